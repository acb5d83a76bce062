"""What the user probably meant: nearest spellings, and the keys that other trainers use for the same thing."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

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
    "num_generations": "rollout.samples",
    "response_length": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "sft_model_path": "model.source.path",
    "model_name_or_path": "model.source.path",
    "reward_model_path": "reward=reward_model",
}
"""Keys of veRL's and TRL's configurations, and where the same thing is set here."""


def nearest(key: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Up to ``most`` of the ``known`` dotted keys that ``key`` may stand for, best first.

    Keys that end in exactly the same word win (the path was wrong), then the same place with a word spelt alike,
    then whole paths that look alike.
    """
    known = list(known)
    parent, _, leaf = key.rpartition(".")
    same_word = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]
    if same_word:
        return get_close_matches(key, same_word, n=most, cutoff=0.0)
    siblings = {c.rpartition(".")[2]: c for c in known if c.rpartition(".")[0] == parent}
    alike = [siblings[word] for word in get_close_matches(leaf, siblings, n=1)]
    return alike or get_close_matches(key, known, n=1)


def hint(key: str, known: Iterable[str]) -> str:
    """One sentence that leads from a wrong key to the right one; empty where nothing is near."""
    foreign = FOREIGN_KEYS.get(key)
    if foreign:
        return f"here it is called {foreign}"
    near = nearest(key, known)
    return f"did you mean {' or '.join(near)}?" if near else ""
