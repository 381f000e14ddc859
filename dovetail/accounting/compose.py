"""Many rounds, one number: the smallest bound of all composition theorems.

`exposure` says what one user is exposed to; every accountant of `accountants` that reaches is asked, and the best
answer is kept. Each gives eps at a delta and delta at an eps. Where users are sampled, the same rounds with nothing
gained from it are asked about as well: they never promise more than holds (docs/proofs/fixed-size.md).

`local_bound` is for a client's own reports, seen with its name on them: no crowd, no shuffle, no sampling.
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
from dovetail.accounting.exposure import Exposure, exposures_of, reason_for_refusal, without_sampling
from dovetail.accounting.releases import Curve
from dovetail.accounting.releases.crowds import LOCAL
from dovetail.events import Disjoint, Everyone, Round, Separated
from dovetail.statements import Bound, Neighbors, NotApplicable, Proof

__all__ = ["best_bound", "bound", "check_target", "fits", "local_bound"]

Accountant = Callable[[Sequence[Exposure]], Curve]

_TIGHTEST_FIRST: tuple[Accountant, ...] = (
    accountants.exact_gaussian,
    accountants.ratio_to_gaussian,
    accountants.equal_rounds,
    accountants.privacy_loss,
    accountants.renyi,
    accountants.pure_composition,
)
_CHEAPEST_FIRST: tuple[Accountant, ...] = (
    accountants.exact_gaussian,
    accountants.ratio_to_gaussian,
    accountants.renyi,
    accountants.pure_composition,
    accountants.equal_rounds,
    accountants.privacy_loss,
)


def fits(rounds: Sequence[Round], *, eps: float, delta: float) -> bool:
    """Whether some accountant certifies these rounds at (eps, delta); the cheap ones are asked first.

    Arguments:
        rounds: everything that is to be run.
        eps: the target that must not be exceeded.
        delta: of that target.
    """
    _validate.in_interval(0, 1, delta=delta)
    if reason_for_refusal(rounds) is not None:
        return False
    exposures = exposures_of(rounds)
    plain = without_sampling(exposures)
    readings = (exposures,) if plain is None else (exposures, plain)
    for accountant, reading in itertools.product(_CHEAPEST_FIRST, readings):
        try:
            if not reading or 0 <= _curve(accountant, reading).eps(delta) <= eps:
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

    Arguments:
        rounds: everything that was run, in any order.
        delta: the delta to find an eps at.
        eps: the eps to find a delta at.
        both_ends: whether to compute a lower end, too, which may take longer than the bound.

    Guarantees:
        Exactly one of delta and eps is given, and the bound has it.
        At an eps for which nothing is certified delta is 1.
    """
    check_target(delta, eps)
    why = reason_for_refusal(rounds)
    if why is not None:
        nothing = Proof(missing=why)
        if eps is None:
            return Bound(eps=math.inf, delta=_nan_if_none(delta), proof=nothing)
        return Bound(eps=eps, delta=1.0, proof=nothing)
    return best_bound(exposures_of(rounds), delta=delta, eps=eps, both_ends=both_ends)


def best_bound(
    exposures: Sequence[Exposure], *, delta: float | None = None, eps: float | None = None, both_ends: bool = False
) -> Bound:
    """The smallest eps, or delta, of all accountants; `NotApplicable` with every reason if none applies.

    With `both_ends` also a lower end of that eps, where its accountant has one.

    Arguments:
        exposures: what one user is exposed to, from `exposures_of`.
        delta: the delta to find an eps at.
        eps: the eps to find a delta at.
        both_ends: whether to compute a lower end, too.

    Guarantees:
        Never above the bound without sampling, where that holds; if it is that one, it says so (`sample_known`).
    """
    check_target(delta, eps)
    if not exposures:
        return Bound(eps=0.0 if eps is None else eps, delta=0.0, proof=BASIC.proof)
    return _best_bound(tuple(exposures), delta, eps, both_ends)


@functools.lru_cache(maxsize=32)
def _best_bound(exposures: tuple[Exposure, ...], delta: float | None, eps: float | None, both_ends: bool) -> Bound:
    """`best_bound`, kept: trainings with other seeds, and the statements of one training, ask the same again."""
    answers, reasons = _ask_accountants(exposures, delta, eps)
    bounds = [candidate for candidate, _ in answers]
    plain = without_sampling(exposures)
    if plain is not None:
        more, others = _ask_accountants(plain, delta, eps)
        # where users are added or removed, a name tells who joined
        sample_known = all(exposure.release.neighbors is Neighbors.REPLACE_ONE for exposure in exposures)
        bounds += [dataclasses.replace(candidate, sample_known=sample_known) for candidate, _ in more]
        reasons += others
    if not bounds:
        raise NotApplicable("; ".join(dict.fromkeys(reasons)))
    best = min(bounds, key=lambda bound: (bound.eps if eps is None else bound.delta, not bound.sample_known))
    curve = next((curve for candidate, curve in answers if candidate is best), None)
    return _with_lower_eps(best, curve) if both_ends and eps is None and curve is not None else best


