"""What a supervised run has come to, compared with the uninterrupted one: one row for each fault."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mlflow import MlflowClient

from lightning_rlhf.checkpoint import latest_valid
from lightning_rlhf.supervise import files
from lightning_rlhf.supervise.classify import DONE
from tests.crash_matrix.cases import ITERATIONS, Case
from tests.crash_matrix.faults import AFTERWARDS, BEGAN, FOUND, STRUCK, Fault, rows
from tests.crash_matrix.project import Ran, mounts

TIMES = ("time/", "perf/", "memory/", "eval/")
"""Beginnings of names of metrics that are not the same in two runs."""


@dataclass(frozen=True)
class Row:
    """One fault and what became of it, in the words of the table.

    Attributes:
        kind, moment: what was done, and where.
        attempts: the attempt that it ended, and the number of attempts of its supervised run.
        found: the class found.
        repeated: iterations that were trained a second time.
        ended: whether the run ended at its target, or the class with which the supervisor gave up.
        equal: whether the weights and the optimiser's state are bit for bit those of the uninterrupted run.
        metrics: numbers lost, doubled and different in MLflow. A run that was given up lacks the rest.
        left: temporary files and processes that are left.
        seconds: from the fault to the next iteration, or to the end.
        wrong: what is not as it should be; empty: nothing.
    """

    kind: str
    moment: str
    attempts: str
    found: str
    repeated: str
    ended: str
    equal: str
    metrics: str
    left: str
    seconds: str
    wrong: str


@dataclass
class _Run:
    """Everything about one run that its rows share."""

    ended: str
    equal: bool
    metrics: tuple[int, int, int]
    left: list[str]
    attempts: list[dict[str, Any]]
    wrong: list[str] = field(default_factory=list)


def measure(case: Case, ran: Ran, reference: Ran) -> list[Row]:
    """The rows of one supervised run."""
    run = _looked_at(case, ran, reference)
    struck = [each for each in rows(ran.project / STRUCK) if each["how"] not in AFTERWARDS]
    missed = [fault for fault in case.faults if fault.how not in AFTERWARDS][len(struck) :]
    run.wrong += [f"never struck: {fault.how} in {fault.moment}" for fault in missed]
    if not case.faults:
        return [_row(case, ran, run, {"how": "reward raises", "moment": "at one prompt, always", "attempt": 1})]
    return [_row(case, ran, run, each) for each in struck] or [
        _row(case, ran, run, {"how": "none", "moment": "never", "attempt": 1})
    ]


def _looked_at(case: Case, ran: Ran, reference: Ran) -> _Run:
    state = files.read(ran.folder / files.FOLDER / files.STATE) or {}
    attempts = _attempts(ran, state.get("attempts", []))
    run = _Run("no", _same(ran.folder, reference.folder), _metrics(ran, reference), _left(ran), attempts)
    last = attempts[-1].get("class") if attempts else None
    if ran.code is None:
        run.ended = "hangs"
    elif ran.code == 0 and last == DONE and _iteration(ran.folder) == ITERATIONS:
        run.ended = "yes"
    elif "\nsupervise: giving up: " in ran.output:
        run.ended = f"gave up: {last}"
    wanted = "yes" if case.gives_up is None else f"gave up: {case.gives_up}"
    if run.ended != wanted:
        run.wrong.append(f"{run.ended} instead of {wanted} (exit code {ran.code})")
    if case.equal and not run.equal:
        run.wrong.append("other weights")
    lost, doubled, different = run.metrics
    if doubled or (case.equal and lost) or ((case.equal or case.disk) and different):
        run.wrong.append("metrics lost, doubled or different")
    status = _statuses(ran)
    if "RUNNING" in status or (case.gives_up is None and "FINISHED" not in status):
        run.wrong.append(f"status in MLflow: {', '.join(status)}")
    if case.gives_up and case.on_disk != "run" and not list((ran.folder / "crashes").glob("attempt_*.md")):
        run.wrong.append("no report")
    if run.left:
        run.wrong.append(f"left: {', '.join(run.left)}")
    return run


def _attempts(ran: Ran, written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The attempts with the classes that the supervisor has said: with a full disk it cannot write them down."""
    said = re.findall(r"^supervise: attempt (\d+): (\w+) \(", ran.output, re.MULTILINE)
    known = {each["attempt"]: each for each in written}
    return [known.get(number, {}) | {"attempt": number, "class": kind} for number, kind in map(_numbered, said)] + [
        each for each in written if each["attempt"] > len(said)
    ]


def _numbered(pair: tuple[str, str]) -> tuple[int, str]:
    return int(pair[0]), pair[1]


