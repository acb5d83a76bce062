"""Every metric the kit logs: name, unit, which way is better, how it is reduced, what it means, names elsewhere.

Metrics are checked against this table before they are logged, so a misspelt name is an error and not a curve that
never appears. ``docs/metrics.md`` and the metric part of ``docs/coming-from-verl-trl-openrlhf.md`` are printed from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Literal, get_args

from lightning_rlhf.metrics.names_evaluation import EVALUATION
from lightning_rlhf.metrics.names_groups import GROUPS
from lightning_rlhf.metrics.names_prompts import PROMPTS
from lightning_rlhf.metrics.names_ptx import PTX
from lightning_rlhf.metrics.names_rollout_corr import ROLLOUT_CORR
from lightning_rlhf.metrics.names_safety import SAFETY

Better = Literal["up", "down", "neither"]

REDUCTIONS = {
    "tokens": "mean over the valid tokens of all ranks: sums are added up first, then divided",
    "sequences": "mean over the sequences of all ranks: sums are added up first, then divided",
    "deviation": "standard deviation (n - 1) over the same elements as the mean beside it, all ranks",
    "max": "largest over all ranks and, during updates, over all minibatches",
    "min": "smallest over all ranks and, during updates, over all minibatches",
    "steps": "reduced over all ranks within each minibatch, then the mean over the iteration's minibatches",
    "sum": "added up over all ranks",
    "gathered": "from the values of all ranks, which are gathered: a percentile of the valid tokens, a correlation",
    "once": "one number, the same on every rank; the value at the end of the iteration",
    "rank 0": "measured by the rank that logs",
}
"""How a number is combined over minibatches and ranks."""


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of them.

    Attributes:
        name: ``group/name``; a part in angle brackets stands for any letters, digits, ``_``, ``-`` and ``.``.
        unit: of the value.
        better: the desired direction; ``neither`` if both extremes are bad or there is none.
        reduced: a key of :data:`REDUCTIONS`.
        description: mask, direction and estimator of a KL, per token or per sequence, before or after clipping.
        aliases: the nearest metric of ``verl``, ``trl``, ``openrlhf`` and ``sb3``, with the difference in brackets.
    """

    name: str
    unit: str
    better: Better
    reduced: str
    description: str
    aliases: Mapping[str, str] = field(default_factory=dict)

    def matches(self, name: str) -> bool:
        """Whether ``name`` is this metric, or one of this family."""
        return re.fullmatch(_pattern(self.name), name) is not None


@cache
def _pattern(name: str) -> str:
    return "".join(r"[A-Za-z0-9_.\-]+" if part.startswith("<") else re.escape(part) for part in _split(name))


def _split(name: str) -> list[str]:
    return [part for part in re.split(r"(<[a-z_]+>)", name) if part]


def _m(name: str, unit: str, better: Better, reduced: str, description: str, **aliases: str) -> Metric:
    return Metric(name, unit, better, reduced, description, aliases)


