"""The processes of a run must have read the same data: each draws its own share of every batch from it."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from lightning import LightningDataModule

from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.fingerprint import difference_of_ranks, in_short
from lightning_rlhf.data.sources import DataError
from lightning_rlhf.distributed.strategies import DDPStrategy
from tests.data.test_datamodule import data, tokenizer  # noqa: F401
from tests.ranks import run_ranks
from tests.runs.test_going_on import TINY, project  # noqa: F401
from tests.support import Recorder, fit, tiny_module

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(6)]


def facts(module: PromptDataModule) -> dict[str, Any]:
    module.setup("fit")
    state = module.state_dict()
    return in_short(state["data"], state["held_out"])


def test_what_differs_is_said_with_the_processes_that_have_it(tokenizer) -> None:  # noqa: F811
    own = facts(data(tokenizer, ROWS, ROWS[:2]))
    fewer, order = (facts(data(tokenizer, rows, ROWS[:2])) for rows in (ROWS[:5], ROWS[::-1]))
    answers = facts(data(tokenizer, [row | {"answer": "9"} for row in ROWS], ROWS[:2]))
    assert difference_of_ranks([own, deepcopy(own), own]) == ""
    assert difference_of_ranks([own, fewer, own, fewer, answers]) == (
        "processes 1, 3: 5 training prompts where process 0 has 6; "
        "process 4: other training rows than process 0, though as many (6)"
    )
    assert difference_of_ranks([own, order]) == "process 1: the training rows in another order than process 0"
    seed = facts(data(tokenizer, ROWS, ROWS[:2], seed=9))
    assert difference_of_ranks([own, seed]) == "process 1: another seed, or other prompts in data.conservative"
    held = facts(data(tokenizer, ROWS, ROWS[:3]))
    assert difference_of_ranks([own, held]) == "process 1: other held-out prompts (3; process 0 has 2)"
    changed = deepcopy(tokenizer)
    changed.add_tokens(["<new>"])
    assert "process 1: another tokenizer (" in difference_of_ranks([own, facts(data(changed, ROWS, ROWS[:2]))])


def refused(rank: int, rows: list[list[dict[str, str]]]) -> tuple[str, int]:
    module, seen = tiny_module(iterations=1), Recorder()
    own: LightningDataModule = PromptDataModule(
        rows[rank], tokenizer=module.tokenizer, prompts_per_iteration=4, iterations=1
    )
    own.setup("fit")  # as the assembly of a run does, before there are several processes
    said = ""
    try:
        fit(module, [seen], data=own, devices=2, strategy=DDPStrategy(timeout_seconds=60))  # type: ignore[arg-type]
    except DataError as error:
        said = str(error)
    return said, len(seen.of("on_rollout_start"))


@pytest.mark.parametrize("alike", [True, False])
def test_a_fit_of_processes_with_different_data_is_refused_on_all(tmp_path: Path, alike: bool) -> None:
    rows = [ROWS, ROWS if alike else ROWS[:5]]
    first, second = run_ranks(refused, rows, folder=tmp_path, process_group=False)
    assert first == second
    said, rollouts = first
    assert rollouts == alike
    assert alike == (said == "") and (alike or "process 1: 5 training prompts where process 0 has 6. All need" in said)


SOURCE = """\
import os


class OfRank:
    def rows(self):
        for i in range(8 - int(os.environ.get("RANK", "0"))):
            yield {"prompt": f"{i}+{i}=", "answer": str(2 * i)}

    def __iter__(self):
        return self.rows()
"""


@pytest.mark.slow
def test_a_run_of_two_processes_with_different_data_is_refused(project: Path) -> None:  # noqa: F811
    (project / "source_of_a_rank.py").write_text(SOURCE, encoding="utf-8")
    words = [word for word in TINY if word not in ("data=jsonl", "data.train.path=prompts.jsonl")]
    words += ["data=jsonl", "~data.train", "+data.train._target_=source_of_a_rank.OfRank"]
    command = [str(Path(sys.executable).parent / "lightning-rlhf"), "train", *words, "hydra.run.dir=run"]
    two = ["trainer=ddp", "trainer.devices=2", "iterations=2"]
    done = subprocess.run([*command, *two], capture_output=True, text=True, timeout=400, env=os.environ)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "process 1: 7 training prompts where process 0 has 8" in done.stderr
    assert not list((project / "run").rglob("*.ckpt"))
