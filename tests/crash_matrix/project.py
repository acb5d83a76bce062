"""A user's folder in which the runs of the crash matrix take place, and the runs themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_rlhf.reporting import RLMLFlowLogger, send_spooled
from tests.crash_matrix.cases import ITERATIONS, REFERENCES, Case
from tests.crash_matrix.faults import BEGAN, DISK, PLAN, SERVER, STRUCK, rows
from tests.overrides import OWN_PROMPTS, SMALL_MODEL
from tests.reporting.test_mlflow_logger import Server

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 1500.0
"""Seconds after which a supervised run counts as hanging."""

WORDS = (
    *SMALL_MODEL,
    *OWN_PROMPTS,
    f"iterations={ITERATIONS}",
    "data.prompts_per_iteration=12",
    "+reward.terms.own={weight: 1, reward: {_target_: tests.crash_matrix.faults.Reward, wrong: null}}",
    "module.update.minibatch_size=6",
    "module.update.epochs=2",
    "callbacks.checkpoint.every_n_iterations=1",
    "callbacks.checkpoint.keep=3",
    "+callbacks.planned._target_=tests.crash_matrix.faults.Planned",
    "trainer.enable_progress_bar=false",
    "logger.mlflow.flush_timeout=120",
)
"""Of every run: the tiny model, iterations far below a second, a checkpoint after each."""
_SUPERVISED = ("supervise.wait=0", "supervise.retries=100")


@dataclass(frozen=True)
class Ran:
    """A run that has ended.

    Attributes:
        project: the user's folder.
        folder: of the run.
        code: exit code; ``None``: it hung.
        seconds: from its start to its end.
        output: what it wrote to stderr.
    """

    project: Path
    folder: Path
    code: int | None
    seconds: float
    output: str


class Project:
    """Makes the folders, and runs there.

    Args:
        work: folder for all of them; removed by the caller.
    """

    def __init__(self, work: Path) -> None:
        self.work = work
        self._references: dict[str, Ran] = {}
        RLMLFlowLogger(work / "store" / "run", store_dir=work / "store")  # its tables take seconds

    def reference(self, name: str) -> Ran:
        """The uninterrupted run of this name, trained at the first call.

        Raises:
            RuntimeError: it failed, so nothing can be compared.
        """
        if name not in self._references:
            project = self._make(f"reference_{len(self._references)}", [])
            ran = _run(["train", *WORDS, *REFERENCES[name], "hydra.run.dir=run"], project, project / "run")
            if ran.code != 0:
                raise RuntimeError(f"the uninterrupted run failed:\n{ran.output[-3000:]}")
            self._references[name] = ran
        return self._references[name]

    def run(self, case: Case, number: int) -> Ran:
        """The supervised run of a case."""
        project = self._make(f"case_{number:02d}", [asdict(fault) for fault in case.faults])
        words, folder = ["supervise", *WORDS, *_SUPERVISED, *case.words], project / "run"
        with _disk(project, case.disk):
            if case.disk and case.on_disk == "run":
                folder = project / DISK / "run"
            elif case.disk:
                words.append(f"callbacks.checkpoint.dirpath={project / DISK}")
            words.append(f"hydra.run.dir={folder}")
            if not case.server:
                return _kept(_run(words, project, folder), project, case)
            shutil.copy(self.work / "store" / "mlflow.db", project / "server.db")
            with _server(project, len(case.faults)) as uri:
                ran = _run([*words, f"logger.mlflow.tracking_uri={uri}"], project, folder)
                server_is_back(uri)
                send_spooled(folder)  # what a run whose server is away at its end says to do
                return ran

    def _make(self, name: str, faults: list[dict]) -> Path:
        project = self.work / name
        (project / "mlflow").mkdir(parents=True)
        (project / "tmp").mkdir()
        shutil.copy(self.work / "store" / "mlflow.db", project / "mlflow" / "mlflow.db")
        lines = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(40)]
        (project / "prompts.jsonl").write_text("\n".join(lines))
        (project / PLAN).write_text(json.dumps(faults))
        return project


def _run(words: Sequence[str], project: Path, folder: Path) -> Ran:
    inherited = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "MLFLOW_TRACKING_URI")
    environment = {key: value for key, value in os.environ.items() if key not in inherited} | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TMPDIR": str(project / "tmp"),
        "LIGHTNING_RLHF_CACHE": str(project / "cache"),
    }
    command, began = [sys.executable, "-m", "lightning_rlhf.cli", *words], time.monotonic()
    with (project / "output").open("w+b") as output:
        process = subprocess.Popen(command, cwd=project, env=environment, stdout=output, stderr=output)
        try:
            code: int | None = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()  # its training ends with it
            process.wait()
            code = None
    text = (project / "output").read_text(errors="replace")
    return Ran(project, folder, code, time.monotonic() - began, text)


# --- a small disk ----------------------------------------------------------------------------------------------------


@contextmanager
def _disk(project: Path, size: int) -> Iterator[None]:
    """A file system in memory of so many MiB; where it cannot be mounted, an ordinary folder."""
    place = project / DISK
    if not size:
        yield
        return
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(place)], check=False)
    try:
        yield
    finally:
        if place.is_mount():
            subprocess.run(["umount", str(place)], check=True)


def mounts() -> bool:
    """Whether a file system can be mounted here."""
    place = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in place.splitlines() if line.startswith("CapEff"))
    return bool(int(effective, 16) >> 21 & 1)  # CAP_SYS_ADMIN


def _kept(ran: Ran, project: Path, case: Case) -> Ran:
    """What lies on the small disk is copied from it, as it is unmounted."""
    if not case.disk:
        return ran
    copy = project / "kept"
    shutil.copytree(project / DISK, copy, ignore=shutil.ignore_patterns("filler"))
    if case.on_disk == "run":
        return Ran(project, copy / "run", ran.code, ran.seconds, ran.output)
    shutil.copytree(copy, ran.folder / "checkpoints")
    return ran


# --- a tracking server -----------------------------------------------------------------------------------------------


def server_is_back(uri: str) -> None:
    """Wait until a server answers.

    Raises:
        TimeoutError: it does not.
    """
    until = time.monotonic() + 300
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{uri}/health", timeout=5).read()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"{uri} does not answer")


@contextmanager
def _server(project: Path, faults: int) -> Iterator[str]:
    """A tracking server that is started again after so many faults, and runs beyond the end of the training."""
    server, ended = Server(project), threading.Event()

    def start() -> None:
        server.start()
        assert server.process is not None
        (project / SERVER).write_text(str(server.process.pid))

    def again() -> None:
        while len(rows(project / STRUCK)) < faults or len(rows(project / BEGAN)) < 2:
            if ended.wait(0.2):
                return
        server.kill()
        start()

    start()
    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield server.uri
    finally:
        ended.set()
        thread.join()
        server.kill()
