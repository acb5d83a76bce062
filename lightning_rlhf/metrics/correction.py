"""Metrics ``rollout_corr/``: the gap between engine and trainer, and the effect of the correction.

Two tiers. The **cheap** one is sums and extremes of tensors that weights and rejection have built anyway. The **full**
one adds statistics per row, the details of every rejection rule, and percentiles, for which the valid tokens of all
ranks are gathered and sorted: exact, and as much memory as three float32 numbers per token.

Definitions are veRL's, with three differences: rows without a valid token are in no statistic, KL k3 clamps the
log-ratio to +-20 before ``exp`` (so it is finite), and the weights in use are reported beside those before truncation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_rlhf.functional.correction import Correction
from lightning_rlhf.functional.kl import MAX_LOG_RATIO
from lightning_rlhf.functional.stats import select_valid
from lightning_rlhf.metrics.correction_numbers import Numbers, finish, quantiles

PERCENTILES = (5, 10, 25, 50, 75, 90, 95, 99)
"""Of the weights before truncation."""

TAIL = (2, 98)
"""Percentiles of the log-ratio that form the tail envelope."""

TAIL_BINS = 10
"""Bins of equal width of the engine's token probability, for the tail envelope."""

MAX_EXPONENT = 600.0
"""Perplexities beyond e^600 are reported as e^600; float64 ends at e^709."""


class Tally:
    """Named sums and maxima of one batch on one rank; float64 scalars."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def sum(self, name: str, values: Tensor) -> None:
        """Add up a tensor that is 0 at masked elements."""
        self.sums[name] = values.sum(dtype=torch.float64)

    def dot(self, name: str, left: Tensor, right: Tensor) -> None:
        """Sum of products of two float64 tensors that are 0 at masked elements."""
        self.sums[name] = torch.dot(left.flatten(), right.flatten())

    def top(self, name: str, values: Tensor, valid: Tensor) -> None:
        """Largest valid element, -inf without any. (A minimum is the maximum of the negative.)"""
        chosen = values.masked_fill(~valid, -math.inf)
        empty = torch.full((), -math.inf, dtype=torch.float64, device=values.device)
        self.maxima[name] = chosen.amax().double() if chosen.numel() else empty


class CorrectionMetrics(Metric):
    """All metrics of one batch, or of the micro-batches of one update; torchmetrics reduces them over ranks.

    Sums are added up over ranks and divided then, extremes are extremes of all ranks, percentiles are those of all
    valid tokens. ``compute`` costs one reduction of sums, one of extremes, in the full tier one gather, and one
    transfer.

    Args:
        full: the full tier instead of the cheap one.

    After :meth:`compute` of the full tier, :attr:`tail_envelope` is a table for figures.
    """

    full_state_update = False
    total: Tensor
    extreme: Tensor
    tokens: Any

    def __init__(self, *, full: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.full = full
        self.tail_envelope: list[dict[str, float]] = []
        """Per bin of the engine's token probability: ``low, high, tokens, p2, p98`` of the log-ratio (nats)."""
        self._finish: Callable[[Numbers, Numbers], Numbers] | None = None
        self._names: tuple[list[str], list[str]] = ([], [])

    def update(self, correction: Correction, train_logprobs: Tensor, rollout_logprobs: Tensor) -> None:
        """Take in one batch.

        Args:
            correction: the result of :func:`~lightning_rlhf.functional.correction.correct`.
            train_logprobs, rollout_logprobs: ``[B, R]``, its arguments.
        """
        tally = Tally()
        train, rollout = (x.detach().to(correction.ratio.token.dtype) for x in (train_logprobs, rollout_logprobs))
        off_policy(tally, correction, train, rollout)
        acceptance(tally, correction)
        if correction.raw is not None:
            weight_spread(tally, correction, self.full)
        if self.full:
            for index in range(len(correction.passed)):
                rule_spread(tally, correction, index)
        self._gather(correction, rollout)
        self._add(tally)
        self._finish = lambda sums, maxima: finish(sums, maxima, correction, self.full)

    def compute(self) -> Numbers:
        """Metrics by name; what has no valid element on any rank is absent."""
        if self._finish is None:
            raise RuntimeError("CorrectionMetrics.compute() before any update()")
        quantiles = self._quantiles()
        values = torch.cat([self.total, self.extreme, *quantiles.values()]).tolist()
        sums_names, maxima_names = self._names
        sums = dict(zip(sums_names, values, strict=False))
        maxima = dict(zip(maxima_names, values[len(sums_names) :], strict=False))
        numbers = self._finish(sums, maxima)
        rest = values[len(sums_names) + len(maxima_names) :]
        if self.full:
            numbers |= self._named_quantiles(quantiles, rest)
        return {f"rollout_corr/{name}": value for name, value in numbers.items()}

    # --- states --------------------------------------------------------------------------------------------------

    def _add(self, tally: Tally) -> None:
        """Fold a tally into the states, whose size follows from the first one."""
        names = (list(tally.sums), list(tally.maxima))
        sums, maxima = torch.stack(list(tally.sums.values())), torch.stack(list(tally.maxima.values()))
        if self._finish is None:
            self._names = names
            self.add_state("total", torch.zeros_like(sums), dist_reduce_fx="sum")
            self.add_state("extreme", torch.full_like(maxima, -math.inf), dist_reduce_fx="max")
        elif names != self._names:
            raise ValueError("the batches of one CorrectionMetrics have to be corrected by the same kind of plan")
        self.total = self.total + sums
        self.extreme = torch.maximum(self.extreme, maxima)

    def _gather(self, correction: Correction, rollout: Tensor) -> None:
        """Keep weight, log-ratio and probability of every measured token (full tier)."""
        if not self.full:
            return
        if "tokens" not in self._defaults:
            self.add_state("tokens", [], dist_reduce_fx="cat")
        measured, token = correction.ratio.measured, correction.ratio.token
        raw = torch.ones_like(token) if correction.raw is None else correction.raw.expand_as(token)
        self.tokens.append(torch.stack([x[measured].float() for x in (raw, token, rollout.exp())], dim=-1))

    def _quantiles(self) -> dict[str, Tensor]:
        if not self.full:
            return {}
        tokens = torch.cat(self.tokens) if isinstance(self.tokens, list) else self.tokens
        raw, ratio, probability = tokens.unbind(-1)
        found = {"weights": quantiles(raw, PERCENTILES)}
        bins = (probability * TAIL_BINS).long().clamp(0, TAIL_BINS - 1)
        for index in range(TAIL_BINS):
            inside = ratio[bins == index]
            count = torch.full((1,), float(len(inside)), dtype=torch.float64, device=ratio.device)
            found[f"tail {index}"] = torch.cat([count, quantiles(inside, TAIL)])
        return found

    def _named_quantiles(self, found: dict[str, Tensor], values: list[float]) -> Numbers:
        numbers: Numbers = {}
        self.tail_envelope = []
        position = 0
        for index, part in enumerate(found.values()):
            mine = values[position : position + len(part)]
            position += len(part)
            if index == 0:
                if any(name == "is/total" for name in self._names[0]):
                    numbers |= {f"rollout_is_p{p}": v for p, v in zip(PERCENTILES, mine, strict=True)}
                continue
            low, (count, *tails) = (index - 1) / TAIL_BINS, mine
            row = {"low": low, "high": low + 1 / TAIL_BINS, "tokens": count}
            if count:
                row |= {f"p{p}": v for p, v in zip(TAIL, tails, strict=True)}
                numbers |= {f"tail_p{p}_prob_{low:.1f}": v for p, v in zip(TAIL, tails, strict=True)}
            self.tail_envelope.append(row)
        return {name: value for name, value in numbers.items() if not math.isnan(value)}


