"""Metrics of many tensors, reduced over ranks at once and brought to the host in one transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlhf.functional.groups import group_sum, row_sums
from lightning_rlhf.functional.stats import all_reduce_max, all_reduce_sum, deviation_of_sums


class MetricBatch:
    """Collects sums and maxima on the device; :meth:`compute` reduces and transfers them once.

    Calling a method again under the same name adds to the same metric, so the micro-batches of a minibatch, or
    the minibatches of an epoch, can report one after the other. Means are over valid elements of **all** calls
    and ranks, a maximum is a maximum over all of them; padding is never in a denominator. An unmeasured metric is not
    0: a mean, deviation, maximum or minimum without a valid element on any rank is absent, on every rank alike. A sum
    of nothing is 0.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._maxima: dict[tuple[str, str], Tensor] = {}
        self._known: dict[str, float] = {}

    def known(self, name: str, value: float) -> None:
        """A number that is already the same on every rank."""
        self._known[name] = value

    def sum(self, name: str, value: Tensor) -> None:
        """Add up a scalar, or all elements of a tensor."""
        self._add((name, "sum"), value.detach().sum(dtype=torch.float64))

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None, *, std: str | None = None) -> None:
        """Mean over the elements where ``mask`` is true; ``std`` names a second metric, their deviation (n - 1)."""
        valid, count = _valid(values, mask)
        self._add((name, "total"), valid.sum(dtype=torch.float64))
        self._add((name, "count"), count)
        if std is not None:
            self._add((std, "std_total"), valid.sum(dtype=torch.float64))
            self._add((std, "std_square"), valid.double().square().sum())
            self._add((std, "std_count"), count)

    def means(
        self,
        names: Sequence[str],
        values: Tensor,
        members: Tensor,
        mask: Tensor | None = None,
        *,
        stds: Sequence[str] = (),
    ) -> None:
        """A mean for each group of rows: row ``i`` counts in ``names[members[i]]``; ``stds`` name the deviations.

        Args:
            names: of all groups, the same on every rank.
            values: ``[B]`` or ``[B, R]``.
            members: ``[B]`` int64.
            mask: of the shape of ``values``; default: all.
            stds: as many names, or none.
        """
        values = values.detach()
        valid = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
        totals, counts = (
            group_sum(row_sums(x, valid), members, len(names)).unbind() for x in (values, torch.ones_like(values))
        )
        for name, total, count in zip(names, totals, counts, strict=True):
            self._add((name, "total"), total)
            self._add((name, "count"), count)
        if stds:
            squares = group_sum(row_sums(values.double().square(), valid), members, len(names)).unbind()
            for std, total, square, count in zip(stds, totals, squares, counts, strict=True):
                self._add((std, "std_total"), total)
                self._add((std, "std_square"), square)
                self._add((std, "std_count"), count)

    def max(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        self._raise((name, "max"), values, mask)

    def min(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        self._raise((name, "min"), -values, mask)

    def compute(self) -> dict[str, float]:
        """The metrics that were measured. Every rank must have called the same methods under the same names."""
        sums, maxima = _transfer(self._sums, self._maxima)
        result: dict[str, float] = dict(self._known)
        for (name, kind), value in sums.items():
            if kind == "sum":
                result[name] = value
            elif kind == "total" and (count := sums[name, "count"]):
                result[name] = value / count
            elif kind == "std_total" and (count := sums[name, "std_count"]):
                result[name] = deviation_of_sums(value, sums[name, "std_square"], count)
        for (name, kind), value in maxima.items():
            if value != -math.inf:
                result[name] = -value if kind == "min" else value
        return result

    def _add(self, key: tuple[str, str], value: Tensor) -> None:
        self._sums[key] = self._sums[key] + value if key in self._sums else value

    def _raise(self, key: tuple[str, str], values: Tensor, mask: Tensor | None) -> None:
        values = values.detach().double()
        if mask is not None:
            values = values.masked_fill(~mask.bool(), -math.inf)
        top = values.amax() if values.numel() else torch.full((), -math.inf, dtype=torch.float64, device=values.device)
        self._maxima[key] = torch.maximum(self._maxima[key], top) if key in self._maxima else top


def _valid(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    values = values.detach()
    if mask is None:
        return values, torch.full((), float(values.numel()), dtype=torch.float64, device=values.device)
    return values.masked_fill(~mask.bool(), 0.0), mask.bool().sum(dtype=torch.float64)


def _transfer(
    sums: dict[tuple[str, str], Tensor], maxima: dict[tuple[str, str], Tensor]
) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Two reductions (sum, max) and one device-to-host copy for everything."""
    parts = []
    if sums:
        parts.append(all_reduce_sum(torch.stack(list(sums.values()))))
    if maxima:
        parts.append(all_reduce_max(torch.stack(list(maxima.values()))))
    numbers = torch.cat(parts).tolist() if parts else []
    return dict(zip(sums, numbers, strict=False)), dict(zip(maxima, numbers[len(sums) :], strict=True))
