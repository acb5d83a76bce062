"""``lightning-rlhf train resume=RUN``, as the README writes it: five kinds of run, branches, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
import torch
from mlflow import MlflowClient
from omegaconf import OmegaConf

from lightning_rlhf import cli
from lightning_rlhf.checkpoint import latest_valid
from tests.overrides import OWN_PROMPTS, SMALL_MODEL

TINY = [
    *SMALL_MODEL,
    *OWN_PROMPTS,
    "iterations=4",
    "data.prompts_per_iteration=12",
    "module.update.minibatch_size=6",
    "module.update.epochs=2",
    "callbacks.checkpoint.every_n_iterations=2",
    "callbacks.checkpoint.keep=null",
    "trainer.enable_progress_bar=false",
    "model.lr.actor=0.0004",
]

ENDS = """
import os, signal
from pathlib import Path
from lightning_rlhf.callbacks import RLHFCallback

class Ends(RLHFCallback):
    '''In the middle of the update of iteration 3, once.'''

    def __init__(self, how, mark="ended", seed=None):
        self.how, self.mark, self.seed = how, Path(mark), seed

    def on_minibatch_end(self, trainer, module, stats):
        if stats.iteration != 3 or trainer.global_rank or self.mark.exists() or self.seed not in (None, module.seed):
            return
        self.mark.touch()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the power is cut")
