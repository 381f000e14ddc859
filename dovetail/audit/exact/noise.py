"""Attacks on noisy releases: Gaussian, Laplace and Skellam noise, and sums over a subject's sampled items.

A neighbour moves the released value as far as the sensitivity allows. One Gaussian coordinate says it all, and rounds
add up to one Gaussian. Otherwise every release is cut into cells, whose log-likelihood ratios in whole steps are added
up over independent releases (`sums`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.signal import lfilter
from scipy.special import log_ndtr, logsumexp

from dovetail.audit.bounds import ExactAttack, disjoint_attack
from dovetail.audit.exact import cells, sums
from dovetail.audit.exact.cells import ULP, binomial_law
from dovetail.audit.exact.registry import attacks_on_event, attacks_on_stream, observe_in_sample
from dovetail.audit.exact.sums import RepeatedCells, attack_likelihood_ratios, attacks_on_repeated_reports
from dovetail.events import (
    CorrelatedGaussian,
    CorrelatedSum,
    Gaussian,
    Laplace,
    ReplacedUsers,
    SampledSubject,
    Separated,
    SkellamNoise,
)
from dovetail.statements import Neighbors, NotApplicable

__all__ = [
    "attack_every_round",
    "attack_gaussian",
    "attack_laplace",
    "attack_replaced_users",
    "attack_sampled_subject",
    "attack_skellam",
    "attack_skellam_sum",
    "attack_stream",
    "attack_stream_of_sums",
    "log_masses_of_cells",
    "observe_sampled_gaussian",
]

_FAR = 38.0  # standard deviations: the smallest normal tail that a double holds
_CELLS = 8000  # between both tails, for a single Gaussian
_BEYOND = 12.0  # standard deviations beyond all shifts that are cut into cells
_PER_STD = 400  # cells of a mixture to a standard deviation
_LARGEST_SHIFT = 500.0  # standard deviations
_NEVER = 1e-30  # numbers of items with a smaller probability are left out
_PI = 4 * np.arctan(np.longdouble(1))
_LARGEST = 2**22  # values of a law


@attacks_on_event.register(Gaussian)
def attack_gaussian(event: Gaussian, rounds: int) -> list[ExactAttack]:
    """The attack by the projection on the direction in which neighbours differ, added up over the rounds."""
    if event.std == 0:
        return [disjoint_attack("the released value, to which no noise is added")]
    return [_attack_shifted_normal("the released value along the difference", event.mu * math.sqrt(rounds))]


@attacks_on_event.register(CorrelatedGaussian)
@attacks_on_event.register(CorrelatedSum)
def attack_every_round(event: CorrelatedGaussian | CorrelatedSum, rounds: int) -> list[ExactAttack]:
    """The attack on a stream by a victim who takes part in every round."""
    return attacks_on_stream(event, Separated(uploads=rounds, separation=1, rounds=rounds), rounds)


@attacks_on_stream.register(CorrelatedGaussian)
def attack_stream(event: CorrelatedGaussian, schedule: Separated, rounds: int) -> list[ExactAttack]:
    """The attack on correlated noise: it whitens what was released, by undoing the noise's own filter round by round.

    The victim takes part first in round 0 and then as soon as it may, each time with all that its norm allows. A stream
    with fewer rounds than were planned is refused: without the rounds that are missing nothing can be undone.
    """
    return _attack_stream(event, schedule, rounds)


@attacks_on_stream.register(CorrelatedSum)
def attack_stream_of_sums(event: CorrelatedSum, schedule: Separated, rounds: int) -> list[ExactAttack]:
    """The same attack on sums by shares, in one coordinate, in which the victim holds all that its norm allows.

    The noise was rounded, by 1/2 at the most in each round: what that can do to the statistic is taken off the shift.
    """
    moved = event.norms_apart * math.floor(event.scale * event.clip_norm)
    return _attack_stream(event.with_sensitivity(moved), schedule, rounds, rounded_by=0.5)


def _attack_stream(
    event: CorrelatedGaussian, schedule: Separated, rounds: int, *, rounded_by: float = 0.0
) -> list[ExactAttack]:
    """The attack on the rows of C^-1 Z by a victim who moves each of its rounds by the event's sensitivity.

    Arguments:
        rounded_by: how far from these rows the noise of a round may be.
    """
    if rounds < schedule.rounds:
        raise NotApplicable(
            f"{rounds} of the {schedule.rounds} rounds of a stream were released, and the record does not say which"
        )
    if event.std == 0:
        return [disjoint_attack("the released values, to which no noise is added")]
    moved = np.zeros(rounds)
    moved[: schedule.uploads * schedule.separation : schedule.separation] = event.sensitivity / event.std
    whitened = lfilter([1.0], event.coefficients, moved)
    shift = float(np.linalg.norm(whitened))
    weights = lfilter([1.0], event.coefficients, whitened[::-1] / shift)  # of the rounds in the statistic
    hidden = 2 * rounded_by / event.std * float(np.abs(weights).sum())
    return [_attack_shifted_normal("all rounds, whitened, along the difference", max(0.0, shift - hidden))]


@attacks_on_event.register(ReplacedUsers)
def attack_replaced_users(event: ReplacedUsers, rounds: int) -> list[ExactAttack]:
    """The attack on several users at once, all of whom turn from one direction to the opposite one."""
    shift = 2 * event.clip_norm * event.users / event.std
    return [_attack_shifted_normal("the released value along the difference", shift * math.sqrt(rounds))]


def _attack_shifted_normal(attack: str, mu: float) -> ExactAttack:
    """The attack between N(mu, 1) and N(0, 1), for mu >= 0; at delta = 0 no finite eps holds."""
    cuts = np.linspace(-_FAR, mu + _FAR, _CELLS + 1)
    laws = [log_masses_of_cells(log_ndtr(cuts - shift), log_ndtr(shift - cuts)) for shift in (mu, 0.0)]
    return ExactAttack(attack=attack, log_first=laws[0], log_second=laws[1], slack=1e-300, pure_eps=math.inf)


def log_masses_of_cells(log_cdf: np.ndarray, log_sf: np.ndarray) -> np.ndarray:
    """The log masses of the cells that increasing cuts make, one more than there are cuts.

    Arguments:
        log_cdf: the logarithm of the probability below each cut.
        log_sf: that of the probability above each cut; with both, differences keep their precision in either tail.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        below = log_cdf[1:] + np.log(-np.expm1(np.minimum(log_cdf[:-1] - log_cdf[1:], 0.0)))
        above = log_sf[:-1] + np.log(-np.expm1(np.minimum(log_sf[1:] - log_sf[:-1], 0.0)))
    inner = np.where(log_cdf[1:] < math.log(0.5), below, above)
    return np.concatenate([log_cdf[:1], np.where(np.isnan(inner), -np.inf, inner), log_sf[-1:]])


