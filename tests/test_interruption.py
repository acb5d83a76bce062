"""Ctrl-C and SIGTERM, sent to real processes: the files left, the output, the exit code."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lightning_rlhf.interruption import REQUEST_VARIABLE, Interrupted, Signals, passed_on, signals
from lightning_rlhf.runs.ending import how_to_go_on, resume_command
from tests.overrides import FEW, OWN_PROMPTS

BIN = Path(sys.executable).parent
SECONDS = 900
"""Longest wait of a test; no result depends on elapsed time."""

TINY = [
    *OWN_PROMPTS,
    *FEW,
    "model.source.hidden_size=32",
    "model.source.layers=1",
    "model.source.heads=2",
    "threads=1",
    "callbacks=checkpoint",
]
CALLBACK = '''
import os, time
from pathlib import Path
from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.interruption import signals

class Waits(RLHFCallback):
    """Says that an event is reached, and stays there until a signal has come; not where a file says to go on."""

    def __init__(self, event, iteration, until="noted"):
        self.event, self.iteration, self.until = event, iteration, until

    def on_rollout_start(self, trainer, module, prompts):
        self.at("rollout", module)

    def on_minibatch_end(self, trainer, module, stats):
        self.at("update", module)

    def on_validation_start(self, trainer, module):
        self.at("evaluation", module)

    def at(self, event, module):
        if (event, module.control.iteration) != (self.event, self.iteration) or Path("go_on").exists():
            return
        Path(f"reached_{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
        while self.until == "for ever" or not signals().received:
            time.sleep(0.02)

def warm_up(**arguments):
    Path("reached_0").write_text(str(os.getpid()))
    while True:
        time.sleep(0.02)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    (tmp_path / "mine.py").write_text(CALLBACK, encoding="utf-8")
    return tmp_path


def waits(event: str, iteration: int, until: str = "noted") -> str:
    return f"+callbacks.waits={{_target_: mine.Waits, event: {event}, iteration: {iteration}, until: {until}}}"


def ignore_nothing() -> None:
    """Restore default handlers: a shell makes background jobs, and tests in them, ignore SIGINT, nohup SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Command:
    """A command in a process of its own, in a folder; its output goes to files."""

    def __init__(self, folder: Path, *arguments: str, program: tuple[str, ...] = ("lightning-rlhf",)) -> None:
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "TORCHELASTIC"))}
        for leftover in folder.glob("reached_*"):
            leftover.unlink()
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                [str(BIN / program[0]), *program[1:], *arguments],
                cwd=folder,
                stdout=out,
                stderr=err,
                env=environment | {"OMP_NUM_THREADS": "1"},
                preexec_fn=ignore_nothing,
            )

    def wait_for(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not there():
            assert self.process.poll() is None, f"it has ended\n{self.said}"
            assert time.monotonic() < deadline, f"still not there\n{self.said}"
            time.sleep(0.02)

    def reached(self, ranks: int = 1) -> None:
        files = [self.folder / f"reached_{rank}" for rank in range(ranks)]
        self.wait_for(lambda: all(file.exists() and file.read_text() for file in files))

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> int:
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end\n{self.said}") from None
        finally:
            self.process.kill()

    @property
    def said(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()


def train(folder: Path, *arguments: str) -> Command:
    return Command(folder, "train", "hydra.run.dir=run", "iterations=5", *TINY, *arguments)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.stem[-6:]) for path in folder.glob("*.ckpt"))


