from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_rlhf.models.actor import Actor
from lightning_rlhf.models.critic import SeparateCritic, SharedCritic, ValueHead


def randomise(head: ValueHead) -> None:
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(7)))
        head.bias.fill_(0.3)


def values(critic: SeparateCritic | SharedCritic, lm: Any, ids: torch.Tensor, mask: torch.Tensor, response: int) -> Any:
    if isinstance(critic, SeparateCritic):
        return critic(ids, mask, response)
    return critic(Actor(lm)(ids, mask, response, with_hidden=True).hidden)


@pytest.mark.parametrize("kind", [SeparateCritic, SharedCritic])
def test_first_values_are_zero_and_learn(make_lm: Any, batch: Any, kind: Any) -> None:
    lm = make_lm()
    critic = kind(lm)
    got = values(critic, lm, batch.input_ids, batch.attention_mask, batch.response_length)
    assert got.shape == (2, batch.response_length + 1)
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.zeros_like(got))
    (got - 1).square().sum().backward()
    assert critic.head.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", [SeparateCritic, SharedCritic])
def test_a_value_knows_the_tokens_before_its_own_only(make_lm: Any, batch: Any, kind: Any) -> None:
    """Column t is the state in which response token t is chosen: it changes with token t - 1, not with token t."""
    lm = make_lm()
    critic = kind(lm)
    randomise(critic.head)
    ids, mask, response = batch.input_ids[:1], batch.attention_mask[:1], batch.response_length
    before = values(critic, lm, ids, mask, response)
    for t in range(response):
        changed = ids.clone()
        changed[0, ids.shape[1] - response + t] = 49
        moved = (values(critic, lm, changed, mask, response) - before)[0].abs() > 1e-6
        assert moved.tolist() == [column > t for column in range(response + 1)]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", [SeparateCritic, SharedCritic])
def test_padding_never_matters(make_lm: Any, batch: Any, architecture: str, kind: Any) -> None:
    lm = make_lm(architecture)
    critic = kind(lm)
    randomise(critic.head)
    ids, mask, response = batch.input_ids[:1], batch.attention_mask[:1], batch.response_length
    alone = values(critic, lm, ids, mask, response)
    padded = nn.functional.pad(ids, (7, 0), value=7), nn.functional.pad(mask, (7, 0))
    assert alone.abs().max() > 0.1
    torch.testing.assert_close(values(critic, lm, *padded, response), alone, atol=1e-5, rtol=0)


def test_separate_critic_is_a_copy_of_the_backbone_without_the_output_head(make_lm: Any, batch: Any) -> None:
    lm = make_lm(tie_word_embeddings=False)
    critic = SeparateCritic(lm)
    assert set(critic.state_dict()) == {f"backbone.{name}" for name in lm.model.state_dict()} | {
        "head.weight",
        "head.bias",
    }
    own = {parameter.data_ptr() for parameter in critic.parameters()}
    assert not own & {parameter.data_ptr() for parameter in lm.parameters()}
    for mine, theirs in zip(critic.backbone.parameters(), lm.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    randomise(critic.head)
    values(critic, lm, batch.input_ids, batch.attention_mask, batch.response_length).sum().backward()
    assert all(parameter.grad is None for parameter in lm.parameters())
    assert all(parameter.grad is not None for parameter in critic.parameters())


def test_shared_critic_reaches_the_trunk(make_lm: Any, batch: Any) -> None:
    lm = make_lm(tie_word_embeddings=False)
    critic = SharedCritic(lm)
    randomise(critic.head)
    assert set(critic.state_dict()) == {"head.weight", "head.bias"}
    values(critic, lm, batch.input_ids, batch.attention_mask, batch.response_length).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in lm.model.layers.parameters())
    assert lm.lm_head.weight.grad is None


@pytest.mark.parametrize("mode", ["autocast", "true"])
def test_the_head_stays_in_float32(make_lm: Any, batch: Any, mode: str) -> None:
    lm = make_lm()
    critic: Any = SeparateCritic(lm)
    randomise(critic.head)
    want = values(critic, lm, batch.input_ids, batch.attention_mask, batch.response_length)
    weight, frequencies = critic.head.weight.detach().clone(), critic.backbone.rotary_emb.inv_freq.clone()
    if mode == "true":
        nn.ModuleDict({"critic": critic}).to(torch.bfloat16)
        assert {p.dtype for p in critic.backbone.parameters()} == {torch.bfloat16}
    assert torch.equal(critic.head.weight, weight)
    assert torch.equal(critic.backbone.rotary_emb.inv_freq, frequencies)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        got = values(critic, lm, batch.input_ids, batch.attention_mask, batch.response_length)
        assert got.dtype == torch.float32
        # not the product of rounded numbers: the head computes in float32
        hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        torch.testing.assert_close(critic.head(hidden), (hidden.float() * weight).sum(-1) + 0.3)
    got.sum().backward()
    assert (got - want).abs().max() < 1.0
    assert all(parameter.grad.isfinite().all() for parameter in critic.parameters())


def test_value_head_survives_saving_and_loading(make_lm: Any, batch: Any) -> None:
    lm = make_lm()
    critic, fresh = SeparateCritic(lm), SeparateCritic(make_lm(seed=1))
    with torch.no_grad():
        critic.head.weight.fill_(0.123)
        critic.head.bias.fill_(0.123)
    fresh.load_state_dict(critic.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(critic.parameters(), fresh.parameters(), strict=True))
    inputs = batch.input_ids, batch.attention_mask, batch.response_length
    assert torch.equal(critic(*inputs), fresh(*inputs))
    incomplete = {name: tensor for name, tensor in critic.state_dict().items() if name != "head.weight"}
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        fresh.load_state_dict(incomplete)
