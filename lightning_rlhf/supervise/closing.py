"""Close the MLflow run of a training that ended without doing so: ``python -m lightning_rlhf.supervise.closing``.

A process of its own, because the supervisor imports neither MLflow nor what this package needs for it. It reads
what to do from stdin: the disk may be full.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    content = {"folder": str(folder), "failure": failure, "tags": dict(tags), "report": report and str(report)}
    command, told = [sys.executable, "-m", __name__], json.dumps(content)
    try:
        done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"not within {PATIENCE:.0f} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def main() -> None:
    """Do what stdin says."""
    from lightning_rlhf.reporting.mlflow_logger import RLMLFlowLogger
    from lightning_rlhf.runs.ending import RunFailed

    told: dict[str, Any] = json.load(sys.stdin)
    logger = RLMLFlowLogger(told["folder"], resume_from=told["folder"])
    logger.log_tags(told["tags"])
    if told["report"]:
        logger.log_file(told["report"], "crashes")
    if told["failure"]:
        logger.log_failure(RunFailed(told["failure"]))
    logger.finalize("failed")


if __name__ == "__main__":
    main()
