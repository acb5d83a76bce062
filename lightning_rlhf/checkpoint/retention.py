"""Which checkpoints are kept: the newest, the best, and always the newest verified one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from lightning_rlhf.checkpoint.files import iteration_of
from lightning_rlhf.checkpoint.records import is_verified


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest iteration first."""
    return sorted((path for path in folder.glob("*.ckpt") if iteration_of(path) >= 0), key=iteration_of)


def superseded(checkpoints: Sequence[Path], keep: int | None, spared: Collection[str] = ()) -> list[Path]:
    """Those that are not to be kept.

    Args:
        checkpoints: oldest first.
        keep: how many of the newest are kept; ``None``: all.
        spared: paths that are kept anyway, such as that of the best one.
    """
    if keep is None:
        return []
    good = next((path for path in reversed(checkpoints) if is_verified(path)), None)
    return [path for path in checkpoints[:-keep] if path != good and str(path) not in spared]
