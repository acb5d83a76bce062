"""The receiving end of a weight transfer: runs inside each vLLM worker and counts what is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_RELOADER = "online_process_loader"
"""Name of the loader that vLLM wraps around a parameter's own during a reload."""


@dataclass
class Receipt:
    """What one worker received.

    Attributes:
        sent: weights that arrived.
        parameters: parameters of the worker's model.
        wrong: for every parameter that was not written exactly once: elements written, and elements it has.
    """

    sent: int = 0
    parameters: int = 0
    wrong: dict[str, tuple[int, int]] = field(default_factory=dict)

    def check(self) -> None:
        """Raises RuntimeError naming the parameters that were not written exactly once."""
        if self.wrong or not self.sent:
            listed = [f"{name} ({done} of {size} elements)" for name, (done, size) in sorted(self.wrong.items())]
            more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
            raise RuntimeError(
                f"the weights sent to vLLM ({self.sent}) did not write every one of its {self.parameters} parameters "
                f"exactly once: {', '.join(listed[:8])}{more}"
            )


def receive(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> Receipt:
    """Load checkpoint weights into a running worker (``LLM.collective_rpc(receive, args=(weights,))``).

    vLLM fuses tensors (q, k and v into one), splits them over workers, pads vocabularies and repacks matrices for its
    kernels; what counts is therefore not which names arrived but how many elements of every parameter were written.

    Args:
        worker: the vLLM worker.
        weights: names and tensors as in a Hugging Face checkpoint.

    Raises:
        Exception: whatever a loader or ``weights`` raises. The model then holds a mixture, which only a complete
            transfer repairs.
    """
    receipt = Receipt()
    model = worker.get_model()
    with torch.no_grad():
        try:
            with _counting(model, receipt):
                worker.model_runner.reload_weights(weights_iterator=weights)
        except BaseException:
            _abandon(worker, model)
            raise
        _refresh_tied(model)
    return receipt


def _abandon(worker: Any, model: nn.Module) -> None:
    """End an aborted reload; otherwise the next one would add to its incomplete layers."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, worker.vllm_config.model_config)


def _refresh_tied(model: nn.Module) -> None:
    """Update layers that use another layer's weight, such as a tied head.

    vLLM processes the layers that received weights. A tied head receives none, but on a CPU computes with a repacked
    copy, which would be that of the weights vLLM started with.
    """
    seen: set[int] = set()
    for layer in model.modules():
        own = [id(parameter) for parameter in layer.parameters(recurse=False)]
        process = getattr(getattr(layer, "quant_method", None), "process_weights_after_loading", None)
        if process is not None and seen.intersection(own):
            process(layer)
        seen.update(own)


@contextmanager
def _counting(model: Any, receipt: Receipt) -> Iterator[None]:
    """Count the elements written into every parameter while ``model.load_weights`` runs inside."""
    load_weights = model.load_weights
    written: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    own = {name for name, _ in model.named_parameters()}  # a tied head counts with its embedding

    def counted(weights: Iterable[tuple[str, Tensor]]) -> Any:
        # The reload has put fresh parameters into the model by now, and its own loaders on them.
        for name, parameter in model.named_parameters():
            if name not in own:
                continue
            sizes[name] = getattr(parameter, "weight_loader_numel", parameter.numel())
            parameter.weight_loader = _counting_loader(name, parameter, written)
        return load_weights(_tallied(weights, receipt))

    model.load_weights = counted  # shadows the method
    try:
        yield
    finally:
        del model.load_weights
    receipt.parameters = len(sizes)
    receipt.wrong = {name: (written[name], size) for name, size in sizes.items() if written[name] != size}


def _tallied(weights: Iterable[tuple[str, Tensor]], receipt: Receipt) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        receipt.sent += 1
        yield name, tensor


def _counting_loader(name: str, parameter: Tensor, written: Counter[str]) -> Callable[..., Any]:
    """The parameter's loader; before it runs, a dry run on a meta tensor counts the elements that it writes."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader = getattr(parameter, "weight_loader", default_weight_loader)
    own: Any = loader
    while own.__name__ == _RELOADER:
        own = own.__wrapped__

    def online_process_loader(destination: Tensor, loaded: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _Writes() as writes:
            own(_without_memory(destination), loaded, *args, **kwargs)
        written[name] += writes.elements
        return loader(destination, loaded, *args, **kwargs)

    # vLLM unwraps loaders of this name when a layer is complete.
    online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]
    return online_process_loader


def _without_memory(parameter: Tensor) -> Tensor:
    """A copy on the meta device, with the class and attributes that weight loaders look at."""
    copy = parameter.data.to("meta")
    copy.__class__ = parameter.__class__
    copy.__dict__ = parameter.__dict__.copy()
    return copy


class _Writes(TorchDispatchMode):
    """Counts the elements that in-place operations write to tensors without memory."""

    elements = 0
    _OPERATIONS = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._OPERATIONS and args[0].is_meta:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))
