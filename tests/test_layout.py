"""The layout that CONTRIBUTING.md describes: no import upwards or in a circle, short files and functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_rlhf"

FLOORS: list[set[str]] = [
    {
        "errors",
        "faults",
        "bounds",
        "files",
        "model_paths",
        "passwords",
        "kinds",
        "quiet",
        "threads",
        "interruption",
        "control",
        "experience",
        "settings",
        "functional",
    }
    | {"metrics.names", "metrics.names_prompts", "metrics.names_ptx", "metrics.names_rollout_corr"}
    | {"metrics.names_evaluation", "metrics.names_groups", "metrics.names_safety", "distributed.processes"}
    | {"distributed.first_fault"}
    | {"accelerators.device"},
    {"models", "rollout", "rewards", "data", "metrics", "memory", "snapshot", "distributed.parallel"},
    {"events", "mixins", "module", "ppo", "module_checkpoint", "update", "minibatches", "gradients", "objective"}
    | {"optimizer", "scoring", "screening", "generation", "validation", "logbook"},
    {"callbacks", "checkpoint", "reporting", "seeds", "distributed.strategies"},
    {"schema", "precision", "warmup", "distributed.ray_settings", "accelerators"},
    {
        "assembly",
        "run",
        "runs",
        "train",
        "distributed",
        "cli",
        "command_words",
        "closed_output",
        "help",
        "serve",
        "export",
        "evaluate",
        "prompts",
        "supervise",
    },
]
"""Lowest floor first; the longest matching name counts. A module may import from its own floor and those below."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "conf":
            yield ".".join(parts).removesuffix(".__init__"), ast.parse(file.read_text(encoding="utf-8"))


TREES = {name: tree for name, tree in modules() if name != "__init__"}


def floor_of(module: str) -> int:
    found = [
        (len(entry), index)
        for index, floor in enumerate(FLOORS)
        for entry in floor
        if module == entry or module.startswith(f"{entry}.")
    ]
    assert found, f"lightning_rlhf.{module} has no floor: name it in FLOORS, and in CONTRIBUTING.md"
    return max(found)[1]


def imported(module: str, *, lazily: bool) -> set[str]:
    """Modules of the package that a module imports, without those for type checkers; ``lazily``: in functions, too."""
    tree = TREES[module]
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            source = str(node.module)
            if source == "lightning_rlhf" or source.startswith("lightning_rlhf."):
                found = [f"{source}.{alias.name}".removeprefix("lightning_rlhf.") for alias in node.names]
                names |= {name if name in TREES else name.rpartition(".")[0] for name in found}
    return names & set(TREES) - {module}


@pytest.mark.parametrize("module", TREES)
def test_no_import_runs_upwards(module: str) -> None:
    floor = floor_of(module)
    assert not {other for other in imported(module, lazily=True) if floor_of(other) > floor}


def test_no_import_runs_in_a_circle() -> None:
    graph = {module: imported(module, lazily=False) for module in TREES}
    while leaves := {module for module, others in graph.items() if not others}:
        graph = {module: others - leaves for module, others in graph.items() if module not in leaves}
    assert not graph, "these import one another, or what does"


def test_files_and_functions_are_short() -> None:
    """400 lines a file, 60 a function."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "callbacks").glob("*.py")]
    long = {str(file.relative_to(ROOT)): n for file in files if (n := len(file.read_text().splitlines())) > 400}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = int(node.end_lineno or 0) - node.lineno + 1
                if lines > 60:
                    long[f"{module}.{node.name}"] = lines
    assert not long


def test_mutated_modules_and_their_tests_exist() -> None:
    from benchmarks.mutants import TESTS

    named = [PACKAGE / module for module in TESTS] + [ROOT / test for tests in TESTS.values() for test in tests]
    assert not [str(path) for path in named if not path.exists()]
