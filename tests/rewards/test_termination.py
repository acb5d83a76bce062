"""How responses end: which are early, and what each choice does to rewards, returns and advantages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.callbacks import LengthCurriculum
from lightning_rlhf.experience import Experience, Finish, Rollout
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.moments import RunningMoments
from lightning_rlhf.mixins.rollout_correction import bypass
from lightning_rlhf.rewards import RewardBatch
from lightning_rlhf.rewards.termination import classify, drop_early, soft_overlong_penalty
from lightning_rlhf.rollout import HFEngine
from lightning_rlhf.scoring import compute_advantages
from lightning_rlhf.settings import PPOSettings
from tests.ranks import run_ranks
from tests.support import Recorder, fit, moments, resume_equals_whole, same, tiny_module, tiny_policy, weights

F64 = torch.float64
LENGTHS = [3, 1, 4]
"""Tokens of a natural response, of one that is its end token alone, and of one cut at four tokens."""
CHOICES: dict[str, dict[str, Any]] = {
    "keep": {},
    "early penalty": {"early": "penalty"},
    "early drop": {"early": "drop"},
    "truncated penalty": {"truncated": "penalty"},
    "truncated drop_reward": {"truncated": "drop_reward"},
    "truncated bootstrap": {"truncated": "bootstrap"},
    "truncated soft_overlong": {"truncated": "soft_overlong", "overlong_cache": 2, "overlong_factor": 2.0},
}


def rows(lengths: list[int], finish: list[Finish]) -> dict[str, Any]:
    """The fields of a rollout with these lengths, one group, 4 tokens at most."""
    count = len(lengths)
    return {
        "prompt_ids": torch.ones(count, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(count, 1, dtype=torch.bool),
        "response_ids": torch.ones(count, 4, dtype=torch.int64),
        "response_mask": torch.arange(4) < torch.tensor(lengths).unsqueeze(1),
        "rollout_logprobs": torch.zeros(count, 4, dtype=F64),
        "finish": torch.tensor([int(code) for code in finish]),
        "policy_version": torch.zeros(count, dtype=torch.int64),
        "seed": torch.zeros(count, dtype=torch.int64),
        "group": torch.zeros(count, dtype=torch.int64),
        "prompt_key": ["key"] * count,
        "max_new_tokens": torch.full((count,), 4),
    }


def three(**fields: Any) -> Experience:
    """Three scored responses (natural, early, truncated), KL to the reference 0.25 nats on every token."""
    experience = Experience(
        **rows(LENGTHS, [Finish.NATURAL, Finish.EARLY, Finish.TRUNCATED]),
        scores=torch.tensor([1.0, 0.5, 3.0], dtype=F64),
        old_logprobs=torch.zeros(3, 4, dtype=F64),
        ref_logprobs=torch.full((3, 4), -0.25, dtype=F64),
        values=torch.tensor([[0.5, 0.25, 1, 9], [0.125, 9, 9, 9], [0.25, 0.5, 0.75, 1]], dtype=F64),
        final_values=torch.tensor([0.0, 0.0, 0.75], dtype=F64),
        prompts=["1+1="] * 3,
        texts=["2", "", "2222"],
    )
    experience.loss_mask = experience.response_mask
    for name, value in fields.items():
        setattr(experience, name, value)
    return experience


def advantages_of(
    experience: Experience,
    termination: dict[str, Any],
    *,
    beta: float = 0.0,
    seen: RunningMoments | None = None,
    **blocks: dict[str, Any],
) -> dict[str, float]:
    """Compute advantages as an iteration does, without whitening and z-score unless asked for; returns the metrics."""
    blocks = {"reward_processing": {"normalise": "none"}, **blocks}
    blocks["advantage"] = {"whiten": False, **blocks.get("advantage", {})}
    settings = PPOSettings.from_blocks(termination={"min_tokens": 2, **termination}, **blocks)
    drop_early(experience, settings.termination)
    metrics = MetricBatch()
    compute_advantages(experience, settings, beta, RunningMoments() if seen is None else seen, metrics)
    return metrics.compute()


def equal(given: Tensor | None, expected: list[Any]) -> None:
    assert given is not None
    torch.testing.assert_close(given, torch.tensor(expected, dtype=given.dtype), rtol=1e-12, atol=1e-12)


# --- which responses are early -----------------------------------------------------------------------------------


def test_a_response_is_early_by_its_tokens_before_the_end_token() -> None:
    """With min_tokens 2: two tokens and an end token are enough, one token and an end token are not."""
    ends = [Finish.NATURAL, Finish.NATURAL, Finish.NATURAL, Finish.TRUNCATED]
    rollout = Rollout(**rows([3, 2, 1, 1], ends))
    early = classify(rollout, 2)
    assert early.finish.tolist() == [Finish.NATURAL, Finish.EARLY, Finish.EARLY, Finish.TRUNCATED]
    assert rollout.finish.tolist() == ends, "the engine's rollout is left alone"
    assert classify(early, 1).finish.tolist() == [Finish.NATURAL, Finish.NATURAL, Finish.EARLY, Finish.TRUNCATED]
    assert classify(early, 0).finish.tolist() == ends, "0: none is early"


def test_the_module_tells_early_responses_whatever_the_engine() -> None:
    """Every third token ends a response here, so most are early with min_tokens 3; rewards see it, too."""
    seen: list[Finish] = []
    recorder = Recorder()

    def look(batch: RewardBatch) -> list[float]:
        seen.extend(batch.finish)
        return [0.0] * len(batch)

    module = tiny_module(iterations=1, reward=look, termination={"min_tokens": 3})
    module.engine = HFEngine(samples=2, max_new_tokens=6, stop_token_ids=[3, 6, 9, 12])
    numbers = fit(module, [recorder]).callback_metrics
    [rollout] = recorder.of("on_rollout_end")
    lengths = rollout.response_lengths.tolist()
    early = [code == Finish.EARLY for code in rollout.finish.tolist()]
    assert seen == rollout.finish.tolist()
    ended = [code != Finish.TRUNCATED for code in rollout.finish.tolist()]
    assert early == [stop and length - 1 < 3 for stop, length in zip(ended, lengths, strict=True)]
    assert 0 < sum(early) < len(early)
    assert numbers["response/early_fraction"] == sum(early) / len(early)
    assert rollout.max_new_tokens.tolist() == [6] * len(rollout)


# --- rewards, returns and advantages by hand ---------------------------------------------------------------------

EARLY, CUT = [0.375, 0, 0, 0], [2.5, 2.625, 2.75, 2.875]
NATURAL = [0.625, 0.75, 0.875, 0]
"""Returns with ``keep``: the scores 0.5, 3 and 1, minus 0.125 for each token from this one on."""
GAE: dict[str, tuple[list[float], list[list[float]]]] = {
    "keep": ([1, 0.5, 3], [NATURAL, EARLY, CUT]),
    "early penalty": ([1, -1.5, 3], [NATURAL, [-1.625, 0, 0, 0], CUT]),
    "early drop": ([1, 0.5, 3], [NATURAL, EARLY, CUT]),
    "truncated penalty": ([1, 0.5, 1], [NATURAL, EARLY, [0.5, 0.625, 0.75, 0.875]]),
    "truncated drop_reward": ([1, 0.5, 0], [NATURAL, EARLY, [-0.5, -0.375, -0.25, -0.125]]),
    "truncated bootstrap": ([1, 0.5, 3], [NATURAL, EARLY, [3.25, 3.375, 3.5, 3.625]]),
    "truncated soft_overlong": (
        [0, 0.5, 1],
        [[-0.375, -0.25, -0.125, 0], EARLY, [0.5, 0.625, 0.75, 0.875]],
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_rewards_and_returns_of_gae(choice: str) -> None:
    """gamma = lambda = 1, beta 0.5: a return is the sum of the token rewards from its token on."""
    experience = three()
    advantages_of(experience, CHOICES[choice], beta=0.5)
    rewards, returns = GAE[choice]
    equal(experience.rewards, rewards)
    equal(experience.returns, returns)
    advantages = torch.tensor(returns, dtype=F64) - experience.require("values")
    if choice == "early drop":
        advantages[1] = 0.0
    equal(experience.advantages, advantages.masked_fill(~experience.response_mask, 0.0).tolist())
    assert experience.require("loss_mask")[1].any() == (choice != "early drop")


@pytest.mark.parametrize("choice", CHOICES)
def test_the_token_rewards_of_gae(choice: str) -> None:
    """With lambda 0 and values of 0 an advantage is the token's own reward, and the bootstrap after the last one."""
    experience = three(values=torch.zeros(3, 4, dtype=F64))
    advantages_of(experience, CHOICES[choice], beta=0.5, advantage={"gae_lambda": 0.0})
    returns = torch.tensor(GAE[choice][1], dtype=F64)
    expected = returns - torch.cat([returns[:, 1:], returns.new_zeros(3, 1)], 1)
    if choice == "early drop":
        expected[1] = 0.0
    equal(experience.advantages, expected.tolist())


