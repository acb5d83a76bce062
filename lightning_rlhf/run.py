"""One training in one process: trainer -> parts from a fixed seed -> fit -> closing lines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lightning import Trainer

from lightning_rlhf import precision, schema, warmup
from lightning_rlhf.assembly import Parts, assemble, find_checkpoint, make_trainer
from lightning_rlhf.checkpoint import IterationCheckpoint
from lightning_rlhf.data.sources import DataError
from lightning_rlhf.distributed.first_fault import named
from lightning_rlhf.distributed.processes import is_first, place_at_start
from lightning_rlhf.interruption import Signals
from lightning_rlhf.quiet import own_warnings_in_words
from lightning_rlhf.reporting import log_config, tell
from lightning_rlhf.reporting.progress import ProgressLines
from lightning_rlhf.reporting.terminal import run_log, say
from lightning_rlhf.runs.ending import failing, told
from lightning_rlhf.runs.folder import starts
from lightning_rlhf.runs.refusal import refuse_other_data, refuse_other_model
from lightning_rlhf.runs.resume import read_content, read_settings
from lightning_rlhf.supervise.ending import begin, recorded


def run(plain: dict[str, Any]) -> dict[str, float]:
    """Train in this process, alone or as one of several.

    Args:
        plain: as :func:`lightning_rlhf.schema.check` returns it; ``resume`` is a checkpoint or null.

    Returns:
        As :func:`train`.

    Raises:
        InputError: a part cannot be built as configured.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1; a checkpoint was written if anything was trained.
        TrainingFailed: a callback has found the run to be broken.
        CodeEnded: code of the run has raised SystemExit or the like.
        PeerFailed: another process of the run has failed, or is gone.
        RanksTimedOut: another process has not come in time.
    """
    with (
        own_warnings_in_words(),
        Signals(),
        run_log(plain["output_dir"], first=is_first()),
        recorded(),
        told(plain, speaks=is_first()),
        named(Path(plain["output_dir"]), *place_at_start(), plain["trainer"]),
        failing(),
    ):
        begin(plain, first=is_first())
        return _run(plain)


def _run(plain: dict[str, Any]) -> dict[str, float]:
    plain, replaced = precision.fit(plain)
    if is_first():
        introduce(plain, replaced)
    checkpoint = None if plain["resume"] is None else find_checkpoint(plain["resume"], "resume")
    trainer = make_trainer(plain)  # first: a callback or logger that cannot be built costs no loading and no warm-up
    saved = {} if checkpoint is None else read_content(checkpoint).get("lightning_rlhf", {})
    parts = assemble(plain, earlier_warm_up=saved.get("warm_up"))
    parts.datamodule.accept_other_data = plain["resume_on_other_data"]
    if checkpoint is not None:
        refuse_other_data(parts, checkpoint)
    with closing(parts.module.engine):
        if checkpoint is not None:
            refuse_other_model(parts.module, trainer, checkpoint)
            tell(trainer.loggers, "log_start", read_settings(checkpoint)[1])
        log_config(trainer.loggers, plain)
        try:
            # A resumed run loads its weights only in ``fit``.
            before = held_out(trainer, parts) if checkpoint is None else {}
            trainer.fit(parts.module, datamodule=parts.datamodule, ckpt_path=checkpoint, weights_only=True)
        except DataError as error:
            raise schema.InputError(str(error)) from error
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        iteration, after = parts.module.last_evaluation or (None, {})
        if iteration != parts.module.control.iteration:  # else training ended with an evaluation
            after = held_out(trainer, parts)
        if trainer.is_global_zero:
            before = before or at_the_start(trainer, plain["output_dir"])
            say("\n".join(closing_lines(parts, trainer, before, after)))
        return metrics | after


def introduce(config: dict[str, Any], replaced: Sequence[precision.Replaced] = ()) -> None:
    """Print what the user should know before the training starts."""
    for text in [*replaced, *schema.warnings(config)]:
        say(f"note: {text}")
    if config.get("warmup") and config.get("resume") is None:
        say(warmup.announcement(config["warmup"]))
    elif config.get("warmup"):
        say("the supervised warm-up of the run's start gives the reference model again")
    batch = schema.batch_sizes_of(config)
    if batch is not None:  # a custom engine or data module may name its sizes differently
        say(str(batch))


def held_out(trainer: Trainer, parts: Parts) -> dict[str, float]:
    """The greedy scores of the held-out prompts under the current weights; empty without such prompts."""
    results = trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)
    return {name: float(value) for result in results for name, value in result.items()}


def at_the_start(trainer: Trainer, folder: str) -> dict[str, float]:
    """The greedy scores before the run's first iteration, as an earlier start measured them; a branch has none."""
    if any("branch_of" in start for start in starts(folder)):
        return {}
    lines = (callback for callback in trainer.callbacks if isinstance(callback, ProgressLines))  # type: ignore[attr-defined]
    return next((each.at_the_start(trainer) for each in lines), {})


def closing_lines(parts: Parts, trainer: Trainer, before: dict[str, float], after: dict[str, float]) -> list[str]:
    """The last lines of a run: its held-out scores, why it stopped early, and its folder."""
    lines = []
    for name in parts.module.reward.terms:
        if f"eval/{name}" in after:
            start = f"{before[f'eval/{name}']:.2f} -> " if f"eval/{name}" in before else ""
            lines.append(f"held-out {name.replace('_', ' ')}: {start}{after[f'eval/{name}']:.2f}")
    undone, iterations = parts.module.control.counts["rollbacks"], parts.module.control.iteration
    if undone:
        little = ": little or nothing was learned (a lower learning rate, model.lr.actor, may help)"
        lines.append(f"rolled back {undone} times in {iterations} iterations{little if undone >= iterations else ''}")
    if parts.module.control.training_stopped:
        lines.append(f"stopped early: {parts.module.control.training_stopped}")
    for saver in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(saver, IterationCheckpoint) and saver.monitor is not None and saver.best_model_path:
            lines.append(f"best checkpoint by {saver.monitor} ({saver.best_model_score:.4g}): {saver.best_model_path}")
    lines.append(f"output folder: {trainer.default_root_dir}")
    return lines + [line for told in tell(trainer.loggers, "closing_lines") for line in told]
