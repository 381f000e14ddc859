"""Dominating pairs of shuffled coordinates, and their composition.

Every event here reduces, coordinate by coordinate, to one biased coin among fair coins (`pairs.binomial`):

- `Shuffled`: the clone pair, for any eps_local-LDP report. The victim's coin has bias e^eps/(1 + e^eps), each other
  user is a fair coin with probability 2/(e^eps + 1), else exposed.
- `PaddedBernoulli` (SS-Double, repaired): the victim takes part with probability beta, otherwise a fair dummy stands in
  its place, so the tilt is beta tanh(eps/2); only users that take part can be exposed (docs/proofs/ss-double.md).
- `PaddedTopk` (SS-Topk): at most `top` such coins, 2 `top` where a surplus may be dropped (docs/proofs/ss-topk.md).

Where the randomizer is known there is a sharper pair: binary reports are known exactly, without revealing who is
exposed (`pairs.binary`), and Laplace reports, levels and caps by their blanket (`pairs.blanket_pair`). Coordinates are
shuffled independently, so they compose. In padded events `num_users` is the most that a round admits. A round on a
secret sample of fixed size has a pair of its own, made of the delta of the whole round (`symmetric.sampled_pair`).
"""

from __future__ import annotations

import contextlib
import functools
import math

import numpy as np

from dovetail import _validate
from dovetail.accounting import conversion, loss_distributions, numerics
from dovetail.accounting.conversion import RENYI
from dovetail.accounting.loss_distributions import PRIVACY_LOSS, Loss
from dovetail.accounting.pairs import binary, blanket_pair, symmetric
from dovetail.accounting.pairs.binary import BinaryReports
from dovetail.accounting.pairs.binomial import BinomialPair
from dovetail.accounting.pairs.symmetric import LARGEST_LOSS, SymmetricPair, sampled_pair
from dovetail.accounting.releases._base import Release, Sampling, Scale, releases
from dovetail.events import Crowd, Everyone, FixedSize, PaddedBernoulli, PaddedTopk, Report, Shuffled
from dovetail.statements import Bound, NotApplicable, Proof, Spent, Theorem

__all__ = [
    "ORDERS",
    "delta",
    "eps",
    "local_bound",
    "loss",
    "most_sampled_coordinates",
    "overflow_delta",
    "pair",
    "renyi",
    "resolution",
    "theorem",
]

CLONES = Theorem(
    key="FMT23.thm3.2",
    where="the clone pair of Feldman, McMillan, Talwar (SODA 2023), Thm. 3.2",
    url="https://arxiv.org/abs/2208.04591",
)
DOUBLE = Theorem(key="dovetail.ss-double", where="the Bernoulli-sampled coin of docs/proofs/ss-double.md")
TOPK = Theorem(key="dovetail.ss-topk", where="the full pairs of docs/proofs/ss-topk.md")
_UNREVEALED = "binary reports exactly (docs/proofs/binary.md)"
DOUBLE_EXACT = Theorem(key="dovetail.ss-double.exact", where=f"docs/proofs/ss-double.md, {_UNREVEALED}")
TOPK_EXACT = Theorem(key="dovetail.ss-topk.exact", where=f"the full pairs of docs/proofs/ss-topk.md, {_UNREVEALED}")
LOCAL = Theorem(
    key="DR14.thm3.16", where="basic composition of the reports of one client (Dwork, Roth 2014, Thm. 3.16)"
)

ORDERS = 1 + np.geomspace(0.05, 20_000, 300)  # the Renyi orders at which crowds are asked; do not write to them
_OUTWARD = 1 + 1e-9  # rounds up an eps or a delta by more than any rounding error in it
_UNDERFLOW = 1e-300  # added to a probability that may have underflowed
_MOST_USERS = 10**11  # a crowd of more users hides at least as well
_INDICES_TELL = "which coordinates a client reports depends on its data"


def theorem(event: Crowd) -> Theorem:
    """The theorem that gives the pair of this event: that of the sharper pair, where there is one."""
    _require_crowd(event)
    if not _exact_pair(event):
        return {Shuffled: CLONES, PaddedBernoulli: DOUBLE, PaddedTopk: TOPK}[type(event)]
    if _is_binary(event.report):
        return {Shuffled: binary.BINARY, PaddedBernoulli: DOUBLE_EXACT, PaddedTopk: TOPK_EXACT}[type(event)]
    return blanket_pair.BLANKETS if event.report.kind == "cap" else blanket_pair.BLANKET_PAIR


