"""Supervised warm-up: a freshly built model learns the task's format before PPO, so that some answers earn a reward.

It is computed in float32 whatever the weights are stored in: in float16 Adam's epsilon of 1e-8 rounds to 0, so a step
may divide by 0.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from lightning_rlhf import __version__
from lightning_rlhf.bounds import bounded
from lightning_rlhf.data import Prompt, PromptDataModule
from lightning_rlhf.data.prompts import refuse_unknown_characters
from lightning_rlhf.data.sources import SOURCE_KEY
from lightning_rlhf.files import as_file
from lightning_rlhf.models import LoadedModel, fingerprint

log = logging.getLogger(__name__)

IGNORE = -100

Row = tuple[list[int], int]
"""Token ids of prompt, answer and end token, and the prompt's length."""

RATE_WANTED = (
    "the learning rate of the supervised warm-up has to be named, such as warmup.lr=1e-5 for a pre-trained model "
    "(warmup=none takes no such steps)"
)


@dataclass(frozen=True)
class WarmUp:
    """Result of the warm-up.

    Attributes:
        steps: optimiser steps taken.
        loss: mean loss of the last step, nats per answer token.
        cached: whether the weights came from the cache.
        path: the cache file.
        rows: hash of the rows that were trained on.
    """

    steps: int
    loss: float
    cached: bool
    path: Path
    rows: str

    @property
    def record(self) -> dict[str, Any]:
        """For checkpoints: what a later start of the run needs to have the same weights again."""
        return {"steps": self.steps, "loss": self.loss, "kept_as": self.path.name, "rows": self.rows}


def warm_up(
    loaded: LoadedModel,
    datamodule: PromptDataModule,
    *,
    steps: int,
    batch_size: int,
    lr: float | None,
    target: float | None = None,
    answer_field: str | Mapping[str, float] = "answer",
    cache_dir: str | Path | None = None,
    seed: int = 1,
    earlier: Mapping[str, Any] | None = None,
) -> WarmUp:
    """Fine-tune on the training prompts and their answers, in place, or take the result of an earlier call.

    Only the tokens of the answer and the end token count in the loss. The held-out split is never touched. The same
    arguments give the same weights, trained or cached, and the global random state is left as it was.

    Args:
        loaded: model and tokenizer; the model's weights are changed.
        datamodule: gives the training prompts.
        steps: optimiser steps at most.
        batch_size: rows per step.
        lr: peak learning rate of AdamW; it decays to 0 on a cosine over ``steps``. ``None`` is refused: what suits a
            random model destroys a pre-trained one.
        target: stop as soon as the mean loss of a step is below this; ``None`` runs all steps.
        answer_field: column of the answer; or several columns with their shares: one is drawn each time a row is shown,
            for a model that knows the right answer but often gives another.
        cache_dir: folder of the cache; ``None`` is ``$LIGHTNING_RLHF_CACHE`` or ``~/.cache/lightning_rlhf``.
        seed: of the order of the rows and of the drawn answer columns.
        earlier: :attr:`WarmUp.record` of the start of a run that is resumed: its weights are taken from the cache
            whatever the rows are now, since they are the run's reference model.

    Raises:
        ValueError: a setting is out of range, a row has no answer, or loss or weights (then not kept) are not finite;
            or the rows are not those of ``earlier``, and its weights are gone.
        FolderInPlaceError: a folder has the name of the cache's file.
    """
    _check(steps, batch_size, lr, target)
    shares = _shares(answer_field)
    rows = list(zip(*(encode(datamodule.train_prompts, loaded, field) for field in shares), strict=True))
    weights = list(shares.values())
    limits: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "lr": lr, "target": target, "seed": seed}
    key, rows_now = cache_key(loaded.lm, rows, {**limits, "shares": weights}), rows_key(rows, weights)
    path = as_file(cache_folder(cache_dir) / f"warmup-{key}.safetensors")
    found = _kept(loaded.lm, path, rows_now, earlier or {})
    if found is not None:
        log.info("warm-up: %d steps, loss %.3f, cached in\n  %s", found.steps, found.loss, found.path)
        return found
    with in_float32(loaded.lm):
        taken, loss = fit(loaded.lm, rows, weights, **limits)
    if broken := not_finite(loaded.lm):
        dtype = str(loaded.lm.dtype).removeprefix("torch.")
        raise ValueError(f"warmup.lr = {lr}: after {taken} steps {broken} holds NaN or infinite weights in {dtype}")
    _save(loaded.lm, path, taken, loss)
    log.info("warm-up: %d steps, loss %.3f, kept in\n  %s", taken, loss, path)
    return WarmUp(taken, loss, cached=False, path=path, rows=rows_now)