# --- sums of one batch -----------------------------------------------------------------------------------------------


def off_policy(tally: Tally, correction: Correction, train: Tensor, rollout: Tensor) -> None:
    """Differences of probabilities, KL, perplexity and chi-square."""
    ratio = correction.ratio
    valid, rows = ratio.measured, ratio.length > 0
    tally.sum("n", valid)
    tally.sum("rows", rows)
    tally.sum("missing", ratio.missing)
    train, rollout = select_valid(train, valid), select_valid(rollout, valid)
    # Squares of float32 probabilities would drown a small variance in rounding.
    p, q = (select_valid(x.exp(), valid).double() for x in (train, rollout))
    gap = (p - q).abs()
    tally.top("gap", gap, valid)
    for name, values in {"gap": gap, "p": p, "q": q}.items():
        tally.sum(name, values)
    for name, left, right in (("gap2", gap, gap), ("pp", p, p), ("qq", q, q), ("pq", p, q)):
        tally.dot(name, left, right)
    bounded = ratio.token.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess = torch.expm1(bounded)  # r - 1 without cancellation
    tally.sum("l", ratio.token)
    tally.sum("k3", excess - bounded)
    tally.sum("excess", excess)
    tally.dot("excess2", excess.double(), excess.double())
    length = ratio.length.clamp(min=1)
    surprise, engine = (-x.sum(-1, keepdim=True, dtype=torch.float64) / length for x in (train, rollout))
    per_row = {
        "log_ppl": surprise,
        "ppl": _exp(surprise),
        "engine_log_ppl": engine,
        "engine_ppl": _exp(engine),
        "d": surprise - engine,
        "abs_d": (surprise - engine).abs(),
        "exp_d": _exp(surprise - engine),
        "chi2_seq": torch.expm1(2 * ratio.total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
    }
    for name, values in per_row.items():
        tally.sum(name, select_valid(values, rows))
    tally.top("d", surprise - engine, rows)
    tally.top("-d", engine - surprise, rows)


def _exp(x: Tensor) -> Tensor:
    """Finite for every finite float64 number, also summed over a billion of them."""
    return x.clamp(max=MAX_EXPONENT).exp()


def acceptance(tally: Tally, correction: Correction) -> None:
    """Counts of rejected and vetoed tokens and rows, and sums of the weights in use."""
    mask = correction.ratio.measured | correction.ratio.missing
    rows = mask.any(-1, keepdim=True)
    tally.sum("valid", mask)
    tally.sum("valid_rows", rows)
    tally.sum("kept", correction.keep)
    if correction.passed:
        passed = mask
        for accepted in correction.passed:
            passed = passed & accepted
        rejected = mask & ~passed
        tally.sum("rejected", rejected)
        tally.sum("rejected_rows", rejected.any(-1))
    if correction.catastrophic is not None:
        tally.sum("catastrophic", correction.catastrophic)
        tally.sum("vetoed", correction.catastrophic.any(-1))
    if correction.weights is not None:
        used = select_valid(correction.weights, correction.keep).double()  # squares of float32 lose a small spread
        tally.sum("used", used)
        tally.sum("used2", used * used)
    if correction.factor is not None:
        tally.maxima["factor"] = correction.factor.double()


def spread(
    tally: Tally,
    key: str,
    values: Tensor,
    correction: Correction,
    band: tuple[float, float],
    *,
    ideal: float,
    full: bool,
) -> None:
    """Moments, extremes and shares outside ``band`` of a statistic per token ``[B, R]`` or per row ``[B, 1]``.

    Means are over valid tokens; a row's value counts once for each of its tokens. Extremes and shares are over tokens
    or rows, whichever the statistic belongs to. For deviations the distance from ``ideal`` (1 for ratios, 0
    for divergences) is added up in float64: float32 squares of 16,384 weights of 1.0003 deviated by 1.7e-4.
    """
    ratio = correction.ratio
    per_row = values.shape[-1] == 1 and ratio.token.shape[-1] != 1
    rows = ratio.length > 0
    unit = rows if per_row else ratio.measured
    lower, upper = band
    off = select_valid(values.clamp(lower, upper).double() - ideal, unit)
    values = select_valid(values, unit)
    high, low = unit & (values > upper), unit & (values < lower)
    tally.sum(f"{key}/units", unit)
    tally.sum(f"{key}/high", high)
    tally.sum(f"{key}/low", low)
    of_tokens = {"total": values, "off": off, "off2": off * off, "high_tokens": high, "low_tokens": low}
    for name, each in of_tokens.items():
        tally.sum(f"{key}/{name}", each * ratio.length if per_row else each)
    tally.top(f"{key}/max", values, unit)
    tally.top(f"{key}/-min", -values, unit)
    if not full:
        return
    means = values if per_row else values.sum(-1, keepdim=True, dtype=torch.float64) / ratio.length.clamp(min=1)
    means = select_valid(means, rows)
    apart = select_valid(means.double() - ideal, rows)
    tally.sum(f"{key}/seq", apart)
    tally.sum(f"{key}/seq2", apart * apart)
    tally.sum(f"{key}/seq_high", rows & (means > upper))
    tally.sum(f"{key}/seq_low", rows & (means < lower))
    tally.top(f"{key}/seq_max", means, rows)
    tally.top(f"{key}/-seq_min", -means, rows)


def weight_spread(tally: Tally, correction: Correction, full: bool) -> None:
    """Weights before truncation, and their shares outside ``[plan.lowest, plan.cap]``."""
    assert correction.raw is not None
    band = (correction.plan.lowest, correction.plan.cap)
    spread(tally, "is", correction.raw, correction, band, ideal=1.0, full=full)


def rule_spread(tally: Tally, correction: Correction, index: int) -> None:
    """The statistic of one rejection rule: the ratio itself, k1 as minus the log-ratio, k2 and k3 as they are."""
    rule, passed = correction.plan.rules[index], correction.passed[index]
    statistic, band = rule.statistic(correction.ratio), rule.bounds()
    if rule.kind == "ratio":
        statistic = statistic.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        band = (math.exp(band[0]), math.exp(band[1]))
    elif rule.kind == "k1":
        statistic, band = -statistic, (-band[1], -band[0])
    else:
        band = (0.0, band[1])
    spread(tally, f"rs{index}", statistic, correction, band, ideal=float(rule.kind == "ratio"), full=True)
    rejected = correction.ratio.measured & ~passed
    tally.sum(f"rs{index}/rejected", rejected)
    tally.sum(f"rs{index}/rejected_rows", rejected.any(-1))
