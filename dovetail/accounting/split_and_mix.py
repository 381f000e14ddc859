"""Split-and-mix: a sum over untrusted shufflers with the noise of a curator (Balle et al. 2020; Agarwal et al. 2021).

Vectors are clipped to `clip_norm`, scaled and rounded to integers of bounded norm (`rounded_norm`). Each client adds
its part of a Skellam noise of variance `noise_variance`, splits every coordinate into additive shares modulo `modulus`,
and each slot of shares is permuted freshly, coordinate by coordinate. Ideally only the sum is seen, at the price of
Skellam's Renyi divergence. The shuffled shares of a coordinate are within `eta` of that ideal in total variation, which
adds ``(1 + e^eps) d eta`` to delta: both neighbours are d eta away from their ideals.

``eta <= sqrt(E[q^(c-1)] - 1)/2``, c the components of the union of slots - 1 uniform permutations of the n honest
clients. Let L be the likelihood ratio of a view against uniform shares of the same sum; it is q^(n-1) times the chance
that a random re-assembly of the shares gives every client its value, so E[L^2] under the ideal is q^(n-1) times that
chance for shares as sent. Client and re-assembled client are joined by the share that they have in common: m matchings,
of which one may be contracted. A component of k clients forces k - 1 further independent equations modulo q (its last
one follows, or is violated for sure), so the chance is at most E[q^-(n-c)]; TV is at most sqrt(E[L^2] - 1)/2.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy.special import gammaln

from dovetail import _validate
from dovetail.accounting.calibrate import smallest_noise
from dovetail.statements import Bound, Neighbors, NotApplicable, Theorem

__all__ = [
    "SPLIT_AND_MIX",
    "SplitAndMix",
    "calibrate",
    "closed_form_shares",
    "delta",
    "eps",
    "error_std",
    "eta",
    "modulus_for",
    "renyi",
    "rounded_norm",
    "shares_for",
    "spent_delta",
]

SPLIT_AND_MIX = Theorem(
    key="dovetail.split-and-mix",
    where="Skellam noise (Agarwal, Kairouz, Liu 2021), conversion by Canonne, Kamath, Steinke (2020), Prop. 12, over "
    "additive shares mixed slot by slot (after Balle, Bell, Gascon, Nissim 2020; exact second moment)",
    url="https://arxiv.org/abs/2002.00817",
)

_OUTWARD = 1 + 1e-9
_BASE = 768  # sizes up to which the recursion runs; larger crowds are bounded from it
_LARGEST_RECURSION = 6000
_MOST_SHARES = 32
_ORDERS = np.unique(np.round(np.geomspace(2, 20_000, 160)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitAndMix:
    """One sum of vectors by split-and-mix, in privacy terms.

    `num_users` is the enforced minimum of uploads, of which `colluders` are the adversary's. `noise_variance` is that
    of the honest clients' noise on a coordinate of the scaled integer sum. `colluding_slots` of the `shares` slots are
    handled by shufflers that collude with the analyzer. `rounding_tail` is that of `rounded_norm`.
    """

    num_users: int
    coordinates: int
    clip_norm: float
    scale: float
    noise_variance: float
    modulus: int
    shares: int
    colluders: int = 0
    colluding_slots: int = 0
    rounding_tail: float = 1e-3

    def __post_init__(self) -> None:
        _validate.integer(num_users=self.num_users, coordinates=self.coordinates, modulus=self.modulus)
        _validate.integer(shares=self.shares, colluders=self.colluders, colluding_slots=self.colluding_slots)
        _validate.at_least(1, coordinates=self.coordinates, shares=self.shares)
        _validate.at_least(2, num_users=self.num_users, modulus=self.modulus)
        _validate.non_negative(colluders=self.colluders, colluding_slots=self.colluding_slots)
        _validate.positive(clip_norm=self.clip_norm, scale=self.scale, noise_variance=self.noise_variance)
        _validate.in_open_interval(0, 1, rounding_tail=self.rounding_tail)
        if self.honest < 2:
            raise ValueError(f"expected at least 2 honest users, got {self.honest} of num_users={self.num_users}")

    @property
    def honest(self) -> int:
        """Users that neither collude nor are fake."""
        return self.num_users - self.colluders

    @property
    def slots(self) -> int:
        """Share slots whose permutation the analyzer does not know."""
        return max(0, self.shares - self.colluding_slots)

    @property
    def neighbors(self) -> Neighbors:
        """Shuffled mechanisms are stated for replacement."""
        return Neighbors.REPLACE_ONE


def rounded_norm(*, clip_norm: float, scale: float, coordinates: int, rounding_tail: float) -> float:
    """The L2 norm that conditional stochastic rounding enforces, rounded up (Kairouz, Liu, Steinke 2021).

    Plain stochastic rounding stays below it with probability at least 1 - rounding_tail; it is repeated until it does,
    which biases the result slightly.
    """
    reach, half = scale * clip_norm, math.sqrt(coordinates) / 2
    square = reach**2 + half**2 + math.sqrt(-2 * math.log(rounding_tail)) * (reach + half)
    return min(math.sqrt(square), reach + 2 * half) * (1 + 1e-14)


def renyi(event: SplitAndMix, orders: np.ndarray) -> np.ndarray:
    """Skellam's Renyi divergence of the ideal sum, all coordinates; an order between integers costs the next integer.

    Guarantees:
        Never below the divergence summed from Skellam's probabilities.
    """
    norm = rounded_norm(
        clip_norm=event.clip_norm,
        scale=event.scale,
        coordinates=event.coordinates,
        rounding_tail=event.rounding_tail,
    )
    return _skellam(2 * norm, event.coordinates, event.noise_variance, np.asarray(orders, dtype=float))


def _skellam(l2: float, coordinates: int, variance: float, orders: np.ndarray) -> np.ndarray:
    l1 = min(math.sqrt(coordinates) * l2, l2**2)
    usable = np.isfinite(orders) & (orders > 1)
    order = np.maximum(np.ceil(np.where(usable, orders, 2.0)), 2.0)
    excess = np.minimum(((2 * order - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance))
    return np.where(usable, (order * l2**2 / (2 * variance) + excess) * (1 + 1e-13), np.inf)


def eta(*, num_users: int, slots: int, modulus: int) -> float:
    """Distance of one coordinate's shuffled shares to the ideal, rounded up; 1 where nothing is hidden.

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
    return min(1.0, math.exp(min(1.0, log_excess / 2)) / 2 * (1 + 1e-5))


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
        at_base = _sum(_terms(base + 1, logs, r)[1:], math.log(8 * q) - r * math.log(base + 1))
        if at_base > 0:
            if n > _LARGEST_RECURSION:
                raise NotApplicable(f"not certified: too few share slots ({r + 2}) for modulus={q}")
            logs, base = _log_moments(n - 1, r, q), n - 1
    i = np.arange(1, base + 1)
    with np.errstate(divide="ignore"):
        terms = _terms(n, logs, r)[1:] + np.log1p(-i / n * (1 + 1 / q))
    if n == base + 1:
        return _sum(terms)
    log_pairs = math.log(n) + math.log(n - 1) - math.log(2)
    rest = np.logaddexp(-(r + 1) * math.log(n), -(r - 1) * log_pairs - math.log(n))
    return _sum(terms, math.log(2 * q) + float(rest))