# fmt: off
METRICS: list[Metric] = [
    # --- reward: the score of whole sequences --------------------------------------------------------------------
    _m("reward/mean", "score", "up", "sequences", "Weighted sum of the reward terms as scored: before clipping, "
       "normalisation and KL penalty. This and the next four: without what `module.safety` has replaced or left out.",
       verl="critic/score/mean", trl="objective/scores (GRPO: reward)", openrlhf="reward", sb3="rollout/ep_rew_mean"),
    _m("reward/std", "score", "neither", "deviation", "Spread of the scores of one iteration; near 0 there is nothing "
       "to learn from.", trl="reward_std (GRPO, within groups)"),
    _m("reward/max", "score", "up", "max", "Best score of the iteration.", verl="critic/score/max"),
    _m("reward/min", "score", "up", "min", "Worst score of the iteration.", verl="critic/score/min"),
    _m("reward/term/<name>", "score", "up", "sequences", "One term of the reward, before its weight.",
       trl="rewards/<function>/mean (GRPO)"),
    _m("reward/total_with_kl", "score", "up", "sequences", "Score minus coefficient times KL(current || reference) "
       "summed over its tokens, before normalisation; without sequences that leave the loss.",
       verl="critic/rewards/mean", trl="objective/rlhf_reward", openrlhf="return (after discounting)"),
    _m("reward/termination_penalty", "score", "up", "sequences", "Penalty of how a sequence ended (early, cut at the "
       "limit, near it), added to its score; mean over all sequences, logged where `module.termination` has one."),
    _m("reward/overridden_fraction", "share", "down", "tokens", "Share of tokens whose reward was replaced by a fixed "
       "one (callback kl_guard: tokens over its limit)."),
    # --- kl: two distances, two names ----------------------------------------------------------------------------
    _m("kl/ref", "nats/token", "down", "tokens", "KL(current || reference) on the sampled tokens, before any update of "
       "the iteration; configured estimator (k1 by default); tokens left after rejection.",
       verl="actor/reward_kl_penalty (actor/kl_loss where it is in the loss)", openrlhf="kl", trl="kl (GRPO)"),
    _m("kl/ref_sequence", "nats/sequence", "down", "sequences", "kl/ref summed over all tokens of a sequence; grows "
       "with length.", trl="objective/kl"),
    _m("kl/ref_average", "nats/token", "down", "tokens", "Exponential moving average of kl/ref over iterations: what "
       "the controller of the coefficient acts on (callback adaptive_kl)."),
    _m("kl/ref_update", "nats/token", "down", "steps", "KL(current || reference) while the policy is updated: current "
       "weights, old policy's tokens, valid tokens, estimator k3 (k1 has the wrong sign on tokens left behind)."),
    _m("kl/old", "nats/token", "down", "steps", "KL(old || current), estimator k3: how far the updates moved the "
       "policy from the one that sampled; valid tokens, before each step.", verl="actor/ppo_kl (k1, may be negative)",
       trl="policy/approxkl_avg (k2, padding takes part)", openrlhf="ppo_kl (k1)", sb3="train/approx_kl"),
    _m("kl/coefficient", "1", "neither", "once", "beta, the weight of the KL to the reference, in force during the "
       "iteration.", verl="actor/reward_kl_penalty_coeff (actor/kl_coef)"),
    _m("kl/reward_penalty", "score", "up", "sequences", "The KL penalty in the reward: minus beta times the "
       "sequence's KL to the reference; 0 where the penalty is in the loss.", trl="objective/non_score_reward"),
    _m("kl/loss", "nats/token", "down", "steps", "KL(current || reference) as a term of the loss, aggregated like the "
       "policy loss, before its coefficient.", verl="actor/kl_loss"),
    # --- ppo: the objective --------------------------------------------------------------------------------------
    _m("ppo/policy_loss", "1", "neither", "steps", "Clipped surrogate loss in the configured aggregation; its level "
       "says little (whitened advantages make it start near 0).", verl="actor/pg_loss", trl="loss/policy_avg",
       openrlhf="policy_loss", sb3="train/policy_gradient_loss"),
    _m("ppo/value_loss", "1", "down", "steps", "Half the squared error against the returns (clipped where configured), "
       "same aggregation, before its coefficient.", verl="critic/vf_loss", trl="loss/value_avg",
       openrlhf="critic_loss", sb3="train/value_loss (no half)"),
    _m("ppo/clip_fraction", "share", "neither", "steps", "Share of valid tokens where the clipped branch is the one "
       "taken (clip active, not merely outside the band).", verl="actor/pg_clipfrac", trl="policy/clipfrac_avg",
       openrlhf="ppo_clip_ratio", sb3="train/clip_fraction (outside the band)"),
    _m("ppo/clip_fraction_lower", "share", "neither", "steps", "Share of valid tokens where the dual clip acts "
       "(negative advantage, large ratio).", verl="actor/pg_clipfrac_lower"),
    _m("ppo/ratio_mean", "1", "neither", "steps", "Mean of current / old probability over valid tokens, before "
       "clipping.", trl="val/ratio"),
    _m("ppo/ratio_max", "1", "down", "max", "Largest current / old probability of a valid token, before clipping."),
    _m("ppo/ratio_min", "1", "up", "min", "Smallest current / old probability of a valid token, before clipping."),
    _m("ppo/epochs_used", "epochs", "neither", "once", "Passes that reached a minibatch with an accepted token."),
    _m("ppo/updates", "steps", "neither", "once", "Optimiser steps taken in this iteration."),
    _m("ppo/steps_skipped", "steps", "down", "once", "Minibatches with an accepted token, but no step."),
    # --- policy, values, advantages ------------------------------------------------------------------------------
    _m("entropy/mean", "nats/token", "neither", "tokens", "Entropy of the sampling distribution (temperature applied) "
       "at every generated token, before the updates.", verl="actor/entropy",
       trl="policy/entropy_avg (GRPO: entropy)", openrlhf="entropy_loss", sb3="train/entropy_loss (negated)"),
    _m("entropy/update", "nats/token", "neither", "steps", "Entropy while the policy is updated: current weights "
       "(with noise where ALP is on), tokens in the loss."),
    _m("value/mean", "score", "neither", "tokens", "Predicted value before the updates, valid tokens.",
       verl="critic/values/mean (critic/vpred_mean during updates)", openrlhf="values"),
    _m("value/explained_variance", "1", "up", "once", "1 - Var(returns - values) / Var(returns) over the valid tokens "
       "of all ranks, before the updates; 0 is as good as a constant.", verl="critic/vf_explained_var",
       sb3="train/explained_variance"),
    _m("value/clip_fraction", "share", "neither", "steps", "Share of valid tokens where the clipped value loss is the "
       "one taken.", verl="critic/vf_clipfrac", trl="val/clipfrac_avg"),
    _m("advantage/mean", "1", "neither", "tokens", "Advantages as the loss sees them (whitened where configured), "
       "valid tokens.", verl="critic/advantages/mean"),
    _m("advantage/std", "1", "neither", "deviation", "Spread of the advantages; 1 where they are whitened."),
    _m("advantage/abs_mean", "1", "neither", "tokens", "Mean |advantage|: the strength of the learning signal."),
    _m("advantage/raw_abs_mean", "score", "neither", "tokens", "Mean |advantage| before whitening, which brings any "
       "signal, however weak, to the same size."),
    _m("advantage/max", "1", "neither", "max", "Largest advantage.", verl="critic/advantages/max"),
    _m("advantage/min", "1", "neither", "min", "Smallest advantage.", verl="critic/advantages/min"),
    _m("return/mean", "score", "up", "tokens", "Targets of the value function, valid tokens.",
       verl="critic/returns/mean", openrlhf="return"),
    _m("return/std", "score", "neither", "deviation", "Spread of the returns."),
    # --- what was generated --------------------------------------------------------------------------------------
    _m("response/length_mean", "tokens", "neither", "sequences", "Generated tokens of a sequence, the end token "
       "included.", verl="response_length/mean", trl="completions/mean_length (GRPO)", openrlhf="response_length"),
    _m("response/length_max", "tokens", "neither", "max", "Longest response.", verl="response_length/max",
       trl="completions/max_length (GRPO)"),
    _m("response/length_min", "tokens", "neither", "min", "Shortest response.", verl="response_length/min",
       trl="completions/min_length (GRPO)"),
    _m("response/truncated_fraction", "share", "down", "sequences", "Share of sequences that reached the length limit "
       "without an end token.", verl="response_length/clip_ratio (every sequence of full length)",
       trl="completions/clipped_ratio (GRPO)"),
    _m("response/early_fraction", "share", "down", "sequences", "Share of sequences with fewer than "
       "`module.termination.min_tokens` tokens before their end token."),
    _m("response/dropped_fraction", "share", "down", "sequences", "Share of sequences that ended early and were left "
       "out of all statistics and the loss; logged with `module.termination.early=drop`."),
    _m("prompt/length_mean", "tokens", "neither", "sequences", "Tokens of a prompt.", verl="prompt_length/mean"),
    _m("tokens/rejected_fraction", "share", "down", "tokens", "Share of generated tokens that rejection took out of "
       "the loss, those of dropped sequences included."),
    _m("rollout/logprob_abs_diff_mean", "nats/token", "down", "tokens", "|trainer's - engine's log-probability| of the "
       "sampled token, every generated token.", verl="training/rollout_probs_diff_mean (of probabilities)",
       trl="sampling/sampling_logp_difference/mean (GRPO)", openrlhf="vllm_kl (a KL)"),
    _m("rollout/logprob_abs_diff_max", "nats/token", "down", "max", "Largest difference of a generated token.",
       verl="training/rollout_probs_diff_max (of probabilities)",
       trl="sampling/sampling_logp_difference/max (GRPO)"),
    _m("rollout/staleness_mean", "iterations", "down", "sequences", "Iterations by which the weights that drew a "
       "sample lag behind the policy; 0 is on-policy, 1 is normal with `rollout.lag=1`."),
    _m("rollout/staleness_max", "iterations", "down", "max", "Staleness of the stalest sample."),
    _m("rollout/drawn_late", "0 or 1", "down", "once", "1 if rollouts run ahead but this one was drawn when needed: "
       "the run's first, or in place of one that was too stale."),
    # --- calibration: engine against trainer at the same weights, on a probe ---------------------------------------
    _m("calibrate/logprob_abs_diff_mean", "nats/token", "down", "tokens", "|trainer's - engine's log-probability| of "
       "the tokens of a probe (callback calibrate): same weights, so rounding only; the run ends above its limit.",
       verl="training/rollout_probs_diff_mean (of probabilities, on the rollout)"),
    _m("calibrate/logprob_abs_diff_max", "nats/token", "down", "max", "Largest difference of a probe token."),
    _m("calibrate/k3_kl", "nats/token", "down", "tokens", "KL(engine || trainer) of the probe's tokens, estimator k3."),
    _m("calibrate/probs_diff_mean", "probability", "down", "tokens", "|trainer's - engine's probability| of the same "
       "tokens.", verl="training/rollout_probs_diff_mean (on the rollout)"),
    _m("calibrate/probs_diff_std", "probability", "down", "deviation", "Spread of that difference.",
       verl="training/rollout_probs_diff_std (on the rollout)"),
    _m("calibrate/probs_diff_max", "probability", "down", "max", "Largest difference of a probe token.",
       verl="training/rollout_probs_diff_max (on the rollout)"),
    _m("calibrate/probs_pearson_corr", "1", "up", "tokens", "Pearson correlation of the two probabilities.",
       verl="training/rollout_actor_probs_pearson_corr (on the rollout)"),
    # --- adaptive layerwise perturbation -------------------------------------------------------------------------
    _m("alp/sigma_layer_<layer>", "hidden units", "neither", "once", "Standard deviation of the noise on the input of "
       "a decoder layer, root mean square over hidden units; layers are counted from 0."),
    _m("alp/sigma_router_<layer>", "logits", "neither", "once", "Standard deviation of the noise on the router's "
       "logits of a layer, utilisation included, root mean square over experts."),
    _m("alp/utilisation_max", "share", "down", "once", "Moving average of the mean router probability of the most "
       "used expert of any layer; 1 / experts is even."),
    _m("alp/balance_loss", "1", "down", "steps", "lambda times sum (utilisation - target)^2 over experts and layers, "
       "as it is in the loss."),
    _m("alp/lr_factor", "1", "neither", "once", "Factor on the learning rate of log sigma: 0 during its "
       "warm-up, below 1 while KL is over its limit."),
    _m("alp/clip_norm", "1", "neither", "once", "Limit of the gradient norm of log sigma in force."),
    _m("alp/kl_perturbed", "nats/token", "neither", "tokens", "KL(plain || perturbed) of the current policy, estimator "
       "k3, valid tokens of the first micro-batch of each epoch, in iterations that compare."),
    _m("alp/correlation_plain", "1", "up", "tokens", "Pearson correlation of the plain current policy's probabilities "
       "with the engine's, same tokens.", verl="training/rollout_actor_probs_pearson_corr (before the updates)"),
    _m("alp/correlation_perturbed", "1", "up", "tokens", "That correlation for the perturbed current policy."),
    # --- optimiser -----------------------------------------------------------------------------------------------
    _m("grad_norm/<group>", "1", "neither", "steps", "Global L2 norm of a parameter group's gradient (actor, critic), "
       "before clipping.", verl="actor/grad_norm, critic/grad_norm"),
    _m("grad_norm/<group>_average", "1", "neither", "once", "Exponential moving average of that norm over optimiser "
       "steps (callback gradient_monitor)."),
    _m("grad_clipped/<group>", "share", "down", "steps", "Share of this iteration's minibatches whose norm was over "
       "the group's limit."),
    _m("grad_clipped/<group>_average", "share", "down", "once", "Exponential moving average of that share (callback "
       "gradient_monitor)."),
    _m("lr/<group>", "1", "neither", "once", "Learning rate of a parameter group at the end of the iteration.",
       verl="actor/lr, critic/lr", trl="lr", openrlhf="actor_lr, critic_lr", sb3="train/learning_rate"),
    # --- control -------------------------------------------------------------------------------------------------
    _m("knob/<name>", "1", "neither", "once", "A number that callbacks may change, as in force: value times "
       "multipliers, within its bounds."),
    _m("stability/<knob>_multiplier", "1", "neither", "once", "Product of the multipliers put on a knob in this "
       "iteration; logged only where there is one."),
    _m("stability/epochs_stopped", "count", "neither", "once", "Iterations in which a callback asked to end the "
       "epochs, since the run began."),
    _m("stability/steps_skipped", "count", "down", "once", "Steps skipped by request, since the run began."),
    _m("stability/rollbacks", "count", "down", "once", "Rollbacks carried out, since the run began."),
    _m("stability/nonfinite_steps", "count", "down", "once", "Steps refused because loss or gradient was not finite, "
       "since the run began."),
    _m("stability/empty_minibatches", "count", "down", "once", "Minibatches without a valid token, since the run "
       "began."),
    _m("stability/oom_retries", "count", "down", "once", "Times memory ran out and the work was done again in smaller "
       "pieces, since the run began (callback oom_guard)."),
    _m("stability/learning_rate_cuts", "count", "down", "once", "Times the learning rate was lowered, since the run "
       "began (callback lr_backoff)."),
    _m("stability/kl_brakes", "count", "down", "once", "Iterations after which the KL coefficient was scaled up, since "
       "the run began (callback kl_guard)."),
    _m("stability/length_cuts", "count", "down", "once", "Times responses were shortened because memory was nearly "
       "full, since the run began (callback oom_guard)."),
    # --- clocks and cost -----------------------------------------------------------------------------------------
    _m("clock/iteration", "iterations", "neither", "once", "Iterations done, this one included; the step axis of every "
       "other metric.", verl="training/global_step"),
    _m("clock/update", "steps", "neither", "once", "Optimiser steps taken since the run began.",
       sb3="train/n_updates (epochs)"),
    _m("clock/sequences", "sequences", "neither", "sum", "Sequences in batches since the run began.", trl="episode"),
    _m("clock/tokens", "tokens", "neither", "sum", "Tokens of the batches' responses since the run began: with "
       "`module.safety` those of replies count, and those of discarded draws do not.", trl="num_tokens (GRPO)"),
    _m("data/pass", "passes", "neither", "once", "Passes over the training prompts that were complete when the last "
       "prompt of the batch was drawn.", verl="training/epoch"),
    _m("data/prompts_dropped", "prompts", "down", "once", "Prompts left out because they are longer than the limit."),
    _m("perf/tokens_per_second", "tokens/s", "up", "once", "The batch's response tokens (clock/tokens) of all ranks "
       "per second of the whole iteration.", verl="perf/throughput (per GPU, prompts included)"),
    _m("perf/padding_fraction", "share", "down", "steps", "Share of the tokens sent through the model during updates "
       "that are padding."),
    _m("time/rollout", "s", "down", "rank 0", "Generation.", verl="timing_s/gen"),
    _m("time/reward", "s", "down", "rank 0", "Scoring by the rewards.", verl="timing_s/reward"),
    _m("time/score", "s", "down", "rank 0", "Old and reference log-probabilities, values and advantages.",
       verl="timing_s/{old_log_prob,ref,values,adv}"),
    _m("time/update", "s", "down", "rank 0", "All epochs of the update.", verl="timing_s/{update_actor,update_critic}"),
    _m("time/rollout_wait", "s", "down", "rank 0", "Waiting, after the update, for the rollout that is generated ahead "
       "(`rollout.lag=1`)."),
    _m("time/weights", "s", "down", "rank 0", "Sending the weights to the rollout engine."),
    _m("time/iteration", "s", "down", "rank 0", "The whole iteration.", verl="timing_s/step", trl="step_time (GRPO)"),
    _m("memory/peak_gib", "GiB", "down", "rank 0", "Largest device memory in use by tensors during the iteration.",
       verl="perf/max_memory_allocated_gb"),
    # --- evaluation ----------------------------------------------------------------------------------------------
    _m("eval/<name>", "score", "up", "sequences", "A reward term, or reward_mean, response_length_mean and "
       "truncated_fraction, of greedy answers to the held-out prompts.", verl="val-core/<source>/<variable>/mean@N"),
]
# fmt: on
METRICS += [Metric(*row) for row in (*ROLLOUT_CORR, *SAFETY, *PROMPTS, *GROUPS, *EVALUATION)]
METRICS += [_m(f"ptx/{name}", unit, better, reduced, text) for name, unit, better, reduced, text in PTX]


