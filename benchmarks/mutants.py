"""Mutation testing: change one operator, constant or statement of a module and see whether its tests notice.

    python benchmarks/mutants.py --out mutants.csv                       # every module, 40 mutants each; hours
    python benchmarks/mutants.py --out mutants.csv --modules functional/kl.py callbacks --samples 20 --seed 2
    python benchmarks/mutants.py --out mutants.csv --again               # survivors once more, after new tests
    python benchmarks/mutants.py --out mutants.csv --table               # figures of each module, no run
    python benchmarks/mutants.py --out mutants.csv --survivors           # mutants that no test noticed, no run

A mutant is killed if a test fails (or the tests take ten times as long), else it survives. ``--samples`` mutants
of a module are drawn by ``--seed``. They run one after the other; each is written to the csv file when it ends, and
mutants in the file are skipped, so the script can be stopped at any time. ``--again`` adds a row and keeps the
earlier one; ``--table`` counts first and last rows.

Tests of a module are the files in :data:`TESTS`, without ``slow`` tests and without tests over ``--longest``
seconds. Libraries are imported once; every mutant gets a fork of that process. Processes that a test starts itself
have the unchanged module.

A surviving mutant is not a fault by itself: some are equivalent (``<`` or ``<=`` of numbers that are never equal), some
change a text, a default that every caller overrides, or only the speed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import csv
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWN = ("lightning_rlhf", "tests", "test_", "conftest", "pytest", "_pytest", "hypothesis", "xdist", "__main__")
"""Modules with these prefixes are imported anew by each fork: they may use the changed module, or are pytest's."""
COLUMNS = ("module", "line", "mutant", "outcome", "test", "seconds")

BOUNDS = "tests/callbacks/test_bounds.py"
TESTS: dict[str, tuple[str, ...]] = {
    "functional/advantages.py": ("tests/functional/test_advantages.py", "tests/functional/test_edges.py"),
    "functional/correction.py": ("tests/functional/test_correction.py", "tests/functional/test_edges.py"),
    "functional/kl.py": ("tests/functional/test_kl.py", "tests/functional/test_edges.py"),
    "functional/logprobs.py": ("tests/functional/test_logprobs.py", "tests/functional/test_logprobs_cost.py"),
    "functional/losses.py": ("tests/functional/test_losses.py", "tests/functional/test_edges.py"),
    "functional/log_ratio.py": ("tests/functional/test_correction.py",),
    "functional/rejection.py": ("tests/functional/test_rejection.py", "tests/functional/test_correction.py"),
    "functional/schedules.py": ("tests/functional/test_schedules.py",),
    "functional/stats.py": (
        *("tests/functional/test_stats.py", "tests/functional/test_edges.py"),
        "tests/accelerators/test_device.py",
    ),
    "update.py": ("tests/test_update.py", "tests/test_memory.py", "tests/test_invariants.py"),
    "scoring.py": ("tests/test_scoring.py", "tests/test_invariants.py", "tests/test_experience.py"),
    "mixins/adaptive_limits.py": ("tests/mixins/test_rollout_correction.py",),
    "mixins/alp.py": ("tests/mixins/test_alp.py", "tests/mixins/test_alp_keys.py"),
    "mixins/alp_comparison.py": ("tests/mixins/test_alp.py",),
    "mixins/alp_schedule.py": ("tests/mixins/test_alp.py", "tests/mixins/test_alp_keys.py"),
    "mixins/alp_settings.py": ("tests/mixins/test_alp.py", "tests/mixins/test_alp_keys.py"),
    "mixins/correction_settings.py": ("tests/mixins/test_rollout_correction.py", "tests/schema/test_verl.py"),
    "mixins/rollout_correction.py": (
        *("tests/mixins/test_rollout_correction.py", "tests/mixins/test_rejection_in_the_update.py"),
        "tests/metrics/test_correction.py",
    ),
    **{
        f"callbacks/{name}.py": (f"tests/callbacks/test_{name}.py", *more)
        for name, more in {
            "adaptive_kl": ("tests/callbacks/test_logged_knobs.py",),
            "advantage_vanish": (BOUNDS,),
            "alp_figures": (),
            "calibrate": (BOUNDS,),
            "clip_fraction_break": (BOUNDS,),
            "efficiency_stop": (BOUNDS,),
            "gradient_monitor": (),
            "kl_early_stop": (BOUNDS,),
            "kl_guard": (BOUNDS, "tests/callbacks/test_nothing_measured.py"),
            "length_curriculum": (BOUNDS,),
            "lr_backoff": (),
            "oom_guard": (),
            "progress": (),
            "prompt_monitor": ("tests/metrics/test_prompt_statistics.py",),
            "prompt_records": (),
            "samples_table": (),
        }.items()
    },
}
"""Modules below ``lightning_rlhf/`` and their test files."""


# --- mutants ---------------------------------------------------------------------------------------------------------

COMPARISONS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
OPERATORS: dict[type, type] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
OPPOSITES = {
    **{"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum"},
    **{"any": "all", "all": "any"},
}
KEYWORDS = {"min": "max", "max": "min"}
"""Of ``clamp(min=1)``."""
UNSEEN = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
"""Texts, and what has no operator of ours."""


