"""A config's training in privacy terms, with the noise that meets its target."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from dovetail import accounting
from dovetail.claims import subdp
from dovetail.experiment.config import Config
from dovetail.guarantee import Guarantee, Spread
from dovetail.mechanisms import LAPLACE_CUT, NORMAL_CUT
from dovetail.numbers import at_least
from dovetail.protocols import Protocol
from dovetail.protocols.subjects import record_level
from dovetail.sampling import Schedule
from dovetail.statements import Neighbors, Unit

__all__ = ["calibrated", "guarantee_of"]

_SIMULATED = (
    "whoever runs the simulation is trusted: all users' data and all noise are on one machine",
    "32-bit floating-point noise is as good as real-valued noise, although normal draws are cut off at "
    f"{at_least(NORMAL_CUT, 3)} standard deviations and Laplace draws at {at_least(LAPLACE_CUT, 3)} scales",
    "32-bit floating-point sums move with one user's data as exact sums do, although each addition that a user's "
    "numbers pass may round others' numbers differently, by up to 2^-23 of the sum, and the number of records of the "
    "largest user may decide how others' updates round, by up to 2e-5 clip norms each (docs/proofs/float-sums.md)",
)
_SECRET = {
    "os": "the run's noise key (256 bits from the operating system) stays secret; it is never written to disk",
    "seeded": "nobody who sees a model knows the seed, which determines all noise and is written in config.toml",
}


def guarantee_of(
    config: Config,
    protocol: Protocol,
    schedule: Schedule,
    dim: int,
    spread: Spread,
    *,
    said: tuple[str, ...] = (),
    declared: tuple[str, ...] = (),
) -> Guarantee:
    """What the simulated training of a config guarantees; `said` is what else its statement says."""
    privacy = config.privacy
    return Guarantee(
        protocol=protocol,
        cohorts=tuple(schedule.cohort(index) for index in range(schedule.rounds)),
        dim=dim,
        relation=Neighbors(privacy.neighbors),
        delta=privacy.delta,
        eps=privacy.eps if privacy.stop == "delta" else None,
        unit=None if privacy.unit is None else Unit(privacy.unit),
        spread=spread,
        assumptions=(*_SIMULATED, _SECRET[config.noise], *config.task.all_features.assumptions, *said),
        declared=declared,
        reproducible=schedule.randomness.reproducible,
    )


def calibrated(guarantee: Guarantee, *, eps: float | None) -> tuple[Protocol, Callable[[int], float] | None]:
    """The settled protocol with its noise set to meet a target; and the noise for each Z, where the data set it."""
    protocol = guarantee.protocol
    if protocol.samples == "records" and record_level(protocol).adaptive_z:
        return _published(guarantee, eps)
    if eps is not None:
        _refuse_without_promise(guarantee, eps)
        if not protocol.calibrated:
            guarantee = guarantee.calibrated(eps)
    return guarantee.settled, None


def _refuse_without_promise(guarantee: Guarantee, eps: float) -> None:
    """A target needs rounds that promise something, to the unit that it is for."""
    protocol = guarantee.protocol
    if not protocol.calibrated:
        guarantee = dataclasses.replace(guarantee, protocol=protocol.with_noise(1.0))
    if accounting.refusal(guarantee.rounds()) is not None:
        raise ValueError(f"expected no privacy.eps with {protocol.name!r}, which gives no guarantee, got {eps}")
    if guarantee.asked is not guarantee.scope.unit:
        dataclasses.replace(guarantee, eps=None).bound(guarantee.cohorts[:1])


def _published(guarantee: Guarantee, eps: float | None) -> tuple[Protocol, Callable[[int], float]]:
    """SubDP as printed: the target is what its recipe would promise, and nothing is certified."""
    if eps is None:
        raise ValueError("expected privacy.eps with adaptive_z, which derives the noise from it, got none")
    cohorts = guarantee.cohorts
    settled = record_level(guarantee.protocol).settle(cohorts[0], guarantee.dim)
    batches = len(cohorts) * (settled.private_steps or cohorts[0].size)

    @functools.cache
    def noise_of(group: int) -> float:
        found = subdp.noise_scale(eps=eps, delta=guarantee.delta, group=group, prob=settled.rate, steps=batches)
        return found.value

    return dataclasses.replace(settled.with_noise(noise_of(1)), claimed_eps=eps), noise_of
