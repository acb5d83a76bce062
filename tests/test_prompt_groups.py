"""Groups of prompts in real runs: ranks, resume, evaluation, gradients, and a noisy group that drowns another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import noisy_group
from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble
from lightning_rlhf.callbacks import PromptRecords, RLHFCallback, SamplesTable
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.errors import InputError, SettingError
from lightning_rlhf.experience import Experience, MiniBatch, split_by_tokens
from lightning_rlhf.functional.losses import LossScale
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.reporting.prompt_records import read_records
from tests.ranks import run_ranks
from tests.support import Recorder, fit, resume_equals_whole, same, tiny_module, tiny_policy, weights

LEVELS = ["easy", "hard", "hard", "easy", "easy", "hard", "odd one", "easy"]
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": level} for i, level in enumerate(LEVELS)]
OF = {row["prompt"]: row["level"] for row in ROWS}
BATCH = {"reward_processing": {"normalise": "batch"}}
RUNNING = {"reward_processing": {"normalise": "running"}}


def data(module: ActorCriticModule, rows: Any = ROWS, **settings: Any) -> PromptDataModule:
    sizes: dict[str, Any] = {"prompts_per_iteration": 8, "iterations": module.iterations, "group_column": "level"}
    return PromptDataModule(rows, tokenizer=module.tokenizer, **(sizes | settings))


def run(data_settings: dict[str, Any] | None = None, **settings: Any) -> tuple[ActorCriticModule, Recorder, dict]:
    module, recorder = tiny_module(**({"iterations": 2} | settings)), Recorder()
    trainer = fit(module, [recorder], data=data(module, **(data_settings or {})))
    return module, recorder, {name: float(value) for name, value in trainer.callback_metrics.items()}


def experiences(recorder: Recorder) -> list[Experience]:
    return [experience for experience, _ in recorder.of("on_experience_ready")]


# --- what a run measures, and that it changes nothing ------------------------------------------------------------


def test_a_column_alone_measures_and_changes_no_bit() -> None:
    plain, _, without = run({"group_column": None})
    module, recorder, numbers = run()
    assert same(weights(plain), weights(module))
    own = {name: value for name, value in numbers.items() if name.startswith("group/")}
    noise = ("time/", "perf/")
    assert {n: v for n, v in numbers.items() if n not in own and not n.startswith(noise)} == {
        n: v for n, v in without.items() if not n.startswith(noise)
    }
    last = experiences(recorder)[-1]
    assert last.prompt_group == [OF[text] for text in last.prompts]
    for group, label in (("easy", "easy"), ("hard", "hard"), ("odd one", "odd_one")):
        rows = [i for i, of in enumerate(last.prompt_group) if of == group]
        scores, valid = last.require("scores").double()[rows], last.require("loss_mask")[rows]
        kl = (last.require("old_logprobs") - last.require("ref_logprobs")).double()[rows][valid]
        expected = {
            "samples": len(rows),
            "reward_mean": scores.mean(),
            "reward_std": scores.std(),
            "response_length_mean": last.response_lengths[rows].double().mean(),
            "advantage_mean": last.require("advantages").double()[rows][valid].mean(),
            "advantage_abs_mean": last.require("advantages").double()[rows][valid].abs().mean(),
            "kl_ref": kl.mean(),
        }
        found = {name: own.pop(f"group/{label}/{name}") for name in expected}
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-6, abs=1e-9)
    assert own == {}


def test_a_group_that_is_not_in_the_batch_has_no_samples_and_nothing_else() -> None:
    _, _, numbers = run({"prompts_per_iteration": 4, "shuffle": False}, iterations=1, update={"minibatch_size": 4})
    assert {name for name in numbers if name.startswith("group/odd_one")} == {"group/odd_one/samples"}
    assert numbers["group/odd_one/samples"] == 0 and numbers["group/hard/samples"] == 4


@pytest.mark.parametrize("column", ["level", None])
def test_records_and_samples_name_the_group_of_each_prompt(tmp_path: Path, column: str | None) -> None:
    module = tiny_module(iterations=1)
    callbacks = [PromptRecords(), SamplesTable(rows=8)]
    fit(module, callbacks, data=data(module, group_column=column), folder=tmp_path)
    records = list(read_records(tmp_path))
    assert len(records) == 16
    assert all(row["prompt_group"] == (OF[row["prompt"]] if column else None) for row in records)
    samples = [json.loads(line) for line in (tmp_path / "samples" / "iteration_000001.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    assert all(row.get("prompt_group") == (OF[row["prompt"]] if column else None) for row in samples)


def test_rollouts_drawn_ahead_and_drawn_again_keep_their_groups() -> None:
    module, recorder = tiny_module(iterations=3, safety={"patterns": ["[13579]"]}, samples=3), Recorder()
    module.engine.ahead = type(module.engine.ahead)(lag=1)
    fit(module, [recorder], data=data(module))
    for experience in experiences(recorder):
        assert experience.prompt_group == [OF[text] for text in experience.prompts]
    assert all((experience.safety != 0).any() for experience in experiences(recorder)), "some were drawn again"
    assert [int(e.policy_version[0]) for e in experiences(recorder)] == [0, 0, 1], "the last two were drawn ahead"


def test_the_held_out_prompts_are_measured_per_group() -> None:
    held_out = [{"prompt": f"1{i}+1=", "level": level} for i, level in enumerate(["easy", "hard", "easy", "only here"])]
    module = tiny_module(iterations=1)
    given = data(module, validation=held_out, validation_batch_size=3)
    numbers = fit(module, data=given, limit_val_batches=None).callback_metrics
    groups = {name: float(value) for name, value in numbers.items() if name.startswith("eval/group/")}
    assert groups.keys() == {f"eval/group/{name}/reward_mean" for name in ("easy", "hard", "only_here")}
    weighted = [2 * groups["eval/group/easy/reward_mean"], groups["eval/group/hard/reward_mean"]]
    total = sum(weighted) + groups["eval/group/only_here/reward_mean"]
    assert total / 4 == pytest.approx(float(numbers["eval/reward_mean"]), rel=1e-6)
    assert "group/only_here/samples" not in numbers


# --- weights and normalisation in the update -------------------------------------------------------------------------


class Once(RLHFCallback):
    """Takes no step, so that the experience is all that a run makes."""

    def on_before_step(self, trainer: Any, module: Any, stats: Any) -> None:
        module.control.skip_step("only the experience is wanted")


def gradients(module: ActorCriticModule, parts: list[MiniBatch]) -> dict[str, torch.Tensor]:
    module.zero_grad()
    for part in parts:
        module.micro_batch_loss(part, MetricBatch()).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def scored(groups: dict[str, Any], **settings: Any) -> tuple[ActorCriticModule, MiniBatch]:
    recorder, module = Recorder(), tiny_module(iterations=1, max_new_tokens=12, groups=groups, **settings)
    fit(module, [recorder, Once()], data=data(module))
    [experience] = experiences(recorder)
    counts = experience.require("loss_mask").sum(-1)
    scale = LossScale(tokens=float(counts.sum()), sequences=float((counts > 0).sum()))
    return module, MiniBatch.from_experience(experience, torch.arange(len(experience)), scale)


def only(minibatch: MiniBatch, group: str) -> MiniBatch:
    return minibatch.select(torch.tensor([i for i, of in enumerate(minibatch.prompt_group) if of == group]))


@pytest.mark.parametrize("groups", [{"weights": {"hard": 0.25}}, {"normalise": "rewards"}, {"normalise": "advantages"}])
@pytest.mark.parametrize("cut", ["one by one", "by group"])
def test_gradients_do_not_depend_on_the_split(groups: dict[str, Any], cut: str) -> None:
    module, whole = scored(groups, **BATCH)
    expected = gradients(module, [whole])
    parts = [part for _, part in split_by_tokens(whole, whole.lengths(), 1)]
    if cut == "by group":
        parts = [only(whole, name) for name in dict.fromkeys(LEVELS)]
    found = gradients(module, parts)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_a_weight_is_the_share_of_the_policy_gradient_and_leaves_the_critic_alone() -> None:
    """The gradient with weights is the sum of each group's, times its weight; all in the units of the whole loss."""
    factors = {"easy": 1.0, "hard": 0.25, "odd one": 0.0}
    module, plain = scored({}, policy=tiny_policy(critic="separate"))
    of_groups = {name: gradients(module, [only(plain, name)]) for name in factors}
    value = gradients(module, [plain])
    module, weighted = scored({"weights": {"hard": 0.25, "odd one": 0.0}}, policy=tiny_policy(critic="separate"))
    found = gradients(module, [weighted])
    for name, gradient in found.items():
        parts = {group: of[name] for group, of in of_groups.items()}
        if name.startswith("actor."):
            expected = sum((factors[group] * part for group, part in parts.items()), torch.zeros_like(gradient))
        else:
            expected = value[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [BATCH, RUNNING], ids=["batch", "running"])
