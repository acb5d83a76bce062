"""Suggestions for unknown keys: nearest spellings, and the counterparts of other trainers' keys."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MINIBATCH = "module.update.minibatch_size"

FOREIGN_KEYS = {
    # veRL
    "actor_rollout_ref.model.path": "model.source.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.policy.activation_checkpointing",
    "actor_rollout_ref.actor.ppo_epochs": "module.update.epochs",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "module.update.minibatch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "module.update.micro_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "module.update.micro_batch_tokens",
    "actor_rollout_ref.actor.clip_ratio": "module.loss.clip_low and module.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "module.loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "module.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "module.loss.dual_clip",
    "actor_rollout_ref.actor.entropy_coeff": "module.loss.entropy_coefficient",
    "actor_rollout_ref.actor.loss_agg_mode": "module.loss.aggregation",
    "actor_rollout_ref.actor.use_kl_loss": "module.kl.placement",
    "actor_rollout_ref.actor.kl_loss_coef": "module.kl.coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "module.kl.estimator",
    "actor_rollout_ref.actor.grad_clip": "module.actor.clip_norm",
    "actor_rollout_ref.actor.optim.lr": "module.actor.lr",
    "actor_rollout_ref.rollout.n": "rollout.samples",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.response_length": "rollout.max_new_tokens",
    "critic.cliprange_value": "module.loss.value_clip",
    "critic.grad_clip": "module.critic.clip_norm",
    "critic.optim.lr": "module.critic.lr",
    "algorithm.gamma": "module.advantage.gamma",
    "algorithm.lam": "module.advantage.gae_lambda",
    "algorithm.adv_estimator": "module.advantage.estimator",
    "algorithm.norm_adv_by_std_in_grpo": "module.advantage.normalise_std",
    "algorithm.use_kl_in_reward": "module.kl.placement",
    "algorithm.kl_penalty": "module.kl.estimator",
    "algorithm.kl_ctrl.kl_coef": "module.kl.coefficient",
    "reward_model.overlong_buffer.enable": "module.termination.truncated",
    "reward_model.overlong_buffer.len": "module.termination.overlong_cache",
    "reward_model.overlong_buffer.penalty_factor": "module.termination.overlong_factor",
    "data.train_files": "data.train",
    "data.val_files": "data.validation",
    "data.train_batch_size": "data.prompts_per_iteration",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "trainer.total_epochs": "iterations",
    "trainer.total_training_steps": "iterations",
    "trainer.n_gpus_per_node": "trainer.devices",
    "trainer.test_freq": "evaluate_every",
    "trainer.experiment_name": "run_name",
    # TRL
    "learning_rate": "module.actor.lr",
    "num_ppo_epochs": "module.update.epochs",
    "num_iterations": "module.update.epochs",
    "num_mini_batches": "module.update.minibatch_size",
    "per_device_train_batch_size": "module.update.micro_batch_size",
    "gradient_accumulation_steps": "module.update.micro_batch_tokens",
    "max_grad_norm": "module.actor.clip_norm and module.critic.clip_norm",
    "total_episodes": "iterations",
    "cliprange": "module.loss.clip_low and module.loss.clip_high",
    "epsilon": "module.loss.clip_low",
    "epsilon_high": "module.loss.clip_high",
    "cliprange_value": "module.loss.value_clip",
    "vf_coef": "module.loss.value_coefficient",
    "loss_type": "module.loss.aggregation",
    "kl_coef": "module.kl.coefficient",
    "init_kl_coef": "module.kl.coefficient",
    "beta": "module.kl.coefficient",
    "kl_estimator": "module.kl.estimator",
    "lam": "module.advantage.gae_lambda",
    "gamma": "module.advantage.gamma",
    "whiten_rewards": "module.reward_processing.normalise",
    "scale_rewards": "module.advantage.normalise_std",
    "missing_eos_penalty": "module.termination.truncated_penalty",
    "num_generations": "rollout.samples",
    "response_length": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "sft_model_path": "model.source.path",
    "model_name_or_path": "model.source.path",
    "reward_model_path": "reward=reward_model",
    "batch_size": "data.prompts_per_iteration",
    "max_steps": "iterations",
    # Lightning, and guesses from memory
    "max_epochs": "iterations",
    "gpus": "trainer.devices",
    "trainer.gpus": "trainer.devices",
    "checkpoint": "resume",
    "ckpt_path": "resume",
    "model.path": "model.source.path",
    "lora": "model=hf_lora",
    "rollout.n": "rollout.samples",
    "n": "rollout.samples",
}
"""Keys of other trainers' configurations, and the keys with the same meaning here."""


def nearest(key: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Up to ``most`` of the ``known`` dotted keys, and blocks of them, that ``key`` may mean, best first.

    In this order: a path with only misspelt parts; keys elsewhere whose last part is exactly the same; keys whose last
    part is spelt similarly, in the same block or elsewhere. Never ``key`` itself.
    """
    known = [candidate for candidate in known if candidate != key]
    walked = respelt(key, known)
    if walked:
        return [walked]
    leaf = key.rpartition(".")[2]
    same_word = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]
    if same_word:
        return get_close_matches(key, same_word, n=most, cutoff=0.0)
    words = {candidate.rpartition(".")[2] for candidate in known}
    alike = get_close_matches(leaf, words, n=1, cutoff=0.75)
    found = [candidate for candidate in known if alike and candidate.rpartition(".")[2] == alike[0]]
    return get_close_matches(key, found, n=most, cutoff=0.0) or get_close_matches(key, known, n=1, cutoff=0.75)


def respelt(key: str, known: Iterable[str]) -> str | None:
    """``key`` with each part replaced by the nearest known one; ``None`` if a part is similar to none."""
    path: list[str] = []
    known = list(known)
    for part in key.split("."):
        start = "".join(f"{name}." for name in path)
        here = dict.fromkeys(c.removeprefix(start).partition(".")[0] for c in known if c.startswith(start))
        near = [part] if part in here else get_close_matches(part, here, n=1) or _begun(part, here)
        if not near:
            return None
        path.append(near[0])
    found = ".".join(path)
    return found if found != key else None


def _begun(part: str, names: Iterable[str]) -> list[str]:
    """The name that begins with ``part``, such as ``coefficient`` for ``coef``, if there is exactly one."""
    found = [name for name in names if len(part) > 2 and name.startswith(part)]
    return found if len(found) == 1 else []


def parts_of(block: str, known: Iterable[str]) -> list[str]:
    """Names inside a block of the ``known`` dotted keys; empty if it is not a block."""
    start = f"{block}."
    return list(dict.fromkeys(c.removeprefix(start).partition(".")[0] for c in known if c.startswith(start)))


def counterpart(key: str) -> str:
    """Our key for another trainer's, with what to know before its value is copied."""
    note = " (in sequences, prompts x rollout.samples; veRL counts prompts)" if key == MINIBATCH else ""
    return f"{key}{note}"


def hint(key: str, known: Iterable[str]) -> str:
    """One sentence that suggests the right key for a wrong one; empty if none is similar."""
    foreign = FOREIGN_KEYS.get(key) or FOREIGN_KEYS.get(key.rpartition(".")[2])
    if foreign and foreign != key and not respelt(key, known := list(known)):
        return f"here it is called {counterpart(foreign)}"
    known = list(known)
    near = nearest(key, known)
    if not near:
        return ""
    inside = parts_of(near[0], known) if len(near) == 1 else []
    return f"did you mean {' or '.join(near)}?" + (f" It is a block of {', '.join(inside)}" if inside else "")
