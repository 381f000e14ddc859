"""What the paper of a protocol claims for its rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail import protocols
from dovetail.claims import CLAIMS, flame
from dovetail.events import DataIndependent, Mechanism, NonPrivate, PaddedTopk, Round, SampledSubject
from dovetail.statements import NotApplicable, Scope, Statement, Unit

__all__ = ["claimed", "from_data", "index_privacy"]

_FROM_DATA = "the paper's Z is computed from the data and this claim reveals it: a diagnostic that no statement covers"


def from_data(claim: Statement | None) -> bool:
    """Whether a claim reveals something about the data, and so is a diagnostic."""
    return claim is not None and _FROM_DATA in claim.assumptions


def claimed(
    protocol: protocols.Protocol, cohorts: Sequence[protocols.Cohort], dim: int, scope: Scope, *, delta: float
) -> Statement | None:
    """What the protocol's paper claims for these rounds; None where it says nothing."""
    if not cohorts:
        return None
    if protocol.claimed_for == "training":
        return _claimed_for_training(protocol, cohorts, dim, scope, delta)
    return _claimed_for_round(protocol.name, protocol.published_event(cohorts[0], dim), scope, delta)


def _claimed_for_round(
    name: str, about: tuple[Mechanism, Mapping[str, Any]] | None, scope: Scope, delta: float
) -> Statement | None:
    """What the protocol's paper claims for one round of it, which is also one epoch of disjoint batches."""
    if name not in CLAIMS or about is None:
        return None
    event, extra = about
    try:
        return CLAIMS[name](event, delta=delta, **extra).statement(scope, span="one round")
    except NotApplicable:
        return None


def _claimed_for_training(
    protocol: protocols.Protocol, cohorts: Sequence[protocols.Cohort], dim: int, scope: Scope, delta: float
) -> Statement | None:
    """What the protocol's paper claims for all rounds together."""
    abouts = [protocol.published_event(cohort, dim) for cohort in cohorts]
    if protocol.name not in CLAIMS or not abouts or any(about is None for about in abouts):
        return None
    released, extra = [], {}
    for about, cohort in zip(abouts, cohorts, strict=True):
        event, extra = about  # type: ignore[misc]
        sampling = getattr(protocol, "published_sampling", cohort.participation)
        released += [Round(mechanism=event, participation=sampling)] * max(1, protocol.private_steps)
    mine = dataclasses.replace(scope, neighbors=getattr(released[0].mechanism, "neighbors", scope.neighbors))
    if released[0].mechanism.__class__ is SampledSubject:
        mine = dataclasses.replace(mine, unit=Unit.SUBJECT)  # its theorems are about groups of a subject's items
    if getattr(protocol, "group_in_batch", None) is not None:
        mine = dataclasses.replace(mine, assumptions=(*mine.assumptions, _FROM_DATA))
    try:
        claim = CLAIMS[protocol.name](released, delta=delta, **extra)
    except NotApplicable:
        return None
    asked = getattr(protocol, "claimed_eps", None)  # the recipe set the noise batch by batch to meet just this
    claim = claim if asked is None else dataclasses.replace(claim, eps=asked)
    return claim.statement(mine, span=f"{len(cohorts)} rounds")


def index_privacy(seen: DataIndependent | NonPrivate, reports: Mechanism) -> DataIndependent | NonPrivate:
    """What the shuffler sees, with what FLAME says of it, where indices tell."""
    if isinstance(seen, NonPrivate) and isinstance(reports, PaddedTopk):
        return NonPrivate(reason=f"{seen.reason}; {_index_privacy(reports)}")
    return seen


def _index_privacy(event: PaddedTopk) -> str:
    """FLAME's measure of what indices tell."""
    try:
        nu = flame.theorem5(num_users=event.num_users, pad_to=event.pad_to, beta=event.top / event.coordinates)
    except NotApplicable as refusal:
        return f"FLAME Thm. 5: {refusal}"
    return f"FLAME Thm. 5 allows {nu.quantity} and nu {nu.value:.4g} at the best. {nu.reason}"