def test_each_groups_rewards_are_normalised_by_its_own_numbers(settings: dict[str, Any]) -> None:
    _, recorder, _ = run(groups={"normalise": "rewards", "min_samples": 5}, **settings)
    running = settings is RUNNING
    seen = experiences(recorder)
    for number, experience in enumerate(seen):
        past = seen[: number + 1] if running else [experience]
        scores = torch.cat([e.require("scores") for e in past]).double()
        of = [group for e in past for group in e.prompt_group]
        for group in set(of):
            own = scores[[i for i, name in enumerate(of) if name == group]]
            own = scores if len(own) < 5 else own
            rows = [i for i, name in enumerate(experience.prompt_group) if name == group]
            expected = (experience.require("scores").double()[rows] - own.mean()) / (own.var() + 1e-8).sqrt()
            torch.testing.assert_close(experience.require("rewards")[rows].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_group_relative_estimators_run_with_groups_of_prompts(estimator: str) -> None:
    groups = {"normalise": "rewards", "weights": {"hard": 0.5}}
    policy = tiny_policy(critic="none")
    _, recorder, numbers = run(policy=policy, advantage={"estimator": estimator}, groups=groups, samples=4, **BATCH)
    for experience in experiences(recorder):
        first = experience.require("advantages")[:, 0].view(-1, 4)
        assert first.sum(-1).abs().max() < 1e-4 and first.isfinite().all()
    assert all(value == value for value in numbers.values())


# --- resume, ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"groups": {"normalise": "rewards", "weights": {"hard": 0.5}}, **RUNNING},
        {"groups": {"normalise": "advantages"}},
    ],
    ids=["rewards, running", "advantages"],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("tests.support.prompts", data)
    modules: list[ActorCriticModule] = []

    def module() -> ActorCriticModule:
        modules.append(tiny_module(iterations=4, **settings))
        return modules[-1]

    resume_equals_whole(tmp_path, lambda: [], module)
    whole, resumed = modules
    assert whole.groups.state_dict() == resumed.groups.state_dict()
    assert bool(whole.groups.state_dict()) == ("reward_processing" in settings), "running moments are in the checkpoint"