@functools.lru_cache(maxsize=32)
def _log_moments(largest: int, r: int, q: int) -> np.ndarray:
    """log h_n = log E[q^c] for n = 0..largest nodes and r + 1 permutations.

    Tuples of r + 1 permutations are sets of connected ones, so sum_n h_n f_n x^n = F(x)^q with F = sum_n f_n x^n and
    f_n = (n!)^r. Comparing coefficients of G'F = q F'G: n h_n = sum_j ((q+1) j - n) C(n,j)^-r h_(n-j), j = 1..n. No
    term is negative for q >= n - 1, so rounding errors stay relative (below 1e-6 in all; `eta` adds 1e-5).
    """
    logs = np.zeros(largest + 1)
    log_factorials = gammaln(np.arange(largest + 2) + 1.0)
    for n in range(1, largest + 1):
        i = np.arange(n)
        log_binomials = log_factorials[n] - log_factorials[i] - log_factorials[n - i]
        with np.errstate(divide="ignore"):
            weights = np.log((q + 1.0) * (n - i) - n)
        logs[n] = _sum(weights - r * log_binomials + logs[:n]) - math.log(n)
    logs.flags.writeable = False
    return logs


def _terms(n: int, logs: np.ndarray, r: int) -> np.ndarray:
    i = np.arange(len(logs))
    return logs - r * (gammaln(n + 1) - gammaln(i + 1) - gammaln(n - i + 1))


def _sum(logs: np.ndarray, more: float = -math.inf) -> float:
    peak = max(float(logs.max()), more)
    return peak + math.log(float(np.exp(logs - peak).sum()) + math.exp(more - peak))


def closed_form_shares(*, num_users: int, modulus: int, bits: float) -> int:
    """Shares for a distance of 2^-bits by the closed form of Balle et al.: a comparison, nothing is certified by it."""
    _validate.at_least(3, num_users=num_users)
    return 2 + math.ceil((2 * bits + math.log2(modulus)) / math.log2(num_users / math.e))


def shares_for(*, num_users: int, modulus: int, target: float) -> int:
    """The fewest share slots with `eta` at most `target`, among so many honest users.

    Guarantees:
        eta at the result is at most target, at one slot less it is not.
        Not certified (`NotApplicable`) where more than 32 slots would be needed: too few users.
    """
    _validate.in_open_interval(0, 1, target=target)
    fewest = 2 + math.floor((math.log(modulus) - 2 * math.log(2 * target)) / math.log(num_users))
    for slots in range(max(3, fewest - 1), _MOST_SHARES + 1):
        try:
            if eta(num_users=num_users, slots=slots, modulus=modulus) <= target:
                return slots
        except NotApplicable:
            if modulus < num_users:
                raise
    raise NotApplicable(
        f"not certified: {num_users} honest users need more than {_MOST_SHARES} shares for a distance of {target:.3g}"
    )


