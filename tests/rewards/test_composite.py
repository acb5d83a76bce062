"""The weighted sum of terms, its checks, and rewards given in a configuration."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_rlhf.experience import Finish
from lightning_rlhf.rewards import CompositeReward, ExactMatch, NumericMatch, RewardBatch, RewardError


def batch(*responses: str, rows=None) -> RewardBatch:
    count = len(responses)
    rows = rows or [{"answer": "46", "_source": f"train.jsonl:{i + 1}"} for i in range(count)]
    return RewardBatch(["12+34="] * count, list(responses), [[1]] * count, rows, [Finish.NATURAL] * count)


def length(batch: RewardBatch) -> list[int]:
    return [len(response) for response in batch.responses]


def test_total_is_the_weighted_sum_and_components_are_unweighted():
    reward = CompositeReward(
        {
            "exact": {"reward": ExactMatch(), "weight": 2},
            "length": {"reward": length, "weight": -0.5},
            "watched": {"reward": length, "weight": 0.0},
        }
    )
    output = reward(batch("46", "463", ""))
    assert output.total.dtype == torch.float32
    assert output.total.tolist() == [2 - 1, -1.5, 0]
    assert list(output.components) == ["exact", "length", "watched"]
    assert output.components["exact"].tolist() == [1, 0, 0]
    assert output.components["length"].tolist() == output.components["watched"].tolist() == [2, 3, 0]


def test_weight_is_one_by_default():
    assert CompositeReward({"length": {"reward": length}})(batch("abc")).total.tolist() == [3]


def test_fault_of_a_term_names_it():
    reward = CompositeReward({"good": {"reward": length}, "bad": {"reward": lambda batch: [float("nan")]}})
    with pytest.raises(RewardError, match=r"reward term 'bad': nan is not a finite number, .*train\.jsonl:1"):
        reward(batch("x"))


@pytest.mark.parametrize(("weight", "value", "total"), [(100, 1e38, "inf"), (-100, 1e38, "-inf")], ids=str)
def test_a_weighted_sum_that_leaves_float32_is_refused_and_names_the_terms(weight, value, total):
    terms = {"big": {"reward": lambda batch: [0.0, value], "weight": weight}, "length": {"reward": length}}
    with pytest.raises(RewardError, match=rf"sum of the reward terms is {total}, .*train\.jsonl:") as error:
        CompositeReward(terms)(batch("x", "xyz"))
    assert (
        f"{weight:g} * " in str(error.value) and "(big) + 1 * " in str(error.value) and "(length)" in str(error.value)
    )


def test_a_weighted_sum_at_the_edge_of_float32_is_kept():
    reward = CompositeReward({"big": {"reward": lambda batch: [1e38], "weight": 3}})
    assert reward(batch("x")).total.tolist() == [pytest.approx(3e38)]


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({}, r"reward\.terms is empty"),
        ({"a": None, "b": None}, r"reward\.terms holds only null: at least one term"),
        ({"a": {"reward": length, "weight": 1e39}}, r"reward\.terms\.a\.weight = 1e\+39 .*float32 ends at 3\.4e\+38"),
        ({"a b": {"reward": length}}, r"reward\.terms\.a b: a term's name becomes a metric's name"),
        ({"reward_mean": {"reward": length}}, r"reward\.terms\.reward_mean: .* none of"),
        ({"a": {"weight": 1.0}}, r"reward\.terms\.a must be a block"),
        ({"a": length}, r"reward\.terms\.a must be a block"),
        ({"a": {"reward": length, "wieght": 2}}, r"reward\.terms\.a\.wieght is not known: did you mean 'weight'\?"),
        ({"a": {"reward": length, "weight": "2"}}, r"reward\.terms\.a\.weight = '2' is not allowed: a finite number"),
        ({"a": {"reward": length, "weight": float("nan")}}, r"reward\.terms\.a\.weight = nan is not allowed"),
        ({"a": {"reward": 0.5}}, r"reward\.terms\.a\.reward = 0\.5 cannot be called .* `_partial_: true`"),
    ],
)
def test_invalid_terms_are_refused(terms, message):
    with pytest.raises(RewardError, match=message):
        CompositeReward(terms)


def test_a_term_that_is_null_is_left_out():
    assert list(CompositeReward({"a": None, "b": {"reward": length}}).terms) == ["b"]


def test_rows_are_checked_before_training():
    reward = CompositeReward({"numeric": {"reward": NumericMatch()}, "length": {"reward": length}})
    good = {"answer": "46", "_source": "train.jsonl:1"}
    reward.check_rows([good, {"answer": 46}])
    with pytest.raises(RewardError) as error:
        reward.check_rows([good, {"result": "46", "_source": "train.jsonl:9"}])
    assert str(error.value) == (
        "reward term 'numeric', train.jsonl:9: the row has no answer in 'answer' (columns: result)"
    )
    with pytest.raises(RewardError, match=r"train\.jsonl:3: there is no number in the answer 'many'"):
        reward.check_rows([{"answer": "many", "_source": "train.jsonl:3"}])


def test_all_rows_that_cannot_be_scored_are_named_with_the_reasons_of_all_terms():
    def check_row(row):
        row["bonus"]

    mine = lambda batch: [0.0] * len(batch)  # noqa: E731 (a function with an attribute)
    mine.check_row = check_row
    reward = CompositeReward({"numeric": {"reward": NumericMatch()}, "mine": {"reward": mine}})
    with pytest.raises(RewardError) as error:
        reward.check_rows([{"answer": i, "bonus": 1, "_source": f"a:{i}"} for i in (1, 2)] + [{"_source": "a:3"}] * 12)
    first, *lines = str(error.value).splitlines()
    assert first == "12 rows cannot be used:" and lines[-1] == "  and 2 more" and len(lines) == 11
    assert lines[0] == (
        "  reward term 'numeric', a:3: the row has no answer in 'answer' (columns: none); "
        "reward term 'mine', a:3: KeyError: 'bonus' (columns of the row: none)"
    )


def test_to_moves_the_terms_that_can_move():
    class Movable:
        device = None

        def __call__(self, batch):
            return [0.0] * len(batch)

        def to(self, device):
            self.device = device

    movable = Movable()
    reward = CompositeReward({"model": {"reward": movable}, "length": {"reward": length}})
    assert reward.to("meta") is reward
    assert movable.device == "meta"


def test_terms_from_a_configuration_with_a_users_function(monkeypatch):
    module = ModuleType("users_rewards")
    module.vowels = lambda batch, letters="aeiou": [sum(c in letters for c in text) for text in batch.responses]
    monkeypatch.setitem(sys.modules, "users_rewards", module)
    config = OmegaConf.create(
        {
            "_target_": "lightning_rlhf.rewards.CompositeReward",
            "terms": {
                "exact": {"weight": 10.0, "reward": {"_target_": "lightning_rlhf.rewards.ExactMatch"}},
                "vowels": {"reward": {"_target_": "users_rewards.vowels", "_partial_": True, "letters": "ae"}},
            },
        }
    )
    for convert in ("none", "all"):
        reward = instantiate(config, _convert_=convert)
        assert reward(batch("46", "area", "io")).total.tolist() == [10, 3, 0]


# --- terms with a state ----------------------------------------------------------------------------------------------


class Counts:
    """The number of responses it has scored before."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, batch: RewardBatch) -> list[int]:
        scores = list(range(self.seen, self.seen + len(batch)))
        self.seen += len(batch)
        return scores

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Model(torch.nn.Linear):
    """A reward model: it has both methods, and weights that are its own files' business."""

    def forward(self, batch: RewardBatch) -> list[float]:  # type: ignore[override]
        return [0.0] * len(batch)


def with_state() -> CompositeReward:
    return CompositeReward({"a": {"reward": Counts()}, "b": {"reward": length}, "c": {"reward": Model(2, 2)}})


def test_terms_with_a_state_go_on_and_models_are_left_out(caplog):
    reward, again = with_state(), with_state()
    assert reward(batch("x", "y")).components["a"].tolist() == [0, 1]
    assert reward.state_dict() == {"a": {"seen": 2}}
    again.load_state_dict(reward.state_dict())
    assert again(batch("x", "y")).components["a"].tolist() == [2, 3] and not caplog.records


def test_a_term_whose_state_is_not_in_the_checkpoint_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        with_state().load_state_dict({"gone": {"seen": 2}})
    assert [r.getMessage() for r in caplog.records] == [
        "the checkpoint holds no state of reward.terms.a: it starts afresh"
    ]
