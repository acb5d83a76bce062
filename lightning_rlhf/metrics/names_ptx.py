"""The metrics of PPO-ptx, as rows of :data:`lightning_rlhf.metrics.names.METRICS`, without their prefix ``ptx/``.

Losses are of plain text at temperature 1; the first token of a block is not predicted and not counted.
"""

from __future__ import annotations

from typing import Literal

Row = tuple[str, str, Literal["up", "down", "neither"], str, str]

# fmt: off
PTX: list[Row] = [
    ("loss", "nats/token", "down", "tokens", "Language-model loss on the text of this iteration's minibatches, each "
     "before its step."),
    ("perplexity", "1", "down", "tokens", "exp(ptx/loss)."),
    ("weighted_loss", "nats/token", "down", "steps", "The coefficient times the language-model loss, as it is in the "
     "loss of a minibatch."),
    ("coefficient", "1", "neither", "once", "gamma, the weight of the language-model loss in force during the "
     "iteration."),
    ("passes", "1", "neither", "once", "Passes over the text since the run began, as a fraction."),
    ("held_out_perplexity", "1", "down", "tokens", "Perplexity of the policy, before the iteration's updates, on text "
     "that is never trained on (callback adaptive_ptx)."),
    ("benchmark/<name>", "score", "up", "once", "A benchmark of your own, before the iteration's updates, mean of the "
     "ranks' numbers (callback adaptive_ptx)."),
    ("capability", "share", "up", "once", "What is left of the capability that the first policy had: the smallest, "
     "over the probes, of baseline / held-out perplexity and benchmark / baseline (callback adaptive_ptx)."),
    ("capability_average", "share", "up", "once", "Moving geometric mean of ptx/capability over the probes: what the "
     "controller of the coefficient acts on (callback adaptive_ptx)."),
]
# fmt: on
