"""Loggers of a run: any number of them, named blocks of the configuration, and what they may be told.

Every logger of Lightning can be one. Beside numbers it is told what it has a method for:

* ``log_start(iteration)``: training goes on behind this iteration; what was recorded of later ones is void.
* ``log_config(config)``: the resolved configuration, in place of ``log_hyperparams`` with its flattened keys.
* ``log_samples(rows, iteration)``, ``log_decisions(rows)``: tables; ``log_file(path, folder)``: a figure.
* ``log_checkpoints(paths, latest=..., best=...)``: the checkpoints that exist.
* ``closing_lines()``: where the record is, for the terminal.
"""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

Ability = Literal["log_start", "log_samples", "log_decisions", "log_file", "log_checkpoints", "closing_lines"]
"""What a logger may have a method for, beside what Lightning's have; see the head of this file."""


def tell(loggers: Iterable[Logger], what: Ability, *arguments: Any, **options: Any) -> list[Any]:
    """Call the method ``what`` of every logger that has it; what they returned."""
    methods = [getattr(logger, what, None) for logger in loggers]
    return [method(*arguments, **options) for method in methods if method is not None]


def log_config(loggers: Iterable[Logger], config: Mapping[str, Any]) -> None:
    """Give every logger the whole configuration, under the dotted keys of overrides."""
    for logger in loggers:
        if hasattr(logger, "log_config"):
            logger.log_config(config)
        else:
            logger.log_hyperparams(dict(_leaves(config, "")))


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# --- in the configuration --------------------------------------------------------------------------------------------

MLFLOW = "lightning_rlhf.reporting.RLMLFlowLogger"


def blocks_of(loggers: Mapping[str, Any] | None) -> dict[str, Any]:
    """The blocks of ``logger`` by name; a single block without a name gets that of its class."""
    if not loggers:
        return {}
    if "_target_" in loggers:
        name = {MLFLOW: "mlflow"}.get(str(loggers["_target_"]), str(loggers["_target_"]).rpartition(".")[2].lower())
        return {name: dict(loggers)}
    return {name: block for name, block in loggers.items() if block is not None}


def tracked(loggers: Mapping[str, Any] | None, **options: Any) -> dict[str, Any]:
    """The blocks of ``logger`` with options set in those of MLflow: how the tracked run goes on."""
    return {
        name: block | options if isinstance(block, dict) and block.get("_target_") == MLFLOW else block
        for name, block in blocks_of(loggers).items()
    }


# --- the others ------------------------------------------------------------------------------------------------------


class RunCSVLogger(CSVLogger):
    """Lightning's, for runs that go on: the rows that were written before stay, up to where training continues."""

    def __init__(
        self,
        save_dir: str | Path,
        *,
        name: str = "metrics",
        version: int | str | None = "",
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)

    @rank_zero_only
    def log_start(self, iteration: int) -> None:
        """Keep the rows of earlier starts up to this iteration, which Lightning's logger would delete."""
        file = Path(self.log_dir) / "metrics.csv"
        rows: list[dict[str, str]] = []
        if file.exists():
            with file.open(encoding="utf-8", newline="") as written:
                rows = list(csv.DictReader(written))
            file.unlink()
        with warnings.catch_warnings():  # what Lightning says it will delete is in `rows`
            warnings.filterwarnings("ignore", message=r"Experiment logs directory .* exists and is not empty")
            _ = self.experiment.metrics
        for row in rows:
            step = int(row.pop("step"))
            if step <= iteration:
                self.experiment.log_metrics({name: float(value) for name, value in row.items() if value}, step)
        self.save()


class RunTensorBoardLogger(TensorBoardLogger):
    """Lightning's, for runs that go on: TensorBoard hides what was recorded of iterations that are done again."""

    def __init__(
        self,
        save_dir: str,
        *,
        name: str = "tensorboard",
        version: int | str | None = "",
        default_hp_metric: bool = False,
        **options: Any,
    ) -> None:
        try:
            super().__init__(save_dir, name, version, default_hp_metric=default_hp_metric, **options)
        except ModuleNotFoundError as error:
            raise ImportError(f'needs TensorBoard: pip install "lightning-rlhf[tensorboard]" ({error})') from error

    @rank_zero_only
    def log_start(self, iteration: int) -> None:
        """Later steps of earlier event files are void."""
        self._kwargs["purge_step"] = iteration + 1

    @rank_zero_only
    def log_config(self, config: Mapping[str, Any]) -> None:
        """Hyper-parameters, for the page of that name, without the metric that Lightning would add to show them."""
        from torch.utils.tensorboard.summary import hparams

        values = dict(_leaves(config, ""))
        self.log_hyperparams(values)
        shown = {k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for k, v in values.items()}
        for summary in hparams(shown, {}):
            self.experiment._get_file_writer().add_summary(summary)


class RunWandbLogger(WandbLogger):
    """Lightning's, with an error that says what to install."""

    def __init__(
        self,
        save_dir: str,
        *,
        project: str = "lightning_rlhf",
        name: str | None = None,
        offline: bool = False,
        id: str | None = None,  # W&B's word
        log_model: bool = False,
        **options: Any,
    ) -> None:
        own: dict[str, Any] = {"project": project, "name": name, "offline": offline, "id": id, "log_model": log_model}
        try:
            super().__init__(save_dir=save_dir, **own, **options)
        except ModuleNotFoundError as error:
            raise ImportError(f'needs Weights & Biases: pip install "lightning-rlhf[wandb]" ({error})') from error
