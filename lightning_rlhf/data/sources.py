"""Where data rows come from: JSONL, Parquet and Hugging Face datasets; a list of rows is a source as well.

A source is anything that can be iterated over and gives one mapping per row. Every row carries its place of origin
(``train.jsonl:12``) under :data:`SOURCE_KEY`, so that an error found much later can still name it.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from omegaconf import OmegaConf

from lightning_rlhf.faults import Faults, excerpt

SOURCE_KEY = "_source"
"""Key of a row's place of origin; the rewards read it for their error messages."""

GZIP = b"\x1f\x8b"
PACKED = (".gz", ".zip", ".zst", ".bz2", ".xz")

Row = dict[str, Any]


class DataError(ValueError):
    """Data that cannot be used. The message says where, what was found and what is allowed."""


class FileError(DataError):
    """A file that is not what it should be; its further lines say nothing more."""


class RowReader(ABC):
    """A source whose rows may each be at fault."""

    @abstractmethod
    def read(self, faults: Faults) -> Iterator[Row]:
        """The rows that can be read; the others are added to ``faults``."""

    def __iter__(self) -> Iterator[Row]:
        """The rows up to the first at fault.

        Raises:
            DataError: rows cannot be read; it is raised in place of the first, and names the others, too.
        """
        faults = Faults()
        for row in self.read(faults):
            if not faults:
                yield row
        if faults:
            raise DataError(str(faults))


class JSONLSource(RowReader):
    """One JSON object per line; blank lines are skipped.

    Args:
        path: a file, a folder of such files, or a pattern (``shards/part-*.jsonl``), see :func:`find_files`.
        limit: rows at most, the first ones; ``None`` reads all.
    """

    suffixes = (".jsonl", ".ndjson")

    def __init__(self, path: str | Path, *, limit: int | None = None) -> None:
        self.path, self.limit = resolve_path(path), _check_limit(limit)

    def read(self, faults: Faults) -> Iterator[Row]:
        lines = chain.from_iterable(map(self._lines, find_files(self.path, self.suffixes)))
        unreadable: Path | None = None
        for path, number, line in islice(lines, self.limit):
            if path == unreadable:
                continue
            try:
                yield {**parse_line(line, f"{path}:{number}"), SOURCE_KEY: f"{path}:{number}"}
            except DataError as error:
                faults.add(error)
                unreadable = path if isinstance(error, FileError) else None

    def _lines(self, path: Path) -> Iterator[tuple[Path, int, bytes]]:
        empty = True
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and line.strip() != codecs.BOM_UTF8:
                    empty = False
                    yield path, number, line
        if empty:
            raise DataError(f"{path} holds no row")


class ParquetSource:
    """One row per record of Parquet files.

    Args:
        path: a file, a folder of such files (shards), or a pattern, see :func:`find_files`.
        limit: rows at most, the first ones; ``None`` reads all.
    """

    suffixes = (".parquet",)

    def __init__(self, path: str | Path, *, limit: int | None = None) -> None:
        self.path, self.limit = resolve_path(path), _check_limit(limit)

    def __iter__(self) -> Iterator[Row]:
        return islice(chain.from_iterable(map(self._read, find_files(self.path, self.suffixes))), self.limit)

    def _read(self, path: Path) -> Iterator[Row]:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file: {error}") from error
        with file:
            rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
            for number, row in enumerate(rows, start=1):
                yield {**row, SOURCE_KEY: f"{path}:{number}"}


