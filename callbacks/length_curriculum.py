"""Short responses first: the length limit grows over the first iterations."""

from __future__ import annotations

from lightning import LightningModule, Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.experience import PromptBatch
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.settings import SettingError


class LengthCurriculum(RLHFCallback):
    """Owner of the knob ``max_new_tokens``: linear growth from ``start`` to ``rollout.max_new_tokens``.

    Early on a policy drifts with every token it writes; short responses bound the KL that one of them can gather. A
    function of the iteration alone, so a resumed run needs no state.

    Args:
        start: tokens in the first iteration.
        iterations: the full length is reached in the iteration after these.
    """

    def __init__(self, start: int = 16, iterations: int = 20) -> None:
        bounded("length_curriculum", at_least=1, whole=True, start=start, iterations=iterations)
        self.start, self.iterations = start, iterations
        self.full = start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        control = pl_module.control
        control.own("max_new_tokens", type(self).__name__)  # type: ignore[union-attr, operator]
        self.full = pl_module.engine.sampling.max_new_tokens  # type: ignore[union-attr, assignment]
        if self.start > self.full:
            allowed = f"at most rollout.max_new_tokens = {self.full}"
            raise SettingError("callbacks.length_curriculum.start", self.start, allowed)

    def on_rollout_start(self, trainer: Trainer, module: ActorCriticModule, prompts: PromptBatch) -> None:
        grown = min((module.control.iteration - 1) / self.iterations, 1.0)
        length = round(self.start + grown * (self.full - self.start))
        module.control.set("max_new_tokens", length, type(self).__name__)
