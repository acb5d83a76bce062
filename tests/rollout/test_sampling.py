"""Drawing one token per row: probabilities, truncation, random streams."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.rollout.base import Sampling
from lightning_rlhf.rollout.sampling import draw, inverse_cdf, row_uniforms, truncate


def log(*probs: float) -> torch.Tensor:
    return torch.tensor([probs]).log()


def uniform(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- log-probabilities under the distribution that is sampled ------------------------------------------------------


@pytest.mark.parametrize(("u", "token", "logprob"), [(0.5, 0, -0.018150), (0.999, 1, -4.018150)])
def test_logprobs_are_after_temperature(u: float, token: int, logprob: float) -> None:
    tokens, logprobs = draw(torch.tensor([[2.0, 0.0]]), uniform(u), Sampling(temperature=0.5))
    assert tokens.item() == token
    assert logprobs.item() == pytest.approx(logprob, abs=1e-6)


@pytest.mark.parametrize(("u", "token", "prob"), [(0.1, 0, 0.625), (0.9, 1, 0.375)])
def test_top_k_renormalises_over_the_tokens_kept(u: float, token: int, prob: float) -> None:
    tokens, logprobs = draw(log(0.5, 0.3, 0.2), uniform(u), Sampling(top_k=2))
    assert tokens.item() == token
    assert logprobs.exp().item() == pytest.approx(prob, abs=1e-6)


def test_greedy_takes_the_likeliest_and_scores_it_under_the_full_distribution() -> None:
    sampling = Sampling(temperature=0.5, top_k=1, greedy=True)
    tokens, logprobs = draw(torch.tensor([[0.0, 2.0]]), uniform(0.001), sampling)
    assert tokens.item() == 1
    assert logprobs.item() == pytest.approx(-0.018150, abs=1e-6)


def test_low_precision_logits_are_processed_in_float32() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.bfloat16)
    _, logprobs = draw(logits, uniform(0.0), Sampling(temperature=0.7))
    assert logprobs.dtype == torch.float32
    expected = (logits.double() / 0.7).log_softmax(-1)[0, 0].item()
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)


# --- truncation ----------------------------------------------------------------------------------------------------


def kept(logits: torch.Tensor, **options: float) -> list[bool]:
    return truncate(logits, **options).isfinite()[0].tolist()  # type: ignore[arg-type]


def test_top_p_keeps_the_smallest_set_with_the_mass() -> None:
    probs = log(0.2, 0.5, 0.3)
    assert kept(probs, top_p=0.4) == [False, True, False]
    assert kept(probs, top_p=0.6) == [False, True, True]
    assert kept(probs, top_p=0.9) == [True, True, True]


def test_top_p_acts_on_the_distribution_left_by_top_k() -> None:
    assert kept(log(0.5, 0.3, 0.2), top_p=0.6) == [True, True, False]
    assert kept(log(0.5, 0.3, 0.2), top_k=2, top_p=0.6) == [True, False, False]  # 0.5 / 0.8 > 0.6


def test_ties_with_the_last_token_are_kept() -> None:
    assert kept(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), top_k=2) == [True, True, True, False]


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert kept(log(0.5, 0.3, 0.2), top_k=10) == [True, True, True]


# --- the draw --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 3, 256, 257, 1000])
def test_inverse_cdf_equals_a_search_in_the_cumulative_sum(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    probs = torch.rand(200, vocabulary, generator=generator)
    probs[:, ::3] = 0.0
    probs[:, 0] += 0.1
    u = torch.rand(200, generator=generator, dtype=torch.float64)
    cdf = probs.double().cumsum(-1)
    expected = torch.searchsorted(cdf, (u * cdf[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    assert inverse_cdf(probs, u).tolist() == expected.tolist()


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    probs = torch.zeros(1, 900)
    probs[0, [300, 600]] = torch.tensor([0.1, 0.7])
    assert inverse_cdf(probs, uniform(u)).item() == (300 if u == 0.0 else 600)


def test_tokens_far_below_float32_resolution_are_not_drawn_too_often() -> None:
    """The uniform is not rounded to float32: a grid of 2**-24 would hit token 0 when u is 0."""
    probs = torch.tensor([[1e-12, 1.0]])
    assert inverse_cdf(probs, uniform(2**-30)).item() == 1


@pytest.mark.parametrize("options", [{}, {"top_p": 0.85}, {"top_k": 3, "temperature": 0.7}])
def test_frequencies_match_the_probabilities(options: dict[str, float]) -> None:
    draws, base = 10_000, log(0.1, 0.4, 0.2, 0.3)
    sampling = Sampling(**options)  # type: ignore[arg-type]
    uniforms = row_uniforms(range(draws), 1)[:, 0]
    tokens, _ = draw(base.expand(draws, -1), uniforms, sampling)
    probs = (base / sampling.temperature).softmax(-1)[0].double()
    if options:
        probs[0] = 0.0
        probs /= probs.sum()
    counts = torch.bincount(tokens, minlength=4)
    error = (probs * (1 - probs) / draws).sqrt()
    assert ((counts / draws - probs).abs() <= 4 * error).all()


# --- random streams ----------------------------------------------------------------------------------------------


def test_a_stream_is_a_function_of_its_seed_alone() -> None:
    together = row_uniforms([7, 8, 9], 20)
    assert together.dtype == torch.float64
    assert torch.equal(row_uniforms([8], 20)[0], together[1])
    assert torch.equal(row_uniforms([9, 7], 5), together[[2, 0], :5])
    assert ((together >= 0) & (together < 1)).all()


def test_all_63_bits_of_a_seed_count() -> None:
    low, high = row_uniforms([5, 5 + 2**32], 4)
    assert not torch.equal(low, high)


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    row_uniforms([1, 2], 8)
    assert torch.equal(torch.get_rng_state(), before)


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("temperature", 0.0, "a number >= 0.01: PPO learns from samples"),
        ("temperature", -1.0, "> 0"),
        ("temperature", math.inf, "finite"),
        ("temperature", math.nan, "finite"),
        ("temperature", "hot", "number"),
        ("top_k", -1, "whole number >= 0"),
        ("top_k", 2.5, "whole number >= 0"),
        ("top_p", 0.0, "> 0 and <= 1"),
        ("top_p", 1.01, "> 0 and <= 1"),
        ("samples", 0, ">= 1"),
        ("max_new_tokens", 0, ">= 1"),
        ("max_new_tokens", True, "whole number >= 1"),
    ],
)
def test_a_bad_setting_is_refused_by_name(key: str, value: object, says: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.{key} = {value!r}") as error:
        Sampling(**{key: value})  # type: ignore[arg-type]
    assert says in str(error.value)


@pytest.mark.parametrize(("options", "truncated"), [({}, False), ({"top_k": 5}, True), ({"top_p": 0.9}, True)])
def test_settings_know_whether_tokens_are_excluded(options: dict[str, float], truncated: bool) -> None:
    assert Sampling(**options).truncated is truncated  # type: ignore[arg-type]
