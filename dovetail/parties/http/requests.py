"""What services share: bodies of bounded size from known senders, refusals in one sentence, and when to come back.

Nothing is logged about a request: neither its sender's address nor when it came. When users are to come back is told
with every answer, from what is public, so that nobody has to ask again and again. It does not depend on how many have
reported: whoever watches an answer must not learn when somebody reports.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import http
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

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
    verify_request_head,
)
from dovetail.parties.http.monitoring import Pulse
from dovetail.parties.intermediary.store import UploadRefused

__all__ = [
    "SLOWEST",
    "SLOWEST_RATE",
    "Backoff",
    "Counts",
    "ServiceApp",
    "authenticate_head",
    "cacheable_response",
    "model_response",
    "number_in_path",
    "read_body",
    "refusal_response",
    "repeat_forever",
    "routed_path",
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
_WORDED = (Unknown, TooLate, TooEarly, UploadRefused, Malformed, Unavailable)
_WORDS = {
    404: "this service has no such path",
    405: "this path takes another method",
    408: "the body did not come in time: send it again, faster",
    411: "state the length of the body: one in chunks is not read",
    413: "the body is larger than anything that this path takes",
    429: "an upload from this user is still in progress",
}
_FOREVER = 365 * 86_400  # seconds that what never changes may be kept
_PIECE = 1 << 16  # bytes of an answer that are handed over at a time
SLOWEST = 60.0  # seconds that any body may take
SLOWEST_RATE = 16_384.0  # bytes per second that a large body may add to them


class Counts(collections.Counter[str]):
    """How many requests were taken, and how many refused, by status."""

    def counts_of_all_processes(self) -> dict[str, int]:
        """The counts of all processes of the service."""
        return dict(self)

    def publish(self) -> None:
        """Show the counts to the other processes."""


class ServiceApp(Starlette):
    """The application around a party: its routes, its counts, and its background work.

    Arguments:
        routes: what it answers.
        counts: how often what was refused, for every exception that a route raises.
        work: runs as long as the application does.
        pulse: whether the process works; it beats as long as the application runs.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        counts: Counts,
        work: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        pulse: Pulse | None = None,
    ) -> None:
        self.counts = counts
        self.pulse = pulse
        self._work = work
        super().__init__(
            routes=list(routes),
            lifespan=type(self)._run_in_background,
            exception_handlers=dict.fromkeys((HTTPException, Exception, *_STATUS), self._refuse),
        )
        self.router.redirect_slashes = False  # a redirect is no answer to a signed request

    @contextlib.asynccontextmanager
    async def _run_in_background(self) -> AsyncIterator[None]:
        """Run the background work and the pulse for as long as the application serves."""
        tasks = [] if self._work is None else [asyncio.create_task(self._work())]
        tasks += [] if self.pulse is None else [asyncio.create_task(self.pulse.beat())]
        yield
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _refuse(self, request: Request, error: Exception) -> Response:
        return refusal_response(error, self.counts)


def refusal_response(error: Exception, counts: Counts) -> Response:
    """Answer a request that was refused for this reason, in one sentence, and count it."""
    if isinstance(error, HTTPException):
        status = error.status_code
        words = _WORDS.get(status, "")
    else:
        kind = next((kind for kind in _STATUS if isinstance(error, kind)), None)
        status = 500 if kind is None else _STATUS[kind]
        words = " ".join(str(error).split())
        if kind not in _WORDED and not _is_raised_in_package(error):
            words = ""  # would tell a stranger how the service is made
    counts[f"refused {status}"] += 1
    headers = {"retry-after": "1"} if status == 429 else {}
    return PlainTextResponse(words or http.HTTPStatus(status).phrase.lower(), status_code=status, headers=headers)


