"""Log-probability and entropy of tokens, forward and backward: chunked against straightforward.

    python benchmarks/logprobs.py

Both versions get the same hidden states and output embedding. Time: the versions alternate, and the table shows
medians of wall-clock seconds and their ratio. Memory: each version runs once in its own process; "extra" is the rise
of that process's peak resident memory (``ru_maxrss``) during the run, minus the results and the gradients
of hidden states and embedding. Rows: log-probability alone, with the entropy as a metric, with the entropy's gradient.
The target ratios apply to the default sizes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlhf.functional.logprobs import DEFAULT_CHUNK_SIZE, EntropyMode, token_logprobs

MODES: tuple[EntropyMode, ...] = ("none", "detached", "gradient")
TIME_LIMIT = {"none": 1.45, "detached": 1.45, "gradient": 1.2}
MEMORY_LIMIT = 0.1


@dataclass(frozen=True)
class Sizes:
    """Sizes of the problem: ``batch x length`` tokens."""

    batch: int
    length: int
    vocab: int
    hidden: int
    threads: int
    chunk_size: int
    dtype: str

    @property
    def tokens(self) -> int:
        return self.batch * self.length


def straightforward(
    hidden: Tensor, weight: Tensor, labels: Tensor, mode: EntropyMode, chunk_size: int
) -> tuple[Tensor, Tensor | None]:
    """All logits at once; the softmax in float32. ``chunk_size`` has no meaning here."""
    logprobs = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    entropy = None
    if mode != "none":
        with torch.set_grad_enabled(mode == "gradient"):
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], entropy


def chunked(
    hidden: Tensor, weight: Tensor, labels: Tensor, mode: EntropyMode, chunk_size: int
) -> tuple[Tensor, Tensor | None]:
    """The function of the package."""
    return token_logprobs(hidden, weight, labels, entropy=mode, chunk_size=chunk_size)


VERSIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "straightforward": straightforward,
    "chunked": chunked,
}


def make_inputs(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, embedding and labels; the logits have a standard deviation of about 1.

    Made without temporary copies: memory freed before the run would hide memory that the run allocates.
    """
    torch.manual_seed(0)
    dtype = getattr(torch, sizes.dtype)
    hidden = torch.randn(sizes.tokens, sizes.hidden, dtype=dtype)
    weight = torch.randn(sizes.vocab, sizes.hidden, dtype=dtype).mul_(sizes.hidden**-0.5)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(sizes.vocab, (sizes.tokens,))


def run(version: str, mode: EntropyMode, inputs: tuple[Tensor, Tensor, Tensor], sizes: Sizes) -> list[Tensor]:
    """One forward and backward pass; returns results and gradients."""
    hidden, weight, labels = inputs
    logprobs, entropy = VERSIONS[version](hidden, weight, labels, mode, sizes.chunk_size)
    loss = logprobs.mean()
    if mode == "gradient" and entropy is not None:
        loss = loss + 0.01 * entropy.mean()
    results = [logprobs] if entropy is None else [logprobs, entropy]
    return [*results, *torch.autograd.grad(loss, (hidden, weight))]


def peak_bytes() -> int:
    """The largest resident memory this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def extra_memory(version: str, mode: EntropyMode, sizes: Sizes) -> float:
    """Extra peak memory in MB; to be called in a fresh process."""
    torch.set_num_threads(sizes.threads)
    tiny = Sizes(1, 64, 256, sizes.hidden, sizes.threads, sizes.chunk_size, sizes.dtype)
    run(version, mode, make_inputs(tiny), tiny)  # libraries set up their own memory at the first call
    inputs = make_inputs(sizes)
    before = peak_bytes()
    kept = run(version, mode, inputs, sizes)
    return (peak_bytes() - before - sum(tensor.nbytes for tensor in kept)) / 1e6


def measure_memory(sizes: Sizes) -> dict[tuple[str, str], float]:
    """Extra peak memory of every version and mode."""
    context = multiprocessing.get_context("spawn")
    results: dict[tuple[str, str], float] = {}
    for mode in MODES:
        for version in VERSIONS:
            with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
                results[version, mode] = pool.submit(extra_memory, version, mode, sizes).result()
    return results


def measure_time(sizes: Sizes, repetitions: int) -> dict[tuple[str, str], float]:
    """Median seconds of every version and mode; the versions alternate, after one warm-up run each."""
    torch.set_num_threads(sizes.threads)
    inputs = make_inputs(sizes)
    results: dict[tuple[str, str], float] = {}
    for mode in MODES:
        seconds: dict[str, list[float]] = {version: [] for version in VERSIONS}
        for _ in range(repetitions + 1):
            for version, times in seconds.items():
                start = time.perf_counter()
                run(version, mode, inputs, sizes)
                times.append(time.perf_counter() - start)
        for version, times in seconds.items():
            results[version, mode] = statistics.median(times[1:])
    return results


def print_table(title: str, unit: str, results: dict[tuple[str, str], float], limits: dict[str, float]) -> None:
    """One row per mode: both versions, their ratio, and the target ratio."""
    print(f"\n{title:<28}{'straightforward':>18}{'chunked':>12}{'ratio':>10}{'aim':>10}")
    for mode in MODES:
        plain, ours = results["straightforward", mode], results["chunked", mode]
        aim = f"<= {limits[mode]:g}"
        print(f"entropy {mode:<20}{plain:>15.2f} {unit:<2}{ours:>9.2f} {unit:<2}{ours / plain:>10.3f}{aim:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk-size", type=int, default=DEFAULT_CHUNK_SIZE)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = vars(parser.parse_args())
    repetitions = arguments.pop("repetitions")
    sizes = Sizes(**arguments)
    print(sizes)
    # Memory first: on Linux a child's ru_maxrss starts at that of its parent, which must still be small.
    print_table("extra peak memory", "MB", measure_memory(sizes), dict.fromkeys(MODES, MEMORY_LIMIT))
    print_table(f"time, median of {repetitions}", "s", measure_time(sizes, repetitions), TIME_LIMIT)


if __name__ == "__main__":
    main()
