"""What every rollout engine offers, and the sampling settings they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_rlhf.bounds import bounded
from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.rollout.ahead import Ahead
from lightning_rlhf.rollout.binding import Binding, stop_ids_setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


COLDEST = 0.01
"""Lowest temperature: below it every sample is the likeliest one, gradients overflow, and vLLM takes this one."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Order of processing: temperature, top-k, top-p, renormalise.

    Attributes:
        temperature: logits are divided by it.
        top_k: only the ``top_k`` likeliest tokens may be drawn; 0 switches it off.
        top_p: only the smallest set of likeliest tokens with at least this mass may be drawn; 1 switches it off.
        samples: responses per prompt.
        max_new_tokens: limit of the response length, end token included.
        greedy: the likeliest token instead of a draw (evaluation only).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    samples: int = 1
    max_new_tokens: int = 256
    greedy: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.temperature, (int, float)) and 0 <= self.temperature < COLDEST:
            allowed = f"a number >= {COLDEST}: PPO learns from samples (held-out prompts are answered greedily)"
            raise SettingError("rollout.temperature", self.temperature, allowed)
        bounded("rollout", above=0, temperature=self.temperature)
        bounded("rollout", at_least=0, whole=True, top_k=self.top_k)  # 0 switches it off
        bounded("rollout", above=0, at_most=1, top_p=self.top_p)  # 1 switches it off
        bounded("rollout", at_least=1, whole=True, samples=self.samples, max_new_tokens=self.max_new_tokens)

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn, so that log-probs over the whole vocabulary differ from the engine's."""
        return self.top_k > 0 or self.top_p < 1


@runtime_checkable
class RolloutEngine(Protocol):
    """Draws responses to prompts; subclass :class:`BaseEngine` for your own."""

    sampling: Sampling
    ahead: Ahead
    reports_logprobs: bool
    """Whether each token comes with its log-probability, as rollout correction and ALP need it."""
    max_model_len: int | None
    """Longest sequence, prompt and response, that the settings allow; ``None``: not set."""

    @property
    def shares_weights(self) -> bool:
        """Whether the trained weights themselves generate; sharded ones have to be gathered around each call."""

    @property
    def positions(self) -> int | None:
        """Longest sequence that the engine takes, known once it is set up; ``None``: the model's limit."""

    def setup(self, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Bind the engine to the trainer's language model and tokenizer, on all ranks together.

        Called before any other method, at the beginning of a training or an evaluation; :meth:`update_weights` follows
        before anything is generated.
        """

    def generate(
        self, prompts: PromptBatch, *, samples: int, max_new_tokens: int, seed: int, greedy: bool = False
    ) -> Rollout:
        """Draw ``samples`` responses to each prompt (not repeated by the caller); the rows of a prompt are adjacent.

        Args:
            prompts: the prompts, ids without padding.
            samples: responses per prompt; overrides the setting of the engine for this call, as do the next two.
            max_new_tokens: limit of the response length, end token included.
            seed: seed of the run. A row's own seed is ``sample_seed(seed, prompt key, sample index, data pass, copy)``.
            greedy: take the likeliest token (evaluation).
        """

    def update_weights(self, version: int) -> None:
        """Take over the trainer's weights; rollouts drawn from here on carry ``version``, the iterations trained.

        Called on all ranks together; :meth:`generate` is not, and must not wait for another rank.
        Never called while :meth:`generate` runs. With ``ahead.lag = 1`` that is called from another thread and must not
        read weights that training changes.
        """

    def describe(self) -> dict[str, Any]:
        """Every current setting, as plain values for the log."""

    def close(self) -> None:
        """The run is over: free what the engine holds beyond the trainer's model."""


class BaseEngine:
    """Common parts of the kit's engines: settings of sampling, and shared entries of :meth:`RolloutEngine.describe`.

    Args:
        temperature: divides the logits.
        top_k: only the ``top_k`` likeliest tokens may be drawn; 0 switches it off.
        top_p: only the smallest set of likeliest tokens with this mass may be drawn; 1 switches it off.
        samples: responses per prompt.
        max_new_tokens: limit of the response length, end token included.
        stop_token_ids: ids that end a response, beside all end tokens of tokenizer, model and generation config.
        ignore_eos: no token ends a response; each has exactly ``max_new_tokens`` (benchmarks).
        lag: 1 generates the next batch while this one is trained on (:class:`HFEngine`: from a copy of the language
            model); 0 is on-policy.
        max_staleness: see :class:`~lightning_rlhf.rollout.Ahead`.

    Raises:
        ValueError: a setting is not allowed.
    """

    reports_logprobs = True
    max_model_len: int | None = None

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        samples: int = 1,
        max_new_tokens: int = 256,
        stop_token_ids: Iterable[int] | None = None,
        ignore_eos: bool = False,
        lag: int = 0,
        max_staleness: int | None = None,
    ) -> None:
        self.sampling = Sampling(temperature, top_k, top_p, samples, max_new_tokens)
        self.ahead = Ahead(lag, max_staleness)
        self.stop_token_ids = stop_ids_setting(stop_token_ids)
        self.ignore_eos = ignore_eos
        self.policy_version = 0

    @property
    def shares_weights(self) -> bool:
        """No: the engine has weights of its own."""
        return False

    @property
    def positions(self) -> int | None:
        """No limit beside the model's."""
        return None

    def ends(self, binding: Binding) -> list[int]:
        """Ids that end a response."""
        return [] if self.ignore_eos else binding.stop_ids

    def described(self, engine: str, binding: Binding, **own: Any) -> dict[str, Any]:
        """What ``describe`` returns: the shared settings in force, and those of the engine alone.

        Args:
            engine: its name in a configuration.
            binding: facts of model and tokenizer; ``ignored_generation_config`` lists the checkpoint's ignored options.
            own: further settings and facts.
        """
        sampling = {name: value for name, value in asdict(self.sampling).items() if name != "greedy"}
        shared = {"stop_token_ids": self.ends(binding), "ignore_eos": self.ignore_eos, **asdict(self.ahead)}
        return {"engine": engine, **sampling, **shared, **own, "ignored_generation_config": binding.ignored}


def pad_left(ids: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts as one block: ``ids [N, P]`` int64 padded on the left, and ``mask [N, P]`` bool."""
    width = max(len(row) for row in ids)
    block = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in ids], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in ids])
    return block, length_mask(lengths, width).flip(-1)


def length_mask(lengths: Tensor, columns: int) -> Tensor:
    """``[B, columns]`` bool, true on the first ``lengths[b]`` columns of row ``b``."""
    return torch.arange(columns, device=lengths.device) < lengths.unsqueeze(-1)
