"""The writer of checkpoint files: complete or absent, and verified."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_rlhf.checkpoint.files import not_written, partial_of, plain, publish, read_through, remove
from lightning_rlhf.checkpoint.records import digest
from lightning_rlhf.checkpoint.shards import read_checkpoint
from lightning_rlhf.checkpoint.verification import problem_in


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a temporary file beside the target, syncs it, verifies it, then renames it: complete or absent.

    It streams into the file, so a save needs no second copy of the state in memory (Lightning's own writer does). What
    was read back and found good gets a record ``*.verified.json``; a whole file with a tensor that is not finite, or
    of another shape than in memory, gets ``*.unverified.json``.
    Paths with a protocol (``s3://...``) are left to Lightning's writer.

    Attributes:
        buffers: names in a ``state_dict`` that are no weights and may be infinite.
    """

    buffers: Collection[str] = ()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; if that fails, nothing is left behind and an older file of that name is untouched.

        Raises:
            CheckpointError: the content is not plain, or the file could not be written or read back.
        """
        checkpoint = plain(checkpoint)
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        partial = partial_of(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            read_through(partial)
            problem = problem_in(partial, checkpoint, self.buffers)
            publish(path, problem, digest(partial) | {"iteration": checkpoint.get("iteration")})
        except (OSError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
            # After a failed write PyTorch reports a wrong file position; the real reason is in that error's context.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise not_written(path, cause) from error
        finally:
            if partial.exists():
                remove(partial)

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """The content of a file, or of a folder of shards put together."""
        if Path(path).is_dir():
            return read_checkpoint(Path(path))
        return super().load_checkpoint(path, *args, **options)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint and its records."""
        remove(Path(path))
