"""The loss of a micro-batch: policy, values, entropy, KL to the reference, and what mixins add."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_rlhf.experience import MiniBatch
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.functional.losses import aggregate, value_loss
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.experience import policy_metrics

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule

ACCEPTED_TOKENS = "accepted tokens"
"""Key of a minibatch's count over all ranks; reduced with the metrics but not logged."""


def micro_batch_loss(module: ActorCriticModule, micro: MiniBatch, metrics: MetricBatch) -> Tensor:
    """The scalar loss for the backward pass, normalised so that the micro-batches of a minibatch add up.

    Args:
        module: its extension points compute the terms.
        micro: rows of one minibatch.
        metrics: receives the terms.
    """
    settings = module.settings
    output = module.actor_logprobs(micro)
    policy = module.policy_loss(micro, output.logprobs)
    if policy.accepted is not None:  # tokens rejected under the current policy leave all terms
        micro = replace(micro, loss_mask=policy.accepted)
    mask, total = micro.require("loss_mask"), policy.loss
    metrics.sum(ACCEPTED_TOKENS, mask)
    metrics.sum("ppo/policy_loss", policy.loss)
    if module.critic is not None:
        values = _values(module, micro) if output.values is None else output.values
        value = value_loss(
            values,
            micro.require("values"),
            micro.require("returns"),
            mask,
            clip=settings.loss.value_clip,
            scale=micro.scale,
        )
        total = total + settings.loss.value_coefficient * value.loss
        metrics.sum("ppo/value_loss", value.loss)
        metrics.mean("value/clip_fraction", value.clipped.float(), mask)
    if output.entropy is not None:
        metrics.mean("entropy/update", output.entropy, mask)
    if output.entropy is not None and settings.loss.entropy_coefficient:
        entropy = aggregate(output.entropy, mask, micro.scale)
        total = total - settings.loss.entropy_coefficient * entropy
    if micro.ref_logprobs is not None and settings.kl.placement == "loss":
        penalty = kl_estimate(output.logprobs, micro.ref_logprobs, settings.kl.estimator, mask=mask)
        kl = aggregate(penalty, mask, micro.scale)
        paid = kl if micro.kl_scale is None else aggregate(micro.kl_scale.unsqueeze(-1) * penalty, mask, micro.scale)
        total = total + module.control.value("kl_coefficient") * paid
        metrics.sum("kl/loss", kl)
    for name, term in module.extra_losses(micro).items():
        total = total + term
        metrics.sum(name, term)
    policy_metrics(micro, output.logprobs.detach(), policy, metrics)
    return total


def _values(module: ActorCriticModule, micro: MiniBatch) -> Tensor:
    """Values ``[B, R]`` of a separate critic model."""
    ids, mask = micro.concatenated()
    return module.critic(ids, mask, micro.response_ids.shape[1])[:, :-1]  # type: ignore[misc]
