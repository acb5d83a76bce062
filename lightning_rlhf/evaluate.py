"""Score held-out prompts with the policy of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from omegaconf import OmegaConf

from lightning_rlhf import precision, schema
from lightning_rlhf.assembly import assemble, load_checkpoint, make_trainer
from lightning_rlhf.runs.ending import failing
from lightning_rlhf.runs.recompose import Composition
from lightning_rlhf.runs.resume import planned


@failing()
def evaluate_checkpoint(checkpoint: str, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Greedy answers to the held-out prompts, scored by every term of the run's reward; prints and returns them.

    Args:
        checkpoint: a checkpoint file or a run's folder (its newest whole checkpoint).
        overrides: changes of the run's configuration, such as ``data.validation=other.jsonl``; options of groups,
            too (``reward=math``).

    Raises:
        InputError: no such checkpoint, an override that cannot work, or no held-out prompt.
    """
    for text in overrides:  # Hydra's parser gives no clear error for this
        if not text.partition("=")[1]:
            raise schema.InputError(f"{text!r} is not allowed: overrides are written key=value")
    going_on = planned(checkpoint, Composition(tuple(overrides)), "checkpoint")
    path, saved = load_checkpoint(str(going_on.checkpoint))
    config = without_texts(going_on.settings_in(going_on.run or going_on.outputs))
    plain, replaced = precision.fit(schema.check(OmegaConf.create(config)))
    for each in replaced:
        print(f"note: {each}")
    parts = assemble(without_reference(plain), warm_up=False)
    if not len(getattr(parts.datamodule, "validation_prompts", [None])):  # a custom data module may lack it
        raise schema.InputError(NOTHING_HELD_OUT)
    parts.module.load_state_dict({k: v for k, v in saved["state_dict"].items() if not k.startswith("reference.")})
    print("evaluating the held-out prompts", flush=True)
    with closing(parts.module.engine):
        trainer = make_trainer(plain, train=False)
        results = next(iter(trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)), {})
    if not results:
        raise schema.InputError(NOTHING_HELD_OUT)
    metrics = {name: float(value) for name, value in results.items()}
    print(f"{path}: held-out prompts")
    width = max(len(name) for name in metrics)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4g}")
    return metrics


NOTHING_HELD_OUT = (
    "data.validation = null: the run holds no prompt out, so eval has nothing to score. Say which ones: "
    "data.validation=FILE (a JSONL or Parquet file), or the block of a source, data.validation={_target_: ...}"
)


def without_texts(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without callbacks and without PPO-ptx, whose texts need not be there any more."""
    module = config["module"] if config["module"].get("ptx") is None else config["module"] | {"ptx": None}
    return config | {"module": module, "callbacks": None}


def without_reference(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the reference model, the frozen copy of the first policy that only training needs."""
    policy = config["model"]["policy"]
    if policy.get("lora") is not None:
        return config  # with LoRA the reference is the base model, no copy
    return config | {"model": config["model"] | {"policy": policy | {"reference": "none"}}}
