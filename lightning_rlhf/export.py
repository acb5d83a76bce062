"""From a checkpoint to a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_rlhf import __version__
from lightning_rlhf.assembly import building, load_checkpoint, make
from lightning_rlhf.checkpoint.records import digest
from lightning_rlhf.evaluate import without_reference
from lightning_rlhf.mixins.alp_settings import ALPSettings, alp_settings
from lightning_rlhf.models import LoadedModel
from lightning_rlhf.models.actor import Actor
from lightning_rlhf.models.fixed_perturbation import save_perturbation
from lightning_rlhf.models.perturbation import decoder_layers
from lightning_rlhf.quiet import quiet_loading
from lightning_rlhf.runs.recompose import Composition
from lightning_rlhf.runs.resume import planned
from lightning_rlhf.schema import InputError, get

RECORD = "lightning_rlhf_export.json"
"""File of an export with the hashes of all others: a folder in which one was added or changed is not replaced."""


def export_checkpoint(
    checkpoint: str, output: str, overrides: Sequence[str] = (), *, force: bool = False, perturbation: bool = False
) -> Path:
    """Write the trained policy as a Hugging Face folder: weights (LoRA merged), configuration, tokenizer, template.

    The folder is written beside ``output`` and renamed, so it is whole or absent. Its tokenizer pads on the left, as
    batched generation needs; file permissions follow the umask.

    Args:
        checkpoint: a checkpoint file or a run's folder (its newest whole checkpoint).
        output: the folder to write; a symbolic link stays, and the folder that it names is written.
        overrides: changes of the run's configuration of the model, such as ``model.source.path=moved/model``; others
            have no effect here.
        force: replace an earlier export; other folders that are not empty are refused all the same.
        perturbation: also write the noise scales of ALP, for perturbed inference
            (:func:`lightning_rlhf.models.fixed_perturbation.apply_perturbation`). The weights are the same either way.

    Returns:
        The folder, absolute.

    Raises:
        InputError: no such checkpoint, ``output`` is in use and may not be replaced, the run had no noise to write, or
            an override cannot work.
    """
    target = Path(output).expanduser().resolve()
    _refuse_what_is_not_replaced(target, output, force)
    going_on = planned(checkpoint, Composition(tuple(overrides)), "checkpoint")
    _, saved = load_checkpoint(str(going_on.checkpoint))
    config = without_reference(going_on.settings_in(going_on.run or going_on.outputs))
    base = get(config, "model.source.path")
    if base and Path(base).expanduser().resolve().is_relative_to(target):
        raise InputError(f"output = {output!r} holds the model that the run began with ({base}); choose another folder")
    noise = alp_settings(config["module"].get("alp"))
    if perturbation and noise is None:
        raise InputError(f"perturbation = true is not allowed: {checkpoint!r} was trained without module.alp")
    loaded, actor = trained_actor(config, saved["state_dict"], going_on.checkpoint)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        actor.save_pretrained(staging, loaded.tokenizer)
        if perturbation and noise is not None:
            _save_noise(actor.lm, saved["state_dict"]["perturbation.log_sigma"], noise, staging)
        written = {name: digest(staging / name)["sha256"] for name in sorted(_files(staging))}
        content = {"lightning_rlhf": __version__, "files": written}
        (staging / RECORD).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _as_umask_says(staging)
        former = staging.with_name(f"{staging.name}.former")
        if target.exists():
            target.rename(former)
        staging.rename(target)
        shutil.rmtree(former, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def trained_actor(
    config: Mapping[str, Any], state: Mapping[str, Tensor], checkpoint: Path, use: str = "exported"
) -> tuple[LoadedModel, Actor]:
    """The model that the run began with, its tokenizer, and the actor with a checkpoint's weights, on the CPU.

    Args:
        config: of the run, see :func:`~lightning_rlhf.evaluate.without_reference`.
        state: the checkpoint's ``state_dict``.
        checkpoint: where it lies, for errors.
        use: what becomes of the policy, for errors.

    Raises:
        InputError: the model cannot be loaded, or the weights hold NaN or infinity.
    """
    quiet_loading()
    loaded = _base_model(config)
    with building("model.policy"):
        actor: Actor = make(config["model"]["policy"] | {"critic": "none"}, loaded=loaded).actor
    prefix = "actor."
    weights = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    _refuse_broken(weights, checkpoint, use)
    actor.load_state_dict(weights)
    return loaded, actor


def _refuse_broken(weights: Mapping[str, Tensor], checkpoint: Path, use: str) -> None:
    """Weights with NaN or infinity answer nothing."""
    broken = sorted(name for name, weight in weights.items() if not weight.isfinite().all())
    if broken:
        raise InputError(
            f"checkpoint = {str(checkpoint)!r} is not {use}: {len(broken)} of its weights hold NaN or infinity, "
            f"{broken[0]} first; name an earlier checkpoint"
        )


def _base_model(config: Mapping[str, Any]) -> LoadedModel:
    """The model and tokenizer that the run began with."""
    try:
        with building("model.source"):
            loaded: LoadedModel = make(config["model"]["source"])
    except InputError as error:
        raise InputError(f"{error}\nIf the model lies elsewhere by now, say where: model.source.path=FOLDER") from error
    return loaded


def _refuse_what_is_not_replaced(target: Path, output: str, force: bool) -> None:
    """Accept only a new or empty folder or, with ``force``, an earlier export with nothing added since.

    Raises:
        InputError: ``target`` is something else; the message says what.
    """
    if not target.exists():
        return
    if Path.cwd().is_relative_to(target):
        raise InputError(f"output = {output!r} is the current folder or lies above it; choose a folder of its own")
    if not target.is_dir() or (any(target.iterdir()) and not force):
        which = "choose another" if not target.is_dir() else "choose another or, for an earlier export, set force=true"
        raise InputError(f"output = {output!r} exists and is not an empty folder; {which}")
    if not any(target.iterdir()):
        return
    kept = f"output = {output!r} is not replaced, force=true or not, as it"
    try:
        written = dict(json.loads((target / RECORD).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{kept} holds no {RECORD}, which an earlier export has: choose another folder, or remove this one yourself"
        ) from error
    others = sorted(name for name in _files(target) if name != RECORD and written.get(name) != _hash(target / name))
    if others:
        how = "was changed since it was exported" if others[0] in written else "no export has written"
        raise InputError(f"{kept} holds {others[0]}, which {how}: move it, or choose another folder")


def _hash(path: Path) -> str:
    return "" if path.is_symlink() else str(digest(path)["sha256"])


def _files(folder: Path) -> list[str]:
    """Names below a folder of everything in it but folders."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path.relative_to(folder).as_posix() for path in found]


def _as_umask_says(folder: Path) -> None:
    """Give the files the permissions of new files; safetensors makes its own readable by the owner only."""
    mode = folder.stat().st_mode & 0o777
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)


def _save_noise(lm: Any, log_sigma: Tensor, settings: ALPSettings, folder: Path) -> None:
    layers, found = decoder_layers(lm, settings.layers)
    first, last = settings.layer_range or (0, len(found) - 1)
    indices = list(range(first, last + 1))
    save_perturbation(log_sigma, folder, layers=layers, indices=indices, bits=settings.quantise_bits)
