"""What the survey quotes (Ahmed, Wu, Dushime, Tao 2021): rates of amplification and of error, and binary summation.

Rates are functions of their printed arguments with the constant that is printed, or 1 where an O() stands. Only what
a table of ours shows is here. k is the number of users, as there.
"""

from __future__ import annotations

import math

from dovetail import _validate
from dovetail.claims._claim import HOLDS, REFUTED, UNPROVEN, Claim, PrintedNumber
from dovetail.claims.flame import RATE, corollary1
from dovetail.statements import NotApplicable, Theorem

__all__ = [
    "amplification_erlingsson",
    "amplification_multi",
    "amplification_single",
    "binary_sum_estimate",
    "error_shuffled_response",
]


def _survey_theorem(key: str, where: str) -> Theorem:
    return Theorem(key=f"Survey.{key}", where=f"Survey (Ahmed, Wu, Dushime, Tao 2021), {where}")


def amplification_single(*, eps_local: float, num_users: int, delta: float) -> Claim:
    """Sec. 5.5: O(min(eps, 1) e^eps sqrt(log(1/delta) / k)) for eps <= log(k / log(1/delta)) / 2."""
    eps = corollary1(eps_local=eps_local, num_users=num_users, delta=delta).eps
    return Claim(eps=eps, delta=delta, theorem=_survey_theorem("blanket", "Sec. 5.5"), verdict=UNPROVEN, reason=RATE)


def amplification_multi(*, eps_local: float, num_users: int, delta: float) -> Claim:
    """Sec. 5.2 as printed, the root in the exponent: min(eps, 1) e^(eps sqrt(log(1/delta) / k))."""
    _validate.positive(eps_local=eps_local)
    _validate.at_least(2, num_users=num_users)
    _validate.in_open_interval(0, 1, delta=delta)
    eps = min(eps_local, 1.0) * math.exp(eps_local * math.sqrt(math.log(1 / delta) / num_users))
    below = eps < eps_local
    return Claim(
        eps=eps,
        delta=delta,
        theorem=_survey_theorem("sec5.2", "Sec. 5.2"),
        verdict=REFUTED if below else HOLDS,
        reason="The root has slipped into the exponent: at k 1e6, delta 1e-6 binary randomized response with eps 14 "
        "is claimed 1.05 and exceeds 2."
        if below
        else "The printed number is not below eps_local, so it says nothing new.",
    )


def amplification_erlingsson(*, eps_local: float, num_users: int, delta: float) -> Claim:
    """Sec. 5.5: O(eps sqrt(log(1/delta) / k))."""
    _validate.positive(eps_local=eps_local)
    _validate.at_least(2, num_users=num_users)
    _validate.in_open_interval(0, 1, delta=delta)
    return Claim(
        eps=eps_local * math.sqrt(math.log(1 / delta) / num_users),
        delta=delta,
        theorem=_survey_theorem("erlingsson", "Sec. 5.5"),
        verdict=UNPROVEN,
        reason="The constant 12 and the condition eps <= 1/2 of Erlingsson et al. 2019 are not quoted.",
    )


def binary_sum_estimate(*, reports_sum: float, num_users: int, prob_random: float) -> PrintedNumber:
    """Eq. 6 as printed: (sum + k p / 2) / (1 - p)."""
    _validate.at_least(1, num_users=num_users)
    _validate.in_interval(0, num_users, reports_sum=reports_sum)
    _validate.non_negative(prob_random=prob_random)
    if prob_random >= 1:
        raise NotApplicable(f"eq. 6 needs p < 1, got prob_random={prob_random}: every report is a coin")
    return PrintedNumber(
        value=(reports_sum + num_users * prob_random / 2) / (1 - prob_random),
        quantity="estimate of a sum of bits",
        theorem=_survey_theorem("eq6", "eq. 6"),
        verdict=REFUTED,
        reason="The sign is wrong: (sum - k p / 2) / (1 - p) is unbiased, the printed one exceeds it by k p / (1 - p).",
    )


def error_shuffled_response(*, eps: float, delta: float) -> PrintedNumber:
    """Binary summation by shuffled randomized response, printed as O(sqrt(1/delta) / eps)."""
    _validate.positive(eps=eps)
    _validate.in_open_interval(0, 1, delta=delta)
    return PrintedNumber(
        value=math.sqrt(1 / delta) / eps,
        quantity="error of a sum, up to a constant",
        theorem=_survey_theorem("shuffled-rr", "Sec. 5.4"),
        verdict=REFUTED,
        reason="A logarithm is missing: Cheu et al. 2019 prove O(sqrt(log(1/delta)) / eps).",
    )
