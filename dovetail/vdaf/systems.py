"""The interface of a proof about a shared vector, whatever is proven: `ProofSystem`, with what aggregators pass around.

A user shards integers into shares with a proof. Each aggregator checks the form of its share, queries it and tells the
others its verifier share; from all of these each decides, and adds up its share of the integers. `levels.LevelProofs`
and `pine.Pine` are the two systems.
"""

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
    """An aggregator's answer about one report.

    `seeds` are the joint seeds that it computed, which must be those that `ProofSystem.decide` gives; `verifier` is the
    verifier share that it tells the others.
    """

    seeds: bytes
    verifier: bytes


class ProofSystem(Protocol):
    """Shares of integers with a proof, for `shares` aggregators, in the 64-bit field."""

    @property
    def shares(self) -> int:
        """How many aggregators there are."""
        ...

    @property
    def num_elements(self) -> int:
        """Field elements that an aggregator works with per report: a measure of its work."""
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
    def zero_knowledge_error(self) -> float:
        """The zero-knowledge error: how far what proofs show is, at most, from what follows from public randomness.

        In total variation, for one report.
        """
        ...

    def soundness_error(self, hashes: float) -> float:
        """The probability, at most, that a false report of a user that computes so many hashes is accepted.

        Rounded up.
        """
        ...

    def share_size(self, index: int) -> int:
        """Bytes of the share of the aggregator with this index; 0 is the leader, whose share is the long one."""
        ...

    def shard(self, integers: np.ndarray, nonce: bytes, rand: bytes) -> tuple[bytes, list[bytes]]:
        """User: the public share, and every aggregator's share, the leader's first.

        Arguments:
            integers: int64, (length,).
            nonce: 16 bytes that no other report has.
            rand: `rand_size` uniform bytes.
        """
        ...

    def check_encoding(self, index: int, report: SharedReport) -> None:
        """Aggregator: refuse a report whose parts have the wrong length or hold numbers that are no field elements."""
        ...

    def query(self, key: bytes, index: int, reports: Sequence[SharedReport]) -> list[Queried]:
        """Aggregator: its answers about its shares of some reports, in their order, under the round's shared key."""
        ...

    def decide(self, verifiers: Sequence[Sequence[bytes]]) -> list[bytes | None]:
        """Aggregator: for every report, the seeds that all must have computed; None if it is refused.

        It counts only where these seeds are those of the aggregator's own `Queried`.
        """
        ...

    def public_share_of(self, verifiers: Sequence[bytes]) -> bytes:
        """Aggregator: the public share that fits the verifier shares of one report, given in aggregators' order."""
        ...

    def output_share(self, index: int, share: bytes) -> np.ndarray:
        """Aggregator: its share of the integers, as field elements.

        The sum of all shares is the integers modulo the field.
        """
        ...
