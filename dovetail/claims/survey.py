"""What the survey quotes (Ahmed, Wu, Dushime, Tao 2021): rates of amplification and of error, and binary summation.

Rates are functions of their printed arguments with the constant that is printed, or 1 where an O() stands. k is the
number of users, as there.
"""

from __future__ import annotations

import math

from dovetail import _validate
from dovetail.claims._claim import HOLDS, REFUTED, UNPROVEN, Claim, PrintedNumber
from dovetail.claims.flame import RATE, corollary1, lemma4
from dovetail.statements import NotApplicable, Theorem, Verdict

__all__ = [
    "amplification_erlingsson",
    "amplification_multi",
    "amplification_single",
    "binary_sum_estimate",
    "error_curator",
    "error_local",
    "error_shuffled_response",
    "messages_cheu",
    "messages_recursive",
    "mse_local_messages",
    "mse_recursive",
    "mse_single_message",
    "randomized_response",
    "subsampling",
]

_ORDER = "It gives an order of growth; the constant is not printed and is taken as 1 here."


def _survey(key: str, where: str) -> Theorem:
    return Theorem(key=f"Survey.{key}", where=f"Survey (Ahmed, Wu, Dushime, Tao 2021), {where}")


def amplification_single(*, eps_local: float, num_users: int, delta: float) -> Claim:
    """Sec. 5.5: O(min(eps, 1) e^eps sqrt(log(1/delta) / k)) for eps <= log(k / log(1/delta)) / 2."""
    eps = corollary1(eps_local=eps_local, num_users=num_users, delta=delta).eps
    return Claim(eps=eps, delta=delta, theorem=_survey("blanket", "Sec. 5.5"), verdict=UNPROVEN, reason=RATE)


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
        theorem=_survey("sec5.2", "Sec. 5.2"),
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
        theorem=_survey("erlingsson", "Sec. 5.5"),
        verdict=UNPROVEN,
        reason="The constant 12 and the condition eps <= 1/2 of Erlingsson et al. 2019 are not quoted.",
    )


def subsampling(*, eps: float, delta: float, size: int, num_users: int) -> Claim:
    """Sec. 5.5: amplification by drawing m of k users, as FLAME's Lemma 4."""
    one = lemma4(eps=eps, delta=delta, size=size, population=num_users)
    where = _survey("subsampling", "Sec. 5.5")
    return Claim(eps=one.eps, delta=one.delta, theorem=where, verdict=one.verdict, reason=one.reason)


def randomized_response(*, prob_random: float) -> Claim:
    """Sec. 5.4: a bit replaced by a fair coin with probability p = 2 / (e^eps + 1) is eps-LDP."""
    _validate.positive(prob_random=prob_random)
    _validate.at_most(1, prob_random=prob_random)
    return Claim(
        eps=math.log(2 / prob_random - 1),
        delta=0.0,
        theorem=_survey("rr", "Sec. 5.4"),
        verdict=HOLDS,
        reason="The ratio of the two answers' probabilities is (1 - p/2) / (p/2).",
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
        theorem=_survey("eq6", "eq. 6"),
        verdict=REFUTED,
        reason="The sign is wrong: (sum - k p / 2) / (1 - p) is unbiased, the printed one exceeds it by k p / (1 - p).",
    )


def error_curator(*, eps: float) -> PrintedNumber:
    """Summation with a trusted curator: error O(1/eps), the O(1) of Sec. 5.3 and 5.5 at a fixed eps."""
    _validate.positive(eps=eps)
    return _error("curator", "Sec. 5.3", 1 / eps, HOLDS, "The Laplace mechanism's standard deviation is sqrt(2) / eps.")


def error_local(*, eps: float, num_users: int) -> PrintedNumber:
    """Summation in the local model: error O(sqrt(k) / eps)."""
    _validate.positive(eps=eps)
    _validate.at_least(1, num_users=num_users)
    return _error("local", "Sec. 5.4", math.sqrt(num_users) / eps, UNPROVEN, _ORDER)


def error_shuffled_response(*, eps: float, delta: float) -> PrintedNumber:
    """Binary summation by shuffled randomized response, printed as O(sqrt(1/delta) / eps)."""
    _validate.positive(eps=eps)
    _validate.in_open_interval(0, 1, delta=delta)
    reason = "A logarithm is missing: Cheu et al. 2019 prove O(sqrt(log(1/delta)) / eps)."
    return _error("shuffled-rr", "Sec. 5.4", math.sqrt(1 / delta) / eps, REFUTED, reason)


def mse_single_message(*, num_users: int) -> PrintedNumber:
    """Real summation with one message per user: mean squared error O(k^(1/3))."""
    _validate.at_least(1, num_users=num_users)
    reason = "The rate is that of Balle et al. 2019 for the shuffle model, which the survey calls local."
    return _error("single-message", "Sec. 5.5", num_users ** (1 / 3), UNPROVEN, reason, "mean squared error")


def mse_local_messages(*, eps: float) -> PrintedNumber:
    """Sec. 5.3: with O(log(k/delta)) messages per user the mean squared error is O(1/eps^2)."""
    _validate.positive(eps=eps)
    reason = "The rate is that of the multi-message shuffle model of Balle et al. 2020, which the survey calls local."
    return _error("multi-message", "Sec. 5.3", 1 / eps**2, UNPROVEN, reason, "mean squared error")


def mse_recursive(*, num_users: int) -> PrintedNumber:
    """Balle et al. 2020, recursive protocol: mean squared error O((log log k)^2)."""
    return _error("recursive", "Sec. 5.5", _log_log(num_users) ** 2, UNPROVEN, _ORDER, "mean squared error")


def messages_recursive(*, num_users: int) -> PrintedNumber:
    """Balle et al. 2020, recursive protocol: O(log log k) messages per user, each of O(log k) bits."""
    return _error("recursive", "Sec. 5.5", _log_log(num_users), UNPROVEN, _ORDER, "messages per user")


def messages_cheu(*, num_users: int) -> PrintedNumber:
    """Cheu et al. 2019: O(sqrt(k)) messages per user give error O(1)."""
    _validate.at_least(1, num_users=num_users)
    return _error("cheu", "Sec. 1", math.sqrt(num_users), UNPROVEN, _ORDER, "messages per user")


def _log_log(num_users: int) -> float:
    _validate.at_least(3, num_users=num_users)
    return math.log(math.log(num_users))


def _error(
    key: str, where: str, value: float, verdict: Verdict, reason: str, quantity: str = "error of a sum"
) -> PrintedNumber:
    return PrintedNumber(
        value=value,
        quantity=f"{quantity}, up to a constant",
        theorem=_survey(key, where),
        verdict=verdict,
        reason=reason,
    )
