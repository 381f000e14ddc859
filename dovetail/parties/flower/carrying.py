"""Where the envelopes go that Flower brings: on to services, or to a shuffler that the server app plays.

`Relay` hands every upload to the aggregator or shuffler it is for, as the node has sealed and signed it. It has no key,
and what it carries is sealed to the services' own keys: it learns nothing, also together with the analyzer. `Play` is a
task's one shuffler, with its keys and its store in a folder. Either way the server app sees which node sent which
envelope, and when.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol as Interface

from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient, Unreachable
from dovetail.parties.common.keys import ServicePairs
from dovetail.parties.common.notices import SignedNotice
from dovetail.parties.common.task import TrainingTask, task_id_of
from dovetail.parties.common.wire import RoundStatus
from dovetail.parties.shuffler import Shuffler
from dovetail.parties.user.client import Envelope

__all__ = ["Carrying", "Play", "Relay"]

_TRIES = 6  # over some 8 seconds


class Carrying(Interface):
    """What a server app does with envelopes; `source` tells it the task, the round and the model."""

    @property
    def source(self) -> AnalyzerClient | IntermediaryClient:
        """The analyzer, or a service that tells what the analyzer says."""
        ...

    def check(self, task: TrainingTask) -> None:
        """Refuse a task whose envelopes would not find their way, before a node spends anything on it."""
        ...

    def notices(self) -> list[SignedNotice]:
        """What the task's signer has announced, for the nodes, which verify it."""
        ...

    def begin(self, status: RoundStatus, seconds: float) -> None:
        """Take envelopes of a round, for so many seconds."""
        ...

    def take(self, node: int, envelope: Envelope) -> None:
        """Take the envelope of a node, once; raises a ValueError that says why not."""
        ...

    def finish(self, round: int) -> None:
        """No more envelopes come for a round."""
        ...


class Play:
    """The one shuffler of a task, in the server app.

    Guarantees:
        A node has one upload in a round, by its id in the fleet.
        A server app that was ended goes on with the files in its folder.
    """

    def __init__(self, folder: Path, *, analyzer: AnalyzerClient, signer: bytes, keys: ServicePairs) -> None:
        self.source = analyzer
        self._shuffler = Shuffler(folder, signed=analyzer.task(), signer=signer, index=0, keys=keys)
        if not self._shuffler.is_alone:
            count = len(self._shuffler.task.shufflers)
            raise ValueError(f"expected a task with one shuffler, which a server app can play, got {count}")
        open_round = analyzer.status().round
        for round, _, _ in self._shuffler.store.pending_rounds():
            if round != open_round:
                self.finish(round)

    def check(self, task: TrainingTask) -> None:
        """The shuffler has looked at it already."""

    def notices(self) -> list[SignedNotice]:
        """As the analyzer hands them out."""
        return self.source.notices()

    def begin(self, status: RoundStatus, seconds: float) -> None:
        """Open the round in the store; what it took before stays."""
        self._shuffler.store.open_round(status.round, head=status.head, closes=time.time() + seconds)

    def take(self, node: int, envelope: Envelope) -> None:
        """Into the store."""
        if len(envelope.uploads) != 1:
            raise ValueError(f"expected an envelope for one shuffler, got one for {len(envelope.uploads)}")
        upload, sender = envelope.uploads[0], envelope.sender
        self._shuffler.accept(envelope.round, client=_client(node), upload=upload, sender=sender)

    def finish(self, round: int) -> None:
        """Shuffle and forward, or forget what is below the minimum."""
        self._shuffler.close(round)
        _again(functools.partial(self._shuffler.forward, round, self.source))


class Relay:
    """A messenger between nodes and the services of aggregators or shufflers, which have the nodes' keys enrolled.

    Guarantees:
        It hands on what nodes have sealed and signed, and has no key of its own: it can neither read nor change it, nor
        report in a node's name, nor give one service what is for another.
        No node is asked for a round before every service takes uploads for it.
    """

    def __init__(self, urls: Sequence[str], *, ca: Path | None) -> None:
        self._links = [IntermediaryClient(url, index=index, ca=ca) for index, url in enumerate(urls)]
        self.source = self._links[0]

    def check(self, task: TrainingTask) -> None:
        """Refuse other services than the task's, as many and with this task."""
        if len(self._links) != len(task.intermediaries):
            raise ValueError(f"expected the task's {len(task.intermediaries)} services, got {len(self._links)}")
        for link in self._links:
            if task_id_of(link.task().body) != task.task_id:
                raise ValueError(f"expected services of one task, got another task's at {link.url}")

    def notices(self) -> list[SignedNotice]:
        """As any of the services hands them out."""
        return [notice for link in self._links for notice in link.notices()]

    def begin(self, status: RoundStatus, seconds: float) -> None:
        """Wait for services that have not heard of the round yet: they follow the analyzer themselves."""
        for link in self._links:
            _again(functools.partial(_follows, link, status.round))

    def take(self, node: int, envelope: Envelope) -> None:
        """To everybody what is for it."""
        if len(envelope.uploads) != len(self._links) or len(envelope.signatures) != len(self._links):
            raise ValueError(f"expected {len(self._links)} uploads, one per service, got {len(envelope.uploads)}")
        for index, link in enumerate(self._links):
            _again(functools.partial(envelope.give, index, link))

    def finish(self, round: int) -> None:
        """The services close a round when it is full or its time is up."""


def _follows(link: IntermediaryClient, round: int) -> None:
    if link.status().round < round:
        raise Unreachable(f"expected {link.url} to take uploads for round {round}, got an earlier round")


def _again(call: Callable[[], None]) -> None:
    """Until somebody answers, a few times; whatever is said here may be said twice."""
    for attempt in range(_TRIES - 1):
        try:
            return call()
        except Unreachable:
            time.sleep(2.0**attempt / 4)
    return call()


def _client(node: int) -> bytes:
    return node.to_bytes(8, "big")
