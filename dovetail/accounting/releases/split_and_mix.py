"""Split-and-mix: a sum over untrusted shufflers with the noise of a curator (Balle et al. 2020; Agarwal et al. 2021).

Vectors are clipped to `clip_norm`, scaled and rounded to integers of bounded norm (`rounded_norm`). Each client adds
its part of a Skellam noise of variance `noise_variance`, splits every coordinate into additive shares modulo `modulus`,
and each slot of shares is permuted freshly, coordinate by coordinate. Ideally only the sum is seen, at the price of
a Gaussian and of Skellam's distance from it (`skellam_sums`), or of Skellam's Renyi divergence, whichever is less.
The shuffled shares of a coordinate are within eta = `mixing_distance` of that ideal in total variation, which adds
``(1 + e^eps) d eta`` to delta for each round: both neighbours are d eta away from their ideals.

**How far shuffled shares are from showing only their sum** (after Balle, Bell, Gascon, Nissim 2020):
``eta <= sqrt(E[q^(c-1)] - 1)/2``, c the components of the union of slots - 1 uniform permutations of the n honest
clients. Let L be the likelihood ratio of a view against uniform shares of the same sum; it is q^(n-1) times the chance
that a random re-assembly of the shares gives every client its value, so E[L^2] under the ideal is q^(n-1) times that
chance for shares as sent. Client and re-assembled client are joined by the share that they have in common: m matchings,
of which one may be contracted. A component of k clients forces k - 1 further independent equations modulo q (its last
one follows, or is violated for sure), so the chance is at most E[q^-(n-c)]; TV is at most sqrt(E[L^2] - 1)/2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from scipy.special import gammaln

from dovetail import _validate
from dovetail.accounting import gaussian, numerics
from dovetail.accounting.conversion import RENYI, delta_of, eps_of
from dovetail.accounting.gaussian import NearGaussian
from dovetail.accounting.releases import skellam_sums
from dovetail.accounting.releases._base import releases
from dovetail.accounting.releases.skellam_sums import (
    ORDERS,
    SkellamRelease,
    _skellam_renyi,
    near_gaussian_of,
    renyi,
    rounded_norm,
)
from dovetail.accounting.search import eps_after_spending, smallest_noise
from dovetail.events import SplitAndMix
from dovetail.statements import Bound, Neighbors, NotApplicable, Spent, Theorem

__all__ = [
    "ORDERS",
    "REMOVED",
    "SPLIT_AND_MIX",
    "calibrate",
    "delta",
    "eps",
    "mixing_delta",
    "mixing_distance",
    "modulus_for",
    "near_gaussian_of",
    "renyi",
    "rounded_norm",
    "shares_for",
]

SPLIT_AND_MIX = Theorem(
    key="dovetail.split-and-mix",
    where="Skellam noise (Agarwal, Kairouz, Liu 2021) over additive shares mixed slot by slot (after Balle, Bell, "
    "Gascon, Nissim 2020; exact second moment)",
    url="https://arxiv.org/abs/2002.00817",
)
REMOVED = dataclasses.replace(
    SPLIT_AND_MIX,
    key="dovetail.split-and-mix-removed",
    where=f"{SPLIT_AND_MIX.where}; for users that are removed, docs/proofs/removed-users.md",
)

_OUTWARD = 1 + 1e-9  # more than the rounding errors of an eps or a delta
_LEAST = 1e-300  # stands for a distance that underflows
_CLIMB = 1 - 4e-5  # more than `eps_after_spending` may go beyond the smallest eps
_BASE = 768  # sizes up to which the recursion runs; larger crowds are bounded from it
_LARGEST_RECURSION = 6000  # nodes; its time grows with their square
_MOST_SHARES = 32  # slots


def mixing_distance(*, num_users: int, slots: int, modulus: int) -> float:
    """Total variation distance of one coordinate's shuffled shares from showing only their sum, rounded up.

    It is 1 where fewer than three slots are left, which hide nothing.

    Arguments:
        num_users: honest users.
        slots: share slots whose permutation the analyzer does not know.
        modulus: of the shares; at least the number of users.

    Guarantees:
        Never below the exact distance, enumerated at small num_users, slots and modulus.
        Refuses a modulus below the number of users, for which the recursion would need cancellation.
    """
    _validate.integer(num_users=num_users, slots=slots, modulus=modulus)
    _validate.at_least(2, num_users=num_users)
    if modulus < num_users:
        raise NotApplicable(f"expected modulus >= num_users={num_users}, got modulus={modulus}")
    if slots < 3:
        return 1.0
    log_excess = _log_excess(num_users, slots - 2, modulus)
    return numerics.as_probability_bound(math.exp(min(1.0, log_excess / 2)) / 2 * (1 + 1e-5))


def _log_excess(n: int, r: int, q: int) -> float:
    """log(E[q^(c-1)] - 1) =: log T_n for n nodes and r + 1 permutations, from h_i = E[q^c] on i nodes.

    T_n = (1/(n q)) sum_{0<i<n} ((q+1)(n-i) - n) C(n,i)^-r h_i, the recursion of `_log_moments` without its last term;
    the weight is at most 1 - i/n. Beyond `_BASE` nodes h_i = q (1 + T_i) <= 2q as long as T_i <= 1, and for all of
    those T_n <= sum_{i<=base} C(n,i)^-r h_i + 8 q n^-r, because 1/C(n,1) + ... + 1/C(n,n-1) <= 4/n; this falls in n, so
    it is enough that it is at most 1 at base + 1. Sizes beyond base then add at most 2q (n^-(r+1) + C(n,2)^-(r-1)/n).
    """
    base = min(n - 1, _BASE)
    logs = _log_moments(base, r, q)
    if n > base + 1:
        at_base = _log_sum_exp(_log_summands(base + 1, logs, r)[1:], math.log(8 * q) - r * math.log(base + 1))
        if at_base > 0:
            if n > _LARGEST_RECURSION:
                raise NotApplicable(f"not certified: too few share slots ({r + 2}) for modulus={q}")
            logs = _log_moments(n - 1, r, q)
            base = n - 1
    i = np.arange(1, base + 1)
    with np.errstate(divide="ignore"):
        terms = _log_summands(n, logs, r)[1:] + np.log1p(-i / n * (1 + 1 / q))
    if n == base + 1:
        return _log_sum_exp(terms)
    log_pairs = math.log(n) + math.log(n - 1) - math.log(2)
    rest = np.logaddexp(-(r + 1) * math.log(n), -(r - 1) * log_pairs - math.log(n))
    return _log_sum_exp(terms, math.log(2 * q) + float(rest))


@functools.lru_cache(maxsize=32)
def _log_moments(largest: int, r: int, q: int) -> np.ndarray:
    """log h_n = log E[q^c] for n = 0..largest nodes and r + 1 permutations.

    Tuples of r + 1 permutations are sets of connected ones, so sum_n h_n f_n x^n = F(x)^q with F = sum_n f_n x^n and
    f_n = (n!)^r. Comparing coefficients of G'F = q F'G: n h_n = sum_j ((q+1) j - n) C(n,j)^-r h_(n-j), j = 1..n. No
    term is negative for q >= n - 1, so rounding errors stay relative (below 1e-6 in all; `mixing_distance` adds 1e-5).
    """
    logs = np.zeros(largest + 1)
    log_factorials = gammaln(np.arange(largest + 2) + 1.0)
    for n in range(1, largest + 1):
        i = np.arange(n)
        log_binomials = log_factorials[n] - log_factorials[i] - log_factorials[n - i]
        with np.errstate(divide="ignore"):
            weights = np.log((q + 1.0) * (n - i) - n)
        logs[n] = _log_sum_exp(weights - r * log_binomials + logs[:n]) - math.log(n)
    logs.flags.writeable = False
    return logs


def _log_summands(n: int, logs: np.ndarray, r: int) -> np.ndarray:
    """log(C(n, i)^-r h_i) for i = 0, 1, ..., where `logs` has log h_i."""
    i = np.arange(len(logs))
    return logs - r * (gammaln(n + 1) - gammaln(i + 1) - gammaln(n - i + 1))


def _log_sum_exp(logs: np.ndarray, more: float = -math.inf) -> float:
    """log of the sum of e^x over all of these, and of e^more."""
    peak = max(float(logs.max()), more)
    return peak + math.log(float(np.exp(logs - peak).sum()) + math.exp(more - peak))


def shares_for(*, num_users: int, modulus: int, target: float) -> int:
    """The fewest share slots with `mixing_distance` at most `target`, among so many honest users.

    Arguments:
        num_users: honest users.
        modulus: of the shares.
        target: the largest distance from the ideal.

    Guarantees:
        eta at the result is at most target, at one slot less it is not.
        Not certified (`NotApplicable`) where more than 32 slots would be needed: too few users.
    """
    _validate.in_open_interval(0, 1, target=target)
    fewest = 2 + math.floor((math.log(modulus) - 2 * math.log(2 * target)) / math.log(num_users))
    for slots in range(max(3, fewest - 1), _MOST_SHARES + 1):
        try:
            if mixing_distance(num_users=num_users, slots=slots, modulus=modulus) <= target:
                return slots
        except NotApplicable:
            if modulus < num_users:
                raise
    raise NotApplicable(
        f"not certified: {num_users} honest users need more than {_MOST_SHARES} shares for a distance of {target:.3g}"
    )


def modulus_for(*, num_users: int, norm: float, noise_variance: float) -> int:
    """The smallest modulus in which a coordinate of the sum wraps around only if its noise exceeds 9 deviations.

    Arguments:
        num_users: the most that upload.
        norm: the largest L2 norm of one user's vector of integers.
        noise_variance: of all noise in a coordinate.
    """
    _validate.positive(num_users=num_users, norm=norm)
    _validate.non_negative(noise_variance=noise_variance)
    return math.ceil(2 * (num_users * norm + 9 * math.sqrt(noise_variance))) + 1


def mixing_delta(event: SplitAndMix, eps: float) -> float:
    """What imperfect mixing of one round adds to delta, rounded up: (1 + e^eps) coordinates `mixing_distance`.

    Arguments:
        event: one round.
        eps: that of the whole composition, 0 or more.

    Guarantees:
        1 where the colluding shufflers leave too few slots: then only the client's own noise remains.
    """
    _validate.non_negative(eps=eps)
    distance = mixing_distance(num_users=event.honest, slots=event.slots, modulus=event.modulus)
    log_spent = float(np.logaddexp(0.0, eps)) + math.log(event.coordinates) + math.log(max(distance, _LEAST))
    return numerics.as_probability_bound(math.exp(min(0.0, log_spent)) * _OUTWARD)


def delta(event: SplitAndMix, *, eps: float, rounds: int = 1) -> float:
    """A delta at which so many rounds are (eps, delta)-DP against the analyzer and its colluders.

    The smallest of the three routes of `eps`, and what imperfect mixing adds.
    """
    _check_rounds(rounds)
    noise_delta = delta_of(ORDERS, rounds * renyi(event, ORDERS), eps=eps) * _OUTWARD
    with contextlib.suppress(NotApplicable):
        near_all = near_gaussian_of(event).repeat(rounds)
        distance = gaussian.distance_delta(near_all.divergence, eps=eps)
        noise_delta = min(noise_delta, gaussian.delta_of(near_all.mu, eps=eps) + distance)
        noise_delta = min(noise_delta, _delta_by_ratio(near_all, eps))
    return numerics.as_probability_bound(noise_delta + rounds * mixing_delta(event, eps))


def eps(event: SplitAndMix, *, delta: float, rounds: int = 1) -> Bound:
    """The smallest eps of so many rounds at delta, with what imperfect mixing spends in each.

    Guarantees:
        Non-decreasing in rounds; equal to what `compose.bound` finds for the same rounds.
        The smallest of three routes: by the ratio of Skellam noise to a Gaussian's, by their distance, and by Skellam's
        Renyi divergence.
    """
    _check_rounds(rounds)
    bounds, refusals = [], []
    for route in (_bound_by_ratio, _bound_by_distance, _bound_by_renyi):
        try:
            bounds.append(route(event, delta, rounds))
        except NotApplicable as refusal:
            refusals.append(refusal)
    if not bounds:
        raise refusals[-1]
    return min(bounds, key=lambda bound: bound.eps)


def _theorem(event: SplitAndMix) -> Theorem:
    """`SPLIT_AND_MIX` for users that are replaced, `REMOVED` for users that are removed."""
    return SPLIT_AND_MIX if event.neighbors is Neighbors.REPLACE_ONE else REMOVED


def _bound_by_renyi(event: SplitAndMix, delta: float, rounds: int) -> Bound:
    """The eps of so many rounds at delta by Skellam's Renyi divergence, imperfect mixing paid."""
    divergence = rounds * renyi(event, ORDERS)
    value = eps_after_spending(
        lambda left: _eps_by_renyi(divergence, left), lambda eps: rounds * mixing_delta(event, eps), delta=delta
    )
    return Bound(eps=value, delta=delta, proof=_theorem(event).proof.then(RENYI))


