"""Noise on the hidden states: what it is, what its gradient is, and that it is nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_rlhf.models import Actor, build_policy, build_tiny, disable_dropout
from lightning_rlhf.models.perturbation import (
    AddNoise,
    Perturbation,
    clamp_sigma_,
    decoder_layers,
    draw_noise,
    fake_quantise,
)
from tests.models.conftest import Batch

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"]


def loss_of(lm: Any, batch: Batch) -> Tensor:
    return Actor(lm)(batch.input_ids, batch.attention_mask, batch.response_length).logprobs[batch.response_mask].sum()


def training(lm: Any) -> Any:
    """As in reinforcement learning: training mode, no dropout."""
    disable_dropout(lm)
    return lm.train()


def gradients(lm: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    lm.zero_grad()
    return found


# --- the noise itself --------------------------------------------------------------------------------------------


def test_noise_has_mean_0_and_deviation_sigma() -> None:
    count, sigma = 400_000, 0.3
    hidden = torch.zeros(2, 200, 1000)
    noise = AddNoise.apply(hidden, torch.tensor(sigma).log(), 7, None)
    assert abs(noise.mean()) < 3 * sigma / count**0.5
    assert abs(noise.std() - sigma) < 3 * sigma / (2 * count) ** 0.5
    between_rows = (noise[0] * noise[1]).mean()
    assert abs(between_rows) < 3 * sigma**2 / (count / 2) ** 0.5


def test_noise_is_a_function_of_its_seed_and_leaves_other_streams_alone() -> None:
    before = torch.get_rng_state()
    shape, cpu = torch.Size((3, 50)), torch.device("cpu")
    assert torch.equal(draw_noise(shape, 5, cpu), draw_noise(shape, 5, cpu))
    assert not torch.equal(draw_noise(shape, 5, cpu), draw_noise(shape, 6, cpu))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_is_float32_whatever_the_hidden_states_are(dtype: torch.dtype) -> None:
    hidden = torch.randn(4, 9, 16).to(dtype)
    noisy = AddNoise.apply(hidden, torch.tensor(0.1).log(), 3, None)
    expected = (hidden.float() + 0.1 * draw_noise(hidden.shape, 3, hidden.device)).to(dtype)
    assert noisy.dtype == dtype
    torch.testing.assert_close(noisy, expected, rtol=0, atol=float(torch.finfo(dtype).eps))


def test_no_noise_is_kept_for_the_backward_pass() -> None:
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    hidden = torch.randn(2, 30, 40, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        AddNoise.apply(hidden, torch.tensor(0.1, requires_grad=True).log(), 3, None)
    assert max(shape.numel() for shape in kept) == 1


@pytest.mark.parametrize(("bits", "levels"), [(8, 255), (4, 15)])
def test_rounding_to_a_grid_passes_gradients_straight_through(bits: int, levels: int) -> None:
    hidden = torch.randn(3, 500, requires_grad=True)
    log_sigma = torch.tensor(0.1, requires_grad=True).log().detach().requires_grad_()
    rounded = AddNoise.apply(hidden, log_sigma, 3, bits)
    plain = AddNoise.apply(hidden, log_sigma, 3, None)
    assert all(len(row.unique()) <= levels for row in rounded)
    step = plain.abs().amax(-1, keepdim=True) / (levels // 2)
    assert ((rounded - plain).abs() <= step / 2 * 1.001).all() and not torch.equal(rounded, plain)
    weights = torch.randn_like(hidden)
    of_rounded = torch.autograd.grad((rounded * weights).sum(), (hidden, log_sigma))
    of_plain = torch.autograd.grad((plain * weights).sum(), (hidden, log_sigma))
    assert all(torch.equal(a, b) for a, b in zip(of_rounded, of_plain, strict=True))


def test_a_row_of_zeros_is_rounded_to_zeros() -> None:
    assert torch.equal(fake_quantise(torch.zeros(2, 5), 4), torch.zeros(2, 5))


def test_bounds_keep_a_sigma_of_zero() -> None:
    log_sigma = torch.tensor([-torch.inf, -30.0, -5.0, 3.0])
    clamp_sigma_(log_sigma, 1e-6, 0.1)
    torch.testing.assert_close(log_sigma.exp(), torch.tensor([0.0, 1e-6, 0.006737947, 0.1]))


# --- any decoder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["layer", "channel"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sigma_0_changes_no_bit(make_lm: Any, batch: Batch, architecture: str, granularity: Any) -> None:
    lm = training(make_lm(architecture))
    loss = loss_of(lm, batch)
    loss.backward()
    expected = gradients(lm)
    perturbation = Perturbation(lm, init_sigma=0.0, granularity=granularity)
    with perturbation.noise(step=1, part=0):
        perturbed = loss_of(lm, batch)
    perturbed.backward()
    found = gradients(lm)
    assert torch.equal(loss, perturbed) and found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert (perturbation.log_sigma.grad == 0).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layer_gets_its_own_noise_inside_and_none_outside(make_lm: Any, batch: Batch, architecture: str) -> None:
    lm = training(make_lm(architecture))
    plain = loss_of(lm, batch)
    perturbation = Perturbation(lm, init_sigma=0.01)
    seen: list[Tensor] = []
    _, layers = decoder_layers(lm)
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with perturbation.noise(step=1, part=0):
        perturbed = loss_of(lm, batch)
    noisy, seen[:] = list(seen), []
    assert torch.equal(loss_of(lm, batch), plain) and not torch.equal(perturbed, plain)
    first = (noisy[0] - seen[0]).flatten()
    assert abs(float(first.std()) - 0.01) < 3 * 0.01 / (2 * first.numel()) ** 0.5
    assert len(noisy) == len(layers) == 2
    with perturbation.noise(step=1, part=0):
        assert torch.equal(loss_of(lm, batch), perturbed), "the same numbers give the same noise"
    others = [{"step": 2, "part": 0}, {"step": 1, "part": 1}, {"step": 1, "part": 0, "rank": 1}]
    for other in others:
        with perturbation.noise(**other):
            assert not torch.equal(loss_of(lm, batch), perturbed)


def test_layers_differ_and_do_not_depend_on_the_range(make_lm: Any, batch: Batch) -> None:
    lm = make_lm("llama", num_hidden_layers=3)
    seen: dict[str, list[Tensor]] = {}
    for name, span in (("all", None), ("last", (2, 2))):
        perturbation = Perturbation(lm, init_sigma=0.5, layer_range=span)
        with perturbation.noise(step=1, part=0) as _:
            current = perturbation.current
            seen[name] = [
                draw_noise(torch.Size((5,)), current.seed_of(f"layer/{index}"), torch.device("cpu"))
                for index in perturbation.indices
            ]
        perturbation.remove()
    assert torch.equal(seen["all"][2], seen["last"][0]) and not torch.equal(seen["all"][0], seen["all"][1])


def test_only_the_layers_of_the_range_are_perturbed(make_lm: Any, batch: Batch) -> None:
    lm = make_lm("llama", num_hidden_layers=3)
    perturbation = Perturbation(lm, init_sigma=0.1, layer_range=(1, 1))
    assert perturbation.indices == [1] and perturbation.log_sigma.shape == (1,)
    inputs: list[Tensor] = []
    lm.model.layers[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for noisy in (False, True):
        if noisy:
            with perturbation.noise(step=1, part=0):
                loss_of(lm, batch)
        else:
            loss_of(lm, batch)
    assert torch.equal(*inputs)


@pytest.mark.parametrize("span", [(0, 2), (1, 0), (-1, 1)])
def test_a_range_that_does_not_exist_is_refused(make_lm: Any, span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"module\.alp\.layer_range = .* two numbers from 0 to 1"):
        Perturbation(make_lm("llama"), layer_range=span)


def test_layers_that_cannot_be_found_can_be_named(make_lm: Any, batch: Batch) -> None:
    lm = make_lm("llama")
    lm.config.num_hidden_layers = 7
    with pytest.raises(ValueError, match=r"layers: model\.decoder\.blocks; its lists: model\.layers \(2 modules\)"):
        Perturbation(lm)
    with pytest.raises(ValueError, match=r"module\.alp\.layers = 'model\.blocks' is not allowed"):
        Perturbation(lm, layers="model.blocks")
    assert Perturbation(lm, layers="model.layers").layers == "model.layers"


def test_experts_are_not_taken_for_layers() -> None:
    """A list inside a layer may have as many modules as there are layers."""
    lm = build_tiny("ab", hidden_size=16, layers=2, heads=2).lm
    lm.model.layers[0].experts = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert decoder_layers(lm)[0] == "model.layers"


# --- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["layer", "channel"])
def test_the_gradient_of_sigma_is_that_of_finite_differences(make_lm: Any, batch: Batch, granularity: Any) -> None:
    lm = make_lm("gpt2").double()  # Llama's norms compute in float32 whatever they are given
    perturbation = Perturbation(lm, init_sigma=0.05, granularity=granularity)
    perturbation.log_sigma.data = perturbation.log_sigma.double() + 0.1 * torch.randn(
        perturbation.log_sigma.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def value() -> Tensor:
        with perturbation.noise(step=3, part=1):
            hidden = lm.transformer(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()
            ).last_hidden_state
        return (hidden * torch.linspace(-1, 1, hidden.shape[-1], dtype=torch.float64)).sum()

    value().backward()
    exact, flat = perturbation.log_sigma.grad.flatten(), perturbation.log_sigma.data.view(-1)
    step = 1e-5
    for index in range(0, len(flat), max(1, len(flat) // 8)):
        ends = []
        for sign in (1, -1):
            flat[index] += sign * step
            ends.append(value().item())
            flat[index] -= sign * step
        assert exact[index].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_activation_checkpointing_changes_no_gradient(make_lm: Any, batch: Batch, architecture: str) -> None:
    results = []
    for recompute in (False, True):
        lm = training(make_lm(architecture))
        if recompute:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        perturbation = Perturbation(lm, init_sigma=0.1)
        with perturbation.noise(step=1, part=0):
            loss = loss_of(lm, batch)
        plain = loss_of(lm, batch)  # a pass without noise in the same graph stays without when it is recomputed
        (loss + 2 * plain).backward()
        results.append(gradients(lm) | {"sigma": perturbation.log_sigma.grad.clone(), "loss": loss.detach()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_checkpoint_that_would_lose_the_noise_is_refused(make_lm: Any, batch: Batch) -> None:
    lm = make_lm("llama")
    perturbation = Perturbation(lm, init_sigma=0.1)

    def loss(**options: Any) -> Tensor:
        with perturbation.noise(step=1, part=0):
            return checkpoint(
                lambda ids: lm(input_ids=ids).logits.sum(), batch.input_ids, use_reentrant=False, **options
            )

    with pytest.raises(RuntimeError, match=r"context_fn=perturbation\.checkpoint_context"):
        loss().backward()
    loss(context_fn=perturbation.checkpoint_context).backward()
    assert (perturbation.log_sigma.grad != 0).all()


# --- where it is not ---------------------------------------------------------------------------------------------


def test_weights_that_are_sent_are_those_of_the_plain_model(make_lm: Any) -> None:
    lm = make_lm("llama")
    names, actor = set(lm.state_dict()), Actor(lm)
    Perturbation(lm, init_sigma=0.1)
    assert set(actor.export_state_dict()) == names == set(lm.state_dict())


def test_a_copy_of_the_model_is_never_perturbed(make_lm: Any, batch: Batch) -> None:
    lm = make_lm("llama")
    perturbation = Perturbation(lm, init_sigma=0.1)
    twin = copy.deepcopy(lm)
    plain = loss_of(lm, batch)
    with perturbation.noise(step=1, part=0):
        assert torch.equal(loss_of(twin, batch), plain)


def test_passes_do_not_nest_and_an_error_ends_them(make_lm: Any, batch: Batch) -> None:
    lm = make_lm("llama")
    plain, perturbation = loss_of(lm, batch), Perturbation(lm, init_sigma=0.1)
    outer, inner = perturbation.noise(step=1, part=0), perturbation.noise(step=1, part=1)
    with pytest.raises(RuntimeError, match="nested"), outer, inner:
        pass
    assert torch.equal(loss_of(lm, batch), plain)


def test_sigma_stays_float32_in_a_bfloat16_model(make_lm: Any) -> None:
    perturbation = Perturbation(make_lm("llama"), granularity="channel")
    assert perturbation.to(torch.bfloat16).log_sigma.dtype == torch.float32
    torch.testing.assert_close(perturbation.sigmas(), torch.full((2,), 1e-4))


def test_perturbation_works_with_lora() -> None:
    pytest.importorskip("peft")
    loaded = build_tiny("0123456789", hidden_size=32, layers=2, heads=2)
    policy = build_policy(loaded, critic="none", lora={"r": 2}, activation_checkpointing=True)
    perturbation = Perturbation(policy.actor.lm, init_sigma=0.1)
    ids = torch.arange(2, 10)[None]
    with perturbation.noise(step=1, part=0):
        policy.actor(ids, torch.ones_like(ids, dtype=torch.bool), 4).logprobs.sum().backward()
    assert (perturbation.log_sigma.grad != 0).all()
