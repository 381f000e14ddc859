"""Messages that travel whole: how many of them look like the victim's.

A message of k reports is a point that the victim pulls to one side in all of them at once. The statistic is the number
of messages with at least t ones, a report counting as a one if it lies in the upper half: others, who hold the low end,
hardly ever get there, and dummies, which are fair coins, rarely. All thresholds t that the victim may reach are tried,
and a score that grows with the number of ones as the likelihood ratio does.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binom

from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import cells
from dovetail.audit.exact.cells import Binomial, binomial_window, counts
from dovetail.audit.exact.sums import ULP, SumPart, sums
from dovetail.events import Report

__all__ = ["Ones", "messages_like_the_victims", "ones"]

_RAREST = 1e-9
_MOST_THRESHOLDS = 48


class Ones(tuple[float, float, float]):
    """The probability of a one in a report on the high end, on the low end, and in a dummy."""


def ones(report: Report) -> Ones:
    """Reports seen as bits: upper half or lower half."""
    family = cells.of_report(report)
    high, low = family.ends(report.eps_local)
    upper = np.arange(len(high)) >= (len(high) + 1) // 2
    if family.cuts is not None:
        upper = np.concatenate([[False], family.cuts >= 0.5])
    dummy = float(np.mean(upper)) if report.kind == "rr" else 0.5
    return Ones((float(high[upper].sum()), float(low[upper].sum()), dummy))


def messages_like_the_victims(
    bits: Ones, width: int, *, others: int, dummies: int, slack: float = 0.0
) -> list[ExactAttack]:
    """Among so many others at the low end and so many messages of dummies: by likelihood, and by each threshold."""
    found = [_likelihoods(bits, width, others, dummies, slack)]
    high, low, dummy = bits
    largest = int(binom.isf(_RAREST, width, high))
    smallest = math.floor(width * min(high, max(low, dummy)))
    for least in np.unique(np.linspace(smallest, min(largest, width), _MOST_THRESHOLDS).round().astype(int)):
        reached = [float(binom.sf(least - 1, width, prob)) for prob in (high, low, dummy)]
        crowd = [Binomial(trials=others, prob=reached[1]), Binomial(trials=dummies, prob=reached[2])]
        worlds = [[*crowd, Binomial(trials=1, prob=prob)] for prob in reached[:2]]
        found.append(counts(f"messages with at least {least} ones of {width}", worlds[0], worlds[1], slack=slack))
    return found


def _likelihoods(bits: Ones, width: int, others: int, dummies: int, slack: float) -> ExactAttack:
    """The sum over all messages of (f_high - f_low) / g, where the mean density g of the others is not too small."""
    high, low, dummy = (_number_of_ones(width, prob) for prob in bits)
    messages = others + dummies
    average = (others * low + dummies * dummy) / messages
    ratio = np.zeros(width + 1)
    np.divide(high - low, average, out=ratio, where=average > 1e-100, casting="unsafe")
    ratio = np.minimum(np.where(average > 1e-100, ratio, np.inf), 4.0 * messages)
    points = cells.whole_steps(ratio, average, messages=messages, finest=32.0)
    error = 64 * (width + 64) * ULP

    def part(law: np.ndarray, times: int) -> SumPart:
        return SumPart(masses=cells.scored(law, points), times=times, error=error)

    crowd = [part(low, others), part(dummy, dummies)]
    return sums("likelihood ratios of whole messages", [*crowd, part(high, 1)], [*crowd, part(low, 1)], slack=slack)


def _number_of_ones(width: int, prob: float) -> np.ndarray:
    start, masses = binomial_window(width, prob)
    law = np.zeros(width + 1, np.longdouble)
    law[start : start + len(masses)] = masses
    return law
