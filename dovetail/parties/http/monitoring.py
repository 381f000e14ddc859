"""What operators look at: health, readiness, Prometheus metrics, and logs as JSON; nothing in them is about a user.

Health and readiness are on the service's own port. Metrics show how many uploads come when, so they have a port of
their own on this machine. A process whose loop or store hangs cannot be mended from within: it logs where it hangs and
ends, and its supervisor starts another one; systemd is notified as long as it works (sd_notify).

The analyzer's page for people: where the training stands, what was spent, how good the model is.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from dovetail.numbers import at_most
from dovetail.statements import Statement
from dovetail.templating import render

__all__ = [
    "PATIENCE",
    "Gauges",
    "Pulse",
    "health_routes",
    "log_as_json",
    "notify_systemd",
    "prometheus_text",
    "serve_metrics",
    "status_page",
]

Gauges = Mapping[str, float]  # by name, without the prefix
_LOG = logging.getLogger(__name__)
_PREFIX = "dovetail_"
_LONGEST_HEAD = 8192  # bytes of a request for metrics
_SECONDS = 10.0  # for a request for metrics to come
PATIENCE = 120.0  # seconds without an answer from the store after which a process is taken to hang
_BEAT = 2.0  # seconds between two signs of life
_SLOW = 30.0  # seconds without a good answer from the store after which a service is not ready


def notify_systemd(message: str) -> None:
    """Notify systemd, if it started this process and asks for it (NOTIFY_SOCKET)."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path[:1] not in ("/", "@"):
        return
    address = "\0" + path[1:] if path[0] == "@" else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.setblocking(False)
        line.sendto(message.encode(), address)


class Pulse:
    """Whether a process works: its loop runs, and its store answers.

    A process that is guarded ends if its store does not answer, or its loop does not run, for too long.

    Arguments:
        ask: a question to the store.
        patience: seconds without an answer after which the process hangs.
    """

    def __init__(self, ask: Callable[[], object], *, patience: float = PATIENCE) -> None:
        self._ask = ask
        self._patience = patience
        self._answered: float | None = None  # when the store last answered
        self._worked: float | None = None  # and when without an error
        self._report_alive: Callable[[], None] | None = None

    def kill_when_hanging(self, report_alive: Callable[[], None]) -> None:
        """End this process when it hangs; as long as it does not, `report_alive` is called every few seconds."""
        self._report_alive = report_alive

    @property
    def is_alive(self) -> bool:
        """Whether the store answered lately, if only that the database is away."""
        return self._answered is None or time.monotonic() - self._answered < self._patience

    @property
    def is_ready(self) -> bool:
        """Whether the store answered lately without an error."""
        return self._worked is None or time.monotonic() - self._worked < _SLOW

    async def beat(self) -> None:
        """Ask the store again and again, until cancelled."""
        self._answered = self._worked = time.monotonic()
        try:
            while True:
                asking = asyncio.create_task(asyncio.to_thread(self._ask))
                while not asking.done():
                    self._reset_alarm()
                    await asyncio.wait({asking}, timeout=_BEAT)
                self._answered = time.monotonic()
                if asking.exception() is None:
                    self._worked = self._answered
                self._reset_alarm()
                await asyncio.sleep(_BEAT)
        finally:
            if self._report_alive is not None:
                faulthandler.cancel_dump_traceback_later()

    def _reset_alarm(self) -> None:
        """Set the interpreter's own alarm, which goes off even if no Python code runs, and quotes no values."""
        if self._report_alive is None or self._answered is None:
            return
        if (left := self._answered + self._patience - time.monotonic()) > 0:  # else it is about to go off
            faulthandler.dump_traceback_later(left, exit=True, file=2)
            self._report_alive()


def health_routes(ready: Callable[[], bool], pulse: Pulse | None = None) -> list[BaseRoute]:
    """Routes for `/healthz`, the process and its store answer, and `/readyz`, it can do its work."""

    async def healthz(request: Request) -> Response:
        if pulse is not None and not pulse.is_alive:
            return PlainTextResponse("the store does not answer", status_code=503)
        return PlainTextResponse("ok")

    async def readyz(request: Request) -> Response:
        is_ready = ready() and (pulse is None or pulse.is_ready)
        return PlainTextResponse("ready" if is_ready else "not ready", status_code=200 if is_ready else 503)

    return [Route("/healthz", healthz), Route("/readyz", readyz)]


def prometheus_text(counts: Mapping[str, int], gauges: Gauges) -> str:
    """Counts and gauges in the text format of Prometheus."""
    lines = [f"# TYPE {_PREFIX}requests_total counter"]
    lines += [f'{_PREFIX}requests_total{{outcome="{name}"}} {count}' for name, count in sorted(counts.items())]
    for name, value in sorted(gauges.items()):
        lines += [f"# TYPE {_PREFIX}{name} gauge", f"{_PREFIX}{name} {float(value):.10g}"]
    return "\n".join(lines) + "\n"


async def serve_metrics(port: int, read: Callable[[], Awaitable[str]]) -> None:
    """Answer every request on a port of this machine with the metrics, until cancelled."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.LimitOverrunError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(_SECONDS):
                await reader.readuntil(b"\r\n\r\n")
                body = (await read()).encode()
                head = "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\nconnection: close\r\n"
                writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port, limit=_LONGEST_HEAD)
    async with server:
        await server.serve_forever()


class _Json(logging.Formatter):
    def __init__(self, party: str) -> None:
        super().__init__()
        self._party = party

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "party": self._party,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = record.exc_info[0].__name__
        return json.dumps(entry)


def log_as_json(party: str) -> Callable[[str], None]:
    """Log as one JSON object per line on stderr from now on; addresses of others are never logged.

    Returns: a function that logs the URL at which the party listens.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(party))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _LOG.setLevel(logging.INFO)
    return lambda address: _LOG.info("%s listens on %s", party, address)


_WIDTH, _HEIGHT = 560, 160


def status_page(facts: Mapping[str, Any]) -> str:
    """The analyzer's page, from what `Analyzer.privacy` returns."""
    spent = facts["spent"]["eps"]
    budget = facts["budget"]["eps"]
    history = facts["history"]
    return render(
        "status.html.jinja",
        task=facts["task"],
        protocol=facts["protocol"],
        task_id=facts["task_id"][:16],
        reserved=facts["rounds_reserved"],
        rounds=facts["rounds"],
        spent=_eps_in_words(spent),
        delta=at_most(facts["budget"]["delta"]),
        budget=None if budget is None else _eps_in_words(budget),
        share=None if spent is None or budget is None else f"{min(100.0, 100 * spent / budget):.1f}",
        statement=str(Statement.from_json(facts["statement"])),
        curve=_accuracy_drawing([(row["round"], row["accuracy"]) for row in history if row["accuracy"] is not None]),
        history=[{"reason": None, **row, "accuracy": _accuracy_in_words(row["accuracy"])} for row in history],
    )


def _eps_in_words(eps: float | None) -> str:
    return "no guarantee" if eps is None else f"eps {at_most(eps)}"


def _accuracy_in_words(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{accuracy:.1%}"


def _accuracy_drawing(points: Sequence[tuple[int, float]]) -> dict[str, Any] | None:
    """Accuracy by round, as the points of a line; None before the first model."""
    if not points:
        return None
    end, accuracy = points[-1]
    last = max(round for round, _ in points)
    places = (f"{_WIDTH * round / last:.1f},{_HEIGHT * (1 - height):.1f}" for round, height in points)
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "points": " ".join(places),
        "round": end,
        "accuracy": f"{accuracy:.1%}",
    }
