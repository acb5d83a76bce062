"""Log-probabilities and entropy of given tokens, straight from hidden states and the output embedding.

A language model's logits are by far its largest activation: ``[N, V]`` with ``V`` of 50 000 to 250 000. Here they
never exist at once. The forward pass walks over tiles of ``chunk_size`` tokens times a slice of the vocabulary,
keeps a running softmax normaliser per token (Milakov & Gimelshein 2018, arXiv:1805.02867) and throws the tile away;
the backward pass computes each tile again, turns it into the gradient in place, and multiplies it into the gradients
of the hidden states and of the embedding. Four matrix products instead of three, in exchange for every pass over the
logits happening in the processor's cache.

Computing the gradient in the forward pass instead, as Liger does for the cross-entropy loss, is no alternative: what
PPO multiplies each token's gradient with depends on its log-probability, and the embedding's gradient mixes tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

EntropyMode = Literal["none", "detached", "gradient"]

DEFAULT_CHUNK_SIZE = 1024

_CPU_TILE = 1 << 20
"""Logits per tile on a CPU: 4 MiB in fp32, so that the passes over a tile find it in the cache."""

_DEVICE_TILE = 1 << 26
"""Logits per tile elsewhere: 256 MiB in fp32, so that kernels take much longer than their launch."""


def response_hidden(hidden: Tensor, response_length: int) -> Tensor:
    """The hidden states that belong to the response: the one place where predictions and tokens are aligned.

    A causal model's state at position ``i`` predicts token ``i + 1``. Of ``T = P + R`` columns the function keeps
    ``P-1 .. P+R-1``, so that column ``t < R`` is the state in which response token ``t`` was chosen, and column
    ``R`` the state after the last column (where a truncated response is bootstrapped)::

        states = response_hidden(hidden, response_length)       # [B, R + 1, H]
        logprobs, _ = token_logprobs(states[:, :-1], lm_head.weight, input_ids[:, -response_length:])
        values = value_head(states)                             # [B, R + 1]

    Args:
        hidden: ``[B, T, H]``, last hidden states of prompt and response side by side.
        response_length: ``R``, number of response columns.

    Returns:
        ``[B, R + 1, H]``, a view.

    Raises:
        ValueError: if there is no prompt column left of the response to predict its first token.
    """
    columns = hidden.shape[1]
    if not 0 <= response_length < columns:
        raise ValueError(
            f"response_length={response_length} with {columns} columns: allowed are 0 to {columns - 1}, because the "
            "first response token needs a prompt column before it"
        )
    return hidden[:, columns - response_length - 1 :]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    entropy: EntropyMode = "none",
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, and the entropy of the distribution it was scored under.

    The distribution is ``softmax(cap(hidden @ weight.T + bias) / temperature)`` with
    ``cap(x) = softcap * tanh(x / softcap)``. Matrix products run in the dtype of ``hidden`` and ``weight`` (under
    autocast in autocast's), everything else in float32, or in float64 if the inputs are float64. Nothing of size
    ``[N, V]`` is built, forward or backward; the result does not depend on ``chunk_size``.

    Gradients flow to ``hidden``, ``weight`` and ``bias``, to those of them that require one; there is no second
    derivative. A token whose incoming gradient is exactly zero (masked, or clipped by PPO) takes no part in the
    backward pass: it costs nothing there, and a NaN in it cannot reach the weights.

    Args:
        hidden: ``[..., H]``, the states that predict the labels (see :func:`response_hidden`).
        weight: ``[V, H]``, output embedding (``lm_head.weight``), possibly tied to the input embedding.
        labels: ``[...]`` integer token ids. They must lie in ``[0, V)`` wherever the result is used. At masked
            positions any number will do (-100, a padding id beyond the vocabulary): it has logit 0 there.
        bias: ``[V]``, bias of the output embedding.
        temperature: sampling temperature; divides the logits.
        softcap: bound of the logits (Gemma's ``final_logit_softcapping``); ``None`` leaves them as they are.
        chunk_size: tokens processed at once, against a slice of the vocabulary or all of it. It bounds the scratch
            memory by ``chunk_size x V`` numbers per buffer; very small chunks are slow.
        entropy: ``"none"`` does not compute it, ``"detached"`` gives the value without a gradient, ``"gradient"``
            the value with its gradient.

    Returns:
        Log-probabilities and entropy (``None`` with ``"none"``) in nats, shaped like ``labels``, float32 or float64.

    Raises:
        ValueError: if shapes, dtypes or settings do not fit together.
    """
    settings = _Settings(_compute_dtype(hidden, weight), temperature, softcap, chunk_size, entropy)
    _check(hidden, weight, labels, bias, settings)
    states, ids = hidden.reshape(labels.numel(), hidden.shape[-1]), labels.reshape(-1).long()
    logprobs, entropies = _TokenLogprobs.apply(states, weight, bias, ids, settings)
    return logprobs.view(labels.shape), None if entropies is None else entropies.view(labels.shape)


