"""Planned faults, struck inside a training: a user's callback and a user's reward that read a plan.

The training imports this file by its name, as it would a user's own. A plan is a list; each fault of it strikes once,
in order, whatever the attempt of the supervisor.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.checkpoint import atomic, files
from lightning_rlhf.rewards import RewardBatch
from tests.crash_matrix import damage
from tests.support import even_digits

PLAN, STRUCK, BEGAN = "plan.json", "struck.jsonl", "began.jsonl"
SERVER, DISK, FILLER = "server.pid", "disk", "filler"
"""Files of the project: the faults to come, those that struck, starts of the training; number of the tracking server's
process, the small disk, the file that fills it."""

PLACES = {
    "start": "before the first iteration of an attempt",
    "rollout": "rollout",
    "reward": "reward",
    "update": "update",
    "weights": "end of the update, before the engine has the new weights",
    "writing": "checkpoint half written",
    "renaming": "checkpoint in place, its record not",
    "end": "end of the training",
    "teardown": "after the end of the training",
}
"""Where a fault can strike, in words."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        how: what happens: a name of :data:`ACTIONS`.
        place: where: one of :data:`PLACES`.
        iteration: in this one or the first after it.
        delay: seconds between that place and the fault, while training goes on. Signals only.
        rank: of the process.
    """

    how: str
    place: str = "rollout"
    iteration: int = 0
    delay: float = 0.0
    rank: int = 0

    @property
    def moment(self) -> str:
        """In words."""
        when = f" + {self.delay * 1000:.0f} ms" if self.delay else ""
        where = PLACES[self.place] + when + (f", process {self.rank}" if self.rank else "")
        return where if self.place in ("start", "end", "teardown") else f"iteration {self.iteration}, {where}"


def rows(path: Path) -> list[dict[str, Any]]:
    """The records of one of the files; none without it."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class _Plan:
    """The plan of this process: what comes next, and a note when it struck."""

    iteration = 0
    armed = False
    """Whether a fault that ends the process has begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def strike(self, place: str, iteration: int | None = None) -> str | None:
        """Do what is planned for this place; the name of what the caller has to do itself, if any.

        ``iteration`` is that of a checkpoint being written, which may be another one than that of the training.
        """
        with self._lock:  # a checkpoint is written by another thread
            fault = self._next(place, self.iteration if iteration is None else iteration)
        if fault is None:
            return None
        action = ACTIONS[fault.how]
        if fault.delay:
            timer = threading.Timer(fault.delay, action)
            timer.daemon = True
            timer.start()
            return None
        action()
        return fault.how

    def _next(self, place: str, iteration: int) -> Fault | None:
        """The next fault, noted, if it is one of this place, iteration and process."""
        faults, done = json.loads(Path(PLAN).read_text()), len(rows(Path(STRUCK)))
        if self.armed or done >= len(faults):
            return None
        fault = Fault(**faults[done])
        if fault.place != place or iteration < fault.iteration or fault.rank != int(os.environ.get("RANK", "0")):
            return None
        self.armed = fault.how not in GOES_ON
        note(STRUCK, asdict(fault) | {"at": iteration})
        return fault


plan = _Plan()


def note(name: str, content: dict[str, Any]) -> None:
    """Add a record with the time and the number of the attempt."""
    told = Path(os.environ.get("LIGHTNING_RLHF_SUPERVISED", "."), "attempt.json")
    attempt = json.loads(told.read_text())["attempt"] if told.exists() else 0
    with Path(name).open("a") as file:
        file.write(json.dumps(content | {"attempt": attempt, "time": time.time()}) + "\n")


class Planned(RLHFCallback):
    """Strikes at the events of a training."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            plan.armed = False
            _watch_checkpoints()
            plan.strike("start")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        plan.iteration = module.control.iteration
        if trainer.is_global_zero:
            note(BEGAN, {"from": plan.iteration})

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        plan.iteration = module.control.iteration
        plan.strike("rollout")

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Any) -> None:
        found = plan.strike("update")
        if found == "NaN in the loss":
            original = module.micro_batch_loss
            module.micro_batch_loss = lambda micro, metrics: original(micro, metrics) * float("nan")
        elif found == "NaN in the weights":
            with torch.no_grad():
                next(iter(module.actor.parameters())).fill_(float("nan"))

    def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
        vars(module).pop("micro_batch_loss", None)

    def on_update_end(self, trainer: Any, module: Any, stats: Any) -> None:
        plan.strike("weights")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        plan.strike("end")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            plan.strike("teardown")


