"""Records of single samples in a run's folder: Parquet pieces that a crash cannot spoil, and their reader.

``prompts/start_2/iterations_000011-000020.rank_0.parquet`` holds what rank 0 saw in iterations 11 to 20 of the run's
second start. A piece is written beside its place and renamed. Each iteration becomes a piece of its own at once;
:func:`compact` joins them later. If a process dies between the two, both are there, and the reader takes one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    "safety": "string",
    "tokens": "int32",
    "score": "float32",
    "terms": "map<string, float>",
    "kl_ref": "float32",
    "advantage": "float32",
    "staleness": "int32",
    "seed": "int64",
}
"""Columns of a record and their Arrow types."""
LATER = ("safety",)
"""Columns that pieces of earlier releases lack; they are null there."""


@dataclass(frozen=True)
class Piece:
    """One file: iterations ``first`` to ``last`` as one rank saw them in one start of the run."""

    path: Path
    start: int
    first: int
    last: int
    rank: int


class DamagedPieces:
    """Pieces that cannot be read: each is told once, and its samples are left out.

    Args:
        tell: gets the line about a piece.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._errors: dict[Path, InputError] = {}
        self._read_any = False

    def __repr__(self) -> str:
        return f"DamagedPieces({sorted(map(str, self._errors))})"

    def read(self, piece: Piece, columns: Sequence[str] | None) -> pyarrow.Table | None:
        """The columns of a piece, see :data:`COLUMNS`; ``None`` if it cannot be read."""
        try:
            table = _read(piece, columns)
        except InputError as error:
            if piece.path not in self._errors:
                self._errors[piece.path] = error
                self._tell(f"{error}: its samples are left out")
            return None
        self._read_any = True
        return table

    def refuse_if_all(self) -> None:
        """To be called after reading.

        Raises:
            InputError: there were pieces, and none of them could be read; it is about the first one.
        """
        if self._errors and not self._read_any:
            raise next(iter(self._errors.values()))


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


def compact(folder: Path, start: int, rank: int, last: int, damaged: DamagedPieces | None = None) -> None:
    """Join this rank's pieces of single iterations of this start, up to ``last``, into one, then remove them.

    One that ``damaged`` is told of stays as it is, and those before and after it become two: it would count as part of
    a joined one.

    Raises:
        InputError: a piece cannot be read, and ``damaged`` is ``None``.
    """
    own = [piece for piece in pieces(folder) if (piece.start, piece.rank) == (start, rank) and piece.last <= last]
    single = [piece for piece in own if piece.first == piece.last]
    if len(single) < 2:
        return
    import pyarrow

    read: list[dict[Piece, pyarrow.Table]] = [{}]
    for piece in single:
        table = _read(piece, None) if damaged is None else damaged.read(piece, None)
        if table is None:
            read.append({})
        else:
            read[-1][piece] = table
    for tables in read:
        if len(tables) < 2:
            continue
        joined = list(tables)
        path = piece_path(folder, start, joined[0].first, joined[-1].last, rank)
        _write(path, pyarrow.concat_tables(tables.values()))
        for piece in joined:
            piece.path.unlink(missing_ok=True)


def read_records(
    folder: Path,
    *,
    columns: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    since: int = 0,
    rank: int | None = None,
    damaged: DamagedPieces | None = None,
) -> Iterator[dict[str, Any]]:
    """The records of a run, each iteration as it was done last; in the order of iterations within each rank.

    Args:
        folder: the run's.
        columns: which; ``None`` for all.
        keys: of these prompts only; ``None`` for all.
        since: the first iteration.
        rank: of this rank only; ``None`` for all.
        damaged: is told of pieces that cannot be read, which are left out; ``None``: they are refused.

    Raises:
        InputError: a piece cannot be read, and ``damaged`` is ``None``; names the file.
    """
    import pyarrow
    import pyarrow.compute as compute

    for piece in pieces(folder):
        if piece.last < since or rank not in (None, piece.rank):
            continue
        wanted = None if columns is None else [*dict.fromkeys([*columns, "iteration", "key"])]
        table = _read(piece, wanted) if damaged is None else damaged.read(piece, wanted)
        if table is None:
            continue
        chosen = compute.and_(
            compute.greater_equal(table["iteration"], since), compute.less_equal(table["iteration"], piece.last)
        )
        if keys is not None:
            chosen = compute.and_(chosen, compute.is_in(table["key"], pyarrow.array(list(keys), pyarrow.string())))
        for row in table.filter(chosen).to_pylist():
            yield row | {"terms": dict(row["terms"] or ())} if "terms" in row else row


def _read(piece: Piece, columns: Sequence[str] | None) -> pyarrow.Table:
    """The columns, checked down to the bytes of the texts: what is found later would not name the file."""
    import pyarrow
    import pyarrow.parquet

    names = list(COLUMNS if columns is None else columns)
    try:
        table = pyarrow.parquet.ParquetFile(piece.path).read(names)
        for name in {*names} & {*LATER} - {*table.column_names}:
            table = table.append_column(name, pyarrow.nulls(len(table), pyarrow.string()))
        table = table.select(names).cast(pyarrow.schema([schema().field(name) for name in names]))
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{piece.path} cannot be read as Parquet ({error})") from error
    return table
