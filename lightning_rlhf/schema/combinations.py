"""Values that are valid alone but not together."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_rlhf.errors import Problem
from lightning_rlhf.metrics.monitored import misspelt
from lightning_rlhf.schema.batch_sizes import BatchSizes, batch_sizes_of, settings_of
from lightning_rlhf.schema.keys import get
from lightning_rlhf.schema.shipped import homes
from lightning_rlhf.schema.trainer import processes_of
from lightning_rlhf.settings import SOMETHING_TO_FIND, PPOSettings


def combinations(config: Mapping[str, Any]) -> Iterator[Problem]:
    """All invalid combinations; those of numbers only if each number is valid by itself."""
    if get(config, "warmup._target_") == "lightning_rlhf.warmup.warm_up" and get(config, "warmup.lr") is None:
        from lightning_rlhf.warmup import RATE_WANTED

        yield Problem("warmup.lr", None, RATE_WANTED)
    lora = get(config, "model.policy.lora")
    if lora is not None and importlib.util.find_spec("peft") is None:
        yield Problem("model.policy.lora", lora, 'null, or with the package peft: pip install "lightning-rlhf[lora]"')
    yield from _monitor(config)
    settings, batch = settings_of(config), batch_sizes_of(config)
    if settings is None or batch is None:
        return
    yield from _sizes(config, settings, batch)
    yield from _processes(config, batch)
    yield from _estimator(config, settings, batch)
    yield from _termination(config, settings)
    yield from _corrections(config)
    yield from _safety(config)
    yield from _conservative(config, settings)
    yield from _groups(config, settings)


def _monitor(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that the metric by which checkpoints are kept is spelt as it is logged, and is logged in time."""
    key = "callbacks.checkpoint.monitor"
    name, terms = get(config, key), get(config, "reward.terms")
    if not isinstance(name, str):
        return
    if near := misspelt(name, terms if isinstance(terms, Mapping) else ()):
        yield Problem(key, name, f"did you mean {near}? A metric of your own needs a name that is less like it")
    elif name.startswith("eval/") and config.get("evaluate_every") is None:
        allowed = f"a whole number, such as 10, with {key} = {name}: evaluations in the course of training measure it"
        yield Problem("evaluate_every", None, allowed)


def _sizes(config: Mapping[str, Any], settings: PPOSettings, batch: BatchSizes) -> Iterator[Problem]:
    """Check that a minibatch fits into an iteration, and the longest sequence into a micro-batch."""
    update = settings.update
    if update.minibatch_size > batch.sequences:
        yield Problem(
            "module.update.minibatch_size",
            update.minibatch_size,
            f"at most {batch.sequences}, the sequences of an iteration (data.prompts_per_iteration = {batch.prompts} x "
            f"rollout.samples = {batch.samples})",
        )
    longest = (get(config, "data.max_prompt_tokens") or 0) + (get(config, "rollout.max_new_tokens") or 0)
    for name in ("micro_batch_tokens", "score_tokens"):
        if getattr(update, name) < longest:
            yield Problem(
                f"module.update.{name}",
                getattr(update, name),
                f"at least {longest}, one longest sequence (data.max_prompt_tokens + rollout.max_new_tokens)",
            )


def _processes(config: Mapping[str, Any], batch: BatchSizes) -> Iterator[Problem]:
    """Check that prompts and engines can be divided among the processes."""
    processes, engine = processes_of(get(config, "trainer") or {}), str(get(config, "rollout._target_"))
    if not processes:
        return
    if batch.prompts % processes:
        yield Problem(
            "data.prompts_per_iteration",
            batch.prompts,
            f"a multiple of {processes}, the number of processes (trainer.devices x trainer.num_nodes; "
            "with Ray trainer.ray.workers)",
        )
    own_process = processes == 1 and get(config, "trainer.ray") is None
    if not own_process and engine.endswith("VLLMEngine"):
        yield Problem("rollout", "vllm", "vllm_server or hf: vLLM inside of a training process runs with one process")
    requests = get(config, "rollout.requests_per_server")
    if engine.endswith("VLLMServerEngine") and isinstance(requests, int) and requests < processes:
        yield Problem("rollout.requests_per_server", requests, f"at least {processes}, one for each training process")


