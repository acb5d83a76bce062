"""Log-probabilities and entropy from hidden states: alignment, values, gradients, memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.functional import logprobs as module
from lightning_rlhf.functional.logprobs import response_hidden, token_logprobs

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "logprobs.json").read_text())


def score(*args: Any, **kwargs: Any) -> Any:
    """:func:`token_logprobs`; each test knows whether there is an entropy."""
    return token_logprobs(*args, **kwargs)


def straightforward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same computation, written plainly, in the dtype of the inputs."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, labels[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


def problem(
    tokens: int = 13, vocab: int = 23, width: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Any]:
    """Random inputs that require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(vocab, (tokens,), generator=generator)
    return {"hidden": normal(tokens, width), "weight": normal(vocab, width), "bias": normal(vocab), "labels": labels}


def gradients(function: Callable[..., Any], inputs: dict[str, Any], **options: Any) -> list[Tensor]:
    """Log-probabilities, entropy (if any), then the gradients of hidden, weight, bias under uneven upstream ones."""
    logprobs, entropy = function(**inputs, **options)
    upstream = torch.linspace(-1, 2, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    loss = (logprobs * upstream).sum()
    if entropy is not None and entropy.requires_grad:
        loss = loss + (entropy * upstream.cos()).sum()
    wanted = [tensor for tensor in inputs.values() if tensor.requires_grad]
    results = [logprobs, *([] if entropy is None else [entropy]), *torch.autograd.grad(loss, wanted)]
    return [tensor.detach() for tensor in results]


def assert_all_close(actual: list[Tensor], expected: list[Tensor], rtol: float, atol: float) -> None:
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left.double(), right.double(), rtol=rtol, atol=atol)


