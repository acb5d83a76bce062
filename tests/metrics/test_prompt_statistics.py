"""Statistics of prompts: exact numbers of small histories, false alarms of large ones, memory, state."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.metrics.prompt_statistics import MEASURES, PromptStatistics, Visit


def visit(key: str, scores: list[float], kl: float = 0.0) -> Visit:
    mean = sum(scores) / len(scores)
    return Visit(key, len(scores), mean, sum((x - mean) ** 2 for x in scores), kl)


def test_numbers_of_a_history_worked_out_by_hand() -> None:
    """Three prompts, three iterations; the iterations' median scores are 1, 2, 3 and their median KLs 0, 0.1, 0.2."""
    statistics = PromptStatistics(window=5)
    for i, (low, high) in enumerate(((0.0, 5.0), (1.0, 6.0), (-7.0, 7.0))):
        centre, kl = 1.0 + i, 0.1 * i
        statistics.add([visit("a", [low], kl - 0.1), visit("b", [centre], kl), visit("c", [high, high], kl + 0.5)])
    found = statistics.standing(min_visits=1)
    # a: -1, -1, -10 from the median, without the farthest -1; c: 4, 4, 4, of which the first is left out.
    assert found.values["reward"].tolist() == pytest.approx([-1.0, 0.0, 4.0])
    assert found.values["spread"].tolist() == pytest.approx([0.0, 0.0, 0.0])
    assert found.values["kl"].tolist() == pytest.approx([-0.1, 0.0, 0.5], abs=1e-6)
    assert found.samples.tolist() == [3, 3, 6]
    assert found.scores.tolist() == pytest.approx([-2.0, 2.0, 6.0])


def test_spread_is_within_a_group_and_between_visits() -> None:
    """Prompt a: groups (0, 2), (4, 6) and (-50, 50), of which the last is left out: mean 3, squares 2 + 2 + 4 * 4."""
    statistics = PromptStatistics(window=5)
    for group in ([0.0, 2.0], [4.0, 6.0], [-50.0, 50.0]):
        statistics.add([visit("a", group), visit("b", [0.0, 0.0]), visit("c", [0.0, 0.0])])
    spread = statistics.standing(min_visits=1).values["spread"]
    assert spread.tolist() == pytest.approx([math.sqrt(20 / 3), 0.0, 0.0])


def test_only_the_last_visits_count() -> None:
    statistics = PromptStatistics(window=2)
    for score in (100.0, 5.0, 5.0):
        statistics.add([visit("a", [score]), visit("b", [0.0]), visit("c", [0.0])])
    assert statistics.standing(1).values["reward"].tolist() == [5.0, 0.0, 0.0]
    assert statistics.visits[:3].tolist() == [3, 3, 3]


def test_prompts_with_few_visits_are_not_judged() -> None:
    statistics = PromptStatistics(window=5)
    statistics.add([visit(key, [0.0]) for key in "abc"])
    statistics.add([visit(key, [0.0]) for key in "ab"])
    z = statistics.standing(min_visits=2).z["reward"]
    assert z[:2].tolist() == [0.0, 0.0] and math.isnan(z[2])


def test_without_a_reference_there_is_no_kl() -> None:
    statistics = PromptStatistics(window=5)
    statistics.add([visit(key, [0.0, 1.0], math.nan) for key in "abc"])
    found = statistics.standing(min_visits=1)
    assert found.values["kl"].isnan().all() and found.z["kl"].isnan().all() and not found.z["reward"].isnan().any()


