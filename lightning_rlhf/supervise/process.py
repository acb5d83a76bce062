"""One attempt: the training as a child process that is watched, given signals, and ended with all its processes."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_rlhf.supervise import files, kernel
from lightning_rlhf.supervise.classify import Ended
from lightning_rlhf.supervise.files import Beat
from lightning_rlhf.supervise.settings import Settings
from lightning_rlhf.supervise.watch import Watch

_POLL_SECONDS = 0.2
_KEPT = 64_000
"""Characters of the training's stderr that are kept."""
_STACK_SECONDS = 10.0
"""Longest time for a hanging process to write its stacks."""
_TOGETHER_SECONDS = 1.0
"""A signal to all processes of a job may end the training before it reaches the supervisor."""


class Relay:
    """Context that passes SIGINT, SIGTERM, SIGUSR1 and SIGHUP on to the training; one that was ignored stays so."""

    def __init__(self) -> None:
        self.received = 0
        """The first signal, 0 if none."""
        self._process: subprocess.Popen[bytes] | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Relay:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                if (former := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    self._former[number] = former
                    signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def to(self, process: subprocess.Popen[bytes] | None) -> None:
        """From now on to this process; one that was received before is passed on now."""
        self._process = process
        if process is not None and self.received:
            process.send_signal(self.received)

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        self.received = self.received or signum
        if self._process is not None:
            self._process.send_signal(signum)

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until a signal."""
        until = time.monotonic() + seconds
        while not self.received and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))


def run(words: Sequence[str], folder: Path, settings: Settings, relay: Relay) -> tuple[Ended, Beat | None]:
    """Train, and wait for the end; afterwards no process of the training is left.

    Args:
        words: for ``lightning-rlhf train``.
        folder: for the files by which training and supervisor talk.
        settings: of the supervisor.
        relay: that passes signals on.

    Returns:
        How it ended, and its last sign of life.
    """
    for old in (*(folder / name for name in (files.BEAT, files.END, files.LAST)), *folder.glob("stacks_*.txt")):
        old.unlink(missing_ok=True)
    spared, kills = set(kernel.descendants(os.getpid())), kernel.oom_kills()
    command = [sys.executable, "-m", "lightning_rlhf.supervise.start", str(os.getpid()), *words]
    environment = os.environ | {files.VARIABLE: str(folder)}
    with kernel.adopting():
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        tee = _Tee(process)
        try:
            relay.to(process)
            hang, beat = _watched(process, folder, Watch(settings))
        finally:
            relay.to(None)
            process.kill()
            process.wait()
            kernel.kill_descendants(spared)
    output = tee.text()
    if process.returncode and not relay.received:
        relay.wait(_TOGETHER_SECONDS)
    record = files.read(folder / files.END)
    return Ended(process.returncode, relay.received, hang, kernel.oom_kills() - kills, record, output), beat


def _watched(process: subprocess.Popen[bytes], folder: Path, watch: Watch) -> tuple[str, Beat | None]:
    """Wait for the end of the process, or until it hangs; says why it does, if so."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
            watch.look(folder)
            return "", watch.beat
        watch.look(folder)
        if hang := watch.overdue:
            _ask_for_stacks(process.pid, folder)
            return hang, watch.beat


def _ask_for_stacks(pid: int, folder: Path) -> None:
    """Let every process of the training write the stacks of its threads, and wait for that."""
    there = {pid, *kernel.descendants(pid)}
    asked = [each for each in there if (folder / files.STACKS.format(pid=each)).exists()]
    for each in asked:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGUSR2)
    until, sizes = time.monotonic() + _STACK_SECONDS, [-1] * len(asked)
    while time.monotonic() < until:
        before, sizes = sizes, [(folder / files.STACKS.format(pid=each)).stat().st_size for each in asked]
        if sizes == before and all(sizes):
            return
        time.sleep(0.3)


class _Tee:
    """Passes a process's stderr on to this one's, and keeps its end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self._pipe, self._text = process.stderr, ""
        self._thread = threading.Thread(target=self._read, name="stderr", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while part := os.read(self._pipe.fileno(), 1 << 16):
            text = decoder.decode(part)
            self._text = (self._text + text)[-_KEPT:]
            with suppress(OSError):  # the terminal may be gone; the training goes on
                sys.stderr.write(text)
                sys.stderr.flush()
        self._pipe.close()

    def text(self) -> str:
        """The end of what was written; called when no process of the training is left."""
        self._thread.join(10.0)
        return self._text
