"""``lightning-rlhf supervise`` with real trainings: killed, diverging, hanging, stopped, wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from lightning_rlhf import cli
from lightning_rlhf.supervise.files import Beat
from tests.runs.test_resume_command import (
    TINY,
    assert_same_record,
    assert_same_run,
    ended,
    last,
    project,  # noqa: F401
    record,
    runs_in,
    train,
)
from tests.supervise.test_notify import Webhook, webhook  # noqa: F401

pytestmark = pytest.mark.slow

PATIENCE = 400.0

TROUBLE = """
import os, signal, time
from pathlib import Path

import torch

from lightning_rlhf.callbacks import RLHFCallback


class Diverges(RLHFCallback):
    '''Iteration 3 is broken while the learning rate is above a limit.'''

    def __init__(self, above):
        self.above = above

    def on_update_end(self, trainer, module, stats):
        if stats.iteration == 3 and module.optimizers().param_groups[0]["lr"] > self.above:
            module.control.stop_training("the loss is NaN", failed=True)


class Once(RLHFCallback):
    '''Out of memory in iteration 3, or killed in the first rollout, once.'''

    def __init__(self, how):
        self.how, self.mark = how, Path("once")

    def on_rollout_end(self, trainer, module, rollout):
        iteration = module.control.iteration
        if self.mark.exists() or iteration != {"memory": 3, "kill": 1}[self.how]:
            return
        self.mark.touch()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise torch.OutOfMemoryError("CUDA out of memory, planted")


class Reward:
    def __init__(self, how):
        self.how = how

    def __call__(self, batch):
        if self.how == "sleep":
            time.sleep(10_000)
        if any(prompt.startswith("7+") for prompt in batch.prompts):
            raise KeyError("the answer to 7+7 is missing")
        return [0.0] * len(batch.prompts)