def status(folder: Path) -> str:
    """Status of the only tracked run."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("lightning_rlhf").experiment_id])
    return run.info.status


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_in_the_rollout_writes_the_iteration_before_and_the_printed_command_goes_on(folder: Path) -> None:
    run = train(folder, "warmup=none", waits("rollout", 4))
    run.reached()
    run.send(signal.SIGINT)
    assert run.end() == 130, run.said
    output = folder / "run"
    assert kept(output / "checkpoints") == [1, 3]
    last = (folder / "out").read_text().splitlines()
    command = f"lightning-rlhf train resume={output}"
    assert last[-4:] == [
        "stopped by SIGINT",
        f"output folder: {output}",
        f"newest checkpoint: {output}/checkpoints/iteration_000003.ckpt",
        f"to go on: {command}",
    ]
    assert status(folder) == "KILLED"

    (folder / "go_on").touch()
    again = Command(folder, *shlex.split(command)[1:])
    assert again.end() == 0, again.said
    assert status(folder) == "FINISHED"
    whole = Command(folder, "train", "hydra.run.dir=whole", "iterations=5", "warmup=none", "logger=none", *TINY)
    assert whole.end() == 0, whole.said
    left, right = (
        torch.load(folder / name / "checkpoints" / "iteration_000005.ckpt", weights_only=True)
        for name in ("run", "whole")
    )
    torch.testing.assert_close(left["state_dict"], right["state_dict"], rtol=0, atol=0)
    states = [saved["optimizer_states"][0]["state"] for saved in (left, right)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.slow
def test_a_signal_in_the_update_finishes_the_iteration_and_a_second_one_does_not(folder: Path) -> None:
    once = train(folder, "warmup=none", "logger=none", waits("update", 3))
    once.reached()
    once.send(signal.SIGTERM)
    assert once.end() == 143, once.said
    assert f"finishing iteration 3; kill {once.process.pid} to stop now" in once.said
    assert kept(folder / "run" / "checkpoints") == [1, 3]

    noticed = train(folder, "warmup=none", "hydra.run.dir=noticed", waits("update", 3))
    noticed.reached()
    noticed.send(signal.SIGUSR1)  # of a scheduler, some time before the end
    assert noticed.end() == 138, noticed.said
    assert kept(folder / "noticed" / "checkpoints") == [1, 3] and status(folder) == "KILLED"
    assert "stopped by SIGUSR1" in noticed.said and "to go on: lightning-rlhf train resume=" in noticed.said

    twice = train(folder, "warmup=none", "logger=none", "hydra.run.dir=twice", waits("update", 3, "for ever"))
    twice.reached()
    twice.send(signal.SIGINT)
    twice.wait_for(lambda: "finishing iteration 3; press Ctrl-C again to stop now" in twice.said)
    twice.send(signal.SIGINT)
    assert twice.end() == 130, twice.said
    assert kept(folder / "twice" / "checkpoints") == [1]
    assert "newest checkpoint: " in twice.said and "iteration_000001.ckpt" in twice.said


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_whose_terminal_is_closed_stops_as_at_a_signal(folder: Path, processes: int) -> None:
    """Its output is gone, which once ended it with a traceback or at once: log and MLflow status are complete."""
    own, other = pty.openpty()
    words = [str(BIN / "lightning-rlhf"), "train", "hydra.run.dir=run", "iterations=5", *TINY, "warmup=none"]
    words += [waits("update", 3)] + (["trainer=ddp", "trainer.devices=2"] if processes == 2 else [])

    def in_the_terminal() -> None:
        ignore_nothing()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    run = subprocess.Popen(
        words, cwd=folder, stdin=other, stdout=other, stderr=other, start_new_session=True, preexec_fn=in_the_terminal
    )
    os.close(other)
    os.set_blocking(own, False)
    log = folder / "run" / "train.log"
    try:
        deadline = time.monotonic() + SECONDS
        while not all((folder / f"reached_{rank}").exists() for rank in range(processes)):
            assert run.poll() is None and time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
            with suppress(BlockingIOError):
                os.read(own, 4096)
            time.sleep(0.02)
        os.close(own)
        assert run.wait(SECONDS) == 129, log.read_text()
    finally:
        run.kill()
    assert kept(folder / "run" / "checkpoints") == [1, 3]
    said = log.read_text()
    assert "stopped by SIGHUP" in said and "to go on: lightning-rlhf train resume=" in said
    assert "Traceback" not in said and status(folder) == "KILLED"


@pytest.mark.slow
def test_before_anything_is_trained_there_is_nothing_to_resume(folder: Path) -> None:
    """In the warm-up, in the evaluation before training, and in an evaluation by `eval`."""
    warm = train(folder, "logger=none", "warmup={_target_: mine.warm_up}")
    warm.reached()
    warm.send(signal.SIGTERM)
    assert warm.end() == 143, warm.said
    assert "no checkpoint yet: nothing to go on from" in warm.said

    held_out = ["data.validation={_target_: lightning_rlhf.data.JSONLSource, path: prompts.jsonl}"]
    first = train(folder, "warmup=none", *held_out, waits("evaluation", 0, "for ever"))
    first.reached()
    first.send(signal.SIGINT)
    assert first.end() == 130, first.said
    assert "no checkpoint yet" in first.said and "Traceback" not in first.said
    assert status(folder) == "KILLED"


@pytest.mark.slow
def test_a_sweep_ends_as_a_whole(folder: Path) -> None:
    arguments = [
        "train",
        "--multirun",
        "hydra.sweep.dir=sweep",
        "seed=1,2",
        "iterations=3",
        "warmup=none",
        "logger=none",
    ]
    sweep = Command(folder, *arguments, *TINY, waits("rollout", 2))
    sweep.reached()
    sweep.send(signal.SIGINT)
    assert sweep.end() == 130, sweep.said
    assert kept(folder / "sweep" / "0" / "checkpoints") == [1]
    assert not (folder / "sweep" / "1").exists()


# --- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "left", "signum", "code"),
    [
        ("rollout", [1, 2], signal.SIGTERM, 143),
        ("update", [1, 3], signal.SIGTERM, 143),
        ("update", [1, 3], signal.SIGUSR1, 138),
    ],
)
def test_two_processes_agree_where_they_stop(folder: Path, event: str, left: list[int], signum: int, code: int) -> None:
    run = train(folder, "warmup=none", "trainer=ddp", "trainer.devices=2", waits(event, 3))
    run.reached(ranks=2)
    run.send(signum)
    assert run.end() == code, run.said
    assert kept(folder / "run" / "checkpoints") == left
    assert run.said.count("to go on: lightning-rlhf train resume=") == 1
    assert not (folder / "run" / "stop_request").exists()
    assert status(folder) == "KILLED"


TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2", "-m", "lightning_rlhf.cli")


@pytest.mark.slow
@pytest.mark.parametrize("program", [("lightning-rlhf",), TORCHRUN], ids=["own", "torchrun"])
def test_processes_whose_command_was_killed_end_and_leave_the_folder_to_the_next_start(
    folder: Path, program: tuple[str, ...]
) -> None:
    """Nothing can tell them to stop, and they would go on beside the run that is started again."""
    words = ["hydra.run.dir=run", "iterations=5", *TINY, "warmup=none", "logger=none"]
    two = ["trainer=ddp", "trainer.devices=2", waits("update", 3, "for ever")]
    run = Command(folder, "train", *words, *two, program=program)
    run.reached(ranks=2)
    ranks = [int((folder / f"reached_{rank}").read_text()) for rank in range(2)]
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + SECONDS
    while any(alive(rank) for rank in ranks):
        assert time.monotonic() < deadline, f"still there\n{run.said}"
        time.sleep(0.02)
    assert run.said.count(f"process {run.process.pid}, which started it, is gone: it ends, too") == 2
    (folder / "go_on").touch()
    again = Command(folder, "train", f"resume={folder}/run")
    assert again.end() == 0, again.said
    assert kept(folder / "run" / "checkpoints")[-1] == 5


def alive(process: int) -> bool:
    """Whether it runs; one that has ended stays as a zombie where nobody waits for it."""
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ray_workers_stop_between_two_iterations(folder: Path, signum: int, code: int) -> None:
    pytest.importorskip("ray")
    small = ["+trainer.ray.init={num_cpus: 2, include_dashboard: false, object_store_memory: 100000000}"]
    run = train(folder, "warmup=none", "trainer=ray", *small, waits("update", 2))
    run.reached(ranks=2)
    run.send(signum)
    assert run.end() == code, run.said
    assert kept(folder / "run" / "checkpoints") == [1, 2]
    assert "to go on: lightning-rlhf train resume=" in run.said
    assert status(folder) == "KILLED"


# --- parts -----------------------------------------------------------------------------------------------------------


def test_a_signal_raises_at_once_unless_it_is_held() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as own:
        assert signals() is own
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        assert caught.value.code == 143 and str(caught.value) == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before and signals() is not own


def test_held_work_is_finished_and_a_second_signal_is_not_held(capfd: pytest.CaptureFixture) -> None:
    with Signals() as own:
        own.hold("finishing iteration 7")
        os.kill(os.getpid(), signal.SIGTERM)
        assert own.received == signal.SIGTERM
        assert "finishing iteration 7" in capfd.readouterr().err
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_was_ignored_stays_ignored(signum: int) -> None:
    """SIGHUP is, under nohup."""
    before = signal.signal(signum, signal.SIG_IGN)
    try:
        with Signals() as own:
            os.kill(os.getpid(), signum)
            assert own.received == 0
    finally:
        signal.signal(signum, before)


def test_a_closing_terminal_may_send_sighup_twice() -> None:
    """The kernel sends SIGHUP, and so does the shell; another signal after it ends the run at once."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Signals() as own:
            own.hold("finishing iteration 7")
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            assert own.received == signal.SIGHUP
            with pytest.raises(Interrupted, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_user_is_told_how_to_send_the_signal_again(
    capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", REQUEST_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for signum, how in ((signal.SIGINT, "press Ctrl-C again"), (signal.SIGTERM, f"kill {os.getpid()}")):
        with Signals() as own:
            own.hold("finishing iteration 7")
            os.kill(os.getpid(), signum)
            time.sleep(0)
        assert capfd.readouterr().err.strip() == f"finishing iteration 7; {how} to stop now"


def test_a_request_by_file_is_a_signal(tmp_path: Path) -> None:
    (tmp_path / "stop_request").write_text("15")
    with pytest.raises(Interrupted, match="SIGTERM"), Signals(tmp_path / "stop_request"):
        time.sleep(30)


def test_the_launcher_writes_the_stop_request_and_removes_it(tmp_path: Path) -> None:
    with passed_on(tmp_path) as own:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (tmp_path / "stop_request").read_text() == "15" and own.received == 15
    assert not (tmp_path / "stop_request").exists()


@pytest.mark.parametrize("name", ["run", "lr=0.1,seed=2", "my run", "it's", 'a"b', "a\\b"])
def test_the_printed_resume_command_is_parsed_correctly(tmp_path: Path, name: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / name / "checkpoints" / "iteration_000004.ckpt").touch()
    lines = how_to_go_on({"output_dir": str(tmp_path / name), "callbacks": None, "resume": None})
    command = lines[-1].removeprefix("to go on: ")
    assert command == resume_command(tmp_path / name)
    [override] = OverridesParser.create().parse_overrides(shlex.split(command)[2:])
    assert override.value() == str(tmp_path / name)
