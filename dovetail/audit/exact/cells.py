"""Exact laws of two kinds: of counts, and of a local randomizer's reports in finitely many cells.

*Counts*: numbers of ones among independent bits, and numbers of messages in two cells. Convolutions of binomials are
sums of positive numbers, which keep their relative precision down to far tails. What lies beyond a window of twelve
standard deviations is cut off, and goes into the attack's `slack`.

*Cells*: randomized response has its levels. Real-valued reports are cut into intervals, which the adversary may do to
what it sees. Inputs and reports are positions: 0 is the low end of the interval of inputs, 1 the high end; reports may
lie outside of it. `score_cells` turns cells into integers to be added up over messages: where all others hold the same
input, the likelihood ratio of a shuffled slot is mean f_0/g over mean f_1/g, with g the density of the others' reports,
and for many messages its logarithm is linear in the sum of (f_1 - f_0)/g.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy.special import gammaln
from scipy.stats import binom

from dovetail import _validate
from dovetail.audit.bounds import ExactAttack
from dovetail.events import Report
from dovetail.statements import NotApplicable

__all__ = [
    "ULP",
    "Binomial",
    "Cells",
    "attack_counts",
    "attack_two_counts",
    "binomial_law",
    "cells_of_randomizer",
    "cells_of_report",
    "clip_laplace_cells",
    "integer_scores",
    "law_of_score",
    "log_binomial_pmf",
    "rounding_error",
    "score_cells",
]

ULP = float(np.finfo(np.longdouble).eps)  # the relative rounding error of extended precision
_WIDE = 12.0  # standard deviations to either side
_UNDERFLOW = 1e-290  # below, the logarithm of a probability is computed by gamma functions
_NEAR_ONE = 1e-4
_MOST_PRODUCTS = 2e9  # of a convolution
_MOST_PAIRS = 2**22  # of two counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binomial:
    """The number of ones among `trials` independent bits, each of which is one with probability `prob`."""

    trials: int
    prob: float


def attack_counts(
    attack: str, first: Sequence[Binomial], second: Sequence[Binomial], *, slack: float = 0.0
) -> ExactAttack:
    """The attack by the number of ones; exact up to rounding, but for far tails, which go into the slack.

    Arguments:
        first: in the first world, the parts whose ones are counted together; `second` likewise.
        slack: more than the error of any probability that the caller knows of.
    """
    laws = [_law_of_sum(parts) for parts in (first, second)]
    low = min(start for start, _, _ in laws)
    high = max(start + len(masses) for start, masses, _ in laws)
    logs = []
    for start, masses, _ in laws:
        log = np.full(high - low, -np.inf)
        with np.errstate(divide="ignore"):
            log[start - low : start - low + len(masses)] = np.log(masses)
        logs.append(log)
    cut = max(lost for _, _, lost in laws)
    return ExactAttack(attack=attack, log_first=logs[0], log_second=logs[1], slack=slack + cut)


def _law_of_sum(parts: Sequence[Binomial]) -> tuple[int, np.ndarray, float]:
    """The law of the sum of independent binomials.

    Returns: the first value; the probabilities from there on; and more than what was cut off or lost in rounding.
    """
    start = 0
    masses = np.ones(1)
    lost = 0.0
    for part in parts:
        if not part.trials:
            continue
        low, here = binomial_law(part.trials, part.prob)
        high = low + len(here) - 1
        here = here.astype(np.float64)
        if len(here) * len(masses) > _MOST_PRODUCTS:
            raise NotApplicable(f"too many bits to count: {part.trials} beside {len(masses)} values")
        start, masses = start + low, np.convolve(masses, here)
        lost += float(binom.cdf(low - 1, part.trials, part.prob) + binom.sf(high, part.trials, part.prob)) * 1.01
        lost += 1e-300 * (len(here) + 1)  # probabilities that underflowed
        if part.prob > 1 - _NEAR_ONE:  # what is missing to 1 was rounded, perhaps to nothing
            lost += part.trials * 2.0**-52
    return start, masses, lost


def _binomial_range(trials: int, prob: float) -> tuple[int, int]:
    """The smallest and the largest value of a binomial that matter: mean and twelve standard deviations, and 64 more.

    All values, where they are few.
    """
    if trials <= 256:
        return 0, trials
    mean, std = trials * prob, math.sqrt(trials * prob * (1 - prob))
    half_width = _WIDE * std + 64
    return max(0, math.floor(mean - half_width)), min(trials, math.ceil(mean + half_width))


def binomial_law(trials: int, prob: float | np.longdouble) -> tuple[int, np.ndarray]:
    """A binomial law in extended precision: the first of the values that matter, and the probabilities from there on.

    From the largest on they follow from each other by ratios, and they are scaled to add up to 1: tails below 1e-30 are
    cut off. The error of all together is some roundings for each standard deviation.
    """
    low, high = _binomial_range(trials, float(prob))
    odds = np.longdouble(prob) / (1 - np.longdouble(prob)) if prob < 1 else np.longdouble(np.inf)
    if not np.isfinite(odds) or high == low:
        return high, np.ones(1, np.longdouble)
    values = np.arange(low, high, dtype=np.longdouble)
    with np.errstate(divide="ignore"):  # the smallest odds vanish beside large values
        rises = np.log((trials - values) / (values + 1) * odds)
    mode = int(np.count_nonzero(rises > 0))
    zero = np.zeros(1, np.longdouble)
    logs = np.concatenate([-np.cumsum(rises[:mode][::-1])[::-1], zero, np.cumsum(rises[mode:])])
    weights = np.exp(logs)
    return low, weights / weights.sum()


def attack_two_counts(
    attack: str,
    trials: int,
    others: tuple[float, float],
    first: tuple[float, float],
    second: tuple[float, float],
) -> ExactAttack:
    """The attack by how many of `trials` others and of one victim fall into each of two cells.

    Arguments:
        others: the probabilities of the two cells for everybody else.
        first: those for the victim in the first world.
        second: those for the victim in the second world.
    """
    a, b = others
    low, high = _binomial_range(trials, a)
    left = np.arange(low, high + 1)
    prob_b = b / (1 - a)  # of those that are not in the first cell
    ends = [_binomial_range(trials - int(count), prob_b) for count in (left[0], left[-1])]
    bottom, top = min(end[0] for end in ends), max(end[1] for end in ends)
    if len(left) * (top - bottom + 1) > _MOST_PAIRS:
        raise NotApplicable(f"too many pairs of counts: {len(left)} times {top - bottom + 1}")
    right = np.arange(bottom, top + 1)
    law = binom.pmf(left, trials, a)[:, None] * binom.pmf(right, trials - left[:, None], prob_b)
    lost = float(binom.cdf(low - 1, trials, a) + binom.sf(high, trials, a))
    lost += float(np.sum(binom.pmf(left, trials, a) * binom.cdf(bottom - 1, trials - left, prob_b)))
    lost += float(np.sum(binom.pmf(left, trials, a) * binom.sf(top, trials - left, prob_b)))
    logs = []
    for in_a, in_b in (first, second):
        world = np.zeros((len(left) + 1, len(right) + 1))
        world[1:, :-1] += in_a * law
        world[:-1, 1:] += in_b * law
        world[:-1, :-1] += (1 - in_a - in_b) * law
        with np.errstate(divide="ignore"):
            logs.append(np.log(world.ravel()))
    return ExactAttack(attack=attack, log_first=logs[0], log_second=logs[1], slack=1.01 * lost + 1e-300 * law.size)


def log_binomial_pmf(trials: int, prob: float) -> np.ndarray:
    """The log probabilities of 0 .. trials ones: also where they underflow, there to about 1e-12 of the logarithm."""
    values = np.arange(trials + 1)
    with np.errstate(divide="ignore"):
        near = np.log(binom.pmf(values, trials, prob))
    far = gammaln(trials + 1) - gammaln(values + 1) - gammaln(trials - values + 1)
    far = far + values * math.log(prob) + (trials - values) * math.log1p(-prob)
    return np.where(near > math.log(_UNDERFLOW), near, far)


# Reports in cells

_CUTS = 64  # between the two ends; the law of a finer partition hardly differs
_TAILS = np.array([0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.4, 2.0, 2.8, 4.0, 6.0])  # beyond an end, in scales

Kind = Literal["clip_laplace", "laplace", "rr"]
_LARGEST_BUDGET: dict[Kind, float] = {"rr": 15.0, "laplace": 25.0, "clip_laplace": 25.0}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """A family of randomizers on the same cells: levels of randomized response, or intervals between `cuts`.

    `cuts` are increasing positions (None for levels), and make one cell more than there are of them. `overhang` is how
    far beyond both ends Clip-Laplace reports lie at most, where the distance between the ends is 1.

    Guarantees:
        Masses are those of the randomizer's own density, to about the precision of the dtype; they add up to 1.
    """

    kind: Kind
    levels: int = 2
    cuts: np.ndarray | None = None
    overhang: float = 0.0

    def masses(self, eps_local: float | np.ndarray, position: float) -> np.ndarray:
        """The probability of every cell in extended precision, along a new last axis.

        Arguments:
            eps_local: one budget, or an array of budgets.
            position: where the input lies, from 0 (the low end) to 1.
        """
        _validate.in_interval(0, 1, position=position)
        budget = np.asarray(eps_local, np.longdouble)[..., None]
        most = _LARGEST_BUDGET[self.kind]
        if np.max(budget) > most:
            raise NotApplicable(
                f"exact laws are kept to budgets of at most {most}, where lies are not yet rounded away"
            )
        if self.kind == "rr":
            return self._masses_of_levels(budget, position)
        if self.cuts is None:
            raise ValueError(f"kind={self.kind!r} needs cuts")
        below = _laplace_mass_from_zero((self.cuts.astype(np.longdouble) - np.longdouble(position)) * budget)
        bottom = np.full_like(budget, -0.5)
        top = -bottom
        if self.kind == "clip_laplace":
            bottom = _laplace_mass_from_zero((-np.longdouble(self.overhang) - position) * budget)
            top = _laplace_mass_from_zero((1 + np.longdouble(self.overhang) - position) * budget)
        whole = top - bottom
        below = np.clip(below, bottom, top)
        return np.diff(np.concatenate([bottom, below, top], axis=-1), axis=-1) / whole

    def masses_at_ends(self, eps_local: float) -> tuple[np.ndarray, np.ndarray]:
        """The masses for an input at the high end, and for one at the low end."""
        return self.masses(eps_local, 1.0), self.masses(eps_local, 0.0)

    def _masses_of_levels(self, budget: np.ndarray, position: float) -> np.ndarray:
        """The probabilities of the levels of randomized response; an input between two levels is rounded at random."""
        lie = np.exp(-budget)
        spread = np.longdouble(position) * (self.levels - 1)
        chance = np.maximum(0, 1 - np.abs(np.arange(self.levels) - spread))
        return (lie - np.expm1(-budget) * chance) / (1 + (self.levels - 1) * lie)


def _laplace_mass_from_zero(end: np.ndarray) -> np.ndarray:
    """The mass of Laplace noise of scale 1 between 0 and t, negative where t is."""
    return -np.sign(end) * np.expm1(-np.abs(end)) / 2


@functools.lru_cache(maxsize=64)
def _cells_of_randomizer(kind: Kind, levels: int, narrowest: float, widest: float) -> Cells:
    """As `cells_of_randomizer`. The result is cached and shared: its arrays must not be written to."""
    if kind == "rr":
        return Cells(kind=kind, levels=levels)
    if kind == "clip_laplace":
        return clip_laplace_cells(0.0)
    inner = np.linspace(0.0, 1.0, _CUTS + 1)
    if narrowest == widest:  # beyond the ends all ratios are constant
        return Cells(kind=kind, cuts=inner)
    beyond = np.unique(np.concatenate([_TAILS / narrowest, _TAILS / widest]))
    return Cells(kind=kind, cuts=np.concatenate([-beyond[::-1], inner, 1 + beyond]))


def cells_of_randomizer(kind: Kind, *, levels: int = 2, narrowest: float = 1.0, widest: float = 1.0) -> Cells:
    """The cells of a randomizer's reports, shared with other callers: do not write to its arrays.

    Arguments:
        levels: of randomized response.
        narrowest: the largest budget whose reports are cut into cells, which has the narrowest noise.
        widest: the smallest budget. Between different budgets, Laplace noise is cut beyond the ends, too.
    """
    return _cells_of_randomizer(kind, levels, narrowest, widest)


def clip_laplace_cells(overhang: float) -> Cells:
    """Cells for Clip-Laplace reports that lie at most `overhang` beyond both ends, whose distance is 1."""
    return Cells(kind="clip_laplace", cuts=np.linspace(-overhang, 1 + overhang, _CUTS + 1)[1:-1], overhang=overhang)


def cells_of_report(report: Report) -> Cells:
    """The cells of a report whose randomizer is known: randomized response, Laplace or Clip-Laplace."""
    if report.kind == "generic" or report.kind == "cap":
        raise ValueError(f"reports of kind={report.kind!r} have no cells: the randomizer's density is not known")
    return cells_of_randomizer(report.kind, levels=report.levels)


def rounding_error(masses: np.ndarray) -> float:
    """More than the rounding errors of all these masses together."""
    return (4 * len(masses) + 16) * ULP


def score_cells(
    first: np.ndarray, second: np.ndarray, others: np.ndarray, *, messages: float, max_steps_per_std: float = 256.0
) -> np.ndarray:
    """An integer for every cell, from 0 on: (first - second) / others in steps that resolve a sum of such scores.

    Arguments:
        first: the probabilities of the cells for the victim in the first world; `second` likewise.
        others: their mean probabilities for everybody else; above 0.
        messages: how many scores are added up.
        max_steps_per_std: how many steps there are at most to a standard deviation; there are fewer for more messages.
    """
    ratio = np.asarray((first - second) / others, np.float64)
    return integer_scores(ratio, others, messages=messages, max_steps_per_std=max_steps_per_std)


def integer_scores(
    ratio: np.ndarray, others: np.ndarray, *, messages: float, max_steps_per_std: float = 256.0
) -> np.ndarray:
    """Scores of cells as integers from 0 on, in equal steps; arguments as in `score_cells`, `ratio` are the scores."""
    law = np.asarray(others, np.float64)
    std = math.sqrt(float(law @ ratio**2) - float(law @ ratio) ** 2)
    steps = min(max_steps_per_std, max(4.0, 2**11 / math.sqrt(messages)))
    steps = min(steps, 2**15 * std / float(np.ptp(ratio)))
    whole = np.rint(ratio / std * steps).astype(np.int64)
    whole -= whole.min()
    return whole // max(1, int(np.gcd.reduce(whole)))


def law_of_score(masses: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The law of the score of one message: the probabilities of 0, 1, 2, ..., in extended precision.

    Arguments:
        masses: the probabilities of its cells.
        points: the score of each cell, an integer from 0 on.
    """
    law = np.zeros(int(points.max()) + 1, np.longdouble)
    np.add.at(law, points, masses)
    return law
