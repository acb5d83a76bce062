"""Groups of prompts in an experience: exact metrics, normalisation and weights, and settings that are refused."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf import schema
from lightning_rlhf.errors import ConfigError, SettingError
from lightning_rlhf.experience import Experience
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.metrics.groups import PromptGroups
from lightning_rlhf.metrics.moments import RunningMoments
from lightning_rlhf.scoring import compute_advantages
from lightning_rlhf.settings import PPOSettings, PromptGroupSettings

F64 = torch.float64
LENGTHS = [2, 3, 1, 3, 2, 1, 3]
OF = ["easy", "hard", "easy", "hard", "easy", "hard", "few"]
SCORES = [0.25, 40.0, 0.5, -25.0, 1.0, 3.0, 5.0]
NAMES = ("absent", "easy", "few", "hard")
REJECTED = 2
"""A row without a valid token: in the metrics of rewards and lengths, in no statistic of normalisation."""


def experience(**fields: Any) -> Experience:
    """Seven scored sequences of three groups; samples 0 and 2, 1 and 3 answer one prompt each."""
    count = len(LENGTHS)
    mask = torch.arange(3) < torch.tensor(LENGTHS).unsqueeze(1)
    made = Experience(
        prompt_ids=torch.ones(count, 1, dtype=torch.int64),
        prompt_mask=torch.ones(count, 1, dtype=torch.bool),
        response_ids=torch.ones(count, 3, dtype=torch.int64),
        response_mask=mask,
        rollout_logprobs=torch.zeros(count, 3, dtype=F64),
        finish=torch.zeros(count, dtype=torch.int64),
        policy_version=torch.zeros(count, dtype=torch.int64),
        seed=torch.zeros(count, dtype=torch.int64),
        group=torch.tensor([0, 1, 0, 1, 2, 3, 4]),
        prompt_key=["key"] * count,
        prompt_group=list(OF),
        scores=torch.tensor(SCORES, dtype=F64),
        old_logprobs=torch.zeros(count, 3, dtype=F64),
        ref_logprobs=-torch.arange(count * 3, dtype=F64).view(count, 3) / 8,
        values=torch.zeros(count, 3, dtype=F64),
        final_values=torch.zeros(count, dtype=F64),
        loss_mask=mask.clone(),
    )
    made.require("loss_mask")[REJECTED] = False
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def groups_of(settings: PPOSettings) -> PromptGroups:
    groups = PromptGroups(settings)
    groups.take(NAMES, {name: name.upper() for name in NAMES})
    return groups


def computed(groups: dict[str, Any] | None = None, **blocks: Any) -> tuple[Experience, dict[str, float]]:
    """Advantages and metrics; no KL penalty, rewards as scored and advantages not whitened, unless set otherwise."""
    chosen: dict[str, Any] = {"kl": {"coefficient": 0.0}, "reward_processing": {"normalise": "none"}}
    chosen |= {"advantage": {"whiten": False}, "groups": groups} | blocks
    settings = PPOSettings.from_blocks(**chosen)
    made, metrics, own = experience(), MetricBatch(), groups_of(settings)
    compute_advantages(made, settings, 0.0, RunningMoments(), metrics, own)
    own.measure(made, metrics)
    return made, metrics.compute()


def rows_of(name: str, *, valid: bool = False) -> list[int]:
    return [i for i, of in enumerate(OF) if of == name and not (valid and i == REJECTED)]


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_the_metrics_are_exact() -> None:
    made, numbers = computed()
    found = {name.removeprefix("group/"): value for name, value in numbers.items() if name.startswith("group/")}
    advantages = made.require("advantages").tolist()
    expected: dict[str, float] = {"ABSENT/samples": 0}
    for name in ("easy", "hard", "few"):
        rows, valid = rows_of(name), rows_of(name, valid=True)
        tokens = [(i, t) for i in valid for t in range(LENGTHS[i])]
        scores = [SCORES[i] for i in rows]
        expected |= {
            f"{name.upper()}/reward_mean": statistics.fmean(scores),
            f"{name.upper()}/reward_std": statistics.stdev(scores) if len(scores) > 1 else 0.0,
            f"{name.upper()}/response_length_mean": statistics.fmean(LENGTHS[i] for i in rows),
            f"{name.upper()}/samples": len(rows),
            f"{name.upper()}/kl_ref": statistics.fmean((3 * i + t) / 8 for i, t in tokens),
            f"{name.upper()}/advantage_mean": statistics.fmean(advantages[i][t] for i, t in tokens),
            f"{name.upper()}/advantage_abs_mean": statistics.fmean(abs(advantages[i][t]) for i, t in tokens),
        }
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_groups_add_up_to_the_whole() -> None:
    _, numbers = computed()
    counts = {name: numbers[f"group/{name.upper()}/samples"] for name in NAMES}
    total = sum(numbers[f"group/{name.upper()}/reward_mean"] * count for name, count in counts.items() if count)
    assert sum(counts.values()) == len(OF) and total == pytest.approx(sum(SCORES))


def test_calls_for_several_parts_add_up() -> None:
    names, stds = ["a", "b"], ["sa", "sb"]
    values, members = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=F64), torch.tensor([0, 1, 1, 1])
    whole, parts = MetricBatch(), MetricBatch()
    whole.means(names, values, members, stds=stds)
    for part in (slice(None, 3), slice(3, None)):
        parts.means(names, values[part], members[part], stds=stds)
    expected = {"a": 1.0, "sa": 0.0, "b": 14 / 3, "sb": statistics.stdev([2, 4, 8])}
    assert whole.compute() == parts.compute() == pytest.approx(expected)


def test_without_groups_nothing_is_measured_or_changed() -> None:
    settings = PPOSettings.from_blocks(kl={"coefficient": 0.0})
    plain, grouped = experience(), experience()
    for made, groups in ((plain, None), (grouped, PromptGroups(settings))):
        metrics = MetricBatch()
        compute_advantages(made, settings, 0.0, RunningMoments(), metrics, groups)
        PromptGroups(settings).measure(made, metrics)
        assert not [name for name in metrics.compute() if name.startswith("group/")]
    assert torch.equal(plain.require("advantages"), grouped.require("advantages"))


@pytest.mark.parametrize("groups", [["easy"] * 6, [*OF[:-1], "strange"]])
def test_a_batch_with_other_groups_than_the_data_module_names_is_an_error(groups: list[str]) -> None:
    with pytest.raises(RuntimeError, match="the data module's groups are absent, easy, few, hard"):
        groups_of(PPOSettings()).members(experience(prompt_group=groups))


# --- rewards ---------------------------------------------------------------------------------------------------------


def z_scores(elements: dict[int, float]) -> dict[int, float]:
    mean, var = statistics.fmean(elements.values()), statistics.variance(elements.values())
    return {i: (x - mean) / math.sqrt(var + 1e-8) for i, x in elements.items()}


def expected_rewards(min_samples: int) -> list[float]:
    """Z-scores within each group; over all valid rows for groups with fewer than ``min_samples``."""
    everyone = {i: x for i, x in enumerate(SCORES) if i != REJECTED}
    result = dict.fromkeys(range(len(SCORES)), math.nan)
    for name in ("easy", "hard", "few"):
        own = {i: x for i, x in everyone.items() if OF[i] == name}
        result |= z_scores(own) if len(own) >= min_samples else {i: z_scores(everyone)[i] for i in own}
    return [result[i] for i in range(len(SCORES)) if i != REJECTED]


@pytest.mark.parametrize("processing", ["batch", "running"])
@pytest.mark.parametrize("min_samples", [2, 3, 4])
def test_rewards_are_normalised_within_groups(processing: str, min_samples: int) -> None:
    """A first batch has no history, so that running moments are those of the batch."""
    made, _ = computed(
        {"normalise": "rewards", "min_samples": min_samples}, reward_processing={"normalise": processing}
    )
    rewards = made.require("rewards")
    kept = [i for i in range(len(SCORES)) if i != REJECTED]
    assert rewards[kept].tolist() == pytest.approx(expected_rewards(min_samples), rel=1e-12)


def test_one_group_is_normalised_as_all_were() -> None:
    settings = PPOSettings.from_blocks(groups={"normalise": "rewards"}, kl={"coefficient": 0.0})
    groups = PromptGroups(settings)
    groups.take(("one",), {"one": "one"})
    found = []
    for own in (None, groups):
        made = experience(prompt_group=["one"] * 7)
        compute_advantages(made, settings, 0.0, RunningMoments(), MetricBatch(), own)
        found.append(made.require("rewards"))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0.0)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = (5, 1, 7)
    scores = [torch.randn(n, generator=generator, dtype=F64) * 10 + 3 for n in sizes]
    return [(x, torch.randint(0, 3, (len(x),), generator=generator)) for x in scores]


def test_running_numbers_of_all_batches_are_those_of_all_scores_at_once() -> None:
    settings = PPOSettings.from_blocks(
        groups={"normalise": "rewards", "min_samples": 2}, reward_processing={"normalise": "running"}
    )
    groups, whole = groups_of(settings), RunningMoments()
    for scores, members in batches():
        rows = torch.ones(len(scores), dtype=torch.bool)
        whole.update(scores, rows)
        last = groups.running(scores, rows, members, whole)
    x, of = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    for place, name in enumerate(NAMES[:3]):
        own = x[of == place]
        count, mean, squares = groups.state_dict()[name]
        assert count == len(own) and mean == pytest.approx(own.mean().item(), rel=1e-13)
        assert squares == pytest.approx(((own - own.mean()) ** 2).sum().item(), rel=1e-12)
        mine = members == place
        expected = (scores[mine] - own.mean()) / (own.var() + 1e-8).sqrt()
        torch.testing.assert_close(last[mine], expected, rtol=1e-12, atol=1e-13)
    again = groups_of(settings)
    again.load_state_dict(groups.state_dict())
    assert again.state_dict() == groups.state_dict() and groups.state_dict()["hard"] == [0.0, 0.0, 0.0]


def test_a_score_that_is_not_finite_does_not_spoil_later_batches() -> None:
    settings = PPOSettings.from_blocks(groups={"normalise": "rewards"}, reward_processing={"normalise": "running"})
    groups, whole = groups_of(settings), RunningMoments()
    scores, members = torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1, 1, 1])
    rows = torch.ones(3, dtype=torch.bool)
    whole.update(scores, rows)
    found = groups.running(scores, rows, members, whole)
    assert found.isnan().tolist() == [False, True, False] and groups.state_dict()["easy"] == [2.0, 2.0, 2.0]


# --- advantages and weights ------------------------------------------------------------------------------------------


def test_advantages_are_whitened_within_groups_over_their_valid_tokens() -> None:
    plain, _ = computed()
    made, _ = computed({"normalise": "advantages", "min_samples": 2}, advantage={"whiten": True})
    raw, found, valid = (plain.require("advantages"), made.require("advantages"), made.require("loss_mask"))
    for name in ("easy", "hard", "few"):
        rows = rows_of(name)
        source = raw[valid] if name == "few" else raw[rows][valid[rows]]
        expected = (raw[rows] - source.mean()) / (source.var() + 1e-8).sqrt()
        torch.testing.assert_close(found[rows][valid[rows]], expected[valid[rows]], rtol=1e-12, atol=1e-12)
    assert (found[~valid] == 0).all()


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "grpo", "rloo"])
@pytest.mark.parametrize("whiten", [True, False])
def test_a_weight_multiplies_the_advantages_of_its_group_and_nothing_else(estimator: str, whiten: bool) -> None:
    blocks: dict[str, Any] = {"advantage": {"estimator": estimator, "whiten": whiten}}
    (plain, _), (made, _) = computed(**blocks), computed({"weights": {"hard": 0.5, "few": 0.0}}, **blocks)
    factors = torch.tensor([{"hard": 0.5, "few": 0.0}.get(of, 1.0) for of in OF], dtype=F64).unsqueeze(-1)
    torch.testing.assert_close(made.require("advantages"), plain.require("advantages") * factors, rtol=0, atol=0)
    if estimator == "gae":
        assert torch.equal(made.require("returns"), plain.require("returns")), "the critic learns from all alike"


def test_group_relative_estimators_stay_centred_and_scale_with_the_group() -> None:
    """Samples of a prompt share its group: a shift cancels, a scale is that of the group's deviation."""
    for estimator in ("rloo", "grpo"):
        advantage = {"estimator": estimator, "normalise_std": False}
        plain, _ = computed(advantage=advantage)
        made, _ = computed({"normalise": "rewards", "min_samples": 3}, advantage=advantage, reward_processing={})
        raw, found = plain.require("advantages"), made.require("advantages")
        assert found[[1, 3], 0].sum() == pytest.approx(0.0, abs=1e-12)
        deviation = statistics.stdev(SCORES[i] for i in rows_of("hard"))
        torch.testing.assert_close(found[[1, 3]], raw[[1, 3]] / deviation, rtol=1e-9, atol=0.0)
    with_std = [
        computed(groups, advantage={"estimator": "grpo"}, reward_processing={})[0].require("advantages")[[1, 3]]
        for groups in (None, {"normalise": "rewards", "min_samples": 3})
    ]
    torch.testing.assert_close(*with_std, rtol=1e-4, atol=0.0)  # 1e-6 is added to the deviation


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"normalise": "reward"}, r"module\.groups\.normalise = 'reward' .*one of none, rewards, advantages .*did you"),
        ({"min_samples": 1}, r"module\.groups\.min_samples = 1 .*a whole number >= 2"),
        ({"weights": {"hard": -1}}, r"module\.groups\.weights\.hard = -1 .*a finite number >= 0"),
        ({"weights": {"above": None}}, r"module\.groups\.weights\.above = None .*a finite number >= 0"),
        ({"weights": {"hard": True}}, r"module\.groups\.weights\.hard = True .*a finite number >= 0"),
        ({"weights": [1]}, r"module\.groups\.weights = \[1\] .*a block"),
        ({"weight": {}}, r"module\.groups\.weight = .*did you mean 'weights'\?"),
    ],
)
def test_invalid_settings_are_refused(block: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        PPOSettings.from_blocks(groups=block)


def test_names_of_groups_that_yaml_reads_as_numbers_are_texts() -> None:
    given: dict[object, float] = {True: 0.5, 3: 2.0, 0.5: 1.0, "a": 0}
    assert PromptGroupSettings(weights=given).weights == {"true": 0.5, "3": 2.0, "0.5": 1.0, "a": 0}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            {"weights": {"hrad": 0.5}},
            r"module\.groups\.weights\.hrad = 0\.5 .*did you mean 'hard'\? the training .*few",
        ),
        ({"weights": dict.fromkeys(NAMES, 0)}, r"module\.groups\.weights = .*a weight above 0 for one group at least"),
    ],
)
def test_weights_are_compared_with_the_groups_of_the_data(block: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        groups_of(PPOSettings.from_blocks(groups=block))


@pytest.mark.parametrize("block", [{"weights": {"hard": 1.0}}, {"normalise": "rewards"}])
def test_settings_for_groups_without_groups_are_refused(block: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"nothing without groups: set data\.group_column"):
        PromptGroups(PPOSettings.from_blocks(groups=block)).take((), {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["module.groups.normalise=advantages"], "none without data.group_column"),
        (["module.groups.weights={hard: 0.5}"], "null without data.group_column"),
        (["data.group_column=answer", "module.groups.normalise=rewards"], "reward_processing.normalise batch or runn"),
        (
            ["data.group_column=answer", "module.groups.normalise=advantages", "module.advantage.whiten=false"],
            "module.advantage.whiten=true with gae or reinforce_plus_plus",
        ),
        (
            [
                *("data.group_column=answer", "module.groups.normalise=advantages", "model.policy.critic=none"),
                *("module.advantage.estimator=grpo", "rollout.samples=2"),
            ],
            "module.advantage.whiten=true with gae or reinforce_plus_plus",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(compose: Any, changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        schema.check(compose("logger=none", *changes))
    assert said in str(error.value) and "module.groups." in str(error.value)
