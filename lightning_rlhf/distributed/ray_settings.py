"""Settings of Ray Train (``trainer.ray``), and the options they require; needs no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_rlhf.bounds import bounded
from lightning_rlhf.settings import SettingError, build

STRATEGY = "lightning_rlhf.distributed.strategies.RayDDPStrategy"

DEVICES: dict[str, tuple[dict[str, float], str]] = {"cpu": ({}, "gloo"), "gpu": ({"GPU": 1}, "nccl")}
"""By ``trainer.accelerator``: Ray's resource for one device, and the backend of the process group."""


@dataclass(frozen=True)
class RaySettings:
    """Settings of the block; each checks its own value."""

    workers: int
    """Training processes, one device each."""
    resources_per_worker: Mapping[str, float] | None = None
    """Resources that each reserves, beside or in place of one CPU and its device."""
    max_failures: int = 3
    """Restarts after a failed worker; -1: without limit."""
    address: str | None = None
    """Of a running cluster; null: $RAY_ADDRESS, else Ray is started on this machine alone for the run."""
    init: Mapping[str, Any] | None = field(
        default_factory=lambda: {"include_dashboard": False, "object_store_memory": 100_000_000}
    )
    """Arguments of ``ray.init`` if Ray is started on this machine."""

    def __post_init__(self) -> None:
        bounded("trainer.ray", at_least=1, whole=True, workers=self.workers)
        bounded("trainer.ray", at_least=-1, whole=True, max_failures=self.max_failures)
        if not isinstance(self.address, (str, type(None))):
            raise SettingError("trainer.ray.address", self.address, "HOST:PORT, auto, local or null")
        for name in ("resources_per_worker", "init"):
            if not isinstance(getattr(self, name), (Mapping, type(None))):
                raise SettingError(f"trainer.ray.{name}", getattr(self, name), "a block or null")
        for name, amount in (self.resources_per_worker or {}).items():
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0:
                raise SettingError(f"trainer.ray.resources_per_worker.{name}", amount, "a number >= 0")


def workers_of(trainer: Mapping[str, Any]) -> int | None:
    """Training processes under Ray; ``None`` where that is no number (:func:`wrong_options` says so)."""
    block = trainer.get("ray")
    workers = block.get("workers") if isinstance(block, Mapping) else None
    return workers if type(workers) is int and workers > 0 else None


def wrong_options(trainer: Mapping[str, Any]) -> Iterator[SettingError]:
    """Settings of Ray that cannot work; Ray decides about workers, their places and devices."""
    strategy = trainer.get("strategy")
    target = strategy.get("_target_") if isinstance(strategy, Mapping) else strategy
    if trainer.get("ray") is None:
        if target == STRATEGY:
            yield SettingError("trainer.ray", None, "a block of settings, as in trainer=ray, with this strategy")
        return
    try:
        build(RaySettings, "trainer.ray", trainer["ray"])
    except SettingError as error:
        yield error
    if target != STRATEGY:
        yield SettingError("trainer.strategy", target, f"{STRATEGY} with trainer.ray")
    for name in ("devices", "num_nodes"):
        if trainer.get(name, 1) != 1:
            yield SettingError(f"trainer.{name}", trainer[name], "1: trainer.ray.workers is the number of processes")
    if trainer.get("accelerator") not in DEVICES:
        allowed = f"one of {', '.join(DEVICES)} with trainer.ray: each worker reserves one"
        yield SettingError("trainer.accelerator", trainer.get("accelerator"), allowed)
