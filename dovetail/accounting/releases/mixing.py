"""How far shuffled additive shares are from showing only their sum (after Balle, Bell, Gascon, Nissim 2020).

``eta <= sqrt(E[q^(c-1)] - 1)/2``, c the components of the union of slots - 1 uniform permutations of the n honest
clients. Let L be the likelihood ratio of a view against uniform shares of the same sum; it is q^(n-1) times the chance
that a random re-assembly of the shares gives every client its value, so E[L^2] under the ideal is q^(n-1) times that
chance for shares as sent. Client and re-assembled client are joined by the share that they have in common: m matchings,
of which one may be contracted. A component of k clients forces k - 1 further independent equations modulo q (its last
one follows, or is violated for sure), so the chance is at most E[q^-(n-c)]; TV is at most sqrt(E[L^2] - 1)/2.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy.special import gammaln

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.statements import NotApplicable

__all__ = ["eta", "modulus_for", "rounded_norm", "shares_for"]

_BASE = 768  # sizes up to which the recursion runs; larger crowds are bounded from it
_LARGEST_RECURSION = 6000
_MOST_SHARES = 32


def rounded_norm(*, clip_norm: float, scale: float, coordinates: int, rounding_tail: float) -> float:
    """The L2 norm that conditional stochastic rounding enforces, rounded up (Kairouz, Liu, Steinke 2021).

    Plain stochastic rounding stays below it with probability at least 1 - rounding_tail; it is repeated until it does,
    which biases the result slightly.
    """
    _validate.positive(clip_norm=clip_norm, scale=scale, coordinates=coordinates)
    _validate.in_open_interval(0, 1, rounding_tail=rounding_tail)
    reach, half = scale * clip_norm, math.sqrt(coordinates) / 2
    square = reach**2 + half**2 + math.sqrt(-2 * math.log(rounding_tail)) * (reach + half)
    return min(math.sqrt(square), reach + 2 * half) * (1 + 1e-14)


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
    return numerics.probability(math.exp(min(1.0, log_excess / 2)) / 2 * (1 + 1e-5))


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


def modulus_for(*, num_users: int, norm: float, noise_variance: float) -> int:
    """The smallest modulus in which the sum of at most so many users does not wrap around, but for 9 deviations."""
    _validate.positive(num_users=num_users, norm=norm)
    _validate.non_negative(noise_variance=noise_variance)
    return math.ceil(2 * (num_users * norm + 9 * math.sqrt(noise_variance))) + 1
