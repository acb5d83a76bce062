"""The strictest check of a checkpoint: a fresh policy loaded from it answers prompts as the live one does."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_rlhf.checkpoint.records import UNVERIFIED, VERIFIED, read_record, record_of, write_record
from lightning_rlhf.checkpoint.writer import free_host_memory
from lightning_rlhf.experience import PromptBatch
from lightning_rlhf.memory import attempt
from lightning_rlhf.models.sharding import is_sharded
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.rollout.hf import HFEngine

TOKENS = 16
"""Longest answer to a probe prompt."""


class Probe:
    """Asks the live policy, and remembers its answers for the comparison.

    Args:
        prompts: how many of an iteration's prompts are asked.
    """

    def __init__(self, prompts: int) -> None:
        self._count = prompts
        self._prompts: PromptBatch | None = None
        self._off = False

    def see(self, batch: Any) -> None:
        """Take the prompts of an iteration."""
        if isinstance(batch, PromptBatch) and len(batch):
            self._prompts = batch.first(self._count)

    def ask(self, trainer: Trainer) -> Asked | None:
        """The live policy's greedy answers; ``None``, with a warning the first time, where it cannot be probed.

        It costs the time of the answers, in which training waits.
        """
        module: Any = trainer.lightning_module
        if self._off or self._prompts is None or not trainer.is_global_zero:
            return None
        asked, reason = None, _hindrance(module)
        if reason is None:
            asked, reason = attempt(partial(Asked, trainer, self._prompts))
        if reason is not None:
            rank_zero_warn(f"callbacks.checkpoint.probe = {self._count} checks nothing from here on: {reason}")
            self._off = True
        return asked


class Asked:
    """Answers of the live policy at this moment, and an empty copy of it to be filled from the file.

    Args:
        trainer: between two iterations.
        prompts: what is asked.

    Raises:
        RuntimeError: memory ran out, or the policy fails.
    """

    def __init__(self, trainer: Trainer, prompts: PromptBatch) -> None:
        self._trainer, self._prompts = trainer, prompts
        self._module = cast("Any", trainer.lightning_module)
        self._empty: Any = _empty_copy(self._module.actor)
        self._answers = self._of(self._module.actor.lm)

    def compare(self, path: Path) -> None:
        """Load a checkpoint that is in place into the copy and ask that; add the outcome to the record.

        Where memory runs out the record stays as it is, which one line says.

        Raises:
            Exception: the file cannot be read, or the policy fails.
        """
        _, lacking = attempt(partial(self._compare, path))
        if lacking is not None:
            rank_zero_warn(f"{path} was not probed: {lacking}")

    def _compare(self, path: Path) -> None:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["state_dict"]
        state = {name.removeprefix("actor."): value for name, value in saved.items() if name.startswith("actor.")}
        missing, unknown = self._empty.load_state_dict(state, strict=False)
        record = read_record(path, VERIFIED) or {}
        problem = None
        if missing or unknown:
            problem = f"the policy cannot be loaded from it: {[*missing, *unknown][0]} is missing or unknown"
        else:
            answers = self._of(self._empty.lm)
            other = sum(one != live for one, live in zip(answers, self._answers, strict=True))
            if other:
                problem = (
                    f"a policy loaded from it answers {other} of {len(answers)} prompts otherwise than the live one"
                )
        if problem is None:
            checked = [*record.get("checked", []), f"greedy answers to {len(self._answers)} prompts"]
            write_record(path, VERIFIED, **record | {"checked": checked})
            return
        write_record(path, UNVERIFIED, **record | {"problem": problem})
        record_of(path, VERIFIED).unlink(missing_ok=True)

    def _of(self, lm: Any) -> list[list[int]]:
        """Tokens of the greedy answers; random states are neither read nor changed."""
        longest = min(TOKENS, self._module.engine.sampling.max_new_tokens)
        engine = HFEngine(max_new_tokens=longest, ignore_eos=True)
        engine.setup(lm, self._module.tokenizer)
        with self._trainer.precision_plugin.forward_context():
            rollout = engine.generate(self._prompts, samples=1, max_new_tokens=longest, seed=0, greedy=True)
        return rollout.response_ids.tolist()


def _hindrance(module: Any) -> str | None:
    if not isinstance(module, ActorCriticModule):
        return "the module has no policy that answers prompts"
    if is_sharded(module):
        return "the policy is sharded, and no process holds a whole one beside its slices"
    size, free = sum(parameter.nbytes for parameter in module.actor.parameters()), free_host_memory()
    if module.device.type == "cpu" and free is not None and free < size:
        return f"a second policy needs {size / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB of host memory are free"
    return None


def _empty_copy(actor: nn.Module) -> nn.Module:
    """The same modules with parameters that hold nothing yet; buffers are copied."""
    empty = {id(p): nn.Parameter(torch.empty_like(p), requires_grad=False) for p in actor.parameters()}
    return copy.deepcopy(actor, empty)
