"""Which new prompts will have a high KL? A small classifier, trained on what a run has recorded of its own prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlhf.data.prompts import MESSAGES_KEY, Prompt
from lightning_rlhf.data.sources import SOURCE_KEY
from lightning_rlhf.errors import InputError
from lightning_rlhf.files import write_whole
from lightning_rlhf.prompts.vectors import Measured
from lightning_rlhf.reporting.prompt_review import shortened
from lightning_rlhf.reporting.prompt_table import RecordedPrompt

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

FILES = {"ranking": "screening.jsonl", "list": "screened.txt"}
SHARE = 0.1
"""Share of the recorded prompts whose KL counts as high, those with the largest ``kl_excess``."""
FOLDS = 5
LEAST = 10
"""Prompts of each kind at least, two in every fold."""
CHANCE = 0.6
"""An AUC below this is called no better than chance, however many prompts there are."""
SHUFFLES = 19
"""Permutations of the labels: an AUC above those of all is chance in one of twenty cases."""
ENOUGH = 100
"""Prompts of each kind from which on labels are not shuffled."""
SHOWN = 10
"""New prompts that are printed."""


@dataclass(frozen=True)
class HeldOut:
    """How well the classifier ranks prompts that it was not fitted on.

    Attributes:
        auc: area under the ROC curve, mean over the folds: the probability that a prompt with a high KL is ranked above
            one without.
        chance: the largest AUC under shuffled labels, at least :data:`CHANCE`.
    """

    auc: float
    chance: float

    @property
    def warning(self) -> str:
        """What to say of an AUC that may be chance; empty for a better one."""
        if self.auc >= self.chance:
            return ""
        return (
            f"the held-out AUC {self.auc:.2f} is no better than chance (0.5; {self.chance:.2f} would be): these "
            "features do not tell which prompts have a high KL, so the ranking means nothing and no prompt is listed"
        )


def require_sklearn() -> None:
    """Refuse to go on without scikit-learn.

    Raises:
        InputError: names the extra that brings it.
    """
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise InputError(f'--screen needs scikit-learn: pip install "lightning-rlhf[prompts]" ({error})') from error


def high_kl(prompts: Sequence[RecordedPrompt]) -> tuple[np.ndarray, float]:
    """Which prompts have a high KL: a ``kl_excess`` above the quantile ``1 - SHARE`` of all.

    Args:
        prompts: of a run.

    Returns:
        ``[N]`` bool, and the quantile in nats per token.

    Raises:
        InputError: no KL was recorded, or fewer than :data:`LEAST` prompts would be of one kind.
    """
    values = [prompt.kl_excess for prompt in prompts if prompt.kl_excess is not None]
    if len(values) < len(prompts):
        raise InputError(
            f"--screen learns from the KL to the reference, and {len(prompts) - len(values)} of {len(prompts)} "
            "recorded prompts have none: the run needs model.policy.reference=copy"
        )
    limit = float(np.quantile(values, 1 - SHARE))
    high = np.array(values) > limit
    if min(high.sum(), (~high).sum()) < LEAST:
        raise InputError(
            f"--screen cannot be judged: {int(high.sum())} of {len(prompts)} recorded prompts lie above the quantile "
            f"{1 - SHARE:g} of the KL, and an AUC needs at least {LEAST} above and {LEAST} below, so about "
            f"{math.ceil(LEAST / SHARE)} different prompts whose KL differs"
        )
    return high, limit


def features(vectors: np.ndarray, measured: Measured, texts: Sequence[str]) -> np.ndarray:
    """``[N, D + 3]`` float64: the vectors, length in tokens, share of symbols, mean log-probability of a token.

    Args:
        vectors: ``[N, D]``.
        measured: length and log-probability of each prompt.
        texts: of the prompts, as the model reads them.
    """
    symbols = [symbol_share(text) for text in texts]
    plain = np.stack([measured.tokens.numpy(), np.array(symbols), measured.logprobs.numpy()], axis=1)
    return np.concatenate([vectors, plain], axis=1, dtype=np.float64)


def symbol_share(text: str) -> float:
    """Share of the characters that are neither letter, digit nor white space; 0 of an empty text."""
    symbols = sum(not (character.isalnum() or character.isspace()) for character in text)
    return symbols / len(text) if text else 0.0


def classifier() -> Pipeline:
    """Logistic regression on standardised features, with scikit-learn's default L2 penalty."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))