def _estimator(config: Mapping[str, Any], settings: PPOSettings, batch: BatchSizes) -> Iterator[Problem]:
    """Check that the advantage estimator has its critic or several answers per prompt, and the KL a reference."""
    advantage, critic = settings.advantage, get(config, "model.policy.critic")
    if advantage.estimator == "gae" and critic == "none":
        yield Problem(
            "module.advantage.estimator", "gae", "set model.policy.critic=shared or separate: gae needs a critic"
        )
    if advantage.estimator != "gae" and critic in ("shared", "separate"):
        allowed = f"set model.policy.critic=none: the estimator {advantage.estimator} has no use for a critic"
        yield Problem("model.policy.critic", critic, allowed)
    if advantage.estimator in ("grpo", "rloo") and batch.samples < 2:
        needs = f"at least 2: {advantage.estimator} compares the answers to one prompt"
        yield Problem("rollout.samples", batch.samples, needs)
    if settings.kl.coefficient > 0 and get(config, "model.policy.reference") == "none":
        yield Problem("module.kl.coefficient", settings.kl.coefficient, "0 without model.policy.reference")


def _termination(config: Mapping[str, Any], settings: PPOSettings) -> Iterator[Problem]:
    """Check that truncated responses have the critic that values them, or a penalty within the length limit.

    Where early ones are dropped, check that a response can be long enough to end by itself.
    """
    chosen, limit = settings.termination, get(config, "rollout.max_new_tokens")
    if chosen.early == "drop" and isinstance(limit, int) and chosen.min_tokens >= max(limit, 1):
        allowed = (
            f"it must be below rollout.max_new_tokens = {limit} with module.termination.early = drop: every response "
            "that ends by itself would be early, and dropped"
        )
        yield Problem("module.termination.min_tokens", chosen.min_tokens, allowed)
    if chosen.truncated == "bootstrap" and settings.advantage.estimator != "gae":
        allowed = "keep, penalty, drop_reward or soft_overlong, or the estimator gae with its critic"
        yield Problem("module.termination.truncated", "bootstrap", allowed)
    if chosen.truncated == "soft_overlong" and isinstance(limit, int) and chosen.overlong_cache > max(limit, 1):
        allowed = f"at most rollout.max_new_tokens = {limit} tokens, or a share of it below 1"
        yield Problem("module.termination.overlong_cache", chosen.overlong_cache, allowed)


def _corrections(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that only one of ALP and importance weights corrects the gap between engine and trainer."""
    unified = get(config, "module.alp") is not None and get(config, "module.alp.ratio", "unified") == "unified"
    weights = get(config, "module.rollout_correction.rollout_is")
    if unified and weights is not None:
        yield Problem(
            "module.rollout_correction.rollout_is",
            weights,
            "null with module.alp.ratio = unified: the ratio perturbed current / engine contains the correction, "
            "weights on top would count the gap twice; module.alp.ratio=decoupled uses weights",
        )


def _safety(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that there is something to look for, and that no log-probability of an undrawn reply is asked for."""
    block = get(config, "module.safety")
    misspelt_key = isinstance(block, Mapping) and any(f"module.safety.{name}" not in homes() for name in block)
    looks_for = ("words", "patterns", "classifier")
    if isinstance(block, Mapping) and not misspelt_key and not any(block.get(name) for name in looks_for):
        yield Problem("module.safety.words", [], SOMETHING_TO_FIND)
    readers = [name for name in ("rollout_correction", "alp") if get(config, f"module.{name}") is not None]
    if get(config, "module.safety.train_replaced") is True and readers:
        allowed = f"false with module.{readers[0]}: a reply was not drawn, and has no log-probability of the engine"
        yield Problem("module.safety.train_replaced", True, allowed)


def _conservative(config: Mapping[str, Any], settings: PPOSettings) -> Iterator[Problem]:
    """Check that there is a KL coefficient for ``data.conservative`` to multiply."""
    conservative = get(config, "data.conservative")
    blocks = (get(config, "callbacks") or {}).values()
    steered = any(str(block.get("_target_")).endswith("AdaptiveKL") for block in blocks if isinstance(block, Mapping))
    if conservative is not None and settings.kl.coefficient == 0 and not steered:
        allowed = "null with module.kl.coefficient = 0: there is no KL penalty that it could multiply"
        yield Problem("data.conservative", conservative, allowed)


def _groups(config: Mapping[str, Any], settings: PPOSettings) -> Iterator[Problem]:
    """Check that there are groups of prompts for ``module.groups``, and a normalisation to do per group."""
    own = settings.groups
    if settings.groups_fault is not None:
        yield settings.groups_fault.problem
    if get(config, "data.group_column", default="of its own data module") is None:
        off = {"weights": own.weights or None, "normalise": None if own.normalise == "none" else own.normalise}
        for name, value in off.items():
            if value is not None:
                allowed = f"{'null' if name == 'weights' else 'none'} without data.group_column: there are no groups"
                yield Problem(f"module.groups.{name}", value, allowed)
