"""What is left when shuffler and analyzer collude: the victim's own reports, with its name on them.

Nobody else hides the victim, so the law of its reports in both worlds is all there is. Reports that are independent add
up their log-likelihood ratios. Where which slots a client fills is a function of its data, or where the server gets the
update itself, the supports differ and no finite eps holds.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np

from dovetail.audit import exact
from dovetail.audit.attacks import central_sub, privunit, s_apes
from dovetail.audit.bounds import ExactAttack, disjoint
from dovetail.audit.exact import cells
from dovetail.audit.exact.counts import log_binomial
from dovetail.audit.exact.noise import skellam
from dovetail.audit.exact.ratios import many_alike
from dovetail.events import FixedSize, Poisson, Report
from dovetail.protocols import Cohort, Protocol
from dovetail.protocols.curator.dp_fl import DpFl
from dovetail.protocols.curator.fedavg import FedAvg
from dovetail.protocols.flame.ss_double import SsDouble
from dovetail.protocols.flame.ss_simple import SsSimple
from dovetail.protocols.flame.ss_topk import SsTopk
from dovetail.protocols.local.ldp_fl import LdpFl
from dovetail.protocols.local.privunit import PrivUnit
from dovetail.protocols.personal._personal import Personal
from dovetail.protocols.personal.apes import Apes
from dovetail.protocols.personal.s_apes import SApes
from dovetail.protocols.subjects.central_sub import CentralSub
from dovetail.protocols.subjects.local_sub import LocalSub
from dovetail.protocols.sums.binary_sum import BinarySum
from dovetail.protocols.sums.real_sum import RealSum
from dovetail.protocols.sums.split_and_mix import SplitAndMixProtocol
from dovetail.statements import NotApplicable

__all__ = ["exact_attacks"]

_OWN = "the victim's own reports"
_SERVER = "the victim's update, which the server gets as it is"


def exact_attacks(protocol: Protocol, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on one round of a settled protocol by all who receive anything of it.

    Guarantees:
        At delta = 0 exactly the local eps, to 1e-6, where reports are independent and the randomizer has a finite one.
    """
    match protocol:
        case SsSimple():
            return _reports(protocol.report, dim)
        case SsDouble():
            return _sampled_reports(protocol, dim)
        case SsTopk():
            return _largest(protocol, dim)
        case PrivUnit():
            return [_caps(protocol, dim)]
        case SApes() if protocol.kept(dim) < dim or protocol.sparsify == "threshold":
            settled = protocol.settle(cohort, dim)
            budgets = settled.eps_locals.max(keepdims=True)
            laws = s_apes.sparsified(settled, dim)
            return _cells(laws(budgets, 1.0)[0], laws(budgets, 0.0)[0], dim)
        case Personal():
            return _largest_budget(protocol, cohort, dim)
        case BinarySum():
            return _reports(Report(kind="rr", eps_local=protocol.local.eps_local), 1)
        case RealSum():
            if protocol.sharing is not None:
                return _own_noise(protocol.sharing)
            local = protocol.local
            return _reports(Report(kind="rr", eps_local=local.eps_local, levels=local.levels), protocol.slots)
        case SplitAndMixProtocol():
            return _own_noise(protocol)
        case LocalSub() if protocol.adaptive_z:
            return central_sub.exact_attacks(protocol, cohort, dim)
        case LdpFl() | LocalSub():
            return exact.exact_attacks(protocol.view(cohort, dim, neighbors=protocol.relation).round.mechanism)
        case CentralSub():
            return [_own_sum(protocol, cohort)]
        case DpFl() | FedAvg():
            return [_seen_by_the_server(cohort)]
    raise NotApplicable(f"no attack is known on a client's own reports under {protocol.name!r}")


def _reports(report: Report, count: int) -> list[ExactAttack]:
    """So many reports, all on the low end or all on the high end."""
    high, low = cells.of_report(report).ends(report.eps_local)
    return _cells(high, low, count)


def _cells(first: np.ndarray, second: np.ndarray, count: int, *, pure: float = 0.0) -> list[ExactAttack]:
    if len(first) == 2:
        logs = [log_binomial(count, float(law[1])) for law in (first, second)]
        return [ExactAttack(attack=f"ones among {_OWN}", log_first=logs[0], log_second=logs[1])]
    return many_alike(f"log-likelihood ratios of {_OWN}", first, second, count, pure=pure)


