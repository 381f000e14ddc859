"""Attacks on noisy releases: Gaussian, Laplace and Skellam noise, and sums over a subject's sampled items.

A neighbour moves the released value as far as the sensitivity allows. One Gaussian coordinate says it all, and rounds
add up to one Gaussian. Otherwise every release is cut into cells, whose log-likelihood ratios in whole steps are added
up over independent releases (`sums`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import log_ndtr, logsumexp

from dovetail.audit.bounds import ExactAttack, disjoint
from dovetail.audit.exact import cells, sums
from dovetail.audit.exact.cells import ULP, binomial_window
from dovetail.audit.exact.registry import in_sample, on_event
from dovetail.audit.exact.sums import RepeatedCells, attack_likelihoods, attack_repeated
from dovetail.events import Gaussian, Laplace, ReplacedUsers, SampledSubject, SkellamNoise
from dovetail.statements import Neighbors, NotApplicable

__all__ = [
    "attack_gaussian",
    "attack_laplace",
    "attack_replaced_users",
    "attack_sampled_subject",
    "attack_skellam",
    "attack_skellam_sum",
    "log_cells",
    "observe_sampled_gaussian",
]

_FAR = 38.0  # standard deviations: the smallest normal tail that a double holds
_CELLS = 8000
_BEYOND = 12.0  # standard deviations beyond all shifts that are cut into cells
_PER_STD = 400  # cells
_LARGEST_SHIFT = 500.0
_NEVER = 1e-30
_PI = 4 * np.arctan(np.longdouble(1))
_LARGEST = 2**22


@on_event.register(Gaussian)
def attack_gaussian(event: Gaussian, rounds: int) -> list[ExactAttack]:
    """The projection on the direction in which neighbours differ, added up over the rounds."""
    if event.std == 0:
        return [disjoint("the released value, to which no noise is added")]
    return [_attack_shifted_normal("the released value along the difference", event.mu * math.sqrt(rounds))]


@on_event.register(ReplacedUsers)
def attack_replaced_users(event: ReplacedUsers, rounds: int) -> list[ExactAttack]:
    """All of them turn from one direction to the other."""
    shift = 2 * event.clip_norm * event.users / event.std
    return [_attack_shifted_normal("the released value along the difference", shift * math.sqrt(rounds))]


def _attack_shifted_normal(attack: str, mu: float) -> ExactAttack:
    cuts = np.linspace(-_FAR, mu + _FAR, _CELLS + 1)
    laws = [log_cells(log_ndtr(cuts - shift), log_ndtr(shift - cuts)) for shift in (mu, 0.0)]
    return ExactAttack(attack=attack, log_first=laws[0], log_second=laws[1], slack=1e-300, pure=math.inf)


def log_cells(log_cdf: np.ndarray, log_sf: np.ndarray) -> np.ndarray:
    """The log masses between cuts and beyond the outer ones, from the logarithms of both tails at every cut."""
    with np.errstate(divide="ignore", invalid="ignore"):
        below = log_cdf[1:] + np.log(-np.expm1(np.minimum(log_cdf[:-1] - log_cdf[1:], 0.0)))
        above = log_sf[:-1] + np.log(-np.expm1(np.minimum(log_sf[1:] - log_sf[:-1], 0.0)))
    inner = np.where(log_cdf[1:] < math.log(0.5), below, above)
    return np.concatenate([log_cdf[:1], np.where(np.isnan(inner), -np.inf, inner), log_sf[-1:]])


@on_event.register(Laplace)
def attack_laplace(event: Laplace, rounds: int) -> list[ExactAttack]:
    """Every query moves by its sensitivity; at delta = 0 all answers beyond both values show the full ratio."""
    family = cells.partition("laplace")
    copies = event.count * rounds
    high, low = family.ends(event.eps_each)
    return attack_repeated("log-likelihood ratios of all answers", high, low, copies)


@on_event.register(SkellamNoise)
def attack_skellam_sum(event: SkellamNoise, rounds: int) -> list[ExactAttack]:
    """The noisy sum of one coordinate, in which the victim holds all it may; only whole numbers, so nothing is rounded.

    The shares of a coordinate, mixed or added up, give that sum, so it is seen, whatever else is.
    """
    shift = event.norms_apart * math.floor(event.scale * event.clip_norm) * rounds
    return [
        attack_skellam("the noisy sum of one coordinate", event.noise_variance * rounds, shift, modulus=event.modulus)
    ]


def attack_skellam(attack: str, variance: float, shift: int, *, modulus: int) -> ExactAttack:
    """A whole number with Skellam noise, moved by `shift`, seen modulo a divisor of the modulus."""
    wanted = 1 << math.ceil(math.log2(24 * math.sqrt(variance) + shift + 256))
    size = wanted if modulus % wanted == 0 else modulus
    if size > _LARGEST:
        raise NotApplicable(f"the noise spreads over {size} values, and exact laws are kept to {_LARGEST}")
    angles = 8 * np.arctan(np.longdouble(1)) * np.arange(size // 2 + 1) / size
    value = np.exp(-2 * np.longdouble(variance) * np.sin(angles / 2) ** 2)
    error = 64 * ULP * (1 + np.abs(np.log(np.maximum(value, 1e-300)))) * value
    masses, slack = sums.law((value.astype(np.clongdouble), error.astype(np.float64)), size)
    return sums.attack_on_laws(
        attack, [(np.roll(masses, shift), slack), (masses, slack)], centre=shift // 2, pure=math.inf
    )


@in_sample.register(Gaussian)
def observe_sampled_gaussian(event: Gaussian, prob: float, times: int) -> RepeatedCells:
    """A user who is drawn by a coin of this probability for each release, against nobody in its place."""
    if event.neighbors is not Neighbors.ADD_REMOVE or event.std == 0:
        raise NotApplicable("of Poisson samples, exact attacks are known on Gaussian sums, for adding a user")
    included = np.array([1 - np.longdouble(prob), prob], np.longdouble)
    return RepeatedCells(*_mixture_cells(included, event.mu), times, _error(items=1))


@on_event.register(SampledSubject)
def attack_sampled_subject(event: SampledSubject, rounds: int) -> list[ExactAttack]:
    """All items pull in one direction: the number of them in a sum is random, or its Gaussian shift is certain.

    Where users are drawn first, others' records are taken to be zero, so that they do not show who was drawn.
    """
    attacks = []
    for name, split in _splits(event).items():
        attack = f"log-likelihood ratios of all releases, {name}"
        attacks.append(_attack_mixture(attack, event, split, event.steps * rounds))
    return attacks


def _splits(event: SampledSubject) -> dict[str, tuple[int, ...]]:
    """Ways to spread the subject's items over users that the caps allow."""
    full, rest = divmod(event.most_items, event.most_at_user)
    together = (event.most_at_user,) * full + ((rest,) if rest else ())
    each, more = divmod(event.most_items, event.most_users)
    apart = (each + 1,) * more + (each,) * (event.most_users - more)
    splits = {f"items at {len(together)} users": together}
    if sorted(apart) != sorted(together) and (event.noise == "user" or event.prob_user < 1):
        splits[f"items at {len(apart)} users"] = apart
    return splits