def pair(event: Crowd) -> BinomialPair:
    """The dominating coins of one round: all its coordinates, both directions, without its `overflow_delta`.

    Guarantees:
        Refuses a padded event with anything but binary randomized response: its dummies would not be fair coins.
        Refuses SS-Topk with both a possible surplus and colluders, who would see how many of their reports survive.
    """
    _require_crowd(event)
    tilt = math.tanh(event.report.eps_local / 2)  # 1 - tilt = 2/(e^eps + 1) is the probability of a fair coin
    match event:
        case Shuffled():
            others = min(event.honest, _MOST_USERS) - 1
            return BinomialPair(
                others=others,
                exposed=others,
                prob_exposed=_round_prob_up(tilt),
                tilt=_round_prob_up(tilt),
                folds=event.coordinates,
            )
        case PaddedBernoulli(inclusion=inclusion):
            _require_binary(event.report)
            return BinomialPair(
                others=event.pad_to - event.colluders - 1,
                exposed=event.honest - 1,
                prob_exposed=_round_prob_up(inclusion * tilt),
                tilt=_round_prob_up(inclusion * tilt),
                folds=event.coordinates,
            )
        case PaddedTopk(top=top):
            _require_binary(event.report)
            surplus = event.num_users > event.pad_to
            if surplus and event.colluders:
                raise NotApplicable(
                    "where a surplus may be dropped, colluders see how many of their own reports survive: "
                    f"SS-Topk with colluders needs num_users <= pad_to, got num_users={event.num_users}"
                )
            return BinomialPair(
                others=event.pad_to - event.colluders - 1,
                exposed=min(event.num_users, event.pad_to) - event.colluders - 1,
                prob_exposed=_round_prob_up(tilt),
                tilt=_round_prob_up(tilt),
                folds=2 * top if surplus else top,
            )


def _exact_pair(event: Crowd) -> SymmetricPair | None:
    """The pair of the randomizer itself (`binary`, `blanket_pair`), sharper than `pair`; None where there is none."""
    with contextlib.suppress(NotApplicable):
        if isinstance(event, Shuffled) and not _is_binary(event.report):
            return blanket_pair.pair(event)
        coins = pair(event)
        eps_local = event.report.eps_local
        inclusion = event.inclusion if isinstance(event, PaddedBernoulli) else 1.0
        exact = BinaryReports(others=coins.exposed, places=coins.others, eps_local=eps_local, inclusion=inclusion)
        return exact.pair(folds=coins.folds)
    return None


def renyi(event: Crowd, orders: np.ndarray) -> np.ndarray:
    """Upper bounds on the Renyi divergence of one round with everyone, all coordinates, at each order > 1.

    Guarantees:
        Never below the divergence of the pair in 50-digit arithmetic, at any order.
        Non-decreasing in eps_local, coordinates and order, non-increasing in num_users of `Shuffled` (up to 0.3 %
        where the blanket's nodes are used).
    """
    coins = pair(event)
    sharper = _exact_pair(event)
    bound = np.fmin(coins.renyi(orders), coins.folds * event.report.eps_local)
    return np.fmin(bound, sharper.renyi(orders)) if sharper else bound


@functools.lru_cache(maxsize=32)
def loss(event: Crowd, *, interval: float = 1e-4) -> Loss:
    """The privacy loss of one round with everyone, all coordinates, rounded up to multiples of `interval`.

    Both directions are equal. By the sharper pair where there is one; without `overflow_delta`.
    """
    return symmetric.folded_loss(_exact_pair(event) or pair(event), interval=interval)


def delta(event: Crowd, *, eps: float) -> float:
    """A delta at which one round is (eps, delta)-DP, rounded up, `overflow_delta` included.

    It is the smaller one of two: by Renyi divergences, and by the privacy loss where its grid is not too large.
    """
    _validate.non_negative(eps=eps)
    deltas = [_delta_by_renyi(event, eps)]
    with contextlib.suppress(NotApplicable):
        deltas.append(_delta_by_loss(event, eps))
    return numerics.as_probability_bound(min(deltas) * _OUTWARD + overflow_delta(event))


def _delta_by_renyi(event: Crowd, eps: float) -> float:
    """Delta of one round at eps by Renyi divergences, without its `overflow_delta`."""
    return conversion.delta_of(ORDERS, _renyi_at_orders(event), eps=eps)


def _delta_by_loss(event: Crowd, eps: float) -> float:
    """Delta of one round at eps by its privacy loss, without its `overflow_delta`; refuses too large a grid."""
    return loss_distributions.worst_delta([loss(event, interval=resolution(event))], eps=eps)


