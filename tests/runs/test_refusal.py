"""A resume that is refused leaves metrics, decisions and the tracked run as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.checkpoint.shards import shapes_of_shards
from lightning_rlhf.errors import InputError
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.runs.recompose import Composition, compose
from lightning_rlhf.runs.refusal import refuse_other_model
from lightning_rlhf.train import train as train_from_python
from tests.checkpoint.test_shards import mesh, two  # noqa: F401
from tests.runs.test_resume_command import TINY, project, record, train  # noqa: F401
from tests.support import fit, tiny_module, tiny_policy


def traces(folder: Path) -> dict[str, bytes]:
    """Content of the files in which a run's record is kept."""
    files = [path for part in ("metrics", "tracking") for path in (folder / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def other_reference(saved: dict[str, Any]) -> None:
    saved["lightning_rlhf"]["reference_fingerprint"] = "0" * 64


def another_parameter(saved: dict[str, Any]) -> None:
    saved["optimizer_states"][0]["param_groups"][0]["params"].append(99)


def without_count(saved: dict[str, Any]) -> None:
    del saved["iteration"]


def without_control(saved: dict[str, Any]) -> None:
    del saved["lightning_rlhf"]["control"]


def of_a_later_format(saved: dict[str, Any]) -> None:
    saved["written_by"] = {"lightning_rlhf": "9.0.0", "format": 99}


def unchanged(saved: dict[str, Any]) -> None: ...


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], list[str], str]] = {
    "reference": (other_reference, [], "trained against another reference model"),
    "shapes": (unchanged, ["model.source.hidden_size=48"], "embed_tokens.weight ("),
    "critic": (unchanged, ["model.policy.critic=separate"], "it lacks critic."),
    "optimiser": (another_parameter, [], "its optimiser trains actor ("),
    "a key": (without_control, [], "the checkpoint lacks lightning_rlhf.control"),
    "format": (of_a_later_format, [], "has format 99, written by lightning_rlhf 9.0.0"),
    "iteration": (without_count, [], "does not say its iteration"),
}


@pytest.mark.slow
def test_what_refuses_a_checkpoint_does_so_before_the_record_is_touched(
    project: Path,  # noqa: F811
    capsys: pytest.CaptureFixture,
) -> None:
    assert train(*TINY, "logger=[mlflow,csv]", "hydra.run.dir=run", "iterations=3") == 0
    before, tracked = traces(project / "run"), record(project / "run")
    assert tracked[0] == "FINISHED" and any(name.endswith("metrics.csv") for name in before)
    named = project / "run" / "checkpoints" / "iteration_000002.ckpt"
    saved = torch.load(named, weights_only=True)
    named.with_name("iteration_000002.verified.json").unlink()  # it would refuse every changed file
    for name, (change, words, said) in REFUSED.items():
        content = torch.load(named, weights_only=True)
        change(content)
        torch.save(content, named)
        capsys.readouterr()
        assert train(f"resume={named}", "branch=false", *words) != 0, name
        assert said in capsys.readouterr().err, name
        assert traces(project / "run") == before, name
        assert record(project / "run") == tracked, name
        torch.save(saved, named)
    assert train(f"resume={named}", "branch=false") == 0


def test_a_branch_of_a_finished_run_that_would_train_nothing_is_refused_before_any_folder_is_made(
    project: Path,  # noqa: F811
    capsys: pytest.CaptureFixture,
) -> None:
    assert train(*TINY, "logger=none", "hydra.run.dir=run", "iterations=1") == 0
    before, said = sorted(project.rglob("*")), "iterations = 1 is not allowed: "
    for words in (["module.kl.coefficient=0.5"], ["branch=true"], ["callbacks=stability", "iterations=1"]):
        capsys.readouterr()
        assert train("resume=run", *words) == 2
        error = capsys.readouterr().err
        assert error.startswith(said) and "iteration_000001.ckpt has done 1 already" in error
        assert "allowed: more than 1\n" in error
        assert sorted(project.rglob("*")) == before
    typed = ("resume=run", "module.kl.coefficient=0.5", "iterations=1")
    with pytest.raises(InputError, match=said):
        train_from_python(compose(Composition(typed), "python"), composition=Composition(typed))
    assert sorted(project.rglob("*")) == before
    assert train("resume=run", "callbacks.checkpoint.keep=1") == 0, "the run itself"
    assert not (project / "outputs").exists()
    assert train("resume=run", "module.kl.coefficient=0.5", "iterations=2", "hydra.run.dir=branch") == 0


