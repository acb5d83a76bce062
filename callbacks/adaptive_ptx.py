"""Steer the weight of the language-model loss so that the policy keeps what it can do besides the task."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rlhf.bounds import is_number
from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded, check_range
from lightning_rlhf.callbacks.controllers import LogPID, may_act, own_within
from lightning_rlhf.callbacks.efficiency_stop import change, mean
from lightning_rlhf.checkpoint.random_state import random_state_kept
from lightning_rlhf.distributed.processes import gather_objects, together
from lightning_rlhf.errors import InputError
from lightning_rlhf.events import ExperienceStats
from lightning_rlhf.experience import Experience, PromptBatch
from lightning_rlhf.metrics.names import valid
from lightning_rlhf.mixins.ptx import KNOB, PTXMixin, perplexity
from lightning_rlhf.models.actor import training_mode
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.settings import SettingError

Mode = Literal["doubling", "pid"]
Benchmark = Callable[[ActorCriticModule], float]
BLOCK = "callbacks.adaptive_ptx"
PERPLEXITY = "held_out_perplexity"
SMALLEST_SHARE = 1e-6
"""A benchmark that fell to 0 or below counts as this share of its baseline."""


class AdaptivePTX(RLHFCallback):
    """Owner of the knob ``ptx_coefficient`` (gamma): probes of what the policy can do besides the task steer it.

    Before the first step, and then every ``every`` iterations before the rollout, it measures the perplexity on a
    held-out text and your own benchmarks. A probe's share is what is left of its baseline, the value before the first
    step: baseline / perplexity, and benchmark / baseline. The smallest share is the *capability*; the controller acts
    on its moving geometric mean.

    ``doubling``
        Doubles gamma if the average is below ``tolerance``. Halves it if capability is stable (average and last
        probe are at least ``tolerance``) and the reward stalls: the mean score of the last ``window`` iterations is
        over that of the ``window`` before by at most ``min_improvement`` of what the run has gained so far. After a
        change the average starts anew and gamma stays for ``1 / (1 - smoothing)`` probes, so that one low probe acts
        once.
    ``pid``
        :class:`LogPID` on the loss of capability, ``-log(average)``, with the target ``-log(tolerance)``: gamma settles
        where as much is lost as ``tolerance`` allows, whatever the reward does.

    The probe that measures the baselines is 1 by definition and moves nothing; it only begins the average.

    A probe changes nothing of the run: modes, random generators and counters are as before. A probe that is not finite
    moves nothing. Baselines, averages and scores are in the checkpoint.

    Args:
        every: iterations between two probes.
        text: held-out text, a source as ``module.ptx.source``; ``None``: the blocks that ``module.ptx.held_out`` keeps
            apart, no perplexity if there are none.
        text_field: column of its text.
        blocks: of the text, at most: the first ones.
        benchmarks: by name, callables that get the module and return a number > 0 at the start, higher is better. Every
            rank calls them, the mean over ranks counts. In a configuration a block with the ``_target_`` of a class
            with ``__call__``, or of a function with ``_partial_: true``.
        tolerance: share of the capability to keep, in (0, 1).
        mode: one of the two.
        smoothing: weight of the past in the average, in [0, 1).
        window, min_improvement: when the reward stalls (``doubling``).
        kp, ki, kd: gains (``pid``).
        minimum, maximum: bounds of gamma.

    Raises:
        SettingError: a value is not allowed.
        InputError: at the start, without PPO-ptx or anything to probe; or a benchmark that returns no number, or a
            baseline that is not > 0.
    """

    def __init__(
        self,
        every: int = 2,
        text: Any = None,
        text_field: str = "text",
        blocks: int = 16,
        benchmarks: Mapping[str, Benchmark] | None = None,
        tolerance: float = 0.98,
        mode: Mode = "doubling",
        smoothing: float = 0.5,
        window: int = 5,
        min_improvement: float = 0.01,
        kp: float = 0.6,
        ki: float = 0.2,
        kd: float = 0.4,
        minimum: float = 0.001,
        maximum: float = 10.0,
    ) -> None:
        bounded("adaptive_ptx", at_least=1, whole=True, every=every, blocks=blocks, window=window)
        bounded("adaptive_ptx", above=0, below=1, tolerance=tolerance)
        bounded("adaptive_ptx", at_least=0, below=1, smoothing=smoothing)
        bounded("adaptive_ptx", at_least=0, min_improvement=min_improvement, kp=kp, ki=ki, kd=kd)
        check_range("adaptive_ptx", minimum, maximum)
        if mode not in get_args(Mode):
            raise SettingError(f"{BLOCK}.mode", mode, f"one of {', '.join(get_args(Mode))}")
        self.every, self.text, self.text_field, self.blocks = every, text, text_field, blocks
        self.benchmarks = _checked(benchmarks)
        self.tolerance, self.mode, self.smoothing = tolerance, mode, smoothing
        self.window, self.min_improvement = window, min_improvement
        self.minimum, self.maximum = minimum, maximum
        self.pid = LogPID(-math.log(tolerance), kp, ki, kd, minimum, maximum)
        self.baseline: dict[str, float] = {}
        self.average: float | None = None
        """Moving average of the loss of capability, ``-log(share)``."""
        self.kept = math.nan
        """exp(-average) at the last probe, before a change made the average start anew."""
        self.since_change = 0
        self.scores: list[float] = []
        self.start: float | None = None
        """Mean score of the first window."""
        self._held_out: Tensor | None = None

    # --- probes ------------------------------------------------------------------------------------------------------

    def probe(self, module: ActorCriticModule) -> dict[str, float]:
        """Perplexity and benchmarks of the policy as it is, the same numbers on every rank.

        Raises:
            InputError: a benchmark returned something else than a number.
        """
        numbers: dict[str, float] = {}
        with training_mode(module, False), random_state_kept(module.device), torch.no_grad():
            if self._held_out is not None:
                numbers[PERPLEXITY] = perplexity(cast(PTXMixin, module).text_loss(self._held_out))
            for name, benchmark in self.benchmarks.items():
                everyone = gather_objects(together(partial(_score, name, benchmark, module)))
                numbers[f"benchmark/{name}"] = sum(everyone) / len(everyone)
        return numbers

    def capability(self, numbers: Mapping[str, float]) -> float:
        """The smallest share of its baseline that is left of any probe; NaN if one is not finite."""
        shares = [
            self.baseline[name] / value if name == PERPLEXITY else value / self.baseline[name]
            for name, value in numbers.items()
        ]
        return min(shares) if all(map(math.isfinite, numbers.values())) else math.nan

    # --- controller --------------------------------------------------------------------------------------------------

    def next_coefficient(self, gamma: float, capability: float, *, baseline: bool = False) -> float:
        """gamma after a probe; updates the controller's state, unless the capability is not finite.

        Args:
            gamma: in force.
            capability: see :meth:`capability`.
            baseline: it is that of the baselines themselves, so 1 whatever gamma is: gamma stays.
        """
        self.kept = math.nan
        if not math.isfinite(capability):
            return gamma
        lost, past = -math.log(max(capability, SMALLEST_SHARE)), self.average
        self.average = lost if past is None else self.smoothing * past + (1.0 - self.smoothing) * lost
        self.kept = math.exp(-self.average)
        if self.mode == "doubling":
            gamma = self._doubling(gamma, capability, baseline)
        elif not baseline:
            gamma = self.pid.next(gamma, self.average, past)
        return min(max(gamma, self.minimum), self.maximum)

    def _doubling(self, gamma: float, capability: float, baseline: bool) -> float:
        self.since_change += 1
        if baseline or not may_act(self.since_change, self.smoothing):
            return gamma
        stable = min(self.kept, capability) >= self.tolerance
        factor = 2.0 if self.kept < self.tolerance else 0.5 if stable and self.stalled else 1.0
        if factor != 1.0:
            self.since_change, self.average = 0, None
        return gamma * factor

    @property
    def stalled(self) -> bool:
        """Whether the reward has stopped rising; false until there are two windows of it."""
        if len(self.scores) < 2 * self.window or self.start is None:
            return False
        gained = max(mean(self.scores[self.window :]) - self.start, 0.0)
        return change(self.scores) <= self.min_improvement * gained

    # --- events ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        module: Any = pl_module
        if KNOB not in module.control.knobs:
            raise InputError(
                f"{BLOCK} steers module.ptx, which is off: ptx=default module.ptx.source=..., or {BLOCK}=null"
            )
        if self._held_out is None:
            held_out = module.held_out_text
            if self.text is not None:
                try:
                    held_out = module.read_text(self.text, text_field=self.text_field, key=f"{BLOCK}.text")
                except (ValueError, OSError, ImportError) as error:  # of the text, so it is no failure of the run
                    said = str(error).removeprefix(f"{BLOCK}.text: ")
                    raise InputError(f"{BLOCK}.text = {self.text!r:.200}: {said}") from error
            self._held_out = None if held_out is None else held_out[: self.blocks]
        if self._held_out is None and not self.benchmarks:
            raise InputError(
                f"{BLOCK} has nothing to probe: set module.ptx.held_out to a number of blocks, {BLOCK}.text to a text, "
                f"or {BLOCK}.benchmarks"
            )
        own_within(
            module.control, KNOB, type(self).__name__, self.minimum, self.maximum,
            key="module.ptx.coefficient", block="adaptive_ptx", warn=stage == "fit",
        )  # fmt: skip

    def on_rollout_start(self, trainer: Trainer, module: ActorCriticModule, prompts: PromptBatch) -> None:
        control = module.control
        due = (control.iteration - 1) % self.every == 0
        known = {*self.baseline} >= {*([PERPLEXITY] if self._held_out is not None else []), *self._names()}
        if not due and known:
            return
        numbers = self.probe(module)
        baseline = not {*numbers} & {*self.baseline}
        for name in [name for name in numbers if name not in self.baseline]:
            self._begin(name, numbers[name])
        if not due:
            return  # a probe that this run did not have before; its baseline is that of now
        capability = self.capability(numbers)
        if not math.isfinite(capability):
            rank_zero_warn(f"iteration {control.iteration}: a probe of {BLOCK} is not finite ({numbers}); gamma stays")
        gamma = control.knobs[KNOB].value
        self._set(module, gamma, self.next_coefficient(gamma, capability, baseline=baseline), capability)
        for name, value in numbers.items():
            control.report(f"ptx/{name}", value)
        control.report("ptx/capability", capability)
        control.report("ptx/capability_average", self.kept)

    def _names(self) -> list[str]:
        return [f"benchmark/{name}" for name in self.benchmarks]

    def _begin(self, name: str, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise InputError(
                f"{BLOCK}: the baseline of {name} is {value}, of which no share can be kept; allowed is a finite "
                "number > 0 (a benchmark that begins at 0 may add a constant)"
            )
        self.baseline[name] = value

    def _set(self, module: ActorCriticModule, before: float, after: float, capability: float) -> None:
        """Set gamma, and note a doubling or halving with its reason."""
        after = module.control.set(KNOB, after, type(self).__name__)
        if self.mode == "doubling" and after > before:
            reason = f"{capability:.3f} of the capability left, tolerance {self.tolerance}"
            module.control.note("raise_ptx_coefficient", f"{reason}: from {before:g} to {after:g}")
        elif self.mode == "doubling" and after < before:
            reason = f"the reward stalls and {capability:.3f} of the capability is left"
            module.control.note("lower_ptx_coefficient", f"{reason}: from {before:g} to {after:g}")

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        if not math.isfinite(stats.score_mean):
            return
        self.scores = [*self.scores, stats.score_mean][-2 * self.window :]
        if self.start is None and len(self.scores) == self.window:
            self.start = mean(self.scores)

    def state_dict(self) -> dict[str, Any]:
        names = ("baseline", "average", "since_change", "scores", "start")
        own = {name: getattr(self, name) for name in names}
        return own | {"pid": self.pid.state_dict(), "text": _fingerprint(self._held_out)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pid.load_state_dict(state_dict["pid"])
        self.baseline, self.scores = dict(state_dict["baseline"]), list(state_dict["scores"])
        self.average, self.since_change = state_dict["average"], state_dict["since_change"]
        self.start = state_dict["start"]
        if PERPLEXITY in self.baseline and state_dict["text"] != _fingerprint(self._held_out):
            del self.baseline[PERPLEXITY]
            self.average = None
            rank_zero_warn(f"the held-out text of {BLOCK} is another one than before: its baseline is measured again")


def _fingerprint(blocks: Tensor | None) -> str | None:
    """Identifies the blocks of a text."""
    return None if blocks is None else hashlib.sha256(blocks.cpu().numpy().tobytes()).hexdigest()[:16]


def _checked(benchmarks: Mapping[str, Benchmark] | None) -> dict[str, Benchmark]:
    """The benchmarks, each a callable under a name that can be logged."""
    if not isinstance(benchmarks, (Mapping, type(None))):
        raise SettingError(f"{BLOCK}.benchmarks", benchmarks, "callables by name, or null")
    for name, benchmark in (benchmarks or {}).items():
        if not callable(benchmark):
            allowed = "a callable that takes the module; in a configuration a function needs _partial_: true"
            raise SettingError(f"{BLOCK}.benchmarks.{name}", benchmark, allowed)
        if not valid(f"ptx/benchmark/{name}") or "/" in name:
            raise SettingError(f"{BLOCK}.benchmarks", name, "names of letters, digits, '_', '-' and '.'")
    return dict(benchmarks or {})


def _score(name: str, benchmark: Benchmark, module: ActorCriticModule) -> float:
    try:
        value = benchmark(module)
    except Exception as error:
        error.called_as = f"{BLOCK}.benchmarks.{name}"  # type: ignore[attr-defined]  # names it in what the user reads
        raise
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not is_number(value) and not (isinstance(value, float) and not math.isfinite(value)):
        raise InputError(f"{BLOCK}.benchmarks.{name} returned {value!r:.80}; allowed is a number, higher is better")
    return float(value)
