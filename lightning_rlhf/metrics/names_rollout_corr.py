"""The metrics of rollout correction, as rows of :data:`lightning_rlhf.metrics.names.METRICS`.

Names after the slash are veRL's. Probabilities and log-ratios are of sampled tokens; "log-ratio" is always trainer
minus engine. In bypass mode the trainer's side is the current policy over all micro-batches of the update.
"""

from __future__ import annotations

from typing import Literal

Row = tuple[str, str, Literal["up", "down", "neither"], str, str, dict[str, str]]

_VERL = "rollout_corr/"


def _row(
    name: str,
    unit: str,
    better: Literal["up", "down", "neither"],
    reduced: str,
    description: str,
    verl: str | None = "",
    **others: str,
) -> Row:
    """``verl``: veRL's name if it differs, empty if it is the same, ``None`` if veRL has none."""
    aliases = dict(others) if verl is None else {"verl": verl or f"{_VERL}{name}", **others}
    return f"rollout_corr/{name}", unit, better, reduced, description, aliases


# fmt: off
ROLLOUT_CORR: list[Row] = [
    _row("rollout_probs_diff_max", "probability", "down", "max",
         "Largest |trainer's - engine's probability| of a valid token.", "training/rollout_probs_diff_max"),
    _row("rollout_probs_diff_mean", "probability", "down", "tokens",
         "Mean of that difference.", "training/rollout_probs_diff_mean"),
    _row("rollout_probs_diff_std", "probability", "down", "deviation",
         "Spread of that difference.", "training/rollout_probs_diff_std"),
    _row("rollout_actor_probs_pearson_corr", "1", "up", "tokens",
         "Pearson correlation of the two probabilities; absent where one of them does not vary.",
         "training/rollout_actor_probs_pearson_corr"),
    _row("kl", "nats/token", "neither", "tokens",
         "KL(engine || trainer), estimator k1: mean of minus the log-ratio; may be negative.", openrlhf="vllm_kl"),
    _row("k3_kl", "nats/token", "down", "tokens",
         "KL(engine || trainer), estimator k3 (log-ratio clamped to +-20)."),
    _row("training_ppl", "1", "neither", "sequences",
         "Perplexity of a sequence under the trainer."),
    _row("training_log_ppl", "nats", "neither", "sequences",
         "Logarithm of that perplexity, its mean."),
    _row("rollout_ppl", "1", "neither", "sequences",
         "Perplexity of a sequence under the engine."),
    _row("rollout_log_ppl", "nats", "neither", "sequences",
         "Logarithm of that perplexity, its mean."),
    _row("log_ppl_diff", "nats", "neither", "sequences",
         "Log-perplexity under the trainer minus under the engine."),
    _row("log_ppl_abs_diff", "nats", "down", "sequences",
         "Absolute value of that difference."),
    _row("log_ppl_diff_max", "nats", "down", "max",
         "The largest difference."),
    _row("log_ppl_diff_min", "nats", "up", "min",
         "The smallest difference."),
    _row("ppl_ratio", "1", "neither", "sequences",
         "Perplexity under the trainer over that under the engine."),
    _row("chi2_token", "1", "down", "tokens",
         "Chi-square divergence of tokens: mean squared ratio minus 1. Above chi2_trigger the full set of metrics "
         "follows at once."),
    _row("chi2_seq", "1", "down", "sequences",
         "Chi-square divergence of whole sequences, whose ratio is a product over tokens."),
    _row("missing_fraction", "share", "down", "tokens",
         "Share of valid tokens for which the engine reported no finite log-probability; they are in no other "
         "metric of this group.", None),
    _row("accepted_fraction", "share", "up", "tokens",
         "Share of valid tokens that no rule, veto or missing log-probability took out of the loss.", None),
    _row("rollout_is_mean", "1", "neither", "tokens",
         "Importance weight trainer / engine before truncation."),
    _row("rollout_is_std", "1", "down", "deviation",
         "Spread (n) of the weights clipped to [lower threshold (1 / threshold by default), threshold]."),
    _row("rollout_is_max", "1", "down", "max",
         "Largest weight before truncation."),
    _row("rollout_is_min", "1", "up", "min",
         "Smallest weight before truncation."),
    _row("rollout_is_eff_sample_size", "share", "up", "tokens",
         "Effective sample size (mean squared over mean of squares) of the clipped weights; 1 is all of the batch."),
    _row("rollout_is_ratio_fraction_high", "share", "down", "tokens",
         "Share of tokens (of sequences where weights are per sequence) over the threshold."),
    _row("rollout_is_ratio_fraction_low", "share", "down", "tokens",
         "Share under the lower threshold (1 / threshold by default)."),
    _row("rollout_is_batch_norm_factor", "1", "neither", "once",
         "Mean that the weights were divided by."),
    _row("rollout_is_seq_<statistic>", "1", "neither", "sequences",
         "Of each sequence's mean weight: mean, std (n - 1), max, min, max_deviation (from 1), fraction_high, "
         "fraction_low. Full set.", f"{_VERL}rollout_is_seq_mean, ..."),
    _row("rollout_is_p<percent>", "1", "neither", "gathered",
         "Percentile (5 to 99) of the weights before truncation. Full set.",
         "mismatch/rollout_is_p25, ... (its first version)"),
    _row("rollout_is_veto_fraction", "share", "down", "sequences",
         "Share of sequences that the veto rejected.", f"{_VERL}rollout_is_veto_fraction (its second version)"),
    _row("rollout_is_catastrophic_token_fraction", "share", "down", "tokens",
         "Share of tokens that cause a veto.",
         f"{_VERL}rollout_is_catastrophic_token_fraction (its second version)"),
    _row("is_used_mean", "1", "neither", "tokens",
         "Weight as the loss uses it, over accepted tokens.", None),
    _row("is_used_ess", "share", "up", "tokens",
         "Effective sample size of the weights in use; what adaptive.target_ess steers.", None),
    _row("rollout_rs_masked_fraction", "share", "down", "tokens",
         "Share of valid tokens that the rejection rules took; what adaptive.target_rejection steers."),
    _row("rollout_rs_seq_masked_fraction", "share", "down", "sequences",
         "Share of sequences with a rejected token."),
    _row("rollout_rs_<statistic>", "1", "neither", "tokens",
         "Statistic of a rejection rule: mean, max, min, std, fractions outside the band, seq_... per sequence; "
         "veRL's current rules, and each of several, have their name in front (token_k1_mean). Full set.",
         f"{_VERL}rollout_rs_<option>_mean, ..."),
    _row("tail_p<percent>_prob_<bin>", "nats", "neither", "gathered",
         "P2 and P98 of the log-ratio among tokens whose probability under the engine lies in a tenth that begins "
         "at <bin>. Full set.", None),
]
# fmt: on
