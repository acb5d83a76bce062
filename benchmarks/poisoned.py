"""Ten poisoned prompts among a thousand: which does the prompt monitor flag, and what does their removal change?

The model of the quickstart is trained on 1000 additions for 20 iterations; every prompt is visited about five times
(``--visits``). It begins with its bad habit (``novice``: hardly an answer is right), or without (``able``: nearly all
are). Ten prompts are poisoned, in one of three ways or in all of them:

* ``noise``: normal noise of standard deviation 10 on the score (others score between 0 and 1.5);
* ``garbled``: the prompt is a row of random characters, and its answer cannot be known;
* ``contradictory``: every answer that can be given is wrong, as where a label contradicts the prompt;
* ``mixed``: four, three and three of these.

A cell is one run with one start, one kind, one number of samples and one seed. After it the keys that were flagged are
blacklisted, and the run is done again; the last columns are the mean of ``reward/std`` squared over the iterations.

    python -m benchmarks.poisoned                                  # everything
    python -m benchmarks.poisoned --kinds noise --seeds 1          # one kind
    python -m benchmarks.poisoned --starts able --kinds mixed
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import random
import statistics
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import hydra
import torch
from lightning import Callback, Trainer

from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble, make_trainer
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.experience import prompt_key
from lightning_rlhf.reporting.prompt_records import FOLDER, SUSPECTS
from lightning_rlhf.rewards import RewardBatch

KINDS = ("noise", "garbled", "contradictory")
STARTS: dict[str, tuple[str, ...]] = {"novice": (), "able": ("warmup.answer_field=answer",)}
"""Overrides of the supervised warm-up."""
NOISE = 10.0
PROMPTS, POISONED, ITERATIONS = 1000, 10, 20
SETTINGS = {
    1: (),
    4: (
        *("rollout.samples=4", "module.advantage.estimator=grpo", "model.policy.critic=none"),
        *("module.update.epochs=1", "module.update.minibatch_size=500"),
    ),
}
"""Overrides by samples of a prompt: PPO with a critic, GRPO without."""


def rows(kind: str, count: int, poisoned: int, seed: int) -> list[dict[str, Any]]:
    """The data: additions, the first ``poisoned`` of them spoiled."""
    draw = random.Random(f"{kind}/{seed}")
    made = [dict(row) for row in itertools.islice(ArithmeticTask(seed=seed), count)]
    for number, row in enumerate(made[:poisoned]):
        row["poison"] = KINDS[number % len(KINDS)] if kind == "mixed" else kind
        if row["poison"] == "garbled":
            row["answer"] = str(draw.randrange(100))
            row["prompt"] = "".join(draw.choice("0123456789+=") for _ in range(7))
        if row["poison"] == "contradictory":
            row["answer"] = "+" + row["answer"]
    return made


class Noise:
    """A reward term: noise of standard deviation :data:`NOISE` on poisoned rows, 0 on the others; given by the seed."""

    def __init__(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)

    def __call__(self, batch: RewardBatch) -> list[float]:
        noise = NOISE * torch.randn(len(batch), generator=self.draw)
        return [float(x) if row.get("poison") == "noise" else 0.0 for x, row in zip(noise, batch.rows, strict=True)]


class Spreads(Callback):
    """Keeps ``reward/std`` of every iteration."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["reward/std"]))


def composed(*overrides: str) -> dict[str, Any]:
    """The checked configuration."""
    common = ("logger=none", "trainer.enable_progress_bar=false", "progress_every=null")
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        return schema.check(hydra.compose("train", overrides=[*common, *overrides]))


def warm_model(folder: Path, start: str) -> list[str]:
    """Teach the quickstart's model to add, on clean problems, and save it; returns the overrides that load it."""
    config = composed(f"output_dir={folder}", *STARTS[start])
    loaded, rates = assemble(config).loaded, config["model"]["lr"]
    loaded.lm.save_pretrained(folder / "model")
    loaded.tokenizer.save_pretrained(folder / "model")
    return [
        *("model=hf", "recipe=tiny", "warmup=none", f"model.source.path={folder / 'model'}"),
        *("model.source.chat_template=null", f"model.lr.actor={rates['actor']}", f"model.lr.critic={rates['critic']}"),
    ]


