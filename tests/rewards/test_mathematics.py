"""Mathematical equality: equal expressions, unreadable ones, and endless ones, in any thread or process."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest

from lightning_rlhf.experience import Finish
from lightning_rlhf.rewards import MathExpression, RewardBatch, RewardError
from lightning_rlhf.rewards.math_worker import Judge


def score(reward: MathExpression, response: str, answer: str = "46") -> float:
    row = {"answer": answer, "_source": "test.jsonl:1"}
    [value] = reward(RewardBatch(["12+34="], [response], [[1]], [row], [Finish.NATURAL]))
    return value


@pytest.fixture
def math() -> MathExpression:
    """With a time limit that even a busy machine does not reach."""
    pytest.importorskip("math_verify")
    return MathExpression(timeout=60)


@pytest.fixture
def hasty() -> MathExpression:
    pytest.importorskip("math_verify")
    return MathExpression(timeout=1)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"The answer is \boxed{\frac{1}{2}}.", "1/2", 1),
        ("0.5", r"\frac12", 1),
        ("$1+x^2$", "x^2+1", 1),
        (r"first 12, then \boxed{46}", "46", 1),
        ("1,234", "1234", 1),
        (r"$\{2, 1\}$", r"\{1, 2\}", 1),
        ("2", r"\{1, 2\}", 0),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        ("-3.5", "-3.5", 1),
        ("1234", "1,234", 1),
        ("x = 3", "3", 1),
        ("46", r"so \boxed{46}", 1),
        ("46", "the answer is $46$", 1),
        ("47", "46", 0),
        (r"\boxed{\frac{1}{3}}", "1/2", 0),
    ],
)
def test_expressions_are_compared_mathematically(math, response, answer, expected):
    assert score(math, response, answer) == expected
    assert not math.counts


def test_unreadable_response_scores_zero_and_is_counted(math):
    assert [score(math, text) for text in ("no idea", "", r"\frac{1}{")] == [0, 0, 0]
    assert math.counts == {"unparsed_responses": 3}


def test_unreadable_answer_scores_zero_is_counted_and_said(math, caplog):
    with caplog.at_level(logging.WARNING):
        assert score(math, "46", "$") == 0
    assert math.counts == {"unparsed_answers": 1}
    assert "unparsed_answers: 1 so far; the last for '$'" in caplog.text


ENDLESS = ["$9^{9^{9}}$", "$9^{9^{9^9}}$"]


def test_endless_expressions_are_stopped_counted_and_said(hasty, caplog):
    with caplog.at_level(logging.WARNING):
        assert [score(hasty, text) for text in ENDLESS] == [0, 0]
    assert hasty.counts == {"timeouts": 2}
    assert "timeouts: 1 so far; the last for '$9^{9^{9}}$'" in caplog.text
    assert [score(hasty, "46"), score(hasty, "47")] == [1, 0]


def test_other_threads_have_the_same_limit_and_take_turns(hasty):
    scores: dict[str, list[float]] = {}

    def work(name: str) -> None:
        scores[name] = [score(hasty, text) for text in ("46", "$9^{9^{9}}$", "47", "46")]

    threads = [threading.Thread(target=work, args=[name]) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert scores == {"a": [1, 0, 0, 1], "b": [1, 0, 0, 1]}
    assert hasty.counts == {"timeouts": 2}


@pytest.mark.parametrize("function", ["parse", "verify"])
def test_fault_inside_the_library_is_counted_and_said_with_its_traceback(math, monkeypatch, caplog, function):
    library = pytest.importorskip("math_verify")
    judge = Judge(library)
    assert judge("46", "46") == (1, [])  # the answer is known from now on

    def broken(*args, **kwargs):
        raise RecursionError("too deep")

    monkeypatch.setattr(library, function, broken)
    monkeypatch.setattr(math._worker, "ask", judge)
    with caplog.at_level(logging.WARNING):
        assert [score(math, "46") for _ in range(5)] == [0] * 5
    assert math.counts == {"errors": 5}
    assert [record.args[1] for record in caplog.records if record.name.startswith("lightning_rlhf")] == [1, 2, 4]
    assert "RecursionError: too deep" in caplog.text


def pid(math: MathExpression) -> int:
    return math._worker._running.process.pid


def test_the_process_is_kept_and_started_again_where_it_died(math):
    assert score(math, "46") == 1
    first = pid(math)
    assert score(math, "0046") == 1
    assert pid(math) == first
    os.kill(first, signal.SIGKILL)
    assert score(math, "46") == 1
    assert pid(math) != first
    assert not math.counts


def test_copies_and_forked_processes_have_processes_of_their_own(math):
    assert score(math, "46") == 1
    for other in (copy.deepcopy(math), pickle.loads(pickle.dumps(math))):
        assert other.timeout == math.timeout
        assert score(other, "46") == 1
        assert pid(other) != pid(math)
    first, child = pid(math), os.fork()
    if child == 0:
        fine = score(math, "46") == 1 and score(math, "47") == 0 and pid(math) != first
        math._worker.close()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert score(math, "46") == 1
    assert pid(math) == first


def test_the_process_ends_with_its_reward_and_with_the_interpreter(math):
    assert score(math, "46") == 1
    process = math._worker._running.process
    del math._worker
    assert process.returncode == -signal.SIGKILL
    code = (
        "from lightning_rlhf.rewards import MathExpression\n"
        "reward = MathExpression()\n"
        "assert reward.score('46', '46') == 1\n"
        "print(reward._worker._running.process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_the_process_ends_with_a_killed_interpreter(math):
    code = (
        "import time\n"
        "from lightning_rlhf.rewards import MathExpression\n"
        "reward = MathExpression()\n"
        "assert reward.score('46', '46') == 1\n"
        "print(reward._worker._running.process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        os.kill(int(run.stdout.readline()), 0)
        run.kill()
        run.communicate(timeout=300)  # until nobody has stderr open any more: the process that compares has, too


def test_a_process_that_cannot_start_is_an_error(math, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the process that compares expressions could not be started"):
        score(math, "46")


def test_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-rlhf\[math\]'"):
        MathExpression()


def test_bad_timeout_is_refused(math):
    for value in (0, 0.5, True):
        with pytest.raises(RewardError, match=r"timeout = .* is not allowed: whole seconds >= 1"):
            MathExpression(timeout=value)
