"""The classifier of new prompts: what counts as high, the features, the held-out AUC, the ranking."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_rlhf.data.lists import read_list
from lightning_rlhf.data.prompts import MESSAGES_KEY, Prompt
from lightning_rlhf.data.sources import SOURCE_KEY
from lightning_rlhf.errors import InputError
from lightning_rlhf.experience import prompt_key
from lightning_rlhf.prompts.screening import (
    FILES,
    FOLDS,
    HeldOut,
    classifier,
    cross_validated_auc,
    features,
    held_out_auc,
    high_kl,
    ranked,
    require_sklearn,
    symbol_share,
    write_ranking,
)
from lightning_rlhf.prompts.vectors import Measured
from lightning_rlhf.reporting.prompt_review import refuse_used_files
from lightning_rlhf.reporting.prompt_table import RecordedPrompt


def recorded(*excess: float | None) -> list[RecordedPrompt]:
    return [RecordedPrompt(prompt_key(str(n)), str(n), 1, 1, 0.0, kl, kl) for n, kl in enumerate(excess)]


# --- what is high ------------------------------------------------------------------------------------------------


def test_the_top_tenth_is_high() -> None:
    order = np.random.default_rng(0).permutation(100)
    high, limit = high_kl(recorded(*map(float, order)))
    assert limit == pytest.approx(89.1) and high.tolist() == (order > 89).tolist()


@pytest.mark.parametrize(
    ("excess", "said"),
    [
        ([float(n) for n in range(90)], "9 of 90 recorded prompts lie above the quantile 0.9"),
        ([1.0] * 300, "0 of 300 recorded prompts lie above"),
        ([0.0] * 291 + [1.0] * 9, "9 of 300 recorded prompts lie above"),
        ([None] * 4, "4 of 4 recorded prompts have none: the run needs model.policy.reference=copy"),
    ],
)
def test_too_few_of_one_kind_are_told_and_how_many_are_needed(excess: list[float | None], said: str) -> None:
    with pytest.raises(InputError) as refused:
        high_kl(recorded(*excess))
    assert said in str(refused.value)
    assert None in excess or "at least 10 above and 10 below, so about 100 different prompts" in str(refused.value)


# --- features ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0.0), ("abc 12", 0.0), ("1+1=", 0.5), ("\u00e4\u4e2d\u0663", 0.0), ("<s>\n", 0.5), ("?!", 1.0)],
)
def test_the_share_of_symbols(text: str, share: float) -> None:
    assert symbol_share(text) == share


def test_features_are_the_vectors_and_three_plain_numbers() -> None:
    measured = Measured(torch.zeros(2, 9), torch.tensor([4, 7]), torch.tensor([-1.5, -0.25]))
    found = features(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), measured, ["1+1=", "seven"])
    assert found.tolist() == [[1, 2, 4, 0.5, -1.5], [3, 4, 7, 0, -0.25]] and found.dtype == np.float64


# --- AUC ---------------------------------------------------------------------------------------------------------


def test_the_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    """Of one feature the classifier is monotone, so its AUC is that of the feature: counted here pair by pair."""
    from sklearn.model_selection import StratifiedKFold

    draw = np.random.default_rng(2)
    high = np.arange(60) < 20
    rows = (draw.normal(size=60) + 1.2 * high)[:, None]
    found = held_out_auc(rows, high, seed=5)
    folds = []
    for _, left_out in StratifiedKFold(FOLDS, shuffle=True, random_state=5).split(rows, high):
        above, below = rows[left_out][high[left_out], 0], rows[left_out][~high[left_out], 0]
        folds.append(np.mean([(a > b) + (a == b) / 2 for a in above for b in below]))
    assert 0.6 < np.mean(folds) < 1
    assert found.auc == pytest.approx(np.mean(folds)) and not found.warning
    assert held_out_auc(rows, high, seed=5) == found, "seeded"


def test_features_that_tell_everything_have_an_auc_of_one_and_constant_ones_of_a_half() -> None:
    high = np.arange(100) < 10
    assert held_out_auc(high[:, None].astype(float), high).auc == 1.0
    nothing = held_out_auc(np.ones((100, 3)), high)
    assert (nothing.auc, nothing.chance) == (0.5, 0.6) and "no better than chance" in nothing.warning


def test_an_auc_below_0_6_is_called_chance() -> None:
    assert HeldOut(0.599, 0.6).warning and not HeldOut(0.6, 0.6).warning


def test_shuffled_labels_give_a_half_and_rarely_look_better_than_chance() -> None:
    draw = np.random.default_rng(7)
    rows = draw.normal(size=(100, 12))
    high = np.arange(100) < 10
    rows[high, 0] += 3.0
    found = held_out_auc(rows, high)
    assert found.auc > 0.9 > found.chance > 0.6 and not found.warning
    shuffled = [held_out_auc(rows, draw.permutation(high), seed=number) for number in range(10)]
    # One AUC deviates by 0.13; their mean by a third of it.
    assert np.mean([each.auc for each in shuffled]) == pytest.approx(0.5, abs=0.09)
    assert sum(not each.warning for each in shuffled) <= 2, "one of twenty is expected"


def test_what_few_prompts_have_to_exceed_is_the_best_of_nineteen_shuffles() -> None:
    draw = np.random.default_rng(3)
    rows, high = draw.normal(size=(100, 4)), np.arange(100) < 10
    order = np.random.default_rng(0)
    shuffled = [cross_validated_auc(rows, order.permutation(high)) for _ in range(19)]
    assert held_out_auc(rows, high).chance == max(shuffled) > 0.6
    many, labels = np.repeat(rows, 10, axis=0), np.repeat(high, 10)
    assert held_out_auc(many, labels) == HeldOut(cross_validated_auc(many, labels), 0.6), "100 of each kind"


# --- the ranking -------------------------------------------------------------------------------------------------


def new(text: str, number: int) -> Prompt:
    return Prompt([1], text, prompt_key(text), {"prompt": text, SOURCE_KEY: f"new.jsonl:{number}"})


NEW = [new("a\nb", 1), new("c", 2), new("0", 3), new("c", 4)]
GOOD, CHANCE = HeldOut(0.91, 0.66), HeldOut(0.55, 0.66)


def test_the_most_probable_come_first_and_prompts_of_the_run_are_told() -> None:
    rows = ranked(NEW, [0.25, 0.5, 0.75, 0.5], recorded(1.25))
    assert [row.prompt.row[SOURCE_KEY] for row in rows] == [f"new.jsonl:{n}" for n in (3, 2, 4, 1)]
    assert [row.recorded for row in rows] == [1.25, None, None, None]


def test_ranking_and_list_are_written_and_the_next_run_reads_the_list(tmp_path: Path) -> None:
    rows = ranked(NEW, [0.25, 0.5, 0.75, 0.5], recorded(1.25))
    said = write_ranking(tmp_path / "out", "a\nrun", rows, GOOD, 0.5)
    assert "2 keys with a probability of 0.5 or more" in said[1]
    assert read_list(tmp_path / "out" / FILES["list"], "data.blacklist") == {prompt_key("0"): 1.0, prompt_key("c"): 1.0}
    text = (tmp_path / "out" / FILES["list"]).read_text(encoding="utf-8")
    assert text.startswith("# new prompts that may have a high KL, by a run (held-out AUC 0.91): ")
    assert text.splitlines()[1] == f"{prompt_key('0')}  # 0.75: 0", "the most probable first"
    lines = (tmp_path / "out" / FILES["ranking"]).read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {
        **{"key": prompt_key("0"), "probability": 0.75, "row": "new.jsonl:3", "prompt": "0"},
        "recorded_kl_excess": 1.25,
    }
    assert json.loads(lines[3])["prompt"] == "a b" and len(lines) == 4


def test_a_chat_prompt_is_shown_by_its_last_message(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    chat = Prompt([1], "<|system|>be brief<|user|>why?", "0" * 16, {MESSAGES_KEY: messages, SOURCE_KEY: "new.jsonl:1"})
    write_ranking(tmp_path, "run", ranked([chat], [0.9], []), GOOD, 0.5)
    assert json.loads((tmp_path / FILES["ranking"]).read_text(encoding="utf-8"))["prompt"] == "why?"
    assert (tmp_path / FILES["list"]).read_text(encoding="utf-8").endswith("# 0.90: why?\n")


def test_an_auc_of_chance_lists_nothing_and_says_so_in_every_row(tmp_path: Path) -> None:
    said = write_ranking(tmp_path, "run", ranked(NEW, [0.9] * 4, []), CHANCE, 0.5)
    assert said[1].startswith("0 keys")
    assert read_list(tmp_path / FILES["list"], "data.blacklist") == {}
    assert "# WARNING: the held-out AUC 0.55 is no better than chance" in (tmp_path / FILES["list"]).read_text()
    rows = [json.loads(line) for line in (tmp_path / FILES["ranking"]).read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 4 and all("the ranking means nothing" in row["warning"] for row in rows)


def test_an_edited_list_is_not_written_over(tmp_path: Path) -> None:
    refuse_used_files(tmp_path, FILES.values())
    (tmp_path / FILES["list"]).touch()
    with pytest.raises(InputError, match=r"screened\.txt exists and may have been edited; take a new folder"):
        refuse_used_files(tmp_path, FILES.values())
    with pytest.raises(InputError, match="take a new folder"):
        refuse_used_files(tmp_path / FILES["list"], FILES.values())


def test_a_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_sklearn()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match=r'pip install "lightning-rlhf\[prompts\]"'):
        require_sklearn()


def test_the_classifier_gives_probabilities() -> None:
    rows = np.arange(40.0)[:, None]
    found = classifier().fit(rows, rows[:, 0] >= 20).predict_proba(np.array([[0.0], [19.5], [39.0]]))[:, 1]
    assert found[0] < 0.05 and found[1] == pytest.approx(0.5, abs=1e-3) and found[2] > 0.95
