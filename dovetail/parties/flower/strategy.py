"""The server app's side of a training: it passes the analyzer's model to the nodes, and their envelopes to services.

The analyzer decides which round is open, what it costs and what the model is; this strategy follows it. In every round
it waits for as many nodes as the task's privacy was accounted with, and refuses the round if they do not come; it sends
them the model, with a time to live that ends with the round, and passes on what they reply. It stops as soon as a round
has no report at all, and says why: such a round costs nothing.

How good a model is, is measured where the model is, on data that is the server's (`evaluate_fn`), or on the nodes' if
the task measures it: they evaluate, and what they find is added to their reports and leaves in the noisy sum alone.
Their code's own replies never reach this side.

Envelopes go to a `Relay`, which hands every upload to the aggregator or shuffler it is for, as the node has sealed and
signed it: it has no key, and what it carries is sealed to the services' own keys, so it learns nothing, also together
with the analyzer. Or they go to a `LocalShuffler`, a task's one shuffler with its keys and its store in a folder.
Either way the server app sees which node sent which envelope, and when.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from typing import Protocol as Interface

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from dovetail.numbers import at_most
from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient, Rejected, Unreachable
from dovetail.parties.common.keys import ServicePairs
from dovetail.parties.common.notices import SignedNotice
from dovetail.parties.common.task import TrainingTask, task_id_of, verify
from dovetail.parties.common.wire import RoundStatus
from dovetail.parties.flower.messages import envelope_in_reply, flatten, make_instruction, unflatten
from dovetail.parties.shuffler import Shuffler
from dovetail.parties.user.client import Envelope, RoundCall
from dovetail.statements import Statement

__all__ = ["DovetailStrategy", "LocalShuffler", "Relay"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]

_GATHERING = 0.5  # of a round's time, to wait for nodes
_EVALUATING = 0.4  # of what is left of it, to let them evaluate
_POLL = 0.5  # seconds
_LONGEST_END = 300.0  # seconds from the end of a round to the next model
_ATTEMPTS = 6  # to reach a service, over some 8 seconds
_SYSTEM = random.SystemRandom()
_Answer = TypeVar("_Answer")
_LOG = logging.getLogger("flwr")  # the one that Flower shows


class DovetailStrategy:
    """Runs a task of Dovetail's over a Flower grid, in the place of another strategy of a server app.

    Arguments:
        delivery: where envelopes go: a `Relay` or a `LocalShuffler`.
        signer: id of the key that signs tasks.

    Guarantees:
        No message is sent to fewer nodes than the task was accounted with.
        A reply is passed on whole or not at all, once a node, and only if it is an envelope of this task and round.
        After a round without any report no other one is begun.
    """

    def __init__(self, delivery: Delivery, *, signer: bytes) -> None:
        self._delivery = delivery
        self._source = delivery.source
        self._signed = _retry(self._source.task)  # services may just be starting
        self.task = verify(self._signed, signer=signer)
        if self.task.analyzer_sign is None:
            raise ValueError(
                "the task names no key that its analyzer signs with, and nodes report to signed rounds alone"
            )
        _retry(functools.partial(delivery.check, self.task))
        self._asks_to_evaluate = any(measure.kind != "within_clip" for measure in self.task.measures)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> DovetailStrategy:
        """The strategy that a run's configuration describes.

        Arguments:
            config: `dovetail-signer` is the id of the key that signs tasks, `dovetail-ca` the certificate of the
                authority to trust. To relay: `dovetail-services`, the addresses of the aggregators or shufflers with
                spaces between, in the order of the task, and `dovetail-analyzer`, the analyzer's, for the statement and
                the measures at the end, if it can be reached from here. To be a task's one shuffler:
                `dovetail-analyzer`, and `dovetail-shuffler`, a folder with the shuffler's store, and its keys under
                `keys`.
        """

        def setting(name: str) -> str:
            return str(config.get(name) or "")

        if not setting("dovetail-signer"):
            raise ValueError(
                "the run's configuration lacks dovetail-signer, the id of the key that signs tasks (dovetail keys "
                "prints it): give it, and where the services are, with flwr run --run-config"
            )
        signer = bytes.fromhex(setting("dovetail-signer"))
        ca = Path(setting("dovetail-ca")) if setting("dovetail-ca") else None
        if urls := setting("dovetail-services").split():
            return cls(Relay(urls, ca=ca, analyzer=setting("dovetail-analyzer") or None), signer=signer)
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

    def initialize_parameters(self, client_manager: object) -> None:
        """Refuse what Flower's older server apps call first: they ask for updates that nobody has randomized."""
        raise ValueError(
            "DovetailStrategy runs in a server app with a main function, not in ServerAppComponents: write @app.main() "
            "and, in it, DovetailStrategy.from_config(context.run_config).start(grid=grid, "
            "initial_arrays=ArrayRecord(arrays)); a client_fn may stay as it is"
        )

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        *,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train until the analyzer says that it is over; rounds and timeouts are the task's.

        Arguments:
            grid: the nodes.
            initial_arrays: names and shapes of the model's arrays; the numbers are the analyzer's.
            train_config: passed on to the nodes' training code.
            evaluate_config: passed on to the nodes' evaluating code, in a task that measures what it finds.
            evaluate_fn: measures the model after a round, on data that is the server's.

        Returns: the final model, what `evaluate_fn` has measured, and what the task measures with the nodes' help, as
            far as the analyzer can be reached.
        """
        if evaluate_config is not None and not self._asks_to_evaluate:
            raise ValueError(
                "evaluate_config is given, and the task has no measure that nodes evaluate for: what they find would "
                "leave without protection. Make a task with it (dovetail task new --measure evaluation --held-out .2), "
                "or evaluate on the server's own data (evaluate_fn)"
            )
        if len(flatten(initial_arrays)) != self.task.model_dim:
            raise ValueError(
                f"the task is for a model of {self.task.model_dim} numbers, and this one has "
                f"{len(flatten(initial_arrays))}"
            )
        if not self._asks_to_evaluate:
            _LOG.info("nodes only train: the task has no measure for which they evaluate (dovetail task new --measure)")
        result = Result()
        status = self._source.status()
        while True:
            done = status.round if status.over else status.round - 1
            result.arrays = unflatten(self._source.model(done, dim=self.task.model_dim), initial_arrays)
            metrics = evaluate_fn(done, result.arrays) if evaluate_fn is not None else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[done] = metrics
            shown = {
                name: round(value, 4) if isinstance(value, float) else value for name, value in (metrics or {}).items()
            }
            _LOG.info("after round %d of %d: %s", done, self.task.rounds, shown)
            if status.over:
                self._report_privacy(done, result)
                return result
            self._run_round(
                grid, status, result.arrays, train_config or ConfigRecord(), evaluate_config or ConfigRecord()
            )
            status = self._wait_for_end_of(status.round)

    def _run_round(
        self,
        grid: Grid,
        status: RoundStatus,
        arrays: ArrayRecord,
        config: ConfigRecord,
        evaluate_config: ConfigRecord | None = None,
    ) -> None:
        """Call the nodes to a round and deliver what they reply; an evaluation that is asked for comes first."""
        deadline = time.monotonic() + self.task.round_seconds
        nodes = self._wait_for_nodes(grid, status.round, time.monotonic() + _GATHERING * self.task.round_seconds)
        self._delivery.begin_round(status, deadline - time.monotonic())
        call = RoundCall(signed=self._signed, status=status, notices=tuple(self._delivery.notices()))
        ask = functools.partial(self._send_and_receive, grid, nodes, status.round)
        reasons: collections.Counter[str] = collections.Counter()
        count = 0
        if self._asks_to_evaluate:
            seconds = _EVALUATING * (deadline - time.monotonic())
            content = make_instruction(arrays, evaluate_config or ConfigRecord(), call)
            count = self._count_evaluated(ask(MessageType.EVALUATE, content, seconds), reasons)
            _LOG.info("round %d: %d of %d nodes evaluated", status.round, count, len(nodes))
        if count or not self._asks_to_evaluate:
            content = make_instruction(arrays, config, call)
            replies = ask(MessageType.TRAIN, content, deadline - time.monotonic())
            count = self._deliver_envelopes(replies, status.round, reasons)
            _LOG.info("round %d: %d of %d nodes reported", status.round, count, len(nodes))
        self._delivery.finish_round(status.round)
        if not count:
            raise ValueError(_reason_for_no_reports(status.round, len(nodes), reasons, seconds=self.task.round_seconds))

    def _send_and_receive(
        self, grid: Grid, nodes: Sequence[int], round: int, kind: str, content: RecordDict, seconds: float
    ) -> Iterable[Message]:
        """The replies of these nodes to a message, as far as they come in time."""
        messages = [Message(content, node, kind, ttl=seconds, group_id=str(round)) for node in nodes]
        return grid.send_and_receive(messages, timeout=seconds)

    def _count_evaluated(self, replies: Iterable[Message], reasons: collections.Counter[str]) -> int:
        """Count the nodes that have evaluated, and the reasons of the others."""
        count = 0
        for reply in replies:
            if reply.has_error():
                reasons[reply.error.reason] += 1
                _LOG.warning("a node did not evaluate: %s", reply.error.reason)
            else:
                count += 1
        return count

    def _wait_for_nodes(self, grid: Grid, round: int, until: float) -> list[int]:
        """The nodes of a round: all that are there, or as many as the task lets in."""
        while len(nodes := list(grid.get_node_ids())) < self.task.min_clients:
            if time.monotonic() >= until:
                raise ValueError(
                    f"round {round} needs at least {self.task.min_clients} nodes, and only {len(nodes)} are connected: "
                    "start more, or make a task with a lower minimum"
                )
            time.sleep(_POLL)
        return _SYSTEM.sample(nodes, min(len(nodes), self.task.max_clients))

    def _deliver_envelopes(self, replies: Iterable[Message], round: int, reasons: collections.Counter[str]) -> int:
        """Hand every envelope on, and count those that were taken, and the reasons why others were not."""
        taken: set[int] = set()
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                reasons[reply.error.reason] += 1
                _LOG.warning("a node did not report: %s", reply.error.reason)
                continue
            try:
                envelope = envelope_in_reply(reply)
                if (envelope.task_id, envelope.round) != (self.task.task_id, round):
                    raise ValueError(f"the envelope is of round {envelope.round}, or of another task")
                self._delivery.deliver(node, envelope)
                taken.add(node)
            except (ValueError, Unreachable) as reason:
                reasons[f"its reply was not taken: {reason}"] += 1
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

    def _report_privacy(self, rounds: int, result: Result) -> None:
        """Log the statement at the end, and add the task's measures to the result.

        The analyzer's own statement is the one that counts, for it knows which rounds cost nothing and how the
        published model is made. Who cannot reach it has the task's, for all rounds that were open.
        """
        facts = None
        if self._delivery.analyzer is not None:
            try:
                facts = self._delivery.analyzer.privacy()
            except (Rejected, Unreachable) as reason:
                _LOG.warning("the analyzer does not say what was spent: %s", reason)
        if facts is None:
            if not rounds:
                return
            _LOG.info("what the signed task guarantees for its %d rounds:", rounds)
            statement, _ = certify_task(self.task, rounds)
        else:
            for row in facts["history"]:
                _add_measures(row, result)
            spent = facts["spent"]["eps"]
            said = "without a bound" if spent is None else f"eps {at_most(spent)}"
            _LOG.info("what the training guarantees, as the analyzer says (it spent %s):", said)
            statement = Statement.from_json(facts["statement"])
        for line in str(statement).splitlines():
            _LOG.info("%s", line)


def _reason_for_no_reports(round: int, nodes: int, reasons: collections.Counter[str], *, seconds: float) -> str:
    """Why the run stops after a round without any report."""
    if reasons:
        reason, count = reasons.most_common(1)[0]
        why = f"{count} of them say: {reason}"
    else:
        why = f"none of them replied in time (a round of this task has {seconds:g} seconds)"
    return (
        f"no report came in round {round}, and the run stops: {nodes} nodes were asked, and {why}. The round costs the "
        "analyzer's budget nothing, and a node only what its own ledger says (dovetail client spent). Mend it, and "
        "start the run again: it goes on with the round that is open then"
    )


def _add_measures(row: Mapping[str, Any], result: Result) -> None:
    """Add what the task has measured in a round, by the analyzer's history, to Flower's result."""
    values: dict[str, float] = {}
    for name, measured in (row.get("measured") or {}).items():
        for key, value in measured.items():
            if isinstance(value, int | float):
                values[key if name == "evaluation" else f"{name}-{key}"] = float(value)
    if values:
        shown = {name: round(value, 3) for name, value in values.items()}
        _LOG.info("round %d: nodes' evaluation, from the noisy sum: %s", row["round"], shown)
        result.evaluate_metrics_clientapp[row["round"]] = MetricRecord(dict(values))


class Delivery(Interface):
    """Where a server app takes the envelopes that nodes reply with."""

    @property
    def source(self) -> AnalyzerClient | IntermediaryClient:
        """Where task, round and model come from: the analyzer, or a service that passes on what the analyzer says."""
        ...

    @property
    def analyzer(self) -> AnalyzerClient | None:
        """The analyzer, if it can be asked for its statement."""
        ...

    def check(self, task: TrainingTask) -> None:
        """Refuse a task whose envelopes could not be delivered, before a node spends anything on it."""
        ...

    def notices(self) -> list[SignedNotice]:
        """What the task's signer has announced, for the nodes, which verify it."""
        ...

    def begin_round(self, status: RoundStatus, seconds: float) -> None:
        """Begin to take envelopes of a round, for so many seconds."""
        ...

    def deliver(self, node: int, envelope: Envelope) -> None:
        """Take the envelope of a node, once; a ValueError says why not."""
        ...

    def finish_round(self, round: int) -> None:
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
        self.source = self.analyzer = analyzer
        self._shuffler = Shuffler(folder, signed=analyzer.task(), signer=signer, index=0, keys=keys)
        if not self._shuffler.is_alone:
            count = len(self._shuffler.task.shufflers)
            raise ValueError(
                f"the task has {count} shufflers, and a server app can be one alone: set dovetail-services"
            )
        open_round = analyzer.status().round
        for round, _, _ in self._shuffler.store.pending_rounds():
            if round != open_round:
                self.finish_round(round)

    def check(self, task: TrainingTask) -> None:
        """The shuffler has checked it already."""

    def notices(self) -> list[SignedNotice]:
        """The notices that the analyzer hands out."""
        return self.source.notices()

    def begin_round(self, status: RoundStatus, seconds: float) -> None:
        """Open the round in the store; what it took before stays."""
        self._shuffler.store.open_round(status.round, head=status.head, closes=time.time() + seconds)

    def deliver(self, node: int, envelope: Envelope) -> None:
        """Put the node's upload into the store."""
        if len(envelope.uploads) != 1:
            raise ValueError(f"expected an envelope with one upload, for one shuffler, got {len(envelope.uploads)}")
        (upload,) = envelope.uploads
        self._shuffler.accept(envelope.round, client=_client_id(node), upload=upload, sender=envelope.sender)

    def finish_round(self, round: int) -> None:
        """Shuffle and forward, or forget what is below the minimum."""
        self._shuffler.close_round(round)
        _retry(functools.partial(self._shuffler.forward, round, self.source))


