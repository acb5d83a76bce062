"""Progress: plain lines in files, one line in a terminal, and train.log beside both."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_rlhf import cli, schema
from lightning_rlhf.assembly import make_trainer
from lightning_rlhf.reporting.progress import ProgressLines, duration
from lightning_rlhf.reporting.terminal import FILE, note, run_log, say
from lightning_rlhf.reporting.untrained import Untrained, why
from lightning_rlhf.rewards.safety import SafetySettings
from lightning_rlhf.settings import PPOSettings

LINE = re.compile(r"iteration (\d+)/7  reward -?\d\.\d{3}  kl/ref -?\d\.\d{4}  \d+ tok/s  \d+:\d\d left")
TINY = ["model.source.hidden_size=32", "model.source.layers=1", "model.source.heads=2", "logger=none"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_run: list[str]):
    """``run("key=value", ...)``: a training of seven iterations in ``run`` of an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    usual = [word for word in tiny_run if not word.startswith(("iterations=", "trainer.enable_progress_bar="))]

    def _run(*overrides: str) -> int:
        return cli.main(["train", "iterations=7", "hydra.run.dir=run", *usual, *TINY, *overrides])

    return _run


def without_times(file: Path) -> str:
    return re.sub(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", file.read_text(encoding="utf-8"))


def test_without_a_terminal_there_is_a_plain_line_every_few_iterations(run, capsys):
    assert run("progress_every=3") == 0
    out = capsys.readouterr().out
    said = [line for line in out.splitlines() if line.startswith("iteration ")]
    assert [LINE.fullmatch(line)[1] for line in said] == ["1", "3", "6", "7"], said
    assert said[-1].endswith("0:00 left")
    assert "\r" not in out and "Epoch" not in out and "v_num" not in out
    assert out.count("evaluating the held-out prompts\n") == 2, "before training and after it"
    log = without_times(Path("run", FILE))
    assert log == out, "all that is said is in the folder, once"
    assert "held-out exact match:" in log and f"output folder: {Path.cwd()}/run" in log


def test_the_evaluations_during_the_training_are_not_announced_again(run, capsys):
    assert run("iterations=4", "evaluate_every=1", "data.validation.size=2") == 0
    out = capsys.readouterr().out
    said = [line for line in out.splitlines() if line.startswith(("iteration ", "evaluating"))]
    assert [line.split()[0] for line in said] == ["evaluating", "iteration", "iteration"], "before the first alone"


@pytest.mark.parametrize(("functions", "times"), [("fit fit fit", 1), ("validate fit fit validate", 2)])
def test_a_first_evaluation_is_announced_wherever_it_comes(capsys, functions, times):
    lines = ProgressLines(12, terminal=False)
    for function in functions.split():
        lines.on_validation_start(SimpleNamespace(is_global_zero=True, state=SimpleNamespace(fn=function)), None)
    assert capsys.readouterr().out.count("evaluating the held-out prompts") == times


def test_a_resumed_run_says_what_the_held_out_score_was_at_its_start(run, capsys):
    """But not on other held-out prompts, and not in a branch, whose start was not evaluated."""

    def held_out(*words):
        capsys.readouterr()
        assert cli.main(["train", "resume=run", *words]) == 0
        return re.search("held-out characters: (.*)\n", capsys.readouterr().out)[1]

    assert run("iterations=1") == 0
    start = re.search("held-out characters: (.*) -> ", capsys.readouterr().out)[1]
    for iterations in (2, 3):  # the second start hands it on
        assert re.fullmatch(rf"{re.escape(start)} -> \d\.\d\d", held_out(f"iterations={iterations}"))
    assert re.fullmatch(r"\d\.\d\d", held_out("iterations=4", "module.kl.coefficient=0.5", "hydra.run.dir=branch"))
    assert re.fullmatch(r"\d\.\d\d", held_out("iterations=4", "data.validation_limit=2"))


def test_in_a_terminal_one_line_of_its_width_is_drawn_again(run, tmp_path, monkeypatch):
    """The output is a real pseudo-terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    reader, writer = os.openpty()
    received: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(reader, 4096)
            except OSError:  # the other end is closed
                return
            received.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        # Every iteration is stopped by the callback, which says so through Python's logging.
        code = run("module.update.epochs=2", "callbacks.kl_early_stop.target=1e-9", "progress_every=3")
        monkeypatch.undo()
    thread.join()
    os.close(reader)
    text = b"".join(received).decode()
    assert code == 0
    drawn = re.findall(r"\r\x1b\[K(iteration \d+/[^\r\n]*)", text)
    assert {LINE.fullmatch(line)[1] for line in drawn} == {"1", "2", "3", "4", "5", "6", "7"}
    screen = [part for line in text.replace("\r\n", "\n").split("\n") for part in line.split("\r\x1b[K")]
    assert max(len(line) for line in screen if LINE.match(line)) < 80
    assert "Epoch" not in text and "v_num" not in text
    stops = [line for line in text.splitlines() if "stop_epochs" in line]
    assert stops and all(re.search(r"(^|\x1b\[K)iteration \d+: stop", line) for line in stops), "on lines of their own"
    log = without_times(tmp_path / "run" / FILE)
    assert [LINE.fullmatch(line)[1] for line in log.splitlines() if LINE.match(line)] == ["1", "3", "6", "7"]
    assert "\x1b" not in log


def test_a_terminal_gets_plain_lines_where_the_drawn_one_is_switched_off(compose, monkeypatch):
    reader, writer = os.openpty()
    with os.fdopen(writer, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        for wanted in (True, False):
            config = schema.check(compose("logger=none", f"trainer.enable_progress_bar={wanted}"))
            [progress] = [c for c in make_trainer(config).callbacks if isinstance(c, ProgressLines)]
            assert progress.drawn == wanted
        monkeypatch.undo()
    os.close(reader)


def test_no_lines_with_an_interval_of_null(run, capsys):
    assert run("progress_every=null", "iterations=1") == 0
    assert "iteration 1/" not in capsys.readouterr().out


def test_numbers_that_there_are_not_are_left_out():
    progress = ProgressLines(20, 5)
    assert progress.text(3, {}) == "iteration 3/20"
    numbers = {"reward/mean": 0.5, "kl/old": 0.01, "perf/tokens_per_second": 853.4}
    assert progress.text(3, numbers) == "iteration 3/20  reward 0.500  kl/old 0.0100  853 tok/s"
    progress._seconds.extend([1.0, 3.0])
    assert progress.text(3, numbers | {"kl/ref": 0.2}).endswith("kl/ref 0.2000  853 tok/s  0:34 left")


def test_what_a_run_says_is_80_columns_wide_but_for_paths_on_their_own_line(run, tmp_path, fresh_store, capsys):
    (tmp_path / "mlflow").mkdir()
    shutil.copy(fresh_store, tmp_path / "mlflow" / "mlflow.db")
    assert run("iterations=1", "warmup=sft", "warmup.lr=1e-3", "warmup.steps=2", "logger=[mlflow,csv]") == 0
    assert cli.main(["train", "resume=run", "module.kl.coefficient=0.5", "iterations=2", "logger=csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("SUPERVISED WARM-UP BEFORE PPO (warmup=none leaves it out): up to 2") for line in lines)
    for line in lines:  # a path stands behind a few words at most, or alone
        assert len(line) <= 80 or re.fullmatch(r"[\w :-]{0,40}\S*/\S*( \(.*\))?|  mlflow ui --\S+ \S+", line), line
    assert f"  mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow/mlflow.db" in lines
    assert f"  {tmp_path}/run/metrics/metrics.csv" in lines
    branch = lines[next(i for i, line in enumerate(lines) if line.startswith("a branch, for ")) :]
    assert not any("MLflow run is a child" in line for line in branch), "nothing of it is tracked there"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.2, "0:00"), (42, "0:42"), (59.6, "1:00"), (3599, "59:59"), (11100, "3:05:00")]
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


def test_a_reward_that_never_varies_is_said_once(capsys):
    lines = ProgressLines(12, None, terminal=False)
    for iteration, spread in enumerate((0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0), start=1):
        numbers = {"clock/iteration": iteration, "reward/mean": 0.25, "reward/std": spread}
        lines.on_train_batch_end(SimpleNamespace(is_global_zero=True, callback_metrics=numbers), None, None, None, 0)
    assert (
        capsys.readouterr().out.count("note: iterations 4 to 6: every score was 0.25, so nothing can be learned") == 1
    )


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["safety=filter", "module.safety.patterns=['.*']", "module.safety.attempts=1"],
            "100% left out as unsafe (module.safety.words, module.safety.patterns, module.safety.classifier)",
        ),
        (
            ["module.termination.early=drop", "module.termination.min_tokens=119", "rollout.max_new_tokens=120",
             "model.source.max_positions=256"],
            "100% dropped as too short (module.termination.early = drop, module.termination.min_tokens = 119)",
        ),
        (
            ["rollout_correction=stability", "module.rollout_correction.rollout_rs=token",
             "module.rollout_correction.rollout_rs_threshold=1.0002",
             "module.rollout_correction.rollout_rs_threshold_lower=1.0001"],
            "100% rejected (module.rollout_correction)",
        ),
    ],
)  # fmt: skip
def test_a_run_without_steps_says_once_why(run, capsys, overrides, why):
    assert run("iterations=4", *overrides) == 0
    said = "note: iterations 1 to 3: no response may train, so no step was taken and the weights stay: "
    assert capsys.readouterr().out.count(f"{said}{why}\n") == 1
    log = without_times(Path("run", FILE))
    assert log.count(f"{said}{why}\n") == 1 and "every score was" not in log


def test_a_response_that_is_dropped_beside_unsafe_ones_has_its_share():
    settings = SafetySettings(patterns=(".*",))
    module = SimpleNamespace(
        safety=SimpleNamespace(settings=settings), run_config=None,
        settings=PPOSettings.from_blocks(termination={"early": "drop", "min_tokens": 7}),
    )  # fmt: skip
    numbers = {"safety/unsafe_fraction": 0.5, "response/dropped_fraction": 0.25}
    unsafe, dropped, rejected = why(numbers, module).replace("), ", ")\n").splitlines()
    assert unsafe.startswith("50% left out as unsafe (") and rejected == "25% rejected (by code of your own)"
    assert dropped.startswith("25% dropped as too short (") and dropped.endswith("min_tokens = 7)")
    module.safety.settings = replace(settings, action="penalise")
    assert "unsafe" not in why(numbers, module), "it is trained on, with its penalty"


def test_steps_that_callbacks_skip_are_not_a_run_without_steps():
    notes, module = Untrained(1), SimpleNamespace(control=SimpleNamespace(counts=Counter(empty_minibatches=4)))
    notes.begin(module)
    numbers = {"stability/empty_minibatches": 4.0, "ppo/updates": 0.0, "ppo/steps_skipped": 0.0}
    assert notes.note(1, numbers, module) is None, "its epochs were ended before the first minibatch"
    numbers = {"stability/empty_minibatches": 5.0, "ppo/updates": 0.0, "ppo/steps_skipped": 1.0}
    assert notes.note(2, numbers, module) is None and notes.row == 0


def test_a_wrong_interval_is_refused():
    with pytest.raises(ValueError, match="progress_every = 0"):
        ProgressLines(3, 0)


def test_train_log_keeps_what_is_said_and_what_is_logged(tmp_path, capsys):
    with run_log(str(tmp_path / "run"), first=True):
        say("said")
        note("noted")
        logging.getLogger("a.callback").warning("logged")
    say("afterwards")
    lines = (tmp_path / "run" / FILE).read_text(encoding="utf-8").splitlines()
    assert [line[20:] for line in lines] == ["said", "noted", "logged"]
    assert all(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S") for line in lines)
    assert capsys.readouterr().out == "said\nafterwards\n"


def test_a_handler_that_hydra_has_made_is_not_doubled(tmp_path):
    handler = logging.FileHandler(tmp_path / FILE)
    logging.getLogger().addHandler(handler)
    try:
        with run_log(str(tmp_path), first=True):
            say("once")
            logging.getLogger("a.callback").warning("once more")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert (tmp_path / FILE).read_text(encoding="utf-8") == "once\nonce more\n"


def test_other_processes_write_nothing(tmp_path):
    with run_log(str(tmp_path / "run"), first=False):
        say("said by the second")
    assert not (tmp_path / "run").exists()
