"""The analyzer as a service: batches in, models out, a page for people, JSON for machines."""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import time
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from dovetail._structs import resolve_fields
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common.notices import Notices
from dovetail.parties.common.wire import BATCH_ID, Closed, Malformed
from dovetail.parties.http.monitoring import Pulse, health_routes, prometheus_text, serve_metrics, status_page
from dovetail.parties.http.requests import (
    Counts,
    ServiceApp,
    authenticate_head,
    cacheable_response,
    model_response,
    number_in_path,
    read_body,
    repeat_forever,
    routed_path,
)

__all__ = ["AnalyzerService"]

_LOG = logging.getLogger(__name__)
_PATIENCE = 600.0  # seconds that releasing a model and testing it may take


class AnalyzerService:
    """An analyzer behind HTTP.

    Arguments:
        analyzer: the party.
        grace: seconds after the end of a round's time in which nothing comes, after which the round is given up.
        notices: reads what the task's signer has announced.
        metrics_port: port on this machine for metrics; None: there are none.
    """

    def __init__(
        self,
        analyzer: Analyzer,
        *,
        grace: float = 600.0,
        notices: Callable[[], Notices] | None = None,
        metrics_port: int | None = None,
    ) -> None:
        self._metrics_port = metrics_port
        self._failing = False
        self._analyzer = analyzer
        self._grace = grace
        self._notices = notices or functools.partial(Notices, analyzer.signed.signer.key_id)
        signing = [keys.sign for keys in analyzer.task.intermediaries]
        self._senders = {key.key_id: index for index, key in enumerate(signing)}
        self._keys = {key.key_id: key for key in signing}
        self._seen = (0, 0)  # the last progress
        self._since = time.monotonic()  # when it was seen
        self.counts = Counts()
        prefix = "/v1/tasks/{task}"
        pulse = Pulse(lambda: analyzer.round_and_messages, patience=_PATIENCE)
        routes = [
            *health_routes(lambda: not self._failing, pulse),
            Route("/", self._get_page),
            Route("/v1/privacy", self._get_privacy),
            Route("/v1/task", self._get_task),
            Route("/v1/notices", self._get_notices),
            Route("/v1/status", self._get_status),
            Route("/v1/counts", self._get_counts),
            Route(f"{prefix}/models/{{round}}", self._get_model),
            Route(f"{prefix}/rounds/{{round}}/batches/{{batch}}/parts/{{number}}", self._take_part, methods=["POST"]),
            Route(f"{prefix}/rounds/{{round}}/closed", self._note_closed, methods=["POST"]),
        ]
        self.app = ServiceApp(routes, self.counts, self._work_in_background, pulse=pulse)

    async def _get_page(self, request: Request) -> Response:
        return HTMLResponse(status_page(await asyncio.to_thread(self._analyzer.privacy)))

    async def _get_privacy(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._analyzer.privacy))

    async def _get_task(self, request: Request) -> Response:
        return cacheable_response(request, msgspec.json.encode(self._analyzer.signed), "application/json", seconds=60)

    async def _get_notices(self, request: Request) -> Response:
        return cacheable_response(
            request, msgspec.json.encode(self._notices().handed_out), "application/json", seconds=1
        )

    async def _get_status(self, request: Request) -> Response:
        status = await asyncio.to_thread(self._analyzer.status)
        return cacheable_response(request, msgspec.json.encode(status), "application/json", seconds=1)

    async def _get_counts(self, request: Request) -> Response:
        return JSONResponse(dict(self.counts))

    async def _get_model(self, request: Request) -> Response:
        round = number_in_path(request.path_params, self._analyzer.task.task_id)
        model = await asyncio.to_thread(self._analyzer.model, round)
        return model_response(request, model, self._analyzer.model_signature(round, model))

    async def _take_part(self, request: Request) -> Response:
        """Count a part that an intermediary sends; its sender is verified before the body is read."""
        task = self._analyzer.task
        round = number_in_path(request.path_params, task.task_id)
        number = number_in_path(request.path_params, task.task_id, "number")
        batch = _parse_batch(request.path_params["batch"])
        sender, body = await self._authenticate(request, max_bytes=self._analyzer.incoming.max_part_bytes)
        outcome = await asyncio.to_thread(self._analyzer.count_part, sender, round, batch, number, body)
        self.counts[outcome] += 1
        return PlainTextResponse(outcome)

    async def _note_closed(self, request: Request) -> Response:
        """Note that an intermediary says it has closed a round."""
        round = number_in_path(request.path_params, self._analyzer.task.task_id)
        sender, body = await self._authenticate(request, max_bytes=1024)
        try:
            closed = msgspec.json.decode(body, type=resolve_fields(Closed))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Malformed(f"this does not say how a round was closed: {error}") from error
        await asyncio.to_thread(self._analyzer.note_closed, sender, round, closed)
        self.counts["closed"] += 1
        return PlainTextResponse("closed")

    async def _authenticate(self, request: Request, *, max_bytes: int) -> tuple[int, bytes]:
        """The index of the shuffler or aggregator that sends a request, and its body."""
        head = authenticate_head(self._keys, request.method, routed_path(request), request.headers, max_bytes=max_bytes)
        body = await read_body(request.receive, max_bytes=head.length)
        head.check(body)
        return self._senders[head.sender], body

    async def _work_in_background(self) -> None:
        duties = [repeat_forever(1.0, self._check_progress, self._log_error)]
        if self._metrics_port is not None:
            duties.append(serve_metrics(self._metrics_port, self._metrics_text))
        await asyncio.gather(*duties)

    def _log_error(self, error: Exception) -> None:
        self._failing = True
        _LOG.warning("%s: %s", type(error).__name__, error)

    async def _metrics_text(self) -> str:
        facts = await asyncio.to_thread(self._analyzer.privacy)
        outcomes = collections.Counter(row["outcome"] for row in facts["history"])
        gauges = {f"rounds_{name}": float(outcomes[name]) for name in ("released", "void", "spoiled")}
        spent = facts["spent"]["eps"]
        budget = facts["budget"]["eps"]
        gauges |= {
            "rounds_reserved": facts["rounds_reserved"],
            "rounds": facts["rounds"],
            "messages": facts["messages"],
        }
        if spent is not None and budget:  # a ratio: eps itself is in statements alone
            gauges["budget_spent"] = spent / budget
        return prometheus_text(self.counts.counts_of_all_processes(), gauges)

    async def _check_progress(self) -> None:
        """End a training that was withdrawn, and give up a round that nobody closes."""
        if reason := self._notices().why_ended(self._analyzer.signed):
            await asyncio.to_thread(self._analyzer.end_task, reason)
        progress = await asyncio.to_thread(lambda: self._analyzer.round_and_messages)
        self._failing = False
        if progress != self._seen:
            self._seen = progress
            self._since = time.monotonic()
        elif time.monotonic() - self._since > self._analyzer.task.round_seconds + self._grace:
            await asyncio.to_thread(self._analyzer.give_up_round, progress[0])


def _parse_batch(text: str) -> bytes:
    try:
        batch = bytes.fromhex(text)
    except ValueError:
        batch = b""
    if len(batch) != BATCH_ID or text != batch.hex():
        raise Malformed(f"the id of a batch in the path must be {2 * BATCH_ID} hexadecimal digits in lower case")
    return batch
