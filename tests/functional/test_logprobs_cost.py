"""What :func:`token_logprobs` costs: no product and no memory beyond what the gradients asked for need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rlhf.functional import logprobs as module
from lightning_rlhf.functional.logprobs import token_logprobs


def problem(tokens: int, vocab: int, width: int) -> dict[str, Any]:
    """Random inputs that require gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    labels = torch.randint(vocab, (tokens,), generator=generator)
    return {"hidden": normal(tokens, width), "weight": normal(vocab, width), "bias": normal(vocab), "labels": labels}


def score(*args: Any, **kwargs: Any) -> Any:
    """:func:`token_logprobs`; each test knows whether there is an entropy."""
    return token_logprobs(*args, **kwargs)


def test_entropy_without_gradient_has_no_edge_in_the_graph() -> None:
    inputs = problem(tokens=13, vocab=23, width=5)
    assert score(**inputs, entropy="none")[1] is None
    logprobs, entropy = score(**inputs, entropy="detached")
    assert logprobs.requires_grad and not entropy.requires_grad and entropy.grad_fn is None
    assert score(**inputs, entropy="gradient")[1].requires_grad
    plain = torch.autograd.grad(score(**inputs)[0].sum(), inputs["weight"])
    torch.testing.assert_close(torch.autograd.grad((logprobs + 5 * entropy).sum(), inputs["weight"]), plain)


class OperationRecorder(TorchDispatchMode):
    """All operations, and the shapes and dtypes of the matrix products among them."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: set[torch.dtype] = set()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append(func)
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.shapes.append(tuple(result.shape))
            self.dtypes |= {tensor.dtype for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        return result


@pytest.mark.parametrize(
    ("frozen", "products"),
    [
        ((), [(13, 23), (13, 23), (13, 5), (23, 5)]),
        (("weight",), [(13, 23), (13, 23), (13, 5)]),
        (("hidden",), [(13, 23), (13, 23), (23, 5)]),
        (("hidden", "weight"), [(13, 23), (13, 23)]),
        (("hidden", "weight", "bias"), [(13, 23)]),
    ],
)
def test_only_the_gradients_that_are_needed_are_computed(
    frozen: tuple[str, ...], products: list[tuple[int, ...]]
) -> None:
    inputs = {
        name: tensor.detach() if name in frozen else tensor
        for name, tensor in problem(tokens=13, vocab=23, width=5).items()
    }
    with OperationRecorder() as recorder:
        logprobs, _ = score(**inputs)
        if logprobs.requires_grad:
            logprobs.sum().backward()
    assert sorted(recorder.shapes) == sorted(products)
    assert all(inputs[name].grad is None for name in frozen)
    assert all(inputs[name].grad is not None for name in {"hidden", "weight", "bias"} - set(frozen))


def test_a_detached_entropy_costs_nothing_in_the_backward_pass() -> None:
    operations = []
    for entropy in ("none", "detached"):
        logprobs, _ = score(**problem(tokens=13, vocab=23, width=5), entropy=entropy)
        with OperationRecorder() as recorder:
            logprobs.sum().backward()
        operations.append(recorder.operations)
    assert operations[0] == operations[1]


def test_tokens_without_gradient_take_no_part_in_the_backward_pass() -> None:
    inputs = problem(tokens=13, vocab=23, width=5)
    logprobs, entropy = score(**inputs, entropy="gradient")
    with OperationRecorder() as recorder:
        (logprobs[3:5].sum() + entropy[4:6].sum()).backward()
    assert sorted(recorder.shapes) == [(3, 5), (3, 23), (23, 5)]


@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_around_the_forward_pass_sets_the_dtype_of_every_product(
    forward_inside: bool, backward_inside: bool
) -> None:
    inputs = problem(tokens=13, vocab=23, width=5)
    with OperationRecorder() as recorder:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_inside):
            logprobs, _ = score(**inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward_inside):
            logprobs.sum().backward()
    assert len(recorder.shapes) == 4
    assert recorder.dtypes == {torch.bfloat16 if forward_inside else torch.float32}


class StorageRecorder(TorchDispatchMode):
    """The largest memory allocated by any operation, in elements; views of older memory do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in old:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def largest_allocation(entropy: Any, **sizes: int) -> int:
    inputs = problem(tokens=64, vocab=100, width=2)
    with StorageRecorder() as recorder:
        logprobs, entropies = score(**inputs, softcap=3.0, entropy=entropy, **sizes)
        loss = logprobs.sum() if entropy != "gradient" else (logprobs + entropies).sum()
        loss.backward()
    return recorder.largest


@pytest.mark.parametrize("chunk_size", [2, 7, 64])
@pytest.mark.parametrize("entropy", ["none", "detached", "gradient"])
def test_nothing_larger_than_a_chunk_times_the_vocabulary(entropy: Any, chunk_size: int) -> None:
    """Forward and backward; the gradients of hidden (64 x 2) and weight (100 x 2) are smaller than any chunk here."""
    assert largest_allocation(entropy, chunk_size=chunk_size) == chunk_size * 100


def test_large_chunks_are_cut_along_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CPU_TILE", 640)
    assert largest_allocation("gradient", chunk_size=64) == 640


def test_a_frozen_embedding_gets_no_gradient_sized_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CPU_TILE", 80)
    inputs = problem(tokens=8, vocab=100, width=30)
    with StorageRecorder() as recorder:
        logprobs, _ = score(inputs["hidden"], inputs["weight"].detach(), inputs["labels"])
        logprobs.sum().backward()
    assert recorder.largest == 8 * 30
