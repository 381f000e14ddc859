"""A plan: what the rounds of a training promise, what the budget still allows, and how one round is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail import accounting, protocols
from dovetail.data import Clients, Dataset, Model, Task
from dovetail.engine import Engine, Ran, Training, devices
from dovetail.events import Round
from dovetail.experiment.calibration import unit_of
from dovetail.experiment.config import Config
from dovetail.guarantee import quotes, units
from dovetail.guarantee.record import Record
from dovetail.randomness import Randomness
from dovetail.sampling import Sampler, Schedule
from dovetail.statements import Bound, Neighbors, NotApplicable, Scope, Statement, Unit

__all__ = ["Plan"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made ready to run, on `model` and `dataset`; `sampler` says who takes part in which round, and how."""

    config: Config
    sampler: Sampler
    engine: Engine
    task: Task
    model: Model
    dataset: Dataset
    scope: Scope
    rounds: tuple[Round, ...]
    replaced: units.Viewed | None
    spread: units.Spread

    @property
    def protocol(self) -> protocols.Protocol:
        """The protocol, settled."""
        return self.sampler.protocol

    @property
    def schedule(self) -> Schedule:
        """When which users take part."""
        return self.sampler.schedule

    @property
    def clients(self) -> Clients:
        """Who holds which records."""
        return self.sampler.clients

    @property
    def unit(self) -> Unit:
        """Whom the target and the statement are about."""
        return unit_of(self.config, self.scope)

    def viewed(self, released: list[int]) -> tuple[units.Viewed, units.Viewed | None]:
        """The rounds that were released, as they are stated and under replacement of a user."""
        own = units.Viewed(rounds=tuple(self.rounds[i] for i in released), scope=self.scope)
        if self.replaced is None:
            return own, None
        rounds = tuple(self.replaced.rounds[i] for i in released)
        return own, dataclasses.replace(self.replaced, rounds=rounds)

    def record(self, released: list[int]) -> Record:
        """What is planned of these rounds, in privacy terms."""
        return self._recorded([self.schedule.cohort(i) for i in released], *self.viewed(released))

    def record_of(self, ran: Sequence[Ran]) -> Record:
        """What the engine did in these rounds, in privacy terms: by its own notes and not by the plan."""
        cohorts = [item.cohort for item in ran]
        relation = Neighbors(self.config.privacy.neighbors)
        own = units.Viewed(rounds=self._views(cohorts, relation), scope=self.scope)
        if self.replaced is None:
            return self._recorded(cohorts, own, None)
        rounds = self._views(cohorts, Neighbors.REPLACE_ONE)
        return self._recorded(cohorts, own, dataclasses.replace(self.replaced, rounds=rounds))

    def _views(self, cohorts: Sequence[protocols.Cohort], relation: Neighbors) -> tuple[Round, ...]:
        dim = self.engine.dim
        return tuple(self.protocol.view(cohort, dim, neighbors=relation).round for cohort in cohorts)

    def _recorded(
        self, cohorts: Sequence[protocols.Cohort], own: units.Viewed, replaced: units.Viewed | None
    ) -> Record:
        return quotes.recorded(
            self.protocol,
            cohorts,
            self.engine.dim,
            own,
            replaced=replaced,
            spread=self.spread,
            unit=self.unit,
            reproducible=self.randomness.reproducible,
            **self._at,
        )

    def certify(self, released: list[int]) -> Statement:
        """The statement for the rounds that were released."""
        return self.record(released).certified()

    def table(self, released: list[int]) -> Mapping[Unit, Statement]:
        """What these rounds promise for an item, a user and a subject."""
        return self.record(released).table()

    def quote(self, released: list[int]) -> quotes.Quote:
        """That statement, beside what the paper claims, what the shuffler learns, and what is left without trust."""
        cohorts = [self.schedule.cohort(i) for i in released]
        delta = self.config.privacy.delta
        claim = quotes.claimed(self.protocol, cohorts, self.engine.dim, self.scope, delta=delta)
        return quotes.Quote.of(self.protocol.name, self.record(released), claim)

    def renewed(self) -> Plan:
        """The same plan for another run, which has noise and samples of its own."""
        if self.randomness.reproducible:
            return self
        return self._with(devices.shared_randomness(self.config.seed))

    def resumed(self, root: bytes | None) -> Plan:
        """The same plan with the noise and the samples of an earlier run."""
        return self._with(Randomness(self.config.seed, root))

    def _with(self, randomness: Randomness) -> Plan:
        return dataclasses.replace(self, sampler=self.sampler.renewed(randomness))

    @property
    def randomness(self) -> Randomness:
        """What the run draws from."""
        return self.schedule.randomness

    def spent(self, released: list[int]) -> Bound | None:
        """The bound of that statement, without the rest of it; None where nothing is certified."""
        try:
            own, replaced = self.viewed(released)
            return units.bound(self.unit, own, replaced, self.spread, **self._target)
        except NotApplicable:
            return None

    def fits(self, released: list[int]) -> bool:
        """Whether these rounds stay within the budget."""
        eps, delta = self.config.privacy.eps, self.config.privacy.delta
        if eps is None or self.sampler.by_recipe:
            return True  # no budget, or one that only the paper's recipe keeps to
        own, replaced = self.viewed(released)
        if self.unit is self.scope.unit:
            return accounting.fits(own.rounds, eps=eps, delta=delta)
        try:
            return units.bound(self.unit, own, replaced, self.spread, delta=delta).eps <= eps
        except NotApplicable:
            return False

    def affordable(self) -> int:
        """How many rounds from the first fit into the budget together; what fits with more, fits with fewer."""
        low, high = 0, len(self.rounds)
        if self.fits(list(range(high))):
            return high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(list(range(middle))) else (low, middle)
        return low

    def step(self, training: Training, index: int, users: np.ndarray) -> Training:
        """Run a round with these users."""
        return self.engine.step(
            training,
            users,
            index=index,
            capacity=self.sampler.capacity,
            cohort=self.schedule.cohort(index),
            drawn=self.sampler.drawn(index, users),
            randomness=self.randomness,
        )

    @property
    def _target(self) -> dict[str, float]:
        """At which delta, or eps, the rounds are bounded."""
        privacy = self.config.privacy
        by_delta = privacy.stop == "delta" and privacy.eps is not None
        return {"eps": privacy.eps} if by_delta else {"delta": privacy.delta}  # type: ignore[dict-item]

    @property
    def _at(self) -> dict[str, Any]:
        return {"delta": self.config.privacy.delta, **self._target}
