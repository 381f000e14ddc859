"""The agent: the process on a node that randomizes and seals.

Code that is shipped to a node hands its update over and gets a sealed envelope back, over a Unix socket; policy, keys
and ledger stay with the node's owner.
"""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dovetail._structs import resolve_fields
from dovetail.parties.common.http_clients import Rejected, Unreachable
from dovetail.parties.common.wire import Malformed, encode_vector
from dovetail.parties.http.requests import Counts, ServiceApp, read_body
from dovetail.parties.user.client import Client, Envelope, RoundCall

__all__ = ["Agent", "serve_agent"]

_MOST = 1 << 30  # bytes of a request: an update of 250 million parameters


class _ReportRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    call: RoundCall
    update: bytes
    facts: dict[str, float | list[float]] = {}


class Agent:
    """The agent behind a socket, as code on the same node sees it; answers as `Client.answer` does.

    Arguments:
        socket: the Unix socket that the agent listens on.
        timeout: seconds to wait for its answer, which takes as long as sealing does.
    """

    def __init__(self, socket: Path, *, timeout: float = 600.0) -> None:
        self._socket = socket
        self._http = httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=timeout, trust_env=False)

    def answer(self, call: RoundCall, update: np.ndarray, facts: Mapping[str, Any] | None = None) -> Envelope:
        """The envelope of the round that the call is for, if the node's policy admits it; else `Rejected`."""
        plain = {name: np.asarray(value, np.float64).tolist() for name, value in (facts or {}).items()}
        request = msgspec.msgpack.encode(_ReportRequest(call=call, update=encode_vector(update), facts=plain))
        try:
            answer = self._http.post("http://agent/v1/report", content=request)
        except httpx.HTTPError as error:
            raise Unreachable(f"no agent answers on the socket {str(self._socket)!r}: is it running?") from error
        if answer.status_code != 200:
            raise Rejected(answer.text)
        return Envelope.decode(answer.content)


def serve_agent(client: Client, socket: Path, *, group: bool = False) -> None:
    """Serve one client's reports on a socket, until the process is stopped.

    Arguments:
        client: whose reports.
        socket: path of the socket; one that is left over there is replaced.
        group: let the agent's group use the socket, not its own user alone: shipped code then runs as another user, who
            cannot get at the agent's files.
    """
    lock = threading.Lock()

    def report(body: bytes) -> bytes:
        try:
            request = msgspec.msgpack.decode(body, type=resolve_fields(_ReportRequest))
        except msgspec.MsgspecError as error:
            raise Malformed(f"this is not a call to a round with an update ({error})") from error
        if len(request.update) % 4:
            raise Malformed(f"expected an update of numbers of 4 bytes each, got {len(request.update)} bytes")
        with lock:
            return client.answer(request.call, np.frombuffer(request.update, "<f4"), request.facts).encode()

    async def handle(request: Request) -> Response:
        body = await read_body(request.receive, max_bytes=_MOST)
        return Response(await asyncio.to_thread(report, body), media_type="application/octet-stream")

    app = ServiceApp([Route("/v1/report", handle, methods=["POST"])], Counts())
    socket.unlink(missing_ok=True)  # of an agent that was killed
    with sockets.socket(sockets.AF_UNIX) as listener:
        before = os.umask(0o117 if group else 0o177)
        try:
            listener.bind(str(socket))
        finally:
            os.umask(before)
        uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[listener])
