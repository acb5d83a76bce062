"""Whether the tensors of a written checkpoint are finite and of the shapes that they had in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CHECKED = ("checksums", "shapes", "finite weights", "finite optimiser state")
"""What every verified checkpoint has passed, for its record."""


def tensors_of(content: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a checkpoint's weights and optimiser state."""
    for part in ("state_dict", "optimizer_states"):
        yield from _tensors(content.get(part), part)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is NaN or infinite; of sharded tensors this rank's slices. One transfer from the device.

    The norm of a tensor is finite only if all of its elements are, and is by far the fastest of all reductions. Where
    one is not, which finite elements from about 1e19 on can cause, too, the least and greatest elements decide.
    """
    plain = [local for tensor in tensors if (local := _floats(tensor)) is not None]
    return _finite(map(torch.linalg.vector_norm, plain)) or _finite(torch.stack(each.aminmax()) for each in plain)


def _finite(numbers: Iterable[Tensor]) -> bool:
    found = [each.isfinite().all() for each in numbers]
    return not found or bool(torch.stack([each.to(found[0].device) for each in found]).all())


def _floats(tensor: Tensor) -> Tensor | None:
    """What can be NaN or infinite in a tensor; ``None`` for whole numbers and without elements."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    if not local.is_floating_point() or local.numel() == 0:
        return None
    return local.float() if local.element_size() == 1 else local  # 8-bit floats have no reductions


def first_not_finite(content: Mapping[str, Any], buffers: Collection[str] = ()) -> str | None:
    """The first of the checked tensors that is not finite, in words.

    Args:
        content: of a checkpoint.
        buffers: names in its ``state_dict`` that are no weights: a mask may hold infinity.
    """
    skipped = {f"state_dict.{name}" for name in buffers}
    checked = {name: tensor for name, tensor in tensors_of(content) if name not in skipped}
    if all_finite(checked.values()):  # one transfer from the device; one for each only to find the broken one
        return None
    broken = next(name for name, tensor in checked.items() if not all_finite([tensor]))
    return f"{broken} holds NaN or infinity"


def difference(written: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """What differs in names, shapes and types between the tensors of a file and those in memory, in words."""
    found, wanted = dict(tensors_of(written)), dict(tensors_of(expected))
    if found.keys() != wanted.keys():
        return f"it has not the tensors of the run, {min(found.keys() ^ wanted.keys())} first"
    for name, tensor in wanted.items():
        there = found[name]
        if (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
            return f"{name} is {_form(there)} in it and {_form(tensor)} in memory"
    return None


def _form(tensor: Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape)) or 'a number'} ({str(tensor.dtype).removeprefix('torch.')})"


def problem_in(path: Path, expected: Mapping[str, Any], buffers: Collection[str] = ()) -> str | None:
    """Read a written file and check its tensors.

    Args:
        path: a file of ``torch.save``.
        expected: what was handed to it.
        buffers: as in :func:`first_not_finite`.

    Returns:
        What is wrong, in words; ``None`` if it is good.
    """
    written = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return difference(written, expected) or first_not_finite(written, buffers)
