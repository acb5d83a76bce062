"""vLLM in the training process against the embedded engine: generation, and the cost of sending the weights.

    python -m benchmarks.rollout                    # SmolLM2-135M; 32 prompts of 64 tokens, 64 new
    python -m benchmarks.rollout --model tiny       # hidden 128, 4 layers: seconds
    python -m benchmarks.rollout --dtype bfloat16   # vLLM in bfloat16, the trainer in float32

Both engines sample exactly ``--new-tokens`` tokens for each prompt from the same weights, in turn, in one process.
Medians of wall-clock seconds after a warm-up round. Then the transfer of all weights is timed, alone and as a share
of whole PPO iterations (shared critic, one epoch, two minibatches) with vLLM as engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, Trainer

from benchmarks.iteration import FixedPrompts, Shape, even_ids, fit, load
from lightning_rlhf.experience import PromptBatch
from lightning_rlhf.models import build_policy
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import CompositeReward
from lightning_rlhf.rollout import HFEngine, VLLMEngine


class Times(Callback):
    """The seconds that the module measured in each iteration."""

    def __init__(self) -> None:
        self.weights: list[float] = []
        self.iteration: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.weights.append(float(trainer.callback_metrics["time/weights"]))
        self.iteration.append(float(trainer.callback_metrics["time/iteration"]))


def seconds(call: Callable[..., object], *args: Any, **kwargs: Any) -> float:
    start = time.perf_counter()
    call(*args, **kwargs)
    return time.perf_counter() - start


def generation(engines: dict[str, Any], prompts: PromptBatch, new: int, repeats: int) -> None:
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            taken[name].append(seconds(engine.generate, prompts, samples=1, max_new_tokens=new, seed=repeat))
    medians = {name: statistics.median(values[1:]) for name, values in taken.items()}
    for name, median in medians.items():
        spread = f"{min(taken[name][1:]):.2f} to {max(taken[name][1:]):.2f}"
        print(f"{name:5}{median:8.2f} s ({spread})  {len(prompts) * new / median:8.0f} tokens/s", flush=True)
    print(f"vllm is {medians['hf'] / medians['vllm']:.2f} times as fast as hf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=2, help="PPO iterations after one that warms up; 0: none")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model)
    policy = build_policy(loaded, critic="shared")
    vllm = VLLMEngine(max_new_tokens=args.new_tokens, ignore_eos=True, dtype=args.dtype)
    engines: dict[str, Any] = {"hf": HFEngine(max_new_tokens=args.new_tokens, ignore_eos=True), "vllm": vllm}
    for name, engine in engines.items():
        print(f"{name} ready after {seconds(engine.setup, loaded.lm, loaded.tokenizer):.1f} s")
    shape = Shape(args.prompts, args.prompt_tokens, args.new_tokens, epochs=1, minibatches=2)
    data = FixedPrompts(shape, loaded.lm.config.vocab_size, args.iterations + 1)
    print(f"{args.prompts} prompts of {args.prompt_tokens} tokens, {args.new_tokens} new, {args.threads} threads")
    generation(engines, data.batches[0], args.new_tokens, args.repeats)
    sent = statistics.median(seconds(vllm.update_weights, 0) for _ in range(args.repeats))
    print(f"all weights sent in {1000 * sent:.0f} ms (vllm: {vllm.describe()['dtype']})", flush=True)
    if args.iterations:
        module = PPOModule(
            policy,
            vllm,
            CompositeReward({"even": {"reward": even_ids}}),
            iterations=args.iterations + 1,
            update={"epochs": 1, "minibatch_size": args.prompts // 2, "micro_batch_tokens": 8192},
        )
        times = Times()
        fit(module, data, times)
        weights, whole = statistics.median(times.weights[1:]), statistics.median(times.iteration[1:])
        print(f"iteration {whole:.1f} s, of which the weights {1000 * weights:.0f} ms: {weights / whole:.2%}")
    vllm.close()


if __name__ == "__main__":
    main()