def places(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that are executed, in source order, without annotations and strings."""
    if isinstance(node, UNSEEN):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from places(child)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every node that may replace this one, with the kind of change."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            operators: list[Any] = list(node.ops)
            operators[i] = COMPARISONS[type(operator)]()
            yield "comparison", ast.Compare(node.left, operators, node.comparators)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS and not _is_type(node):
        changed: Any = copy.copy(node)
        changed.op = OPERATORS[type(node.op)]()
        yield "operator", changed
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and not _is_dimension(node):
        yield "sign or not", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "constant", ast.Constant(value)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement", ast.Pass()
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    function = node.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if name in OPPOSITES:
        other = copy.copy(function)
        setattr(other, "id" if isinstance(function, ast.Name) else "attr", OPPOSITES[name])
        yield "min/max", ast.Call(other, node.args, node.keywords)
    for i, keyword in enumerate(node.keywords):
        if name == "clamp" and keyword.arg in KEYWORDS:
            keywords = list(node.keywords)
            keywords[i] = ast.keyword(KEYWORDS[keyword.arg], keyword.value)
            yield "min/max", ast.Call(function, node.args, keywords)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_dimension(node: ast.UnaryOp) -> bool:
    """``-1``, the last dimension, which of two is 1 as well. The constant in it makes its own mutant."""
    return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant) and node.operand.value == 1


def _is_type(node: ast.AST) -> bool:
    """``str | None`` outside an annotation, or ``{...} | {...}`` of dictionaries, for which ``&`` always fails."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and (
        _is_none(node.right) or isinstance(node.right, (ast.Dict, ast.DictComp))
    )  # fmt: skip


def mutants(source: str) -> dict[str, tuple[int, ast.Module]]:
    """Every mutant of a module by its description, with line and changed tree."""
    tree = ast.parse(source)
    found: dict[str, tuple[int, ast.Module]] = {}
    for node in list(places(tree)):
        for kind, other in changes(node):
            text = f"{kind}: {_short(node)} -> {_short(other)}"
            position = f"{getattr(node, 'lineno', 0)}:{getattr(node, 'col_offset', 0)}"
            found[f"{position} {text}"] = (getattr(node, "lineno", 0), _exchanged(tree, node, other))
    return found


def _short(node: ast.AST) -> str:
    text = re.sub(r"\s+", " ", ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))))
    return text if len(text) <= 90 else text[:87] + "..."


class _Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if node is self.old:
            return ast.copy_location(self.new, node)
        return self.generic_visit(_shallow(node))


def _shallow(node: ast.AST) -> ast.AST:
    """A copy with its own lists, so that the original tree does not change."""
    new = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(new, name, list(value))
    return new


def _exchanged(tree: ast.Module, old: ast.AST, new: ast.AST) -> ast.Module:
    return ast.fix_missing_locations(_Exchange(old, new).visit(tree))


