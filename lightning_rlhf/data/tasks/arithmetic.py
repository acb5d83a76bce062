"""Arithmetic problems with their answers."""

from __future__ import annotations

import hashlib
import operator
import random
import sys
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

from lightning_rlhf.data.sources import SOURCE_KEY, DataError, Row

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
COMMUTATIVE = frozenset("+*")

MOST_PROBLEMS = 1_000_000
"""Most problems that are made where ``size`` is not given."""

Split = Literal["train", "validation", "all"]
Style = Literal["plain", "chat"]

TEMPLATES = {"plain": "{a}{op}{b}=", "chat": "What is {a} {op} {b}? Answer with the number only."}


class Problem(NamedTuple):
    """``a op b``."""

    a: int
    op: str
    b: int

    @property
    def answer(self) -> int:
        return OPERATIONS[self.op](self.a, self.b)

    @property
    def fraction(self) -> float:
        """The problem's hash as a number in [0, 1); a sum or product has the same hash in both orders."""
        a, b = sorted((self.a, self.b)) if self.op in COMMUTATIVE else (self.a, self.b)
        digest = hashlib.blake2b(f"{a}{self.op}{b}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64


class ArithmeticTask:
    """A source of rows ``{"prompt": "12+34=", "answer": "46", "rambling": "46="}``.

    ``rambling`` is the answer with something after it: a bad habit that a supervised warm-up teaches and PPO removes.

    A problem belongs to the training or to the validation split by a hash of the problem itself. The two splits have
    no problem in common, whatever the seeds and sizes they are drawn with, and ``34+12`` is on the same side as
    ``12+34``.

    Args:
        operations: any of ``+``, ``-`` and ``*``, each with the same probability.
        min_value: smallest operand, >= 0.
        max_value: largest operand.
        style: ``plain`` prompts are text (``12+34=``), ``chat`` prompts are one user message.
        template: text of the prompt with the fields ``{a}``, ``{op}`` and ``{b}``; ``None`` is the style's own.
        answer_format: text of the answer with the field ``{answer}``, an integer; ``{answer:04d}`` pads with zeros.
        split: ``train``, ``validation`` or ``all``.
        held_out: share of all problems that belongs to the validation split.
        size: number of different problems; ``None`` takes all of the split.
        seed: of the choice and order of problems.

    Raises:
        DataError: a setting is out of range, or the split has fewer than ``size`` problems.
    """

    def __init__(
        self,
        operations: str = "+",
        min_value: int = 0,
        max_value: int = 49,
        *,
        style: Style = "plain",
        template: str | None = None,
        answer_format: str = "{answer}",
        split: Split = "train",
        held_out: float = 0.1,
        size: int | None = None,
        seed: int = 0,
    ) -> None:
        if not operations or set(operations) - set(OPERATIONS):
            raise DataError(f"operations = {operations!r} is not allowed: any of {' '.join(OPERATIONS)}")
        if not 0 <= min_value <= max_value:
            raise DataError(f"min_value = {min_value}, max_value = {max_value} is not allowed: 0 <= min <= max")
        if style not in get_args(Style):
            raise DataError(f"style = {style!r} is not allowed: one of {', '.join(get_args(Style))}")
        if split not in get_args(Split):
            raise DataError(f"split = {split!r} is not allowed: one of {', '.join(get_args(Split))}")
        if not 0 < held_out < 1:
            raise DataError(f"held_out = {held_out} is not allowed: a number between 0 and 1")
        if size is not None and size < 1:
            raise DataError(f"size = {size} is not allowed: a whole number >= 1, or null for all problems")
        self.operations = "".join(sorted(set(operations)))
        self.min_value, self.max_value = min_value, max_value
        self.style, self.template, self.answer_format = style, template or TEMPLATES[style], answer_format
        self.split, self.held_out, self.size, self.seed = split, held_out, size, seed
        self._check_formats()

    def __iter__(self) -> Iterator[Row]:
        for number, problem in enumerate(self.problems()):
            text = self._prompt(problem)
            yield {
                "prompt": [{"role": "user", "content": text}] if self.style == "chat" else text,
                "answer": (answer := self.answer_format.format(answer=problem.answer)),
                "rambling": f"{answer}=",
                SOURCE_KEY: f"ArithmeticTask[{self.split}]:{number}",
            }

    def problems(self) -> list[Problem]:
        """The problems, all different, in an order that the seed decides."""
        values = self.max_value - self.min_value + 1
        total = len(self.operations) * values**2
        if total > sys.maxsize:
            raise DataError(
                f"max_value = {self.max_value} is not allowed: at most {sys.maxsize} problems can be told apart"
            )
        if self.size is None and total > MOST_PROBLEMS:
            raise DataError(f"size = null is not allowed: there are {total} problems; give a size")
        draws = total
        if self.size is not None:
            # So many draws that the split's share of them reaches `size`; a large space is never enumerated.
            draws = min(total, int((4 * self.size + 64) / self._share()))
        indices = random.Random(self.seed).sample(range(total), draws)
        problems = [problem for problem in map(self._problem, indices) if self._belongs(problem)]
        if len(problems) < (self.size or 1):
            raise DataError(f"size = {self.size} is not allowed: split {self.split} has {len(problems)} problems")
        return problems[: self.size]

    @property
    def vocabulary(self) -> str:
        """Every character that prompts and answers can consist of, sorted; for a character-level tokenizer."""
        written = self._prompt(Problem(0, self.operations[0], 0)) + self.answer_format.format(answer=0)
        return "".join(sorted(set("0123456789" + self.operations + written)))

    def _share(self) -> float:
        return {"train": 1 - self.held_out, "validation": self.held_out, "all": 1.0}[self.split]

    def _belongs(self, problem: Problem) -> bool:
        return self.split == "all" or (problem.fraction < self.held_out) == (self.split == "validation")

    def _problem(self, index: int) -> Problem:
        values = self.max_value - self.min_value + 1
        index, b = divmod(index, values)
        op, a = divmod(index, values)
        return Problem(self.min_value + a, self.operations[op], self.min_value + b)

    def _prompt(self, problem: Problem) -> str:
        return self.template.format(a=problem.a, op=problem.op, b=problem.b)

    def _check_formats(self) -> None:
        probes = [Problem(1, "+", 2), Problem(3, "+", 2), Problem(1, "-", 2), Problem(1, "+", 3)]
        try:
            texts = {self._prompt(problem) for problem in probes}
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(f"template = {self.template!r} is not allowed: {error!r}") from error
        if len(texts) < 4:
            raise DataError(f"template = {self.template!r} is not allowed: it must use {{a}}, {{op}} and {{b}}")
        try:
            answers = {self.answer_format.format(answer=answer) for answer in (1, 2)}
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(f"answer_format = {self.answer_format!r} is not allowed: {error!r}") from error
        if len(answers) < 2:
            raise DataError(f"answer_format = {self.answer_format!r} is not allowed: it must use {{answer}}")