class MetricError(ValueError):
    """A metric that the registry refuses; the message says how to declare it."""


class UnknownMetricError(MetricError):
    """A metric name that the registry does not know."""


def find(name: str) -> Metric | None:
    """The metric or family that ``name`` belongs to; the most specific one wins."""
    fitting = [metric for metric in METRICS if metric.matches(name)]
    return max(fitting, key=lambda metric: len(re.sub("<[a-z_]+>", "", metric.name)), default=None)


def check(names: Iterable[str]) -> None:
    """Refuse names that are not registered.

    Raises:
        UnknownMetricError: names every unknown metric and the nearest registered spelling.
    """
    unknown = [name for name in names if find(name) is None]
    if unknown:
        raise UnknownMetricError(
            "; ".join(_complaint(name) for name in unknown)
            + ". A metric of your own is declared once, beside the code that logs it: from lightning_rlhf.metrics "
            f"import Metric, register; register(Metric({unknown[0]!r}, unit='1', better='neither', reduced='once', "
            "description='...'))"
        )


def is_ours(name: str) -> bool:
    """Whether the name is in one of the kit's groups (the part before the first slash)."""
    group, slash, _ = name.partition("/")
    return bool(slash) and group in {metric.name.partition("/")[0] for metric in METRICS}


def register(metric: Metric) -> None:
    """Declare a metric of your own; declaring the same one again is fine.

    Call it at the top of the file that logs the metric (a callback, mixin, loss term or reward), so that every process
    that imports the file knows the metric. ``reduced`` describes the reduction, it does not perform it.

    Raises:
        MetricError: the name is not one that trackers accept, is taken by another metric, or ``better`` or ``reduced``
            is unknown.
    """
    plain = "".join("x" if part.startswith("<") else part for part in _split(metric.name))
    if not valid(plain):
        raise MetricError(
            f"metric name {metric.name!r} is not allowed: group/name of letters, digits, _ - . and spaces"
        )
    if metric.reduced not in REDUCTIONS:
        raise MetricError(f"{metric.name}: reduced = {metric.reduced!r} is not allowed: one of {', '.join(REDUCTIONS)}")
    if metric.better not in get_args(Better):
        raise MetricError(
            f"{metric.name}: better = {metric.better!r} is not allowed: one of {', '.join(get_args(Better))}"
        )
    taken = next((other for other in METRICS if other.name.lower() == metric.name.lower()), None)
    if taken is not None and taken != metric:
        raise MetricError(f"metric name {metric.name!r} is taken by {taken.name}: {taken.description}")
    if taken is None:
        METRICS.append(metric)


