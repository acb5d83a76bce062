"""From a rollout to experience: rewards, log-probabilities, values, advantages. Each step only adds fields."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.distributed.parallel import in_step
from lightning_rlhf.experience import Experience, Finish, PromptBatch, Rollout, split_by_tokens
from lightning_rlhf.functional.advantages import (
    gae,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    rloo_advantages,
    token_rewards,
)
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.functional.stats import whiten
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.groups import PromptGroups
from lightning_rlhf.metrics.moments import RunningMoments
from lightning_rlhf.models import Actor, AdapterReference, FrozenReference, SeparateCritic, SharedCritic
from lightning_rlhf.rewards import CompositeReward, RewardBatch
from lightning_rlhf.rewards.termination import RewardChanges, reward_changes
from lightning_rlhf.settings import WHITENED, AdvantageSettings, PPOSettings, RewardSettings


def score_rewards(
    reward: CompositeReward,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    rollout: Rollout,
    end_ids: Collection[int] = (),
) -> Experience:
    """Decode the responses and score them; the token ids travel along, so nothing is tokenised again.

    Args:
        reward: gives one number per sequence, and the terms it consists of.
        tokenizer: of the policy.
        prompts: the prompts the rollout answers, each once.
        rollout: prompt-major, ``len(rollout) / len(prompts)`` samples of each.
        end_ids: end tokens of the model, beside the tokenizer's own.
    """
    return score_batch(reward, reward_batch(tokenizer, prompts, rollout, end_ids), prompts, rollout)


def reward_batch(
    tokenizer: PreTrainedTokenizerBase, prompts: PromptBatch, rollout: Rollout, end_ids: Collection[int] = ()
) -> RewardBatch:
    """What a reward sees of the responses; the arguments are those of :func:`score_rewards`."""
    asked = prompts.repeat(len(rollout) // len(prompts))
    lengths = rollout.response_lengths.tolist()
    ids = [row[:length] for row, length in zip(rollout.response_ids.tolist(), lengths, strict=True)]
    texts, plain = as_written(tokenizer, ids, end_ids), tokenizer.batch_decode(ids, skip_special_tokens=True)
    finish = [Finish(code) for code in rollout.finish.tolist()]
    return RewardBatch(
        prompts=asked.texts,
        responses=texts,
        response_ids=ids,
        rows=asked.rows,
        finish=finish,
        plain_responses=plain,
        keys=asked.keys,
    )


def score_batch(reward: CompositeReward, batch: RewardBatch, prompts: PromptBatch, rollout: Rollout) -> Experience:
    """Score what :func:`reward_batch` returned for these prompts and this rollout."""
    output, asked = reward(batch), prompts.repeat(len(rollout) // len(prompts))
    experience = Experience.from_rollout(rollout, batch.prompts, batch.responses)
    experience.prompt_group = asked.groups
    device = rollout.response_ids.device
    experience.scores = output.total.to(device)
    experience.components = {name: term.to(device) for name, term in output.components.items()}
    if asked.kl_scales:
        experience.kl_scale = torch.tensor(asked.kl_scales, dtype=torch.float32, device=device)
    return experience


def response_texts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout, end_ids: Collection[int] = ()) -> list[str]:
    """The text of each response, see :func:`as_written`."""
    lengths = rollout.response_lengths.tolist()
    ids = [row[:length] for row, length in zip(rollout.response_ids.tolist(), lengths, strict=True)]
    return as_written(tokenizer, ids, end_ids)


def as_written(tokenizer: PreTrainedTokenizerBase, ids: list[list[int]], end_ids: Collection[int] = ()) -> list[str]:
    """The text of each response without trailing end and padding tokens; nothing else is removed or cleaned up.

    Args:
        tokenizer: of the policy.
        ids: the tokens of each response.
        end_ids: end tokens beside the tokenizer's own.
    """
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *end_ids}
    kept = [row[: next((i for i in range(len(row), 0, -1) if row[i - 1] not in ends), 0)] for row in ids]
    texts: list[str] = tokenizer.batch_decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return texts


@torch.no_grad()
def score_experience(
    experience: Experience,
    actor: Actor,
    critic: SeparateCritic | SharedCritic | None,
    reference: FrozenReference | AdapterReference | None,
    *,
    temperature: float,
    budget: int,
    old_policy: bool = True,
) -> None:
    """Add old and reference log-probabilities, entropy and values, all ``[B, R]`` float32 and 0 on padding.

    Args:
        experience: the rows to score; filled in place.
        actor: the policy before the update.
        critic: its values are those of the state in which each token was chosen; ``final_values [B]`` is the value
            after the last token of truncated rows and 0 for rows that ended.
        reference: scored under the same temperature as the actor.
        temperature: of sampling; both models are scored under it.
        budget: tokens (padding included) of one forward pass.
        old_policy: score the actor. Otherwise the engine's log-probabilities are the old ones, there is no entropy, and
            the actor computes only the hidden states for a critic on its trunk.
    """
    mask, device = experience.response_mask, experience.response_ids.device
    rows_total, columns_total = mask.shape
    names = (["old_logprobs", "entropy"] if old_policy else []) + (["ref_logprobs"] if reference is not None else [])
    scored = {name: torch.zeros(rows_total, columns_total, dtype=torch.float32, device=device) for name in names}
    values = torch.zeros(rows_total, columns_total + 1, dtype=torch.float32, device=device)
    shared = isinstance(critic, SharedCritic)
    parts = list(split_by_tokens(experience, experience.lengths(), budget))
    for index, part in in_step(actor, parts, parts[-1]):  # scoring a part again changes nothing
        rows, columns = index.to(device), part.response_ids.shape[1]
        ids, attention = part.concatenated()
        hidden = None
        if old_policy:
            output = actor(ids, attention, columns, temperature=temperature, entropy="detached", with_hidden=shared)
            scored["old_logprobs"][rows, :columns] = output.logprobs
            scored["entropy"][rows, :columns] = output.entropy
            hidden = output.hidden
        elif shared:
            hidden = actor.hidden_states(ids, attention, columns)
        if reference is not None:
            scored["ref_logprobs"][rows, :columns] = reference.logprobs(ids, attention, columns, temperature)
        if critic is not None:
            values[rows, : columns + 1] = critic(hidden) if shared else critic(ids, attention, columns)
    for name, tensor in scored.items():
        setattr(experience, name, tensor.masked_fill(~mask, 0.0))
    if not old_policy:
        experience.old_logprobs = experience.rollout_logprobs
    if critic is not None:
        after_last = values.gather(1, experience.response_lengths.unsqueeze(1)).squeeze(1)
        experience.final_values = after_last.masked_fill(experience.finish != Finish.TRUNCATED, 0.0)
        experience.values = values[:, :-1].masked_fill(~mask, 0.0)


@torch.no_grad()
def compute_advantages(
    experience: Experience,
    settings: PPOSettings,
    beta: float,
    moments: RunningMoments,
    metrics: MetricBatch,
    groups: PromptGroups | None = None,
) -> None:
    """Add processed rewards ``[B]``, advantages and returns ``[B, R]``.

    The recursions run over the response mask **before** rejection, so that a rejected last token does not swallow
    the outcome; statistics, whitening and group means see the rows and tokens that survived.

    Args:
        experience: scored; filled in place.
        settings: of the module.
        beta: current KL coefficient, times ``experience.kl_scale`` where rows have one; part of the rewards only with
            ``kl.placement=reward``.
        moments: of all scores so far, for ``normalise: running``; updated.
        metrics: receives the KL to the reference.
        groups: of the prompts, with their weights and normalisation; ``None`` for none.
    """
    mask, valid = experience.response_mask, experience.require("loss_mask")
    rows = valid.any(-1)
    changes = reward_changes(experience, settings.termination)
    if changes.penalty is not None:
        metrics.mean("reward/termination_penalty", changes.penalty)
    if settings.termination.early == "drop":
        metrics.mean("response/dropped_fraction", (experience.finish == Finish.EARLY).float())
    if experience.penalty is not None:
        changes = changes.plus(experience.penalty)
    scores = experience.require("scores")
    groups = groups if groups is not None and groups.names else None
    by_group = groups if settings.groups.normalise == "rewards" else None
    members = None if groups is None else groups.members(experience)
    experience.rewards = process_scores(scores, rows, settings.reward_processing, moments, changes, by_group, members)
    penalty, kl = beta if settings.kl.placement == "reward" else 0.0, None
    if experience.ref_logprobs is not None:
        kl = kl_estimate(experience.require("old_logprobs"), experience.ref_logprobs, settings.kl.estimator)
        per_sequence = kl.masked_fill(~mask, 0.0).sum(-1)
        metrics.mean("kl/ref", kl, valid)
        metrics.mean("kl/ref_sequence", per_sequence, rows)
        if experience.kl_scale is not None:  # from here on the KL that is paid for, not the one that is measured
            kl, per_sequence = experience.kl_scale.unsqueeze(-1) * kl, experience.kl_scale * per_sequence
        # Where the reference's probability is 0 the KL is infinite, and 0 * inf is NaN.
        taken, weighed = (c * per_sequence if c else torch.zeros_like(per_sequence) for c in (penalty, beta))
        metrics.mean("kl/reward_penalty", -taken, rows)
        own = rows if experience.own is None else rows & experience.own
        metrics.mean("reward/total_with_kl", scores - weighed, own)
    rewards = token_rewards(experience.rewards, mask, kl, penalty)
    if experience.reward_override is not None:
        replaced = mask & ~experience.reward_override.isnan()
        metrics.mean("reward/overridden_fraction", replaced.float(), valid)
        rewards = torch.where(replaced, experience.reward_override, rewards)
    bootstrap = experience.final_values if settings.termination.truncated == "bootstrap" else None
    advantages, experience.returns = _estimate(experience, rewards, settings.advantage, bootstrap)
    metrics.mean("advantage/raw_abs_mean", advantages.abs(), valid)
    experience.advantages = _finished(advantages, valid, settings, groups, members)


def _finished(
    advantages: Tensor, valid: Tensor, settings: PPOSettings, groups: PromptGroups | None, members: Tensor | None
) -> Tensor:
    """The advantages as the loss reads them: whitened where configured, times the weights of their groups."""
    if not (settings.advantage.whiten and settings.advantage.estimator in WHITENED):
        advantages = advantages.masked_fill(~valid, 0.0)
    elif groups is not None and members is not None and settings.groups.normalise == "advantages":
        advantages = groups.whiten(advantages, valid, members)
    else:
        advantages = whiten(advantages, valid)
    return advantages if groups is None or members is None else groups.weighted(advantages, members)


def _estimate(
    experience: Experience, rewards: Tensor, settings: AdvantageSettings, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advantages before whitening, and returns; ``bootstrap [B]`` is what :func:`gae` adds after truncated rows."""
    mask, valid = experience.response_mask, experience.require("loss_mask")
    if settings.estimator == "gae":
        return gae(
            rewards,
            experience.require("values"),
            mask,
            gamma=settings.gamma,
            lam=settings.gae_lambda,
            bootstrap=bootstrap,
        )
    if settings.estimator == "reinforce_plus_plus":
        advantages = reinforce_plus_plus_advantages(rewards, mask, gamma=settings.gamma)
    elif settings.estimator == "grpo":
        # Group estimators compare whole answers, so the KL penalty is part of what they compare.
        advantages = grpo_advantages(rewards.sum(-1), experience.group, valid, normalise_std=settings.normalise_std)
    else:
        advantages = rloo_advantages(rewards.sum(-1), experience.group, valid)
    return advantages, advantages


