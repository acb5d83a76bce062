"""The work of each rank for test_vllm_servers.py: small trainings on servers in the test's process."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from lightning import Trainer
from torch import nn

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.distributed.strategies import DDPStrategy
from lightning_rlhf.experience import PromptBatch, Rollout, prompt_key
from lightning_rlhf.rollout.vllm_server import VLLMServerEngine
from tests.support import prompts, tiny_module

MAX_NEW_TOKENS = 6
QUICK = {"max_new_tokens": MAX_NEW_TOKENS, "retry_seconds": 0.02, "request_timeout": 20.0}


class Drawn(RLHFCallback):
    """Seeds and prompts of what this rank drew, and the metrics, iteration by iteration."""

    def __init__(self) -> None:
        self.seeds: list[list[int]] = []
        self.versions: list[list[int]] = []
        self.curve: list[dict[str, float]] = []

    def on_rollout_end(self, trainer: Any, module: Any, rollout: Rollout) -> None:
        self.seeds.append(rollout.seed.tolist())
        self.versions.append(rollout.policy_version.unique().tolist())

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.curve.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train_on_servers(rank: int, urls: list[str], engine: dict[str, Any], validate: bool = False) -> dict[str, Any]:
    """A training, with ``validate`` between two evaluations, as the command does it; or the error that ends it."""
    module = tiny_module(iterations=3)
    module.engine = VLLMServerEngine(urls, **({"samples": 2} | QUICK | engine))
    data, drawn = prompts(module, per_iteration=8), Drawn()
    trainer = Trainer(
        accelerator="cpu",
        strategy=DDPStrategy(),
        devices=int(os.environ["WORLD_SIZE"]),
        callbacks=[drawn],
        max_epochs=1,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    held_out: list[Any] = []
    try:
        if validate:
            held_out += trainer.validate(module, datamodule=data, verbose=False)
        trainer.fit(module, datamodule=data)
        if validate:
            held_out += trainer.validate(module, datamodule=data, verbose=False)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "iteration": module.control.iteration}
    finally:
        module.engine.close()
    return {
        "seeds": drawn.seeds,
        "versions": drawn.versions,
        "curve": drawn.curve,
        "held_out": held_out,
        "label": module.engine._label,
        "weights": {name: p.detach().clone() for name, p in module.actor.lm.named_parameters()},
    }


# --- an engine without a training ------------------------------------------------------------------------------------


def small_model(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )


def engine_on(urls: list[str], lm: nn.Module, **settings: Any) -> VLLMServerEngine:
    engine = VLLMServerEngine(urls, **(QUICK | settings))
    engine.setup(lm, SimpleNamespace(eos_token_id=None, pad_token_id=0))
    return engine


def prompts_of(rank: int, number: int = 6) -> PromptBatch:
    ids = [[1, 2 + rank, 3 + i] for i in range(number)]
    texts = [" ".join(map(str, row)) for row in ids]
    return PromptBatch(ids, texts, [prompt_key(text) for text in texts], [{}] * number, [0] * number)


def set_up(rank: int, urls: list[str], settings: dict[str, Any]) -> str:
    """The error of the setup."""
    try:
        engine_on(urls, small_model(), **settings).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def draw_once(rank: int, urls: list[str], settings: dict[str, Any]) -> list[int]:
    """Seeds of 12 rows."""
    engine = engine_on(urls, small_model(), **settings)
    engine.update_weights(1)
    rollout = engine.generate(prompts_of(rank), samples=2, max_new_tokens=MAX_NEW_TOKENS, seed=5)
    torch.distributed.barrier()  # rank 0 has the store
    engine.close()
    return rollout.seed.tolist()


def send_sharded(rank: int, urls: list[str], broken: bool) -> Any:
    """Sends weights that are sharded over the ranks; if ``broken``, rank 0's copy fails after its first tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    lm = small_model()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in lm.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(lm, mesh=mesh)
    engine = engine_on(urls, lm)
    if broken and engine._store is not None:

        def publish(label: str, weights: Any) -> None:
            next(weights)
            raise MemoryError("no room for a copy")

        engine._store.publish = publish  # type: ignore[method-assign]
    try:
        engine.update_weights(1)
    except MemoryError as error:
        return str(error)
    finally:
        engine.close()
    return {name: tensor.detach().clone() for name, tensor in small_model().named_parameters()}
