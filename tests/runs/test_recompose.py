"""The configuration of a run under new overrides: what they change, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.runs.recompose import Composition, apply_difference, compose, merged, recomposed, resolved
from lightning_rlhf.runs.resume import MISSING, differences, in_short, keeps_numbers
from lightning_rlhf.schema import InputError
from lightning_rlhf.schema.verl import adopt

TYPED = (
    "data=jsonl",
    "data.train.path=p.jsonl",
    "+callbacks.mine={_target_: builtins.dict, a: 1}",
    "callbacks.checkpoint.keep=3",
    "seed=2",
    "model.lr.actor=0.0004",
)


@pytest.fixture(scope="module")
def own() -> Composition:
    return Composition(TYPED)


@pytest.fixture(scope="module")
def saved(own: Composition) -> dict[str, Any]:
    """The configuration of a run whose release had another default for ``module.loss.clip_low``."""
    config = resolved(compose(own, "/runs/1"))
    config["module"]["loss"]["clip_low"] = 0.77
    return config


NEW = {
    "nothing": ([], {}),
    "the same once more": (TYPED, {}),
    "a value and what follows from it": (
        ["model.lr.actor=0.5"],
        {"model.lr.actor": (0.0004, 0.5), "module.actor.lr": (0.0004, 0.5)},
    ),
    "the kit's present default, typed": (["module.loss.clip_low=0.2"], {"module.loss.clip_low": (0.77, 0.2)}),
    "a key that was added": (["callbacks.mine.a=4"], {"callbacks.mine.a": (1, 4)}),
    "a block that was added, taken out": (["~callbacks.mine"], {"callbacks.mine": ("builtins.dict", None)}),
    "a group with other defaults of its own": (["module.advantage.gamma=0.5"], {"module.advantage.gamma": (1.0, 0.5)}),
}


@pytest.mark.parametrize(("new", "expected"), NEW.values(), ids=NEW.keys())
def test_only_what_the_overrides_change(saved: dict, own: Composition, new: list[str], expected: dict) -> None:
    config, _ = recomposed(saved, own, Composition(tuple(new)))
    found = in_short(dict(differences(saved, config)))
    assert {key: (then, None if now is MISSING else now) for key, (then, now) in found} == expected


def test_an_override_of_a_pasted_verl_block_changes_our_key() -> None:
    pasted = Composition(("+algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 3.0}",))
    saved = adopt(resolved(compose(pasted, "/runs/1")))[0]
    new = Composition(("algorithm.rollout_correction.rollout_is_threshold=5.0",))
    config, _ = recomposed(saved, pasted, new)
    changes = dict(differences(saved, config))
    assert changes == {"module.rollout_correction.rollout_is_threshold": (3.0, 5.0)}
    assert config["module"]["rollout_correction"]["rollout_is"] == "token"


def test_a_branch_by_our_name_of_a_pasted_key_can_be_changed_again() -> None:
    pasted = Composition(("+algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 3.0}",))
    saved = adopt(resolved(compose(pasted, "/runs/1")))[0]
    ours = Composition(("module.rollout_correction.rollout_is_threshold=5.0",))
    branch, composition = recomposed(saved, pasted, ours)
    config, last = recomposed(branch, composition, Composition(("iterations=9",)))
    assert dict(differences(branch, config)) == {"iterations": (branch["iterations"], 9)}
    again, _ = recomposed(config, last, Composition(("algorithm.rollout_correction.rollout_is_threshold=6.0",)))
    assert dict(differences(config, again)) == {"module.rollout_correction.rollout_is_threshold": (5.0, 6.0)}


def test_an_option_of_a_group_brings_its_values_and_takes_those_of_the_former(saved: dict, own: Composition) -> None:
    config, composition = recomposed(saved, own, Composition(("callbacks=none",)))
    assert list(config["callbacks"]) == ["mine"], "what was added stays"
    assert "callbacks.checkpoint.keep=3" not in composition.overrides, "it has no place any more"
    config, composition = recomposed(saved, own, Composition(("callbacks=stability",)))
    assert config["callbacks"]["checkpoint"]["keep"] == 3 and "clip_fraction_break" in config["callbacks"]
    assert config["module"]["loss"]["clip_low"] == 0.77
    again, _ = recomposed(config, composition, Composition(("callbacks.clip_fraction_break.limit=0.3",)))
    assert again["callbacks"]["clip_fraction_break"]["limit"] == 0.3
    assert again["callbacks"].keys() == config["callbacks"].keys()


def test_a_block_of_another_class_is_the_new_one_as_a_whole() -> None:
    """The run's record does not contain the class that the run had."""
    saved = {"trainer": {"devices": 2, "strategy": {"_target_": "a.Sharded", "cpu_offload": True, "timeout": 50}}}
    before = {"trainer": {"devices": 1, "strategy": "auto"}}
    after = {"trainer": {"devices": 1, "strategy": {"_target_": "a.Replicated", "timeout": 1800}}}
    assert apply_difference(saved, before, after) == {"trainer": after["trainer"] | {"devices": 2}}
    known = {"trainer": {"devices": 1, "strategy": {"_target_": "a.Unknown", "timeout": 1800}}}
    assert apply_difference(saved, known, after) == {"trainer": after["trainer"] | {"devices": 2}}


