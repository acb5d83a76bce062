"""FSDP2 in real processes on gloo: gradients, norms, a whole run, checkpoints at other world sizes, export."""

from __future__ import annotations

import csv
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rlhf.assembly import load_checkpoint
from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.checkpoint import latest_valid, verify
from lightning_rlhf.checkpoint.shards import read_checkpoint
from lightning_rlhf.evaluate import evaluate_checkpoint
from lightning_rlhf.experience import Experience
from lightning_rlhf.export import export_checkpoint
from tests.distributed.fsdp2_ranks import GRADIENTS, gradients_of, numbers, out_of_memory, run, run_all
from tests.ranks import run_ranks
from tests.support import fit, tiny_module, tiny_policy


class Keep(RLHFCallback):
    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience, stats: Any) -> None:
        self.experience = {f.name: getattr(experience, f.name) for f in fields(Experience)}


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Experience for each of the settings, scored by one process."""
    scored = {}
    for name, settings in GRADIENTS.items():
        keep = Keep()
        module = tiny_module(policy=tiny_policy(**settings["policy"]), iterations=1, max_new_tokens=9)
        fit(module, [keep], folder=tmp_path_factory.mktemp("scored"))
        scored[name] = keep.experience
    return scored


@pytest.fixture(scope="module")
def gradients(scored: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of one process and of each of two ranks."""
    alone = {name: gradients_of(name, scored[name]) for name in GRADIENTS}
    return [alone, *run_ranks(numbers, scored, folder=tmp_path_factory.mktemp("gradients"), process_group=False)]


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_one_process(gradients: list[dict[str, Any]], name: str) -> None:
    alone, *ranks = (found[name] for found in gradients)
    assert len(alone) == 4, "minibatches of 5, 5, 5 and 1 rows"
    for rank in ranks:
        assert len(rank) == len(alone)
        for mine, expected in zip(rank, alone, strict=True):
            assert mine.keys() == expected.keys()
            for key, gradient in expected.items():
                difference = (mine[key] - gradient).norm() / gradient.norm().clamp(min=1e-12)
                assert difference < 1e-5, f"{key}: {difference}"
    used = {key.partition(".")[0] for key in alone[0]}
    assert {"actor", "critic"} <= used and ("perturbation" in used) == ("ALP" in name)


@pytest.mark.slow
def test_norm_and_clipping_are_of_all_shards(gradients: list[dict[str, Any]]) -> None:
    found = [rank["small clip"] for rank in gradients[1:]]
    assert [entry["norm"] for entry in found] == [5.0, 5.0]
    assert [entry["clipped"] for entry in found] == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.slow
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_older_one(gradients: list[dict[str, Any]]) -> None:
    first, second = (rank["failed saves"] for rank in gradients[1:])
    assert first == second and len(first) == 2
    for error, rank in zip(first, (1, 0), strict=True):
        assert re.search(rf"iteration_000001.ckpt was not written: rank {rank}: .*No space left.*GiB free there", error)


@pytest.mark.slow
def test_out_of_memory_on_one_rank_names_the_key_and_ends_the_others(scored: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(out_of_memory, scored["LoRA"], folder=tmp_path, process_group=False, ends=[1, 1])
    assert re.search(
        r"OutOfMemory: CUDA out of memory \(simulated\): a micro-batch of \d+ tokens does not fit.*"
        r"lower module.update.micro_batch_tokens = 40",
        (tmp_path / "rank_1.log").read_text(),
    )
    # The connection is closed or reset, depending on how far the other rank had ended.
    assert re.search(r"Connection (closed|reset) by peer", (tmp_path / "rank_0.log").read_text())


# --- whole runs and their checkpoints --------------------------------------------------------------------------------

RUN = [
    "alp=decoupled",
    "module.alp.init_sigma=1e-2",
    "module.alp.warmup_steps=1",
    "rollout_correction=token_tis",
    "callbacks=stability",
    "callbacks.calibrate.every=1",
    "callbacks.checkpoint.every_n_iterations=1",
    "callbacks.checkpoint.keep=null",
    "iterations=3",
    "threads=1",
    "warmup=none",
    "logger=csv",
    "model.source.hidden_size=32",
    "model.source.heads=2",
    "data.prompts_per_iteration=8",
    "data.validation.size=6",
    "rollout.samples=2",
    "module.update.minibatch_size=6",
    "module.update.micro_batch_tokens=60",
    "module.update.score_tokens=100",
    "trainer.enable_progress_bar=false",
]
"""Everything at once; ranks have different numbers of micro-batches, and of parts to score."""


def sharded_run(name: str, *more: str, checkpoint: str = "sharded", devices: int = 2) -> list[str]:
    strategy = [f"trainer.strategy.checkpoint={checkpoint}", "trainer.strategy.timeout_seconds=60"]
    return [
        *RUN,
        "trainer=fsdp2",
        "trainer.accelerator=cpu",
        f"trainer.devices={devices}",
        *strategy,
        f"output_dir={name}",
        *more,
    ]


def looking(name: str) -> list[str]:
    return ["+callbacks.look._target_=tests.distributed.fsdp2_ranks.Look", f"+callbacks.look.path={name}.pt"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two ranks a whole run, and one resumed behind its first iteration that saves files in place of folders."""
    folder = tmp_path_factory.mktemp("runs")
    first = "resume=whole/checkpoints/iteration_000001.ckpt"
    both = [sharded_run("whole"), sharded_run("resumed", first, checkpoint="full")]
    # DDP goes on behind a folder, and FSDP2 behind the file that DDP writes.
    second, third = "resume=whole/checkpoints/iteration_000002.ckpt", "resume=ddp/checkpoints/iteration_000003.ckpt"
    ddp = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "output_dir=ddp"]
    both.append([*RUN, *ddp, second, *looking("ddp")])
    both.append(sharded_run("back", third, "iterations=4", *looking("back")))
    run_ranks(run_all, both, folder=folder, process_group=False)
    return folder


def states(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every trained weight and every entry of the optimiser."""
    entries = content["optimizer_states"][0]["state"]
    moments = {f"{index}.{name}": value for index in entries for name, value in entries[index].items()}
    return {k: v for k, v in content["state_dict"].items() if not k.startswith("reference.")} | moments


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_run_in_folders_and_in_files(runs: Path) -> None:
    folder, file = (runs / name / "checkpoints" / "iteration_000003.ckpt" for name in ("whole", "resumed"))
    assert folder.is_dir() and file.is_file()
    verify(folder)
    verify(file)
    whole, resumed = read_checkpoint(folder), read_checkpoint(file)
    assert_same(states(whole), states(resumed))
    for key in ("control", "progress"):
        assert whole["lightning_rlhf"][key] == resumed["lightning_rlhf"][key]
    assert whole["callbacks"] == resumed["callbacks"]
    copies = [dict(enumerate(content["lightning_rlhf"]["update"]["actor"])) for content in (whole, resumed)]
    assert_same(*copies)
    assert whole["lightning_rlhf"]["alp"]["sigma_difference"] == 0.0
    assert len(whole["rng_per_rank"]) == 2
    assert not any(name.startswith("reference.") for name in whole["state_dict"])
    sigma = [read_checkpoint(runs / f"whole/checkpoints/iteration_00000{n}.ckpt")["state_dict"] for n in (1, 3)]
    assert not torch.equal(sigma[0]["perturbation.log_sigma"], sigma[1]["perturbation.log_sigma"]), "it is learned"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "resumed"])
