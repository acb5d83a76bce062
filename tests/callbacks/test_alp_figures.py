"""Figures of the noise: written when due, given to loggers, with a verdict that follows from the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger

from lightning_rlhf.callbacks import ALPFigures
from lightning_rlhf.callbacks.alp_figures import ratio_figure, sigma_figure, verdict
from lightning_rlhf.mixins.alp_comparison import RatioTails
from tests.support import fit, tiny_module


class Files(Logger):
    """A logger that takes files."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str]] = []

    name = "files"
    version = 0

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_file(self, path: Path, folder: str = "") -> None:
        self.files.append((path.name, folder))


def test_figures_are_written_when_due_and_at_the_end(tmp_path: Path) -> None:
    logger = Files()
    alp = {"init_sigma": 0.05, "warmup_steps": 0, "compare_every": 2}
    callback = ALPFigures(every_n_iterations=2)
    fit(tiny_module(alp=alp, iterations=3), [callback], folder=tmp_path, logger=logger)
    written = sorted(path.name for path in (tmp_path / "figures").iterdir())
    expected = [f"alp_{kind}_{iteration:06d}.png" for kind in ("ratio", "sigma") for iteration in (2, 3)]
    assert written == expected and sorted(logger.files) == [(name, "figures") for name in expected]
    assert all((tmp_path / "figures" / name).read_bytes()[:4] == b"\x89PNG" for name in written)
    assert callback.iterations == [1, 2, 3] and callback.layers == [0, 1] and len(callback.sigmas) == 3
    restored = ALPFigures()
    restored.load_state_dict(callback.state_dict())
    assert (restored.iterations, restored.sigmas) == (callback.iterations, callback.sigmas)


def test_figures_show_the_numbers() -> None:
    figure = sigma_figure([1, 2], [0, 1, 2], [[3e-4, 2e-4, 1e-4], [4e-4, 2e-4, 1e-4]])
    heat, lines = figure.axes[:2]
    assert heat.images[0].get_array().tolist() == [[3e-4, 4e-4], [2e-4, 2e-4], [1e-4, 1e-4]]
    assert [line.get_ydata().tolist() if hasattr(line.get_ydata(), "tolist") else list(line.get_ydata())
            for line in lines.lines] == [[3e-4, 4e-4], [2e-4, 2e-4], [1e-4, 1e-4]]  # fmt: skip
    assert figure.get_suptitle().startswith("healthy (bottom > middle > top)")
    tails = [RatioTails(0.0, 0.1, 5, (-0.2, 0.3), (-0.1, 0.2)), RatioTails(0.9, 1.0, 9, (-0.02, 0.03), (-0.01, 0.02))]
    axes = ratio_figure(tails).axes[0]
    assert list(axes.lines[0].get_ydata()) == [-0.2, -0.02] and list(axes.lines[3].get_ydata()) == [0.2, 0.02]
    assert "14 tokens" in axes.get_title()


@pytest.mark.parametrize(
    ("sigmas", "said"),
    [
        ([3e-4, 2e-4, 1e-4], "healthy (bottom > middle > top): bottom 3.00e-04, middle 2.00e-04, top 1.00e-04"),
        ([1e-4, 2e-4, 3e-4], "not the healthy order (bottom > middle > top)"),
        ([4.0, 2.0, 3.0, 3.0, 1.0, 1.0], "not the healthy order"),
        ([1.0, 2.0], "2 layers: too few"),
    ],
)
def test_the_verdict(sigmas: list[float], said: str) -> None:
    assert verdict(sigmas).startswith(said)


def test_without_noise_there_is_nothing_to_draw() -> None:
    with pytest.raises(RuntimeError, match=r"callbacks\.alp_figures needs noise to draw: alp=default"):
        fit(tiny_module(iterations=1), [ALPFigures()])
    with pytest.raises(ValueError, match=r"callbacks\.alp_figures\.every_n_iterations = 0 is not allowed"):
        ALPFigures(every_n_iterations=0)
