"""Text packed into blocks, and the order in which they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.data import DataError, TextSource
from lightning_rlhf.data.corpus import BlockStream, open_text, text_blocks
from lightning_rlhf.data.sources import JSONLSource, ParquetSource
from lightning_rlhf.models.tiny import character_tokenizer

TOKENIZER = character_tokenizer("abcdefgh ")
"""Ids: padding 0, end 1, a 2, b 3, ..."""


def blocks(source: Any, length: int = 4, text_field: str = "text", tokenizer: Any = TOKENIZER) -> Tensor:
    return text_blocks(source, tokenizer, text_field=text_field, length=length, key="module.ptx.source")


def rows(*texts: Any) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def test_documents_are_packed_with_the_end_token_between_them_and_the_rest_is_dropped() -> None:
    found = blocks(rows("abc", "de", "fgh"))
    assert found.tolist() == [[2, 3, 4, 1], [5, 6, 1, 7]] and found.dtype == torch.int32


def test_a_tokenizer_with_a_start_token_begins_every_document_with_it() -> None:
    tokenizer = character_tokenizer("abcdefgh ", add_bos=True)
    assert blocks(rows("ab", "c"), 3, tokenizer=tokenizer).tolist() == [[2, 3, 4], [1, 2, 5]]


def test_documents_without_text_are_left_out() -> None:
    assert blocks(rows("abc", "  ", "", "de", "fgh")).tolist() == blocks(rows("abc", "de", "fgh")).tolist()


def test_many_documents_are_packed_in_their_order() -> None:
    """More than one call of the tokenizer."""
    texts = ["abcdefgh"[i % 8] for i in range(600)]
    assert blocks(rows(*texts), 2)[:, 0].tolist() == [i % 8 + 2 for i in range(600)]


def test_every_kind_of_file_gives_the_same_blocks(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = ["abc", "defg"]
    expected = blocks(rows(*texts))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(*texts)), tmp_path / "a.parquet")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    one, two = (str(tmp_path / "texts" / f"{number}.txt") for number in (0, 1))
    kinds: list[Any] = [tmp_path / "a.jsonl", str(tmp_path / "a.parquet"), str(tmp_path / "texts" / "*.txt")]
    for source in [*kinds, [one, two], TextSource(tmp_path / "texts"), JSONLSource(tmp_path / "a.jsonl")]:
        assert torch.equal(blocks(source), expected), source
    assert isinstance(open_text(str(tmp_path / "a.parquet")), ParquetSource)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([], r"module\.ptx\.source: there is no row"),
        (rows("abc", None, 7), r"module\.ptx\.source: 2 rows cannot be used:\n  list:1: the row has no text in the "
         r"column 'text' \(columns: text\)\n  list:2: the row has no text in the column 'text' but 7 there"),
        ([{"words": "abc", "id": 1}], r"list:0: the row has no text in the column 'text' \(columns: id, words\)"),
        (rows("ab"), r"the text has 3 tokens, fewer than one block of module\.ptx\.length = 4"),
        (rows(" ", ""), r"the text has 0 tokens, fewer than one block of module\.ptx\.length = 4"),
        (rows("abc", "xyz"), r"list:1: the model has no token for 'x' 'y' 'z'"),
        ({"path": "x"}, r"is not a data source"),
        ("nowhere/text.txt", r"there is no file .*nowhere/text\.txt"),
        ("text.csv", r"'text\.csv' is not a data file: .* Plain text: files that end in \.txt"),
    ],
)  # fmt: skip
def test_a_text_that_cannot_be_used_is_one_clear_error(source: Any, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        blocks(source)
    assert str(caught.value).startswith("module.ptx.source: ")


def test_a_text_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 text \(invalid start byte at byte 4\)"):
        blocks(tmp_path / "a.txt")


# --- the order -------------------------------------------------------------------------------------------------------


def stream(seed: int = 1, count: int = 5) -> BlockStream:
    return BlockStream(torch.arange(count, dtype=torch.int32)[:, None].expand(count, 2), seed=seed)


def read(source: BlockStream, *counts: int) -> list[int]:
    found = []
    for count in counts:
        found += source.upcoming(count)[:, 0].tolist()
        source.advance(count)
    return found


def test_every_pass_has_each_block_once_in_an_order_of_its_own() -> None:
    order = read(stream(), *[2] * 10)
    passes = [order[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in passes) and len({tuple(one) for one in passes}) > 1
    assert read(stream(), 20) == order and read(stream(), 1, 7, 12) == order, "however it is read"
    assert read(stream(seed=2), 20) != order


def test_looking_ahead_does_not_move_on() -> None:
    source = stream()
    assert torch.equal(source.upcoming(7), source.upcoming(7)) and source.position == 0 and source.passes == 0
    source.advance(7)
    assert source.passes == 1.4


def test_the_position_is_all_that_a_resumed_stream_needs() -> None:
    whole, first = read(stream(), 20), stream()
    read(first, 7)
    second = stream()
    second.load_state_dict(first.state_dict())
    assert read(second, 13) == whole[7:]


@pytest.mark.parametrize("other", [stream(seed=2), stream(count=6)])
def test_other_text_or_order_begins_anew_with_a_warning(other: BlockStream) -> None:
    first = stream()
    first.advance(7)
    with pytest.warns(UserWarning, match=r"the text of module\.ptx, its blocks or their order are not those"):
        other.load_state_dict(first.state_dict())
    assert other.position == 0
