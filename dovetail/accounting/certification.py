"""From rounds to a statement: the number, and everything that belongs to it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dovetail.accounting.compose import best_bound, check_target
from dovetail.accounting.exposure import Exposure, delta_spent, distinct, exposures_of, reason_for_refusal
from dovetail.accounting.releases import release_of
from dovetail.events import Disjoint, Everyone, Round, Separated
from dovetail.statements import Bound, NotApplicable, Scope, Statement, Unit, Verdict, no_guarantee

__all__ = ["certify"]

_MOST_PREMISES = 8  # different rounds that a statement tells one by one


def certify(
    rounds: Sequence[Round],
    scope: Scope,
    *,
    delta: float | None = None,
    eps: float | None = None,
    bound: Bound | None = None,
) -> Statement:
    """The smallest certified eps for these rounds at this delta, or the smallest certified delta at this eps.

    A `bound` that was found for these rounds otherwise becomes a statement as it is, with all that belongs to one.

    Arguments:
        rounds: everything that was run, in any order; equal rounds count each time.
        scope: what the statement says beside its numbers; its neighbouring relation must be that of the events.
        delta: the delta to certify an eps at.
        eps: the eps to certify a delta at.
        bound: a bound for these rounds that was proved elsewhere.

    Guarantees:
        Exactly one of delta, eps and bound is given, and the statement has it.
        Monotone: more rounds never give a smaller eps, or delta.
        The theorem named is the one that gave the number, and its hypotheses were checked.
        A release without noise gives an unbounded statement, never a number.
    """
    span = _span_in_words(rounds)
    if bound is not None:
        return _state_bound(bound, scope, exposures_of(rounds), span=span)
    check_target(delta, eps)
    why = reason_for_refusal(rounds)
    if why is not None:
        return no_guarantee(scope, reason=why, delta=1.0 if delta is None else delta, span=span)
    for item in distinct(rounds):
        relation = release_of(item.mechanism).neighbors
        if relation is not scope.neighbors:
            raise ValueError(
                f"the scope is stated under {scope.neighbors.value}, but an event under {relation.value}: "
                "use one relation for both"
            )
        if scope.unit is Unit.SUBJECT and isinstance(item.participation, Disjoint | Separated):
            raise NotApplicable("a subject's data may sit in several batches: how often users come does not help it")
    exposures = exposures_of(rounds)
    best = best_bound(exposures, delta=delta, eps=eps, both_ends=True)
    several = exposures if len(exposures) > 1 or any(exposure.times > 1 for exposure in exposures) else ()
    one_by_one = several if len(several) <= _MOST_PREMISES else ()
    premises = tuple(_state_one_round(exposure, scope, delta, eps) for exposure in one_by_one)
    return _state_bound(best, scope, exposures, span=span, premises=premises, per_user=_eps_per_user(exposures, best))


def _state_one_round(exposure: Exposure, scope: Scope, delta: float | None, eps: float | None) -> Statement:
    """The statement about one of these rounds alone, at the same delta or eps: a premise of the whole."""
    single = dataclasses.replace(exposure, times=1)
    best = best_bound((single,), delta=delta, eps=eps)
    return _state_bound(best, scope, (single,), span=f"one of {exposure.times} rounds")


def _state_bound(
    bound: Bound,
    scope: Scope,
    exposures: Sequence[Exposure],
    *,
    span: str,
    premises: tuple[Statement, ...] = (),
    per_user: tuple[float, ...] | None = None,
) -> Statement:
    """The statement of a bound for these exposures: its scope with all assumptions, its proof with all of delta spent.

    A bound that gains from sampling assumes that the sample is secret.
    """
    secrecy = () if bound.sample_known else _sampling_assumptions(exposures)
    assumptions = (*scope.assumptions, *secrecy, scope.tuning)
    scope = dataclasses.replace(scope, assumptions=tuple(dict.fromkeys(assumptions)))
    if bound.eps < math.inf:
        bound = dataclasses.replace(bound, proof=bound.proof.with_spent(*delta_spent(exposures, eps=bound.eps)))
    return scope.state(bound, Verdict.CERTIFIED, span=span, premises=premises, per_user=per_user)


def _eps_per_user(exposures: Sequence[Exposure], best: Bound) -> tuple[float, ...] | None:
    """Every user's own eps, where users differ and one event says it all; nobody's is above everybody's."""
    if len(exposures) != 1 or exposures[0].sampling != Everyone() or not 0 < best.delta < 1:
        return None
    per_user = exposures[0].release.eps_per_user(exposures[0].times, delta=best.delta)
    return None if per_user is None else tuple(np.minimum(per_user, best.eps).tolist())


def _sampling_assumptions(exposures: Sequence[Exposure]) -> list[str]:
    """What these exposures assume of their samples, in words; equal ones may repeat."""
    assumptions = (exposure.release.sampling_assumption(exposure.sampling) for exposure in exposures)
    return [assumption for assumption in assumptions if assumption is not None]


def _span_in_words(rounds: Sequence[Round]) -> str:
    """What a statement about these rounds covers, in words: "12 rounds in 3 epochs of disjoint batches"."""
    spans = {release_of(item.mechanism).span for item in distinct(rounds)} - {None}
    if len(spans) == len(rounds) == 1:
        return str(spans.pop())
    epochs = {item.participation.epoch for item in rounds if isinstance(item.participation, Disjoint)}
    text = f"{len(rounds)} round{'s' * (len(rounds) != 1)}"
    uploads = [
        item.participation.most_uploads for item in distinct(rounds) if isinstance(item.participation, Separated)
    ]
    if uploads:
        return f"{text} with at most {max(uploads)} upload{'s' * (max(uploads) != 1)} per user"
    return text + (f" in {len(epochs)} epoch{'s' * (len(epochs) != 1)} of disjoint batches" if epochs else "")