"""

TEXTS = (".md", ".json", ".jsonl", ".log", ".yaml")
FAST = ["supervise.wait=0"]


@pytest.fixture
def trouble(project: Path) -> Path:  # noqa: F811
    (project / "trouble.py").write_text(TROUBLE, encoding="utf-8")
    return project


def supervise(*words: str) -> int:
    return cli.main(["supervise", *words])


def reward(how: str) -> str:
    return f"+reward.terms.own={{weight: 1, reward: {{_target_: trouble.Reward, how: {how}}}}}"


def state(folder: Path) -> dict:
    return json.loads((folder / "supervise" / "state.json").read_text(encoding="utf-8"))


def started(folder: Path, *words: str) -> subprocess.Popen:
    """A supervisor whose training is in its iterations."""
    line = [sys.executable, "-m", "lightning_rlhf.cli", "supervise", *words, f"hydra.run.dir={folder}"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        beat = Beat.read(folder / "supervise")
        if beat is not None and beat.training and beat.iteration >= 2:
            return process
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    raise AssertionError("no iteration has begun")


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_training_goes_on_as_if_nothing_had_happened(project: Path) -> None:  # noqa: F811
    assert train(*TINY, "hydra.run.dir=whole") == 0
    assert supervise(*TINY, *ended("kill"), "hydra.run.dir=run", *FAST) == 0
    folder = project / "run"
    assert_same_run(folder, project / "whole")
    assert_same_record(folder, project / "whole")
    assert runs_in(project) == 2, "one of each"
    first, second = state(folder)["attempts"]
    assert (first["class"], first["iteration"], second["from"], second["class"]) == ("killed", 3, 2, "done")
    assert "with the same settings" in first["next"] and second["changes"] == {}
    marked = json.loads((folder / "checkpoints" / "iteration_000002.suspect.json").read_text(encoding="utf-8"))
    assert [crash["class"] for crash in marked["crashes"]] == ["killed"]
    tags = record(folder)[2]
    assert tags["lightning_rlhf.attempt_01"].startswith("killed in iteration 3: ended by SIGKILL; trying again with")


def test_a_diverging_run_is_rescued_by_half_the_learning_rate(trouble: Path, capfd: pytest.CaptureFixture) -> None:
    """The first retry has the same settings, the second one half the rate; report and MLflow say so."""
    words = ["+callbacks.diverges={_target_: trouble.Diverges, above: 0.0003}", "hydra.run.dir=run", *FAST]
    words.append("module.optimizer.schedule=constant")
    assert supervise(*TINY, *words) == 0
    folder = trouble / "run"
    assert [each["class"] for each in state(folder)["attempts"]] == ["divergence", "divergence", "done"]
    assert [each["changes"].get("module.actor.lr") for each in state(folder)["attempts"]] == [None, None, 0.0002]
    assert last(folder)["iteration"] == 4
    assert last(folder)["lightning_rlhf"]["run_config"]["module"]["actor"]["lr"] == 0.0002
    status, history, tags = record(folder)
    assert status == "FINISHED" and runs_in(trouble) == 1
    assert [(step, rate) for step, rate in history["lr/actor"]][2:] == [(3, 0.0002), (4, 0.0002)]
    assert [step for step, _ in history["reward/mean"]] == [1, 2, 3, 4]
    assert "module.actor.lr 0.0004 -> 0.0002" in tags["lightning_rlhf.attempt_02"]
    assert tags["changed/module.actor.lr"] == "0.0004 -> 0.0002"
    page = (folder / "crashes" / "attempt_02.md").read_text(encoding="utf-8")
    assert "TrainingFailed: iteration 3: the loss is NaN" in page and "module.actor.lr 0.0004 -> 0.0002" in page
    assert "| 1 | 0 | none | divergence in iteration 3 | trying again with the same settings" in page
    assert "iteration 3: stop_training: the loss is NaN" in page, "decisions of the last iterations"
    told = [json.loads(line) for line in (folder / "tracking" / "decisions_resumed_3.jsonl").read_text().splitlines()]
    assert told[0]["verb"] == "retry" and "module.actor.lr 0.0004 -> 0.0002" in told[0]["reason"]
    assert "done, in 3 attempts" in capfd.readouterr().err


def test_a_misspelt_key_is_not_retried(project: Path, capfd: pytest.CaptureFixture) -> None:  # noqa: F811
    assert supervise(*TINY, "model.lr.aktor=1", *FAST) == 2
    error = capfd.readouterr().err
    assert "did you mean model.lr.actor?" in error and "giving up: configuration is not retried" in error
    assert "in iteration 0: there is no key 'model.lr.aktor'" in error and "Traceback" not in error
    assert not list(project.glob("outputs/*/*")), "the folder of a run that never was"


def test_a_refused_start_leaves_the_record_of_a_finished_run(project: Path) -> None:  # noqa: F811
    assert cli.main(["train", *TINY, "iterations=1", "hydra.run.dir=run"]) == 0
    assert supervise("resume=run", "iteratons=5", *FAST) == 2
    assert record(project / "run")[0] == "FINISHED" and not (project / "run" / "crashes").exists()


def test_an_error_of_a_reward_is_not_retried(
    trouble: Path,
    capfd: pytest.CaptureFixture,
    webhook: Webhook,  # noqa: F811
) -> None:
    """The supervisor gives up with the error, MLflow has the report, people are told, no checkpoint is blamed."""
    words = ["hydra.run.dir=run", *FAST, f"supervise.notify={webhook.address}"]
    assert supervise(*TINY, reward("raise"), *words) == 1
    assert [message["title"] for message in webhook.received] == ["lightning-rlhf run: given up (user_code)"]
    assert "# Attempt 1: user_code" in webhook.received[0]["message"]
    assert "secret" not in "".join(path.read_text() for path in (trouble / "run").rglob("*.*") if path.suffix in TEXTS)
    folder, error = trouble / "run", capfd.readouterr().err
    assert [each["class"] for each in state(folder)["attempts"]] == ["user_code"]
    assert "the error:\nRewardError" in error and "7+7 is missing" in error
    assert 'trouble.py", line ' in error[error.index("the error:") :]
    assert "giving up: user_code is not retried" in error
    assert (folder / "crashes" / "attempt_01.md").exists() and not list(folder.rglob("*.suspect.json"))
    status, _, tags = record(folder)
    assert status == "FAILED" and "giving up" in tags["lightning_rlhf.attempt_01"]


def test_a_used_up_budget_is_remembered_and_the_record_is_closed(trouble: Path, capfd: pytest.CaptureFixture) -> None:
    """A killed training cannot close its own MLflow run."""
    assert supervise(*TINY, *ended("kill"), "hydra.run.dir=run", "supervise.retries=0") == 137
    error = capfd.readouterr().err
    assert "giving up: all retries are used (0)" in error and "ended by SIGKILL" in error
    status, history, tags = record(trouble / "run")
    assert status == "FAILED" and [step for step, _ in history["reward/mean"]] == [1, 2]
    assert "ended by SIGKILL" in tags["failure"] and "giving up" in tags["lightning_rlhf.attempt_01"]


def test_changes_that_the_run_refuses_are_taken_back(trouble: Path, capfd: pytest.CaptureFixture) -> None:
    """Half of the micro-batch's tokens are fewer than the longest sequence has."""
    words = ["+callbacks.once={_target_: trouble.Once, how: memory}", "hydra.run.dir='run a=1'", *FAST, "logger=none"]
    tokens = ["data.max_prompt_tokens=12", "module.update.micro_batch_tokens=20"]
    policy = "supervise.policy.out_of_memory=[{module.update.micro_batch_tokens: '* 0.5'}]"
    assert supervise(*TINY, *words, *tokens, policy) == 0
    first, refused, second = state(trouble / "run a=1")["attempts"]
    assert "micro_batch_tokens 20 -> 10" in first["next"] and refused["changes"] == {
        "module.update.micro_batch_tokens": 10
    }
    assert refused["class"] == "configuration" and "micro_batch_tokens 10 -> 20" in refused["next"]
    assert second["changes"] == {} and (trouble / "run a=1" / "crashes" / "attempt_02.md").exists()
    assert "module.update.micro_batch_tokens = 10" in capfd.readouterr().err