def _attack_mixture(attack: str, event: SampledSubject, split: tuple[int, ...], releases: int) -> ExactAttack:
    if event.prob_user < 1 and (event.steps > 1 or event.noise == "user"):
        raise NotApplicable("users that are drawn first are the same in all steps of a round: no exact law is known")
    unit = event.clip_norm / event.std
    if event.prob_item == 1 and event.prob_user == 1:
        shift = sum(split) if event.noise == "sum" else math.sqrt(sum(part**2 for part in split))
        return _attack_shifted_normal(attack, shift * unit * math.sqrt(releases))
    if event.noise == "user":
        laws = [(_items_law(event, (part,)), split.count(part)) for part in sorted(set(split))]
    else:
        laws = [(_items_law(event, split), 1)]
    if releases == 1 and len(laws) == 1 and laws[0][1] == 1:
        return _attack_one_mixture("the released value along the difference", laws[0][0], unit)
    error = _error(event.most_items)
    cells_of_laws = [RepeatedCells(*_mixture_cells(law, unit), releases * times, error) for law, times in laws]
    return attack_likelihoods(attack, cells_of_laws, pure=math.inf)


def _error(items: int) -> float:
    """By how much the law of a mixture over so many items is off."""
    return 256 * ULP * (2 + items) + 1e-24


def _attack_one_mixture(attack: str, law: np.ndarray, unit: float) -> ExactAttack:
    """A single release: the mixture's likelihood ratio rises with the value, and tails are closed forms."""
    likely = np.flatnonzero(law > _NEVER)
    shifts = unit * likely
    log_weights = np.log(law[likely]).astype(np.float64)
    cuts = np.linspace(-_FAR, float(shifts[-1]) + _FAR, _CELLS + 1)
    tails = [np.empty(len(cuts)), np.empty(len(cuts))]
    for start in range(0, len(cuts), 512):
        gaps = np.subtract.outer(cuts[start : start + 512], shifts)
        for tail, sign in zip(tails, (1, -1), strict=True):
            tail[start : start + 512] = logsumexp(log_weights + log_ndtr(sign * gaps), axis=1)
    plain = log_cells(log_ndtr(cuts), log_ndtr(-cuts))
    return ExactAttack(attack=attack, log_first=log_cells(*tails), log_second=plain, slack=1e-28, pure=math.inf)


def _items_law(event: SampledSubject, split: Sequence[int]) -> np.ndarray:
    """The probabilities of 0, 1, ... of these items in a sum."""
    law = np.ones(1, np.longdouble)
    for items in split:
        start, masses = binomial_window(items, event.prob_item)
        here = np.concatenate([np.zeros(start, np.longdouble), masses]) * np.longdouble(event.prob_user)
        here[0] += 1 - np.longdouble(event.prob_user)
        law = np.convolve(law, here)
    return law


def _mixture_cells(law: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """The mixture of shifted Gaussians and the plain one, in cells; what lies beyond all cells is below 1e-30."""
    likely = np.flatnonzero(law > _NEVER)
    reach = unit * float(likely[-1])
    if reach > _LARGEST_SHIFT:
        raise NotApplicable(f"shifts of {reach:.3g} standard deviations: exact laws are kept to {_LARGEST_SHIFT:g}")
    width = np.longdouble(1) / _PER_STD
    middles = (np.arange(int((reach + 2 * _BEYOND) * _PER_STD)) + np.longdouble(0.5)) * width - _BEYOND
    mixed = sum(law[items] * _narrow_masses(middles - items * np.longdouble(unit), width) for items in likely)
    return np.asarray(mixed), _narrow_masses(middles, width)


def _narrow_masses(middles: np.ndarray, width: np.longdouble) -> np.ndarray:
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
