"""Where data rows come from: JSONL, Parquet and Hugging Face datasets; a list of rows is a source as it is.

A source is anything that can be iterated over and gives one mapping per row. Every row carries the place it came from
(``train.jsonl:12``) under :data:`SOURCE_KEY`, so that an error found much later can still name it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from omegaconf import OmegaConf

SOURCE_KEY = "_source"
"""Key of a row's place of origin; also read by the rewards for their error messages."""

Row = dict[str, Any]


class DataError(ValueError):
    """Data that cannot be used. The message says where, what was found and what is allowed."""


class JSONLSource:
    """One JSON object per line; blank lines are skipped.

    Args:
        path: the file; a relative path counts from where the command was typed, see :func:`resolve_path`.
        limit: rows at most, the first ones; ``None`` reads all.
    """

    def __init__(self, path: str | Path, *, limit: int | None = None) -> None:
        self.path, self.limit = resolve_path(path), _check_limit(limit)

    def __iter__(self) -> Iterator[Row]:
        _check_file(self.path)
        with self.path.open("rb") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            for number, line in islice(lines, self.limit):
                place = f"{self.path}:{number}"
                yield {**_parse_line(line, place), SOURCE_KEY: place}


class ParquetSource:
    """One row per record of a Parquet file.

    Args:
        path: the file, as for :class:`JSONLSource`.
        limit: rows at most, the first ones; ``None`` reads all.
    """

    def __init__(self, path: str | Path, *, limit: int | None = None) -> None:
        self.path, self.limit = resolve_path(path), _check_limit(limit)

    def __iter__(self) -> Iterator[Row]:
        import pyarrow
        import pyarrow.parquet

        _check_file(self.path)
        try:
            file = pyarrow.parquet.ParquetFile(self.path)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{self.path} is not a Parquet file: {error}") from error
        with file:
            rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
            for number, row in enumerate(islice(rows, self.limit), start=1):
                yield {**row, SOURCE_KEY: f"{self.path}:{number}"}


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


READERS: dict[str, Callable[..., Iterable[Row]]] = {
    ".jsonl": JSONLSource,
    ".ndjson": JSONLSource,
    ".parquet": ParquetSource,
}


def open_source(value: Any) -> Iterable[Mapping[str, Any]]:
    """The source a setting stands for.

    Args:
        value: a source object or a list of rows (both returned as they are), the path of a ``.jsonl`` or
            ``.parquet`` file, a folder written by ``Dataset.save_to_disk``, or a list of such paths, read in turn.

    Raises:
        DataError: nothing of that kind.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, (str, Path)):
        return _open_path(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, (str, Path)) for item in value):
        return [row for path in value for row in _open_path(path)]
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise DataError(
            f"{value!r} is not a data source; allowed: a path, a list of paths, a list of rows, "
            "or an object (`_target_`) that gives rows when iterated over"
        )
    return value


def read_rows(source: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Plain rows of a source, each with its place of origin.

    Raises:
        DataError: a row is not a mapping.
    """
    for number, row in enumerate(source):
        place = f"{type(source).__name__}:{number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{place}: a row must be a mapping of column names to values, not {row!r:.80}")
        yield {SOURCE_KEY: place, **row}


def resolve_path(path: str | Path) -> Path:
    """Absolute form of a path: ``~`` and environment variables expanded, relative to where the command was typed."""
    base = Path(get_original_cwd()) if HydraConfig.initialized() else Path.cwd()
    return base / Path(os.path.expandvars(path)).expanduser()


def _open_path(path: str | Path) -> Iterable[Row]:
    resolved = resolve_path(path)
    if resolved.is_dir():
        return HFDatasetSource(path)
    reader = READERS.get(resolved.suffix.lower())
    if reader is not None:
        return reader(path)
    hint = "" if resolved.is_file() else f"; nothing lies at {resolved}"
    raise DataError(
        f"{str(path)!r} is not a data file: allowed are {', '.join(READERS)} and folders written by "
        f"Dataset.save_to_disk{hint}. For a dataset on the hub use _target_: lightning_rlhf.data.HFDatasetSource"
    )


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"there is no file {path}")


def _check_limit(limit: int | None) -> int | None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise DataError(f"limit = {limit!r} is not allowed: a whole number >= 1, or null for all rows")
    return limit


def _parse_line(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text ({error.reason} at byte {error.start}): {line[:60]!r}") from error
    except json.JSONDecodeError as error:
        start = line.decode("utf-8-sig").strip()[:60]
        raise DataError(f"{place}: not valid JSON ({error.msg} at column {error.colno}): {start!r}") from error
    if not isinstance(row, dict):
        raise DataError(f'{place}: a line must hold one JSON object such as {{"prompt": ...}}, not {row!r:.60}')
    return row
