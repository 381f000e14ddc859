"""Several users replaced at once in noisy sums over samples: a subject with data at more than one of them.

Of the subject's u users K are in a sum, and only the law of K matters. Poisson samples (K ~ Bin(u, prob)) have the pair
``sum_k w_k N(k C, s^2)`` against ``sum_k w_k N(-k C, s^2)`` (docs/proofs/poisson-replacement.md). On samples of fixed
size (K hypergeometric) whoever is not drawn leaves a place to somebody else, so that neighbours may differ by 2 k C
from each other, and both from a round without them; for one user it is the spliced profile (docs/proofs/fixed-size.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.loss_distributions import Loss
from dovetail.accounting.numerics import ULP
from dovetail.accounting.pairs.symmetric import Nodes, SymmetricPair, sampled_pair
from dovetail.accounting.releases._base import Release, Sampling, Scale, releases
from dovetail.events import Everyone, FixedSize, Gaussian, Poisson, ReplacedUsers
from dovetail.statements import Neighbors, NotApplicable, Theorem

__all__ = [
    "REPLACED_USERS",
    "NumberDrawn",
    "fixed_size_delta",
    "law_of_binomial_draws",
    "law_of_hypergeometric_draws",
    "poisson_delta",
]

REPLACED_USERS = Theorem(
    key="dovetail.replaced-users",
    where="mixtures over the number of a subject's users in a sample (docs/proofs/subjects.md, section 7)",
)

_NODES = Nodes(0.05, 5.5, 0.1, 9.0, 1.04)  # where the curve of a round is asked
_RAREST = 1e-40  # a number of users drawn that is rarer is charged
_MOST_DRAWN = 2000  # users of one subject that are told apart
_LARGEST_SHIFT = 1000.0  # in standard deviations: beyond, eps is in the hundreds of thousands
_SEEN = 1e-15  # losses that are rarer do not widen the grid
_FARTHEST = 1e6  # the largest |a| at which a maximum is looked for
_CLOSE = 1e-12  # width of its enclosure
_UP = 1 + 1e-15  # rounds up a product or quotient of a few numbers


class NumberDrawn(NamedTuple):
    """The law of how many of a subject's users are in a sample."""

    weights: np.ndarray  # the probabilities of 0, 1, ... users
    error: float  # by how much each of them may be off, relative to itself
    rare: float  # the probability of more users than that, rounded up


def law_of_binomial_draws(users: int, prob: float) -> NumberDrawn:
    """The law of how many of so many users a Poisson sample has: Bin(users, prob), 0 < prob < 1."""
    _validate.in_open_interval(0, 1, prob=prob)
    error = float(numerics.binomial_outward_factor(users)) - 1
    return _drop_rare(numerics.binomial_pmf(np.arange(users + 1), users, prob), error)


def law_of_hypergeometric_draws(users: int, sampling: FixedSize) -> NumberDrawn:
    """The law of how many of so many users are in a sample of fixed size: hypergeometric.

    Guarantees:
        Right to `error`, by ratios of neighbouring probabilities from the end where none, or all, are drawn.
        Not known (`NotApplicable`) where some must be drawn and some must not.
    """
    size, population = sampling.size, sampling.population
    _validate.in_interval(1, population, users=users)
    others = population - size
    if users > others and users > size:
        raise NotApplicable(f"{users} users are more than are drawn, and more than are not, of {population}")
    marked, unmarked = (size, others) if users <= others else (others, size)  # else: how many are *not* drawn
    index = np.arange(users, dtype=float)
    count = np.arange(users)
    log_none = float(np.log1p(-marked / (population - index)).sum())
    with np.errstate(divide="ignore"):
        ratios = np.log((users - count) / (count + 1))
        ratios += np.log(np.maximum(marked - count, 0) / (unmarked - users + count + 1))
    law = np.exp(log_none + np.concatenate([[0.0], np.cumsum(ratios)]))
    error = 16 * ULP * (users + 16) * (1 + abs(log_none) + math.log(population))
    return _drop_rare(law if users <= others else law[::-1], error)