def valid(name: str) -> bool:
    """Whether every tracker accepts the name as is (MLflow's rules; no empty part, no leading or trailing space)."""
    return all(re.fullmatch(r"(?!\.+$)[A-Za-z0-9_.\- ]+", part) and part == part.strip() for part in name.split("/"))


def _complaint(name: str) -> str:
    near = get_close_matches(name, [metric.name for metric in METRICS], n=1)
    return f"no metric is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


# --- documentation ---------------------------------------------------------------------------------------------------


def metrics_table() -> str:
    """The text of ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Printed from `lightning_rlhf/metrics/names.py` by",
        "`python -c \"from lightning_rlhf.metrics.names import metrics_table; print(metrics_table(), end='')\"`.",
        "Every metric is logged once per iteration; the step axis is `clock/iteration`, the other clock is the metric",
        "`clock/update`. *Valid tokens* are the generated tokens (the end token included, padding never) that",
        "rejection left in the loss. What was not measured is not logged: a mean, deviation or extreme without a valid",
        "element on any rank has no point in its curve at that iteration, on every rank alike.",
        "",
        "| metric | unit | better | reduced over | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    arrows = {"up": "up", "down": "down", "neither": "-"}
    lines += [_row(f"`{m.name}`", m.unit, arrows[m.better], m.reduced, m.description) for m in METRICS]
    lines += ["", "| reduced over | how |", "| --- | --- |"]
    lines += [_row(name, text) for name, text in REDUCTIONS.items()]
    return "\n".join(lines) + "\n"


def aliases_table() -> str:
    """The metric part of ``docs/coming-from-verl-trl-openrlhf.md``: our names beside those of other trainers."""
    columns = {"verl": "veRL", "trl": "TRL", "openrlhf": "OpenRLHF", "sb3": "Stable-Baselines3"}
    lines = [_row("here", *columns.values()), _row(*["---"] * (1 + len(columns)))]
    lines += [_row(f"`{m.name}`", *(_alias(m.aliases.get(column)) for column in columns)) for m in METRICS if m.aliases]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _alias(text: str | None) -> str:
    if not text:
        return ""
    name, bracket, note = text.partition(" (")
    return f"`{name}`" + (f" ({note}" if bracket else "")
