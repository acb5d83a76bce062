"""A fake ``torch.npu`` and a fake ``torch_npu``: only names that the real package has, only calls that it would take.

Names and signatures come from ``npu_signatures.json``, read out of the real package (``extract_npu_signatures.py``).
They are implemented in plain PyTorch.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SIGNATURES: dict[str, Any] = json.loads((Path(__file__).parent / "npu_signatures.json").read_text(encoding="utf-8"))


def of_function(arguments: str) -> inspect.Signature:
    """From the text of a Python function's arguments."""
    return inspect.signature(eval(f"lambda {arguments}: None"))


def of_operator(schema: str) -> inspect.Signature:
    """From an operator's schema, parsed by PyTorch."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return inspect.Signature(
        [
            inspect.Parameter(
                a.name,
                kinds[a.kwarg_only],
                default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
            )
            for a in torch._C.parse_schema(schema).arguments
        ]
    )


FUNCTIONS = {name: of_function(text) for name, text in SIGNATURES["functions"].items()}
OPERATORS = {name: of_operator(schema) for name, schema in SIGNATURES["operators"].items()}
SCALER = {name: of_function(text) for name, text in SIGNATURES["grad_scaler"]["methods"].items()}


class Checked:
    """An object whose functions take what their signatures take; every call is counted."""

    def __init__(self, signatures: dict[str, inspect.Signature], functions: dict[str, Callable[..., Any]]) -> None:
        self._signatures, self._functions = signatures, functions
        self.calls: Counter[str] = Counter()
        self.current: list[int] = [0]
        self.seeds: list[int] = []
        self.amp: Any = None
        self.__spec__: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._signatures:
            raise AttributeError(f"the real module has no {name!r} among the signatures that were read")
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        bound = self._signatures[name].bind(*args, **kwargs)
        bound.apply_defaults()
        self.calls[name] += 1
        return self._functions[name](**bound.arguments)


# --- torch.npu -------------------------------------------------------------------------------------------------------


class GradScaler(torch.amp.GradScaler):
    """What torch-npu's scaler does differently: a fused optimiser is handed itself, which PyTorch's does not take.

    Every call has to fit the real scaler's signatures, and is counted.
    """

    device = "npu"
    """Where it scales; a test that computes on the CPU says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        SCALER["__init__"].bind(*args, **kwargs)
        super().__init__(self.device, *args, **kwargs)
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in SCALER or name == "__init__":
            return found

        def checked(*args: Any, **kwargs: Any) -> Any:
            SCALER[name].bind(*args, **kwargs)
            self.calls[name] += 1
            return found(*args, **kwargs)

        return checked

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return optimizer.step(*args, **dict(kwargs, grad_scaler=self))
        return super().step(optimizer, *args, **kwargs)


def fake_torch_npu_module(devices: int = 2) -> Checked:
    """A fake ``torch.npu`` with some devices; ``current`` and ``seeds`` record the calls."""
    states = {index: torch.Generator().manual_seed(index).get_state() for index in range(devices)}
    memory = {"allocated_bytes.all.current": 1 << 20, "allocated_bytes.all.peak": 1 << 30}

    def index_of(device: Any) -> int:
        device = torch.device(device) if isinstance(device, str) else device
        number = getattr(device, "index", device)
        return fake.current[-1] if number is None else number

    functions: dict[str, Callable[..., Any]] = {
        "device_count": lambda: devices,
        "is_available": lambda: devices > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: fake.current[-1],
        "set_device": lambda device: fake.current.append(index_of(device)),
        "manual_seed_all": lambda seed: fake.seeds.append(seed),
        "empty_cache": lambda: None,
        "memory_stats": lambda device: dict(memory),
        "max_memory_allocated": lambda device: memory["allocated_bytes.all.peak"],
        "reset_peak_memory_stats": lambda device: memory.update({"allocated_bytes.all.peak": 0}),
        "mem_get_info": lambda device: (3 << 30, 4 << 30),
        "get_rng_state": lambda device: states[index_of(device)].clone(),
        "set_rng_state": lambda new_state, device: states.update({index_of(device): new_state.clone()}),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
    }
    fake = Checked(FUNCTIONS, functions)
    fake.amp = SimpleNamespace(GradScaler=GradScaler)
    return fake


# --- torch_npu -------------------------------------------------------------------------------------------------------


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    assert input.dtype == gamma.dtype, "the operator wants one dtype"
    scale = torch.rsqrt(input.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (input.float() * scale).to(input.dtype) * gamma, scale


def swiglu(input: Tensor, dim: int) -> Tensor:
    gate, up = input.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def fusion_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Any, ...]:
    """``softmax(scale * q k^T, hidden where the mask is true) v`` in the layout BNSD, heads shared in groups."""
    assert options["input_layout"] == "BNSD" and options["head_num"] == query.shape[1]
    assert options["inner_precise"] == 2, "rows without a key come out wrong otherwise"
    assert options["atten_mask"].dtype == torch.bool and options["keep_prob"] == 1.0
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    hidden = options["atten_mask"]
    scores = options["scale"] * (query @ key.transpose(-1, -2)).float()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    empty = torch.zeros(0)
    return (weights.to(value.dtype) @ value, empty, empty, empty, 0, 0, 0)


def fake_torch_npu() -> Checked:
    """A fake ``torch_npu`` package, to be put into ``sys.modules``: the fused operators."""
    functions = {"npu_rms_norm": rms_norm, "npu_swiglu": swiglu, "npu_fusion_attention": fusion_attention}
    fake = Checked(OPERATORS, functions)
    fake.__spec__ = ModuleSpec("torch_npu", None)
    return fake
