"""MLflow logging: every number arrives once, whatever happens to the server or to the run."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from mlflow import MlflowClient, MlflowException
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from lightning_rlhf.errors import InputError
from lightning_rlhf.metrics.names import UnknownMetricError
from lightning_rlhf.reporting import RLMLFlowLogger, RunRecord, send_spooled
from lightning_rlhf.reporting.mlflow_address import original_of
from lightning_rlhf.reporting.mlflow_delivery import with_table
from lightning_rlhf.reporting.mlflow_logger import end_as_failed


@pytest.fixture
def store(tmp_path: Path, fresh_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "store").mkdir()
    shutil.copy(fresh_store, tmp_path / "store" / "mlflow.db")
    return tmp_path / "store"


Make = Callable[..., RLMLFlowLogger]


@pytest.fixture
def make(tmp_path: Path, store: Path) -> Make:
    def build(run: str = "run", **options: Any) -> RLMLFlowLogger:
        return RLMLFlowLogger(tmp_path / run, store_dir=store, **{"retry_seconds": 0.05, **options})

    return build


def history(logger: RLMLFlowLogger, name: str) -> list[tuple[int, float]]:
    """(step, value) of everything the store holds for a metric."""
    assert logger.flush(30) and logger.run_id is not None
    return sorted((m.step, m.value) for m in MlflowClient(logger.tracking_uri).get_metric_history(logger.run_id, name))


def stored(logger: RLMLFlowLogger) -> Any:
    assert logger.flush(30) and logger.run_id is not None
    return MlflowClient(logger.tracking_uri).get_run(logger.run_id)


def artifact(logger: RLMLFlowLogger, path: str, folder: Path) -> str:
    assert logger.flush(30) and logger.run_id is not None
    client = MlflowClient(logger.tracking_uri)
    return Path(client.download_artifacts(logger.run_id, path, str(folder))).read_text()


class Outage:
    """Calls of the client fail while it lasts; `lost_answer` lets them through and fails afterwards."""

    def __init__(self, logger: RLMLFlowLogger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.lost_answer, self.calls = False, False, 0
        for name in ("log_batch", "get_run", "set_terminated", "update_run", "log_artifact"):
            monkeypatch.setattr(logger.experiment, name, self._wrap(getattr(logger.experiment, name)))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.lost_answer:
                self.lost_answer = False
                call(*args, **kwargs)
                raise ConnectionError("answer lost")
            if self.on:
                raise ConnectionError("connection refused")
            return call(*args, **kwargs)

        return wrapped


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_one_call_per_iteration_under_both_clocks(make: Make) -> None:
    logger = make()
    for iteration in (1, 2, 3):
        metrics = {"reward/mean": 0.5 * iteration, "clock/iteration": iteration, "clock/update": 8 * iteration}
        logger.log_metrics(metrics, step=iteration - 1)  # Lightning counts batches from 0
    assert history(logger, "reward/mean") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert history(logger, "clock/update") == [(1, 8), (2, 16), (3, 24)]


def test_lightnings_step_counts_without_a_clock(make: Make) -> None:
    logger = make()
    logger.log_metrics({"eval/reward_mean": torch.tensor(0.25)}, step=7)
    assert history(logger, "eval/reward_mean") == [(7, 0.25)]


def test_returns_before_the_store_has_taken_anything(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    logger = make()
    gate, write = threading.Event(), logger.experiment.log_batch

    def held(*args: Any, **kwargs: Any) -> None:
        gate.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr(logger.experiment, "log_batch", held)
    for iteration in range(5):
        logger.log_metrics({"kl/ref": 0.1}, step=iteration)
    assert not gate.is_set()  # five calls have returned, none was served
    gate.set()
    assert len(history(logger, "kl/ref")) == 5


def test_misspelt_names_of_the_kit_are_refused(make: Make) -> None:
    with pytest.raises(UnknownMetricError, match="'kl/reff'; did you mean 'kl/ref'"):
        make().log_metrics({"kl/reff": 0.1}, step=1)


def test_other_names_are_the_users_own(make: Make) -> None:
    """Lightning's own callbacks log names such as lr-AdamW/actor; characters MLflow refuses must not merge two."""
    logger = make()
    logger.log_metrics({"lr-AdamW/actor": 0.1, "my@1": 1.0, "my:1": 2.0, "epoch": 0}, step=1)
    metrics = stored(logger).data.metrics
    assert metrics["lr-AdamW/actor"] == 0.1
    assert sorted(v for k, v in metrics.items() if k.startswith("my_1_")) == [1.0, 2.0]


def test_mlflows_own_functions_miss_the_run_and_its_client_with_its_id_reaches_it(make: Make, tmp_path: Path) -> None:
    """As docs/runs.md says."""
    logger = make()
    logger.log_metrics({"my/number": 1.0}, step=1)
    logger.experiment.log_dict(logger.run_id, {"a": 1}, "mine.json")
    try:
        mlflow.log_metric("my/other", 2.0, step=1)
        active = mlflow.active_run()
    finally:
        mlflow.end_run()
    assert active is not None and active.info.run_id != logger.run_id
    assert history(logger, "my/number") == [(1, 1.0)] and history(logger, "my/other") == []
    assert json.loads(artifact(logger, "mine.json", tmp_path)) == {"a": 1}


