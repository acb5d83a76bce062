"""From the sums and maxima of all ranks to the metrics of rollout correction; percentiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_rlhf.functional.correction import Correction
from lightning_rlhf.functional.stats import deviation_of_sums

Numbers = dict[str, float]


def finish(sums: Numbers, maxima: Numbers, correction: Correction, full: bool) -> Numbers:
    """Metrics (without their prefix) from the sums and maxima of all ranks; absent if nothing was measured."""
    n, rows, valid, valid_rows = (sums[name] for name in ("n", "rows", "valid", "valid_rows"))
    if not valid:
        return {}
    numbers = {"missing_fraction": sums["missing"] / valid, "accepted_fraction": sums["kept"] / valid}
    numbers |= _off_policy_numbers(sums, maxima, n, rows) if n else {}
    if correction.passed:
        numbers["rollout_rs_masked_fraction"] = sums["rejected"] / valid
        numbers["rollout_rs_seq_masked_fraction"] = sums["rejected_rows"] / valid_rows
    if correction.catastrophic is not None:
        numbers["rollout_is_catastrophic_token_fraction"] = sums["catastrophic"] / valid
        numbers["rollout_is_veto_fraction"] = sums["vetoed"] / valid_rows
    if correction.weights is not None:
        over_tokens = correction.plan.level == "geometric"
        numbers |= _spread_numbers("is", "rollout_is_", sums, maxima, ratio=True, over_tokens=over_tokens)
        if sums["kept"]:
            numbers["is_used_mean"] = sums["used"] / sums["kept"]
        if sums["used2"] > 0:
            numbers["is_used_ess"] = sums["used"] ** 2 / (sums["kept"] * sums["used2"])
    if "factor" in maxima and sums["kept"]:
        numbers["rollout_is_batch_norm_factor"] = maxima["factor"]
    rules = correction.plan.rules if full else ()
    for index, rule in enumerate(rules):
        ratio, key = rule.kind == "ratio", f"rs{index}"
        alone = ratio and sum(other.kind == "ratio" for other in rules) == 1
        prefix = "rollout_rs_" if alone else f"rollout_rs_{rule.name}_"
        numbers |= _spread_numbers(key, prefix, sums, maxima, ratio=ratio)
        if not ratio and n:
            numbers[f"{prefix}masked_fraction"] = sums[f"{key}/rejected"] / n
            numbers[f"{prefix}seq_masked_fraction"] = sums[f"{key}/rejected_rows"] / rows
            if rule.kind != "k1":
                numbers.pop(f"{prefix}seq_fraction_low", None)
    return numbers


def _off_policy_numbers(sums: Numbers, maxima: Numbers, n: float, rows: float) -> Numbers:
    mean = {name: value / n for name, value in sums.items()}
    per_row = {name: value / rows for name, value in sums.items()}
    numbers = {
        "rollout_probs_diff_mean": mean["gap"],
        "rollout_probs_diff_std": deviation_of_sums(sums["gap"], sums["gap2"], n),
        "kl": -mean["l"],
        "k3_kl": mean["k3"],
        "training_ppl": per_row["ppl"],
        "training_log_ppl": per_row["log_ppl"],
        "rollout_ppl": per_row["engine_ppl"],
        "rollout_log_ppl": per_row["engine_log_ppl"],
        "log_ppl_diff": per_row["d"],
        "log_ppl_abs_diff": per_row["abs_d"],
        "ppl_ratio": per_row["exp_d"],
        "chi2_token": mean["excess2"] + 2 * mean["excess"],  # r^2 - 1
        "chi2_seq": per_row["chi2_seq"],
        "rollout_probs_diff_max": maxima["gap"],
        "log_ppl_diff_max": maxima["d"],
        "log_ppl_diff_min": -maxima["-d"],
    }
    var_p, var_q = mean["pp"] - mean["p"] ** 2, mean["qq"] - mean["q"] ** 2
    # Probabilities that do not vary have no correlation; rounding would produce one.
    if min(var_p, var_q) > 1e-12:
        covariance = mean["pq"] - mean["p"] * mean["q"]
        numbers["rollout_actor_probs_pearson_corr"] = covariance / math.sqrt(var_p * var_q)
    return numbers


def _spread_numbers(
    key: str, prefix: str, sums: Numbers, maxima: Numbers, *, ratio: bool, over_tokens: bool = False
) -> Numbers:
    """Metrics of one :func:`spread`; of ratios also the effective sample size, and deviations are from 1 and not 0."""
    part = {name.partition("/")[2]: value for name, value in (sums | maxima).items() if name.startswith(f"{key}/")}
    n, rows = sums["n"], sums["rows"]
    if not n:
        return {}
    fraction = "ratio_fraction" if ratio else "fraction"
    # Deviations from 1 (ratios) or 0 were added up: their squares keep the digits of a spread that is small beside 1.
    off, off2 = part["off"] / n, part["off2"] / n
    ideal = 1.0 if ratio else 0.0
    high, low, units = ("high_tokens", "low_tokens", n) if over_tokens else ("high", "low", part["units"])
    numbers = {
        "mean": part["total"] / n,
        "max": part["max"],
        "min": -part["-min"],
        "std": deviation_of_sums(part["off"], part["off2"], n, unbiased=False),
        f"{fraction}_high": part[high] / units,
        f"{fraction}_low": part[low] / units,
    }
    square = off2 + 2 * off * ideal + ideal
    if ratio and square > 0:
        numbers["eff_sample_size"] = (off + ideal) ** 2 / square
    if "seq" in part:
        highest, lowest = part["seq_max"], -part["-seq_min"]
        numbers |= {
            "seq_mean": part["seq"] / rows + ideal,
            "seq_std": deviation_of_sums(part["seq"], part["seq2"], rows),
            "seq_max": highest,
            "seq_min": lowest,
            "seq_max_deviation": max(abs(highest - ideal), abs(lowest - ideal)),
            "seq_fraction_high": part["seq_high"] / rows,
            "seq_fraction_low": part["seq_low"] / rows,
        }
    return {f"{prefix}{name}": value for name, value in numbers.items()}


def quantiles(values: Tensor, percents: tuple[int, ...]) -> Tensor:
    """Percentiles with linear interpolation between order statistics; NaN without a value.

    Sorted once, where ``torch.quantile`` refuses more than 2^24 elements.

    Args:
        values: ``[N]``.
        percents: from 0 to 100.

    Returns:
        Float64, one per percentage.
    """
    if not len(values):
        return torch.full((len(percents),), math.nan, dtype=torch.float64, device=values.device)
    ordered = values.sort().values
    place = torch.tensor(percents, dtype=torch.float64, device=values.device) / 100 * (len(values) - 1)
    below = place.floor().long()
    left, right = (ordered[index.clamp(max=len(values) - 1)].double() for index in (below, below + 1))
    return torch.lerp(left, right, place - below)
