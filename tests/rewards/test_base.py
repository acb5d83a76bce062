"""What a reward may return, and how a bad return is reported."""

from __future__ import annotations

import pytest
import torch

from lightning_rlhf.experience import Finish, prompt_key
from lightning_rlhf.rewards import Reward, RewardBatch, RewardError
from lightning_rlhf.rewards.base import evaluate


def batch(*responses: str, **row) -> RewardBatch:
    count = len(responses)
    return RewardBatch(
        prompts=[f"prompt {i}" for i in range(count)],
        responses=list(responses),
        response_ids=[list(range(len(response))) for response in responses],
        rows=[{"answer": "1", "_source": f"train.jsonl:{i + 1}"} | row for i in range(count)],
        finish=[Finish.NATURAL] * count,
    )


@pytest.mark.parametrize(
    "result",
    [
        [1.0, 0.5],
        (1, 0.5),
        [True, 0.5],
        torch.tensor([1.0, 0.5]),
        torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True),
        torch.tensor([1.0, 0.5]).numpy(),
        [torch.tensor(1.0), 0.5],
    ],
    ids=["list", "tuple", "bool", "tensor", "float64 with gradient", "numpy", "list of tensors"],
)
def test_numbers_become_a_float32_tensor(result):
    values = evaluate("mine", lambda batch: result, batch("a", "b"))
    assert values.dtype == torch.float32
    assert values.device.type == "cpu"
    assert values.tolist() == [1.0, 0.5]
    assert not values.requires_grad


NOT_FINITE = [float("nan"), float("inf"), -float("inf"), 1e300]


@pytest.mark.parametrize(
    "result",
    [
        *([0.0, value] for value in [*NOT_FINITE, None, "high", "1", 1j, [1.0]]),
        *(torch.tensor([0.0, value], dtype=torch.float64) for value in NOT_FINITE),
    ],
    ids=repr,
)
def test_not_a_finite_number_names_term_row_prompt_and_value(result):
    value = result[1] if isinstance(result, list) else result[1].item()
    with pytest.raises(RewardError) as error:
        evaluate("mine", lambda batch: result, batch("good", "bad"))
    assert str(error.value) == (
        f"reward term 'mine': {value!r} is not a finite number, for row 1 of the batch (train.jsonl:2, "
        f"prompt key {prompt_key('prompt 1')}): prompt 'prompt 1', response 'bad'"
    )


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("10", "reward term 'mine': a sequence of 2 numbers is wanted, not str '10'"),
        ({"a": 1.0, "b": 0.0}, "reward term 'mine': a sequence of 2 numbers is wanted, not dict {'a': 1.0, 'b': 0.0}"),
        ({0.0, 1.0}, "reward term 'mine': a sequence of 2 numbers is wanted, not set {0.0, 1.0}"),
        (torch.zeros(2, 1).numpy(), r"reward term 'mine': a tensor of shape \[2\] is wanted, not .*\[2, 1\]"),
        (torch.tensor(1.0), r"reward term 'mine': a tensor of shape \[2\] is wanted, not of shape \[\]"),
        (iter([1.0, 0.0]), "reward term 'mine': a sequence of 2 numbers is wanted, not <list_iterator"),
        ([1.0], "reward term 'mine': 1 numbers for 2 responses"),
        ([], "reward term 'mine': 0 numbers for 2 responses"),
        (torch.zeros(3), "reward term 'mine': 3 numbers for 2 responses"),
        (torch.zeros(2, 1), r"reward term 'mine': a tensor of shape \[2\] is wanted, not .*\[2, 1\]"),
        (1.0, "reward term 'mine': a sequence of 2 numbers is wanted, not 1.0"),
        (None, "reward term 'mine': a sequence of 2 numbers is wanted, not None"),
    ],
)
def test_wrong_number_of_numbers_names_the_term(result, message):
    with pytest.raises(RewardError, match=message):
        evaluate("mine", lambda batch: result, batch("a", "b"))


def test_an_exception_names_term_row_and_response():
    def mine(batch: RewardBatch) -> list[float]:
        return [1 / len(response) for response in batch.responses]

    with pytest.raises(RewardError) as error:
        evaluate("mine", mine, batch("good", "", "x"))
    assert str(error.value) == (
        "reward term 'mine': ZeroDivisionError: division by zero, for row 1 of the batch (train.jsonl:2, "
        f"prompt key {prompt_key('prompt 1')}): prompt 'prompt 1', response ''"
    )
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_missing_column_is_answered_with_the_columns_there_are():
    def mine(batch: RewardBatch) -> list[float]:
        return [float(row["bonus"]) for row in batch.rows]

    rows = [{"bonus": 1, "_source": "a:1"}, {"prompt": "x", "answer": "1", "_messages": [], "_source": "a:2"}]
    given = batch("a", "b")
    given.rows = rows
    with pytest.raises(
        RewardError, match=r"'mine': KeyError: 'bonus' \(columns of the row: answer, prompt\), for .*\(a:2,"
    ):
        evaluate("mine", mine, given)


def test_an_exception_that_no_row_raises_alone_names_the_batch():
    def mine(batch: RewardBatch) -> list[float]:
        if len(batch) > 1:
            raise KeyError("many")
        return [0.0]

    with pytest.raises(RewardError, match=r"'mine': KeyError: 'many', for the batch as a whole, though for none of"):
        evaluate("mine", mine, batch("a", "b"))


def test_an_out_of_memory_error_is_passed_on_unchanged():
    def mine(batch: RewardBatch) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        evaluate("mine", mine, batch("a", "b"))


def test_an_async_function_is_refused_with_the_way_out(recwarn):
    async def mine(batch: RewardBatch) -> list[float]:
        return [0.0] * len(batch)

    with pytest.raises(RewardError, match=r"reward term 'mine' is an async function; .* calls asyncio\.run"):
        evaluate("mine", mine, batch("a", "b"))  # type: ignore[arg-type]
    assert not recwarn.list  # no coroutine that was never awaited


def test_omitted_fields_of_a_batch_get_defaults_and_follow_their_row():
    rows = batch("a", "b")
    assert rows.plain_responses == ["a", "b"]
    assert rows.keys == [prompt_key("prompt 0"), prompt_key("prompt 1")]
    assert vars(rows.only(1)) == {name: value[1:] for name, value in vars(rows).items()}


def test_fields_of_a_batch_have_one_length():
    with pytest.raises(RewardError, match=r"must have one length, not .*'rows': 1"):
        RewardBatch(["p", "p"], ["a", "b"], [[1], [2]], [{}], [Finish.NATURAL] * 2)
    assert len(batch("a", "b", "c")) == 3


def test_functions_and_objects_are_rewards():
    assert isinstance(lambda batch: [0.0], Reward)
    assert not isinstance(3, Reward)
