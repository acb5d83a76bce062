"""The front door: ``lightning-rlhf train | eval | export | serve``. What is heavy is imported when a verb needs it."""

from __future__ import annotations

import importlib.resources
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf import __version__
from lightning_rlhf.noise import log_once, quiet

if TYPE_CHECKING:
    from omegaconf import DictConfig

USAGE = """\
lightning-rlhf {version}: reinforcement learning of language models

  lightning-rlhf train  [key=value ...]                           train; without arguments, the quickstart
  lightning-rlhf eval   checkpoint=RUN_OR_FILE [key=value ...]    score held-out prompts with a checkpoint
  lightning-rlhf export checkpoint=RUN_OR_FILE output=FOLDER      write a Hugging Face folder (force=true overwrites,
                                                                  perturbation=true adds the noise of ALP)
  lightning-rlhf serve  [port=8000 ...] [key=value ...]           start a vLLM server for a run (rollout=vllm_server)

examples
  lightning-rlhf train iterations=100 module.loss.clip_high=0.28
  lightning-rlhf train experiment=smollm2_arithmetic
  lightning-rlhf train data=jsonl data.train.path=prompts.jsonl callbacks.kl_early_stop=null
  lightning-rlhf train --multirun seed=1,2,3
  lightning-rlhf train --config-dir my_configs callbacks=mine     configs from a folder of your own
  lightning-rlhf train +callbacks.mine._target_=my_file.Mine      classes from the current folder

{groups}

train also takes Hydra's flags: --cfg job (print the configuration), --info, --multirun, --config-dir, --hydra-help.
A full traceback of every error: HYDRA_FULL_ERROR=1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit code: 0, 2 for input that cannot work (said on one screen), 1 for any other failure, 130 after Ctrl-C
        and 143 after SIGTERM.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("help", "-h", "--help") or {"-h", "--help"} & set(arguments[1:]):
        print(help_text())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    verbs: dict[str, Callable[[list[str]], None]] = {
        "train": _train,
        "eval": _eval,
        "export": _export,
        "serve": _serve,
    }
    verb, rest = arguments[0], arguments[1:]
    if verb not in verbs:
        print(f"lightning-rlhf: no verb {verb!r}; there are: {', '.join(verbs)}. See --help.", file=sys.stderr)
        return 2
    # A console script leaves the current folder out; users keep their callbacks and rewards there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with quiet(), _full_errors() as wanted:
        return _run(verbs[verb], rest, wanted)


def _run(verb: Callable[[list[str]], None], arguments: list[str], full_errors: bool) -> int:
    from hydra.errors import HydraException

    from lightning_rlhf.schema import InputError

    try:
        verb(arguments)
    except (InputError, HydraException) as error:
        if full_errors:
            traceback.print_exc()
        print(_one_screen(error), file=sys.stderr)
        return 2
    except RunEnded as ended:
        if full_errors:
            traceback.print_exc()
        print(f"{ended}\n(full traceback: HYDRA_FULL_ERROR=1)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there was a run
        print("lightning-rlhf: interrupted", file=sys.stderr)
        return 130
    except SystemExit as end:
        if not (isinstance(end.code, int) and end.code > 128):
            raise
        if not getattr(end, "told", False):
            print(f"lightning-rlhf: stopped by {end}", file=sys.stderr)
        return end.code
    return 0


def help_text() -> str:
    """The verbs, examples, and every configuration group with its options."""
    groups = _groups()
    width = max(len(name) for name in groups)
    lines = [f"  {name:<{width}}  {', '.join(options)}" for name, options in groups.items()]
    return USAGE.format(version=__version__, groups="groups (group=option)\n" + "\n".join(lines))


def _groups() -> dict[str, list[str]]:
    root = importlib.resources.files("lightning_rlhf.conf")
    folders = sorted((e for e in root.iterdir() if e.is_dir() and not e.name.startswith("_")), key=lambda e: e.name)
    return {
        folder.name: sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
        for folder in folders
    }


# --- verbs -----------------------------------------------------------------------------------------------------------


def _train(arguments: list[str]) -> None:
    import hydra

    from lightning_rlhf.schema import InputError
    from lightning_rlhf.searchpath import register

    refused: list[InputError | RunEnded] = []

    @hydra.main(version_base="1.3", config_path="pkg://lightning_rlhf.conf", config_name="train")
    def run(config: DictConfig) -> Any:
        from lightning_rlhf.train import train

        log_once()
        # Also under hydra.job.chdir=true: relative paths of data and models are those of the command.
        os.chdir(hydra.utils.get_original_cwd())
        try:
            with _told_without_servers(config.output_dir):
                return train(config)
        except (InputError, RunEnded) as error:
            refused.append(error)  # raised below: Hydra would print all overrides before the message

    register()
    if not any(word.startswith("hydra.run.dir=") for word in arguments) and _several_processes():
        from lightning_rlhf.launch import shared_name

        if name := shared_name():
            arguments = [f"hydra.run.dir=outputs/{name}", f"hydra.sweep.dir=multirun/{name}", *arguments]
    # Hydra's parser stops reading overrides at a flag behind one; flags first, both kinds in their order.
    flags = [word for word in arguments if word.startswith("-") or not ("=" in word or word.startswith("~"))]
    with _argv(["lightning-rlhf", *flags, *(word for word in arguments if word not in flags)]):
        run()
    if refused:
        raise refused[0]


def _several_processes() -> bool:
    """Whether this may be one of several processes started by torchrun or SLURM; costs no import."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_NTASKS" in os.environ


