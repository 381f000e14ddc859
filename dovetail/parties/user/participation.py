"""A user's way through a training: fetch the model, train, report, upload to every shuffler or aggregator.

`Participation` does it one step at a time and says when to go on, so that a few threads can run thousands of users:
`take_part` runs one user, `take_part_together` many.

Where the training stands is the analyzer's word, whoever passes it on, and may be an old copy. A user believes nobody
that the round is one before another that it has heard of, and begins nothing in a round whose time is up.
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

_SHORTEST, _LONGEST = 0.05, 10.0  # seconds between questions
_LOOKS = 20  # questions in the time of a round, at least
_SPREAD = 0.25  # share of the time until users come back, over which they spread
_AGAIN = 0.1  # seconds until an upload is tried again
_LOG = logging.getLogger(__name__)
Train = Callable[[np.ndarray], np.ndarray]  # from the model to the update, both flat float32 vectors


class Participation:
    """One user in one training.

    `measure` tells from a model what the task's measures ask for. `patience` is how many seconds in a row nobody may
    answer. A round that this user came too late for is skipped; what it spent on it stays spent.
    """

    def __init__(
        self,
        client: Client,
        links: Sequence[IntermediaryClient],
        train: Train,
        *,
        measure: Callable[[np.ndarray], Mapping[str, Any]] | None = None,
        patience: float = 60.0,
    ) -> None:
        self._client, self._links, self._train, self._measure = client, links, train, measure
        self._patience, self._heard, self._pause = patience, time.monotonic(), _SHORTEST
        self._longest = _LONGEST
        self._last = 0  # the last round that this user is done with
        self._known: tuple[SignedTask, TrainingTask] | None = None  # the task, as its signer signed it
        self._seen: RoundStatus | None = None  # the latest of what the analyzer said
        self._closed = 0  # the last round that was found to be closed
        self._envelope: Envelope | None = None  # what is on its way
        self._given = 0  # how many have it
        self.reported = 0  # rounds

    @property
    def withdrawn(self) -> bool:
        """Whether the training ended because its signer has withdrawn the task, or lost the key that signed it."""
        return self._known is not None and self._client.notices.why_ended(self._known[0]) is not None

    def step(self) -> float | None:
        """Do what there is to do; the seconds after which to look again, None when the training is over."""
        try:
            if self._envelope is None and self._ask():
                return None
            if self._envelope is not None:
                self._upload(self._envelope)
        except (Gone, Conflict):
            self._close(self._envelope)  # the round went on meanwhile, or has something else from this user
        except Later:
            pass  # perhaps the round is still open then
        except Unreachable:
            if time.monotonic() - self._heard > self._patience:
                raise
            if self._envelope is not None:
                return _AGAIN
        return self._later()

    def _later(self) -> float:
        """Seconds until there may be something to do: as was told, else longer and longer; not all users at once.

        Whoever passes answers on cannot keep a user away for longer than the analyzer's round takes.
        """
        told = getattr(self._links[0], "retry_after", None)
        if told is not None and self._envelope is None:
            if self._seen is not None and self._seen.closes:
                told = min(told, max(self._longest, self._seen.closes - time.time()))
            return told + random.random() * max(_SHORTEST, _SPREAD * told)
        pause, self._pause = self._pause, min(self._longest, 1.2 * self._pause)
        return pause * (0.5 + random.random())

    def _ask(self) -> bool:
        """Where the training stands; a new round is reported to. Whether it is over."""
        status = self._links[0].status()
        self._check_newest(status)
        self._heard = time.monotonic()
        if not status.over and status.round > self._last and self._open(status):
            try:
                self._report(status.round)
            except BudgetSpent:
                self._last = status.round  # it was here before, and was interrupted
        if status.over:
            self._listen()
        return status.over

    def _check_newest(self, status: RoundStatus) -> None:
        """Refuse what is said of another task than the signer's, and what is older than what was said before."""
        signed = self._links[0].task()
        if self._known is None or self._known[0] is not signed:
            self._listen()
            self._known = signed, self._client.verify_signer(signed)
        if status.task_id != self._known[1].task_id:
            raise Rejected("expected the status of the signer's task, got that of another task")
        seen = self._seen
        if seen is not None and not status.over:  # what is over stays so
            if status.round < seen.round:
                raise Unreachable(
                    f"expected round {seen.round} or a later one, got round {status.round}: an old copy of the status"
                )
            if status.round == seen.round and status.head != seen.head:
                raise Rejected(
                    f"expected round {seen.round} as it was opened, got another one: the analyzer was set back"
                )
        self._seen = status

    def _listen(self) -> None:
        """What the signer announced; who withholds it does not speak for the others."""
        for link in self._links:
            self._client.receive_notices(link.notices())

    def _open(self, status: RoundStatus) -> bool:
        """Whether a round still takes in reports; says so once if not."""
        late = status.seconds_late
        if late > CLOCK_SKEW and self._closed != status.round:
            self._closed = status.round
            _LOG.warning(
                "expected a round that is open, got round %d, which closed %.0f seconds ago by this machine's clock: "
                "an old copy of the status, a clock that is wrong, or a round that waits for its services",
                status.round,
                late,
            )
        return late <= CLOCK_SKEW

    def _report(self, round: int) -> None:
        signed = self._links[0].task()
        self._listen()
        task = self._client.admit(signed)
        if len(self._links) != len(task.intermediaries):
            kind, count = "aggregators" if task.aggregators else "shufflers", len(task.intermediaries)
            raise Refused(f"expected the task's {count} {kind}, got {len(self._links)}")
        if not 1 <= round <= task.rounds:
            raise Refused(f"expected one of the task's {task.rounds} rounds to be open, got round {round}")
        self._longest = min(_LONGEST, task.round_seconds / _LOOKS)
        self._client.refuse_early(task, round)
        model = self._links[0].model(round - 1, dim=task.model_dim)
        facts = self._measure(model) if self._measure is not None and task.measures else {}
        self._envelope, self._given = self._client.report(signed, round, self._train(model), facts), 0
        self._heard = time.monotonic()  # training may take longer than patience lasts

    def _upload(self, envelope: Envelope) -> None:
        """To each that does not have it yet; nothing leaves once the user has left, or the signer ended the task."""
        while self._given < len(self._links):
            try:
                self._client.refuse_ended(self._links[0].task())
            except Refused:
                self._close(envelope)
                raise
            envelope.give(self._given, self._links[self._given])
            self._heard = time.monotonic()
            self._given += 1
        self.reported += 1
        self._close(envelope)

    def _close(self, envelope: Envelope | None) -> None:
        if envelope is not None:
            self._client.sent(envelope)
            self._last, self._pause, self._envelope = envelope.round, _SHORTEST, None


def take_part(client: Client, links: Sequence[IntermediaryClient], train: Train, **options: Any) -> int:
    """Take part in a training until it is over, with a `Participation`'s options; the rounds that were reported to."""
    participation = Participation(client, links, train, **options)
    while (pause := participation.step()) is not None:
        time.sleep(pause)
    return participation.reported


def take_part_together(
    participations: Iterable[Participation],
    *,
    threads: int = 4,
    failed: Callable[[Participation, Exception], None] = lambda one, error: None,
) -> None:
    """Take part with many users at once: so many threads do whatever is due first.

    A user that fails does not stop the others: `failed` hears of it at once, and the first failure is raised when all
    have ended.
    """
    now = time.monotonic()
    due = [(now, number, participation) for number, participation in enumerate(participations)]
    left, failures, changed = len(due), [], threading.Condition()

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
