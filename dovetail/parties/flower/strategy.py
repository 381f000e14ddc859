"""The server app's side of a training: it passes the analyzer's model to the nodes, and their envelopes to services.

The analyzer decides which round is open, what it costs and what the model is; this strategy follows it. In every round
it waits for as many nodes as the task's privacy was accounted with, and refuses the round if they do not come; it sends
them the model, with a time to live that ends with the round, and passes on what they reply. Nodes evaluate nothing: how
good a model is, is measured where the model is, on data that is the server's.

Envelopes go to a `Relay`, which hands every upload to the aggregator or shuffler it is for, as the node has sealed and
signed it: it has no key, and what it carries is sealed to the services' own keys, so it learns nothing, also together
with the analyzer. Or they go to a `LocalShuffler`, a task's one shuffler with its keys and its store in a folder.
Either way the server app sees which node sent which envelope, and when.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol as Interface

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient, Unreachable
from dovetail.parties.common.keys import ServicePairs
from dovetail.parties.common.notices import SignedNotice
from dovetail.parties.common.task import TrainingTask, task_id_of, verify
from dovetail.parties.common.wire import RoundStatus
from dovetail.parties.flower.messages import envelope_of, flatten, instruction, unflatten
from dovetail.parties.shuffler import Shuffler
from dovetail.parties.user.client import Envelope, RoundCall

__all__ = ["DovetailStrategy", "LocalShuffler", "Relay"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]

_GATHERING = 0.5  # of a round's time, to wait for nodes
_POLL = 0.5  # seconds
_LONGEST_END = 300.0  # seconds from the end of a round to the next model
_ATTEMPTS = 6  # to reach a service, over some 8 seconds
_SYSTEM = random.SystemRandom()
_LOG = logging.getLogger("flwr")  # the one that Flower shows


class DovetailStrategy:
    """Runs a task of Dovetail's over a Flower grid, in the place of another strategy of a server app.

    Arguments:
        delivery: where envelopes go: a `Relay` or a `LocalShuffler`.
        signer: id of the key that signs tasks.

    Guarantees:
        No message is sent to fewer nodes than the task was accounted with.
        A reply is passed on whole or not at all, once a node, and only if it is an envelope of this task and round.
    """

    def __init__(self, delivery: Delivery, *, signer: bytes) -> None:
        self._delivery = delivery
        self._source = delivery.source
        self._signed = self._source.task()
        self.task = verify(self._signed, signer=signer)
        if self.task.analyzer_sign is None:
            raise ValueError(
                "the task names no key that its analyzer signs with, and nodes report to signed rounds alone"
            )
        delivery.check(self.task)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> DovetailStrategy:
        """The strategy that a run's configuration describes.

        Arguments:
            config: `dovetail-signer` is the id of the key that signs tasks, `dovetail-ca` the certificate of the
                authority to trust. To relay: `dovetail-services`, the addresses of the aggregators or shufflers with
                spaces between, in the order of the task. To be a task's one shuffler: `dovetail-analyzer`, its address,
                and `dovetail-shuffler`, a folder with the shuffler's store, and its keys under `keys`.
        """

        def setting(name: str) -> str:
            return str(config.get(name) or "")

        signer = bytes.fromhex(setting("dovetail-signer"))
        ca = Path(setting("dovetail-ca")) if setting("dovetail-ca") else None
        if urls := setting("dovetail-services").split():
            return cls(Relay(urls, ca=ca), signer=signer)
        if not setting("dovetail-analyzer") or not setting("dovetail-shuffler"):
            raise ValueError(
                "the run's configuration must have dovetail-services, or both dovetail-analyzer and dovetail-shuffler"
            )
        folder = Path(setting("dovetail-shuffler"))
        with contextlib.closing(AnalyzerClient(setting("dovetail-analyzer"), ca=ca)) as client:
            shufflers = verify(client.task(), signer=signer, fresh=False).shufflers
        if len(shufflers) != 1:
            raise ValueError(
                f"the task has {len(shufflers)} shufflers, and a server app can be one alone: set dovetail-services"
            )
        keys = ServicePairs.find(folder / "keys", shufflers[0])  # there may be newer ones, for the next task
        analyzer = AnalyzerClient(setting("dovetail-analyzer"), ca=ca, key=keys.sign)
        return cls(LocalShuffler(folder, analyzer=analyzer, signer=signer, keys=keys), signer=signer)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        *,
        train_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train until the analyzer says that it is over; rounds and timeouts are the task's.

        Arguments:
            grid: the nodes.
            initial_arrays: names and shapes of the model's arrays; the numbers are the analyzer's.
            train_config: passed on to the nodes' training code.
            evaluate_fn: measures the model after a round, on data that is the server's.

        Returns: the final model, and what `evaluate_fn` has measured.
        """
        if len(flatten(initial_arrays)) != self.task.model_dim:
            raise ValueError(
                f"the task is for a model of {self.task.model_dim} numbers, and this one has "
                f"{len(flatten(initial_arrays))}"
            )
        result = Result()
        status = self._source.status()
        while True:
            done = status.round if status.over else status.round - 1
            result.arrays = unflatten(self._source.model(done, dim=self.task.model_dim), initial_arrays)
            metrics = evaluate_fn(done, result.arrays) if evaluate_fn is not None else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[done] = metrics
            _LOG.info("after round %d of %d: %s", done, self.task.rounds, dict(metrics or {}))
            if status.over:
                return result
            self._run_round(grid, status, result.arrays, train_config or ConfigRecord())
            status = self._wait_for_end_of(status.round)

    def _run_round(self, grid: Grid, status: RoundStatus, arrays: ArrayRecord, config: ConfigRecord) -> None:
        deadline = time.monotonic() + self.task.round_seconds
        nodes = self._gather(grid, status.round, time.monotonic() + _GATHERING * self.task.round_seconds)
        seconds = deadline - time.monotonic()
        self._delivery.begin(status, seconds)
        call = RoundCall(signed=self._signed, status=status, notices=tuple(self._delivery.notices()))
        content = instruction(arrays, config, call)
        group = str(status.round)
        messages = [Message(content, node, MessageType.TRAIN, ttl=seconds, group_id=group) for node in nodes]
        count = self._pass_on(grid.send_and_receive(messages, timeout=seconds), status.round)
        _LOG.info("round %d: %d of %d nodes reported", status.round, count, len(nodes))
        self._delivery.finish(status.round)

    def _gather(self, grid: Grid, round: int, until: float) -> list[int]:
        """The nodes of a round: all that are there, or as many as the task lets in."""
        while len(nodes := list(grid.get_node_ids())) < self.task.min_clients:
            if time.monotonic() >= until:
                raise ValueError(
                    f"round {round} needs at least {self.task.min_clients} nodes, and only {len(nodes)} are connected: "
                    "start more, or make a task with a lower minimum"
                )
            time.sleep(_POLL)
        return _SYSTEM.sample(nodes, min(len(nodes), self.task.max_clients))

    def _pass_on(self, replies: Iterable[Message], round: int) -> int:
        """Hand every envelope on, and count those that were taken."""
        taken: set[int] = set()
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                _LOG.warning("a node did not report: %s", reply.error.reason)
                continue
            try:
                envelope = envelope_of(reply)
                if (envelope.task_id, envelope.round) != (self.task.task_id, round):
                    raise ValueError(f"the envelope is of round {envelope.round}, or of another task")
                self._delivery.take(node, envelope)
                taken.add(node)
            except (ValueError, Unreachable) as reason:
                _LOG.warning("a reply was not taken: %s", reason)
        return len(taken)

    def _wait_for_end_of(self, round: int) -> RoundStatus:
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
                raise TimeoutError(f"the analyzer has not ended round {round} in time: see its log")
            time.sleep(_POLL)