@pytest.fixture(params=[8, module._CPU_TILE], ids=["many-tiles", "one-tile"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the test with a vocabulary cut into many tiles, and uncut."""
    monkeypatch.setattr(module, "_CPU_TILE", request.param)
    return request.param


# --- alignment ---------------------------------------------------------------------------------------------------


def test_response_token_is_scored_by_the_state_before_it() -> None:
    """Tokens 2 | 0 1 2 with these logits have probabilities 1/3, 1/4, 1/5; unshifted they would be .5, .6, .8."""
    tokens = torch.tensor([[2, 0, 1, 2]])
    logits = torch.tensor(
        [[[0, 0, 0], [math.log(2), 0, 0], [0, math.log(3), 0], [0, 0, math.log(8)]]], dtype=torch.float64
    )
    states = response_hidden(logits, response_length=3)
    logprobs, _ = score(states[:, :-1], torch.eye(3, dtype=torch.float64), tokens[:, -3:])
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[1 / 3, 1 / 4, 1 / 5]], dtype=torch.float64))


def test_response_hidden_keeps_the_last_prompt_column_and_the_last_state() -> None:
    hidden = torch.arange(2 * 5).view(2, 5, 1)
    assert response_hidden(hidden, 3)[..., 0].tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert response_hidden(hidden, 0)[..., 0].tolist() == [[4], [9]]


@pytest.mark.parametrize("response_length", [5, 6, -1])
def test_response_hidden_refuses_a_response_without_prompt(response_length: int) -> None:
    with pytest.raises(ValueError, match=f"response_length={response_length} with 5 columns: allowed are 0 to 4"):
        response_hidden(torch.zeros(1, 5, 2), response_length)


# --- values ------------------------------------------------------------------------------------------------------


def test_temperature_divides_the_logits_not_the_logprob() -> None:
    logprobs, _ = score(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.eye(2), torch.tensor([0, 1]), temperature=0.5)
    torch.testing.assert_close(logprobs, torch.tensor([-0.018150, -4.018150]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 4), (8,)])
def test_golden_numbers(tile: int, shape: tuple[int, ...]) -> None:
    """veRL's numbers, its logits fed through an identity embedding."""
    logits = torch.tensor(GOLDEN["logits"], dtype=torch.float64).view(*shape, -1)
    labels = torch.tensor(GOLDEN["labels"]).view(shape)
    logprobs, entropy = score(logits, torch.eye(logits.shape[-1], dtype=torch.float64), labels, entropy="detached")
    for name, actual in (("logprobs", logprobs), ("entropy", entropy)):
        expected = torch.tensor(GOLDEN[name], dtype=torch.float64).view(shape)
        torch.testing.assert_close(actual, expected, **GOLDEN["tolerance"])


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_entropy_of_two_uniform_rows_and_a_certain_one(chunk_size: int) -> None:
    hidden = torch.tensor([[0.0, 0, 0, 0], [0, 0, 0, 0], [1000, 0, 0, 0]])
    for mode in ("detached", "gradient"):
        _, entropy = score(hidden, torch.eye(4), torch.tensor([0, 1, 2]), chunk_size=chunk_size, entropy=mode)
        assert entropy.mean().item() == pytest.approx(0.924196, abs=1e-6)
        assert entropy[2] == 0


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_extreme_logits_stay_finite(tile: int, scale: float) -> None:
    """The second row's label is beaten by 2 x scale; the first row's is one of two best and has probability 1/2."""
    hidden = (torch.tensor([[1.0, -1, 0, 1], [1, -1, 0, 1]]) * scale).requires_grad_()
    inputs = {"hidden": hidden, "weight": torch.eye(4).requires_grad_(), "labels": torch.tensor([0, 1])}
    results = gradients(score, inputs, entropy="gradient")
    logprobs, entropy, grad_hidden, _ = results
    torch.testing.assert_close(logprobs, torch.tensor([-math.log(2), -2 * scale - math.log(2)]))
    torch.testing.assert_close(entropy, torch.full((2,), math.log(2)))
    torch.testing.assert_close(grad_hidden, torch.tensor([[-0.5, 0, 0, 0.5], [-1, 2, 0, -1]]))
    assert all(result.isfinite().all() for result in results)


def test_labels_beyond_the_vocabulary_do_no_harm_where_masked(tile: int) -> None:
    inputs = problem(tokens=4)
    mask = torch.tensor([1.0, 0, 0, 1], dtype=torch.float64)
    expected_logprobs, _ = score(**inputs)
    expected = torch.autograd.grad((expected_logprobs * mask).sum(), inputs["weight"])
    inputs["labels"] = torch.where(mask.bool(), inputs["labels"], torch.tensor([0, -100, 23, 0]))
    logprobs, _ = score(**inputs)
    assert logprobs.isfinite().all()
    torch.testing.assert_close(logprobs[[0, 3]], expected_logprobs[[0, 3]])
    torch.testing.assert_close(torch.autograd.grad((logprobs * mask).sum(), inputs["weight"]), expected)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("entropy", ["none", "gradient"])
def test_no_tokens(shape: tuple[int, ...], entropy: Any) -> None:
    hidden, weight = torch.zeros(*shape, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    logprobs, entropies = score(hidden, weight, torch.zeros(shape, dtype=torch.int64), entropy=entropy)
    assert logprobs.shape == shape
    assert entropies is None or entropies.shape == shape
    grad_hidden, grad_weight = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert grad_hidden.shape == hidden.shape
    assert torch.equal(grad_weight, torch.zeros(6, 4))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_any_integer_dtype(tile: int, dtype: torch.dtype) -> None:
    inputs = problem()
    expected = gradients(score, inputs)
    assert_all_close(gradients(score, {**inputs, "labels": inputs["labels"].to(dtype)}), expected, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_temperature_divides_logits(temperature: float) -> None:
    inputs = problem()
    found = gradients(score, inputs, temperature=temperature, entropy="gradient")
    expected = gradients(straightforward, inputs, temperature=temperature)
    assert_all_close(found, expected, rtol=1e-9, atol=1e-12)


# --- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [3, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("entropy", ["none", "detached", "gradient"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_are_those_of_finite_differences(
    tile: int, chunk_size: int, softcap: float | None, entropy: Any, with_bias: bool
) -> None:
    inputs = problem(tokens=5, vocab=7, width=3)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        logprobs, entropies = score(
            hidden,
            weight,
            inputs["labels"],
            bias=bias,
            temperature=0.7,
            softcap=softcap,
            chunk_size=chunk_size,
            entropy=entropy,
        )
        return (logprobs, entropies) if entropy == "gradient" else (logprobs,)

    tensors = [inputs["hidden"], inputs["weight"], *([inputs["bias"]] if with_bias else [])]
    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"softcap": 2.0}, {"temperature": 1.7, "softcap": 3.0}])
