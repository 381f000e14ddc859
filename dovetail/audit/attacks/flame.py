"""Attacks on FLAME's protocols, SS-Simple, SS-Double and SS-Topk, in their printed and repaired forms.

In the printed forms all reports of a client travel as one message, and counts or indices follow the data.

*SS-Simple* as printed shuffles whole messages: one message with too many ones is the victim's.

*SS-Double with a fixed number of coordinates*. As printed, a client's k reports are one message, and dummies are put
into messages of the same length: how many messages of how many ones there are shows the victim. Without links, a client
still sends exactly k reports, and the number of ones in all slots together is a sum of binomials. That a slot overflows
is charged to the slack.

*SS-Topk*, where counts or indices show, which are a function of the data:

- A surplus that is kept: `n - 1` others report a coordinate, and the number of its messages is n if the victim does,
  too, else n - 1.
- Whole messages without decoys: the victim's has one set of indices or the other; nobody else has either. Dummies come
  in messages, too, but there are more sets of k indices than messages.
- Whole messages of all coordinates: messages with many ones, as for SS-Simple.

*Messages that travel whole*: a message of k reports is a point that the victim pulls to one side in all of them at
once. The statistic is the number of messages with at least t ones, a report counting as a one if it lies in the upper
half: others, who hold the low end, hardly ever get there, and dummies, which are fair coins, rarely. All thresholds t
that the victim may reach are tried, and a score that grows with the number of ones as the likelihood ratio does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

from dovetail.audit import exact
from dovetail.audit.attacks import _own
from dovetail.audit.attacks.registry import attacks_on_own_reports, shows_less_than_event, stronger_attacks
from dovetail.audit.bounds import ExactAttack, disjoint_attack
from dovetail.audit.exact import cells
from dovetail.audit.exact.cells import ULP, Binomial, attack_counts, binomial_law
from dovetail.audit.exact.sums import SumPart, attack_sums
from dovetail.events import Report, Shuffled
from dovetail.protocols import Cohort
from dovetail.protocols.flame.ss_double import SsDouble
from dovetail.protocols.flame.ss_simple import SsSimple
from dovetail.protocols.flame.ss_topk import SsTopk

__all__ = [
    "OneProbs",
    "attack_ss_double_client",
    "attack_ss_double_round",
    "attack_ss_simple_client",
    "attack_ss_simple_round",
    "attack_ss_topk_client",
    "attack_ss_topk_round",
    "attack_whole_messages",
    "one_probs",
]

_RAREST = 1e-9  # numbers of ones that the victim's message exceeds less often are not tried as thresholds
_MOST_THRESHOLDS = 48  # on the number of ones in a message


@stronger_attacks.register(SsSimple)
def attack_ss_simple_round(protocol: SsSimple, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on SS-Simple as printed, where a client's reports travel as one message; none where they do not."""
    if protocol.linkage != "vector":
        return []
    users = cohort.crowd()
    others = users - cohort.colluders - 1
    apart = Shuffled(report=protocol.report, num_users=users, colluders=cohort.colluders, coordinates=dim)
    attacks = attack_whole_messages(one_probs(protocol.report), dim, others=others, dummies=0)
    return attacks + exact.exact_attacks(apart)  # links may be ignored


