"""What every engine takes from the trainer's model and tokenizer: end tokens, vocabulary, limits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import PromptBatch, Rollout

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lightning_rlhf.rollout.base import Sampling

log = logging.getLogger(__name__)

_NO_CHOICE = ("eos_token_id", "bos_token_id", "pad_token_id", "use_cache", "transformers_version")
_NO_CHOICE_PREFIXES = ("_", "output_", "return_")
"""Entries of a generation config that are no sampling options."""


@dataclass(frozen=True)
class Binding:
    """Facts about model and tokenizer that decide what an engine generates."""

    vocabulary: int
    """Number of ids the model can produce."""
    max_positions: int | None
    """Longest sequence the model was built for; ``None`` if its configuration names no limit."""
    stop_ids: list[int]
    """Every id that ends a response: those asked for, and the end tokens of tokenizer, model and generation config."""
    pad_id: int
    """An id for padding; masks never come from comparing with it."""
    ignored: dict[str, Any]
    """Sampling options of the checkpoint's generation config, which are not applied."""


def bind(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int] = ()) -> Binding:
    """Read model and tokenizer.

    Raises:
        SettingError: a stop token lies outside the vocabulary.
    """
    lm = unwrapped(lm)
    config = lm.config.get_text_config()
    vocabulary = int(config.vocab_size)
    asked = list(stop_token_ids)
    for token in asked:
        if not (isinstance(token, int) and 0 <= token < vocabulary):
            raise SettingError("rollout.stop_token_ids", asked, f"token ids from 0 to {vocabulary - 1}, not {token!r}")
    generation = getattr(lm, "generation_config", None)
    stop_ids = sorted({i for i in end_tokens(lm, tokenizer) if 0 <= i < vocabulary} | set(asked))
    pads = (tokenizer.pad_token_id, *stop_ids)
    return Binding(
        vocabulary=vocabulary,
        max_positions=getattr(config, "max_position_embeddings", None),
        stop_ids=stop_ids,
        pad_id=next((i for i in pads if i is not None and 0 <= i < vocabulary), 0),
        ignored=_sampling_options(generation),
    )


def end_tokens(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that tokenizer, model and generation config call an end token."""
    lm = unwrapped(lm)
    generation = getattr(lm, "generation_config", None)
    return _ids(tokenizer) | _ids(generation) | _ids(lm.config.get_text_config())


def unwrapped(lm: PreTrainedModel) -> PreTrainedModel:
    """The model inside a peft wrapper; adapters injected into it stay in force."""
    base_model = getattr(lm, "get_base_model", None)
    return lm if base_model is None else base_model()


def stop_ids_setting(value: Any) -> list[int]:
    """The setting ``rollout.stop_token_ids`` as a list.

    Raises:
        SettingError: it is neither a list nor null.
    """
    if isinstance(value, (str, int)):
        raise SettingError("rollout.stop_token_ids", value, "a list of token ids, or null")
    return list(value or ())


def announce(binding: Binding, sampling: Sampling, *, ignore_eos: bool) -> None:
    """Log facts that a user may not expect."""
    if not binding.stop_ids and not ignore_eos:
        log.warning("no end token is known: every response will have rollout.max_new_tokens tokens")
    if sampling.truncated:
        log.warning(
            "rollout.top_k = %s, rollout.top_p = %s: the trainer scores tokens over the whole vocabulary, so its "
            "log-probabilities lie below the engine's by the log of the mass that was kept",
            sampling.top_k,
            sampling.top_p,
        )
    if binding.ignored:
        log.info("sampling options of the checkpoint's generation config, not applied: %s", binding.ignored)


def check_prompts(prompts: PromptBatch, max_new_tokens: int, positions: int | None) -> None:
    """Refuse a batch without prompts, an empty prompt, and prompts that leave no room for the response.

    Raises:
        ValueError: naming the prompt.
    """
    if len(prompts) == 0:
        raise ValueError("generate() was given no prompt")
    for key, ids, row in zip(prompts.keys, prompts.ids, prompts.rows, strict=True):
        name = f"{key} ({row['_source']})" if "_source" in row else key
        if not ids:
            raise ValueError(f"prompt {name} has no token")
        if positions is not None and len(ids) + max_new_tokens > positions:
            raise ValueError(
                f"rollout.max_new_tokens = {max_new_tokens} and the {len(ids)} tokens of prompt {name} exceed the "
                f"{positions} positions of model and engine: lower data.max_prompt_tokens or rollout.max_new_tokens"
            )


def check_finite(rollout: Rollout) -> None:
    """Refuse tokens without a log-probability, as they come from logits that are NaN or infinite; names the first.

    Raises:
        FloatingPointError: a log-probability is not finite.
    """
    bad = rollout.response_mask & ~rollout.rollout_logprobs.isfinite()
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise FloatingPointError(
            f"the logits of the rollout engine are not finite: response token {column} of prompt "
            f"{rollout.prompt_key[row]} has log-probability {rollout.rollout_logprobs[row, column].item()} (policy "
            f"version {int(rollout.policy_version[row])}, {int(bad.any(-1).sum())} of {len(rollout)} rows). With a "
            "rollout correction (rollout_correction=monitor or another) its missing_logprobs decides what becomes of "
            "such tokens"
        )


def _ids(source: object) -> set[int]:
    """End tokens of a tokenizer or configuration: none, one or several."""
    ids = getattr(source, "eos_token_id", None)
    return set() if ids is None else set(ids) if isinstance(ids, (list, tuple)) else {ids}


def _sampling_options(generation: GenerationConfig | None) -> dict[str, Any]:
    """Sampling options of a generation config, without end tokens (those are used here, too)."""
    options = {} if generation is None else generation.to_diff_dict()
    return {
        name: value
        for name, value in options.items()
        if name not in _NO_CHOICE and not name.startswith(_NO_CHOICE_PREFIXES)
    }
