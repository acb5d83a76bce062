"""The device layer, on the CPU and on a fake device module; and nothing else in the package names a kind of device."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_rlhf.accelerators import device
from lightning_rlhf.checkpoint.random_state import _restore_rng, _rng_state
from lightning_rlhf.memory import free_memory, peak_memory_share
from tests.accelerators.fake_npu import Checked, fake_torch_npu_module
from tests.support import tiny_module

ROOT = Path(__file__).resolve().parents[2]
THERE = type("Device", (), {"type": "npu", "index": 1})()
"""Stands for ``torch.device("npu", 1)``, which PyTorch refuses to make where no such backend is registered."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """A fake ``torch.npu`` with two devices in the place of the machine's accelerator."""
    module = fake_torch_npu_module(devices=2)
    monkeypatch.setattr(device, "module_of", lambda _: module)
    monkeypatch.setattr(device, "current", lambda: THERE)
    return module


def test_fake_device_counts_its_memory(fake: Checked) -> None:
    assert device.peak_bytes(THERE) == 1 << 30 and device.total_bytes(THERE) == 4 << 30
    assert peak_memory_share(THERE) == 0.25
    device.reset_peak(THERE)
    assert device.peak_bytes(THERE) == 0
    free_memory()
    assert fake.calls["empty_cache"] == 1


def test_fake_device_keeps_its_generator(fake: Checked) -> None:
    before, host = device.rng_state(THERE), torch.get_rng_state()
    with device.generators_kept():
        device.set_rng_state(THERE, torch.Generator().manual_seed(99).get_state())
        torch.rand(3)
        assert not torch.equal(device.rng_state(THERE), before)
    assert torch.equal(device.rng_state(THERE), before) and torch.equal(torch.get_rng_state(), host)


def test_fake_device_state_in_a_checkpoint_is_restored_on_its_own_kind_only(fake: Checked) -> None:
    saved = _rng_state(THERE)
    assert saved["device_type"] == "npu"
    other = torch.Generator().manual_seed(99).get_state()
    device.set_rng_state(THERE, other)
    _restore_rng(saved | {"device_type": "cuda"}, THERE)
    assert torch.equal(device.rng_state(THERE), other)
    _restore_rng(saved, torch.device("cpu"))
    assert torch.equal(device.rng_state(THERE), other)
    _restore_rng(saved, THERE)
    assert torch.equal(device.rng_state(THERE), saved["device"])


def test_a_cpu_counts_no_memory_and_has_no_generator_of_its_own() -> None:
    cpu = torch.device("cpu")
    assert device.peak_bytes(cpu) is None and device.total_bytes(cpu) is None and device.rng_state(cpu) is None
    device.reset_peak(cpu)
    assert peak_memory_share(cpu) is None
    assert _rng_state(cpu)["device"] is None


def test_float64_is_gathered_where_it_cannot_be_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pretend ranks: the collectives are fakes that play the other rank's part."""
    from lightning_rlhf.functional import stats

    class FakeGroup:
        ReduceOp = torch.distributed.ReduceOp

        def is_available(self) -> bool:
            return True

        is_initialized = is_available

        def get_world_size(self) -> int:
            return 2

        def all_gather(self, parts: list[torch.Tensor], mine: torch.Tensor) -> None:
            parts[0].copy_(mine)
            parts[1].copy_(mine + 1)

        def all_reduce(self, tensor: torch.Tensor, op: object) -> None:
            assert tensor.dtype != torch.float64, "hccl refuses float64"
            tensor.mul_(2)

    monkeypatch.setattr(stats, "dist", FakeGroup())
    monkeypatch.setattr(stats, "reduces_float64", lambda _: False)
    mine = torch.tensor([1.0, 1e-12], dtype=torch.float64)
    assert torch.equal(stats.all_reduce_sum(mine), mine + (mine + 1))
    assert torch.equal(stats.all_reduce_max(mine), mine + 1)
    assert torch.equal(stats.all_reduce_sum(torch.ones(2)), 2 * torch.ones(2))


# --- nothing names a kind of device ----------------------------------------------------------------------------------


def sources() -> Iterator[Path]:
    for folder in ("lightning_rlhf", "callbacks"):
        yield from sorted(path for path in (ROOT / folder).rglob("*.py"))


def named(text: str) -> list[int]:
    """Lines of code (comments and docstrings left out) with the word cuda as a name, or at the start of a string."""
    found, statement_begins = [], True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string == "cuda":
            found.append(token.start[0])
        if token.type == tokenize.STRING and not statement_begins and token.string.strip("rbfu\"'").startswith("cuda"):
            found.append(token.start[0])
        blank = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT)
        statement_begins = token.type in blank or (statement_begins and token.type == tokenize.ENCODING)
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_but_the_device_layer_names_a_kind_of_gpu(path: Path) -> None:
    if path.name != "device.py":
        assert named(path.read_text(encoding="utf-8")) == []


def test_the_search_sees_each_way_to_name_it() -> None:
    assert named("x.cuda()\ntorch.cuda.is_available()\nx.to('cuda')\ny = f'cuda:{i}'\n") == [1, 2, 3, 4]
    assert named('"""cuda"""\n# cuda\nx = "no CUDA graphs"\n') == []


@pytest.mark.slow
def test_an_iteration_on_the_cpu_asks_torch_cuda_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.accelerators.no_cuda_iteration", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "replaced" in done.stdout.splitlines()[-1]


def test_reward_models_go_where_the_strategy_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning sets a module up before it moves it: by then the module itself is still on the CPU."""
    module = tiny_module()
    moved: list[torch.device] = []
    monkeypatch.setattr(module.reward, "to", moved.append)
    there = torch.device("meta")
    monkeypatch.setattr(module, "_trainer", SimpleNamespace(strategy=SimpleNamespace(root_device=there)))
    module.setup("fit")
    assert moved == [there] and module.device.type == "cpu"
