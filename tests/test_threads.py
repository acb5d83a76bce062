"""OpenMP threads sleep while they wait, checked by the settings that OpenMP prints at its start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlhf import threads


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")])
def test_openmp_of_a_run_waits_as_the_user_said_or_passively(tmp_path: Path, given: dict[str, str], policy: str):
    environment = {name: value for name, value in os.environ.items() if name not in threads.PASSIVE}
    environment |= {"OMP_DISPLAY_ENV": "true", **given}
    command = [sys.executable, "-m", "lightning_rlhf.cli", "train", "seed=-1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, "refused after PyTorch is imported"
    if "OPENMP DISPLAY ENVIRONMENT" not in done.stderr:
        pytest.skip("this PyTorch has another OpenMP, which does not show its settings")
    said = re.search(r"OMP_WAIT_POLICY = '(\w+)'", done.stderr)
    assert said is not None
    assert said[1] == policy


def test_workers_of_ray_get_the_wait_policy(monkeypatch):
    pytest.importorskip("ray")
    from lightning_rlhf.distributed import ray_launch

    for name in threads.PASSIVE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    threads.wait_passively()
    assert threads.waiting() == {"OMP_WAIT_POLICY": "active"}
    assert ray_launch.of_processes()["env_vars"]["OMP_WAIT_POLICY"] == "active"
