"""What operators look at: health, readiness, Prometheus metrics, and logs as JSON; nothing in them is about a user.

Health and readiness are told at the door. Metrics say how many uploads come when, so they have a port of their own on
this machine, for whoever collects them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

__all__ = ["Gauges", "health_routes", "log_as_json", "metrics_of", "tell_metrics"]

Gauges = Mapping[str, float]  # by name, without the prefix
_LOG = logging.getLogger(__name__)
_PREFIX = "dovetail_"
_LONGEST_LINE = 8192  # bytes of a question for metrics
_SECONDS = 10.0  # for a question to come


def health_routes(ready: Callable[[], bool]) -> list[BaseRoute]:
    """`/healthz`: the process answers; `/readyz`: it can do its work."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok")

    async def readyz(request: Request) -> Response:
        fine = ready()
        return PlainTextResponse("ready" if fine else "not ready", status_code=200 if fine else 503)

    return [Route("/healthz", healthz), Route("/readyz", readyz)]


def metrics_of(counts: Mapping[str, int], gauges: Gauges) -> str:
    """In the text format of Prometheus."""
    lines = [f"# TYPE {_PREFIX}requests_total counter"]
    lines += [f'{_PREFIX}requests_total{{outcome="{name}"}} {count}' for name, count in sorted(counts.items())]
    for name, value in sorted(gauges.items()):
        lines += [f"# TYPE {_PREFIX}{name} gauge", f"{_PREFIX}{name} {float(value):.10g}"]
    return "\n".join(lines) + "\n"


async def tell_metrics(port: int, read: Callable[[], Awaitable[str]]) -> None:
    """Answer every question on a port of this machine with the metrics, until cancelled."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.LimitOverrunError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(_SECONDS):
                await reader.readuntil(b"\r\n\r\n")
                body = (await read()).encode()
                head = "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\nconnection: close\r\n"
                writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port, limit=_LONGEST_LINE)
    async with server:
        await server.serve_forever()


class _Json(logging.Formatter):
    def __init__(self, party: str) -> None:
        super().__init__()
        self._party = party

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "party": self._party,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            said["error"] = record.exc_info[0].__name__
        return json.dumps(said)


def log_as_json(party: str) -> Callable[[str], None]:
    """One JSON object per line on stderr, for all that is logged from now on; addresses of others are never logged.

    Returns what logs at which address the party listens.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(party))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _LOG.setLevel(logging.INFO)
    return lambda address: _LOG.info("%s listens on %s", party, address)