def process_scores(
    scores: Tensor,
    rows: Tensor,
    settings: RewardSettings,
    moments: RunningMoments,
    changes: RewardChanges,
    groups: PromptGroups | None = None,
    members: Tensor | None = None,
) -> Tensor:
    """Clip the sequence rewards ``[B]``, add the penalties of termination, and normalise over ``rows``.

    A penalty is added after clipping, so that no clip can cancel it, and before the z-score, which sees it. A row
    without a score is in no statistic and has the reward 0. KL penalties are not touched. With ``groups`` the z-score
    is taken within the group of the row's prompt, ``members [B]``.
    """
    if settings.clip is not None:
        scores = scores.clamp(-settings.clip, settings.clip)
    if changes.penalty is not None:
        scores = scores + changes.penalty
    if changes.without is not None:
        rows = rows & ~changes.without
    if settings.normalise == "running":
        moments.update(scores, rows)
    if groups is not None and members is not None:
        whitened = settings.normalise == "batch"
        scores = groups.whiten(scores, rows, members) if whitened else groups.running(scores, rows, members, moments)
    elif settings.normalise == "batch":
        scores = whiten(scores, rows)
    elif settings.normalise == "running":
        scores = moments.normalise(scores)
    return scores if changes.without is None else scores.masked_fill(changes.without, 0.0)
