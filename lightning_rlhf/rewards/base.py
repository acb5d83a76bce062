"""The protocol of a reward: anything that takes a :class:`RewardBatch` and returns one number per response."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn

from lightning_rlhf.errors import InputError
from lightning_rlhf.experience import Finish, prompt_key
from lightning_rlhf.interruption import from_signal

SOURCE_KEY = "_source"
"""Key of a data row's place of origin."""

MESSAGES_KEY = "_messages"
"""Key under which the row of a chat prompt holds its messages."""


class RewardError(ValueError):
    """A reward that cannot be used. The message names the term, the row and the value."""

    origin = ""
    """Where in the term's own code its exception was raised, as lines of a traceback; empty if there was none."""


@dataclass
class RewardBatch:
    """What a reward sees of ``B`` responses.

    Attributes:
        prompts: the prompts as the policy read them (chat template applied).
        responses: the responses as the policy wrote them, special tokens (such as ``<think>``) and spaces included;
            only the end and padding tokens at the end are removed.
        response_ids: the policy's own token ids of each response, end token included.
        rows: the data row of each prompt, with all its columns, its place of origin under ``_source`` and, for a
            chat prompt, the messages under ``_messages``.
        finish: how each response ended.
        plain_responses: the responses without special tokens, cleaned up by the tokenizer's own rules: for readers
            that must not see special tokens, such as another model. Default: ``responses``.
        keys: of each prompt's content, see :func:`~lightning_rlhf.experience.prompt_key`. Default: keys of ``prompts``.
    """

    prompts: list[str]
    responses: list[str]
    response_ids: list[list[int]]
    rows: list[dict[str, Any]]
    finish: list[Finish]
    plain_responses: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plain_responses = self.plain_responses or list(self.responses)
        self.keys = self.keys or [prompt_key(text) for text in self.prompts]
        lengths = {name: len(value) for name, value in vars(self).items()}
        if len(set(lengths.values())) > 1:
            raise RewardError(f"the fields of a RewardBatch must have one length, not {lengths}")

    def __len__(self) -> int:
        return len(self.responses)

    def only(self, i: int) -> RewardBatch:
        """Row ``i`` as a batch of one."""
        return RewardBatch(**{name: value[i : i + 1] for name, value in vars(self).items()})


@runtime_checkable
class Reward(Protocol):
    """A function, or an object with ``__call__``.

    It may also have ``check_row(row)``, called on every data row before training, which raises :class:`RewardError`
    for a row it could not score, and ``to(device)``. One that learns or counts has ``state_dict()``, of plain values
    and tensors, and ``load_state_dict(state)``: rank 0's state is in the checkpoints, and is restored on every rank.
    """

    def __call__(self, batch: RewardBatch) -> Sequence[float] | Tensor:
        """One finite number per response, ``[B]``."""
        ...


def evaluate(name: str, reward: Reward, batch: RewardBatch) -> Tensor:
    """The checked numbers of a term of the reward, see :func:`checked_scores`."""
    return checked_scores(f"reward term {name!r}", reward, batch)


def checked_scores(what: str, reward: Reward, batch: RewardBatch, *, gaps: bool = False) -> Tensor:
    """The checked numbers of a reward: ``[B]`` float32 on the CPU.

    Args:
        what: names the reward in error messages.
        reward: scores the responses.
        batch: ``B`` responses.
        gaps: NaN is allowed, for a response that was not scored.

    Raises:
        RewardError: the reward raised an exception, or did not return one finite number per response.
    """
    result = _call(what, reward, batch)
    if isinstance(result, (str, bytes, Mapping, Set)):
        raise RewardError(
            f"{what}: a sequence of {len(batch)} numbers is wanted, not {type(result).__name__} {result!r:.80}"
        )
    if (shape := getattr(result, "shape", None)) is not None:  # a tensor or an array
        if len(shape) != 1:
            raise RewardError(f"{what}: a tensor of shape [{len(batch)}] is wanted, not of shape {list(shape)}")
        result = result.tolist()
    try:
        count = len(result)
    except TypeError:
        raise RewardError(f"{what}: a sequence of {len(batch)} numbers is wanted, not {result!r:.80}") from None
    if count != len(batch):
        raise RewardError(f"{what}: {count} numbers for {len(batch)} responses")
    for i, value in enumerate(result):
        if not (_is_finite(value) or (gaps and isinstance(value, float) and math.isnan(value))):
            raise RewardError(f"{what}: {value!r} is not a finite number, for {describe(batch, i)}")
    return torch.tensor([float(value) for value in result], dtype=torch.float32)


