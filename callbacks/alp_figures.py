"""Figures of adaptive layerwise perturbation: sigma over time, and the tails of the ratio with and without noise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning import Trainer

from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.checks import bounded
from lightning_rlhf.events import UpdateStats
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.reporting.loggers import tell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_rlhf.mixins.alp_comparison import RatioTails

HEALTHY = "bottom > middle > top"


class ALPFigures(RLHFCallback):
    """Writes ``figures/alp_sigma_000010.png`` and ``figures/alp_ratio_000010.png`` below the run's folder.

    The first shows sigma by layer and iteration, as a heat map and as lines, and whether it has the pattern regarded
    as healthy: largest at the bottom, smallest at the top. The second shows P2 and P98 of log(trainer / engine) by
    token probability at the last comparison (``module.alp.compare_every``). Loggers that accept files get both.

    Args:
        every_n_iterations: iterations between two figures; the last iteration is drawn as well.

    Raises:
        ValueError: ``every_n_iterations`` is not a whole number >= 1.
        RuntimeError: at the start of training, for a module without noise (``alp=none``).
    """

    def __init__(self, every_n_iterations: int = 10) -> None:
        bounded("alp_figures", at_least=1, whole=True, every_n_iterations=every_n_iterations)
        self.every_n_iterations = every_n_iterations
        self.iterations: list[int] = []
        self.layers: list[int] = []
        self.sigmas: list[list[float]] = []
        """Sigmas: a row per iteration, a column per layer."""

    def on_train_start(self, trainer: Trainer, module: ActorCriticModule) -> None:  # type: ignore[override]
        if not getattr(module, "sigma_by_layer", dict)():
            raise RuntimeError("callbacks.alp_figures needs noise to draw: alp=default, or callbacks.alp_figures=null")

    def on_update_end(self, trainer: Trainer, module: ActorCriticModule, stats: UpdateStats) -> None:
        sigmas: dict[int, float] = cast(Any, module).sigma_by_layer()
        self.layers = list(sigmas)
        self.iterations.append(stats.iteration)
        self.sigmas.append(list(sigmas.values()))

    def on_train_batch_end(self, trainer: Trainer, module: ActorCriticModule, *args: Any) -> None:  # type: ignore[override]
        """Draw once the iteration's comparison is known."""
        iteration = self.iterations[-1]
        if trainer.is_global_zero and (iteration % self.every_n_iterations == 0 or iteration == module.iterations):
            self._write(trainer, "alp_sigma", iteration, sigma_figure(self.iterations, self.layers, self.sigmas))
            tails: list[RatioTails] = cast(Any, module).ratio_tails
            if tails:
                self._write(trainer, "alp_ratio", iteration, ratio_figure(tails))

    def _write(self, trainer: Trainer, name: str, iteration: int, figure: Figure) -> None:
        path = Path(trainer.default_root_dir) / "figures" / f"{name}_{iteration:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
        tell(trainer.loggers, "log_file", path, "figures")

    def state_dict(self) -> dict[str, Any]:
        return {"iterations": self.iterations, "layers": self.layers, "sigmas": self.sigmas}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.iterations, self.layers = list(state_dict["iterations"]), list(state_dict["layers"])
        self.sigmas = [list(row) for row in state_dict["sigmas"]]


def verdict(sigmas: Sequence[float]) -> str:
    """Whether the mean sigma of the bottom, middle and top third of the layers falls from bottom to top."""
    if len(sigmas) < 3:
        return f"{len(sigmas)} layers: too few to compare bottom, middle and top"
    third = len(sigmas) / 3
    cuts = [0, round(third), round(2 * third), len(sigmas)]
    means = [sum(sigmas[a:b]) / (b - a) for a, b in pairwise(cuts)]
    shown = ", ".join(f"{part} {mean:.2e}" for part, mean in zip(("bottom", "middle", "top"), means, strict=True))
    order = "healthy" if means[0] > means[1] > means[2] else "not the healthy order"
    return f"{order} ({HEALTHY}): {shown}"


def sigma_figure(iterations: Sequence[int], layers: Sequence[int], sigmas: Sequence[Sequence[float]]) -> Figure:
    """Heat map and lines of sigma.

    Args:
        iterations: one per row.
        layers: one per column.
        sigmas: rows of standard deviations, by iteration.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = list(zip(*sigmas, strict=True))
    edges = (iterations[0] - 0.5, iterations[-1] + 0.5, layers[0] - 0.5, layers[-1] + 0.5)
    image = left.imshow(rows, aspect="auto", origin="lower", extent=edges, interpolation="nearest")
    figure.colorbar(image, ax=left, label="sigma")
    left.set(xlabel="iteration", ylabel="layer (0 is the bottom)", title="sigma by layer")
    for layer, row in zip(layers, rows, strict=True):
        # From dark for the bottom layer to light for the top, in the order of the heat map's axis.
        shade = 0.85 * (layer - layers[0]) / max(layers[-1] - layers[0], 1)
        right.plot(
            iterations, row, color=str(shade), label=f"layer {layer}" if layer in (layers[0], layers[-1]) else None
        )
    right.set(xlabel="iteration", ylabel="sigma", title="dark: bottom, light: top")
    right.legend()
    figure.suptitle(verdict(sigmas[-1]))
    return figure


def ratio_figure(tails: Sequence[RatioTails]) -> Figure:
    """P2 and P98 of the log-ratio against token probability, with and without noise."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    centres = [(tail.low + tail.high) / 2 for tail in tails]
    for name, pairs, colour in (
        ("plain", [tail.plain for tail in tails], "tab:blue"),
        ("perturbed", [tail.perturbed for tail in tails], "tab:orange"),
    ):
        low, high = zip(*pairs, strict=True)
        axes.plot(centres, low, marker="o", color=colour, label=name)
        axes.plot(centres, high, marker="o", color=colour)
        axes.fill_between(centres, low, high, color=colour, alpha=0.15)
    axes.axhline(0.0, color="grey", linewidth=0.8)
    tokens = sum(tail.tokens for tail in tails)
    axes.set(xlabel="probability of the token under the engine", ylabel="log(trainer / engine), P2 and P98")
    axes.set_title(f"tails of the ratio, {tokens} tokens")
    axes.legend()
    return figure
