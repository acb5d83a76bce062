"""Behaviours that a module is composed of; each inactive while its block of settings is null."""

from lightning_rlhf.mixins.alp import ALPMixin
from lightning_rlhf.mixins.ptx import PTXMixin
from lightning_rlhf.mixins.rollout_correction import RolloutCorrectionMixin

__all__ = ["ALPMixin", "PTXMixin", "RolloutCorrectionMixin"]
