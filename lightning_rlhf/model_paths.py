"""Whether a model can be where a path says, in a folder or on the Hugging Face hub; known before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache

MODEL, ADAPTER = "config.json", "adapter_config.json"
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_TIMEOUT = 10.0  # seconds


def fault_of(path: str, revision: str = "main") -> str | None:
    """Why there is no model or adapter in a folder or under a hub id, in one line; ``None`` if there may be one.

    Args:
        path: a folder or hub id.
        revision: on the hub.
    """
    local = Path(path).expanduser()
    if not path or not local.exists():
        return absent(path, revision)
    if not local.is_dir():
        return "it is a file, not a folder"
    return None if (local / ADAPTER).is_file() else folder_fault(local)


def absent(path: str, revision: str = "main") -> str | None:
    """Why a path that does not exist here is no model of the hub either; ``None`` if it is one.

    One that can only be local is refused without a request.
    """
    looks_local = path.startswith((".", "/", "~")) or path.endswith(".gguf")
    if looks_local or not _HUB_ID.fullmatch(path):
        return "there is no such file or folder"
    return _hub_fault(path, revision)


def folder_fault(folder: Path) -> str | None:
    """Why a folder holds no model; ``None`` if it has a configuration of one."""
    if (folder / MODEL).is_file():
        return None
    if not any(folder.iterdir()):
        return "the folder is empty"
    return f"the folder has no config.json; {listing(folder)}"


def listing(folder: Path) -> str:
    """The first names in a folder, in words."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith((".", "__")))
    more = ", ..." if len(names) > 8 else ""
    return f"it holds: {', '.join(names[:8]) or 'nothing'}{more}"


def _hub_fault(path: str, revision: str) -> str | None:
    """One quick request to the hub, instead of a minute of retries while loading."""
    if any(isinstance(try_to_load_from_cache(path, name, revision=revision), str) for name in (MODEL, ADAPTER)):
        return None
    try:
        HfApi().model_info(path, revision=revision, timeout=_HUB_TIMEOUT)
    except Exception as error:  # the hub client's exceptions share no base class; all mean that nothing can be loaded
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"no such folder here, and the Hugging Face hub gave no such model ({reason})"
    return None
