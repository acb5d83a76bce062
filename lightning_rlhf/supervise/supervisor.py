"""Attempts, judgement, the next attempt, until the training is done or given up."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_rlhf import passwords
from lightning_rlhf.errors import InputError
from lightning_rlhf.runs.folder import STARTS, checkpoint_folder, quoted
from lightning_rlhf.runs.recompose import value_of
from lightning_rlhf.supervise import checkpoints, closing, files, process, report
from lightning_rlhf.supervise.classify import CLASSES, DONE, STOPPED, USER_CODE, Ended, classify
from lightning_rlhf.supervise.files import Beat
from lightning_rlhf.supervise.notify import Notifier
from lightning_rlhf.supervise.policy import Decision, State, decide, withdraw
from lightning_rlhf.supervise.settings import Settings

AGAIN, AGAIN_CHANGED, NEVER = 75, 76, 1
"""Exit codes of ``--once`` after a crash: start the same command again (the settings are the same; are changed); do
not. Further ones: 0, done; 2, wrong configuration; 128 + n, ended by signal n."""

_OF_A_RESUME = ("resume", "branch", "resume_on_other_data")
_UNSUSPICIOUS = ("preempted", "configuration", "disk", USER_CODE)
"""Classes of crashes that say nothing about the checkpoint."""


class Supervisor:
    """Starts the training until it is done, or until the policy or the budget has no further attempt.

    Args:
        chosen: the settings.
        words: of ``train``.
        folder: of the run.
        notifier: tells people.
        relay: passes signals on.
        own: the supervisor's own words, for the command that goes on.
    """

    def __init__(
        self, chosen: Settings, words: Sequence[str], folder: Path, notifier: Notifier, relay: process.Relay, own: str
    ) -> None:
        self._settings, self._folder, self._notifier, self._relay = chosen, folder, notifier, relay
        self._words = [word for word in words if _key(word) != "hydra.run.dir"]
        self._own = own
        self._files = folder / files.FOLDER
        saved = files.read(self._files / files.STATE)
        self._state = State(**saved) if saved else State()
        if self._state.given_up:  # whoever starts it again has looked at it
            self._state.given_up, self._state.retries, self._state.seen = False, 0, {}
        self._report: Path | None = None
        self._touched = False
        """Whether an attempt has touched the run's record: the first one, if it is refused, has not."""

    def run(self, *, once: bool) -> int:
        """Attempts until the end; with ``once`` a single one. Returns the exit code."""
        _say(f"the run's folder is {self._folder}")
        while True:
            began, words = self._begin()
            end, beat = process.run(words, self._files, self._settings, self._relay)
            kind = classify(end)
            if kind == DONE:
                return self._done()
            if kind == STOPPED:
                return self._stopped(end, beat)
            decision = self._judge(kind, end, beat, began, words)
            if not decision.retry:
                return self._give_up(kind, end, once=once)
            if once:
                return AGAIN_CHANGED if decision.changed or decision.back else AGAIN
            self._relay.wait(self._settings.wait)
            if self._relay.received:
                self._close(f"stopped by signal {self._relay.received} between two attempts")
                return 128 + self._relay.received

    # --- before an attempt -------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Path | None, list[str]]:
        """Write down that an attempt begins; its checkpoint, if chosen here, and its words for ``train``."""
        state, pending = self._state, self._state.pending
        began = Path(pending["checkpoint"]) if pending and pending["checkpoint"] else None
        if began is not None and not began.exists():  # removed since
            began, unreadable = self._newest(began.parent)
            if unreadable:
                raise InputError(unreadable)
        if pending and began is None:
            self._close("it ended before its first checkpoint, and was started again")
        words = self._next_words(began)
        number = len(state.attempts) + 1
        entry = {
            "attempt": number,
            "from": checkpoints.iteration_of(began) if began else 0,
            "changes": dict(state.changes),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        pages = [str(self._folder / report.FOLDER / f"attempt_{each['attempt']:02d}.md") for each in state.attempts]
        reason = f"attempt {number}: {pending['why']}" if pending else ""
        told = {"attempt": number, "tags": self._tags(), "reports": pages[-1:], "reason": reason}
        state.attempts.append(entry)
        with _said_if_not_written():
            files.write(self._files / files.ATTEMPT, told)
        self._save()
        if number > 1:
            _say(f"attempt {number}: lightning-rlhf train {' '.join(report.hidden_words(words))}")
        return began, words

    def _next_words(self, began: Path | None) -> list[str]:
        """The words of ``train``: as typed, or from a checkpoint; in both cases with the changes made so far."""
        changes, place = self._state.changes, f"hydra.run.dir={_path(self._folder)}"
        changed = [
            f"{key}={quoted(value) if isinstance(value, str) else _yaml(value)}" for key, value in changes.items()
        ]
        own = [word for word in self._words if _key(word) not in changes]
        if began is None:
            return [*own, place, *changed]
        # Words beside a resume= of the command are changes of the run, which no checkpoint may have recorded yet.
        resumed = any(_key(word) == "resume" for word in own)
        kept = [word for word in own if _key(word) not in _OF_A_RESUME] if resumed else []
        return [f"resume={_path(began)}", "branch=false", *kept, place, *changed]

    def _tags(self) -> dict[str, str]:
        """Tags of the tracked run, one for each attempt that has ended."""
        return {
            f"lightning_rlhf.attempt_{each['attempt']:02d}": f"{each['class']} in iteration {each['iteration']}: "
            f"{each['error']}; {each['next']}"
            for each in self._state.attempts
            if "class" in each
        }

    # --- after an attempt --------------------------------------------------------------------------------------------

    def _judge(self, kind: str, end: Ended, beat: Beat | None, began: Path | None, words: Sequence[str]) -> Decision:
        """Decide what is next, and write it down: in the state, beside the checkpoint, in a report."""
        state, entry = self._state, self._state.attempts[-1]
        began_at_all = beat is not None or kind != "configuration" or bool(state.pending)
        self._touched = (self._touched or began_at_all) and (self._folder / STARTS).exists()
        config = files.read(self._files / files.CONFIG) or {}
        iteration = max(beat.iteration if beat else 0, checkpoints.iteration_of(began) if began else 0)
        kept = checkpoint_folder({"output_dir": str(self._folder)} | config)
        newest, unreadable = self._newest(kept)
        crash = {"attempt": entry["attempt"], "class": kind, "iteration": iteration, "error": _short(end.error)}
        entry |= crash
        tried = (state.pending or {}).get("changed")
        if unreadable:
            decision = Decision(False, unreadable)
        elif kind == "configuration" and tried:
            decision = withdraw(state, self._settings, tried)
        else:
            decision = decide(state, self._settings, kind, iteration, config)
        suspect = None
        if newest is not None and kind not in _UNSUSPICIOUS and iteration <= self._near(newest):
            with _said_if_not_written():
                checkpoints.mark_suspect(newest, crash)
                suspect = newest
        chosen = checkpoints.newest(kept, back=True) if decision.back else newest
        if decision.retry and chosen is None:
            with _said_if_not_written():
                checkpoints.set_aside(kept)
        entry["next"] = self._in_words(decision, chosen)
        state.given_up = not decision.retry
        state.pending = (
            {
                "checkpoint": str(chosen) if chosen else None,
                "why": entry["next"],
                "changed": {key: list(pair) for key, pair in decision.changed.items()},
            }
            if decision.retry
            else None
        )
        self._save()
        _say(f"attempt {entry['attempt']}: {kind} ({CLASSES[kind]}) in iteration {iteration}: {entry['error']}")
        if self._touched:
            with _said_if_not_written():
                self._report = report.write(self._folder, self._content(end, beat, words, suspect, began))
                _say(f"report: {self._report}")
        _say(entry["next"])
        if decision.retry:
            self._tell(f"crash ({kind}), trying again", entry["next"])
        return decision

    @staticmethod
    def _newest(kept: Path) -> tuple[Path | None, str]:
        """The checkpoint to go on from; the second says why no checkpoint can be read, where that is so."""
        try:
            return checkpoints.newest(kept), ""
        except OSError as error:
            return None, f"the checkpoints cannot be read, and are left as they are: {error}"

    def _near(self, checkpoint: Path) -> int:
        """The last iteration in which a crash makes this checkpoint suspect."""
        return checkpoints.iteration_of(checkpoint) + max(self._settings.soon, 1)

    @staticmethod
    def _in_words(decision: Decision, chosen: Path | None) -> str:
        if not decision.retry:
            return str(decision)
        place = "where the run began, as it has no checkpoint yet"
        if chosen is not None:
            place = f"iteration {checkpoints.iteration_of(chosen)}"
        return f"{decision}; from {place}"

    def _content(
        self, end: Ended, beat: Beat | None, words: Sequence[str], suspect: Path | None, began: Path | None
    ) -> dict[str, Any]:
        """Everything in the report of the last attempt."""
        entry, record = self._state.attempts[-1], end.record or {}
        last: Mapping[str, Any] = files.read(self._files / files.LAST) or {}
        log = self._folder / "train.log"
        tail = report.log_tail(log, self._settings.log_lines)
        if not end.record and end.output.strip():
            lines = end.output.splitlines()[-self._settings.log_lines :]
            tail = "\n".join([tail, "--- stderr", *lines])
        return {
            **{key: entry[key] for key in ("attempt", "class", "iteration", "next")},
            "run": str(self._folder),
            "words": report.hidden_words(words),
            "began_from": str(began) if began else value_of(self._words, "resume"),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "stage": beat.stage if beat else "before the training",
            "exit_code": end.exit_code,
            "meaning": CLASSES[entry["class"]],
            "suspect": str(suspect) if suspect else None,
            "error": passwords.hidden(end.error),
            "traceback": record.get("traceback"),
            "stacks": report.stacks(self._files) if end.hang else "",
            "history": self._state.attempts,
            "measured": last.get("iteration", 0),
            "metrics": last.get("metrics", {}),
            "decisions": last.get("decisions", []),
            "environment": report.environment(),
            "log": str(log),
            "log_tail": tail,
        }

    # --- the end -----------------------------------------------------------------------------------------------------

    def _done(self) -> int:
        self._state.attempts[-1] |= {"class": DONE, "iteration": None, "error": "", "next": ""}
        self._state.pending, self._state.retries, self._state.seen = None, 0, {}
        self._save()
        number = len(self._state.attempts)
        _say(f"done, in {number} attempt{'s' * (number > 1)}")
        self._tell("done", f"The training has ended after {number} attempts.")
        return 0

    def _stopped(self, end: Ended, beat: Beat | None) -> int:
        """Stopped on purpose: no retry, and the next start goes on with the settings in force."""
        entry = self._state.attempts[-1]
        entry |= {"class": STOPPED, "iteration": beat.iteration if beat else 0, "error": _short(end.error), "next": ""}
        kept = checkpoint_folder({"output_dir": str(self._folder)} | (files.read(self._files / files.CONFIG) or {}))
        found, unreadable = self._newest(kept)
        if unreadable:
            _say(unreadable)
        same = {"checkpoint": str(found), "why": "after a stop", "changed": {}}
        self._state.pending = same if found and self._state.changes else None
        self._save()
        if end.code < 0:  # it could not close its record
            self._close(f"stopped: {end.error}")
        if found:
            again = ["lightning-rlhf supervise", self._own, f"resume={_path(self._folder)}"]
            _say(f"to go on under supervision: {' '.join(filter(None, again))}")
        self._tell("stopped", f"The training was stopped ({_short(end.error)}).")
        return end.exit_code

    def _give_up(self, kind: str, end: Ended, *, once: bool) -> int:
        first = self._state.attempts[0]
        number = len(self._state.attempts)
        if self._touched:
            own_words = end.code > 0 and end.record is not None
            self._close("" if own_words else f"{kind}: {end.error}")
            _say(
                f"the error of the last of {number} attempts:\n{end.error}"
                if number > 1
                else f"the error:\n{end.error}"
            )
            if number > 1 and first.get("error") not in (None, "", _short(end.error)):
                _say(f"the error of the first attempt: {first['error']}")
            if self._report is not None:
                _say(f"report: {self._report}")
        self._tell(f"given up ({kind})", self._state.attempts[-1]["next"])
        if once:
            return 2 if kind == "configuration" else NEVER
        return end.exit_code

    def _close(self, failure: str) -> None:
        """Close the tracked run, which the training could not, or which lacks the last report."""
        wrong = closing.close(self._folder, failure=failure, tags=self._tags(), report=self._report)
        if wrong:
            _say(f"the tracked run was not closed: {wrong}")

    def _tell(self, title: str, text: str) -> None:
        self._notifier.send(f"lightning-rlhf {self._folder.name}: {title}", f"{self._folder}\n{text}", self._report)

    def _save(self) -> None:
        with _said_if_not_written():
            files.write(self._files / files.STATE, asdict(self._state))


@contextmanager
def _said_if_not_written() -> Iterator[None]:
    """A full or read-only disk, often what ended the training, takes neither judgement nor messages from people."""
    try:
        yield
    except OSError as error:
        _say(f"not written, so it is known to this process only: {error}")


def _path(path: Path) -> str:
    return str(path) if re.fullmatch(r"[\w./+-]+", str(path)) else quoted(path)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _short(text: str) -> str:
    """The first line, without passwords, cut."""
    line = passwords.hidden(text.strip().partition("\n")[0])
    return line if len(line) <= 300 else f"{line[:297]}..."


def _say(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)