def spent_delta(event: SplitAndMix, eps: float) -> float:
    """What imperfect mixing adds to delta at the eps of the whole composition, for one round: (1 + e^eps) d eta.

    Guarantees:
        1 where the colluding shufflers leave too few slots: then only the client's own noise remains.
    """
    _validate.non_negative(eps=eps)
    distance = eta(num_users=event.honest, slots=event.slots, modulus=event.modulus)
    log_spent = np.logaddexp(0.0, eps) + math.log(event.coordinates) + math.log(distance)
    return min(1.0, math.exp(min(0.0, float(log_spent))) * _OUTWARD)


def delta(event: SplitAndMix, *, eps: float) -> float:
    """A delta at which one round is (eps, delta)-DP against the analyzer and its colluders."""
    noise = _log_delta(renyi(event, _ORDERS), eps)
    return min(1.0, math.exp(min(0.0, noise)) * _OUTWARD + spent_delta(event, eps))


def eps(event: SplitAndMix, *, delta: float) -> Bound:
    """The smallest eps of one round at delta, with what imperfect mixing spends."""
    _validate.in_open_interval(0, 1, delta=delta)
    divergence = renyi(event, _ORDERS)
    value = 0.0
    for _ in range(60):
        left = delta * (1 - 1e-10) - spent_delta(event, value)
        if left <= 0:
            raise NotApplicable(
                f"not certified: mixing {event.slots} shares of {event.honest} honest users costs more than {delta=}"
            )
        new = _eps(divergence, left)
        if new <= value:
            return Bound(eps=value, delta=delta, theorem=SPLIT_AND_MIX)
        value = new * (1 + 1e-12)
    raise NotApplicable(f"not certified: no eps found at delta={delta}")


def _eps(divergence: np.ndarray, delta: float) -> float:
    a = _ORDERS
    converted = divergence + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    return max(0.0, float(converted.min())) * _OUTWARD


def _log_delta(divergence: np.ndarray, eps: float) -> float:
    a = _ORDERS
    return float(((a - 1) * (divergence - eps + np.log1p(-1 / a)) - np.log(a)).min())


def modulus_for(*, num_users: int, norm: float, noise_variance: float) -> int:
    """The smallest modulus in which the sum of at most so many users does not wrap around, but for 9 deviations."""
    return math.ceil(2 * (num_users * norm + 9 * math.sqrt(noise_variance))) + 1


def error_std(event: SplitAndMix) -> float:
    """Standard deviation of a coordinate of the estimated sum: noise and, at the most, rounding; in unscaled units."""
    return math.sqrt(event.noise_variance + event.num_users / 4) / event.scale


def calibrate(
    *,
    num_users: int,
    coordinates: int,
    clip_norm: float,
    eps: float,
    delta: float,
    colluders: int = 0,
    rounding_loss: float = 5e-4,
    mixing_share: float = 1e-3,
) -> SplitAndMix:
    """The parameters that meet (eps, delta): noise, scale, modulus (a power of two), shares.

    The scale makes rounding inflate norms by about `rounding_loss`, then fills the modulus. `mixing_share` of delta
    goes to imperfect mixing. No slot is assumed to collude: add shares for those that may.

    Guarantees:
        `split_and_mix.eps(result, delta=delta).eps` is at most eps.
    """
    _validate.positive(eps=eps, clip_norm=clip_norm)
    _validate.in_open_interval(0, 1, delta=delta, mixing_share=mixing_share, rounding_loss=rounding_loss)

    def at(scale: float) -> SplitAndMix:
        norm = rounded_norm(clip_norm=clip_norm, scale=scale, coordinates=coordinates, rounding_tail=1e-3)
        goal = delta * (1 - mixing_share) * (1 - 1e-9)

        def eps_of(noise: float) -> float:
            return _eps(_skellam(2 * norm, coordinates, (noise * norm) ** 2, _ORDERS), goal)

        variance = (smallest_noise(eps_of, eps=eps) * norm) ** 2
        everyone = variance * num_users / (num_users - colluders)
        needed = modulus_for(num_users=num_users, norm=norm, noise_variance=everyone)
        return SplitAndMix(
            num_users=num_users,
            coordinates=coordinates,
            clip_norm=clip_norm,
            scale=scale,
            noise_variance=variance,
            modulus=needed,
            shares=1,
            colluders=colluders,
        )

    scale = math.sqrt(coordinates / 8 / rounding_loss) / clip_norm
    modulus = 1 << (at(scale).modulus - 1).bit_length()
    while at(scale * 1.01).modulus <= modulus:
        scale *= 1.01
    found = at(scale)
    target = delta * mixing_share / (coordinates * (1 + math.exp(eps)) * (1 + 1e-8))
    shares = shares_for(num_users=found.honest, modulus=modulus, target=target)
    return dataclasses.replace(found, modulus=modulus, shares=shares)
