"""Tokenizer and generation config of an exported folder, ready for generation."""

from __future__ import annotations

import copy
import logging

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
OF_BEAMS = ("early_stopping", "length_penalty")


def exported_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy that pads on the left, as generation needs for a batch of prompts."""
    exported = copy.deepcopy(tokenizer)
    exported.padding_side = "left"
    exported.init_kwargs["padding_side"] = "left"  # this is written to disk; the attribute is not
    return exported


def exported_generation_config(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig | None:
    """The model's generation config, its end and padding tokens named, without what transformers refuses to save.

    It refuses options without effect: sampling options without ``do_sample``, beam options without ``num_beams``.
    Leaving them out does not change what is generated; each is logged.
    """
    if lm.generation_config is None:
        return None
    config = copy.deepcopy(lm.generation_config)
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None or config.pad_token_id < 0:
        config.pad_token_id = tokenizer.pad_token_id
    if _refused(config) is None:
        return config
    idle = [] if config.do_sample is True else [(name, "do_sample") for name in OF_SAMPLING]
    idle += [(name, "num_beams") for name in OF_BEAMS] if config.num_beams in (None, 1) else []
    for name, needs in idle:
        if name in config.to_diff_dict():
            value = getattr(config, name)
            said = "export: the generation config's %s = %r has no effect without %s: left out"
            log.warning(said, name, value, needs)
        if hasattr(config, name):
            setattr(config, name, None)
    if (reason := _refused(config)) is not None:
        log.warning("export: the generation config is left out, but for its tokens: %s", reason)
        tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = GenerationConfig(**tokens)
    return config


def _refused(config: GenerationConfig) -> str | None:
    """Why transformers would not save the config; ``None`` if it would."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        return str(error).splitlines()[0]
    return None
