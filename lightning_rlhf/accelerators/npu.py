"""Ascend NPUs in Lightning: accelerator, strategies and precision, which only work together.

Lightning has no support for NPUs. With a registered accelerator alone it trains on the CPU, or casts for another
device; :func:`trainer_objects` completes the options of a Trainer so that this cannot happen, and refuses options that
do not fit. Importing this module registers the accelerator ``npu`` and the strategies ``npu_single``, ``npu_ddp`` and
``npu_fsdp2``. PyTorch's own module ``torch.npu`` comes from the package torch-npu.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_rlhf.accelerators.device import module_of
from lightning_rlhf.distributed.strategies import DDPStrategy, FSDP2Strategy
from lightning_rlhf.schema.locate import locate
from lightning_rlhf.settings import SettingError

NPU = "npu"
MIXED = ("bf16-mixed", "16-mixed")
PRECISIONS = (*MIXED, "bf16-true", "16-true", "32-true")


def is_available() -> bool:
    """Whether torch-npu is loaded and sees a device."""
    return hasattr(torch, NPU) and bool(_npu().is_available())


def _device(index: int = 0) -> torch.device:
    return torch.device(NPU, index)


def _npu() -> Any:
    return module_of(_device())


class NPUAccelerator(Accelerator):
    """Ascend NPUs by way of torch-npu."""

    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` the current one.

        Raises:
            ValueError: the strategy chose a device of another kind.
        """
        if device.type != NPU:
            raise ValueError(f"the strategy trains on {device}, not on an NPU: trainer.strategy has to be one for NPUs")
        _npu().set_device(device)

    def teardown(self) -> None:
        """Release the cached memory."""
        _npu().empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Counters of the caching allocator, such as ``allocated_bytes.all.peak`` (bytes)."""
        return dict(_npu().memory_stats(device))

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Indices of the devices: a number of them, -1 or ``auto`` for all, ``"0,1"`` or a list of indices.

        Raises:
            SettingError: no such devices here.
        """
        return parse_devices(devices, NPUAccelerator.auto_device_count())

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [_device(index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return int(_npu().device_count()) if hasattr(torch, NPU) else 0

    @staticmethod
    def is_available() -> bool:
        return is_available()

    @staticmethod
    def name() -> str:
        return NPU


def parse_devices(devices: Any, there: int) -> list[int]:
    """Indices that ``trainer.devices`` names where ``there`` NPUs are; see :meth:`NPUAccelerator.parse_devices`.

    Raises:
        SettingError: it names no device, one twice, or one that does not exist.
    """
    allowed = f"1 to {there} devices: a number, -1 or auto for all, or a list of indices below {there}"
    refused = SettingError("trainer.devices", devices, allowed)
    chosen: Any = devices
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        if devices == "auto":
            chosen = -1
        elif not parts or not all(part.lstrip("-").isdigit() for part in parts):
            raise refused
        else:
            chosen = [int(part) for part in parts] if "," in devices else int(devices)
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        chosen = list(range(there if chosen == -1 else chosen))
    if not isinstance(chosen, (list, tuple)) or not chosen or len(set(chosen)) != len(chosen):
        raise refused
    if not all(isinstance(index, int) and not isinstance(index, bool) and 0 <= index < there for index in chosen):
        raise refused
    return list(chosen)


# --- strategies ------------------------------------------------------------------------------------------------------


class SingleNPUStrategy(SingleDeviceStrategy):
    """One process on one explicit NPU: Lightning's own choice for a single device would be the CPU."""

    strategy_name = "npu_single"

    def __init__(self, device: int | torch.device = 0, **kwargs: Any) -> None:
        super().__init__(device=_device(device) if isinstance(device, int) else device, **kwargs)


class HCCLMixin:
    """Mixin of a distributed strategy: its processes communicate over hccl, Huawei's collective library."""

    strategy_name: str

    def __init__(self, *args: Any, process_group_backend: str = "hccl", **kwargs: Any) -> None:
        super().__init__(*args, process_group_backend=process_group_backend, **kwargs)  # type: ignore[call-arg]


class NPUDDPStrategy(HCCLMixin, DDPStrategy):
    """Data parallel over several NPUs: :class:`lightning_rlhf.distributed.strategies.DDPStrategy` over hccl."""

    strategy_name = "npu_ddp"

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # As Lightning's, without the CUDA stream that it opens around this.
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class NPUFSDP2Strategy(HCCLMixin, FSDP2Strategy):
    """Sharded over several NPUs: :class:`lightning_rlhf.distributed.strategies.FSDP2Strategy` over hccl."""

    strategy_name = "npu_fsdp2"


STRATEGIES: tuple[Any, ...] = (SingleNPUStrategy, NPUDDPStrategy, NPUFSDP2Strategy)


# --- precision -------------------------------------------------------------------------------------------------------


class NPUMixedPrecision(MixedPrecision):
    """Autocast on the NPU; with float16 the loss is scaled by torch-npu's own scaler.

    That scaler also reads the overflow flag of chips whose float16 has no infinity. It cannot leave the scale to a
    fused optimiser, as PyTorch's scaler does, so it divides the gradients itself before the step.
    """

    def __init__(self, precision: Literal["16-mixed", "bf16-mixed"]) -> None:
        super().__init__(precision, NPU, scaler=_npu().amp.GradScaler() if precision == "16-mixed" else None)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Called by the strategy once the optimisers exist."""
        if self.scaler is not None:
            for optimizer in optimizers:
                optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return super().connect(model, optimizers, lr_schedulers)


# --- together --------------------------------------------------------------------------------------------------------


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a Trainer with ``accelerator="npu"`` that cannot work on this machine.

    Raises:
        SettingError: no NPU, or devices, strategy or precision that do not fit.
    """
    lacking = missing()
    if lacking is not None:
        raise SettingError("trainer.accelerator", NPU, lacking)
    several = len(NPUAccelerator.parse_devices(options.get("devices", "auto"))) > 1 or options.get("num_nodes", 1) > 1
    strategy, precision = options.get("strategy", "auto"), options.get("precision")
    kind = _strategy_class(strategy)
    if kind is not None and not issubclass(kind, (SingleNPUStrategy, HCCLMixin)):
        names = ", ".join(each.strategy_name for each in STRATEGIES)
        raise SettingError("trainer.strategy", strategy, f"auto, {names}, or one of their classes, on an NPU")
    if kind is not None and several and issubclass(kind, SingleNPUStrategy):
        raise SettingError("trainer.strategy", strategy, "auto, npu_ddp or npu_fsdp2 with more than one device")
    if precision is not None and precision not in PRECISIONS:
        raise SettingError("trainer.precision", precision, f"one of {', '.join(PRECISIONS)} on an NPU")
    if precision == "16-mixed" and kind is not None and issubclass(kind, ModelParallelStrategy):
        raise SettingError("trainer.precision", precision, "bf16-mixed with sharding: the loss scaler knows no shards")
    if precision in MIXED and options.get("plugins"):
        raise SettingError("trainer.plugins", options["plugins"], f"nothing beside trainer.precision={precision}")


def trainer_objects(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replacements for some of a Trainer's options: strategy and precision as objects for the NPU.

    Args:
        options: as in a configuration, with ``accelerator``; empty result for another accelerator.

    Raises:
        SettingError: see :func:`check_options`.
    """
    if options.get("accelerator") != NPU:
        return {}
    check_options(options)
    devices = NPUAccelerator.parse_devices(options.get("devices", "auto"))
    objects: dict[str, Any] = {"devices": devices}
    strategy = options.get("strategy", "auto")
    if strategy == "auto":
        strategy = "npu_single" if len(devices) == 1 and options.get("num_nodes", 1) == 1 else "npu_ddp"
        objects["strategy"] = strategy
    if strategy == "npu_single":
        objects["strategy"] = SingleNPUStrategy(devices[0])
    if options.get("precision") in MIXED:
        objects |= {"precision": None, "plugins": [NPUMixedPrecision(options["precision"])]}
    return objects


def _strategy_class(strategy: Any) -> type | None:
    """The class behind a name, an object or a ``_target_`` block; ``None`` for ``auto``."""
    if strategy == "auto":
        return None
    if isinstance(strategy, str):
        return next((each for each in STRATEGIES if each.strategy_name == strategy), object)
    if isinstance(strategy, Mapping):
        target = locate(strategy["_target_"])
        return target if isinstance(target, type) else object
    return type(strategy)


def missing() -> str | None:
    """What this machine lacks to train on an NPU, a line for each part; ``None`` where nothing is missing."""
    if is_available():
        return None
    loaded = hasattr(torch, NPU)
    installed = loaded or importlib.util.find_spec("torch_npu") is not None
    cann = any(os.environ.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"))
    cann = cann or ctypes.util.find_library("ascendcl") is not None
    count = NPUAccelerator.auto_device_count()
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    lines = [
        "there is no NPU to train on, and nothing is trained on the CPU in its place:",
        f"torch-npu: {'loaded' if loaded else 'installed, not loaded' if installed else 'not installed'}"
        + ("" if installed else " (the release for this PyTorch, after CANN)"),
        "CANN: " + ("found" if cann else "not found (source its set_env.sh; it sets ASCEND_TOOLKIT_HOME)"),
        f"devices: {count}" + (f" with ASCEND_RT_VISIBLE_DEVICES={visible}" if visible is not None else ""),
        "see docs/npu.md; trainer=default trains on what is there",
    ]
    return "\n      ".join(lines)


def register() -> None:
    """Make accelerator and strategies known to Lightning by name; done on import, harmless twice."""
    AcceleratorRegistry.register(NPU, NPUAccelerator, description="Ascend NPUs (torch-npu)", override=True)
    for strategy in STRATEGIES:
        StrategyRegistry.register(strategy.strategy_name, strategy, description=strategy.__doc__, override=True)


register()
