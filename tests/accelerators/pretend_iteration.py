"""One PPO iteration through the ordinary assembly, on the CPU and on the pretend NPU; prints how far apart they end.

    python tests/accelerators/pretend_iteration.py <folder>

Run in a process of its own. The last line of its output is JSON.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import hydra
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble, make_trainer
from tests.accelerators import pretend_npu
from tests.accelerators.fake_npu import fake_torch_npu

RUN = [
    *("iterations=1", "threads=1", "warmup=none", "logger=none", "trainer.enable_progress_bar=false"),
    *("data.prompts_per_iteration=8", "rollout.samples=2", "module.update.minibatch_size=8", "module.update.epochs=2"),
    *("alp=decoupled", "rollout_correction=npu", "callbacks=stability"),
    *("model.policy.critic=separate", "model.lr.actor=4e-4", "model.lr.critic=1e-3", "rollout.max_new_tokens=5"),
    *("module.loss.value_coefficient=0.5", "module.loss.entropy_coefficient=0.02", "module.kl.coefficient=0.002"),
    *("module.advantage.gae_lambda=0.95", "module.reward_processing.normalise=none", "module.actor.clip_norm=1"),
    "callbacks.checkpoint=null",  # the CPU tensor behind a pretend tensor is not saved
    "+reward.terms.even={weight: 1.0, reward: {_target_: tests.support.even_digits}}",
    "module.actor.warmup_iterations=0",
    # Adam divides a gradient by its own size: without this the rounding of a gradient near zero becomes a whole step.
    "module.optimizer.eps=1e-4",
]
NPU = {
    "plain": ["trainer=npu", "trainer.precision=32-true"],
    "fused": ["trainer=npu", "trainer.precision=32-true", "model.policy.npu_fused=true"],
    "16-mixed": ["trainer=npu", "trainer.precision=16-mixed"],
}
NOISE = ("time/", "perf/", "memory/", "tok/s", "stability/nonfinite_steps")


def iterate(overrides: list[str], folder: str) -> tuple[dict[str, torch.Tensor], dict[str, float], Any]:
    """Trained tensors and metrics of a run; the Trainer, and where the parameters were in training."""
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        config = schema.check(hydra.compose("train", [f"output_dir={folder}", *RUN, *overrides]))
    parts = assemble(config)
    trainer = make_trainer(config)
    where: set[str] = set()
    trainer.callbacks.append(  # type: ignore[attr-defined]
        LambdaCallback(on_train_batch_end=lambda *_: where.update(str(p.device) for p in parts.module.parameters()))
    )
    trainer.fit(parts.module, datamodule=parts.datamodule)
    weights = {name: p.detach().cpu() for name, p in parts.module.named_parameters() if p.requires_grad}
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith(NOISE)}
    return weights, metrics, (trainer, sorted(where))


def compare(cpu: tuple[Any, ...], npu: tuple[Any, ...]) -> dict[str, Any]:
    """Largest differences: of parameters as they are, of metrics relative to their size where that is above 1."""
    (weights, metrics, _), (other_weights, other_metrics, (trainer, where)) = cpu, npu
    assert weights.keys() == other_weights.keys() and metrics.keys() == other_metrics.keys()
    apart = {
        name: abs(value - other_metrics[name]) / max(1.0, abs(value))
        for name, value in metrics.items()
        if not (math.isnan(value) and math.isnan(other_metrics[name]))
    }
    worst = max(apart, key=apart.__getitem__)
    return {
        "parameters": max(float((weights[name] - other_weights[name]).abs().max()) for name in weights),
        "metrics": apart[worst],
        "worst metric": worst,
        "compared": [len(weights), len(apart)],
        "updates": other_metrics["clock/update"],
        "sigma": sum(name.startswith("alp/sigma") for name in metrics),
        "weights of correction": metrics["rollout_corr/is_used_mean"],
        "parameters on": where,
        "root device": str(trainer.strategy.root_device),
        "strategy": type(trainer.strategy).__name__,
        "precision": type(trainer.precision_plugin).__name__,
    }


def main(folder: str) -> None:
    torch.set_num_threads(1)
    fake, operators = pretend_npu.install(), fake_torch_npu()
    sys.modules["torch_npu"] = operators  # type: ignore[assignment]
    cpu = iterate(["trainer.accelerator=cpu"], f"{folder}/cpu")
    moved = max(float((a - b).abs().max()) for a, b in zip(cpu[0].values(), start().values(), strict=True))
    results = {name: compare(cpu, iterate(options, f"{folder}/{name}")) for name, options in NPU.items()}
    print(json.dumps({"moved": moved, "runs": results, "calls": fake.calls, "operators": operators.calls}))


def start() -> dict[str, torch.Tensor]:
    """The trained tensors before the iteration."""
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        config = schema.check(hydra.compose("train", ["output_dir=/nowhere", *RUN]))
    module = assemble(config).module
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


if __name__ == "__main__":
    main(sys.argv[1])