@attacks_on_event.register(Laplace)
def attack_laplace(event: Laplace, rounds: int) -> list[ExactAttack]:
    """Attacks by the likelihood ratios of all answers, where every query moves by its whole sensitivity.

    At delta = 0 all answers beyond both values show the full ratio.
    """
    family = cells.cells_of_randomizer("laplace")
    copies = event.count * rounds
    high, low = family.masses_at_ends(event.eps_each)
    return attacks_on_repeated_reports("log-likelihood ratios of all answers", high, low, copies)


@attacks_on_event.register(SkellamNoise)
def attack_skellam_sum(event: SkellamNoise, rounds: int) -> list[ExactAttack]:
    """The attack by the noisy sum of one coordinate, in which the victim holds all that its norm allows.

    The shares of a coordinate, mixed or added up, give that sum, so it is seen, whatever else is. Shifts are whole
    numbers, so nothing is rounded.
    """
    shift = event.norms_apart * math.floor(event.scale * event.clip_norm) * rounds
    return [
        attack_skellam("the noisy sum of one coordinate", event.noise_variance * rounds, shift, modulus=event.modulus)
    ]


def attack_skellam(attack: str, variance: float, shift: int, *, modulus: int) -> ExactAttack:
    """The attack between Skellam noise and the same noise plus `shift`, both modulo a number.

    The number is a power of two that divides the modulus, or the modulus itself. At delta = 0 no finite eps holds.
    """
    wanted = 1 << math.ceil(math.log2(24 * math.sqrt(variance) + shift + 256))
    size = wanted if modulus % wanted == 0 else modulus
    if size > _LARGEST:
        raise NotApplicable(f"the noise spreads over {size} values, and exact laws are kept to {_LARGEST}")
    angles = 8 * np.arctan(np.longdouble(1)) * np.arange(size // 2 + 1) / size
    value = np.exp(-2 * np.longdouble(variance) * np.sin(angles / 2) ** 2)
    error = 64 * ULP * (1 + np.abs(np.log(np.maximum(value, 1e-300)))) * value
    masses, slack = sums.law_of_spectrum((value.astype(np.clongdouble), error.astype(np.float64)), size)
    return sums.attack_on_laws(
        attack, [(np.roll(masses, shift), slack), (masses, slack)], centre=shift // 2, pure_eps=math.inf
    )


@observe_in_sample.register(Gaussian)
def observe_sampled_gaussian(event: Gaussian, prob: float, times: int) -> RepeatedCells:
    """The laws, in cells, of `times` Gaussian releases into each of which a user is drawn with probability `prob`.

    First with the user, second without; for adding or removing a user alone.
    """
    if event.neighbors is not Neighbors.ADD_REMOVE or event.std == 0:
        raise NotApplicable("of Poisson samples, exact attacks are known on Gaussian sums, for adding a user")
    included = np.array([1 - np.longdouble(prob), prob], np.longdouble)
    return RepeatedCells(*_mixture_and_normal_masses(included, event.mu), times, _mixture_error(items=1))


@attacks_on_event.register(SampledSubject)
def attack_sampled_subject(event: SampledSubject, rounds: int) -> list[ExactAttack]:
    """Attacks by the likelihood ratios of all releases, where all of a subject's items pull in one direction.

    A release is then a mixture of shifted Gaussians, by the number of items that were drawn. One attack for each way
    to spread the items over users. Where users are drawn first, others' records are taken to be zero, so that they do
    not show who was drawn.
    """
    attacks = []
    for name, split in _splits_to_attack(event).items():
        attack = f"log-likelihood ratios of all releases, {name}"
        attacks.append(_attack_mixture(attack, event, split, event.steps * rounds))
    return attacks


def _splits_to_attack(event: SampledSubject) -> dict[str, tuple[int, ...]]:
    """Ways to spread the subject's items over users that the caps allow: by name, the numbers of items at each user.

    As many at each as fit; and, where that can be worse, as evenly over as many users as possible.
    """
    full, rest = divmod(event.most_items, event.most_at_user)
    together = (event.most_at_user,) * full + ((rest,) if rest else ())
    each, more = divmod(event.most_items, event.most_users)
    apart = (each + 1,) * more + (each,) * (event.most_users - more)
    splits = {f"items at {len(together)} users": together}
    if sorted(apart) != sorted(together) and (event.noise == "user" or event.prob_user < 1):
        splits[f"items at {len(apart)} users"] = apart
    return splits


def _attack_mixture(attack: str, event: SampledSubject, split: tuple[int, ...], releases: int) -> ExactAttack:
    """The attack on `releases` releases by a subject whose items are spread like this over users."""
    if event.prob_user < 1 and (event.steps > 1 or event.noise == "user"):
        raise NotApplicable("users that are drawn first are the same in all steps of a round: no exact law is known")
    unit = event.clip_norm / event.std
    if event.prob_item == 1 and event.prob_user == 1:
        shift = sum(split) if event.noise == "sum" else math.sqrt(sum(part**2 for part in split))
        return _attack_shifted_normal(attack, shift * unit * math.sqrt(releases))
    if event.noise == "user":
        laws = [(_law_of_items_in_sum(event, (part,)), split.count(part)) for part in sorted(set(split))]
    else:
        laws = [(_law_of_items_in_sum(event, split), 1)]
    if releases == 1 and len(laws) == 1 and laws[0][1] == 1:
        return _attack_one_mixture("the released value along the difference", laws[0][0], unit)
    error = _mixture_error(event.most_items)
    cells_of_laws = [
        RepeatedCells(*_mixture_and_normal_masses(law, unit), releases * times, error) for law, times in laws
    ]
    return attack_likelihood_ratios(attack, cells_of_laws, pure_eps=math.inf)


def _mixture_error(items: int) -> float:
    """More than the error of the law of a mixture over so many items, all cells together."""
    return 256 * ULP * (2 + items) + 1e-24


def _attack_one_mixture(attack: str, items_law: np.ndarray, shift_per_item: float) -> ExactAttack:
    """The attack on a single release of a mixture of shifted Gaussians, against the unshifted one.

    The likelihood ratio rises with the value, so thresholds on the value are best, and tails are closed forms.

    Arguments:
        items_law: the probabilities of 0, 1, ... items.
        shift_per_item: the shift of one item, in standard deviations.
    """
    likely = np.flatnonzero(items_law > _NEVER)
    shifts = shift_per_item * likely
    log_weights = np.log(items_law[likely]).astype(np.float64)
    cuts = np.linspace(-_FAR, float(shifts[-1]) + _FAR, _CELLS + 1)
    tails = [np.empty(len(cuts)), np.empty(len(cuts))]
    for start in range(0, len(cuts), 512):
        gaps = np.subtract.outer(cuts[start : start + 512], shifts)
        for tail, sign in zip(tails, (1, -1), strict=True):
            tail[start : start + 512] = logsumexp(log_weights + log_ndtr(sign * gaps), axis=1)
    plain = log_masses_of_cells(log_ndtr(cuts), log_ndtr(-cuts))
    return ExactAttack(
        attack=attack, log_first=log_masses_of_cells(*tails), log_second=plain, slack=1e-28, pure_eps=math.inf
    )


def _law_of_items_in_sum(event: SampledSubject, split: Sequence[int]) -> np.ndarray:
    """The probabilities that 0, 1, ... of the subject's items are in a sum; `split` has the number at each user."""
    law = np.ones(1, np.longdouble)
    for items in split:
        start, masses = binomial_law(items, event.prob_item)
        here = np.concatenate([np.zeros(start, np.longdouble), masses]) * np.longdouble(event.prob_user)
        here[0] += 1 - np.longdouble(event.prob_user)
        law = np.convolve(law, here)
    return law


def _mixture_and_normal_masses(items_law: np.ndarray, shift_per_item: float) -> tuple[np.ndarray, np.ndarray]:
    """The masses of a mixture of shifted Gaussians and of the unshifted one, in the same narrow cells.

    What lies beyond all cells is below 1e-30.

    Arguments:
        items_law: the probabilities of 0, 1, ... items.
        shift_per_item: the shift of one item, in standard deviations.
    """
    likely = np.flatnonzero(items_law > _NEVER)
    largest_shift = shift_per_item * float(likely[-1])
    if largest_shift > _LARGEST_SHIFT:
        raise NotApplicable(
            f"shifts of {largest_shift:.3g} standard deviations: exact laws are kept to {_LARGEST_SHIFT:g}"
        )
    width = np.longdouble(1) / _PER_STD
    middles = (np.arange(int((largest_shift + 2 * _BEYOND) * _PER_STD)) + np.longdouble(0.5)) * width - _BEYOND
    mixed = sum(
        items_law[items] * _normal_masses_of_narrow_cells(middles - items * np.longdouble(shift_per_item), width)
        for items in likely
    )
    return np.asarray(mixed), _normal_masses_of_narrow_cells(middles, width)


def _normal_masses_of_narrow_cells(middles: np.ndarray, width: np.longdouble) -> np.ndarray:
    """The standard normal masses of narrow cells, by Taylor's series around their middles.

    The k-th term is He_2k (width / 2)^2k / (2k + 1)!; of those left out, the first is below 1e-18.
    """
    square = middles**2
    half = (width / 2) ** 2
    second = square - 1
    fourth = square**2 - 6 * square + 3
    sixth = square**3 - 15 * square**2 + 45 * square - 15
    series = 1 + half * second / 6 + half**2 * fourth / 120 + half**3 * sixth / 5040
    return np.maximum(width / np.sqrt(2 * _PI) * np.exp(-square / 2) * series, 0)
