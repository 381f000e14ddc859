"""What one user pays for, out of all the rounds.

Rounds over disjoint batches of an epoch concern different users, so an epoch costs what its worst round costs; all else
adds up. Beside its noise a round may spend some of delta: on reports that meet a full coordinate, and on imperfect
mixing of shares, which costs the more the larger the eps of the whole is.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from dovetail.accounting import releases
from dovetail.accounting.releases import Sampling, subjects
from dovetail.events import (
    Disjoint,
    Everyone,
    FixedSize,
    Gaussian,
    Mechanism,
    NonPrivate,
    Poisson,
    Round,
    SampledSubject,
)
from dovetail.statements import NotApplicable

__all__ = ["Exposure", "exposures", "spent_delta", "spent_on_full", "spent_on_mixing"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exposure:
    """A mechanism that one user pays for `times` times; disjoint batches are already folded into epochs."""

    mechanism: Mechanism
    sampling: Sampling
    times: int


def exposures(rounds: Iterable[Round]) -> tuple[Exposure, ...]:
    """What one user pays for at the most: epochs of disjoint batches count once, everything else each time.

    A sum that has all items of a subject every time is a Gaussian release, and is charged as one.

    Guarantees:
        Refuses rounds under different relations: what they add up to would be a statement about neither.
    """
    rounds = tuple(rounds)
    relations = {item.mechanism.neighbors.value for item in rounds if not isinstance(item.mechanism, NonPrivate)}
    if len(relations) > 1:
        raise ValueError(f"expected rounds under one neighbouring relation, got {' and '.join(sorted(relations))}")
    counts: Counter[tuple[Mechanism, Sampling]] = Counter()
    epochs: dict[int, list[Mechanism]] = {}
    for item in rounds:
        match item.participation:
            case Disjoint() if isinstance(item.mechanism, SampledSubject):
                raise NotApplicable("a subject may have data at users of several disjoint batches of an epoch")
            case Disjoint(epoch=epoch):
                epochs.setdefault(epoch, []).append(item.mechanism)
            case FixedSize(size=size, population=population) if size == population:
                counts[item.mechanism, Everyone()] += 1
            case Poisson(prob=prob) if prob == 1:
                counts[item.mechanism, Everyone()] += 1
            case Poisson(prob=prob) if prob == 0:
                pass
            case sampling:
                counts[item.mechanism, sampling] += 1
    for mechanisms in epochs.values():
        counts[_worst(mechanisms), Everyone()] += 1
    plain: Counter[tuple[Mechanism, Sampling]] = Counter()
    for (mechanism, sampling), times in counts.items():
        if isinstance(mechanism, SampledSubject) and isinstance(sampling, Everyone):
            plain[subjects.always_sampled(mechanism) or mechanism, sampling] += times
        else:
            plain[mechanism, sampling] += times
    return tuple(Exposure(mechanism=m, sampling=s, times=times) for (m, s), times in plain.items())


def _worst(mechanisms: Sequence[Mechanism]) -> Mechanism:
    distinct = set(mechanisms)
    if len(distinct) == 1:
        return mechanisms[0]
    if all(isinstance(mechanism, Gaussian) for mechanism in distinct):
        return max(distinct, key=lambda mechanism: mechanism.mu)  # type: ignore[union-attr]
    raise NotApplicable("the rounds of an epoch over disjoint batches differ, and there is no order between them")


def spent_delta(paid: Sequence[Exposure], *, eps: float) -> float:
    """What the rounds cost in delta beside their noise, when eps is that of the whole.

    Guarantees:
        Non-decreasing in eps, and adds up over rounds.
    """
    return spent_on_full(paid) + spent_on_mixing(paid, eps=eps)


def spent_on_full(paid: Sequence[Exposure]) -> float:
    """The delta that all rounds spend on reports that meet a full coordinate."""
    return math.fsum(exposure.times * releases.spent_on_full(exposure.mechanism) for exposure in paid)


def spent_on_mixing(paid: Sequence[Exposure], *, eps: float) -> float:
    """The delta that all rounds spend on imperfect mixing of shares, when eps is that of the whole."""
    return math.fsum(exposure.times * releases.spent_on_mixing(exposure.mechanism, eps=eps) for exposure in paid)
