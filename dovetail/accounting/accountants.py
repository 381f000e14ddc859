"""The composition theorems: each turns what one user is exposed to into a curve of eps and delta.

- `exact_gaussian`: Gaussian releases in which nobody is sampled, without any loss, or releases close to Gaussian;
- `ratio_to_gaussian`: releases close to Gaussian, sampled or not, by the ratio of the laws of their noise;
- `equal_rounds`: one release, repeated, by a theorem of its own (personal budgets);
- `privacy_loss` and `renyi`: numerical privacy-loss distributions and Renyi orders, of every release that has them;
- `pure`: basic composition, the only one that needs no delta.

An accountant raises `NotApplicable` where its theorem does not reach. What releases spend of delta beside their noise
(`exposure.delta_spent`), and what the theorem itself spends (`Curve.delta_spent`), is taken from the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from dovetail.accounting import conversion, gaussian, loss_distributions, numerics, releases
from dovetail.accounting.conversion import RENYI
from dovetail.accounting.exposure import Exposure, delta_spent
from dovetail.accounting.gaussian import NearGaussian
from dovetail.accounting.loss_distributions import PRIVACY_LOSS
from dovetail.accounting.pairs import mixtures
from dovetail.accounting.releases import Curve
from dovetail.accounting.releases.noise import MOST_LOSSES
from dovetail.accounting.search import eps_after_spending
from dovetail.events import Everyone, FixedSize, Poisson
from dovetail.statements import Neighbors, NotApplicable, Proof, Spent, Theorem

__all__ = ["BASIC", "equal_rounds", "exact_gaussian", "privacy_loss", "pure_composition", "ratio_to_gaussian", "renyi"]

BASIC = Theorem(key="DR14.thm3.16", where="basic composition (Dwork, Roth 2014, Thm. 3.16)")
RENYI_POISSON = Theorem(
    key="MTZ19.sec3",
    where="Renyi divergence of the Poisson-sampled Gaussian (Mironov, Talwar, Zhang 2019, Sec. 3)",
    url="https://arxiv.org/abs/1908.10530",
)
RENYI_FIXED_SIZE = Theorem(
    key="WBK19.thm27",
    where="Renyi divergence under fixed-size sampling (Wang, Balle, Kasiviswanathan 2019, Thm. 27)",
    url="https://arxiv.org/abs/1808.00087",
)
POISSON_REPLACED = Theorem(
    key="dovetail.poisson-replacement", where="the dominating pair of docs/proofs/poisson-replacement.md"
)
FIXED_SIZE = Theorem(
    key="dovetail.fixed-size",
    where="the spliced profile of fixed-size samples (Zhu, Dong, Wang 2022, Thm. 11; docs/proofs/fixed-size.md)",
    url="https://arxiv.org/abs/2106.08567",
)

_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(range(11, 65)) + (80, 96, 128, 192, 256, 384, 512, 1024)
_WHOLE_ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256)  # where sampled releases cost little to compute
_OUTWARD = 1 + 1e-9
_MOST_CASES = 64  # ways in which subjects may be spread over users that are composed one by one
_DEVIATIONS = 40  # width of the window in which a sum of losses is resolved, in its standard deviations
_MOST_LOSSES = 2**22  # points that a sum may take
_FINER = 16  # how many times finer the grid for lower ends is
_MOST_BELOW = 2**20  # points of the grid for lower ends
_PARTS = 24.0  # intervals to one standard deviation of a sampled release's loss
_FEW = 4  # different releases that are composed on the finest grid
_TINIEST = 1e-300  # the least mu: one that underflows is not 0
_SUM_ERROR = 1e-15  # relative error of a sum, or a root of a sum of squares, for each of its terms and four more
_NOT_GAUSSIAN = "the gap between Skellam and Gaussian noise"


def exact_gaussian(exposures: Sequence[Exposure]) -> Curve:
    """The curve of Gaussian releases in which nobody is sampled.

    It is exact, and has a `lower` end, where all noise is Gaussian and every release is tight. Noise that is only close
    to Gaussian costs its distance from that (`_charge_gaussian_distance`), and then there is no lower end.
    """
    mu = _total_mu(exposures)
    curve = _charge_gaussian_distance(exposures, _gaussian_curve(exposures, mu))
    if not curve.delta_spent(0.0) and not delta_spent(exposures, eps=0.0):
        if not all(exposure.release.is_tight for exposure in exposures):
            return dataclasses.replace(curve, best=frozenset({"eps", "delta"}))
        least = mu * (1 - 4 * _SUM_ERROR * (len(exposures) + 4))  # undoes the rounding up in `_total_mu`, and more
        return dataclasses.replace(
            curve,
            best=frozenset({"eps", "delta"}),
            lower=lambda delta: gaussian.lower_eps_of(least, delta=_require_proper_delta(delta)),
        )
    return _charge_spending(exposures, curve)


def ratio_to_gaussian(exposures: Sequence[Exposure]) -> Curve:
    """The curve of releases whose noise is close to Gaussian, by the ratio of the laws of all noise.

    Users may be sampled. Beside exact Gaussian releases at least one must be only close to one, or `exact_gaussian` and
    `privacy_loss` say as much without a ratio.
    """
    near_releases = _near_gaussian_releases(exposures)
    draws = [near.repeat(times).draws for times, near in near_releases]
    differing = [part for part in draws if part is not None]
    if len(near_releases) < len(exposures) or not differing:
        raise NotApplicable("the ratio of noise to a Gaussian's needs noise that is near to one")
    unsampled = all(exposure.sampling == Everyone() for exposure in exposures)
    base = _gaussian_curve(exposures, _total_mu(exposures)) if unsampled else _loss_curve(tuple(exposures))
    curve = Curve(
        proof=base.proof.after(*(near.theorem for _, near in near_releases if near.theorem is not None)),
        eps=lambda delta: gaussian.eps_by_ratio(base.eps, differing, delta=_require_proper_delta(delta)),
        delta=lambda eps: gaussian.delta_by_ratio(base.delta, differing, eps=eps),
    )

    def tails(eps: float) -> tuple[Spent, ...]:
        return (Spent(gaussian.ratio_tail_cost(base.delta, eps=eps), _NOT_GAUSSIAN),)

    # eps and delta of this curve have paid for the tails already
    return dataclasses.replace(_charge_spending(exposures, curve), delta_spent=tails)


def _near_gaussian_releases(exposures: Sequence[Exposure]) -> list[tuple[int, NearGaussian]]:
    """(times, Gaussian) of every exposure whose release is Gaussian or close to it; others are left out."""
    return [(exposure.times, near) for exposure in exposures if (near := exposure.release.near_gaussian) is not None]


def _total_mu(exposures: Sequence[Exposure]) -> float:
    """mu of all releases together, the root of the sum of squares: rounded up, and never 0.

    Refuses sampled users, and noise that is not close to Gaussian.
    """
    shifts = []
    for exposure in exposures:
        near = exposure.release.near_gaussian
        if near is None or exposure.sampling != Everyone():
            raise NotApplicable("the exact Gaussian formula needs Gaussian noise and no sampling of users")
        shifts.append(near.mu * math.sqrt(exposure.times))
    return max(math.hypot(*shifts) * (1 + _SUM_ERROR * (len(exposures) + 4)), _TINIEST)


def _gaussian_curve(exposures: Sequence[Exposure], mu: float) -> Curve:
    """The exact curve of one Gaussian release of this mu, whose proof also cites the theorems of the exposures."""
    return Curve(
        proof=_cite_releases(exposures, gaussian.ANALYTIC.proof),
        eps=lambda delta: gaussian.eps_of(mu, delta=_require_proper_delta(delta)),
        delta=lambda eps: gaussian.delta_of(mu, eps=eps),
    )


def _charge_gaussian_distance(exposures: Sequence[Exposure], curve: Curve) -> Curve:
    """The curve, with the delta added that some releases cost because they are only close to Gaussian.

    `curve` treats every release that is close to Gaussian as that Gaussian. Divergences add up over releases, rounded
    up; where all are exactly Gaussian the curve is returned as it is.
    """
    near_releases = _near_gaussian_releases(exposures)
    outward = 1 + _SUM_ERROR * (len(exposures) + 4)
    divergence = math.fsum(times * near.divergence for times, near in near_releases) * outward
    if not divergence:
        return curve
    return dataclasses.replace(
        curve,
        proof=curve.proof.after(*(near.theorem for _, near in near_releases if near.theorem is not None)),
        delta_spent=lambda eps: (Spent(gaussian.distance_delta(divergence, eps=eps), _NOT_GAUSSIAN),),
    )


def renyi(exposures: Sequence[Exposure]) -> Curve:
    """The curve by Renyi divergences: added up over all releases at every order, then converted at the best order."""
    orders = _shared_renyi_orders(exposures)
    total = np.zeros(len(orders))
    proof = RENYI.proof
    for exposure in exposures:
        total += exposure.times * releases.renyi(exposure.mechanism, exposure.sampling, orders)
        if isinstance(exposure.sampling, Poisson):
            proof = proof.after(RENYI_POISSON)
        elif isinstance(exposure.sampling, FixedSize):
            proof = proof.after(RENYI_FIXED_SIZE)
    usable = np.isfinite(total) & (total >= 0)
    if not usable.any():
        raise NotApplicable("no Renyi order is finite for this composition")
    at, total = np.asarray(orders)[usable], total[usable]
    curve = Curve(
        proof=_cite_releases(exposures, proof),
        eps=lambda delta: conversion.eps_of(at, total, delta=_require_proper_delta(delta)) * _OUTWARD,
        delta=lambda eps: numerics.as_probability_bound(conversion.delta_of(at, total, eps=eps) * _OUTWARD),
    )
    return _charge_spending(exposures, curve)


def _shared_renyi_orders(exposures: Sequence[Exposure]) -> tuple[float, ...]:
    """The Renyi orders at which all exposures are asked.

    Releases that name orders of their own (`Release.orders`) answer at any others, too: if all of them do, the shortest
    list is taken; otherwise it is the usual orders, or whole ones where many releases are sampled.
    """
    special = [orders for exposure in exposures if (orders := exposure.release.orders) is not None]
    if len(special) < len(exposures):
        sampled = sum(not isinstance(exposure.sampling, Everyone) for exposure in exposures)
        return _ORDERS if sampled <= _FEW else _WHOLE_ORDERS
    return tuple(min(special, key=len).tolist())


def privacy_loss(exposures: Sequence[Exposure]) -> Curve:
    """The curve by numerical privacy-loss distributions, convolved on one grid of losses.

    Where a release has several possible losses, so does the composition, and the worst counts. Different releases are
    combined in every way, also in those that no one subject can bring about.
    """
    return _charge_spending(exposures, _charge_gaussian_distance(exposures, _loss_curve(tuple(exposures))))


@functools.lru_cache(maxsize=8)
def _loss_curve(exposures: tuple[Exposure, ...]) -> Curve:
    """The curve of the losses alone, kept for later questions: `delta_spent` of releases is not taken off yet.

    Noise that is close to Gaussian counts as Gaussian here; `_charge_gaussian_distance` charges the difference.
    """
    grid = _grid_interval(exposures)
    possible = [releases.losses(exposure.mechanism, exposure.sampling, grid) for exposure in exposures]
    cases = math.prod(len(losses) for losses in possible)
    if cases > _MOST_CASES:
        raise NotApplicable(f"the items of a subject may be spread in {cases} ways, more than {_MOST_CASES}")
    parts = [
        [loss_distributions.self_compose(loss, exposure.times) if exposure.times > 1 else loss for loss in losses]
        for exposure, losses in zip(exposures, possible, strict=True)
    ]
    totals = [loss_distributions.compose(case) for case in itertools.product(*parts)]
    return Curve(
        proof=_cite_releases(exposures, PRIVACY_LOSS.proof.after(*_sampling_theorems(exposures))),
        eps=lambda delta: loss_distributions.worst_eps(totals, delta=_require_proper_delta(delta)),
        delta=lambda eps: loss_distributions.worst_delta(totals, eps=eps),
        lower=lambda delta: _lower_eps(exposures, grid, _require_proper_delta(delta)),
    )


def _lower_eps(exposures: Sequence[Exposure], upper_interval: float, delta: float) -> float:
    """A number that is never above the exact eps of the same releases at this delta.

    Losses are rounded down, on a grid finer than the upper bound's, because rounding down costs more tightness.

    Arguments:
        exposures: what one user is exposed to.
        upper_interval: the interval of losses that the upper bound used.
        delta: at which eps is asked for, in (0, 1).
    """
    scales = [(exposure.times, exposure.release.loss_scale(exposure.sampling)) for exposure in exposures]
    spread = math.hypot(*(scale.std * math.sqrt(times) for times, scale in scales if scale is not None))
    interval = max(upper_interval / _FINER, spread * _DEVIATIONS / _MOST_BELOW)
    possible = [exposure.release.losses_rounded_down(exposure.sampling, interval) for exposure in exposures]
    parts = [
        [loss_distributions.self_compose(loss, exposure.times) for loss in losses]
        for exposure, losses in zip(exposures, possible, strict=True)
    ]
    return max(loss_distributions.compose(case).lower_eps(delta) for case in itertools.product(*parts))


def _sampling_theorems(exposures: Sequence[Exposure]) -> list[Theorem]:
    """The theorems of dominating pairs that sampled users need beside the pair of the noise."""
    replaced = any(isinstance(c.sampling, Poisson) and c.release.neighbors is Neighbors.REPLACE_ONE for c in exposures)
    fixed = any(isinstance(c.sampling, FixedSize) for c in exposures)
    return [POISSON_REPLACED] * replaced + [FIXED_SIZE] * fixed


def _grid_interval(exposures: Sequence[Exposure]) -> float:
    """The interval of losses on which all releases are composed: it decides how tight and fast, never how sound.

    A few different releases get the finest interval that one of them asks for, or a power of two times it where their
    sum would take too many points. For subjects, or for many different releases, the interval is chosen from the root
    mean square of their losses, because rounding to a grid adds to that.
    """
    for_subjects = any(exposure.release.concerns_subjects for exposure in exposures)
    if not for_subjects and len(exposures) <= _FEW:
        finest = min(_finest_interval(exposure) for exposure in exposures)
        scales = [(exposure.times, exposure.release.loss_scale(exposure.sampling)) for exposure in exposures]
        known_scales = [(times, scale) for times, scale in scales if scale is not None]
        spread = math.hypot(*(min(scale.std, 1e6) * math.sqrt(times) for times, scale in known_scales))
        widest = max((min(scale.width, 1e12) for _, scale in known_scales), default=0.0)
        least = max(spread * _DEVIATIONS / _MOST_LOSSES, widest / MOST_LOSSES)
        coarser = max(1.0, least / finest * (1 - 1e-9))
        return finest * 2.0 ** math.ceil(math.log2(coarser))
    squares = 0.0
    widest = 0.0
    count = 0
    others = []
    for exposure in exposures:
        scale = exposure.release.loss_scale(exposure.sampling)
        if scale is None:
            others.append(exposure.release.resolution)
        else:
            squares += exposure.times * scale.sums * scale.std**2
            widest = max(widest, scale.width)
            count = count + exposure.times * scale.sums
    if not count:
        return min(others)
    return min([mixtures.interval_for(math.sqrt(squares / count), widest, num_releases=count), *others])


def _finest_interval(exposure: Exposure) -> float:
    """The interval that a release asks for: a finer one where users are sampled, who lose little in most rounds."""
    scale = None if exposure.sampling == Everyone() else exposure.release.loss_scale(exposure.sampling)
    wanted = exposure.release.resolution
    return wanted if scale is None else min(wanted, scale.std / _PARTS)


def equal_rounds(exposures: Sequence[Exposure]) -> Curve:
    """The curve of one release, any number of times, by a theorem of its own (`Release.equal_rounds`)."""
    if len(exposures) != 1:
        raise NotApplicable(
            f"theorems of one release need rounds that are all equal, got {len(exposures)} different ones"
        )
    own = exposures[0].release.equal_rounds(exposures[0].sampling, exposures[0].times)
    return dataclasses.replace(own, eps=lambda delta: own.eps(_require_proper_delta(delta)))


def pure_composition(exposures: Sequence[Exposure]) -> Curve:
    """The curve by basic composition: pure eps add up, delta is 0 from their sum on and 1 below it."""
    terms = []
    for exposure in exposures:
        if not isinstance(exposure.sampling, Everyone):
            raise NotApplicable("basic composition without delta needs pure mechanisms and no sampling of users")
        terms.append(exposure.times * exposure.release.pure_eps)
    total = math.fsum(terms) * (1 + _SUM_ERROR * (len(terms) + 4))
    return Curve(proof=BASIC.proof, eps=lambda delta: total, delta=lambda eps: 0.0 if eps >= total else 1.0)


def _charge_spending(exposures: Sequence[Exposure], curve: Curve) -> Curve:
    """The same curve for the whole delta, some of which goes to what is not noise.

    That is what the releases spend (`exposure.delta_spent`) and what the curve's own proof spends
    (`Curve.delta_spent`), both of which may grow with eps. Where neither spends any at eps = 0, the curve is unchanged.
    """

    def parts(eps: float) -> tuple[Spent, ...]:
        return tuple(part for part in (*delta_spent(exposures, eps=eps), *curve.delta_spent(eps)) if part.delta)

    def spent_at(eps: float) -> float:
        return math.fsum(part.delta for part in parts(eps))

    at_least = spent_at(0.0)
    if not at_least:
        return curve

    def eps(delta: float) -> float:
        if delta <= at_least:
            what = " and on ".join(part.on for part in parts(0.0))
            raise NotApplicable(f"not certified: {what} alone takes {at_least:.3g} of delta, more than delta={delta}")
        return eps_after_spending(curve.eps, spent_at, delta=_require_proper_delta(delta))

    return dataclasses.replace(
        curve, eps=eps, delta=lambda eps: numerics.as_probability_bound(curve.delta(eps) + spent_at(eps))
    )


def _cite_releases(exposures: Sequence[Exposure], proof: Proof) -> Proof:
    """The proof with the theorems that gave the releases' divergences or losses."""
    theorems = (exposure.release.theorem for exposure in exposures)
    return proof.after(*(theorem for theorem in theorems if theorem is not None))


def _require_proper_delta(delta: float) -> float:
    """This delta, if it is above 0 and below 1; `NotApplicable` otherwise."""
    if not 0 < delta < 1:
        raise NotApplicable(f"this theorem needs 0 < delta < 1, got delta={delta}")
    return delta