@dataclass(frozen=True)
class _Settings:
    """What the autograd function needs besides tensors."""

    compute: torch.dtype
    """Dtype of the matrix products, also in backward; autocast does not affect products with ``out=`` or in place."""
    temperature: float
    softcap: float | None
    chunk_size: int
    entropy: EntropyMode

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype of everything else."""
        return torch.promote_types(self.compute, torch.float32)


class _TokenLogprobs(torch.autograd.Function):
    """:func:`token_logprobs` on ``hidden [N, H]`` and ``labels [N]``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor | None]:
        tiles = _Tiles(hidden, weight, bias, settings)
        softmax = _RunningSoftmax(tiles)
        for columns, embedding in tiles.vocabulary():
            for rows in tiles.tokens():
                softmax.absorb(tiles.logits(rows, columns, embedding), rows, labels, columns)
        logprobs, entropy = softmax.logprobs(), softmax.entropy()
        if settings.entropy == "detached":
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, labels, softmax.maximum, softmax.total, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, labels, maximum, total, entropy = ctx.saved_tensors
        incoming = torch.zeros_like(total) if grad_logprobs is None else grad_logprobs
        active = incoming != 0
        if grad_entropy is not None:
            active |= grad_entropy != 0
        index = active.nonzero()[:, 0]
        tiles = _Tiles(hidden[index], weight, bias, ctx.settings)
        upstream = _Upstream(
            labels=labels[index],
            maximum=maximum[index],
            total=total[index],
            logprobs=incoming[index] / ctx.settings.temperature,
            entropies=None if grad_entropy is None else grad_entropy[index] / ctx.settings.temperature,
            entropy=None if grad_entropy is None else entropy[index],
        )
        grad_active, grad_weight, grad_bias = _backward(tiles, upstream, ctx.needs_input_grad[:3])
        grad_hidden = None
        if grad_active is not None:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, index, grad_active.to(hidden.dtype))
        return grad_hidden, grad_weight, grad_bias, None, None


class _Tiles:
    """The logits ``[N, V]`` one tile ``[n, v]`` at a time, in buffers that all tiles share."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> None:
        self.hidden, self.weight, self.bias, self.settings = hidden, weight, bias, settings
        self._rows = max(1, min(settings.chunk_size, hidden.shape[0]))
        budget = _CPU_TILE if hidden.device.type == "cpu" else _DEVICE_TILE
        self._columns = min(weight.shape[0], max(1, budget // self._rows))
        self._buffers: dict[str, Tensor] = {}

    def tokens(self) -> Iterator[slice]:
        """The rows, a chunk at a time."""
        return _slices(self.hidden.shape[0], self._rows)

    def vocabulary(self) -> Iterator[tuple[slice, Tensor]]:
        """The columns, a slice at a time, with their embedding ``[v, H]`` in the dtype of the products."""
        for columns in _slices(self.weight.shape[0], self._columns):
            yield columns, self.weight[columns].to(self.settings.compute)

    def states(self, rows: slice) -> Tensor:
        """``[n, H]`` hidden states in the dtype of the products."""
        return self.hidden[rows].to(self.settings.compute)

    def buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Scratch memory of a tile's shape, the same memory at every call with the same name."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._rows * self._columns, dtype=dtype, device=self.hidden.device)
        return self._buffers[name][: shape.numel()].view(shape)

    def logits(self, rows: slice, columns: slice, embedding: Tensor) -> Tensor:
        """``[n, v]`` logits, capped and divided by the temperature; the next call overwrites them."""
        states, settings = self.states(rows), self.settings
        shape = torch.Size((states.shape[0], embedding.shape[0]))
        logits = torch.mm(states, embedding.T, out=self.buffer("product", shape, settings.compute))
        if settings.compute != settings.accumulate:
            logits = self.buffer("logits", shape, settings.accumulate).copy_(logits)
        if self.bias is not None:
            logits.add_(self.bias[columns])
        if settings.softcap is not None:
            logits.div_(settings.softcap).tanh_().mul_(settings.softcap)
        if settings.temperature != 1.0:
            logits.div_(settings.temperature)
        return logits

    def exp(self, logits: Tensor) -> Tensor:
        """``exp(logits)`` in a second buffer."""
        return torch.exp(logits, out=self.buffer("exp", logits.shape, logits.dtype))

    def slope(self, logits: Tensor) -> Tensor | None:
        """Derivative of the cap at the logits that :meth:`logits` returned; ``None`` without a cap."""
        settings = self.settings
        if settings.softcap is None:
            return None
        slope = self.buffer("slope", logits.shape, logits.dtype).copy_(logits)
        return slope.mul_(settings.temperature / settings.softcap).square_().neg_().add_(1)  # 1 - tanh ** 2

    def operand(self, gradient: Tensor) -> Tensor:
        """A tile's gradient in the dtype of the products."""
        if gradient.dtype == self.settings.compute:
            return gradient
        return self.buffer("product", gradient.shape, self.settings.compute).copy_(gradient)