"""


@pytest.fixture
def project(tmp_path: Path, fresh_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with prompts, a callback of their own and an MLflow store, as the current one."""
    folder = tmp_path / "p"
    (folder / "mlflow").mkdir(parents=True)
    shutil.copy(fresh_store, folder / "mlflow" / "mlflow.db")
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    (folder / "ends.py").write_text(ENDS, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def train(*words: str) -> int:
    return cli.main(["train", *words])


def command(*words: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "lightning_rlhf.cli", "train", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)


def ended(how: str, **options: object) -> list[str]:
    return ["+callbacks.ends._target_=ends.Ends", f"+callbacks.ends.how={how}"] + [
        f"+callbacks.ends.{name}={value}" for name, value in options.items()
    ]


def last(folder: Path) -> dict:
    return torch.load(latest_valid(folder / "checkpoints"), weights_only=True)


def assert_same_run(folder: Path, whole: Path) -> None:
    """Weights, moments of the optimiser and clocks of the last checkpoints, bit for bit."""
    one, other = last(folder), last(whole)
    assert one["iteration"] == other["iteration"] == 4
    torch.testing.assert_close(one["state_dict"], other["state_dict"], rtol=0, atol=0)
    states = [saved["optimizer_states"][0]["state"] for saved in (one, other)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def record(folder: Path) -> tuple[str, dict[str, list[tuple[int, float]]], dict[str, str]]:
    """Status, history of the metrics that do not measure time, and tags of the MLflow run of a folder."""
    run = json.loads((folder / "tracking" / "run.json").read_text())
    client = MlflowClient(run["tracking_uri"])
    stored = client.get_run(run["run_id"])
    names = [n for n in stored.data.metrics if not n.startswith(("time/", "perf/", "eval/", "memory/"))]
    history = {n: sorted((m.step, m.value) for m in client.get_metric_history(run["run_id"], n)) for n in names}
    return stored.info.status, history, stored.data.tags


def assert_same_record(folder: Path, whole: Path) -> None:
    """One finished MLflow run with each step once, and the values of the run that was not interrupted."""
    status, history, _ = record(folder)
    assert status == "FINISHED"
    assert [step for step, _ in history["reward/mean"]] == [1, 2, 3, 4]
    assert history == record(whole)[1]


def runs_in(project: Path) -> int:
    client = MlflowClient(f"sqlite:///{project}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("lightning_rlhf")
    return len(client.search_runs([experiment.experiment_id]))


# --- five kinds of run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_killed_in_an_iteration_is_resumed(project: Path) -> None:
    assert train(*TINY, "hydra.run.dir=whole") == 0
    assert command(*TINY, *ended("kill")).returncode == -signal.SIGKILL
    [run] = project.glob("outputs/*/*")
    status, history, _ = record(run)
    assert status == "RUNNING" and [step for step, _ in history["reward/mean"]] == [1, 2]
    first = {name: (run / name).read_text() for name in (".hydra/config.yaml", ".hydra/overrides.yaml")}
    resumed = command(f"resume={run.relative_to(project)}")
    assert resumed.returncode == 0, resumed.stderr
    assert "iteration_000002.ckpt (iteration 2)" in resumed.stdout and "12 prompts x 1 samples" in resumed.stdout
    assert_same_run(run, project / "whole")
    assert_same_record(run, project / "whole")
    assert list(project.glob("outputs/*/*")) == [run], "no other folder"
    assert runs_in(project) == 2
    assert {name: (run / name).read_text() for name in first} == first
    assert (run / ".hydra" / "start_2" / "config.yaml").exists()


def test_another_model_goes_on_after_an_error(project: Path, capsys: pytest.CaptureFixture) -> None:
    """Shared critic, more layers, another KL estimator: none of these overrides is given again."""
    other = [
        "model.source.layers=2",
        "model.policy.critic=shared",
        "module.kl.coefficient=0.2",
        "module.kl.estimator=k3",
    ]
    assert train(*TINY, *other, "hydra.run.dir=whole") == 0
    assert train(*TINY, *other, *ended("raise"), "hydra.run.dir=run") == 1
    assert "FAILED: RuntimeError: the power is cut" in capsys.readouterr().err
    assert record(project / "run")[0] == "FAILED"
    capsys.readouterr()
    assert train("resume=run") == 0
    assert "changed" not in capsys.readouterr().out
    assert_same_run(project / "run", project / "whole")
    assert_same_record(project / "run", project / "whole")


@pytest.mark.slow
def test_a_run_of_two_processes_is_resumed(project: Path) -> None:
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    whole = command(*TINY, *two, "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stderr
    assert command(*TINY, *two, *ended("kill"), "hydra.run.dir=run").returncode == 1
    resumed = command("resume=run")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("resuming from") == 1
    assert_same_run(project / "run", project / "whole")
    assert_same_record(project / "run", project / "whole")


def test_a_job_of_a_sweep_and_the_others_of_it(project: Path, capsys: pytest.CaptureFixture) -> None:
    """The second of three jobs fails, the third is invalid, the first is done; the last lines report all three."""
    assert train(*TINY, "seed=2", "hydra.run.dir=whole") == 0
    sweep = [*TINY, *ended("raise", seed=2), "hydra.sweep.dir=sweep", "seed=1,2,-1", "--multirun"]
    assert train(*sweep) == 2
    error = capsys.readouterr().err
    assert "3 jobs, 2 of them failed" in error and "nothing was started" not in error
    for line in (
        r"job 0 \(seed=1\): done, (eval/reward_mean|reward/mean) [\d.e+-]+, in .*sweep/0",
        r"job 1 \(seed=2\): failed: RuntimeError: the power is cut",
        r"job 2 \(seed=-1\): failed: seed = -1",
    ):
        assert re.search(line, error), line
    at_once = error[: error.index("3 jobs, 2 of them failed")]
    assert "job 1 (seed=2) has failed: RuntimeError: the power is cut\n" in at_once and "FAILED: " not in error
    assert re.search(r"job 2 \(seed=-1\) has failed: seed = -1", at_once)
    logs = [(project / "sweep" / job / "train.log").read_text(encoding="utf-8") for job in "12"]
    assert logs[0].count("RuntimeError: the power is cut") == 1 and logs[1].startswith("seed = -1")
    assert last(project / "sweep" / "0")["iteration"] == 4
    assert train("resume=sweep/1") == 0
    assert_same_run(project / "sweep" / "1", project / "whole")
    assert_same_record(project / "sweep" / "1", project / "whole")


def test_a_project_that_was_moved_is_resumed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from another working directory: the run's own data file is found."""
    assert train(*TINY, "hydra.run.dir=whole") == 0
    assert train(*TINY, f"data.train.path={project}/prompts.jsonl", *ended("raise"), "hydra.run.dir=runs/a") == 1
    now = project.with_name("p2")
    monkeypatch.chdir(project.parent)
    project.rename(now)
    mlflow.tracking._tracking_service.utils._artifact_repos_cache.clear()  # as in another process
    (now / "ended").rename(project.parent / "ended")  # the mark of the callback lies where the command is typed
    assert train("resume=p2/runs/a") == 0
    assert [*project.rglob("*"), *project.parent.glob("mlflow")] == [], "nothing in the old place"
    monkeypatch.chdir(now)
    assert_same_run(now / "runs" / "a", now / "whole")
    assert record(now / "runs" / "a")[1] == record_of_moved(now / "whole", now)
    assert record(now / "runs" / "a")[0] == "FINISHED"


def test_a_resume_through_another_folder_records_paths_that_do_not_need_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(*TINY, "iterations=1", f"data.train.path={project}/prompts.jsonl", "hydra.run.dir=a") == 0
    (elsewhere := project.with_name("elsewhere")).mkdir()
    monkeypatch.chdir(elsewhere)
    assert train("resume=../p/a", "iterations=2") == 0
    monkeypatch.chdir(project)
    shutil.rmtree(elsewhere)
    starts = [json.loads(line) for line in (project / "a" / "starts.jsonl").read_text().splitlines()]
    assert [start.pop("typed")[-1] for start in starts][1:] == ["iterations=2"]
    assert ".." not in json.dumps(starts) + (project / "a" / "tracking" / "run.json").read_text()
    (now := project.with_name("p2")).parent.joinpath("x").mkdir()
    project.rename(now)
    monkeypatch.chdir(now.parent / "x")
    mlflow.tracking._tracking_service.utils._artifact_repos_cache.clear()  # as in another process
    assert train("resume=../p2/a", "iterations=3") == 0
    steps = [step for step, _ in record_of_moved(now / "a", now)["reward/mean"]]
    assert steps == [1, 2, 3] and not project.exists()


def record_of_moved(folder: Path, project: Path) -> dict[str, list[tuple[int, float]]]:
    """The record of a moved run that has not been started since."""
    file = folder / "tracking" / "run.json"
    run = json.loads(file.read_text())
    run["tracking_uri"] = f"sqlite:///{project}/mlflow/mlflow.db"
    file.write_text(json.dumps(run))
    return record(folder)[1]


# --- the same run or a branch ----------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, int]:
    return {
        str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"
    }


def test_other_settings_are_a_branch_and_more_iterations_are_not(project: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(*TINY, "hydra.run.dir=run", "module.optimizer.schedule=constant") == 0
    run_id = json.loads((project / "run" / "tracking" / "run.json").read_text())["run_id"]
    before, parent = files_of(project / "run"), record(project / "run")
    capsys.readouterr()
    assert train("resume=run", "model.lr.actor=0.002", "iterations=5") == 0
    out = capsys.readouterr().out
    assert "  model.lr.actor: 0.0004 -> 0.002\n" in out and "  iterations: 4 -> 5\n" in out
    assert "a branch, for other numbers follow from module.actor.lr, model.lr.actor: its files go to" in out
    [branch] = project.glob("outputs/*/*")
    assert files_of(project / "run") == before and record(project / "run") == parent
    status, history, tags = record(branch)
    assert status == "FINISHED" and [step for step, _ in history["reward/mean"]] == [5]
    assert tags["mlflow.parentRunId"] == run_id and tags["lightning_rlhf.branch_of"] == f"{run_id} at iteration 4"
    assert last(branch)["lightning_rlhf"]["run_config"]["module"]["actor"]["lr"] == 0.002

    earlier = "run/checkpoints/iteration_000002.ckpt"
    assert train(f"resume={earlier}", "hydra.run.dir=earlier") == 0
    assert "a branch, for the run has gone on to iteration 4 since" in capsys.readouterr().out
    assert files_of(project / "run") == before
    assert_same_run(project / "earlier", project / "run")

    # The branch goes on as itself, and so does the run, once with a setting that was asked to be its own.
    assert train(f"resume={branch}", "iterations=6") == 0
    assert record(branch)[2]["lightning_rlhf.branch_of"].endswith("at iteration 4")
    assert [step for step, _ in record(branch)[1]["reward/mean"]] == [5, 6]
    assert train("resume=run", "iterations=5") == 0
    assert train("resume=run", "iterations=6", "model.lr.critic=0.007", "branch=false") == 0
    assert [step for step, _ in record(project / "run")[1]["reward/mean"]] == [1, 2, 3, 4, 5, 6]
    assert len(list(project.glob("outputs/*/*"))) == 1 and runs_in(project) == 3
    assert last(project / "run")["lightning_rlhf"]["run_config"]["module"]["critic"]["lr"] == 0.007


def test_resume_from_python(project: Path) -> None:
    """``train(config)`` with ``resume``: what differs from the shipped defaults counts as typed."""
    import hydra

    from lightning_rlhf.train import train as train_config

    assert train(*TINY, "hydra.run.dir=run", "logger=none") == 0
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        config = hydra.compose("train", ["resume=run", "iterations=5", f"output_dir={project}/run"])
    assert train_config(config)["clock/iteration"] == 5
    saved = last(project / "run")["lightning_rlhf"]["run_config"]
    assert saved["data"]["prompts_per_iteration"] == 12 and saved["logger"] == {}


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_release_says_what_it_lacks_and_goes_on(
    project: Path, capsys: pytest.CaptureFixture
) -> None:
    """It lacks today's keys, the record of its data, and some state of callbacks."""
    words = [*TINY, "logger=none", "callbacks=stability", "callbacks.checkpoint.keep=null", "iterations=2"]
    assert train(*words, "hydra.run.dir=run") == 0
    file = latest_valid(project / "run" / "checkpoints")
    assert file is not None
    saved = torch.load(file, weights_only=True)
    for key in ("progress_every", "unsupported_precision", "branch", "resume_on_other_data"):
        del saved["lightning_rlhf"]["run_config"][key]
    [loader] = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    for state in (saved["PromptDataModule"], loader):
        del state["data"], state["origin"]
    del saved["callbacks"]["KLGuard"]["progress"], saved["callbacks"]["LRBackoff"]["before"]
    torch.save(saved, file)
    file.with_name("iteration_000002.verified.json").unlink()  # earlier releases wrote none
    capsys.readouterr()
    assert train("resume=run", "iterations=3") == 2
    said = capsys.readouterr().err
    assert "the checkpoint does not say which data it was trained on" in said and "resume_on_other_data=true" in said
    assert train("resume=run", "iterations=3", "resume_on_other_data=true", "branch=false") == 0
    said = capsys.readouterr().out
    assert "progress_every" not in said and "unsupported_precision" not in said, "a default is no change"
    assert last(project / "run")["iteration"] == 3
    assert last(project / "run")["lightning_rlhf"]["run_config"]["progress_every"] == 5


def test_other_data_is_refused_and_accepted_where_asked(project: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(*TINY, "logger=none", "hydra.run.dir=run", "iterations=2") == 0
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    (project / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    capsys.readouterr()
    assert train("resume=run", "iterations=3") == 2
    assert "trained on other data: other rows, though as many (40)" in capsys.readouterr().err
    assert train("resume=run", "iterations=3", "resume_on_other_data=true", "hydra.run.dir=other") == 0
    assert last(project / "other")["iteration"] == 3
    assert train("resume=other", "iterations=4") == 0, "from here on it is the run's data"
    assert train("resume=other", "resume_on_other_data=yes") == 2
    assert "resume_on_other_data = 'yes' is not allowed: true, false" in capsys.readouterr().err
    (project / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows[::-1]), encoding="utf-8")
    assert train("resume=other", "iterations=5") == 2, "what was allowed once is not allowed for ever"
    assert "the same rows in another order" in capsys.readouterr().err


# --- what is refused -------------------------------------------------------------------------------------------------


def test_overrides_of_a_start_without_checkpoint_can_be_repeated(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that dies before its first checkpoint changes nothing: the same command has the same effect again."""
    assert train(*TINY, "iterations=2", "hydra.run.dir=run") == 0
    again = ["resume=run", "iterations=3", "callbacks=stability", "branch=false"]
    with monkeypatch.context() as patch:

        def cut(*_: object, **__: object) -> None:
            raise RuntimeError("the power is cut")

        patch.setattr("lightning_rlhf.run.assemble", cut)
        assert train(*again) == 1
    assert train(*again) == 0
    assert "kl_guard" in last(project / "run")["lightning_rlhf"]["run_config"]["callbacks"]


def test_a_damaged_newest_checkpoint_makes_no_branch(project: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(*TINY, "hydra.run.dir=run", "logger=none") == 0
    newest = project / "run" / "checkpoints" / "iteration_000004.ckpt"
    whole = last(project / "run")
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with pytest.warns(UserWarning, match="skipped: "):
        assert train("resume=run") == 0
    assert "a branch" not in capsys.readouterr().out and not (project / "outputs").exists()
    torch.testing.assert_close(last(project / "run")["state_dict"], whole["state_dict"], rtol=0, atol=0)


def test_a_refused_resume_leaves_the_record_of_the_run(project: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(*TINY, "hydra.run.dir=run") == 0
    before = record(project / "run")
    assert train("resume=run", "iterations=3") == 2
    assert "iterations = 3 is not allowed: the checkpoint has already done 4" in capsys.readouterr().err
    lines = (project / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    (project / "prompts.jsonl").write_text("\n".join(lines[1:]), encoding="utf-8")
    assert train("resume=run", "iterations=5") == 2
    assert "40 training prompts then, 39 now" in capsys.readouterr().err
    assert record(project / "run") == before and before[0] == "FINISHED"


def test_relative_paths_are_those_of_the_folder_where_the_run_was_started(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Also if the present working directory has a file of the same name, and for bare file names."""
    held_out = "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(50, 54))
    (project / "held.jsonl").write_text(held_out, encoding="utf-8")
    whole = [*TINY, "data.validation=held.jsonl", "logger=none", "iterations=2"]
    assert train(*whole, "hydra.run.dir=run") == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = json.dumps({"prompt": "7+7=", "answer": "14"})
    (elsewhere / "prompts.jsonl").write_text("\n".join([other] * 40), encoding="utf-8")
    monkeypatch.chdir(elsewhere)
    assert train(f"resume={project}/run", "iterations=3") == 0
    # What is typed now counts from here.
    assert train(f"resume={project}/run", "iterations=4", "data.train.path=prompts.jsonl") == 2
    assert "other rows, though as many (40)" in capsys.readouterr().err


def test_folders_with_another_run_are_refused(project: Path, capsys: pytest.CaptureFixture) -> None:
    tiny = [*TINY, "logger=none", "iterations=1"]
    assert train(*tiny, "hydra.run.dir=run") == 0
    assert train(*tiny, "hydra.run.dir=run") == 2
    assert "holds the checkpoints of a run already (iteration_000001.ckpt). resume=" in capsys.readouterr().err
    assert train(*tiny, "resume=latest") == 2
    assert "hydra.run.dir=FOLDER" in capsys.readouterr().err
    assert not list(project.glob("outputs/*/*")), "nothing is left behind"
    assert train("resume=run", "branch=maybe") == 2
    assert "branch = 'maybe' is not allowed" in capsys.readouterr().err
    assert train("resume=run", "model.lr.aktor=1") == 2
    assert "the run has no key 'model.lr.aktor'; did you mean model.lr.actor?" in capsys.readouterr().err


@pytest.mark.slow
def test_two_commands_of_the_same_second(project: Path) -> None:
    """Both folders are named by the same second; each command has its own checkpoints afterwards."""
    line = [sys.executable, "-c", SAME_SECOND, "train", *TINY, "iterations=1", "logger=none"]
    both = [subprocess.Popen([*line, f"seed={seed}"], env=os.environ, cwd=project) for seed in (1, 2)]
    assert [process.wait(300) for process in both] == [0, 0]
    folders = sorted(project.glob("outputs/*/*"))
    assert [folder.name for folder in folders] == ["12-00-00", "12-00-00-2"]
    assert {last(folder)["lightning_rlhf"]["run_config"]["seed"] for folder in folders} == {1, 2}


SAME_SECOND = """
import datetime, sys
import hydra.core.utils

class Clock(datetime.datetime):
    @classmethod
    def now(cls):
        return cls(2026, 1, 31, 12, 0, 0)

hydra.core.utils.datetime = Clock
from lightning_rlhf import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_each_start_is_recorded(project: Path) -> None:
    assert train(*TINY, "logger=none", "iterations=1", "hydra.run.dir=run") == 0
    assert train("resume=run", "iterations=2") == 0
    first, second = (json.loads(line) for line in (project / "run" / "starts.jsonl").read_text().splitlines())
    assert first["typed"] == [*TINY, "logger=none", "iterations=1"]
    assert second["typed"] == ["resume=run", "iterations=2"] and second["changes"] == {"iterations": ["1", "2"]}
    assert OmegaConf.load("run/.hydra/start_2/config.yaml").iterations == 2
    assert OmegaConf.load("run/.hydra/config.yaml").iterations == 1


def test_a_damaged_or_broken_checkpoint_that_is_named_is_used_by_nothing(
    project: Path, capsys: pytest.CaptureFixture
) -> None:
    """One bit of a weight turned on disk: no verb goes on with it. NaN in a weight: it is not exported."""
    assert train(*TINY, "logger=none", "iterations=2", "hydra.run.dir=run") == 0
    newest = latest_valid(project / "run" / "checkpoints")
    assert newest is not None
    weight = torch.load(newest, weights_only=True)["state_dict"]["actor.lm.model.embed_tokens.weight"]
    bytes_of_weight, content = weight.contiguous().numpy().tobytes(), bytearray(newest.read_bytes())
    at = content.find(bytes_of_weight)
    assert at > 0
    content[at + 3] ^= 0x40
    damaged = project / "damaged.ckpt"
    damaged.write_bytes(content)
    capsys.readouterr()
    for words in (
        ["eval", f"checkpoint={damaged}"],
        ["export", f"checkpoint={damaged}", "output=model"],
        ["train", f"resume={damaged}", "iterations=4"],
    ):
        assert cli.main(words) == 2, words
        assert "checksum" in capsys.readouterr().err
    saved = torch.load(newest, weights_only=True)
    saved["state_dict"]["actor.lm.model.embed_tokens.weight"][0, 0] = float("nan")
    torch.save(saved, newest)
    newest.with_name("iteration_000002.verified.json").unlink()
    assert cli.main(["export", f"checkpoint={newest}", "output=model"]) == 2
    assert "hold NaN or infinity, lm.model.embed_tokens.weight first" in capsys.readouterr().err
    assert not (project / "model").exists()