# --- running ---------------------------------------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from a changed tree."""

    def __init__(self, name: str, path: str, tree: ast.Module) -> None:
        super().__init__(name, path)
        self.tree = tree

    def get_code(self, fullname: str) -> Any:
        return compile(self.tree, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module's changed tree instead of its file."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        loader = _Loader(self.name, str(self.path), self.tree)
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


class _Order:
    """Pytest plugin: runs the fastest tests first and none over a limit, by the times of an earlier run."""

    def __init__(self, seconds: dict[str, float] | None, longest: float) -> None:
        self.seconds, self.longest = seconds, longest
        self.measured: dict[str, float] = defaultdict(float)
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if (known := self.seconds) is not None:
            items[:] = sorted(
                (item for item in items if known.get(item.nodeid, 0.0) <= self.longest),
                key=lambda item: known.get(item.nodeid, 0.0),
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.measured[report.nodeid] += report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"import of {report.nodeid}"


def forked(
    name: str,
    tree: ast.Module | None,
    tests: Sequence[str],
    seconds: dict[str, float] | None,
    *,
    longest: float,
    limit: float,
) -> tuple[str, str, dict[str, float]]:
    """Run the tests in a fork, with the module changed or not; returns outcome, first failed test, times."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                _in_child(name, tree, tests, _Order(seconds, longest), answer)
            finally:
                os._exit(3)  # no clean-up of the parent's resources
        if not _ended(child, limit):
            return "killed", "too slow", {}
        if not answer.is_file():
            return "killed", "the process died", {}
        code, failed, libraries, *times = answer.read_text(encoding="utf-8").splitlines()
        for library in libraries.split() if tree is None else ():
            with contextlib.suppress(Exception):  # modules that cannot be imported here are imported by the fork
                importlib.import_module(library)
        measured = {nodeid: float(took) for took, _, nodeid in (line.partition(" ") for line in times)}
        return ("survived" if code == "0" else "killed"), failed, measured


def _ended(child: int, limit: float) -> bool:
    """Wait for a fork; after the limit, or on Ctrl-C, it is killed with all processes it started."""
    began, ended = time.monotonic(), False
    try:
        while time.monotonic() - began < limit and not ended:
            ended = os.waitpid(child, os.WNOHANG)[0] != 0
            time.sleep(0 if ended else 0.02)
    finally:
        if not ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return ended


def _in_child(name: str, tree: ast.Module | None, tests: Sequence[str], order: _Order, answer: Path) -> None:
    sink = os.open(answer.parent / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    if tree is not None:
        sys.meta_path.insert(0, _Finder(name, path_of(name), tree))
    stop = [] if tree is None else ["-x"]
    base = f"--basetemp={answer.parent / 'tests'}"
    code = pytest.main([*stop, "-q", "-p", "no:cacheprovider", "-p", "no:randomly", base, *tests], plugins=[order])
    times = "".join(f"{took} {nodeid}\n" for nodeid, took in order.measured.items())
    libraries = " ".join(name for name in list(sys.modules) if not name.startswith(OWN))
    answer.write_text(f"{int(code)}\n{order.failed}\n{libraries}\n{times}", encoding="utf-8")
    os._exit(0)


def path_of(name: str) -> Path:
    return ROOT / (name.replace(".", "/") + ".py")


def run(module: str, chosen: list[str], out: Path, *, longest: float) -> None:
    """Run the chosen mutants of a module, one after the other."""
    name = "lightning_rlhf." + module.removesuffix(".py").replace("/", ".")
    found = mutants(path_of(name).read_text(encoding="utf-8"))
    chosen = [mutant for mutant in chosen if mutant in found]
    if not chosen:
        return
    outcome, failed, seconds = forked(name, None, TESTS[module], None, longest=longest, limit=3600)
    if outcome != "survived":
        raise SystemExit(f"{module}: its tests fail without a change: {failed}")
    usual = sum(took for took in seconds.values() if took <= longest)
    left_out = [nodeid for nodeid, took in seconds.items() if took > longest]
    print(f"{module}: {len(chosen)} of {len(found)} mutants, tests of {usual:.1f} s", *left_out, sep="\n  without ")
    for mutant in chosen:
        line, tree = found[mutant]
        began = time.monotonic()
        limit = 10 * (usual + 10)
        outcome, failed, _ = forked(name, tree, TESTS[module], seconds, longest=longest, limit=limit)
        row = (module, line, mutant, outcome, failed, round(time.monotonic() - began, 1))
        append(out, row)
        if outcome == "survived":
            print(f"  survived: {mutant}", flush=True)


# --- the csv file ----------------------------------------------------------------------------------------------------


def append(out: Path, row: Sequence[Any]) -> None:
    new = not out.exists()
    with out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(row)


def rows(out: Path) -> list[dict[str, str]]:
    if not out.exists():
        return []
    with out.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(found: list[dict[str, str]]) -> None:
    """Killed and all mutants of each module, by the first and by the last run of each mutant."""
    first: dict[tuple[str, str], str] = {}
    last: dict[tuple[str, str], str] = {}
    for row in found:
        key = (row["module"], row["mutant"])
        first.setdefault(key, row["outcome"])
        last[key] = row["outcome"]
    print(f"{'module':32} {'mutants':>8} {'killed at first':>16} {'killed now':>11}")
    for module in [*dict.fromkeys(module for module, _ in first), "all"]:
        mine = [key for key in first if module in ("all", key[0])]
        killed = [sum(table[key] == "killed" for key in mine) for table in (first, last)]
        share = [f"{count} ({100 * count / max(len(mine), 1):.0f} %)" for count in killed]
        print(f"{module:32} {len(mine):8} {share[0]:>16} {share[1]:>11}")


def survivors(found: list[dict[str, str]]) -> dict[str, list[str]]:
    last = {(row["module"], row["mutant"]): row["outcome"] for row in found}
    result: dict[str, list[str]] = defaultdict(list)
    for (module, mutant), outcome in last.items():
        if outcome == "survived":
            result[module].append(mutant)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="csv file, one row a mutant")
    parser.add_argument("--modules", nargs="+", default=list(TESTS), help="files or folders below lightning_rlhf/")
    parser.add_argument("--samples", type=int, default=40, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=5.0, help="seconds; a test that takes longer is left out")
    parser.add_argument("--again", action="store_true", help="run the survivors of the csv file once more")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--survivors", action="store_true")
    arguments = parser.parse_args()
    found, out = rows(arguments.out), arguments.out.resolve()
    if arguments.table or arguments.survivors:
        if arguments.table:
            table(found)
        for module, left in survivors(found).items() if arguments.survivors else ():
            print(module, *left, sep="\n  ")
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    done = {(row["module"], row["mutant"]) for row in found}
    for module in TESTS:
        if not any(module == asked or module.startswith(f"{asked}/") for asked in arguments.modules):
            continue
        if arguments.again:
            chosen = survivors(found)[module]
        else:
            every = list(mutants((ROOT / "lightning_rlhf" / module).read_text(encoding="utf-8")))
            chosen = random.Random(f"{arguments.seed} {module}").sample(every, min(arguments.samples, len(every)))
            chosen = [mutant for mutant in chosen if (module, mutant) not in done]
        run(module, chosen, out, longest=arguments.longest)


if __name__ == "__main__":
    main()