class _RunningSoftmax:
    """Softmax statistics of each row over the tiles seen so far.

    With logits ``x`` and their maximum ``m``: ``total = sum exp(x - m)`` and ``moment = sum exp(x - m) (x - m)``. The
    entropy is ``log total - moment / total``: two terms that are never negative, so nothing cancels. ``m`` and
    ``total`` stay apart, because ``m + log total`` would drop digits of small probabilities when logits are large.
    """

    def __init__(self, tiles: _Tiles) -> None:
        def filled(value: float) -> Tensor:
            return torch.full(tiles.hidden.shape[:1], value, dtype=dtype, device=tiles.hidden.device)

        dtype = tiles.settings.accumulate
        self.tiles = tiles
        self.maximum = filled(torch.finfo(dtype).min / 2)  # not -inf: shift * total must be 0 at the first tile
        self.total = filled(0.0)
        self.moment = None if tiles.settings.entropy == "none" else filled(0.0)
        self.label_logit = filled(0.0)

    def absorb(self, logits: Tensor, rows: slice, labels: Tensor, columns: slice) -> None:
        """Take in one tile, which is overwritten."""
        place, inside = _locate(labels[rows], columns)
        self.label_logit[rows] = torch.where(inside, logits[place], self.label_logit[rows])
        maximum = torch.maximum(self.maximum[rows], logits.amax(dim=1))
        shift = self.maximum[rows] - maximum
        shrink = shift.exp()
        self.maximum[rows] = maximum
        logits.sub_(maximum[:, None])
        if self.moment is None:
            self.total[rows] = shrink * self.total[rows] + logits.exp_().sum(dim=1)
            return
        exp = self.tiles.exp(logits)
        moment = shrink * (self.moment[rows] + shift * self.total[rows])
        self.total[rows] = shrink * self.total[rows] + exp.sum(dim=1)
        self.moment[rows] = moment + exp.mul_(logits).sum(dim=1)

    def logprobs(self) -> Tensor:
        """Log-probability of each row's label."""
        return (self.label_logit - self.maximum) - self.total.log()

    def entropy(self) -> Tensor | None:
        """Entropy of each row, if requested."""
        return None if self.moment is None else self.total.log() - self.moment / self.total