def _with_lower_eps(best: Bound, curve: Curve) -> Bound:
    """The bound with a lower end of its eps from its curve; unchanged where the curve has none, or cannot say it."""
    if curve.lower is None or not 0 < best.eps < math.inf:
        return best
    with contextlib.suppress(NotApplicable, ArithmeticError):
        return dataclasses.replace(best, lower=min(curve.lower(best.delta), best.eps))
    return best


def _ask_accountants(
    exposures: tuple[Exposure, ...], delta: float | None, eps: float | None
) -> tuple[list[tuple[Bound, Curve]], list[str]]:
    """Ask every accountant for eps at this delta, or delta at this eps; exactly one of the two is given.

    Returns: each answer with the curve that gave it, and the reasons of those that do not apply. An answer that no
        other theorem improves on ends the round.
    """
    bounds: list[tuple[Bound, Curve]] = []
    reasons: list[str] = []
    for accountant in _TIGHTEST_FIRST:
        try:
            curve = _curve(accountant, exposures)
            if eps is None:
                answer = Bound(eps=curve.eps(_nan_if_none(delta)), delta=_nan_if_none(delta), proof=curve.proof)
            else:
                answer = Bound(eps=eps, delta=curve.delta(eps), proof=curve.proof)
            bounds.append((_note_delta_spent(answer, curve), curve))
        except NotApplicable as error:
            reasons.append(str(error))
        except ArithmeticError:
            reasons.append(f"{accountant.__name__.replace('_', ' ')}: numbers beyond what a computer holds")
        else:
            if ("eps" if eps is None else "delta") in curve.best:
                break
    return bounds, reasons


def _note_delta_spent(answer: Bound, curve: Curve) -> Bound:
    """The bound, with what its curve spends of delta noted in its proof.

    `NotApplicable` where a number could not be computed: eps must be at least 0, and delta a probability.
    """
    if not answer.eps >= 0 or not 0 <= answer.delta <= 1:
        raise NotApplicable(f"{answer.proof.key} gives no number here (eps={answer.eps}, delta={answer.delta})")
    if answer.eps == math.inf:
        return answer
    return dataclasses.replace(answer, proof=answer.proof.with_spent(*curve.delta_spent(answer.eps)))


def check_target(delta: float | None, eps: float | None) -> None:
    """Raise ValueError unless exactly one of the two is given, a delta in [0, 1] or an eps >= 0."""
    if (delta is None) == (eps is None):
        raise ValueError(f"expected exactly one of delta and eps, got delta={delta!r} and eps={eps!r}")
    if eps is None:
        _validate.in_interval(0, 1, delta=_nan_if_none(delta))
    else:
        _validate.non_negative(eps=eps)


def _nan_if_none(delta: float | None) -> float:
    """The delta; NaN, which every check refuses, where there is none."""
    return math.nan if delta is None else delta


@functools.lru_cache(maxsize=16)
def _curve(accountant: Accountant, exposures: tuple[Exposure, ...]) -> Curve:
    """The curve that this accountant gives, kept for the next question about the same rounds."""
    return accountant(exposures)


def local_bound(rounds: Sequence[Round], *, delta: float) -> Bound:
    """A bound for all rounds at this delta or a smaller one; infinite where a report tells more than its noise hides.

    Arguments:
        rounds: the rounds that one client reports in, with everyone, in disjoint batches, or rarely.
        delta: for all rounds together.

    Guarantees:
        Basic composition: never below what any one of the rounds costs.
        `NotApplicable` for rounds that are sampled, which whoever sees names can tell, and for events of noisy sums.
    """
    exposures = exposures_of(rounds)
    if any(not isinstance(item.participation, Disjoint | Everyone | Separated) for item in rounds):
        raise NotApplicable("an adversary who sees names also sees who was sampled")
    times = sum(exposure.times for exposure in exposures)
    eps, spent = [], []
    for exposure in exposures:
        single = exposure.release.local_bound(delta=delta / times)
        if math.isinf(single.eps):
            return Bound(eps=math.inf, delta=delta, proof=single.proof)
        eps.append(exposure.times * single.eps)
        spent.append(exposure.times * single.delta)
    total = math.fsum(eps) * (1 + 1e-15 * (len(eps) + 4))
    return Bound(eps=total, delta=min(delta, math.fsum(spent)), proof=LOCAL.proof)
