"""One process per device: started here through PyTorch's elastic agent, or from outside by torchrun, SLURM or MPI.

The processes read the checked configuration from a file, so they agree on it and on the output folder; relative paths
start at the folder of the command in all of them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_rlhf.distributed import first_fault
from lightning_rlhf.distributed.orphans import ends_with_parent
from lightning_rlhf.distributed.processes import is_first
from lightning_rlhf.files import as_file, write_whole
from lightning_rlhf.interruption import REQUEST, REQUEST_VARIABLE, Interrupted, passed_on
from lightning_rlhf.reporting.mlflow_logger import end_as_failed
from lightning_rlhf.runs.ending import RunFailed, how_to_go_on, report_of_process, told
from lightning_rlhf.runs.folder import trained_here
from lightning_rlhf.schema import InputError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

LAUNCHER_VARIABLE = "LIGHTNING_RLHF_LAUNCHER"
"""Environment variable with this process's number, for the processes that it starts."""

FILE = "launch.json"
"""In the output folder: the configuration that the processes of a run read."""

RESULT = "metrics.json"
"""In the output folder: the last value of every metric, from the first process."""

INVALID = 2
"""Exit code of a process that has refused its input."""

INTERRUPTED = "interrupted"
"""The only key of that file where a signal has ended the run: its number."""


def started_outside() -> bool:
    """Whether another launcher has started one process per device and set their ranks."""
    outside = (TorchElasticEnvironment, LSFEnvironment, MPIEnvironment)
    return _several_slurm_tasks() or any(environment.detect() for environment in outside)


def _several_slurm_tasks() -> bool:
    """Whether SLURM has started several tasks; a single task starts its processes as any other command does."""
    return SLURMEnvironment.detect() and int(os.environ["SLURM_NTASKS"]) > 1


def local_devices(config: Mapping[str, Any]) -> int:
    """Devices of this machine that the configuration asks for.

    Raises:
        InputError: it asks for all devices of an unknown accelerator.
    """
    trainer = config["trainer"]
    devices = trainer.get("devices", 1)
    if isinstance(devices, list):
        return len(devices)
    if devices not in ("auto", -1, "-1"):
        return int(devices)
    import torch

    name = trainer.get("accelerator", "auto")
    if name in ("auto", "gpu"):
        found = torch.accelerator.current_accelerator()
        name = "cpu" if found is None else str(found.type)
    if name not in AcceleratorRegistry:
        raise InputError(f"trainer.devices = {devices!r} is not allowed with trainer.accelerator = {name!r}: a number")
    return int(AcceleratorRegistry.get(name).auto_device_count())


