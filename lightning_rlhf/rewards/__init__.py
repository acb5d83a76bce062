"""Rewards: functions of a batch of responses, one number per sequence."""

from lightning_rlhf.rewards.base import Reward, RewardBatch, RewardError
from lightning_rlhf.rewards.composite import CompositeReward, RewardOutput
from lightning_rlhf.rewards.mathematics import MathExpression
from lightning_rlhf.rewards.model_based import RewardModel
from lightning_rlhf.rewards.stored import StoredScores
from lightning_rlhf.rewards.verifiable import (
    CharacterMatch,
    ExactMatch,
    LengthPenalty,
    NumericMatch,
    RegexMatch,
)

__all__ = [
    "CharacterMatch",
    "CompositeReward",
    "ExactMatch",
    "LengthPenalty",
    "MathExpression",
    "NumericMatch",
    "RegexMatch",
    "Reward",
    "RewardBatch",
    "RewardError",
    "RewardModel",
    "RewardOutput",
    "StoredScores",
]
