"""Lists of prompts: those that are not trained on, and those with a larger KL coefficient.

A list is a text file with one prompt key a line, 16 hexadecimal digits; in a list for ``data.conservative`` a factor
may follow. ``#`` begins a comment. ``lightning-rlhf prompts RUN --export FOLDER`` writes such files, to be edited.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_rlhf.bounds import LARGEST, bounded
from lightning_rlhf.data.prompts import Prompt
from lightning_rlhf.data.sources import DataError, listed, resolve_path
from lightning_rlhf.faults import Faults

log = logging.getLogger(__name__)

KEY = re.compile(r"[0-9a-f]{16}")


class PromptLists:
    """The lists of a data module.

    Args:
        blacklist: file of ``data.blacklist``; ``None`` for none.
        conservative: file of ``data.conservative``; ``None`` for none.
        conservative_beta: factor of keys without one, at least 1.

    Raises:
        DataError: a list cannot be read.
    """

    def __init__(self, blacklist: str | None, conservative: str | None, conservative_beta: float) -> None:
        bounded("data", at_least=1, conservative_beta=conservative_beta)
        self.blacklist = None if blacklist is None else read_list(blacklist, "data.blacklist")
        self.conservative = (
            None if conservative is None else read_list(conservative, "data.conservative", factor=conservative_beta)
        )

    def apply(self, train: Sequence[Prompt]) -> tuple[list[Prompt], dict[str, float]]:
        """The prompts to train on, each with its factor, and metrics: how many rows a list concerns.

        A prompt on both lists is left out. Keys that name no training prompt are said, and change nothing.

        Raises:
            DataError: the blacklist leaves no prompt.
        """
        numbers: dict[str, float] = {}
        kept = list(train)
        if self.conservative is not None:
            factors = self.conservative
            _warn_about_unknown("data.conservative", factors, train)
            kept = [replace(prompt, kl_scale=factors.get(prompt.key, 1.0)) for prompt in kept]
        if self.blacklist is not None:
            _warn_about_unknown("data.blacklist", self.blacklist, train)
            kept = [prompt for prompt in kept if prompt.key not in self.blacklist]
            numbers["data/prompts_blacklisted"] = len(train) - len(kept)
            log.warning("data.blacklist: %d of %d training rows are left out", len(train) - len(kept), len(train))
            if not kept:
                raise DataError(f"data.blacklist leaves no training prompt: it names all {len(train)} rows")
        if self.conservative is not None:
            count = sum(prompt.key in self.conservative for prompt in kept)
            numbers["data/prompts_conservative"] = count
            log.warning("data.conservative: %d of %d training rows have a larger KL coefficient", count, len(kept))
        return kept, numbers


def read_list(path: str | Path, setting: str, *, factor: float | None = None) -> dict[str, float]:
    """Keys of a list, each with its factor.

    Args:
        path: relative to the command's working folder.
        setting: its key in the configuration, for errors.
        factor: of lines without one; ``None``: lines may have none.

    Raises:
        DataError: the file cannot be read, or lines are no entries; the first are named.
    """
    place = resolve_path(path)
    try:
        text = place.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{setting} = {str(path)!r} cannot be read ({error}); allowed is a text file with one prompt key a line"
        ) from error
    found: dict[str, float] = {}
    lines: dict[str, int] = {}
    faults = Faults()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        key, fault = words[0], _fault(words, factor)
        value = float(words[1]) if len(words) > 1 and not fault else factor or 1.0
        if not fault and found.get(key, value) != value:
            fault = f"{key} has the factor {value:g} here and {found[key]:g} in line {lines[key]}; allowed is one"
        if fault:
            faults.add(f"{setting}: {place}:{number}: {fault}")
        else:
            found[key] = value
            lines.setdefault(key, number)
    if faults:
        raise DataError(str(faults))
    return found


def _fault(words: list[str], factor: float | None) -> str:
    """What is wrong with an entry; empty if nothing is."""
    if not KEY.fullmatch(words[0]):
        return (
            f"{words[0]!r:.60} is no prompt key; allowed are 16 hexadecimal digits, as `lightning-rlhf prompts` shows"
        )
    if len(words) == 1:
        return ""
    if factor is None or len(words) > 2:
        allowed = "one key a line" if factor is None else "a key and a factor a line"
        return f"{' '.join(words[1:])!r:.60} is not allowed after the key; allowed is {allowed}, and a comment after #"
    try:
        value = float(words[1])
    except ValueError:
        value = math.nan
    return "" if 1 <= value <= LARGEST else f"factor {words[1]!r:.60} is not allowed: a finite number >= 1"


def _warn_about_unknown(setting: str, keys: Mapping[str, float], train: Sequence[Prompt]) -> None:
    unknown = sorted(keys.keys() - {prompt.key for prompt in train})
    if unknown:
        log.warning("%s: %d of %d keys name no training prompt: %s", setting, len(unknown), len(keys), listed(unknown))
