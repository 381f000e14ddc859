"""A user's loop through a training: fetch the model, train, report, upload to every shuffler or aggregator.

`Participation` does it one step at a time and says when to go on, so that a few threads can run thousands of users:
`take_part` runs one user, `take_part_together` many.

The analyzer signs where the training stands; whoever passes that on may pass on an old copy. A user accepts no round
before the latest one that it has seen, and begins nothing in a round whose time is up.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.parties.common.http_clients import Conflict, Gone, IntermediaryClient, Rejected, Unreachable
from dovetail.parties.common.task import SignedTask, TrainingTask
from dovetail.parties.common.wire import CLOCK_SKEW, RoundStatus
from dovetail.parties.user.client import Client, Envelope
from dovetail.parties.user.policy import Refused
from dovetail.parties.user.spending import BudgetSpent, Later

__all__ = ["Participation", "Train", "take_part", "take_part_together"]

_SHORTEST, _LONGEST = 0.05, 10.0  # seconds between two polls
_POLLS = 20  # in the time of a round, at least
_SPREAD = 0.25  # part of the time until users come back, over which they spread
_RETRY = 0.1  # seconds until an upload is tried again
_LOG = logging.getLogger(__name__)
Train = Callable[[np.ndarray], np.ndarray]  # from the model to the update, both flat float32 vectors


class Participation:
    """One user in one training. A round that it comes too late for is skipped; what it spent on it stays spent.

    Arguments:
        client: the user.
        services: the shufflers or aggregators of the task, in its order.
        train: makes an update from a model.
        measure: what the task's measures ask for, by name, from a model.
        patience: seconds in a row in which nobody may answer, before `step` raises `Unreachable`.
    """

    def __init__(
        self,
        client: Client,
        services: Sequence[IntermediaryClient],
        train: Train,
        *,
        measure: Callable[[np.ndarray], Mapping[str, Any]] | None = None,
        patience: float = 60.0,
    ) -> None:
        self._client = client
        self._services = services
        self._train = train
        self._measure = measure
        self._patience = patience
        self._answered = time.monotonic()  # when a service last answered
        self._pause = _SHORTEST
        self._longest = _LONGEST
        self._last = 0  # the last round that this user is done with
        self._verified: tuple[SignedTask, TrainingTask] | None = None  # the task, as its signer signed it
        self._latest: RoundStatus | None = None  # the latest status that the analyzer signed
        self._closed = 0  # the last round that was logged as closed
        self._envelope: Envelope | None = None  # what is on its way
        self._delivered = 0  # how many services have it
        self.reported = 0  # rounds

    @property
    def is_withdrawn(self) -> bool:
        """Whether the training ended because its signer has withdrawn the task, or lost the key that signed it."""
        return self._verified is not None and self._client.notices.why_ended(self._verified[0]) is not None

    def step(self) -> float | None:
        """Do what there is to do.

        Returns: seconds after which to call it again; None when the training is over.
        """
        try:
            if self._envelope is None and self._poll():
                return None
            if self._envelope is not None:
                self._upload_envelope(self._envelope)
        except (Gone, Conflict):
            self._forget_envelope(self._envelope)  # the round went on meanwhile, or has something else from this user
        except Later:
            pass  # perhaps the round is still open then
        except Unreachable:
            if time.monotonic() - self._answered > self._patience:
                raise
            if self._envelope is not None:
                return _RETRY
        return self._backoff()

    def _backoff(self) -> float:
        """Seconds until there may be something to do: as the service says, else longer and longer; randomly spread.

        Whoever passes answers on cannot keep a user away for longer than the analyzer's round takes.
        """
        wait = getattr(self._services[0], "retry_after", None)
        if wait is not None and self._envelope is None:
            if self._latest is not None and self._latest.closes:
                wait = min(wait, max(self._longest, self._latest.closes - time.time()))
            return wait + random.random() * max(_SHORTEST, _SPREAD * wait)
        pause, self._pause = self._pause, min(self._longest, 1.2 * self._pause)
        return pause * (0.5 + random.random())

    def _poll(self) -> bool:
        """Ask where the training stands, and report to a new round.

        Returns: whether the training is over.
        """
        status = self._services[0].status()
        self._check_newest(status)
        self._answered = time.monotonic()
        if not status.over and status.round > self._last and self._is_open(status):
            try:
                self._report_to_round(status.round)
            except BudgetSpent:
                self._last = status.round  # it was here before, and was interrupted
        if status.over:
            self._receive_notices()
        return status.over

    def _check_newest(self, status: RoundStatus) -> None:
        """Refuse the status of another task than the signer's, and one that is older than the latest."""
        signed = self._services[0].task()
        if self._verified is None or self._verified[0] is not signed:
            self._receive_notices()
            self._verified = signed, self._client.verify_signer(signed)
        if status.task_id != self._verified[1].task_id:
            raise Rejected(f"this status belongs to another task than the signer's, {self._verified[1].task_id.hex()}")
        latest = self._latest
        if latest is not None and not status.over:  # what is over stays so
            if status.round < latest.round:
                raise Unreachable(
                    f"the status says round {status.round} after round {latest.round}: it is an old copy, of a cache "
                    "or a replica that lags"
                )
            if status.round == latest.round and status.head != latest.head:
                raise Rejected(
                    f"the analyzer has opened round {latest.round} twice on other ledgers: its ledger was set back"
                )
        self._latest = status

    def _receive_notices(self) -> None:
        """Receive the notices of every service: one that withholds them does not speak for the others."""
        for service in self._services:
            self._client.receive_notices(service.notices())

    def _is_open(self, status: RoundStatus) -> bool:
        """Whether a round still takes in reports; logs once if not."""
        late = status.seconds_late
        if late > CLOCK_SKEW and self._closed != status.round:
            self._closed = status.round
            _LOG.warning(
                "round %d closed %.0f seconds ago by this machine's clock, and is not reported to: the status is an "
                "old copy, a clock is wrong, or the round waits for its services",
                status.round,
                late,
            )
        return late <= CLOCK_SKEW

    def _report_to_round(self, round: int) -> None:
        """Check task and round, train, and spend the round; what is left to do is to upload the envelope."""
        signed = self._services[0].task()
        self._receive_notices()
        task = self._client.admit(signed)
        if len(self._services) != len(task.intermediaries):
            kind = "aggregators" if task.aggregators else "shufflers"
            raise Refused(
                f"the task has {len(task.intermediaries)} {kind}, and {len(self._services)} addresses were given: give "
                "one for each (--service), in the task's order"
            )
        if not 1 <= round <= task.rounds:
            raise Refused(f"the analyzer has opened round {round}, and the task has rounds 1 to {task.rounds}")
        self._longest = min(_LONGEST, task.round_seconds / _POLLS)
        self._client.refuse_early(task, round)
        model = self._services[0].model(round - 1, dim=task.model_dim)
        facts = self._measure(model) if self._measure is not None and task.measures else {}
        self._envelope = self._client.report(signed, round, self._train(model), facts)
        self._delivered = 0
        self._answered = time.monotonic()  # training may take longer than patience lasts

    def _upload_envelope(self, envelope: Envelope) -> None:
        """Send to each service that lacks it; nothing leaves once the user or the signer has ended the task."""
        while self._delivered < len(self._services):
            try:
                self._client.refuse_ended(self._services[0].task())
            except Refused:
                self._forget_envelope(envelope)
                raise
            envelope.send_upload(self._delivered, self._services[self._delivered])
            self._answered = time.monotonic()
            self._delivered += 1
        self.reported += 1
        self._forget_envelope(envelope)

    def _forget_envelope(self, envelope: Envelope | None) -> None:
        if envelope is not None:
            self._client.forget_envelope(envelope)
            self._last = envelope.round
            self._pause = _SHORTEST
            self._envelope = None


