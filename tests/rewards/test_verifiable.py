"""Rewards that compare a response with an answer."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.experience import Finish
from lightning_rlhf.rewards import (
    CharacterMatch,
    ExactMatch,
    LengthPenalty,
    NumericMatch,
    RegexMatch,
    RewardBatch,
    RewardError,
)
from lightning_rlhf.rewards.verifiable import last_number


def score(reward, response: str, answer="46", **row) -> float:
    data = {"answer": answer, "_source": "train.jsonl:5"} | row
    [value] = reward(RewardBatch(["12+34="], [response], [[1] * len(response)], [data], [Finish.NATURAL]))
    return value


# --- answers ---------------------------------------------------------------------------------------------------------


def test_answer_column_numbers_and_alternatives():
    assert score(ExactMatch("gold"), "46", None, gold="46") == 1
    assert score(ExactMatch(), "46", 46) == 1
    assert score(ExactMatch(), "0.5", 0.5) == 1
    assert score(ExactMatch(), "Paris", ["London", "Paris"]) == 1
    assert score(ExactMatch(), "Rome", ["London", "Paris"]) == 0
    assert score(ExactMatch(), "0", 0) == 1
    assert score(ExactMatch(), "", "") == 1


@pytest.mark.parametrize("answer", [None, []])
@pytest.mark.parametrize(
    "reward",
    [ExactMatch(), CharacterMatch(), NumericMatch(), RegexMatch("(.*)", group=1)],
    ids=lambda r: type(r).__name__,
)
def test_row_without_answer_is_named(reward, answer):
    message = r"the row has no answer in 'answer' \(columns: answer, topic\)"
    with pytest.raises(RewardError, match=rf"{type(reward).__name__}, train\.jsonl:5: {message}"):
        score(reward, "46", answer, topic="sums")
    with pytest.raises(RewardError, match=message):
        reward.check_row({"answer": answer, "topic": "sums"})


# --- exact and by character ------------------------------------------------------------------------------------------


def test_exact_match_options():
    assert score(ExactMatch(), " 46\n") == 1
    assert score(ExactMatch(strip=False), " 46\n") == 0
    assert score(ExactMatch(), "Yes", "yes") == 0
    assert score(ExactMatch(casefold=True), "STRASSE", "straße") == 1
    assert score(ExactMatch(), "4 6") == 0
    assert score(ExactMatch(), "") == 0


@pytest.mark.parametrize(
    ("response", "expected"),
    [("46", 1), ("47", 1 / 2), ("56", 1 / 2), ("4", 1 / 2), ("467", 2 / 3), ("64", 0), ("", 0), (" 46 ", 1)],
)
def test_character_match(response, expected):
    assert score(CharacterMatch(), response) == pytest.approx(expected)


@given(response=st.text("012 ", max_size=6), answer=st.text("012", max_size=6))
def test_character_match_is_a_share_and_full_only_for_the_answer(response, answer):
    value = CharacterMatch().score(response, answer)
    assert 0 <= value <= 1
    assert (value == 1) == (response.strip() == answer and answer != "")


# --- regular expressions ---------------------------------------------------------------------------------------------


def test_regex_match_of_the_format_needs_no_answer():
    reward = RegexMatch(r"<think>.*</think>\s*\d+", mode="fullmatch")
    assert score(reward, "<think>add</think> 46", None) == 1
    assert score(reward, "well <think>add</think> 46", None) == 0
    assert score(RegexMatch(r"\d\d"), "it is 46.", None) == 1
    assert score(RegexMatch(r"\d\d"), "it is 4.", None) == 0


def test_regex_group_is_compared_with_the_answer_and_the_last_match_counts():
    reward = RegexMatch(r"####\s*(?P<result>\S*)", group="result")
    assert score(reward, "#### 45 no, #### 46") == 1
    assert score(reward, "#### 46 no, #### 45") == 0
    assert score(reward, "46") == 0
    assert score(RegexMatch(r"x=(.*)", group=1, mode="fullmatch"), "x= 46 ") == 1
    assert score(RegexMatch(r"x=(.*)", group=1, mode="fullmatch"), "so x=46") == 0
    assert score(RegexMatch(r"a(b)?", group=1), "a", "") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "("}, r"pattern = '\(' is not a regular expression"),
        ({"pattern": "(a)", "group": 2}, r"group = 2 is not allowed: the pattern has \['0', '1'\]"),
        ({"pattern": "(a)", "group": "x"}, "group = 'x' is not allowed"),
        ({"pattern": "a", "mode": "match"}, "mode = 'match' is not allowed: search or fullmatch"),
    ],
)
def test_bad_regex_settings_are_refused(options, message):
    with pytest.raises(RewardError, match=message):
        RegexMatch(**options)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("46", 46),
        ("The sum of 12 and 34 is 46.", 46),
        ("1,234", 1234),
        ("$1,234,567.89.", Fraction("1234567.89")),
        ("-3.5", Fraction("-3.5")),
        ("x = -3", -3),
        ("(-3)", -3),
        ("+7", 7),
        ("\u22123", -3),
        ("5-3", 3),
        ("x-3", 3),
        ("(5)-3", 3),
        ("5 - 3", 3),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("1.5e-3", Fraction("0.0015")),
        ("2E6", 2_000_000),
        ("3e", 3),
        ("3/4", Fraction(3, 4)),
        ("It is -3/4.", Fraction(-3, 4)),
        ("3 / 4", 4),
        ("7 of 3/0", 7),
        ("1/2.5", Fraction(5, 2)),
        ("12%", 12),
        ("x2", 2),
        ("1,23", 23),
        ("1234,567", 567),
        ("12,3456", 3456),
        ("1,234,56", 56),
        ("3.14.15", 15),
        ("007", 7),
        ("5 " + "9" * 1001, 5),
        ("9" * 1000, 10**1000 - 1),
        ("none", None),
        ("", None),
        ("-", None),
        ("nan inf", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@given(number=st.integers() | st.decimals(allow_nan=False, allow_infinity=False, places=3).map(Fraction))
def test_numbers_are_read_exactly(number):
    text = str(number) if isinstance(number, int) else f"{float(number):,.3f}"
    assert last_number(f"so, it is {text}.") == (number if isinstance(number, int) else Fraction(text.replace(",", "")))


def test_numeric_match_is_exact_without_tolerance():
    assert score(NumericMatch(), "The answer is 46.") == 1
    assert score(NumericMatch(), "46 or 47") == 0
    assert score(NumericMatch(), "no number") == 0
    assert score(NumericMatch(), "1/2", 0.5) == 1
    assert score(NumericMatch(), "0.3", 0.1 + 0.2) == 0
    assert score(NumericMatch(), "12345678901234567890", "12345678901234567891") == 0
    assert score(NumericMatch(), "1,000", "1000.0") == 1


def test_numeric_match_tolerances():
    assert score(NumericMatch(absolute_tolerance=0.01), "3.15", "3.14") == 1
    assert score(NumericMatch(absolute_tolerance=0.01), "3.16", "3.14") == 0
    assert score(NumericMatch(relative_tolerance=0.01), "-1010", "-1000") == 1
    assert score(NumericMatch(relative_tolerance=0.01), "-1011", "-1000") == 0
    assert score(NumericMatch(absolute_tolerance=1, relative_tolerance=0.1), "105", "100") == 1


def test_numeric_match_behind_a_marker():
    reward = NumericMatch(marker="####")
    assert score(reward, "12+34 is 46\n#### 46 apples, 3 bags") == 1
    assert score(reward, "#### 45, sorry #### 46") == 1
    assert score(reward, "46") == 0
    assert score(reward, "#### many") == 0
    assert score(reward, "#### -46", "first 12, then 34 #### -46 of 50") == 1


def test_answer_without_number_is_a_fault_of_the_data():
    with pytest.raises(RewardError, match=r"NumericMatch, train\.jsonl:5: there is no number in the answer 'many'"):
        score(NumericMatch(), "46", "many")
    with pytest.raises(RewardError, match="there is no number in the answer"):
        NumericMatch().check_row({"answer": "many"})


@pytest.mark.parametrize("name", ["absolute_tolerance", "relative_tolerance"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_bad_tolerance_is_refused(name, value):
    with pytest.raises(RewardError, match=f"{name} = .* is not allowed: a finite number >= 0"):
        NumericMatch(**{name: value})


# --- length ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (10, 0), (11, -0.1), (15, -0.5), (20, -1), (30, -1)])
def test_length_penalty(tokens, expected):
    assert score(LengthPenalty(10, 20), "x" * tokens) == pytest.approx(expected)


def test_length_limits_are_checked():
    for limits in ((20, 20), (-1, 5)):
        with pytest.raises(RewardError, match=r"soft_limit = .* is not allowed: 0 <= soft_limit < hard_limit"):
            LengthPenalty(*limits)
