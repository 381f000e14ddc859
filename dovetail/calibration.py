"""The noise that meets the target of a config, and the rounds that it will run.

The accountant is asked, not a formula inverted: what is calibrated is what will be certified, for the unit that the
target is for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from dovetail import accounting, protocols, units
from dovetail.accounting.published import subdp
from dovetail.config import Config
from dovetail.events import NonPrivate
from dovetail.federated.cohort import Schedule
from dovetail.mechanisms import LAPLACE_CUT, NORMAL_CUT
from dovetail.numbers import at_least
from dovetail.protocols._items import ItemLevel
from dovetail.statements import Neighbors, NotApplicable, Scope, Unit

__all__ = ["Calibration", "unit_of"]

_SIMULATED = (
    "whoever runs the simulation is trusted: all users' data and all noise are on one machine",
    "32-bit floating-point noise is as good as real-valued noise, although normal draws are cut off at "
    f"{at_least(NORMAL_CUT, 3)} standard deviations and Laplace draws at {at_least(LAPLACE_CUT, 3)} scales",
)
_SECRET = {
    "os": "the run's noise key (256 bits from the operating system) stays secret; it is deleted when the run ends",
    "seeded": "nobody who sees a model knows the seed, which determines all noise and is written in config.toml",
}


def unit_of(config: Config, scope: Scope) -> Unit:
    """Whom the target and the statement are about."""
    return scope.unit if config.privacy.unit is None else Unit(config.privacy.unit)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The noise that meets the target of a config, and the rounds that it will run."""

    protocol: protocols.Protocol
    schedule: Schedule
    config: Config
    dim: int
    spread: units.Spread

    def calibrated(self) -> tuple[protocols.Protocol, Callable[[int], float] | None]:
        """The protocol with its noise set; and the noise for each Z, where it is the data that sets it."""
        protocol, privacy = self.protocol, self.config.privacy
        if isinstance(protocol, ItemLevel) and protocol.adaptive_z:
            return self._published(protocol)
        if privacy.eps is not None:
            self._refuse_without_promise(protocol if protocol.calibrated else protocol.with_noise(1.0))
        refusals: list[NotApplicable] = []

        def eps_at(noise: float) -> float:
            try:
                candidate = protocol.with_noise(noise)
                own = self.planned(candidate)
                unit = unit_of(self.config, own.scope)
                replaced = None if unit is own.scope.unit else self.replaced(candidate)
                return units.bound(unit, own, replaced, self.spread, delta=privacy.delta).eps
            except NotApplicable as refusal:
                refusals.append(refusal)
                return math.inf

        if not protocol.calibrated and privacy.eps is not None:
            try:
                protocol = protocol.with_noise(accounting.smallest_noise(eps_at, eps=privacy.eps))
            except ValueError as error:
                raise refusals[-1] if refusals else error from error
        return protocol.settle(self.schedule.cohort(0), self.dim), None

    def _refuse_without_promise(self, protocol: protocols.Protocol) -> None:
        """A target needs rounds that promise something, to the unit that it is for."""
        eps, own = self.config.privacy.eps, self.planned(protocol)
        if any(isinstance(item.mechanism, NonPrivate) for item in own.rounds):
            raise ValueError(f"expected no privacy.eps with {protocol.name!r}, which gives no guarantee, got {eps}")
        unit = unit_of(self.config, own.scope)
        if protocol.calibrated and unit is not own.scope.unit:
            replaced = self.replaced(protocol)
            one = units.Viewed(rounds=own.rounds[:1], scope=own.scope)
            first = None if replaced is None else units.Viewed(rounds=replaced.rounds[:1], scope=replaced.scope)
            units.bound(unit, one, first, self.spread, delta=self.config.privacy.delta)

    def planned(self, protocol: protocols.Protocol) -> units.Viewed:
        """All rounds as they will be stated."""
        return self._viewed(protocol, Neighbors(self.config.privacy.neighbors))

    def replaced(self, protocol: protocols.Protocol) -> units.Viewed | None:
        """All rounds under replacement of a user, where that is a view that the protocol has."""
        try:
            return self._viewed(protocol, Neighbors.REPLACE_ONE)
        except ValueError:
            return None

    def _viewed(self, protocol: protocols.Protocol, neighbors: Neighbors) -> units.Viewed:
        protocol = protocol.settle(self.schedule.cohort(0), self.dim)
        cohorts = [self.schedule.cohort(i) for i in range(self.schedule.rounds)]
        views = [protocol.view(cohort, self.dim, neighbors=neighbors) for cohort in cohorts]
        scope = views[0].scope
        said = (*scope.assumptions, *_SIMULATED, _SECRET[self.config.noise])
        if scope.unit is Unit.SUBJECT and not self.spread.known:
            said = (*said, self.spread.assumption)
        scope = dataclasses.replace(scope, assumptions=said, population=self.spread.count_of(scope.unit))
        return units.Viewed(rounds=tuple(view.round for view in views), scope=scope)

    def _published(self, protocol: ItemLevel) -> tuple[protocols.Protocol, Callable[[int], float]]:
        """SubDP as printed: the target is what its recipe would promise, and nothing is certified."""
        eps, delta = self.config.privacy.eps, self.config.privacy.delta
        if eps is None:
            raise ValueError("expected privacy.eps with adaptive_z, which derives the noise from it, got none")
        settled = protocol.settle(self.schedule.cohort(0), self.dim)
        batches = self.schedule.rounds * (protocol.private_steps or self.schedule.size)

        @functools.cache
        def noise_of(group: int) -> float:
            return subdp.noise_scale(eps=eps, delta=delta, group=group, prob=settled.rate, steps=batches).value

        return dataclasses.replace(settled.with_noise(noise_of(1)), claimed_eps=eps), noise_of
