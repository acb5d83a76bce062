"""The training of a supervisor: ``python -m lightning_rlhf.supervise.start PARENT [words of train ...]``.

It ends with its supervisor, however that ends.
"""

from __future__ import annotations

import os
import signal
import sys

from lightning_rlhf.supervise.kernel import die_with_parent


def main(arguments: list[str]) -> int:
    """Train as ``lightning-rlhf train`` does, unless the supervisor is gone already."""
    parent, words = int(arguments[0]), arguments[1:]
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return 128 + signal.SIGKILL
    from lightning_rlhf import cli

    return cli.main(["train", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
