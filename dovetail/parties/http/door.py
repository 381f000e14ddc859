"""The door of a service: connections that are accepted, kept within limits, and served by uvicorn on uvloop.

Whoever says nothing, says it too slowly, or does not read the answer is let go of. If as many are connected as the
process has files for, the one that has been silent for longest makes room for the next: silence never closes the door.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import resource
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.parties.http import _http

__all__ = ["Door", "address_of", "answer", "configured", "listen", "most_connections", "serve"]

_HANDSHAKE, _GOODBYE = 10.0, 5.0  # seconds for TLS to begin and to end
_HEAD = 10.0  # seconds for the head of a request
_LARGEST_HEAD = 64 * 1024  # bytes
_UNREAD = 60.0  # seconds in which somebody must read on
_IDLE = 30.0  # seconds that a connection is kept for another request
_LINGER = 5.0  # seconds in which who was refused before all had come may read the answer, and end
_AHEAD = 8  # requests of one connection that wait for their turn; each costs a hundred times its bytes
_AT_ONCE = 64  # connections that are accepted in a row
_OWN_FILES = 128  # files that are not connections: the store, links to others, what is loaded later
_SWITCH = 0.001  # seconds after which the thread that writes gets its turn
_FEWEST = 64  # connections below which serving makes no sense


def most_connections() -> int:
    """How many connections this process has files for; raises its soft limit as far as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (1 << 16 if soft == resource.RLIM_INFINITY else min(soft, 1 << 16)) - _OWN_FILES
    if most < _FEWEST:
        raise ValueError(f"expected a limit of at least {_OWN_FILES + _FEWEST} open files (ulimit -n), got {soft}")
    return most


class _Connection(HttpToolsProtocol):
    """One connection; `quiet` are those that nothing is being done for, the longest silent first."""

    quiet: dict[_Connection, None]
    _since = 0.0  # when what is being waited for began
    _waiting: float | None = None  # how long it may take; None: it is our turn
    _head = 0  # bytes of the head that is coming
    _unread: float | None = None  # since when the other side does not read
    _closing: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = None  # nobody is to know
        self._await(_HEAD)
        self.quiet[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.quiet.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._waiting == _IDLE:  # the next request begins
            self._await(_HEAD)
        super().data_received(data)
        if self._waiting == _HEAD and not self.transport.is_closing():
            self._head += len(data)
            if self._head > _LARGEST_HEAD:
                self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _AHEAD:
            raise ValueError("expected answers to be waited for")  # the parser ends the connection
        self.quiet.pop(self, None)
        self._head = 0
        stated = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._await(_http.SLOWEST + min(stated, 1 << 40) / _http.SLOWEST_RATE + _HEAD)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.cycle.response_complete:  # it was refused before all of it had come
            self._rest()
        else:
            self._waiting = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """As the base does, but for its timer: `overdue` does with one look at everybody's clock a second."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        else:
            self._rest(_IDLE if self._waiting is None else _LINGER)

    def pause_writing(self) -> None:
        self._unread = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread = None
        super().resume_writing()

    def _rest(self, seconds: float = _IDLE) -> None:
        self._await(seconds)
        self.quiet[self] = None

    def _await(self, seconds: float) -> None:
        self._since, self._waiting = self.loop.time(), seconds

    def overdue(self, now: float) -> bool:
        """Whether the other side lets us wait for too long."""
        if self.transport.is_closing():
            self._closing = self._closing or now
            return now - self._closing > _GOODBYE
        if self._unread is not None and now - self._unread > _UNREAD:
            return True
        return self._waiting is not None and now - self._since > self._waiting + 1.0

    def drop(self) -> None:
        """Let go of it, without another word."""
        self.transport.abort()


class Door(uvicorn.Server):
    """A server that accepts at most so many connections, and lets go of the longest silent one if there are more."""

    def __init__(self, config: uvicorn.Config, *, most: int) -> None:
        super().__init__(config)
        self._most = most
        self._shaking: dict[socket.socket, None] = {}  # TLS has not begun yet
        self._quiet: dict[_Connection, None] = {}
        self._kind = type("Connection", (_Connection,), {"quiet": self._quiet})
        self._tasks: set[asyncio.Task[None]] = set()
        self.turned = collections.Counter[str]()

    @property
    def open(self) -> int:
        """Connections, also those in which TLS has not begun yet."""
        return len(self._shaking) + len(self.server_state.connections)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("expected a service that starts, got one that does not")
        self.servers = []
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            listener.setblocking(False)
            loop.add_reader(listener.fileno(), self._accept, listener)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody any more, and say good-bye."""
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            loop.remove_reader(listener.fileno())
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Once a second, let go of whom there is no point in waiting for."""
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, _Connection) and connection.overdue(now):
                    self.turned["overdue"] += 1
                    connection.drop()
        return await super().on_tick(counter)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _address = listener.accept()
            except OSError:  # nobody is left, or who was there has gone
                return
            if self.open >= self._most and not self._make_room():
                self.turned["no room"] += 1
                accepted.close()
                continue
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._shaking[accepted] = None
            task = asyncio.get_running_loop().create_task(self._begin(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _make_room(self) -> bool:
        """Let go of whoever has been silent for longest; False if everybody is being served."""
        silent = next(iter(self._shaking), None)
        if silent is not None:
            del self._shaking[silent]
            with contextlib.suppress(OSError):
                silent.shutdown(socket.SHUT_RDWR)
        else:
            quiet = next(iter(self._quiet), None)
            if quiet is None:
                return False
            del self._quiet[quiet]
            quiet.drop()
        self.turned["silent"] += 1
        return True

    async def _begin(self, accepted: socket.socket) -> None:
        options: dict[str, Any] = {}
        if self.config.ssl is not None:
            seconds = {"ssl_handshake_timeout": _HANDSHAKE, "ssl_shutdown_timeout": _GOODBYE}
            options = {"ssl": self.config.ssl, **seconds}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, accepted, **options)
        except (OSError, ssl.SSLError, ConnectionError, TimeoutError):
            accepted.close()  # it spoke no TLS, or not in time
        finally:
            self._shaking.pop(accepted, None)

    def _connection(self) -> asyncio.Protocol:
        return self._kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def serve(
    app: Starlette,
    *,
    host: str,
    port: int,
    certificate: Path | None,
    private_key: Path | None,
    ready: Callable[[str], None],
) -> None:
    """Serve until told to stop; `ready` gets the address as soon as connections are taken."""
    most = most_connections()
    listener = listen(host, port)
    ready(address_of(listener, host, tls=certificate is not None))
    answer(app, listener, certificate=certificate, private_key=private_key, most=most)


def answer(
    app: Starlette, listener: socket.socket, *, certificate: Path | None, private_key: Path | None, most: int
) -> None:
    """Answer what comes to a listening socket until told to stop."""
    sys.setswitchinterval(_SWITCH)
    Door(configured(app, certificate, private_key), most=most).run(sockets=[listener])


def configured(app: Any, certificate: Path | None, private_key: Path | None) -> uvicorn.Config:
    """How connections are served."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        http=_Connection,
        loop="uvloop",
        ws="none",
        ssl_certfile=None if certificate is None else str(certificate),
        ssl_keyfile=None if private_key is None else str(private_key),
        timeout_graceful_shutdown=1,  # else TLS waits for every neighbour to say good-bye
    )
    config.load()
    if config.ssl is not None:
        config.ssl.num_tickets = 0  # a ticket would tell that somebody was here before
    return config


def listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(4096)
    return listener


def address_of(listener: socket.socket, host: str, *, tls: bool) -> str:
    """Where a listening socket is found."""
    return f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}"
