"""One MLflow run: found or created once the server answers, then updated record by record.

A record may be delivered twice if a response got lost, so every call here is idempotent: MLflow stores
a metric once per name, step, time and value, and everything else is looked up before it is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.errors import InputError
from lightning_rlhf.files import as_file, write_whole
from lightning_rlhf.metrics import names
from lightning_rlhf.reporting.mlflow_database import forget_steps_behind

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

LONGEST_PARAM, LONGEST_TAG, LONGEST_KEY = 6000, 8000, 250
"""Most characters that MLflow accepts in a parameter's value, a tag's value and a key."""
ENTRIES_PER_CALL, METRICS_PER_CALL = 100, 1000
KEY_TAG = "lightning_rlhf.key"
CONTINUES_TAG = "lightning_rlhf.continues"
BRANCH_TAG = "lightning_rlhf.branch_of"
TABLES_TAG = "mlflow.loggedArtifacts"
FOLDER = "tracking"
"""Subfolder of the run's folder with spools, ``run.json`` and files still to be sent to MLflow."""

RECORDS = {
    "metrics": ("step", "time", "values"),
    "rewind": ("step",),
    "params": ("values",),
    "tags": ("values",),
    "status": ("status",),
    "file": ("path", "folder"),
    "table": ("path",),
}
"""Kinds of records in the spools, and the keys that each has."""


def is_record(record: dict[str, Any]) -> bool:
    """Whether this object of a spool is a record that can be delivered, not one that a damaged file has left over."""
    keys = RECORDS.get(str(record.get("kind")))
    return keys is not None and all(key in record for key in keys)


@dataclass
class RunRecord:
    """The record of a run's MLflow run in the run's folder (``run.json``).

    Attributes:
        tracking_uri: of the server or database.
        experiment_name: of the experiment.
        key: identifies the run before MLflow has given it an id.
        run_id: MLflow's id; ``None`` until the server has answered.
        starts: how often the run was started.
        run_dir: the run's folder when this was written; it may have been moved since.
    """

    tracking_uri: str
    experiment_name: str
    key: str
    run_id: str | None = None
    starts: int = 0
    run_dir: str | None = None

    @classmethod
    def read(cls, run_dir: str | Path) -> RunRecord | None:
        """The record in a run's folder, ``None`` if there is none.

        Raises:
            InputError: the file is damaged or cannot be read.
        """
        path = Path(run_dir) / FOLDER / "run.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{path} cannot be read: {error}. It names the run in MLflow. Restore it, "
                "or move it away: the next start then gets a new run in MLflow"
            ) from error

    def write(self, run_dir: Path) -> None:
        """Replace the record in a run's folder."""
        self.run_dir = str(run_dir)
        write_whole(run_dir / FOLDER / "run.json", json.dumps(asdict(self), indent=2) + "\n")


