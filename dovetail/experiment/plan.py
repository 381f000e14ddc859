"""A plan: what the rounds of a training promise, what the budget still allows, and how one round is run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dovetail import protocols
from dovetail.data import Clients, Dataset, Model, Task
from dovetail.engine import Drawn, Engine, Items, Ran, Training, devices
from dovetail.events import Round
from dovetail.experiment.config import Config
from dovetail.guarantee import Guarantee, Quote, Record
from dovetail.protocols.subjects._items import ItemLevel
from dovetail.randomness import Randomness
from dovetail.sampling.items import ItemDraws
from dovetail.sampling.schedule import Schedule
from dovetail.statements import Bound, NotApplicable, Scope, Statement, Unit

__all__ = ["Plan", "with_group"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made ready to run; `model`, `dataset` and `clients` are what the engine runs on."""

    config: Config
    schedule: Schedule
    guarantee: Guarantee
    engine: Engine
    task: Task
    model: Model
    dataset: Dataset
    clients: Clients
    items: ItemDraws | None = None
    published_noise: Callable[[int], float] | None = None

    @property
    def protocol(self) -> protocols.Protocol:
        """The protocol that runs, its noise set."""
        return self.guarantee.protocol

    @property
    def unit(self) -> Unit:
        """Whom the target and the statement are about."""
        return self.guarantee.asked

    @property
    def scope(self) -> Scope:
        """What is stated besides numbers and proof."""
        return self.guarantee.scope

    @functools.cached_property
    def rounds(self) -> tuple[Round, ...]:
        """All rounds that are planned, as they are stated."""
        return self.guarantee.rounds()

    def record(self, released: Sequence[int]) -> Record:
        """What is planned of these rounds, in privacy terms."""
        return self.guarantee.record(self._cohorts(released))

    def record_of(self, ran: Sequence[Ran]) -> Record:
        """What the engine did in these rounds, in privacy terms: by its own notes and not by the plan."""
        return self.guarantee.record([item.cohort for item in ran])

    def certify(self, released: Sequence[int]) -> Statement:
        """The statement for the rounds that were released."""
        return self.record(released).certified()

    def table(self, released: Sequence[int]) -> Mapping[Unit, Statement]:
        """What these rounds promise for an item, a user and a subject."""
        return self.record(released).table()

    def quote(self, released: Sequence[int]) -> Quote:
        """That statement, beside what the paper claims, what the shuffler learns, and what is left without trust."""
        return self.guarantee.quote(self._cohorts(released))

    def _cohorts(self, released: Sequence[int]) -> list[protocols.Cohort]:
        return [self.guarantee.cohorts[index] for index in released]

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
        guarantee = dataclasses.replace(self.guarantee, protocol=protocol)
        return dataclasses.replace(self, schedule=schedule, items=items, guarantee=guarantee)

    @property
    def randomness(self) -> Randomness:
        """What the run draws from."""
        return self.schedule.randomness

    def spent(self, released: Sequence[int]) -> Bound | None:
        """The bound of that statement, without the rest of it; None where nothing is certified."""
        try:
            return self.guarantee.bound(self._cohorts(released))
        except NotApplicable:
            return None

    def fits(self, released: Sequence[int]) -> bool:
        """Whether these rounds stay within the budget."""
        eps = self.config.privacy.eps
        if eps is None or self.published_noise is not None:
            return True  # no budget, or one that only the paper's recipe keeps to
        return self.guarantee.fits(eps, self._cohorts(released))

    def affordable(self) -> int:
        """How many rounds from the first fit into the budget together; what fits with more, fits with fewer."""
        low, high = 0, len(self.rounds)
        if self.fits(range(high)):
            return high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(range(middle)) else (low, middle)
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
