"""Checks of a configuration: values, combinations, spelling, pasted veRL blocks, and the error screen."""

from lightning_rlhf.errors import ConfigError, InputError, Problem
from lightning_rlhf.schema.batch_sizes import batch_sizes_of
from lightning_rlhf.schema.checks import check, first_look, warnings
from lightning_rlhf.schema.keys import NOT_HANDED_OVER, get
from lightning_rlhf.schema.shipped import flatten, shipped_keys

__all__ = [
    "NOT_HANDED_OVER",
    "ConfigError",
    "InputError",
    "Problem",
    "batch_sizes_of",
    "check",
    "first_look",
    "flatten",
    "get",
    "shipped_keys",
    "warnings",
]