class TrackedRun:
    """The run in MLflow. One thread delivers, possibly another one opens the run.

    Args:
        client: of the tracking server or database.
        record: which run it is; kept up to date in ``run_dir``.
        run_dir: the run's folder.
        resumed: whether MLflow or the spool may hold steps of it already. Becomes false if the run is lost and a new
            one started; :attr:`continues` stays, as the spool may still hold steps that the new run repeats.
        may_be_lost: whether a new run is started if the recorded one no longer exists.
        artifact_location: of a new experiment; ``None`` leaves it to the server.
        tags: of a new run.
    """

    def __init__(
        self,
        client: MlflowClient,
        record: RunRecord,
        run_dir: Path,
        *,
        resumed: bool,
        may_be_lost: bool = False,
        artifact_location: str | None = None,
        tags: dict[str, Any] | None = None,
    ) -> None:
        self.client, self.record, self.run_dir, self.resumed = client, record, run_dir, resumed
        self.continues = resumed
        self.artifact_location, self.tags, self.may_be_lost = artifact_location, tags or {}, may_be_lost
        self.experiment_id: str | None = None
        self._recorded: dict[str, dict[int, float]] = {}
        self._lock = threading.Lock()
        self._texts: dict[Path, str] = {}
        """The newest version of each text that the disk did not take."""
        self._writing = threading.Lock()

    # --- opening -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Count a start of the run, and find or create it; if the server is down, that happens later.

        Raises:
            MlflowException: the server answers and refuses (no such run, no permission).
        """
        from mlflow import MlflowException

        self.record.starts += 1
        self.record.write(self.run_dir)
        try:
            self.ensure()
        except MlflowException as error:
            status = error.get_http_status_code()
            if 400 <= status < 500 and status != 429:
                raise
            # The courier warns the user as soon as it has something to send.
            log.debug("the run is opened later", exc_info=True)

    def ensure(self) -> str:
        """The run's id; the first call asks the server."""
        with self._lock:
            if self.experiment_id is None and self.may_be_lost:
                self._notice_a_loss()
            run_id = self.record.run_id or self._find_or_create()
            if self.experiment_id is None:
                self.experiment_id = self.client.get_run(run_id).info.experiment_id
                self.record.run_id = run_id
                self.record.write(self.run_dir)
            return run_id

    def _notice_a_loss(self) -> None:
        """If the run of an earlier start is no longer in the store, start a new one that names it."""
        from mlflow import MlflowException

        lost = self.record.run_id
        try:
            if lost is None or self.client.get_run(lost).info.lifecycle_stage == "active":
                self.may_be_lost = False
                return
        except MlflowException as error:
            if error.get_http_status_code() != 404:
                raise
        log.warning(
            "the MLflow run %s is not in %s: logging goes on in a new run, whose tag %s names the old one",
            lost,
            self.record.tracking_uri,
            CONTINUES_TAG,
        )
        self.tags = {**self.tags, CONTINUES_TAG: str(lost)}
        self.record.run_id, self.resumed, self.may_be_lost = None, False, False

    def _find_or_create(self) -> str:
        from mlflow.tracking.context.registry import resolve_tags

        experiment = self._find_or_create_experiment()
        # A call whose response got lost may have created it earlier.
        found = self.client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{self.record.key}'", max_results=1)
        if found:
            return found[0].info.run_id
        tags = resolve_tags({**self.tags, KEY_TAG: self.record.key})
        return self.client.create_run(experiment, tags=tags).info.run_id

    def _find_or_create_experiment(self) -> str:
        from mlflow import MlflowException

        name = self.record.experiment_name
        if (experiment := self.client.get_experiment_by_name(name)) is None:
            try:
                return self.client.create_experiment(name, artifact_location=self.artifact_location)
            except MlflowException:
                # Another process may have created it since.
                if (experiment := self.client.get_experiment_by_name(name)) is None:
                    raise
        return experiment.experiment_id

    # --- texts -------------------------------------------------------------------------------------------------------

    def write(self, path: Path, text: str) -> None:
        """Write a text that will be sent as a file; if the disk does not take it, it is kept in memory until then."""
        with self._writing:
            self._texts[path] = text
        self._write_kept(path)

    def text(self, path: Path) -> str:
        """The text that was written last, nothing if there is none; bytes that are no UTF-8 are replaced."""
        if (kept := self._texts.get(path)) is not None:
            return kept
        return as_file(path).read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _write_kept(self, path: Path) -> str | None:
        """Write a text that waits in memory; returns it if that is still where it is, and ``None`` otherwise."""
        with self._writing:
            if path in self._texts:
                try:
                    write_whole(path, self._texts[path])
                    del self._texts[path]
                except OSError:  # the spool beside it meets the same disk, and its courier says so
                    log.debug("%s is written later", path, exc_info=True)
            return self._texts.get(path)

    def in_memory(self, records: list[dict[str, Any]]) -> str:
        """These records and the texts that the disk did not take, in words; empty if there are none."""
        texts = [path.name for path in list(self._texts) if self._write_kept(path) is not None]
        return in_words(records, texts)

    # --- delivery ----------------------------------------------------------------------------------------------------

    def deliver_log(self, records: list[dict[str, Any]]) -> int:
        """Send the first record, or all leading metric records in one call; returns how many records were sent.

        Metrics that a later start will repeat, as its ``rewind`` among the records says, are not sent.
        """
        run_id, kind = self.ensure(), records[0]["kind"]
        if kind == "metrics":
            last = min((record["step"] for record in records if record["kind"] == "rewind"), default=math.inf)
            return self._metrics(run_id, list(takewhile(lambda record: record["kind"] == kind, records)), last)
        if kind == "rewind":
            forget_steps_behind(self.client, run_id, records[0]["step"])
            self._recorded.clear()
        elif kind == "params":
            self._params(run_id, records[0]["values"])
        elif kind == "tags":
            self._set_tags(run_id, records[0]["values"])
        else:
            self._status(run_id, records[0])
        return 1

    def deliver_file(self, records: list[dict[str, Any]]) -> int:
        """Send the first file, or the tag of a table; returns 1."""
        run_id, record = self.ensure(), records[0]
        if record["kind"] == "table":
            tag = self.client.get_run(run_id).data.tags.get(TABLES_TAG, "[]")
            self._set_tags(run_id, {TABLES_TAG: with_table(tag, record["path"])})
        elif (text := self._write_kept(Path(record["path"]))) is not None:
            self.client.log_text(run_id, text, os.path.join(record["folder"], os.path.basename(record["path"])))
        elif os.path.exists(record["path"]):
            self.client.log_artifact(run_id, record["path"], record["folder"] or None)
        else:
            log.error("%s was removed before it could be sent to MLflow", record["path"])
        return 1

    def _metrics(self, run_id: str, records: list[dict[str, Any]], last: float) -> int:
        """Send as many records as one call takes, without those of steps after ``last``; returns how many are done."""
        from mlflow.entities import Metric

        batch: list[Metric] = []
        sent = 0
        for record in records:
            if batch and len(batch) + len(record["values"]) > METRICS_PER_CALL:
                break
            step, moment = record["step"], record["time"]
            values = record["values"].items() if step <= last else ()
            new = {k: v for k, v in values if not self._is_recorded(run_id, k, step, v)}
            batch += [Metric(name, value, moment, step) for name, value in new.items()]
            sent += 1
        for start in range(0, len(batch), METRICS_PER_CALL):
            self.client.log_batch(run_id, metrics=batch[start : start + METRICS_PER_CALL])
        return sent

    def _is_recorded(self, run_id: str, name: str, step: int, value: float) -> bool:
        """Whether a resumed run already has this value for this step; a different value is added after it."""
        if not self.continues:
            return False
        if name not in self._recorded:
            history = sorted(self.client.get_metric_history(run_id, name), key=lambda metric: metric.timestamp)
            self._recorded[name] = {metric.step: metric.value for metric in history}
        before = self._recorded[name].get(step)
        self._recorded[name][step] = value
        return before == value or (before is not None and math.isnan(before) and math.isnan(value))

    def _params(self, run_id: str, values: dict[str, str]) -> None:
        """Write new parameters; an existing parameter with another value gets a tag, as MLflow never changes one."""
        from mlflow.entities import Param

        data = self.client.get_run(run_id).data
        new = [Param(key, value) for key, value in values.items() if key not in data.params]
        for start in range(0, len(new), ENTRIES_PER_CALL):
            self.client.log_batch(run_id, params=new[start : start + ENTRIES_PER_CALL])
        changes = {}
        for key, value in values.items():
            tag = fit_key(f"changed/{key}")
            before, shown = data.params.get(key, value), cut(value, 1000)
            if tag in data.tags and data.tags[tag].rpartition(" -> ")[2] != shown:
                changes[tag] = cut(f"{data.tags[tag]} -> {shown}", LONGEST_TAG)
            elif tag not in data.tags and before != value:
                changes[tag] = f"{cut(before, 1000)} -> {shown}"
        self._set_tags(run_id, changes)

    def _set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        entries = [RunTag(key, value) for key, value in tags.items()]
        for start in range(0, len(entries), ENTRIES_PER_CALL):
            self.client.log_batch(run_id, tags=entries[start : start + ENTRIES_PER_CALL])

    def _status(self, run_id: str, record: dict[str, Any]) -> None:
        if record["status"] != "RUNNING":
            self.client.set_terminated(run_id, record["status"], end_time=record["time"])
            return
        tags = self.client.get_run(run_id).data.tags
        self.client.update_run(run_id, status="RUNNING")
        if "failure" in tags:
            self._set_tags(run_id, {"previous_failure": tags["failure"]})
            self.client.delete_tag(run_id, "failure")


