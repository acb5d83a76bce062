"""Records of single samples in a run's folder: Parquet pieces that a crash cannot spoil, and their reader.

``prompts/start_2/iterations_000011-000020.rank_0.parquet`` holds what rank 0 saw in iterations 11 to 20 of the run's
second start. A piece is written beside its place and renamed. Each iteration becomes a piece of its own at once;
:func:`compact` joins them later. If a process dies between the two, both are there, and the reader takes one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.errors import InputError

if TYPE_CHECKING:
    import pyarrow

FOLDER = "prompts"
SUSPECTS = "suspects.json"
"""File in that folder: the prompts that stand out now, as the callback prompt_monitor finds them."""
PIECE = re.compile(r"iterations_(\d+)-(\d+)\.rank_(\d+)\.parquet")
START = re.compile(r"start_(\d+)")

COLUMNS = {
    "iteration": "int32",
    "key": "string",
    "origin": "string",
    "prompt_group": "string",
    "prompt": "string",
    "response": "string",
    "finish": "string",
    "tokens": "int32",
    "score": "float32",
    "terms": "map<string, float>",
    "kl_ref": "float32",
    "advantage": "float32",
    "staleness": "int32",
    "seed": "int64",
}
"""Columns of a record and their Arrow types."""


@dataclass(frozen=True)
class Piece:
    """One file: iterations ``first`` to ``last`` as one rank saw them in one start of the run."""

    path: Path
    start: int
    first: int
    last: int
    rank: int


def piece_path(folder: Path, start: int, first: int, last: int, rank: int) -> Path:
    """The file of a piece; ``folder`` is the run's."""
    return folder / FOLDER / f"start_{start}" / f"iterations_{first:06d}-{last:06d}.rank_{rank}.parquet"


def pieces(folder: Path) -> list[Piece]:
    """The pieces of a run that count, in the order of iterations and ranks.

    Iterations that were done again after a resume count once, as the newest start did them: a piece of an earlier start
    is left out, or cut (``last``), from the first iteration on that a later start has recorded.
    """
    found: dict[int, list[Piece]] = {}
    for path in (folder / FOLDER).glob("start_*/iterations_*.parquet"):
        start, named = START.fullmatch(path.parent.name), PIECE.fullmatch(path.name)
        if start and named:
            first, last, rank = map(int, named.groups())
            found.setdefault(int(start[1]), []).append(Piece(path, int(start[1]), first, last, rank))
    kept: list[Piece] = []
    end: float = float("inf")
    for number in sorted(found, reverse=True):
        for piece in _without_doubles(found[number]):
            if piece.first < end:
                kept.append(replace(piece, last=int(min(piece.last, end - 1))))
        end = min(end, *(piece.first for piece in found[number]))
    return sorted(kept, key=lambda piece: (piece.first, piece.rank))


def _without_doubles(of_start: Sequence[Piece]) -> Iterator[Piece]:
    """Leave out pieces that a longer one of the same rank contains."""
    for piece in of_start:
        longer = (o for o in of_start if o.rank == piece.rank and o.last - o.first > piece.last - piece.first)
        if not any(other.first <= piece.first and piece.last <= other.last for other in longer):
            yield piece


def next_start(folder: Path) -> int:
    """Number of the start that begins now: one more than any in the folder."""
    numbers = [START.fullmatch(path.name) for path in (folder / FOLDER).glob("start_*")]
    return 1 + max((int(number[1]) for number in numbers if number), default=0)


def schema() -> pyarrow.Schema:
    """The columns as Arrow knows them."""
    import pyarrow

    types = {"int32": pyarrow.int32(), "int64": pyarrow.int64(), "float32": pyarrow.float32()}
    types |= {"string": pyarrow.string(), "map<string, float>": pyarrow.map_(pyarrow.string(), pyarrow.float32())}
    return pyarrow.schema([(name, types[kind]) for name, kind in COLUMNS.items()])


def write_piece(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write one piece, whole or not at all; ``columns`` are those of :data:`COLUMNS`."""
    import pyarrow

    _write(path, pyarrow.table(dict(columns), schema=schema()))


def _write(path: Path, table: pyarrow.Table) -> None:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        pyarrow.parquet.write_table(table, partial, compression="zstd")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def compact(folder: Path, start: int, rank: int, last: int) -> None:
    """Join this rank's pieces of single iterations of this start, up to ``last``, into one, then remove them."""
    own = [piece for piece in pieces(folder) if (piece.start, piece.rank) == (start, rank) and piece.last <= last]
    single = [piece for piece in own if piece.first == piece.last]
    if len(single) < 2:
        return
    import pyarrow

    joined = pyarrow.concat_tables([_read(piece, None) for piece in single])
    _write(piece_path(folder, start, single[0].first, single[-1].last, rank), joined)
    for piece in single:
        piece.path.unlink(missing_ok=True)


def read_records(
    folder: Path,
    *,
    columns: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    since: int = 0,
    rank: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The records of a run, each iteration as it was done last; in the order of iterations within each rank.

    Args:
        folder: the run's.
        columns: which; ``None`` for all.
        keys: of these prompts only; ``None`` for all.
        since: the first iteration.
        rank: of this rank only; ``None`` for all.

    Raises:
        InputError: a piece cannot be read; names the file.
    """
    import pyarrow
    import pyarrow.compute as compute

    for piece in pieces(folder):
        if piece.last < since or rank not in (None, piece.rank):
            continue
        wanted = None if columns is None else [*dict.fromkeys([*columns, "iteration", "key"])]
        table = _read(piece, wanted)
        chosen = compute.and_(
            compute.greater_equal(table["iteration"], since), compute.less_equal(table["iteration"], piece.last)
        )
        if keys is not None:
            chosen = compute.and_(chosen, compute.is_in(table["key"], pyarrow.array(list(keys), pyarrow.string())))
        for row in table.filter(chosen).to_pylist():
            yield row | {"terms": dict(row["terms"] or ())} if "terms" in row else row


def _read(piece: Piece, columns: Sequence[str] | None) -> pyarrow.Table:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(piece.path).read(columns)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise InputError(f"{piece.path} cannot be read as Parquet ({error}); remove it to do without it") from error
