"""Stop a run whose reward goes on rising while the quality that it stands for falls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torchmetrics.functional import spearman_corrcoef

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.checkpoint import IterationCheckpoint
from lightning_rlhf.checkpoint.random_state import random_state_kept
from lightning_rlhf.distributed.processes import gather_objects, place, together
from lightning_rlhf.errors import InputError
from lightning_rlhf.events import EvaluationStats
from lightning_rlhf.experience import Experience
from lightning_rlhf.faults import Faults
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.rewards import Reward, RewardBatch, RewardError
from lightning_rlhf.rewards.base import checked_scores, has_state, in_words, origin, restore_state
from lightning_rlhf.settings import SettingError

BLOCK = "callbacks.overoptimisation_stop"
GOLD = "eval/gold_mean"
Row = tuple[str, float, float]
"""Key of a held-out prompt, and the reward and the gold score of its answer."""


class OveroptimisationStop(RLHFCallback):
    """Ends a run once a second, trusted scorer says that the answers get worse, whatever the reward says.

    Every evaluation on the held-out prompts (``evaluate_every``, and the one before training) is a check: ``gold``
    scores the same greedy answers as the reward. The run ends if in ``patience`` checks in a row

    - the gold score has *fallen*: over the prompts that were scored both at the best check so far and now, the mean of
      (score then - score now) is over ``min_drop`` times |best mean|, and over ``standard_errors`` times its standard
      error s / sqrt(n), s being the standard deviation (n - 1) of these differences; or
    - the rank correlation of reward and gold score is below ``min_spearman``.

    The best check is the one with the highest mean gold score, the first of equals. A check that measured nothing (no
    answer with a gold score, fewer than two prompts to compare, one side constant) neither counts nor interrupts a row.
    ``callbacks.checkpoint.monitor=eval/gold_mean`` with ``mode=max`` keeps the weights of the best check; the reason
    of a stop names the file.

    A check changes nothing of the run: its random generators are as before. Best scores, counts and the history of
    checks are in the checkpoint, and so is the state of a gold scorer that has one.

    Args:
        gold: scores answers, as a term of the reward does: called with a :class:`RewardBatch`, it returns one finite
            number for each response; NaN for one without a score is allowed if it has a true attribute
            ``leaves_gaps``, as :class:`lightning_rlhf.rewards.StoredScores` has. ``None`` is refused at the start.
        patience: checks in a row.
        min_drop: share of the best gold score, as a magnitude, by which the score has to lie below it: a policy that
            trains goes up and down on every prompt. 0 leaves it to the standard error alone, as for scores around 0.
        standard_errors: of the paired difference by which the gold score has to lie below its best: the prompts are a
            sample.
        min_spearman: rank correlation below which a check counts, in [-1, 1]; ``None``: off.

    Raises:
        SettingError: a value is not allowed.
        InputError: at the start, without gold scorer, held-out prompts or evaluations; or if no answer of the first
            check has a gold score.
        RewardError: the gold scorer failed, or did not return one finite number per response.
    """

    def __init__(
        self,
        gold: Reward | None = None,
        patience: int = 2,
        min_drop: float = 0.03,
        standard_errors: float = 2.0,
        min_spearman: float | None = None,
    ) -> None:
        if gold is not None and not callable(gold):
            allowed = "a callable that scores a batch of responses; in a configuration a function needs _partial_: true"
            raise SettingError(f"{BLOCK}.gold", gold, allowed)
        bounded("overoptimisation_stop", at_least=1, whole=True, patience=patience)
        bounded("overoptimisation_stop", at_least=0, min_drop=min_drop, standard_errors=standard_errors)
        bounded("overoptimisation_stop", at_least=-1, at_most=1, optional=True, min_spearman=min_spearman)
        self.gold, self.patience = gold, patience
        self.min_drop, self.standard_errors, self.min_spearman = min_drop, standard_errors, min_spearman
        self.best: dict[str, Any] | None = None
        """Iteration, mean and scores by prompt of the best check."""
        self.falls = 0
        self.uncorrelated = 0
        self.history: list[list[float | None]] = []
        """Iteration, mean gold score and rank correlation of every check; ``None`` was not measured."""
        self._rows: list[Row] = []

    # --- the rule ----------------------------------------------------------------------------------------------------

    def judge(self, iteration: int, rows: Sequence[Row]) -> str | None:
        """Take one check into account.

        Args:
            iteration: after which it was made.
            rows: of the answers of all ranks.

        Returns:
            Why the run should end, or ``None``.
        """
        scores, correlation = by_prompt(rows), spearman(rows)
        average = gold_mean(rows)
        self.history.append([iteration, _or_none(average), _or_none(correlation)])
        if self.min_spearman is not None and math.isfinite(correlation):
            self.uncorrelated = self.uncorrelated + 1 if correlation < self.min_spearman else 0
        drop = error = math.nan
        if self.best is None or average > self.best["mean"]:
            if math.isfinite(average):
                self.best, self.falls = {"iteration": iteration, "mean": average, "scores": scores}, 0
        else:
            drop, error = paired_drop(self.best["scores"], scores)
            least = max(self.min_drop * abs(self.best["mean"]), self.standard_errors * error)
            if math.isfinite(drop):
                self.falls = self.falls + 1 if drop > least else 0
        if self.falls >= self.patience and math.isfinite(drop) and self.best is not None:
            return (
                f"over-optimised: the gold score {average:.4g} lies {drop:.4g} (standard error {error:.2g}) below its "
                f"best of {self.best['mean']:.4g} after iteration {self.best['iteration']}, in {self.falls} checks in "
                "a row"
            )
        if self.uncorrelated >= self.patience and math.isfinite(correlation):
            return (
                f"over-optimised: the rank correlation of reward and gold score, {correlation:.3f}, is below "
                f"{self.min_spearman} in {self.uncorrelated} checks in a row"
            )
        return None

    # --- events ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.gold is None:
            raise InputError(
                f"{BLOCK}.gold = null: there is nothing to compare the reward with; allowed is what a term of the "
                "reward may be, such as {_target_: my_parts.Judge}, or stored scores, {_target_: "
                "lightning_rlhf.rewards.StoredScores, rows: {_target_: lightning_rlhf.data.JSONLSource, path: FILE}}"
            )
        prompts = getattr(getattr(trainer, "datamodule", None), "validation_prompts", None)
        if prompts is not None and not len(prompts):
            raise InputError(
                f"data.validation = null: {BLOCK} scores the answers to held-out prompts, and there are none; allowed "
                "are data.validation=FILE, data.validation_size=NUMBER (held out from the training rows), or "
                f"{BLOCK}=null"
            )
        module: Any = pl_module
        every, iterations = trainer.val_check_interval, module.iterations
        if isinstance(every, int) and every > iterations:  # null is iterations + 1
            raise InputError(
                f"evaluate_every = {'null' if every == iterations + 1 else every}: {BLOCK} acts after evaluations in "
                f"the course of training, and there are none; allowed is a whole number up to iterations = "
                f"{iterations}, such as evaluate_every=10, or {BLOCK}=null"
            )
        if stage == "fit":
            self._check_monitor(trainer)
        together(partial(self._prepare, prompts or ()))
        if callable(move := getattr(self.gold, "to", None)):
            move(trainer.strategy.root_device)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = []

    def on_evaluation_scored(
        self, trainer: Trainer, module: ActorCriticModule, batch: RewardBatch, answers: Experience
    ) -> None:
        assert self.gold is not None
        with random_state_kept(module.device), torch.no_grad():
            gold = checked_scores(f"{BLOCK}.gold", self.gold, batch, gaps=self._gaps)
        self._rows += zip(batch.keys, answers.require("scores").tolist(), gold.tolist(), strict=True)

    def on_evaluation_end(self, trainer: Trainer, module: ActorCriticModule, stats: EvaluationStats) -> None:
        rows = [row for rank in gather_objects(self._rows) for row in rank]
        self._rows = []
        if not rows:
            return
        coverage = sum(not math.isnan(gold) for _, _, gold in rows) / len(rows)
        if self._gaps:
            module.control.report("eval/gold_coverage", coverage)
        if self.best is None and not coverage:
            raise InputError(
                f"{BLOCK}.gold has a score for none of the {len(rows)} answers to the held-out prompts, so nothing can "
                "be compared; allowed are stored scores of answers that the policy gives, or a scorer of any answer"
            )
        module.control.report(GOLD, gold_mean(rows))
        module.control.report("eval/gold_spearman", spearman(rows))
        if not stats.training and stats.iteration:
            return  # after training, of which it is no check
        reason = self.judge(stats.iteration, rows)
        if reason is not None and stats.iteration < module.iterations:
            module.control.stop_training(f"{reason}; {self._kept(trainer)}")

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("best", "falls", "uncorrelated", "history")}
        gold: Any = self.gold
        return state | ({"gold": gather_objects(gold.state_dict())} if has_state(gold) else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.history = state_dict["best"], [list(check) for check in state_dict["history"]]
        self.falls, self.uncorrelated = state_dict["falls"], state_dict["uncorrelated"]
        gold: Any = self.gold
        if has_state(gold) and "gold" in state_dict:
            states, (rank, world) = state_dict["gold"], place()
            alike = len(states) == world
            if not alike:
                rank_zero_warn(
                    f"the checkpoint holds the states of {BLOCK}.gold of {len(states)} processes, and this run has "
                    f"{world}: each goes on with that of process 0"
                )
            restore_state(f"{BLOCK}.gold", gold, states[rank if alike else 0])

    # --- helpers -----------------------------------------------------------------------------------------------------

    @property
    def _gaps(self) -> bool:
        return bool(getattr(self.gold, "leaves_gaps", False))

    def _prepare(self, prompts: Iterable[Any]) -> None:
        """Check every held-out row, as :meth:`lightning_rlhf.rewards.CompositeReward.check_rows` does."""
        check: Any = getattr(self.gold, "check_row", None)
        faults = Faults()
        for prompt in prompts if check is not None else ():
            try:
                check(prompt.row)
            except Exception as error:  # a user's scorer may raise anything
                faults.add(f"{BLOCK}.gold, {origin(prompt.row)}: {in_words(error, prompt.row)}")
        if faults:
            raise RewardError(str(faults))

    def _check_monitor(self, trainer: Trainer) -> None:
        """Warn if checkpoints are kept by another number."""
        for saver in _savers(trainer):
            if (saver.monitor, saver.mode) != (GOLD, "max"):
                rank_zero_warn(
                    f"callbacks.checkpoint.monitor = {saver.monitor or 'null'}, mode = {saver.mode}: the checkpoint "
                    f"with the best gold score is not kept apart; set monitor={GOLD} mode=max"
                )

    def _kept(self, trainer: Trainer) -> str:
        """The checkpoint with the best gold score, in words."""
        savers = [saver for saver in _savers(trainer) if (saver.monitor, saver.mode) == (GOLD, "max")]
        trained = " after training began" if self.best is not None and not self.best["iteration"] else ""
        means = [mean for iteration, mean, _ in self.history if mean is not None and (iteration or not trained)]
        if savers and means and self.history[-1][1] is not None and means[-1] > max(means[:-1], default=-math.inf):
            return f"this check is the best{trained}, and its checkpoint is written now"
        saver = next((saver for saver in savers if saver.best_model_path), None)
        if saver is None:
            return f"no checkpoint of the best is kept, see callbacks.checkpoint.monitor={GOLD}"
        score = f"{saver.best_model_score:.4g}" if saver.best_model_score is not None else "not measured"
        return f"the checkpoint with the best gold score{trained} ({score}) is {saver.best_model_path}"


def _savers(trainer: Trainer) -> list[IterationCheckpoint]:
    callbacks: Iterable[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, IterationCheckpoint)]


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def gold_mean(rows: Iterable[Row]) -> float:
    """Mean over the answers that have a gold score; NaN if none has."""
    measured = [gold for _, _, gold in rows if not math.isnan(gold)]
    return math.fsum(measured) / len(measured) if measured else math.nan


def by_prompt(rows: Iterable[Row]) -> dict[str, float]:
    """The gold score of every prompt that has one; of several rows with one prompt their mean."""
    found = defaultdict[str, list[float]](list)
    for key, _, gold in rows:
        if not math.isnan(gold):
            found[key].append(gold)
    return {key: math.fsum(found[key]) / len(found[key]) for key in sorted(found)}


def paired_drop(before: Mapping[str, float], now: Mapping[str, float]) -> tuple[float, float]:
    """Mean of before - now over the prompts in both, and its standard error; NaN with fewer than two such prompts."""
    differences = [before[key] - now[key] for key in sorted(before.keys() & now.keys())]
    count = len(differences)
    if count < 2:
        return math.nan, math.nan
    average = math.fsum(differences) / count
    return average, math.sqrt(math.fsum((d - average) ** 2 for d in differences) / (count - 1) / count)


def spearman(rows: Iterable[Row]) -> float:
    """Rank correlation of reward and gold score over the answers that have both; NaN if one side is constant."""
    pairs = sorted((reward, gold) for _, reward, gold in rows if not math.isnan(gold))
    if len({reward for reward, _ in pairs}) < 2 or len({gold for _, gold in pairs}) < 2:
        return math.nan
    rewards, golds = torch.tensor(pairs, dtype=torch.float64).T
    return float(spearman_corrcoef(rewards, golds))
