"""The format of checkpoints, as numbered in them; earlier ones, without a number, are format 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rlhf import __version__
from lightning_rlhf.checkpoint.files import CheckpointError

FORMAT = 1
"""Raised when an older version of the kit could not resume a checkpoint, or would resume it wrongly."""


def refuse_format(checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a later format than this version knows; changes nothing.

    Raises:
        CheckpointError: names the version that wrote it.
    """
    writer = checkpoint.get("written_by") or {}
    number = writer.get("format", 0)
    if not isinstance(number, int) or number > FORMAT:
        version = writer.get("lightning_rlhf", "(unknown)")
        raise CheckpointError(
            f"the checkpoint has format {number!r}, written by lightning_rlhf {version}; this is lightning_rlhf "
            f"{__version__}, which reads formats up to {FORMAT}: install the version that wrote it"
        )