class Delivery(Interface):
    """Where a server app takes the envelopes that nodes reply with."""

    @property
    def source(self) -> AnalyzerClient | IntermediaryClient:
        """Where task, round and model come from: the analyzer, or a service that passes on what the analyzer says."""
        ...

    def check(self, task: TrainingTask) -> None:
        """Refuse a task whose envelopes could not be delivered, before a node spends anything on it."""
        ...

    def notices(self) -> list[SignedNotice]:
        """What the task's signer has announced, for the nodes, which verify it."""
        ...

    def begin(self, status: RoundStatus, seconds: float) -> None:
        """Begin to take envelopes of a round, for so many seconds."""
        ...

    def take(self, node: int, envelope: Envelope) -> None:
        """Take the envelope of a node, once; a ValueError says why not."""
        ...

    def finish(self, round: int) -> None:
        """Say that no more envelopes come for a round."""
        ...


class LocalShuffler:
    """The one shuffler of a task, in the server app.

    Arguments:
        folder: where its store is.
        analyzer: where it sends the shuffled messages.
        signer: id of the key that signs tasks.
        keys: the shuffler's key pairs.

    Guarantees:
        A node has one upload in a round, by its id in the fleet.
        A server app that was ended goes on with the files in its folder.
    """

    def __init__(self, folder: Path, *, analyzer: AnalyzerClient, signer: bytes, keys: ServicePairs) -> None:
        self.source = analyzer
        self._shuffler = Shuffler(folder, signed=analyzer.task(), signer=signer, index=0, keys=keys)
        if not self._shuffler.is_alone:
            count = len(self._shuffler.task.shufflers)
            raise ValueError(
                f"the task has {count} shufflers, and a server app can be one alone: set dovetail-services"
            )
        open_round = analyzer.status().round
        for round, _, _ in self._shuffler.store.pending_rounds():
            if round != open_round:
                self.finish(round)

    def check(self, task: TrainingTask) -> None:
        """The shuffler has checked it already."""

    def notices(self) -> list[SignedNotice]:
        """The notices that the analyzer hands out."""
        return self.source.notices()

    def begin(self, status: RoundStatus, seconds: float) -> None:
        """Open the round in the store; what it took before stays."""
        self._shuffler.store.open_round(status.round, head=status.head, closes=time.time() + seconds)

    def take(self, node: int, envelope: Envelope) -> None:
        """Put the node's upload into the store."""
        if len(envelope.uploads) != 1:
            raise ValueError(f"expected an envelope with one upload, for one shuffler, got {len(envelope.uploads)}")
        (upload,) = envelope.uploads
        self._shuffler.accept(envelope.round, client=_client_id(node), upload=upload, sender=envelope.sender)

    def finish(self, round: int) -> None:
        """Shuffle and forward, or forget what is below the minimum."""
        self._shuffler.close(round)
        _retry(functools.partial(self._shuffler.forward, round, self.source))


