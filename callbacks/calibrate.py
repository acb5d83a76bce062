"""Check that the engine samples from the policy that is trained: both score the same tokens."""

from __future__ import annotations

import logging
import math

import torch
from lightning import Trainer
from torch import Tensor

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.experience import PromptBatch
from lightning_rlhf.functional.stats import all_reduce_sum
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.module import ActorCriticModule

log = logging.getLogger(__name__)

LIMITS = {"float32": 1e-3, "low precision": 0.1, "rounded weights": 0.5}
"""Mean |difference of log-probabilities| in nats per token that the coarser precision of the two sides explains."""


class CalibrationError(RuntimeError):
    """Engine and trainer disagree by more than their precision explains."""


class Calibrate(RLHFCallback):
    """Probes the engine before the first rollout of a fit and every ``every`` iterations; a gap too large ends the run.

    The engine answers some prompts of the current iteration, the trainer scores the same tokens at the same
    temperature. Both have the same weights at that moment, so only rounding may differ. A larger gap means that
    weights were not sent, or that temperature, template or log-probability are not the same on both sides.

    The probe samples with the rows' own seeds and changes no counter, so a run with it equals one without.

    Args:
        prompts: how many prompts of the iteration, each answered once.
        tokens: longest answer; the gap does not grow with length, the cost does.
        every: iterations between two probes.
        limit: largest mean |log-probability difference| in nats per token. ``None``: 1e-3 if engine and trainer
            compute in float32, 0.1 if one of them has a lower precision, 0.5 if the engine's weights are
            rounded (``rollout.quantization``, ``rollout.weight_bits``). With ``rollout.top_k`` or ``rollout.top_p`` set
            the log-probabilities differ by the mass cut off, so with ``None`` the callback only reports.
    """

    def __init__(self, prompts: int = 16, tokens: int = 32, every: int = 20, limit: float | None = None) -> None:
        bounded("calibrate", at_least=1, whole=True, prompts=prompts, tokens=tokens, every=every)
        bounded("calibrate", above=0, optional=True, limit=limit)
        self.prompts, self.tokens, self.every, self.limit = prompts, tokens, every, limit
        self._first = True
        self.largest = 0.0
        """The largest mean gap that a line has told at a scheduled probe."""

    def on_fit_start(self, trainer: Trainer, pl_module: ActorCriticModule) -> None:  # type: ignore[override]
        self._first = True

    def on_rollout_start(self, trainer: Trainer, module: ActorCriticModule, prompts: PromptBatch) -> None:
        scheduled = (module.control.iteration - 1) % self.every == 0
        if not (scheduled or self._first):
            return
        rollout, train_logprobs = module.probe(prompts.first(self.prompts), max_new_tokens=self.tokens)
        numbers = compare(train_logprobs, rollout.rollout_logprobs, rollout.response_mask)
        if scheduled:  # a resumed run probes once more, but logs what an uninterrupted one logs
            for name, value in numbers.items():
                module.control.report(name, value)
        if numbers:  # empty: no token was generated, and the next iteration probes again
            self._say(numbers, module, scheduled)
            self._judge(numbers, module)
            self._first = False

    def _say(self, numbers: dict[str, float], module: ActorCriticModule, scheduled: bool) -> None:
        """One line at the first probe, and whenever the mean gap is over twice the largest told so far."""
        gap = numbers["calibrate/logprob_abs_diff_mean"]
        grown = gap > 2 * self.largest
        if self._first or grown:
            log.info(
                "calibrate, iteration %d (%s): engine and trainer differ by\n"
                "  %.2g nats per token at equal weights (largest %.2g; k3 %.2g)",
                module.control.iteration,
                "first probe" if self.largest == 0 or not grown else "largest gap so far",
                gap,
                numbers["calibrate/logprob_abs_diff_max"],
                numbers["calibrate/k3_kl"],
            )
        if scheduled and grown:  # the probe at the start of a resumed run leaves the state as it would be without
            self.largest = gap

    def state_dict(self) -> dict[str, float]:
        return {"largest": self.largest}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.largest = state_dict["largest"]

    def _judge(self, numbers: dict[str, float], module: ActorCriticModule) -> None:
        sampling = module.engine.sampling
        if self.limit is None and sampling.truncated:
            if self._first:
                log.warning(
                    "callbacks.calibrate only reports: with rollout.top_k = %s, rollout.top_p = %s the log-probs of "
                    "engine and trainer differ anyway; set callbacks.calibrate.limit to judge them",
                    sampling.top_k,
                    sampling.top_p,
                )
            return
        kind = coarsest(module)
        limit = LIMITS[kind] if self.limit is None else self.limit
        gap = numbers["calibrate/logprob_abs_diff_mean"]
        if not gap <= limit:  # also true for NaN: a log-probability that is not a number is a disagreement
            raise CalibrationError(
                f"iteration {module.control.iteration}: rollout engine and trainer disagree. The mean |log-probability "
                f"difference| of the sampled tokens is {gap:.3g} nats, over the limit of {limit:g} ({kind}; "
                f"callbacks.calibrate.limit). Largest {numbers['calibrate/logprob_abs_diff_max']:.3g} nats; mean "
                f"|probability difference| {numbers['calibrate/probs_diff_mean']:.3g}, correlation "
                f"{numbers['calibrate/probs_pearson_corr']:.4f}. Likely causes: weights that were not "
                f"sent to the engine; another temperature there (here it is {sampling.temperature:g}), or "
                "log-probabilities before it (raw mode); another model, tokenizer or chat template there."
            )


