"""Score held-out prompts with the policy of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf import precision, schema
from lightning_rlhf.assembly import assemble, load_checkpoint, make_trainer
from lightning_rlhf.spelling import hint


def evaluate_checkpoint(checkpoint: str, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Greedy answers to the held-out prompts, scored by every term of the run's reward; prints and returns them.

    Args:
        checkpoint: a checkpoint file or a run's folder (its newest whole checkpoint).
        overrides: ``key=value`` changes of the run's configuration, such as ``data.validation.path=other.jsonl``.

    Raises:
        InputError: no such checkpoint, or an override that cannot work.
    """
    path, saved = load_checkpoint(checkpoint)
    config = override(saved["lightning_rlhf"]["run_config"], overrides)
    plain, replaced = precision.fit(schema.check(OmegaConf.create(config)))
    for text in replaced:
        print(f"note: {text}")
    parts = assemble(without_reference(plain), warm_up=False)
    parts.module.load_state_dict({k: v for k, v in saved["state_dict"].items() if not k.startswith("reference.")})
    with closing(parts.module.engine):
        trainer = make_trainer(plain, train=False)
        [results] = trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)
    metrics = {name: float(value) for name, value in results.items()}
    print(f"{path}: held-out prompts")
    width = max(len(name) for name in metrics)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4g}")
    return metrics


def override(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of a run with some of its values changed.

    Raises:
        InputError: a key that the run's configuration does not have, or a group in place of a value.
    """
    node = OmegaConf.create(config)
    OmegaConf.set_struct(node, True)
    for text in overrides:
        key, _, value = text.partition("=")
        if isinstance(schema.get(config, key), dict):
            raise schema.InputError(
                f"{text}: {key} is a block of the run's configuration; change single values, as {key}.<key>={value}"
            )
        try:
            node.merge_with_dotlist([text])
        except OmegaConfBaseException as error:
            near = hint(key, [name for name, _ in schema.flatten(config)])
            raise schema.InputError(f"the run has no key {key!r}" + (f"; {near}" if near else "")) from error
    return OmegaConf.to_container(node)  # type: ignore[return-value]


def without_reference(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the frozen copy of the starting policy, which nothing but training needs."""
    policy = config["model"]["policy"]
    if policy.get("lora") is not None:
        return config  # the adapter's reference is no copy
    return config | {"model": config["model"] | {"policy": policy | {"reference": "none"}}}
