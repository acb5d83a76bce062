"""Real vLLM servers as processes of their own, started by ``lightning-rlhf serve``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from lightning_rlhf.callbacks import RLHFCallback

START_SECONDS = 600
"""The longest a start may take on a busy machine; common are 30."""


class RealServer:
    """One server for the run that the overrides describe."""

    def __init__(
        self, overrides: list[str], log: Path, port: int | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.overrides, self.log, self.environment = overrides, log, environment or {}
        self.start()

    def start(self) -> None:
        """Begin to start; see :meth:`wait`."""
        words = ["serve", f"port={self.port}", "enforce_eager=true", *self.overrides]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lightning_rlhf.cli", *words],
                env=os.environ | settings | self.environment,
                cwd=self.log.parent,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until the server answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"no server after {START_SECONDS} s: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """SIGKILL to the server and all its workers."""
        kill_group(self.process.pid)
        self.process.wait()


class KillAtRollout(RLHFCallback):
    """Kills a server when the rollout of an iteration begins."""

    def __init__(self, pid: int, iteration: int) -> None:
        self.pid, self.iteration = pid, iteration

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        if module.control.iteration == self.iteration:
            kill_group(self.pid)


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
