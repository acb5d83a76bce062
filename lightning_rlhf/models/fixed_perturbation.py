"""The noise a policy was trained with, written beside an exported model and applied to it for inference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_rlhf.models.perturbation import Perturbation

FILE = "perturbation.safetensors"
INFERENCE_SHARE = 0.7
"""Perturbed inference uses 30 % less noise than training."""


@torch.no_grad()
def fixed_sigma(log_sigma: Tensor, bits: int | None, share: float = INFERENCE_SHARE) -> Tensor:
    """Standard deviations for inference: sigma rounded to a quantised grid, times ``share``.

    Args:
        log_sigma: ``[L]`` or ``[L, H]``.
        bits: of the symmetric grid whose largest value is the largest sigma (of the layer, where there is one per
            hidden unit); ``None``: sigma as it is.
        share: share of the training noise.
    """
    sigma = log_sigma.exp()
    if bits is not None:
        limit = 2 ** (bits - 1) - 1
        step = sigma.amax(-1, keepdim=True).clamp(min=torch.finfo(sigma.dtype).tiny) / limit
        sigma = (sigma / step).round() * step
    return sigma * share


def save_perturbation(
    log_sigma: Tensor, folder: str | Path, *, layers: str, indices: list[int], bits: int | None
) -> Path:
    """Write ``perturbation.safetensors``: ``sigma`` for inference, and its layers. Returns its path."""
    path = Path(folder) / FILE
    place = {"layers": layers, "indices": json.dumps(indices), "bits": json.dumps(bits)}
    save_file({"sigma": fixed_sigma(log_sigma.cpu(), bits).contiguous()}, path, metadata=place)
    return path


def apply_perturbation(lm: Any, path: str | Path, *, seed: int = 0) -> FixedPerturbation:
    """Perturb every forward pass of a model from now on, with the noise of an exported file.

    Args:
        lm: the model as loaded from the exported folder.
        path: the file, or the folder that holds it.
        seed: of the noise; a new draw for every forward pass, that is for every token of ``generate``.

    Returns:
        The noise; its ``remove()`` restores the plain model.

    Raises:
        ValueError: the file holds no perturbation, or does not fit the model.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        with safe_open(path, "pt") as file:
            sigma, place = file.get_tensor("sigma"), file.metadata()
            layers, indices, bits = place["layers"], json.loads(place["indices"]), json.loads(place["bits"])
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no perturbation: {error}") from error
    return FixedPerturbation(lm, sigma, layers=layers, indices=indices, bits=bits, seed=seed)


class FixedPerturbation(nn.Module):
    """A :class:`Perturbation` with given standard deviations, in every forward pass of the model."""

    def __init__(
        self, lm: Any, sigma: Tensor, *, layers: str, indices: list[int], bits: int | None, seed: int = 0
    ) -> None:
        super().__init__()
        granularity: Any = "channel" if sigma.ndim == 2 else "layer"
        span = (indices[0], indices[-1])
        self.perturbation = Perturbation(
            lm, granularity=granularity, layers=layers, layer_range=span, bits=bits, seed=seed
        )
        log_sigma = self.perturbation.log_sigma.requires_grad_(False)
        if log_sigma.shape != sigma.shape:
            self.perturbation.remove()
            raise ValueError(
                f"the perturbation has the shape {list(sigma.shape)}, {type(lm).__name__} needs {list(log_sigma.shape)}"
            )
        log_sigma.copy_(sigma.log())
        self._passes = 0
        self._open: Any = None
        self._handles = [
            lm.register_forward_pre_hook(self._begin),
            lm.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the noise from the model."""
        self.perturbation.remove()
        for handle in self._handles:
            handle.remove()

    def _begin(self, lm: nn.Module, args: tuple) -> None:
        self._open = self.perturbation.noise(step=0, part=self._passes)
        self._open.__enter__()
        self._passes += 1

    def _end(self, lm: nn.Module, args: tuple, output: Any) -> None:
        self._open.__exit__(None, None, None)
