"""A map of a run's prompts: a point for each, coloured by KL and by score, and a table that names them."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_rlhf.errors import InputError
from lightning_rlhf.files import replaced
from lightning_rlhf.functional.projection import principal_components
from lightning_rlhf.reporting.prompt_review import shortened
from lightning_rlhf.reporting.prompt_table import RecordedPrompt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILES = {"figure": "map.png", "table": "map.csv"}
LEAST = 3
"""Prompts of a map at least: two are always one line."""
NEIGHBOURS = 15
"""Neighbours of a point that UMAP keeps together, its own default; fewer prompts are shown by PCA."""
NAMED = 12
"""Suspects whose keys are written into the figure, those first in the monitor's list."""
TEXT = 1000
"""Characters of a prompt in the table; a chat template begins all with the same words."""
SHARE_IN_COLOUR = 0.98
"""The colours end at this quantile and its counterpart, and leave out at least the farthest value on each side: one
enormous KL would leave all other prompts one colour."""


@dataclass(frozen=True)
class Plane:
    """Coordinates of prompts.

    Attributes:
        points: ``[N, 2]`` float64.
        method: ``UMAP`` or ``PCA``.
    """

    points: Tensor
    method: str


def refuse_few(count: int) -> None:
    """Refuse a map of too few prompts.

    Raises:
        InputError: says how many it needs.
    """
    if count < LEAST:
        raise InputError(f"--map needs at least {LEAST} different prompts; the run has recorded {count}")


def plane_of(vectors: Tensor, seed: int = 0) -> Plane:
    """Two coordinates for each vector: by UMAP where it is installed (McInnes et al. 2018), else by PCA.

    Args:
        vectors: ``[N, D]`` float.
        seed: of UMAP; with it the same vectors give the same plane on one machine.

    Raises:
        InputError: fewer than three vectors, or UMAP is there and cannot be imported.
    """
    refuse_few(len(vectors))
    if importlib.util.find_spec("umap") is None or len(vectors) <= NEIGHBOURS:
        return Plane(principal_components(vectors), "PCA")
    try:
        import umap
    except ImportError as error:
        raise InputError(f"umap is installed and cannot be imported ({error}); repair or remove it") from error
    reducer = umap.UMAP(n_components=2, n_neighbors=NEIGHBOURS, random_state=seed, n_jobs=1)
    return Plane(torch.as_tensor(reducer.fit_transform(vectors.float().numpy())).double(), "UMAP")


def write_map(
    folder: Path,
    run: str,
    prompts: Sequence[RecordedPrompt],
    plane: Plane,
    *,
    vectors: str,
    suspects: Mapping[str, str],
) -> list[str]:
    """Write figure and table; earlier ones in the folder are replaced.

    Args:
        folder: made if need be.
        run: the run's folder, for the title.
        prompts: in the order of the plane's points.
        plane: coordinates.
        vectors: what the vectors are, in words.
        suspects: keys of flagged prompts, each with its reasons.

    Returns:
        Lines for the terminal that say what was written.

    Raises:
        InputError: ``folder`` is a file.
    """
    if folder.is_file():
        raise InputError(f"--map {folder}: is a file; allowed is a folder")
    with replaced(folder / FILES["table"]) as file:
        writer = csv.DictWriter(file, list(_cells(prompts[0], (0.0, 0.0), "")))
        writer.writeheader()
        for prompt, point in zip(prompts, plane.points.tolist(), strict=True):
            writer.writerow(_cells(prompt, point, suspects.get(prompt.key, "")))
    draw(run, prompts, plane, vectors=vectors, suspects=suspects).savefig(folder / FILES["figure"], dpi=150)
    marked = sum(prompt.key in suspects for prompt in prompts)
    return [
        f"{len(prompts)} prompts of {run}, {marked} of them suspects, by {plane.method} of {vectors}:",
        f"  {folder / FILES['figure']}",
        f"  {folder / FILES['table']}: coordinates, key and text of each",
    ]


def _cells(prompt: RecordedPrompt, point: Sequence[float], reasons: str) -> dict[str, Any]:
    """A row of the table; what was not measured is an empty cell."""
    numbers = {"kl_ref": prompt.kl, "kl_excess": prompt.kl_excess, "score": prompt.score}
    return {
        "key": prompt.key,
        "x": f"{point[0]:.6g}",
        "y": f"{point[1]:.6g}",
        **{name: "" if value is None else f"{value:.6g}" for name, value in numbers.items()},
        "visits": prompt.visits,
        "samples": prompt.samples,
        "suspect": reasons,
        "prompt": shortened(prompt.text, TEXT),
    }


def draw(
    run: str, prompts: Sequence[RecordedPrompt], plane: Plane, *, vectors: str, suspects: Mapping[str, str]
) -> Figure:
    """The figure: mean KL on the left, mean score on the right, suspects ringed. Arguments as in :func:`write_map`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    # A path may hold what matplotlib takes for a formula.
    figure.suptitle(f"{len(prompts)} prompts of {run}\n{plane.method} of {vectors}", parse_math=False)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    _panel(left, [prompt.kl for prompt in prompts], plane.points, "mean KL to the reference, nats per token")
    _panel(right, [prompt.score for prompt in prompts], plane.points, "mean score")
    ringed = [row for row, prompt in enumerate(prompts) if prompt.key in suspects]
    for panel in (left, right):
        panel.set_xlabel(f"{plane.method} 1")
        panel.set_ylabel(f"{plane.method} 2")
        if ringed:
            x, y = plane.points[ringed].T.tolist()
            panel.scatter(x, y, s=90, facecolors="none", edgecolors="tab:red", linewidths=1.4, label="suspects")
            panel.legend(loc="best")
    of_key = {prompts[row].key: plane.points[row].tolist() for row in ringed}
    for key in [key for key in suspects if key in of_key][:NAMED]:
        left.annotate(key, of_key[key], xytext=(6, 6), textcoords="offset points", fontsize=7)
    return figure


def _panel(panel: Axes, values: Sequence[float | None], points: Tensor, what: str) -> None:
    """All points, those without a value grey, the others in the order of their values, so that high ones lie on top."""
    rows = [row for row, value in enumerate(values) if value is None]
    panel.set_title(what if len(rows) < len(values) else f"{what}: not recorded")
    if rows:
        x, y = points[rows].T.tolist()
        panel.scatter(x, y, s=14, color="lightgrey")
    measured = sorted((value, row) for row, value in enumerate(values) if value is not None)
    if not measured:
        return
    colours = torch.tensor([value for value, _ in measured], dtype=torch.float64)
    low = float(colours.quantile(1 - SHARE_IN_COLOUR, interpolation="higher"))
    high = float(colours.quantile(SHARE_IN_COLOUR, interpolation="lower"))
    x, y = points[[row for _, row in measured]].T.tolist()
    drawn = panel.scatter(x, y, s=14, c=colours.tolist(), cmap="viridis", vmin=low, vmax=high)
    ends = {(True, True): "both", (True, False): "min", (False, True): "max", (False, False): "neither"}
    cut = (float(colours[0]) < low, float(colours[-1]) > high)
    panel.figure.colorbar(drawn, ax=panel, extend=ends[cut])
