"""Groups of prompts in an iteration: their metrics, weights, and normalisation by their own mean and deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import Experience
from lightning_rlhf.functional.groups import group_moments, group_sum, merged, of_rows, standardise_groups
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.functional.stats import Moments, all_reduce_sum, masked_moments, select_valid
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.moments import RunningMoments
from lightning_rlhf.settings import PPOSettings

BLOCK = "module.groups"


class PromptGroups:
    """The groups of the training prompts, in an order that all ranks share; without any, nothing here is used.

    The state is, per group, count, mean and sum of squared deviations of all its rewards so far. It is kept by name, so
    that a run that is resumed on data with further groups keeps what it knows.

    Args:
        settings: of the module.
    """

    def __init__(self, settings: PPOSettings) -> None:
        self.settings = settings
        self.names: tuple[str, ...] = ()
        self.labels: Mapping[str, str] = {}
        """By group, its name in metrics."""
        self._running: dict[str, list[float]] = {}

    def take(self, names: Sequence[str], labels: Mapping[str, str]) -> None:
        """The groups of the data; both are empty without ``data.group_column``.

        Raises:
            SettingError: the settings ask for groups and there is none, or for one that there is not; or no group is
                left with a weight.
        """
        own = self.settings.groups
        if (fault := self.settings.groups_fault) is not None:
            raise fault
        if not names and own.normalise != "none":
            raise SettingError(f"{BLOCK}.normalise", own.normalise, NO_GROUPS)
        weights = own.weights or {}
        for group, weight in weights.items():
            if group not in names:
                near = get_close_matches(group, names, n=1)
                known = f"the training prompts have the groups {', '.join(names)}" if names else NO_GROUPS
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise SettingError(f"{BLOCK}.weights.{group}", weight, f"{hint}{known}")
        if names and not any(weights.get(name, 1.0) for name in names):
            raise SettingError(f"{BLOCK}.weights", dict(weights), "a weight above 0 for one group at least")
        self.names, self.labels = tuple(names), dict(labels)

    def members(self, experience: Experience) -> Tensor:
        """``[B]`` int64, the group of each row as its place in :attr:`names`.

        Raises:
            RuntimeError: a row has no group, or one that the data module does not name.
        """
        found = experience.prompt_group
        places = {name: place for place, name in enumerate(self.names)}
        strange = sorted(set(found) - places.keys())
        if strange or len(found) != len(experience):
            said = (
                f"prompts of the group {strange[0]!r}" if strange else f"{len(found)} groups for {len(experience)} rows"
            )
            raise RuntimeError(f"the batch has {said}; the data module's groups are {', '.join(self.names)}")
        return torch.tensor([places[name] for name in found], device=experience.response_ids.device)

    # --- rewards and advantages ----------------------------------------------------------------------------------

    def whiten(self, x: Tensor, mask: Tensor, members: Tensor) -> Tensor:
        """Valid elements of each group to mean 0 and variance 1 over all ranks; 0 at masked elements.

        Args:
            x: ``[B]`` or ``[B, R]``.
            mask: of the same shape; true on valid elements.
            members: as :meth:`members` returns them.
        """
        rows = mask if mask.ndim == 1 else mask.any(-1)
        sequences = all_reduce_sum(group_sum(rows.double(), members, len(self.names)))
        own = group_moments(x, mask, members, len(self.names))
        few = sequences < self.settings.groups.min_samples
        return select_valid(standardise_groups(x, members, own, masked_moments(x, mask), few), mask)

    def running(self, scores: Tensor, rows: Tensor, members: Tensor, whole: RunningMoments) -> Tensor:
        """The scores ``[B]`` by the mean and deviation of all scores of their group so far, these included.

        Args:
            scores: one that is not finite is left out of the moments and stays as it is.
            rows: ``[B]`` bool, rows that count.
            members: as :meth:`members` returns them.
            whole: of all groups, these scores included.
        """
        batch = group_moments(scores, rows & scores.isfinite(), members, len(self.names))
        own = merged(self._moments(scores.device), batch)
        squares = own.var * (own.count - 1).clamp(min=0)
        state = torch.stack([own.count, own.mean, squares], dim=-1).tolist()
        self._running |= dict(zip(self.names, state, strict=True))
        few = own.count < self.settings.groups.min_samples
        return standardise_groups(scores, members, own, Moments(whole.mean, whole.var, whole.count), few)

    def weighted(self, advantages: Tensor, members: Tensor) -> Tensor:
        """The advantages ``[B, R]`` times the weight of their group; themselves if no group has one."""
        weights = self.settings.groups.weights
        if not weights:
            return advantages
        factors = [weights.get(name, 1.0) for name in self.names]
        numbers = torch.tensor(factors, dtype=advantages.dtype, device=advantages.device)
        return advantages * of_rows(numbers, members, advantages)

    def _moments(self, device: torch.device) -> Moments:
        state = [self._running.get(name, [0.0, 0.0, 0.0]) for name in self.names]
        count, mean, squares = torch.tensor(state, dtype=torch.float64, device=device).unbind(-1)
        return Moments(mean, squares / (count - 1).clamp(min=1), count)

    def state_dict(self) -> dict[str, Any]:
        """Count, mean and sum of squared deviations of each group's rewards; empty unless they are running."""
        return {name: list(state) for name, state in self._running.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._running = {name: list(numbers) for name, numbers in state.items()}

    # --- metrics -------------------------------------------------------------------------------------------------

    def measure(self, experience: Experience, metrics: MetricBatch) -> None:
        """The metrics ``group/...`` of a scored experience with advantages; masks as of the metrics of all groups."""
        if not self.names:
            return
        members, valid = self.members(experience), experience.require("loss_mask")
        labels = [self.labels[name] for name in self.names]
        stds = [f"group/{label}/reward_std" for label in labels]
        scores = experience.require("scores")
        metrics.means([f"group/{label}/reward_mean" for label in labels], scores, members, experience.own, stds=stds)
        lengths = experience.response_lengths.float()
        metrics.means([f"group/{label}/response_length_mean" for label in labels], lengths, members)
        advantages = experience.require("advantages")
        metrics.means([f"group/{label}/advantage_mean" for label in labels], advantages, members, valid)
        metrics.means([f"group/{label}/advantage_abs_mean" for label in labels], advantages.abs(), members, valid)
        if experience.ref_logprobs is not None:
            estimator = self.settings.kl.estimator
            kl = kl_estimate(experience.require("old_logprobs"), experience.ref_logprobs, estimator)
            metrics.means([f"group/{label}/kl_ref" for label in labels], kl, members, valid)
        counts = group_sum(torch.ones_like(scores), members, len(labels))
        for label, count in zip(labels, counts, strict=True):
            metrics.sum(f"group/{label}/samples", count)


NO_GROUPS = "nothing without groups: set data.group_column to a column of the data"