def _call(what: str, reward: Reward, batch: RewardBatch) -> Any:
    """Call the term; its exceptions become errors that name term and row."""
    try:
        result = reward(batch)
    except Exception as error:
        if is_oom_error(error):  # the run repeats the work in smaller pieces, or says which key to lower
            raise
        found = _first_failing(reward, batch)
        if found is None:
            where, shown, row = "for the batch as a whole, though for none of its rows alone", error, None
        else:
            where, shown, row = f"for {describe(batch, found[0])}", found[1], batch.rows[found[0]]
        failure = RewardError(f"{what}: {in_words(shown, row)}, {where}")
        failure.origin = "" if isinstance(shown, RewardError) else _origin(shown)
        raise failure from shown
    except BaseException as error:  # such as the SystemExit of a term that calls exit()
        if from_signal(error):
            raise
        failure = RewardError(f"{what}: {error!r}")
        failure.origin = _origin(error)
        raise failure from error
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise RewardError(
            f"{what} is an async function; rewards are called outside of any event loop: give a plain "
            "function that calls asyncio.run(...)"
        )
    return result


def has_state(reward: Any) -> bool:
    """Whether a reward can save and restore a state; not a PyTorch module, whose weights do not belong there."""
    methods = (getattr(reward, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(reward, nn.Module) and all(map(callable, methods))


def restore_state(what: str, reward: Any, state: Any) -> None:
    """Give a reward the state that a checkpoint holds for it.

    Raises:
        InputError: it does not accept it, such as that of another class.
    """
    try:
        reward.load_state_dict(state)
    except Exception as error:  # a user's class may raise anything
        raise InputError(
            f"{what}: {type(reward).__name__} cannot take up the state that the checkpoint holds for it "
            f"({type(error).__name__}: {error}); name the scorer that wrote it, or begin a new run"
        ) from error


def in_words(error: Exception, row: Mapping[str, Any] | None) -> str:
    """An exception of a term for a row; if a missing column may have caused it, with the columns that the row has."""
    if isinstance(error, RewardError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if row is not None and isinstance(error, KeyError) and error.args and error.args[0] not in row:
        text += f" (columns of the row: {columns(row)})"
    return text


def columns(row: Mapping[str, Any]) -> str:
    """The names of a data row's own columns, sorted."""
    return ", ".join(sorted(set(row) - {SOURCE_KEY, MESSAGES_KEY})) or "none"


def _first_failing(reward: Reward, batch: RewardBatch) -> tuple[int, Exception] | None:
    """The first row that raises an exception when scored alone, and the exception."""
    for i in range(len(batch)):
        try:
            reward(batch.only(i))
        except Exception as error:
            return i, error
    return None


def _origin(error: BaseException) -> str:
    """The calls from the term to where the exception was raised: the innermost :data:`CALLS_SHOWN`."""
    calls = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call of the term, in this file
    calls = [call for call in calls if "/hydra/_internal/" not in call.filename]  # Hydra wraps what it makes
    shown = traceback.StackSummary.from_list(calls[-CALLS_SHOWN:])
    return "".join(shown.format()).rstrip("\n")


CALLS_SHOWN = 5


def describe(batch: RewardBatch, i: int) -> str:
    """Row ``i`` in words: place of origin, prompt key, and the beginning of prompt and response."""
    return (
        f"row {i} of the batch ({origin(batch.rows[i])}, prompt key {batch.keys[i]}): "
        f"prompt {batch.prompts[i][:60]!r}, response {batch.responses[i][:60]!r}"
    )


def origin(row: Mapping[str, Any]) -> str:
    """Where a data row came from."""
    return str(row.get(SOURCE_KEY, "a row of unknown origin"))


def _is_finite(value: Any) -> bool:
    """Whether the value is a number that float32 can hold."""
    if isinstance(value, (str, bytes)):
        return False  # float() would read "1"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    return math.isfinite(number) and abs(number) <= torch.finfo(torch.float32).max