def _check(steps: int, batch_size: int, lr: float | None, target: float | None) -> None:
    if lr is None:
        raise ValueError(f"warmup.lr = None is not allowed: {RATE_WANTED}")
    bounded("warmup", above=0, whole=True, steps=steps, batch_size=batch_size)
    bounded("warmup", above=0, lr=lr)
    bounded("warmup", above=0, optional=True, target=target)


def _shares(answer_field: str | Mapping[str, float]) -> dict[str, float]:
    """The answer columns with their shares."""
    shares = {answer_field: 1.0} if isinstance(answer_field, str) else dict(answer_field)
    if not shares or any(isinstance(s, bool) or not 0 < s < math.inf for s in shares.values()):
        allowed = "a column, or columns with shares > 0"
        raise ValueError(f"warmup.answer_field = {answer_field!r} is not allowed: {allowed}")
    return shares


def encode(prompts: Sequence[Prompt], loaded: LoadedModel, answer_field: str) -> list[Row]:
    """The rows of the prompts with the answers of one column."""
    answers = []
    for prompt in prompts:
        answer = prompt.row.get(answer_field)
        if not isinstance(answer, str) or not answer:
            raise ValueError(
                f"warmup.answer_field = {answer_field!r}: the row of {prompt.text[:40]!r} has no such text"
            )
        answers.append(answer)
    try:
        encoded = loaded.tokenizer(answers, add_special_tokens=False)["input_ids"]
    except Exception:  # fast tokenizers raise plain Exception
        for prompt, answer in zip(prompts, answers, strict=True):
            refuse_unknown_characters(loaded.tokenizer, answer, str(prompt.row[SOURCE_KEY]))
        raise
    end = loaded.tokenizer.eos_token_id
    return [([*p.ids, *ids, end], len(p.ids)) for p, ids in zip(prompts, encoded, strict=True)]


def announcement(settings: Mapping[str, Any]) -> str:
    """A prominent note: what is trained before PPO, and how to switch it off."""
    given = {name: settings.get(name, "?") for name in ("steps", "batch_size", "lr")}
    return (
        f"SUPERVISED WARM-UP BEFORE PPO (warmup=none leaves it out): up to {given['steps']} steps\n"
        f"  of {given['batch_size']} rows at learning rate {given['lr']} on the answers of the training rows"
    )


def fit(
    lm: PreTrainedModel,
    rows: Sequence[Sequence[Row]],
    shares: Sequence[float],
    *,
    steps: int,
    batch_size: int,
    lr: float,
    target: float | None,
    seed: int,
) -> tuple[int, float]:
    """Train ``lm`` in place; returns the steps taken and the mean loss of the last one.

    Args:
        rows: for each prompt one row per answer column.
        shares: how often each answer column is shown, relative to the others.

    Raises:
        ValueError: a loss is NaN or infinite.
    """
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    odds = torch.tensor(shares, dtype=torch.float64)
    order: list[int] = []
    loss = math.inf
    step = 0
    training = lm.training
    lm.train()
    while step < steps and not (target is not None and loss < target):
        while len(order) < batch_size:
            order += torch.randperm(len(rows), generator=generator).tolist()
        chosen, order = order[:batch_size], order[batch_size:]
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        kinds = [0] * batch_size
        if len(shares) > 1:
            kinds = torch.multinomial(odds, batch_size, replacement=True, generator=generator).tolist()
        loss_tensor = answer_loss(lm, [rows[index][kind] for index, kind in zip(chosen, kinds, strict=True)])
        loss_tensor.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_tensor.item()
        step += 1
        if step % math.ceil(steps / 10) == 0 and not sys.stdout.isatty():  # a long silence looks like a hang
            log.info("warm-up: step %d of at most %d, loss %.3f", step, steps, loss)
        if not math.isfinite(loss):
            lm.train(training)
            raise ValueError(f"warmup.lr = {lr}: the loss of step {step} is {loss}; a smaller rate, or other answers")
    lm.train(training)
    return step, loss


