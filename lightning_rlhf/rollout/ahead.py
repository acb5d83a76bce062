"""Asynchronous rollouts: the next batch is generated in a thread while this one is trained on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch

from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import PromptBatch, Rollout


@dataclass(frozen=True)
class Ahead:
    """How far rollouts may run ahead of training.

    Attributes:
        lag: 0 generates with the weights that the batch is trained from (on-policy); 1 generates the next batch while
            this one is trained on, with the weights before this iteration's update.
        max_staleness: iterations by which a sample's weights may lag behind; an older rollout is dropped and generated
            again. ``None`` sets no limit.
    """

    lag: int = 0
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.lag not in (0, 1) or isinstance(self.lag, bool):
            raise SettingError("rollout.lag", self.lag, "0 (on-policy) or 1 (one iteration behind)")
        limit = self.max_staleness
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < self.lag):
            raise SettingError("rollout.max_staleness", limit, f"an integer >= rollout.lag = {self.lag}, or null")


class AheadRollouts:
    """Holds the one rollout that is generated ahead of the iteration it belongs to.

    Weights must not change before :meth:`wait` has returned. The state is the finished rollout, so a resumed run trains
    on the same samples as an uninterrupted one.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[Rollout] | None = None
        self._ready: Rollout | None = None

    def begin(self, generate: Callable[[], Rollout], device: torch.device) -> None:
        """Call ``generate`` in another thread, without gradients and with this thread's autocast state."""
        if self._running is not None or self._ready is not None:
            raise RuntimeError("a rollout ahead of training is still there; take it before the next one begins")
        self._pool = self._pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        self._running = self._pool.submit(_run, generate, autocast_in_force(device))

    def wait(self) -> None:
        """Wait until the generation has ended; raises its error."""
        if self._running is not None:
            running, self._running = self._running, None
            self._ready = running.result()

    def take(self, prompts: PromptBatch) -> Rollout | None:
        """The rollout generated for these prompts; ``None`` if there is none, or if it was for other prompts."""
        self.wait()
        rollout, self._ready = self._ready, None
        if rollout is None or rollout.prompt_key != prompts.repeat(len(rollout) // len(prompts)).keys:
            return None
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """The finished rollout as plain containers; empty if there is none."""
        self.wait()
        return {} if self._ready is None else {f.name: getattr(self._ready, f.name) for f in fields(Rollout)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        moved: dict[str, Any] = {}
        moved |= {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        self._ready = Rollout(**moved) if moved else None

    def close(self) -> None:
        """End the thread once it is idle; a rollout in progress is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._running = self._ready = None


def _run(generate: Callable[[], Rollout], autocast: AbstractContextManager) -> Rollout:
    with torch.no_grad(), autocast:
        return generate()


def autocast_in_force(device: torch.device) -> AbstractContextManager:
    """A context that applies the calling thread's autocast state to the thread that enters it."""
    kind = device.type
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