def start(config: Mapping[str, Any], processes: int) -> dict[str, float]:
    """Run ``train`` in that many processes and wait for them.

    The agent ends all of them when one ends early, and they end by themselves when this process does.

    Args:
        config: plain containers, as :func:`lightning_rlhf.schema.check` returns them.
        processes: on this machine.

    Returns:
        What the first process returned.

    Raises:
        InputError: a process refused its input; it has printed why.
        RunFailed: a process failed; it has printed why.
        Interrupted: SIGINT, SIGTERM, SIGHUP, SIGUSR1; the processes have ended between two iterations, or at once
            after a second one.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    file = hand_over(config)
    folder = file.parent
    as_file(folder / RESULT).unlink(missing_ok=True)
    first_fault.forget(folder)
    environment = {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # each process would take all cores otherwise
        REQUEST_VARIABLE: str(folder / REQUEST),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    quiet = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    before, level = dict(os.environ), quiet.level
    os.environ.update(environment)
    quiet.setLevel(logging.CRITICAL)  # the error below reports the failure
    try:
        with TemporaryDirectory(prefix="elastic_") as logs, told(config, speaks=True), passed_on(folder) as stop:
            elastic_launch(_agent(processes, logs), sys.executable)("-m", __name__, str(file))
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        how = f"signal {-first.exitcode}" if first.exitcode < 0 else f"exit code {first.exitcode}"
        if stop.received:
            raise Interrupted(stop.received, told=True) from failure
        reason = f"process {rank} of {processes} ended with {how}, and the others were ended with it"
        fault = first_fault.read(folder, any_start=True)
        if first.exitcode == -signal.SIGABRT and fault is None:  # NCCL's watchdog cannot raise an error
            limit = config["trainer"]["strategy"].get("timeout_seconds")
            reason += f" (NCCL ends so one that has waited longer than {first_fault.TIMEOUT_KEY} = {limit} s)"
        # If a process was killed, the others report only a lost connection.
        cause = reason if fault is None else f"process {fault[0]}: {fault[1]}"
        end_as_failed(folder, cause, is_cause=first.exitcode < 0 or fault is not None)
        said = f"training has ended: {reason}. What it said is above"
        refused = first.exitcode == INVALID
        raise (InputError if refused else RunFailed)("\n".join([said, *how_to_go_on(config)])) from failure
    finally:
        quiet.setLevel(level)
        for name in environment:
            os.environ.pop(name)
        os.environ |= {name: before[name] for name in environment if name in before}
    return _result(config, folder)


def _result(config: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """What the first process has written, once all have ended with exit code 0."""
    if not (folder / RESULT).exists():  # some code has called os._exit(0)
        reason = "process 0 ended with exit code 0 in the middle of the training"
        end_as_failed(folder, reason)
        raise RunFailed("\n".join([f"training has ended: {reason}", *how_to_go_on(config)]))
    result: dict[str, float] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    if INTERRUPTED in result:
        raise Interrupted(int(result[INTERRUPTED]), told=True)
    return result


def _agent(processes: int, logs: str) -> LaunchConfig:
    """Settings of PyTorch's elastic agent, which ends the processes of a run together and never restarts them.

    Args:
        processes: to be started.
        logs: folder for its files, which it would otherwise leave in the system's temporary folder.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
        shutdown_timeout=10,  # until the others are killed, after a failure or a second signal
        signals_to_handle="SIGQUIT",  # on other signals the agent would kill the processes after that time
    )


def hand_over(config: Mapping[str, Any]) -> Path:
    """Write the file that the processes of a run read."""
    file = Path(config["output_dir"]).absolute() / FILE
    write_whole(file, json.dumps(config, indent=1))
    return file


def main(file: str) -> int:
    """One process of a run: ``python -m lightning_rlhf.distributed.launch FILE``, with RANK set by a launcher."""
    import torch
    from omegaconf import OmegaConf

    from lightning_rlhf.quiet import quiet
    from lightning_rlhf.run import run
    from lightning_rlhf.schema import check

    logging.basicConfig(format="%(message)s", level=logging.INFO if is_first() else logging.WARNING)
    logging.getLogger("lightning").handlers.clear()
    folder, launcher = Path(file).parent, int(os.environ.pop(LAUNCHER_VARIABLE, os.getppid()))
    try:
        with ends_with_parent(launcher), trained_here(folder, first=is_first()), quiet():
            metrics = run(check(OmegaConf.create(json.loads(Path(file).read_text(encoding="utf-8")))))
    except InputError as error:
        print(f"process {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        return INVALID
    except Interrupted as stop:
        if not stop.on_every_rank:
            return 128 + stop.signum
        metrics = {INTERRUPTED: stop.signum}
    except Exception as error:
        report_of_process(f"process {os.environ['RANK']}", error, folder)
        return 1
    if is_first():
        write_whole(folder / RESULT, json.dumps(metrics))
    torch.distributed.destroy_process_group()
    return 0


def shared_name() -> str | None:
    """Common folder name of processes started by another launcher; ``None`` if the folder may be named by the time.

    Each of them composes the configuration at a different time, which would give each another folder.

    Raises:
        InputError: they have no name in common.
    """
    if _several_slurm_tasks():
        step = os.environ.get("SLURM_STEP_ID", "0")  # a second srun of the job is another run
        return f"slurm-{os.environ['SLURM_JOB_ID']}" + (f"-{step}" if step != "0" else "")
    if TorchElasticEnvironment.detect():
        name = os.environ["TORCHELASTIC_RUN_ID"]
        if name == "none":
            raise InputError(
                "torchrun has no name: give it --rdzv-id=NAME or --standalone, or set hydra.run.dir=FOLDER"
            )
        return f"torchrun-{name}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