class Relay:
    """Passes envelopes on to aggregators or shufflers, which have the nodes' keys enrolled.

    Arguments:
        urls: addresses of the services, in the order of the task.
        ca: certificate of the authority to trust; None: the usual ones.

    Guarantees:
        It hands on what nodes have sealed and signed, and has no key of its own: it can neither read nor change it, nor
        report in a node's name, nor give one service what is for another.
        No node is asked for a round before every service takes uploads for it.
    """

    def __init__(self, urls: Sequence[str], *, ca: Path | None) -> None:
        self._services = [IntermediaryClient(url, index=index, ca=ca) for index, url in enumerate(urls)]
        self.source = self._services[0]

    def check(self, task: TrainingTask) -> None:
        """Refuse another number of services than the task's, and services of other tasks."""
        if len(self._services) != len(task.intermediaries):
            raise ValueError(
                f"the task has {len(task.intermediaries)} services, and dovetail-services names {len(self._services)}: "
                "give the address of each, in the task's order"
            )
        for service in self._services:
            if task_id_of(service.task().body) != task.task_id:
                raise ValueError(f"{service.url} is a service of another task than the first one")

    def notices(self) -> list[SignedNotice]:
        """The notices that any of the services hands out."""
        return [notice for service in self._services for notice in service.notices()]

    def begin(self, status: RoundStatus, seconds: float) -> None:
        """Wait until every service takes uploads for the round: they follow the analyzer themselves."""
        for service in self._services:
            _retry(functools.partial(_require_round, service, status.round))

    def take(self, node: int, envelope: Envelope) -> None:
        """Pass every upload on to the service it is for."""
        if len(envelope.uploads) != len(self._services) or len(envelope.signatures) != len(self._services):
            raise ValueError(f"expected {len(self._services)} uploads, one per service, got {len(envelope.uploads)}")
        for index, service in enumerate(self._services):
            _retry(functools.partial(envelope.send_upload, index, service))

    def finish(self, round: int) -> None:
        """Nothing: the services close a round themselves, when it is full or its time is up."""


def _require_round(service: IntermediaryClient, round: int) -> None:
    current = service.status().round
    if current < round:
        raise Unreachable(f"{service.url} is at round {current} and does not take uploads for round {round} yet")


def _retry(call: Callable[[], None]) -> None:
    """Do what may be done twice, a few times until somebody answers."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return call()
        except Unreachable:
            time.sleep(2.0**attempt / 4)
    return call()


def _client_id(node: int) -> bytes:
    return node.to_bytes(8, "big")
