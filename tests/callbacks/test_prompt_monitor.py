"""PromptMonitor: poisoned prompts are flagged, good ones are not, and a resume changes nothing."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import PromptMonitor
from lightning_rlhf.callbacks.prompt_monitor import merged
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.experience import Safety, prompt_key
from lightning_rlhf.metrics.prompt_statistics import Visit
from lightning_rlhf.rewards import RewardBatch
from tests.support import DecisionLog, Recorder, even_digits, fit, tiny_module, tiny_policy

COUNT, POISONED = 200, 4
ROWS = list(ArithmeticTask(max_value=20, size=COUNT))
BAD = {prompt_key(row["prompt"]) for row in ROWS[:POISONED]}
GRPO: dict[str, Any] = {"samples": 4, "advantage": {"estimator": "grpo"}, "critic": {"lr": 1.0}}


class Noisy:
    """Share of even digits, and noise of standard deviation 10 on the poisoned prompts."""

    def __init__(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)

    def __call__(self, batch: RewardBatch) -> list[float]:
        noise = torch.randn(len(batch), generator=self.draw).tolist()
        poisoned = [key in BAD for key in batch.keys]
        plain = even_digits(batch)
        return [score + 10 * x * bad for score, x, bad in zip(plain, noise, poisoned, strict=True)]


def data(module: Any, **settings: Any) -> PromptDataModule:
    """Four visits of every prompt in eight iterations."""
    sizes = {"prompts_per_iteration": COUNT // 2, "iterations": 8}
    return PromptDataModule(ROWS, tokenizer=module.tokenizer, **sizes | settings)


def module(seed: int = 1, **settings: Any) -> Any:
    cheap = {"update": {"epochs": 1, "minibatch_size": 100}, "max_new_tokens": 3, "iterations": 8, "seed": seed}
    return tiny_module(**{"reward": Noisy(seed), **cheap, **settings})


@pytest.mark.parametrize(("seed", "settings"), [(1, {"samples": 1}), (2, {"samples": 1}), (1, GRPO)])
def test_noise_is_found_and_its_removal_calms_the_reward(tmp_path: Path, seed: int, settings: dict[str, Any]) -> None:
    """The benchmark poisoned.py in small."""
    policy = tiny_policy(critic="none") if "advantage" in settings else tiny_policy()
    trained, log = module(seed, policy=policy, **settings), DecisionLog()
    loud, quiet = Recorder(), Recorder()
    trainer = fit(trained, [PromptMonitor(), loud], data=data(trained), folder=tmp_path, logger=log)
    found = json.loads((tmp_path / "prompts" / "suspects.json").read_text(encoding="utf-8"))
    flagged = {suspect["key"]: suspect for suspect in found["suspects"]}
    assert set(flagged) >= BAD and len(set(flagged) - BAD) <= COUNT // 100
    assert sum("spread" in flagged[key]["reasons"] for key in BAD) >= POISONED - 1
    assert min(flagged[key]["spread"] for key in BAD) > 3 * found["others"]["spread"]
    assert found["others"]["spread"] < 1 and found["iteration"] == 8 and found["judged"] == COUNT
    assert trainer.callback_metrics["prompts/flagged"] == len(flagged)
    assert trainer.callback_metrics["prompts/flagged_spread"] >= POISONED - 1
    assert trainer.callback_metrics["prompts/seen"] == trainer.callback_metrics["prompts/judged"] == COUNT
    assert any(key in reason for key in BAD for _, reason in log.of("suspect_prompts"))

    (tmp_path / "blacklist.txt").write_text("\n".join(flagged), encoding="utf-8")
    calm = module(seed, policy=tiny_policy(critic="none") if "advantage" in settings else tiny_policy(), **settings)
    fit(calm, [quiet], data=data(calm, blacklist=str(tmp_path / "blacklist.txt")), folder=tmp_path)
    assert variance(quiet) < variance(loud) / 2


def variance(recorder: Recorder) -> float:
    """Mean variance of the scores of an iteration."""
    variances = [stats.score_std**2 for _, stats in recorder.of("on_experience_ready")]
    return sum(variances) / len(variances)


def test_nothing_is_flagged_before_enough_prompts_can_be_judged(tmp_path: Path) -> None:
    trained = module(samples=1, iterations=5)
    trainer = fit(trained, [PromptMonitor(z=0.01)], data=data(trained, iterations=5), folder=tmp_path)
    assert trainer.callback_metrics["prompts/judged"] >= 0 and trainer.callback_metrics["prompts/seen"] == COUNT
    assert ("prompts/flagged" in trainer.callback_metrics) == (trainer.callback_metrics["prompts/judged"] >= 50)
    few = module(samples=1, iterations=5)
    watched = PromptMonitor(min_prompts=COUNT + 1, min_visits=2, z=0.01)
    last = fit(few, [watched], data=data(few, iterations=5), folder=tmp_path / "few")
    assert last.callback_metrics["prompts/judged"] == COUNT and "prompts/flagged" not in last.callback_metrics
    assert watched.since == {} and not (tmp_path / "few" / "prompts").exists()


def test_without_a_reference_reward_and_spread_are_watched_all_the_same(tmp_path: Path) -> None:
    trained = module(policy=tiny_policy(reference="none"), kl={"coefficient": 0.0}, samples=1)
    watched = PromptMonitor()
    trainer = fit(trained, [watched], data=data(trained), folder=tmp_path)
    assert set(watched.since) >= BAD and trainer.callback_metrics["prompts/flagged_kl"] == 0


def test_a_resumed_run_flags_the_same_prompts_bit_for_bit(tmp_path: Path) -> None:
    """Saved after six of eight iterations; the reward's noise is a function of prompt and iteration-free seed here."""

    def reward(batch: RewardBatch) -> list[float]:
        loud = [10.0 * math.sin(sum(ids) * 7.3 + len(ids)) for ids in batch.response_ids]
        pairs = zip(batch.keys, even_digits(batch), loud, strict=True)
        return [score + (x if key in BAD else 0.0) for key, score, x in pairs]

    states, weights = [], []
    for resume in (None, tmp_path / "iteration_000006.ckpt"):
        watched, trained = PromptMonitor(), module(reward=reward, samples=1)
        callbacks = [watched, RNGState(), IterationCheckpoint(str(tmp_path), every_n_iterations=2, keep=None)]
        fit(trained, callbacks, data=data(trained), folder=tmp_path, resume=resume, enable_checkpointing=True)
        states.append(watched.state_dict())
        weights.append((tmp_path / "prompts" / "suspects.json").read_text(encoding="utf-8"))
    first, second = states
    assert first["since"] == second["since"] and set(first["since"]) >= BAD and weights[0] == weights[1]
    assert first["statistics"]["keys"] == second["statistics"]["keys"]
    for name in ("visits", "rings", "numbers"):
        assert torch.equal(first["statistics"][name], second["statistics"][name])


