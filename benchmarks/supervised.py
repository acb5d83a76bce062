"""What does ``lightning-rlhf supervise`` cost an iteration, against ``lightning-rlhf train``?

Both commands train the quickstart's model in turn, in changing order. Compared are the times from the start of an
iteration to the start of the next one, so that everything in between counts: the heartbeat, and whatever the
supervisor takes from the same cores.

    python -m benchmarks.supervised                         # five rounds of 30 iterations
    python -m benchmarks.supervised --rounds 3 --threads 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning_rlhf.callbacks import RLHFCallback

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("train", "supervise")


class Clock(RLHFCallback):
    """Writes down when each iteration begins.

    Args:
        file: gets the times, in s, at the end of the training.
    """

    def __init__(self, file: str) -> None:
        self.file, self.times = Path(file), []  # type: tuple[Path, list[float]]

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.file.write_text(json.dumps(self.times), encoding="utf-8")


def iterations(command: str, count: int, threads: int, folder: Path) -> list[float]:
    """Seconds of each iteration but the first two, which hold set-up."""
    file = folder / "times.json"
    words = [f"iterations={count}", f"threads={threads}", "logger=csv", "data.validation=null"]
    words += [
        "callbacks=default",
        "callbacks.checkpoint=null",
        "trainer.enable_progress_bar=false",
        f"hydra.run.dir={folder}/run",
    ]
    words += [f"+callbacks.clock={{_target_: benchmarks.supervised.Clock, file: {file}}}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    line = [sys.executable, "-m", "lightning_rlhf.cli", command, *words]
    subprocess.run(line, env=environment, cwd=folder, check=True, capture_output=True)
    times = json.loads(file.read_text(encoding="utf-8"))
    return [after - before for before, after in itertools.pairwise(times[2:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    ratios, found = [], {command: [] for command in COMMANDS}  # type: tuple[list[float], dict[str, list[float]]]
    for number in range(arguments.rounds):
        for command in COMMANDS if number % 2 == 0 else reversed(COMMANDS):
            with tempfile.TemporaryDirectory() as name:
                times = iterations(command, arguments.iterations, arguments.threads, Path(name))
            found[command].append(statistics.median(times))
        ratios.append(found["supervise"][-1] / found["train"][-1])
        shown = ", ".join(f"{command} {times[-1] * 1000:.1f} ms" for command, times in found.items())
        print(f"round {number + 1}: {shown}, ratio {ratios[-1]:.3f}", flush=True)
    print(f"supervised / plain, median of the rounds: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
