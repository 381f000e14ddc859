"""From rounds to a statement: the number, and everything that belongs to it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from dovetail.accounting import personalized
from dovetail.accounting.charges import Charge, charges, spent_on_full, spent_on_mixing
from dovetail.accounting.composition import best_bound, check_target
from dovetail.events import Disjoint, Everyone, FixedSize, NonPrivate, Personalized, Poisson, Round
from dovetail.numbers import at_most
from dovetail.statements import TUNING_ASSUMPTION, Bound, NotApplicable, Scope, Statement, Unit, Verdict, unbounded

__all__ = ["certify", "stated"]

_MOST_PREMISES = 8  # different rounds that a statement tells one by one


def certify(
    rounds: Sequence[Round], scope: Scope, *, delta: float | None = None, eps: float | None = None
) -> Statement:
    """The smallest certified eps for these rounds at this delta, or the smallest certified delta at this eps.

    Guarantees:
        Exactly one of delta and eps is given, and the statement has it.
        Monotone: more rounds never give a smaller eps, or delta.
        The theorem named is the one that gave the number, and its hypotheses were checked.
        A release without noise gives an unbounded statement, never a number.
    """
    check_target(delta, eps)
    span = _span(rounds)
    for item in rounds:
        if isinstance(item.mechanism, NonPrivate):
            return unbounded(scope, reason=item.mechanism.reason, delta=1.0 if delta is None else delta, span=span)
        if item.mechanism.neighbors is not scope.neighbors:
            raise ValueError(
                f"expected events under {scope.neighbors.value}, got an event under {item.mechanism.neighbors.value}"
            )
        if scope.unit is Unit.SUBJECT and isinstance(item.participation, Disjoint):
            raise NotApplicable("a subject's data may sit in several batches: disjoint batches of users do not help it")
    paid = charges(rounds)
    best = best_bound(paid, delta=delta, eps=eps)
    several = paid if len(paid) > 1 or any(charge.times > 1 for charge in paid) else ()
    told = several if len(several) <= _MOST_PREMISES else ()
    premises = tuple(_one_round(charge, scope, delta, eps) for charge in told)
    return _statement(best, scope, paid, span=span, premises=premises, per_user=_per_user(paid, best))


def stated(rounds: Sequence[Round], bound: Bound, scope: Scope) -> Statement:
    """A bound that was found for these rounds otherwise, with everything that belongs to a statement about them."""
    return _statement(bound, scope, charges(rounds), span=_span(rounds))


def _one_round(charge: Charge, scope: Scope, delta: float | None, eps: float | None) -> Statement:
    one = dataclasses.replace(charge, times=1)
    best = best_bound((one,), delta=delta, eps=eps)
    return _statement(best, scope, (one,), span=f"one of {charge.times} rounds")


def _statement(
    bound: Bound,
    scope: Scope,
    paid: Sequence[Charge],
    *,
    span: str,
    premises: tuple[Statement, ...] = (),
    per_user: tuple[float, ...] | None = None,
) -> Statement:
    said = (*scope.assumptions, *_sampling_assumptions(paid), TUNING_ASSUMPTION)
    scope = dataclasses.replace(scope, assumptions=tuple(dict.fromkeys(said)))
    by = dataclasses.replace(bound.theorem, where="; ".join((bound.theorem.where, *_spent(paid, bound.eps))))
    bound = dataclasses.replace(bound, theorem=by)
    return scope.state(bound, Verdict.CERTIFIED, span=span, premises=premises, per_user=per_user)


def _per_user(paid: Sequence[Charge], best: Bound) -> tuple[float, ...] | None:
    """Every user's own eps, where budgets are personal and one event says it all; nobody's is above everybody's."""
    if len(paid) != 1 or not isinstance(paid[0].mechanism, Personalized) or not isinstance(paid[0].sampling, Everyone):
        return None
    if not 0 < best.delta < 1:
        return None
    event, times = paid[0].mechanism, paid[0].times
    whole = dataclasses.replace(event, coordinates=event.coordinates * times)
    mine = personalized.per_user(whole, delta=best.delta, tolerance=0.02)
    return tuple(min(bound.eps, best.eps) for bound in mine)


def _spent(paid: Sequence[Charge], eps: float) -> list[str]:
    """What the proof spends of delta beside the noise."""
    mixing = spent_on_mixing(paid, eps=eps) if eps < math.inf else 0.0
    said = ((spent_on_full(paid), "overflowing coordinates"), (mixing, "imperfect mixing of shares"))
    return [f"of delta, {at_most(spent, 3)} is spent on {what}" for spent, what in said if spent]


def _sampling_assumptions(paid: Sequence[Charge]) -> list[str]:
    said = []
    for charge in paid:
        match charge.sampling:
            case Poisson(prob=prob):
                said.append(
                    f"each user joins a round independently with probability {prob:.4g}, secret from the adversary"
                )
            case FixedSize(size=size, population=population):
                but = " (but colluders see whether they are sampled)" * bool(getattr(charge.mechanism, "colluders", 0))
                said.append(
                    f"the {size} of {population} users of a round are a uniform sample, secret from the adversary{but}"
                )
    return said


def _span(rounds: Sequence[Round]) -> str:
    epochs = {item.participation.epoch for item in rounds if isinstance(item.participation, Disjoint)}
    text = f"{len(rounds)} round{'s' * (len(rounds) != 1)}"
    return text + (f" in {len(epochs)} epoch{'s' * (len(epochs) != 1)} of disjoint batches" if epochs else "")