@pytest.mark.parametrize("chunk_size", [4, 100])
def test_agrees_with_the_straightforward_version_in_float64(
    tile: int, options: dict[str, float], chunk_size: int
) -> None:
    inputs = problem()
    actual = gradients(score, inputs, chunk_size=chunk_size, entropy="gradient", **options)
    assert_all_close(actual, gradients(straightforward, inputs, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [4, 100])
def test_float32_is_as_exact_as_the_straightforward_version(tile: int, chunk_size: int) -> None:
    inputs = problem(dtype=torch.float32, vocab=100, width=16)
    actual = gradients(score, inputs, temperature=0.8, chunk_size=chunk_size, entropy="gradient")
    assert {result.dtype for result in actual} == {torch.float32}
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items() if name != "labels"}
    expected = gradients(straightforward, {**exact, "labels": inputs["labels"]}, temperature=0.8)
    assert_all_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [4, 100])
def test_bfloat16_rounds_logits_but_not_the_softmax(tile: int, chunk_size: int) -> None:
    """The reference rounds where bf16 must: inputs and logits. Computed in bf16, log-probs would be off by 1e-2."""
    inputs = problem(dtype=torch.bfloat16, vocab=200, width=16)
    del inputs["bias"]
    actual = gradients(score, inputs, chunk_size=chunk_size, entropy="gradient")
    logprobs, entropy, grad_hidden, grad_weight = actual
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16, torch.bfloat16)
    rounded = (inputs["hidden"] @ inputs["weight"].T).double()
    expected, expected_entropy = straightforward(rounded, torch.eye(200, dtype=torch.float64), inputs["labels"])
    assert_all_close([logprobs, entropy], [expected.detach(), expected_entropy.detach()], rtol=1e-5, atol=1e-5)
    exact = {name: inputs[name].detach().double().requires_grad_() for name in ("hidden", "weight")}
    reference = gradients(straightforward, {**exact, "labels": inputs["labels"]})[2:]
    for grad, wanted in zip(actual[2:], reference, strict=True):
        assert (grad.double() - wanted).norm() < 0.01 * wanted.norm()


def test_bfloat16_gradients_of_many_chunks_are_summed_in_float32() -> None:
    """1024 equal contributions: summed in bf16 the total sticks at 256 of them."""
    tokens = 1024
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)
    logprobs, _ = score(hidden, weight, labels, bias=bias, chunk_size=1)
    grad_weight, grad_bias = torch.autograd.grad(logprobs.sum(), (weight, bias))
    assert grad_weight[:, 0].tolist() == [tokens / 2, -tokens / 2]
    assert grad_bias.tolist() == [tokens / 2, -tokens / 2]


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_equals_a_model_in_its_dtype(tile: int, backward_inside: bool) -> None:
    inputs = problem(dtype=torch.float32, vocab=40, width=16)
    del inputs["bias"]
    half = {name: tensor.detach().bfloat16().requires_grad_() for name, tensor in inputs.items() if name != "labels"}
    expected = gradients(score, {**half, "labels": inputs["labels"]}, chunk_size=4, entropy="gradient")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = score(**inputs, chunk_size=4, entropy="gradient")
        if backward_inside:
            actual = gradients(lambda **_: results, inputs)
    if not backward_inside:
        actual = gradients(lambda **_: results, inputs)
    assert {result.dtype for result in actual} == {torch.float32}
    assert_all_close(actual[:2], expected[:2], rtol=0, atol=0)
    assert_all_close(actual[2:], expected[2:], rtol=1e-2, atol=1e-3)


def test_autocast_leaves_float64_alone() -> None:
    inputs = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gradients(score, inputs, entropy="gradient")
    assert_all_close(actual, gradients(score, inputs, entropy="gradient"), rtol=0, atol=0)


@pytest.mark.parametrize("narrow", ["hidden", "weight"])
def test_mixed_dtypes_meet_in_the_wider_one(narrow: str) -> None:
    inputs = problem(dtype=torch.float32)
    mixed = {**inputs, narrow: inputs[narrow].detach().bfloat16().requires_grad_()}
    wide = {**inputs, narrow: mixed[narrow].detach().float().requires_grad_()}
    actual = gradients(score, mixed, entropy="gradient")
    assert_all_close(actual, gradients(score, wide, entropy="gradient"), rtol=4e-3, atol=0)
    assert_all_close(actual[:2], gradients(score, wide, entropy="gradient")[:2], rtol=1e-6, atol=1e-6)


