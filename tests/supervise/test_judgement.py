"""What a supervisor concludes and decides: pure functions and small files, without a training."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from urllib.error import URLError

import httpx
import pytest
import requests
import torch
import yaml

from lightning_rlhf import cli
from lightning_rlhf.checkpoint import CheckpointError
from lightning_rlhf.control import TrainingFailed
from lightning_rlhf.errors import InputError, SettingError
from lightning_rlhf.memory import OutOfMemory
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.runs.ending import RunFailed
from lightning_rlhf.runs.folder import locked
from lightning_rlhf.supervise import checkpoints, files, kernel, report
from lightning_rlhf.supervise.classify import CLASSES, Ended, classify
from lightning_rlhf.supervise.ending import kind_of, recorded
from lightning_rlhf.supervise.files import Beat
from lightning_rlhf.supervise.policy import State, decide, withdraw
from lightning_rlhf.supervise.settings import Settings, read
from lightning_rlhf.supervise.watch import Watch

ROOT = Path(__file__).resolve().parents[2]


def settings(*words: str) -> Settings:
    return read([f"supervise.{word}" for word in words])[0]


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (Ended(0), "done"),
        (Ended(-9), "killed"),
        (Ended(137), "killed"),
        (Ended(-9, oom_kills=1), "out_of_memory"),
        (Ended(-9, hang="no sign of life for 5 s"), "hang"),
        (Ended(-9, hang="no sign of life", record={"class": "out_of_memory"}), "out_of_memory"),
        (Ended(-9, passed=signal.SIGINT), "stopped"),
        (Ended(143, passed=signal.SIGTERM), "stopped"),
        (Ended(143), "preempted"),
        (Ended(-signal.SIGUSR1), "preempted"),
        (Ended(138), "preempted"),
        (Ended(130), "stopped"),
        (Ended(129), "stopped"),
        (Ended(2), "configuration"),
        (Ended(1, record={"class": "divergence"}), "divergence"),
        (Ended(1, record={"class": "communication"}, oom_kills=1), "out_of_memory"),
        (Ended(1, record={"class": "user_code"}, oom_kills=1), "user_code"),
        (Ended(1, output="torch.OutOfMemoryError: CUDA out of memory. Tried"), "out_of_memory"),
        (Ended(1, output="OSError: [Errno 28] No space left on device"), "disk"),
        (Ended(1, output="ProcessGroupNCCL watchdog timed out"), "communication"),
        (Ended(1, output="something else"), "unknown"),
        (Ended(-signal.SIGSEGV, output=""), "unknown"),
    ],
)
def test_the_class_of_an_end(end: Ended, kind: str) -> None:
    assert classify(end) == kind


def raised(error: Exception, cause: BaseException | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (OutOfMemory("lower module.update.score_tokens"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RewardError("reward term 'a': MemoryError"), "user_code"),
        (TrainingFailed("iteration 3: NaN"), "divergence"),
        (CheckpointError("the weights after iteration 3 are not finite: no checkpoint"), "divergence"),
        (CheckpointError("checkpoint a was not written: no"), "disk"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (PermissionError(errno.EPERM, "Operation not permitted"), "disk"),
        (InputError("no"), "configuration"),
        (SettingError("a", 1, "2"), "configuration"),
        (torch.distributed.DistNetworkError("lost"), "communication"),
        (ConnectionResetError("reset"), "communication"),
        (RuntimeError("[Gloo] Connection closed by peer"), "communication"),
        (RuntimeError("a shape is wrong"), "unknown"),
    ],
)
def test_the_class_of_an_error(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind


def test_the_cause_of_an_error_counts() -> None:
    assert kind_of(raised(RewardError("reward term 'a'"), MemoryError())) == "out_of_memory"
    assert kind_of(raised(RewardError("reward term 'a'"), ConnectionRefusedError())) == "communication"
    for lost in (requests.ConnectTimeout(), requests.HTTPError("503"), httpx.ReadError("reset"), URLError("refused")):
        assert kind_of(raised(RewardError("reward term 'a'"), lost)) == "communication"
    assert kind_of(raised(RewardError("reward term 'a'"), requests.exceptions.InvalidURL("x"))) == "user_code"
    assert kind_of(raised(RewardError("reward term 'a'"), KeyError("x"))) == "user_code"
    assert kind_of(raised(RewardError("reward term 'a'"), PermissionError())) == "user_code"
    assert kind_of(raised(RuntimeError("it ended"), OSError(errno.ENOSPC, "full"))) == "disk"


def test_an_error_that_ranks_exchange_is_that_of_the_rank_on_which_it_arose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    error = RewardError("reward term 'a'")
    error.of_rank = 3  # type: ignore[attr-defined]
    with pytest.raises(RewardError), recorded():
        raise error
    record = files.read(tmp_path / files.END)
    assert record is not None and record["rank"] == 3


def test_the_first_error_of_all_processes_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), recorded():
        raise KeyError("nobody supervises")
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    with pytest.raises(TrainingFailed), recorded():
        raise TrainingFailed("at http://me:secret@host")
    with pytest.raises(ConnectionError), recorded():
        raise ConnectionError("the other one has gone")
    with pytest.raises(RunFailed), recorded():
        raise RunFailed("process 1 of 2 ended with signal 9, and the others were ended with it")
    record = files.read(tmp_path / files.END)
    assert record is not None and record["class"] == "divergence" and record["exception"] == "TrainingFailed"
    assert "raise TrainingFailed" in record["traceback"] and "secret" not in json.dumps(record)
    assert os.listdir(tmp_path) == [files.END], "no temporary file"
    end = Ended(1, record=record)
    assert end.error == "TrainingFailed: at http://me:***@host"


def test_a_killed_process_is_the_cause_of_lost_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    with pytest.raises(ConnectionError), recorded():
        raise ConnectionError("Connection reset by peer")
    with pytest.raises(RunFailed), recorded():
        raise RunFailed("process 1 of 2 ended with signal 9, and the others were ended with it")
    record = files.read(tmp_path / files.END)
    assert record is not None and record["class"] == "killed" and "process 1 of 2" in record["message"]


# --- the policy ------------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "module": {
        "actor": {"lr": 0.01},
        "critic": {"lr": 0.02},
        "kl": {"coefficient": 0.05},
        "update": {"micro_batch_tokens": 1001, "score_tokens": None},
    }
}


def test_a_crash_that_comes_back_brings_the_next_step() -> None:
    state, chosen = State(), settings()
    first = decide(state, chosen, "divergence", 7, CONFIG)
    assert first.retry and not first.changed and not first.back and state.retries == 1
    second = decide(state, chosen, "divergence", 8, CONFIG)
    assert second.changed == {"module.actor.lr": (0.01, 0.005), "module.critic.lr": (0.02, 0.01)}
    # The crashed attempt may not have written a checkpoint: the configuration still has the first values.
    third = decide(state, chosen, "divergence", 7, CONFIG)
    assert third.changed["module.actor.lr"] == (0.005, 0.0025) and third.changed["module.kl.coefficient"] == (0.05, 0.1)
    assert third.back and state.original["module.actor.lr"] == 0.01
    last = decide(state, chosen, "divergence", 7, CONFIG)
    assert not last.retry and "divergence came back soon after it was retried 3 times" in str(last)


def test_a_crash_much_later_is_another_trouble_and_renews_the_budget() -> None:
    state, chosen = State(), settings("retries=2", "renew_after=10", "soon=2")
    assert decide(state, chosen, "hang", 5, CONFIG).retry
    later = decide(state, chosen, "hang", 8, CONFIG)
    assert later.retry and "step 1 of 2" in later.why and state.retries == 2
    over = decide(state, chosen, "killed", 11, CONFIG)
    assert not over.retry and over.why == "all retries are used (2)"
    state.crashed_at = 11
    renewed = decide(state, chosen, "killed", 21, CONFIG)
    assert renewed.retry and state.retries == 1


def test_whole_numbers_stay_whole_and_what_the_run_lacks_is_left_out() -> None:
    state, chosen = State(), settings()
    decide(state, chosen, "out_of_memory", 1, CONFIG)
    step = decide(state, chosen, "out_of_memory", 1, CONFIG)
    assert step.changed == {"module.update.micro_batch_tokens": (1001, 500)}
    assert step.left_out == ["module.update.score_tokens"] and "cannot be changed in this run" in str(step)
    steps = "policy.disk=[{a: 7, b: '* 0.1', c: true}]"
    given = decide(State(), settings(steps), "disk", 1, {"a": 7, "b": 3, "c": False})
    assert given.changed == {"b": (3, 1), "c": (False, True)}


def test_classes_without_steps_are_not_retried() -> None:
    assert not decide(State(), settings(), "configuration", 0, {}).retry
    state = State()
    assert not decide(state, settings(), "user_code", 4, CONFIG).retry
    assert decide(state, settings(), "disk", 4, CONFIG).retry
    assert not decide(state, settings(), "disk", 4, CONFIG).retry
    assert set(settings().policy) == set(CLASSES), "the shipped table answers every class"


def test_changes_that_a_run_refuses_are_taken_back() -> None:
    state, chosen = State(), settings()
    decide(state, chosen, "divergence", 7, CONFIG)
    tried = decide(state, chosen, "divergence", 7, CONFIG)
    answer = withdraw(state, chosen, tried.changed)
    assert answer.retry and state.changes == {} and answer.changed["module.actor.lr"] == (0.005, 0.01)
    assert not withdraw(state, settings("retries=3"), tried.changed).retry, "it counts as a retry"


# --- settings --------------------------------------------------------------------------------------------------------


def test_words_and_a_file_change_the_shipped_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HOOK", "json://host/secret")
    own = tmp_path / "own.yaml"
    own.write_text("retries: 7\nnotify: ['${oc.env:MY_HOOK}']\npolicy:\n  hang: []\n", encoding="utf-8")
    chosen, words = read([f"supervise={own}", "iterations=3", "supervise.soon=0", "supervise.hang_after=null"])
    assert words == ["iterations=3"] and (chosen.retries, chosen.soon, chosen.hang_after) == (7, 0, None)
    assert chosen.notify == ["json://host/secret"] and chosen.policy["hang"] == []
    assert settings('notify=["${oc.env:MY_HOOK}"]').notify == ["json://host/secret"]
    assert chosen.policy["killed"] == settings().policy["killed"]
    shipped = yaml.safe_load((ROOT / "conf" / "supervise.yaml").read_text(encoding="utf-8"))
    assert {name: getattr(settings(), name) for name in shipped} == shipped


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("supervise.retrys=1", "there is no key supervise.retrys; did you mean retries"),
        ("supervise.retries=-1", "supervise.retries = -1 is not allowed: a whole number >= 0"),
        ("supervise.renew_after=0", "a whole number >= 1"),
        ("supervise.soon=-1", "supervise.soon = -1"),
        ("supervise.log_lines=x", "supervise.log_lines = 'x'"),
        ("supervise.wait=-1", "supervise.wait = -1"),
        ("supervise.hang_after=0", "supervise.hang_after = 0"),
        ("supervise.hang_factor=0.5", "supervise.hang_factor = 0.5"),
        ("supervise.start_within=0", "supervise.start_within = 0"),
        ("supervise.policy.oom=[]", "the classes are out_of_memory, "),
        ("supervise.policy.hang={}", "a list of steps"),
        ("supervise.policy.hang=[{a: '* x'}]", "supervise.policy.hang: a = '* x' is not allowed"),
        ("supervise.policy.hang=[{back: 1}]", "true or false"),
        ("supervise=nowhere.yaml", "supervise = 'nowhere.yaml' cannot be read"),
        ("supervise.retries", "is not allowed without a value"),
        ("supervise.notify=[json://secret?]", "supervise.notify = *** is not allowed"),
        ("supervise.notify=3", "a list of addresses"),
    ],
)
def test_settings_that_are_refused(word: str, said: str) -> None:
    with pytest.raises((InputError, SettingError)) as caught:
        read([word])
    assert said in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--multirun", "seed=1,2"], "--multirun is not allowed: supervise starts one training"),
        (["--cfg", "job"], "--cfg is not allowed"),
        (["resume=latest"], "needs hydra.run.dir=FOLDER"),
        (["resume=a/iteration_000001.ckpt"], "needs hydra.run.dir=FOLDER beside it"),
        (["hydra.run.dir='runs/${now:%Y}'"], "supervise needs the path of the folder"),
        (["lr"], "settings are written key=value"),
        (["supervise.notify=[nonsense://here]"], "supervise.notify[0] (nonsense://***) is no address"),
        (["supervise.retries=x"], "supervise.retries = 'x' is not allowed"),
    ],
)
def test_commands_that_are_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["supervise", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_a_second_supervisor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with locked(tmp_path / "run" / files.FOLDER):
        assert cli.main(["supervise", "hydra.run.dir=run"]) == 2
    assert "is at work in this folder" in capsys.readouterr().err
    assert os.listdir(tmp_path / "run" / files.FOLDER) == [".lock"]


def test_a_task_of_several_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert cli.main(["supervise"]) == 2
    assert "supervise is started once" in capsys.readouterr().err


def test_the_supervisor_is_small(tmp_path: Path) -> None:
    """It needs neither PyTorch nor what imports it."""
    code = (
        "import sys\nfrom lightning_rlhf import cli\n"
        "import lightning_rlhf.supervise.command, lightning_rlhf.supervise.closing\n"
        "assert cli.main(['supervise', '--cfg', 'job']) == 2\n"
        "print([name for name in ('torch', 'lightning', 'transformers', 'mlflow', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_lists_it(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["--help"]) == 0 and "lightning-rlhf supervise" in capsys.readouterr().out
    assert cli.main(["supervise", "--help"]) == 0
    text = capsys.readouterr().out
    shipped = yaml.safe_load((ROOT / "conf" / "supervise.yaml").read_text(encoding="utf-8"))
    for key in ("retries", "soon", "hang_after", "start_within", "wait"):
        assert f"supervise.{key}={shipped[key]:g}" in text
    assert f"renew_after={shipped['renew_after']}" in text and "--once" in text


# --- signs of life ---------------------------------------------------------------------------------------------------


def beat(count: int, *, training: bool = True) -> Beat:
    return Beat(3, "rollout", training, 0.0, 1, count)


def test_a_hang_is_a_pause_longer_than_all_before() -> None:
    now = [0.0]
    watch = Watch(settings("hang_after=10", "hang_factor=4", "start_within=100"), clock=lambda: now[0])
    watch.see(beat(0, training=False))
    now[0] = 99.0
    assert not watch.overdue
    watch.see(beat(1))
    now[0] = 107.0
    watch.see(beat(2))  # a pause of 8: from now on only one of 32 is a hang
    watch.see(beat(2))
    now[0] = 138.0
    assert not watch.overdue
    now[0] = 140.0
    assert watch.overdue == "no sign of life for 33 s since 'rollout' of iteration 3 began or went on"


def test_a_full_disk_is_no_hang(tmp_path: Path) -> None:
    """The file cannot be replaced, but its time can be set."""
    now = [0.0]
    watch = Watch(settings("hang_after=10"), clock=lambda: now[0])
    watch.look(tmp_path)
    beat(1).write(tmp_path)
    watch.look(tmp_path)
    now[0] = 9.0
    os.utime(tmp_path / files.BEAT, (5.0, 5.0))
    watch.look(tmp_path)
    now[0] = 18.0
    assert not watch.overdue


def test_a_training_that_never_begins_hangs_too() -> None:
    now = [0.0]
    watch = Watch(settings("start_within=100"), clock=lambda: now[0])
    now[0] = 101.0
    assert watch.overdue == "no iteration has begun within 100 s"
    assert not Watch(settings("start_within=null", "hang_after=null"), clock=lambda: now[0]).overdue


# --- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, iteration: int, *, whole: bool = True) -> Path:
    path = folder / f"iteration_{iteration:06d}.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "weights" * 100)
    if not whole:
        path.write_bytes(path.read_bytes()[:-20])
    return path


def test_the_newest_whole_checkpoint_is_chosen_and_verified_ones_first(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    paths = [checkpoint(tmp_path, number) for number in (2, 4, 6)]
    checkpoint(tmp_path, 8, whole=False)
    assert checkpoints.newest(tmp_path) == paths[2]
    checkpoints.sidecar(paths[1], "verified").write_text("{}", encoding="utf-8")
    assert checkpoints.newest(tmp_path) == paths[1]


def test_going_back_leaves_out_suspect_checkpoints(tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path, number) for number in (2, 4, 6)]
    checkpoints.mark_suspect(paths[2], {"attempt": 1})
    checkpoints.mark_suspect(paths[2], {"attempt": 2})
    assert checkpoints.newest(tmp_path) == paths[2] and checkpoints.newest(tmp_path, back=True) == paths[1]
    mark = json.loads((tmp_path / "iteration_000006.suspect.json").read_text(encoding="utf-8"))
    assert [crash["attempt"] for crash in mark["crashes"]] == [1, 2]
    for path in paths[:2]:
        checkpoints.mark_suspect(path, {"attempt": 3})
    assert checkpoints.newest(tmp_path, back=True) == paths[0], "all are suspect: the oldest"


def test_checkpoints_that_cannot_be_read_are_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not answer is no reason to begin again; another checkpoint that can be read will do."""
    paths, opened = [checkpoint(tmp_path, number) for number in (2, 4)], zipfile.ZipFile

    def fails(path: Path, *arguments: Any) -> Any:
        if path in broken:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *arguments)

    monkeypatch.setattr(zipfile, "ZipFile", fails)
    broken = paths[1:]
    assert checkpoints.newest(tmp_path) == paths[0]
    broken = paths
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.newest(tmp_path)


