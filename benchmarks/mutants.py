"""Mutation testing: change one operator, constant or statement of a module and see whether its tests notice.

    python -m benchmarks.mutants --out mutants.csv                       # every module, 40 mutants each; hours
    python -m benchmarks.mutants --out mutants.csv --modules functional/kl.py callbacks --samples 20 --seed 2
    python -m benchmarks.mutants --out mutants.csv --again               # survivors once more, after new tests
    python -m benchmarks.mutants --out mutants.csv --table               # figures of each module, no run
    python -m benchmarks.mutants --out mutants.csv --survivors           # mutants that no test noticed, no run

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
import csv
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.mutation import mutants

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
    "scoring.py": (
        *("tests/test_scoring.py", "tests/test_invariants.py", "tests/test_experience.py"),
        *("tests/rewards/test_termination.py", "tests/test_prompt_groups.py"),
    ),
    "mixins/adaptive_limits.py": ("tests/mixins/test_rollout_correction.py",),
    "mixins/alp.py": ("tests/mixins/test_alp.py", "tests/mixins/test_alp_keys.py"),
    "mixins/alp_comparison.py": ("tests/mixins/test_alp.py",),
    "mixins/alp_schedule.py": ("tests/mixins/test_alp.py", "tests/mixins/test_alp_keys.py"),
    "mixins/alp_settings.py": ("tests/mixins/test_alp.py", "tests/mixins/test_alp_keys.py"),
    "mixins/ptx.py": ("tests/mixins/test_ptx.py", "tests/data/test_corpus.py"),
    "mixins/ptx_settings.py": ("tests/mixins/test_ptx.py", "tests/mixins/test_ptx_keys.py"),
    "mixins/correction_settings.py": ("tests/mixins/test_rollout_correction.py", "tests/schema/test_verl.py"),
    "mixins/rollout_correction.py": (
        *("tests/mixins/test_rollout_correction.py", "tests/mixins/test_rejection_in_the_update.py"),
        "tests/metrics/test_correction.py",
    ),
    "callbacks/controllers.py": ("tests/callbacks/test_adaptive_kl.py", "tests/callbacks/test_adaptive_ptx.py"),
    "rewards/termination.py": ("tests/rewards/test_termination.py",),
    "rewards/answers.py": ("tests/rewards/test_answers.py",),
    "rewards/safety.py": ("tests/rewards/test_safety.py", "tests/rewards/test_answers.py"),
    "metrics/prompt_statistics.py": ("tests/metrics/test_prompt_statistics.py",),
    "functional/projection.py": ("tests/functional/test_projection.py",),
    "reporting/prompt_table.py": ("tests/reporting/test_prompt_table.py",),
    "reporting/prompt_map.py": ("tests/reporting/test_prompt_map.py",),
    "prompts/screening.py": ("tests/prompts/test_screening.py",),
    "prompts/vectors.py": ("tests/prompts/test_vectors.py",),
    "functional/outliers.py": ("tests/functional/test_outliers.py", "tests/metrics/test_prompt_statistics.py"),
    **{
        f"callbacks/{name}.py": (f"tests/callbacks/test_{name}.py", *more)
        for name, more in {
            "adaptive_kl": ("tests/callbacks/test_logged_knobs.py",),
            "adaptive_ptx": (),
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
