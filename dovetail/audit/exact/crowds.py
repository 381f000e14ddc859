"""Attacks on shuffled crowds: every message gets a score, and the sum over all messages is the statistic.

The victim holds the low end in one world and the high end in the other, in every coordinate. What the others hold is
the attack's choice, for a promise covers all inputs: all the low end, or a level that the victim does not hold. (The
high end is the mirror image; others in the middle, or at both ends, only add noise.) Messages of colluders are known
and set aside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import cells
from dovetail.audit.exact.cells import ULP, Binomial, attack_counts, attack_two_counts, binomial_law
from dovetail.audit.exact.registry import attacks_on_event
from dovetail.audit.exact.sums import Mixture, RepeatedCells, SumPart, attack_likelihood_ratios, attack_sums
from dovetail.events import PaddedBernoulli, PaddedTopk, Report, Shuffled
from dovetail.statements import NotApplicable

__all__ = ["attack_padded_bernoulli", "attack_padded_topk", "attack_shuffled"]

_NEGLIGIBLE = 1e-12  # a probability of overflow that costs an attack nothing


class _Messages(NamedTuple):
    """`times` independent messages: the probabilities of their cells, and the score of each cell, an integer."""

    masses: np.ndarray
    scores: np.ndarray
    times: int


class _Crowd:
    """The laws of one report at either end, and attacks by the scores of messages that have such laws.

    `high` and `low` are the probabilities of a report's cells at the ends, `blanket` those of a dummy.
    """

    def __init__(self, report: Report) -> None:
        if report.kind == "generic":
            raise NotApplicable("the randomizer is not known from an event of kind 'generic': no exact attack")
        family = cells.cells_of_report(report)
        self.report = report
        self.high, self.low = family.masses_at_ends(report.eps_local)
        uniform = report.kind == "rr"
        self.blanket = np.full_like(self.low, 1) / len(self.low) if uniform else family.masses(report.eps_local, 0.5)
        self.binary = len(self.low) == 2

    def masses_on_level(self, index: int) -> np.ndarray:
        """The probabilities of a report's cells for an input on level `index` (from 0) of randomized response."""
        return cells.cells_of_report(self.report).masses(self.report.eps_local, index / (self.report.levels - 1))

    def score_of_each_cell(self, others: np.ndarray, *, messages: int) -> np.ndarray:
        """The score of each cell: integers whose sum over all messages tells high from low.

        Arguments:
            others: the mean law of the other messages.
            messages: how many there are, which decides how fine scores need to be.
        """
        if self.binary:
            return np.arange(2)
        return cells.score_cells(self.high, self.low, others, messages=messages)

    def as_sum_part(self, masses: np.ndarray, scores: np.ndarray, times: int) -> SumPart:
        """The scores of `times` messages of this law, as a part of a sum."""
        return SumPart(masses=cells.law_of_score(masses, scores), times=times, error=cells.rounding_error(masses))

    def attack_sum_of_scores(
        self, attack: str, first: Sequence[_Messages], second: Sequence[_Messages], *, slack: float = 0.0
    ) -> ExactAttack:
        """The attack by the sum of the scores of all messages.

        Arguments:
            first: all messages in the first world; `second` likewise. What is the same object in both is computed once.
            slack: the probability that the crowd is not as assumed.
        """
        if self.binary:
            try:
                bits = [[Binomial(trials=m.times, prob=float(m.masses[1])) for m in world] for world in (first, second)]
                return attack_counts(attack, bits[0], bits[1], slack=slack)
            except NotApplicable:
                pass  # too many bits for a convolution
        summands = {id(part): self.as_sum_part(part.masses, part.scores, part.times) for part in (*first, *second)}
        parts = [[summands[id(part)] for part in world] for world in (first, second)]
        return attack_sums(attack, parts[0], parts[1], slack=slack)

    def attack_slot_counts(
        self, attack: str, first: Sequence[_Messages], second: Sequence[_Messages], slots: int, *, slack: float = 0.0
    ) -> list[ExactAttack]:
        """The attack by the likelihood ratios of all slots' counts of ones: no statistic tells more.

        None where reports are not bits; nor for one slot, where the count itself does.

        Arguments:
            first: the messages of one slot in the first world; `second` likewise.
            slots: how many independent slots there are.
        """
        if not self.binary or slots == 1:
            return []
        error = 64 * ULP * (1 + sum(m.times for m in first))
        cells_of_slots = RepeatedCells(_law_of_ones(first), _law_of_ones(second), slots, error)  # most telling: no ones
        return [attack_likelihood_ratios(attack, [cells_of_slots], slack=slack + slots * 1e-30)]


