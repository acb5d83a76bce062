"""Close the MLflow run of a training that ended without doing so: ``python -m lightning_rlhf.supervise.closing FILE``.

A process of its own, because the supervisor imports neither MLflow nor what this package needs for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_rlhf.supervise import files

FILE = "closing.json"
PATIENCE = 180.0
"""Seconds for the process that closes a run, imports included."""


def close(folder: Path, *, failure: str, tags: Mapping[str, str], report: Path | None) -> str:
    """Set the status of a run's MLflow run to FAILED, if it has one, with tags and a report.

    Args:
        folder: of the run.
        failure: why it ended, if the training could not say so itself; otherwise empty.
        tags: to be added.
        report: to be added as artifact.

    Returns:
        What went wrong, empty if nothing did.
    """
    if not (folder / "tracking" / "run.json").exists():
        return ""
    file = folder / files.FOLDER / FILE
    content = {"folder": str(folder), "failure": failure, "tags": dict(tags), "report": report and str(report)}
    try:
        files.write(file, content)
    except OSError as error:
        return str(error)
    command = [sys.executable, "-m", __name__, str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"not within {PATIENCE:.0f} s"
    finally:
        file.unlink(missing_ok=True)
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def main(file: str) -> None:
    """Do what the file says."""
    from lightning_rlhf.reporting.mlflow_logger import RLMLFlowLogger
    from lightning_rlhf.runs.ending import RunFailed

    told: dict[str, Any] = files.read(Path(file)) or {}
    logger = RLMLFlowLogger(told["folder"], resume_from=told["folder"])
    logger.log_tags(told["tags"])
    if told["report"]:
        logger.log_file(told["report"], "crashes")
    if told["failure"]:
        logger.log_failure(RunFailed(told["failure"]))
    logger.finalize("failed")


if __name__ == "__main__":
    main(sys.argv[1])
