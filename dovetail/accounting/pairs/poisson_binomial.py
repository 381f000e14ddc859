"""One biased coin among fair ones, whose number is a sum of unequal coins: the pair of personalised clones.

The victim's coin shows heads with probability ``E/(E+1)``, E = e^eps_local, and hides among C fair coins,
C ~ PoissonBinomial(probs). Where the outcomes are cut into regions of fixed probability, C has a law of its own in each
(`Hiding`). More clones never hurt, so every approximation takes fewer: upper tails of C move down, lower tails are
charged in full.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy.special import gammaln

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.amplification.clones import CloneCounts, expected_delta

__all__ = ["Hiding", "PoissonBinomialPair", "clone_counts"]

_TINY = 1e-290  # masses below this are charged, not carried
_UNDERFLOW = 1e-300  # more than a weight that may have underflowed
_DEPTH = 300.0  # nats of tail mass that Renyi sums resolve
_NODES = 4096  # privacy losses are rounded to this many nodes where there are many more

Hiding = tuple[tuple[float, np.ndarray], ...]  # (probability of a region of outcomes, clone probabilities in it)


@dataclasses.dataclass(frozen=True, eq=False)
class PoissonBinomialPair:
    """A coin of bias eps_local that hides among clones; delta and divergences are equal in both directions."""

    hiding: Hiding
    eps_local: float

    def __post_init__(self) -> None:
        _validate.positive(eps_local=self.eps_local)

    @functools.cached_property
    def laws(self) -> list[tuple[float, CloneCounts]]:
        """The number of clones in each region."""
        return [(mass, clone_counts(probs)) for mass, probs in self.hiding]

    @functools.cached_property
    def pair(self) -> tuple[np.ndarray, np.ndarray, float]:
        """A dominating pair as privacy losses log(P/Q), their log-masses under Q, and the mass left out.

        Losses share nodes when there are many: each is split between its two neighbours so that neither P nor Q gains
        or loses mass, a mean-preserving spread of P/Q, which can only raise a divergence.
        """
        losses, weights, tail = [], [], 0.0
        for region, law in self.laws:
            counts, masses, lost = _coarser(law)
            tail += region * lost
            for c, mass in zip(counts, region * masses, strict=True):
                loss, chance, missed = _step(int(c), self.eps_local, depth=_DEPTH + math.log(mass))
                losses.append(loss)
                weights.append(mass * chance)
                tail += mass * missed
        loss, weight = np.concatenate(losses), np.concatenate(weights)
        if len(loss) > 4 * _NODES:
            loss, weight = _onto_nodes(loss, weight)
        keep = weight > _UNDERFLOW
        return loss[keep], np.log(weight[keep]), tail + _UNDERFLOW * int(np.count_nonzero(~keep))

    def delta(self, eps: float) -> float:
        """delta at eps, rounded up."""
        _validate.non_negative(eps=eps)
        terms = (mass * expected_delta(_core(law, 1e-60), eps=eps, eps_local=self.eps_local) for mass, law in self.laws)
        return numerics.probability(math.fsum(terms) * (1 + 1e-14))

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Renyi divergence at each order, rounded up; infinite at orders that are not finite and > 1.

        log(1 + E_Q[r^a - 1 - a (r - 1)]) / (a - 1), r = P/Q: no term is negative, so nothing cancels in the sum.
        """
        loss, log_q, tail = self.pair
        result = np.full(len(orders), np.inf)
        for index, order in enumerate(np.asarray(orders, dtype=float)):
            if math.isfinite(order) and order > 1:
                log_terms = log_q + _log_terms(loss, order)
                peak = float(log_terms.max()) if len(log_terms) else -math.inf
                log_sum = peak + math.log(np.exp(log_terms - peak).sum()) if math.isfinite(peak) else peak
                log_tail = math.log(max(tail, _TINY)) + max(order * self.eps_local, math.log(order))
                result[index] = np.logaddexp(0.0, np.logaddexp(log_sum, log_tail) + 1e-9) / (order - 1)
        return result


def clone_counts(probs: np.ndarray) -> CloneCounts:
    """C ~ PoissonBinomial(probs), by direct convolution of positive numbers: no transform, no cancellation.

    Guarantees:
        With the mass below put at no clones, the law is stochastically at most the exact one.
    """
    probs = np.asarray(probs, dtype=float)
    _validate.finite_array(probs=probs)
    if ((probs < 0) | (probs > 1)).any():
        raise ValueError(f"expected probabilities, got values from {probs.min()} to {probs.max()}")
    rows = np.stack([1 - probs, probs], axis=1) if len(probs) else np.ones((1, 1))
    while len(rows) > 1 and rows.shape[1] <= 64:
        if len(rows) % 2:
            rows = np.concatenate([rows, np.eye(1, rows.shape[1])])
        a, b = rows[::2], rows[1::2]
        rows = np.zeros((len(a), 2 * a.shape[1] - 1))
        for j in range(a.shape[1]):
            rows[:, j : j + a.shape[1]] += a[:, j : j + 1] * b
    parts = [_trim(row, 0, 0.0, _TINY) for row in rows]
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [_trim(np.convolve(a, b), i + j, lost + more, _TINY) for (a, i, lost), (b, j, more) in pairs] + odd
    weights, first, below = parts[0]
    outward = 1 + 1e-15 * (len(probs) + 64)
    return CloneCounts(counts=first + np.arange(len(weights)), weights=weights * outward, below=below, above=0.0)


