"""Several loggers at once, and those beside MLflow: hyper-parameters, one step axis, and resumed runs."""

from __future__ import annotations

import csv
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlhf import cli, schema
from lightning_rlhf.assembly import make_trainer
from lightning_rlhf.reporting import RLMLFlowLogger, RunCSVLogger, blocks_of, tell, tracked

TINY = [
    "warmup=none",
    "model.source.hidden_size=32",
    "model.source.layers=1",
    "model.source.heads=2",
    "data.prompts_per_iteration=4",
    "data.validation=null",
    "module.update.minibatch_size=4",
    "module.update.epochs=1",
    "threads=1",
    "trainer.enable_progress_bar=false",
]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_and_tensorboard_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Both have every hyper-parameter and the same numbers for the same iterations, before and after."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = [*TINY, "logger=[csv,tensorboard]", "hydra.run.dir=run", "callbacks.checkpoint.every_n_iterations=1"]
    assert cli.main(["train", *words, "iterations=3", "callbacks.checkpoint.keep=null"]) == 0
    said = capsys.readouterr().out
    assert f"\n  {tmp_path}/run/metrics/metrics.csv\n" in said
    assert f"to look at it:\n  tensorboard --logdir {tmp_path}/run/tensorboard\n" in said
    first = rows(tmp_path / "run")
    again = ["resume=run/checkpoints/iteration_000002.ckpt", "hydra.run.dir=run", "branch=false"]
    assert cli.main(["train", *again, "iterations=4"]) == 0

    kept = [row for row in rows(tmp_path / "run") if row["reward/mean"]]
    assert [int(row["step"]) for row in kept] == [1, 2, 3, 4] == [int(float(row["clock/iteration"])) for row in kept]
    same = ("reward/mean", "kl/ref", "time/iteration", "lr/actor")
    assert [{name: float(row[name]) for name in same} for row in kept[:2]] == [
        {name: float(row[name]) for name in same} for row in first if row["reward/mean"] and int(row["step"]) < 3
    ]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    board = {
        name: [(event.step, event.value) for event in events.Scalars(name)] for name in ("reward/mean", "lr/actor")
    }
    for name, values in board.items():
        expected = [(int(row["step"]), float(row[name])) for row in kept]
        assert values == [(step, pytest.approx(value)) for step, value in expected]
    config = dict(schema.flatten(yaml.safe_load((tmp_path / "run" / ".hydra" / "start_2" / "config.yaml").read_text())))
    for place in ("metrics", "tensorboard"):
        logged = yaml.safe_load((tmp_path / "run" / place / "hparams.yaml").read_text())
        assert logged.keys() == config.keys() and logged["module.actor.lr"] == config["module.actor.lr"]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_a_csv_logger_that_goes_on_keeps_its_rows_and_warns_of_no_loss(tmp_path: Path) -> None:
    def logger() -> RunCSVLogger:
        return RunCSVLogger(str(tmp_path), name="metrics", version="")

    first = logger()
    for step in (1, 2, 3):
        first.log_metrics({"reward/mean": step / 2}, step)
    first.save()
    (tmp_path / "metrics" / "hparams.yaml").write_text("seed: 1", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger().log_start(2)
    assert [(row["step"], row["reward/mean"]) for row in rows(tmp_path)] == [("1", "0.5"), ("2", "1.0")]


def test_a_csv_logger_that_begins_anew_keeps_what_lay_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run in the folder of another one without checkpoints; a start again after one that had none yet."""
    for number in (1, 2, 3):
        logger = RunCSVLogger(str(tmp_path), name="metrics", version="")
        logger.log_metrics({"reward/mean": number / 2}, number)
        logger.log_decisions([{"iteration": number, "reason": "x"}])
        logger.save()
    folder = tmp_path / "metrics"
    for place, number in ((folder / "earlier_1", 1), (folder / "earlier_2", 2), (folder, 3)):
        assert f"{number / 2}" in (place / "metrics.csv").read_text() and (place / "decisions.jsonl").is_file()
    assert [row["step"] for row in rows(tmp_path)] == ["3"]
    assert f"{folder} held what an earlier start had measured: it is in {folder}/earlier_1 now" in caplog.text


def test_a_csv_file_is_never_without_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the file is rewritten, at a resume or for a new column: the old rows are still there."""

    def logger() -> RunCSVLogger:
        return RunCSVLogger(str(tmp_path), name="metrics", version="")

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    first = logger()
    for step in (1, 2, 3):
        first.log_metrics({"reward/mean": step / 2}, step)
        first.save()
    first.log_decisions([{"iteration": step, "reason": "größer"} for step in (1, 2, 3)])
    monkeypatch.setattr(csv.DictWriter, "writerows", killed)
    again = logger()
    with pytest.raises(Killed):
        again.log_start(2)
    with pytest.raises(Killed):
        first.log_metrics({"eval/reward_mean": 1.0}, 3)
        first.save()
    monkeypatch.undo()
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]
    assert sorted(path.name for path in (tmp_path / "metrics").iterdir()) == ["decisions.jsonl", "metrics.csv"]
    assert first.decisions_place == "metrics/decisions.jsonl"

    with (tmp_path / "metrics" / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write("2.2")  # half of a row
    with (tmp_path / "metrics" / "decisions.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"iterat')
    again = logger()
    again.log_start(2)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"]
    again.log_decisions([{"iteration": 3, "reason": "anew"}])
    again.log_metrics({"reward/mean": 5.0, "kl/ref": 0.5}, 3)
    again.save()
    assert [(row["step"], row["reward/mean"], row["kl/ref"]) for row in rows(tmp_path)] == [
        ("1", "0.5", ""),
        ("2", "1.0", ""),
        ("3", "5.0", "0.5"),
    ]
    lines = (tmp_path / "metrics" / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["größer", "größer", "anew"]


def test_two_loggers_by_name(compose: Any, tmp_path: Path, fresh_store: Path) -> None:
    config = schema.check(
        compose("logger=[mlflow,csv]", "logger.csv.name=numbers", f"logger.mlflow.store_dir={tmp_path}")
    )
    assert [type(logger).__name__ for logger in make_trainer(config).loggers] == ["RLMLFlowLogger", "RunCSVLogger"]
    config = schema.check(compose("logger=[mlflow,csv]", "logger.mlflow=null"))
    assert [type(logger).__name__ for logger in make_trainer(config).loggers] == ["RunCSVLogger"]
    assert make_trainer(schema.check(compose("logger=none"))).loggers == []


def test_a_block_without_a_name_is_one_logger() -> None:
    """The form in configurations and checkpoints of earlier releases."""
    block = {"_target_": "lightning_rlhf.reporting.RLMLFlowLogger", "run_dir": "r"}
    assert blocks_of(block) == {"mlflow": block}
    assert tracked(block, resume_from="x") == {"mlflow": block | {"resume_from": "x"}}
    assert blocks_of({"_target_": "my.Logger"}) == {"logger": {"_target_": "my.Logger"}}
    assert blocks_of(None) == blocks_of({"mlflow": None}) == {}


def test_each_logger_gets_what_it_has_a_method_for(tmp_path: Path, fresh_store: Path) -> None:
    class Mine:
        def log_samples(self, rows: list, iteration: int) -> str:
            return f"{len(rows)} in {iteration}"

    loggers: Any = [Mine(), object()]
    assert tell(loggers, "log_samples", [{}, {}], 3) == ["2 in 3"]


def test_wandb_names_the_package_to_install(compose: Any) -> None:
    if "wandb" in sys.modules or __import__("importlib.util").util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    with pytest.raises(schema.InputError, match=r'logger\.wandb: .*pip install "lightning-rlhf\[wandb\]"'):
        make_trainer(schema.check(compose("logger=wandb")))


def test_a_logger_that_is_not_a_block_is_refused(compose: Any) -> None:
    with pytest.raises(schema.ConfigError, match=r"logger\.csv"):
        schema.check(compose("logger=csv", "~logger.csv._target_"))
    assert RLMLFlowLogger.__name__ in str(compose("logger=mlflow").logger.mlflow._target_)