def test_a_value_that_is_no_number_is_named(make: Make) -> None:
    with pytest.raises(TypeError, match="my/name = 'high' is not a number"):
        make().log_metrics({"my/name": "high"}, step=1)


def test_nan_and_infinity(make: Make) -> None:
    logger = make()
    logger.log_metrics({"kl/ref": math.nan, "kl/old": math.inf, "kl/loss": -math.inf}, step=1)
    assert math.isnan(history(logger, "kl/ref")[0][1])
    assert history(logger, "kl/old") == [(1, sys.float_info.max)]
    assert history(logger, "kl/loss") == [(1, -sys.float_info.max)]


# --- outages ---------------------------------------------------------------------------------------------------------


def test_an_outage_delays_and_loses_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = make()
    outage = Outage(logger, monkeypatch)
    logger.log_metrics({"reward/mean": 1.0}, step=1)
    assert logger.flush(30)
    outage.on = True
    with caplog.at_level(logging.WARNING, logger="lightning_rlhf"):
        for step in range(2, 7):
            logger.log_metrics({"reward/mean": float(step)}, step=step)
            assert not logger.flush(30)
        logger.log_hyperparams({"lr": 1e-4})
        outage.on = False
        assert logger.flush(30)
    assert history(logger, "reward/mean") == [(step, float(step)) for step in range(1, 7)]
    assert stored(logger).data.params == {"lr": "0.0001"}
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, warnings  # once when it begins, once when it is over
    assert "connection refused" in warnings[0] and "nothing is lost" in warnings[0] and "is back" in warnings[1]