def compare(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Differences between two log-probabilities of the same tokens, over all valid tokens of all ranks.

    Args:
        train_logprobs: ``[B, R]`` of the trainer.
        rollout_logprobs: ``[B, R]`` of the engine.
        mask: ``[B, R]`` bool, generated tokens.

    Returns:
        The numbers by metric name; empty if no rank has a token, as nothing was measured then.

    Raises:
        CalibrationError: there are tokens, and the engine reports a finite log-probability for none of them.
    """
    finite = mask & rollout_logprobs.isfinite()  # other tokens cannot be compared
    generated, comparable = all_reduce_sum(torch.stack([mask.sum(), finite.sum()])).tolist()
    if not generated:
        return {}
    if not comparable:
        raise CalibrationError("the rollout engine reports no finite log-probability for any token of the probe")
    train, rollout = train_logprobs.double(), rollout_logprobs.double()
    gap = (train - rollout).abs()
    difference = (train.exp() - rollout.exp()).abs()
    batch = MetricBatch()
    batch.mean("calibrate/logprob_abs_diff_mean", gap, finite)
    batch.max("calibrate/logprob_abs_diff_max", gap, finite)
    batch.mean("calibrate/k3_kl", torch.expm1(train - rollout) - (train - rollout), finite)
    batch.mean("calibrate/probs_diff_mean", difference, finite, std="calibrate/probs_diff_std")
    batch.max("calibrate/probs_diff_max", difference, finite)
    return batch.compute() | {"calibrate/probs_pearson_corr": pearson(train.exp(), rollout.exp(), finite)}


def pearson(x: Tensor, y: Tensor, mask: Tensor) -> float:
    """Pearson correlation of the elements where ``mask`` is true, all ranks; 1 for equal, 0 for constant inputs."""
    x, y = x[mask].double(), y[mask].double()
    if bool(all_reduce_sum((x != y).sum()) == 0):
        return 1.0
    count, total_x, total_y = all_reduce_sum(torch.stack([torch.ones_like(x).sum(), x.sum(), y.sum()])).unbind()
    x, y = x - total_x / count, y - total_y / count
    xx, yy, xy = all_reduce_sum(torch.stack([(x * x).sum(), (y * y).sum(), (x * y).sum()])).tolist()
    return xy / math.sqrt(xx * yy) if xx * yy > 0 else 0.0


def coarsest(module: ActorCriticModule) -> str:
    """The coarser precision of engine and trainer, a key of :data:`LIMITS`."""
    engine = module.engine.describe()
    if engine.get("weight_bits") is not None or engine.get("quantization") is not None:
        return "rounded weights"
    weights = {parameter.dtype for parameter in module.actor.parameters() if parameter.is_floating_point()}
    exact = weights == {torch.float32} and str(module.trainer.precision).startswith("32")
    return "float32" if exact and engine.get("dtype", "float32") == "float32" else "low precision"
