"""From a checkpoint to a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_rlhf.assembly import building, load_checkpoint, make
from lightning_rlhf.evaluate import without_reference
from lightning_rlhf.mixins.alp_settings import ALPSettings, alp_settings
from lightning_rlhf.models.fixed_perturbation import save_perturbation
from lightning_rlhf.models.perturbation import decoder_layers
from lightning_rlhf.noise import quiet_loading
from lightning_rlhf.recompose import Composition
from lightning_rlhf.resume import planned
from lightning_rlhf.schema import InputError


def export_checkpoint(
    checkpoint: str, output: str, overrides: Sequence[str] = (), *, force: bool = False, perturbation: bool = False
) -> Path:
    """Write the trained policy as a Hugging Face folder: weights (LoRA merged), configuration, tokenizer, template.

    The folder is written beside ``output`` and renamed, so it is whole or absent. Its tokenizer pads on the left, so
    that a batch of prompts can be continued as it comes; who may read the files says the umask.

    Args:
        checkpoint: a checkpoint file or a run's folder (its newest whole checkpoint).
        output: the folder to write.
        overrides: changes of the run's configuration of the model, such as ``model.source.path=moved/model``; others
            have no effect here.
        force: replace a folder that is not empty.
        perturbation: write the noise the policy was trained with beside it, for perturbed inference
            (:func:`lightning_rlhf.models.fixed_perturbation.apply_perturbation`). The weights are the same either way.

    Returns:
        The folder, absolute.

    Raises:
        InputError: no such checkpoint, ``output`` is in use and ``force`` is not set, the run had no noise to write, or
            an override cannot work.
    """
    target = Path(output).expanduser().absolute()
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not force):
        raise InputError(f"output = {output!r} exists and is not an empty folder; choose another or set force=true")
    _, saved = load_checkpoint(checkpoint)
    run_config = saved["lightning_rlhf"]["run_config"]
    if overrides:
        run_config = planned(checkpoint, Composition(tuple(overrides))).config
    config = without_reference(run_config)
    noise = alp_settings(config["module"].get("alp"))
    if perturbation and noise is None:
        raise InputError(f"perturbation = true is not allowed: {checkpoint!r} was trained without module.alp")
    quiet_loading()
    try:
        with building("model.source"):
            loaded = make(config["model"]["source"])
    except InputError as error:
        raise InputError(f"{error}\nIf the model lies elsewhere by now, say where: model.source.path=FOLDER") from error
    with building("model.policy"):
        actor = make(config["model"]["policy"] | {"critic": "none"}, loaded=loaded).actor
    prefix = "actor."
    weights = {k.removeprefix(prefix): v for k, v in saved["state_dict"].items() if k.startswith(prefix)}
    actor.load_state_dict(weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        actor.save_pretrained(staging, loaded.tokenizer)
        if perturbation and noise is not None:
            _save_noise(actor.lm, saved["state_dict"]["perturbation.log_sigma"], noise, staging)
        _as_umask_says(staging)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _as_umask_says(folder: Path) -> None:
    """Give the files the mode that new ones have here; safetensors writes its own for the user alone."""
    mode = folder.stat().st_mode & 0o777
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)


def _save_noise(lm: Any, log_sigma: Tensor, settings: ALPSettings, folder: Path) -> None:
    layers, found = decoder_layers(lm, settings.layers)
    first, last = settings.layer_range or (0, len(found) - 1)
    indices = list(range(first, last + 1))
    save_perturbation(log_sigma, folder, layers=layers, indices=indices, bits=settings.quantise_bits)