def test_a_checkpoint_without_groups_is_resumed_with_them(tmp_path: Path) -> None:
    """Of an earlier release, or of a run without; the groups start anew."""
    module = tiny_module(iterations=2, **RUNNING)
    trainer = fit(module, data=data(module), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "old.ckpt")
    content = torch.load(tmp_path / "old.ckpt", weights_only=True)
    del content["lightning_rlhf"]["groups"]
    torch.save(content, tmp_path / "old.ckpt")
    longer = tiny_module(iterations=3, groups={"normalise": "rewards"}, **RUNNING)
    fit(longer, data=data(longer), resume=tmp_path / "old.ckpt")
    counts = {name: state[0] for name, state in longer.groups.state_dict().items()}
    assert longer.control.iteration == 3 and counts == {"easy": 8.0, "hard": 6.0, "odd one": 2.0}


HALVES = [
    row | {"level": level} for row, level in zip(ROWS, ["easy"] * 3 + ["hard"] * 3 + ["odd one"] * 2, strict=True)
]
"""The first half is that of rank 0. Each rank lacks a group; of ``hard``, rank 0 has 2 of 6 sequences."""


def trained(rank: int, devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    module, recorder = tiny_module(iterations=2, **settings), Recorder()
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2} if devices == 2 else {}
    held_out = [{"prompt": f"1{i}+1=", "level": "easy" if i % 2 else "hard"} for i in range(3)]
    given = data(module, HALVES, validation=held_out, shuffle=False)
    trainer = fit(module, [recorder], data=given, limit_val_batches=None, **options)
    return {
        "weights": weights(module),
        "numbers": {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith(("group/", "eval/"))},
        "groups": set(experiences(recorder)[0].prompt_group),
        "state": module.groups.state_dict(),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"groups": {"normalise": "rewards", "weights": {"hard": 0.5}, "min_samples": 3}, **BATCH},
        {"groups": {"normalise": "rewards", "weights": {"hard": 0.5}, "min_samples": 3}, **RUNNING},
        {"groups": {"normalise": "advantages", "min_samples": 3}},
    ],
    ids=["rewards, batch", "rewards, running", "advantages"],
)
def test_two_ranks_with_different_groups_are_one_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Groups that a rank lacks take part; numbers, moments and weights are those of one process."""
    first, second = run_ranks(trained, 2, settings, folder=tmp_path)
    assert first["groups"] == {"easy", "hard"} and second["groups"] == {"hard", "odd one"}
    assert first["numbers"] == second["numbers"] and first["state"] == second["state"]
    assert same(first["weights"], second["weights"])
    alone = trained(0, 1, settings)
    assert first["numbers"] == pytest.approx(alone["numbers"], rel=1e-4, abs=1e-5)
    assert {"group/easy/kl_ref", "eval/group/hard/reward_mean"} <= alone["numbers"].keys()
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-3, atol=1e-5)


# --- refused before the run ------------------------------------------------------------------------------------------


def test_weights_of_unknown_groups_are_refused_before_any_weights_are_loaded(
    compose: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the reward and the model come after the data")

    small = ["logger=none", "data.train.max_value=4", "data.validation.size=2", "data.group_column=answer"]
    config = schema.check(compose(*small, "module.groups.weights={88: 0.5, 3: 2}"))
    monkeypatch.setattr("lightning_rlhf.assembly.check_members", never)
    with pytest.raises(InputError, match=r"module\.groups\.weights\.88 = 0\.5 .*did you mean '8'\? .*groups 1, 2, 3"):
        assemble(config)
    config = schema.check(compose(*small, "data.group_column=anwser"))
    with pytest.raises(InputError, match=r"'anwser': no row has this column; did you mean 'answer'\?"):
        assemble(config)


def test_a_module_with_weights_and_a_data_module_without_groups_are_refused() -> None:
    module = tiny_module(iterations=1, groups={"weights": {"hard": 0.5}})
    with pytest.raises(SettingError, match=r"module\.groups\.weights\.hard = 0\.5 .*nothing without groups"):
        fit(module, data=data(module, group_column=None))


# --- a noisy group -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("normalise", ["rewards", "advantages"])
def test_a_noisy_group_drowns_another_unless_each_is_normalised_by_itself(normalise: str) -> None:
    """Scores between 0 and 1 beside noise of standard deviation 10."""
    drowned, kept = noisy_group.train("none", 1, 20), noisy_group.train(normalise, 1, 20)
    assert drowned.reached < 0.6 and kept.reached > 0.85
    (easy, hard), (own_easy, own_hard) = drowned.signals[0], kept.signals[0]
    assert easy < 0.4 * hard and own_easy > 0.6 * own_hard
