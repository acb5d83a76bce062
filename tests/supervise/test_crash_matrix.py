"""A small crash matrix (``python -m tests.crash_matrix`` prints the whole one), and that its checks can fail."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.crash_matrix import damage
from tests.crash_matrix.__main__ import main
from tests.crash_matrix.cases import ITERATIONS, KINDS, Plans
from tests.crash_matrix.faults import ACTIONS, PLACES, Fault
from tests.crash_matrix.measure import measure
from tests.crash_matrix.project import Project, mounts


def test_the_whole_matrix_has_what_it_promises() -> None:
    """Counts of faults, moments in every stage, and the same plan for the same seed."""
    cases = Plans().cases()
    faults = [fault for case in cases for fault in case.faults]
    count = Counter(fault.how for fault in faults if fault.rank == 0)
    assert count["SIGTERM"] == 5 and count["SIGUSR1"] == 2
    assert sum(len(case.faults) for case in cases if case.kind == "kill") == 30
    assert sum(count[f"newest checkpoint {how}"] for how in damage.WAYS) == 10
    assert {fault.place for fault in faults if fault.how == "kill -9"} == set(PLACES)
    assert set(count) == set(ACTIONS), "every action is used"
    assert Plans().cases() == cases and Plans(seed=1).cases() != cases
    for case in cases:
        iterations = [fault.iteration for fault in case.faults if fault.place not in ("start", "end", "teardown")]
        assert iterations == sorted(iterations) and max([1, *iterations]) <= ITERATIONS


def test_a_kind_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--kinds", "kill,disks"])
    assert f"--kinds = 'disks' is not allowed: {', '.join(KINDS)}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_killed_damaged_and_out_of_memory(tmp_path: Path) -> None:
    """Every column of three faults in one run; then what each check says about a run that is not well."""
    project = Project(tmp_path)
    [errors] = Plans().cases(["errors"])
    faults = [
        Fault("kill -9", "writing", 2),
        Fault("newest checkpoint cut to a half", "rollout", 4),
        Fault("out of memory", "update", 6),
    ]
    case = replace(errors, faults=faults)
    reference, ran = project.reference(case.reference), project.run(case, 0)
    rows = measure(case, ran, reference)
    assert [row.wrong for row in rows] == ["", "", ""], ran.output[-3000:]
    assert [row.found for row in rows] == ["killed", "killed", "out_of_memory"]
    assert [row.attempts for row in rows] == ["1 of 4", "2 of 4", "3 of 4"]
    assert {(row.ended, row.equal, row.metrics, row.left) for row in rows} == {("yes", "yes", "0 / 0 / 0", "0")}
    assert [int(row.repeated) for row in rows][1] == 1, "the damaged checkpoint's iteration"
    assert all(int(row.seconds) > 0 for row in rows)
    # The run is made worse in each way that a column is about.
    newest = ran.folder / "checkpoints" / f"iteration_{ITERATIONS:06d}.ckpt"
    saved = torch.load(newest, weights_only=True)
    next(iter(saved["state_dict"].values())).flatten()[0] += 1e-6
    newest.with_suffix(".verified.json").unlink()
    torch.save(saved, newest)
    (ran.folder / ".beat.json.1.partial").touch()
    worse = measure(replace(case, faults=[*faults, Fault("hang")]), replace(ran, code=None), reference)[0]
    assert (worse.ended, worse.equal, worse.left) == ("hangs", "no", "1")
    for said in ("hangs instead of yes", "other weights", "left: run/.beat.json.1.partial", "never struck: hang"):
        assert said in worse.wrong


@pytest.mark.slow
@pytest.mark.skipif(not mounts(), reason="a small disk has to be mounted")
def test_a_full_disk_takes_no_judgement_from_the_supervisor(tmp_path: Path) -> None:
    """Nothing in the run's folder can be written any more, the supervisor's own files included."""
    project = Project(tmp_path)
    [case] = [each for each in Plans().cases(["disk"]) if each.on_disk == "run"]
    ran = project.run(case, 0)
    assert "supervise: not written" in ran.output and "supervise/supervisor.py" not in ran.output, "no error of its own"
    assert "giving up: disk came back soon after it was retried once" in ran.output
    assert "the error of the last of 2 attempts:" in ran.output and "No space left on device" in ran.output
    assert ran.code not in (0, None)


@pytest.mark.slow
def test_the_command_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A step whose loss is NaN is left out, without a crash, and the table says that weights differ from then on."""
    assert main(["--kinds", "nan", "--out", str(tmp_path / "table.csv"), "--work", str(tmp_path / "runs")]) == 0
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        [row] = csv.DictReader(file)
    assert (row["kind"], row["found"], row["ended"], row["equal"]) == ("NaN in the loss", "none needed", "yes", "no")
    assert "| NaN in the loss | iteration " in capsys.readouterr().out
