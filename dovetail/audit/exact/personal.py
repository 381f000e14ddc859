"""Attacks on shuffled crowds whose users have budgets of their own.

The statistic is that of `crowds`: the sum of the messages' scores. Every other user has a law of its own, so that the
characteristic function of the crowd is a product over users. Few frequencies matter: the others are given up as soon
as the users looked at so far make the product negligible, for no further user can make it larger. What is left is
computed in extended precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import cells, sums
from dovetail.audit.exact.cells import ULP
from dovetail.audit.exact.registry import attacks_on_event
from dovetail.audit.exact.sums import SumPart
from dovetail.events import Personalized
from dovetail.statements import NotApplicable

__all__ = ["Laws", "attack_crowd", "attack_personalized", "laws_with_threshold"]

Laws = Callable[[np.ndarray, float], np.ndarray]  # budgets, position of the input -> cell masses, one row per user

_GIVEN_UP = -90.0  # log of the size at which a product counts as nothing
_USERS, _FREQUENCIES = 250, 4096  # how many are looked at together, which bounds memory
_DOUBLE = 2.0**-52  # the rounding of a float64
_FINEST = 16.0  # steps of a score to its standard deviation


@attacks_on_event.register(Personalized)
def attack_personalized(event: Personalized, rounds: int) -> list[ExactAttack]:
    """Attacks on the users with the largest and with the median budget, with all others at the low end.

    The colluders are those with the smallest budgets, whose noise hides the victim best. A median equal to the largest
    budget is not attacked again.
    """
    budgets = np.asarray(event.eps_locals)
    family = cells.cells_of_randomizer(
        event.kind, levels=event.levels, narrowest=float(budgets.max()), widest=float(budgets.min())
    )
    laws: Laws = family.masses
    if event.threshold:
        laws = laws_with_threshold(cells.clip_laplace_cells(0.0), event.threshold / 2, eps_fresh=float(budgets.min()))
    victims = {"largest": int(np.argmax(budgets)), "median": int(np.argsort(budgets)[len(budgets) // 2])}
    attacks: list[ExactAttack] = []
    for name, victim in victims.items():
        if attacks and budgets[victim] == budgets.max():
            continue
        others = np.sort(np.delete(budgets, victim))[event.colluders :]
        attack = f"sum over all messages, victim with the {name} budget {budgets[victim]:.4g}, others at the low end"
        attacks.append(attack_crowd(attack, laws, float(budgets[victim]), others, slots=event.coordinates * rounds))
    return attacks


def laws_with_threshold(cells_of_report: cells.Cells, cut: float, *, eps_fresh: float) -> Laws:
    """The laws of Clip-Laplace reports that are drawn anew around the centre where they are close to it.

    Arguments:
        cells_of_report: the cells of reports without a threshold.
        cut: how far from the centre a report must be to be kept.
        eps_fresh: the budget of the reports that are drawn anew.
    """
    overhang = cells_of_report.overhang
    cuts = np.unique(np.concatenate([cells_of_report.cuts, [0.5 - cut, 0.5 + cut]]))
    family = dataclasses.replace(cells_of_report, cuts=cuts)
    middles = (np.concatenate([[-overhang], cuts]) + np.concatenate([cuts, [1 + overhang]])) / 2
    is_kept = np.abs(middles - 0.5) >= cut

    def law(budgets: np.ndarray, position: float) -> np.ndarray:
        report = family.masses(budgets, position) * is_kept
        return report + (1 - report.sum(axis=-1, keepdims=True)) * family.masses(eps_fresh, 0.5)

    return law


def attack_crowd(
    attack: str, laws: Laws, victim_budget: float, other_budgets: np.ndarray, *, slots: int
) -> ExactAttack:
    """The attack by the sum of the scores of all messages.

    Arguments:
        attack: how the attack is described.
        laws: the probabilities of a report's cells, for budgets and the position of the input.
        victim_budget: the victim's budget; it holds the high end or the low one.
        other_budgets: everybody else's budgets; they hold the low end.
        slots: how many independent slots every user has a message in, all of the same laws.
    """
    budgets, users = np.unique(other_budgets, return_counts=True)
    crowd = laws(budgets, 0.0)
    mean = users @ crowd / len(other_budgets)
    high, low = (laws(np.array([victim_budget]), end)[0] for end in (1.0, 0.0))
    points = cells.score_cells(high, low, mean, messages=(len(other_budgets) + 1) * slots, max_steps_per_std=_FINEST)
    values, group = np.unique(points, return_inverse=True)
    grouped = np.zeros((len(budgets), len(values)), np.longdouble)
    np.add.at(grouped.T, group, crowd.T)
    average = SumPart(masses=cells.law_of_score(mean, points), times=len(other_budgets) * slots)
    own = [SumPart(masses=cells.law_of_score(law, points), times=slots) for law in (high, low)]
    size, centre = sums.modulus_and_centre([average, own[0]], [average, own[1]])
    value, error = _spectrum_of_crowd(grouped, users, values, size, slots)
    worlds = []
    for part in own:
        victim_value, victim_error = sums.spectrum_of([part], size)
        both = error + victim_error * np.exp(np.minimum(0.0, sums.log_abs(value))) + 8 * ULP * np.abs(value)
        worlds.append(sums.law_of_spectrum((value * victim_value, both.astype(np.float64)), size))
    return sums.attack_on_laws(attack, worlds, centre=centre)


def _spectrum_of_crowd(
    masses: np.ndarray, users_per_law: np.ndarray, scores: np.ndarray, size: int, slots: int
) -> sums.Spectrum:
    """The characteristic function of all users' scores in all slots, and the error of each value.

    It is computed where it matters; elsewhere the value is 0, and the error covers what was left out.

    Arguments:
        masses: the law of a score for each different budget, (budgets, values).
        users_per_law: how many users have each budget.
        scores: the score of each column of `masses`.
        size: of which roots of unity; values are at the first size // 2 + 1.
        slots: to which power the product over users is taken.
    """
    alive = _relevant_frequencies(masses.astype(np.float64), users_per_law * slots, scores, size)
    if len(alive) * len(masses) > 5e7:
        raise NotApplicable(f"the law of the sum is too rough: {len(alive)} frequencies matter for {len(masses)} laws")
    turn = 8 * np.arctan(np.longdouble(1)) / size
    angles = turn * ((alive[:, None] * scores) % size).astype(np.longdouble)
    roots = np.cos(angles) - 1j * np.sin(angles)
    product = np.ones(len(alive), np.clongdouble)
    log_size = np.zeros(len(alive))
    relative = np.zeros(len(alive))
    amount = (8 * masses.shape[1] + 520) * ULP
    for row, count in zip(masses, users_per_law.tolist(), strict=True):
        factor = roots @ row
        product = product * sums.power(factor, count)
        at_least = np.maximum(np.abs(factor).astype(np.float64), amount)
        log_size += count * np.log(at_least)
        relative += count * amount / at_least
    value = np.zeros(size // 2 + 1, np.clongdouble)
    error = np.full(size // 2 + 1, 2 * np.exp(_GIVEN_UP))
    value[alive] = sums.power(product, slots)
    error[alive] = 1.2 * slots * relative * np.exp(slots * log_size)
    return value, error


def _relevant_frequencies(masses: np.ndarray, times: np.ndarray, scores: np.ndarray, size: int) -> np.ndarray:
    """The frequencies, from 0 to size // 2, at which the product over users may be larger than e^`_GIVEN_UP`.

    Arguments:
        masses: the law of a score for each kind of user, (kinds, values).
        times: how often each kind occurs in the product.
        scores: the score of each column of `masses`.
    """
    relevant = []
    for start in range(0, size // 2 + 1, _FREQUENCIES):
        alive = np.arange(start, min(start + _FREQUENCIES, size // 2 + 1))
        angles = (2 * np.pi / size) * ((alive[:, None] * scores) % size)
        cos = np.cos(angles)
        sin = np.sin(angles)
        log_size = np.zeros(len(alive))
        looked_at = 0
        while looked_at < len(masses) and len(alive):
            more = min(_USERS, 8 + looked_at)
            block, count = masses[looked_at : looked_at + more].T, times[looked_at : looked_at + more]
            looked_at += more
            square = (cos @ block) ** 2 + (sin @ block) ** 2
            log_size += np.log(np.sqrt(square) + 16 * len(scores) * _DOUBLE) @ count
            left = log_size > _GIVEN_UP
            if not left.all():
                alive, cos, sin, log_size = alive[left], cos[left], sin[left], log_size[left]
        relevant.append(alive)
    return np.concatenate(relevant)
