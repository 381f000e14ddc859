"""What services share: bodies of bounded size and of known senders, refusals in one sentence that are counted.

Nothing is logged about a request: neither its sender's address nor when it came.

When users shall come back: told with every answer, from what is public, so that nobody has to ask again and again.

Nothing here depends on how many have reported: who watches an answer must not learn when somebody reports.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import http
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple
from typing import Protocol as Interface

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from dovetail.parties.common.database import Unavailable
from dovetail.parties.common.keys import PublicKey
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.common.wire import (
    RETRY_AFTER,
    SIGNATURE,
    Malformed,
    RequestHead,
    TooEarly,
    TooLate,
    Unknown,
    check_head,
)
from dovetail.parties.http.monitoring import Pulse
from dovetail.parties.intermediary.store import UploadRefused

__all__ = [
    "SLOWEST",
    "SLOWEST_RATE",
    "Announced",
    "Backoff",
    "Counts",
    "Direct",
    "Reply",
    "ServiceApp",
    "announced",
    "cacheable_response",
    "model_response",
    "number_of",
    "path_of",
    "read_body",
    "refusal",
    "repeat_forever",
]

_STATUS: dict[type[Exception], int] = {
    Unknown: 401,
    TooLate: 410,
    TooEarly: 425,
    UploadRefused: 409,
    Malformed: 400,
    Unavailable: 503,
    ValueError: 400,
    ClientDisconnect: 400,
}
_OURS = (Unknown, TooLate, TooEarly, UploadRefused, Malformed, Unavailable)
_WORDS = {
    404: "expected a path of this service, got another one",
    405: "expected another method on this path",
    408: "expected the whole body in time, got a part of it",
    411: "expected a body whose length is stated, got one in chunks",
    413: "expected a smaller body, got one that is too large",
    429: "an upload from this user is still in progress",
}
_FOREVER = 365 * 86_400  # seconds that what never changes may be kept
_PIECE = 1 << 16  # bytes of an answer that are handed over at a time
SLOWEST, SLOWEST_RATE = 60.0, 16_384.0  # seconds that any body may take, and bytes per second of a large one


class Counts(collections.Counter[str]):
    """How often what happened: what was taken, and what was refused for which reason."""

    def everywhere(self) -> dict[str, int]:
        """What all processes of the service counted."""
        return dict(self)

    def publish(self) -> None:
        """Tell the other processes."""


class Reply(NamedTuple):
    """A status, a few words, and headers."""

    status: int
    words: str
    headers: Mapping[str, str] = {}

    def response(self) -> Response:
        """For an application."""
        return PlainTextResponse(self.words, status_code=self.status, headers=dict(self.headers))


class Announced(Interface):
    """A request whose head was looked at and believed."""

    def take(self, body: bytes, answer: Callable[[Reply], None]) -> None:
        """Do what it asks for, and answer, now or later; who refuses does not answer."""

    def done(self) -> None:
        """Its body was refused, or never came."""


class Direct(Interface):
    """What a service answers without a task and an application: frequent requests with a body of bounded size."""

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> Announced | None:
        """The request with this head; None if it goes to the application."""

    def refusal(self, error: Exception) -> Reply:
        """What is said to who is refused."""


class ServiceApp(Starlette):
    """The application around a party: its routes, its counts, its background work, and what goes past it."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        counts: Counts,
        work: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        direct: Direct | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self.counts = counts
        self.direct = direct
        self.pulse = pulse
        self._work = work
        super().__init__(
            routes=list(routes),
            lifespan=type(self)._run_in_background,
            exception_handlers=dict.fromkeys((HTTPException, *_STATUS), self._refuse),
        )
        self.router.redirect_slashes = False  # a redirect is no answer to a signed request

    @contextlib.asynccontextmanager
    async def _run_in_background(self) -> AsyncIterator[None]:
        tasks = [] if self._work is None else [asyncio.create_task(self._work())]
        tasks += [] if self.pulse is None else [asyncio.create_task(self.pulse.beat())]
        yield
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _refuse(self, request: Request, error: Exception) -> Response:
        return refusal(error, self.counts).response()