def test_a_branch_does_not_write_over_its_run_nor_over_another_one(
    project: Path,  # noqa: F811
    capsys: pytest.CaptureFixture,
) -> None:
    again = [*TINY, "logger=csv", "callbacks.checkpoint.keep=2", "callbacks.checkpoint.every_n_iterations=1"]
    for folder in ("run", "other"):
        assert train(*again, f"hydra.run.dir={folder}", "iterations=2") == 0
    files = {path: path.read_bytes() for path in project.rglob("*") if path.is_file() and path.name != "train.log"}
    (project / "link").symlink_to(project / "run")
    elsewhere = "callbacks.checkpoint.dirpath={}"
    longer, earlier = ["iterations=4", "module.kl.coefficient=0.5"], "run/checkpoints/iteration_000001.ckpt"
    refused = {
        ("resume=latest", "hydra.run.dir=run", *again, *longer): "the folder of the run itself",
        ("resume=run", "hydra.run.dir=run", *longer): "would be a branch of it (other numbers follow from module.kl",
        (f"resume={earlier}", "hydra.run.dir=run"): "the run has gone on to iteration 2 since",
        ("resume=run", "hydra.run.dir=other", *longer): "holds the checkpoints of a run already",
        ("resume=run", "hydra.run.dir=other", "iterations=4"): "holds the checkpoints of a run already",
        ("resume=run", "iterations=4", elsewhere.format("other/checkpoints")): "holds the checkpoints of a run already",
        ("resume=run", "hydra.run.dir=new", *longer, elsewhere.format("other/checkpoints")): "of a run already",
        ("resume=run", "hydra.run.dir=new", *longer, elsewhere.format("link/checkpoints")): "where the run keeps its",
    }
    for words, said in refused.items():
        capsys.readouterr()
        assert train(*words) == 2, words
        assert said in capsys.readouterr().err, words
    kept = {path: path.read_bytes() for path in files}
    assert kept == files, "checkpoints, metrics and starts of both runs"
    assert train("resume=run", "hydra.run.dir=run", "branch=false", *longer) == 0, "asked for"
    assert train("resume=other", "hydra.run.dir=branch", *longer) == 0


def checkpoint_of(module: PPOModule, folder: Path) -> tuple[Any, Path]:
    trainer = fit(module, [], folder=folder)
    trainer.save_checkpoint(folder / "x.ckpt")
    return trainer, folder / "x.ckpt"


def test_names_of_weights_that_are_missing_are_said(tmp_path: Path) -> None:
    trainer, file = checkpoint_of(tiny_module(iterations=1, policy=tiny_policy(critic="shared")), tmp_path)
    refuse_other_model(tiny_module(iterations=1, policy=tiny_policy(critic="shared")), trainer, file)
    with pytest.raises(InputError, match=r"it lacks critic\.\S+, critic\.\S+, critic\.\S+ and \d+ more"):
        refuse_other_model(tiny_module(iterations=1, policy=tiny_policy(critic="separate")), trainer, file)


def test_a_hook_of_the_users_may_adapt_a_checkpoint(tmp_path: Path) -> None:
    """What it makes of other weights only Lightning sees, so Lightning compares them."""
    trainer, file = checkpoint_of(tiny_module(iterations=1, policy=tiny_policy(critic="shared")), tmp_path)
    module = tiny_module(iterations=1, policy=tiny_policy(critic="separate"))
    module.__class__ = type("Mine", (type(module),), {"on_load_checkpoint": lambda self, checkpoint: None})
    refuse_other_model(module, trainer, file)


def test_shapes_in_a_folder_of_shards_are_those_of_the_whole_tensors(two: list[Path]) -> None:  # noqa: F811
    assert shapes_of_shards(two[1], "state_dict") == {"a.w": (4, 2)}