def _bound_by_ratio(event: SplitAndMix, delta: float, rounds: int) -> Bound:
    """The eps of so many rounds at delta by the ratio of the noise to a Gaussian's, imperfect mixing paid."""
    near_all = near_gaussian_of(event).repeat(rounds)
    value = _eps_by_ratio(near_all, delta, lambda eps: rounds * mixing_delta(event, eps))
    return Bound(eps=value, delta=delta, proof=_theorem(event).proof.then(skellam_sums.SKELLAM, gaussian.ANALYTIC))


def _bound_by_distance(event: SplitAndMix, delta: float, rounds: int) -> Bound:
    """The eps of so many rounds at delta by the distance of the noise from a Gaussian's, imperfect mixing paid."""
    near_all = near_gaussian_of(event).repeat(rounds)
    value = _eps_by_distance(near_all, delta, lambda eps: rounds * mixing_delta(event, eps))
    return Bound(eps=value, delta=delta, proof=_theorem(event).proof.then(skellam_sums.SKELLAM, gaussian.ANALYTIC))


def _eps_by_distance(near_all: NearGaussian, delta: float, spent: Callable[[float], float] = lambda _: 0.0) -> float:
    """The eps at delta of a release at a distance from a Gaussian one; `spent(eps)` of delta goes elsewhere.

    An upper bound; `NotApplicable` where nothing is left of delta.
    """
    return eps_after_spending(
        lambda left: gaussian.eps_of(near_all.mu, delta=left),
        lambda eps: spent(eps) + gaussian.distance_delta(near_all.divergence, eps=eps),
        delta=delta,
    )