def run(
    kind: str, samples: int, seed: int, visits: int, folder: Path, model: list[str], blacklist: Iterable[str] = ()
) -> float:
    """One run in ``folder``; returns the mean variance of the rewards of an iteration."""
    folder.mkdir(parents=True)
    data, listed = folder / "rows.jsonl", folder / "blacklist.txt"
    spoiled = rows(kind, PROMPTS, POISONED, seed)
    data.write_text("".join(json.dumps(row) + "\n" for row in spoiled), encoding="utf-8")
    listed.write_text("".join(f"{key}\n" for key in blacklist), encoding="utf-8")
    config = composed(
        *model,
        *("callbacks=[minimal,prompt_monitor]", "callbacks.checkpoint=null", f"output_dir={folder}", f"seed={seed}"),
        *(f"iterations={ITERATIONS}", f"data.prompts_per_iteration={PROMPTS * visits // ITERATIONS}"),
        *(f"data.train={data}", f"data.blacklist={listed}", "data.validation=null"),
        f"+reward.terms.noise.reward={{_target_: benchmarks.poisoned.Noise, seed: {seed}}}",
        *SETTINGS[samples],
    )
    parts, trainer, spreads = assemble(config), make_trainer(config), Spreads()
    trainer.callbacks.append(spreads)  # type: ignore[attr-defined]
    with closing(parts.module.engine):
        trainer.fit(parts.module, datamodule=parts.datamodule)
    return statistics.mean(spread**2 for spread in spreads.seen)


def cell(kind: str, samples: int, seed: int, visits: int, model: list[str], *, again: bool) -> dict[str, Any]:
    """One row of the table."""
    poisoned = {prompt_key(row["prompt"]) for row in rows(kind, PROMPTS, POISONED, seed)[:POISONED]}
    with tempfile.TemporaryDirectory() as folder:
        before = run(kind, samples, seed, visits, Path(folder) / "first", model)
        found = json.loads((Path(folder) / "first" / FOLDER / SUSPECTS).read_text(encoding="utf-8"))
        flagged = {suspect["key"] for suspect in found["suspects"]}
        after = run(kind, samples, seed, visits, Path(folder) / "second", model, flagged) if again else math.nan
    good = [s["reasons"] for s in found["suspects"] if s["key"] not in poisoned]
    return {
        **{"poison": kind, "samples": samples, "visits": visits, "seed": seed},
        **{"poisoned found": len(flagged & poisoned), "good flagged": len(good)},
        **{"by": ", ".join(sorted({name for names in good for name in names}))},
        **{"variance": f"{before:.3f}", "without them": f"{after:.3f}" if again else "-"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*KINDS, "mixed"]
    parser.add_argument("--starts", nargs="+", choices=list(STARTS), default=list(STARTS))
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--samples", type=int, nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--visits", type=int, default=5, help="of every prompt in the 20 iterations, 1 to 20")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--once", action="store_true", help="leave out the second run, without the flagged prompts")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_rlhf").setLevel(logging.ERROR)
    cells = itertools.product(arguments.starts, arguments.kinds, arguments.samples, arguments.seeds)
    again = not arguments.once
    with tempfile.TemporaryDirectory() as folder:
        models = {start: warm_model(Path(folder) / start, start) for start in arguments.starts}
        for number, (start, kind, samples, seed) in enumerate(cells):
            row = {"start": start} | cell(kind, samples, seed, arguments.visits, models[start], again=again)
            if not number:
                print("| " + " | ".join(row) + " |", "| --- " * len(row) + "|", sep="\n")
            print("| " + " | ".join(map(str, row.values())) + " |", flush=True)


if __name__ == "__main__":
    main()
