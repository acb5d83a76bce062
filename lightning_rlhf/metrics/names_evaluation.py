"""Metrics of held-out answers besides the reward's, as rows of :data:`lightning_rlhf.metrics.names.METRICS`."""

from __future__ import annotations

from lightning_rlhf.metrics.names_rollout_corr import Row

HELD_OUT = ("reward_mean", "response_length_mean", "truncated_fraction")
"""What every evaluation measures, as ``eval/...``, besides the terms of the reward."""

# fmt: off
EVALUATION: list[Row] = [
    ("eval/gold_mean", "score", "up", "sequences",
     "Score of the greedy answers to the held-out prompts by a scorer that is not trained on; this metric and the next "
     "two come with the callback overoptimisation_stop.", {}),
    ("eval/gold_spearman", "1", "up", "gathered",
     "Spearman's rank correlation of the run's reward and the gold score over the held-out answers; not measured where "
     "one of the two is the same for all.", {}),
    ("eval/gold_coverage", "share", "up", "sequences",
     "Share of the held-out answers that the gold scorer has a score for; logged if it may lack some, as stored scores "
     "do.", {}),
]
# fmt: on