def _drop_rare(law: np.ndarray, error: float) -> NumberDrawn:
    """The law up to the largest number of users whose upper tail is above `_RAREST`; the rest is `rare`."""
    above = np.cumsum(law[::-1])[::-1]
    last = int(np.count_nonzero(above > _RAREST))
    if last > _MOST_DRAWN:
        raise NotApplicable(f"{last} users of one subject may be drawn at once, more than {_MOST_DRAWN}")
    rare = float(above[last]) * (1 + 2 * error) if last < len(law) else 0.0
    return NumberDrawn(law[:last], error, rare + (1e-300 if last < len(law) else 0.0))


def poisson_delta(count: NumberDrawn, shift: float, eps: float) -> float:
    """delta at eps of sum_k w_k N(k shift, 1) against sum_k w_k N(-k shift, 1), rounded up; both directions are equal.

    It is the largest sum_k w_k (Phi(k shift - a) - e^eps Phi(-k shift - a)) of all a, which rises in a, then falls.

    Arguments:
        count: the law of how many of the subject's users are in the sum.
        shift: clip norm over standard deviation.
        eps: at which delta is asked for, 0 or more.
    """
    _validate.non_negative(eps=eps)
    shifts = shift * np.arange(len(count.weights))
    log_weights = _log_weights(count.weights) - shifts**2 / 2

    def rises(a: float) -> bool:
        return eps + np.logaddexp.reduce(log_weights - a * shifts) > np.logaddexp.reduce(log_weights + a * shifts)

    return _largest_delta(count, eps, rises, lambda low, high: (shifts - low, -shifts - high))


def fixed_size_delta(count: NumberDrawn, shift: float, eps: float) -> float:
    """delta at eps where those of the users that are not drawn leave their places to others, rounded up.

    `shift` is that of one user who is replaced. It is the largest sum_k w_k (Phi(u_k) - e^eps Phi(u_k - k shift)) of
    all a, u_k the number in [-a, k shift - a] that is closest to k shift / 2 - eps / (k shift); it rises in a, then
    falls.

    Arguments:
        count: the law of how many of the subject's users are in the sum.
        shift: twice the clip norm over the standard deviation.
        eps: at which delta is asked for, 0 or more.
    """
    _validate.non_negative(eps=eps)
    shifts = shift * np.arange(len(count.weights))
    weights = count.weights[1:]
    apart = shifts[1:]
    free = apart / 2 - eps / apart

    def rises(a: float) -> bool:
        replaced = np.minimum(0.0, -np.expm1(np.minimum(a * apart - apart**2 / 2 - eps, 700.0)))
        joining = np.maximum(0.0, np.expm1(np.minimum(eps - a * apart - apart**2 / 2, 700.0)))
        slope = -math.expm1(-eps) * count.weights[0] + weights @ (replaced + joining * math.exp(-eps))
        return bool(slope > 0)

    def arguments_at(low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
        ends = np.clip(free, -high, apart - low)  # between those of all a from low to high
        slack = high - low
        return np.append(-low, ends + slack), np.append(-high, ends - apart - slack)

    return _largest_delta(count, eps, rises, arguments_at)


def _largest_delta(
    count: NumberDrawn,
    eps: float,
    rises: Callable[[float], bool],
    arguments_at: Callable[[float, float], tuple[np.ndarray, np.ndarray]],
) -> float:
    """The largest sum_k w_k (Phi(x_k) - e^eps Phi(y_k)) over all a, rounded up.

    Arguments:
        count: the weights w_k.
        eps: 0 or more.
        rises: whether the sum rises at a; once it falls it falls from there on.
        arguments_at: (x, y) that hold for every a from low to high, x rounded up and y down; the x_0 and y_0 of no user
            are -low and -high.
    """
    weights, error, rare = count
    low, high = _enclose_maximum(rises)
    first, second = (np.asarray(points) for points in arguments_at(low, high))
    scale = math.exp(min(eps, 700.0))
    upper, lower = ndtr(first), scale * ndtr(second)
    gap, size = upper - lower, upper + lower
    between = float(upper[0] - ndtr(second[0]))
    gap[0] = between - math.expm1(min(eps, 700.0)) * float(ndtr(second[0]))
    size[0] = between + math.expm1(min(eps, 700.0)) * float(ndtr(second[0])) + ULP * float(upper[0])
    rounding = (64 * ULP + 2 * error) * float(weights @ size)
    return numerics.as_probability_bound(max(0.0, float(weights @ gap)) + rounding + rare)


def _enclose_maximum(rises: Callable[[float], bool]) -> tuple[float, float]:
    """(low, high), close to each other, between which a function that rises, then falls, is largest."""
    low, high = -1.0, 1.0
    while not rises(low) and low > -_FARTHEST:
        low *= 2
    while rises(high) and high < _FARTHEST:
        high *= 2
    while high - low > _CLOSE * max(1.0, abs(high)):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) else (low, middle)
    slack = _CLOSE * max(1.0, abs(high))
    return low - slack, high + slack


