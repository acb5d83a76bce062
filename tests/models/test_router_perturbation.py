"""Routers of a mixture of experts: noise on their logits, and how evenly experts are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen2MoeConfig

from lightning_rlhf.models import Actor
from lightning_rlhf.models.perturbation import Perturbation
from lightning_rlhf.models.router_perturbation import MEMORY, RouterPerturbation
from tests.models.conftest import _LLAMA, Batch

CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": Qwen2MoeConfig(
        **_LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
}


def moe(architecture: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(CONFIGS[architecture])
        with torch.no_grad():
            for parameter in lm.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.2)
    return lm.train()


def noises(lm: Any, sigma: float, **router: Any) -> tuple[Perturbation, RouterPerturbation]:
    perturbation = Perturbation(lm, init_sigma=sigma)
    return perturbation, RouterPerturbation(lm, perturbation, **router)


def loss_of(lm: Any, batch: Batch) -> Tensor:
    return Actor(lm)(batch.input_ids, batch.attention_mask, batch.response_length).logprobs[batch.response_mask].sum()


def router_logits(lm: Any, batch: Batch) -> list[Tensor]:
    """Of each layer, as the router itself returns them."""
    seen: list[Tensor] = []
    handles = [layer.mlp.gate.register_forward_hook(lambda m, a, out: seen.append(out[0])) for layer in lm.model.layers]
    loss_of(lm, batch)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("architecture", CONFIGS)
def test_sigma_0_changes_no_bit(batch: Batch, architecture: str) -> None:
    lm = moe(architecture)
    loss = loss_of(lm, batch)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    lm.zero_grad()
    perturbation, _ = noises(lm, 0.0, init_sigma=0.0)
    with perturbation.noise(step=1, part=0, mask=batch.attention_mask):
        perturbed = loss_of(lm, batch)
    perturbed.backward()
    assert torch.equal(perturbed, loss)
    assert all(torch.equal(p.grad, expected[name]) for name, p in lm.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_noise_on_the_logits_follows_utilisation(batch: Batch, architecture: str) -> None:
    lm = moe(architecture)
    plain = router_logits(lm, batch)[0]
    perturbation, router = noises(lm, 0.0, init_sigma=0.1)
    router.utilisation[:] = torch.tensor([0.5, 0.3, 0.2, 0.0])
    draws = []
    for part in range(60):
        with perturbation.noise(step=1, part=part, mask=batch.attention_mask):
            draws.append(router_logits(lm, batch)[0].detach() - plain)
    spread = torch.cat(draws).std(0)
    count = 60 * plain.shape[0]
    # sigma_e = 0.1 * utilisation / (1 / 4); an unused expert keeps 1 % of its noise.
    expected = torch.tensor([0.2, 0.12, 0.08, 0.001])
    assert ((spread - expected).abs() < 4 * expected / (2 * count) ** 0.5).all(), spread


def test_the_router_has_no_noise_outside_a_pass(batch: Batch) -> None:
    lm = moe("mixtral")
    plain = router_logits(lm, batch)
    noises(lm, 0.1, init_sigma=0.1)
    assert all(torch.equal(a, b) for a, b in zip(plain, router_logits(lm, batch), strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_balance_is_the_sum_of_squares_over_real_tokens_and_has_a_gradient(batch: Batch, recompute: bool) -> None:
    lm = moe("mixtral")
    if recompute:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    mask = batch.attention_mask.flatten()
    shares = [logits.softmax(-1)[mask].mean(0) for logits in router_logits(lm, batch)]
    expected = sum(((share - 0.25) ** 2).sum() for share in shares)
    perturbation, router = noises(lm, 0.0, init_sigma=0.0)
    with perturbation.noise(step=1, part=0, mask=batch.attention_mask):
        loss = loss_of(lm, batch)
    balance = router.balance()
    torch.testing.assert_close(balance, expected)
    (loss + balance).backward()
    assert (router.log_sigma.grad == 0).all()
    plain = moe("mixtral")
    total = loss_of(plain, batch) + sum(
        ((logits.softmax(-1)[mask].mean(0) - 0.25) ** 2).sum() for logits in router_logits(plain, batch)
    )
    total.backward()
    for (name, p), other in zip(lm.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, msg=name)


def test_utilisation_is_a_moving_average_over_steps(batch: Batch) -> None:
    lm = moe("mixtral")
    perturbation, router = noises(lm, 0.0, init_sigma=0.0)
    with perturbation.noise(step=1, part=0, mask=batch.attention_mask):
        logits = router_logits(lm, batch)
    share = logits[1].softmax(-1)[batch.attention_mask.flatten()].mean(0)
    router.finish_step()
    torch.testing.assert_close(router.utilisation[1], MEMORY * torch.full((4,), 0.25) + (1 - MEMORY) * share.detach())
    before = router.utilisation.clone()
    router.finish_step()
    assert torch.equal(router.utilisation, before), "nothing was seen since"


def test_activation_checkpointing_changes_no_gradient(batch: Batch) -> None:
    results = []
    for recompute in (False, True):
        lm = moe("qwen2_moe")
        if recompute:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        perturbation, router = noises(lm, 0.05, init_sigma=0.05)
        with perturbation.noise(step=1, part=0, mask=batch.attention_mask):
            loss = loss_of(lm, batch)
        loss.backward()
        grads = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
        results.append(grads | {"sigma": perturbation.log_sigma.grad, "router": router.log_sigma.grad})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert (results[0]["router"] != 0).any()


def test_a_model_without_routers_is_refused(make_lm: Any) -> None:
    lm = make_lm("llama")
    with pytest.raises(ValueError, match=r"module\.alp\.router is not allowed: LlamaForCausalLM names no routers"):
        RouterPerturbation(lm, Perturbation(lm))