GRPO: dict[str, list[float]] = {
    "keep": [-0.5, -1, 1.5],
    "early penalty": [1 / 6, -7 / 3, 13 / 6],
    "early drop": [-1, 0, 1],
    "truncated penalty": [1 / 6, -1 / 3, 1 / 6],
    "truncated drop_reward": [0.5, 0, -0.5],
    "truncated soft_overlong": [-0.5, 0, 0.5],
}
"""Score minus the group's mean: scores 1, 0.5, 3 and their changes; the dropped row is no member of its group."""


@pytest.mark.parametrize("choice", GRPO)
@pytest.mark.parametrize("normalise_std", [False, True])
def test_advantages_of_grpo(choice: str, normalise_std: bool) -> None:
    experience = three(values=None)
    blocks = {"advantage": {"estimator": "grpo", "normalise_std": normalise_std}}
    advantages_of(experience, CHOICES[choice], **blocks)
    expected = torch.tensor(GRPO[choice], dtype=F64)
    if normalise_std:
        members = expected[[0, 2]] if choice == "early drop" else expected
        expected = expected / (members.square().sum() / (len(members) - 1)).sqrt().add(1e-6)
    equal(experience.advantages, (expected.unsqueeze(1) * experience.response_mask).tolist())


def test_the_other_estimators_leave_a_dropped_row_out() -> None:
    experience = three(values=None)
    advantages_of(experience, {"early": "drop"}, advantage={"estimator": "rloo"})
    equal(experience.require("advantages")[:, 0], [-2, 0, 2])
    experience = three(values=None)
    blocks = {"advantage": {"estimator": "reinforce_plus_plus", "whiten": True}}
    advantages_of(experience, {"early": "drop"}, **blocks)
    # Tokens of the loss: three with return 1, four with return 3. Mean 15 / 7, squared deviations 48 / 7, n - 1 = 6.
    low, high = ((x - 15 / 7) / math.sqrt(48 / 42 + 1e-8) for x in (1.0, 3.0))
    equal(experience.advantages, [[low] * 3 + [0], [0] * 4, [high] * 4])


