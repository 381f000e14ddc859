"""What one user is exposed to, out of all the rounds.

Rounds over disjoint batches of an epoch concern different users, so an epoch costs what its worst round costs; a stream
in which users take part rarely costs what a user's uploads cost, as many as its schedule allows; all else adds up.
Beside its noise a round may spend some of delta: on overflowing coordinates, and on imperfect mixing of shares, which
costs the more the larger the eps of the whole is.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from dovetail.accounting.releases import Release, Sampling, release_of
from dovetail.events import Disjoint, Everyone, FixedSize, Mechanism, Poisson, Round, Separated
from dovetail.statements import NotApplicable, Spent

__all__ = ["Exposure", "delta_spent", "distinct", "exposures_of", "reason_for_refusal", "without_sampling"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exposure:
    """A mechanism that one user is exposed to `times` times, always with the same sampling.

    Disjoint batches are folded into epochs already, each of which counts once with `Everyone`, and rounds of a stream
    into what one user's uploads cost.
    """

    mechanism: Mechanism
    sampling: Sampling
    times: int

    @property
    def release(self) -> Release:
        """The `Release` of the mechanism: what one of these releases implies."""
        return release_of(self.mechanism)


def exposures_of(rounds: Iterable[Round]) -> tuple[Exposure, ...]:
    """What one user is exposed to at the most: epochs of disjoint batches count once, streams by their uploads.

    Everything else counts each time.

    A sum that has all items of a subject every time is a Gaussian release, and counts as one.

    Arguments:
        rounds: everything that was run, in any order.

    Guarantees:
        Refuses rounds under different relations: what they add up to would be a statement about neither.
    """
    rounds = tuple(rounds)
    times = Counter(map(id, rounds))  # most equal rounds are one object: hashing all of them would take long
    releases = (release_of(item.mechanism) for item in distinct(rounds))
    relations = {release.neighbors.value for release in releases if release.refusal is None}
    if len(relations) > 1:
        raise ValueError(f"expected rounds under one neighbouring relation, got {' and '.join(sorted(relations))}")
    counts: Counter[tuple[Mechanism, Sampling]] = Counter()
    epochs: dict[int, list[Mechanism]] = {}
    streams: dict[int, list[Round]] = {}
    for item in distinct(rounds):
        match item.participation:
            case Disjoint(epoch=epoch):
                release_of(item.mechanism).check_disjoint_batches()
                epochs.setdefault(epoch, []).append(item.mechanism)
            case Separated(stream=stream):
                streams.setdefault(stream, []).append(item)
            case FixedSize(size=size, population=population) if size == population:
                counts[item.mechanism, Everyone()] += times[id(item)]
            case Poisson(prob=prob) if prob == 1:
                counts[item.mechanism, Everyone()] += times[id(item)]
            case Poisson(prob=prob) if prob == 0:
                pass
            case sampling:
                counts[item.mechanism, sampling] += times[id(item)]
    for mechanisms in epochs.values():
        counts[_worst_mechanism(mechanisms), Everyone()] += 1
    for items in streams.values():
        mechanism, uploads = _fold_stream(items, run=sum(times[id(item)] for item in items))
        counts[mechanism, Everyone()] += uploads
    return _simplify_exposures(counts)


def _fold_stream(rounds: Sequence[Round], *, run: int) -> tuple[Mechanism, int]:
    """What the rounds of one stream cost a user: the worst mechanism among them, and how often it meets a user.

    Arguments:
        rounds: every different round of the stream.
        run: how many rounds of it there were in all.
    """
    schedules = {item.participation for item in rounds}
    if len(schedules) > 1:
        raise NotApplicable("the rounds of a stream state different schedules, so that none of them is kept to")
    (schedule,) = schedules
    if not isinstance(schedule, Separated):
        raise TypeError(f"expected rounds of a stream, got {type(schedule).__name__} participation")
    if run > schedule.rounds:
        raise NotApplicable(f"a stream of {schedule.rounds} rounds has {run}: its schedule holds for fewer")
    kinds = [release_of(mechanism) for mechanism in {item.mechanism for item in rounds}]
    folded = [release.fold_stream(schedule) for release in kinds]
    equal = len(kinds) == 1 or all(release.mixes_in_stream for release in kinds)
    if not equal or len({times for _, times in folded}) > 1:
        raise NotApplicable("the rounds of a stream differ, and there is no order between them")
    return _worst_mechanism([mechanism for mechanism, _ in folded]), folded[0][1]


def without_sampling(exposures: Sequence[Exposure]) -> tuple[Exposure, ...] | None:
    """The same exposures with everyone in every round: nothing is gained from sampling users.

    None where nobody is sampled, or where a round with everyone may be better than one on the sample.

    Guarantees:
        Whatever holds for the result holds for the rounds, also if it is known who was drawn.
    """
    sampled = [exposure for exposure in exposures if exposure.sampling != Everyone()]
    if not sampled or not all(
        exposure.release.full_round_covers_known_sample(exposure.sampling) for exposure in sampled
    ):
        return None
    counts: Counter[tuple[Mechanism, Sampling]] = Counter()
    for exposure in exposures:
        counts[exposure.mechanism, Everyone()] += exposure.times
    return _simplify_exposures(counts)


def _simplify_exposures(counts: Counter[tuple[Mechanism, Sampling]]) -> tuple[Exposure, ...]:
    """One exposure for each mechanism and sampling, each mechanism in the form that accountants know best."""
    plain: Counter[tuple[Mechanism, Sampling]] = Counter()
    for (mechanism, sampling), count in counts.items():
        plain[release_of(mechanism).simplify(sampling), sampling] += count
    return tuple(Exposure(mechanism=m, sampling=s, times=count) for (m, s), count in plain.items())


def distinct(rounds: Iterable[Round]) -> tuple[Round, ...]:
    """Every object among these rounds once, in their order; equal rounds that are different objects stay."""
    return tuple({id(item): item for item in rounds}.values())


def reason_for_refusal(rounds: Iterable[Round]) -> str | None:
    """Why these rounds promise nothing at all, if one of them does not; None if each promises something."""
    return next((why for item in distinct(rounds) if (why := release_of(item.mechanism).refusal) is not None), None)


def _worst_mechanism(mechanisms: Sequence[Mechanism]) -> Mechanism:
    """The mechanism of an epoch that costs most: of Gaussians that with the largest mu; others must all be equal."""
    shifts = {mechanism: release_of(mechanism).mu for mechanism in mechanisms}
    if len(shifts) == 1:
        return mechanisms[0]
    if None in shifts.values():
        raise NotApplicable("the rounds that concern different users differ, and there is no order between them")
    return max(shifts, key=lambda mechanism: shifts[mechanism] or 0.0)


def delta_spent(exposures: Sequence[Exposure], *, eps: float) -> tuple[Spent, ...]:
    """What all rounds together spend of delta beside their noise: one part for each thing that it pays for.

    Arguments:
        exposures: what one user is exposed to.
        eps: that of the whole composition, on which some costs depend.

    Guarantees:
        Non-decreasing in eps, and adds up over rounds.
    """
    parts: dict[str, list[float]] = {}
    for exposure in exposures:
        for part in exposure.release.delta_spent(eps):
            parts.setdefault(part.on, []).append(exposure.times * part.delta)
    totals = (Spent(math.fsum(deltas), on) for on, deltas in parts.items())
    return tuple(part for part in totals if part.delta)
