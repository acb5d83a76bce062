"""How idle OpenMP threads wait, set before PyTorch is imported, as its OpenMP reads the setting once.

By default they spin between two parallel regions. A small model has thousands of those a second, so beside one other
busy process a spinning thread takes the core from the one it waits for, and a run becomes five times slower.
"""

from __future__ import annotations

import os

PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Variables of the OpenMP standard, of GNU's (PyTorch wheels on Linux), and of Intel's and LLVM's."""


def wait_passively() -> None:
    """Let threads sleep while they wait, unless one of these variables is set already."""
    if not any(name in os.environ for name in PASSIVE):
        os.environ.update(PASSIVE)


def waiting() -> dict[str, str]:
    """Those of the variables that are set, for processes that do not inherit the environment."""
    return {name: os.environ[name] for name in PASSIVE if name in os.environ}
