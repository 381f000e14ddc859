"""A number that somebody else printed, with what became of it.

A `Claim` is about privacy and can be shown as a `Statement`; a `PrintedNumber` is about anything else (an error, a
noise scale, a count of messages). Neither is a `Bound`, and neither can carry the verdict `CERTIFIED`: a published
formula is recomputed here so that it can be compared, never so that it can be relied on.
"""

from __future__ import annotations

import dataclasses
import math

from dovetail.numbers import at_most
from dovetail.statements import Bound, Scope, Statement, Theorem, Verdict, check_guarantee

__all__ = ["HOLDS", "REFUTED", "UNPROVEN", "Claim", "PrintedNumber"]

HOLDS = Verdict.CLAIMED_HOLDS
UNPROVEN = Verdict.CLAIMED_UNPROVEN
REFUTED = Verdict.CLAIMED_REFUTED


def _check_reason(verdict: Verdict, reason: str) -> None:
    if verdict is Verdict.CERTIFIED:
        raise ValueError("expected a verdict on somebody's claim, got verdict=Verdict.CERTIFIED")
    if not reason.endswith(".") or reason != reason.strip():
        raise ValueError(f"expected the reason to be one sentence, got reason={reason!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """(eps, delta) by a paper's own formula, our verdict on it, and why in one sentence.

    Guarantees:
        Never certified: the verdict CERTIFIED is refused, and `statement` keeps the verdict.
        eps is in [0, inf] and delta in [0, 1]; anything else is refused.
    """

    eps: float
    delta: float
    theorem: Theorem
    verdict: Verdict
    reason: str

    def __post_init__(self) -> None:
        check_guarantee(eps=self.eps, delta=self.delta)
        _check_reason(self.verdict, self.reason)

    def __str__(self) -> str:
        numbers = f"({at_most(self.eps)}, {at_most(self.delta)})"
        return f"claimed by {self.theorem.where}: {numbers} - {_verdict_in_words(self.verdict)}: {self.reason}"

    def statement(self, scope: Scope, *, span: str = "") -> Statement:
        """The claim as a statement within this scope, with its verdict and the reason for it.

        Arguments:
            scope: whom the paper's promise is about.
            span: what it covers, in words.
        """
        proof = self.theorem.proof.with_notes(f"{_verdict_in_words(self.verdict)}: {self.reason}")
        bound = Bound(eps=self.eps, delta=self.delta, proof=proof)
        return scope.state(bound, self.verdict, span=span)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrintedNumber:
    """A printed quantity that is not a privacy guarantee, with the same verdicts."""

    value: float
    quantity: str
    theorem: Theorem
    verdict: Verdict
    reason: str

    def __post_init__(self) -> None:
        if math.isnan(self.value):
            raise ValueError(f"expected a number, got value={self.value!r}")
        _check_reason(self.verdict, self.reason)

    def __str__(self) -> str:
        word = _verdict_in_words(self.verdict)
        return f"{self.quantity} by {self.theorem.where}: {self.value:.4g} - {word}: {self.reason}"


def _verdict_in_words(verdict: Verdict) -> str:
    return verdict.value.removeprefix("claimed, ")
