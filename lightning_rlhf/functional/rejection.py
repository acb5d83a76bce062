"""Which tokens and rows are too far from the engine to learn from: rejection rules, in log space.

A rule looks at ``l = log p_trainer - log p_engine`` of the sampled tokens and accepts a token, or a row as a whole.
Rules on the ratio itself are named as in the first nested version of veRL's block, those with ``k1``, ``k2``, ``k3``
as in its current one:

====================================  ==============================================================================
``token``, ``token_k1``               ``lower <= exp(l_t) <= upper``, per token
``sequence``, ``seq_sum_k1``          ``lower <= exp(sum_t l_t) <= upper``, per row
``geometric``, ``seq_mean_k1``        ``lower <= exp(mean_t l_t) <= upper``, per row
``token_k2``, ``token_k3``            divergence of the token ``<= upper``, per token
``seq_sum_*, seq_mean_*, seq_max_*``  sum, mean or maximum of the divergence over the row's tokens ``<= upper``, per row
====================================  ==============================================================================

with ``k2 = l^2 / 2`` and ``k3 = exp(l) - 1 - l`` (Schulman, "Approximating KL divergence", 2020). **Mind the unit**:
the first three lines bound a ratio, the last two a divergence in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

import torch
from torch import Tensor

from lightning_rlhf.errors import SettingError
from lightning_rlhf.functional.kl import MAX_LOG_RATIO
from lightning_rlhf.functional.log_ratio import LogRatio

Over = Literal["token", "sum", "mean", "max"]
Kind = Literal["ratio", "k1", "k2", "k3"]

RULES: dict[str, tuple[Over, Kind]] = {
    "token": ("token", "ratio"),
    "sequence": ("sum", "ratio"),
    "geometric": ("mean", "ratio"),
    "token_k1": ("token", "k1"),
    "token_k2": ("token", "k2"),
    "token_k3": ("token", "k3"),
    "seq_sum_k1": ("sum", "k1"),
    "seq_sum_k2": ("sum", "k2"),
    "seq_sum_k3": ("sum", "k3"),
    "seq_mean_k1": ("mean", "k1"),
    "seq_mean_k2": ("mean", "k2"),
    "seq_mean_k3": ("mean", "k3"),
    "seq_max_k2": ("max", "k2"),
    "seq_max_k3": ("max", "k3"),
}
"""Every rule by name: how tokens are reduced, and the statistic of a token."""


@dataclass(frozen=True)
class Rule:
    """One rejection rule; build it with :func:`parse_rules`, which checks the bounds.

    Attributes:
        name: a key of :data:`RULES`.
        upper: largest ratio (``ratio``, ``k1``) or divergence in nats (``k2``, ``k3``) that is accepted.
        lower: smallest ratio that is accepted; ``None`` for divergences, which have no lower bound.
    """

    name: str
    upper: float
    lower: float | None = None

    @property
    def over(self) -> Over:
        return RULES[self.name][0]

    @property
    def kind(self) -> Kind:
        return RULES[self.name][1]

    @property
    def per_row(self) -> bool:
        """Whether rows are accepted as a whole."""
        return self.over != "token"

    def scaled(self, factor: float) -> Rule:
        """The rule with its band ``factor`` times as wide: log bounds of a ratio, or the bound of a divergence."""
        if self.lower is None:
            return replace(self, upper=self.upper * factor)
        return replace(self, upper=self.upper**factor, lower=self.lower**factor)

    def statistic(self, ratio: LogRatio) -> Tensor:
        """``[B, R]`` or, per row, ``[B, 1]``: the value to compare, as a log-ratio (``ratio``, ``k1``) or in nats.

        Sums and means of log-ratios use unclamped tokens; divergences use clamped ones.
        """
        bounded = ratio.token.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.kind in ("ratio", "k1"):
            return {"token": bounded, "sum": ratio.total, "mean": ratio.mean}[self.over]
        divergence = 0.5 * bounded.square() if self.kind == "k2" else torch.expm1(bounded) - bounded
        if self.over == "token":
            return divergence
        if self.over == "max":
            return (
                divergence.amax(-1, keepdim=True) if divergence.shape[-1] else divergence.new_zeros(len(divergence), 1)
            )
        total = divergence.sum(-1, keepdim=True)  # 0 at masked tokens: k2(0) = k3(0) = 0
        return total if self.over == "sum" else total / ratio.length.clamp(min=1)

    def bounds(self) -> tuple[float, float]:
        """The band in the unit of :meth:`statistic`."""
        if self.lower is None:
            return -math.inf, self.upper
        return math.log(self.lower), math.log(self.upper)

    def accepts(self, statistic: Tensor) -> Tensor:
        """Whether each entry lies inside, bounds included. NaN counts as inside, so that the loss shows it.

        Log-ratios are clamped to +-20: differences beyond do not matter.
        """
        lower, upper = self.bounds()
        if self.lower is not None:
            statistic = statistic.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return ~((statistic < lower) | (statistic > upper))


def parse_rules(
    names: str | Sequence[str] | None,
    threshold: float | str | Sequence[float | str] | None,
    threshold_lower: float | None = None,
) -> tuple[Rule, ...]:
    """Rules from the values of ``rollout_rs``, ``rollout_rs_threshold`` and ``rollout_rs_threshold_lower``.

    Args:
        names: one name, several in a list or joined by commas, or ``None``.
        threshold: a bound for each rule, in the same order, in a list or joined by commas; one bound is shared by all.
            A bound on a ratio is a number ``c``, which stands for ``[lower, c]``, or ``"lower_upper"``.
        threshold_lower: lower bound of ratios given as one number; default ``1 / c``.

    Raises:
        SettingError: an unknown rule, no bound, a bound that is not positive, lower above upper, or a lower bound of a
            divergence.
    """
    wanted = _split(names)
    if not wanted:
        return ()
    for name in wanted:
        if name not in RULES:
            near = get_close_matches(name, RULES, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise SettingError("rollout_rs", name, f"null, or some of {', '.join(RULES)}{hint}")
    if threshold is None:
        raise SettingError("rollout_rs_threshold", None, f"a bound: rollout_rs = {','.join(wanted)} needs one")
    given = _split(threshold)
    if len(given) == 1:
        given = given * len(wanted)
    if len(given) != len(wanted):
        raise SettingError("rollout_rs_threshold", threshold, f"one bound, or one for each of {', '.join(wanted)}")
    return tuple(_rule(name, bound, threshold_lower) for name, bound in zip(wanted, given, strict=True))


def _split(value: object) -> list[str]:
    """A single value, a list, or text with commas, as a list of texts."""
    if value is None:
        return []
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def _rule(name: str, bound: str, threshold_lower: float | None) -> Rule:
    below, joined, above = bound.rpartition("_")
    upper = _number("rollout_rs_threshold", bound, above)
    if RULES[name][1] in ("k2", "k3"):
        if joined or threshold_lower is not None:
            part = "rollout_rs_threshold" if joined else "rollout_rs_threshold_lower"
            given = bound if joined else threshold_lower
            raise SettingError(part, given, f"no lower bound for {name}: a divergence has an upper bound alone")
        return Rule(name, upper)
    if joined:
        lower = _number("rollout_rs_threshold", bound, below)
    elif threshold_lower is not None:
        lower = _number("rollout_rs_threshold_lower", threshold_lower, str(threshold_lower))
    elif upper < 1:
        raise SettingError(
            "rollout_rs_threshold", bound, f"at least 1 for {name}: {upper} stands for [{1 / upper:g}, {upper:g}], "
            "where nothing lies; a band is written 'lower_upper'"
        )  # fmt: skip
    else:
        lower = 1.0 / upper
    if lower > upper:
        part = "rollout_rs_threshold" if joined else "rollout_rs_threshold_lower"
        raise SettingError(part, bound if joined else threshold_lower, f"a lower bound of at most {upper:g}")
    return Rule(name, upper, lower)


def _number(part: str, given: object, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise SettingError(part, given, "a finite number > 0, or 'lower_upper' for a ratio")
    return value
