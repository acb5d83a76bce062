"""From data rows to prompts: messages or text, the chat template applied once, exactly one BOS, no truncation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.bounds import bounded
from lightning_rlhf.data.sources import SOURCE_KEY, DataError, Row
from lightning_rlhf.experience import PromptBatch, prompt_key
from lightning_rlhf.faults import Faults, excerpt

MESSAGES_KEY = "_messages"
"""Key of the row that holds a chat prompt's messages, system prompt included (for reward models)."""

_CHUNK = 1024  # texts per tokenizer call


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the rollout engine."""

    ids: list[int]
    text: str
    key: str
    row: Row
    copy: int = 0
    """Number of earlier rows of the source with the same key."""
    kl_scale: float | None = None
    """Factor on the KL coefficient; ``None`` in a run without ``data.conservative``."""
    group: str | None = None
    """What ``data.group_column`` says of it, as text; ``None`` without such a column."""


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of one source.

    Attributes:
        prompts: prompts within the limit, in the rows' order.
        too_long: prompts over the limit, in the rows' order; of huge ones only the tokens of their beginning.
    """

    prompts: list[Prompt]
    too_long: list[Prompt]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, too long ones included; a lower bound if it is huge."""
        return max(len(prompt.ids) for prompt in [*self.prompts, *self.too_long])


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
        max_tokens: longer prompts are dropped, never truncated; ``None`` keeps all.
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
        bounded("data", at_least=1, whole=True, optional=True, max_prompt_tokens=max_tokens)
        self.tokenizer, self.prompt_field = tokenizer, prompt_field
        self.system_prompt, self.text_as_chat = system_prompt, text_as_chat
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.max_tokens = max_tokens
        self.counted_in_part = False
        """Whether some prompt was so long that its tokens were not all counted."""
        self._bos = leading_bos(tokenizer)

    def encode(self, rows: Iterable[Row], faults: Faults | None = None) -> EncodedPrompts:
        """Prompts of all rows, the too long ones separately.

        Args:
            rows: each with its place of origin.
            faults: of the rows that ``rows`` leaves out, filled while it is read; they are reported with the others.

        Raises:
            DataError: rows have no usable prompt (the first are named), there is no row, or no prompt fits.
        """
        faults = Faults() if faults is None else faults
        prompts: list[Prompt] = []
        too_long: list[Prompt] = []
        for rendered in _chunks(self._rendered(rows, faults)):
            for (text, row), ids in zip(rendered, self._tokenise(rendered, faults), strict=True):
                if not ids:
                    continue
                # The key is of the content, not of the rendered text: a template may write today's date into it.
                prompt = Prompt(ids, text, prompt_key(row[self.prompt_field]), row)
                fits = self.max_tokens is None or len(ids) <= self.max_tokens
                (prompts if fits else too_long).append(prompt)
        if faults:
            raise DataError(str(faults))
        if not prompts and not too_long:
            raise DataError("there is no row")
        if not prompts:
            shortest = min(len(prompt.ids) for prompt in too_long)
            raise DataError(
                f"all {len(too_long)} prompts are longer than data.max_prompt_tokens = {self.max_tokens}; the shortest "
                f"has {'at least ' * self.counted_in_part}{shortest} tokens. Raise the limit or shorten the prompts"
            )
        return EncodedPrompts(prompts, too_long)

    def ids_of_recorded(self, prompts: Iterable[tuple[str, str]]) -> list[list[int]]:
        """Token ids of prompts that a run has recorded, the same as in its rollouts.

        Args:
            prompts: each one's rendered text and key. Where the key is that of the text, the prompt was plain text.

        Raises:
            DataError: the tokenizer refuses a text; it is another one than the run's.
        """
        faults = Faults()
        rendered: list[tuple[str, Row]] = []
        for text, key in prompts:
            chat = self.text_as_chat or prompt_key(text) != key  # then the template has written the special tokens
            rendered.append((text, {SOURCE_KEY: key, **({MESSAGES_KEY: None} if chat else {})}))
        ids = list(self._tokenise(rendered, faults)) if rendered else []
        if faults:
            raise DataError(str(faults))
        return ids

    def _rendered(self, rows: Iterable[Row], faults: Faults) -> Iterator[tuple[str, Row]]:
        for row in rows:
            try:
                if MESSAGES_KEY in row:
                    raise DataError(f"{row[SOURCE_KEY]}: the column {MESSAGES_KEY!r} is used by the kit; rename it")
                rendered = self.render(row)
            except DataError as error:
                faults.add(error)
            else:
                yield rendered

    def render(self, row: Row) -> tuple[str, Row]:
        """Text of the row's prompt as the model will read it, and the row; a chat prompt's row with its messages."""
        origin = row[SOURCE_KEY]
        value = row.get(self.prompt_field)
        if value is None:
            columns = ", ".join(sorted(set(row) - {SOURCE_KEY})) or "none"
            found = (
                f"{self.prompt_field!r} is null"
                if self.prompt_field in row
                else f"the row has no {self.prompt_field!r}"
            )
            raise DataError(f"{origin}: no prompt: {found} (columns: {columns}){_chat_column(row)}")
        if isinstance(value, str):
            if not value.strip():
                raise DataError(f"{origin}: the prompt is empty")
            if not self.text_as_chat:
                if self.system_prompt is not None:
                    raise DataError(
                        f"{origin}: data.system_prompt is set, but the prompt is plain text; "
                        "set data.text_as_chat=true to wrap it as a user message"
                    )
                return _valid_unicode(value, origin), row
            value = [{"role": "user", "content": value}]
        messages = self._messages(value, origin)
        return self._apply_template(messages, origin), {**row, MESSAGES_KEY: messages}

    def _messages(self, value: Any, origin: str) -> list[dict[str, Any]]:
        if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
            raise DataError(
                f"{origin}: {self.prompt_field!r} must be text or a list of messages "
                f'{{"role": ..., "content": ...}}, not {value!r:.80}'
            )
        messages = [dict(message) for message in value]
        for number, message in enumerate(messages):
            for name in ("role", "content"):
                if not isinstance(message.get(name), str):
                    raise DataError(f"{origin}: message {number} has no text under {name!r}: {message!r:.80}")
        if not messages or not messages[-1]["content"].strip():
            raise DataError(f"{origin}: the prompt is empty")
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{origin}: the prompt ends with an assistant message; the answer is what is generated")
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def _apply_template(self, messages: list[dict[str, Any]], origin: str) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{origin}: the prompt consists of chat messages, but the model's tokenizer has no chat template; "
                "use text prompts, or a model with a template"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
            )
        except Exception as error:  # templates are programs: they may raise exceptions of Jinja or of any other kind
            raise DataError(f"{origin}: the chat template refuses the messages: {_in_words(error)}") from error
        return _valid_unicode(str(text), origin)

    def _tokenise(self, rendered: list[tuple[str, Row]], faults: Faults) -> Iterator[list[int]]:
        """The ids of each text; none for a row that was added to ``faults``."""
        plain: Sequence[list[int] | None]
        try:
            plain = self._ids([text for text, _ in rendered])
        except Exception:  # its class depends on the tokenizer; encoding row by row finds the rows to name
            plain = [self._ids_of_row(text, row, faults) for text, row in rendered]
        for (text, row), found in zip(rendered, plain, strict=True):
            needs_bos = found is not None and MESSAGES_KEY not in row and found[:1] != self._bos
            ids = [*self._bos, *(found or [])] if needs_bos else list(found or [])
            if found is not None and not ids:
                faults.add(f"{row[SOURCE_KEY]}: the tokenizer makes no token of the prompt {text[:60]!r}")
            yield ids

    def _ids(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(
            [self._enough(text) for text in texts], add_special_tokens=False, verbose=False
        )["input_ids"]
        return ids

    def _enough(self, text: str) -> str:
        """The text, or so much of a huge text that it is surely too long: a tokenizer takes seconds for a megabyte."""
        if self.max_tokens is None or len(text) <= 64 * self.max_tokens:
            return text
        beginning = text[: 16 * self.max_tokens]
        # Twice the limit, since the last tokens before the cut differ from those of the whole text.
        if len(self.tokenizer(beginning, add_special_tokens=False, verbose=False)["input_ids"]) <= 2 * self.max_tokens:
            return text
        self.counted_in_part = True
        return beginning

    def _ids_of_row(self, text: str, row: Row, faults: Faults) -> list[int] | None:
        """The ids of a text; ``None`` if the row was added to ``faults``."""
        try:
            return self._ids([text])[0]
        except Exception as error:
            reason = f"{row[SOURCE_KEY]}: the tokenizer refuses the prompt {text[:60]!r}: {_in_words(error)}"
            try:
                refuse_unknown_characters(self.tokenizer, text, row[SOURCE_KEY])
            except DataError as known:
                reason = str(known)
            faults.add(reason)
            return None


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The start token that the tokenizer puts before every text; empty if it puts none."""
    probe = tokenizer("", add_special_tokens=True)["input_ids"]
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(probe[:1]) == [bos] else []


