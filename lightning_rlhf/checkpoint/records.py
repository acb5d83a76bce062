"""Records beside a checkpoint: that it was verified, or why it is not.

``iteration_000010.ckpt`` has ``iteration_000010.verified.json``, with size and SHA-256, or
``iteration_000010.unverified.json``, with the problem. Every ``iteration_000010.*.json`` belongs to it, whoever has
written it, and is removed with it.
"""

from __future__ import annotations

import glob
import hashlib
import json
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf import __version__
from lightning_rlhf.files import write_whole

MANIFEST = "manifest.json"
"""File in a folder of shards: sizes and hashes of all its files."""
VERIFIED, UNVERIFIED, SUSPECT = "verified", "unverified", "suspect"
"""Kinds of records. A run that crashed may have begun from a suspect one."""


def record_of(path: Path, kind: str) -> Path:
    """Path of a checkpoint's record of one kind."""
    return path.with_name(f"{path.name.removesuffix('.ckpt')}.{kind}.json")


def records(path: Path) -> list[Path]:
    """All records of a checkpoint that exist."""
    if not path.name.endswith(".ckpt"):
        return []
    return sorted(path.parent.glob(f"{glob.escape(path.name.removesuffix('.ckpt'))}.*.json"))


def digest(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file, as a manifest holds them."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            sha256.update(part)
    return {"bytes": path.stat().st_size, "sha256": sha256.hexdigest()}


def hashed_file(path: Path) -> Path:
    """The file whose hash stands for a checkpoint: itself, or a folder's manifest, which hashes all its files."""
    return path / MANIFEST if path.is_dir() else path


def write_record(path: Path, kind: str, **content: Any) -> None:
    """Write a checkpoint's record; the version of the kit is added.

    Raises:
        OSError: it could not be written.
    """
    text = json.dumps({**content, "lightning_rlhf": __version__}, indent=2, ensure_ascii=False)
    write_whole(record_of(path, kind), text + "\n")


def read_record(path: Path, kind: str) -> dict[str, Any] | None:
    """A checkpoint's record of one kind; ``None`` if there is none, or, with a warning, if it cannot be read."""
    file = record_of(path, kind)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        rank_zero_warn(f"{file} cannot be used, so {path.name} is judged without it: {error}")
        return None
    return content


def is_verified(path: Path) -> bool:
    """Whether the checkpoint was found to be good when it was written, and no crash has made it suspect since."""
    bad = any(record_of(path, kind).exists() for kind in (UNVERIFIED, SUSPECT))
    return record_of(path, VERIFIED).exists() and not bad


def problem_of(path: Path) -> str | None:
    """Why a checkpoint failed its verification; ``None`` if it did not."""
    if not record_of(path, UNVERIFIED).exists():
        return None
    return str((read_record(path, UNVERIFIED) or {}).get("problem", "its record cannot be read"))
