"""The metrics of the safety filter, as rows of :data:`lightning_rlhf.metrics.names.METRICS`."""

from __future__ import annotations

from lightning_rlhf.metrics.names_rollout_corr import Row

# fmt: off
SAFETY: list[Row] = [
    ("safety/flagged_fraction", "share", "down", "sequences",
     "Share of sequences whose first draw was unsafe; this metric and the next four are logged with `module.safety`.",
     {}),
    ("safety/redrawn_fraction", "share", "neither", "sequences",
     "Share of sequences that a later draw made safe.", {}),
    ("safety/replaced_fraction", "share", "neither", "sequences",
     "Share of sequences with the configured reply in place of an unsafe response.", {}),
    ("safety/cached_fraction", "share", "neither", "sequences",
     "Share of sequences with an earlier answer of the policy in place of an unsafe response (`module.safety.cache`).",
     {}),
    ("safety/unsafe_fraction", "share", "down", "sequences",
     "Share of sequences that are unsafe after the last draw: left out of the loss (`discard_resample`) or penalised "
     "(`penalise`).", {}),
]
# fmt: on