def _chat_column(row: Row) -> str:
    """The setting for a row that holds its prompt as messages in another column; empty if there is no such column."""
    for name, value in row.items():
        messages = isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value)
        if messages and all({"role", "content"} <= {*item} for item in value):
            return f"; {name!r} holds messages: data.prompt_field={name}"
    return ""


def _valid_unicode(text: str, origin: str) -> str:
    """The text, if it can be encoded as UTF-8; half a surrogate pair, which JSON can write as ``\\ud83d``, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{origin}: the prompt is no valid Unicode: character {error.start + 1} is {text[error.start]!r}, "
            f"half of a surrogate pair, in {excerpt(text, error.start, before=30, after=30)}"
        ) from None
    return text


def _in_words(error: Exception) -> str:
    """An exception on one line; its type if that says more than the text."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return text[:300] if kind in ("TemplateError", "ValueError", "Exception") and text else f"{kind}: {text:.300}"


def refuse_unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str, origin: str) -> None:
    """Refuse a text with characters that a character-level tokenizer, such as that of ``model=tiny``, lacks.

    Raises:
        DataError: it lacks some. A tokenizer with an unknown token, or of subwords, lacks none.
    """
    known = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    missing = sorted(set(text) - known)
    if not missing or tokenizer.unk_token is not None or max(map(len, known), default=0) > 1:
        return
    shown = " ".join(repr(character) for character in missing[:20]) + (" ..." if len(missing) > 20 else "")
    raise DataError(
        f"{origin}: the model has no token for {shown}. The built-in one knows nothing but the characters of "
        "model.source.vocabulary: add them there, or take a model that reads any text: model=hf model.source.path=..."
    )


def collate(prompts: Sequence[Prompt], passes: Sequence[int]) -> PromptBatch:
    """A batch of prompts; ``passes`` has the number of the pass over the data in which each was drawn."""
    return PromptBatch(
        ids=[prompt.ids for prompt in prompts],
        texts=[prompt.text for prompt in prompts],
        keys=[prompt.key for prompt in prompts],
        rows=[prompt.row for prompt in prompts],
        passes=list(passes),
        copies=[prompt.copy for prompt in prompts],
        kl_scales=[prompt.kl_scale for prompt in prompts if prompt.kl_scale is not None],
        groups=[prompt.group for prompt in prompts if prompt.group is not None],
    )


def numbered(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts, each with the number of earlier ones of the same key, so that copies get different samples."""
    seen: Counter[str] = Counter()
    result = []
    for prompt in prompts:
        result.append(replace(prompt, copy=seen[prompt.key]) if seen[prompt.key] else prompt)
        seen[prompt.key] += 1
    return result


def _chunks(rendered: Iterable[tuple[str, Row]]) -> Iterator[list[tuple[str, Row]]]:
    iterator = iter(rendered)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk
