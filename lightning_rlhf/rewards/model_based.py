"""A trained reward model (Hugging Face sequence classification) as a reward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightning_rlhf.functional.choices import DType
from lightning_rlhf.model_paths import fault_of
from lightning_rlhf.rewards.base import MESSAGES_KEY, RewardBatch, RewardError, origin

log = logging.getLogger(__name__)


def last_attended(values: Tensor, mask: Tensor) -> Tensor:
    """The value at the last attended position of each row, with padding on either side.

    Args:
        values: ``[B, T, ...]`` per position.
        mask: ``[B, T]`` bool or 0/1, true on tokens; at least one in each row.

    Returns:
        ``[B, ...]``.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask.bool(), positions, -1).amax(-1)
    return values[torch.arange(values.shape[0], device=values.device), last.to(values.device)]


class RewardModel:
    """Scores conversations with a sequence-classification model, through that model's own tokenizer and template.

    The policy's token ids never reach the reward model: prompt and response are encoded again from text, the response
    without the policy's special tokens, with which it could add turns to the conversation. The score is the model's
    output at the last token of each conversation. The attention mask locates this token, not a search for padding ids,
    so the score does not depend on padding, on a padding token that equals EOS, or on the batch. A model with another
    kind of head (an encoder's ``classifier``) runs on rows of equal length, without padding.

    Args:
        path: folder or hub id of a model that ``AutoModelForSequenceClassification`` loads, head included.
        revision: of a model on the hub.
        batch_size: conversations per forward pass.
        max_tokens: longer conversations lose tokens at their beginning, never at the response's end; counted in
            :attr:`counts` and logged. ``None`` keeps all.
        dtype: of the weights.
        device: where the model is loaded to; :meth:`to` moves it.
        attn_implementation: as for ``from_pretrained``; ``None`` leaves the choice to transformers.
        chat: render conversations with the reward model's chat template (text prompts as one user message), or join
            prompt and response as text. ``None`` uses the template if there is one.
        append_eos: end joined texts with the reward model's EOS token, for a model that was trained so.
        label: which output of a model with several; ``None`` for models with one.
        trust_remote_code: run code from the model's repository.

    Raises:
        RewardError: there is no such model, it has no trained head, or a setting does not fit it.
    """

    def __init__(
        self,
        path: str,
        *,
        revision: str = "main",
        batch_size: int = 16,
        max_tokens: int | None = None,
        dtype: DType = "float32",
        device: torch.device | str = "cpu",
        attn_implementation: str | None = None,
        chat: bool | None = None,
        append_eos: bool = False,
        label: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise RewardError(f"{name} = {value!r} is not allowed: a whole number >= 1")
        self.path, self.batch_size, self.max_tokens = str(path), batch_size, max_tokens
        self.counts: Counter[str] = Counter()
        """``cut``: number of conversations longer than ``max_tokens``."""
        hub = {"revision": revision, "trust_remote_code": trust_remote_code}
        precision = weights_dtype(dtype)
        if precision is None:
            raise RewardError(f"dtype = {dtype!r} is not allowed: {DTYPE_WANTED}")
        try:
            self.tokenizer, self.model = load_classifier(self.path, hub, precision, attn_implementation)
        except NoClassifier as error:
            raise RewardError(f"path = {self.path!r} is not allowed: a reward model is wanted; {error}") from error
        self.model.eval().requires_grad_(False).to(device)
        self.label = self._check_label(label)
        self.chat = bool(self.tokenizer.chat_template) if chat is None else chat
        if self.chat and not self.tokenizer.chat_template:
            raise RewardError(f"chat = true is not allowed: the tokenizer of {self.path} has no chat template")
        self.append_eos = append_eos
        if append_eos and (self.chat or self.tokenizer.eos_token is None):
            raise RewardError("append_eos = true is not allowed: it is for joined texts and a tokenizer with EOS")
        config = self.model.config
        self._head: nn.Module | None = None if config.is_encoder_decoder else getattr(self.model, "score", None)
        if self._head is None:
            # Rows have no padding then; with a padding id set, the model would skip a row's own EOS of that id.
            config.pad_token_id = -1

    def to(self, device: torch.device | str) -> RewardModel:
        """Move the model."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> Tensor:
        """The model's scores ``[B]``, float32 on the CPU."""
        encoded = [self.encode(batch, i) for i in range(len(batch))]
        scores = torch.zeros(len(batch), dtype=torch.float32)
        for rows in self._batches(encoded):
            scores[rows] = self._forward([encoded[i] for i in rows]).float().cpu()
        return scores

    def encode(self, batch: RewardBatch, i: int) -> list[int]:
        """Token ids of conversation ``i``, of the reward model's own tokenizer."""
        if self.chat:
            asked = batch.rows[i].get(MESSAGES_KEY) or [{"role": "user", "content": batch.prompts[i]}]
            messages = [*asked, {"role": "assistant", "content": batch.plain_responses[i]}]
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
            ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        else:
            if MESSAGES_KEY in batch.rows[i]:
                raise RewardError(
                    f"{origin(batch.rows[i])}: the prompt consists of chat messages, but the reward model "
                    f"{self.path} is used without a chat template"
                )
            text = batch.prompts[i] + batch.plain_responses[i] + (self.tokenizer.eos_token if self.append_eos else "")
            has_bos = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
            ids = list(self.tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"])
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            self.counts["cut"] += 1
            if self.counts["cut"] == 1:
                log.warning(
                    "%s: conversation of %d tokens cut to %d at its beginning", self.path, len(ids), self.max_tokens
                )
            ids = ids[-self.max_tokens :]
        return ids

    def _batches(self, encoded: list[list[int]]) -> Iterator[list[int]]:
        """Row numbers of each forward pass: similar lengths together; equal lengths if the model has no ``score``."""
        rows = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        start = 0
        for end in range(1, len(rows) + 1):
            full = end - start == self.batch_size or end == len(rows)
            if full or (self._head is None and len(encoded[rows[end]]) != len(encoded[rows[start]])):
                yield rows[start:end]
                start = end

    def _forward(self, encoded: list[list[int]]) -> Tensor:
        """Scores ``[B]`` of some conversations."""
        longest = max(map(len, encoded))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in encoded], device=self.model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in encoded], device=self.model.device)
        if self._head is None:
            return self.model(input_ids=ids, attention_mask=mask).logits[:, self.label]
        hidden = self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return self._head(last_attended(hidden, mask))[:, self.label]

    def _check_label(self, label: int | None) -> int:
        count = self.model.config.num_labels
        if label is None and count == 1:
            return 0
        if label is None or not 0 <= label < count:
            names = ", ".join(f"{number} ({name})" for number, name in self.model.config.id2label.items())
            raise RewardError(f"label = {label!r} is not allowed: {self.path} has {count} outputs: {names}")
        return label


