"""Ascend NPUs in Lightning, with a fake ``torch.npu``: every call fits the signatures of the real package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch.strategies as lightning_strategies
import pytest
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlhf import schema
from lightning_rlhf.accelerators import npu
from lightning_rlhf.assembly import make_trainer
from lightning_rlhf.distributed.strategies import FSDP2Strategy
from lightning_rlhf.settings import SettingError
from tests.accelerators.fake_npu import Checked, GradScaler, fake_torch_npu_module


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checked]:
    """Two fake NPUs; their devices have PyTorch's name for a private backend, so nothing can be computed."""
    module = fake_torch_npu_module(devices=2)
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(npu, "_npu", lambda: module)
    monkeypatch.setattr(npu, "_device", lambda index=0: torch.device("privateuseone", index))
    yield module


class Device:
    type, index = "npu", 1


# --- accelerator -----------------------------------------------------------------------------------------------------


def test_the_names_are_registered() -> None:
    assert AcceleratorRegistry["npu"]["accelerator"] is npu.NPUAccelerator
    for strategy in npu.STRATEGIES:
        assert StrategyRegistry[strategy.strategy_name]["strategy"] is strategy
    npu.register()  # twice is harmless


def test_fake_accelerator_sets_its_device_and_tells_its_memory(fake: Checked) -> None:
    accelerator = npu.NPUAccelerator()
    accelerator.setup_device(Device)
    assert fake.current[-1] == 1
    assert accelerator.get_device_stats(Device)["allocated_bytes.all.peak"] == 1 << 30
    accelerator.teardown()
    assert fake.calls["empty_cache"] == 1
    assert npu.NPUAccelerator.auto_device_count() == 2 and npu.NPUAccelerator.is_available()
    assert npu.NPUAccelerator.name() == "npu"


def test_fake_accelerator_refuses_a_device_of_another_kind(fake: Checked) -> None:
    """What Lightning's automatic strategy would hand it."""
    with pytest.raises(ValueError, match="trains on cpu, not on an NPU"):
        npu.NPUAccelerator().setup_device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        *[(1, [0]), (2, [0, 1]), (-1, [0, 1, 2]), ("auto", [0, 1, 2]), ("-1", [0, 1, 2]), ("2", [0, 1])],
        *[("0,2", [0, 2]), ("1,", [1]), (" 0, 1 ", [0, 1]), ([2], [2]), ([0, 2], [0, 2]), ((1,), [1])],
    ],
)
def test_devices(devices: Any, indices: list[int]) -> None:
    assert npu.parse_devices(devices, 3) == indices


REFUSED = [0, 4, -2, True, "", "x", "0,x", "3,", "5", [], [3], [0, 0], [True], ["0"], None, 1.0]


@pytest.mark.parametrize("devices", REFUSED)
def test_devices_that_are_refused(devices: Any) -> None:
    with pytest.raises(SettingError, match=r"trainer\.devices = .* 1 to 3 devices"):
        npu.parse_devices(devices, 3)


def test_lightning_parses_devices_by_the_accelerator(fake: Checked) -> None:
    assert npu.NPUAccelerator.parse_devices("auto") == [0, 1]
    assert [d.index for d in npu.NPUAccelerator.get_parallel_devices([0, 1])] == [0, 1]


# --- strategies and precision ----------------------------------------------------------------------------------------


def test_fake_distributed_strategies_talk_over_hccl(fake: Checked) -> None:
    assert npu.NPUDDPStrategy()._get_process_group_backend() == "hccl"
    assert npu.NPUFSDP2Strategy().process_group_backend == "hccl"
    assert npu.NPUDDPStrategy(process_group_backend="gloo").process_group_backend == "gloo"


def test_fake_ddp_wraps_the_model_without_a_cuda_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(npu, "DistributedDataParallel", lambda model, **options: seen.append((model, options)))
    two: list[Any] = [Device, Device]
    strategy = npu.NPUDDPStrategy(timeout_seconds=60)
    strategy.parallel_devices = two
    strategy.cluster_environment = type("Environment", (), {"local_rank": lambda self: 0})()
    strategy._setup_model("module")
    assert seen == [("module", {"device_ids": [1], "gradient_as_bucket_view": True})]


def test_fake_fsdp2_is_the_packages_own_over_hccl() -> None:
    strategy = npu.NPUFSDP2Strategy(cpu_offload=True)
    assert isinstance(strategy, FSDP2Strategy) and strategy.cpu_offload


def test_fake_precision_casts_on_the_npu(fake: Checked) -> None:
    plugin = npu.NPUMixedPrecision("bf16-mixed")
    assert (plugin.device, plugin.precision, plugin.scaler) == ("npu", "bf16-mixed", None)


def test_fake_scaler_is_the_npus_own_and_steps_a_fused_optimiser(fake: Checked) -> None:
    plugin = npu.NPUMixedPrecision("16-mixed")
    assert isinstance(plugin.scaler, GradScaler)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    (plugin.scaler.scale(weight.sum())).backward()
    with pytest.raises(TypeError, match="grad_scaler"):
        plugin.scaler.step(optimizer)  # what would happen without the plugin
    plugin.connect(torch.nn.Linear(1, 1), [optimizer], [])
    plugin.scaler.step(optimizer)
    assert torch.equal(weight.grad, torch.ones(3)), "unscaled before the step"
    assert (weight < 1).all()