def draws(kind: str, generator: torch.Generator, prompts: int) -> tuple[torch.Tensor, bool]:
    """Level of each prompt, and whether scores are 0 or 1."""
    uniform = torch.rand(prompts, generator=generator, dtype=torch.float64)
    if kind == "normal":
        return torch.randn(prompts, generator=generator, dtype=torch.float64), False
    if kind == "exponential":
        return -uniform.log(), False
    if kind == "all solved":
        return torch.full((prompts,), 0.998, dtype=torch.float64), True
    if kind == "some unsolved":
        return torch.where(uniform < 0.95, 0.99, 0.2), True
    return uniform, True  # from never to always solved


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("kind", ["normal", "exponential", "all solved", "some unsolved", "all levels"])
def test_at_most_one_good_prompt_in_a_hundred_stands_out_and_noise_does(kind: str, samples: int) -> None:
    """1000 prompts, five visits each, ten with noise of deviation 10; KLs are log-normal."""
    generator = torch.Generator().manual_seed(3)
    levels, binary = draws(kind, generator, 1000)
    statistics = PromptStatistics(window=10)
    for _ in range(5):
        for part in torch.randperm(1000, generator=generator).chunk(4):
            noise = torch.randn(len(part), samples, generator=generator, dtype=torch.float64)
            uniform = torch.rand(len(part), samples, generator=generator, dtype=torch.float64)
            level = levels[part].unsqueeze(-1)
            scores = (uniform < level).double() if binary else level + 0.5 * noise
            scores = torch.where((part < 10).unsqueeze(-1), scores + 10 * noise, scores)
            kls = (torch.randn(len(part), generator=generator) - 3).exp().tolist()
            rows = zip(part.tolist(), scores.tolist(), kls, strict=True)
            statistics.add([visit(str(key), row, kl) for key, row, kl in rows])
    found = statistics.standing(min_visits=3)
    out = (found.z["reward"].abs() > 3) | (found.z["spread"] > 3) | (found.z["kl"] > 3)
    poisoned = torch.tensor([int(key) < 10 for key in statistics.index])
    assert int(out[poisoned].sum()) >= 9 and int(out[~poisoned].sum()) <= 10


def test_ten_thousand_prompts_take_a_few_megabytes() -> None:
    statistics = PromptStatistics(window=10)
    for _ in range(2):
        statistics.add([Visit(f"{i:016x}", 4, 0.5, 0.1, 0.01) for i in range(10_000)])
    state = statistics.state_dict()
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() * value.element_size() for value in tensors) == 10_000 * 248
    assert len(state["keys"]) == 10_000 and not state["rings"].isnan().any()


@pytest.mark.parametrize("offset", [1e4, 1e6, 1e7])
def test_a_constant_added_to_all_scores_changes_no_z(offset: float) -> None:
    """Kept as float32, scores of 1e7 lose what prompts differ by; their differences from the median do not."""
    draw = torch.randn(10, 60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z = {}
    for constant in (0.0, offset):
        statistics = PromptStatistics(window=10)
        for scores in draw + constant:
            statistics.add([visit(str(i), row.tolist()) for i, row in enumerate(scores)])
        z[constant] = statistics.standing(min_visits=3).z
    for name in ("reward", "spread"):
        torch.testing.assert_close(z[offset][name], z[0.0][name], atol=1e-5, rtol=0)


def history(window: int, visits: int) -> PromptStatistics:
    statistics = PromptStatistics(window)
    for i in range(visits):
        here = [(n, key) for n, key in enumerate("abcd") if i % (n + 1) == 0]
        statistics.add([visit(key, [n * i**1.7], 0.1 * n * i**0.3) for n, key in here])
    return statistics


@pytest.mark.parametrize(("before", "after"), [(4, 4), (7, 3), (3, 7)])
def test_a_state_goes_on_as_if_nothing_had_happened(before: int, after: int) -> None:
    """Also with another window: then as one that always had the smaller of the two."""
    resumed, whole = PromptStatistics(after), history(min(before, after), 9)
    resumed.load_state_dict(history(before, 9).state_dict())
    for name in MEASURES:
        left, right = (statistics.standing(1).values[name] for statistics in (resumed, whole))
        torch.testing.assert_close(left, right, equal_nan=True)
    assert resumed.visits.tolist() == whole.visits[: len(whole)].tolist()
