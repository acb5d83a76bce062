"""From a checkpoint to a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_rlhf.assembly import building, load_checkpoint, make
from lightning_rlhf.evaluate import without_reference
from lightning_rlhf.mixins.alp_settings import ALPSettings, alp_settings
from lightning_rlhf.models.fixed_perturbation import save_perturbation
from lightning_rlhf.models.perturbation import decoder_layers
from lightning_rlhf.noise import quiet_loading
from lightning_rlhf.schema import InputError


def export_checkpoint(checkpoint: str, output: str, *, force: bool = False, perturbation: bool = False) -> Path:
    """Write the trained policy as a Hugging Face folder: weights (LoRA merged), configuration, tokenizer, template.

    The folder is written beside ``output`` and renamed, so it is whole or absent.

    Args:
        checkpoint: a checkpoint file or a run's folder (its newest whole checkpoint).
        output: the folder to write.
        force: replace a folder that is not empty.
        perturbation: write the noise the policy was trained with beside it, for perturbed inference
            (:func:`lightning_rlhf.models.fixed_perturbation.apply_perturbation`). The weights are the same either way.

    Returns:
        The folder, absolute.

    Raises:
        InputError: no such checkpoint, ``output`` is in use and ``force`` is not set, or the run had no noise to write.
    """
    target = Path(output).expanduser().absolute()
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not force):
        raise InputError(f"output = {output!r} exists and is not an empty folder; choose another or set force=true")
    _, saved = load_checkpoint(checkpoint)
    config = without_reference(saved["lightning_rlhf"]["run_config"])
    noise = alp_settings(config["module"].get("alp"))
    if perturbation and noise is None:
        raise InputError(f"perturbation = true is not allowed: {checkpoint!r} was trained without module.alp")
    quiet_loading()
    with building("model.source"):
        loaded = make(config["model"]["source"])
    with building("model.policy"):
        actor = make(config["model"]["policy"] | {"critic": "none"}, loaded=loaded).actor
    prefix = "actor."
    weights = {k.removeprefix(prefix): v for k, v in saved["state_dict"].items() if k.startswith(prefix)}
    actor.load_state_dict(weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        actor.save_pretrained(staging, loaded.tokenizer)
        if perturbation and noise is not None:
            _save_noise(actor.lm, saved["state_dict"]["perturbation.log_sigma"], noise, staging)
        staging.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _save_noise(lm: Any, log_sigma: Tensor, settings: ALPSettings, folder: Path) -> None:
    layers, found = decoder_layers(lm, settings.layers)
    first, last = settings.layer_range or (0, len(found) - 1)
    indices = list(range(first, last + 1))
    save_perturbation(log_sigma, folder, layers=layers, indices=indices, bits=settings.quantise_bits)