def _row(case: Case, ran: Ran, run: _Run, struck: dict[str, Any]) -> Row:
    attempt, how = struck["attempt"], struck["how"]
    found = next((each.get("class") for each in run.attempts if each["attempt"] == attempt), "none")
    wanted = case.gives_up or FOUND.get(how)
    wrong = list(run.wrong)
    if wanted is not None and found != wanted:
        wrong.append(f"class {found} instead of {wanted}")
    elif wanted is None and how != "tracking server killed" and found != DONE:
        wrong.append(f"class {found}, although nothing was to end")
    began = next((each for each in rows(ran.project / BEGAN) if each["attempt"] == attempt + 1), None)
    repeated = "" if began is None or "at" not in struck else str(max(struck["at"] - 1 - began["from"], 0))
    seconds = "" if began is None or "time" not in struck else f"{began['time'] - struck['time']:.0f}"
    fault = {key: value for key, value in struck.items() if key in Fault.__dataclass_fields__}
    lost, doubled, different = run.metrics
    return Row(
        kind=_name(case, how),
        moment=struck.get("moment") or Fault(**fault | {"iteration": struck["at"]}).moment,
        attempts=f"{attempt} of {len(run.attempts)}",
        found="none needed" if found == DONE else str(found),
        repeated=repeated,
        ended=run.ended,
        equal="-" if case.gives_up else "yes" if run.equal else "no",
        metrics=f"{'-' if case.gives_up else lost} / {doubled} / {different}",
        left=str(len(run.left)),
        seconds=seconds,
        wrong="; ".join(wrong),
    )


def _name(case: Case, how: str) -> str:
    if case.disk and not mounts():
        how += " (no tmpfs here: " + ("a limit of the file size)" if how == "full disk" else "permissions)")
    if case.disk and case.gives_up:
        how += ", for good"
    return f"{how}, the whole run's folder" if case.disk and case.on_disk == "run" else how


# --- weights ---------------------------------------------------------------------------------------------------------


def _saved(folder: Path) -> dict[str, Any]:
    path = latest_valid(folder / "checkpoints")
    return {} if path is None else torch.load(path, weights_only=True)


def _iteration(folder: Path) -> int:
    return int(_saved(folder).get("iteration", 0))


def _same(folder: Path, other: Path) -> bool:
    """Whether weights and optimiser states of the newest checkpoints are the same, bit for bit."""
    one, two = _saved(folder), _saved(other)
    parts = ("iteration", "state_dict", "optimizer_states")
    return all(_equal(one.get(part), two.get(part)) for part in parts)


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_equal(value, two[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_equal, one, two))
    return bool(one == two)


# --- MLflow ----------------------------------------------------------------------------------------------------------


def _client(ran: Ran) -> MlflowClient:
    store = ran.project / "server.db"
    return MlflowClient(f"sqlite:///{store if store.exists() else ran.project / 'mlflow' / 'mlflow.db'}")


def _history(ran: Ran) -> Counter[tuple[str, int, float]]:
    """Metric, step, value -> how often it is stored."""
    file = ran.folder / "tracking" / "run.json"
    run_id = json.loads(file.read_text())["run_id"] if file.exists() else None
    if run_id is None:
        return Counter()
    client = _client(ran)
    names = [name for name in client.get_run(run_id).data.metrics if not name.startswith(TIMES)]
    return Counter((n, m.step, m.value) for n in names for m in client.get_metric_history(run_id, n))


def _metrics(ran: Ran, reference: Ran) -> tuple[int, int, int]:
    """Numbers lost, doubled, and with another value than in the uninterrupted run."""
    own, whole = _history(ran), _history(reference)
    places = Counter((name, step) for (name, step, _), count in own.items() for _ in range(count))
    lost = {(name, step) for name, step, _ in whole} - places.keys()
    different = sum(1 for name, step, value in whole if (name, step) in places and (name, step, value) not in own)
    return len(lost), sum(count - 1 for count in places.values()), different


def _statuses(ran: Ran) -> list[str]:
    client = _client(ran)
    experiments = [each.experiment_id for each in client.search_experiments()]
    return sorted(run.info.status for run in client.search_runs(experiments))


# --- what is left ----------------------------------------------------------------------------------------------------


def _left(ran: Ran) -> list[str]:
    """Temporary files of the run and of its processes, and processes that still run in its folder."""
    temporary = [path for path in ran.folder.rglob("*") if ".partial" in path.name or path.suffix == ".tmp"]
    temporary += [path for path in ran.folder.rglob(".end.json.*")] + list((ran.project / "tmp").iterdir())
    processes = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if each.name != str(os.getpid()) and (each / "cwd").readlink() == ran.project:
                processes.append(f"process {each.name}")
        except OSError:  # it has ended, or is another user's
            continue
    return [str(path.relative_to(ran.project)) for path in temporary] + processes
