"""DDP with real processes (gloo): the same run on 1, 2 and 4 ranks, resume at another number, a rank that dies."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble, make_trainer
from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.checkpoint import latest_valid
from lightning_rlhf.distributed.first_fault import PeerFailed
from lightning_rlhf.distributed.parallel import balanced_shares, gather_experience
from lightning_rlhf.distributed.processes import gather_objects
from lightning_rlhf.distributed.strategies import DDPStrategy
from lightning_rlhf.experience import Experience
from tests.ranks import run_ranks
from tests.support import fit, prompts, tiny_module

# --- rows ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_shares_hold_every_index_once_and_are_balanced(costs: list[int], ranks: int) -> None:
    shares = balanced_shares(costs, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    # The last one that a rank was given went where the sum was smallest, so at most the mean of all others.
    assert max(loads) <= sum(costs) / ranks + (1 - 1 / ranks) * max(costs, default=0) + 1e-9


@given(st.lists(st.integers(1, 1000), max_size=6), st.integers(1, 3))
def test_shares_are_at_most_four_thirds_of_the_best_possible(costs: list[int], ranks: int) -> None:
    """Graham (1969); the best of all divisions is found by trying them."""
    best = min(
        max(sum(cost for cost, of in zip(costs, ranks_of, strict=True) if of == rank) for rank in range(ranks))
        for ranks_of in itertools.product(range(ranks), repeat=len(costs))
    )
    loads = [sum(costs[index] for index in share) for share in balanced_shares(costs, ranks)]
    assert max(loads) <= 4 / 3 * best + 1e-9


def rows_of(rank: int, device: str = "cpu") -> Experience:
    """Rank 0: two rows of 3 + 2 columns; rank 1: one row of 1 + 4."""
    rows, prompt, response = ((2, 3, 2), (1, 1, 4))[rank]
    ids = torch.arange(rows * response).reshape(rows, response) + 100 * rank
    return Experience(
        prompt_ids=torch.full((rows, prompt), 7 + rank),
        prompt_mask=torch.ones(rows, prompt, dtype=torch.bool),
        response_ids=ids,
        response_mask=torch.ones(rows, response, dtype=torch.bool),
        rollout_logprobs=-ids.float(),
        finish=torch.zeros(rows, dtype=torch.int64),
        policy_version=torch.zeros(rows, dtype=torch.int64),
        seed=torch.arange(rows) + 2**62,
        group=torch.zeros(rows, dtype=torch.int64),
        prompt_key=[f"key {rank}/{row}" for row in range(rows)],
        texts=[f"text {rank}/{row}" for row in range(rows)],
        components={"score": torch.arange(rows) + 0.5 + rank},
    )


def gather(rank: int) -> Experience:
    return gather_experience(rows_of(rank))


def test_rows_of_unequal_ranks_arrive_whole_and_in_order_everywhere(tmp_path: Path) -> None:
    first, second = run_ranks(gather, folder=tmp_path)
    assert len(first) == 3
    assert first.prompt_ids.tolist() == [[7, 7, 7], [7, 7, 7], [0, 0, 8]], "prompts are padded on the left"
    assert first.prompt_mask.tolist() == [[True] * 3, [True] * 3, [False, False, True]]
    assert first.response_ids.tolist() == [[0, 1, 0, 0], [2, 3, 0, 0], [100, 101, 102, 103]]
    assert first.response_mask.sum(-1).tolist() == [2, 2, 4]
    assert first.seed.tolist() == [2**62, 2**62 + 1, 2**62]
    assert first.group.tolist() == [0, 0, 2], "groups of two ranks stay apart"
    assert first.texts == ["text 0/0", "text 0/1", "text 1/0"] and first.prompt_key[2] == "key 1/0"
    assert first.components["score"].tolist() == [0.5, 1.5, 1.5]
    assert first.advantages is None
    for name in ("prompt_ids", "response_ids", "rollout_logprobs", "group"):
        assert torch.equal(getattr(first, name), getattr(second, name))


# --- one run, any number of ranks ------------------------------------------------------------------------------------


class Notes(RLHFCallback):
    """The gradients of the first step, and the metrics of every iteration."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.curve: list[dict[str, float]] = []

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        if not self.gradients:
            self.gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.curve.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train_tiny(rank: int, iterations: int, minibatch_size: int, critic: str = "separate") -> dict[str, Any]:
    """Responses end where the model says so, so ranks have unequal numbers of tokens."""
    from tests.support import tiny_policy

    world = int(os.environ.get("WORLD_SIZE", "1"))
    policy = tiny_policy(critic=critic)
    module = tiny_module(policy=policy, iterations=iterations, update={"minibatch_size": minibatch_size})
    notes = Notes()
    several = {} if world == 1 else {"strategy": DDPStrategy(), "devices": world}
    fit(module, [notes], data=prompts(module, per_iteration=8), **several)
    return {
        "gradients": notes.gradients,
        "curve": notes.curve,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
    }


UNEQUAL = ("time/", "perf/", "tok/s", "rollout/logprob_abs_diff", "advantage/mean")
"""Clocks, and numbers that are 0 but for rounding."""


