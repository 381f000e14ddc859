"""The HTTP server of a service: uvicorn on uvloop, with limits on connections that uvicorn does not have.

A client that is silent, sends too slowly, or does not read its answer is disconnected. If as many are connected as the
process has files for, the one that has been silent for longest makes room for the next: silence shuts nobody out.

These limits build on private parts of uvicorn, which tests/parties/test_uvicorn.py lists; pyproject.toml bounds its
version for them. They cost no time that can be measured: an upload takes as much of the processor under uvicorn as it
comes (benchmarks/uploads.py).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import resource
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.parties.http import requests
from dovetail.parties.http.monitoring import notify_systemd

__all__ = [
    "CLOSE_SECONDS",
    "BoundedServer",
    "Connection",
    "listen",
    "raise_connection_limit",
    "serve",
    "serve_on",
    "url_of_listener",
    "uvicorn_config",
]

_HANDSHAKE_SECONDS = 10.0  # seconds for TLS to begin
_AT_ONCE = 64  # connections that are accepted in a row
_OWN_FILES = 128  # files that are not connections: the store, links to others, what is loaded later
_SWITCH_INTERVAL = 0.001  # seconds after which the thread that writes gets its turn
_FEWEST_CONNECTIONS = 64  # below which serving makes no sense


def raise_connection_limit() -> int:
    """How many connections this process has files for, after raising its soft limit as far as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = (1 << 16 if soft == resource.RLIM_INFINITY else min(soft, 1 << 16)) - _OWN_FILES
    if max_connections < _FEWEST_CONNECTIONS:
        raise ValueError(
            f"this process may open {soft} files and needs at least {_OWN_FILES + _FEWEST_CONNECTIONS}: raise its "
            "limit (ulimit -n, or LimitNOFILE in systemd)"
        )
    return max_connections


class BoundedServer(uvicorn.Server):
    """A server with at most so many connections, which drops the longest silent one if there are more.

    Arguments:
        config: how connections are served: `uvicorn_config`.
        max_connections: connections, also those in which TLS has not begun.
    """

    def __init__(self, config: uvicorn.Config, *, max_connections: int) -> None:
        super().__init__(config)
        self._max_connections = max_connections
        self._in_handshake: dict[socket.socket, None] = {}  # TLS has not begun yet
        self._silent: dict[Connection, None] = {}
        self._kind = type("Connection", (Connection,), {"silent": self._silent})
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped = collections.Counter[str]()

    @property
    def num_connections(self) -> int:
        """Connections, also those in which TLS has not begun yet."""
        return len(self._in_handshake) + len(self.server_state.connections)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the service did not start: see the error in the log above")
        self.servers = []
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            listener.setblocking(False)
            loop.add_reader(listener.fileno(), self._accept, listener)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and close those that there are."""
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            loop.remove_reader(listener.fileno())
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Once a second, drop connections that are overdue."""
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and connection.is_overdue(now):
                    self.dropped["overdue"] += 1
                    connection.drop()
        return await super().on_tick(counter)

    def _accept(self, listener: socket.socket) -> None:
        """Accept what waits, some at a time; above the limit, only in the place of a connection that is silent."""
        for _ in range(_AT_ONCE):
            try:
                accepted, _address = listener.accept()
            except OSError:  # nobody waits any more
                return
            if self.num_connections >= self._max_connections and not self._drop_longest_silent():
                self.dropped["no room"] += 1
                accepted.close()
                continue
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._in_handshake[accepted] = None
            task = asyncio.get_running_loop().create_task(self._start_connection(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _drop_longest_silent(self) -> bool:
        """Drop the connection that has been silent for longest; False if all are being served."""
        handshake = next(iter(self._in_handshake), None)
        if handshake is not None:
            del self._in_handshake[handshake]
            with contextlib.suppress(OSError):
                handshake.shutdown(socket.SHUT_RDWR)
        else:
            silent = next(iter(self._silent), None)
            if silent is None:
                return False
            del self._silent[silent]
            silent.drop()
        self.dropped["silent"] += 1
        return True

    async def _start_connection(self, accepted: socket.socket) -> None:
        """Do the TLS handshake within its time; until then the connection counts as one in a handshake."""
        options: dict[str, Any] = {}
        if self.config.ssl is not None:
            seconds = {"ssl_handshake_timeout": _HANDSHAKE_SECONDS, "ssl_shutdown_timeout": CLOSE_SECONDS}
            options = {"ssl": self.config.ssl, **seconds}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_connection, accepted, **options)
        except (OSError, ssl.SSLError, ConnectionError, TimeoutError):
            accepted.close()  # it spoke no TLS, or not in time
        finally:
            self._in_handshake.pop(accepted, None)

    def _make_connection(self) -> asyncio.Protocol:
        return self._kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _notify_watchdog() -> None:
    notify_systemd("WATCHDOG=1")


def serve(
    app: Starlette,
    *,
    host: str,
    port: int,
    certificate: Path | None,
    private_key: Path | None,
    ready: Callable[[str], None],
) -> None:
    """Serve until told to stop.

    Arguments:
        app: the application.
        host: the address to listen on.
        port: 0: any free one.
        certificate: for TLS, with its private key; None: plain HTTP.
        private_key: belongs to the certificate.
        ready: gets the URL as soon as connections are accepted.
    """
    max_connections = raise_connection_limit()
    listener = listen(host, port)
    ready(url_of_listener(listener, host, tls=certificate is not None))
    notify_systemd("READY=1")
    serve_on(app, listener, certificate=certificate, private_key=private_key, max_connections=max_connections)


def serve_on(
    app: Starlette,
    listener: socket.socket,
    *,
    certificate: Path | None,
    private_key: Path | None,
    max_connections: int,
    report_alive: Callable[[], None] = _notify_watchdog,
) -> None:
    """Answer what comes to a listening socket until told to stop.

    Arguments:
        app: the application.
        listener: a socket that listens.
        certificate: for TLS, with its private key; None: plain HTTP.
        private_key: belongs to the certificate.
        max_connections: connections.
        report_alive: called every few seconds as long as the process works.
    """
    pulse = getattr(app, "pulse", None)
    if pulse is not None and threading.current_thread() is threading.main_thread():  # a process of its own
        pulse.kill_when_hanging(report_alive)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.freeze()  # the list of users need not be looked through again and again
    BoundedServer(uvicorn_config(app, certificate, private_key), max_connections=max_connections).run(
        sockets=[listener]
    )


def uvicorn_config(app: Any, certificate: Path | None, private_key: Path | None) -> uvicorn.Config:
    """How uvicorn serves connections: as `Connection`, on uvloop, without a log of requests or headers of its own."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        http=Connection,
        loop="uvloop",
        ws="none",
        ssl_certfile=None if certificate is None else str(certificate),
        ssl_keyfile=None if private_key is None else str(private_key),
        timeout_graceful_shutdown=1,  # else TLS waits for every client to close its end
    )
    config.load()
    if config.ssl is not None:
        config.ssl.num_tickets = 0  # a ticket would show that somebody was here before
    return config


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address, and return the socket."""
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


def url_of_listener(listener: socket.socket, host: str, *, tls: bool) -> str:
    """The URL of a listening socket."""
    return f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}"


