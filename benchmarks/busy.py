"""How much slower is the quickstart beside a busy core, and what does passive waiting cost on idle cores?

Each round runs the same short training four times, in changing order: with OpenMP threads that sleep while
they wait (as the command line sets it) and that spin, on idle cores and beside one endless Python loop. The
ratios of the medians are printed. It needs an otherwise idle machine.

    python -m benchmarks.busy                         # three rounds of 12 iterations
    python -m benchmarks.busy --rounds 5 --threads 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAITING = {
    "passive": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"},
    "spinning": {"OMP_WAIT_POLICY": "active"},
}


def seconds(iterations: int, threads: int, waiting: str, folder: Path) -> float:
    """Seconds of all iterations but the first, as the run logs them."""
    environment = os.environ | WAITING[waiting] | {"OMP_NUM_THREADS": str(threads)}
    if waiting == "spinning":
        environment = {k: v for k, v in environment.items() if k not in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    run = folder / f"{time.monotonic_ns()}"
    command = [sys.executable, "-m", "lightning_rlhf.cli", "train", f"iterations={iterations}", f"threads={threads}"]
    command += ["logger=csv", "callbacks=none", "trainer.enable_progress_bar=false", f"hydra.run.dir={run}"]
    subprocess.run([*command, "data.validation=null"], env=environment, check=True, capture_output=True)
    [path] = run.rglob("metrics.csv")
    lines = path.read_text(encoding="utf-8").splitlines()
    column = lines[0].split(",").index("time/iteration")
    times = [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]
    return sum(times[1:])  # the first iteration includes set-up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for number in range(arguments.rounds):
            cells = [(waiting, beside) for waiting in WAITING for beside in ("quiet", "busy")]
            for waiting, beside in cells if number % 2 == 0 else reversed(cells):
                loop = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if beside == "busy" else None
                try:
                    taken = seconds(arguments.iterations, arguments.threads, waiting, Path(name))
                finally:
                    if loop is not None:
                        loop.kill()
                        loop.wait()
                found.setdefault((waiting, beside), []).append(taken)
                print(f"round {number + 1}  {waiting:<8}  {beside:<5}  {taken:.1f} s", flush=True)
    median = {cell: statistics.median(times) for cell, times in found.items()}
    for waiting in WAITING:
        print(f"{waiting}: busy / quiet = {median[waiting, 'busy'] / median[waiting, 'quiet']:.2f}")
    print(f"quiet: passive / spinning = {median['passive', 'quiet'] / median['spinning', 'quiet']:.2f}")


if __name__ == "__main__":
    main()
