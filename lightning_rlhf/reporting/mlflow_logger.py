"""MLflow logging that never stops training and never loses a number.

Every record first goes into a spool file in the run's folder; a background thread sends it. A tracking
server that is down, or a locked database, only delays the records.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import uuid
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.mlflow import MLFlowLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from lightning_rlhf import passwords
from lightning_rlhf.errors import InputError
from lightning_rlhf.interruption import from_signal
from lightning_rlhf.metrics import names
from lightning_rlhf.reporting.mlflow_address import (
    address,
    branch_tags,
    creation_lock,
    earlier_run,
    name_from,
    opening,
    original_of,
    quiet_mlflow,
    store_of,
    unless_copied,
    where_it_is,
)
from lightning_rlhf.reporting.mlflow_database import artifacts_beside
from lightning_rlhf.reporting.mlflow_delivery import (
    FOLDER,
    LONGEST_TAG,
    RunRecord,
    TrackedRun,
    cut,
    fit_key,
    is_record,
)
from lightning_rlhf.reporting.mlflow_values import flattened, now_ms, number, plain, table
from lightning_rlhf.reporting.spool import Courier, Deliver, Spool

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)


class RLMLFlowLogger(MLFlowLogger):
    """Lightning's MLflow logger for long runs.

    * The store is a local sqlite file unless a server is named; two runs may create it at the same moment.
    * One call per iteration, sent in the background. The step axis is ``clock/iteration`` where it is among the
      metrics, Lightning's step otherwise. NaN stays NaN; an infinity becomes MLflow's largest number, 1.797e308.
    * Metrics in the kit's groups must be registered (:mod:`lightning_rlhf.metrics.names`); other names are yours.
    * Parameters have one writer: once :meth:`log_config` was called, :meth:`log_hyperparams` does nothing. A value
      that differs on resume leaves the parameter and sets the tag ``changed/<key>`` to ``old -> new``.
    * A resumed run continues under the same run id. Old values of repeated iterations are deleted if the store is a
      database; a server cannot delete, so it gets the new values after the old ones, and shows the new ones.
      Values equal to the old ones are not recorded twice.
    * A branch is a separate MLflow run: a child of the original run (``mlflow.parentRunId``) with the tag
      ``lightning_rlhf.branch_of``, which names that run and the iteration.
    * If a folder was moved together with its store, the store is found in the new place. If the run cannot be found,
      a new one is started, with the tag ``lightning_rlhf.continues``.
    * Status: FINISHED; FAILED with the reason in the tag ``failure`` and the artifact ``failure.txt``; KILLED.

    Args:
        run_dir: folder of this run; spools and files still to be sent are in ``run_dir/tracking``.
        experiment_name: MLflow experiment, created if needed.
        run_name: name of a new run; ``None``: the last two folders of ``run_dir`` and four random characters.
        tracking_uri: ``http://...``, ``sqlite:///...``; ``None``: that of the resumed run, else the
            environment's ``MLFLOW_TRACKING_URI``, else the sqlite file ``mlflow.db`` in ``store_dir``.
        store_dir: folder of that file and of the artifacts beside it.
        resume_from: folder of the run to continue (often ``run_dir`` itself); records it could not send are sent now.
        branch_from: folder of the run that this one is a branch of.
        branch_iteration: the iteration after which it branches off.
        run_id: id of an MLflow run to continue whose folder is not available.
        tags: of a new run.
        flush_timeout: seconds to wait at the end for records still being sent.
        retry_seconds: first wait after a failed attempt; it doubles up to a minute.

    Raises:
        ValueError: the tracking URI is a plain folder, which MLflow no longer accepts.
    """

    decisions_place = "decisions*.jsonl (the run's artifacts)"

    def __init__(
        self,
        run_dir: str | Path,
        *,
        experiment_name: str = "lightning_rlhf",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        store_dir: str | Path = "mlflow",
        resume_from: str | Path | None = None,
        branch_from: str | Path | None = None,
        branch_iteration: int | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | None = None,
        flush_timeout: float = 30.0,
        retry_seconds: float = 2.0,
    ) -> None:
        self.run_dir, self.flush_timeout = Path(run_dir).expanduser().absolute(), flush_timeout
        resume_from, branch_from = unless_copied(resume_from, branch_from)
        earlier = earlier_run(resume_from)
        parent = RunRecord.read(branch_from) if branch_from is not None and earlier is None else None
        starts = ((earlier, resume_from), (parent, branch_from))
        found = [store_of(record, folder) for record, folder in starts if record]
        uri = address(tracking_uri or next(filter(None, found), None), store_dir)
        quiet_mlflow()
        database = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None
        shown = passwords.without(uri)
        with creation_lock(database), opening(shown):
            super().__init__(experiment_name, tracking_uri=uri)
        drawn = {"mlflow.runName": name_from(self.run_dir)}
        named = {"mlflow.runName": run_name} if run_name else {}
        # A branch is in its parent's experiment, where MLflow shows it below the parent.
        experiment_name = parent.experiment_name if parent is not None else experiment_name
        record = earlier or RunRecord(shown, experiment_name, key=uuid.uuid4().hex[:12])
        self.run = TrackedRun(
            self._mlflow_client,
            replace(record, tracking_uri=shown, run_id=run_id or record.run_id),
            self.run_dir,
            resumed=earlier is not None or run_id is not None,
            may_be_lost=earlier is not None and run_id is None,
            artifact_location=(database.parent / "artifacts").as_uri() if database else None,
            tags=drawn | (tags or {}) | named | branch_tags(parent, branch_from, branch_iteration),
        )
        self._database = database
        self._opened = self._ended = self._config_logged = False
        # With the run's key in its name, a second run in the same folder does not send the first one's records.
        self._log = Spool(self.run_dir / FOLDER / f"{record.key}.log.jsonl", is_record)
        self._files = Spool(self.run_dir / FOLDER / f"{record.key}.files.jsonl", is_record)
        routes: dict[Spool, Deliver] = {self._log: self.run.deliver_log, self._files: self.run.deliver_file}
        self._courier = Courier(routes, f"MLflow at {shown}", retry_seconds)
        if earlier is not None and resume_from is not None and Path(resume_from).absolute() != self.run_dir:
            self._take_over(Path(resume_from).absolute())

    # --- where -------------------------------------------------------------------------------------------------------

    @property
    @rank_zero_experiment
    def experiment(self) -> MlflowClient:
        """The MLflow client. The first use opens the run; if the server is down, the run is opened once it is back.

        Raises:
            MlflowException: the server answers and refuses (no such run, no permission).
        """
        if not self._opened:
            import mlflow

            environment = os.environ.get("MLFLOW_TRACKING_URI")
            mlflow.set_tracking_uri(self.tracking_uri)
            # MLflow also sets the variable; the next job of a sweep in this process must not take it for the user's.
            if environment is None:
                os.environ.pop("MLFLOW_TRACKING_URI", None)
            else:
                os.environ["MLFLOW_TRACKING_URI"] = environment
            if self._database is not None and artifacts_beside(self._mlflow_client, self._database):
                log.info("MLflow: artifacts are now read from the folder beside %s", self._database)
            self.run.open()
            self._opened = True
            if self.run.continues:  # a lost run, too: the spool may hold that it ended
                self._log.append({"kind": "status", "status": "RUNNING"})
            self._courier.wake()
        return self._mlflow_client

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; ``None`` while the server has not answered yet."""
        _ = self.experiment
        return self.run.record.run_id

    @property
    def experiment_id(self) -> str | None:
        """MLflow's id of the experiment; ``None`` while the server has not answered yet."""
        _ = self.experiment
        return self.run.experiment_id

    @property
    def save_dir(self) -> str:
        """The run's folder, Lightning's default for files without another place."""
        return str(self.run_dir)

    @property
    def tracking_uri(self) -> str:
        """Address of the store, including the password of a database that has one."""
        return self._tracking_uri

    @property
    def ui_command(self) -> str:
        """The command that shows the run in a browser, or the server's address."""
        shown = self.run.record.tracking_uri
        return f"mlflow ui --backend-store-uri {shown}" if shown.startswith("sqlite:") else shown

    # --- what is logged ----------------------------------------------------------------------------------------------

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics of one iteration; returns at once.

        Raises:
            UnknownMetricError: a name in one of the kit's groups that is not registered.
            TypeError: a value that is not a number.
        """
        names.check(name for name in metrics if names.is_ours(name))
        values = {fit_key(name): number(name, value) for name, value in metrics.items()}
        iteration = int(values.get("clock/iteration", step or 0))
        _ = self.experiment  # counts this start of the run
        self._put(self._log, kind="metrics", start=self.run.record.starts, step=iteration, time=now_ms(), values=values)

    @rank_zero_only
    def log_start(self, iteration: int) -> None:
        """Training continues after this iteration: records of later ones are void. To be called before all else."""
        if self.run.continues:  # queued before the run is opened, which begins to send what an earlier start has left
            self._log.append({"kind": "rewind", "step": iteration})
        _ = self.experiment

    @rank_zero_only
    def log_config(self, config: Any) -> None:
        """Record the resolved configuration: parameters under dotted keys, as in overrides, and the text as artifact.

        The artifact is ``config.yaml``; a resumed run adds ``config_resumed_2.yaml`` at its second start, and so on.
        """
        config = plain(config)
        self._put(self._log, kind="params", values=flattened(config))
        self._config_logged = True
        suffix = f"_resumed_{self.run.record.starts}" if self.run.resumed else ""
        self.log_text(OmegaConf.to_yaml(OmegaConf.create(config)), f"config{suffix}.yaml")

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Record parameters, unless :meth:`log_config` has recorded them already, under their full keys."""
        if not self._config_logged:
            self._put(self._log, kind="params", values=flattened(plain(params)))

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._put(self._log, kind="tags", values={fit_key(k): cut(v, LONGEST_TAG) for k, v in tags.items()})

    @rank_zero_only
    def log_text(self, text: str, artifact: str) -> None:
        """Record a text as artifact, for instance ``report.txt`` or ``folder/report.txt``."""
        path = self.run_dir / FOLDER / artifact
        self.run.write(path, text)
        self.log_file(path, os.path.dirname(artifact))

    @rank_zero_only
    def log_file(self, path: str | Path, folder: str = "") -> None:
        """Copy a file to the run's artifacts; it must stay in place until it has been sent."""
        self._put(self._files, kind="file", path=str(Path(path).absolute()), folder=folder)

    @rank_zero_only
    def log_samples(self, rows: list[dict[str, Any]], iteration: int) -> None:
        """Record the table ``samples``, see :meth:`log_table`."""
        self.log_table(rows, iteration, "samples")

    @rank_zero_only
    def log_table(self, rows: list[dict[str, Any]], iteration: int, name: str) -> None:
        """Record a :func:`table` as ``<name>/iteration_000012.json``, which MLflow shows as one."""
        artifact = f"{name}/iteration_{iteration:06d}.json"
        self.log_text(table(rows), artifact)
        self._put(self._files, kind="table", path=artifact)

    @rank_zero_only
    def log_decisions(self, rows: list[dict[str, Any]]) -> None:
        """Record the decisions of callbacks in one iteration, with reasons, in the artifact ``decisions.jsonl``.

        A resumed run, which may be in another folder, writes ``decisions_resumed_2.jsonl`` at its second start.
        """
        _ = self.experiment  # counts the start
        suffix = f"_resumed_{self.run.record.starts}" if self.run.resumed else ""
        path = self.run_dir / FOLDER / f"decisions{suffix}.jsonl"
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.log_text(self.run.text(path) + lines, path.name)

    def closing_lines(self) -> list[str]:
        """Where the record is."""
        return where_it_is(self.run.record, self.run_dir, self.ui_command)

    @rank_zero_only
    def log_checkpoints(self, paths: list[str], *, latest: str, best: str = "") -> None:
        """List the checkpoints that exist now (artifact ``checkpoints.json``, tags); the files are not copied."""
        listing = {"latest": latest, "best": best or None, "kept": paths}
        self.log_text(json.dumps(listing, indent=2, ensure_ascii=False) + "\n", "checkpoints.json")
        self.log_tags({"checkpoint/latest": latest, **({"checkpoint/best": best} if best else {})})

    @rank_zero_only
    def log_failure(self, error: BaseException) -> None:
        """Record why the run ended: tag ``failure``, and the traceback as artifact ``failure.txt``."""
        self.log_tags({"failure": " ".join(f"{type(error).__name__}: {error}".split())})
        self.log_text("".join(traceback.format_exception(type(error), error, error.__traceback__)), "failure.txt")

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Set the run's status and wait a little for records still being sent.

        Lightning calls this at the end of every ``fit`` and ``validate``; later records open the run again.
        After an error Lightning calls it while handling the exception, which is recorded as the reason.
        """
        if not self._opened:
            return
        final, error = "FINISHED", sys.exc_info()[1]
        if status == "failed":
            final = "KILLED" if error is not None and from_signal(error) else "FAILED"
            if error is not None:
                self.log_failure(error)
        self._put(self._log, kind="status", status=final, time=now_ms())
        self._ended = True
        if not self.flush():
            log.warning(
                "MLflow at %s has not taken everything yet. The rest is kept in %s and sent when the run is resumed, "
                "or by lightning_rlhf.reporting.send_spooled(%r).",
                *(self.run.record.tracking_uri, self.run_dir / FOLDER, str(self.run_dir)),
            )
            if lost := self.run.in_memory(self._courier.in_memory):
                log.error("%s takes no more: lost if this process ends now: %s", self.run_dir / FOLDER, lost)

    def end_abandoned(self, reason: str, timeout: float, *, is_cause: bool = False) -> None:
        """Set the status of another process's run to FAILED if it is still RUNNING; see :func:`end_as_failed`."""
        from mlflow import MlflowException

        self.flush(timeout)
        try:
            status = self._mlflow_client.get_run(self.run.ensure()).info.status
            if status != "RUNNING" and not (is_cause and status == "FAILED"):
                return
        except MlflowException:
            log.debug("the server is away; it is told later", exc_info=True)
        self._log.append({"kind": "tags", "values": {"failure": cut(reason, LONGEST_TAG)}})
        self._log.append({"kind": "status", "status": "FAILED", "time": now_ms()})
        self._courier.wake()
        self.flush(timeout)

    def flush(self, timeout: float | None = None) -> bool:
        """Try to send everything now; returns whether all arrived within ``timeout`` (default ``flush_timeout``) s."""
        return self._courier.flush(self.flush_timeout if timeout is None else timeout)

    def _put(self, spool: Spool, **record: Any) -> None:
        _ = self.experiment
        if self._ended:
            self._ended = False
            self._log.append({"kind": "status", "status": "RUNNING"})
        spool.append(record)
        self._courier.wake()

    def _take_over(self, folder: Path) -> None:
        """Move the records that the run could not send from its former folder into this one."""
        for own in (self._log, self._files):
            former = Spool(folder / FOLDER / own.path.name, is_record)
            while records := former.pending():
                for record in records:
                    own.append(record)
                former.commit(len(records))