CLOSE_SECONDS = 5.0  # for TLS to end
_HEAD = 10.0  # seconds for the head of a request
_LARGEST_HEAD = 64 * 1024  # bytes
_UNREAD = 60.0  # seconds in which somebody must read on
_UNSENT = 1 << 16  # bytes of answers that wait for the other side to read; uvloop would keep half a megabyte
_IDLE = 30.0  # seconds that a connection is kept for another request
_LINGER = 5.0  # seconds for a client that was refused before all of its body came to read the answer
_AHEAD = 8  # requests of one connection that wait for their turn; each costs a hundred times its bytes


class Connection(HttpToolsProtocol):
    """One connection; `silent` are those for which nothing is being done, the longest silent first."""

    silent: dict[Connection, None]
    _since = 0.0  # when what is being waited for began
    _waiting: float | None = None  # seconds that it may take; None: nothing is waited for
    _head = 0  # bytes of the head that is coming
    _unread: float | None = None  # since when the client does not read
    _closing: float | None = None  # since when the connection is being closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; its address is forgotten at once."""
        super().connection_made(transport)
        self.client = None  # no part of the service is to know it
        transport.set_write_buffer_limits(high=_UNSENT)
        self._set_deadline(_HEAD)
        self.silent[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended, whoever ended it."""
        self.silent.pop(self, None)
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # each holds the other, and with it the buffers of TLS

    def data_received(self, data: bytes) -> None:
        """Bytes of a request have come, and the next are due in time."""
        if self._waiting == _IDLE:  # the next request begins
            self._set_deadline(_HEAD)
        super().data_received(data)
        if self._waiting == _HEAD and not self.transport.is_closing():
            self._head += len(data)
            if self._head > _LARGEST_HEAD:
                self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        """A request's head has come; its body is due in time."""
        if len(self.pipeline) >= _AHEAD:
            raise ValueError(f"more than {_AHEAD} requests before their answers")  # the parser ends the connection
        self.silent.pop(self, None)
        self._head = 0
        stated = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._set_deadline(requests.SLOWEST + min(stated, 1 << 40) / requests.SLOWEST_RATE + _HEAD)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request has come whole."""
        if self.cycle.response_complete:  # it was refused before all of it had come
            self._expect_request_within()
        else:
            self._waiting = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """As the base does, but without its timer: `is_overdue` is asked once a second instead."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        else:
            self._expect_request_within(_IDLE if self._waiting is None else _LINGER)

    def pause_writing(self) -> None:
        """The client does not read what is sent to it."""
        self._unread = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._unread = None
        super().resume_writing()

    def _expect_request_within(self, seconds: float = _IDLE) -> None:
        self._set_deadline(seconds)
        self.silent[self] = None

    def _set_deadline(self, seconds: float) -> None:
        self._since = self.loop.time()
        self._waiting = seconds

    def is_overdue(self, now: float) -> bool:
        """Whether the client has let the service wait for too long."""
        if self.transport.is_closing():
            self._closing = self._closing or now
            return now - self._closing > CLOSE_SECONDS
        if self._unread is not None and now - self._unread > _UNREAD:
            return True
        return self._waiting is not None and now - self._since > self._waiting + 1.0

    def drop(self) -> None:
        """End the connection at once."""
        self.transport.abort()
