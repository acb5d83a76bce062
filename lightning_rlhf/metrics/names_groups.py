"""The metrics of groups of prompts, as rows of :data:`lightning_rlhf.metrics.names.METRICS`.

``<name>`` is the group's value in the column ``data.group_column``, see :func:`lightning_rlhf.data.groups.labels_of`.
"""

from __future__ import annotations

from lightning_rlhf.metrics.names_rollout_corr import Row

# fmt: off
GROUPS: list[Row] = [
    ("group/<name>/reward_mean", "score", "up", "sequences", "reward/mean of one group of prompts; logged with "
     "`data.group_column`, as are the next ones.", {"verl": "critic/score/mean (of all sources)"}),
    ("group/<name>/reward_std", "score", "neither", "deviation", "Spread of the group's scores in one iteration.", {}),
    ("group/<name>/response_length_mean", "tokens", "neither", "sequences", "response/length_mean of the group.", {}),
    ("group/<name>/kl_ref", "nats/token", "down", "tokens", "kl/ref of the group.", {}),
    ("group/<name>/advantage_mean", "1", "neither", "tokens", "advantage/mean of the group, its weight included.", {}),
    ("group/<name>/advantage_abs_mean", "1", "neither", "tokens", "Mean |advantage| of the group, its weight "
     "included: compared between groups, whose sequences the policy learns from.", {}),
    ("group/<name>/samples", "sequences", "neither", "sum", "Sequences of the group in the iteration; 0 in one without "
     "any, where the group has no other metric.", {}),
    ("eval/group/<name>/reward_mean", "score", "up", "sequences", "eval/reward_mean of one group of the held-out "
     "prompts.", {"verl": "val-core/<source>/<variable>/mean@N"}),
]
# fmt: on
