"""Geyer, Klein, Nabi's accounting as they used it: client-level privacy by the moments accountant of Abadi et al.

Log-moments alpha(l) of one Poisson-sampled Gaussian release, l = 1..32, add up over the rounds, and
delta <= min_l exp(sum alpha(l) - l eps). Algorithm 1 draws a fixed number of clients and clips to the un-noised median
of their norms, and neither is covered by that theorem.

The moments accountant of Abadi et al. 2016, as Geyer et al. and SubDP used it: orders 1 to 32, Poisson sampling.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy.special import gammaln, xlog1py, xlogy

from dovetail import _validate
from dovetail.accounting import accountants
from dovetail.accounting.exposure import exposures_of
from dovetail.accounting.releases import release_of
from dovetail.accounting.search import smallest_noise
from dovetail.claims._claim import HOLDS, REFUTED, UNPROVEN, Claim, PrintedNumber
from dovetail.events import Disjoint, Everyone, FixedSize, Gaussian, Poisson, Round, Separated
from dovetail.statements import Neighbors, NotApplicable, Theorem, Verdict

__all__ = [
    "communication_cost",
    "dp_fl",
    "noise_multiplier",
]

Clip = Literal["median", "fixed"]
Accountant = Literal["moments", "renyi", "privacy-loss"]


_MEDIAN = "the noise scale is the exact median of the clients' norms and reveals it, which no accountant counts."
_FIXED_SIZE = "The moments accountant presumes Poisson sampling, while Alg. 1 draws a fixed number of clients."
_PROVED = "With a fixed clipping norm and Poisson sampling it is the theorem of Abadi et al. 2016."


def _geyer_theorem(key: str, where: str) -> Theorem:
    return Theorem(
        key=f"Geyer.{key}", where=f"Geyer, Klein, Nabi (2017), {where}", url="https://arxiv.org/abs/1712.07557"
    )


def dp_fl(rounds: Sequence[Round], *, delta: float, clip: Clip = "median") -> Claim:
    """What Alg. 1 claims for these rounds at this delta: min over orders of (sum alpha(l) + log(1/delta)) / l."""
    _validate.in_open_interval(0, 1, delta=delta)
    total = total_log_moments(rounds)
    verdict, reason = _verdict_of(clip, not any(isinstance(item.participation, FixedSize) for item in rounds))
    eps = float(np.min((total + math.log(1 / delta)) / np.arange(1, MAX_ORDER + 1)))
    return Claim(eps=eps, delta=delta, theorem=_geyer_theorem("alg1", "Alg. 1"), verdict=verdict, reason=reason)


def noise_multiplier(
    *, prob: float, rounds: int, eps: float, delta: float, accountant: Accountant = "moments"
) -> PrintedNumber:
    """The noise that exhausts (eps, delta) at these rounds; the paper prints none.

    "moments" is the paper's accountant; "renyi" and "privacy-loss" are ours, for the same Poisson-sampled rounds.
    """
    _validate.one_of(("moments", "renyi", "privacy-loss"), accountant=accountant)
    _validate.in_open_interval(0, 1, delta=delta)

    def eps_of(noise: float) -> float:
        same = equal_rounds(prob, noise, rounds)
        if accountant == "moments":
            return dp_fl(same, delta=delta, clip="fixed").eps
        ours = accountants.renyi if accountant == "renyi" else accountants.privacy_loss
        try:
            return ours(exposures_of(same)).eps(delta)
        except NotApplicable:
            return math.inf

    return PrintedNumber(
        value=smallest_noise(eps_of, eps=eps, tolerance=1e-4),
        quantity=f"noise multiplier by {accountant}",
        theorem=_geyer_theorem("table1", "Table 1"),
        verdict=UNPROVEN,
        reason="Recomputed from the printed rounds and communication: the paper prints neither sigma_t nor m_t.",
    )


def communication_cost(clients: Sequence[int]) -> PrintedNumber:
    """CC: how many times a client sends a model, sum of m_t."""
    for count in clients:
        _validate.integer(clients=count)
        _validate.non_negative(clients=count)
    return PrintedNumber(
        value=sum(clients),
        quantity="models sent",
        theorem=_geyer_theorem("cc", "Sec. 5"),
        verdict=HOLDS,
        reason="It is a definition.",
    )


def _verdict_of(clip: Clip, poisson: bool) -> tuple[Verdict, str]:
    """The verdict on a claim of this kind of clipping and sampling, and the reason for it."""
    _validate.one_of(("median", "fixed"), clip=clip)
    if clip == "median":
        return REFUTED, _MEDIAN
    return (HOLDS, _PROVED) if poisson else (UNPROVEN, _FIXED_SIZE)


MAX_ORDER = 32


def total_log_moments(rounds: Sequence[Round]) -> np.ndarray:
    """Sum of the log-moments alpha(1), ..., alpha(32) over these rounds, whatever the sampling taken as Poisson."""
    if not rounds:
        raise ValueError("expected at least one round, got none")
    counts: Counter[tuple[float, float]] = Counter()
    for item in rounds:
        shift = release_of(item.mechanism).mu
        if shift is None or math.isinf(shift) or item.mechanism.neighbors is not Neighbors.ADD_REMOVE:
            raise NotApplicable("the moments accountant needs Gaussian noise under add-remove neighbours")
        counts[_sampling_prob(item), 1 / shift] += 1
    total = np.zeros(MAX_ORDER)
    for (prob, noise), times in counts.items():
        total = total + times * _log_moments(prob, noise)
    return total


@functools.lru_cache(maxsize=256)
def _log_moments(prob: float, noise: float) -> np.ndarray:
    """log E_{z ~ mixture}[(mixture / base)^l], l = 1..32: the binomial sum of Abadi et al. 2016, Sec. 3.2."""
    moments = []
    for n in range(2, MAX_ORDER + 2):
        k = np.arange(n + 1)
        choose = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
        terms = choose + xlog1py(n - k, -prob) + xlogy(k, prob) + k * (k - 1) / (2 * noise**2)
        moments.append(float(np.logaddexp.reduce(terms)))
    return np.array(moments)


def _sampling_prob(item: Round) -> float:
    """With which probability a client is in the round; refuses rounds that the moments accountant does not know."""
    match item.participation:
        case Poisson(prob=prob):
            return prob
        case FixedSize(size=size, population=population):
            return size / population
        case Everyone():
            return 1.0
        case Disjoint() | Separated():
            raise NotApplicable("Geyer et al. draw the clients of every round afresh, not in batches that are fixed")


def equal_rounds(prob: float, noise: float, rounds: int) -> list[Round]:
    """So many equal Poisson-sampled Gaussian releases of this noise multiplier."""
    _validate.positive(noise=noise)
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)
    mechanism = Gaussian(std=noise, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)
    return [Round(mechanism=mechanism, participation=Poisson(prob=prob))] * rounds
