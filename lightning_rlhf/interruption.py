"""SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal was closed) and SIGUSR1 (a scheduler's notice): the first ends a run
between two iterations, a second one at once."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_rlhf.files import as_file, write_whole

REQUEST = "stop_request"
"""File in a run's output folder: the launcher of several processes writes a signal's number there to stop them."""
REQUEST_VARIABLE = "LIGHTNING_RLHF_STOP_REQUEST"
"""Environment variable with that file's path, for the started processes."""

_POLL_SECONDS = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Interrupted(SIGTERMException):
    """A signal ended the run. A ``SystemExit``, so Lightning, Hydra and ``except Exception`` let it through.

    Args:
        signum: number of the signal; the exit code is 128 + ``signum``, as in shells.
        on_every_rank: whether all processes of the run raise it at the same point.
        told: whether the user has been told how to resume.
    """

    def __init__(self, signum: int, *, on_every_rank: bool = False, told: bool = False) -> None:
        super().__init__(128 + signum)
        self.signum, self.on_every_rank, self.told = signum, on_every_rank, told

    def __str__(self) -> str:
        return signal.Signals(self.signum).name


class Signals:
    """Handles these signals while the context is active.

    A signal raises :class:`Interrupted` in the main thread. After :meth:`hold` the first one is only stored in
    :attr:`received`, and the code that called ``hold`` raises later. A second signal raises at once, but a SIGHUP after
    another signal is ignored: a closing terminal may send several. A signal that was ignored before (``nohup``, jobs in
    the background) stays ignored. Outside the main thread no handler is installed; requests by file still work.

    Args:
        request: file to watch for another process's request (see :data:`REQUEST`); ``None``: the one that the
            environment names, if any.
    """

    def __init__(self, request: Path | None = None) -> None:
        self.received = 0
        """Number of the first signal, 0 if there was none."""
        named = os.environ.get(REQUEST_VARIABLE)
        self._request = Path(named) if request is None and named else request
        self._held: str | None = None
        self._former: dict[int, Any] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in _SIGNALS}
            self._former = {n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None)}
        self.install()
        _active.append(self)
        if self._request is not None:
            threading.Thread(target=self._watch, args=(self._request,), name="stop request", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        _active.remove(self)
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Install the handlers; again after Lightning or Ray has installed its own."""
        if threading.current_thread() is threading.main_thread():
            for number in self._former:
                signal.signal(number, self._on_signal)

    def hold(self, said: str) -> None:
        """From here on work is finished before a signal ends it; ``said`` is printed when the signal arrives."""
        self._held = said

    def release(self) -> None:
        """The next signal raises again. One already stored does not: the code that called :meth:`hold` raises it."""
        self._held = None

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            _let_go_of_closed_terminals()
            if self.received:
                return
        if self.received:
            for number in self._former:  # a third signal kills the process
                signal.signal(number, signal.SIG_DFL)
            raise Interrupted(signum)
        self.received = signum
        if self._held is None:
            raise Interrupted(signum)
        if os.environ.get("RANK", "0") == "0":  # only rank 0 prints
            say(self._held if REQUEST_VARIABLE in os.environ else f"{self._held}; {again(signum)} to stop now")

    def _watch(self, request: Path) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            signum = read_request(request)
            if signum and not self.received:
                if signum in self._former:
                    os.kill(os.getpid(), signum)  # Python runs the handler in the main thread
                else:
                    self.received = signum
                return


_active: list[Signals] = []


def from_signal(error: BaseException) -> bool:
    """Whether a signal raised this exception, and not a ``sys.exit`` or a KeyboardInterrupt of some code.

    While :class:`Signals` has handlers installed, a signal raises :class:`Interrupted`.
    """
    handled = any(active._former for active in _active)
    return isinstance(error, SIGTERMException) or (isinstance(error, KeyboardInterrupt) and not handled)


def signals() -> Signals:
    """The innermost active context; without one, a context that never receives a signal."""
    return _active[-1] if _active else Signals()


def again(signum: int) -> str:
    """How the user sends the signal once more, to stop at once."""
    return "press Ctrl-C again" if signum == signal.SIGINT else f"kill {os.getpid()}"


def say(text: str) -> None:
    """Write a line to stderr; safe inside a signal handler, where ``print`` is not."""
    with suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())


# --- several processes -----------------------------------------------------------------------------------------------


@contextmanager
def passed_on(folder: Path) -> Iterator[Signals]:
    """In the launcher of a run's processes: the first signal asks them to stop, the second one raises here."""
    request = as_file(folder / REQUEST)
    request.unlink(missing_ok=True)
    own = _PassedOn(request)
    own.hold("stopping between two iterations")
    try:
        with own:
            yield own
    finally:
        request.unlink(missing_ok=True)


class _PassedOn(Signals):
    def __init__(self, request: Path) -> None:
        super().__init__()
        self._file = request

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self.received:
            write_whole(self._file, str(int(signum)))  # atomic: half of 15 would be 1, another signal
        super()._on_signal(signum, frame)


def read_request(file: Path) -> int:
    """Number of the requested signal, 0 if none."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _let_go_of_closed_terminals() -> None:
    """Redirect stdout and stderr to /dev/null if their terminal is gone: every print would be an error."""
    nowhere = os.stat(os.devnull).st_rdev
    for descriptor in (1, 2):
        with suppress(OSError):
            there = os.fstat(descriptor)
            if stat.S_ISCHR(there.st_mode) and there.st_rdev != nowhere and not os.isatty(descriptor):
                file = os.open(os.devnull, os.O_WRONLY)
                os.dup2(file, descriptor)
                os.close(file)