@contextmanager
def in_float32(lm: PreTrainedModel) -> Iterator[None]:
    """Make parameters float32 inside this context and restore their dtypes afterwards."""
    before = {name: parameter.dtype for name, parameter in lm.named_parameters()}
    try:
        for parameter in lm.parameters():
            parameter.data = parameter.data.float()
        yield
    finally:
        for name, parameter in lm.named_parameters():
            parameter.data = parameter.data.to(before[name])


def not_finite(lm: PreTrainedModel) -> str | None:
    """Name of the first parameter that holds NaN or an infinity; ``None`` if there is none."""
    return next((name for name, p in lm.named_parameters() if not bool(p.detach().isfinite().all())), None)


def answer_loss(lm: PreTrainedModel, rows: Sequence[Row]) -> Tensor:
    """Mean cross-entropy (nats) over the tokens behind each row's prompt; rows are padded on the right."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long, device=lm.device)
    labels = torch.full_like(ids, IGNORE)
    mask = torch.zeros_like(ids)
    for row, (tokens, prompt_length) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt_length : len(tokens)] = torch.tensor(tokens[prompt_length:])
        mask[row, : len(tokens)] = 1
    logits = lm(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return functional.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)


# --- cache -----------------------------------------------------------------------------------------------------------


def cache_folder(folder: str | Path | None = None) -> Path:
    """The configured folder, ``$LIGHTNING_RLHF_CACHE``, or ``~/.cache/lightning_rlhf``."""
    return Path(folder or os.environ.get("LIGHTNING_RLHF_CACHE") or "~/.cache/lightning_rlhf").expanduser()


def cache_key(lm: PreTrainedModel, rows: Sequence[Sequence[Row]], settings: Mapping[str, Any]) -> str:
    """Hash of everything the outcome depends on: initial weights and architecture, rows, settings, package version."""
    digest = hashlib.sha256()
    parts = [lm.config.to_json_string(), fingerprint(lm), json.dumps(rows), json.dumps(dict(settings), sort_keys=True)]
    for part in [*parts, __version__]:
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()[:24]


def rows_key(rows: Sequence[Sequence[Row]], shares: Sequence[float]) -> str:
    """Hash of the rows of each answer column, and of the columns' shares."""
    return hashlib.sha256(json.dumps([rows, list(shares)]).encode()).hexdigest()[:24]


def _save(lm: PreTrainedModel, path: Path, steps: int, loss: float) -> None:
    """Write a temporary file and rename it: two processes at once leave one complete file, with the same content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"steps": str(steps), "loss": repr(loss), "fingerprint": fingerprint(lm)}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        save_file({n: p.detach().contiguous() for n, p in lm.named_parameters()}, partial, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _kept(lm: PreTrainedModel, path: Path, rows: str, earlier: Mapping[str, Any]) -> WarmUp | None:
    """Fill ``lm`` with the weights of the run's start, or of any run with the same rows and settings; ``None``: train.

    Raises:
        ValueError: the run began with other rows, and its weights are gone.
    """
    path, began = as_file(path.with_name(earlier.get("kept_as", path.name))), earlier.get("rows", rows)
    found = _load(lm, path, began)
    if found is None and began != rows:
        raise ValueError(
            "the run began with a warm-up on other rows (data.blacklist, or the data, has changed since), and its "
            f"weights, which are the reference model of the run, are no longer in {path}: restore that file, or begin "
            "a new run"
        )
    return found


@torch.no_grad()
def _load(lm: PreTrainedModel, path: Path, rows: str) -> WarmUp | None:
    """Fill ``lm`` from the cache; ``None`` if there is no file, or a broken one (with a warning)."""
    if not path.exists():
        return None
    parameters = dict(lm.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for name, parameter in parameters.items():
                parameter.copy_(file.get_tensor(name))
        if fingerprint(lm) != metadata["fingerprint"]:
            raise ValueError("its weights are not those that were written")
        if broken := not_finite(lm):
            raise ValueError(f"{broken} holds NaN or infinite weights")
        return WarmUp(int(metadata["steps"]), float(metadata["loss"]), cached=True, path=path, rows=rows)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        log.warning("warm-up: the cache file %s cannot be used (%s) and is made anew", path, error)
        for name, parameter in parameters.items():
            parameter.copy_(before[name])
        return None
