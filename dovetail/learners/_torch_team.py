"""Who trains the clients of a module one by one: threads, and processes in their place where training takes long.

Threads wait for Python's lock, which costs them about a tenth of their time; processes take seconds to start and memory
of their own. So threads train until they have taken as long as processes take to start, and go on until those are
ready. Both make the same updates, bit by bit. A module or loss that another process cannot load, as of a notebook, and
whatever goes wrong with a process, leaves the work with the threads.

Run as a program, this module is such a process: `python -m dovetail.learners._torch_team LINK MEMORY`.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch

from dovetail.learners import _torch
from dovetail.learners._torch import Copies, Copy

__all__ = ["Team"]

_START = 2.0  # seconds that threads train before processes are started, which takes about as long
_ALIGNED = 64  # bytes: where arrays begin in shared memory
_KEPT = str(1 << 30)  # bytes that a process keeps for its next step
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # glibc keeps a step's memory for the next one, in large pages: a tenth of the time otherwise.
    "MALLOC_MMAP_THRESHOLD_": _KEPT,
    "MALLOC_TRIM_THRESHOLD_": _KEPT,
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

_log = logging.getLogger("dovetail.learners")


class Team:
    """Threads or processes, one per core, that train clients of this module with this loss.

    Arguments:
        processes: True trains with processes from the first client on, False never, None once threads have trained for
            `_START` seconds.
        isolated: whether the module runs nothing but PyTorch's own code.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: str | _torch.Loss,
        processes: bool | None = None,
        *,
        isolated: bool = False,
    ) -> None:
        self._module = module
        self._loss = loss
        self._processes = processes
        self._isolated = isolated
        self._copies = Copies(module, _torch.num_threads(), isolated=isolated)
        self._total_loss = _torch.loss_sum(loss)
        self._seconds_trained = 0.0
        self._turn = threading.Lock()
        self._pool: _Pool | None = None

    def updates(
        self, steps: _torch.LocalSteps, start: torch.Tensor, x: torch.Tensor, y: torch.Tensor, counts: np.ndarray
    ) -> torch.Tensor:
        """The updates (clients, dim) of some clients; one call at a time, others wait.

        Arguments:
            steps: what a client does with its records.
            start: the flat vector of parameters.
            x: inputs, (clients, records, ...), of which the first `counts` of each client are its own.
            y: labels, in the same way; classes as int64.
        """
        with self._turn:
            pool = self._pool_if_ready(start)
            updates = None if pool is None else pool.updates(steps, start, x, y, counts)
            return self._train_on_threads(steps, start, x, y, counts) if updates is None else updates

    def _train_on_threads(
        self, steps: _torch.LocalSteps, start: torch.Tensor, x: torch.Tensor, y: torch.Tensor, counts: np.ndarray
    ) -> torch.Tensor:
        """The updates, computed by threads; adds the time that it took to `_seconds_trained`."""

        def train(client: int) -> torch.Tensor:
            with self._copies.borrow() as own:
                rows = slice(int(counts[client]))
                return _torch.train_client(own, self._total_loss, steps, start, x[client, rows], y[client, rows])

        began = time.perf_counter()
        updates = torch.stack(_torch.run_in_threads(train, range(len(counts))))
        self._seconds_trained += time.perf_counter() - began
        return updates

    def _pool_if_ready(self, start: torch.Tensor) -> _Pool | None:
        """The processes, if they are to train now; starts them when it is time, and meanwhile returns None."""
        if self._pool is None:
            able = start.device.type == "cpu" and _torch.num_threads() > 1 and hasattr(os, "memfd_create")
            if not able or self._processes is False or not (self._processes or self._seconds_trained > _START):
                return None
            self._pool = _Pool(self._module, self._loss, isolated=self._isolated)
        if self._processes:
            self._pool.wait()
        return self._pool if self._pool.ready else None


class _Array(NamedTuple):
    """Where an array lies in the memory that processes share: `offset` in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    def view_in(self, memory: mmap.mmap) -> np.ndarray:
        """The array itself; who writes to it writes to the shared memory."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset)


class _Client(NamedTuple):
    """What a process is asked for: to train a client and write its row of the updates.

    `client` is its place among the clients, of which it has the first `records` records.
    """

    steps: _torch.LocalSteps
    client: int
    records: int
    arrays: tuple[_Array, ...]  # weights, inputs, labels, updates


