"""Generation in parts of a prompt batch, once the whole does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_rlhf.control import Control
from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.memory import MemoryPolicy, OutOfMemory, attempt, free_memory


def generate_in_parts(
    generate: Callable[[PromptBatch], Rollout],
    prompts: PromptBatch,
    policy: MemoryPolicy | None,
    control: Control,
    pad_id: int,
) -> Rollout:
    """The rollout of all prompts, generated in as many parts as memory requires.

    Engines seed each sample by its prompt, so splitting changes no sample. Generation contains no collective operation,
    so ranks may split differently.

    Args:
        generate: draws the responses to some prompts.
        prompts: all prompts, never empty.
        policy: says how many prompts go together, and is called when memory runs out; ``None``: errors are raised.
        control: for the policy.
        pad_id: pads each part to the widest one.

    Raises:
        OutOfMemory: a single prompt does not fit, or the policy does not lower the number of prompts.
    """
    if policy is None:
        return generate(prompts)
    parts: list[Rollout] = []
    start = 0
    while start < len(prompts):
        size = min(policy.prompts_at_once or len(prompts), len(prompts) - start)
        part, error = attempt(partial(generate, prompts.part(slice(start, start + size))))
        if part is not None:
            parts.append(part)
            start += size
            continue
        free_memory()
        policy.after_rollout_oom(control, size, str(error))
        if (policy.prompts_at_once or size) >= size:
            raise OutOfMemory(f"{error}: generation does not fit into memory with {size} prompts at once")
    return parts[0] if len(parts) == 1 else Rollout.join(parts, pad_id)