def test_a_key_of_the_run_that_its_record_does_not_explain(saved: dict) -> None:
    """A checkpoint outside of a run's folder: its overrides are unknown."""
    config, _ = recomposed(saved, Composition(), Composition(("callbacks.mine.a=4", "data.train.path=q.jsonl")))
    assert config["callbacks"]["mine"] == {"_target_": "builtins.dict", "a": 4}
    assert config["data"]["train"]["path"] == "q.jsonl"


@pytest.mark.parametrize(
    ("key", "near"), [("callbacks.mien.a", "callbacks.mine.a"), ("module.kl.coef", "module.kl.coefficient")]
)
def test_a_key_that_the_run_does_not_have(saved: dict, own: Composition, key: str, near: str) -> None:
    with pytest.raises(InputError, match=rf"the run has no key '{key}'; did you mean {near}\?"):
        recomposed(saved, own, Composition((f"{key}=4",)))


def test_merged_overrides_have_each_key_once() -> None:
    assert merged(["a=1", "+b.c=2"], ["b.c=3", "a=4"]) == ["++b.c=3", "a=4"]
    assert merged(["+b.c=2", "d=1"], ["~b.c"]) == ["d=1"]
    assert merged(["+b.c=2"], ["+b.c=2"]) == ["++b.c=2"], "the whole command again, with resume behind it"


def test_composition_of_a_command(tmp_path: Path) -> None:
    words = ["--config-dir", str(tmp_path), "a=1", "hydra.run.dir=x", "~b", "-cn=mine", "+c.d='x=y'"]
    assert Composition.of_command(words) == Composition(("a=1", "~b", "+c.d='x=y'"), str(tmp_path), "mine")


def test_composition_with_configs_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text("_target_: builtins.len\n", encoding="utf-8")
    composed = resolved(compose(Composition(("reward=mine",), str(tmp_path)), "/runs/1"))
    assert composed["reward"] == {"_target_": "builtins.len"} and composed["output_dir"] == "/runs/1"
    with pytest.raises(InputError, match="which is not there"):
        compose(Composition((), str(tmp_path / "gone")), "/runs/1")


def test_a_callback_that_was_added_and_is_taken_out_is_one_change() -> None:
    gone = {"callbacks.stop._target_": ("my.Stop", MISSING), "callbacks.stop.at": (3, MISSING)}
    changes = gone | {"callbacks.stop": (MISSING, None), "seed": (1, 2)}
    assert list(in_short(changes)) == [("callbacks.stop", ("my.Stop", MISSING)), ("seed", (1, 2))]


@pytest.mark.parametrize(
    ("key", "same"),
    [
        ("iterations", True),
        ("logger.mlflow.tags", True),
        ("callbacks.checkpoint.every_n_iterations", True),
        ("module.update.micro_batch_tokens", True),
        ("trainer.devices", True),
        ("progress_every", True),
        ("trainer.precision", False),
        ("module.update.minibatch_size", False),
        ("callbacks.kl_early_stop.target", False),
        ("seed", False),
    ],
)
def test_keys_that_leave_a_run_the_same_run(key: str, same: bool) -> None:
    assert keeps_numbers(key) is same
