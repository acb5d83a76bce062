"""The FSDP2 strategy in a process group of one: precision, settings, asynchronous generation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.distributed.strategies import FSDP2Strategy
from lightning_rlhf.models.sharding import gathered, is_sharded
from lightning_rlhf.rollout import HFEngine
from lightning_rlhf.settings import SettingError
from tests.support import fit, same, tiny_module, tiny_policy, weights


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Whatever process group a test's trainer opened is closed, and its environment forgotten."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": "shard"}, "trainer.strategy.checkpoint = 'shard'"),
        ({"timeout_seconds": 0}, "trainer.strategy.timeout_seconds = 0"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        FSDP2Strategy(**arguments)


def test_float16_is_refused() -> None:
    with pytest.raises(SettingError, match=r"trainer.precision = '16-true'.*bf16-mixed"):
        fit(tiny_module(iterations=1), strategy=FSDP2Strategy(), accelerator="cpu", precision="16-true")


class Types(RLHFCallback):
    """The dtypes in which layers, head and noise work during an update."""

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Any) -> None:
        layer = module.actor.lm.model.layers[0]
        self.found: dict[str, torch.dtype] = {}

        def in_layer(module: Any, args: Any) -> None:
            self.found |= {"hidden": args[0].dtype, "weight": module.mlp.up_proj.weight.dtype}

        def in_head(module: Any, args: Any) -> None:
            self.found |= {"value head": module.weight.dtype}

        def after(module: Any, args: Any, output: Any) -> None:
            self.found |= {"log-probabilities": output.logprobs.dtype, "entropy": output.entropy.dtype}

        self.handles = [
            layer.register_forward_pre_hook(in_layer),
            module.critic.head.register_forward_pre_hook(in_head),
            module.actor.register_forward_hook(after),
        ]

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        for handle in self.handles:
            handle.remove()
        slices = [p for p in module.parameters() if p.requires_grad]
        self.found["slices"] = slices[0].dtype
        self.found["sigma"] = module.perturbation.log_sigma.dtype
        assert all(isinstance(p, DTensor) == (p is not module.perturbation.log_sigma) for p in slices)


BYPASS = {"bypass_mode": True}
WIDE = dict.fromkeys(("value head", "log-probabilities", "entropy", "sigma"), torch.float32)
EXPECTED = {
    "32-true": WIDE | dict.fromkeys(("hidden", "weight", "slices"), torch.float32),
    "bf16-mixed": WIDE | {"hidden": torch.float32, "weight": torch.bfloat16, "slices": torch.float32},
    "bf16-true": WIDE | dict.fromkeys(("hidden", "weight", "slices"), torch.bfloat16),
}


@pytest.mark.parametrize("precision", EXPECTED)
def test_noise_heads_and_softmax_stay_in_float32(precision: str) -> None:
    types = Types()
    module = tiny_module(
        iterations=1, alp={"init_sigma": 1e-2, "ratio": "decoupled"}, loss={"entropy_coefficient": 0.1}
    )
    fit(module, [types], strategy=FSDP2Strategy(), accelerator="cpu", precision=precision)
    assert types.found == EXPECTED[precision]
    assert is_sharded(module.actor) and is_sharded(module.critic) and is_sharded(module.reference)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ({"critic": "shared", "lora": {"r": 2}}, {}),
        ({"critic": "shared", "reference": "none"}, {"kl": {"coefficient": 0.0}, "rollout_correction": BYPASS}),
    ],
    ids=["adapter as reference", "only hidden states are scored"],
)
def test_one_rank_is_the_run_without_sharding(policy: dict[str, Any], settings: dict[str, Any]) -> None:
    runs = []
    for options in ({}, {"strategy": FSDP2Strategy(), "accelerator": "cpu"}):
        module = tiny_module(iterations=2, policy=tiny_policy(**policy), **settings)
        fit(module, **options)
        runs.append({n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights(module).items()})
    assert same(*runs)


def test_rollouts_ahead_are_drawn_from_a_whole_copy() -> None:
    module = tiny_module(iterations=2)
    module.engine = HFEngine(samples=2, max_new_tokens=6, lag=1)
    trainer: Any = fit(module, strategy=FSDP2Strategy(), accelerator="cpu")
    own = module.engine._require_setup()[0].lm.state_dict()
    trained = module.actor.lm.state_dict()
    assert all(torch.equal(own[name], trained[name].full_tensor()) for name in own)
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)  # sets the engine up again


def test_gathered_weights_are_whole_inside_and_slices_outside() -> None:
    module = tiny_module(iterations=1)
    fit(module, strategy=FSDP2Strategy(), accelerator="cpu")
    weight = module.actor.lm.get_output_embeddings().weight
    assert isinstance(weight, DTensor)
    with gathered(module.actor):
        assert not isinstance(module.actor.lm.get_output_embeddings().weight, DTensor)
        assert not isinstance(module.actor.lm.model.layers[1].mlp.up_proj.weight, DTensor)
    assert module.actor.lm.get_output_embeddings().weight is weight
