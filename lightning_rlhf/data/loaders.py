"""Order of the prompts: the training stream, its position in checkpoints, and the held-out prompts."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_rlhf.data.fingerprint import differences, fingerprint
from lightning_rlhf.data.prompts import Prompt, collate
from lightning_rlhf.data.sources import DataError
from lightning_rlhf.experience import PromptBatch

log = logging.getLogger(__name__)


class PromptStream:
    """The prompts of batch ``c``: a function of the seed and ``c``, independent of what was drawn before.

    Passes over the data, each in a new order, follow one another without a gap: a batch may hold the end of one pass
    and the beginning of the next, so no prompt is lost at the end of a pass. The stream is cut into batches over all
    ranks, and each rank takes its share of every batch; the order of the data does not depend on the number of ranks.

    Args:
        size: number of prompts.
        batch: prompts of one batch over all ranks.
        seed: of the order.
        rank: of this process.
        world: number of processes; must divide ``batch``.
        shuffle: whether each pass has its own order; otherwise the data's order is kept.
    """

    def __init__(
        self, size: int, batch: int, *, seed: int = 0, rank: int = 0, world: int = 1, shuffle: bool = True
    ) -> None:
        if batch % world:
            raise DataError(f"data.prompts_per_iteration = {batch} cannot be shared evenly by {world} processes")
        self.size, self.batch, self.seed, self.rank, self.world, self.shuffle = size, batch, seed, rank, world, shuffle
        self.origin = (0, 0)
        """A batch and the stream position at which it begins; positions of other batches are counted from it."""
        self._orders: dict[int, list[int]] = {}

    def __getitem__(self, c: int) -> list[tuple[int, int]]:
        """This rank's part of batch ``c``: pass and index of each prompt."""
        share = self.batch // self.world
        start = self.position(c) + self.rank * share
        places = (divmod(position, self.size) for position in range(start, start + share))
        return [(data_pass, self._order(data_pass)[index]) for data_pass, index in places]

    def position(self, c: int) -> int:
        """Prompts drawn, over all ranks, before batch ``c``."""
        batch, position = self.origin
        return position + (c - batch) * self.batch

    def _order(self, data_pass: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.size)
        if data_pass not in self._orders:
            digest = hashlib.blake2b(f"{self.seed}/order/{data_pass}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            self._orders = {data_pass: torch.randperm(self.size, generator=generator).tolist()}
        return self._orders[data_pass]


class PromptLoader:
    """Iterates over the stream and counts the batches it has returned; with the stream's origin that is its state.

    It does not use PyTorch's global random state nor worker processes: prompts are tokenised already.

    Args:
        prompts: the training prompts, in the data's order.
        stream: their order.
        iterations: batches of the run.
        rendering: what made tokens of the rows, see :func:`~lightning_rlhf.data.fingerprint.rendering`.
    """

    def __init__(
        self, prompts: Sequence[Prompt], stream: PromptStream, iterations: int, *, rendering: Mapping[str, Any]
    ) -> None:
        self.prompts, self.stream, self.iterations = prompts, stream, iterations
        self.consumed = 0
        self.accept_other_data = False
        self.fingerprint = fingerprint(prompts, seed=stream.seed, shuffle=stream.shuffle, rendering=rendering)

    def __len__(self) -> int:
        """Batches of the whole run, those already returned included (Lightning counts from the run's start)."""
        return self.iterations

    def __iter__(self) -> Iterator[PromptBatch]:
        while self.consumed < self.iterations:
            self.consumed += 1
            yield self.batch(self.consumed - 1)

    def batch(self, c: int) -> PromptBatch:
        """Batch ``c`` of the run, counted from 0; does not change the loader's state."""
        drawn = self.stream[c]
        return collate([self.prompts[index] for _, index in drawn], [data_pass for data_pass, _ in drawn])

    def state_dict(self) -> dict[str, Any]:
        origin = list(self.stream.origin)
        return {"consumed": self.consumed, "batch": self.stream.batch, "origin": origin, "data": self.fingerprint}

    def changes(self, state: Mapping[str, Any]) -> list[str]:
        """The differences between this data and that of a saved state, in words; empty if it is the same.

        Raises:
            DataError: the data differs, and :attr:`accept_other_data` is not set.
        """
        if "data" in state:
            changed = differences(state["data"], self.fingerprint)
            what = f"was trained on other data: {'; '.join(changed)}. Give it the same data, or set "
        else:
            changed = ["the checkpoint's data is unknown"]
            what = "does not say which data it was trained on: an earlier release, with another split, wrote it. Set "
        if changed and not self.accept_other_data:
            raise DataError(
                f"data: the checkpoint {what}resume_on_other_data=true to go on with this data from its first batch"
            )
        return changed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches already returned; with another batch size at the same prompt.

        Lightning calls this a second time, after the data module's ``load_state_dict``.

        Args:
            state: as returned by :meth:`state_dict`.

        Raises:
            DataError: content, order or seed of the data differ, and :attr:`accept_other_data` is not set.
        """
        changed = self.changes(state)
        self.consumed = state["consumed"]
        if changed and self.stream.origin != (self.consumed, 0):
            self.stream.origin = (self.consumed, 0)
            log.warning("going on with other data, from its first batch: %s", "; ".join(changed))
        elif not changed:
            former = tuple(state["origin"])
            reached = former[1] + (self.consumed - former[0]) * state["batch"]
            self.stream.origin = former if state["batch"] == self.stream.batch else (self.consumed, reached)


class ValidationLoader:
    """Fixed prompts in fixed order; rank ``r`` of ``world`` takes every ``world``-th prompt from the ``r``-th on.

    All ranks have equally many batches; if a rank has too few prompts, its last batch is empty.
    """

    def __init__(self, prompts: Sequence[Prompt], batch: int, rank: int = 0, world: int = 1) -> None:
        self.prompts, self.batch = prompts[rank::world], batch
        self._most = -(-len(prompts) // world)

    def __len__(self) -> int:
        return -(-self._most // self.batch)

    def __iter__(self) -> Iterator[PromptBatch]:
        for start in range(0, self._most, self.batch):
            part = self.prompts[start : start + self.batch]
            yield collate(part, [0] * len(part))