# --- normalisation, clipping and other mechanisms ----------------------------------------------------------------


def z(*numbers: float) -> list[float]:
    """Z-scores with unbiased variance."""
    mean = sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in numbers]


def without(kept: list[float], row: int) -> list[float]:
    return [*kept[:row], 0.0, *kept[row:]]


ZSCORES = {
    "keep": z(1, 0.5, 3),
    "early penalty": z(1, -1.5, 3),
    "early drop": without(z(1, 3), 1),
    "truncated penalty": z(1, 0.5, 1),
    "truncated drop_reward": without(z(1, 0.5), 2),
    "truncated bootstrap": z(1, 0.5, 3),
    "truncated soft_overlong": z(0, 0.5, 1),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_the_z_score_sees_penalties_and_no_row_without_a_score(choice: str) -> None:
    experience = three()
    advantages_of(experience, CHOICES[choice], reward_processing={"normalise": "batch"})
    equal(experience.rewards, ZSCORES[choice])


@pytest.mark.parametrize("choice", CHOICES)
def test_running_moments_are_those_of_the_same_rows(choice: str) -> None:
    experience, seen = three(), RunningMoments()
    advantages_of(experience, CHOICES[choice], seen=seen, reward_processing={"normalise": "running"})
    rewards, expected = experience.require("rewards").tolist(), ZSCORES[choice]
    counted = [row for row in range(3) if choice != "early drop" or row != 1]
    equal(torch.tensor([rewards[row] for row in counted], dtype=F64), [expected[row] for row in counted])
    assert seen.count == (2 if choice in ("early drop", "truncated drop_reward") else 3)


def test_a_clip_cancels_no_penalty() -> None:
    experience = three()
    termination = {"early": "penalty", "early_penalty": -5, "truncated": "penalty"}
    advantages_of(experience, termination, reward_processing={"normalise": "none", "clip": 0.75})
    equal(experience.rewards, [0.75, 0.5 - 5, 0.75 - 2])


def test_penalties_of_several_kinds_add_up() -> None:
    """Four tokens at most, all of them the cache: even one token costs 0.25."""
    experience = three()
    termination = {"early": "penalty", "truncated": "soft_overlong", "overlong_cache": 4}
    numbers = advantages_of(experience, termination)
    equal(experience.rewards, [1 - 0.75, 0.5 - 2 - 0.25, 3 - 1])
    assert numbers["reward/termination_penalty"] == pytest.approx((-0.75 - 2.25 - 1) / 3)


def test_metrics_of_what_is_not_configured_are_absent() -> None:
    assert "reward/termination_penalty" not in advantages_of(three(), {"early": "drop"})
    numbers = advantages_of(three(), {"early": "penalty"})
    assert numbers["reward/termination_penalty"] == pytest.approx(-2 / 3) and "response/dropped_fraction" not in numbers
    assert advantages_of(three(), {"early": "drop"})["response/dropped_fraction"] == pytest.approx(1 / 3)
    healthy = three(finish=torch.zeros(3, dtype=torch.int64))
    assert advantages_of(healthy, {"early": "drop"})["response/dropped_fraction"] == 0.0, "measured: none is"


def test_an_overridden_reward_wins_over_a_penalty() -> None:
    override = torch.full((3, 4), math.nan, dtype=F64)
    override[1, 0] = -10.0
    experience = three(reward_override=override)
    advantages_of(experience, {"early": "penalty"}, beta=0.5)
    equal(experience.require("returns")[1], [-10, 0, 0, 0])


def test_a_rejected_row_gets_its_penalty_and_is_in_no_statistic() -> None:
    experience = three()
    experience.loss_mask = experience.response_mask & torch.tensor([[True], [False], [True]])
    advantages_of(experience, {"early": "penalty"}, reward_processing={"normalise": "batch"})
    rewards = experience.require("rewards")
    equal(rewards[[0, 2]], z(1, 3))
    experience = three(values=None)
    experience.loss_mask = experience.response_mask & torch.tensor([[True], [False], [True]])
    advantages_of(experience, {"early": "penalty"}, advantage={"estimator": "grpo", "normalise_std": False})
    equal(experience.require("advantages")[:, 0], [-1, 0, 1])


def test_a_dropped_row_stays_dropped_in_bypass_mode() -> None:
    experience = three()
    drop_early(experience, PPOSettings.from_blocks(termination={"early": "drop"}).termination)
    bypass(experience, reject_rows=False)
    assert experience.require("loss_mask").any(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("choice", CHOICES)
def test_with_the_kl_in_the_loss_rewards_are_scores_and_penalties_alone(choice: str) -> None:
    experience = three()
    advantages_of(experience, CHOICES[choice], beta=0.5, kl={"placement": "loss", "estimator": "k2"})
    rewards, tail = GAE[choice][0], 0.75 if choice == "truncated bootstrap" else 0.0
    equal(experience.require("returns")[:, 0], [rewards[0], rewards[1], rewards[2] + tail])


@pytest.mark.parametrize("junk", [7.0, math.nan])
def test_values_on_padding_reach_no_token(junk: float) -> None:
    """[1.922, 1.58, 1.2] if they leak."""
    experience = Experience(
        **rows([3], [Finish.NATURAL]),
        scores=torch.tensor([2.0], dtype=F64),
        values=torch.tensor([[0.5, 1.0, 1.5, junk]], dtype=F64),
        final_values=torch.zeros(1, dtype=F64),
    )
    experience.loss_mask = experience.response_mask
    advantages_of(experience, {"truncated": "bootstrap"}, advantage={"gae_lambda": 0.9})
    equal(experience.advantages, [[1.355, 0.95, 0.5, 0]])
    equal(experience.returns, [[1.855, 1.95, 2, 0]])


@pytest.mark.parametrize(
    ("gamma", "lam", "cut", "ended"),
    [(1.0, 1.0, [1.3, 1.3], [0.5, 0.5]), (0.9, 0.5, [0.499, 1.22], [0.175, 0.5])],
)
def test_only_a_truncated_row_is_bootstrapped(gamma: float, lam: float, cut: list[float], ended: list[float]) -> None:
    for truncated in ("bootstrap", "keep"):
        experience = Experience(
            **rows([2, 2], [Finish.TRUNCATED, Finish.NATURAL]),
            scores=torch.ones(2, dtype=F64),
            values=torch.full((2, 4), 0.5, dtype=F64),
            final_values=torch.tensor([0.8, 0.0], dtype=F64),
        )
        experience.loss_mask = experience.response_mask
        advantages_of(experience, {"truncated": truncated}, advantage={"gamma": gamma, "gae_lambda": lam})
        expected = [cut if truncated == "bootstrap" else ended, ended]
        equal(experience.require("advantages")[:, :2], expected)


def test_the_soft_penalty_grows_over_the_last_tokens() -> None:
    """L_max 10, L_cache 4; a share of 0.4 is the same cache, and follows the limit of each row."""
    lengths = torch.tensor([1, 6, 7, 9, 10, 11])
    for cache in (4, 0.4):
        penalty = soft_overlong_penalty(lengths, torch.full_like(lengths, 10), cache)
        equal(penalty, [0, 0, -0.25, -0.75, -1, -1])
    limits = torch.tensor([5, 10, 20])
    equal(soft_overlong_penalty(torch.tensor([4, 9, 19]), limits, 0.4), [-0.5, -0.75, -0.875])
    equal(soft_overlong_penalty(torch.tensor([0, 1, 2]), torch.full((3,), 2), 4), [0, -0.5, -1])


# --- real runs ---------------------------------------------------------------------------------------------------

ENDS_AT_ONCE = {"stop_token_ids": list(range(17))}
"""Every token of the tiny model's vocabulary ends a response."""


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_a_batch_dropped_as_a_whole_trains_nothing(estimator: str) -> None:
    policy = tiny_policy(critic="separate" if estimator == "gae" else "none")
    module = tiny_module(
        policy=policy, iterations=2, termination={"early": "drop"}, advantage={"estimator": estimator},
        reward_processing={"normalise": "running"},
    )  # fmt: skip
    module.engine = HFEngine(samples=2, max_new_tokens=6, **ENDS_AT_ONCE)  # type: ignore[arg-type]
    before = weights(module)
    numbers = fit(module).callback_metrics
    assert numbers["response/dropped_fraction"] == numbers["response/early_fraction"] == 1
    assert numbers["tokens/rejected_fraction"] == 1 and module.reward_moments.count == 0
    assert same(before, weights(module)) and moments(module) == {}
    assert "advantage/mean" not in numbers and "reward/mean" in numbers and "entropy/mean" in numbers
    assert all(math.isfinite(value) for value in numbers.values())


def lagging(**settings: Any) -> Any:
    """Rollouts run one iteration ahead, under the soft penalty."""
    module = tiny_module(iterations=4, max_new_tokens=8, termination={"truncated": "soft_overlong"}, **settings)
    module.engine = HFEngine(samples=2, max_new_tokens=8, lag=1)
    return module


def curriculum() -> LengthCurriculum:
    """2 tokens, then 4, 6 and 8."""
    return LengthCurriculum(start=2, iterations=3, max_truncated=None)


def test_the_limit_of_the_soft_penalty_is_the_one_a_row_was_drawn_under() -> None:
    """With rollouts ahead the knob has moved on when a row is scored."""
    recorder = Recorder()
    fit(lagging(), [curriculum(), recorder])
    limits = [rollout.max_new_tokens.unique().tolist() for rollout in recorder.of("on_rollout_end")]
    assert limits == [[2], [2], [4], [6]]
    for experience, _ in recorder.of("on_experience_ready"):
        cut = experience.finish == Finish.TRUNCATED
        assert cut.any() and torch.equal(experience.rewards[cut], experience.scores[cut] - 1)


def test_a_resumed_run_knows_the_limit_of_the_rollout_drawn_ahead(tmp_path: Path) -> None:
    resume_equals_whole(tmp_path, lambda: [curriculum()], lagging)


def share(rank: int) -> list[Any]:
    """Rank 0 has the natural and the truncated row, rank 1 the early one alone."""
    experience = three().select(torch.tensor([[0, 2], [1]][rank]))
    experience.loss_mask = experience.response_mask
    blocks = {"reward_processing": {"normalise": "batch"}, "advantage": {"whiten": True}}
    numbers = advantages_of(experience, {"early": "drop"}, beta=0.5, **blocks)
    return [experience.require("advantages").tolist(), numbers]


def test_a_rank_whose_rows_are_all_dropped_takes_part(tmp_path: Path) -> None:
    whole = three()
    blocks = {"reward_processing": {"normalise": "batch"}, "advantage": {"whiten": True}}
    numbers = advantages_of(whole, {"early": "drop"}, beta=0.5, **blocks)
    (first, told), (second, also_told) = run_ranks(share, folder=tmp_path)
    equal(whole.require("advantages")[[0, 2]], first)
    assert second == [[0.0] * 4] and told == also_told == pytest.approx(numbers)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("min_tokens", -1, "a whole number >= 0"),
        ("early", "bootstrap", "one of keep, penalty, drop"),
        ("truncated", "drop", "one of keep, penalty, drop_reward, bootstrap, soft_overlong"),
        ("truncated_penalty", 0, "a finite number < 0"),
        ("overlong_factor", 0, "a finite number > 0"),
        ("overlong_cache", 0.0, "a finite number > 0 and < 1, .*, or a whole number >= 1"),
        ("overlong_cache", 1.0, "a finite number > 0 and < 1, .*, or a whole number >= 1"),
    ],
)
def test_bad_settings_are_refused(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"module\.termination\.{key} = .* is not allowed: {allowed}"):
        PPOSettings.from_blocks(termination={key: value})
