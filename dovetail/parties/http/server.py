"""The door of a service: connections that are accepted, kept within limits, and served by uvicorn on uvloop.

Whoever says nothing, says it too slowly, or does not read the answer is let go of. If as many are connected as the
process has files for, the one that has been silent for longest makes room for the next: silence never closes the door.

One connection at the door: HTTP by uvicorn, or past it; whoever lets us wait for too long is let go of.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import logging
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
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dovetail.parties.http import requests
from dovetail.parties.http.monitoring import notify_systemd

__all__ = [
    "GOODBYE",
    "BoundedServer",
    "Connection",
    "address_of",
    "answer",
    "listen",
    "max_connections",
    "serve",
    "uvicorn_config",
]

_HANDSHAKE = 10.0  # seconds for TLS to begin
_AT_ONCE = 64  # connections that are accepted in a row
_OWN_FILES = 128  # files that are not connections: the store, links to others, what is loaded later
_SWITCH = 0.001  # seconds after which the thread that writes gets its turn
_FEWEST = 64  # connections below which serving makes no sense


def max_connections() -> int:
    """How many connections this process has files for; raises its soft limit as far as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (1 << 16 if soft == resource.RLIM_INFINITY else min(soft, 1 << 16)) - _OWN_FILES
    if most < _FEWEST:
        raise ValueError(f"expected a limit of at least {_OWN_FILES + _FEWEST} open files (ulimit -n), got {soft}")
    return most


class BoundedServer(uvicorn.Server):
    """A server that accepts at most so many connections, and lets go of the longest silent one if there are more."""

    def __init__(self, config: uvicorn.Config, *, most: int) -> None:
        super().__init__(config)
        self._most = most
        self._shaking: dict[socket.socket, None] = {}  # TLS has not begun yet
        self._quiet: dict[Connection, None] = {}
        self._kind = type("Connection", (Connection,), {"quiet": self._quiet})
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
                if isinstance(connection, Connection) and connection.overdue(now):
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
            seconds = {"ssl_handshake_timeout": _HANDSHAKE, "ssl_shutdown_timeout": GOODBYE}
            options = {"ssl": self.config.ssl, **seconds}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, accepted, **options)
        except (OSError, ssl.SSLError, ConnectionError, TimeoutError):
            accepted.close()  # it spoke no TLS, or not in time
        finally:
            self._shaking.pop(accepted, None)

    def _connection(self) -> asyncio.Protocol:
        return self._kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _tell_systemd() -> None:
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
    """Serve until told to stop; `ready` gets the address as soon as connections are taken."""
    most = max_connections()
    listener = listen(host, port)
    ready(address_of(listener, host, tls=certificate is not None))
    notify_systemd("READY=1")
    answer(app, listener, certificate=certificate, private_key=private_key, most=most)


def answer(
    app: Starlette,
    listener: socket.socket,
    *,
    certificate: Path | None,
    private_key: Path | None,
    most: int,
    tell: Callable[[], None] = _tell_systemd,
) -> None:
    """Answer what comes to a listening socket until told to stop; `tell` whoever watches that this process works."""
    pulse = getattr(app, "pulse", None)
    if pulse is not None and threading.current_thread() is threading.main_thread():  # a process of its own
        pulse.guard(tell)
    sys.setswitchinterval(_SWITCH)
    gc.freeze()  # who is enrolled need not be looked through again and again
    BoundedServer(uvicorn_config(app, certificate, private_key), most=most).run(sockets=[listener])


def uvicorn_config(app: Any, certificate: Path | None, private_key: Path | None) -> uvicorn.Config:
    """How connections are served."""
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


_LOG = logging.getLogger(__name__)
GOODBYE = 5.0  # seconds for TLS to end
_HEAD = 10.0  # seconds for the head of a request
_LARGEST_HEAD = 64 * 1024  # bytes
_UNREAD = 60.0  # seconds in which somebody must read on
_UNSENT = 1 << 16  # bytes of answers that wait for the other side to read; uvloop would keep half a megabyte
_IDLE = 30.0  # seconds that a connection is kept for another request
_LINGER = 5.0  # seconds in which who was refused before all had come may read the answer, and end
_AHEAD = 8  # requests of one connection that wait for their turn; each costs a hundred times its bytes


class _Unheard:
    """An event that nobody waits for."""

    def set(self) -> None:
        """Nothing happens."""


_UNHEARD = _Unheard()


