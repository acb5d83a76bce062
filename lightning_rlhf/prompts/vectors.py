"""Vectors of prompts: from the policy of a run's newest checkpoint, or from a model of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from yaml import YAMLError

from lightning_rlhf.accelerators.device import current
from lightning_rlhf.assembly import building, load_checkpoint, make, newest_checkpoint
from lightning_rlhf.data.prompts import Prompt, PromptEncoder
from lightning_rlhf.errors import InputError
from lightning_rlhf.evaluate import without_reference
from lightning_rlhf.export import trained_actor
from lightning_rlhf.functional.projection import mean_over_tokens
from lightning_rlhf.models.actor import Actor, training_mode
from lightning_rlhf.reporting.prompt_table import RecordedPrompt
from lightning_rlhf.rollout.base import pad_left
from lightning_rlhf.runs.recompose import Composition
from lightning_rlhf.runs.resume import planned
from lightning_rlhf.schema.locate import locate

BATCH_TOKENS = 8192
"""Tokens of one forward pass, padding included."""
FLAG = "--embedding"
OF_RUN_ALONE = {"validation": None, "validation_size": None, "blacklist": None, "conservative": None} | {
    "group_column": None
}
"""Settings of the data that new prompts do not follow: what is held out or on a list of the run's own data."""

Embedding = Callable[[list[str]], Any]
"""From texts to an array ``[N, D]``."""


@dataclass(frozen=True)
class Measured:
    """What the policy makes of prompts.

    Attributes:
        states: ``[N, H]`` float32, last hidden state, mean over the prompt's tokens.
        tokens: ``[N]`` int64, length.
        logprobs: ``[N]`` float32, nats: mean log-probability of the prompt's tokens, each given those before it. The
            first has none before it and does not count; 0 for a prompt of one token.
    """

    states: Tensor
    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class RunPolicy:
    """The policy of a run's newest whole checkpoint, and the settings by which its prompts are read."""

    checkpoint: Path
    config: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    actor: Actor

    @classmethod
    def of(cls, run: Path) -> RunPolicy:
        """Load it.

        Raises:
            InputError: there is no whole checkpoint, or its model cannot be loaded.
        """
        if newest_checkpoint(run) is None:
            raise InputError(
                f"{run} has no whole checkpoint, and the vectors of prompts come from its policy; "
                f"a map can do without one: --map FOLDER {FLAG} my_file.function"
            )
        going_on = planned(str(run), Composition(()))
        path, saved = load_checkpoint(str(going_on.checkpoint))
        config = without_reference(going_on.settings_in(going_on.run or going_on.outputs))
        loaded, actor = trained_actor(config, saved["state_dict"], path, "used")
        return cls(path, config, loaded.tokenizer, actor.to(current()))

    def ids_of(self, prompts: Sequence[RecordedPrompt]) -> list[list[int]]:
        """Token ids of recorded prompts, as in the run's rollouts."""
        encoder = PromptEncoder(self.tokenizer, text_as_chat=bool(self.config["data"].get("text_as_chat")))
        with building("records"):
            return encoder.ids_of_recorded((prompt.text, prompt.key) for prompt in prompts)

    def read(self, file: str) -> tuple[list[Prompt], int]:
        """Prompts of a file under the run's settings of the data, with the keys that a training on it gives them.

        Returns:
            The prompts within ``data.max_prompt_tokens``, and the number of longer ones.

        Raises:
            InputError: the file has rows that cannot be used; the first are named.
        """
        block = self.config["data"]
        block = block | {"train": file} | {name: value for name, value in OF_RUN_ALONE.items() if name in block}
        name = f"--screen {file}"
        try:
            with building("data"):
                made = {"iterations": self.config["iterations"], "seed": self.config["seed"]}
                datamodule = make(block, tokenizer=self.tokenizer, **made)
                prompts = datamodule.train_prompts
        except InputError as error:
            reason = str(error).removeprefix("data: ").removeprefix("data.train: ")
            raise InputError(f"{name}: {reason}") from error
        return prompts, getattr(datamodule, "dropped", {}).get("train", 0)  # a custom data module may lack it

    def measure(self, ids: Sequence[Sequence[int]], tokens: int = BATCH_TOKENS) -> Measured:
        """States, lengths and log-probabilities of prompts; batches have prompts of about equal length.

        Args:
            ids: of each prompt, none empty.
            tokens: of one forward pass at most, padding included; a longer prompt gets one of its own.

        Raises:
            InputError: the states are not finite.
        """
        lengths = torch.tensor([len(row) for row in ids])
        states, logprobs = torch.empty(0), torch.zeros(len(ids))
        pad = self.tokenizer.pad_token_id
        device = next(self.actor.parameters()).device
        with torch.no_grad(), training_mode(self.actor, False):
            for rows in batches(lengths.tolist(), tokens):
                block, mask = pad_left([ids[row] for row in rows], 0 if pad is None else int(pad))
                # A column of padding in front: scoring needs one before the first token.
                block, mask = (torch.nn.functional.pad(x, (1, 0)).to(device) for x in (block, mask))
                out = self.actor(block, mask, block.shape[1] - 1, with_hidden=True)
                found = mean_over_tokens(out.hidden, mask).cpu()
                states = states if len(states) else torch.empty(len(ids), found.shape[1])
                states[rows] = found
                logprobs[rows] = mean_over_tokens(out.logprobs, mask[:, 1:] & mask[:, :-1]).cpu()
        if not (states.isfinite().all() and logprobs.isfinite().all()):
            raise InputError(f"the hidden states of {self.checkpoint} are not finite: its weights overflow")
        return Measured(states, lengths, logprobs)


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Rows in the order of their lengths, as many at once as padded fit into ``tokens``, at least one."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) + 1) * (lengths[row] + 1) > tokens:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


