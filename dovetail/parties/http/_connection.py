"""One connection at the door: HTTP by uvicorn, or past it; whoever lets us wait for too long is let go of."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dovetail.parties.http import _http

__all__ = ["GOODBYE", "Connection"]

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

    def __init__(self, connection: Connection, direct: _http.Direct, request: _http.Announced | None) -> None:
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

    def _end(self) -> _http.Announced | None:
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

    def answer(self, answer: _http.Reply) -> None:
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
        super().connection_made(transport)
        self.client = None  # nobody is to know
        transport.set_write_buffer_limits(high=_UNSENT)
        self._await(_HEAD)
        self.quiet[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.quiet.pop(self, None)
        if isinstance(self.cycle, _Delivery):
            self.cycle.lost()
        super().connection_lost(exc)
        self.cycle = None  # each holds the other, and with it the buffers of TLS

    def data_received(self, data: bytes) -> None:
        if self._waiting == _IDLE:  # the next request begins
            self._await(_HEAD)
        super().data_received(data)
        if self._waiting == _HEAD and not self.transport.is_closing():
            self._head += len(data)
            if self._head > _LARGEST_HEAD:
                self.send_400_response("Invalid HTTP request received.")
        elif isinstance(self.cycle, _Delivery):
            self.cycle.expect(_http.SLOWEST + self._stated / _http.SLOWEST_RATE)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _AHEAD:
            raise ValueError("expected answers to be waited for")  # the parser ends the connection
        self.quiet.pop(self, None)
        self._head = 0
        stated = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._stated = min(stated, 1 << 40)
        self._await(_http.SLOWEST + self._stated / _http.SLOWEST_RATE + _HEAD)
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
        if isinstance(self.cycle, _Delivery):
            self.cycle.add(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.cycle.response_complete:  # it was refused before all of it had come
            self._rest()
        else:
            self._waiting = None
        if isinstance(self.cycle, _Delivery):
            self.cycle.complete()
        else:
            super().on_message_complete()

    def respond(self, answer: _http.Reply, *, last: bool) -> None:
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
            return now - self._closing > GOODBYE
        if self._unread is not None and now - self._unread > _UNREAD:
            return True
        return self._waiting is not None and now - self._since > self._waiting + 1.0

    def drop(self) -> None:
        """Let go of it, without another word."""
        self.transport.abort()