def test_records_are_sent_without_another_call(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = make(retry_seconds=0.01)
    outage = Outage(logger, monkeypatch)
    outage.on = True
    logger.log_metrics({"reward/mean": 1.0}, step=1)
    assert not logger.flush(30)
    outage.on = False
    deadline = time.monotonic() + 30
    while not logger._log.empty and time.monotonic() < deadline:
        time.sleep(0.01)
    assert logger._log.empty


def test_a_lost_answer_stores_nothing_twice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = make()
    outage = Outage(logger, monkeypatch)
    assert logger.flush(30)
    outage.lost_answer = True
    logger.log_metrics({"reward/mean": 1.0, "kl/ref": math.nan}, step=1)
    assert not logger.flush(30)
    logger.log_metrics({"reward/mean": 2.0, "kl/ref": math.nan}, step=2)
    assert history(logger, "reward/mean") == [(1, 1.0), (2, 2.0)]
    assert len(history(logger, "kl/ref")) == 2


def test_a_file_that_cannot_be_sent_does_not_hold_up_metrics(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = make()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("no such bucket")

    with monkeypatch.context() as patch:
        patch.setattr(logger.experiment, "log_artifact", refuse)
        logger.log_text("text", "note.txt")
        logger.log_metrics({"reward/mean": 1.0}, step=1)
        assert not logger.flush(30)
    assert logger._log.empty and not logger._files.empty
    assert history(logger, "reward/mean") == [(1, 1.0)]
    assert logger._files.empty


def test_a_long_outage_is_caught_up_in_large_calls(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = make()
    outage = Outage(logger, monkeypatch)
    outage.on = True
    for step in range(300):
        logger.log_metrics({f"my/m{index}": float(step) for index in range(10)}, step=step)
    assert not logger.flush(30)
    outage.on, outage.calls = False, 0
    assert logger.flush(60)
    assert outage.calls <= 10  # 3000 numbers, at most 1000 a call
    assert [step for step, _ in history(logger, "my/m9")] == list(range(300))


def test_the_rest_is_sent_when_the_run_is_resumed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store stays away until the run has ended; the run goes on from iteration 3 and does 4 and 5 again."""
    first = make()
    outage = Outage(first, monkeypatch)
    for step in (1, 2, 3):
        first.log_metrics({"reward/mean": float(step)}, step=step)
    assert first.flush(30)
    outage.on = True
    for step in (4, 5):
        first.log_metrics({"reward/mean": float(step)}, step=step)
    with caplog.at_level(logging.WARNING, logger="lightning_rlhf"):
        first.finalize("success")
    assert "sent when the run is resumed" in caplog.text
    second = make(resume_from=tmp_path / "run")
    second.log_start(3)
    for step in (4, 6):
        second.log_metrics({"reward/mean": 10.0 * step}, step=step)
    assert second.run_id == first.run_id
    assert history(second, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (6, 60.0)]


def test_the_rest_follows_into_another_folder(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    Outage(first, monkeypatch).on = True
    first.log_metrics({"reward/mean": 1.0}, step=1)
    first.log_text("text", "note.txt")
    assert not first.flush(30)
    second = make("elsewhere", resume_from=tmp_path / "run")
    assert second.run_id == first.run_id
    assert history(second, "reward/mean") == [(1, 1.0)]
    assert artifact(second, "note.txt", tmp_path) == "text"
    assert first._log.empty and first._files.empty


def test_the_rest_can_be_sent_by_hand(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    with monkeypatch.context() as patch:
        Outage(first, patch).on = True
        first.log_metrics({"reward/mean": 1.0}, step=1)
        first.finalize("success")
    first._courier._routes.clear()  # the process has ended
    assert send_spooled(tmp_path / "run")
    assert stored(first).info.status == "FINISHED" and history(first, "reward/mean") == [(1, 1.0)]
    with pytest.raises(FileNotFoundError, match="no MLflow run is recorded"):
        send_spooled(tmp_path)


def test_a_half_written_last_line_is_dropped(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    Outage(first, monkeypatch).on = True
    first.log_metrics({"reward/mean": 1.0}, step=1)
    with first._log.path.open("ab") as file:
        file.write(b'{"kind": "metr')
    second = make(resume_from=tmp_path / "run")
    second.log_metrics({"reward/mean": 2.0}, step=2)
    assert history(second, "reward/mean") == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize(
    "line", [b'{"kind": "metr{"kind": "rewind", "step": 1}\n', b'{"kind": "metrics", "step": 1}\n', b'{"kind": []}\n']
)
def test_a_broken_line_fails_no_run_and_no_resume(
    make: Make, tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = make()
    first.log_metrics({"reward/mean": 1.0}, step=1)
    assert first.flush(30)
    with first._log.path.open("ab") as file:
        file.write(line)
    first.log_metrics({"reward/mean": 2.0}, step=2)
    first.finalize()
    assert stored(first).info.status == "FINISHED"
    with first._log.path.open("ab") as file:
        file.write(line)
    second = make(resume_from=tmp_path / "run")
    second.log_start(2)
    second.log_metrics({"reward/mean": 3.0}, step=3)
    assert history(second, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert second._log.broken.read_bytes() == line and "cannot be read: kept in" in caplog.text


def test_old_values_of_repeated_iterations_are_deleted(make: Make, tmp_path: Path) -> None:
    """0.61 was logged for iteration 4 by an abandoned start and is deleted; 0.535, of the resumed run, stays."""
    first = make()
    for step, value in ((1, 0.1), (2, 0.2), (3, 0.6), (4, 0.61)):
        first.log_metrics({"reward/mean": value, "my/late": value} if step > 2 else {"reward/mean": value}, step=step)
    assert first.flush(30)
    second = make(resume_from=tmp_path / "run")
    second.log_start(2)
    latest = {metric: stored(second).data.metrics.get(metric) for metric in ("reward/mean", "my/late")}
    assert latest == {"reward/mean": 0.2, "my/late": None}, "what MLflow shows in its table, too"
    for step, value in ((3, 0.3), (4, 0.535)):
        second.log_metrics({"reward/mean": value, "kl/ref": 0.1}, step=step)
    assert history(second, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.535)]
    assert history(second, "my/late") == []
    assert stored(second).data.metrics["reward/mean"] == 0.535


def test_a_server_shows_the_value_that_was_written_last(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without access to its database nothing can be deleted; equal values are not stored twice."""
    monkeypatch.setattr("lightning_rlhf.reporting.mlflow_database._engine", lambda client: None)
    first = make()
    for step, value in ((1, 0.1), (2, math.nan), (3, 0.61)):
        first.log_metrics({"reward/mean": value}, step=step)
    assert first.flush(30)
    second = make(resume_from=tmp_path / "run")
    second.log_start(1)
    for step, value in ((2, math.nan), (3, 0.535)):
        second.log_metrics({"reward/mean": value}, step=step)
    assert [step for step, _ in history(second, "reward/mean")] == [1, 2, 3, 3]
    assert stored(second).data.metrics["reward/mean"] == 0.535


def test_a_branch_is_a_child_of_the_run(make: Make, tmp_path: Path) -> None:
    first = make(experiment_name="mine")
    first.log_metrics({"reward/mean": 1.0}, step=1)
    assert first.flush(30)
    branch = make("branch", branch_from=tmp_path / "run", branch_iteration=6)
    branch.log_start(6)
    branch.log_metrics({"reward/mean": 2.0}, step=7)
    tags = stored(branch).data.tags
    assert branch.run_id != first.run_id and branch.experiment_id == first.experiment_id
    assert tags["mlflow.parentRunId"] == first.run_id
    assert tags["lightning_rlhf.branch_of"] == f"{first.run_id} at iteration 6"
    assert history(first, "reward/mean") == [(1, 1.0)] and history(branch, "reward/mean") == [(7, 2.0)]
    again = make("branch", resume_from=tmp_path / "branch", branch_from=tmp_path / "run", branch_iteration=6)
    assert again.run_id == branch.run_id


def test_a_server_that_is_down_is_said_in_a_line_and_not_at_each_attempt(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    logger = make(tracking_uri=address, flush_timeout=0.1)
    with caplog.at_level(logging.WARNING):
        logger.log_metrics({"clock/iteration": 1, "reward/mean": 1.0}, 1)
        assert not logger.flush(1.0)
        logging.getLogger("urllib3.connectionpool").warning("Retrying at %s", "/v1/judge")
    assert caplog.text.count("does not take what is logged") == 1
    assert [entry.getMessage() for entry in caplog.records if "Retrying" in entry.msg] == ["Retrying at /v1/judge"]
    assert logger.closing_lines() == [f"MLflow at {address} has not answered: the record is in {tmp_path}/run/tracking"]


def test_a_copied_folder_does_not_write_to_the_run_of_the_original(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor closes it, when it fails or is asked to send; a copy whose original is gone was moved, in effect."""
    first = make()
    for step in (1, 2, 3):
        first.log_metrics({"clock/iteration": step, "loss": step}, step)
    assert first.flush(30)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert original_of(tmp_path / "copy") == tmp_path / "run" and original_of(tmp_path / "run") is None
    with pytest.raises(InputError, match=r"copy is a copy of .*run: send the records of that folder"):
        send_spooled(tmp_path / "copy")
    end_as_failed(tmp_path / "copy", "it was killed")
    assert stored(first).info.status == "RUNNING"

    second = make("copy", resume_from=tmp_path / "copy")
    second.log_start(1)
    second.log_metrics({"clock/iteration": 2, "loss": 20.0}, 2)
    assert history(second, "loss") == [(2, 20.0)] and second.run_id != first.run_id
    assert stored(second).data.tags["mlflow.parentRunId"] == first.run_id
    assert "copy is a copy of" in caplog.text
    assert history(first, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert original_of(tmp_path / "copy") is None, "it has a run of its own now"
    third = make("copy", resume_from=tmp_path / "copy")
    third.log_start(2)
    assert third.flush(30) and third.run_id == second.run_id


def test_a_folder_that_is_moved_takes_its_store_with_it(tmp_path: Path, fresh_store: Path) -> None:
    before, now = tmp_path / "p", tmp_path / "p2"
    (before / "mlflow").mkdir(parents=True)
    shutil.copy(fresh_store, before / "mlflow" / "mlflow.db")
    first = RLMLFlowLogger(before / "outputs" / "run", store_dir=before / "mlflow", experiment_name="moved")
    first.log_metrics({"reward/mean": 1.0}, step=1)
    first.log_text("text", "note.txt")
    first.finalize()
    before.rename(now)
    mlflow.tracking._tracking_service.utils._artifact_repos_cache.clear()  # as in another process
    second = RLMLFlowLogger(now / "outputs" / "run", store_dir=now / "mlflow", resume_from=now / "outputs" / "run")
    second.log_start(1)
    second.log_metrics({"reward/mean": 2.0}, step=2)
    second.log_text("later", "later.txt")
    assert second.run_id == first.run.record.run_id and second.tracking_uri == f"sqlite:///{now}/mlflow/mlflow.db"
    assert history(second, "reward/mean") == [(1, 1.0), (2, 2.0)]
    assert artifact(second, "note.txt", tmp_path) == "text" and artifact(second, "later.txt", tmp_path) == "later"
    assert not before.exists(), "nothing is made in the old place"


def test_a_run_that_is_lost_goes_on_in_a_new_one(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run whose folder was moved without its store, and a run that was deleted."""
    first = make()
    first.log_metrics({"reward/mean": 1.0}, step=1)
    assert first.flush(30) and first.run_id is not None
    MlflowClient(first.tracking_uri).delete_run(first.run_id)
    with caplog.at_level(logging.WARNING, logger="lightning_rlhf"):
        second = make(resume_from=tmp_path / "run")
        second.log_start(1)
    assert caplog.text.count("goes on in a new run") == 1
    assert second.run_id != first.run_id
    assert stored(second).data.tags["lightning_rlhf.continues"] == first.run_id

    record = RunRecord.read(tmp_path / "run")
    assert record is not None
    record.tracking_uri = f"sqlite:///{tmp_path}/gone/mlflow.db"
    record.write(tmp_path / "run")
    third = make(resume_from=tmp_path / "run")
    assert third.run_id == second.run_id and not (tmp_path / "gone").exists(), "found in the store that is configured"


@pytest.mark.parametrize("store_is", ["database", "server"])
def test_a_lost_run_repeats_no_step_that_its_spool_still_holds(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_is: str
) -> None:
    """Steps 2 and 3 wait in the spool when the run is deleted; the resumed one does 2 and 3 again, 3 differently."""
    if store_is == "server":  # as if: nothing can be deleted
        monkeypatch.setattr("lightning_rlhf.reporting.mlflow_database._engine", lambda client: None)
    first = make()
    first.log_metrics({"reward/mean": 1.0}, step=1)
    assert first.flush(30) and first.run_id is not None
    with monkeypatch.context() as patch:
        Outage(first, patch).on = True
        for step in (2, 3):
            first.log_metrics({"reward/mean": float(step)}, step=step)
        first.finalize("failed")
    first._courier._routes.clear()  # the process has ended
    MlflowClient(first.tracking_uri).delete_run(first.run.record.run_id)
    second = make(resume_from=tmp_path / "run")
    second.log_start(1)
    for step, value in ((2, 2.0), (3, 3.5)):
        second.log_metrics({"reward/mean": value}, step=step)
    assert second.run_id != first.run.record.run_id
    assert history(second, "reward/mean") == [(2, 2.0), (3, 3.5)]
    assert stored(second).info.status == "RUNNING"


def test_a_second_run_in_the_same_folder_is_a_run_of_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    Outage(first, monkeypatch).on = True
    first.log_metrics({"reward/mean": 1.0}, step=1)
    second = make()
    second.log_metrics({"reward/mean": 2.0}, step=1)
    assert second.run_id != first.run_id
    assert history(second, "reward/mean") == [(1, 2.0)]


# --- parameters ------------------------------------------------------------------------------------------------------


def test_changed_parameters_are_tagged_on_resume(make: Make, tmp_path: Path) -> None:
    first = make()
    first.log_hyperparams({"lr": 1e-4, "seed": 1})
    first.log_hyperparams({"lr": 1e-4, "seed": 1})
    assert first.flush(30)
    second = make(resume_from=tmp_path / "run")
    second.log_hyperparams({"lr": 2e-4, "seed": 1, "new": True})
    run = stored(second)
    assert run.info.run_id == first.run_id
    assert run.data.params == {"lr": "0.0001", "seed": "1", "new": "true"}
    assert {k: v for k, v in run.data.tags.items() if k.startswith("changed/")} == {"changed/lr": "0.0001 -> 0.0002"}
    third = make(resume_from=tmp_path / "run")
    third.log_hyperparams({"lr": 2e-4})
    third.log_hyperparams({"lr": 3e-4})
    assert stored(third).data.tags["changed/lr"] == "0.0001 -> 0.0002 -> 0.0003"


def test_the_configuration_is_written_once_in_full(make: Make, tmp_path: Path) -> None:
    config = OmegaConf.create(
        {"seed": 1, "module": {"lr": 1e-4, "twice": "${seed}"}, "none": None, "flag": False, "list": [1, {"a": 2}]}
    )
    logger = make()
    logger.log_config(config)
    logger.log_hyperparams({"lr": 1e-4})  # Lightning's own call with the module's hyper-parameters
    expected = {"seed": "1", "module.lr": "0.0001", "module.twice": "1", "none": "null", "flag": "false"}
    assert stored(logger).data.params == {**expected, "list": '[1, {"a": 2}]'}
    text = artifact(logger, "config.yaml", tmp_path)
    assert OmegaConf.create(text) == OmegaConf.to_container(config, resolve=True)


def test_a_resumed_run_keeps_the_first_configuration(make: Make, tmp_path: Path) -> None:
    first = make()
    first.log_config({"lr": 1})
    assert first.flush(30)
    second = make(resume_from=tmp_path / "run")
    second.log_config({"lr": 2})
    assert artifact(second, "config.yaml", tmp_path) == "lr: 1\n"
    assert artifact(second, "config_resumed_2.yaml", tmp_path) == "lr: 2\n"


def test_parameters_stay_within_the_limits_of_the_back_end(make: Make) -> None:
    long_key = "k" * 300
    params = {f"p{index}": index for index in range(250)} | {"long": "x" * 7000, long_key: 1, long_key + "2": 2}
    logger = make()
    logger.log_hyperparams({**params, "a@b": 1, "a:b": 2})
    stored_params = stored(logger).data.params
    assert len(stored_params) == 255
    assert stored_params["p249"] == "249"
    assert stored_params["long"] == "x" * 5997 + "..."
    assert sorted(v for k, v in stored_params.items() if k.startswith("kkk")) == ["1", "2"]
    assert sorted(v for k, v in stored_params.items() if k.startswith("a_b")) == ["1", "2"]


# --- samples, checkpoints, status ------------------------------------------------------------------------------------


def test_samples_are_tables_for_mlflow(make: Make, tmp_path: Path) -> None:
    logger = make()
    rows = [{"prompt": "1 + 1", "score": 1.0}, {"prompt": "größer", "score": math.nan, "finish": "truncated"}]
    logger.log_samples(rows, iteration=12)
    logger.log_samples([{"scores": [1.0, math.nan]}], iteration=22)
    assert logger.flush(30) and logger.run_id is not None and logger.experiment_id is not None
    client = MlflowClient(logger.tracking_uri)
    table = client.load_table(logger.experiment_id, "samples/iteration_000012.json", [logger.run_id])
    assert table["prompt"].tolist() == ["1 + 1", "größer"]
    assert table["finish"].isna().tolist() == [True, False] and table["score"].isna().tolist() == [False, True]
    for iteration in (12, 22):  # a browser does not read NaN
        json.loads(artifact(logger, f"samples/iteration_0000{iteration}.json", tmp_path), parse_constant=pytest.fail)
    assert [f.path for f in client.list_artifacts(logger.run_id, "samples")] == [
        "samples/iteration_000012.json",
        "samples/iteration_000022.json",
    ]


def test_decisions_are_lines_with_their_reasons_and_a_resumed_run_has_its_own(make: Make, tmp_path: Path) -> None:
    def row(iteration: int, reason: str) -> dict[str, Any]:
        return {"verb": "stop_epochs", "reason": reason, "iteration": iteration, "update": 4 * iteration}

    logger = make()
    logger.log_decisions([row(1, "kl"), row(1, "größer")])
    logger.log_decisions([row(3, "clip fraction")])
    logger.finalize("success")
    text = artifact(logger, "decisions.jsonl", tmp_path)
    assert [json.loads(line)["reason"] for line in text.splitlines()] == ["kl", "größer", "clip fraction"]
    resumed = make(resume_from=logger.run_dir)
    resumed.log_decisions([row(3, "again")])
    assert [json.loads(line) for line in artifact(resumed, "decisions_resumed_2.jsonl", tmp_path).splitlines()] == [
        row(3, "again")
    ]


def test_the_list_of_tables_fits_its_tag() -> None:
    tag = "[]"
    for iteration in [*range(1, 201), 200]:
        tag = with_table(tag, f"samples/iteration_{iteration:06d}.json")
    paths = [table["path"] for table in json.loads(tag)]
    assert len(tag) <= 8000 and len(paths) > 100
    assert paths == [f"samples/iteration_{iteration:06d}.json" for iteration in range(201 - len(paths), 201)]


def test_a_sample_that_is_no_plain_value_is_named(make: Make) -> None:
    with pytest.raises(TypeError, match=r"samples, column 'ids': tensor\(1\)"):
        make().log_samples([{"ids": torch.tensor(1)}], iteration=1)


def test_checkpoints_are_listed_not_copied(make: Make, tmp_path: Path) -> None:
    logger = make()
    paths = ["/runs/a/iteration_000010.ckpt", "/runs/a/iteration_000020.ckpt"]
    logger.log_checkpoints(paths, latest=paths[1], best=paths[0])
    listing = json.loads(artifact(logger, "checkpoints.json", tmp_path))
    assert listing == {"latest": paths[1], "best": paths[0], "kept": paths}
    tags = stored(logger).data.tags
    assert tags["checkpoint/latest"] == paths[1] and tags["checkpoint/best"] == paths[0]


class Counting(LightningModule):
    """Logs two metrics per batch and fails where told."""

    def __init__(self, fail: BaseException | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.fail = fail

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.fail is not None and batch_idx == 2:
            raise self.fail
        self.log_dict({"reward/mean": 0.5 * batch_idx, "clock/iteration": batch_idx + 1.0})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("eval/reward_mean", 0.75, batch_size=1)


def trainer(logger: RLMLFlowLogger) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


DATA: Any = DataLoader(torch.zeros(4))


@pytest.mark.filterwarnings("ignore")
def test_a_run_through_the_lightning_trainer(make: Make) -> None:
    logger = make()
    lightning_trainer, module = trainer(logger), Counting()
    lightning_trainer.validate(module, DATA, verbose=False)
    assert stored(logger).info.status == "FINISHED"
    lightning_trainer.fit(module, DATA, DATA)
    assert history(logger, "reward/mean") == [(1, 0.0), (2, 0.5), (3, 1.0), (4, 1.5)]
    assert [value for _, value in history(logger, "eval/reward_mean")] == [0.75, 0.75]
    assert stored(logger).info.status == "FINISHED"
    assert lightning_trainer.log_dir == str(logger.run_dir)


@pytest.mark.filterwarnings("ignore")
def test_a_failed_run_says_why_and_a_resumed_one_runs_again(make: Make, tmp_path: Path) -> None:
    first = make()
    with pytest.raises(RuntimeError, match="loss is"):
        trainer(first).fit(Counting(RuntimeError("loss is\nnot finite")), DATA)
    run = stored(first)
    assert run.info.status == "FAILED" and run.data.tags["failure"] == "RuntimeError: loss is not finite"
    assert "in training_step" in artifact(first, "failure.txt", tmp_path)
    second = make(resume_from=tmp_path / "run")
    second.log_metrics({"my/a": 1.0}, step=1)
    run = stored(second)
    assert run.info.status == "RUNNING"
    assert "failure" not in run.data.tags and run.data.tags["previous_failure"] == "RuntimeError: loss is not finite"
    second.finalize("success")
    assert stored(second).info.status == "FINISHED"


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_run_has_status_killed(make: Make) -> None:
    logger = make()
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer(logger).fit(Counting(KeyboardInterrupt()), DATA)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stored(logger).info.status == "KILLED"


def test_logging_after_the_end_opens_the_run_again(make: Make) -> None:
    logger = make()
    logger.log_metrics({"my/a": 1.0}, step=1)
    logger.finalize("success")
    assert stored(logger).info.status == "FINISHED"
    logger.log_metrics({"my/a": 1.0}, step=2)
    assert stored(logger).info.status == "RUNNING"


# --- which run, which store ------------------------------------------------------------------------------------------


def test_only_rank_0_writes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = make()
    _ = logger.experiment
    logger.log_metrics({"reward/mean": 1.0}, step=1)
    logger.log_config({"lr": 1})
    logger.log_samples([{"a": 1}], 1)
    logger.finalize("success")
    assert logger.run_id is None and not logger.run_dir.exists()
    assert MlflowClient(logger.tracking_uri).get_experiment_by_name("lightning_rlhf") is None


def test_runs_of_one_seed_have_names_of_their_own_and_leave_the_random_state_alone(make: Make) -> None:
    names = []
    for _ in range(2):
        random.seed(1)
        before = random.getstate()
        logger = make("2026-01-31/12-00-00")
        names.append(stored(logger).info.run_name)
        assert random.getstate() == before
        logger.finalize("success")
        shutil.rmtree(logger.run_dir)
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"2026-01-31/12-00-00-[0-9a-f]{4}", name) for name in names), names


def test_the_default_store_is_a_database_with_artifacts_beside_it(make: Make, store: Path, tmp_path: Path) -> None:
    logger = make(run_name="first try", tags={"purpose": "test"})
    run = stored(logger)
    assert logger.tracking_uri == f"sqlite:///{store}/mlflow.db"
    assert logger.ui_command == f"mlflow ui --backend-store-uri sqlite:///{store}/mlflow.db"
    assert run.info.artifact_uri.startswith((store / "artifacts").as_uri())
    assert run.info.run_name == "first try" and run.data.tags["purpose"] == "test"
    record = RunRecord.read(tmp_path / "run")
    assert record is not None and record.run_id == logger.run_id and record.starts == 1
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert mlflow.telemetry.get_telemetry_client() is None


def test_the_environment_names_the_store_unless_told_otherwise(
    make: Make, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    assert make().tracking_uri == "http://localhost:1"
    assert make(tracking_uri=f"sqlite:///{store}/mlflow.db").tracking_uri.startswith("sqlite")


def test_the_store_of_one_run_is_not_taken_for_the_users_choice_by_the_next(make: Make, tmp_path: Path) -> None:
    first = make()
    first.log_metrics({"my/a": 1.0}, step=1)
    assert first.flush(30) and "MLFLOW_TRACKING_URI" not in os.environ
    assert RLMLFlowLogger(tmp_path / "next", store_dir=tmp_path / "other").tracking_uri.endswith("other/mlflow.db")


def test_a_plain_folder_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"tracking_uri = 'file:\./mlruns' is not allowed: .*sqlite:///FILE"):
        make(tracking_uri="file:./mlruns")


def test_a_run_that_does_not_exist_is_refused(make: Make) -> None:
    with pytest.raises(MlflowException, match="0123456789abcdef"):
        make(run_id="0123456789abcdef").log_metrics({"my/a": 1.0}, step=1)


def test_resuming_a_folder_without_a_run_starts_a_new_one(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_rlhf"):
        logger = make(resume_from=tmp_path / "nothing")
    assert "no MLflow run is recorded" in caplog.text and logger.run_id is not None


def test_a_run_whose_creation_lost_its_answer_is_found_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = make()
    create = logger._mlflow_client.create_run

    def lost(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(logger._mlflow_client, "create_run", create)
        create(*args, **kwargs)
        raise MlflowException("answer lost")

    monkeypatch.setattr(logger._mlflow_client, "create_run", lost)
    logger.log_metrics({"reward/mean": 1.0}, step=1)
    assert history(logger, "reward/mean") == [(1, 1.0)]
    assert logger.experiment_id is not None
    assert len(MlflowClient(logger.tracking_uri).search_runs([logger.experiment_id])) == 1


KILLED = """
    import os, signal, sys
    from lightning_rlhf.reporting import RLMLFlowLogger
    logger = RLMLFlowLogger(sys.argv[1], store_dir=sys.argv[2])
    logger.log_metrics({"reward/mean": 1.0, "clock/iteration": 1})
    assert logger.flush(300)
    logger.log_metrics({"reward/mean": 2.0, "clock/iteration": 2})
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_whose_process_was_killed_is_ended_by_another(tmp_path: Path, store: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "run"), str(store)]
    assert subprocess.run(command, check=False, timeout=300).returncode == -signal.SIGKILL
    record = RunRecord.read(tmp_path / "run")
    assert record is not None and record.run_id is not None
    client = MlflowClient(record.tracking_uri)
    assert client.get_run(record.run_id).info.status == "RUNNING"
    end_as_failed(tmp_path / "run", "process 1 of 2 ended with signal 9")
    run = client.get_run(record.run_id)
    assert run.info.status == "FAILED" and run.info.end_time >= run.info.start_time
    assert run.data.tags["failure"] == "process 1 of 2 ended with signal 9"
    assert [m.value for m in client.get_metric_history(record.run_id, "reward/mean")] == [1.0, 2.0], "sent now"

    end_as_failed(tmp_path / "run", "another reason")
    again = client.get_run(record.run_id)
    assert again.data.tags == run.data.tags and again.info.end_time == run.info.end_time, "it had ended already"
    end_as_failed(tmp_path / "nothing", "no run is recorded there")
    assert not (tmp_path / "nothing").exists()


FRESH = """
    import sys
    from lightning_rlhf.reporting import RLMLFlowLogger
    print("ready", flush=True)
    sys.stdin.readline()
    logger = RLMLFlowLogger(sys.argv[1], store_dir=sys.argv[2])
    logger.log_metrics({"reward/mean": 1.0}, step=1)
    logger.finalize("success")
    print(logger.run_id)
"""


@pytest.mark.slow
def test_two_processes_create_one_fresh_store(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FRESH)]
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen([*command, str(tmp_path / name), str(tmp_path)], text=True, env=environment, **pipes)
        for name in ("a", "b")
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    for output, _ in outputs:
        run = client.get_run(output.strip())
        assert run.data.metrics == {"reward/mean": 1.0} and run.info.status == "FINISHED"


class Server:
    """A tracking server in its own process group, so that it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).read()
                return
            except OSError:
                assert self.process.poll() is None, (self.folder / "server.log").read_text()[-3000:]
                time.sleep(0.2)
        raise TimeoutError("the tracking server did not start")

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path, fresh_store: Path) -> Iterator[Server]:
    shutil.copy(fresh_store, tmp_path / "server.db")
    server = Server(tmp_path)
    yield server
    server.kill()


@pytest.mark.slow
def test_a_real_server_that_is_late_and_gets_killed(server: Server, tmp_path: Path) -> None:
    """Down at the start, up, killed, up again: training never waits, and the store holds each number once."""
    logger = RLMLFlowLogger(tmp_path / "run", tracking_uri=server.uri, retry_seconds=0.2)
    logger.log_config({"lr": 1e-4})
    for step in range(10):
        logger.log_metrics({"reward/mean": float(step)}, step=step)
    assert logger.run_id is None
    server.start()
    assert logger.flush(60)
    for step in range(10, 60):
        logger.log_metrics({"reward/mean": float(step)}, step=step)
        if step == 30:
            server.kill()
    logger.log_samples([{"prompt": "1 + 1"}], iteration=60)
    assert not logger.flush(60)
    server.start()
    logger.finalize("success")
    assert logger.flush(60)
    assert history(logger, "reward/mean") == [(step, float(step)) for step in range(60)]
    run = stored(logger)
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.0001"}
    assert "1 + 1" in artifact(logger, "samples/iteration_000060.json", tmp_path)
    assert logger.experiment_id is not None
    assert len(MlflowClient(server.uri).search_runs([logger.experiment_id])) == 1


FULL_DISK = """
import resource, sys
from pathlib import Path
from lightning_rlhf.reporting import RLMLFlowLogger

folder = Path(sys.argv[1])
logger = RLMLFlowLogger(folder / "run", store_dir=folder, retry_seconds=1000)
logger.log_metrics({"reward/mean": 1.0}, 1)
assert logger.flush(60)
half = (folder / "mlflow.db").stat().st_size // 2
resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))  # a disk that takes no more
for step in (2, 3, 4):
    logger.log_metrics({"reward/mean": 1.0}, step)
    print("arrived", logger.flush(60))
"""


def test_a_full_disk_is_one_line_and_no_traceback_of_the_database(tmp_path: Path, fresh_store: Path) -> None:
    shutil.copy(fresh_store, tmp_path / "mlflow.db")
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:3] == ["arrived False"] * 3, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and "disk I/O error). Training goes on; nothing is lost" in lines[0], done.stderr
    assert "SQL:" not in lines[0]


FULL_RUN_FOLDER = """
import resource, sys
from pathlib import Path
from lightning_rlhf.reporting import RLMLFlowLogger

folder, away = Path(sys.argv[1]), sys.argv[2] == "away"
logger = RLMLFlowLogger(folder / "run", store_dir=folder, retry_seconds=1000)
logger.log_decisions([{"iteration": 1}])
logger.log_metrics({"reward/mean": 1.0}, 1)
assert logger.flush(60)
send = logger.run.ensure

def refuse():
    raise ConnectionError("refused")

logger.run.ensure = refuse
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # a disk that takes no more
for step in (2, 3):
    logger.log_metrics({"reward/mean": float(step)}, step)
    logger.log_decisions([{"iteration": step}])
if away:  # until the end
    logger.finalize()
else:
    assert not logger.flush(60)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    logger.run.ensure = send
    logger.finalize()
"""


@pytest.mark.parametrize("until", ["back", "away"])
def test_a_full_disk_beside_a_server_that_is_away(make: Make, tmp_path: Path, store: Path, until: str) -> None:
    """Nothing raises; what waits in memory arrives, or the last line says what is lost."""
    command = [sys.executable, "-c", FULL_RUN_FOLDER, str(tmp_path), until]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert sum("cannot be written (OSError: [Errno 27] File too large" in line for line in said) == 1, done.stderr
    if until == "away":
        lost = "metrics of iterations 2 to 3, 1 status, 2 file, decisions.jsonl"
        assert said[-1] == f"{tmp_path}/run/tracking takes no more: lost if this process ends now: {lost}"
        return
    assert "nothing was lost" in said[-1] or "nothing was lost" in said[-2], done.stderr
    logger = make(resume_from=tmp_path / "run", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert history(logger, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert artifact(logger, "decisions.jsonl", tmp_path).count("\n") == 3


def test_a_text_that_the_disk_does_not_take_is_sent_from_memory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = make()
    logger.log_decisions([{"iteration": 1}])
    assert logger.flush(30)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lightning_rlhf.reporting.mlflow_delivery.write_whole", full)
        logger.log_decisions([{"iteration": 2}])
        logger.log_text("new", "folder/new.txt")
        assert artifact(logger, "folder/new.txt", tmp_path) == "new"
        logger.log_decisions([{"iteration": 3}])
        assert artifact(logger, "decisions.jsonl", tmp_path).count("iteration") == 3
    logger.log_decisions([{"iteration": 4}])
    assert artifact(logger, "decisions.jsonl", tmp_path).count("iteration") == 4
    assert logger.run.in_memory([]) == "", "and on disk as soon as that works"


def test_a_store_that_is_no_database_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"no database" * 1000)
    with pytest.raises(
        ValueError, match=r"^the MLflow store sqlite:///.*mlflow\.db cannot be opened: .*not a database$"
    ):
        RLMLFlowLogger(tmp_path / "run", store_dir=tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"key": 1}'])
def test_a_damaged_record_of_the_run_is_named(
    make: Make, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run" / "tracking" / "run.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(InputError, match=r"run.json cannot be read: [^\n]* a new run in MLflow"):
        make(resume_from=tmp_path / "run")
    end_as_failed(tmp_path / "run", "killed")
    assert "not marked as failed" in caplog.text and file.read_text() == content
