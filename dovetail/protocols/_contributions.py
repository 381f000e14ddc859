"""What a deployed client adds to the sum of a round, where sums are all that the analyzer gets to see.

A tally adds up, so a client can compute that of its own reports and split it into additive shares between aggregators,
who add up what clients gave them and hand on the sum alone. A `Contribution` is that own tally as integers modulo
2^bits, drawn from the operating system's randomness like `Messages`.
"""

from __future__ import annotations

import abc
import math
from typing import Any

import numpy as np

from dovetail.mechanisms import ExactSampler
from dovetail.vdaf.systems import ProofSystem

__all__ = ["Contribution", "proof_assumptions"]

_HASHES = 2.0**45  # that a hostile user computes for a report, in what a statement says of robustness


class Contribution(abc.ABC):
    """A client's own tally, for updates of one dimension and a cohort of known size.

    Guarantees:
        Every client adds `length` integers, whatever its update.
        The sum over a cohort, taken modulo 2^bits, is read without wrapping, or as the protocol's page says.
        The law of one client's integers is within `total_variation` of the one that is accounted, or of a
        post-processing of it.
    """

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Integers that every client adds."""

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Sums are taken modulo 2^bits, which is at most 32."""

    @property
    def total_variation(self) -> float:
        """Total variation between one client's integers and the law that is accounted, at most; users' add up."""
        return 0.0

    @property
    def noise_total_variation(self) -> float:
        """The total variation between an aggregator's noise and the law that is accounted, at most.

        0 without such noise.
        """
        return 0.0

    @property
    def proof(self) -> ProofSystem | None:
        """What every client proves about its integers, and how; None where nothing is proven.

        Where something is, `draw` and `noise` give signed integers, int64, and `tally` takes them.
        """
        return None

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a statement about deployed sums relies on besides the protocol's own assumptions."""
        return (
            "the random bytes from the operating systems of clients and aggregators are uniform and independent",
            "nobody learns how long a client takes to draw its integers",
        )

    @abc.abstractmethod
    def draw(self, x: np.ndarray, *, sampler: ExactSampler, budget: float | None = None) -> np.ndarray:
        """Client: its integers for one update of shape (dim,), uint32 below 2^bits; with its own budget, if any."""

    def noise(self, *, sampler: ExactSampler) -> np.ndarray | None:
        """Aggregator: what it adds to its sum, uint32 modulo 2^bits; None where clients bring all the noise."""
        return None

    @abc.abstractmethod
    def tally(self, total: np.ndarray, users: int) -> Any:
        """Analyzer: what `Protocol.estimate` takes, from the sum of so many users' integers, uint32 below 2^bits."""


def proof_assumptions(proof: ProofSystem, what: str) -> tuple[str, ...]:
    """What a statement about verified sums relies on: for privacy, and for robustness.

    Arguments:
        proof: the proof system that clients use.
        what: what must not count, in words that fit "... counts with probability at most".
    """
    error = math.ceil(math.log2(proof.soundness_error(_HASHES)))
    return (
        "HMAC-SHA256 and AES-128 in counter mode behave like random functions, for what a client's proof does not tell",
        "an aggregator answers one query about each report: it writes down the round's key before it answers",
        f"(robustness, not privacy) if all {proof.shares} aggregators follow the protocol, {what} counts with "
        f"probability at most 2^{error}, per report of a user that computes 2^45 hashes",
    )
