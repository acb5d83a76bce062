"""The data module: an endless, resumable stream of prompt batches for training, fixed prompts for validation."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.bounds import bounded
from lightning_rlhf.data.fingerprint import difference_of_ranks, held_out, held_out_difference, in_short, rendering
from lightning_rlhf.data.groups import GroupColumn, GroupNames
from lightning_rlhf.data.lists import PromptLists
from lightning_rlhf.data.loaders import PromptLoader, PromptStream, ValidationLoader
from lightning_rlhf.data.prompts import MESSAGES_KEY, EncodedPrompts, Prompt, PromptEncoder, numbered
from lightning_rlhf.data.sources import SOURCE_KEY, DataError, listed, open_source, read_rows
from lightning_rlhf.distributed.processes import gather_objects
from lightning_rlhf.experience import PromptBatch
from lightning_rlhf.faults import Faults

log = logging.getLogger(__name__)


class PromptDataModule(LightningDataModule):
    """Prompts for training and validation.

    The whole run is one Lightning epoch: the training loader yields ``iterations`` batches, however many passes
    over the data that takes. Use ``Trainer(max_epochs=1, use_distributed_sampler=False)``.

    Held-out prompts come from their own source (``validation``) or are taken out of the training data
    (``validation_size``). In the second case a hash of the prompt's content decides
    (:func:`~lightning_rlhf.experience.prompt_key`), so every run holds out the same prompts, whatever its seed,
    tokenizer, chat template or the day, and no held-out prompt is trained on, not even as a duplicate row.

    Args:
        train: source of the training rows: a path, a list of paths, a list of rows, or an object that gives rows,
            see :func:`~lightning_rlhf.data.sources.open_source`.
        validation: source of the held-out rows; ``None`` for none, or to use ``validation_size``.
        tokenizer: of the policy.
        prompts_per_iteration: prompts of one batch, over all processes.
        iterations: batches of the run.
        seed: of the order of the training prompts.
        max_prompt_tokens: longer prompts are dropped and counted; ``None`` keeps all.
        prompt_field: column that holds the prompt: text or chat messages.
        system_prompt: put before chat messages that have no system message.
        text_as_chat: wrap text prompts as one user message.
        chat_template_kwargs: further arguments of the chat template.
        shuffle: whether each pass over the training data has a new order.
        validation_size: number of prompts to hold out from the training rows.
        validation_limit: validation prompts used at most, the first ones; ``None`` uses all.
        validation_batch_size: prompts of one validation batch.
        blacklist: file of prompt keys that are not trained on, see :mod:`lightning_rlhf.data.lists`.
        conservative: file of prompt keys with a KL coefficient of their own.
        conservative_beta: factor on the KL coefficient of these, where the file has none.
        group_column: column that names each prompt's group, for statistics per group; ``None`` for none, see
            :mod:`lightning_rlhf.data.groups`.
        max_groups: different groups at most.

    Raises:
        DataError: a setting is out of range; from :meth:`setup`: the data cannot be used.
    """

    def __init__(
        self,
        train: Any,
        validation: Any = None,
        *,
        tokenizer: PreTrainedTokenizerBase,
        prompts_per_iteration: int,
        iterations: int,
        seed: int = 1,
        max_prompt_tokens: int | None = 512,
        prompt_field: str = "prompt",
        system_prompt: str | None = None,
        text_as_chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        shuffle: bool = True,
        validation_size: int | None = None,
        validation_limit: int | None = None,
        validation_batch_size: int = 64,
        blacklist: str | None = None,
        conservative: str | None = None,
        conservative_beta: float = 2.0,
        group_column: str | None = None,
        max_groups: int = 32,
    ) -> None:
        super().__init__()
        bounded("data", at_least=1, whole=True, prompts_per_iteration=prompts_per_iteration, iterations=iterations)
        bounded("data", at_least=1, whole=True, validation_batch_size=validation_batch_size, max_groups=max_groups)
        bounded("data", at_least=1, whole=True, optional=True, validation_size=validation_size)
        bounded("data", at_least=1, whole=True, optional=True, validation_limit=validation_limit)
        if validation is not None and validation_size is not None:
            raise DataError(
                f"data.validation_size = {validation_size} is not allowed beside data.validation: hold out rows of "
                "the training data (data.validation=null), or give a source for them (data.validation_size=null)"
            )
        self.train, self.validation = train, validation
        self.prompts_per_iteration, self.iterations, self.seed = prompts_per_iteration, iterations, seed
        self.shuffle = shuffle
        self.validation_size, self.validation_limit = validation_size, validation_limit
        self.validation_batch_size = validation_batch_size
        self._lists = PromptLists(blacklist, conservative, conservative_beta)
        self._column = None if group_column is None else GroupColumn(str(group_column), max_groups)
        self._encoder = PromptEncoder(
            tokenizer,
            prompt_field=prompt_field,
            system_prompt=system_prompt,
            text_as_chat=text_as_chat,
            chat_template_kwargs=chat_template_kwargs,
            max_tokens=max_prompt_tokens,
        )
        self._prompts: tuple[list[Prompt], list[Prompt]] | None = None
        self._loader: PromptLoader | None = None
        self._held_out: dict[str, Any] = {}
        self.accept_other_data = False
        """Whether a checkpoint of a run on other data may be resumed."""
        self.dropped: dict[str, int] = {}
        """Number of prompts dropped because they were too long, by setting (``train``, ``validation``)."""
        self.list_numbers: dict[str, float] = {}
        """Metrics of the two lists of prompts, where there is one."""
        self.groups: GroupNames | None = None
        """The groups of the prompts, once the data was read; ``None`` without ``group_column``."""

    # --- prompts -------------------------------------------------------------------------------------------------

    @property
    def train_prompts(self) -> list[Prompt]:
        """Every training prompt, in the data's order. Reads the data at first use."""
        return self._load()[0]

    @property
    def validation_prompts(self) -> list[Prompt]:
        """Every held-out prompt in use. Reads the data at first use."""
        return self._load()[1]

    def _load(self) -> tuple[list[Prompt], list[Prompt]]:
        if self._prompts is None:
            encoded = self._encode("train", self.train)
            train, held_out = encoded.prompts, []
            if self.validation is not None:
                held_out = self._encode("validation", self.validation).prompts
            elif self.validation_size is not None:
                train, held_out = hold_out(train, self.validation_size, encoded.too_long)
            train, self.list_numbers = self._lists.apply(train)
            _warn_about_duplicates(train, held_out)
            held_out = held_out[: self.validation_limit]
            self.groups = None if self._column is None else self._column.names(train, held_out)
            self._prompts = numbered(train), held_out
        return self._prompts

    def _encode(self, name: str, source: Any) -> EncodedPrompts:
        try:
            faults = Faults()
            encoded = self._encoder.encode(read_rows(open_source(source), faults), faults)
            if self._column is not None:
                encoded = replace(encoded, prompts=self._column.read(encoded.prompts, needed=name == "train"))
        except DataError as error:
            raise DataError(f"data.{name}: {error}") from error
        self.dropped[name] = len(encoded.too_long)
        if encoded.too_long:
            log.warning(
                "data.%s: %d of %d prompts dropped, longer than data.max_prompt_tokens = %s (the longest has %s%d): %s",
                name,
                len(encoded.too_long),
                len(encoded.too_long) + len(encoded.prompts),
                self._encoder.max_tokens,
                "at least " if self._encoder.counted_in_part else "",
                encoded.longest,
                listed([prompt.row[SOURCE_KEY] for prompt in encoded.too_long]),
            )
        return encoded

    # --- Lightning -----------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Read and tokenise the data (once); a fit begins at the first batch unless it resumes a checkpoint.

        Raises:
            DataError: the data cannot be used, or the processes of a run have read different data.
        """
        prompts = self.train_prompts
        if stage == "fit":
            rank, world = self._place()
            if self.prompts_per_iteration > len(prompts):
                rank_zero_warn(
                    f"data.prompts_per_iteration = {self.prompts_per_iteration}, but there are {len(prompts)} training "
                    "prompts: an iteration draws prompts more than once"
                )
            stream = PromptStream(
                len(prompts),
                self.prompts_per_iteration,
                seed=self.seed,
                rank=rank,
                world=world,
                shuffle=self.shuffle,
            )
            self._loader = PromptLoader(prompts, stream, self.iterations, rendering=self._rendering(prompts))
            self._held_out = held_out(self.validation_prompts)
        self._refuse_different_ranks()

    def _refuse_different_ranks(self) -> None:
        """Every process reads the data by itself, and takes its share of the batches of all.

        Raises:
            DataError: on every rank, if they have read different data.
        """
        if self._loader is None:
            return
        ranks = gather_objects(in_short(self._loader.fingerprint, self._held_out))
        if found := difference_of_ranks(ranks):
            raise DataError(
                f"data: the processes of this run have read different data. {found}. All need the same rows in "
                "the same order: each takes its own share of every batch"
            )

    def train_dataloader(self) -> PromptLoader:
        if self._loader is None:
            raise RuntimeError("PromptDataModule.setup('fit') must run before train_dataloader()")
        done = self._loader.consumed
        if done > self.iterations:
            raise DataError(f"iterations = {self.iterations} is not allowed: the checkpoint has already done {done}")
        if done == self.iterations:
            log.warning("all %d iterations are done; raise `iterations` to train on", done)
        elif done and self.trainer is not None:
            _reopen_epoch(self.trainer)
        return self._loader

    def train_batch(self, index: int) -> PromptBatch:
        """Batch ``index`` of the run, counted from 0, ahead of its iteration: for rollouts that are generated ahead."""
        if self._loader is None:
            raise RuntimeError("PromptDataModule.setup('fit') must run before train_batch()")
        return self._loader.batch(index)

    def val_dataloader(self) -> ValidationLoader:
        """The held-out prompts; without any, a loader of length 0, which Lightning skips."""
        return ValidationLoader(self.validation_prompts, self.validation_batch_size, *self._place())

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch unchanged: it holds no tensor, and Lightning would search every list of ids for one."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {} if self._loader is None else self._loader.state_dict() | {"held_out": self._held_out}

    def refuse_other_data(self, state_dict: Mapping[str, Any]) -> None:
        """Check the data against a checkpoint's state before the tracked run is opened; needs ``setup("fit")``.

        Raises:
            DataError: the checkpoint was trained on other data, and :attr:`accept_other_data` is not set.
        """
        if self._loader is not None and state_dict:
            self._loader.accept_other_data = self.accept_other_data
            self._loader.changes(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batches already returned; evaluation has no position to restore.

        Raises:
            DataError: the checkpoint was trained on other data, and :attr:`accept_other_data` is not set.
        """
        if self._loader is not None:
            self._loader.accept_other_data = self.accept_other_data
            self._loader.load_state_dict(state_dict)
            if "held_out" in state_dict and (changed := held_out_difference(state_dict["held_out"], self._held_out)):
                log.warning("data.validation: %s; eval/* from here on cannot be compared with those before", changed)

    def _rendering(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        return rendering(
            self._encoder.tokenizer,
            system_prompt=self._encoder.system_prompt,
            template_kwargs=self._encoder.chat_template_kwargs,
            chat=any(MESSAGES_KEY in prompt.row for prompt in prompts),
        )

    def _place(self) -> tuple[int, int]:
        """Rank of this process, and number of processes."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)


def _reopen_epoch(trainer: Trainer) -> None:
    """Let a finished run continue that is resumed with more iterations.

    The whole run is one Lightning epoch. In a checkpoint of its last batch the epoch is over, and Lightning
    would stop at once; this makes its progress look like that of any other batch.
    """
    fit_loop = trainer.fit_loop
    fit_loop.epoch_loop.batch_progress.is_last_batch = False
    progress: Any = fit_loop.epoch_progress
    if progress.current.processed == progress.current.ready:
        for clock in (progress.current, progress.total):
            clock.processed = clock.completed = clock.ready - 1
        fit_loop.restarting = True


def hold_out(
    prompts: Sequence[Prompt], size: int, too_long: Sequence[Prompt] = ()
) -> tuple[list[Prompt], list[Prompt]]:
    """Split off the ``size`` different prompts with the smallest hashes; duplicates have one key and stay together.

    Args:
        prompts: of the training data.
        size: of the held-out part, too long prompts included: the tokenizer decides which are too long, and the split
            must not depend on the tokenizer.
        too_long: prompts of the training data that are not used.

    Returns:
        The training prompts, all rows of them, and the held-out prompts, each once; both in their old order.

    Raises:
        DataError: fewer than ``size + 1`` different prompts, or one of the parts would be empty.
    """
    first = {prompt.key: prompt for prompt in reversed(prompts)}
    keys = first.keys() | {prompt.key for prompt in too_long}
    if size >= len(keys):
        raise DataError(
            f"data.validation_size = {size} leaves no training prompt: the data has {len(keys)} different prompts"
        )
    chosen = set(sorted(keys, key=lambda key: hashlib.blake2b(f"held out/{key}".encode()).digest())[:size])
    held_out = [prompt for prompt in prompts if prompt.key in chosen and first[prompt.key] is prompt]
    train = [prompt for prompt in prompts if prompt.key not in chosen]
    for part, name in ((train, "training"), (held_out, "held-out")):
        if not part:
            raise DataError(
                f"data.validation_size = {size} leaves no {name} prompt: all of them are longer than "
                "data.max_prompt_tokens; raise the limit, or change the size"
            )
    return train, held_out


def _warn_about_duplicates(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
    first: dict[str, Prompt] = {}
    repeats = [prompt for prompt in train if first.setdefault(prompt.key, prompt) is not prompt]
    if repeats:
        log.warning(
            "data.train: %d of %d rows repeat a prompt; all are drawn, each copy with seeds of its own: %s",
            len(repeats),
            len(train),
            listed([f"{prompt.row[SOURCE_KEY]} is {first[prompt.key].row[SOURCE_KEY]}" for prompt in repeats]),
        )
    seen = [prompt for prompt in held_out if prompt.key in first]
    if seen:
        log.warning(
            "data.validation: %d of %d prompts are in the training data as well: %s",
            len(seen),
            len(held_out),
            listed([f"{prompt.row[SOURCE_KEY]} is {first[prompt.key].row[SOURCE_KEY]}" for prompt in seen]),
        )
