"""The module's state in a checkpoint, apart from weights and optimiser."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_rlhf.distributed.processes import gather_objects, place
from lightning_rlhf.errors import InputError

if TYPE_CHECKING:
    from lightning_rlhf.generation import RolloutSource
    from lightning_rlhf.logbook import Logbook
    from lightning_rlhf.module import ActorCriticModule
    from lightning_rlhf.rewards.answers import AnswerCache
    from lightning_rlhf.update import UpdateLoop


log = logging.getLogger(__name__)


_NEEDED = ("control", "update", "progress", "reference_fingerprint", "rollout_ahead")
"""Keys of a saved state without which a run cannot go on; others were added later and may be missing."""


class ModuleState:
    """Saves and restores the state of a module and of its parts under the key ``lightning_rlhf``.

    Args:
        module: whose state it is.
        update, logbook, rollouts: its parts with a state.
    """

    def __init__(
        self, module: ActorCriticModule, update: UpdateLoop, logbook: Logbook, rollouts: RolloutSource
    ) -> None:
        self._module, self._update, self._logbook, self._rollouts = module, update, logbook, rollouts
        self._fingerprint: str | None = None

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Control, counters, rewards, configuration; of a frozen reference only the fingerprint: it never changes."""
        module, answers = self._module, self._answers
        checkpoint["lightning_rlhf"] = {
            "control": module.control.state_dict(),
            "update": self._update.state_dict(),
            "progress": dict(self._logbook.progress),
            "run_config": module.run_config,
            "warm_up": module.warm_up,
            "reference_fingerprint": self.reference_fingerprint(),
            "rewards": gather_objects(module.reward.state_dict()),
            "groups": module.groups.state_dict(),
            "answers": gather_objects({} if answers is None else answers.state_dict()),
            "rollout_ahead": gather_objects(self._rollouts.state_dict()),
        }
        state = checkpoint["state_dict"]
        for name in [name for name in state if name.startswith("reference.")]:
            del state[name]

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Restore what :meth:`save` saved.

        Raises:
            InputError: the reference model is not the same one.
        """
        saved, reference = checkpoint["lightning_rlhf"], self._module.reference
        self.refuse_other_reference(saved)
        self._module.control.load_state_dict(saved["control"])
        self._update.load_state_dict(saved["update"])
        self._logbook.progress = dict(saved["progress"])
        self._module.groups.load_state_dict(saved.get("groups", {}))
        rank, world = place()
        self._load_rewards(saved.get("rewards", {}), rank, world)
        if (answers := self._answers) is not None:
            states = saved.get("answers", [{}])  # earlier releases saved none
            answers.load_state_dict(states[rank % len(states)])
        if len(saved["rollout_ahead"]) == world:  # otherwise the next rollout is generated when needed
            self._rollouts.load_state_dict(saved["rollout_ahead"][rank])
        if isinstance(reference, nn.Module):
            checkpoint["state_dict"].update(reference.state_dict(prefix="reference."))

    @property
    def _answers(self) -> AnswerCache | None:
        return None if self._module.safety is None else self._module.safety.answers

    def _load_rewards(self, saved: list[dict[str, Any]] | dict[str, Any], rank: int, world: int) -> None:
        """Restore the state of this rank's rewards; earlier releases saved none, or that of rank 0 alone."""
        states = saved if isinstance(saved, list) else [saved]
        alike = len(states) == world
        if not alike and rank == 0 and any(states):
            log.warning(
                "the checkpoint holds the states of the rewards of %d process%s, and this run has %d: each goes on "
                "with that of rank 0, which has seen only its own share of the responses",
                *(len(states), "es" * (len(states) > 1), world),
            )
        self._module.reward.load_state_dict(states[rank if alike else 0])

    def refuse_other_reference(self, saved: Mapping[str, Any]) -> None:
        """Compare the reference model with the one of a saved state.

        Raises:
            InputError: it is not the same one, or the state lacks a key that cannot be done without.
        """
        if missing := [key for key in _NEEDED if key not in saved]:
            raise InputError(
                f"the checkpoint lacks lightning_rlhf.{missing[0]}, which every release has written: it comes from a "
                "development version, or was changed"
            )
        if saved["reference_fingerprint"] != self.reference_fingerprint():
            raise InputError(
                "the checkpoint was trained against another reference model than the one loaded now: the model's "
                "source or seed, its supervised warm-up or model.policy.reference has changed since. Restore it, or "
                "start a new run."
            )

    def reference_fingerprint(self) -> str | None:
        """Of the unsharded weights: first called before sharding, then cached."""
        if self._fingerprint is None and self._module.reference is not None:
            self._fingerprint = self._module.reference.fingerprint()
        return self._fingerprint
