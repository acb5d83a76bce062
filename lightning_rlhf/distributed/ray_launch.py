"""Workers of Ray Train (``trainer=ray``): placed and watched by Ray, started again from the newest whole checkpoint.

A worker reads the checked configuration from a file in the output folder, which all machines must see: checkpoints are
written there, too. Ray itself sees neither checkpoints nor metrics.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_rlhf.checkpoint import latest_valid
from lightning_rlhf.distributed import launch
from lightning_rlhf.distributed.parallel import gather_objects
from lightning_rlhf.distributed.ray_settings import DEVICES, RaySettings
from lightning_rlhf.interruption import REQUEST, REQUEST_VARIABLE, Interrupted, passed_on
from lightning_rlhf.quiet import log_once, quiet, quiet_ray
from lightning_rlhf.reporting import tracked as of_earlier
from lightning_rlhf.reporting.mlflow_logger import end_as_failed
from lightning_rlhf.runs.ending import RunFailed, how_to_go_on, report_of_process, told
from lightning_rlhf.schema import InputError, check
from lightning_rlhf.settings import build
from lightning_rlhf.supervise.classify import USER_CODE
from lightning_rlhf.supervise.ending import kind_of
from lightning_rlhf.threads import waiting

try:
    import ray
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    from lightning_rlhf.distributed.ray_watch import NotAgain, Refused, Watch, failures
except ImportError as error:
    raise ImportError(f'needs Ray Train: pip install "lightning-rlhf[ray]" ({error})') from error

log = logging.getLogger(__name__)


# --- in the command's process ----------------------------------------------------------------------------------------


def start(config: Mapping[str, Any]) -> dict[str, float]:
    """Run the training in workers of Ray Train and wait for them.

    Args:
        config: plain containers, as :func:`lightning_rlhf.schema.check` returns them.

    Returns:
        What the first worker returned.

    Raises:
        InputError: there is no such cluster, it lacks the resources, or the configuration cannot work.
        RunFailed: workers failed more often than ``trainer.ray.max_failures``.
        Interrupted: SIGINT, SIGTERM, SIGHUP, SIGUSR1; the workers have ended between two iterations, or at once after a
            second one.
    """
    settings = build(RaySettings, "trainer.ray", config["trainer"]["ray"])
    folder = Path(config["output_dir"]).absolute()
    file = launch.hand_over(config)
    scaling = scaling_of(settings, config["trainer"]["accelerator"])
    with connected(settings) as started_here, told(config, speaks=True), passed_on(folder) as stop:
        check_resources(scaling, may_grow=not started_here)
        trainer = _Trainer(
            work,
            train_loop_config={"file": str(file), "folder": os.getcwd(), "before": _own_files(folder)},
            torch_config=process_group_of(config["trainer"]),
            scaling_config=scaling,
            run_config=RunConfig(
                name="ray",
                storage_path=str(folder),
                failure_config=FailureConfig(max_failures=settings.max_failures),
                callbacks=[Watch(settings.max_failures)],
                worker_runtime_env=of_processes(),
                logging_config=LoggingConfig("WARNING"),
            ),
        )
        try:
            result = dict(trainer.fit().return_value)
        except TrainingFailedError as failure:
            if stop.received:
                raise Interrupted(stop.received) from failure
            refusal = getattr(failure, "controller_failure", None)
            if isinstance(refusal, Refused):
                raise InputError(str(refusal)) from failure
            reason = _why_it_ended(failure)
            end_as_failed(folder, reason)
            raise RunFailed("\n".join([reason, *how_to_go_on(config)])) from failure
        if launch.INTERRUPTED in result:
            raise Interrupted(int(result[launch.INTERRUPTED]), told=True)
        return result


class _Trainer(TorchTrainer):
    """Without Ray's SIGINT handler, which aborts the run; here a second signal does, by closing the connection."""

    def _register_sigint_handler(self, controller: Any) -> None:
        pass


def scaling_of(settings: RaySettings, accelerator: str) -> ScalingConfig:
    """Workers, and the resources that each reserves."""
    device, _ = DEVICES[accelerator]
    resources = {"CPU": 1, **device, **(settings.resources_per_worker or {})}
    return ScalingConfig(num_workers=settings.workers, use_gpu="GPU" in resources, resources_per_worker=resources)


def process_group_of(trainer: Mapping[str, Any]) -> TorchConfig:
    """The process group, which Ray opens and the strategy finds."""
    strategy, (_, backend) = trainer["strategy"], DEVICES[trainer["accelerator"]]
    timeout = strategy.get("timeout_seconds", 1800)
    return TorchConfig(backend=strategy.get("process_group_backend") or backend, timeout_s=timeout)


def of_processes() -> dict[str, Any]:
    """Runtime environment of all Ray processes: they import the same modules as this process."""
    variables = {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else printed lines appear twice, as they go to a log, too
        **waiting(),
    }
    return {"env_vars": variables, "worker_process_setup_hook": f"{quiet_ray.__module__}.quiet_ray"}


