"""Cost of noise on the hidden states: one update of the actor with noise against one without.

An update is forward, backward and optimiser step on one minibatch of full rows, without a critic, which would make the
share of the noise smaller. Updates with and without noise alternate on the same model in one process; the median of
the ratios of neighbouring updates is printed. Memory: each version runs in its own process; the peak is that
of the device, or on a CPU the largest resident memory.

    python -m benchmarks.alp smollm2            # SmolLM2-135M, float32; 8 rows of 64 + 64 tokens
    python -m benchmarks.alp smollm2 --device cuda --precision bf16
    python -m benchmarks.alp tiny               # a few seconds; the share of the noise is larger in a small model
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.iteration import load
from benchmarks.logprobs import peak_bytes
from lightning_rlhf.models import Actor, disable_dropout
from lightning_rlhf.models.perturbation import Perturbation

ROWS, PROMPT, RESPONSE = 8, 64, 64
LIMITS = {"layer": (1.03, 1.02), "channel": (1.10, 1.05)}
"""Allowed ratio of time and of peak memory."""


class Update:
    """An actor with optional noise, its optimiser and a fixed minibatch."""

    def __init__(self, workload: str, granularity: Any, device: str, precision: str) -> None:
        lm: Any = load(workload).lm
        lm = lm.to(device).train()
        disable_dropout(lm)
        self.actor, self.device, self.precision = Actor(lm), device, precision
        self.perturbation = Perturbation(lm, granularity=granularity)
        parameters = [*self.actor.parameters(), self.perturbation.log_sigma]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(10, lm.config.vocab_size, (ROWS, PROMPT + RESPONSE), generator=generator).to(device)
        self.mask = torch.ones_like(self.ids, dtype=torch.bool)
        self.steps = 0

    def run(self, *, noisy: bool) -> float:
        """Seconds of one update."""
        self.steps += 1
        start = time.perf_counter()
        noise = self.perturbation.noise(step=self.steps, part=0) if noisy else contextlib.nullcontext()
        low = torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")
        with noise, low:
            loss = self.actor(self.ids, self.mask, RESPONSE).logprobs.mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start


def peak(workload: str, granularity: str, device: str, precision: str, threads: int, noisy: bool) -> float:
    """Peak memory in MB of three updates; to be called in a fresh process."""
    torch.set_num_threads(threads)
    update = Update(workload, granularity, device, precision)
    for _ in range(3):
        update.run(noisy=noisy)
    return (peak_bytes() if device == "cpu" else torch.accelerator.max_memory_allocated()) / 1e6


def measure_peak(*arguments: Any) -> float:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(peak, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["tiny", "smollm2"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    place = (arguments.workload, arguments.device, arguments.precision)
    for granularity, (time_limit, memory_limit) in LIMITS.items():
        peaks = [measure_peak(place[0], granularity, *place[1:], arguments.threads, noisy) for noisy in (False, True)]
        update = Update(place[0], granularity, *place[1:])
        for noisy in (False, True):
            update.run(noisy=noisy)
        pairs = []
        for index in range(arguments.repeats):
            # The order alternates, so that neither version gains from the other's caches.
            order = (False, True) if index % 2 else (True, False)
            seconds = {noisy: update.run(noisy=noisy) for noisy in order}
            pairs.append((seconds[False], seconds[True]))
        ratios = sorted(noisy / plain for plain, noisy in pairs)
        plain, noisy = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio, grown = statistics.median(ratios), peaks[1] / peaks[0]
        print(f"{granularity}: {plain:.3f} s without, {noisy:.3f} s with; ratio {ratio:.3f} (limit {time_limit})")
        print(f"  ratios: {', '.join(f'{value:.3f}' for value in ratios)}")
        print(f"  peak {peaks[0]:.0f} MB without, {peaks[1]:.0f} MB with; ratio {grown:.3f} (limit {memory_limit})")


if __name__ == "__main__":
    main()
