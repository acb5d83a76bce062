"""Messages of other libraries that tell the user of an ordinary run nothing; each is matched by its text."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent

LOG_MESSAGES = (
    "GPU available: False",
    "TPU available: False",
    "HPU available: False",
    "💡 Tip:",
    # Checkpoints are loaded with weights_only=True; this is about the checkpoint hooks of a fit without a checkpoint.
    "`weights_only` was not set",
    # The run prints this itself, with the iteration.
    "Restoring states from the checkpoint path at",
    "Restored all states from the checkpoint at",
    # The whole run is one epoch; `iterations` is its length.
    "`Trainer.fit` stopped: `max_epochs=1` reached",
    # Once per user, when matplotlib makes its cache.
    "generated new fontManager",
)
"""Beginnings of log records."""

LOGGERS = (
    *("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.trainer.connectors.checkpoint_connector"),
    "matplotlib.font_manager",
)

WARNINGS = (
    # Lightning's own use of a PyTorch function.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # The frozen reference model is in eval mode on purpose.
    r"Found \d+ module\(s\) in eval mode at the start of training",
    # vLLM opens a process group of one; the module reduces what it logs itself.
    r"It is recommended to use `self.log\('[\w/]+', ..., sync_dist=True\)`",
    # A checkpoint in a folder is read by one process.
    r"torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to load in a single process",
    # No code changes outputs of actor or critic in place.
    r"FSDP2-wrapped module \(FSDP\w+\) returned a view tensor",
    # vLLM searches all of PyTorch for Triton functions.
    r"`torch.distributed.reduce_op` is deprecated",
    # Prompts are tokenised once; a data loader with worker processes would gain nothing.
    r"The '\w+_dataloader' does not have many workers",
    # A run without held-out prompts; Lightning skips the loader, and has the same words for no loader at all.
    r"Total length of `ValidationLoader` across ranks is zero",
)
"""Regular expressions for the beginnings of warnings."""


class _Unimportant(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(LOG_MESSAGES)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages above inside this context."""
    unimportant = _Unimportant()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(unimportant)
    try:
        with warnings.catch_warnings():
            for message in WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(unimportant)


@contextmanager
def own_warnings_in_words() -> Iterator[None]:
    """Show this package's warnings without the line of its code that they come from, which tells a user nothing."""
    before = warnings.formatwarning

    def shown(message: Warning | str, category: type[Warning], filename: str, *place: Any, **more: Any) -> str:
        if Path(filename).resolve().is_relative_to(PACKAGE) or Path(filename).is_relative_to(PACKAGE):
            return f"warning: {message}\n"
        return before(message, category, filename, *place, **more)

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = before


def quiet_libraries() -> None:
    """Silence warnings of PyTorch's C++ code, such as of NUMA nodes when vLLM starts on a CPU; call before its import.

    Errors are still printed, and a level set by the user stays.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def quiet_loading() -> None:
    """No progress bar for loading weights from disk; downloads keep theirs on a terminal."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as messages

    modeling_gguf_pytorch_utils.tqdm = messages.tqdm  # this tqdm can be switched off
    messages.disable_progress_bar()  # disables the bars of downloads, too
    if sys.stderr.isatty() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        enable_progress_bars()


def log_once() -> None:
    """Leave Lightning's records to the root logger's handlers, which Hydra sets up; its own would show them twice."""
    logging.getLogger("lightning").handlers.clear()


def quiet_ray() -> None:
    """In a process started by Ray: silence log lines that do not concern the user."""
    for name in (
        "execution.controller.placement_group_cleaner",  # polls a part of Ray that is not installed, once a second
        "callbacks.backend_setup",  # a traceback about a lost worker; ray_watch says which and what follows
    ):
        # A filter, as Ray sets the levels afterwards.
        logging.getLogger(f"ray.train.v2._internal.{name}").addFilter(lambda record: record.levelno >= logging.ERROR)
