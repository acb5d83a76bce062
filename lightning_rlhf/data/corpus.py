"""Plain text for language modelling: the documents of a source, packed into blocks of one length."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import OmegaConf
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.prompts import leading_bos, refuse_unknown_characters
from lightning_rlhf.data.sources import (
    SOURCE_KEY,
    DataError,
    Row,
    Sources,
    find_files,
    open_source,
    read_rows,
    resolve_path,
)
from lightning_rlhf.experience import sample_seed
from lightning_rlhf.faults import Faults

_CHUNK = 256  # documents per tokenizer call


class TextSource:
    """One row per text file (UTF-8), with the whole file in the column ``text``.

    Args:
        path: a file, a folder of such files, or a pattern, see :func:`lightning_rlhf.data.sources.find_files`.
    """

    suffixes = (".txt",)

    def __init__(self, path: str | Path) -> None:
        self.path = resolve_path(path)

    def __iter__(self) -> Iterator[Row]:
        for path in find_files(self.path, self.suffixes):
            try:
                text = path.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start + 1})") from error
            yield {"text": text, SOURCE_KEY: str(path)}


def open_text(value: Any) -> Iterable[Mapping[str, Any]]:
    """The source of documents that a setting names: as :func:`open_source`, and ``.txt`` files or patterns of them.

    Raises:
        DataError: it is none of these.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, (str, Path)) for item in value):
        return Sources([open_text(path) for path in value])
    if isinstance(value, (str, Path)) and Path(value).suffix.lower() in TextSource.suffixes:
        return TextSource(value)
    try:
        return open_source(value)
    except DataError as error:
        raise DataError(f"{error}. Plain text: files that end in .txt, or a pattern such as 'folder/*.txt'") from None


def text_blocks(source: Any, tokenizer: PreTrainedTokenizerBase, *, text_field: str, length: int, key: str) -> Tensor:
    """All documents of a source one after the other, cut into blocks.

    Each document begins with the start token, if the tokenizer adds one, and ends with the end token. A block may begin
    and end in the middle of a document (packing without padding, as in pre-training); what is left after the last whole
    block is dropped. Documents without any text are left out.

    Args:
        source: see :func:`open_text`.
        tokenizer: of the model.
        text_field: column of the text.
        length: tokens of a block.
        key: dotted key of ``source`` in the configuration, for errors.

    Returns:
        ``[N, length]`` int32 token ids, N at least 1.

    Raises:
        DataError: a row has no text or text that the tokenizer refuses, there is no row, or less than one block of
            text; names the key, and the file and line where there is one.
    """
    faults = Faults()
    try:
        rows = read_rows(open_text(source), faults)
        ids = _token_ids(rows, tokenizer, text_field, faults)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    if faults:
        raise DataError(f"{key}: {faults}")
    if len(ids) < length:
        raise DataError(f"{key}: the text has {len(ids)} tokens, fewer than one block of module.ptx.length = {length}")
    whole = len(ids) // length
    return torch.frombuffer(ids, dtype=torch.int32)[: whole * length].clone().view(whole, length)


def _token_ids(rows: Iterator[Row], tokenizer: PreTrainedTokenizerBase, text_field: str, faults: Faults) -> array[int]:
    begin = leading_bos(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids, documents = array("i"), 0
    while chunk := list(islice(rows, _CHUNK)):
        documents += len(chunk)
        named = [(text, str(row[SOURCE_KEY])) for row in chunk if (text := _text(row, text_field, faults))]
        for found in _encode(named, tokenizer, faults) if named else ():
            ids.extend([*begin, *found, *end])
    if not documents and not faults:
        raise DataError("there is no row")
    return ids


def _text(row: Row, text_field: str, faults: Faults) -> str:
    """The row's text; empty if it was added to ``faults``, or has nothing but white space."""
    value = row.get(text_field)
    if isinstance(value, str):
        return value if value.strip() else ""
    columns = ", ".join(sorted(set(row) - {SOURCE_KEY})) or "none"
    found = f"(columns: {columns})" if value is None else f"but {value!r:.60} there"
    faults.add(f"{row[SOURCE_KEY]}: the row has no text in the column {text_field!r} {found}")
    return ""


def _encode(named: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, faults: Faults) -> Iterable[list[int]]:
    """The ids of texts with their places of origin; texts that the tokenizer refuses are added to ``faults``."""
    try:
        return tokenizer([text for text, _ in named], add_special_tokens=False, verbose=False)["input_ids"]
    except Exception:  # its class depends on the tokenizer
        before = faults.count
        for text, origin in named:
            try:
                refuse_unknown_characters(tokenizer, text, origin)
            except DataError as error:
                faults.add(error)
        if faults.count == before:  # refused for another reason
            raise
        return ()


class BlockStream:
    """Blocks in an endless order: a new permutation in each pass, from the seed alone. Its position is its state.

    Args:
        blocks: ``[N, length]`` token ids.
        seed: of the order.
    """

    def __init__(self, blocks: Tensor, *, seed: int) -> None:
        self.blocks, self.seed = blocks, seed
        self.position = 0
        """Blocks handed out so far."""
        self._order: tuple[int, Tensor] | None = None

    def upcoming(self, count: int) -> Tensor:
        """``[count, length]`` int64: the next blocks; :meth:`advance` moves on."""
        places = range(self.position, self.position + count)
        index = [int(self._permutation(place // len(self.blocks))[place % len(self.blocks)]) for place in places]
        return self.blocks[index].long()

    def advance(self, count: int) -> None:
        self.position += count

    @property
    def passes(self) -> float:
        """Passes over the text so far, as a fraction."""
        return self.position / len(self.blocks)

    def _permutation(self, number: int) -> Tensor:
        """Order of one pass; that of the last one asked for is kept."""
        if self._order is None or self._order[0] != number:
            generator = torch.Generator().manual_seed(sample_seed(self.seed, "text blocks", 0, number))
            self._order = number, torch.randperm(len(self.blocks), generator=generator)
        return self._order[1]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the blocks and of the seed of their order; computed once, as neither changes."""
        digest = hashlib.blake2b(f"{self.seed} {list(self.blocks.shape)}".encode(), digest_size=16)
        digest.update(self.blocks.numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the saved position; with other blocks or another order begin anew, with a warning."""
        if state["fingerprint"] == self.fingerprint:
            self.position = state["position"]
            return
        rank_zero_warn(
            "the text of module.ptx, its blocks or their order are not those of the checkpoint: it is read from its "
            "beginning"
        )
