"""Settings of PPO-ptx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.bounds import bounded
from lightning_rlhf.settings import SettingError, build

BLOCK = "module.ptx"


@dataclass(frozen=True)
class PTXSettings:
    """The text, how much of it is in a step, and its weight; see docs/ptx.md."""

    source: Any
    """Documents: see :func:`lightning_rlhf.data.corpus.open_text`."""
    text_field: str = "text"
    """Column of the text."""
    length: int = 512
    """Tokens of a block."""
    tokens_per_step: int = 4096
    """Tokens of text per optimiser step, over all ranks: the whole blocks that fit."""
    coefficient: float = 0.05
    """gamma; the start value where a callback steers the knob ``ptx_coefficient``."""
    held_out: int = 16
    """Blocks that are never trained on, evenly spread over the text."""

    def __post_init__(self) -> None:
        if self.source is None:
            raise SettingError(f"{BLOCK}.source", None, "a file, a folder, a list of files or rows, or a source block")
        if not isinstance(self.text_field, str) or not self.text_field:
            raise SettingError(f"{BLOCK}.text_field", self.text_field, "the name of a column")
        bounded(BLOCK, at_least=2, whole=True, length=self.length)  # the first token of a block is not predicted
        bounded(BLOCK, at_least=self.length, whole=True, tokens_per_step=self.tokens_per_step)
        bounded(BLOCK, above=0, coefficient=self.coefficient)
        bounded(BLOCK, at_least=0, whole=True, held_out=self.held_out)

    @property
    def blocks_per_step(self) -> int:
        return self.tokens_per_step // self.length


def ptx_settings(block: Mapping[str, Any] | PTXSettings | None) -> PTXSettings | None:
    """Settings from the config block ``module.ptx``; ``None`` where it is null.

    Raises:
        SettingError: an unknown key or a value that is not allowed.
    """
    return None if block is None else build(PTXSettings, BLOCK, block)
