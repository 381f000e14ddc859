"""The best of a random number of trials (Papernot, Steinke 2022, Thm. 2; docs/proofs/private-selection.md).

K >= 1 trials are run, each with a setting drawn whatever the data are, and only the best of them is seen. If a trial's
Renyi divergence is at most D(a) at every order a, under both neighbours, that of the best is at most
``D(a) + (1 + eta) ((1 - 1/b) D(b) + log(1/gamma) / b) + log E[K] / (a - 1)`` for any order b >= 1. K follows the
truncated negative binomial law of `events.BestTrial`. Which trial is best may depend on what trials release and on
public data, and on nothing else.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.numerics import ULP
from dovetail.accounting.releases._base import Release, Sampling, release_of, releases
from dovetail.accounting.search import smallest_point
from dovetail.events import BestTrial, Everyone
from dovetail.statements import NotApplicable, Spent, Theorem

__all__ = [
    "SELECTION",
    "BestTrialRelease",
    "expected_trials",
    "gamma_for",
    "most_trials",
    "renyi_of_best",
    "trials_at_quantile",
]

SELECTION = Theorem(
    key="PS22.thm2",
    where="the best of a random number of trials (Papernot, Steinke 2022, Thm. 2; docs/proofs/private-selection.md)",
    url="https://arxiv.org/abs/2110.03620",
)

_LEAST_GAMMA = 1e-6  # where the search for a gamma begins
_DIGITS = 70  # with which K is drawn; a uniform number has more
_NOTHING = Decimal("1e-50")  # of the law, where its sum ends
_OFF = 1e-45  # more than what all roundings and the end of the sum do, over the squared number of terms


def renyi_of_best(orders: np.ndarray, divergences: np.ndarray, *, eta: float, gamma: float) -> np.ndarray:
    """The Renyi divergence of the best of K trials at every order, from that of one trial at the same orders.

    Arguments:
        orders: Renyi orders above 1.
        divergences: of one trial at each of them.
        eta: the shape of the law of the number of trials.
        gamma: its other parameter: the smaller, the more trials.

    Guarantees:
        Never below the exact divergence, for any number of outputs and any order of them; rounded up.
        Never below the divergence of one trial.
    """
    _check_law(eta, gamma)
    orders, divergences = np.asarray(orders, dtype=float), np.asarray(divergences, dtype=float)
    if not (orders > 1).all():
        raise ValueError(f"expected every order > 1, got orders={orders.tolist()}")
    bounds = np.where(divergences >= 0, divergences, np.inf)
    ratio = np.append((1 - 1 / orders) * bounds + math.log(1 / gamma) / orders, math.log(1 / gamma))
    several = math.log(expected_trials(eta=eta, gamma=gamma)) + 16 * ULP
    best = bounds + (1 + eta) * float(ratio.min()) + several / (orders - 1)
    return best * (1 + 64 * ULP)


def expected_trials(*, eta: float, gamma: float) -> float:
    """The mean number of trials, E[K], for eta > -1 and 0 < gamma < 1."""
    _check_law(eta, gamma)
    log = math.log(gamma)
    if abs(eta * log) < 1e-6:  # eta / (1 - gamma^eta) is close to -1/log(gamma) (1 - eta log(gamma) / 2)
        return (1 - gamma) / gamma * (1 - eta * log / 2 + 1e-12) / -log
    return eta * (1 - gamma) / (gamma * -math.expm1(eta * log))


def gamma_for(mean: float, *, eta: float) -> float:
    """The gamma at which K has this mean, or a little less.

    Arguments:
        mean: the number of trials on average, above 1.
        eta: the shape of the law, above -1.
    """
    _validate.finite(mean=mean)
    if not mean > 1:
        raise ValueError(f"expected a mean number of trials > 1, got mean={mean!r}")
    if expected_trials(eta=eta, gamma=_LEAST_GAMMA) < mean:
        raise ValueError(f"mean={mean!r} trials are more than gamma >= {_LEAST_GAMMA:g} can give: ask for fewer")
    high = 1 - 1e-9
    return smallest_point(lambda gamma: expected_trials(eta=eta, gamma=gamma) <= mean, low=_LEAST_GAMMA, high=high)


def trials_at_quantile(uniform: float | Fraction, *, eta: float, gamma: float) -> int:
    """The K at this quantile: a draw of K, for a uniform number in [0, 1); in `_DIGITS` digits.

    Arguments:
        uniform: in [0, 1), with as many digits as the draw is to be right to.
        eta: the shape of the law.
        gamma: its other parameter.
    """
    _check_law(eta, gamma)
    if not 0 <= uniform < 1:
        raise ValueError(f"expected 0 <= uniform < 1, got uniform={uniform!r}")
    with localcontext(prec=_DIGITS):
        exact_eta, exact_gamma = Decimal(eta), Decimal(gamma)
        if eta == 0:
            prob = (1 - exact_gamma) / -exact_gamma.ln()
        else:
            prob = (1 - exact_gamma) * exact_eta / ((-exact_eta * exact_gamma.ln()).exp() - 1)
        numerator, denominator = Fraction(uniform).as_integer_ratio()
        below = prob
        trials = 1
        quantile = Decimal(numerator) / denominator
        while quantile >= below:
            ratio = (1 - exact_gamma) * (trials + exact_eta) / (trials + 1)
            if ratio < 1 and prob < _NOTHING * (1 - ratio):
                break
            prob *= ratio
            below += prob
            trials += 1
    return trials


def most_trials(*, eta: float, gamma: float) -> float:
    """An upper bound on what `trials_at_quantile` returns: beyond it next to nothing of the law is left."""
    _check_law(eta, gamma)
    return 150 * (1 + abs(eta)) / gamma


def _check_law(eta: float, gamma: float) -> None:
    """Refuse parameters that are not of the law: eta > -1, 0 < gamma < 1."""
    _validate.finite(eta=eta)
    if not eta > -1:
        raise ValueError(f"expected eta > -1, got eta={eta!r}")
    _validate.in_open_interval(0, 1, gamma=gamma)


@releases(BestTrial)
class BestTrialRelease(Release[BestTrial]):
    """The best of a random number of trials: known by Renyi orders, if every setting is."""

    theorem = SELECTION

    @property
    def refusal(self) -> str | None:  # type: ignore[override]
        """Why it promises nothing, if one of its settings does: then the choice between all of them does not either."""
        refusals = (release_of(repeated.mechanism).refusal for repeated in self.event.releases)
        why = next((why for why in refusals if why is not None), None)
        return None if why is None else f"the choice looked at trials without a guarantee: {why}"

    @property
    def span(self) -> str:  # type: ignore[override]
        """In words: the best of so many trials on average."""
        mean = expected_trials(eta=self.event.eta, gamma=self.event.gamma)
        return f"the best of a random number of trials, {mean:.3g} on average"

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        """The divergence of the worst setting at every order, plus what choosing the best adds; rounded up.

        Refuses samples of the choice itself, and settings with a release that spends some delta beside its noise.
        """
        if not isinstance(sampling, Everyone):
            return super().renyi(sampling, orders)
        trial = np.zeros(len(orders))
        for setting in self.event.settings:
            total = np.zeros(len(orders))
            for repeated in setting:
                release = release_of(repeated.mechanism)
                if release.delta_spent(0.0):
                    raise NotApplicable("private selection needs trials that spend nothing of delta beside their noise")
                total += repeated.times * release.renyi(repeated.sampling, orders)
            trial = np.maximum(trial, total)
        return renyi_of_best(np.asarray(orders), trial * (1 + 64 * ULP), eta=self.event.eta, gamma=self.event.gamma)

    def delta_spent(self, eps: float) -> tuple[Spent, ...]:
        """What it costs that K is drawn with finitely many digits: (1 + e^eps) times how far its law is off."""
        off = min(1.0, most_trials(eta=self.event.eta, gamma=self.event.gamma) ** 2 * _OFF)
        spent = numerics.as_probability_bound(
            math.exp(min(0.0, float(np.logaddexp(0.0, eps)) + math.log(off))) * (1 + 1e-12)
        )
        return (Spent(spent, "rounding in the draw of the number of trials"),)

    def sampling_assumption(self, sampling: Sampling) -> str | None:
        """What its trials assume of their samples, each assumption once; None if all of them use everyone."""
        repeats = self.event.releases
        assumptions = (release_of(part.mechanism).sampling_assumption(part.sampling) for part in repeats)
        return "; ".join(dict.fromkeys(text for text in assumptions if text is not None)) or None