def refusal(error: Exception, counts: Counts) -> Reply:
    """What is said, and counted, of a request that was refused."""
    if isinstance(error, HTTPException):
        status, words = error.status_code, _WORDS.get(error.status_code, "")
    else:
        kind = next((kind for kind in _STATUS if isinstance(error, kind)), None)
        status, words = 500 if kind is None else _STATUS[kind], " ".join(str(error).split())
        if kind not in _OURS and not words.startswith("expected "):
            words = ""  # would say how we are made
    counts[f"refused {status}"] += 1
    headers = {"retry-after": "1"} if status == 429 else {}
    return Reply(status, words or http.HTTPStatus(status).phrase.lower(), headers)


def announced(
    keys: Mapping[bytes, PublicKey], method: str, path: str, headers: Mapping[str, str], *, most: int
) -> RequestHead:
    """Who sends a request, and how much: all that is looked at before its body is read, of one of these alone."""
    if "transfer-encoding" in headers:
        raise HTTPException(411)
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length) > most:
        raise HTTPException(413)
    return check_head(keys, method, path, headers)


async def read_body(request: Request, *, most: int) -> bytes:
    """The body of a request, of at most so many bytes; a longer one is not read to its end, nor a slow one."""
    body = bytearray()
    try:
        async with asyncio.timeout(SLOWEST + most / SLOWEST_RATE):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise HTTPException(413)
    except TimeoutError as error:
        raise HTTPException(408) from error
    return bytes(body)


class _Piecewise(Response):
    """An answer that is handed over as it is read: who does not read a model has no copy of it waiting in memory."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), _PIECE):
            piece, rest = bytes(body[start : start + _PIECE]), start + _PIECE < len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": rest})
        if not body:
            await send({"type": "http.response.body", "body": b""})


def cacheable_response(
    request: Request, body: bytes, kind: str, *, seconds: int, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer that a proxy may keep for so long, and need not be sent to who has it."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    kept = {"etag": tag, "cache-control": f"public, max-age={seconds}", **(headers or {})}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=kept)
    return _Piecewise(body, media_type=kind, headers=kept)


def model_response(request: Request, data: bytes, signature: bytes) -> Response:
    """A model, which never changes, with the analyzer's signature."""
    headers = {SIGNATURE: signature.hex()} if signature else {}
    return cacheable_response(request, data, "application/octet-stream", seconds=_FOREVER, headers=headers)


def path_of(request: Request) -> str:
    """The path that the request was routed by; `request.url` also depends on what the sender says is its host."""
    return str(request.scope["path"])


def number_of(request: Request, task_id: bytes, name: str = "round") -> int:
    """The round, or another number, that a path names; refuses another task."""
    if request.path_params["task"] != task_id.hex():
        raise Malformed(f"expected task {task_id.hex()}, got another one")
    text = request.path_params[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Malformed(f"expected a {name} as a number, got something else")
    return int(text)


async def repeat_forever(
    seconds: float, step: Callable[[], Awaitable[None]], complain: Callable[[Exception], None]
) -> None:
    """Do a step again and again, with pauses; what goes wrong is said once and tried again."""
    while True:
        try:
            await step()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            complain(error)
        await asyncio.sleep(seconds)


_SOONEST = 0.05  # seconds
_LOOKS = 10  # at a round, in the time that it is expected to take: it may end early, when all have reported


class Backoff:
    """How long rounds of a task take, as far as anybody can tell.

    A round that needs all of its users ends when the last one has reported: as the last one did, as far as is known.
    Others end when their time is up, or sooner if all come: users look now and then, and never so late that they miss
    the next round.
    """

    def __init__(self, task: TrainingTask) -> None:
        self._needs_all = task.min_clients == task.max_clients
        self._expected = None if self._needs_all else task.round_seconds
        self._round, self._since = 0, 0.0

    def saw(self, round: int, now: float | None = None) -> None:
        """A round is open."""
        now = time.monotonic() if now is None else now
        if round == self._round:
            return
        if self._round and self._needs_all:
            self._expected = now - self._since
        self._round, self._since = round, now

    def headers(self, now: float | None = None) -> dict[str, str]:
        """Tells who has reported, or is too late, in how many seconds another round may be open."""
        if self._expected is None or not self._round:
            return {}
        left = self._since + self._expected - (time.monotonic() if now is None else now)
        longest = self._expected / _LOOKS
        soon = left if left > 0 and (self._needs_all or left < longest) else longest
        return {RETRY_AFTER: f"{max(_SOONEST, soon):.2f}"}
