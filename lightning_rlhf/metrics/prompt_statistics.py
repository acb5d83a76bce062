"""Statistics of every prompt over its last visits, in fixed memory, and which prompts stand out from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rlhf.functional.outliers import TAIL, median, robust_z

KL_FLOOR = 0.01
"""Smallest scale of the KL, nats per token: differences of a few hundredths harm no run, however certain."""

MEASURES = ("reward", "spread", "kl")
FIELDS = ("samples", "relative", "centre", "squares", "distance")
"""What is kept of a visit; ``relative`` is the score less the iteration's median, ``centre`` (a difference of two large
scores kept as float32 would be lost), ``distance`` the same for the KL."""


class Visit(NamedTuple):
    """One prompt in one iteration."""

    key: str
    samples: int
    score: float
    """Mean score of its samples."""
    squares: float
    """Sum of the squared differences of the samples' scores from their mean."""
    kl: float
    """Mean KL(policy || reference) of its samples, nats per token; NaN without reference."""


@dataclass(frozen=True)
class Standing:
    """How the prompts stand: one number per prompt, ``[P]`` float64, NaN where nothing was measured.

    Attributes:
        samples: samples in the window.
        scores: mean score.
        values: by measure, what is compared: ``reward``, the mean difference of the score from the iteration's median
            prompt; ``spread``, the standard deviation of these differences over samples; ``kl``, the mean difference of
            the KL from the iteration's median prompt. Each is without the visit that lies farthest out (of several), so
            that one odd answer makes no prompt an outlier.
        z: by measure, the robust z-score among the judged prompts; NaN for the others.
    """

    samples: Tensor
    scores: Tensor
    values: dict[str, Tensor]
    z: dict[str, Tensor]


class PromptStatistics:
    """Running statistics per prompt.

    A prompt is compared with the others over its own last ``window`` visits, not over the last iterations: where a pass
    over the data takes long, most prompts are not among the last iterations at all. The policy changes between visits,
    so scores and KLs count relative to the median prompt of their iteration.

    One prompt takes ``20 * window + 48`` bytes in tensors and its key, whatever its texts.

    Args:
        window: visits that are kept.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.index: dict[str, int] = {}
        """Row of each prompt key, in the order of first visits."""
        self.visits = torch.zeros(0, dtype=torch.int64)
        self._rings = torch.zeros(0, len(FIELDS), window, dtype=torch.float32)
        # Kept, as only the visited prompts' numbers change in an iteration.
        self._numbers = torch.zeros(0, 2 + len(MEASURES), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"PromptStatistics(window={self.window}, prompts={len(self)})"

    def add(self, visits: Sequence[Visit]) -> None:
        """The visits of one iteration, of all ranks; each prompt once."""
        if not visits:
            return
        rows = torch.tensor([self.index.setdefault(visit.key, len(self.index)) for visit in visits])
        self._make_room()
        scores, kls = (
            torch.tensor([getattr(v, name) for v in visits], dtype=torch.float64) for name in ("score", "kl")
        )
        measured = kls[kls.isfinite()]
        numbers = {
            "samples": torch.tensor([float(visit.samples) for visit in visits], dtype=torch.float64),
            "relative": scores - median(scores),
            "centre": torch.full_like(scores, median(scores)),
            "squares": torch.tensor([visit.squares for visit in visits], dtype=torch.float64),
            "distance": kls.where(kls.isfinite(), torch.nan) - (median(measured) if len(measured) else torch.nan),
        }
        column = self.visits[rows] % self.window
        for field, name in enumerate(FIELDS):
            self._rings[rows, field, column] = numbers[name].float()
        self.visits[rows] += 1
        self._numbers[rows] = _numbers(self._rings[rows])

    def _make_room(self) -> None:
        """Grow by doubling, so that a new prompt costs nothing most of the time."""
        missing = len(self.index) - len(self.visits)
        if missing > 0:
            more = max(missing, len(self.visits))
            self.visits = torch.cat([self.visits, self.visits.new_zeros(more)])
            self._rings = torch.cat([self._rings, self._rings.new_zeros(more, len(FIELDS), self.window)])
            self._numbers = torch.cat([self._numbers, self._numbers.new_zeros(more, self._numbers.shape[1])])

    def standing(self, min_visits: int) -> Standing:
        """All prompts, judged if they have at least ``min_visits`` visits (not only those in the window)."""
        count = len(self.index)
        samples, scores, *compared = self._numbers[:count].unbind(-1)
        values = dict(zip(MEASURES, compared, strict=True))
        judged = self.visits[:count] >= min_visits
        candidates = {name: value.where(judged, torch.nan) for name, value in values.items()}
        typical = typical_deviation(candidates["reward"], candidates["spread"])
        floors = {"reward": typical / 3, "spread": typical / 3, "kl": KL_FLOOR}
        z = {name: robust_z(candidates[name], floor=floors[name]) for name in MEASURES}
        return Standing(samples, scores, values, z)

    def state_dict(self) -> dict[str, Any]:
        """Keys and tensors, without the room for further prompts."""
        count = len(self.index)
        tensors = {"visits": self.visits, "rings": self._rings, "numbers": self._numbers}
        return {"keys": list(self.index)} | {name: tensor[:count].clone() for name, tensor in tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; of a longer window the newest visits are kept."""
        self.index = {key: row for row, key in enumerate(state["keys"])}
        self.visits, self._numbers = state["visits"].clone(), state["numbers"].clone()
        self._rings = _resized(state["rings"], self.visits, self.window)
        if state["rings"].shape[-1] != self.window:
            self._numbers = _numbers(self._rings)