def _eval(arguments: list[str]) -> None:
    options, overrides = _options(arguments, required=["checkpoint"])
    from lightning_rlhf.evaluate import evaluate_checkpoint
    from lightning_rlhf.interruption import Signals

    with Signals(), _told_without_servers():
        evaluate_checkpoint(options["checkpoint"], overrides)


def _export(arguments: list[str]) -> None:
    options, overrides = _options(arguments, required=["checkpoint", "output"], optional=["force", "perturbation"])
    from lightning_rlhf.export import export_checkpoint
    from lightning_rlhf.schema import InputError

    flags = {name: options.get(name, "false").lower() for name in ("force", "perturbation")}
    for name, value in flags.items():
        if value not in ("true", "false"):
            raise InputError(f"{name} = {value!r} is not allowed: true or false")
    if overrides:
        raise InputError(f"export takes checkpoint=, output=, force= and perturbation=, not {overrides[0]!r}")
    from lightning_rlhf.interruption import Signals

    chosen = {name: value == "true" for name, value in flags.items()}
    with Signals():
        folder = export_checkpoint(options["checkpoint"], options["output"], **chosen)
    print(f"exported to {folder}; load it with AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def _serve(arguments: list[str]) -> None:
    from lightning_rlhf.serve import DEFAULTS, serve

    own, extra = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, extra = arguments[:cut], arguments[cut + 1 :]
    options, overrides = _options(own, required=[], optional=list(DEFAULTS))
    serve(options, overrides, extra)


def _options(
    arguments: list[str], required: list[str], optional: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The verb's own ``key=value`` arguments, and the others."""
    from lightning_rlhf.schema import InputError

    options: dict[str, str] = {}
    overrides: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise InputError(f"{argument!r} is not allowed: arguments are written key=value")
        if key in (*required, *optional):
            options[key] = value
        else:
            overrides.append(argument)
    missing = [key for key in required if not options.get(key)]
    if missing:
        raise InputError(f"{missing[0]}=... is missing")
    return options, overrides


# --- errors ----------------------------------------------------------------------------------------------------------


class RunEnded(Exception):
    """A run had to end for a reason outside of it; the message is all there is to say."""


@contextmanager
def _told_without_servers(folder: str | None = None) -> Iterator[None]:
    """A run has failed, or no rollout server is left: say so, and how to go on, instead of a traceback."""
    from lightning_rlhf.checkpoint import CheckpointError, latest_valid
    from lightning_rlhf.control import TrainingFailed
    from lightning_rlhf.ending import RunFailed
    from lightning_rlhf.rollout.pool import ServersGone

    try:
        yield
    except (TrainingFailed, CheckpointError, RunFailed) as error:
        raise RunEnded("\n".join([f"FAILED: {error}", *getattr(error, "__notes__", [])])) from error
    except ServersGone as error:
        lines = [str(error)]
        if folder is not None:
            found = latest_valid(Path(folder) / "checkpoints")
            again = f"once there are servers again, resume={folder} goes on from {found.name}" if found else ""
            lines.append(again or "there is no checkpoint yet to go on from")
        raise RunEnded("\n".join(lines)) from error


def _one_screen(error: Exception) -> str:
    from hydra.errors import OverrideParseException

    from lightning_rlhf.schema import ConfigError, InputError, shipped_keys
    from lightning_rlhf.spelling import hint

    hidden = "(full traceback: HYDRA_FULL_ERROR=1)"
    if isinstance(error, ConfigError):
        count = len(error.problems)
        return f"The configuration cannot work ({count} problem{'s' * (count > 1)}); nothing was started.\n\n{error}\n"
    if isinstance(error, InputError):
        return f"{error}\n{hidden}\n"
    text = str(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read: {text.splitlines()[0]}\n{hidden}\n"
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        text = f"there is no key {key[1]!r}"
        near = hint(key[1], shipped_keys())
        text += f"; {near}" if near else ""
        return f"{text}\nA key of your own is added with +{key[1]}=...; every key: lightning-rlhf train --cfg job\n"
    option = re.search(r"Could not find '([^/']+)/([^']+)'", text)
    if option:
        options = _groups().get(option[1], [])
        near = hint(option[2], options)
        return (
            f"there is no {option[1]}={option[2]}" + (f"; {near}" if near else "") + f"\n"
            f"Options of {option[1]}: {', '.join(options) or 'none (there is no such group)'}\n"
        )
    return f"{text}\n{hidden}\n"


@contextmanager
def _full_errors() -> Iterator[bool]:
    """Let exceptions through Hydra (it prints and exits otherwise); yields whether the user asked for tracebacks."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield before == "1"
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


@contextmanager
def _argv(arguments: list[str]) -> Iterator[None]:
    """Hydra reads ``sys.argv``."""
    before, sys.argv = sys.argv, arguments
    try:
        yield
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main())
