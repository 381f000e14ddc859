"""Load for a service, cheap enough to share its cores: prepared requests, nonblocking TLS, one loop over epoll.

The generator does not check the service's certificate: clients do that, on machines of their own.
"""

import collections
import dataclasses
import select
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

_READ = 1 << 16


@dataclasses.dataclass
class Measured:
    """What came of some load."""

    seconds: float
    statuses: dict[int, int]
    latencies: np.ndarray  # seconds, of every script: from its first byte, or from connecting, to its last answer

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.latencies, share))


class _Line:
    """One connection, on its way through a script: requests, each after the answer to the one before."""

    def __init__(self, sock: socket.socket, tls: Any) -> None:
        self.sock, self.tls, self.number, self.shaken = sock, tls, sock.fileno(), False
        self.script: Iterator[bytes] = iter(())
        self.out, self.got, self.began = memoryview(b""), b"", 0.0


class Load:
    """Runs scripts against an address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    def run(self, scripts: Iterable[Sequence[bytes]], *, connections: int, fresh: bool = False) -> Measured:
        """Every script once, so many at a time; `fresh`: each on a connection of its own.

        Connections that stay are there before the clock starts.
        """
        self._todo, self._fresh = iter(scripts), fresh
        self._lines: dict[int, _Line] = {}
        self._statuses: collections.Counter[int] = collections.Counter()
        self._latencies: list[float] = []
        self._poll = select.epoll()
        lines = [None if fresh else self._connect() for _ in range(connections)]
        while any(line is not None and not line.shaken for line in lines):
            for number, _ in self._poll.poll(60):
                self._shake(self._lines[number])
        began = time.perf_counter()
        for line in lines:
            self._next(line)
        while self._lines:
            for number, _ in self._poll.poll(60):
                self._step(self._lines[number])
        self._poll.close()
        return Measured(time.perf_counter() - began, dict(self._statuses), np.array(self._latencies))

    def _next(self, line: _Line | None) -> None:
        """Begin the next script, if there is one."""
        script = next(self._todo, None)
        if line is not None and (script is None or self._fresh):
            del self._lines[line.number]
            self._poll.unregister(line.number)
            line.sock.close()
            line = None
        if script is None:
            return
        if line is None:
            line = self._connect()
        line.script = iter(script)
        if line.shaken:
            line.began = time.perf_counter()
            self._send_next(line)

    def _connect(self) -> _Line:
        plain = socket.socket()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        plain.connect(self._address)  # to loopback: at once, or never
        plain.setblocking(False)
        line = _Line(plain, self._context._wrap_socket(plain, False))  # without the layers of `SSLSocket`
        line.began = began
        self._lines[line.number] = line
        self._poll.register(line.number, select.EPOLLIN | select.EPOLLOUT)
        return line

    def _step(self, line: _Line) -> None:
        if not line.shaken:
            self._shake(line)
            if line.shaken:
                self._send_next(line)
            return
        try:
            if line.out:
                self._send(line)
            else:
                self._read(line)
        except ssl.SSLWantReadError:
            self._poll.modify(line.number, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._poll.modify(line.number, select.EPOLLIN | select.EPOLLOUT)

    def _shake(self, line: _Line) -> None:
        try:
            line.tls.do_handshake()
            line.shaken = True
            self._poll.modify(line.number, select.EPOLLIN)
        except ssl.SSLWantReadError:
            self._poll.modify(line.number, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._poll.modify(line.number, select.EPOLLIN | select.EPOLLOUT)

    def _send_next(self, line: _Line) -> None:
        request = next(line.script, None)
        if request is None:
            self._latencies.append(time.perf_counter() - line.began)
            self._next(line)
            return
        line.out, line.got = memoryview(request), b""
        self._send(line)

    def _send(self, line: _Line) -> None:
        try:
            while line.out:
                line.out = line.out[line.tls.write(line.out) :]
        except ssl.SSLWantWriteError:
            self._poll.modify(line.number, select.EPOLLIN | select.EPOLLOUT)
            return
        self._poll.modify(line.number, select.EPOLLIN)

    def _read(self, line: _Line) -> None:
        data = line.tls.read(_READ)
        if not data:
            raise ConnectionError("expected an answer, got the end of the connection")
        line.got += data
        head, found, body = line.got.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
        if len(body) >= length:
            self._statuses[int(head[9:12])] += 1
            self._send_next(line)