@functools.lru_cache(maxsize=16)
def _renyi_at_orders(event: Crowd) -> np.ndarray:
    """`renyi` at `ORDERS`, kept: the array cannot be written to."""
    divergences = renyi(event, ORDERS)
    divergences.flags.writeable = False
    return divergences


@functools.lru_cache(maxsize=64)
def _sampled_pair(event: Crowd, prob: float) -> SymmetricPair:
    """The pair of one round on a secret sample of fixed size, all coordinates, without its `overflow_delta`.

    `prob` is how probably an honest user is drawn, rounded up. The pair is made from the delta of the round with
    everyone, by its privacy loss where the grid is not too large.
    """
    used = _exact_pair(event) or pair(event)
    try:
        loss(event, interval=resolution(event))
        delta_by = _delta_by_loss
    except NotApplicable:
        delta_by = _delta_by_renyi
    return sampled_pair(
        lambda eps: delta_by(event, eps) * _OUTWARD,
        prob=prob,
        eps_pure=used.folds * used.eps_pure * _OUTWARD,
        std=used.std_loss * math.sqrt(used.folds),
    )


def eps(event: Crowd, *, delta: float) -> Bound:
    """The smallest eps certified for one round at this delta, `overflow_delta` included.

    Arguments:
        event: one round.
        delta: of the whole round; `NotApplicable` where `overflow_delta` alone is more.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    left = (delta - overflow_delta(event)) * (1 - 1e-12)
    if left <= 0:
        raise NotApplicable(
            f"coordinates overflow with probability {overflow_delta(event):.3g}, more than delta={delta}"
        )
    by_theorem = {RENYI: conversion.eps_of(ORDERS, _renyi_at_orders(event), delta=left)}
    with contextlib.suppress(NotApplicable):
        round_loss = loss(event, interval=resolution(event))
        by_theorem[PRIVACY_LOSS] = loss_distributions.worst_eps([round_loss], delta=left)
    accountant = min(by_theorem, key=lambda name: by_theorem[name])
    return Bound(eps=by_theorem[accountant] * _OUTWARD, delta=delta, proof=theorem(event).proof.then(accountant))


def local_bound(event: Crowd, *, delta: float = 0.0) -> Bound:
    """(eps, delta) of one client's reports seen with its name on them, by basic composition over what it may send.

    Arguments:
        event: one round.
        delta: that may be spent on how many coordinates a client reports.

    Guarantees:
        SS-Topk promises something finite only if every coordinate is reported (decoys = coordinates - top).
    """
    eps_local = event.report.eps_local
    match event:
        case PaddedBernoulli():
            reports = most_sampled_coordinates(event, delta=delta)
            return Bound(eps=reports * eps_local * _OUTWARD, delta=delta, proof=LOCAL.proof)
        case PaddedTopk():
            _require_binary(event.report)
            finite = event.decoys == event.coordinates - event.top
            if not finite:
                return Bound(eps=math.inf, delta=0.0, proof=Proof(missing=_INDICES_TELL))
            return Bound(eps=event.top * eps_local * _OUTWARD, delta=0.0, proof=LOCAL.proof)
    return Bound(eps=event.coordinates * eps_local * _OUTWARD, delta=0.0, proof=LOCAL.proof)


def overflow_delta(event: Crowd) -> float:
    """What a round costs in delta beside its pair: the chance that a report of the victim meets a full coordinate.

    Guarantees:
        At most the chance that any coordinate overflows, by the union bound: P(Bin(n - t, beta) > n_p - t) d.
        Zero where nothing is dropped, and for SS-Topk, whose pair pays for drops.
    """
    _require_crowd(event)
    match event:
        case PaddedBernoulli(inclusion=inclusion):
            slots = event.pad_to - event.colluders
            if event.honest > slots:
                full = float(numerics.binomial_sf(slots - 1, event.honest - 1, inclusion))
                full = full * _OUTWARD * numerics.binomial_outward_factor(event.honest) + _UNDERFLOW
                return numerics.as_probability_bound(event.coordinates * inclusion * full)
    return 0.0


def most_sampled_coordinates(event: PaddedBernoulli, *, delta: float) -> int:
    """The smallest k_max with P[Bin(coordinates, inclusion) > k_max] <= delta.

    Arguments:
        event: one round.
        delta: how probably a client may report more, in [0, 1].
    """
    _validate.in_interval(0, 1, delta=delta)
    low, high = -1, event.coordinates
    while high - low > 1:
        middle = (low + high) // 2
        over = float(numerics.binomial_sf(middle, event.coordinates, event.inclusion)) * _OUTWARD
        over = over * numerics.binomial_outward_factor(event.coordinates) + _UNDERFLOW
        low, high = (low, middle) if over <= delta else (middle, high)
    return high


def _require_crowd(event: Crowd) -> None:
    """Raise `NotApplicable` for an event that is no shuffled round."""
    if not isinstance(event, Crowd):
        raise NotApplicable(f"no dominating pair here for {type(event).__name__}")


def resolution(event: Crowd) -> float:
    """The interval of privacy losses that one round with everyone should be composed on."""
    return symmetric.composition_interval(_exact_pair(event) or pair(event))


def _is_binary(report: Report) -> bool:
    return report.kind == "rr" and report.levels == 2


def _require_binary(report: Report) -> None:
    """Raise `NotApplicable` for a padded report that is not binary randomized response."""
    if not _is_binary(report):
        raise NotApplicable(
            "padding is proven for binary randomized response only, whose dummies are fair coins; "
            f"got kind={report.kind!r}, levels={report.levels}"
        )


def _round_prob_up(prob: float) -> float:
    """A probability rounded up by more than the error of tanh."""
    return min(1.0, prob * (1 + 1e-15))


@releases(Shuffled, PaddedBernoulli, PaddedTopk)
class CrowdRelease(Release[Crowd]):
    """Coordinates that are shuffled independently, padded with dummies or not."""

    orders = ORDERS

    @property
    def theorem(self) -> Theorem:
        """The theorem that gives its dominating pair: the sharper one, where there is one."""
        return theorem(self.event)

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        """Its Renyi divergence with everyone, rounded up; `NotApplicable` on a sample, where no bound is known."""
        return renyi(self.event, np.asarray(orders)) if sampling == Everyone() else super().renyi(sampling, orders)

    def losses(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The loss of one round, rounded up: with everyone, or on a sample of as many users as are shuffled.

        The loss of a sampled round is that of docs/proofs/fixed-size.md; other samples are refused.
        """
        if isinstance(sampling, FixedSize):
            return (_sampled_pair(self.event, self._prob_sampled(sampling)).loss(interval=interval),)
        is_everyone = sampling == Everyone()
        return (loss(self.event, interval=interval),) if is_everyone else super().losses(sampling, interval)

    def _prob_sampled(self, sampling: FixedSize) -> float:
        """How probably an honest user is drawn, rounded up; colluders see who of them is, and count as drawn."""
        if self.event.num_users != sampling.size:
            raise NotApplicable(f"the rounds shuffle {self.event.num_users} users, but {sampling.size} are drawn")
        honest = sampling.population - self.event.colluders
        if honest <= sampling.size:
            raise NotApplicable(
                f"all of {honest} honest users may be among the {sampling.size} drawn: a sample hides nobody"
            )
        return min(1.0, sampling.size / honest * (1 + 2 * numerics.ULP))

    def losses_rounded_down(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The round's losses with everyone, rounded down. Only the sharper pair has them.

        `pair` is only an upper bound on the round, so that rounding it down would bound nothing from below.
        """
        sharper = _exact_pair(self.event)
        if sampling != Everyone() or sharper is None:
            return super().losses_rounded_down(sampling, interval)
        return (symmetric.loss_rounded_down(sharper, interval=interval),)

    @property
    def resolution(self) -> float:
        """The interval that a round with everyone should be composed on, all its coordinates."""
        return resolution(self.event)

    def loss_scale(self, sampling: Sampling) -> Scale:
        """Std and width of the loss of a round, to choose a grid by: by the sharper pair where there is one.

        With everyone the std is that of all coordinates together, the width that of one.
        """
        if isinstance(sampling, FixedSize):
            sampled = _sampled_pair(self.event, self._prob_sampled(sampling))
            return Scale(std=sampled.std_loss, width=min(sampled.eps_pure, LARGEST_LOSS), sums=1)
        used = _exact_pair(self.event) or pair(self.event)
        return Scale(std=used.std_loss * math.sqrt(used.folds), width=used.eps_pure, sums=1)

    @property
    def pure_eps(self) -> float:
        """The local eps of all coordinates, which shuffling cannot worsen; padded rounds have none without a delta."""
        event = self.event
        return event.coordinates * event.report.eps_local if isinstance(event, Shuffled) else super().pure_eps

    def delta_spent(self, eps: float) -> tuple[Spent, ...]:
        """`overflow_delta`: reports that may be dropped, at any eps; charged in full where users are sampled, too."""
        return (Spent(overflow_delta(self.event), "overflowing coordinates"),)

    def local_bound(self, *, delta: float) -> Bound:
        """(eps, delta) of one client's reports with its name on them: basic composition over those it may send."""
        return local_bound(self.event, delta=delta)