@pytest.mark.parametrize(("minibatch_size", "critic"), [(8, "separate"), (3, "shared")])
def test_gradients_and_curves_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, minibatch_size: int, critic: str
) -> None:
    """Minibatches of 3 rows leave a rank of 4 without any; the last one of an epoch has a single row."""
    alone = train_tiny(0, 10, minibatch_size, critic)
    for world in (2, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        ranks = run_ranks(train_tiny, 10, minibatch_size, critic, folder=folder, world_size=world)
        for name, expected in alone["gradients"].items():
            found = ranks[0]["gradients"][name]
            assert (found - expected).norm() <= 1e-5 * expected.norm() + 1e-12, name
        for rank in ranks:
            for name, weight in rank["weights"].items():
                assert torch.equal(weight, ranks[0]["weights"][name]), f"ranks hold different weights: {name}"
        for expected, found in zip(alone["curve"], ranks[0]["curve"], strict=True):
            assert expected.keys() == found.keys()
            for name in expected:
                if not name.startswith(UNEQUAL):
                    assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


# --- the whole loop --------------------------------------------------------------------------------------------------

EVERYTHING = [
    "callbacks=stability",
    "alp=decoupled",
    "module.alp.warmup_steps=2",
    "rollout_correction=token_tis",
    "logger=none",
    "warmup=none",
    "threads=1",
    "iterations=6",
    "callbacks.checkpoint.every_n_iterations=2",
    "callbacks.checkpoint.keep=null",
    "data.prompts_per_iteration=8",
    "data.validation_limit=7",
    "module.update.minibatch_size=8",
    "module.update.epochs=2",
    "trainer.enable_progress_bar=false",
]
"""Every mixin and every stability callback; 7 held-out prompts are no multiple of the ranks."""


def train_composed(rank: int, folder: str, *overrides: str, die: int | None = None) -> dict[str, Any]:
    """Compose, build and fit as the command does; rank 1 kills itself in iteration ``die``."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer_group = ["trainer=ddp", f"trainer.devices={world}"] if world > 1 else ["trainer.accelerator=cpu"]
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        config = schema.check(hydra.compose("train", [f"output_dir={folder}", *EVERYTHING, *trainer_group, *overrides]))
    parts, trainer = assemble(config), make_trainer(config)
    notes = Notes()
    more: list[Any] = [notes, *([] if die is None else [Death(die)])]
    trainer.callbacks.extend(more)  # type: ignore[attr-defined]
    resume = latest_valid(Path(folder) / "checkpoints")
    trainer.fit(parts.module, datamodule=parts.datamodule, ckpt_path=resume, weights_only=True)
    optimizer: Any = trainer.optimizers[0]
    held_out = trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)[0]
    return {
        "curve": notes.curve,
        "weights": {name: p.detach().clone() for name, p in parts.module.named_parameters()},
        "moments": [state["exp_avg"].clone() for state in optimizer.state.values()],
        "control": parts.module.control.state_dict(),
        "held_out": held_out,
    }


class Death(RLHFCallback):
    """Rank 1 dies in the middle of an update."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
        if stats.iteration == self.iteration and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_death(rank: int, folder: str) -> str:
    """The error of the surviving rank."""
    try:
        train_composed(rank, folder, die=5)
    except (RuntimeError, PeerFailed) as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_rank_dies_and_the_run_continues_bit_for_bit_or_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    expected = run_ranks(train_composed, str(whole), folder=whole, timeout=600)
    assert expected[0]["curve"][-1]["clock/iteration"] == 6
    assert expected[0]["held_out"] == expected[1]["held_out"], "seven prompts, four and three of them, one mean"
    assert all(torch.equal(expected[0]["weights"][n], w) for n, w in expected[1]["weights"].items())
    assert "alp/sigma_layer_00" in expected[0]["curve"][-1]

    told = run_ranks(train_until_death, str(cut), folder=cut, ends=[0, -signal.SIGKILL], timeout=600)
    assert "peer" in told[0] or "closed" in told[0].lower() or "Timed out" in told[0]
    assert latest_valid(cut / "checkpoints").name == "iteration_000004.ckpt"

    copies = {}
    for world in (1, 4):
        copies[world] = tmp_path / f"resumed_{world}"
        (copies[world] / "checkpoints").mkdir(parents=True)
        for file in (cut / "checkpoints").iterdir():
            (copies[world] / "checkpoints" / file.name).write_bytes(file.read_bytes())

    resumed = run_ranks(train_composed, str(cut), folder=cut, timeout=600)
    for before, after in zip(expected, resumed, strict=True):
        for name, weight in before["weights"].items():
            assert torch.equal(weight, after["weights"][name]), name
        assert all(torch.equal(a, b) for a, b in zip(before["moments"], after["moments"], strict=True))
        assert before["control"] == after["control"]
        assert before["held_out"] == after["held_out"]
        for one, other in zip(before["curve"][-2:], after["curve"], strict=True):
            # What an earlier iteration logged last stays in the uninterrupted run's list.
            same = {name for name in other if not name.startswith(("time/", "perf/", "tok/s"))}
            assert {name: one[name] for name in same} == {name: other[name] for name in same}

    for world, folder in copies.items():
        [first, *_] = run_ranks(train_composed, str(folder), folder=folder, world_size=world, timeout=600)
        assert [row["clock/iteration"] for row in first["curve"]] == [5, 6]
        # ALP's noise differs with the number of ranks; the prompts and the samples before the update are the same.
        assert first["curve"][0]["reward/mean"] == pytest.approx(expected[0]["curve"][4]["reward/mean"], rel=1e-6)
        assert first["curve"][0]["kl/ref"] == pytest.approx(expected[0]["curve"][4]["kl/ref"], rel=1e-3)


def objects(rank: int) -> list[dict[str, int]]:
    return gather_objects({"rank": rank})


def test_objects_come_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    assert run_ranks(objects, folder=tmp_path, world_size=3) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    assert gather_objects("alone") == ["alone"]