def _eps_by_ratio(near_all: NearGaussian, delta: float, spent: Callable[[float], float] = lambda _: 0.0) -> float:
    """The eps at delta by a Gaussian release and the ratio of the noise to it; `spent(eps)` of delta goes elsewhere.

    An upper bound; `NotApplicable` where nothing is left of delta, or nothing is known of the ratio. No `draws` means
    no difference from a Gaussian.
    """
    draws = () if near_all.draws is None else (near_all.draws,)
    return gaussian.eps_by_ratio(lambda left: gaussian.eps_of(near_all.mu, delta=left), draws, delta=delta, spent=spent)


def _delta_by_ratio(near_all: NearGaussian, eps: float) -> float:
    """The delta at eps by a Gaussian release and the ratio of the noise to it: an upper bound, as `_eps_by_ratio`."""
    draws = () if near_all.draws is None else (near_all.draws,)
    return gaussian.delta_by_ratio(lambda at: gaussian.delta_of(near_all.mu, eps=at), draws, eps=eps)


def _check_rounds(rounds: int) -> None:
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)


def _eps_by_renyi(divergence: np.ndarray, delta: float) -> float:
    return eps_of(ORDERS, divergence, delta=delta) * _OUTWARD


def calibrate(
    *,
    num_users: int,
    coordinates: int,
    clip_norm: float,
    eps: float,
    delta: float,
    rounds: int = 1,
    colluders: int = 0,
    rounding_loss: float = 5e-4,
    mixing_share: float = 1e-3,
    neighbors: Neighbors = Neighbors.REPLACE_ONE,
) -> SplitAndMix:
    """The parameters with which so many rounds meet (eps, delta): noise, scale, modulus (a power of two), shares.

    The scale makes rounding inflate norms by about `rounding_loss`, then fills the modulus. `mixing_share` of delta
    goes to imperfect mixing, in all rounds together. No slot is assumed to collude: add shares for those that may.

    Arguments:
        num_users: the enforced minimum of uploads.
        coordinates: of a user's vector.
        clip_norm: its largest L2 norm.
        eps: the target for all rounds together.
        delta: the target's, for all rounds together.
        rounds: how many there are.
        colluders: uploads of the adversary's own.
        rounding_loss: by how much rounding may inflate norms, relatively.
        mixing_share: which part of delta imperfect mixing may spend.
        neighbors: the relation of the statement.

    Guarantees:
        `split_and_mix.eps(result, delta=delta, rounds=rounds).eps` is at most eps.
    """
    _check_rounds(rounds)
    _validate.positive(eps=eps, clip_norm=clip_norm)
    _validate.in_open_interval(0, 1, delta=delta, mixing_share=mixing_share, rounding_loss=rounding_loss)

    def design_at(scale: float) -> SplitAndMix:
        """The design with the least noise at this scale, with the smallest modulus and one share."""
        norm = rounded_norm(clip_norm=clip_norm, scale=scale, coordinates=coordinates, rounding_tail=1e-3)
        goal = delta * (1 - mixing_share) * (1 - 1e-9)
        moved = norm * (2 if neighbors is Neighbors.REPLACE_ONE else 1)  # the L2 sensitivity of the sum

        def eps_of(noise: float) -> float:
            variance = (noise * norm) ** 2
            candidates = [_eps_by_renyi(rounds * _skellam_renyi(moved, coordinates, variance, ORDERS), goal)]
            for route in (_eps_by_ratio, _eps_by_distance):
                with contextlib.suppress(NotApplicable):
                    round_noise = skellam_sums.near_gaussian(
                        sensitivity=moved, coordinates=coordinates, variance=variance
                    )
                    candidates.append(route(round_noise.repeat(rounds), goal) / _CLIMB)
            return min(candidates)

        variance = (smallest_noise(eps_of, eps=eps) * norm) ** 2
        total_variance = variance * num_users / (num_users - colluders)
        needed = modulus_for(num_users=num_users, norm=norm, noise_variance=total_variance)
        return SplitAndMix(
            num_users=num_users,
            coordinates=coordinates,
            clip_norm=clip_norm,
            scale=scale,
            noise_variance=variance,
            modulus=needed,
            shares=1,
            colluders=colluders,
            neighbors=neighbors,
        )

    scale = math.sqrt(coordinates / 8 / rounding_loss) / clip_norm
    design = design_at(scale)
    modulus = 1 << (design.modulus - 1).bit_length()
    larger = scale * modulus / design.modulus  # about what fills the modulus: norms grow with the scale
    while larger > scale and (filled := design_at(larger)).modulus > modulus:
        larger *= 0.995
    design = filled if larger > scale else design
    target = delta * mixing_share / (rounds * coordinates * (1 + math.exp(eps)) * (1 + 1e-8))
    shares = shares_for(num_users=design.honest, modulus=modulus, target=target)
    return dataclasses.replace(design, modulus=modulus, shares=shares)


@releases(SplitAndMix)
class SplitAndMixRelease(SkellamRelease[SplitAndMix]):
    """A sum by mixed shares: Skellam noise, and the distance of the shares from their ideal."""

    @property
    def theorem(self) -> Theorem:
        """`SPLIT_AND_MIX` for users that are replaced, `REMOVED` for users that are removed."""
        return _theorem(self.event)

    def delta_spent(self, eps: float) -> tuple[Spent, ...]:
        """`mixing_delta`: what imperfect mixing of one round costs; it grows with the eps of the whole."""
        return (Spent(mixing_delta(self.event, eps), "imperfect mixing of shares"),)
