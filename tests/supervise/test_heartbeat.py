"""The sign of life of a supervised training, in a real small run."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.supervise import files, heartbeat
from lightning_rlhf.supervise.files import Beat
from lightning_rlhf.supervise.heartbeat import Heartbeat
from tests.support import DecisionLog, fit, same, tiny_module, weights


class Seen(Heartbeat):
    """Keeps every stage of every iteration."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen: list[tuple[int, str]] = []

    def beat(self, trainer: Any, module: Any, stage: str, **options: Any) -> None:
        super().beat(trainer, module, stage, **options)
        found = Beat.read(self._folder)
        place = (found.iteration, found.stage) if found else (0, "")
        self.seen += [] if self.seen[-1:] == [place] else [place]


class Stops(RLHFCallback):
    def on_update_end(self, trainer: Any, module: Any, stats: Any) -> None:
        if stats.iteration == 2:
            module.control.stop_training("enough")


def test_every_stage_is_a_beat_and_the_training_is_the_same(tmp_path: Path) -> None:
    plain, watched, callback = tiny_module(), tiny_module(), Seen(tmp_path)
    fit(plain, [Stops()])
    fit(watched, [Stops(), callback])
    assert same(weights(plain), weights(watched))
    stages = ["rollout", "rewards and scoring", "advantages", "update", "new weights for the engine"]
    assert [stage for iteration, stage in callback.seen if iteration == 2][: len(stages)] == stages
    beat, last = Beat.read(tmp_path), files.read(tmp_path / files.LAST)
    assert beat is not None and (beat.iteration, beat.stage, beat.training, beat.pid) == (2, "end", True, os.getpid())
    assert last is not None and "reward/mean" in last["metrics"]
    assert sorted(os.listdir(tmp_path)) == ["beat.json", "last.json", f"stacks_{os.getpid()}.txt"]


def test_the_loggers_are_told_of_earlier_attempts(tmp_path: Path) -> None:
    told = {"tags": {"lightning_rlhf.attempt_01": "hang"}, "reports": [], "reason": "attempt 2: trying again"}
    (tmp_path / files.ATTEMPT).write_text(json.dumps(told), encoding="utf-8")
    tags: dict[str, str] = {}

    class Log(DecisionLog):
        def log_tags(self, values: dict[str, str]) -> None:
            tags.update(values)

    log = Log()
    fit(tiny_module(iterations=1), [Heartbeat(tmp_path)], logger=log)
    assert tags == told["tags"] and log.of("retry") == [(0, "attempt 2: trying again")]


def test_a_file_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (files.BEAT, files.LAST):
        (tmp_path / name).mkdir()
    before = (tmp_path / files.BEAT).stat().st_mtime_ns
    with caplog.at_level(logging.WARNING):
        module = tiny_module(iterations=2)
        fit(module, [Heartbeat(tmp_path)])
    assert module.control.iteration == 2 and caplog.text.count("nothing can be written for the supervisor") == 1
    assert (tmp_path / files.BEAT).stat().st_mtime_ns > before, "its time is the sign of life"


def test_a_device_that_has_failed_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No pretended device: reading the metrics fails as it would after the device's own error."""

    class Fails(RLHFCallback):
        def on_update_end(self, trainer: Any, module: Any, stats: Any) -> None:
            monkeypatch.setattr(heartbeat, "_measured", broken)
            raise KeyError("the first error")

    def broken(*_: Any) -> dict[str, float]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(KeyError, match="the first error") as caught:
        fit(tiny_module(iterations=2), [Heartbeat(tmp_path), Fails()])
    assert caught.value.__context__ is None and "cannot be read for the supervisor: CUDA error" in caplog.text
    last = files.read(tmp_path / files.LAST)
    assert last is not None and last["metrics"] == {}


def test_without_a_supervisor_there_is_no_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert heartbeat.heartbeat() == []
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    assert [type(callback) for callback in heartbeat.heartbeat()] == [Heartbeat]


def test_a_training_without_its_supervisor_ends_at_once(tmp_path: Path) -> None:
    """Its parent is another one than it was told; one that dies later takes it with it."""
    start = [sys.executable, "-m", "lightning_rlhf.supervise.start"]
    done = subprocess.run([*start, "1", "iterations=1"], timeout=300, cwd=tmp_path, check=False)
    assert done.returncode == 128 + signal.SIGKILL and not list(tmp_path.iterdir())
    inner = "import signal, time; from lightning_rlhf.supervise.kernel import die_with_parent\n"
    inner += "die_with_parent(signal.SIGKILL); print('ready', flush=True); time.sleep(1000)"
    outer = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {inner!r}], stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline(); print(child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 300
    while time.monotonic() < until:
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.1)
    raise AssertionError("it is still there")
