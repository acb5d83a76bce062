"""A whole PPO iteration on a pretend NPU: PyTorch takes ``npu`` for a device, what it computes runs on the CPU.

It shows that nothing is left on another device, that strategy, precision and device fit together, and that the numbers
are those of the CPU. It shows nothing about the kernels, memory or speed of a real NPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerators import pretend_npu

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not pretend_npu.available(),
        reason="this PyTorch lacks torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    ),
]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pretend")
    command = [sys.executable, "-m", "tests.accelerators.pretend_iteration", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_pretend_npu_ends_where_the_cpu_does(result: dict[str, Any]) -> None:
    """The real module with perturbation, correction and the stability callbacks, selected by ``trainer=npu``."""
    run = result["runs"]["plain"]
    assert result["moved"] > 1e-3, "the iteration changed the weights"
    assert run["updates"] >= 2 and run["sigma"] == 2
    assert run["compared"][0] > 40 and run["compared"][1] > 100, "parameters and metrics that were compared"
    assert run["parameters"] <= 1e-6
    assert run["metrics"] <= 1e-6, run["worst metric"]


def test_pretend_npu_holds_every_parameter_in_training(result: dict[str, Any]) -> None:
    for run in result["runs"].values():
        assert run["parameters on"] == ["npu:0"] and run["root device"] == "npu:0"
        assert run["strategy"] == "SingleNPUStrategy"


def test_pretend_npu_with_fake_fused_operators_ends_where_the_cpu_does(result: dict[str, Any]) -> None:
    run = result["runs"]["fused"]
    assert all(result["operators"][name] > 0 for name in ("npu_rms_norm", "npu_swiglu", "npu_fusion_attention"))
    assert run["parameters"] <= 1e-6 and run["metrics"] <= 1e-6, run["worst metric"]


def test_pretend_npu_with_float16_scales_and_unscales(result: dict[str, Any]) -> None:
    """Autocast reaches the log-probabilities, so the numbers are float16's; the loss scale has cancelled."""
    run = result["runs"]["16-mixed"]
    assert run["precision"] == "NPUMixedPrecision"
    assert 1e-7 < run["parameters"] <= 1e-4 and run["metrics"] <= 1e-2


def test_pretend_npu_gets_the_expected_calls(result: dict[str, Any]) -> None:
    for name in ("set_device", "manual_seed_all", "empty_cache", "max_memory_allocated", "reset_peak_memory_stats"):
        assert result["calls"][name] > 0, name
