"""Copies of verified checkpoints in another place, made in the background; a failure is said and never matters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf.checkpoint.records import records
from lightning_rlhf.errors import SettingError
from lightning_rlhf.reporting import RLMLFlowLogger

KEY = "callbacks.checkpoint.copy_to"
MLFLOW = "mlflow"
"""The value for artifacts of the run's MLflow run."""
WAIT = 120.0
"""Seconds that the end of a run waits for the last copy."""


class Copies:
    """Copies one checkpoint at a time; while one is copied, only the newest of the others waits.

    Args:
        target: a folder, any address that fsspec knows, or ``mlflow``.

    Raises:
        SettingError: no file system has such an address, or its package is missing.
    """

    def __init__(self, target: str) -> None:
        if not isinstance(target, str) or not target.strip():
            raise SettingError(KEY, target, "a folder, an address such as s3://bucket/run, mlflow, or null")
        self.target = target
        self._place: _Folder | _Artifacts = _Artifacts() if target == MLFLOW else _Folder(target)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._current: Path | None = None
        self._next: Path | None = None

    def bind(self, loggers: Iterable[Any]) -> None:
        """Find the run's loggers, one of which may be the target.

        Raises:
            SettingError: the target is MLflow, and no logger writes there.
        """
        if isinstance(self._place, _Artifacts):
            self._place.bind(loggers)

    @property
    def in_use(self) -> set[str]:
        """Paths that must stay in place until they are copied."""
        with self._lock:
            return {str(path) for path in (self._current, self._next) if path is not None}

    def send(self, path: Path) -> None:
        """Copy this checkpoint as soon as the one before is done; returns at once."""
        with self._lock:
            self._next = path
            if self._thread is None:
                # A daemon: a target that never answers must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name="checkpoint copy", daemon=True)
                self._thread.start()

    def finish(self, seconds: float = WAIT) -> None:
        """Wait for what was sent, at most so long; warns if that is not enough."""
        until = time.monotonic() + seconds
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(max(until - time.monotonic(), 0))
            if thread.is_alive():
                rank_zero_warn(f"{self._current} is not yet copied to {self.target}: the run ends without it")

    def _run(self) -> None:
        while True:
            with self._lock:
                self._current, self._next = self._next, None
                if self._current is None:
                    self._thread = None
                    return
                path = self._current
            try:
                self._place.put(path)
            except Exception as error:  # a file system raises what it likes
                rank_zero_warn(f"{path.name} was not copied to {self.target}: {type(error).__name__}: {error}")


class _Folder:
    """A folder of any file system."""

    def __init__(self, target: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(target)
        except (ValueError, ImportError) as error:
            raise SettingError(KEY, target, f"an address that fsspec can write to ({error})") from error
        self._sent: set[Path] = set()

    def put(self, path: Path) -> None:
        """Copy under a temporary name, compare the size, rename; then remove copies of what is no longer kept."""
        fs, final, partial = self._fs, self._at(path.name), self._at(f".{path.name}.partial")
        fs.makedirs(self._root, exist_ok=True)
        self._remove(partial)
        try:
            fs.put(str(path), partial, recursive=path.is_dir())
            size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
            if fs.du(partial) != size:
                raise OSError(f"{fs.du(partial)} bytes arrived of {size}")
            self._remove(final)
            fs.mv(partial, final, recursive=path.is_dir())
        finally:
            self._remove(partial)
        for record in records(path):
            fs.put_file(str(record), self._at(record.name))
        self._sent.add(path)
        for gone in [sent for sent in self._sent if not sent.exists()]:
            self._sent.discard(gone)
            for name in fs.glob(self._at(f"{gone.name.removesuffix('.ckpt')}.*")):
                self._remove(name)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _remove(self, place: str) -> None:
        if self._fs.exists(place):
            self._fs.rm(place, recursive=True)


class _Artifacts:
    """Artifacts ``checkpoints/`` of the run's MLflow run; MLflow cannot remove what is no longer kept."""

    def __init__(self) -> None:
        self._logger: Any = None

    def bind(self, loggers: Iterable[Any]) -> None:
        self._logger = next((each for each in loggers if isinstance(each, RLMLFlowLogger)), None)
        if self._logger is None:
            raise SettingError(KEY, MLFLOW, "another target, or a run with logger=mlflow")

    def put(self, path: Path) -> None:
        from mlflow import MlflowClient

        client, run = MlflowClient(self._logger.tracking_uri), self._logger.run.record.run_id
        if run is None:
            raise OSError("the server has not answered yet")
        if path.is_dir():
            client.log_artifacts(run, str(path), f"checkpoints/{path.name}")
        else:
            client.log_artifact(run, str(path), "checkpoints")
        for record in records(path):
            client.log_artifact(run, str(record), "checkpoints")
