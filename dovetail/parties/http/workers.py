"""Several processes for one service: one runs the rounds, the others answer requests; one that dies is replaced.

They share nothing but the listening socket, the store, and a page of memory each, in which they show what they counted.
The first process only supervises the others, so that it has nothing to die of; when it ends, so do they.
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
    "COORDINATOR",
    "SharedCounts",
    "Supervisor",
    "serve_with_workers",
]

_LOG = logging.getLogger(__name__)
COORDINATOR = 0  # the number of the process that runs the rounds
_PAGE = 16_384  # bytes in which a process shows what it counted
_BAD_INPUT = 2  # the status of a process that would fail again
_LOOK = 0.05  # seconds between looks at the others
_STARTED = 1.0  # seconds after which a process did not die of its start
_STOP_SECONDS = 15.0  # seconds that processes get to end
_SILENCE = PATIENCE + 30.0  # seconds without a sign of life after which a process is killed
_NOTIFY_SECONDS = 2.0  # between two notifications of systemd
_NEVER = struct.pack("<d", 0.0)


class SharedCounts(Counts):
    """What one process of a service counts; `everywhere` adds what the others showed last."""

    def __init__(self, pages: mmap.mmap, number: int) -> None:
        super().__init__()
        self._pages = pages
        self._number = number
        self.update(self._read_counts(number))  # of the process whose place this one takes

    def publish(self) -> None:
        """Show the counts to the other processes."""
        content = json.dumps(self).encode()
        if len(content) + 4 <= _PAGE:
            at = self._number * _PAGE
            self._pages[at : at + 4 + len(content)] = struct.pack("<I", len(content)) + content

    def counts_of_all_processes(self) -> dict[str, int]:
        """The counts of all processes."""
        total = Counts(self)
        for number in range(len(self._pages) // _PAGE):
            if number != self._number:
                total.update(self._read_counts(number))
        return dict(total)

    def _read_counts(self, number: int) -> dict[str, int]:
        at = number * _PAGE
        (length,) = struct.unpack("<I", self._pages[at : at + 4])
        with contextlib.suppress(ValueError):  # it was being written
            return json.loads(self._pages[at + 4 : at + 4 + length] or b"{}")
        return {}


class Supervisor:
    """The processes of a service: a coordinator, and so many workers that answer requests."""

    def __init__(self, num_workers: int) -> None:
        self._size = 1 + num_workers
        self._pages = mmap.mmap(-1, self._size * _PAGE)
        self._ready = mmap.mmap(-1, mmap.PAGESIZE)
        self._beats = mmap.mmap(-1, 8 * self._size)  # when each last showed that it works
        self._notified = 0.0
        self._alive, self._watched = os.pipe()  # its writing end is closed when the first process ends
        self._processes: dict[int, tuple[int, float]] = {}
        self._stopping = False
        self.number: int | None = None  # of this process

    def start(self) -> int:
        """Start the other processes, and return in each of them, with its number; the first one stays here."""
        for number in range(self._size):
            if self._fork_process(number):
                return number
        signal.signal(signal.SIGTERM, self._on_stop_signal)
        signal.signal(signal.SIGINT, self._on_stop_signal)
        while self._processes:
            pid, status = self._wait_for_end()
            number, began = self._processes.pop(pid)
            if self._stopping:
                continue
            if os.waitstatus_to_exitcode(status) == _BAD_INPUT:
                self._stop_processes(_BAD_INPUT)
            _LOG.warning("process %d of the service ended (%s) and is replaced", number, _exit_reason(status))
            if time.monotonic() - began < _STARTED:
                time.sleep(_STARTED)
            if self._fork_process(number):
                return number
        raise SystemExit(0)

    def beat(self) -> None:
        """Show that this process works."""
        if self.number is not None:
            self._beats[8 * self.number : 8 * self.number + 8] = struct.pack("<d", time.monotonic())

    def _wait_for_end(self) -> tuple[int, int]:
        """Wait until a process ends, and return its id and status; looks often, for a signal may come between looks."""
        while not (ended := os.waitpid(-1, os.WNOHANG))[0]:
            self._kill_silent_processes(time.monotonic())
            time.sleep(_LOOK)
        return ended

    def _kill_silent_processes(self, now: float) -> None:
        """Kill processes that are stopped; those that hang end by themselves. Notify systemd that this one works."""
        for pid, (number, _) in self._processes.items():
            (last,) = struct.unpack("<d", self._beats[8 * number : 8 * number + 8])
            if last and now - last > _SILENCE:
                _LOG.warning("process %d of the service said nothing for %.0f seconds and is ended", number, now - last)
                os.kill(pid, signal.SIGKILL)
                self._beats[8 * number : 8 * number + 8] = _NEVER
        if now > self._notified + _NOTIFY_SECONDS:
            self._notified = now
            notify_systemd("WATCHDOG=1")

    def counts(self) -> SharedCounts:
        """The counts of this process."""
        return SharedCounts(self._pages, COORDINATOR if self.number is None else self.number)

    def await_store(self) -> None:
        """Wait until the coordinator has made the store."""
        while not self._ready[0]:
            time.sleep(0.01)

    def mark_store_ready(self) -> None:
        """Show the other processes that the store is there."""
        self._ready[0] = 1

    @staticmethod
    def run(work: Coroutine[Any, Any, None]) -> None:
        """Run this until the process is told to stop."""

        async def run_until_stopped() -> None:
            task = asyncio.ensure_future(work)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run(run_until_stopped())

    def _fork_process(self, number: int) -> bool:
        """Start a process; True in it. Signals wait until this one knows of the process, and would end it, too."""
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
        threading.Thread(target=self._end_with_supervisor, daemon=True).start()
        return True

    def _end_with_supervisor(self) -> None:
        """End this process when the supervisor has, whose end of the pipe then closes."""
        os.read(self._alive, 1)
        os._exit(1)

    def _on_stop_signal(self, *_: object) -> None:
        """Stop once, however many signals come."""
        if not self._stopping:
            self._stopping = True
            self._stop_processes(0)

    def _stop_processes(self, status: int) -> NoReturn:
        """Stop all processes, by SIGKILL those that take too long, and exit with this status."""
        self._stopping = True
        end = time.monotonic() + _STOP_SECONDS
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


def _exit_reason(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"status {code}"


def serve_with_workers(
    make: Callable[..., tuple[Any, Any]],
    num_workers: int,
    *,
    host: str,
    port: int,
    certificate: Path | None,
    private_key: Path | None,
    ready: Callable[[str], None],
) -> None:
    """Serve until told to stop, by worker processes and a coordinator; this process supervises them.

    Arguments:
        make: called in each of them with `coordinates`, whether it runs the rounds, and `counts`; gives its party and
            its service.
        num_workers: processes that answer requests.
        host: the address to listen on.
        port: 0: any free one.
        certificate: for TLS, with its private key; None: plain HTTP.
        private_key: belongs to the certificate.
        ready: gets the URL as soon as connections are accepted.
    """
    max_connections = server.raise_connection_limit()
    listener = server.listen(host, port)
    supervisor = Supervisor(num_workers)
    ready(server.url_of_listener(listener, host, tls=certificate is not None))
    notify_systemd("READY=1")
    number = supervisor.start()
    if number != COORDINATOR:
        supervisor.await_store()
    party, service = make(coordinates=number == COORDINATOR, counts=supervisor.counts())
    try:
        if number == COORDINATOR:
            listener.close()
            supervisor.mark_store_ready()
            service.pulse.kill_when_hanging(supervisor.beat)
            supervisor.run(service.run_rounds())
        else:
            tls = {"certificate": certificate, "private_key": private_key}
            server.serve_on(service.app, listener, **tls, max_connections=max_connections, report_alive=supervisor.beat)
    finally:
        party.close()
