"""Every call to torch-npu in the source is one that the real package takes (its signatures, read without CANN)."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_rlhf.accelerators.npu import NPUMixedPrecision
from tests.accelerators.fake_npu import FUNCTIONS, OPERATORS, SIGNATURES, GradScaler, fake_torch_npu_module
from tests.support import Recorder, fit, tiny_module

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_rlhf"
OWNERS = {"_npu": FUNCTIONS, "module_of": FUNCTIONS, "_operators": OPERATORS}
"""Functions that return torch-npu's modules, or another device's with the same names, and what these offer."""


def calls() -> list[tuple[str, str, Any]]:
    """File, function that returned the module, and call, of every ``owner(...).name(...)`` in the package."""
    found: list[tuple[str, str, Any]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                value = node.func.value
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in OWNERS:
                    found.append((path.name, value.func.id, node))
    return found


def bind(signature: inspect.Signature, call: ast.Call) -> None:
    signature.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})


@pytest.mark.parametrize(("file", "owner", "call"), calls(), ids=lambda part: getattr(part, "id", None))
def test_call_fits_the_real_signature(file: str, owner: str, call: Any) -> None:
    signatures = OWNERS[owner]
    assert call.func.attr in signatures, f"{file}: torch-npu has no {call.func.attr} among the signatures read"
    bind(signatures[call.func.attr], call)


def test_the_calls_are_found() -> None:
    names = {call.func.attr for _, _, call in calls()}
    assert names >= set(OPERATORS) | {"set_device", "empty_cache", "memory_stats", "get_rng_state", "mem_get_info"}


def test_the_check_sees_a_wrong_call() -> None:
    call: Any = ast.parse("torch_npu.npu_rms_norm(x, weight, eps=1e-6)", mode="eval").body
    with pytest.raises(TypeError, match="eps"):
        bind(OPERATORS["npu_rms_norm"], call)
    with pytest.raises(AttributeError, match="clear_cache"):
        fake_torch_npu_module().clear_cache()
    with pytest.raises(TypeError, match="device"):
        fake_torch_npu_module().set_device(index=0)


def test_nothing_else_reaches_for_torch_npu() -> None:
    """So that the calls above are all: no other way to torch-npu's functions in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("npu", "get_device_module"):
                owner = getattr(node.value, "id", None)
                assert owner != "torch" or path.name == "device.py", f"{path}: torch.{node.attr}"
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not any(name.split(".")[0] == "torch_npu" for name in names), path


class OnTheCPU(NPUMixedPrecision):
    """The precision of NPUs with a scaler that is handed in, computing on the CPU."""

    def __init__(self, scaler: GradScaler) -> None:
        MixedPrecision.__init__(self, "16-mixed", "cpu", scaler=scaler)


@pytest.mark.parametrize("overflow", [False, True])
def test_fake_scaler_takes_what_the_update_loop_and_lightning_ask_of_it(
    monkeypatch: pytest.MonkeyPatch, overflow: bool
) -> None:
    """A run in float16 on the CPU: every call of the scaler fits the real one, that after an overflow included."""
    monkeypatch.setattr(GradScaler, "device", "cpu")
    scaler, recorder = GradScaler(init_scale=2.0**60 if overflow else 2.0**4), Recorder()
    module = tiny_module(iterations=1, update={"epochs": 1, "minibatch_size": 8})
    fit(module, [recorder], plugins=[OnTheCPU(scaler)])
    assert [stats.stepped for stats in recorder.of("on_minibatch_end")] == [not overflow] * 2
    assert scaler.calls["scale"] == 2 and scaler.calls["step"] == (0 if overflow else 2)
    assert scaler.calls["update"] == 2 and scaler.get_scale() == (2.0**58 if overflow else 2.0**4)
    with pytest.raises(TypeError, match="grow"):
        scaler.update(grow=2.0)  # what a call that does not fit would do
    assert SIGNATURES["grad_scaler"]["bases"] == ["BaseGradScaler"], "get_scale and get_backoff_factor are inherited"
    assert {"get_scale", "get_backoff_factor"} <= set(dir(torch.amp.GradScaler))


def test_the_process_group_backend_is_one_that_torch_npu_registers() -> None:
    from lightning_rlhf.accelerators.npu import NPUDDPStrategy, NPUFSDP2Strategy

    for strategy in (NPUDDPStrategy(), NPUFSDP2Strategy()):
        assert SIGNATURES["process_group_backends"][strategy.process_group_backend] == ["npu"]


def test_signatures_are_those_of_the_release_that_the_docs_name() -> None:
    text = (PACKAGE.parent / "docs" / "npu.md").read_text(encoding="utf-8")
    assert f"torch-npu {SIGNATURES['torch-npu']['version']}" in text