def _trim(masses: np.ndarray, first: int, lost: float, least: float) -> tuple[np.ndarray, int, float]:
    """Drop negligible ends: below, the mass is charged; above, it moves down to the last count kept."""
    keep = np.flatnonzero(masses > least)
    i, j = int(keep[0]), int(keep[-1]) + 1
    kept = masses[i:j].copy()
    kept[-1] += masses[j:].sum()
    return kept, first + i, lost + float(masses[:i].sum()) + len(masses) * _TINY


def _core(law: CloneCounts, least: float) -> CloneCounts:
    """The law without ends whose counts weigh less than this each."""
    weights, first, below = _trim(law.weights, int(law.counts[0]), law.below, least)
    return CloneCounts(counts=first + np.arange(len(weights)), weights=weights, below=below, above=0.0)


def _log_terms(loss: np.ndarray, order: float) -> np.ndarray:
    """log(r^a - 1 - a (r - 1)) at r = e^loss: by its series near 0, shifted where it would overflow."""
    a, x = order, np.clip(order * loss, -np.inf, 30.0)
    near = np.abs(x) < 1e-2
    y = np.where(near, loss, 0.0)
    higher = 1 + (a + 1) / 3 * y + (a * a + a + 1) / 12 * y * y + (a**3 + a * a + a + 1) / 60 * y**3
    series = (a - 1) * a / 2 * y * y * higher
    far = order * loss > 30.0
    here, beyond = np.where(far, 0.0, loss), np.where(far, loss, 1.0)
    plain = np.where(near, series, np.expm1(x) - a * np.expm1(here))
    rest = a * np.exp((1 - a) * beyond) + (1 - a) * np.exp(-a * beyond)  # (1 + a (r - 1)) / r^a
    with np.errstate(divide="ignore", invalid="ignore"):
        shifted = order * beyond + np.where(rest < 1, np.log1p(-rest), 0.0)
        found = np.where(far, shifted, np.log(np.maximum(plain, 0.0)))
    return np.where(np.isnan(found), np.inf, found)


def _step(c: int, eps_local: float, *, depth: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Losses and probabilities under Q of a ones among c + 1 coins, but for ends of mass e^-depth (Hoeffding)."""
    reach = math.sqrt(max(c, 1) / 2 * max(depth, 1.0))
    middle = (c + 1) / 2
    a = np.arange(max(0, math.floor(middle - reach - 1)), min(c + 1, math.ceil(middle + reach + 1)) + 1)
    missed = 2 * math.exp(-2 * reach**2 / max(c, 1)) if len(a) < c + 2 else 0.0
    ones, zeros, small = a / (c + 1), (c + 1 - a) / (c + 1), math.exp(-eps_local)
    likely = small * ones + zeros
    with np.errstate(divide="ignore", over="ignore"):
        loss = np.log1p(-math.expm1(-eps_local) * (ones - zeros) / likely)
    loss = np.select([zeros == 0, ones == 0], [eps_local, -eps_local], loss)
    log_binomial = -gammaln(a + 1) - gammaln(c + 2 - a)
    chance = np.exp(log_binomial - log_binomial.max()) * likely
    return loss, chance / chance.sum(), missed


def _onto_nodes(loss: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    nodes, width = np.linspace(loss.min(), loss.max(), _NODES, retstep=True)
    below = np.clip(((loss - nodes[0]) / width).astype(int), 0, _NODES - 2)
    upper = np.clip(np.expm1(loss - nodes[below]) / math.expm1(width), 0.0, 1.0) * weight
    return nodes, np.bincount(below, weight - upper, _NODES) + np.bincount(below + 1, upper, _NODES)


def _coarser(law: CloneCounts) -> tuple[np.ndarray, np.ndarray, float]:
    """Counts rounded down, to an eighth of their deviation in the bulk and a whole one beyond; never up."""
    law = _core(law, math.exp(-_DEPTH))
    counts, masses = law.counts, law.weights
    mean = float(counts @ masses) / masses.sum()
    deviation = math.sqrt(float((counts - mean) ** 2 @ masses))
    if deviation < 16:
        return counts, masses, law.below
    fine, coarse = int(deviation / 8), int(deviation)
    start = np.where(abs(counts - mean) < 8 * deviation, counts // fine * fine, counts // coarse * coarse)
    values, where = np.unique(np.maximum(start, counts[0]), return_inverse=True)
    return values, np.bincount(where, masses), law.below