def take_part(client: Client, services: Sequence[IntermediaryClient], train: Train, **options: Any) -> int:
    """Take part in a training until it is over.

    Arguments:
        client: the user.
        services: the shufflers or aggregators of the task, in its order.
        train: makes an update from a model.
        options: others of a `Participation`.

    Returns: the number of rounds that were reported to.
    """
    participation = Participation(client, services, train, **options)
    while (pause := participation.step()) is not None:
        time.sleep(pause)
    return participation.reported


def take_part_together(
    participations: Iterable[Participation],
    *,
    threads: int = 4,
    failed: Callable[[Participation, Exception], None] = lambda participation, error: None,
) -> None:
    """Take part with many users at once. One that fails does not stop the others.

    Arguments:
        participations: the users.
        threads: how many threads do whatever is due first.
        failed: called at once with a user that failed and why; the first failure is raised when all have ended.
    """
    now = time.monotonic()
    due = [(now, number, participation) for number, participation in enumerate(participations)]
    left = len(due)
    failures = []
    changed = threading.Condition()

    def work() -> None:
        nonlocal left
        while True:
            with changed:
                while left and (not due or due[0][0] > time.monotonic()):
                    changed.wait(due[0][0] - time.monotonic() if due else None)
                if not left:
                    return
                _, number, participation = heapq.heappop(due)
            try:
                pause = participation.step()
            except Exception as error:  # a thread would swallow it
                failures.append(error)
                failed(participation, error)
                pause = None
            with changed:
                if pause is None:
                    left -= 1
                else:
                    heapq.heappush(due, (time.monotonic() + pause, number, participation))
                changed.notify_all()

    workers = [threading.Thread(target=work) for _ in range(min(threads, left))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
