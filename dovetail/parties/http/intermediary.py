"""A shuffler or aggregator as a service: uploads in, rosters to the others, batches out to the analyzer.

Clients see the analyzer's task, status and models through it, so that the analyzer never sees a client. Uploads that
arrive together are written in one transaction. In the background it follows the analyzer, closes rounds that are full
or whose time is up, and forwards them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient, Unreachable
from dovetail.parties.common.keys import PublicKey
from dovetail.parties.common.notices import Notices
from dovetail.parties.common.wire import CLOCK_SKEW, Malformed, RoundStatus, TooLate, Unknown, authenticate
from dovetail.parties.http import requests
from dovetail.parties.http.monitoring import Pulse, health_routes, metrics_of, serve_metrics
from dovetail.parties.http.requests import (
    Backoff,
    Counts,
    ServiceApp,
    cacheable_response,
    number_of,
    path_of,
    repeat_forever,
)
from dovetail.parties.http.uploads import Uploads
from dovetail.parties.intermediary.party import Intermediary

__all__ = ["IntermediaryService"]

_LOG = logging.getLogger(__name__)
_PAUSE = 0.05  # seconds between looks at what there is to do
_LOOK = 0.2  # seconds between looks of those who do not keep the rounds: all of them ask the analyzer
_SAID = 0.5  # seconds after which others hear what was counted
_PATIENCE = 60.0  # seconds in which others may still come up
_STALE = 15.0  # seconds without sound word from the analyzer after which this service is not ready


class IntermediaryService:
    """A shuffler or aggregator and its neighbours: who may upload, the others of the task, the analyzer.

    Of several processes for one, a single one `keeps` the rounds: closes them, agrees with the others, forwards.
    """

    def __init__(
        self,
        party: Intermediary[Any],
        *,
        enrolled: Mapping[bytes, PublicKey],
        analyzer: AnalyzerClient,
        peers: Sequence[IntermediaryClient] = (),
        notices: Callable[[], Notices] | None = None,
        counts: Counts | None = None,
        keeps: bool = True,
        metrics_port: int | None = None,
    ) -> None:
        self._metrics_port = metrics_port
        self._notices = notices or functools.partial(Notices, party.signed.signer.key_id)
        self._keeps = keeps
        self._pacing = Backoff(party.task)
        self._party, self._analyzer, self._peers, self._enrolled = party, analyzer, peers, enrolled
        others = [keys.sign for i, keys in enumerate(party.task.intermediaries) if i != party.index]
        self._others = {key.key_id: key for key in others}
        self._status: RoundStatus | None = None
        self._followed = -math.inf  # when the analyzer was last heard and believed
        self._clock_is_off = False
        self._opened = 0  # the last round that this replica opened
        self._model: tuple[int, tuple[bytes, bytes]] | None = None  # with its signature
        self._said: set[str] = set()
        self._began = time.monotonic()
        prefix = "/v1/tasks/{task}"
        self.counts = Counts() if counts is None else counts
        self._uploads = Uploads(
            party,
            enrolled=enrolled,
            notices=self._notices,
            counts=self.counts,
            current=lambda: None if self._status is None else self._status.round,
            headers=self._pacing.headers,
            complain=self._complain,
        )
        self.pulse = Pulse(lambda: party.store.state(0))
        routes = [
            *health_routes(self._is_ready, self.pulse),
            Route("/v1/task", self._get_task),
            Route("/v1/notices", self._get_notices),
            Route("/v1/status", self._get_status),
            Route("/v1/counts", self._get_counts),
            Route(f"{prefix}/models/{{round}}", self._get_model),
            Route(f"{prefix}/rounds/{{round}}/uploads/{{index}}", self._upload, methods=["POST"]),
            Route(f"{prefix}/rounds/{{round}}/roster", self._roster),
            Route(f"{prefix}/rounds/{{round}}/agreed", self._agreed),
            Route(f"{prefix}/rounds/{{round}}/challenge", self._challenge),
            Route(f"{prefix}/rounds/{{round}}/verifiers/{{first:int}}", self._verifiers),
        ]
        self.app = ServiceApp(routes, self.counts, self._work, direct=self._uploads, pulse=self.pulse)

    def _is_ready(self) -> bool:
        """Whether it can work: it has heard the analyzer lately, writes, and agrees with it about the time."""
        heard = time.monotonic() - self._followed < _STALE
        return heard and not self._uploads.failing and not self._clock_is_off

    async def _get_task(self, request: Request) -> Response:
        return cacheable_response(request, msgspec.json.encode(self._party.signed), "application/json", seconds=60)

    async def _get_notices(self, request: Request) -> Response:
        return cacheable_response(
            request, msgspec.json.encode(self._notices().handed_out), "application/json", seconds=1
        )

    async def _get_status(self, request: Request) -> Response:
        if self._status is None:
            return PlainTextResponse("expected an analyzer that answers, got none yet", status_code=503)
        body = msgspec.json.encode(self._status)
        return cacheable_response(request, body, "application/json", seconds=1, headers=self._pacing.headers())

    async def _get_counts(self, request: Request) -> Response:
        """For its owner alone: whoever watches the counts knows when uploads come."""
        own = self._party.key.public
        authenticate({own.key_id: own}, "GET", path_of(request), request.headers, b"")
        return JSONResponse(self.counts.everywhere())

    async def _get_model(self, request: Request) -> Response:
        round = number_of(request, self._party.task.task_id)
        if self._model is None or self._model[0] != round:
            raise TooLate("expected the round of the current model, got another one")
        return requests.model_response(request, *self._model[1])

    async def _upload(self, request: Request) -> Response:
        round = number_of(request, self._party.task.task_id)
        if request.path_params["index"] != str(self._party.index):
            raise Malformed(f"expected an upload for {self._party.kind} {self._party.index}, got one for another")
        return await self._uploads.serve(request, round)

    async def _roster(self, request: Request) -> Response:
        round = self._asked_by_another(request)
        return _packed(await asyncio.to_thread(self._party.store.roster, round))

    async def _agreed(self, request: Request) -> Response:
        round = self._asked_by_another(request)
        return _packed(await asyncio.to_thread(self._party.store.agreed_digest, round))

    async def _challenge(self, request: Request) -> Response:
        round = self._asked_by_another(request)
        return _packed(await asyncio.to_thread(self._party.challenge, round))

    async def _verifiers(self, request: Request) -> Response:
        round, first = self._asked_by_another(request), request.path_params["first"]
        return _packed(await asyncio.to_thread(self._party.verifiers, round, first))

    def _asked_by_another(self, request: Request) -> int:
        round = number_of(request, self._party.task.task_id)
        if not self._others:
            raise Unknown(f"expected another {self._party.kind} of this task, got none that could ask")
        authenticate(self._others, "GET", path_of(request), request.headers, b"")
        return round

    async def _work(self) -> None:
        look = _PAUSE if self._keeps else _LOOK
        duties = [self._uploads.write(), repeat_forever(look, self._follow, self._complain), self._publish()]
        if self._keeps:
            duties += [repeat_forever(_PAUSE, self._close, self._complain), self._tell_metrics()]
        await asyncio.gather(*duties)

    async def keep(self) -> None:
        """Keep the rounds, and take nothing from anybody: others do."""
        await asyncio.gather(
            *(repeat_forever(_PAUSE, step, self._complain) for step in (self._follow, self._close)),
            self.pulse.beat(),
            self._publish(),
            self._tell_metrics(),
        )

    async def _tell_metrics(self) -> None:
        if self._metrics_port is not None:
            await serve_metrics(self._metrics_port, self._metrics)

    async def _metrics(self) -> str:
        round = 0 if self._status is None else self._status.round
        uploads = await asyncio.to_thread(self._party.store.uploads, round)
        over = self._status is not None and self._status.over
        return metrics_of(self.counts.everywhere(), {"round": round, "round_uploads": uploads, "over": over})

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(_SAID)
            self.counts.publish()

    async def _follow(self) -> None:
        """What the analyzer says: a new round is opened here, with its model."""
        status = await asyncio.to_thread(self._analyzer.status)
        task, store = self._party.task, self._party.store
        if status.task_id != task.task_id:
            raise ValueError("expected the analyzer of this task, got that of another one")
        wanted = status.round if status.over else status.round - 1
        if self._model is None or self._model[0] != wanted:
            dim = None if status.over else task.model_dim  # what is published may be solved from longer updates
            self._model = wanted, await asyncio.to_thread(self._analyzer.signed_model, wanted, dim=dim)
        is_new = not status.over and self._opened != status.round
        if is_new and not await self._has_ended() and await self._leads():
            closes = time.time() + task.round_seconds
            opening = functools.partial(store.open_round, status.round, head=status.head, closes=closes)
            await asyncio.to_thread(opening)
            self._opened = status.round
        self._compare_clocks(status)
        self._pacing.saw(status.round)
        self._status, self._followed = status, time.monotonic()

    def _compare_clocks(self, status: RoundStatus) -> None:
        """Say so, and be not ready, if a round ends at another time than it can by this clock.

        Users look at their own clocks: where these differ from the analyzer's, round after round is charged and void.
        """
        if status.over or not status.closes:
            return
        late, behind = status.seconds_late, -status.seconds_late - self._party.task.round_seconds
        has_just_opened = self._status is not None and self._status.round < status.round
        if behind > CLOCK_SKEW:
            self._clock_is_off, words = True, f"{behind:.0f} seconds behind"
        elif late > CLOCK_SKEW and (has_just_opened or self._clock_is_off):
            self._clock_is_off, words = True, f"at least {late:.0f} seconds ahead of"
        else:
            self._clock_is_off = False
            return
        self._complain(ValueError(f"this machine's clock is {words} the analyzer's: set both by NTP"))

    async def _has_ended(self) -> bool:
        """Whether the task ended before its time; then the one that leads forgets what its rounds hold, for good."""
        store, reason = self._party.store, self._notices().why_ended(self._party.signed)
        if await asyncio.to_thread(store.why_ended) is not None:
            return True
        if reason is None:
            return False
        if await self._leads():
            _LOG.warning("%s: open rounds are dropped, and none opens again", reason)
            await asyncio.to_thread(store.end_task, reason)
        return True

    async def _leads(self) -> bool:
        """Whether this replica opens, closes and forwards rounds: one of them at a time does."""
        return self._keeps and await asyncio.to_thread(self._party.store.leads)

    async def _close(self) -> None:
        """Rounds that are full or whose time is up; what was closed is forwarded."""
        store = self._party.store
        if not await self._leads() or await self._has_ended():
            return
        for round, state, closes in await asyncio.to_thread(store.pending_rounds):
            if state in ("open", "frozen") and self._status is not None and round < self._status.round:
                await asyncio.to_thread(self._party.drop_round, round)
                continue
            if state == "open" and (time.time() >= closes or self._party.is_full(round)):
                await asyncio.to_thread(store.freeze, round)
                state = "frozen"
            if state == "frozen":
                state = await asyncio.to_thread(self._party.exchange, round, self._peers)
            if state in ("void", "sent"):
                await asyncio.to_thread(self._party.forward, round, self._analyzer)

    def _complain(self, error: Exception) -> None:
        """Say what goes wrong once; it is tried again all the time, and services may come up later than others."""
        if isinstance(error, Unreachable) and time.monotonic() - self._began < _PATIENCE:
            return
        said = f"{type(error).__name__}: {error}"
        if said not in self._said:
            self._said.add(said)
            _LOG.warning("%s", said)


def _packed(value: object) -> Response:
    return Response(msgspec.msgpack.encode(value), media_type="application/octet-stream")