def _sampled_reports(protocol: SsDouble, dim: int) -> list[ExactAttack]:
    """Which coordinates are reported is seen, and depends on nobody's data."""
    if protocol.inclusion == "fixed-k":
        return _reports(protocol.report, protocol.fixed(dim))
    ends, beta = cells.of_report(protocol.report).ends(protocol.report.eps_local), np.longdouble(protocol.beta)
    high, low = (np.append(beta * end, 1 - beta) for end in ends)
    return _cells(high, low, dim)


def _largest(protocol: SsTopk, dim: int) -> list[ExactAttack]:
    """The signs of the k largest; or which they are, unless a client reports every coordinate."""
    rest, decoys = dim - protocol.k, protocol.per_client(dim) - protocol.k
    if decoys == rest:
        return _reports(protocol.report, protocol.k)
    changed = min(protocol.k, rest)
    by_chance = math.comb(rest - changed, decoys - changed) / math.comb(rest, decoys) if decoys >= changed else 0.0
    with np.errstate(divide="ignore"):
        logs = np.log([by_chance, 1 - by_chance])
    attack = "whether the victim reports all its largest coordinates of the first world"
    return [ExactAttack(attack=attack, log_first=np.array([0.0, -np.inf]), log_second=logs)]


def _caps(protocol: PrivUnit, dim: int) -> ExactAttack:
    towards, away = privunit.cap_probs(protocol, dim)
    logs = np.log([towards, 1 - towards - away, away])
    return ExactAttack(attack="the cap that the victim's message falls into", log_first=logs, log_second=logs[::-1])


def _largest_budget(protocol: Personal, cohort: Cohort, dim: int) -> list[ExactAttack]:
    budget = float(protocol.settle(cohort, dim).eps_locals.max())
    family = cells.partition(protocol.kind)
    if isinstance(protocol, Apes) and protocol.kind == "clip_laplace":
        family = cells.clipped((protocol.output_bound / protocol.clip_value - 1) / 2)
    high, low = family.ends(budget)
    return _cells(high, low, dim, pure=dim * budget * (1 - 1e-9))  # the ratio at the end of the box


def _own_noise(protocol: SplitAndMixProtocol) -> list[ExactAttack]:
    """A value with one client's part of the noise: its law where that fits, and Chernoff's bound on both tails."""
    shift = 2 * math.floor(protocol.known("scale") * protocol.clip_norm)
    variance = protocol.noise_part
    found = []
    with contextlib.suppress(NotApplicable):
        found.append(skellam("the victim's own noisy value", variance, shift, modulus=protocol.known("modulus")))
    for share in (0.5, 0.8, 0.9, 0.95, 0.98):
        above = math.ceil(shift * share)
        missed, alarm = (_log_skellam_tail(variance, distance) for distance in (shift - above, above))
        if math.exp(missed) + math.exp(alarm) > 0.99:  # upper bounds that say nothing
            continue
        first = np.array([missed, math.log(-math.expm1(missed))])
        second = np.array([math.log(-math.expm1(alarm)), alarm])
        attack = f"whether the victim's own noisy value is above {above}"
        found.append(ExactAttack(attack=attack, log_first=first, log_second=second, pure=math.inf))
    return found or [
        ExactAttack(attack="the victim's own noisy value", log_first=np.zeros(1), log_second=np.zeros(1), pure=math.inf)
    ]


def _log_skellam_tail(variance: float, distance: int) -> float:
    """An upper bound on log P(noise >= distance)."""
    slope = math.asinh(distance / variance)
    return variance * (math.hypot(1.0, distance / variance) - 1) - distance * slope


def _own_sum(protocol: CentralSub, cohort: Cohort) -> ExactAttack:
    """A user's sum is not zero if the subject's records are in it; the subject is that user's only one."""
    caps = [cap for cap in (protocol.items_per_user, protocol.items_per_subject) if cap is not None]
    absent = (1 - protocol.rate) ** min(caps, default=1)
    absent = 1 - _prob_drawn(cohort) * (1 - absent)
    with np.errstate(divide="ignore"):
        there = np.log([absent, 1 - absent])
    return ExactAttack(attack=_SERVER, log_first=there, log_second=np.array([0.0, -np.inf]))


def _seen_by_the_server(cohort: Cohort) -> ExactAttack:
    prob = _prob_drawn(cohort)
    if prob == 1:
        return disjoint(_SERVER)
    logs = np.array([math.log(prob), -math.inf, math.log1p(-prob)])
    return ExactAttack(attack=_SERVER, log_first=logs, log_second=logs[[1, 0, 2]])


def _prob_drawn(cohort: Cohort) -> float:
    match cohort.participation:
        case Poisson(prob=prob):
            return prob
        case FixedSize(size=size, population=population):
            return size / population
    return 1.0
