"""Amplification by shuffling in closed form: Erlingsson'19, FLAME's Lemma 1, clones 2022 and 2023, Girgis'21.

One report per user, one uniform shuffle, replacement. These are the formulas that papers quote; the numerical bounds of
`clones` and `blanket` are tighter and rest on fewer hypotheses. Every bound takes the event and a delta, puts n - t for
n (t colluding or planted users), and refuses, with the reason, outside its hypotheses or where it gains nothing over
the local guarantee: eps_local is never dressed up as a bound.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.conversion import eps_by_order
from dovetail.events import Shuffled
from dovetail.statements import Bound, NotApplicable, Theorem

__all__ = [
    "ERLINGSSON19",
    "FLAME_LEMMA1",
    "FMT22_CLOSED",
    "FMT23_CLOSED",
    "GIRGIS21",
    "LEAST_GAIN",
    "bound_if_gain",
    "clones22",
    "clones23",
    "erlingsson19",
    "flame_lemma1",
    "girgis21",
    "require_single_report",
]

ERLINGSSON19 = Theorem(
    key="EFMRTT19",
    where="Erlingsson, Feldman, Mironov, Raghunathan, Talwar, Thakurta (SODA 2019), amplification by shuffling",
    url="https://arxiv.org/abs/1811.12469",
)
FLAME_LEMMA1 = Theorem(
    key="BBGN19.thm3.1",
    where="FLAME (Liu et al., AAAI 2021), Lemma 1, after Balle, Bell, Gascon, Nissim (CRYPTO 2019), Thm. 3.1",
    url="https://arxiv.org/abs/1903.02837",
)
FMT22_CLOSED = Theorem(
    key="FMT22.thm3.1",
    where="clones, closed form (Feldman, McMillan, Talwar, FOCS 2021, Thm. 3.1)",
    url="https://arxiv.org/abs/2012.12803",
)
FMT23_CLOSED = Theorem(
    key="FMT23.closed",
    where="stronger clones, closed form (Feldman, McMillan, Talwar, SODA 2023), for every randomizer by the pair of "
    "docs/proofs/personalized-clones.md",
    url="https://arxiv.org/abs/2208.04591",
)
GIRGIS21 = Theorem(
    key="GDDSK21.thm1",
    where="Renyi divergence of one shuffle (Girgis, Data, Diggavi, Suresh, Kairouz, CCS 2021, Thm. 1), "
    "conversion by Canonne, Kamath, Steinke (2020), Prop. 12",
    url="https://arxiv.org/abs/2105.05180",
)

LEAST_GAIN = 1e-3  # a bound within a thousandth of eps_local is no gain
_OUTWARD = 1 + 1e-12  # more than the rounding errors of a closed form
_GIRGIS_ORDERS = np.unique(np.round(np.geomspace(2, 4000, 120)).astype(int))


def require_single_report(event: Shuffled, *, delta: float | None = None) -> tuple[int, float]:
    """Check the question, and return the number of honest users and the eps_local of one shuffled report.

    Arguments:
        event: of which only one coordinate is allowed.
        delta: checked to be a probability, if there is one.

    Returns: the number of honest users and eps_local.
    """
    _validate.in_open_interval(0, 1, **_validate.not_none(delta=delta))
    if event.coordinates != 1:
        raise NotApplicable(f"this bound is for one coordinate, got coordinates={event.coordinates}: compose instead")
    return event.honest, event.report.eps_local


def bound_if_gain(eps: float, event: Shuffled, *, delta: float, theorem: Theorem) -> Bound:
    """This eps as a bound, if it is below eps_local by more than a thousandth; otherwise `NotApplicable`.

    `eps` is rounded up already; it may be NaN or infinite, which is no gain.
    """
    eps_local = event.report.eps_local
    if not eps < eps_local * (1 - LEAST_GAIN):
        raise NotApplicable(f"no gain over eps_local={eps_local:.4g} at n={event.honest}, delta={delta:.3g}")
    return Bound(eps=numerics.as_eps_bound(eps), delta=delta, proof=theorem.proof)


def erlingsson19(event: Shuffled, *, delta: float) -> Bound:
    """12 eps_local sqrt(log(1/delta) / n).

    Guarantees:
        Refuses outside eps_local <= 1/2, n >= 1000, delta < 1/100.

    References:
        Erlingsson, Feldman, Mironov, Raghunathan, Talwar, Thakurta (SODA 2019).
    """
    n, eps_local = require_single_report(event, delta=delta)
    if eps_local > 0.5 or n < 1000 or delta >= 0.01:
        raise NotApplicable(
            "hypotheses fail: needs eps_local <= 0.5, n >= 1000 and delta < 0.01; "
            f"got eps_local={eps_local:.4g}, n={n}, delta={delta:.3g}"
        )
    eps = 12 * eps_local * math.sqrt(-math.log(delta) / n)
    return bound_if_gain(eps * _OUTWARD, event, delta=delta, theorem=ERLINGSSON19)


def flame_lemma1(event: Shuffled, *, delta: float) -> Bound:
    """sqrt(14 log(2/delta) (e^eps_local + b - 1) / (n - 1)) for b-ary randomized response.

    FLAME's lemma drops the second condition of the theorem that it cites, eps >= 27 (e^eps_local + b - 1) / (n - 1),
    which small deltas imply and large ones do not; it is asked here.

    Guarantees:
        Refuses any other randomizer, and eps outside (0, 1].

    References:
        Balle, Bell, Gascon, Nissim (CRYPTO 2019), Thm. 3.1; FLAME (AAAI 2021), Lemma 1.
    """
    n, eps_local = require_single_report(event, delta=delta)
    if event.report.kind != "rr":
        raise NotApplicable(f"proved for b-ary randomized response only, the report is {event.report.kind}")
    weight = (math.exp(min(eps_local, 700.0)) + event.report.levels - 1) / (n - 1)
    eps = math.sqrt(14 * math.log(2 / delta) * weight) * _OUTWARD
    if eps > 1 or eps < 27 * weight:
        raise NotApplicable(
            "hypotheses fail: needs 27 (e^eps_local + b - 1) / (n - 1) <= eps <= 1, "
            f"got eps={eps:.4g} and a least eps of {27 * weight:.4g}"
        )
    return bound_if_gain(eps, event, delta=delta, theorem=FLAME_LEMMA1)


def clones22(event: Shuffled, *, delta: float) -> Bound:
    """log(1 + tanh(eps_local / 2) (8 sqrt(e^eps_local log(4/delta) / n) + 8 e^eps_local / n)).

    Guarantees:
        Refuses outside eps_local <= log(n / (16 log(2/delta))).
        Never below the numerical bound of the same clone probability.

    References:
        Feldman, McMillan, Talwar (FOCS 2021), Thm. 3.1.
    """
    n, eps_local = require_single_report(event, delta=delta)
    _require_eps_local_within(eps_local, n / (16 * math.log(2 / delta)), event)
    E = math.exp(eps_local)
    ratio = math.tanh(eps_local / 2) * (8 * math.sqrt(E * math.log(4 / delta) / n) + 8 * E / n)
    return bound_if_gain(math.log1p(ratio) * _OUTWARD, event, delta=delta, theorem=FMT22_CLOSED)


def clones23(event: Shuffled, *, delta: float) -> Bound:
    """log(1 + (e^eps_local - 1) (4 sqrt(2 log(4/delta) / ((e^eps_local + 1) n)) + 4 / n)).

    Guarantees:
        Refuses outside eps_local <= log(n / (8 log(2/delta)) - 1).
        Never below the numerical bound of the same clone probability.

    References:
        Feldman, McMillan, Talwar (SODA 2023), with the corrected proof of the pair (see `clones`).
    """
    n, eps_local = require_single_report(event, delta=delta)
    _require_eps_local_within(eps_local, n / (8 * math.log(2 / delta)) - 1, event)
    E = math.exp(eps_local)
    ratio = math.expm1(eps_local) * (4 * math.sqrt(2 * math.log(4 / delta) / ((E + 1) * n)) + 4 / n)
    return bound_if_gain(math.log1p(ratio) * _OUTWARD, event, delta=delta, theorem=FMT23_CLOSED)


def _require_eps_local_within(eps_local: float, exp_limit: float, event: Shuffled) -> None:
    """Refuse eps_local above log(exp_limit)."""
    limit = math.log(exp_limit) if exp_limit > 0 else -math.inf
    if eps_local > limit:
        raise NotApplicable(
            f"hypotheses fail: needs eps_local <= {limit:.4g} at n={event.honest}, got eps_local={eps_local:.4g}"
        )


def girgis21(event: Shuffled, *, delta: float) -> Bound:
    """The Renyi bound for integer orders, converted to (eps, delta).

    Orders are a geometric grid up to 4000, which costs less than a thousandth against all of them. The theorem is
    stated for finitely many outputs; both sides of a divergence are suprema over finite partitions of the outputs, so
    it holds for any.

    Guarantees:
        Every order used is finite; the others are dropped.

    References:
        Girgis, Data, Diggavi, Suresh, Kairouz (CCS 2021), Thm. 1; Canonne, Kamath, Steinke (2020), Prop. 12.
    """
    n, eps_local = require_single_report(event, delta=delta)
    divergences = np.array([_girgis_renyi(int(order), n, eps_local) for order in _GIRGIS_ORDERS])
    usable = np.isfinite(divergences) & (divergences >= 0)
    if not usable.any():
        raise NotApplicable(f"no Renyi order is finite at eps_local={eps_local:.4g}, n={n}")
    orders, divergences = _GIRGIS_ORDERS[usable], divergences[usable]
    eps = numerics.smallest_bound(eps_by_order(orders, divergences, delta=delta))
    return bound_if_gain(eps + 1e-12, event, delta=delta, theorem=GIRGIS21)


def _girgis_renyi(order: int, num_users: int, eps_local: float) -> float:
    """Thm. 1 at one whole order >= 2 for n users, in log space, rounded up; it may be infinite."""
    nbar = math.floor((num_users - 1) / 2 * math.exp(-eps_local) * (1 - 1e-15)) + 1
    i = np.arange(3, order + 1)
    log_choose = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    log_base = 2 * _log_expm1(2 * eps_local) - math.log(2) - 2 * eps_local - math.log(nbar)
    terms = np.concatenate(
        [
            [0.0],
            [math.log(order * (order - 1) / 2) + 2 * _log_expm1(eps_local) - math.log(nbar) - eps_local],
            log_choose + np.log(i) + gammaln(i / 2) + i / 2 * log_base,
            [eps_local * order - (num_users - 1) / 8 * math.exp(-eps_local)],
        ]
    )
    rounding = 1e-14 * (1 + float(gammaln(order + 1)) + order * abs(log_base))
    top = terms.max()
    # log(1 + x) / (order - 1), with x summed apart so that small divergences keep their digits
    if top < 1:
        return math.log1p(float(np.exp(terms[1:] + rounding).sum())) / (order - 1) * _OUTWARD
    return (top + math.log(float(np.exp(terms - top).sum())) + rounding) / (order - 1) * _OUTWARD


def _log_expm1(x: float) -> float:
    """log(e^x - 1) for x > 0, without overflow."""
    return x + math.log(-math.expm1(-x))