def _is_raised_in_package(error: Exception) -> bool:
    """Whether the line that raised an error is Dovetail's: then its words were written for whoever sent the request."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("dovetail.")


def authenticate_head(
    keys: Mapping[bytes, PublicKey], method: str, path: str, headers: Mapping[str, str], *, max_bytes: int
) -> RequestHead:
    """Who sends a request, and how much of a body; it is all that is looked at before the body is read.

    Refuses a sender who has none of these keys, and a body of more bytes than `max_bytes` or of unstated length.
    """
    if "transfer-encoding" in headers:
        raise HTTPException(411)
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length) > max_bytes:
        raise HTTPException(413)
    return verify_request_head(keys, method, path, headers)


async def read_body(receive: Receive, *, max_bytes: int) -> bytes:
    """The body of a request, of at most so many bytes; a longer one is not read to its end, nor a slow one."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(SLOWEST + max_bytes / SLOWEST_RATE):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise HTTPException(413)
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise HTTPException(408) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


class _PiecewiseResponse(Response):
    """An answer that is handed over as it is read: for a client that does not read a model, none waits in memory."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), _PIECE):
            piece = bytes(body[start : start + _PIECE])
            is_last = start + _PIECE >= len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        if not body:
            await send({"type": "http.response.body", "body": b""})


def cacheable_response(
    request: Request, body: bytes, kind: str, *, seconds: int, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer that a proxy may keep for so many seconds, and that is not sent again to whoever has it."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    sent = {"etag": tag, "cache-control": f"public, max-age={seconds}", **(headers or {})}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=sent)
    return _PiecewiseResponse(body, media_type=kind, headers=sent)


def model_response(request: Request, data: bytes, signature: bytes) -> Response:
    """A model, which never changes, with the analyzer's signature of it."""
    headers = {SIGNATURE: signature.hex()} if signature else {}
    return cacheable_response(request, data, "application/octet-stream", seconds=_FOREVER, headers=headers)


def routed_path(request: Request) -> str:
    """The path that the request was routed by; `request.url` would depend on the host that the sender states."""
    return str(request.scope["path"])


def number_in_path(path_params: Mapping[str, str], task_id: bytes, name: str = "round") -> int:
    """The round, or another number, that a path names; refuses the path of another task."""
    if path_params["task"] != task_id.hex():
        raise Malformed(f"this service runs task {task_id.hex()}, and the path names another one")
    text = path_params[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Malformed(f"the {name} in the path must be a number of at most 9 digits")
    return int(text)


async def repeat_forever(
    seconds: float, step: Callable[[], Awaitable[None]], complain: Callable[[Exception], None]
) -> None:
    """Run a step again and again, with pauses of so many seconds; errors go to `complain`, and the next step comes."""
    while True:
        try:
            await step()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            complain(error)
        await asyncio.sleep(seconds)


_SOONEST = 0.05  # seconds
_LOOKS = 10  # of a user at a round, in the time that it is expected to take: it may end early


class Backoff:
    """When users are to come back, from how long rounds take.

    A round that needs all of its users ends when the last one has reported: it is expected to take as long as the one
    before. Others end when their time is up, or sooner if all come: users look now and then, and never so late that
    they miss the next round.
    """

    def __init__(self, task: TrainingTask) -> None:
        self._needs_all = task.min_clients == task.max_clients
        self._expected = None if self._needs_all else task.round_seconds
        self._round = 0
        self._since = 0.0

    def note_round(self, round: int, now: float | None = None) -> None:
        """Note that a round is open."""
        now = time.monotonic() if now is None else now
        if round == self._round:
            return
        if self._round and self._needs_all:
            self._expected = now - self._since
        self._round = round
        self._since = now

    def headers(self, now: float | None = None) -> dict[str, str]:
        """The header that says in how many seconds another round may be open, if anybody can tell."""
        if self._expected is None or not self._round:
            return {}
        left = self._since + self._expected - (time.monotonic() if now is None else now)
        longest = self._expected / _LOOKS
        soon = left if left > 0 and (self._needs_all or left < longest) else longest
        return {RETRY_AFTER: f"{max(_SOONEST, soon):.2f}"}