class Reward:
    """The share of even digits, which an untrained model finds. Strikes, and always fails at prompts with ``wrong``."""

    def __init__(self, wrong: str | None = None) -> None:
        self.wrong = wrong

    def __call__(self, batch: RewardBatch) -> list[float]:
        plan.strike("reward")
        if self.wrong is not None and any(prompt.startswith(self.wrong) for prompt in batch.prompts):
            raise KeyError(f"the answer to {self.wrong} is missing")
        return even_digits(batch)


def _watch_checkpoints() -> None:
    """Strike in the middle of a file, and between its rename and its record."""
    if hasattr(torch.save, "watched"):
        return
    save, put = torch.save, files._put_in_place

    def saving(content: Any, file: Any, *args: Any, **options: Any) -> None:
        iteration = re.search(r"iteration_(\d+)\.ckpt", str(getattr(file, "name", "")))
        if iteration is None:
            save(content, file, *args, **options)
            return
        save(content, file, *args, **options)
        file.flush()
        whole = file.tell()
        file.truncate(whole // 3)  # as far as a killed process has got
        plan.strike("writing", int(iteration[1]))
        file.seek(0)
        file.truncate(0)
        save(content, file, *args, **options)

    def putting(path: Path) -> None:
        put(path)
        plan.strike("renaming", files.iteration_of(path))

    saving.watched = True  # type: ignore[attr-defined]
    atomic.torch.save = saving  # type: ignore[assignment]
    files._put_in_place = putting


# --- what happens ----------------------------------------------------------------------------------------------------


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _damaged(how: str) -> Callable[[], None]:
    """The newest checkpoint is damaged, then the process is killed: the supervisor finds it so."""

    def act() -> None:
        damage.newest(damage.folder(), plan.iteration - 1, how)
        os.kill(os.getpid(), signal.SIGKILL)

    return act


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, planned")


def _raise_once() -> None:
    raise ConnectionRefusedError("the judge's server is being restarted")


def _full() -> None:
    """The small disk is filled to its last byte; without one, files of this process may have no byte."""
    disk = Path(DISK)
    if not disk.is_mount():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return
    with (disk / FILLER).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def _room() -> None:
    Path(DISK, FILLER).unlink(missing_ok=True)


def _read_only() -> None:
    if os.geteuid() == 0:  # permissions do not stop root
        subprocess.run(["chattr", "+i", str(damage.folder())], check=True)
    else:
        damage.folder().chmod(0o555)


def _writable() -> None:
    if os.geteuid() == 0:
        subprocess.run(["chattr", "-i", str(damage.folder())], check=True)
    else:
        damage.folder().chmod(0o755)


def _kill_server() -> None:
    os.killpg(int(Path(SERVER).read_text()), signal.SIGKILL)


ACTIONS: dict[str, Callable[[], None]] = {
    "kill -9": _signal(signal.SIGKILL),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGUSR1": _signal(signal.SIGUSR1),
    "out of memory": _out_of_memory,
    "NaN in the loss": lambda: None,
    "NaN in the weights": lambda: None,
    "hang": lambda: time.sleep(100_000),
    "reward fails once": _raise_once,
    "full disk": _full,
    "room again": _room,
    "read-only folder": _read_only,
    "writable again": _writable,
    "tracking server killed": _kill_server,
    **{f"newest checkpoint {how}": _damaged(how) for how in damage.WAYS},
}
"""Everything that can happen."""

GOES_ON = ("NaN in the loss", "room again", "writable again", "tracking server killed")
"""After which the process goes on."""

AFTERWARDS = ("room again", "writable again")
"""No faults, but their ends: they have no row in the table."""

FOUND = {
    "kill -9": "killed",
    "SIGTERM": "preempted",
    "SIGUSR1": "preempted",
    "out of memory": "out_of_memory",
    "NaN in the weights": "divergence",
    "hang": "hang",
    "reward fails once": "communication",
    "full disk": "disk",
    "read-only folder": "disk",
    **{f"newest checkpoint {how}": "killed" for how in damage.WAYS},
}
"""The class that a supervisor should find; none for a fault that ends nothing."""