class Relay:
    """Passes envelopes on to aggregators or shufflers, which have the nodes' keys enrolled.

    Arguments:
        urls: addresses of the services, in the order of the task.
        ca: certificate of the authority to trust; None: the usual ones.
        analyzer: address of the analyzer, for its statement; None: it cannot be reached from here.

    Guarantees:
        It hands on what nodes have sealed and signed, and has no key of its own: it can neither read nor change it, nor
        report in a node's name, nor give one service what is for another.
        No node is asked for a round before every service takes uploads for it.
    """

    def __init__(self, urls: Sequence[str], *, ca: Path | None, analyzer: str | None = None) -> None:
        self._services = [IntermediaryClient(url, index=index, ca=ca) for index, url in enumerate(urls)]
        self.source = self._services[0]
        self.analyzer = None if analyzer is None else AnalyzerClient(analyzer, ca=ca)

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

    def begin_round(self, status: RoundStatus, seconds: float) -> None:
        """Wait until every service takes uploads for the round: they follow the analyzer themselves."""
        for service in self._services:
            _retry(functools.partial(_require_round, service, status.round))

    def deliver(self, node: int, envelope: Envelope) -> None:
        """Pass every upload on to the service it is for."""
        if len(envelope.uploads) != len(self._services) or len(envelope.signatures) != len(self._services):
            raise ValueError(f"expected {len(self._services)} uploads, one per service, got {len(envelope.uploads)}")
        for index, service in enumerate(self._services):
            _retry(functools.partial(envelope.send_upload, index, service))

    def finish_round(self, round: int) -> None:
        """Nothing: the services close a round themselves, when it is full or its time is up."""


def _require_round(service: IntermediaryClient, round: int) -> None:
    current = service.status().round
    if current < round:
        raise Unreachable(f"{service.url} is at round {current} and does not take uploads for round {round} yet")


def _retry(call: Callable[[], _Answer]) -> _Answer:
    """Do what may be done twice, a few times until somebody answers."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return call()
        except Unreachable:
            time.sleep(2.0**attempt / 4)
    return call()


def _client_id(node: int) -> bytes:
    return node.to_bytes(8, "big")