def test_tied_embedding_collects_both_gradients() -> None:
    inputs = problem()
    tokens = torch.arange(13) % 23

    def tied(function: Callable[..., Any]) -> Tensor:
        logprobs, _ = function(inputs["weight"][tokens].tanh(), inputs["weight"], inputs["labels"])
        return torch.autograd.grad(logprobs.mean(), inputs["weight"])[0]

    torch.testing.assert_close(tied(score), tied(straightforward))


def test_gradients_of_an_unused_entropy_and_of_unused_logprobs(tile: int) -> None:
    inputs = problem()
    for position in (0, 1):
        actual = score(**inputs, entropy="gradient")[position]
        expected = straightforward(**inputs)[position]
        torch.testing.assert_close(
            torch.autograd.grad(actual.sum(), inputs["weight"]), torch.autograd.grad(expected.sum(), inputs["weight"])
        )


def test_a_nan_in_a_masked_token_reaches_no_gradient(tile: int) -> None:
    inputs = problem()
    keep = torch.arange(13) % 3 == 0
    chosen = {**inputs, "hidden": inputs["hidden"].detach()[keep].requires_grad_(), "labels": inputs["labels"][keep]}
    expected = gradients(score, chosen, chunk_size=4, entropy="gradient")
    poisoned = torch.where(keep[:, None], inputs["hidden"].detach(), math.nan).requires_grad_()

    def masked(**kwargs: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropy = score(**kwargs, chunk_size=4, entropy="gradient")
        return logprobs[keep], entropy[keep]

    logprobs, entropy, grad_hidden, *others = gradients(masked, {**inputs, "hidden": poisoned})
    assert torch.equal(grad_hidden[~keep], torch.zeros(8, 5, dtype=torch.float64))
    assert_all_close([logprobs, entropy, grad_hidden[keep], *others], expected, rtol=1e-12, atol=1e-12)


def test_there_is_no_second_derivative() -> None:
    inputs = problem()
    logprobs, _ = score(**inputs)
    (first,) = torch.autograd.grad(logprobs.square().sum(), inputs["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# --- chunks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunk_size_changes_nothing(dtype: torch.dtype) -> None:
    inputs = problem(dtype=dtype)
    whole = gradients(score, inputs, chunk_size=13, entropy="gradient")
    for chunk_size in (1, 7):
        actual = gradients(score, inputs, chunk_size=chunk_size, entropy="gradient")
        assert_all_close(actual, whole, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-12)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    vocab=st.integers(1, 17),
    chunk_size=st.integers(1, 12),
    tile_size=st.integers(1, 40),
    temperature=st.floats(0.2, 5),
    softcap=st.none() | st.floats(0.5, 30),
    seed=st.integers(0, 1000),
)
def test_any_cut_gives_the_straightforward_result(
    tokens: int, vocab: int, chunk_size: int, tile_size: int, temperature: float, softcap: float | None, seed: int
) -> None:
    inputs = problem(tokens, vocab, seed=seed)
    options = {"temperature": temperature, "softcap": softcap}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CPU_TILE", tile_size)
        actual = gradients(score, inputs, chunk_size=chunk_size, entropy="gradient", **options)
    assert_all_close(actual, gradients(straightforward, inputs, **options), rtol=1e-9, atol=1e-9)


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 4)}, r"hidden \(3, 4\), weight \(23, 5\)"),
        ({"weight": torch.zeros(23, 5, dtype=torch.int8)}, "weight torch.int8: floating-point"),
        ({"labels": torch.zeros(12, dtype=torch.int64)}, r"labels \(12,\): one per hidden state, \(13,\)"),
        ({"labels": torch.zeros(13)}, "labels are torch.float32: integer"),
        ({"bias": torch.zeros(5)}, r"bias \(5,\): one number per row of weight, 23"),
        ({"temperature": 0.0}, "temperature=0.0: a finite number > 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"softcap": -1.0}, "softcap=-1.0: a finite number > 0"),
        ({"chunk_size": 0}, "chunk_size=0: at least one"),
        ({"entropy": "yes"}, "entropy='yes': allowed are 'none', 'detached', 'gradient'"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(**{**problem(), **change})
