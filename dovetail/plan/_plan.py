"""A plan: what the rounds of a training promise, what the budget still allows, and how one round is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from dovetail import accounting, protocols, quotes, units
from dovetail.calibration import unit_of
from dovetail.config import Config
from dovetail.events import Round
from dovetail.federated.cohort import Schedule
from dovetail.federated.items import ItemDraws
from dovetail.simulate import Engine, Items, Training
from dovetail.statements import Bound, NotApplicable, Scope, Statement, Unit
from dovetail.tasks import Clients, Dataset, Model

__all__ = ["Plan"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made ready to run; `model`, `dataset` and `clients` are what the engine runs on."""

    config: Config
    schedule: Schedule
    protocol: protocols.Protocol
    engine: Engine
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

    def certify(self, released: list[int]) -> Statement:
        """The statement for the rounds that were released."""
        own, _ = self.viewed(released)
        if self.unit is not self.scope.unit:
            return self.table(released)[self.unit]
        return quotes.certified(own.rounds, self.scope, **self._at)

    def table(self, released: list[int]) -> Mapping[Unit, Statement]:
        """What these rounds promise for an item, a user and a subject."""
        return units.table(*self.viewed(released), self.spread, delta=self.config.privacy.delta)

    def quote(self, released: list[int]) -> quotes.Quote:
        """That statement, beside what the paper claims, what the shuffler learns, and what is left without trust."""
        return quotes.state(
            self.protocol,
            [self.schedule.cohort(i) for i in released],
            self.engine.dim,
            [self.rounds[i] for i in released],
            self.scope,
            delta=self.config.privacy.delta,
            statement=self.certify(released),
        )

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
        schedule, scale = self.schedule, self.schedule.noise_scale_of(index)
        size: float = schedule.size_of(index)
        capacity = schedule.capacity
        steps = self.protocol.private_steps
        items = None
        if self.items is not None:
            scales = self._published_scales(index, users, max(1, steps))
            if steps:
                items = Items(self.items.batches(index, users, steps=steps), scales)
            else:
                users, size, capacity = self.items.batch(index, users), self._batch, self.items.capacity
                if self.published_noise is not None:
                    scale = float(np.sqrt(np.sum(scales**2)))
        return self.engine.step(
            training, users, index=index, capacity=capacity, size=size, noise_scale=scale, items=items
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
    def _at(self) -> dict[str, float]:
        return {"delta": self.config.privacy.delta, **self._target}
