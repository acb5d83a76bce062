"""Checkpoints: the callback that saves them, their files and shards, and the random state in them."""

from lightning_rlhf.checkpoint.atomic import AtomicCheckpointIO
from lightning_rlhf.checkpoint.callback import IterationCheckpoint
from lightning_rlhf.checkpoint.files import CheckpointError, latest_valid, plain, verify
from lightning_rlhf.checkpoint.model_checkpoint import warn_about_model_checkpoint
from lightning_rlhf.checkpoint.random_state import RNGState

__all__ = [
    "AtomicCheckpointIO",
    "CheckpointError",
    "IterationCheckpoint",
    "RNGState",
    "latest_valid",
    "plain",
    "verify",
    "warn_about_model_checkpoint",
]