def cross_validated_auc(rows: np.ndarray, high: np.ndarray, seed: int = 0) -> float:
    """AUC of the classifier on prompts that it was not fitted on: mean over the folds of a stratified cross-validation.

    Args:
        rows: ``[N, D]`` features.
        high: ``[N]`` bool, at least :data:`FOLDS` of each kind.
        seed: of the folds.
    """
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold

    aucs = []
    for fitted, left_out in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(rows, high):
        model = classifier().fit(rows[fitted], high[fitted])
        aucs.append(roc_auc_score(high[left_out], model.predict_proba(rows[left_out])[:, 1]))
    return float(np.mean(aucs))


def held_out_auc(rows: np.ndarray, high: np.ndarray, seed: int = 0) -> HeldOut:
    """The cross-validated AUC, and what it has to exceed: a permutation test (Ojala and Garriga 2010).

    A formula for the spread of an AUC would not do: the folds share prompts to fit on, so their AUCs go together. With
    :data:`ENOUGH` prompts of each kind :data:`CHANCE` lies beyond that spread, and nothing is shuffled.

    Args:
        rows: ``[N, D]`` features.
        high: ``[N]`` bool, at least :data:`FOLDS` of each kind.
        seed: of folds and permutations.
    """
    chance = CHANCE
    if min(high.sum(), (~high).sum()) < ENOUGH:
        draw = np.random.default_rng(seed)
        shuffled = (cross_validated_auc(rows, draw.permutation(high), seed) for _ in range(SHUFFLES))
        chance = max(chance, *shuffled)
    return HeldOut(cross_validated_auc(rows, high, seed), chance)


@dataclass(frozen=True)
class Ranked:
    """A new prompt and the probability that its KL will be high."""

    prompt: Prompt
    probability: float
    recorded: float | None
    """Its ``kl_excess`` in the run, where the run drew it: then it is no new prompt, and was fitted on."""


def ranked(
    prompts: Sequence[Prompt], probabilities: Sequence[float], recorded: Sequence[RecordedPrompt]
) -> list[Ranked]:
    """New prompts, the most probable first; equal ones in the order of the file."""
    known = {prompt.key: prompt.kl_excess for prompt in recorded}
    rows = [Ranked(p, float(x), known.get(p.key)) for p, x in zip(prompts, probabilities, strict=True)]
    return sorted(rows, key=lambda row: -row.probability)


def asked(prompt: Prompt) -> str:
    """What to show of a prompt: its last message, as a chat template begins all with the same words, or its text."""
    messages = prompt.row.get(MESSAGES_KEY)
    return str(messages[-1]["content"]) if messages else prompt.text


def write_ranking(folder: Path, run: str, rows: Sequence[Ranked], held_out: HeldOut, threshold: float) -> list[str]:
    """Write the ranking as JSONL, and the list of keys whose probability reaches the threshold.

    Args:
        folder: without files of these names, see :func:`~lightning_rlhf.reporting.prompt_review.refuse_used_files`.
        run: the run's folder, for the list's first line.
        rows: the most probable first.
        held_out: with an AUC that may be chance nothing is listed, and every row of the ranking says so.
        threshold: smallest probability of the list.

    Returns:
        Lines for the terminal that say what was written.
    """
    warning = held_out.warning
    write_whole(
        folder / FILES["ranking"], "".join(json.dumps(_record(r, warning), ensure_ascii=False) + "\n" for r in rows)
    )
    listed = {row.prompt.key: row for row in reversed(rows) if row.probability >= threshold and not warning}
    lines = [
        f"# new prompts that may have a high KL, by {' '.join(run.split())} (held-out AUC {held_out.auc:.2f}): one "
        "prompt key a line; remove the line of a prompt that is to stay as it is"
    ]
    if warning:
        lines.append(f"# WARNING: {warning}")
    for key, row in reversed(listed.items()):
        lines.append(f"{key}  # {row.probability:.2f}: {shortened(asked(row.prompt), 60)}")
    write_whole(folder / FILES["list"], "\n".join(lines) + "\n")
    return [
        f"the ranking: {folder / FILES['ranking']}",
        f"{len(listed)} keys with a probability of {threshold:g} or more: data.conservative={folder / FILES['list']}, "
        "or data.blacklist=; edit it first",
    ]


def _record(row: Ranked, warning: str) -> Mapping[str, Any]:
    record = {
        "key": row.prompt.key,
        "probability": round(row.probability, 6),
        "row": row.prompt.row[SOURCE_KEY],
        "prompt": shortened(asked(row.prompt), 200),
        "recorded_kl_excess": row.recorded,
    }
    return record | ({"warning": warning} if warning else {})