def test_samples_of_a_prompt_on_two_ranks_are_one_visit() -> None:
    """Scores 0 and 2 on one rank, 5 on the other: mean 7/3, squares 38/3."""
    [found] = merged([Visit("a", 2, 1.0, 2.0, 0.1), Visit("a", 1, 5.0, 0.0, 0.4)])
    assert found == Visit("a", 3, pytest.approx(7 / 3), pytest.approx(38 / 3), pytest.approx(0.2))
    assert merged([Visit("a", 1, 0.0, 0.0, 0.0), Visit("b", 1, 1.0, 0.0, 0.0)])[1].key == "b"


ODD: dict[str, Any] = {"patterns": ["[13579]"]}
COUNTED = {
    "replace": {Safety.SAFE},
    "discard_resample": {Safety.SAFE, Safety.REDRAWN},
    "penalise": {Safety.SAFE, Safety.UNSAFE},
}


@pytest.mark.parametrize(
    "block",
    [{"action": "replace", "reply": "0"}, {"action": "discard_resample", "attempts": 1}, {"action": "penalise"}],
)
def test_only_the_policys_own_samples_are_visits(tmp_path: Path, block: dict[str, Any]) -> None:
    """A reply that the policy never sampled has an enormous KL, which says nothing about the prompt."""
    trained, watched, recorder = module(samples=2, iterations=2, safety=ODD | block), PromptMonitor(), Recorder()
    fit(trained, [watched, recorder], data=data(trained, iterations=2), folder=tmp_path)
    own: dict[str, list[float]] = {}
    others = 0
    for experience, _ in recorder.of("on_experience_ready"):
        rows = zip(experience.prompt_key, experience.scores.tolist(), experience.safety.tolist(), strict=True)
        for key, score, code in rows:
            if Safety(code) in COUNTED[block["action"]]:
                own.setdefault(key, []).append(score)
            else:
                others += 1
    standing = watched.statistics.standing(min_visits=1)
    assert list(watched.statistics.index) == list(own) and (others > 0) == (block["action"] != "penalise")
    assert standing.samples.tolist() == [len(scores) for scores in own.values()]
    assert standing.scores.tolist() == pytest.approx([sum(s) / len(s) for s in own.values()], rel=1e-5, abs=1e-6)
    assert len(own) < COUNT or block["action"] == "penalise", "a prompt without an own sample was not visited"


