"""Where a run is recorded: address of the store, the MLflow run to continue, and settings of the MLflow library."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from lightning_rlhf import passwords
from lightning_rlhf.errors import InputError
from lightning_rlhf.reporting.mlflow_delivery import BRANCH_TAG, FOLDER, RunRecord
from lightning_rlhf.reporting.spool import in_a_line

log = logging.getLogger(__name__)

PARENT_TAG = "mlflow.parentRunId"


def earlier_run(resume_from: str | Path | None) -> RunRecord | None:
    """The record in the folder of the run to continue; without one, a warning says that a new MLflow run is started."""
    earlier = RunRecord.read(resume_from) if resume_from is not None else None
    if resume_from is not None and earlier is None:
        log.warning("resume: no MLflow run is recorded in %s; a new one is started", Path(resume_from) / FOLDER)
    return earlier


def original_of(folder: str | Path) -> Path | None:
    """The folder that this one is a copy of; ``None`` for any other, also for one that was moved.

    A copy has the record of the original's MLflow run, which goes on there: two folders must not write to one run.
    """
    record = RunRecord.read(folder)
    if record is None or record.run_dir is None:
        return None
    original = Path(record.run_dir)
    try:
        if original.samefile(folder):
            return None
        there = RunRecord.read(original)
    except FileNotFoundError:  # it was moved
        return None
    except InputError:  # a damaged record
        return original
    return original if there is not None and there.key == record.key else None


def unless_copied(
    resume_from: str | Path | None, branch_from: str | Path | None
) -> tuple[str | Path | None, str | Path | None]:
    """Folders of the run to continue and of the one to branch from: a copy of a folder becomes a branch."""
    original = None if resume_from is None else original_of(resume_from)
    if original is None:
        return resume_from, branch_from
    log.warning(
        "%s is a copy of %s, where the MLflow run goes on: the copy gets one of its own, a branch",
        resume_from,
        original,
    )
    return None, resume_from


def store_of(record: RunRecord, folder: str | Path | None) -> str | None:
    """Address of the store of a run in this folder, which may have been moved with it; ``None`` if it is not found."""
    path = Path(record.tracking_uri.removeprefix("sqlite:///"))
    if not record.tracking_uri.startswith("sqlite:///"):
        return record.tracking_uri
    places = [path]
    if folder is not None and record.run_dir is not None:
        before, now = Path(record.run_dir), Path(folder).absolute()
        while before != now and before.name == now.name and before.name:
            before, now = before.parent, now.parent
        if path.is_relative_to(before):
            places.insert(0, now / path.relative_to(before))
    return next((f"sqlite:///{place}" for place in places if place.exists()), None)


def branch_tags(parent: RunRecord | None, folder: str | Path | None, iteration: int | None) -> dict[str, str]:
    """Tags of a branch: MLflow's own tag for the parent run, and a readable one."""
    if folder is None:
        return {}
    known = {PARENT_TAG: parent.run_id} if parent is not None and parent.run_id is not None else {}
    where = known.get(PARENT_TAG, Path(folder).absolute())
    return {**known, BRANCH_TAG: f"{where}" + ("" if iteration is None else f" at iteration {iteration}")}


def address(given: str | None, store_dir: str | Path) -> str:
    """Address of the store: the one given, that of the environment, or a file in ``store_dir``.

    Raises:
        ValueError: a plain folder, which MLflow no longer accepts.
    """
    named = os.environ.get("MLFLOW_TRACKING_URI")
    if given and named and passwords.without(named) == given:
        given = named  # a run's record has the address without its password
    uri = given or named
    if not uri:
        return f"sqlite:///{Path(store_dir).expanduser().absolute() / 'mlflow.db'}"
    if uri.startswith(("file:", "/", ".", "~")):
        raise ValueError(
            f"logger.mlflow.tracking_uri = {uri!r} is not allowed: MLflow no longer keeps runs in plain folders; "
            "null (a local sqlite file in logger.mlflow.store_dir), sqlite:///FILE or the address of a server"
        )
    known = passwords.credentials(uri) if uri.startswith("http") else None
    if known is not None:  # MLflow gets the password through its own variables, so no written or shown address has it
        os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"] = known
        return passwords.without(uri)
    return uri


def quiet_mlflow() -> None:
    """No telemetry, no progress bars, no log lines about database tables, short timeouts for a server that is down."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # The courier repeats failed calls itself; MLflow's own retries would only block it.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    if "mlflow" in sys.modules:
        from mlflow.telemetry import set_telemetry_client

        set_telemetry_client()  # set up when MLflow was imported; this makes it read the variable again
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It would log a traceback of SQLAlchemy at every attempt; the courier reports the failure once, in one line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("urllib3.connectionpool").addFilter(_no_attempts)  # the same one is added once


def _no_attempts(entry: logging.LogRecord) -> bool:
    """Leaves out the lines on each attempt to reach MLflow, several a second where its server is down."""
    return "/api/2.0/mlflow" not in entry.getMessage()


@contextlib.contextmanager
def opening(store: str) -> Iterator[None]:
    """Report a store that cannot be opened in one line.

    Raises:
        ValueError: MLflow or its database refuses.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("sqlalchemy", "mlflow", "alembic"):
            raise
        raise ValueError(f"the MLflow store {store} cannot be opened: {in_a_line(error)}") from error


@contextlib.contextmanager
def creation_lock(database: Path | None) -> Iterator[None]:
    """One process at a time creates the tables of a new database: two at once would break it."""
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(database.with_name(f".{database.name}.lock")):
        yield


def where_it_is(record: RunRecord, run_dir: Path, command: str) -> list[str]:
    """Lines for the end of a run: its MLflow run, and the command to look at it."""
    if record.run_id is None:
        return [f"MLflow at {record.tracking_uri} has not answered: the record is in {run_dir / FOLDER}"]
    return [f"MLflow run {record.run_id}", f"  in {record.tracking_uri}", f"to look at it:\n  {command}"]


def name_from(run_dir: Path) -> str:
    """A unique name made from the run's folder.

    MLflow would draw a name from Python's seeded random state: all runs with one seed would have the same name.
    """
    return f"{'/'.join(run_dir.parts[-2:]).lstrip('/')}-{uuid.uuid4().hex[:4]}"