# --- a Trainer's options ---------------------------------------------------------------------------------------------


def test_other_accelerators_are_left_alone() -> None:
    assert npu.trainer_objects({"accelerator": "cpu", "precision": "bf16-mixed"}) == {}


def test_fake_options_become_strategy_and_precision_for_the_npu(fake: Checked) -> None:
    objects = npu.trainer_objects({"accelerator": "npu", "devices": [1], "precision": "bf16-mixed"})
    assert objects["devices"] == [1] and isinstance(objects["strategy"], npu.SingleNPUStrategy)
    assert objects["strategy"].root_device.index == 1
    assert objects["precision"] is None and isinstance(objects["plugins"][0], npu.NPUMixedPrecision)
    assert "plugins" not in npu.trainer_objects({"accelerator": "npu", "devices": 1, "precision": "bf16-true"})
    assert npu.trainer_objects({"accelerator": "npu", "devices": -1})["strategy"] == "npu_ddp"
    assert npu.trainer_objects({"accelerator": "npu", "devices": 1, "num_nodes": 2})["strategy"] == "npu_ddp"
    assert "strategy" not in npu.trainer_objects({"accelerator": "npu", "devices": 2, "strategy": "npu_fsdp2"})


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"devices": 3}, "trainer.devices"),
        ({"strategy": "ddp"}, "trainer.strategy"),
        ({"strategy": "fsdp"}, "trainer.strategy"),
        ({"strategy": {"_target_": "lightning.pytorch.strategies.DDPStrategy"}}, "trainer.strategy"),
        ({"strategy": lightning_strategies.SingleDeviceStrategy("cpu")}, "trainer.strategy"),
        ({"strategy": "npu_single", "devices": 2}, "trainer.strategy"),
        ({"precision": "64-true"}, "trainer.precision"),
        ({"precision": "transformer-engine"}, "trainer.precision"),
        ({"precision": "16-mixed", "strategy": "npu_fsdp2"}, "trainer.precision"),
        ({"precision": "bf16-mixed", "plugins": ["mine"]}, "trainer.plugins"),
    ],
)
def test_fake_options_that_do_not_fit_are_refused(fake: Checked, options: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingError) as refused:
        npu.check_options({"accelerator": "npu", "devices": 1} | options)
    assert refused.value.key == key


def test_fake_strategy_as_a_block_is_taken(fake: Checked) -> None:
    block = {"_target_": "lightning_rlhf.accelerators.npu.NPUDDPStrategy", "timeout_seconds": 60}
    npu.check_options({"accelerator": "npu", "devices": 2, "strategy": block})


@pytest.mark.parametrize("option", ["npu", "npu_ddp", "npu_fsdp2"])
def test_an_absent_npu_is_refused_before_any_work(compose: Callable, option: str) -> None:
    """One screen that says what is missing; nothing falls back to the CPU."""
    if npu.is_available():
        pytest.skip("there is an NPU")
    with pytest.raises(schema.ConfigError) as refused:
        schema.check(compose(f"trainer={option}"))
    text = str(next(p for p in refused.value.problems if p.key == "trainer.accelerator"))
    for part in ("no NPU to train on", "torch-npu: not installed", "CANN: not found", "devices: 0", "docs/npu.md"):
        assert part in text
    assert len(text.splitlines()) < 12


def test_an_absent_npu_is_refused_by_the_trainer_as_well(compose: Callable) -> None:
    if npu.is_available():
        pytest.skip("there is an NPU")
    config = schema.check(compose("logger=none", "callbacks=none"))
    config["trainer"] |= {"accelerator": "npu"}
    with pytest.raises(schema.InputError, match=r"trainer\.accelerator = 'npu'"):
        make_trainer(config)


def test_the_message_lists_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_torch_npu_module(devices=0)
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(npu, "_npu", lambda: module)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "7")
    text = npu.missing() or ""
    assert "torch-npu: loaded" in text and "CANN: found" in text
    assert "devices: 0 with ASCEND_RT_VISIBLE_DEVICES=7" in text


def test_fused_operators_without_torch_npu_are_refused_before_any_work(compose: Callable) -> None:
    with pytest.raises(schema.ConfigError, match=r"model\.policy\.npu_fused"):
        schema.check(compose("model.policy.npu_fused=true"))


@pytest.mark.parametrize(
    ("option", "strategy", "devices"),
    [("npu", npu.SingleNPUStrategy, 1), ("npu_ddp", npu.NPUDDPStrategy, 2), ("npu_fsdp2", npu.NPUFSDP2Strategy, 2)],
)
def test_fake_npus_get_accelerator_strategy_precision_and_backend_together(
    fake: Checked, compose: Callable, option: str, strategy: type, devices: int
) -> None:
    """By the shipped file alone, through the ordinary check and assembly."""
    trainer = make_trainer(schema.check(compose(f"trainer={option}", "logger=none", "callbacks=none")))
    assert isinstance(trainer.accelerator, npu.NPUAccelerator) and isinstance(trainer.strategy, strategy)
    assert [d.index for d in trainer._accelerator_connector._parallel_devices] == list(range(devices))
    assert isinstance(trainer.precision_plugin, npu.NPUMixedPrecision) and trainer.precision_plugin.device == "npu"
    assert getattr(trainer.strategy, "process_group_backend", "hccl") == "hccl"