def test_responses_that_are_dropped_as_early_are_the_policys_own(tmp_path: Path) -> None:
    trained = module(samples=1, iterations=1, termination={"early": "drop", "min_tokens": 2})
    watched, recorder = PromptMonitor(), Recorder()
    fit(trained, [watched, recorder], data=data(trained, iterations=1), folder=tmp_path)
    [(experience, _)] = recorder.of("on_experience_ready")
    assert not experience.loss_mask.any(-1).all() and len(watched.statistics) == len(set(experience.prompt_key))


def test_a_batch_without_a_sample_that_counts_is_no_visit(tmp_path: Path) -> None:
    trained = module(samples=1, iterations=1, safety={"patterns": [r"(?s)^.*$"], "attempts": 1})
    trainer = fit(trained, [PromptMonitor()], data=data(trained, iterations=1), folder=tmp_path)
    assert trainer.callback_metrics["prompts/seen"] == trainer.callback_metrics["prompts/judged"] == 0


def test_a_suspect_that_comes_and_goes_is_named_once(tmp_path: Path) -> None:
    class Watched(PromptMonitor):
        def on_experience_ready(self, *arguments: Any) -> None:
            super().on_experience_ready(*arguments)
            flagged.append({*self.since})

    flagged: list[set[str]] = []
    trained, log = module(samples=1), DecisionLog()
    watched = Watched(z=0.5, min_visits=2)
    fit(trained, [watched], data=data(trained), folder=tmp_path, logger=log)
    entered = [key for before, after in pairwise([set(), *flagged]) for key in after - before]
    assert len(entered) > len(set(entered)), "some left the list and came back"
    reasons = [reason for _, reason in log.of("suspect_prompts")]
    named = [key for reason in reasons for key in re.findall(r"[0-9a-f]{16}", reason)]
    more = sum(int(count) for reason in reasons for count in re.findall(r"and (\d+) more", reason))
    assert len(named) == len(set(named)) and len(named) + more == len(set(entered))
    state = watched.state_dict()
    assert set(state["named"]) == set(entered) >= set(state["since"])
    resumed = PromptMonitor()
    resumed.load_state_dict(state)
    assert resumed.state_dict()["named"] == state["named"]
    del state["named"]  # an earlier release
    resumed.load_state_dict(state)
    assert resumed.state_dict()["named"] == sorted(state["since"])


def test_a_suspects_visits_are_those_that_count(tmp_path: Path) -> None:
    trained = module(samples=1)
    fit(trained, [PromptMonitor(window=3)], data=data(trained), folder=tmp_path)
    found = json.loads((tmp_path / "prompts" / "suspects.json").read_text(encoding="utf-8"))
    assert {suspect["visits"] for suspect in found["suspects"]} == {3}, "of four"
    assert {suspect["samples"] for suspect in found["suspects"]} == {3}
    assert "kl" not in found["suspects"][0] and {"kl_excess"} < {*found["suspects"][0]} & {*found["others"], "key"}
