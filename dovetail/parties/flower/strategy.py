"""The server app's side of a training: it carries the analyzer's model to the nodes, and their envelopes to services.

The analyzer decides which round is open, what it costs and what the model is; this strategy follows it. In every round
it waits for as many nodes as the task's privacy was accounted with, and refuses the round if they do not come; it sends
them the model, with a time to live that ends with the round, and passes on what they reply. Nodes evaluate nothing:
how good a model is, is measured where the model is, on data that is the server's.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from dovetail.parties.common.http_clients import AnalyzerClient, Unreachable
from dovetail.parties.common.keys import ServicePairs
from dovetail.parties.common.task import verify
from dovetail.parties.common.wire import RoundStatus
from dovetail.parties.flower.carrying import Carrying, Play, Relay
from dovetail.parties.flower.records import envelope_of, flatten, instruction, unflatten
from dovetail.parties.user.client import RoundCall

__all__ = ["DovetailStrategy"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]

_GATHERING = 0.5  # of a round's time, to wait for nodes
_POLL = 0.5  # seconds
_LONGEST_END = 300.0  # seconds from the end of a round to the next model
_SYSTEM = random.SystemRandom()
_LOG = logging.getLogger("flwr")  # the one that Flower shows


class DovetailStrategy:
    """Runs a task of Dovetail's over a Flower grid; stands where another strategy stood in a server app.

    Guarantees:
        No message is sent to fewer nodes than the task was accounted with.
        A reply is passed on whole or not at all, once a node, and only if it is an envelope of this task and round.
    """

    def __init__(self, carrying: Carrying, *, signer: bytes) -> None:
        self._carrying, self._source = carrying, carrying.source
        self._signed = self._source.task()
        self.task = verify(self._signed, signer=signer)
        if self.task.analyzer_sign is None:
            raise ValueError(
                "the task names no key that its analyzer signs with, and nodes report to signed rounds alone"
            )
        carrying.check(self.task)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> DovetailStrategy:
        """By a run's configuration.

        `dovetail-signer` is the id of the key that signs tasks, `dovetail-ca` the certificate that services are known
        by. To relay: `dovetail-services`, the addresses of the aggregators or shufflers with spaces between, in the
        order of the task. To play a task's one shuffler: `dovetail-analyzer`, its address; `dovetail-shuffler`, a
        folder with the shuffler's store, and its keys under `keys`.
        """

        def told(name: str) -> str:
            return str(config.get(name) or "")

        signer, ca = bytes.fromhex(told("dovetail-signer")), Path(told("dovetail-ca")) if told("dovetail-ca") else None
        if urls := told("dovetail-services").split():
            return cls(Relay(urls, ca=ca), signer=signer)
        if not told("dovetail-analyzer") or not told("dovetail-shuffler"):
            raise ValueError(
                "expected dovetail-services, or dovetail-analyzer and dovetail-shuffler, in the run's configuration, "
                "got neither"
            )
        folder = Path(told("dovetail-shuffler"))
        with contextlib.closing(AnalyzerClient(told("dovetail-analyzer"), ca=ca)) as link:
            named = verify(link.task(), signer=signer, fresh=False).shufflers
        if len(named) != 1:  # the services of others, shufflers or aggregators, are in dovetail-services
            raise ValueError(f"expected a task with one shuffler, which a server app can play, got {len(named)}")
        keys = ServicePairs.find(folder / "keys", named[0])  # there may be newer ones, for the next task
        analyzer = AnalyzerClient(told("dovetail-analyzer"), ca=ca, key=keys.sign)
        return cls(Play(folder, analyzer=analyzer, signer=signer, keys=keys), signer=signer)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        *,
        train_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train until the analyzer says that it is over.

        `initial_arrays` gives the names and shapes of the model's arrays; the numbers are the analyzer's. Rounds and
        timeouts are the task's.
        """
        if len(flatten(initial_arrays)) != self.task.model_dim:
            raise ValueError(f"expected a model of {self.task.model_dim} numbers, got {len(flatten(initial_arrays))}")
        result, status = Result(), self._source.status()
        while True:
            done = status.round if status.over else status.round - 1
            result.arrays = unflatten(self._source.model(done, dim=self.task.model_dim), initial_arrays)
            measured = evaluate_fn(done, result.arrays) if evaluate_fn is not None else None
            if measured is not None:
                result.evaluate_metrics_serverapp[done] = measured
            _LOG.info("after round %d of %d: %s", done, self.task.rounds, dict(measured or {}))
            if status.over:
                return result
            self._round(grid, status, result.arrays, train_config or ConfigRecord())
            status = self._next(status.round)

    def _round(self, grid: Grid, status: RoundStatus, arrays: ArrayRecord, config: ConfigRecord) -> None:
        ends = time.monotonic() + self.task.round_seconds
        nodes = self._gather(grid, status.round, time.monotonic() + _GATHERING * self.task.round_seconds)
        seconds = ends - time.monotonic()
        self._carrying.begin(status, seconds)
        call = RoundCall(signed=self._signed, status=status, notices=tuple(self._carrying.notices()))
        content = instruction(arrays, config, call)
        group = str(status.round)
        messages = [Message(content, node, MessageType.TRAIN, ttl=seconds, group_id=group) for node in nodes]
        taken = self._pass_on(grid.send_and_receive(messages, timeout=seconds), status.round)
        _LOG.info("round %d: %d of %d nodes reported", status.round, taken, len(nodes))
        self._carrying.finish(status.round)

    def _gather(self, grid: Grid, round: int, until: float) -> list[int]:
        """The nodes of a round: all that are there, or as many as the task lets in."""
        while len(nodes := list(grid.get_node_ids())) < self.task.min_clients:
            if time.monotonic() >= until:
                raise ValueError(f"expected at least {self.task.min_clients} nodes for round {round}, got {len(nodes)}")
            time.sleep(_POLL)
        return _SYSTEM.sample(nodes, min(len(nodes), self.task.max_clients))

    def _pass_on(self, replies: Iterable[Message], round: int) -> int:
        """Hand every envelope on; how many were taken."""
        taken: set[int] = set()
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                _LOG.warning("a node did not report: %s", reply.error.reason)
                continue
            try:
                envelope = envelope_of(reply)
                if (envelope.task_id, envelope.round) != (self.task.task_id, round):
                    raise ValueError("expected an envelope of this task and round, got another one")
                self._carrying.take(node, envelope)
                taken.add(node)
            except (ValueError, Unreachable) as reason:
                _LOG.warning("a reply was not taken: %s", reason)
        return len(taken)

    def _next(self, round: int) -> RoundStatus:
        """The status after a round, as soon as the analyzer has ended it."""
        until = time.monotonic() + self.task.round_seconds + _LONGEST_END
        while True:
            try:
                status = self._source.status()
                if status.over or status.round > round:
                    return status
            except Unreachable:
                pass  # an analyzer that restarts; a longer absence ends below
            if time.monotonic() >= until:
                raise TimeoutError(f"expected the analyzer to end round {round}, got no answer that it did")
            time.sleep(_POLL)
