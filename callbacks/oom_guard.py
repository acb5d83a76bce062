"""Repeat the work in smaller pieces when memory runs out."""

from __future__ import annotations

from typing import Any

from lightning import Trainer

from lightning_rlhf import memory
from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.control import Control
from lightning_rlhf.events import UpdateStats
from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.functional.stats import largest_over_ranks
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.settings import SettingError


class OOMGuard(RLHFCallback):
    """Tells the update and generation how to go on when memory runs out; works on GPU, NPU and CPU.

    Update: the token budget of a micro-batch halves and the minibatch starts again, so its gradient is the same as
    without the error; if a single sequence does not fit, the run ends with a clear message. Generation: the prompts are
    processed in halves. Both sizes are kept, and doubled again after ``retry_after`` iterations without an error; if
    that fails the next wait is twice as long. With a sharded model (``trainer=fsdp2``) an update cannot be repeated,
    because the other ranks wait inside it: the run ends, and the error names the key to lower.

    Rollout: while tensors hold more than ``high`` of the device's memory at the end of generation, each iteration
    lowers ``max_new_tokens`` by a share; below ``low`` it is raised again step by step. The fullest rank decides.

    Args:
        retry_after: iterations without an error before a larger size is tried.
        high: share of device memory above which responses get shorter.
        low: share below which they get longer again.
        length_step: share of ``max_new_tokens`` removed at a time.
        min_new_tokens: the limit of the response length does not fall below it.
    """

    def __init__(
        self,
        retry_after: int = 50,
        high: float = 0.85,
        low: float = 0.7,
        length_step: float = 0.25,
        min_new_tokens: int = 16,
    ) -> None:
        bounded("oom_guard", at_least=1, whole=True, retry_after=retry_after, min_new_tokens=min_new_tokens)
        bounded("oom_guard", above=0, below=1, high=high, low=low, length_step=length_step)
        if low > high:
            raise SettingError("callbacks.oom_guard.low", low, f"at most callbacks.oom_guard.high = {high}")
        self.retry_after, self.high, self.low = retry_after, high, low
        self.length_step, self.min_new_tokens = length_step, min_new_tokens
        self.tokens_share = 1.0
        """Multiplier of ``module.update.micro_batch_tokens``."""
        self.length_share = 1.0
        """Multiplier of ``rollout.max_new_tokens``."""
        self._prompts_at_once: int | None = None
        self.quiet = 0
        self.wait = retry_after
        self._raised = self._failed = False

    # --- called by the update and by generation ------------------------------------------------------------------

    @property
    def prompts_at_once(self) -> int | None:
        return self._prompts_at_once

    def after_update_oom(self, control: Control, tokens: int, error: str) -> None:
        before, budget = int(control.value("micro_batch_tokens")), max(tokens // 2, 1)
        self.tokens_share = budget / control.knobs["micro_batch_tokens"].value
        control.scale("micro_batch_tokens", self.tokens_share, by=type(self).__name__)
        self._note(control, f"micro_batch_tokens {before} -> {budget} ({error})")

    def after_rollout_oom(self, control: Control, prompts: int, error: str) -> None:
        self._prompts_at_once = max(prompts // 2, 1)
        self._note(control, f"prompts generated at once {prompts} -> {self._prompts_at_once} ({error})")

    def _note(self, control: Control, reason: str) -> None:
        self._failed = True
        control.note("oom_retry", reason)

    # --- events --------------------------------------------------------------------------------------------------

    def on_rollout_start(self, trainer: Trainer, module: ActorCriticModule, prompts: PromptBatch) -> None:
        control, name = module.control, type(self).__name__
        if self._prompts_at_once is not None and self._prompts_at_once >= len(prompts):
            self._prompts_at_once = None
        if self.tokens_share < 1:
            control.scale("micro_batch_tokens", self.tokens_share, by=name)
        if self.length_share < 1:
            control.scale("max_new_tokens", self.length_share, by=name)

    def on_rollout_end(self, trainer: Trainer, module: ActorCriticModule, rollout: Rollout) -> None:
        here = memory.peak_memory_share(module.device)
        if here is None:
            return
        [share] = largest_over_ranks([here], module.device)
        limit = module.control.knobs["max_new_tokens"].value
        shorter = max(self.length_share * (1 - self.length_step), self.min_new_tokens / limit)
        if share > self.high and shorter < self.length_share:
            self.length_share = shorter
            reason = f"{share:.0%} of device memory in use, over {self.high:.0%}: at most {shorter * limit:.0f} tokens"
            module.control.note("shorten_responses", reason)
        elif share < self.low:
            self.length_share = min(self.length_share / (1 - self.length_step), 1.0)

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        mine = [self._failed, self.tokens_share < 1 or self._prompts_at_once is not None]
        failed, smaller = largest_over_ranks([float(flag) for flag in mine], module.device)
        if failed:
            self.wait = 2 * self.wait if self._raised else self.wait
            self.quiet, self._raised, self._failed = 0, False, False
        elif smaller:
            self.quiet += 1
        if smaller and self.quiet >= self.wait:
            self.tokens_share = min(2 * self.tokens_share, 1.0)
            self._prompts_at_once = None if self._prompts_at_once is None else 2 * self._prompts_at_once
            self.quiet, self._raised = 0, True

    def state_dict(self) -> dict[str, Any]:
        names = ("tokens_share", "length_share", "_prompts_at_once", "quiet", "wait", "_raised")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value)