def test_damaged_checkpoints_make_room_for_a_training_that_begins_again(tmp_path: Path) -> None:
    """It refuses a folder that holds checkpoints; a second time, too."""
    for _ in range(2):
        (tmp_path / "iteration_000001.ckpt").write_bytes(b"damaged")
        (tmp_path / "iteration_000002.ckpt").mkdir()
        (tmp_path / "iteration_000002.ckpt" / "state.pt").touch()
        checkpoints.sidecar(tmp_path / "iteration_000001.ckpt", "verified").touch()
        checkpoints.set_aside(tmp_path)
        names = [f"iteration_00000{number}.ckpt.set_aside" for number in (1, 2)]
        assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_mark_of_an_earlier_checkpoint_of_that_name_does_not_count(tmp_path: Path) -> None:
    path, other = checkpoint(tmp_path, 4), checkpoint(tmp_path, 2)
    checkpoints.mark_suspect(path, {"attempt": 1})
    later = path.stat().st_mtime + 10
    os.utime(path, (later, later))
    assert checkpoints.newest(tmp_path, back=True) == path
    os.utime(checkpoints.sidecar(path, "suspect"), (later + 1, later + 1))
    assert checkpoints.newest(tmp_path, back=True) == other


def test_a_damaged_folder_of_shards_is_not_whole(tmp_path: Path) -> None:
    folder = tmp_path / "iteration_000002.ckpt"
    folder.mkdir()
    (folder / "shard").write_bytes(b"abc")
    (folder / "manifest.json").write_text(json.dumps({"files": {"shard": {"sha256": "0"}}}), encoding="utf-8")
    assert not checkpoints.whole(folder) and checkpoints.newest(tmp_path) is None
    right = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (folder / "manifest.json").write_text(json.dumps({"files": {"shard": {"sha256": right}}}), encoding="utf-8")
    assert checkpoints.newest(tmp_path) == folder