def send_spooled(run_dir: str | Path, timeout: float = 600.0) -> bool:
    """Send the records that a run could not deliver before it ended; returns whether all have arrived.

    Raises:
        FileNotFoundError: no MLflow run is recorded in the folder.
        InputError: the folder is a copy of another one, which sends them.
    """
    if (original := original_of(run_dir)) is not None:
        raise InputError(f"{run_dir} is a copy of {original}: send the records of that folder")
    if RunRecord.read(run_dir) is None:
        raise FileNotFoundError(f"{Path(run_dir) / FOLDER / 'run.json'}: no MLflow run is recorded there")
    return RLMLFlowLogger(run_dir, resume_from=run_dir).flush(timeout)


def end_as_failed(run_dir: str | Path, reason: str, timeout: float = 30.0, *, is_cause: bool = False) -> None:
    """Record the failure of a run whose process could not: it was killed, or waits for a killed one.

    Does nothing if no MLflow run of its own is recorded in the folder, or the run has ended already. A record that
    cannot be read is a warning, so that the run's own failure is still reported.
    """
    try:
        recorded = RunRecord.read(run_dir) is not None and original_of(run_dir) is None
    except InputError as error:
        log.warning("the run is not marked as failed in MLflow: %s", error)
        return
    if recorded:
        RLMLFlowLogger(run_dir, resume_from=run_dir).end_abandoned(reason, timeout, is_cause=is_cause)