class _Pool:
    """Processes, one per core; what they train with and what they make lies in memory that all of them share."""

    def __init__(self, module: torch.nn.Module, loss: str | _torch.Loss, *, isolated: bool) -> None:
        self._memory = _Memory(os.memfd_create("dovetail-torch"))
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._started: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._threads = ThreadPoolExecutor(_torch.num_threads(), "torch-process")
        self._shut_down = weakref.finalize(self, _shut_down, self._started, self._memory)
        self.ready = False
        self._starting = threading.Thread(target=self._start, args=(module, loss, isolated), daemon=True)
        self._starting.start()

    def wait(self) -> None:
        """Wait until the processes are ready, or starting them has failed (`ready` says which)."""
        self._starting.join()

    def _start(self, module: torch.nn.Module, loss: str | _torch.Loss, isolated: bool) -> None:
        """Start the processes and send them the module; if one fails, none is used."""
        try:
            work = pickle.dumps((module, loss, isolated))
            for _ in range(_torch.num_threads()):
                self._started.append(_launch(self._memory.file))
            for _, link in self._started:
                link.send(sys.path)
                link.send_bytes(work)
            for _, link in self._started:
                _receive_answer(link)
                self._idle.put(link)
            self.ready = True
        except Exception as error:  # whatever a module's own code raises, too
            _log.info("clients train on threads, as processes cannot: %s: %s", type(error).__name__, error)
            self._give_up()

    def updates(
        self, steps: _torch.LocalSteps, start: torch.Tensor, x: torch.Tensor, y: torch.Tensor, counts: np.ndarray
    ) -> torch.Tensor | None:
        """The updates (clients, dim); None if a process ended or could not train: no process is used from then on."""
        try:
            inputs = [tensor.numpy() for tensor in (start, x, y)]
            arrays = self._memory.lay_out(inputs, (len(counts), len(start)))
            clients = [_Client(steps, i, int(count), arrays) for i, count in enumerate(counts)]
            list(self._threads.map(self._train, clients))
            return torch.from_numpy(arrays[-1].view_in(self._memory.view).copy())
        except Exception as error:
            _log.warning(
                "clients train on threads from now on, as a process ended: %s: %s", type(error).__name__, error
            )
            self._give_up()
            return None
        except BaseException:  # who asked is interrupted: what processes still send has nobody to read it
            self._give_up()
            raise

    def _train(self, client: _Client) -> None:
        """Let a process that is idle train a client, and wait for it."""
        link = self._idle.get()
        try:
            link.send(client)
            _receive_answer(link)
        finally:
            self._idle.put(link)

    def _give_up(self) -> None:
        """End all processes, so that training goes on with threads."""
        self.ready = False
        _kill(self._started)  # threads that wait for one hear of it
        self._threads.shutdown(cancel_futures=True)
        self._shut_down()


class _Memory:
    """A file in memory, by its descriptor, that grows as needed and is mapped by several processes."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._view: mmap.mmap | None = None

    @property
    def view(self) -> mmap.mmap:
        """The whole file, mapped."""
        size = os.fstat(self.file).st_size
        if self._view is None or len(self._view) != size:
            self._view = mmap.mmap(self.file, size)  # arrays of the one before may still be in use
        return self._view

    def lay_out(self, inputs: Sequence[np.ndarray], updates: tuple[int, int]) -> tuple[_Array, ...]:
        """Write these arrays into the file, and leave room for updates of this shape (float32) behind them.

        Returns: where each array lies, the updates last.
        """
        arrays = []
        end = 0
        for shape, dtype in [*((array.shape, array.dtype) for array in inputs), (updates, np.dtype(np.float32))]:
            arrays.append(_Array(end, shape, dtype.str))
            end += -(-int(np.prod(shape, dtype=np.int64)) * dtype.itemsize // _ALIGNED) * _ALIGNED
        if end > os.fstat(self.file).st_size:
            os.ftruncate(self.file, end)
        for array, values in zip(arrays, inputs, strict=False):
            array.view_in(self.view)[...] = values
        return tuple(arrays)

    def close(self) -> None:
        """Close the file; its memory is freed when no process maps it any more."""
        os.close(self.file)


def _launch(memory: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that serves `_serve`; returns it and our end of the connection."""
    ours, theirs = Pipe()
    with theirs:
        passed = (theirs.fileno(), memory)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
        )
    return process, ours


def _receive_answer(link: Connection) -> None:
    """Wait until a process says that it is done; raise what went wrong there."""
    if (trouble := link.recv()) is not None:
        raise RuntimeError(trouble)


def _kill(started: list[tuple[subprocess.Popen[bytes], Connection]]) -> None:
    """End the processes at once."""
    for process, _ in started:
        process.kill()  # it has nothing to lose
        process.wait()


def _shut_down(started: list[tuple[subprocess.Popen[bytes], Connection]], memory: _Memory) -> None:
    """End the processes, and close what was shared with them."""
    _kill(started)
    for _, link in started:
        link.close()
    memory.close()


def _serve(link: Connection, memory: _Memory) -> None:
    """The main loop of a process: train the clients that the other end of the link asks for, until it is closed.

    First come the Python path and the pickled module, loss and `isolated`; every request is answered by None or by what
    went wrong.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    torch.set_num_threads(1)
    sys.path[:] = link.recv()
    try:
        module, loss, isolated = pickle.loads(link.recv_bytes())
    except Exception as error:
        link.send(f"{type(error).__name__}: {error}")
        return
    train = functools.partial(_torch.train_client, Copy(module, isolated=isolated), _torch.loss_sum(loss))
    link.send(None)
    while True:
        try:
            link.send(_train_into(train, link.recv(), memory.view))
        except (EOFError, OSError):
            return


def _train_into(train: Callable[..., torch.Tensor], request: _Client, memory: mmap.mmap) -> str | None:
    """Write the update that is asked for where it belongs; returns what went wrong, or None."""
    start, x, y, updates = (torch.from_numpy(array.view_in(memory)) for array in request.arrays)
    client = request.client
    rows = slice(request.records)
    try:
        updates[client] = train(request.steps, start, x[client, rows], y[client, rows]).detach()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), _Memory(int(sys.argv[2])))
