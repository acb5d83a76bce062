"""The metrics of single prompts, as rows of :data:`lightning_rlhf.metrics.names.METRICS`."""

from __future__ import annotations

from typing import Literal

Row = tuple[str, str, Literal["up", "down", "neither"], str, str, dict[str, str]]

# fmt: off
PROMPTS: list[Row] = [
    ("prompts/seen", "prompts", "neither", "once", "Different prompts that the run has visited (callback "
     "prompt_monitor); where a safety filter replaced or left out all responses to one, that is no visit.", {}),
    ("prompts/judged", "prompts", "neither", "once", "Of these, prompts with enough visits to be compared.", {}),
    ("prompts/flagged", "prompts", "down", "once", "Prompts that lie far from the others by reward, spread or KL "
     "now; absent until enough prompts can be compared.", {}),
    ("prompts/flagged_reward", "prompts", "down", "once", "Of these, prompts whose mean reward is far above or below "
     "that of the others.", {}),
    ("prompts/flagged_spread", "prompts", "down", "once", "Of these, prompts whose scores spread far more widely, "
     "within a group of samples and from visit to visit.", {}),
    ("prompts/flagged_kl", "prompts", "down", "once", "Of these, prompts on which the policy is far further from the "
     "reference.", {}),
    ("data/prompts_blacklisted", "prompts", "neither", "once", "Rows of the training data left out by "
     "`data.blacklist`; absent without one.", {}),
    ("data/prompts_conservative", "prompts", "neither", "once", "Rows of the training data with a KL coefficient of "
     "their own by `data.conservative`; absent without one.", {}),
]
# fmt: on
