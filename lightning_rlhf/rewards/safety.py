"""Which responses are unsafe, by words, regular expressions and a classifier, and what is learned from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.bounds import bounded
from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import Experience, Safety
from lightning_rlhf.rewards.answers import AnswerCache
from lightning_rlhf.rewards.base import RewardError
from lightning_rlhf.rewards.model_based import DTYPE_WANTED, NoClassifier, load_classifier, weights_dtype
from lightning_rlhf.settings import SOMETHING_TO_FIND, build

BLOCK = "module.safety"
ACTIONS = ("discard_resample", "replace", "penalise")
MOST_KEPT = 100_000
"""Largest ``cache``: every answer is compared with the prompts of unsafe responses, and is in each checkpoint."""


@dataclass(frozen=True)
class ClassifierSettings:
    """A text classifier; any that ``AutoModelForSequenceClassification`` loads, head included."""

    path: str
    """Folder or hub id."""
    label: str | int | None = None
    """Name or number of the output that means unsafe; null for a classifier with one output."""
    threshold: float = 0.5
    """Unsafe from this probability of the label on."""
    batch_size: int = 32
    """Windows of text per forward pass."""
    max_tokens: int = 512
    """Longer responses are read in windows of so many tokens, and the worst window counts."""
    dtype: str = "float32"
    revision: str = "main"

    def __post_init__(self) -> None:
        block = f"{BLOCK}.classifier"
        bounded(block, above=0, below=1, threshold=self.threshold)
        bounded(block, at_least=1, whole=True, batch_size=self.batch_size)
        bounded(block, at_least=8, whole=True, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class SafetySettings:
    """What is unsafe, and what becomes of it."""

    words: tuple[str, ...] = ()
    """Whole words or phrases, whatever their case."""
    patterns: tuple[str, ...] = ()
    """Python regular expressions, found anywhere in a response."""
    classifier: ClassifierSettings | None = None
    """Asked about the responses that words and patterns let pass."""
    action: str = "discard_resample"
    """discard_resample, replace or penalise."""
    attempts: int = 3
    """discard_resample: new draws for an unsafe response at most."""
    penalty: float = -10.0
    """penalise: added to the score."""
    reply: str | None = None
    """replace: the text in place of an unsafe response."""
    train_replaced: bool = False
    """replace: learn from the reply, too, although the policy did not write it."""
    cache: int = 0
    """replace: good answers that each rank keeps, to stand in for unsafe ones in place of the reply; 0: none."""
    cache_similarity: float = 0.5
    """Smallest similarity, at most 1, of a prompt whose answer may be used for another one."""

    def __post_init__(self) -> None:
        for name in ("words", "patterns"):
            given = getattr(self, name)
            if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) and text for text in given):
                raise SettingError(f"{BLOCK}.{name}", given, "a list of texts, none of them empty")
            object.__setattr__(self, name, tuple(given))
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                allowed = f"Python regular expressions; {pattern!r}: {error}"
                raise SettingError(f"{BLOCK}.patterns", list(self.patterns), allowed) from None
        if self.classifier is not None:
            built = build(ClassifierSettings, f"{BLOCK}.classifier", self.classifier)
            object.__setattr__(self, "classifier", built)
        if self.action not in ACTIONS:
            raise SettingError(f"{BLOCK}.action", self.action, f"one of {', '.join(ACTIONS)}")
        bounded(BLOCK, at_least=1, whole=True, attempts=self.attempts)
        bounded(BLOCK, below=0, penalty=self.penalty)
        if (self.action == "replace") != bool(self.reply):
            wanted = "the text to put in place of an unsafe response" if self.action == "replace" else "null"
            raise SettingError(f"{BLOCK}.reply", self.reply, f"{wanted} with action = {self.action}")
        if self.train_replaced and self.action != "replace":
            raise SettingError(f"{BLOCK}.train_replaced", True, f"false with action = {self.action}")
        bounded(BLOCK, at_least=0, at_most=MOST_KEPT, whole=True, cache=self.cache)
        bounded(BLOCK, above=0, at_most=1, cache_similarity=self.cache_similarity)
        if self.cache and self.action != "replace":
            raise SettingError(f"{BLOCK}.cache", self.cache, f"0 with action = {self.action}")


class SafetyFilter:
    """Judges responses by their text.

    Args:
        settings: words, patterns and classifier; at least one of them.

    Raises:
        SettingError: there is nothing to look for, or the classifier cannot be used.
    """

    def __init__(self, settings: SafetySettings) -> None:
        if not (settings.words or settings.patterns or settings.classifier):
            raise SettingError(f"{BLOCK}.words", [], SOMETHING_TO_FIND)
        self.settings = settings
        self.answers = AnswerCache(settings.cache, settings.cache_similarity) if settings.cache else None
        """The good answers of this rank; ``None`` without a cache."""
        words = [(word, rf"(?<!\w){re.escape(word)}(?!\w)") for word in settings.words]
        self._rules = [("word", word, re.compile(rule, re.IGNORECASE)) for word, rule in words]
        self._rules += [("pattern", pattern, re.compile(pattern)) for pattern in settings.patterns]
        self.classifier = None if settings.classifier is None else TextClassifier(settings.classifier)
        if settings.reply is not None and (found := self.findings([settings.reply])[0]) is not None:
            allowed = f"a text that the filter lets pass; the {found['found_by']} {found['found']!r} finds it"
            raise SettingError(f"{BLOCK}.reply", settings.reply, allowed)

    @classmethod
    def from_block(cls, block: Mapping[str, Any] | SafetySettings | None) -> SafetyFilter | None:
        """The filter of a configuration block; ``None`` where it is null."""
        return None if block is None else cls(build(SafetySettings, BLOCK, block))

    def unsafe(self, texts: Sequence[str]) -> list[bool]:
        """Whether each response is unsafe."""
        return [finding is not None for finding in self.findings(texts)]

    def findings(self, texts: Sequence[str]) -> list[dict[str, Any] | None]:
        """What makes each response unsafe; the classifier reads only those that words and patterns let pass.

        Returns:
            ``response`` (the text), ``found_by`` (word, pattern or classifier), ``found`` (the first such word or
            pattern, or the classifier's label), and ``probability`` of the label, ``None`` for the other two. ``None``
            for a safe response.
        """
        found = [self._by_rules(text) for text in texts]
        if self.classifier is not None and (left := [i for i, finding in enumerate(found) if finding is None]):
            judged = self.classifier.probabilities([texts[i] for i in left])
            for i, probability in zip(left, judged.tolist(), strict=True):
                if probability >= self.classifier.settings.threshold:
                    found[i] = _finding(texts[i], "classifier", self.classifier.name, probability)
        return found

    def _by_rules(self, text: str) -> dict[str, Any] | None:
        hits = (_finding(text, kind, what) for kind, what, rule in self._rules if rule.search(text))
        return next(hits, None)

    def to(self, device: torch.device | str) -> SafetyFilter:
        """Move the classifier."""
        if self.classifier is not None:
            self.classifier.model.to(device)
        return self


def _finding(text: str, kind: str, what: str, probability: float | None = None) -> dict[str, Any]:
    return {"response": text, "found_by": kind, "found": what, "probability": probability}


class TextClassifier:
    """Probability that a text has a label.

    Texts are cut into windows; windows of equal length share a forward pass, so there is no padding, and a probability
    does not depend on the other texts.

    Raises:
        SettingError: there is no such classifier, or it has no such label.
    """

    def __init__(self, settings: ClassifierSettings) -> None:
        self.settings = settings
        dtype = weights_dtype(settings.dtype)
        if dtype is None:
            raise SettingError(f"{BLOCK}.classifier.dtype", settings.dtype, DTYPE_WANTED)
        try:
            self.tokenizer, self.model = load_classifier(settings.path, {"revision": settings.revision}, dtype)
        except NoClassifier as error:
            allowed = f"a text classifier is wanted; {error}"
            raise SettingError(f"{BLOCK}.classifier.path", settings.path, allowed) from error
        self.model.eval().requires_grad_(False)
        self.model.config.pad_token_id = -1  # rows have no padding; a set id would be searched for and skipped
        self.label = self._number_of(settings.label)
        self.name = str(self.model.config.id2label[self.label])
        """Of the label."""
        if not self.tokenizer.is_fast:
            allowed = "a classifier with a fast tokenizer, which cuts long texts into windows"
            raise SettingError(f"{BLOCK}.classifier.path", settings.path, allowed)
        positions = getattr(self.model.config, "max_position_embeddings", None) or settings.max_tokens
        self._window = min(settings.max_tokens, positions, self.tokenizer.model_max_length)

    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """``[B]`` float32 on the CPU: the largest probability of the label in any window of each text."""
        windows = [(row, ids) for row, text in enumerate(texts) for ids in self._windows(text)]
        worst = torch.zeros(len(texts))
        for batch in self._batches(windows):
            rows = torch.tensor([row for row, _ in batch])
            found = self._forward([ids for _, ids in batch])
            if not found.isfinite().all():  # NaN is over no threshold: everything would pass
                text = texts[int(rows[~found.isfinite()][0])]
                raise RewardError(
                    f"{BLOCK}.classifier: {self.settings.path} gives {found[~found.isfinite()][0]:g} in place of a "
                    f"probability for {text[:60]!r}; its weights are damaged, or its dtype is too narrow"
                )
            worst = worst.scatter_reduce(0, rows, found, "amax")
        return worst

    def _windows(self, text: str) -> list[list[int]]:
        """Token ids of each window, special tokens included; an empty text may have none."""
        cut = self.tokenizer(text, truncation=True, max_length=self._window, return_overflowing_tokens=True)
        return [list(ids) for ids in cut["input_ids"] if len(ids)]

    def _batches(self, windows: list[tuple[int, list[int]]]) -> Iterator[list[tuple[int, list[int]]]]:
        """Windows of one length, at most ``batch_size`` at once."""
        lengths: dict[int, list[tuple[int, list[int]]]] = {}
        for window in windows:
            lengths.setdefault(len(window[1]), []).append(window)
        for alike in lengths.values():
            for start in range(0, len(alike), self.settings.batch_size):
                yield alike[start : start + self.settings.batch_size]

    @torch.no_grad()
    def _forward(self, ids: list[list[int]]) -> Tensor:
        """``[N]`` probabilities: softmax over the labels of a text with one, a sigmoid where each stands alone."""
        block = torch.tensor(ids, device=self.model.device)
        logits = self.model(input_ids=block, attention_mask=torch.ones_like(block)).logits.float().cpu()
        alone = logits.shape[1] == 1 or self.model.config.problem_type == "multi_label_classification"
        return (logits.sigmoid() if alone else logits.softmax(-1))[:, self.label]

    def _number_of(self, label: str | int | None) -> int:
        names = {int(number): str(name) for number, name in self.model.config.id2label.items()}
        if label is None and len(names) == 1:
            return 0
        for number, name in names.items():
            if label is not None and str(label) in (name, str(number)):
                return number
        listed = ", ".join(f"{name} ({number})" for number, name in names.items())
        raise SettingError(f"{BLOCK}.classifier.label", label, f"one of the classifier's labels: {listed}")


def apply_safety(experience: Experience, safety: SafetyFilter) -> None:
    """Take unsafe and replaced responses out of the measured scores and the loss mask, or set a penalty.

    Replies and earlier answers are no responses of this policy: their scores are not measured even if they train. Good
    answers are kept.
    """
    codes, settings = experience.require("safety"), safety.settings
    if safety.answers is not None:
        safety.answers.remember(experience)
    unsafe = codes == Safety.UNSAFE
    if settings.action == "penalise":
        experience.penalty = unsafe.to(experience.require("scores").dtype) * settings.penalty
        return
    experience.own = ~(unsafe | replaced(codes))
    if not settings.train_replaced:
        unsafe = unsafe | replaced(codes)
    experience.loss_mask = experience.require("loss_mask") & ~unsafe.unsqueeze(-1)


def marks(experience: Experience, safety: SafetyFilter | None) -> list[str]:
    """For each row what stands in place of the policy's own sample, or why it is left out; empty for an own sample.

    Such rows do not tell how the policy treats a prompt: a reply that it would never write has a KL of hundreds of nats
    per token. A redrawn and a penalised response are its own.

    Args:
        experience: of this rank.
        safety: the filter it went through, if there is one.

    Returns:
        ``[B]`` words of :class:`Safety`: ``replaced`` (by the reply), ``cached`` (by an earlier answer), ``unsafe`` (so
        were all draws, and ``discard_resample`` has left the row out), or an empty text.
    """
    if safety is None:
        return [""] * len(experience)
    counted = {Safety.SAFE, Safety.REDRAWN} | ({Safety.UNSAFE} if safety.settings.action == "penalise" else set())
    codes = [Safety(code) for code in experience.require("safety").tolist()]
    return ["" if code in counted else code.name.lower() for code in codes]


def replaced(codes: Tensor) -> Tensor:
    """``[B]`` bool: the response is the reply or an earlier answer, which this draw of the policy did not write."""
    return (codes == Safety.REPLACED) | (codes == Safety.CACHED)
