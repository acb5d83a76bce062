"""How a run that did not come to its end is spoken of: why, what is left of it, and the command that goes on."""

from __future__ import annotations

import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_rlhf.checkpoint_files import iteration_of
from lightning_rlhf.interruption import Interrupted
from lightning_rlhf.reporting.terminal import note, say
from lightning_rlhf.schema import InputError


class RunFailed(RuntimeError):
    """A run has failed in other processes, which have said why; the message is all there is to say."""


@contextmanager
def told(config: Mapping[str, Any], *, speaks: bool) -> Iterator[None]:
    """What goes on inside is a run: where it ends early, the user is told how to go on.

    An error gets that as notes, which stand below its traceback.

    Args:
        config: plain containers, as :func:`lightning_rlhf.schema.check` returns them.
        speaks: whether this process speaks for all of the run.
    """
    try:
        yield
    except Interrupted as stop:
        if speaks:
            say("\n".join([f"stopped by {stop}", *how_to_go_on(config)]))
        stop.told = True
        raise
    except InputError:
        raise
    except Exception as error:
        lines = ["the run has FAILED", *how_to_go_on(config)]
        if speaks:
            note("".join(traceback.format_exception(type(error), error, error.__traceback__)) + "\n".join(lines))
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note("\n".join(lines))
        elif speaks:
            print("\n".join(lines), file=sys.stderr, flush=True)
        raise


def how_to_go_on(config: Mapping[str, Any]) -> list[str]:
    """The run's folder, its newest checkpoint and the command that resumes it."""
    output = Path(config["output_dir"]).absolute()
    lines = [f"output folder: {output}"]
    folder = _checkpoint_folder(config)
    found = [path for path in folder.glob("*.ckpt") if iteration_of(path) >= 0]
    if found:
        newest = max(found, key=iteration_of)
        where: Path | str = output if folder == output / "checkpoints" else folder
        return [*lines, f"newest checkpoint: {newest}", f"to go on: {resume_command(where)}"]
    if config.get("resume") not in (None, "latest"):
        return [*lines, "no checkpoint since it was resumed", f"to go on: {resume_command(config['resume'])}"]
    return [*lines, "no checkpoint yet: nothing to go on from"]


def resume_command(where: Path | str) -> str:
    """The command that resumes a run, as a shell and Hydra read it."""
    if re.fullmatch(r"[\w./+-]+", str(where)):
        return f"lightning-rlhf train resume={where}"
    escaped = str(where).replace('"', '\\"')
    return "lightning-rlhf train " + shlex.quote(f'resume="{escaped}"')


def _checkpoint_folder(config: Mapping[str, Any]) -> Path:
    """Where the run's checkpoints are, whichever of the callbacks writes them."""
    blocks = (config.get("callbacks") or {}).values()
    places = [block["dirpath"] for block in blocks if isinstance(block, Mapping) and block.get("dirpath")]
    return Path(places[0] if places else Path(config["output_dir"]) / "checkpoints").absolute()