def _law_of_ones(messages: Sequence[_Messages]) -> np.ndarray:
    """The probabilities of 0, 1, ... ones in a slot; what is cut off is below 1e-30."""
    law = np.ones(1, np.longdouble)
    for part in messages:
        if part.times:
            start, masses = binomial_law(part.times, part.masses[1])
            law = np.convolve(law, np.concatenate([np.zeros(start, np.longdouble), masses]))
    return law


@attacks_on_event.register(Shuffled)
def attack_shuffled(event: Shuffled, rounds: int) -> list[ExactAttack]:
    """Attacks on a shuffle in which every honest user sends a report on every coordinate."""
    if event.report.kind == "cap":
        return _attack_caps(event, rounds)
    crowd = _Crowd(event.report)
    others = event.honest - 1
    slots = event.coordinates * rounds
    messages = event.honest * slots
    scores = crowd.score_of_each_cell(crowd.low, messages=messages)
    crowded = _Messages(crowd.low, scores, others * slots)
    first, second = (_Messages(law, scores, slots) for law in (crowd.high, crowd.low))
    attacks = [
        crowd.attack_sum_of_scores("sum over all messages, others at the low end", [crowded, first], [crowded, second])
    ]
    one_slot = [[crowded._replace(times=others), world._replace(times=1)] for world in (first, second)]
    attacks += crowd.attack_slot_counts(
        "likelihood ratios of all counts, others at the low end", one_slot[0], one_slot[1], slots
    )
    if event.report.kind == "rr" and event.report.levels > 2:
        attacks += _attack_from_other_levels(crowd, others, slots)
    return attacks


def _attack_caps(event: Shuffled, rounds: int) -> list[ExactAttack]:
    """The attack on one shuffled message per user that is drawn from a cap, as PrivUnit's are.

    The victim's cap is around one direction or its opposite; all others' are around the opposite.
    """
    if event.coordinates * rounds > 1:
        raise NotApplicable("no exact attack on several messages per user that are drawn from caps")
    away = event.report.mass * event.report.gamma
    towards = away * math.exp(event.report.eps_local)
    attack = "messages on the victim's cap and on the opposite one, others opposite"
    return [attack_two_counts(attack, event.honest - 1, (away, towards), (towards, away), (away, towards))]


def _attack_from_other_levels(crowd: _Crowd, others: int, slots: int) -> list[ExactAttack]:
    """Attacks with all others on a level of randomized response that is neither of the victim's, or on one of them.

    By the sum of scores; for one slot also by how many reports there are on each of the victim's two levels.
    """
    law = crowd.masses_on_level(1)
    attacks = []
    scores = np.zeros(len(law), np.int64)
    scores[0] = 0
    scores[1:-1] = 1
    scores[-1] = 2
    crowded = _Messages(law, scores, others * slots)
    first, second = (_Messages(own, scores, slots) for own in (crowd.high, crowd.low))
    attacks.append(
        crowd.attack_sum_of_scores(
            "reports on one of two levels, others at a third", [crowded, first], [crowded, second]
        )
    )
    if slots == 1:
        ends = [(float(own[0]), float(own[-1])) for own in (law, crowd.high, crowd.low)]
        at_low = (float(crowd.low[0]), float(crowd.low[-1]))
        attacks.append(attack_two_counts("reports on each of two levels, others at a third", others, *ends))
        attacks.append(
            attack_two_counts("reports on each of two levels, others at one of them", others, at_low, *ends[1:])
        )
    return attacks


@attacks_on_event.register(PaddedBernoulli)
def attack_padded_bernoulli(event: PaddedBernoulli, rounds: int) -> list[ExactAttack]:
    """The attack where users report each coordinate with a probability, and dummies fill every slot up to `pad_to`.

    All others that report a coordinate report the low end. The probability that they and the victim do not fit into a
    slot goes into the slack.
    """
    crowd = _Crowd(event.report)
    others = event.honest - 1
    slots = event.coordinates * rounds
    places = event.pad_to - event.colluders - 1  # beside the victim's, or that of the dummy in its place
    start, weights = binomial_law(others, event.inclusion)
    fits = max(0, places + 1 - start)
    overflow = float(binom.sf(places, others, event.inclusion)) * 1.01 if fits < len(weights) else 0.0
    if not fits:
        raise NotApplicable(f"slots of pad_to={event.pad_to} overflow as a rule, and no exact law is known for that")
    beta = np.longdouble(event.inclusion)
    scores = crowd.score_of_each_cell(crowd.blanket, messages=event.pad_to * slots)
    crowded = Mixture(
        some=crowd.as_sum_part(crowd.low, scores, 1),
        rest=crowd.as_sum_part(crowd.blanket, scores, 1),
        total=places,
        start=start,
        weights=weights[:fits],
        times=slots,
    )
    mixed = (beta * law + (1 - beta) * crowd.blanket for law in (crowd.high, crowd.low))
    first, second = (crowd.as_sum_part(law, scores, slots) for law in mixed)
    name = "sum over all messages, others that report at the low end"
    return [attack_sums(name, [crowded, first], [crowded, second], slack=slots * (overflow + 1e-33))]


