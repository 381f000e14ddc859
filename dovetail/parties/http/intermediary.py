"""A shuffler or aggregator as a service: uploads in, rosters to the others, batches out to the analyzer.

Clients get the analyzer's task, status and models through it, so that the analyzer never sees a client. In the
background it follows the analyzer, closes rounds that are full or whose time is up, and forwards them.
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
from dovetail.parties.common.wire import CLOCK_SKEW, RoundStatus, TooLate, Unknown, authenticate_request
from dovetail.parties.http import requests
from dovetail.parties.http.monitoring import Pulse, health_routes, prometheus_text, serve_metrics
from dovetail.parties.http.requests import (
    Backoff,
    Counts,
    ServiceApp,
    cacheable_response,
    number_in_path,
    repeat_forever,
    routed_path,
)
from dovetail.parties.http.uploads import Uploads
from dovetail.parties.intermediary.party import Intermediary

__all__ = ["IntermediaryService"]

_LOG = logging.getLogger(__name__)
_PAUSE = 0.05  # seconds between looks at what there is to do
_LOOK = 0.2  # seconds between looks of processes that do not run the rounds: all of them ask the analyzer
_PUBLISH = 0.5  # seconds after which other processes see what was counted
_PATIENCE = 60.0  # seconds in which other services may still start
_STALE = 15.0  # seconds without a valid status of the analyzer after which this service is not ready


class IntermediaryService:
    """A shuffler or aggregator behind HTTP.

    Arguments:
        party: the shuffler or aggregator.
        enrolled: the keys of the users that may upload, by id.
        analyzer: the analyzer's service.
        peers: the services of the others of its kind in the task.
        notices: reads what the task's signer has announced.
        counts: shared with other processes of this service; None: this is the only one.
        coordinates: whether this process runs the rounds: closes them, agrees with the peers, and forwards.
        metrics_port: port on this machine for metrics; None: there are none.
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
        coordinates: bool = True,
        metrics_port: int | None = None,
    ) -> None:
        self._metrics_port = metrics_port
        self._notices = notices or functools.partial(Notices, party.signed.signer.key_id)
        self._coordinates = coordinates
        self._backoff = Backoff(party.task)
        self._party = party
        self._analyzer = analyzer
        self._peers = peers
        others = [keys.sign for i, keys in enumerate(party.task.intermediaries) if i != party.index]
        self._others = {key.key_id: key for key in others}
        self._status: RoundStatus | None = None
        self._followed = -math.inf  # when the analyzer last sent a valid status
        self._clock_is_off = False
        self._opened = 0  # the last round that this replica opened
        self._model: tuple[int, tuple[bytes, bytes]] | None = None  # with its signature
        self._logged: set[str] = set()
        self._began = time.monotonic()
        prefix = "/v1/tasks/{task}"
        self.counts = Counts() if counts is None else counts
        self._uploads = Uploads(
            party,
            enrolled=enrolled,
            notices=self._notices,
            counts=self.counts,
            current=lambda: None if self._status is None else self._status.round,
            headers=self._backoff.headers,
            complain=self._log_error,
        )
        self.pulse = Pulse(lambda: party.store.state(0))
        routes = [
            Route(f"{prefix}/rounds/{{round}}/uploads/{{index}}", self._uploads, methods=["POST"]),  # the most frequent
            *health_routes(self._is_ready, self.pulse),
            Route("/v1/task", self._get_task),
            Route("/v1/notices", self._get_notices),
            Route("/v1/status", self._get_status),
            Route("/v1/counts", self._get_counts),
            Route(f"{prefix}/models/{{round}}", self._get_model),
            Route(f"{prefix}/rounds/{{round}}/roster", self._get_roster),
            Route(f"{prefix}/rounds/{{round}}/agreed", self._get_agreed),
            Route(f"{prefix}/rounds/{{round}}/challenge", self._get_challenge),
            Route(f"{prefix}/rounds/{{round}}/verifiers/{{first:int}}", self._get_verifiers),
        ]
        self.app = ServiceApp(routes, self.counts, self._work_in_background, pulse=self.pulse)

    def _is_ready(self) -> bool:
        """Whether it can work: it follows the analyzer, its store writes, and its clock is right."""
        follows = time.monotonic() - self._followed < _STALE
        return follows and not self._uploads.failing and not self._clock_is_off

    async def _get_task(self, request: Request) -> Response:
        return cacheable_response(request, msgspec.json.encode(self._party.signed), "application/json", seconds=60)

    async def _get_notices(self, request: Request) -> Response:
        return cacheable_response(
            request, msgspec.json.encode(self._notices().handed_out), "application/json", seconds=1
        )

    async def _get_status(self, request: Request) -> Response:
        if self._status is None:
            return PlainTextResponse("the analyzer has not answered this service yet", status_code=503)
        body = msgspec.json.encode(self._status)
        return cacheable_response(request, body, "application/json", seconds=1, headers=self._backoff.headers())

    async def _get_counts(self, request: Request) -> Response:
        """For its owner alone: whoever watches the counts knows when uploads come."""
        own = self._party.key.public
        authenticate_request({own.key_id: own}, "GET", routed_path(request), request.headers, b"")
        return JSONResponse(self.counts.counts_of_all_processes())

    async def _get_model(self, request: Request) -> Response:
        round = number_in_path(request.path_params, self._party.task.task_id)
        if self._model is None or self._model[0] != round:
            current = "none" if self._model is None else f"that after round {self._model[0]}"
            raise TooLate(f"the model after round {round} is not here; the current one is {current}")
        return requests.model_response(request, *self._model[1])

    async def _get_roster(self, request: Request) -> Response:
        round = self._round_of_authentic_peer(request)
        return _msgpack_response(await asyncio.to_thread(self._party.store.roster, round))

    async def _get_agreed(self, request: Request) -> Response:
        round = self._round_of_authentic_peer(request)
        return _msgpack_response(await asyncio.to_thread(self._party.store.agreed_digest, round))

    async def _get_challenge(self, request: Request) -> Response:
        round = self._round_of_authentic_peer(request)
        return _msgpack_response(await asyncio.to_thread(self._party.challenge, round))

    async def _get_verifiers(self, request: Request) -> Response:
        round = self._round_of_authentic_peer(request)
        first = request.path_params["first"]
        return _msgpack_response(await asyncio.to_thread(self._party.verifiers, round, first))

    def _round_of_authentic_peer(self, request: Request) -> int:
        """The round that another shuffler or aggregator of the task asks about."""
        round = number_in_path(request.path_params, self._party.task.task_id)
        if not self._others:
            raise Unknown(f"this task has one {self._party.kind}, so that no other may ask about a round")
        authenticate_request(self._others, "GET", routed_path(request), request.headers, b"")
        return round

    async def _work_in_background(self) -> None:
        """Write uploads and follow the analyzer; only the process that coordinates closes rounds and serves metrics."""
        look = _PAUSE if self._coordinates else _LOOK
        duties = [
            self._uploads.write_groups(),
            repeat_forever(look, self._follow_analyzer, self._log_error),
            self._publish_counts(),
        ]
        if self._coordinates:
            duties += [repeat_forever(_PAUSE, self._close_rounds, self._log_error), self._serve_metrics()]
        await asyncio.gather(*duties)

    async def run_rounds(self) -> None:
        """Run the rounds, while other processes answer requests."""
        await asyncio.gather(
            *(repeat_forever(_PAUSE, step, self._log_error) for step in (self._follow_analyzer, self._close_rounds)),
            self.pulse.beat(),
            self._publish_counts(),
            self._serve_metrics(),
        )

    async def _serve_metrics(self) -> None:
        if self._metrics_port is not None:
            await serve_metrics(self._metrics_port, self._metrics_text)

    async def _metrics_text(self) -> str:
        round = 0 if self._status is None else self._status.round
        uploads = await asyncio.to_thread(self._party.store.num_uploads, round)
        over = self._status is not None and self._status.over
        return prometheus_text(
            self.counts.counts_of_all_processes(), {"round": round, "round_uploads": uploads, "over": over}
        )

    async def _publish_counts(self) -> None:
        while True:
            await asyncio.sleep(_PUBLISH)
            self.counts.publish()

    async def _follow_analyzer(self) -> None:
        """Ask the analyzer for the status and the model, and open a new round here."""
        status = await asyncio.to_thread(self._analyzer.status)
        task = self._party.task
        store = self._party.store
        if status.task_id != task.task_id:
            raise ValueError(
                f"the analyzer runs task {status.task_id.hex()} and this service {task.task_id.hex()}: check --analyzer"
            )
        wanted = status.round if status.over else status.round - 1
        if self._model is None or self._model[0] != wanted:
            dim = None if status.over else task.model_dim  # what is published may be solved from longer updates
            signed = await asyncio.to_thread(self._analyzer.signed_model, wanted, dim=dim)
            self._model = wanted, signed
        is_new = not status.over and self._opened != status.round
        if is_new and not await self._has_ended() and await self._is_leader():
            closes = time.time() + task.round_seconds
            opening = functools.partial(store.open_round, status.round, head=status.head, closes=closes)
            await asyncio.to_thread(opening)
            self._opened = status.round
        self._compare_clocks(status)
        self._backoff.note_round(status.round)
        self._status = status
        self._followed = time.monotonic()

    def _compare_clocks(self, status: RoundStatus) -> None:
        """Log, and be not ready, if a round ends at another time than it can by this machine's clock.

        Users look at their own clocks: where these differ from the analyzer's, round after round is charged and void.
        """
        if status.over or not status.closes:
            return
        late = status.seconds_late
        behind = -late - self._party.task.round_seconds
        has_just_opened = self._status is not None and self._status.round < status.round
        if behind > CLOCK_SKEW:
            words = f"{behind:.0f} seconds behind"
        elif late > CLOCK_SKEW and (has_just_opened or self._clock_is_off):
            words = f"at least {late:.0f} seconds ahead of"
        else:
            self._clock_is_off = False
            return
        self._clock_is_off = True
        self._log_error(ValueError(f"this machine's clock is {words} the analyzer's: set both by NTP"))

    async def _has_ended(self) -> bool:
        """Whether the task ended before its time; if so, the leading replica deletes what its rounds hold, for good."""
        store = self._party.store
        reason = self._notices().why_ended(self._party.signed)
        if await asyncio.to_thread(store.why_ended) is not None:
            return True
        if reason is None:
            return False
        if await self._is_leader():
            _LOG.warning("%s: open rounds are deleted, and none opens again", reason)
            await asyncio.to_thread(store.end_task, reason)
        return True

    async def _is_leader(self) -> bool:
        """Whether this replica opens, closes and forwards rounds: one replica at a time does."""
        return self._coordinates and await asyncio.to_thread(self._party.store.is_leader)

    async def _close_rounds(self) -> None:
        """Close rounds that are full or whose time is up, and forward those that are closed."""
        store = self._party.store
        if not await self._is_leader() or await self._has_ended():
            return
        for round, state, closes in await asyncio.to_thread(store.pending_rounds):
            if state in ("open", "frozen") and self._status is not None and round < self._status.round:
                await asyncio.to_thread(self._party.drop_round, round)
                continue
            if state == "open" and (time.time() >= closes or self._party.is_full(round)):
                await asyncio.to_thread(store.freeze, round)
                state = "frozen"
            if state == "frozen":
                state = await asyncio.to_thread(self._party.agree_and_close, round, self._peers)
            if state in ("void", "sent"):
                await asyncio.to_thread(self._party.forward, round, self._analyzer)

    def _log_error(self, error: Exception) -> None:
        """Log an error once: steps are tried again all the time, and other services may start later than this one."""
        if isinstance(error, Unreachable) and time.monotonic() - self._began < _PATIENCE:
            return
        line = f"{type(error).__name__}: {error}"
        if line not in self._logged:
            self._logged.add(line)
            _LOG.warning("%s", line)


def _msgpack_response(value: object) -> Response:
    return Response(msgspec.msgpack.encode(value), media_type="application/octet-stream")