def _numbers(rings: Tensor) -> Tensor:
    """``[P, 5]`` float64 from ring buffers: samples, mean score, and the numbers of :data:`MEASURES`."""
    samples, relative, centre, squares, distance = rings.double().unbind(1)
    relative, distance = (values.where(samples > 0, torch.nan) for values in (relative, distance))
    columns = [
        samples.sum(-1),
        _weighted_mean(centre + relative, samples),
        _weighted_mean(relative, samples * ~_farthest(relative)),
        _inner_spread(samples, relative, squares),
        _weighted_mean(distance, samples * ~_farthest(distance)),
    ]
    return torch.stack(columns, dim=-1)


def typical_deviation(means: Tensor, spreads: Tensor) -> float:
    """Standard deviation of one score of a usual prompt: within prompts and between them, without the outermost 2 %.

    A third of it is the floor of the scales, so that |z| > 3 needs a difference of at least one such deviation. Among
    prompts that are (nearly) all solved the median absolute deviation is 0, and a single failure would be an outlier.
    """
    means, spreads = means[~means.isnan()], spreads[~spreads.isnan()]
    within = _inner_mean_square(spreads) if len(spreads) else 0.0
    between = _inner_mean_square(means - median(means)) if len(means) else 0.0
    return max((within + between) ** 0.5, _SMALLEST)


_SMALLEST = 1e-9
"""Where all scores are equal: any difference stands out, and rounding does not."""


def _inner_mean_square(values: Tensor) -> float:
    kept = len(values) - max(1, int(2 * TAIL * len(values)))
    return float(values.square().sort().values[: max(1, kept)].mean())


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of each row without the NaNs; NaN where nothing has a weight."""
    weights = weights.where(~values.isnan(), 0.0)
    return (weights * values.nan_to_num(0.0)).sum(-1) / weights.sum(-1)


def _farthest(values: Tensor) -> Tensor:
    """Marks the value of each row that is farthest from the row's mean; none in a row with fewer than two values."""
    away = (values - values.nanmean(-1, keepdim=True)).abs()
    return _largest(away)


def _largest(values: Tensor) -> Tensor:
    """Marks the largest value of each row, the first of equal ones; none in a row with fewer than two values."""
    chosen = torch.zeros_like(values, dtype=torch.bool)
    chosen.scatter_(-1, values.nan_to_num(-1.0).argmax(-1, keepdim=True), True)
    return chosen & ((~values.isnan()).sum(-1, keepdim=True) > 1)


def _inner_spread(samples: Tensor, relative: Tensor, squares: Tensor) -> Tensor:
    """Standard deviation (n - 1) of all samples of a row's visits but the one that adds most to it."""
    away = relative - _weighted_mean(relative, samples).unsqueeze(-1)
    inner = samples * ~_largest(squares + samples * away.square())
    away = relative - _weighted_mean(relative, inner).unsqueeze(-1)
    total = inner.sum(-1)
    spread = (((squares * (inner > 0)) + inner * away.square().nan_to_num(0.0)).sum(-1) / (total - 1)).sqrt()
    return spread.where(total > 1, torch.nan)


def _resized(rings: Tensor, visits: Tensor, window: int) -> Tensor:
    """The ring buffers with another number of places; each visit lies at its number modulo the places."""
    former = rings.shape[-1]
    if former == window:
        return rings.clone()
    resized = rings.new_zeros(*rings.shape[:-1], window)
    rows = torch.arange(len(visits))
    for back in range(1, min(former, window) + 1):
        known = visits >= back
        number = (visits - back)[known]
        resized[rows[known], :, number % window] = rings[rows[known], :, number % former]
    return resized
