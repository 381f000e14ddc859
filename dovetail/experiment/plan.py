"""A plan: what the rounds of a training promise, what the budget still allows, and how one round is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail import accounting, protocols
from dovetail.data import Clients, Dataset, Model, Task
from dovetail.engine import Drawn, Engine, Items, Ran, Training, devices
from dovetail.events import Round
from dovetail.experiment.calibration import unit_of
from dovetail.experiment.config import Config
from dovetail.guarantee import quotes, units
from dovetail.guarantee.record import Record
from dovetail.protocols.subjects._items import ItemLevel
from dovetail.randomness import Randomness
from dovetail.sampling.items import ItemDraws
from dovetail.sampling.schedule import Schedule
from dovetail.statements import Bound, Neighbors, NotApplicable, Scope, Statement, Unit

__all__ = ["Plan", "with_group"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made ready to run; `model`, `dataset` and `clients` are what the engine runs on."""

    config: Config
    schedule: Schedule
    protocol: protocols.Protocol
    engine: Engine
    task: Task
    model: Model
    dataset: Dataset
    clients: Clients
    scope: Scope
    rounds: tuple[Round, ...]
    replaced: units.Viewed | None
    spread: units.Spread
    items: ItemDraws | None = None
    published_noise: Callable[[int], float] | None = None

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
        items = None if self.items is None else dataclasses.replace(self.items, randomness=randomness)
        schedule = dataclasses.replace(self.schedule, randomness=randomness)
        protocol = self.protocol
        if items is not None and isinstance(protocol, ItemLevel) and protocol.group_in_batch is not None:
            protocol = with_group(protocol, items, schedule, self.published_noise)
        return dataclasses.replace(self, schedule=schedule, items=items, protocol=protocol)

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
        if eps is None or self.published_noise is not None:
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
        cohort, capacity, drawn = self.schedule.cohort(index), self.schedule.capacity, None
        if self.items is not None:
            steps = self.protocol.private_steps
            scales = self._published_scales(index, users, max(1, steps))
            if steps:
                rows = self.items.batches(index, users, steps=steps)
                drawn = Drawn(users, cohort.size, items=Items(rows, scales))
            else:
                capacity = self.items.capacity
                scale = 1.0 if self.published_noise is None else float(np.sqrt(np.sum(scales**2)))
                drawn = Drawn(self.items.batch(index, users), self._batch, noise_scale=scale)
        return self.engine.step(
            training,
            users,
            index=index,
            capacity=capacity,
            cohort=cohort,
            drawn=drawn,
            randomness=self.randomness,
        )

    def _published_scales(self, index: int, users: np.ndarray, steps: int) -> np.ndarray:
        if self.items is None or self.published_noise is None:
            return np.ones((len(users), steps), np.float32)
        return self.items.published_scales(index, users, steps=steps, noise_of=self.published_noise)

    @property
    def _batch(self) -> float:
        return float(self.protocol.known("batch"))

    @property
    def _target(self) -> dict[str, float]:
        """At which delta, or eps, the rounds are bounded."""
        privacy = self.config.privacy
        by_delta = privacy.stop == "delta" and privacy.eps is not None
        return {"eps": privacy.eps} if by_delta else {"delta": privacy.delta}  # type: ignore[dict-item]

    @property
    def _at(self) -> dict[str, Any]:
        return {"delta": self.config.privacy.delta, **self._target}


def with_group(
    protocol: ItemLevel, items: ItemDraws, schedule: Schedule, published_noise: Callable[[int], float] | None
) -> ItemLevel:
    """The protocol with the paper's Z, from all rounds if it sets the noise, else from some for the claim."""
    steps = max(1, protocol.private_steps)
    rounds = schedule.rounds if protocol.adaptive_z else min(schedule.rounds, max(1, 50 // steps))
    largest = items.largest_group(rounds, np.arange(schedule.population), steps=steps)
    if published_noise is not None:
        published_noise(largest)  # refuses a Z that its recipe has no noise for
    return dataclasses.replace(protocol, group_in_batch=largest)
