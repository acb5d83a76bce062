"""PPO as it is shipped: the actor-critic module with ALP, rollout correction and PPO-ptx."""

from __future__ import annotations

from lightning_rlhf.mixins.alp import ALPMixin
from lightning_rlhf.mixins.ptx import PTXMixin
from lightning_rlhf.mixins.rollout_correction import RolloutCorrectionMixin
from lightning_rlhf.module import ActorCriticModule


class PPOModule(ALPMixin, RolloutCorrectionMixin, PTXMixin, ActorCriticModule):
    """The default composition. Mixins stand before the base class: ``class Mine(MyMixin, PPOModule)``."""