class HFDatasetSource:
    """A Hugging Face dataset: a folder written by ``save_to_disk``, or a name on the hub.

    Args:
        path: folder or hub name.
        split: for example ``train``, or ``train[:500]`` with a hub name.
        name: configuration of a hub dataset.
        limit: rows at most, the first ones; ``None`` reads all.

    Raises:
        ImportError: the package ``datasets`` (extra ``data``) is not installed.
    """

    def __init__(
        self, path: str | Path, *, split: str = "train", name: str | None = None, limit: int | None = None
    ) -> None:
        self.path, self.split, self.name, self.limit = str(path), split, name, _check_limit(limit)

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(islice(self._load(), self.limit)):
            yield {**row, SOURCE_KEY: f"{self.path}[{self.split}]:{number}"}

    def _load(self) -> Iterable[Mapping[str, Any]]:
        try:
            import datasets
        except ImportError as error:
            raise ImportError(
                f"the dataset {self.path} needs the package `datasets`: pip install 'lightning-rlhf[data]'"
            ) from error
        folder = resolve_path(self.path)
        if not folder.is_dir():
            return datasets.load_dataset(self.path, self.name, split=self.split)
        try:
            loaded = datasets.load_from_disk(str(folder))
        except FileNotFoundError as error:
            raise DataError(f"{folder} is not a folder written by Dataset.save_to_disk: {error}") from error
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if self.split not in loaded:
            raise DataError(f"{folder} has no split {self.split!r}; there are: {', '.join(loaded)}")
        return loaded[self.split]


READERS: dict[str, type[JSONLSource | ParquetSource]] = {
    suffix: reader for reader in (JSONLSource, ParquetSource) for suffix in reader.suffixes
}


def open_source(value: Any) -> Iterable[Mapping[str, Any]]:
    """The source that a setting names.

    Args:
        value: a source object or a list of rows (both returned as they are), the path of a ``.jsonl`` or
            ``.parquet`` file, a folder or pattern of such files, a folder written by ``Dataset.save_to_disk``, or a
            list of such paths, read in turn.

    Raises:
        DataError: it is none of these.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, (str, Path)):
        return _open_path(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, (str, Path)) for item in value):
        return Sources([_open_path(path) for path in value])
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise DataError(
            f"{value!r} is not a data source; allowed: a path, a list of paths, a list of rows, "
            "or an object (`_target_`) that gives rows when iterated over"
        )
    return value


class Sources(RowReader):
    """Sources read in turn."""

    def __init__(self, sources: Sequence[Iterable[Mapping[str, Any]]]) -> None:
        self.sources = sources

    def read(self, faults: Faults) -> Iterator[Row]:
        return chain.from_iterable(read_rows(source, faults) for source in self.sources)


def read_rows(source: Iterable[Mapping[str, Any]], faults: Faults) -> Iterator[Row]:
    """Plain rows of a source, each with its place of origin; rows that cannot be used are added to ``faults``."""
    # A subclass with an __iter__ of its own is read through it.
    reads = isinstance(source, RowReader) and type(source).__iter__ is RowReader.__iter__
    for number, row in enumerate(source.read(faults) if reads else source):  # type: ignore[attr-defined]
        origin = f"{type(source).__name__}:{number}"
        if isinstance(row, Mapping):
            yield {SOURCE_KEY: origin, **row}
        else:
            faults.add(f"{origin}: a row must be a mapping of column names to values, not {row!r:.80}")


def listed(items: Sequence[str], most: int = 5) -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def resolve_path(path: str | Path) -> Path:
    """Absolute form of a path: ``~`` and environment variables expanded, relative to the command's working folder."""
    base = Path(get_original_cwd()) if HydraConfig.initialized() else Path.cwd()
    return base / Path(os.path.expandvars(path)).expanduser()


def find_files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """The file, or all files of a folder or pattern (``*``, ``?``, ``[...]``) with one of the suffixes, sorted by name.

    Files that begin with a dot or an underscore (``_SUCCESS`` and the like) are left out.

    Raises:
        DataError: there is none.
    """
    if path.is_file():
        return [path]
    pattern = str(path / "*") if path.is_dir() else str(path)
    named = [Path(name) for name in glob.glob(pattern)]
    found = sorted(
        file for file in named if file.suffix.lower() in suffixes and file.is_file() and file.name[0] not in "._"
    )
    if found:
        return found
    if path.is_dir():
        others = ", ".join(sorted(file.name for file in named)[:8]) or "nothing"
        raise DataError(f"the folder {path} has no file that ends in {' or '.join(suffixes)}; it holds: {others}")
    raise DataError(f"there is no file {path}")


