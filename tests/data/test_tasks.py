"""Built-in tasks: right answers, splits without a problem in common, text and chat."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlhf.data.sources import DataError
from lightning_rlhf.data.tasks import ArithmeticTask


def test_plain_rows():
    rows = list(ArithmeticTask("+", 10, 99, size=50, seed=1))
    assert len(rows) == 50
    for number, row in enumerate(rows):
        a, b = row["prompt"].removesuffix("=").split("+")
        assert 10 <= int(a) <= 99
        assert 10 <= int(b) <= 99
        assert row["answer"] == str(int(a) + int(b))
        assert row["_source"] == f"ArithmeticTask[train]:{number}"


def test_chat_rows():
    row = next(iter(ArithmeticTask("-", 0, 9, style="chat", size=1)))
    [message] = row["prompt"]
    assert message["role"] == "user"
    a, op, b = message["content"].removeprefix("What is ").removesuffix("? Answer with the number only.").split()
    assert op == "-"
    assert row["answer"] == str(int(a) - int(b))


def test_operations_template_and_answer_format():
    rows = list(ArithmeticTask("*+-", 0, 9, template="<{b}|{op}|{a}>", answer_format="={answer:03d}", split="all"))
    assert len(rows) == 300
    by_prompt = {row["prompt"]: row["answer"] for row in rows}
    assert len(by_prompt) == 300
    assert by_prompt["<7|*|6>"] == "=042"
    assert by_prompt["<7|-|6>"] == "=-01"
    assert by_prompt["<7|+|6>"] == "=013"


@settings(deadline=None, max_examples=30)
@given(
    operations=st.sampled_from(["+", "-", "*", "+-*"]),
    top=st.integers(5, 30),
    held_out=st.sampled_from([0.1, 0.3, 0.5]),
    seeds=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_splits_share_no_problem_in_either_order(operations, top, held_out, seeds):
    options = {"operations": operations, "max_value": top, "held_out": held_out}
    train = ArithmeticTask(**options, split="train", seed=seeds[0]).problems()
    validation = ArithmeticTask(**options, split="validation", seed=seeds[1]).problems()
    every = ArithmeticTask(**options, split="all").problems()
    assert len(train) + len(validation) == len(every) == len(set(train) | set(validation))
    turned = {p._replace(a=p.b, b=p.a) for p in validation if p.op in "+*"}
    assert not turned & set(train)


def test_held_out_share_is_about_right():
    task = ArithmeticTask(max_value=99, held_out=0.2, split="validation")
    assert len(task.problems()) == pytest.approx(0.2 * 100**2, rel=0.1)


def test_size_and_seed_choose_problems_and_the_space_may_be_huge():
    options = {"max_value": 10**8, "split": "validation", "held_out": 0.01}
    first = ArithmeticTask(**options, size=200, seed=1).problems()
    assert len(set(first)) == 200
    assert first == ArithmeticTask(**options, size=200, seed=1).problems()
    assert not set(first) & set(ArithmeticTask(**options, size=200, seed=2).problems())
    assert all(problem.fraction < 0.01 for problem in first)


def test_vocabulary_covers_every_prompt_and_answer():
    for task in (
        ArithmeticTask("-", 0, 9, split="all"),
        ArithmeticTask("+*", 0, 12, template="{a:03d} {op} {b} is ", answer_format="~{answer}", split="all"),
    ):
        characters = {c for row in task for c in row["prompt"] + row["answer"]}
        assert characters == set(task.vocabulary)
        assert list(task.vocabulary) == sorted(set(task.vocabulary))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": "+/"}, r"operations = '\+/' is not allowed: any of \+ - \*"),
        ({"operations": ""}, "operations = '' is not allowed"),
        ({"min_value": 5, "max_value": 4}, "min_value = 5, max_value = 4 is not allowed: 0 <= min <= max"),
        ({"min_value": -1}, "min_value = -1"),
        ({"style": "poem"}, "style = 'poem' is not allowed: one of plain, chat"),
        ({"split": "test"}, "split = 'test' is not allowed: one of train, validation, all"),
        ({"held_out": 1.0}, "held_out = 1.0 is not allowed: a number between 0 and 1"),
        ({"size": 0}, "size = 0 is not allowed"),
        ({"template": "{a}{op}="}, r"template = '\{a\}\{op\}=' is not allowed: it must use \{a\}, \{op\} and \{b\}"),
        ({"template": "{a}{op}{c}"}, r"template = .* is not allowed: KeyError\('c'\)"),
        ({"answer_format": "x"}, r"answer_format = 'x' is not allowed: it must use \{answer\}"),
        ({"answer_format": "{answer:s}"}, r"answer_format = .* is not allowed: ValueError"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        ArithmeticTask(**options)


def test_more_problems_than_there_are_and_endless_ones_are_refused():
    with pytest.raises(DataError, match=r"size = 101 is not allowed: split all has 100 problems"):
        list(ArithmeticTask(max_value=9, size=101, split="all"))
    with pytest.raises(DataError, match=r"size = null is not allowed: there are 1002001 problems; give a size"):
        list(ArithmeticTask(max_value=1000))
    with pytest.raises(DataError, match=r"max_value = 10000000000 is not allowed"):
        list(ArithmeticTask(max_value=10**10, size=1))