def in_words(records: list[dict[str, Any]], texts: list[str]) -> str:
    """What is in these records, for a message: ``metrics of iterations 3 to 7, 1 status, decisions.jsonl``."""
    steps = sorted(record["step"] for record in records if record["kind"] == "metrics")
    others = Counter(record["kind"] for record in records if record["kind"] != "metrics")
    metrics = [f"metrics of iterations {steps[0]} to {steps[-1]}"] if steps else []
    return ", ".join(metrics + [f"{count} {kind}" for kind, count in others.items()] + texts)


def with_table(tag: str, path: str) -> str:
    """The tag that MLflow's table view reads, with one more table; of all tables the newest that fit into a tag."""
    entry = {"path": path, "type": "table"}
    tables = [table for table in json.loads(tag) if table != entry] + [entry]
    while len(json.dumps(tables)) > LONGEST_TAG:
        del tables[0]
    return json.dumps(tables)


def cut(text: str, longest: int) -> str:
    """The text, truncated with three dots if it is too long."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def fit_key(key: str) -> str:
    """The key if MLflow accepts it; else its allowed characters and a hash, so that different keys stay different."""
    if names.valid(key) and len(key) <= LONGEST_KEY:
        return key
    digest = hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
    parts = re.sub(r"[^A-Za-z0-9_.\-/ ]+", "_", key).split("/")
    allowed = "/".join(part.strip() for part in parts if part.strip(". "))
    return f"{allowed[: LONGEST_KEY - 9].rstrip(' /')}_{digest}"
