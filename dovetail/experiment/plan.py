"""A plan: what the rounds of a training promise, what the budget still allows, and how one round is run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from dovetail import protocols
from dovetail.data import Clients, Dataset, Model, Task
from dovetail.data.readers.recipes import recipe_of
from dovetail.engine import Engine, RoundLog, Training, devices
from dovetail.events import Round
from dovetail.experiment.config import Config
from dovetail.guarantee import Guarantee, Quote, Record
from dovetail.learners.prediction import Predictor
from dovetail.randomness import Randomness
from dovetail.sampling import Sampler, Schedule
from dovetail.statements import Bound, NotApplicable, Scope, Statement, Unit

__all__ = ["Plan", "rounds_due"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made ready to run, on `model` and `dataset`; `sampler` says who takes part in which round, and how."""

    config: Config
    sampler: Sampler
    guarantee: Guarantee
    engine: Engine
    task: Task
    model: Model
    dataset: Dataset

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
        return self.guarantee.target_unit

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

    def record_of(self, rounds: Sequence[RoundLog]) -> Record:
        """What the engine did in these rounds, in privacy terms: by its own notes and not by the plan."""
        return self.guarantee.record([item.cohort for item in rounds])

    def certify(self, released: Sequence[int]) -> Statement:
        """The statement for the rounds that were released."""
        return self.record(released).certified_statement()

    def statements_by_unit(self, released: Sequence[int]) -> Mapping[Unit, Statement]:
        """What these rounds promise for an item, a user and a subject."""
        return self.record(released).statements_by_unit()

    def quote(self, released: Sequence[int]) -> Quote:
        """That statement, beside what the paper claims, what the shuffler learns, and what is left without trust."""
        return self.guarantee.quote(self._cohorts(released))

    def predictor(self, training: Training) -> Predictor:
        """The model to publish, ready to be asked."""
        return Predictor(
            model=self.model,
            parameters=self.engine.model_arrays(training),
            recipe=msgspec.structs.replace(self.dataset.recipe or recipe_of(self.dataset), model=self.model.name),
            features=self.config.task.all_features,
        )

    def _cohorts(self, released: Sequence[int]) -> list[protocols.Cohort]:
        return [self.guarantee.cohorts[index] for index in released]

    def with_assumption(self, said: str) -> Plan:
        """The same plan, whose statements rest on this too."""
        said_before = self.guarantee.assumptions
        return dataclasses.replace(
            self, guarantee=dataclasses.replace(self.guarantee, assumptions=(*said_before, said))
        )

    def with_declaration(self, said: str) -> Plan:
        """The same plan, whose statements are *as declared*, and this is what is declared."""
        declared = (*self.guarantee.declared, said)
        return dataclasses.replace(self, guarantee=dataclasses.replace(self.guarantee, declared=declared))

    def renewed(self) -> Plan:
        """The same plan for another run, or for the rest of one, which has noise and samples of its own."""
        if self.randomness.reproducible:
            return self
        sampler = self.sampler.with_randomness(devices.shared_randomness(self.config.seed))
        guarantee = dataclasses.replace(self.guarantee, protocol=sampler.protocol)
        return dataclasses.replace(self, sampler=sampler, guarantee=guarantee)

    @property
    def randomness(self) -> Randomness:
        """What the run draws from."""
        return self.schedule.randomness

    def spent_bound(self, released: Sequence[int]) -> Bound | None:
        """The bound of that statement, without the rest of it; None where nothing is certified."""
        try:
            return self.guarantee.bound(self._cohorts(released))
        except NotApplicable:
            return None

    def fits(self, released: Sequence[int]) -> bool:
        """Whether these rounds stay within the budget."""
        eps = self.config.privacy.eps
        if eps is None or self.sampler.by_recipe:
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
        return self.engine.step(
            training,
            users,
            index=index,
            capacity=self.sampler.capacity,
            cohort=self.schedule.cohort(index),
            sample=self.sampler.sample(index, users),
            randomness=self.randomness,
        )


def rounds_due(plan: Plan, released: list[int], *, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """The rounds from `start` that fit the budget beside those `released`, a list that grows, and who is drawn."""
    affordable = plan.affordable()
    for index in range(start, len(plan.rounds)):
        if index >= affordable and not plan.fits([*released, index]):
            return
        yield index, plan.schedule.draw(index)