@attacks_on_event.register(PaddedTopk)
def attack_padded_topk(event: PaddedTopk, rounds: int) -> list[ExactAttack]:
    """Attacks where users report their largest coordinates, and dummies fill every slot up to `pad_to`.

    The victim turns the sign of all its largest coordinates; or it has others, in slots that are full without it.
    """
    crowd = _Crowd(event.report)
    slots = event.top * rounds
    attacks = _attack_turned_signs(event, crowd, slots)
    spare = event.honest - 1 - 2 * event.pad_to  # others that report neither half, and need coordinates of their own
    if event.decoys == 0 and spare >= 0 and event.coordinates >= (3 if spare else 2) * event.top:
        attacks.append(_attack_full_slots(event, crowd, slots))
    return attacks


def _attack_turned_signs(event: PaddedTopk, crowd: _Crowd, slots: int) -> list[ExactAttack]:
    """Attacks on the signs of the victim's largest coordinates, which as many others report, low, as fit.

    Dummies and decoys fill up the slots.
    """
    places = event.pad_to - event.colluders - 1
    others = event.honest - 1
    companions, overflow = _companions_and_overflow_prob(event, places, others, slots)
    average = (companions * crowd.low + (places - companions) * crowd.blanket) / places
    scores = crowd.score_of_each_cell(average, messages=event.pad_to * slots)
    crowded = [_Messages(crowd.low, scores, companions), _Messages(crowd.blanket, scores, places - companions)]
    one_slot = [[*crowded, _Messages(law, scores, 1)] for law in (crowd.high, crowd.low)]
    everywhere = [part._replace(times=part.times * slots) for part in crowded]
    all_slots = [[*everywhere, world[-1]._replace(times=slots)] for world in one_slot]
    where = f"the victim's {event.top} coordinates, its signs turned"
    attacks = [crowd.attack_sum_of_scores(f"sum over {where}", all_slots[0], all_slots[1], slack=overflow)]
    return attacks + crowd.attack_slot_counts(
        f"likelihood ratios of the counts of {where}", one_slot[0], one_slot[1], slots, slack=overflow
    )


def _companions_and_overflow_prob(event: PaddedTopk, places: int, others: int, slots: int) -> tuple[int, float]:
    """How many others report the victim's coordinates, and the probability that decoys of the rest overflow a slot.

    Arguments:
        places: in a slot beside the victim's.
        others: honest users beside the victim.
        slots: of the victim's coordinates, over all rounds.
    """
    rest = event.coordinates - event.top
    if others <= places:
        return others, 0.0
    if rest < event.top:
        raise NotApplicable(
            "others cannot keep off the victim's coordinates, and no exact law is known if slots overflow"
        )
    if event.decoys == 0:
        return places, 0.0
    prob = event.decoys / rest

    def overflow_prob(companions: int) -> float:
        return slots * float(binom.sf(places - companions, others - companions, prob)) * 1.01

    low, high = 0, places
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if overflow_prob(middle) <= _NEGLIGIBLE else (low, middle)
    return low, overflow_prob(low)


def _attack_full_slots(event: PaddedTopk, crowd: _Crowd, slots: int) -> ExactAttack:
    """The victim's coordinates in either world are full, and its report displaces another that says the opposite.

    `pad_to` others report the coordinates of the first world, all low, as many those of the second, all high. The
    victim's report joins, high or low, and one of all is dropped: the victim's with probability 1 / (pad_to + 1).
    """
    kept = np.longdouble(event.pad_to) / (event.pad_to + 1)
    low, high = crowd.low, crowd.high
    at_low = crowd.score_of_each_cell(low, messages=2 * event.pad_to * slots)
    at_high = crowd.score_of_each_cell(high, messages=2 * event.pad_to * slots)
    full, less = event.pad_to * slots, (event.pad_to - 1) * slots
    first = [
        _Messages(low, at_low, less),
        _Messages(kept * high + (1 - kept) * low, at_low, slots),
        _Messages(high, at_high, full),
    ]
    second = [
        _Messages(low, at_low, full),
        _Messages(high, at_high, less),
        _Messages(kept * low + (1 - kept) * high, at_high, slots),
    ]
    return crowd.attack_sum_of_scores(
        f"sum over 2 x {event.top} full coordinates, of which the victim joins one half", first, second
    )
