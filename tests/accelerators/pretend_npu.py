"""A pretend device ``npu``: PyTorch takes it for a real one, and each operator runs on a CPU tensor behind the tensor.

It shows what a fake module cannot: a tensor left on the CPU meets one on the device, and the operation fails. It does
not show kernels, dtypes, memory or speed of an NPU. It leaks every tensor, so it needs a process of its own, and it
rests on a private function of PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.accelerators.fake_npu import Checked, fake_torch_npu_module

aten = torch.ops.aten
_BEHIND: dict[int, torch.Tensor] = {}
"""The CPU tensor behind each storage; autograd hands out shallow copies, which only share the storage."""
_LIBRARIES: list[Any] = []
_VIEWS = [
    *("detach", "alias", "expand", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "squeeze.dim"),
    *("select.int", "slice.Tensor", "transpose.int", "t", "permute", "split.Tensor", "unbind.int", "lift_fresh"),
    *("clone", "zero_", "abs", "arange", "arange.start", "arange.start_step"),
]
"""Operators with a kernel for every device at once, which would work on the empty memory of the tensor in front."""


def available() -> bool:
    """Whether this PyTorch has the private function that the pretend device rests on."""
    from torch.utils import backend_registration

    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


class _Pretend(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    behind: torch.Tensor


def _wrap(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensor: Any = torch._C._acc.create_empty_tensor(tuple(value.shape), value.dtype)
    tensor.__class__ = _Pretend
    tensor.behind = _BEHIND[tensor.untyped_storage()._cdata] = value
    return tensor


def _unwrap(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return value.behind if isinstance(value, _Pretend) else _BEHIND[value.untyped_storage()._cdata]
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    (plain, named), schema = tree_map(_unwrap, (args, kwargs)), op._schema
    if op in (aten._copy_from.default, aten._copy_from_and_resize.default):
        plain[1].copy_(plain[0])
        return args[1]
    if op is aten._fused_adamw_.default:
        # Its kernel wants gradients laid out as the weights; PyTorch sees to that by strides, which are not mirrored.
        plain = (plain[0], [gradient.contiguous() for gradient in plain[1]], *plain[2:])
    if op in (aten.view.default, aten._unsafe_view.default):
        result = plain[0].reshape(plain[1])
    else:
        pairs = zip(plain, schema.arguments, strict=False)
        numbers = any(isinstance(x, (int, float)) and str(s.type) == "Tensor" for x, s in pairs)
        result = (op.overloadpacket if numbers else op)(*plain, **named)
    given = [*zip(args, schema.arguments, strict=False)]
    given += [(kwargs[s.name], s) for s in schema.arguments if s.name in kwargs]
    written = [x for x, s in given if s.alias_info and s.alias_info.is_write]
    if written and any(r.alias_info and r.alias_info.is_write for r in schema.returns):
        return written[0] if len(schema.returns) == 1 else tuple(written)
    to_cpu = op is aten._to_copy.default and str(kwargs.get("device")) == "cpu"
    return result if to_cpu else tree_map(_wrap, result)


class _Generator(torch.Generator):
    """For the pretend device one of the CPU: a backend in Python cannot have generators of its own."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu" if torch.device(device).type == "npu" else device)


def install(devices: int = 1) -> Checked:
    """Make ``torch.device("npu")`` a device; returns the fake ``torch.npu``. Once per process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    fake = fake_torch_npu_module(devices)
    _setup_privateuseone_for_python_backend("npu", backend_module=fake)
    everything, own, autocast = (torch.library.Library(name, "IMPL") for name in ("_", "aten", "_"))
    everything.fallback(_run, "PrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _VIEWS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        own.impl(name, lambda *args, _op=op, **kwargs: _run(_op, *args, **kwargs), "PrivateUse1")
    torch.Generator = _Generator  # type: ignore[misc]
    _LIBRARIES.extend((everything, own, autocast))
    return fake
