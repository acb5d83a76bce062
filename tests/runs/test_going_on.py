"""What a run that goes on needs: the command, its checkpoints, its code, its last evaluation, an engine."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlhf import cli
from lightning_rlhf.checkpoint import latest_valid
from lightning_rlhf.runs.ending import how_to_go_on
from lightning_rlhf.runs.folder import note_start, refuse_another_runs, starts
from tests.overrides import FEW, OWN_PROMPTS, SMALL_MODEL

TINY = [
    *SMALL_MODEL,
    *OWN_PROMPTS,
    *FEW,
    "logger=none",
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with prompts."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def checkpoint(folder: Path, iteration: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"iteration_{iteration:06d}.ckpt"
    path.touch()
    return path


def test_overrides_beside_resume_are_in_the_printed_command_until_a_checkpoint_has_them(tmp_path: Path) -> None:
    resumed = checkpoint(tmp_path / "run" / "checkpoints", 4)
    config = {"output_dir": str(tmp_path / "run"), "callbacks": None, "resume": str(resumed)}
    typed = [f"resume={tmp_path}/run", "branch=false", "resume_on_other_data=true", "model.x=[1, 2]"]
    note_start(tmp_path / "run", {"typed": ["iterations=4"]})
    note_start(tmp_path / "run", {"typed": typed})
    [*_, said, command] = how_to_go_on(config | {"resume_on_other_data": True})
    assert said == "no checkpoint since it was resumed"
    words = shlex.split(command.removeprefix("to go on: "))
    assert words == ["lightning-rlhf", "train", f"resume={resumed}", *typed[1:]]

    newer = checkpoint(tmp_path / "run" / "checkpoints", 5)  # of the other data, and under the new settings
    assert how_to_go_on(config | {"resume_on_other_data": True})[1:] == [
        f"newest checkpoint: {newer}",
        f"to go on: lightning-rlhf train resume={tmp_path}/run",
    ]
    # A branch begins in a folder of its own; `train(config)` of Python has typed nothing.
    branch = config | {"output_dir": str(tmp_path / "branch"), "resume_on_other_data": True}
    assert how_to_go_on(branch)[-1] == f"to go on: lightning-rlhf train resume={resumed} resume_on_other_data=true"


def test_a_run_with_checkpoints_outside_of_its_folder_is_found(project: Path, capsys: pytest.CaptureFixture) -> None:
    """By its folder, and by its checkpoint: the same run, and not a branch."""
    kept = project / "large disk" / "of run"
    place = f"callbacks.checkpoint.dirpath={kept}"
    assert cli.main(["train", *TINY, "iterations=1", "hydra.run.dir=run", place]) == 0
    assert starts(project / "run")[0]["checkpoints"] == str(kept)
    capsys.readouterr()
    assert cli.main(["train", "resume=run", "iterations=2"]) == 0
    assert "a branch" not in capsys.readouterr().out
    assert cli.main(["train", "resume=latest", "hydra.run.dir=run", *TINY, place, "iterations=3"]) == 0
    assert "starting afresh" not in capsys.readouterr().out
    newest = latest_valid(kept)
    assert newest is not None and newest.name == "iteration_000003.ckpt" and len(starts(project / "run")) == 3
    assert cli.main(["train", f"resume='{newest}'", "iterations=4"]) == 0, "by its checkpoint"
    assert "a branch" not in capsys.readouterr().out and len(starts(project / "run")) == 4

    assert cli.main(["train", "resume=run", "seed=7", "resume_on_other_data=true", "iterations=5"]) == 2
    said = capsys.readouterr().err
    assert "is where the run keeps its checkpoints" in said and "callbacks.checkpoint.dirpath=FOLDER" in said
    assert cli.main(["eval", "checkpoint=run"]) == 2, "found, but nothing is held out"
    said = capsys.readouterr().err
    assert "data.validation = null: the run holds no prompt out" in said and "data.validation=FILE" in said
    assert cli.main(["eval", "checkpoint=run", "data.validation=prompts.jsonl"]) == 0
    assert "eval/reward_mean" in capsys.readouterr().out


def test_a_folder_in_place_of_a_runs_file_is_one_clear_error(project: Path, capsys: pytest.CaptureFixture) -> None:
    words = [word for word in TINY if word != "logger=none"]
    own = ["logger=csv", "callbacks=[minimal,prompt_monitor]", "iterations=1", "hydra.run.dir=run"]
    assert cli.main(["train", *words, *own]) == 0
    before = sorted((project / "run").rglob("*"))
    for name in (
        "starts.jsonl",
        "train.log",
        "metrics/metrics.csv",
        "metrics/decisions.jsonl",
        "prompts/suspects.json",
    ):
        file, aside = project / "run" / name, project / "aside"
        if file.exists():
            file.rename(aside)
        file.mkdir(parents=True)
        capsys.readouterr()
        assert cli.main(["train", "resume=run", "iterations=2"]) == 2, name
        error = capsys.readouterr().err
        assert "Traceback" not in error and re.search(rf"run/{name}( is a folder; allowed is a file|')", error), error
        file.rmdir()
        if aside.exists():
            aside.rename(file)
    assert cli.main(["train", "resume=run", "iterations=2"]) == 0
    assert {path for path in before if path.suffix != ".ckpt"} <= set((project / "run").rglob("*"))


TWO = "import sys\nfrom lightning_rlhf.runs.folder import locked\nwith locked(sys.argv[1]):\n    print(), input()\n"


def test_two_runs_at_once_do_not_share_a_folder_of_checkpoints(project: Path, capsys: pytest.CaptureFixture) -> None:
    """One of their own, or that of the other run."""
    kept = project / "kept"
    words = ["train", *TINY, "iterations=1", "hydra.run.dir=run"]
    note_start(project / "other", {})
    for at_work, place in ((kept, kept), (project / "other", project / "other" / "checkpoints")):
        command = [sys.executable, "-c", TWO, str(at_work)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "\n"
            assert cli.main([*words, f"callbacks.checkpoint.dirpath={place}"]) == 2
            said = capsys.readouterr().err
            assert f"{at_work}: another run is at work in this folder (process {other.pid} on " in said
            assert "take another folder with callbacks.checkpoint.dirpath=FOLDER" in said
            other.communicate("\n")
    assert cli.main([*words, f"callbacks.checkpoint.dirpath={kept}"]) == 0
    assert cli.main(["train", "resume=run", "iterations=2"]) == 0


def test_a_run_does_not_go_on_from_another_runs_checkpoint(project: Path, capsys: pytest.CaptureFixture) -> None:
    """Both keep theirs in one folder; the first has ended before it wrote one."""
    kept, words = project / "kept", ["train", *TINY, "callbacks=checkpoint", "iterations=2"]
    place = f"callbacks.checkpoint.dirpath={kept}"
    note_start(project / "first", {"checkpoints": str(kept)})
    assert cli.main([*words, place, "hydra.run.dir=second"]) == 0
    capsys.readouterr()
    for again in (["train", "resume=first"], [*words, place, "resume=latest", "hydra.run.dir=first"]):
        assert cli.main(again) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"{kept}/iteration_000002.ckpt was written by the run in {project}/second, not by that")
        assert f"resume={project}/second goes on with that one" in said
    assert cli.main(["eval", "checkpoint=first"]) == 2
    assert cli.main(["train", "resume=second", "iterations=3"]) == 0

    # Where the run itself goes on in a new folder, its checkpoints are its own there.
    assert cli.main(["train", "resume=second", "iterations=4", "branch=false", "hydra.run.dir=third"]) == 0
    refuse_another_runs("third", kept / "iteration_000003.ckpt", project / "second")
    capsys.readouterr()
    assert cli.main(["train", "resume=third", "iterations=5"]) == 0
    # A run that was moved is no other one.
    (project / "third").rename(project / "fourth")
    assert cli.main(["train", "resume=fourth", "iterations=6"]) == 0


def test_classes_come_from_the_folder_where_the_run_was_started(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Not from a file of the same name in the folder of the command that resumes."""
    own = ["+reward.terms.own.reward._target_=own_reward_of_a_run.score", "+reward.terms.own.weight=1"]
    for folder, score in ((project, 1.0), (tmp_path / "elsewhere", 777.0)):
        folder.mkdir(exist_ok=True)
        code = f"def score(batch):\n    return [{score}] * len(batch)\n"
        (folder / "own_reward_of_a_run.py").write_text(code, encoding="utf-8")
    assert cli.main(["train", *TINY, *own, "iterations=1", "hydra.run.dir=run"]) == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delitem(sys.modules, "own_reward_of_a_run")
    capsys.readouterr()
    assert cli.main(["train", f"resume={project}/run", "iterations=3"]) == 0
    assert "reward 1.000" in capsys.readouterr().out


def test_a_training_that_ends_with_an_evaluation_is_not_evaluated_again(project: Path) -> None:
    validation = ["data.validation=prompts.jsonl", "evaluate_every=2", "iterations=4"]
    assert cli.main(["train", *TINY, *validation, "logger=csv", "hydra.run.dir=run"]) == 0
    [path] = (project / "run").rglob("metrics.csv")
    with path.open(encoding="utf-8", newline="") as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["eval/reward_mean"]]
    assert steps == ["0", "2", "4"]


def test_an_engine_that_lacks_something_is_told_what(project: Path, capsys: pytest.CaptureFixture) -> None:
    code = "class Bare:\n    def __init__(self, samples=1, max_new_tokens=5):\n        self.reports_logprobs = False\n"
    (project / "bare_engine.py").write_text(code, encoding="utf-8")
    words = [word for word in TINY if not word.startswith("rollout.")]
    assert cli.main(["train", *words, "~rollout", "+rollout._target_=bare_engine.Bare"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rollout: Bare lacks sampling, ahead, max_model_len, shares_weights, positions, setup,")
    assert "lightning_rlhf.rollout.BaseEngine" in error
