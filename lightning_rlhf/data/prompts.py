"""From data rows to prompts: messages or text, the chat template applied once, exactly one BOS, nothing cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.sources import SOURCE_KEY, DataError, Row
from lightning_rlhf.experience import PromptBatch, prompt_key

MESSAGES_KEY = "_messages"
"""Key under which a chat prompt's messages, system prompt included, travel in the row (for reward models)."""

_CHUNK = 1024  # texts per tokenizer call


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the rollout engine."""

    ids: list[int]
    text: str
    key: str
    row: Row


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of one source.

    Attributes:
        prompts: those that fit.
        dropped: how many were longer than the limit.
        longest: tokens of the longest prompt, dropped ones included.
    """

    prompts: list[Prompt]
    dropped: int
    longest: int


class PromptEncoder:
    """Renders and tokenises data rows.

    A prompt is either text or a list of chat messages (``{"role": ..., "content": ...}``). Messages go through the
    tokenizer's chat template, which writes all special tokens itself, so its output is tokenised without adding any.
    Text gets exactly one BOS if the tokenizer adds one (and none of the tokens it would add at the end).

    Args:
        tokenizer: of the policy.
        prompt_field: column of the prompt.
        system_prompt: put before the messages of rows that do not begin with a system message.
        text_as_chat: wrap text prompts as one user message.
        chat_template_kwargs: further arguments of the chat template, such as ``enable_thinking``.
        max_tokens: longer prompts are dropped, never cut; ``None`` keeps all.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_field: str = "prompt",
        system_prompt: str | None = None,
        text_as_chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise DataError(f"data.max_prompt_tokens = {max_tokens!r} is not allowed: a whole number >= 1, or null")
        self.tokenizer, self.prompt_field = tokenizer, prompt_field
        self.system_prompt, self.text_as_chat = system_prompt, text_as_chat
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.max_tokens = max_tokens
        probe = tokenizer("", add_special_tokens=True)["input_ids"]
        bos = tokenizer.bos_token_id
        self._bos: list[int] = [bos] if bos is not None and list(probe[:1]) == [bos] else []

    def encode(self, rows: Iterable[Row]) -> EncodedPrompts:
        """Prompts of all rows that fit, in the rows' order.

        Raises:
            DataError: a row has no usable prompt, there is no row, or no prompt fits.
        """
        prompts: list[Prompt] = []
        lengths: list[int] = []
        for chunk in _chunks(rows):
            rendered = [self.render(row) for row in chunk]
            for (text, row), ids in zip(rendered, self._tokenise(rendered), strict=True):
                if not ids:
                    raise DataError(f"{row[SOURCE_KEY]}: the tokenizer makes no token of the prompt {text[:60]!r}")
                lengths.append(len(ids))
                if self.max_tokens is None or len(ids) <= self.max_tokens:
                    prompts.append(Prompt(ids, text, prompt_key(text), row))
        if not lengths:
            raise DataError("there is no row")
        if not prompts:
            raise DataError(
                f"all {len(lengths)} prompts are longer than data.max_prompt_tokens = {self.max_tokens}; "
                f"the shortest has {min(lengths)} tokens. Raise the limit or shorten the prompts"
            )
        return EncodedPrompts(prompts, len(lengths) - len(prompts), max(lengths))

    def render(self, row: Row) -> tuple[str, Row]:
        """Text of the row's prompt as the model will read it, and the row; a chat prompt's row with its messages."""
        place = row[SOURCE_KEY]
        value = row.get(self.prompt_field)
        if value is None:
            columns = ", ".join(sorted(set(row) - {SOURCE_KEY})) or "none"
            raise DataError(f"{place}: no prompt: the row has no {self.prompt_field!r} (columns: {columns})")
        if isinstance(value, str):
            if not value.strip():
                raise DataError(f"{place}: the prompt is empty")
            if not self.text_as_chat:
                if self.system_prompt is not None:
                    raise DataError(
                        f"{place}: data.system_prompt is set, but the prompt is plain text; "
                        "set data.text_as_chat=true to wrap it as a user message"
                    )
                return value, row
            value = [{"role": "user", "content": value}]
        messages = self._messages(value, place)
        return self._apply_template(messages, place), {**row, MESSAGES_KEY: messages}

    def _messages(self, value: Any, place: str) -> list[dict[str, Any]]:
        if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
            raise DataError(
                f"{place}: {self.prompt_field!r} must be text or a list of messages "
                f'{{"role": ..., "content": ...}}, not {value!r:.80}'
            )
        messages = [dict(message) for message in value]
        for number, message in enumerate(messages):
            for name in ("role", "content"):
                if not isinstance(message.get(name), str):
                    raise DataError(f"{place}: message {number} has no text under {name!r}: {message!r:.80}")
        if not messages or not messages[-1]["content"].strip():
            raise DataError(f"{place}: the prompt is empty")
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{place}: the prompt ends with an assistant message; the answer is what is generated")
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def _apply_template(self, messages: list[dict[str, Any]], place: str) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{place}: the prompt consists of chat messages, but the model's tokenizer has no chat template; "
                "use text prompts, or a model with a template"
            )
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
            )
        )

    def _tokenise(self, rendered: list[tuple[str, Row]]) -> Iterator[list[int]]:
        texts = [text for text, _ in rendered]
        try:
            plain = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception:  # a tokenizer of Rust raises this very class
            for text, row in rendered:
                refuse_unknown_characters(self.tokenizer, text, row[SOURCE_KEY])
            raise
        for (_, row), ids in zip(rendered, plain, strict=True):
            needs_bos = MESSAGES_KEY not in row and ids[:1] != self._bos
            yield [*self._bos, *ids] if needs_bos else list(ids)


def refuse_unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str, place: str) -> None:
    """Say which characters a tokenizer of single characters, such as that of ``model=tiny``, lacks for a text.

    Raises:
        DataError: it lacks some. A tokenizer with a token for what is unknown, or of pieces of text, lacks none.
    """
    known = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    missing = sorted(set(text) - known)
    if not missing or tokenizer.unk_token is not None or max(map(len, known), default=0) > 1:
        return
    shown = " ".join(repr(character) for character in missing[:20]) + (" ..." if len(missing) > 20 else "")
    raise DataError(
        f"{place}: the model has no token for {shown}. The built-in one knows nothing but the characters of "
        "model.source.vocabulary: add them there, or take a model that reads any text: model=hf model.source.path=..."
    )


def collate(prompts: Sequence[Prompt], passes: Sequence[int]) -> PromptBatch:
    """A batch of prompts; ``passes`` says in which pass over the data each was drawn."""
    return PromptBatch(
        ids=[prompt.ids for prompt in prompts],
        texts=[prompt.text for prompt in prompts],
        keys=[prompt.key for prompt in prompts],
        rows=[prompt.row for prompt in prompts],
        passes=list(passes),
    )


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk
