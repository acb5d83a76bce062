"""Steer the KL coefficient towards a target KL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, cast, get_args

from lightning import LightningModule, Trainer

from lightning_rlhf.callbacks.base import RLHFCallback, needs_reference
from lightning_rlhf.callbacks.checks import bounded, check_range
from lightning_rlhf.callbacks.controllers import LogPID, may_act, own_within
from lightning_rlhf.control import Control
from lightning_rlhf.events import ExperienceStats, UpdateStats
from lightning_rlhf.experience import Experience
from lightning_rlhf.functional.kl import proportional_kl_update
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.reporting.loggers import tell
from lightning_rlhf.settings import SettingError

Mode = Literal["pid", "doubling", "proportional"]


class AdaptiveKL(RLHFCallback):
    """Owner of the knob ``kl_coefficient``: one change per iteration, acting from the next one on.

    Input is ``kl/ref`` of the iteration's samples, reduced over all ranks, in nats per token, and its exponential
    moving average. Output stays within ``minimum`` and ``maximum``; a start value outside is moved to the nearer one.

    ``pid``
        :class:`LogPID` on the average.
    ``doubling``
        Doubles the coefficient if the average is over 1.5 x target, halves it if under target / 1.5. After a
        change the average is reset and the coefficient stays for ``1 / (1 - smoothing)`` iterations: otherwise one high
        value would stay in the average and double the coefficient in every iteration.
    ``proportional``
        The controller of Ziegler et al. 2019 (arXiv 1909.08593) on the KL itself, relative error clipped to +-0.2.

    It steers to a KL that you choose, whatever the score does. To brake a run only when it collapses, use
    :class:`KLGuard` without a target instead. An iteration in which no KL was measured (every token rejected)
    changes neither coefficient nor state.

    Args:
        target: KL(current || reference) in nats per token.
        mode: one of the three.
        kp, ki, kd: gains of ``pid``.
        smoothing: weight of the past in the average (``pid``, ``doubling``), in [0, 1).
        minimum, maximum: bounds of the coefficient.
        horizon: ``proportional``: sequences over which a relative error of 1 would change the coefficient by its own
            size.
        figure_every: iterations between two drawings of ``figures/adaptive_kl.png`` (KL above, coefficient below); it
            is drawn at the end of the run as well. ``None``: no figure.
    """

    def __init__(
        self,
        target: float = 0.05,
        mode: Mode = "pid",
        kp: float = 0.6,
        ki: float = 0.2,
        kd: float = 0.4,
        smoothing: float = 0.7,
        minimum: float = 0.01,
        maximum: float = 0.5,
        horizon: int = 10_000,
        figure_every: int | None = 50,
    ) -> None:
        bounded("adaptive_kl", above=0, target=target, horizon=horizon)
        check_range("adaptive_kl", minimum, maximum)
        bounded("adaptive_kl", at_least=0, kp=kp, ki=ki, kd=kd)
        bounded("adaptive_kl", at_least=0, below=1, smoothing=smoothing)
        bounded("adaptive_kl", at_least=1, whole=True, optional=True, figure_every=figure_every)
        if mode not in get_args(Mode):
            raise SettingError("callbacks.adaptive_kl.mode", mode, f"one of {', '.join(get_args(Mode))}")
        self.target, self.mode, self.horizon = target, mode, horizon
        self.smoothing, self.minimum, self.maximum, self.figure_every = smoothing, minimum, maximum, figure_every
        self.average: float | None = None
        self.pid = LogPID(target, kp, ki, kd, minimum, maximum)
        self.since_change = 0
        self.history: list[list[float]] = []
        """Iteration, KL, coefficient in force."""
        self._sequences, self._kl = 0, math.nan

    # --- controller ----------------------------------------------------------------------------------------------

    def next_coefficient(self, beta: float, kl: float, sequences: int) -> float:
        """The coefficient after an iteration whose samples had this KL; updates the controller's state.

        Args:
            beta: coefficient in force.
            kl: nats per token; not finite (nothing was measured): no change.
            sequences: samples of the iteration.
        """
        if not math.isfinite(kl):
            return beta
        if self.mode == "proportional":
            beta = proportional_kl_update(beta, kl, target=self.target, horizon=self.horizon, steps=sequences)
            return self._bounded(beta)
        past = self.average
        self.average = kl if past is None else self.smoothing * past + (1.0 - self.smoothing) * kl
        if self.mode == "doubling":
            return self._bounded(self._doubling(beta))
        return self._bounded(self.pid.next(beta, self.average, past))

    def _doubling(self, beta: float) -> float:
        self.since_change += 1
        if not may_act(self.since_change, self.smoothing):
            return beta
        average = self._average()
        factor = 2.0 if average > 1.5 * self.target else 0.5 if average < self.target / 1.5 else 1.0
        if factor != 1.0:
            self.since_change, self.average = 0, None
        return beta * factor

    def _average(self) -> float:
        return 0.0 if self.average is None else self.average

    def _bounded(self, beta: float) -> float:
        return min(max(beta, self.minimum), self.maximum)

    # --- events --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        needs_reference(pl_module, "adaptive_kl")
        own_within(
            cast(Control, pl_module.control), "kl_coefficient", type(self).__name__, self.minimum, self.maximum,
            key="module.kl.coefficient", block="adaptive_kl", warn=stage == "fit",
        )  # fmt: skip

    def on_experience_ready(
        self, trainer: Trainer, module: ActorCriticModule, experience: Experience, stats: ExperienceStats
    ) -> None:
        self._sequences, self._kl = stats.sequences, stats.kl_ref
        self.history.append([float(stats.iteration), self._kl, module.control.value("kl_coefficient")])

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        control, kl = module.control, self._kl
        beta = self.next_coefficient(control.knobs["kl_coefficient"].value, kl, self._sequences)
        control.set("kl_coefficient", beta, type(self).__name__)
        if self.average is not None:
            control.report("kl/ref_average", self.average)
        if self.figure_every is not None and stats.iteration % self.figure_every == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.figure_every is not None and self.history:
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "figures" / "adaptive_kl.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(self.history, self.target, path)
        tell(trainer.loggers, "log_file", path, "figures")

    def state_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("average", "since_change", "history")}
        return own | {"pid": self.pid.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pid.load_state_dict(state_dict["pid"])
        for name in ("average", "since_change", "history"):
            setattr(self, name, state_dict[name])


def draw(history: list[list[float]], target: float, path: Path) -> None:
    """Draw KL and coefficient over the iterations, one above the other.

    Args:
        history: iteration, KL in nats per token, and coefficient of each iteration.
        target: the KL aimed at, as a line.
        path: file to write; its suffix decides the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    iterations, kls, betas = zip(*history, strict=True)
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(iterations, kls, label="kl/ref")
    upper.axhline(target, color="grey", linestyle="--", label="target")
    upper.set_ylabel("nats per token")
    upper.legend()
    lower.plot(iterations, betas, color="tab:orange")
    lower.set_yscale("log")
    lower.set_ylabel("kl/coefficient")
    lower.set_xlabel("iteration")
    figure.savefig(path)
