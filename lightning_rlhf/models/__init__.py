"""Actor, critic and reference models."""

from lightning_rlhf.models.actor import Actor, ActorOutput
from lightning_rlhf.models.critic import SeparateCritic, SharedCritic, ValueHead
from lightning_rlhf.models.loading import (
    LoadedModel,
    assert_no_dropout,
    disable_dropout,
    load_pretrained,
    load_tokenizer,
)
from lightning_rlhf.models.policy import Policy, build_policy
from lightning_rlhf.models.reference import AdapterReference, FrozenReference, fingerprint
from lightning_rlhf.models.tiny import build_tiny

__all__ = [
    "Actor",
    "ActorOutput",
    "AdapterReference",
    "FrozenReference",
    "LoadedModel",
    "Policy",
    "SeparateCritic",
    "SharedCritic",
    "ValueHead",
    "assert_no_dropout",
    "build_policy",
    "build_tiny",
    "disable_dropout",
    "fingerprint",
    "load_pretrained",
    "load_tokenizer",
]
