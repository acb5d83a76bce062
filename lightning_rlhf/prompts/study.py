"""``lightning-rlhf prompts RUN --map`` and ``--screen``: from a run's records and its policy to a map and a ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lightning_rlhf.data.prompts import Prompt
from lightning_rlhf.data.sources import SOURCE_KEY
from lightning_rlhf.prompts import screening
from lightning_rlhf.prompts.screening import HeldOut, Ranked
from lightning_rlhf.prompts.vectors import Embedding, Measured, RunPolicy, embedded, make_embedding
from lightning_rlhf.reporting.prompt_map import plane_of, refuse_few, write_map
from lightning_rlhf.reporting.prompt_records import DamagedPieces
from lightning_rlhf.reporting.prompt_review import aligned, refuse_used_files, shortened
from lightning_rlhf.reporting.prompt_table import RecordedPrompt, recorded_prompts


@dataclass(frozen=True)
class Wishes:
    """What to make.

    Attributes:
        map: folder for figure and table.
        screen: file of new prompts.
        export: folder for the ranking of these.
        threshold: smallest probability of a prompt on the list.
        embedding: the callable that makes vectors of texts, in place of the policy; see
            :func:`~lightning_rlhf.prompts.vectors.make_embedding`.
    """

    map: str | None = None
    screen: str | None = None
    export: str | None = None
    threshold: float = 0.5
    embedding: str | None = None


def study(run: Path, wishes: Wishes, suspects: Mapping[str, str], damaged: DamagedPieces | None = None) -> None:
    """Make the map, the ranking or both; what can be refused is refused before the policy is loaded.

    Args:
        run: the run's folder.
        wishes: what to make.
        suspects: keys of flagged prompts, each with its reasons.
        damaged: is told of records that cannot be read, which are left out; ``None``: they are refused.

    Raises:
        InputError: no records, too few prompts, no checkpoint, a file with rows that cannot be used, or an embedding
            that does not work.
    """
    if wishes.screen is not None:
        screening.require_sklearn()
        if wishes.export is not None:
            refuse_used_files(Path(wishes.export).expanduser(), screening.FILES.values())
    prompts = recorded_prompts(run, damaged)
    if wishes.map is not None:
        refuse_few(len(prompts))
    if wishes.screen is not None:
        screening.high_kl(prompts)
    embedding = None if wishes.embedding is None else make_embedding(wishes.embedding)
    policy = RunPolicy.of(run) if wishes.screen is not None or embedding is None else None
    new, too_long = ([], 0) if wishes.screen is None or policy is None else policy.read(wishes.screen)
    measured = None if policy is None else policy.measure(policy.ids_of(prompts))
    vectors = _vectors([prompt.text for prompt in prompts], embedding, measured)
    if wishes.map is not None:
        source = f"vectors by {wishes.embedding}"
        if policy is not None and embedding is None:
            source = f"mean hidden states of {policy.checkpoint.name}"
        folder, plane = Path(wishes.map).expanduser(), plane_of(vectors)
        print("\n".join(write_map(folder, str(run), prompts, plane, vectors=source, suspects=suspects)))
    if wishes.screen is not None and policy is not None and measured is not None:
        ranking, held_out = _rank(run, Recorded(prompts, vectors, measured), new, policy, embedding)
        print("\n".join(_listing(ranking, held_out, too_long, wishes)))
        if wishes.export is not None:
            folder = Path(wishes.export).expanduser()
            print("\n".join(screening.write_ranking(folder, str(run), ranking, held_out, wishes.threshold)))


@dataclass(frozen=True)
class Recorded:
    """The prompts of a run, their vectors ``[N, D]``, and what the policy makes of them."""

    prompts: Sequence[RecordedPrompt]
    vectors: Tensor
    measured: Measured


def _vectors(texts: Sequence[str], embedding: Embedding | None, measured: Measured | None) -> Tensor:
    if embedding is not None:
        return embedded(embedding, texts)
    assert measured is not None
    return measured.states


def _rank(
    run: Path, own: Recorded, new: Sequence[Prompt], policy: RunPolicy, embedding: Embedding | None
) -> tuple[list[Ranked], HeldOut]:
    """Fit the classifier to the run's prompts, print how good it is, and rank the new ones."""
    high, limit = screening.high_kl(own.prompts)
    rows = screening.features(own.vectors.numpy(), own.measured, [prompt.text for prompt in own.prompts])
    held_out = screening.held_out_auc(rows, high)
    print(
        f"{run}: {int(high.sum())} of {len(high)} recorded prompts have a high KL, more than {limit:.3g} nats per "
        f"token above the iteration's median prompt\nheld-out AUC {held_out.auc:.2f} (mean of {screening.FOLDS} "
        f"folds; 0.5 is chance, from {held_out.chance:.2f} on it is better)"
    )
    measured, texts = policy.measure([prompt.ids for prompt in new]), [prompt.text for prompt in new]
    unseen = screening.features(_vectors(texts, embedding, measured).numpy(), measured, texts)
    probabilities = screening.classifier().fit(rows, high).predict_proba(unseen)[:, 1]
    return screening.ranked(new, probabilities.tolist(), own.prompts), held_out


def _listing(ranking: Sequence[Ranked], held_out: HeldOut, too_long: int, wishes: Wishes) -> Sequence[str]:
    """The first rows of the ranking, and what to know of it."""
    likely = sum(row.probability >= wishes.threshold for row in ranking)
    seen = sum(row.recorded is not None for row in ranking)
    lines = [f"{len(ranking)} prompts of {wishes.screen}, {likely} with a probability of {wishes.threshold:g} or more"]
    if seen:
        lines.append(f"note: {seen} of them are prompts of the run, on which the classifier was fitted")
    if too_long:
        lines.append(f"note: {too_long} more are longer than data.max_prompt_tokens and left out, as in training")
    if held_out.warning:
        lines.append(f"WARNING: {held_out.warning}")
    table = [["probability", "prompt key", "row", "prompt"]]
    for row in ranking[: screening.SHOWN]:
        place = shortened(str(row.prompt.row[SOURCE_KEY]), 60)
        table.append([f"{row.probability:.2f}", row.prompt.key, place, shortened(screening.asked(row.prompt), 40)])
    more = [] if wishes.export is not None else ["the whole ranking, and a list of keys: --export FOLDER"]
    return [*lines, "", *aligned(table), "", *more]