DTYPE_WANTED = "a PyTorch type such as float32 or bfloat16"


def weights_dtype(name: str) -> torch.dtype | None:
    """The type of weights of this name; ``None`` if it is none of floating point."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None


class NoClassifier(ValueError):
    """Why there is no sequence-classification model where one was named, in one line without key and path."""


def load_classifier(
    path: str, hub: dict[str, Any], dtype: torch.dtype, attn_implementation: str | None = None
) -> tuple[Any, Any]:
    """Tokenizer and sequence-classification model.

    Args:
        path: folder or hub id.
        hub: arguments for the hub, such as ``revision``.
        dtype: of the weights.
        attn_implementation: as for ``from_pretrained``.

    Raises:
        NoClassifier: there is none, or its head is not in the checkpoint and would be random.
    """
    if (fault := fault_of(path, hub["revision"])) is not None:
        raise NoClassifier(fault)
    local = Path(path).expanduser()
    where = str(local) if local.is_dir() else path
    with _reports_held() as reports:
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, **hub)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                where, **hub, dtype=dtype, attn_implementation=attn_implementation, output_loading_info=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise NoClassifier(f"it cannot be loaded: {' '.join(str(error).split()):.400}") from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"]))
        raise NoClassifier(f"the model has no trained {missing}, which a plain language model lacks")
    for report in reports:
        LOADING.handle(report)
    return tokenizer, model


LOADING = logging.getLogger("transformers.modeling_utils")


@contextmanager
def _reports_held() -> Iterator[list[logging.LogRecord]]:
    """What transformers says of the weights that it loads, a table of many lines: held back where one line says it."""
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    LOADING.addFilter(hold)
    try:
        yield held
    finally:
        LOADING.removeFilter(hold)