# --- a model of the user's own -----------------------------------------------------------------------------------


def make_embedding(words: str) -> Embedding:
    """The callable that ``--embedding`` names.

    Args:
        words: a block with ``_target_`` as YAML, or the import path alone. A class is called with the block's other
            keys, and what it makes is the callable; anything else is the callable itself and gets them at every call.

    Raises:
        InputError: it cannot be read, imported or made, or cannot be called.
    """
    try:
        node: Any = OmegaConf.to_container(OmegaConf.create(words if "_target_" in words else {"_target_": words}))
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise InputError(f"{FLAG} {words!r} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        raise InputError(f"{FLAG} {words!r} is not allowed: an import path, or a block {{_target_: my_file.Model}}")
    try:
        target = locate(node["_target_"])
    except LookupError as error:
        raise InputError(f"{FLAG} {node['_target_']}: {error}") from error
    with building(FLAG):
        made: Any = instantiate(dict(node), _convert_="all", _partial_=not inspect.isclass(target))
    if not callable(made):
        raise InputError(f"{FLAG}: {node['_target_']} makes {type(made).__name__}, which cannot be called with texts")
    return made


def embedded(embedding: Embedding, texts: Sequence[str]) -> Tensor:
    """``[N, D]`` float32: what a callable of the user's makes of texts.

    Raises:
        InputError: it raises an exception, returns another shape, no numbers, or one that is not finite.
    """
    with building(FLAG):
        found = embedding(list(texts))
        if isinstance(found, Tensor):
            found = found.detach().float().cpu().numpy()
        with np.errstate(over="ignore"):  # refused below as not finite
            array = np.asarray(found, dtype=np.float32)
    if array.ndim != 2 or len(array) != len(texts) or not array.shape[1]:
        raise InputError(f"{FLAG}: the shape is {list(array.shape)} for {len(texts)} texts; allowed: [{len(texts)}, D]")
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array).all(1))[0])
        raise InputError(f"{FLAG}: the vector of text {row} holds NaN or infinity: {texts[row]!r:.60}")
    return torch.from_numpy(array)
