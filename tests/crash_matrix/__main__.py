"""The crash matrix: ``python -m tests.crash_matrix [--kinds kill,disk] [--seed 0] [--out table.csv]``.

Real trainings under ``lightning-rlhf supervise`` are killed, stopped, damaged and starved; the table says what became
of each. Exit code 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from tests.crash_matrix.cases import KINDS, Plans, Size
from tests.crash_matrix.measure import Row, measure
from tests.crash_matrix.project import Project

HEADS = {
    "kind": "fault",
    "moment": "moment",
    "attempts": "attempt",
    "found": "class found",
    "repeated": "iterations repeated",
    "ended": "ended at target?",
    "equal": "weights bit-equal?",
    "metrics": "metrics lost / doubled / different",
    "left": "left over",
    "seconds": "seconds to go on",
    "wrong": "wrong",
}


def matrix(plans: Plans, kinds: Sequence[str], work: Path) -> Iterator[Row]:
    """Run everything of these kinds in a folder; the rows, each as soon as its run has ended."""
    project = Project(work)
    for number, case in enumerate(plans.cases(kinds)):
        reference = project.reference(case.reference)
        ran = project.run(case, number)
        found = measure(case, ran, reference)
        if any(row.wrong for row in found):
            print(f"{ran.project}: see its file `output`", file=sys.stderr)
        yield from found


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash_matrix", description=__doc__)
    parser.add_argument("--kinds", default="", help=f"with commas between them, all without it: {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--kills", type=int, default=Size.kills, help="moments of kill -9")
    parser.add_argument("--out", type=Path, help="also write the table there, as CSV")
    parser.add_argument("--work", type=Path, help="keep the runs there; else they are removed if all is well")
    chosen = parser.parse_args(arguments)
    kinds = [kind for kind in chosen.kinds.split(",") if kind]
    plans, began = Plans(chosen.seed, Size(kills=chosen.kills)), time.monotonic()
    try:
        plans.cases(kinds)
    except ValueError as error:
        parser.error(str(error))
    work = chosen.work or Path(tempfile.mkdtemp(prefix="crash_matrix_"))
    print(line(list(HEADS.values())), line(["---"] * len(HEADS)), sep="\n", flush=True)
    found: list[Row] = []
    for row in matrix(plans, kinds, work):
        found.append(row)
        print(line(list(asdict(row).values())), flush=True)
    if chosen.out is not None:
        with chosen.out.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow([each.name for each in fields(Row)])
            table.writerows(asdict(row).values() for row in found)
    wrong = sum(bool(row.wrong) for row in found)
    print(f"{len(found)} faults, {wrong} with something wrong, {time.monotonic() - began:.0f} s", file=sys.stderr)
    if wrong:
        print(f"the runs are in {work}", file=sys.stderr)
    elif chosen.work is None:
        shutil.rmtree(work)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