def _open_path(path: str | Path) -> Iterable[Row]:
    resolved = resolve_path(path)
    if resolved.is_dir() and any((resolved / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return HFDatasetSource(path)
    inside = {file.suffix.lower() for file in resolved.iterdir()} if resolved.is_dir() else {resolved.suffix.lower()}
    readers = {READERS[suffix] for suffix in inside if suffix in READERS}
    if len(readers) == 1:
        return readers.pop()(path)
    if readers:
        raise DataError(f"the folder {resolved} holds both JSONL and Parquet files; name one kind, as in *.parquet")
    hint = "" if resolved.exists() else f"; nothing lies at {resolved}"
    if resolved.suffix.lower() in PACKED:
        hint += "; unpack it first"
    raise DataError(
        f"{str(path)!r} is not a data file: allowed are {', '.join(READERS)} and folders of such files or written by "
        f"Dataset.save_to_disk{hint}. For a dataset on the hub use _target_: lightning_rlhf.data.HFDatasetSource"
    )


def _check_limit(limit: int | None) -> int | None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise DataError(f"limit = {limit!r} is not allowed: a whole number >= 1, or null for all rows")
    return limit


def parse_line(line: bytes, origin: str) -> Row:
    """One line of a JSONL file.

    Raises:
        DataError: it is no JSON object; names place, column (in characters, from 1) and the text there.
        FileError: the same, in the first line of a file of another kind.
    """
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise FileError(f"{origin}: not UTF-8 text but UTF-16; save the file as UTF-8")
    if line.startswith(GZIP):
        raise FileError(f"{origin}: not text but a gzip archive; unpack it first")
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode("utf-8").rstrip()
    except UnicodeDecodeError as error:
        found = line[max(0, error.start - 30) : error.start + 30]
        raise DataError(f"{origin}: not UTF-8 text ({error.reason} at byte {error.start + 1}): {found!r}") from error
    try:
        row = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        hint = _hint(text, origin)
        said = f"not valid JSON ({error.msg} at column {error.pos + 1}): {excerpt(text, error.pos)}{hint}"
        raise (FileError if hint else DataError)(f"{origin}: {said}") from error
    except RecursionError:
        raise DataError(f"{origin}: not valid JSON that can be read: it is nested too deeply") from None
    except _NotStrict as error:
        raise DataError(f"{origin}: {error}, in {text!r:.90}") from None
    if not isinstance(row, dict):
        hint = _hint(text, origin)
        said = f'a line must hold one JSON object such as {{"prompt": ...}}, not {row!r:.60}{hint}'
        raise (FileError if hint else DataError)(f"{origin}: {said}")
    if "\\ud" in text.lower():  # an escape that may be half of a surrogate pair, which could not be encoded later
        try:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            said = f"no valid Unicode: {half!r} is half of a surrogate pair, in {excerpt(error.object, error.start)}"
            raise DataError(f"{origin}: {said}") from None
    return row


class _NotStrict(ValueError):
    """What Python's parser reads in silence, and would change the row."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _NotStrict(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return found


def _no_number(name: str) -> None:
    raise _NotStrict(f"{name} is not allowed in JSON: a number, or null where there is none")


def _hint(text: str, origin: str) -> str:
    """What kind of file this seems to be, if it is not JSONL from its first line on."""
    if not origin.endswith(":1") or not (text.startswith("[") or text == "{"):
        return ""
    kind, filter_ = ("one JSON array", "'.[]'") if text.startswith("[") else ("JSON over several lines", ".")
    return f"; this looks like {kind}, JSONL has one object per line, as jq -c {filter_} old.json > new.jsonl writes it"
