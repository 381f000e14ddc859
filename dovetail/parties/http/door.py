"""The door of a service: connections that are accepted, kept within limits, and served by uvicorn on uvloop.

Whoever says nothing, says it too slowly, or does not read the answer is let go of. If as many are connected as the
process has files for, the one that has been silent for longest makes room for the next: silence never closes the door.
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

from dovetail.parties.http._connection import GOODBYE, Connection
from dovetail.parties.http.operating import notify

__all__ = ["Door", "address_of", "answer", "configured", "listen", "most_connections", "serve"]

_HANDSHAKE = 10.0  # seconds for TLS to begin
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


class Door(uvicorn.Server):
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
    notify("WATCHDOG=1")


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
    notify("READY=1")
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