def _log_weights(weights: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(weights)


@functools.lru_cache(maxsize=64)
def _dominating_pair(event: ReplacedUsers, sampling: Poisson | FixedSize) -> SymmetricPair:
    """The dominating pair of one round on such a sample, in both directions; kept."""
    shift = event.clip_norm / event.std * _UP
    if isinstance(sampling, Poisson):
        count = law_of_binomial_draws(event.users, sampling.prob)
        delta = poisson_delta
    else:
        count = law_of_hypergeometric_draws(event.users, sampling)
        delta = fixed_size_delta
        shift = 2 * shift
    _require_small_shift(count, shift)
    delta_at = functools.partial(delta, count, shift)
    about_std = math.sqrt(2 * math.pi) * delta_at(0.0)  # of the loss, as if it were Gaussian
    return sampled_pair(delta_at, prob=1.0, eps_pure=math.inf, std=about_std, nodes=_NODES)


def _require_small_shift(count: NumberDrawn, shift: float) -> None:
    """Refuse a sum that all users drawn could shift by more than `_LARGEST_SHIFT` standard deviations."""
    if not (len(count.weights) - 1) * shift <= _LARGEST_SHIFT:
        raise NotApplicable(
            f"users of {shift:.3g} standard deviations each may shift the sum by more than the {_LARGEST_SHIFT:g} "
            "that are resolved: the noise is too small"
        )


@releases(ReplacedUsers)
class ReplacedUsersRelease(Release[ReplacedUsers]):
    """A noisy sum over a sample of the users, in which several of them are replaced."""

    theorem = REPLACED_USERS
    concerns_subjects = True

    def losses(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The loss of one round, rounded up, on Poisson samples and samples of fixed size; with everyone there is none.

        With everyone it is a Gaussian release: see `simplify`.
        """
        if not isinstance(sampling, Poisson | FixedSize):
            return super().losses(sampling, interval)
        return (_dominating_pair(self.event, sampling).loss(interval=interval),)

    def loss_scale(self, sampling: Sampling) -> Scale:
        """Std and width of the loss of its pair, to choose a grid by; losses rarer than `_SEEN` do not count."""
        if isinstance(sampling, Everyone):
            raise NotApplicable("users that are all in the sum are a Gaussian release")
        pair = _dominating_pair(self.event, sampling)
        above = np.cumsum(pair.mass[::-1])[::-1]
        points = pair.points[(above > _SEEN) & (pair.points < 1)]
        return Scale(std=pair.std_loss, width=max(2 * math.atanh(float(points[-1])), 1e-15), sums=1)

    def simplify(self, sampling: Sampling) -> Gaussian | ReplacedUsers:
        """The same as a Gaussian release where everyone takes part: all users are in the sum, and their shifts add up.

        The sensitivity is rounded up.
        """
        if sampling != Everyone():
            return self.event
        sensitivity = 2 * self.event.clip_norm * self.event.users * _UP
        return Gaussian(std=self.event.std, sensitivity=sensitivity, neighbors=Neighbors.REPLACE_ONE)

    def full_round_covers_known_sample(self, sampling: Sampling) -> bool:
        """True: once it is known who was drawn, at most `event.users` of them differ, as in a round with everyone."""
        return True

    def check_disjoint_batches(self) -> None:
        """Always refuses: the subject's users may be in several batches of an epoch."""
        raise NotApplicable("a subject may have data at users of several disjoint batches of an epoch")
