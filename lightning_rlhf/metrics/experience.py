"""The metrics of one iteration: of its experience, and of the policy while it is updated."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.experience import Experience, Finish, MiniBatch, Safety
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.functional.losses import PolicyLoss
from lightning_rlhf.functional.stats import explained_variance
from lightning_rlhf.metrics.batch import MetricBatch


def experience_numbers(experience: Experience, metrics: MetricBatch) -> dict[str, float]:
    """The metrics of :func:`experience_metrics` and those already in ``metrics``, reduced over ranks."""
    experience_metrics(experience, metrics)
    numbers = metrics.compute()
    if "value/mean" in numbers:  # on all ranks, if any rank has a valid token
        values, returns = experience.require("values"), experience.require("returns")
        explained = explained_variance(values, returns, experience.require("loss_mask"))
        numbers["value/explained_variance"] = float(explained)
    return numbers


@torch.no_grad()
def experience_metrics(experience: Experience, metrics: MetricBatch) -> None:
    """Scores, lengths, entropy, engine against trainer, advantages and values, over valid rows and tokens."""
    scores, valid, generated = experience.require("scores"), experience.require("loss_mask"), experience.response_mask
    own = experience.own
    metrics.mean("reward/mean", scores, own, std="reward/std")
    metrics.max("reward/max", scores, own)
    metrics.min("reward/min", scores, own)
    for name, term in experience.components.items():
        metrics.mean(f"reward/term/{name}", term, own)
    lengths = experience.response_lengths.float()
    metrics.mean("response/length_mean", lengths)
    metrics.max("response/length_max", lengths)
    metrics.min("response/length_min", lengths)
    metrics.mean("response/truncated_fraction", (experience.finish == Finish.TRUNCATED).float())
    metrics.mean("response/early_fraction", (experience.finish == Finish.EARLY).float())
    if experience.safety is not None:
        metrics.mean("safety/flagged_fraction", (experience.safety != Safety.SAFE).float())
        metrics.mean("safety/redrawn_fraction", (experience.safety == Safety.REDRAWN).float())
        metrics.mean("safety/replaced_fraction", (experience.safety == Safety.REPLACED).float())
        metrics.mean("safety/cached_fraction", (experience.safety == Safety.CACHED).float())
        metrics.mean("safety/unsafe_fraction", (experience.safety == Safety.UNSAFE).float())
    metrics.mean("prompt/length_mean", experience.prompt_mask.sum(-1).float())
    metrics.mean("tokens/rejected_fraction", (~valid).float(), generated)
    if experience.entropy is not None:
        metrics.mean("entropy/mean", experience.entropy, generated)
    if experience.old_logprobs is not experience.rollout_logprobs:
        # Tokens without a log-probability of the engine are left out; NaN of the trainer stays visible.
        gap = (experience.require("old_logprobs") - experience.rollout_logprobs).abs()
        compared = generated & experience.rollout_logprobs.isfinite()
        metrics.mean("rollout/logprob_abs_diff_mean", gap, compared)
        metrics.max("rollout/logprob_abs_diff_max", gap, compared)
    advantages = experience.require("advantages")
    metrics.mean("advantage/mean", advantages, valid, std="advantage/std")
    metrics.mean("advantage/abs_mean", advantages.abs(), valid)
    metrics.max("advantage/max", advantages, valid)
    metrics.min("advantage/min", advantages, valid)
    metrics.mean("return/mean", experience.require("returns"), valid, std="return/std")
    if experience.values is not None:
        metrics.mean("value/mean", experience.values, valid)
    metrics.sum("batch/sequences", torch.full((), len(experience), dtype=torch.float64, device=scores.device))
    metrics.sum("batch/tokens", generated)


@torch.no_grad()
def policy_metrics(micro: MiniBatch, logprobs: Tensor, policy: PolicyLoss, metrics: MetricBatch) -> None:
    """Distance of the current policy from the old and the reference one, ratio and clipping, over valid tokens.

    Both use estimator k3, whatever the penalty uses: the tokens are samples of the old policy. For a policy that has
    moved away from them k1 reports that it came closer to the reference (its mean there is minus a KL, not a KL).
    """
    mask = micro.require("loss_mask")
    metrics.mean("kl/old", kl_estimate(micro.require("old_logprobs"), logprobs, "k3"), mask)
    if micro.ref_logprobs is not None:
        metrics.mean("kl/ref_update", kl_estimate(logprobs, micro.ref_logprobs, "k3"), mask)
    metrics.mean("ppo/clip_fraction", policy.clipped.float(), mask)
    metrics.mean("ppo/clip_fraction_lower", policy.clipped_lower.float(), mask)
    metrics.mean("perf/padding_fraction", (~micro.concatenated()[1]).float())
    metrics.mean("ppo/ratio_mean", policy.ratio, mask)
    metrics.max("ppo/ratio_max", policy.ratio, mask)
    metrics.min("ppo/ratio_min", policy.ratio, mask)


@torch.no_grad()
def row_kl(experience: Experience) -> Tensor | None:
    """``[B]`` mean KL(policy || reference) of each row's generated tokens, nats, estimator k3; ``None`` without one."""
    if experience.ref_logprobs is None:
        return None
    mask = experience.response_mask
    kl = kl_estimate(experience.require("old_logprobs"), experience.ref_logprobs, "k3")
    return kl.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
