"""On a real Ascend NPU only: what fakes and the pretend device cannot show. Never run by this project so far."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_rlhf import schema
from lightning_rlhf.accelerators import device, npu
from lightning_rlhf.assembly import assemble, make_trainer
from lightning_rlhf.models import npu_fused

pytestmark = [pytest.mark.npu, pytest.mark.skipif(not npu.is_available(), reason=f"no Ascend NPU: {npu.missing()}")]
RUN = [
    *("iterations=1", "threads=1", "warmup=none", "logger=none", "callbacks=stability", "alp=decoupled"),
    *("rollout_correction=npu", "data.prompts_per_iteration=8", "rollout.samples=2", "module.update.minibatch_size=8"),
]


@pytest.mark.parametrize("precision", npu.PRECISIONS)
@pytest.mark.parametrize("fused", [False, True])
def test_an_iteration_on_the_npu(compose: Callable, precision: str, fused: bool) -> None:
    options = ["trainer=npu", f"trainer.precision={precision}", f"model.policy.npu_fused={fused}"]
    config = schema.check(compose(*RUN, *options))
    parts, trainer = assemble(config), make_trainer(config)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert trainer.strategy.root_device.type == "npu"
    assert trainer.callback_metrics["clock/update"] > 0
    assert trainer.callback_metrics["memory/peak_gib"] > 0


def test_autocast_is_on_inside_the_precision_plugin() -> None:
    with npu.NPUMixedPrecision("bf16-mixed").forward_context():
        assert torch.is_autocast_enabled("npu") and torch.get_autocast_dtype("npu") == torch.bfloat16


def test_memory_and_generator_of_the_device() -> None:
    there = torch.device("npu", 0)
    npu.NPUAccelerator().setup_device(there)
    tensor = torch.ones(1 << 20, device=there)
    assert (device.peak_bytes(there) or 0) >= tensor.nbytes and (device.total_bytes(there) or 0) > tensor.nbytes
    state = device.rng_state(there)
    first = torch.rand(4, device=there).cpu()
    device.set_rng_state(there, state)
    assert torch.equal(torch.rand(4, device=there).cpu(), first)
    assert npu.NPUAccelerator().get_device_stats(there)


def test_fused_operators_on_the_npu_give_the_unfused_outputs() -> None:
    from tests.accelerators.test_npu_fused import forward_and_backward, model

    plain = model("llama").to("npu")
    logits, _ = forward_and_backward(plain)
    npu_fused.fuse(plain)
    assert torch.allclose(forward_and_backward(plain)[0].cpu(), logits.cpu(), atol=1e-3, rtol=1e-3)
