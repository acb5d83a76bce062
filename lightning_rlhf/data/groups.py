"""Groups of prompts: a column of the data, such as source or difficulty, that statistics are kept apart by."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from lightning_rlhf.data.prompts import MESSAGES_KEY, Prompt
from lightning_rlhf.data.sources import SOURCE_KEY, DataError, Row, listed
from lightning_rlhf.faults import Faults
from lightning_rlhf.kinds import scalar_text

log = logging.getLogger(__name__)

LONGEST_LABEL = 64
"""Characters of a group's name in metrics; of a longer value the beginning is taken."""


@dataclass(frozen=True)
class GroupNames:
    """The groups of a run.

    Attributes:
        train: groups of the training prompts, sorted.
        labels: by group, those of held-out prompts included, its name in metrics, see :func:`labels_of`.
    """

    train: tuple[str, ...]
    labels: Mapping[str, str]


class GroupColumn:
    """The column that ``data.group_column`` names.

    Its values are turned to text: ``3`` and ``3.0`` are the group ``3``, ``true`` is ``true``.

    Args:
        column: its name.
        most: different groups at most.
    """

    def __init__(self, column: str, most: int) -> None:
        self.column, self.most = column, most

    def read(self, prompts: Sequence[Prompt], *, needed: bool) -> list[Prompt]:
        """The prompts of one source, each with its group.

        Args:
            prompts: with their rows.
            needed: refuse a source in which no row has the column; otherwise its prompts have no group.

        Raises:
            DataError: rows have no usable value; the first are named.
        """
        if not any(self.column in prompt.row for prompt in prompts):
            if needed:
                raise DataError(self._unknown(prompt.row for prompt in prompts))
            log.warning("data.validation: no row has data.group_column = %r; no eval/group/* is measured", self.column)
            return list(prompts)
        faults, grouped = Faults(), []
        for prompt in prompts:
            group = scalar_text(prompt.row.get(self.column))
            if group is None or not group.strip():
                faults.add(f"{prompt.row[SOURCE_KEY]}: data.group_column = {self.column!r}: {self._fault(prompt.row)}")
            else:
                grouped.append(replace(prompt, group=group))
        if faults:
            raise DataError(f"{faults}\n  allowed in this column: a text that is not empty, a number, true or false")
        return grouped

    def names(self, train: Iterable[Prompt], held_out: Iterable[Prompt]) -> GroupNames:
        """The groups of the prompts in use.

        Raises:
            DataError: they are too many.
        """
        trained = sorted({prompt.group for prompt in train if prompt.group is not None})
        every = sorted({*trained, *(prompt.group for prompt in held_out if prompt.group is not None)})
        if len(every) > self.most:
            raise DataError(
                f"data.group_column = {self.column!r} has {len(every)} different values ({listed(every)}); allowed are "
                f"at most data.max_groups = {self.most}. Name a column with few values, such as a source or a level, "
                "or raise data.max_groups"
            )
        labels = labels_of(every)
        log.info("data.group_column = %r: %s", self.column, ", ".join(_shown(group, labels[group]) for group in every))
        return GroupNames(tuple(trained), labels)

    def _unknown(self, rows: Iterable[Row]) -> str:
        columns = sorted({str(name) for row in rows for name in row} - {SOURCE_KEY, MESSAGES_KEY})
        near = get_close_matches(self.column, columns, n=1)
        guess = f"; did you mean {near[0]!r}?" if near else "."
        return f"data.group_column = {self.column!r}: no row has this column{guess} Columns: {', '.join(columns)}"

    def _fault(self, row: Row) -> str:
        if self.column not in row:
            return "the row has no such column"
        value = row[self.column]
        if value is None or value != value:
            return "the value is null"
        return "the value is an empty text" if isinstance(value, str) else f"the value is {value!r:.60}"


def labels_of(groups: Iterable[str]) -> dict[str, str]:
    """The name of each group in metrics, where only letters, digits, ``_``, ``-`` and ``.`` are allowed.

    Other characters become ``_``. Groups whose names would then be the same, upper and lower case apart, all get a hash
    of their value behind it, so that no two share a curve.
    """
    plain = {group: _plain(group) for group in groups}
    taken = Counter(label.lower() for label in plain.values())
    return {group: label if taken[label.lower()] == 1 else f"{label}-{_hash(group)}" for group, label in plain.items()}


def _plain(group: str) -> str:
    label = re.sub(r"[^A-Za-z0-9_.\-]", "_", group)[:LONGEST_LABEL]
    return label if label.strip(".") else "_" * len(label)


def _hash(group: str) -> str:
    return hashlib.blake2b(group.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def _shown(group: str, label: str) -> str:
    return group if group == label else f"{group!r} (as {label} in metrics)"
