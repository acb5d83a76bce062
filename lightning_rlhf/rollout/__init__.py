"""Rollout engines: prompts in, sampled responses with their log-probabilities out."""

from lightning_rlhf.rollout.ahead import Ahead, AheadRollouts
from lightning_rlhf.rollout.base import BaseEngine, RolloutEngine, Sampling
from lightning_rlhf.rollout.generation_mode import generation_mode
from lightning_rlhf.rollout.hf import HFEngine
from lightning_rlhf.rollout.vllm import VLLMEngine
from lightning_rlhf.rollout.vllm_server import VLLMServerEngine

__all__ = [
    "Ahead",
    "AheadRollouts",
    "BaseEngine",
    "HFEngine",
    "RolloutEngine",
    "Sampling",
    "VLLMEngine",
    "VLLMServerEngine",
    "generation_mode",
]