class _Delivery:
    """A request that goes past the application, where uvicorn has its cycle of request and response."""

    def __init__(self, connection: Connection, direct: requests.Direct, request: requests.Announced | None) -> None:
        self._parts: list[bytes] = []
        self.response_complete = self.disconnected = False
        self.keep_alive, self.message_event = True, _UNHEARD  # uvicorn sets these
        self._connection, self._direct, self._request = connection, direct, request
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, seconds: float) -> None:
        """The rest of the body must come in so many seconds from now."""
        if self._request is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._give_up)

    def add(self, body: bytes) -> None:
        """A part of the body, of which nothing is kept if the request was refused."""
        if not self.response_complete:
            self._parts.append(body)

    def complete(self) -> None:
        """All of the body is there."""
        if (request := self._end()) is None:
            return
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        try:
            request.take(body, self.answer)
        except Exception as error:
            request.done()
            self.refuse(error)

    def lost(self) -> None:
        """The connection is gone; what has come whole is taken all the same."""
        if (request := self._end()) is not None:
            request.done()
            self._direct.refusal(ClientDisconnect())  # it counts

    def _give_up(self) -> None:
        if (request := self._end()) is not None:
            request.done()
            self.refuse(HTTPException(408))

    def _end(self) -> requests.Announced | None:
        """What has to be done for the request, once."""
        if self._timer is not None:
            self._timer.cancel()
        request, self._request = self._request, None
        return request

    def refuse(self, error: Exception) -> None:
        """Say why not."""
        said = self._direct.refusal(error)
        if said.status == 500:
            _LOG.error("a request failed", exc_info=error)
        self.answer(said)

    def answer(self, answer: requests.Reply) -> None:
        """Say what became of it."""
        self.response_complete = True
        self._parts.clear()
        self._connection.respond(answer, last=not self.keep_alive)


class Connection(HttpToolsProtocol):
    """One connection; `quiet` are those that nothing is being done for, the longest silent first."""

    quiet: dict[Connection, None]
    _since = 0.0  # when what is being waited for began
    _waiting: float | None = None  # how long it may take; None: it is our turn
    _head = 0  # bytes of the head that is coming
    _stated = 0  # bytes of the body that is coming
    _unread: float | None = None  # since when the other side does not read
    _closing: float | None = None
    cycle: Any  # uvicorn's, or a `_Delivery`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; its address is forgotten at once."""
        super().connection_made(transport)
        self.client = None  # nobody is to know
        transport.set_write_buffer_limits(high=_UNSENT)
        self._await(_HEAD)
        self.quiet[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended, whoever ended it."""
        self.quiet.pop(self, None)
        if isinstance(self.cycle, _Delivery):
            self.cycle.lost()
        super().connection_lost(exc)
        self.cycle = None  # each holds the other, and with it the buffers of TLS

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, after which the next ones are due in time."""
        if self._waiting == _IDLE:  # the next request begins
            self._await(_HEAD)
        super().data_received(data)
        if self._waiting == _HEAD and not self.transport.is_closing():
            self._head += len(data)
            if self._head > _LARGEST_HEAD:
                self.send_400_response("Invalid HTTP request received.")
        elif isinstance(self.cycle, _Delivery):
            self.cycle.expect(requests.SLOWEST + self._stated / requests.SLOWEST_RATE)

    def on_headers_complete(self) -> None:
        """A request's head is there: it is answered from the head alone, or its body is awaited."""
        if len(self.pipeline) >= _AHEAD:
            raise ValueError("expected answers to be waited for")  # the parser ends the connection
        self.quiet.pop(self, None)
        self._head = 0
        stated = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._stated = min(stated, 1 << 40)
        self._await(requests.SLOWEST + self._stated / requests.SLOWEST_RATE + _HEAD)
        if not self._begin():
            super().on_headers_complete()

    def _begin(self) -> bool:
        """Whether the request goes past the application; it does if there is nothing unusual about it."""
        direct = getattr(self.config.app, "direct", None)
        waits = self.cycle is not None and not self.cycle.response_complete
        unusual = self.expect_100_continue or self.parser.should_upgrade() or not self.parser.should_keep_alive()
        if direct is None or waits or unusual:
            return False
        head = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        try:
            found = direct.begin(self.parser.get_method().decode("latin-1"), self.url.decode("latin-1"), head)
            if found is None:
                return False
            self.cycle = _Delivery(self, direct, found)
        except Exception as error:
            self.cycle = _Delivery(self, direct, None)
            self.cycle.refuse(error)
        return True

    def on_body(self, body: bytes) -> None:
        """A part of a body, for whoever waits for it."""
        if isinstance(self.cycle, _Delivery):
            self.cycle.add(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has arrived whole."""
        if self.cycle.response_complete:  # it was refused before all of it had come
            self._rest()
        else:
            self._waiting = None
        if isinstance(self.cycle, _Delivery):
            self.cycle.complete()
        else:
            super().on_message_complete()

    def respond(self, answer: requests.Reply, *, last: bool) -> None:
        """Say something, without an application, and hang up after the last word."""
        if not self.transport.is_closing():
            body = answer.words.encode()
            lines = [f"content-length: {len(body)}", "content-type: text/plain; charset=utf-8"]
            lines += [f"{name}: {value}" for name, value in answer.headers.items()]
            lines += ["connection: close"] if last else []
            head = "\r\n".join(lines).encode()
            self.transport.write(STATUS_LINE[answer.status] + head + b"\r\n\r\n" + body)
            if last:
                self.transport.close()
        self.on_response_complete()

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
        """The client does not read what is sent to it."""
        self._unread = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
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
            return now - self._closing > GOODBYE
        if self._unread is not None and now - self._unread > _UNREAD:
            return True
        return self._waiting is not None and now - self._since > self._waiting + 1.0

    def drop(self) -> None:
        """Let go of it, without another word."""
        self.transport.abort()
