"""What a paper says about a protocol: claimed, never certified.

A protocol names its paper's formula, one of `dovetail.claims`, and what that formula is about: the event of one round,
which is also one epoch of disjoint batches, or all rounds of a training. The rest is the same for all papers.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from dovetail.claims import Claim
from dovetail.events import Mechanism, Round
from dovetail.protocols._base import Cohort
from dovetail.statements import NotApplicable, Scope, Statement

__all__ = ["FROM_DATA", "Claimed", "Formula"]

Formula = Callable[..., Claim]  # of an event, or of all rounds, at a delta

FROM_DATA = (
    "the paper's Z is computed from the data, and this claim reveals it: it is a diagnostic that no statement covers"
)


class Claimed(abc.ABC):
    """A mix-in for protocols that a paper makes a claim for.

    Guarantees:
        A claim is never certified, and None where the paper says nothing or its formula gives no number.
    """

    formula: ClassVar[Formula]
    claimed_for: ClassVar[Literal["round", "training"]] = "round"

    @abc.abstractmethod
    def published_event(self, cohort: Cohort, dim: int) -> tuple[Mechanism, dict[str, Any]] | None:
        """What the formula is about: the event of a round, and further arguments; None where nothing is claimed."""

    def published_rounds(self, event: Mechanism, cohort: Cohort) -> list[Round]:
        """The releases of one round as the paper counts them, where its formula is about all rounds.

        Arguments:
            event: what `published_event` gave for this cohort.
            cohort: the round's.
        """
        return [Round(mechanism=event, participation=cohort.participation)]

    def published_scope(self, scope: Scope) -> Scope:
        """The scope of the claim, whom it is about and what it relies on, made from the scope of what is certified."""
        return scope

    def claim_about_slots(self, cohort: Cohort, dim: int) -> str | None:
        """A sentence on what the paper says of the slots that a shuffler sees.

        None where they tell nothing of the data.
        """
        return None

    def claim_statement(self, cohorts: Sequence[Cohort], dim: int, scope: Scope, *, delta: float) -> Statement | None:
        """What the paper claims for these rounds, as a statement that is marked as claimed.

        None where it claims nothing.
        """
        claim = self.claim(cohorts, dim, delta=delta)
        if claim is None:
            return None
        span = "one round" if self.claimed_for == "round" else f"{len(cohorts)} rounds"
        return claim.statement(self.published_scope(scope), span=span)

    def claim(self, cohorts: Sequence[Cohort], dim: int, *, delta: float) -> Claim | None:
        """What the formula gives for these rounds; None outside its hypotheses, or where the paper says nothing."""
        whole = self.claimed_for == "training"
        counted = cohorts if whole else cohorts[:1]
        published = [event for event in (self.published_event(cohort, dim) for cohort in counted) if event is not None]
        if not published or len(published) < len(counted):
            return None
        about: Any
        about, more = published[-1]
        if whole:
            events = zip(published, counted, strict=True)
            about = [release for (event, _), cohort in events for release in self.published_rounds(event, cohort)]
        try:
            return self.formula(about, delta=delta, **more)
        except (NotApplicable, ArithmeticError):  # outside its hypotheses, or beyond what a computer holds
            return None
