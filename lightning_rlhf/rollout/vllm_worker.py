"""The part that runs inside a vLLM server: it fetches the trainer's weights and writes them into the model.

vLLM's option for it: ``--worker-extension-cls lightning_rlhf.rollout.vllm_worker.WeightReceiver``.
"""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import safetensors.torch
from torch import Tensor

from lightning_rlhf.rollout.token_check import agreed_source, bearer
from lightning_rlhf.rollout.weight_receiver import receive

TIMEOUT = 120.0
"""Seconds without a byte from the trainer after which a transfer has failed."""


class WeightReceiver:
    """Methods that vLLM adds to its workers; the trainer calls them by ``/collective_rpc``.

    They return what went wrong instead of raising it: an exception would reach the trainer as a bare HTTP 500.
    """

    model_runner: Any
    vllm_config: Any
    rlhf_label = ""
    """Label of the weights written completely; empty before the first transfer and after one that failed."""

    def rlhf_describe(self) -> dict[str, Any]:
        """The facts that the trainer checks before it sends requests."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        return {
            "model": str(model.model),
            "architectures": list(model.architectures),
            "vocabulary": int(model.get_vocab_size()),
            "max_model_len": int(model.max_model_len),
            "logprobs_mode": str(model.logprobs_mode),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "tensor_parallel_size": int(parallel.tensor_parallel_size),
        }

    def rlhf_held(self) -> dict[str, str]:
        """``{"label": label of the weights that this worker holds}``."""
        return {"label": self.rlhf_label}

    def rlhf_receive(self, source: str, token: str, label: str) -> dict[str, Any]:
        """Replace all weights by the trainer's, offered at ``source`` under ``label``.

        After an error the weights are a mixture; the trainer sends such a server no requests until a transfer succeeds.
        Weights that are held already are not written again: if two ranks ask for them at once, the second cannot
        disturb generation for the first.

        Args:
            source: address of the trainer's :class:`~lightning_rlhf.rollout.weight_offer.WeightStore`, ``http://host:port``;
                refused unless it is the one this server was started with, see
                :func:`~lightning_rlhf.rollout.token_check.agreed_source`.
            token: its bearer token.
            label: label of the requested weights; others are refused.

        Returns:
            ``{"label": label, "parameters": number written}``, or ``{"error": why}``.
        """
        if label == self.rlhf_label:
            return {"label": label, "parameters": 0}
        try:
            agreed_source(source)
        except ValueError as error:  # no weight was changed
            return {"error": str(error)}
        self.rlhf_label = ""
        try:
            weights = fetch(source, token, label)
            receipt = receive(self, weights)
            receipt.check()
        except Exception as error:  # any error of a model's loader is the answer
            return {"error": f"{type(error).__name__}: {error}"}
        self.rlhf_label = label
        return {"label": label, "parameters": receipt.parameters}


def fetch(source: str, token: str, label: str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, part by part; no more than one part is held.

    Raises:
        ValueError: the address is not the agreed one, the trainer refuses, holds other weights, or a part's checksum
            is wrong.
        OSError: the trainer cannot be reached, or the connection broke.
    """
    host, port = agreed_source(source)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    try:
        manifest = json.loads(_get(connection, "/manifest", token))
        if manifest["label"] != label:
            raise ValueError(f"the trainer at {source} holds the weights {manifest['label']!r}, not {label!r}")
        for index, digest in enumerate(manifest["sha256"]):
            payload = _get(connection, f"/{label}/{index}", token)
            if hashlib.sha256(payload).hexdigest() != digest:
                raise ValueError(f"part {index} of the weights {label} was damaged on its way: its sha256 is wrong")
            yield from safetensors.torch.load(payload).items()
    except OSError as error:
        raise OSError(f"no weights from the trainer at {source} ({error}); is rollout.weights_host right?") from error
    finally:
        connection.close()


def _get(connection: http.client.HTTPConnection, path: str, token: str) -> bytes:
    connection.request("GET", path, headers=bearer(token))
    response = connection.getresponse()
    payload = response.read()
    if response.status != 200:
        raise ValueError(f"the trainer answers {response.status} {payload.decode(errors='replace')}")
    return payload
