"""Load for a service, cheap enough to share its cores: prepared requests, a small TLS client, one loop over epoll.

Every connection makes a full handshake of TLS 1.3. The generator does not check whose certificate the service has:
clients do that, on machines of their own.
"""

import collections
import dataclasses
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from _tls import Client

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

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.number = sock.fileno()
        self.tls = Client()
        self.script: Iterator[bytes] | None = None
        self.unsent = b""
        self.got = b""
        self.began = 0.0
        self.waits = select.EPOLLIN


class Load:
    """Runs scripts against an address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

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
        while not all(line is None or line.tls.shaken for line in lines):
            self._step()
        began = time.perf_counter()
        for line in lines:
            self._next(line)
        while self._lines:
            self._step()
        self._poll.close()
        return Measured(time.perf_counter() - began, dict(self._statuses), np.array(self._latencies))

    def _next(self, line: _Line | None) -> None:
        """Begin the next script, if there is one."""
        script = next(self._todo, None)
        if line is not None and (script is None or self._fresh):
            del self._lines[line.number]
            line.sock.close()
            line = None
        if script is None:
            return
        if line is None:
            line = self._connect()
        line.script = iter(script)
        if line.tls.shaken:
            line.began = time.perf_counter()
            self._send_next(line)

    def _connect(self) -> _Line:
        plain = socket.socket()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = _Line(plain)
        line.began = time.perf_counter()
        plain.connect(self._address)  # to loopback: at once, or never
        plain.setblocking(False)
        self._lines[line.number] = line
        self._poll.register(line.number, select.EPOLLIN)
        self._send(line, line.tls.hello())
        return line

    def _step(self) -> None:
        for number, event in self._poll.poll(60):
            line = self._lines[number]
            if event & select.EPOLLOUT:
                self._send(line, b"")
            else:
                self._read(line)

    def _send(self, line: _Line, data: bytes) -> None:
        """Send this; what does not go out now is sent before anything is read again."""
        data = line.unsent + data
        try:
            line.unsent = data[line.sock.send(data) :]
        except BlockingIOError:
            line.unsent = data
        waits = select.EPOLLOUT if line.unsent else select.EPOLLIN
        if waits != line.waits:
            line.waits = waits
            self._poll.modify(line.number, waits)

    def _send_next(self, line: _Line, before: bytes = b"") -> None:
        request = next(line.script, None)
        if request is None:
            self._latencies.append(time.perf_counter() - line.began)
            self._next(line)
            return
        line.got = b""
        self._send(line, before + line.tls.send(request))

    def _read(self, line: _Line) -> None:
        data = line.sock.recv(_READ)
        shaken = line.tls.shaken
        if not data:
            raise ConnectionError("expected an answer, got the end of the connection")
        line.got += line.tls.receive(data)
        if not shaken:
            self._begin(line)
            return
        head, separator, body = line.got.partition(b"\r\n\r\n")
        if not separator:
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
        if len(body) >= length:
            self._statuses[int(head[9:12])] += 1
            self._send_next(line)

    def _begin(self, line: _Line) -> None:
        """End the handshake if all of it is there, together with the first request if there is one."""
        if line.tls.shaken and line.script is None:
            self._send(line, line.tls.finished)
        elif line.tls.shaken:
            self._send_next(line, line.tls.finished)
