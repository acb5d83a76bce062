"""``lightning-rlhf supervise``: its words, the run's folder, and the supervisor at work there."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_rlhf.command_words import refuse_words
from lightning_rlhf.errors import InputError, SettingError
from lightning_rlhf.runs.folder import STARTS, claim, locked
from lightning_rlhf.runs.recompose import value_of
from lightning_rlhf.supervise import files, process, settings
from lightning_rlhf.supervise.notify import Notifier
from lightning_rlhf.supervise.supervisor import Supervisor

ONCE = "--once"

_LOOKING = ("-m", "--multirun", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion", "--hydra-help")


def supervise(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: words of ``train``, ``supervise=FILE``, ``supervise.KEY=VALUE``, ``--once``.

    Returns:
        The exit code: that of the last attempt, or with ``--once`` the judgement.

    Raises:
        InputError: the words or settings are not allowed, or another supervisor is at work in the folder.
    """
    logging.basicConfig(format="%(message)s")  # warnings of this process go to stderr
    once = ONCE in arguments
    try:
        chosen, words = settings.read([word for word in arguments if word != ONCE])
    except SettingError as error:
        raise InputError(str(error)) from error
    _refuse(words)
    notifier = Notifier(chosen.notify)
    folder, made = _run_folder(words)
    own = [word for word in arguments if word not in words]
    with process.Relay() as relay, locked(folder / files.FOLDER):
        try:
            return Supervisor(chosen, words, folder, notifier, relay, _shown(own)).run(once=once)
        finally:
            notifier.wait()
            if made and not (folder / STARTS).exists():  # refused before anything was started
                shutil.rmtree(folder)


def _refuse(words: list[str]) -> None:
    """Refuse what cannot be supervised.

    Raises:
        InputError: says why.
    """
    refuse_words(words)
    looking = [word for word in words if word.partition("=")[0] in _LOOKING or word == "hydra.mode=MULTIRUN"]
    if looking:
        raise InputError(f"{looking[0]} is not allowed: supervise starts one training; lightning-rlhf train takes it")
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError(
            "supervise is started once, not by each task of srun or torchrun: it starts the training itself, which "
            "starts a process for each device (trainer.devices)"
        )
    where = value_of(words, "resume")
    if where not in (None, "latest") and value_of(words, "hydra.run.dir") is None and not Path(str(where)).is_dir():
        raise InputError(
            f"resume = {where!r} needs hydra.run.dir=FOLDER beside it: where the training goes on. Allowed without it: "
            "the folder of a run, which goes on there"
        )


def _run_folder(words: list[str]) -> tuple[Path, bool]:
    """The folder of the run, and whether it was made here; the training is told to use it."""
    where, named = value_of(words, "resume"), value_of(words, "hydra.run.dir")
    if named is None and where == "latest":
        raise InputError("resume = 'latest' needs hydra.run.dir=FOLDER: otherwise each start has a new folder")
    if "${" in f"{named}{where}":
        raise InputError(f"{named or where!r} is not allowed: supervise needs the path of the folder, without ${{...}}")
    if named is not None or where is not None:
        folder = Path(str(named if named is not None else where)).expanduser().absolute()
        return folder, not folder.exists()
    return claim(Path("outputs", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))).absolute(), True


def _shown(own: Sequence[str]) -> str:
    """The words for the supervisor, as they are typed again; addresses are left out."""
    secret = "supervise.notify="
    return " ".join(f"{secret}..." if word.startswith(secret) else shlex.quote(word) for word in own)
