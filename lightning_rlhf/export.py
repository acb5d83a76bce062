"""From a checkpoint to a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from lightning_rlhf.assembly import building, load_checkpoint, make
from lightning_rlhf.evaluate import without_reference
from lightning_rlhf.schema import InputError


def export_checkpoint(checkpoint: str, output: str, *, force: bool = False) -> Path:
    """Write the trained policy as a Hugging Face folder: weights (LoRA merged), configuration, tokenizer, template.

    The folder is written beside ``output`` and renamed, so it is whole or absent.

    Args:
        checkpoint: a checkpoint file or a run's folder (its newest whole checkpoint).
        output: the folder to write.
        force: replace a folder that is not empty.

    Returns:
        The folder, absolute.

    Raises:
        InputError: no such checkpoint, or ``output`` is in use and ``force`` is not set.
    """
    target = Path(output).expanduser().absolute()
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not force):
        raise InputError(f"output = {output!r} exists and is not an empty folder; choose another or set force=true")
    _, saved = load_checkpoint(checkpoint)
    config = without_reference(saved["lightning_rlhf"]["run_config"])
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
        staging.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target
