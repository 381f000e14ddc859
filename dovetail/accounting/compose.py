"""Many rounds, one number: the smallest bound of all composition theorems.

`exposure` says what one user is exposed to; every accountant of `accountants` that reaches is asked, and the best
answer is kept. Each gives eps at a delta and delta at an eps. Where users are sampled, the same rounds with nothing
gained from it are asked about as well: they never promise more than holds (docs/proofs/fixed-size.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

from dovetail import _validate
from dovetail.accounting import accountants
from dovetail.accounting.accountants import BASIC
from dovetail.accounting.exposure import Exposure, exposures, refusal, unsampled
from dovetail.accounting.releases import Curve
from dovetail.events import Round
from dovetail.statements import Bound, Neighbors, NotApplicable, Proof

__all__ = ["best_bound", "bound", "check_target", "fits"]

Accountant = Callable[[Sequence[Exposure]], Curve]

_TIGHTEST_FIRST: tuple[Accountant, ...] = (
    accountants.exact_gaussian,
    accountants.noise_ratio,
    accountants.equal_rounds,
    accountants.privacy_loss,
    accountants.renyi,
    accountants.pure,
)
_CHEAPEST_FIRST: tuple[Accountant, ...] = (
    accountants.exact_gaussian,
    accountants.noise_ratio,
    accountants.renyi,
    accountants.pure,
    accountants.equal_rounds,
    accountants.privacy_loss,
)


def fits(rounds: Sequence[Round], *, eps: float, delta: float) -> bool:
    """Whether some accountant certifies these rounds at (eps, delta); the cheap ones are asked first."""
    _validate.in_interval(0, 1, delta=delta)
    if refusal(rounds) is not None:
        return False
    paid = exposures(rounds)
    plain = unsampled(paid)
    ways = (paid,) if plain is None else (paid, plain)
    for accountant, way in itertools.product(_CHEAPEST_FIRST, ways):
        try:
            if not way or 0 <= _curve(accountant, way).eps(delta) <= eps:
                return True
        except (NotApplicable, ArithmeticError):
            continue
    return False


def bound(
    rounds: Sequence[Round], *, delta: float | None = None, eps: float | None = None, both_ends: bool = False
) -> Bound:
    """The smallest certified eps of these rounds at this delta, or the smallest certified delta at this eps.

    It is a statement's number without the rest of it: for calibration, and for stopping at a delta. With `both_ends`
    also a lower end of that eps, where there is one.

    Guarantees:
        Exactly one of delta and eps is given, and the bound has it.
        At an eps for which nothing is certified delta is 1.
    """
    check_target(delta, eps)
    why = refusal(rounds)
    if why is not None:
        nothing = Proof(missing=why)
        if eps is None:
            return Bound(eps=math.inf, delta=_given(delta), proof=nothing)
        return Bound(eps=eps, delta=1.0, proof=nothing)
    return best_bound(exposures(rounds), delta=delta, eps=eps, both_ends=both_ends)


def best_bound(
    paid: Sequence[Exposure], *, delta: float | None = None, eps: float | None = None, both_ends: bool = False
) -> Bound:
    """The smallest eps, or delta, of all accountants; `NotApplicable` with every reason if none applies.

    With `both_ends` also a lower end of that eps, where its accountant has one.

    Guarantees:
        Never above the bound without sampling, where that holds; if it is that one, it says so (`sample_known`).
    """
    check_target(delta, eps)
    if not paid:
        return Bound(eps=0.0 if eps is None else eps, delta=0.0, proof=BASIC.proof)
    return _best_bound(tuple(paid), delta, eps, both_ends)


@functools.lru_cache(maxsize=32)
def _best_bound(paid: tuple[Exposure, ...], delta: float | None, eps: float | None, both_ends: bool) -> Bound:
    """The same, kept: trainings with other seeds, and the statements of one training, ask the same again."""
    asked, reasons = _asked(paid, delta, eps)
    bounds = [found for found, _ in asked]
    plain = unsampled(paid)
    if plain is not None:
        more, others = _asked(plain, delta, eps)
        known = all(exposure.release.neighbors is Neighbors.REPLACE_ONE for exposure in paid)  # a name tells who joined
        bounds += [dataclasses.replace(found, sample_known=known) for found, _ in more]
        reasons += others
    if not bounds:
        raise NotApplicable("; ".join(dict.fromkeys(reasons)))
    best = min(bounds, key=lambda bound: (bound.eps if eps is None else bound.delta, not bound.sample_known))
    curve = next((curve for found, curve in asked if found is best), None)
    return _with_lower(best, curve) if both_ends and eps is None and curve is not None else best


def _with_lower(found: Bound, curve: Curve) -> Bound:
    """The bound with a lower end of its eps, where there is one."""
    if curve.lower is None or not 0 < found.eps < math.inf:
        return found
    with contextlib.suppress(NotApplicable, ArithmeticError):
        return dataclasses.replace(found, lower=min(curve.lower(found.delta), found.eps))
    return found


def _asked(
    paid: tuple[Exposure, ...], delta: float | None, eps: float | None
) -> tuple[list[tuple[Bound, Curve]], list[str]]:
    """What every accountant answers, and why the others do not."""
    bounds: list[tuple[Bound, Curve]] = []
    reasons: list[str] = []
    for accountant in _TIGHTEST_FIRST:
        try:
            curve = _curve(accountant, paid)
            if eps is None:
                found = Bound(eps=curve.eps(_given(delta)), delta=_given(delta), proof=curve.proof)
            else:
                found = Bound(eps=eps, delta=curve.delta(eps), proof=curve.proof)
            bounds.append((_passed(found, curve), curve))
        except NotApplicable as error:
            reasons.append(str(error))
        except ArithmeticError:
            reasons.append(f"{accountant.__name__.replace('_', ' ')}: numbers beyond what a computer holds")
        else:
            if ("eps" if eps is None else "delta") in curve.best:
                break
    return bounds, reasons


def _passed(found: Bound, curve: Curve) -> Bound:
    """The bound with what its curve spends, if its numbers are some: an eps >= 0, a delta that is a probability."""
    if not found.eps >= 0 or not 0 <= found.delta <= 1:
        raise NotApplicable(f"{found.proof.key} gives no number here (eps={found.eps}, delta={found.delta})")
    if found.eps == math.inf:
        return found
    return dataclasses.replace(found, proof=found.proof.spending(*curve.spent(found.eps)))


def check_target(delta: float | None, eps: float | None) -> None:
    """Exactly one of the two is given, and it is a delta or an eps."""
    if (delta is None) == (eps is None):
        raise ValueError(f"expected exactly one of delta and eps, got delta={delta!r} and eps={eps!r}")
    if eps is None:
        _validate.in_interval(0, 1, delta=_given(delta))
    else:
        _validate.non_negative(eps=eps)


def _given(delta: float | None) -> float:
    return math.nan if delta is None else delta


@functools.lru_cache(maxsize=16)
def _curve(accountant: Accountant, paid: tuple[Exposure, ...]) -> Curve:
    """An accountant's answer, kept for the next question about the same rounds."""
    return accountant(paid)