def test_a_run_without_checkpoint_begins_again(trouble: Path) -> None:
    """In the same folder; its first MLflow run is closed."""
    assert supervise(*TINY, "+callbacks.once={_target_: trouble.Once, how: kill}", "hydra.run.dir=run", *FAST) == 0
    status, history, _ = record(trouble / "run")
    assert status == "FINISHED" and [step for step, _ in history["reward/mean"]] == [1, 2, 3, 4]
    client = MlflowClient(f"sqlite:///{trouble}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("lightning_rlhf")
    assert sorted(run.info.status for run in client.search_runs([experiment.experiment_id])) == ["FAILED", "FINISHED"]


def test_one_of_two_processes_is_killed(project: Path) -> None:  # noqa: F811
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "logger=none", *FAST]
    assert supervise(*TINY, *ended("kill"), *two, "hydra.run.dir=run") == 0
    first, second = state(project / "run")["attempts"]
    assert (first["class"], second["class"], second["from"]) == ("killed", "done", 2)
    assert "process 0 of 2 ended with signal 9" in first["error"] and last(project / "run")["iteration"] == 4


def test_a_hang_is_killed_and_its_stacks_are_kept(trouble: Path, capfd: pytest.CaptureFixture) -> None:
    words = [reward("sleep"), "hydra.run.dir=run", "supervise.hang_after=4", "supervise.retries=0"]
    assert supervise(*TINY, *words) == 137
    page = (trouble / "run" / "crashes" / "attempt_01.md").read_text(encoding="utf-8")
    assert "hang in iteration 1" in page and "since 'rewards and scoring' of iteration 1" in page
    assert 'trouble.py", line ' in page[page.index("## Stacks") :] and "in __call__" in page
    assert record(trouble / "run")[0] == "FAILED"


def test_a_supervisor_that_is_killed_takes_its_training_with_it(project: Path) -> None:  # noqa: F811
    folder = project / "run"
    supervisor = started(folder, *TINY, "logger=none", "iterations=100000")
    beat = Beat.read(folder / "supervise")
    assert beat is not None
    supervisor.kill()
    supervisor.communicate(timeout=PATIENCE)
    wait_until_gone(beat.pid)


def test_ctrl_c_is_passed_on_and_nothing_is_left_running(project: Path) -> None:  # noqa: F811
    folder = project / "run"
    supervisor = started(folder, *TINY, "iterations=100000", "supervise.notify=[]", "supervise.policy.disk=[{}, {}]")
    supervisor.send_signal(signal.SIGINT)
    said = supervisor.communicate(timeout=PATIENCE)[1]
    assert supervisor.returncode == 130
    command = f"lightning-rlhf supervise supervise.notify=... 'supervise.policy.disk=[{{}}, {{}}]' resume={folder}"
    assert f"to go on under supervision: {command}" in said
    assert record(folder)[0] == "KILLED"
    [attempt] = state(folder)["attempts"]
    assert attempt["class"] == "stopped" and state(folder)["pending"] is None
    done = last(folder)["iteration"]
    assert done >= attempt["iteration"] - 1, "what was trained is saved"
    assert not (folder / "crashes").exists()
    assert os.environ.get("LIGHTNING_RLHF_SUPERVISED") is None
