"""Where the envelopes go that Flower brings: to a shuffler that the server app plays, or on to shuffler services.

`Play` is a task's one shuffler, with its store in a folder. `Relay` hands every upload to the shuffler it is for,
signed with a key that it keeps for the node: the shufflers have those keys enrolled as their clients'. Either way the
server app sees which node sent which envelope and nothing in it. A relay sees all uploads of a node at once, so with
the analyzer at its side it can do what only all shufflers together could: run it with somebody whom you would trust to
be the one shuffler.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol as Interface

import msgspec

from dovetail.files import write_atomically
from dovetail.parties.common.keys import KeyPair, KeyRing
from dovetail.parties.common.links import AnalyzerLink, ShufflerLink, Unreachable
from dovetail.parties.common.wire import RoundStatus
from dovetail.parties.shuffler.rounds import Shuffler
from dovetail.parties.user.client import Envelope

__all__ = ["Play", "Relay", "Shuffling"]

_TRIES = 6  # over some 8 seconds


class Shuffling(Interface):
    """What a server app does with envelopes; `source` tells it the task, the round and the model."""

    @property
    def source(self) -> AnalyzerLink | ShufflerLink:
        """The analyzer, or a shuffler that tells what the analyzer says."""
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

    def __init__(self, folder: Path, *, analyzer: AnalyzerLink, signer: bytes, key: KeyPair) -> None:
        self.source = analyzer
        self._shuffler = Shuffler(folder, signed=analyzer.task(), signer=signer, index=0, key=key)
        if not self._shuffler.alone:
            count = len(self._shuffler.task.shufflers)
            raise ValueError(f"expected a task with one shuffler, which a server app can play, got {count}")
        open_round = analyzer.status().round
        for round, _, _ in self._shuffler.store.unfinished():
            if round != open_round:
                self.finish(round)

    def begin(self, status: RoundStatus, seconds: float) -> None:
        """Open the round in the store; what it took before stays."""
        self._shuffler.store.open_round(status.round, head=status.head, closes=time.time() + seconds)

    def take(self, node: int, envelope: Envelope) -> None:
        """Into the store."""
        if len(envelope.uploads) != 1:
            raise ValueError(f"expected an envelope for one shuffler, got one for {len(envelope.uploads)}")
        self._shuffler.accept(envelope.round, client=_client(node), upload=envelope.uploads[0])

    def finish(self, round: int) -> None:
        """Shuffle and forward, or forget what is below the minimum."""
        self._shuffler.close(round)
        _again(functools.partial(self._shuffler.forward, round, self.source))


class Relay:
    """A messenger between nodes and shuffler services; the keys in its folder are enrolled with every one of them.

    Guarantees:
        A node keeps its key, so that a shuffler takes one upload of it in a round.
        A node for which no key is left is turned away.
    """

    def __init__(self, folder: Path, *, shufflers: Sequence[str], ca: Path | None) -> None:
        self._urls, self._ca = tuple(shufflers), ca
        self.source = ShufflerLink(self._urls[0], ca=ca)
        self._keys = {pair.public.key_id: pair for pair in KeyRing(folder, "sign").all()}
        self._path = folder / "seats.json"
        known = self._path.read_bytes() if self._path.exists() else b"{}"
        self._seats = msgspec.json.decode(known, type=dict[int, bytes])

    def begin(self, status: RoundStatus, seconds: float) -> None:
        """The shufflers follow the analyzer themselves."""

    def take(self, node: int, envelope: Envelope) -> None:
        """To every shuffler what is for it."""
        if len(envelope.uploads) != len(self._urls):
            raise ValueError(f"expected {len(self._urls)} uploads, one per shuffler, got {len(envelope.uploads)}")
        key = self._key(node)
        for index, (url, upload) in enumerate(zip(self._urls, envelope.uploads, strict=True)):
            link = ShufflerLink(url, index=index, ca=self._ca, key=key)
            try:
                _again(functools.partial(link.upload, envelope.round, upload))
            finally:
                link.close()

    def finish(self, round: int) -> None:
        """The shufflers close a round when it is full or its time is up."""

    def _key(self, node: int) -> KeyPair:
        if node not in self._seats:
            free = [key_id for key_id in self._keys if key_id not in self._seats.values()]
            if not free:
                raise ValueError(f"expected at most {len(self._keys)} nodes, as many as there are keys, got one more")
            self._seats[node] = free[0]
            write_atomically(self._path, msgspec.json.encode(self._seats))
        return self._keys[self._seats[node]]


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