def test_one_process_without_fsdp_resumes(
    runs: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = runs / kind / "checkpoints" / "iteration_000002.ckpt"
    run([*RUN, "trainer.accelerator=cpu", f"output_dir={tmp_path}", f"resume={path}", *looking("one")])
    assert_same(states(read_checkpoint(path)), states(torch.load("one.pt")))
    assert latest_valid(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "iteration_000003.ckpt"


@pytest.mark.slow
def test_ddp_resumes_and_fsdp2_resumes_from_ddp(runs: Path) -> None:
    behind = {"ddp": "whole/checkpoints/iteration_000002.ckpt", "back": "ddp/checkpoints/iteration_000003.ckpt"}
    for kind, path in behind.items():
        assert_same(states(read_checkpoint(runs / path)), states(torch.load(runs / f"{kind}.pt")))
    assert latest_valid(runs / "back" / "checkpoints") == runs / "back" / "checkpoints" / "iteration_000004.ckpt"


@pytest.mark.slow
def test_four_ranks_resume(runs: Path, tmp_path: Path) -> None:
    paths = {kind: runs / kind / "checkpoints" / "iteration_000002.ckpt" for kind in ("whole", "resumed")}
    overrides = [
        sharded_run(f"four_{kind}", f"resume={path}", *looking(kind), devices=4) for kind, path in paths.items()
    ]
    run_ranks(run_all, overrides, folder=tmp_path, process_group=False, world_size=4)
    for kind, path in paths.items():
        assert_same(states(read_checkpoint(path)), states(torch.load(tmp_path / f"{kind}.pt")))
        third = read_checkpoint(tmp_path / f"four_{kind}" / "checkpoints" / "iteration_000003.ckpt")
        assert third["lightning_rlhf"]["alp"]["sigma_difference"] == 0.0
        assert third["iteration"] == 3 and len(third["rng_per_rank"]) == 4


@pytest.mark.slow
def test_export_and_eval_of_a_folder(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = runs / "whole" / "checkpoints" / "iteration_000003.ckpt"
    exported = export_checkpoint(str(path), str(tmp_path / "out"))
    plain = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    trained = {
        k.removeprefix("actor.lm."): v for k, v in states(read_checkpoint(path)).items() if k.startswith("actor.")
    }
    assert_same(plain, trained)
    numbers = evaluate_checkpoint(str(runs / "whole"))
    with (runs / "whole" / "metrics" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        logged = [row for row in csv.DictReader(file) if row["eval/exact_match"]][-1]
    assert {"eval/exact_match", "eval/reward_mean", "eval/response_length_mean"} <= numbers.keys()
    assert numbers == pytest.approx({name: float(logged[name]) for name in numbers}, rel=1e-6), "as two ranks found"

    def turned(where: str) -> tuple[Path, dict[str, Any]]:
        place, saved = load_checkpoint(where)
        return place, saved | {"state_dict": {name: -value for name, value in saved["state_dict"].items()}}

    monkeypatch.setattr("lightning_rlhf.evaluate.load_checkpoint", turned)
    assert evaluate_checkpoint(str(runs / "whole")) != numbers, "the weights of the folder are what is evaluated"