@attacks_on_own_reports.register(SsSimple)
def attack_ss_simple_client(protocol: SsSimple, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on the victim's reports, one on every coordinate."""
    return _own.attacks_on_reports(protocol.report, dim)


shows_less_than_event.register(SsDouble, lambda protocol: protocol.inclusion == "fixed-k")


@stronger_attacks.register(SsDouble)
def attack_ss_double_round(protocol: SsDouble, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on SS-Double as printed, where exactly k coordinates are drawn; none on the repaired form.

    What its event says is all there is to attack in the repaired form. The probability that some slot gets more than
    `pad_to` reports goes into the slack.
    """
    if protocol.inclusion != "fixed-k":
        return []
    users = cohort.crowd()
    width = protocol.num_selected(dim)
    pad_to = protocol.padding.pad_to
    others = users - cohort.colluders - 1
    overflow = dim * float(binom.sf(pad_to, users, width / dim)) * 1.01
    missing = dim * pad_to - users * width
    bits = one_probs(protocol.report)
    high, low, dummy = bits
    crowd = [Binomial(trials=others * width, prob=low), Binomial(trials=max(0, missing), prob=dummy)]
    worlds = [[*crowd, Binomial(trials=width, prob=prob)] for prob in (high, low)]
    attacks = [attack_counts("ones in all slots together, others at the low end", worlds[0], worlds[1], slack=overflow)]
    if protocol.linkage == "vector":
        dummies = _count_full_dummy_messages(max(0, missing), width)
        attacks += attack_whole_messages(bits, width, others=others, dummies=dummies, slack=overflow)
    return attacks


def _count_full_dummy_messages(dummies: int, width: int) -> int:
    """Messages of as many dummies as a client sends reports; shorter ones are no client's, and are set aside."""
    messages = max(1, -(-dummies // width))
    return max(0, min(messages, dummies - (width - 1) * messages))


@attacks_on_own_reports.register(SsDouble)
def attack_ss_double_client(protocol: SsDouble, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on the victim's reports on the coordinates that it drew; the draw depends on nobody's data."""
    if protocol.inclusion == "fixed-k":
        return _own.attacks_on_reports(protocol.report, protocol.num_selected(dim))
    ends = cells.cells_of_report(protocol.report).masses_at_ends(protocol.report.eps_local)
    beta = np.longdouble(protocol.beta)
    high, low = (np.append(beta * end, 1 - beta) for end in ends)
    return _own.attacks_on_laws(high, low, dim)


@stronger_attacks.register(SsTopk)
def attack_ss_topk_round(protocol: SsTopk, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on SS-Topk as printed: whole messages, and a surplus of messages that is kept; none where neither is so.

    Decoys are the coordinates that a client reports beside its k largest.
    """
    users = cohort.crowd()
    pad_to = protocol.padding.pad_to
    decoys = protocol.per_client(dim) - protocol.k
    rest = dim - protocol.k
    if protocol.linkage == "vector":
        if decoys == rest:
            others = users - cohort.colluders - 1
            dummies = max(0, pad_to - users)
            return attack_whole_messages(one_probs(protocol.report), protocol.k, others=others, dummies=dummies)
        messages = users + -(-dim * pad_to // protocol.k)
        if decoys == 0 and math.comb(dim, protocol.k) > messages + 1:
            return [disjoint_attack("the indices of the victim's message")]
        return []
    if protocol.overflow == "keep" and users > pad_to and decoys < rest:
        with np.errstate(divide="ignore"):
            by_chance = np.log([1 - decoys / rest, decoys / rest])
        attack = "the number of messages of a coordinate that all others report"
        return [ExactAttack(attack=attack, log_first=np.array([-np.inf, 0.0]), log_second=by_chance)]
    return []


@attacks_on_own_reports.register(SsTopk)
def attack_ss_topk_client(protocol: SsTopk, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on the victim's reports: by the signs of its k largest coordinates where it reports all of them.

    Otherwise by which coordinates it reports: surely its k largest, and others only as decoys, by chance.
    """
    rest = dim - protocol.k
    decoys = protocol.per_client(dim) - protocol.k
    if decoys == rest:
        return _own.attacks_on_reports(protocol.report, protocol.k)
    changed = min(protocol.k, rest)
    by_chance = math.comb(rest - changed, decoys - changed) / math.comb(rest, decoys) if decoys >= changed else 0.0
    with np.errstate(divide="ignore"):
        logs = np.log([by_chance, 1 - by_chance])
    attack = "whether the victim reports all its largest coordinates of the first world"
    return [ExactAttack(attack=attack, log_first=np.array([0.0, -np.inf]), log_second=logs)]


class OneProbs(NamedTuple):
    """The probability of a one in a report on the high end, on the low end, and in a dummy."""

    high: float
    low: float
    dummy: float


def one_probs(report: Report) -> OneProbs:
    """A report seen as a bit, which is one in the upper half of what it may be."""
    family = cells.cells_of_report(report)
    high, low = family.masses_at_ends(report.eps_local)
    upper = np.arange(len(high)) >= (len(high) + 1) // 2
    if family.cuts is not None:
        upper = np.concatenate([[False], family.cuts >= 0.5])
    dummy = float(np.mean(upper)) if report.kind == "rr" else 0.5
    return OneProbs(float(high[upper].sum()), float(low[upper].sum()), dummy)


def attack_whole_messages(
    bits: OneProbs, width: int, *, others: int, dummies: int, slack: float = 0.0
) -> list[ExactAttack]:
    """Count the messages that look like the victim's: by likelihood, and by each threshold on their ones.

    Arguments:
        bits: how likely a report is seen as a one.
        width: how many reports travel in a message.
        others: how many users hold the low end.
        dummies: how many messages of dummies there are.
        slack: the probability that the crowd is not as assumed.
    """
    attacks = [_attack_whole_likelihoods(bits, width, others, dummies, slack)]
    high, low, dummy = bits
    largest = int(binom.isf(_RAREST, width, high))
    smallest = math.floor(width * min(high, max(low, dummy)))
    for least in np.unique(np.linspace(smallest, min(largest, width), _MOST_THRESHOLDS).round().astype(int)):
        reached = [float(binom.sf(least - 1, width, prob)) for prob in (high, low, dummy)]
        crowd = [Binomial(trials=others, prob=reached[1]), Binomial(trials=dummies, prob=reached[2])]
        worlds = [[*crowd, Binomial(trials=1, prob=prob)] for prob in reached[:2]]
        attacks.append(
            attack_counts(f"messages with at least {least} ones of {width}", worlds[0], worlds[1], slack=slack)
        )
    return attacks


def _attack_whole_likelihoods(bits: OneProbs, width: int, others: int, dummies: int, slack: float) -> ExactAttack:
    """The attack by the sum of (f_high - f_low) / g over all messages, as a function of a message's number of ones.

    f_high and f_low are the victim's laws, g is the mean law of the others and the dummies; where g is next to 0 the
    ratio is cut off. Arguments are those of `attack_whole_messages`.
    """
    high, low, dummy = (_law_of_ones(width, prob) for prob in bits)
    messages = others + dummies
    average = (others * low + dummies * dummy) / messages
    ratio = np.zeros(width + 1)
    np.divide(high - low, average, out=ratio, where=average > 1e-100, casting="unsafe")
    ratio = np.minimum(np.where(average > 1e-100, ratio, np.inf), 4.0 * messages)
    points = cells.integer_scores(ratio, average, messages=messages, max_steps_per_std=32.0)
    error = 64 * (width + 64) * ULP

    def as_sum_part(law: np.ndarray, times: int) -> SumPart:
        return SumPart(masses=cells.law_of_score(law, points), times=times, error=error)

    crowd = [as_sum_part(low, others), as_sum_part(dummy, dummies)]
    return attack_sums(
        "likelihood ratios of whole messages",
        [*crowd, as_sum_part(high, 1)],
        [*crowd, as_sum_part(low, 1)],
        slack=slack,
    )


def _law_of_ones(width: int, prob: float) -> np.ndarray:
    """The probabilities of 0, ..., width ones among so many bits, in extended precision; far tails are 0."""
    start, masses = binomial_law(width, prob)
    law = np.zeros(width + 1, np.longdouble)
    law[start : start + len(masses)] = masses
    return law
