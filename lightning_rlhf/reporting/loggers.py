"""Loggers of a run: any number of them, each a named block of the configuration.

Every Lightning logger can be used. Beside metrics it gets what it defines a method for:

* ``log_start(iteration)``: training continues after this iteration; earlier records of later iterations are void.
* ``log_config(config)``: the resolved configuration, in place of ``log_hyperparams`` with its flattened keys.
* ``log_samples(rows, iteration)``, ``log_table(rows, iteration, name)``, ``log_decisions(rows)``: tables;
  ``log_file(path, folder)``: a figure.
* ``log_checkpoints(paths, latest=..., best=...)``: the checkpoints that exist.
* ``closing_lines()``: lines for the terminal that say where the record is.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from lightning_rlhf.bounds import bounded
from lightning_rlhf.files import as_file, ensure_line_end, replaced, write_whole

log = logging.getLogger(__name__)

Ability = Literal[
    "log_start", "log_tags", "log_samples", "log_table", "log_decisions", "log_file", "log_checkpoints", "closing_lines"
]
"""Optional methods of a logger beside those of Lightning's; see the head of this file."""


def tell(loggers: Iterable[Logger], what: Ability, *arguments: Any, **options: Any) -> list[Any]:
    """Call the method ``what`` of every logger that has it, and return the results."""
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
    """The blocks of ``logger`` by name; a single block without a name is named after its class."""
    if not loggers:
        return {}
    if "_target_" in loggers:
        name = {MLFLOW: "mlflow"}.get(str(loggers["_target_"]), str(loggers["_target_"]).rpartition(".")[2].lower())
        return {name: dict(loggers)}
    return {name: block for name, block in loggers.items() if block is not None}


def tracked(loggers: Mapping[str, Any] | None, **options: Any) -> dict[str, Any]:
    """The blocks of ``logger`` with options set in those of MLflow, which say how the tracked run continues."""
    return {
        name: block | options if isinstance(block, dict) and block.get("_target_") == MLFLOW else block
        for name, block in blocks_of(loggers).items()
    }


# --- the others ------------------------------------------------------------------------------------------------------


class RunCSVLogger(CSVLogger):
    """Lightning's CSV logger for resumed runs: rows up to the iteration where training continues are kept.

    The file is never without them: to rewrite it, a new file is written completely and then replaces it.

    Raises:
        SettingError: ``flush_logs_every_n_steps`` is no whole number from 1 on.
        FolderInPlaceError: a folder has the name of one of its files.
    """

    _goes_on = False

    def __init__(
        self,
        save_dir: str | Path,
        *,
        name: str = "metrics",
        version: int | str | None = "",
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        bounded("logger.csv", at_least=1, whole=True, flush_logs_every_n_steps=flush_logs_every_n_steps)
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)
        written = (ExperimentWriter.NAME_METRICS_FILE, ExperimentWriter.NAME_HPARAMS_FILE)
        for file in (*(Path(self.log_dir) / each for each in written), self._decisions):
            as_file(file)

    @rank_zero_only
    def log_start(self, iteration: int) -> None:
        """Keep the rows of earlier starts up to this iteration; Lightning's logger would delete them."""
        self._goes_on = True
        self.experiment.keep(iteration)
        with suppress(FileNotFoundError):
            ensure_line_end(self._decisions)
            lines = self._decisions.read_text(encoding="utf-8").splitlines(keepends=True)
            write_whole(self._decisions, "".join(line for line in lines if _made_by(iteration, line)))

    @rank_zero_only
    def log_decisions(self, rows: list[dict[str, Any]]) -> None:
        """Append the callbacks' decisions in one iteration, with reasons, to ``decisions.jsonl`` beside the metrics."""
        _ = self.experiment  # creates the folder
        with self._decisions.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def closing_lines(self) -> list[str]:
        """Where the metrics are."""
        return [f"metrics of all iterations:\n  {Path(self.log_dir).absolute() / 'metrics.csv'}"]

    @property
    def decisions_place(self) -> str:
        """Where the decisions are, in words: their file, relative to the run's folder."""
        return os.path.relpath(self._decisions, self.save_dir)

    @property
    def _decisions(self) -> Path:
        return Path(self.log_dir) / "decisions.jsonl"

    @property
    @rank_zero_experiment
    def experiment(self) -> _Rows:
        """The writer of the file."""
        if self._experiment is None:
            self._experiment = _Rows(self.log_dir, goes_on=self._goes_on)
        return cast(_Rows, self._experiment)


def _made_by(iteration: int, line: str) -> bool:
    """Whether this line is complete and is a decision of an iteration up to this one."""
    try:
        return int(json.loads(line)["iteration"]) <= iteration
    except ValueError:
        return False


class _Rows(ExperimentWriter):
    """Lightning's writer, but instead of rewriting the file in place it writes a new one and replaces it."""

    def __init__(self, log_dir: str, *, goes_on: bool) -> None:
        self._goes_on = goes_on
        super().__init__(log_dir)

    def keep(self, iteration: int) -> None:
        """Remove the rows of later iterations, and a last row that a killed process has half written."""
        columns, rows = self._written()
        self.metrics_keys = columns
        if columns:
            self._replace([row for row in rows if int(row["step"]) <= iteration])

    def _check_log_dir_exists(self) -> None:
        """Move the files of an earlier run, or start without a checkpoint, aside; Lightning's writer deletes them."""
        folder = Path(self.log_dir)
        found = [path for path in folder.glob("*") if path.is_file()]
        if self._goes_on or not found:
            return
        aside = next(path for number in count(1) if not (path := folder / f"earlier_{number}").exists())
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
        log.warning("%s held what an earlier start had measured: it is in %s now", folder, aside)

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._replace(self._written()[1])  # metrics_keys has the new names

    def _written(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and complete rows of the file; nothing if there is no file or no complete header."""
        file = Path(self.metrics_file_path)
        text = file.read_bytes().decode("utf-8", "replace") if file.exists() else ""
        reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
        return list(reader.fieldnames or []), list(reader)

    def _replace(self, rows: list[dict[str, str]]) -> None:
        with replaced(Path(self.metrics_file_path)) as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)


class RunTensorBoardLogger(TensorBoardLogger):
    """Lightning's TensorBoard logger for resumed runs: TensorBoard hides the old values of repeated iterations."""

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

    def closing_lines(self) -> list[str]:
        """The command that shows the run in a browser."""
        return [f"to look at it:\n  tensorboard --logdir {shlex.quote(str(Path(self.log_dir).absolute()))}"]

    @rank_zero_only
    def log_start(self, iteration: int) -> None:
        """Tell TensorBoard to ignore later steps of earlier event files."""
        self._kwargs["purge_step"] = iteration + 1

    @rank_zero_only
    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log hyper-parameters for TensorBoard's page, without the placeholder metric that Lightning would add."""
        from torch.utils.tensorboard.summary import hparams

        values = dict(_leaves(config, ""))
        self.log_hyperparams(values)
        shown = {k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for k, v in values.items()}
        for summary in hparams(shown, {}):
            self.experiment._get_file_writer().add_summary(summary)


class RunWandbLogger(WandbLogger):
    """Lightning's W&B logger, with an error that says what to install."""

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
