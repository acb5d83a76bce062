"""Overrides that many tests share: a command that trains for seconds."""

from __future__ import annotations

SMALL_MODEL = (
    "threads=1",
    "warmup=none",
    "model.source.hidden_size=32",
    "model.source.layers=1",
    "model.source.heads=2",
)
"""The built-in model in small, untrained."""

OWN_PROMPTS = (
    "data=jsonl",
    "data.train.path=prompts.jsonl",
    "data.validation=null",
    "reward=exact_match",
    "rollout.max_new_tokens=4",
)
"""Prompts and answers in a file of the current folder."""

FEW = (
    "data.prompts_per_iteration=4",
    "module.update.minibatch_size=4",
    "module.update.epochs=1",
    "trainer.enable_progress_bar=false",
)
"""Iterations of four prompts."""