# --- kernel and report -----------------------------------------------------------------------------------------------


def test_all_descendants_are_found_and_killed() -> None:
    """A child that starts a child of its own in another session, and ends: the grandchild is found."""
    spared = set(kernel.descendants(os.getpid()))
    inner = "import time; time.sleep(1000)"
    outer = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-c', {inner!r}]\n"
        "print(subprocess.Popen(command, start_new_session=True, stdout=-3, stderr=-3).pid)"
    )
    with kernel.adopting():
        done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, timeout=300)
        pid = int(done.stdout)
        assert pid in kernel.descendants(os.getpid())
        kernel.kill_descendants(spared)
    assert not Path(f"/proc/{pid}").exists()


def test_kills_for_want_of_memory_are_counted_in_the_groups_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "memory.events"
    monkeypatch.setattr(kernel, "_memory_files", lambda: iter([tmp_path / "none", events]))
    assert kernel.oom_kills() == 0
    events.write_text("low 0\noom 3\noom_kill 2\n", encoding="utf-8")
    assert kernel.oom_kills() == 2


def test_the_log_has_as_many_lines_as_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    assert report.log_tail(log, 3) == ""
    log.write_text("".join(f"line {number} at http://a:b@c\n" for number in range(100)), encoding="utf-8")
    assert report.log_tail(log, 2) == "line 98 at http://a:***@c\nline 99 at http://a:***@c"
    assert report.log_tail(log, 0) == ""


def test_the_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    found = report.environment()
    assert found["torch"].startswith(torch.__version__.partition("+")[0]) and "secret" not in str(found)
    assert report.hidden_words(["logger.mlflow.tracking_uri=http://u:secret@h"]) == [
        "logger.mlflow.tracking_uri=http://u:***@h"
    ]
