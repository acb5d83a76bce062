"""Greedy answers to held-out prompts; ranks may have different numbers of prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_rlhf.distributed.processes import gather_objects, place, together
from lightning_rlhf.events import EvaluationStats, emit
from lightning_rlhf.experience import Experience, Finish, PromptBatch
from lightning_rlhf.functional.stats import largest_over_ranks
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.names import check
from lightning_rlhf.scoring import reward_batch, score_batch

if TYPE_CHECKING:
    from lightning_rlhf.generation import RolloutSource
    from lightning_rlhf.module import ActorCriticModule

_Result = TypeVar("_Result")


class Evaluation:
    """One evaluation, batch by batch.

    Ranks communicate between batches only to gather sharded weights; then a rank that has finished its batches takes
    part until the last rank has finished. An error on one rank is raised on all at the end, as ranks waiting in a
    collective cannot be told earlier.

    Args:
        module: generates and scores.
        rollouts: of the module.
    """

    def __init__(self, module: ActorCriticModule, rollouts: RolloutSource) -> None:
        self._module, self._rollouts = module, rollouts
        self._numbers: dict[str, list[Tensor]] = defaultdict(list)
        self._error: Exception | None = None

    def step(self, prompts: PromptBatch) -> None:
        """Answer and score one batch; an empty one takes part and changes nothing.

        Raises:
            Exception: what generation or a reward raises, with one process.
        """
        self._another_batch(True)
        with self._rollouts.weights():
            if len(prompts):
                self._attempt(partial(self._answer, prompts))

    def finish(self) -> dict[str, float]:
        """The means over all prompts of all ranks, and what callbacks report, by name; the same on every rank.

        Raises:
            Exception: of the first rank that had one.
        """
        while self._another_batch(False):
            with self._rollouts.weights():
                continue
        together(self._raise)
        # A rank without prompts has no names, and a reward may return a term for some prompts only.
        names = {name for names in gather_objects(sorted(self._numbers)) for name in names}
        nothing = torch.zeros(0, device=self._module.device)
        metrics = MetricBatch()
        for name in sorted(names):
            metrics.mean(name, torch.cat(self._numbers.get(name, [nothing])))
        return self._reported(metrics.compute())

    def _answer(self, prompts: PromptBatch) -> None:
        module = self._module
        rollout = module.generate(prompts, greedy=True)
        batch = reward_batch(module.tokenizer, prompts, rollout, module.end_ids)
        answers = score_batch(module.reward, batch, prompts, rollout)
        numbers = _numbers_of(answers) | _numbers_of_groups(answers, module.groups.labels)
        check(numbers)
        for name, values in numbers.items():
            self._numbers[name].append(values.float())
        emit(module, "on_evaluation_scored", batch, answers)

    def _reported(self, numbers: dict[str, float]) -> dict[str, float]:
        """The numbers with those that callbacks report at the end of the evaluation."""
        control, trainer = self._module.control, self._module.trainer
        control.reported.clear()  # what was reported during the iteration is logged already
        training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        emit(self._module, "on_evaluation_end", EvaluationStats.of(control.iteration, training, numbers))
        return numbers | control.reported

    def _another_batch(self, mine: bool) -> bool:
        """Whether any rank has another batch, if all must take part in it; else whether this rank has."""
        if not self._rollouts.gathers:
            return mine
        return largest_over_ranks([float(mine)], self._module.device) > [0.0]

    def _attempt(self, work: Callable[[], _Result]) -> _Result | None:
        """With several ranks, keep the first error for :meth:`finish` and skip all further work."""
        if place()[1] == 1:
            return work()
        try:
            return None if self._error else work()
        except Exception as error:
            self._error = error
            return None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _numbers_of(answers: Experience) -> dict[str, Tensor]:
    """Every term of the reward, ``[B]``, and the other metrics of the answers."""
    numbers = {"eval/reward_mean": answers.require("scores")}
    numbers |= {f"eval/{name}": term for name, term in answers.components.items()}
    numbers["eval/response_length_mean"] = answers.response_lengths
    numbers["eval/truncated_fraction"] = answers.finish == Finish.TRUNCATED
    return numbers


def _numbers_of_groups(answers: Experience, labels: Mapping[str, str]) -> dict[str, Tensor]:
    """The scores of each group of prompts that has a name in metrics."""
    scores, groups = answers.require("scores"), answers.prompt_group
    rows = {group: [row for row, of in enumerate(groups) if of == group] for group in set(groups) & labels.keys()}
    return {f"eval/group/{labels[group]}/reward_mean": scores[of_group] for group, of_group in rows.items()}
