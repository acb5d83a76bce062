"""Rewards with a loophole: what is lost with and without the over-optimisation stop? Figures of docs/callbacks.md.

A small random model learns to repeat a number of three digits, two times out of three only its beginning. PPO then gets
a reward of the right kind (how similar the answer is to the number, 0 to 1) with one of two loopholes in it:

* ``length``: every character earns something, however wrong;
* ``magic``: the character ``*`` anywhere earns something.

The gold score is the similarity alone. PPO first removes the habit, and the gold score rises; then it finds the
loophole, and the gold score falls while the reward goes on rising. With ``healthy`` there is no loophole, and nothing
to stop. A line is one seed: the best gold score of the held-out answers, the last one without the stop, where the run
ends with the stop, the gold score there, and that of the checkpoint that is named, evaluated again.

    python -m benchmarks.overoptimised                             # three seeds, both loopholes, and none
    python -m benchmarks.overoptimised --kinds magic --seeds 1     # one run of each side
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import tempfile
import warnings
from contextlib import closing
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import hydra

from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble, make_trainer
from lightning_rlhf.callbacks import OveroptimisationStop
from lightning_rlhf.checkpoint import IterationCheckpoint
from lightning_rlhf.evaluate import evaluate_checkpoint
from lightning_rlhf.rewards import RewardBatch

HERE = "benchmarks.overoptimised"
LOOPHOLES = {
    "length": f"+reward.terms.length={{weight: 0.16, reward: {{_target_: {HERE}.length}}}}",
    "magic": f"+reward.terms.magic={{weight: 0.3, reward: {{_target_: {HERE}.magic}}}}",
}
KINDS = (*LOOPHOLES, "healthy")
MAGIC = "*"
OVERRIDES = (
    *("model=tiny", "recipe=tiny", "data=jsonl", "reward=exact_match", "logger=none", "threads=1"),
    *("model.source.vocabulary='0123456789*='", "model.source.hidden_size=48", "model.source.heads=2"),
    *("warmup=sft", "warmup.steps=250", "warmup.lr=3e-3", "warmup.batch_size=64"),
    "warmup.answer_field={answer: 0.34, short: 0.6, marked: 0.06}",
    *("data.prompts_per_iteration=96", "rollout.max_new_tokens=6", "module.update.minibatch_size=96"),
    *("data.validation_limit=100", "evaluate_every=1", "iterations=30", "model.lr.actor=4e-4"),
    *("trainer.enable_progress_bar=false", "progress_every=null", "module.optimizer.schedule=constant"),
    *("reward.terms.exact_match.weight=0", f"+reward.terms.similarity={{reward: {{_target_: {HERE}.similarity}}}}"),
)


def similarity(batch: RewardBatch) -> list[float]:
    """2 x matching characters / characters of both."""
    pairs = zip(batch.plain_responses, batch.rows, strict=True)
    return [SequenceMatcher(None, response, row["answer"], autojunk=False).ratio() for response, row in pairs]


def length(batch: RewardBatch) -> list[float]:
    return [float(len(response)) for response in batch.plain_responses]


def magic(batch: RewardBatch) -> list[float]:
    return [float(MAGIC in response) for response in batch.plain_responses]


def data(folder: Path) -> list[str]:
    """Numbers to repeat, those held out among them; returns the overrides."""
    numbers = random.Random(0).sample(range(100, 1000), 700)
    for name, part in (("train", numbers[:600]), ("held_out", numbers[600:])):
        rows = [{"prompt": f"{n}=", "answer": f"{n}", "short": f"{n // 10}", "marked": f"{n}*"} for n in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [f"data.train={folder}/train.jsonl", f"data.validation={folder}/held_out.jsonl"]


def run(kind: str, seed: int, folder: Path, *own: str) -> tuple[Any, Any, OveroptimisationStop]:
    """One run in ``folder``: its module, its trainer and the callback."""
    folder.mkdir(parents=True)
    block = "callbacks.overoptimisation_stop"
    overrides = [
        *(*OVERRIDES, *data(folder), f"output_dir={folder}", f"seed={seed}"),
        *([LOOPHOLES[kind]] if kind in LOOPHOLES else []),
        *("callbacks=overoptimisation_stop", f"{block}.gold={{_target_: {HERE}.similarity, _partial_: true}}", *own),
    ]
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        config = schema.check(hydra.compose("train", overrides=overrides))
    parts, trainer = assemble(config), make_trainer(config)
    [callback] = [c for c in trainer.callbacks if isinstance(c, OveroptimisationStop)]  # type: ignore[attr-defined]
    with closing(parts.module.engine):
        trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)
        trainer.fit(parts.module, datamodule=parts.datamodule)
    return parts.module, trainer, callback


def again(path: str) -> float:
    """The gold score of a checkpoint, evaluated anew."""
    with contextlib.redirect_stdout(io.StringIO()):
        return evaluate_checkpoint(path)["eval/similarity"]


def cell(kind: str, seed: int) -> dict[str, Any]:
    """One row of the table: the same run without and with the stop."""
    with tempfile.TemporaryDirectory() as folder:
        _, trainer, watch = run(
            kind, seed, Path(folder) / "without", "callbacks.overoptimisation_stop.patience=1000000"
        )
        reward = float(trainer.callback_metrics["eval/reward_mean"])
        free = [float(gold or "nan") for _, gold, _ in watch.history]
        module, trainer, stop = run(kind, seed, Path(folder) / "with")
        saver = trainer.checkpoint_callback
        assert isinstance(saver, IterationCheckpoint) and stop.best is not None
        named = again(saver.best_model_path)
        held = [float(gold or "nan") for _, gold, _ in stop.history]
        stopped = module.control.training_stopped is not None
        if free[: len(held)] != held:
            raise RuntimeError("the two runs differ before the stop")
    return {
        **{"loophole": kind, "seed": seed, "gold before": held[0], "best gold": max(free)},
        **{"reward at end without": reward, "gold at end without": free[-1]},
        **{"stopped after": module.control.iteration if stopped else "-", "gold at stop": held[-1]},
        **{"named checkpoint": saver.best_model_path[-11:-5], "its gold again": named},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for number, (kind, seed) in enumerate((kind, seed) for kind in given.kinds for seed in given.seeds):
        row = cell(kind, seed)
        if not number:
            print(f"| {' | '.join(row)} |\n|{' --- |' * len(row)}", flush=True)
        shown = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
        print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
