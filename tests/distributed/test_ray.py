"""Workers of Ray Train: the requests to Ray, and a real run (two workers on a CPU) that loses one and resumes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from lightning_rlhf import schema
from lightning_rlhf.assembly import make_trainer
from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.checkpoint import latest_valid
from lightning_rlhf.distributed.ray_settings import RaySettings
from lightning_rlhf.run import run
from lightning_rlhf.runs.ending import RunFailed
from lightning_rlhf.train import train
from tests.ranks import run_ranks

ray = pytest.importorskip("ray")

from lightning_rlhf.distributed import ray_launch  # noqa: E402
from lightning_rlhf.distributed.ray_watch import NotAgain, Refused, Watch, failures  # noqa: E402

# --- what is asked of Ray --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "given", "resources", "backend"),
    [
        ("cpu", None, {"CPU": 1}, "gloo"),
        ("gpu", {"CPU": 8}, {"CPU": 8, "GPU": 1}, "nccl"),
        ("gpu", {"fast_disk": 0.5}, {"CPU": 1, "GPU": 1, "fast_disk": 0.5}, "nccl"),
    ],
)
def test_workers_reserve_their_device_and_what_is_asked_for(compose, accelerator, given, resources, backend):
    settings = RaySettings(workers=3, resources_per_worker=given)
    scaling = ray_launch.scaling_of(settings, accelerator)
    assert scaling.num_workers == 3
    assert scaling._resources_per_worker_not_none == resources
    trainer = schema.check(compose("trainer=ray", f"trainer.accelerator={accelerator}", "trainer.ray.workers=4"))[
        "trainer"
    ]
    assert ray_launch.process_group_of(trainer).backend == backend
    trainer["strategy"] |= {"process_group_backend": "mpi", "timeout_seconds": 7}
    group = ray_launch.process_group_of(trainer)
    assert (group.backend, group.timeout_s) == ("mpi", 7)


def test_more_than_this_machine_has_is_refused_and_a_pretended_cluster_may_grow(monkeypatch, caplog):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    ray_launch.check_resources(ray_launch.scaling_of(RaySettings(workers=2), "cpu"), may_grow=False)
    three = ray_launch.scaling_of(RaySettings(workers=3), "gpu")
    with pytest.raises(schema.InputError, match=r"workers = 3 .* 3 CPU where there is 2, 3 GPU where there is 0"):
        ray_launch.check_resources(three, may_grow=False)
    ray_launch.check_resources(three, may_grow=True)
    assert "wait until machines join" in caplog.text


@pytest.mark.parametrize(
    ("address", "variable", "asked"),
    [(None, None, "local"), (None, "10.0.0.1:6379", "10.0.0.1:6379"), ("auto", "10.0.0.1:6379", "auto")],
)
def test_which_pretended_cluster_is_joined(monkeypatch, address, variable, asked):
    """Arguments for a new Ray are not given to one that runs."""
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **arguments: calls.append((address, arguments)))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append(("shutdown", {})))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    with ray_launch.connected(RaySettings(workers=2, address=address, init={"num_cpus": 2})) as started_here:
        assert started_here == (asked == "local")
    assert [address for address, _ in calls] == [asked, "shutdown"]
    assert ("num_cpus" in calls[0][1]) == started_here
    assert os.getcwd() in calls[0][1]["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep)


def test_a_cluster_that_is_not_there_is_named(monkeypatch):
    def no_answer(address: str, **arguments: Any) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", no_answer)
    with (
        pytest.raises(schema.InputError, match=r"trainer.ray.address: .*'1.2.3.4:5': no answer"),
        ray_launch.connected(RaySettings(workers=2, address="1.2.3.4:5")),
    ):
        pass


def test_without_ray_the_extra_is_named(compose, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "lightning_rlhf.distributed.ray_launch")
    monkeypatch.delattr("lightning_rlhf.distributed.ray_launch")
    with pytest.raises(schema.InputError, match=r"lightning-rlhf\[ray\]"):
        train(compose("trainer=ray"))


def test_a_checkpoint_of_such_a_run_is_evaluated_in_one_process(compose):
    trainer = make_trainer(schema.check(compose("trainer=ray")), train=False)
    assert trainer.world_size == 1


# --- failures --------------------------------------------------------------------------------------------------------


def test_failures_are_printed_with_the_next_step(capsys):
    watch = Watch(max_failures=1)
    lost = ray.exceptions.RayActorError()
    watch.after_exception(None, {1: lost, 0: RuntimeError("Connection closed")})
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "worker 0 failed: Connection closed",
        "worker 1 was lost: its process was killed, or its machine is gone",
        "all workers start again from the newest whole checkpoint (restart 1 of 1)",
    ]
    watch.after_exception(None, {1: lost})
    assert capsys.readouterr().out == "", "there is no second start, and the command says so"
    with pytest.raises(Refused, match="no such file"):
        watch.after_exception(None, {0: lost, 1: Refused("no such file")})
    with pytest.raises(NotAgain, match=r"^worker 1 failed: RewardError: x$"):
        watch.after_exception(None, {0: lost, 1: NotAgain("RewardError: x")})


def test_the_error_names_workers() -> None:
    failure = ray.train.WorkerGroupError("long text", {1: RuntimeError("ValueError: bad")})
    assert failures(failure.worker_failures) == ["worker 1 failed: ValueError: bad"]
    assert "worker 1 failed: ValueError: bad" in ray_launch._why_it_ended(failure)


def test_a_start_resumes_what_earlier_starts_wrote_and_nothing_older(tmp_path):
    def configuration() -> dict[str, Any]:
        logger = {"_target_": "lightning_rlhf.reporting.RLMLFlowLogger", "resume_from": None}
        return {"output_dir": str(tmp_path), "resume": "elsewhere", "logger": {"mlflow": logger}}

    old, record = tmp_path / "checkpoints" / "iteration_000009.ckpt", tmp_path / "tracking" / "run.json"
    for path in (old, record):
        path.parent.mkdir()
    torch.save({}, old)
    record.write_text("{}")
    before = ray_launch._own_files(tmp_path)
    assert set(before) == {str(old), str(record)}
    assert ray_launch._continued(configuration(), before) == configuration(), "the first start"

    old.rename(old.with_name("iteration_000009.ckpt.set_aside"))
    new = old.with_name("iteration_000002.ckpt")
    torch.save({}, new)
    os.utime(record, ns=(1, 1))
    continued = ray_launch._continued(configuration(), before)
    assert continued["resume"] == str(new)
    assert continued["logger"]["mlflow"]["resume_from"] == str(tmp_path)


def test_a_folder_that_a_machine_does_not_see_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(Refused, match=r"there is no .*launch\.json on the machine"):
        ray_launch.work({"file": str(tmp_path / "launch.json"), "folder": str(tmp_path), "before": {}})


# --- real runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started_ray() -> Iterator[None]:
    """Ray with two workers' worth of this machine's CPUs, for the tests of this file."""
    settings = RaySettings(
        workers=2, address="local", init={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 10**8}
    )
    handler = signal.getsignal(signal.SIGTERM)
    with ray_launch.connected(settings) as started_here:
        assert started_here
        yield
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is handler, "Lightning sets its own only where there is none"


class Death(RLHFCallback):
    """Kills the second worker in the middle of an update, once; ``mark`` remembers that it did."""

    def __init__(self, iteration: int, mark: str) -> None:
        self.iteration, self.mark = iteration, Path(mark)

    def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
        if stats.iteration == self.iteration and trainer.global_rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Fails:
    """A reward that raises on the second worker, after it has written down the process that was asked."""

    def __init__(self, mark: str) -> None:
        self.mark = Path(mark)

    def __call__(self, batch: Any) -> list[float]:
        if os.environ["RANK"] == "1":
            with self.mark.open("a") as file:
                file.write(f"{os.getpid()}\n")
            raise KeyError("the answer is missing")
        return [0.0] * len(batch)


TINY = [
    "threads=1",
    "warmup=none",
    "iterations=5",
    "alp=decoupled",
    "callbacks.checkpoint.every_n_iterations=2",
    "data.prompts_per_iteration=4",
    "data.validation_limit=4",
    "module.update.minibatch_size=4",
    "module.update.epochs=2",
    "trainer.enable_progress_bar=false",
]


def compose_in(folder: Path, *overrides: str) -> Any:
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        places = [f"output_dir={folder}", f"logger.mlflow.store_dir={folder}/mlflow"]
        return hydra.compose("train", [*places, *TINY, *overrides])


def train_with_ddp(rank: int, folder: Path) -> dict[str, float]:
    return run(schema.check(compose_in(folder, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")))


@pytest.mark.slow
def test_a_worker_is_killed_and_the_run_ends_as_if_nothing_had_happened(started_ray, tmp_path):
    import mlflow

    whole, cut, mark = tmp_path / "whole", tmp_path / "cut", tmp_path / "killed"
    whole.mkdir()
    [expected, _] = run_ranks(train_with_ddp, whole, folder=whole, process_group=False, timeout=600)

    death = f"+callbacks.death={{_target_: {__name__}.Death, iteration: 4, mark: {mark}}}"
    found = train(compose_in(cut, "trainer=ray", "trainer.ray.max_failures=1", death))
    assert mark.exists(), "the worker was killed"
    record = json.loads((cut / "tracking" / "run.json").read_text(encoding="utf-8"))
    assert record["starts"] == 2, "and Ray started all again"

    clocks = ("time/", "perf/", "tok/s")
    assert found["clock/iteration"] == 5
    # The last process has not seen what is measured in some iterations only, before its checkpoint.
    seen_by_both = [name for name in found if not name.startswith(clocks)]
    assert "kl/ref" in seen_by_both and "alp/sigma_layer_00" in seen_by_both
    assert {name: found[name] for name in seen_by_both} == {name: expected[name] for name in seen_by_both}
    first, second = (torch.load(latest_valid(folder / "checkpoints"), weights_only=True) for folder in (whole, cut))
    assert first["iteration"] == second["iteration"] == 5
    torch.testing.assert_close(second["state_dict"], first["state_dict"], rtol=0, atol=0)
    states = [saved["optimizer_states"][0]["state"] for saved in (first, second)]
    assert states[0]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)

    client = mlflow.MlflowClient(f"sqlite:///{cut}/mlflow/mlflow.db")
    [tracked] = client.search_runs([client.get_experiment_by_name("lightning_rlhf").experiment_id])
    assert tracked.info.status == "FINISHED"
    history = client.get_metric_history(tracked.info.run_id, "reward/mean")
    assert sorted(entry.step for entry in history) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_ray_does_not_restart_an_invalid_configuration(started_ray, tmp_path):
    starts = tmp_path / "starts"

    def refuse() -> None:
        with starts.open("a") as file:
            file.write("start\n")
        raise Refused("data: bad row")

    trainer = ray_launch.TorchTrainer(
        refuse,
        scaling_config=ray_launch.scaling_of(RaySettings(workers=1), "cpu"),
        run_config=ray_launch.RunConfig(
            storage_path=str(tmp_path),
            failure_config=ray_launch.FailureConfig(max_failures=3),
            callbacks=[Watch(3)],
        ),
    )
    with pytest.raises(ray.train.ControllerError) as caught:
        trainer.fit()
    assert str(caught.value.controller_failure) == "data: bad row"
    assert starts.read_text() == "start\n"


@pytest.mark.slow
def test_ray_does_not_restart_after_an_error_of_the_users_own_code(started_ray, tmp_path):
    mark = tmp_path / "asked"
    own = f"+reward.terms.own={{weight: 1, reward: {{_target_: {__name__}.Fails, mark: {mark}}}}}"
    with pytest.raises(RunFailed) as caught:
        train(compose_in(tmp_path / "run", "trainer=ray", "trainer.ray.max_failures=3", own))
    assert len({*mark.read_text().splitlines()}) == 1, "workers that start again are other processes"
    said = str(caught.value)
    assert "is not started again, as the error is one of your own code" in said
    assert "failed: RewardError: reward term 'own'" in said and "the answer is missing" in said
