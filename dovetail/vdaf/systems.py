"""What aggregators and users need of a way to prove something about a shared vector, whatever is proven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

__all__ = ["ProofSystem", "Queried", "SharedReport", "Unlucky"]


class Unlucky(ArithmeticError):  # noqa: N818 - it says what happened; one draws again
    """Randomness for which nothing can be proven about an honest vector: drawn again, other randomness will do."""


class SharedReport(NamedTuple):
    """What an aggregator has of a report: its nonce, the public share, and its own share."""

    nonce: bytes
    public: bytes
    share: bytes


class Queried(NamedTuple):
    """What an aggregator found: the seeds that all must agree on, and the verifier share that it tells the others."""

    seeds: bytes
    verifier: bytes


class ProofSystem(Protocol):
    """Shares of integers with a proof, for `shares` aggregators, in the 64-bit field."""

    @property
    def shares(self) -> int:
        """How many aggregators there are."""
        ...

    @property
    def elements(self) -> int:
        """Elements that an aggregator works with per report."""
        ...

    @property
    def public_size(self) -> int:
        """Bytes of the public share."""
        ...

    @property
    def rand_size(self) -> int:
        """Random bytes that a user draws."""
        ...

    @property
    def verifier_size(self) -> int:
        """Bytes of a verifier share."""
        ...

    @property
    def knowledge_error(self) -> float:
        """At most this far is what proofs tell from what follows from public randomness, in total variation."""
        ...

    def soundness_error(self, hashes: float) -> float:
        """At most this is the probability that a false report is accepted, of a user that computes so many hashes."""
        ...

    def share_size(self, index: int) -> int:
        """Bytes of an aggregator's share."""
        ...

    def shard(self, integers: np.ndarray, nonce: bytes, rand: bytes) -> tuple[bytes, list[bytes]]:
        """User: the public share, and what every aggregator gets."""
        ...

    def check(self, index: int, report: SharedReport) -> None:
        """Aggregator: refuse a report that has not the form of one."""
        ...

    def query(self, key: bytes, index: int, reports: Sequence[SharedReport]) -> list[Queried]:
        """Aggregator: what it finds about its shares of some reports."""
        ...

    def decide(self, verifiers: Sequence[Sequence[bytes]]) -> list[bytes | None]:
        """Aggregator: for every report, the seeds that all must have found; None if it is refused."""
        ...

    def public_of(self, verifiers: Sequence[bytes]) -> bytes:
        """Aggregator: the public share that fits what all aggregators found about a report."""
        ...

    def output(self, index: int, share: bytes) -> np.ndarray:
        """Aggregator: its share of the integers."""
        ...