@contextmanager
def connected(settings: RaySettings) -> Iterator[bool]:
    """Connect to a cluster, or start Ray on this machine for this context; yields whether Ray was started here.

    Raises:
        InputError: there is no such cluster, or it refuses the arguments.
    """
    if ray.is_initialized():  # by the program that called us; it is left as it is
        yield False
        return
    address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
    arguments: Mapping[str, Any] = (settings.init or {}) if address == "local" else {}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns of the old choice at every start
    processes = of_processes()
    if address == "local":  # this machine is not preempted while the command runs
        processes["env_vars"]["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    # Ray leaves its handler installed, and Lightning, which saves at SIGTERM, does not replace an existing one.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, logging_level=logging.ERROR, runtime_env=processes, **arguments)
    except (ConnectionError, ValueError, RuntimeError, TypeError) as error:
        key = "trainer.ray.init" if address == "local" else "trainer.ray.address"
        raise InputError(f"{key}: Ray cannot be reached at {address!r}: {error}") from error
    try:
        yield address == "local"
    finally:
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def check_resources(scaling: ScalingConfig, *, may_grow: bool) -> None:
    """Refuse more than this machine has; only warn for a cluster, which other machines may still join.

    Raises:
        InputError: the workers reserve more than there will ever be.
    """
    there = ray.cluster_resources()
    needed = {name: need for name, need in scaling.total_resources.items() if need > there.get(name, 0)}
    if not needed:
        return
    missing = ", ".join(f"{need:g} {name} where there is {there.get(name, 0):g}" for name, need in needed.items())
    if not may_grow:
        raise InputError(
            f"trainer.ray.workers = {scaling.num_workers} is not allowed: the workers reserve {missing}; fewer "
            "workers, less in trainer.ray.resources_per_worker, or +trainer.ray.init.num_cpus=N to let them share CPUs"
        )
    log.warning("the workers reserve %s: they wait until machines join", missing)


def _why_it_ended(failure: TrainingFailedError) -> str:
    own = getattr(failure, "controller_failure", None)
    if isinstance(own, NotAgain):
        return f"training has ended, and is not started again, as the error is one of your own code:\n{own}"
    workers = getattr(failure, "worker_failures", None)
    reasons = failures(workers) if workers else [f"Ray could not run the workers: {failure}"]
    return "\n".join(["training has ended, and Ray does not start it again (trainer.ray.max_failures):", *reasons])


# --- in a worker -----------------------------------------------------------------------------------------------------


def work(task: Mapping[str, Any]) -> dict[str, float]:
    """The training in one worker.

    Args:
        task: ``file`` with the configuration, ``folder`` to work in, ``before``: what :func:`_own_files` found before
            the first start.

    Raises:
        Refused: the configuration cannot work, here or on any machine.
        NotAgain: code of the user's own failed; the traceback has been printed.
        RuntimeError: training failed otherwise; the traceback has been printed.
    """
    rank = int(os.environ["RANK"])
    for path in (task["folder"], task["file"]):
        if not os.path.exists(path):
            raise Refused(
                f"there is no {path} on the machine {socket.gethostname()}: the folder of the command and output_dir "
                "must be folders that all machines see under the same path"
            )
    os.chdir(task["folder"])
    os.environ[REQUEST_VARIABLE] = str(Path(task["file"]).with_name(REQUEST))
    logging.getLogger().setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("ray.train.v2._internal.util").setLevel(logging.CRITICAL)  # the traceback is printed below
    log_once()
    from lightning_rlhf.run import run

    try:
        with quiet():
            config = OmegaConf.create(Path(task["file"]).read_text(encoding="utf-8"))
            return run(_continued(check(config), task["before"]))  # type: ignore[arg-type]
    except Interrupted as stop:  # not a failure, after which Ray would restart all
        return {launch.INTERRUPTED: stop.signum}
    except InputError as error:
        raise Refused(f"worker {rank} on {socket.gethostname()}: {error}") from None
    except Exception as error:
        report_of_process(f"worker {rank} on {socket.gethostname()}", error, Path(task["file"]).parent)
        # As plain text: not every error can be sent, and the receiver may lack its class.
        sent = NotAgain if kind_of(error) == USER_CODE else RuntimeError
        raise sent(f"{type(error).__name__}: {error}") from None


def _continued(config: dict[str, Any], before: Mapping[str, int]) -> dict[str, Any]:
    """The configuration of this start: after a failure it resumes from files of earlier starts.

    Files in the folder ``before`` the first start are not theirs; ``resume`` alone decides about those.
    """
    folder = Path(config["output_dir"]).absolute()
    now = _own_files(folder)
    new = {path for path, written in now.items() if before.get(path) != written}
    newest = latest_valid(folder / "checkpoints")
    checkpoint = str(newest) if str(newest) in new else None
    checkpoint, tracked = gather_objects((checkpoint, str(folder / RUN_RECORD) in new))[0]  # rank 0 decides for all
    if checkpoint is not None:
        config["resume"] = checkpoint
    if tracked:
        config["logger"] = of_earlier(config.get("logger"), resume_from=str(folder))
    return config


RUN_RECORD = "tracking/run.json"


def _own_files(folder: Path) -> dict[str, int]:
    """Times of writing, in ns, of the checkpoints and of the record of the tracked run."""
    files = [*(folder / "checkpoints").glob("*.ckpt"), folder / RUN_RECORD]
    return {str(file): file.stat().st_mtime_ns for file in files if file.exists()}
