"""Several processes for one service: one keeps the rounds, the others answer the door; who dies or hangs is replaced.

They share nothing but the listening socket, the store, and a page of memory each, in which they say what they counted.
The first process only watches over the others, so that it has nothing to die of; when it ends, so do they.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

from dovetail.parties.http import server
from dovetail.parties.http.monitoring import PATIENCE, notify_systemd
from dovetail.parties.http.requests import Counts

__all__ = [
    "KEEPER",
    "SharedCounts",
    "Supervisor",
    "serve_with_workers",
]

_LOG = logging.getLogger(__name__)
KEEPER = 0  # the number of the process that keeps the rounds
_PAGE = 16_384  # bytes in which a process says what it counted
_BAD_INPUT = 2  # the status of a process that would fail again
_LOOK = 0.05  # seconds between looks at the others
_SETTLED = 1.0  # seconds after which a process did not die of its start
_LAST_WORDS = 15.0  # seconds that processes get to end
_SILENCE = PATIENCE + 30.0  # seconds without a sign of life after which a process was stopped, and is ended
_TOLD = 2.0  # seconds between two words to systemd
_NEVER = struct.pack("<d", 0.0)


class SharedCounts(Counts):
    """What this process of a crew counts; `everywhere` adds what the others said last."""

    def __init__(self, pages: mmap.mmap, number: int) -> None:
        super().__init__()
        self._pages, self._number = pages, number
        self.update(self._read(number))  # of one that died

    def publish(self) -> None:
        """Tell the others."""
        said = json.dumps(self).encode()
        if len(said) + 4 <= _PAGE:
            at = self._number * _PAGE
            self._pages[at : at + 4 + len(said)] = struct.pack("<I", len(said)) + said

    def everywhere(self) -> dict[str, int]:
        """What all processes counted."""
        total = Counts(self)
        for number in range(len(self._pages) // _PAGE):
            if number != self._number:
                total.update(self._read(number))
        return dict(total)

    def _read(self, number: int) -> dict[str, int]:
        at = number * _PAGE
        (length,) = struct.unpack("<I", self._pages[at : at + 4])
        with contextlib.suppress(ValueError):  # it was being written
            return json.loads(self._pages[at + 4 : at + 4 + length] or b"{}")
        return {}


class Supervisor:
    """The processes of a service: a keeper and so many that answer the door."""

    def __init__(self, doors: int) -> None:
        self._size = 1 + doors
        self._pages = mmap.mmap(-1, self._size * _PAGE)
        self._ready = mmap.mmap(-1, mmap.PAGESIZE)
        self._beats = mmap.mmap(-1, 8 * self._size)  # when each last said that it works
        self._told = 0.0
        self._alive, self._watched = os.pipe()  # ends when the first process does
        self._processes: dict[int, tuple[int, float]] = {}
        self._stopping = False
        self.number: int | None = None  # of this process

    def start(self) -> int:
        """Start the others; returns in each of them, with its number. The first process stays here until the end."""
        for number in range(self._size):
            if self._fork(number):
                return number
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        while self._processes:
            pid, status = self._next_end()
            number, began = self._processes.pop(pid)
            if self._stopping:
                continue
            if os.waitstatus_to_exitcode(status) == _BAD_INPUT:
                self._end(_BAD_INPUT)
            _LOG.warning("process %d of the service ended (%s) and is replaced", number, _how(status))
            if time.monotonic() - began < _SETTLED:
                time.sleep(_SETTLED)
            if self._fork(number):
                return number
        raise SystemExit(0)

    def beat(self) -> None:
        """Say that this process works."""
        if self.number is not None:
            self._beats[8 * self.number : 8 * self.number + 8] = struct.pack("<d", time.monotonic())

    def _next_end(self) -> tuple[int, int]:
        """Which process ended, and how; a wait without end would miss a signal that comes just before it begins."""
        while not (found := os.waitpid(-1, os.WNOHANG))[0]:
            self._end_silent(time.monotonic())
            time.sleep(_LOOK)
        return found

    def _end_silent(self, now: float) -> None:
        """End processes that were stopped; those that hang end by themselves. This one works."""
        for pid, (number, _) in self._processes.items():
            (last,) = struct.unpack("<d", self._beats[8 * number : 8 * number + 8])
            if last and now - last > _SILENCE:
                _LOG.warning("process %d of the service said nothing for %.0f seconds and is ended", number, now - last)
                os.kill(pid, signal.SIGKILL)
                self._beats[8 * number : 8 * number + 8] = _NEVER
        if now > self._told + _TOLD:
            self._told = now
            notify_systemd("WATCHDOG=1")

    def counts(self) -> SharedCounts:
        """What this process counts."""
        return SharedCounts(self._pages, KEEPER if self.number is None else self.number)

    def await_keeper(self) -> None:
        """Wait until the store is there."""
        while not self._ready[0]:
            time.sleep(0.01)

    def kept(self) -> None:
        """Say that the store is there."""
        self._ready[0] = 1

    @staticmethod
    def run(work: Coroutine[Any, Any, None]) -> None:
        """Do this until told to stop."""

        async def until_told() -> None:
            task = asyncio.ensure_future(work)
            for one in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(one, task.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run(until_told())

    def _fork(self, number: int) -> bool:
        """A new process; True in it. Who is told to stop meanwhile stops when it knows of the process, and ends it."""
        self._beats[8 * number : 8 * number + 8] = _NEVER
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            pid = os.fork()
            if pid:
                self._processes[pid] = number, time.monotonic()
                return False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.number = number
        os.close(self._watched)
        threading.Thread(target=self._end_with_the_first, daemon=True).start()
        return True

    def _end_with_the_first(self) -> None:
        os.read(self._alive, 1)
        os._exit(1)

    def _stop(self, *_: object) -> None:
        if not self._stopping:
            self._stopping = True
            self._end(0)

    def _end(self, status: int) -> NoReturn:
        self._stopping = True
        end = time.monotonic() + _LAST_WORDS
        for pid in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in list(self._processes):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(pid, os.WNOHANG)[0] == 0:
                    if time.monotonic() > end:
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.02)
        raise SystemExit(status)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"status {code}"


def serve_with_workers(
    make: Callable[..., tuple[Any, Any]],
    doors: int,
    *,
    host: str,
    port: int,
    certificate: Path | None,
    private_key: Path | None,
    ready: Callable[[str], None],
) -> None:
    """Serve until told to stop, by so many processes and one that keeps the rounds; this one watches over them.

    `make` gives a party and its service in a process that keeps the rounds, or does not, and counts.
    """
    most, listener, crew = server.max_connections(), server.listen(host, port), Supervisor(doors)
    ready(server.address_of(listener, host, tls=certificate is not None))
    notify_systemd("READY=1")
    number = crew.start()
    if number != KEEPER:
        crew.await_keeper()
    party, service = make(keeps=number == KEEPER, counts=crew.counts())
    try:
        if number == KEEPER:
            listener.close()
            crew.kept()
            service.pulse.guard(crew.beat)
            crew.run(service.keep())
        else:
            tls = {"certificate": certificate, "private_key": private_key}
            server.answer(service.app, listener, **tls, most=most, tell=crew.beat)
    finally:
        party.shut()