@dataclass(frozen=True)
class _Upstream:
    """Incoming gradients and saved statistics of each row; every field is ``[N]``."""

    labels: Tensor
    maximum: Tensor
    total: Tensor
    logprobs: Tensor
    """Gradient with respect to the log-probability, over the temperature."""
    entropies: Tensor | None
    """Gradient with respect to the entropy, over the temperature."""
    entropy: Tensor | None
    """The entropy itself."""

    def to_logits(self, tiles: _Tiles, rows: slice, columns: slice, embedding: Tensor) -> Tensor:
        """``[n, v]`` gradient with respect to a tile's raw logits, made in place of the logits.

        With respect to the scaled logits: ``d log p_y = 1_y - p`` and ``d entropy = -p (log p + entropy)``.
        """
        logits = tiles.logits(rows, columns, embedding)
        slope = tiles.slope(logits)
        logits.sub_(self.maximum[rows, None])
        logprobs, total = self.logprobs[rows], self.total[rows]
        # p = exp(logits) / total; per-row factors are multiplied with each other before the tile.
        if self.entropies is None or self.entropy is None:
            gradient = logits.exp_().mul_((-logprobs / total)[:, None])
        else:
            exp, entropies = tiles.exp(logits), self.entropies[rows]
            constant = logprobs + entropies * (self.entropy[rows] - total.log())
            gradient = logits.mul_((-entropies / total)[:, None]).sub_((constant / total)[:, None]).mul_(exp)
        place, inside = _locate(self.labels[rows], columns)
        gradient[place] += torch.where(inside, logprobs, 0.0)  # unlike scatter_add_ deterministic on every device
        return gradient if slope is None else gradient.mul_(slope)


def _backward(
    tiles: _Tiles, upstream: _Upstream, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the hidden states ``[N, H]``, the embedding ``[V, H]`` and the bias ``[V]`` where needed."""
    wide = tiles.settings.accumulate
    needs_hidden, needs_weight, needs_bias = needed
    grad_hidden = torch.zeros_like(tiles.hidden, dtype=wide) if needs_hidden else None
    grad_weight = torch.empty_like(tiles.weight) if needs_weight else None
    grad_bias = torch.zeros_like(tiles.bias, dtype=wide) if needs_bias and tiles.bias is not None else None
    for columns, embedding in tiles.vocabulary():
        # Summed over the chunks at full width, and only then rounded to the dtype of the weight.
        grad_slice = torch.zeros_like(embedding, dtype=wide) if needs_weight else None
        for rows in tiles.tokens():
            gradient = upstream.to_logits(tiles, rows, columns, embedding)
            if grad_bias is not None:
                grad_bias[columns] += gradient.sum(dim=0)
            operand = tiles.operand(gradient)
            if grad_hidden is not None:
                _add_product(grad_hidden[rows], operand, embedding)
            if grad_slice is not None:
                _add_product(grad_slice, operand.T, tiles.states(rows))
        if grad_weight is not None and grad_slice is not None:
            grad_weight[columns] = grad_slice
    if grad_bias is not None and tiles.bias is not None:
        grad_bias = grad_bias.to(tiles.bias.dtype)
    return grad_hidden, grad_weight, grad_bias


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``; ``total`` may have a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _locate(labels: Tensor, columns: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Index of each row's label in a tile, and whether the label lies in these columns at all (``[n]``)."""
    inside = (labels >= columns.start) & (labels < columns.stop)
    column = (labels - columns.start).clamp(0, columns.stop - columns.start - 1)
    return (torch.arange(labels.shape[0], device=labels.device), column), inside


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Dtype of the matrix products; like PyTorch's own, autocast leaves float64 alone."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, settings: _Settings) -> None:
    """Refuse arguments that do not fit together, more clearly than a kernel would."""
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: floating-point dtypes are allowed")
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}: [..., H], [V, H] are allowed")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)}: one per hidden state, {tuple(hidden.shape[:-1])}, is allowed")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}: integer token ids are allowed")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}: one number per row of weight, {weight.shape[0]}, is allowed")
    if not (math.isfinite(settings.temperature) and settings.temperature > 0):
        raise ValueError(f"temperature={settings.temperature}: a finite number > 0 is allowed (1 for greedy sampling)")
    if settings.softcap is not None and not (math.isfinite(settings.softcap) and settings.softcap > 0):
        raise ValueError(f"softcap={settings.softcap}: a finite number > 0 is allowed, or None for no cap")
    if settings.chunk_size < 1:
        raise ValueError(f"chunk_size={settings.chunk_size}: at least one token is allowed")
    if settings.entropy not in get_args(EntropyMode):
        raise ValueError(f"entropy={settings.entropy!r}: allowed are {', '.join(map(repr, get_args(EntropyMode)))}")
