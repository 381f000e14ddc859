"""A config made ready to run: a plan, which says what its rounds guarantee and runs them one by one.

Every bad input is refused here, before anything is written. A plan is asked before the first round how many rounds fit
the budget, and again before each later one; cohorts, records and noise depend on the run's randomness and the round
alone.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import msgspec
import numpy as np

from dovetail import accounting, protocols
from dovetail.claims import subdp
from dovetail.data import Clients, Dataset, Model, Task, resolve
from dovetail.data.readers.recipes import recipe_of
from dovetail.engine import Engine, Training
from dovetail.engine.programs import keep_programs
from dovetail.experiment import defaults
from dovetail.experiment.config import Config
from dovetail.experiment.outlook import noise_ratio_of
from dovetail.experiment.population import (
    check_counts,
    data_assumptions,
    load_data,
    num_records,
    schedule_of,
    spread_of,
    with_partition,
)
from dovetail.experiment.scores import PrivateScores, prepare_scores
from dovetail.guarantee import Guarantee, Record, Spread
from dovetail.learners.client import ClientUpdate
from dovetail.learners.isolation import inspect_model
from dovetail.learners.moments import Moments, moments_of
from dovetail.learners.prediction import Predictor
from dovetail.learners.server import Ridge, Server
from dovetail.mechanisms import LAPLACE_CUT, NORMAL_CUT
from dovetail.numbers import at_least
from dovetail.protocols import Cohort, Protocol
from dovetail.protocols.subjects import require_item_level
from dovetail.randomness import Randomness
from dovetail.sampling import Sampler, Schedule, make_sampler, usable_clients
from dovetail.statements import Bound, Neighbors, NotApplicable, Unit

__all__ = ["Guests", "Plan", "calibrate_noise", "guarantee_of", "prepare", "protocol_of", "rounds_due"]


class Guests(typing.Protocol):
    """Users or people that an audit adds to a federation: all count for what is public, but only some are present."""

    def join(self, dataset: Dataset, clients: Clients) -> tuple[Dataset, Clients]:
        """The data and clients with every guest among them; noise, sizes and rates are set for these."""
        ...

    def draw_presence(self, held: Clients, num_records: int) -> Clients:
        """Draw which guests are present, and with which record.

        Arguments:
            held: who holds which records, all guests included.
            num_records: how many records the dataset has.

        Returns: who holds which records, without the guests that are absent.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made ready to run: who takes part in which round (`sampler`), and what that guarantees.

    A plan has no secrets: every run of it draws noise and samples of its own (`with_randomness`), unless the config
    derives them from the seed. Rounds are numbered from 0; `released` are the numbers of rounds, in increasing order.
    """

    config: Config
    sampler: Sampler
    guarantee: Guarantee
    engine: Engine
    task: Task
    model: Model
    dataset: Dataset
    scores: PrivateScores | None = None  # of held-out people who are protected, too; None: test records are public

    @property
    def num_rounds(self) -> int:
        """How many rounds are planned."""
        return len(self.guarantee.cohorts)

    def cohorts(self, released: Sequence[int]) -> list[Cohort]:
        """What is public about the participants of these rounds, a `Cohort` for each."""
        return [self.guarantee.cohorts[index] for index in released]

    def record(self, released: Sequence[int]) -> Record:
        """These rounds in privacy terms, as they were planned: what a ledger holds, and statements are made of."""
        return self.guarantee.record(self.cohorts(released))

    def bound(self, released: Sequence[int]) -> Bound | None:
        """The (eps, delta) that these rounds spend together; None where nothing is certified."""
        try:
            return self.guarantee.bound(self.cohorts(released))
        except NotApplicable:
            return None

    def fits(self, released: Sequence[int]) -> bool:
        """Whether these rounds together stay within the target eps; True where there is none."""
        eps = self.config.privacy.eps
        if eps is None or self.sampler.is_noise_set_by_data:
            return True  # no budget, or one that only the paper's recipe keeps to
        return self.guarantee.fits(eps, self.cohorts(released))

    def num_affordable_rounds(self) -> int:
        """How many rounds from the first fit into the budget together, found by bisection: fewer rounds spend less."""
        low, high = 0, self.num_rounds
        if self.fits(range(high)):
            return high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(range(middle)) else (low, middle)
        return low

    def with_randomness(self, randomness: Randomness) -> Plan:
        """The same plan, to be run with this randomness.

        Where diagnostics are on or the paper's recipe sets the noise, the paper's claim is computed from the data too.
        """
        sampler = self.sampler.with_randomness(randomness)
        if self.config.diagnostics or sampler.is_noise_set_by_data:
            sampler = sampler.with_data_for_claim()
        guarantee = dataclasses.replace(self.guarantee, protocol=sampler.protocol)
        return dataclasses.replace(self, sampler=sampler, guarantee=guarantee)

    def step(self, training: Training, index: int, users: np.ndarray) -> Training:
        """Run one round.

        Arguments:
            training: the state before the round.
            index: its number, from 0; noise and samples depend on it.
            users: the numbers of the users who take part.
        """
        schedule = self.sampler.schedule
        return self.engine.step(
            training,
            users,
            index=index,
            capacity=self.sampler.capacity,
            cohort=schedule.cohort(index),
            sample=self.sampler.sample_round(index, users),
            randomness=schedule.randomness,
        )

    def skip(self, training: Training, index: int) -> Training:
        """The state after a round, counted from 0, of which nothing is released."""
        schedule = self.sampler.schedule
        return self.engine.skip(training, index=index, cohort=schedule.cohort(index), randomness=schedule.randomness)

    def note_past_rounds(self, rounds: int) -> None:
        """Let the engine know who was planned for the first rounds, which an earlier process ran.

        Whoever resumes a run calls it: where users come rarely, the engine refuses who would come again too soon. The
        planned users stand for those who came, for who dropped out is not kept; they keep to the schedule as well.
        """
        schedule = self.sampler.schedule
        for index in range(rounds):
            self.engine.note_past_round(schedule.planned_users(index), index=index, cohort=schedule.cohort(index))

    def predictor(self, training: Training) -> Predictor:
        """The model to publish, ready to be asked."""
        return Predictor(
            model=self.model,
            parameters=self.engine.model_arrays(training),
            recipe=msgspec.structs.replace(self.dataset.recipe or recipe_of(self.dataset), model=self.model.name),
            features=self.config.task.all_features,
        )


def rounds_due(plan: Plan, released: list[int], *, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """The rounds from `start` on that fit the budget, each as its number and the users who were drawn for it.

    Arguments:
        released: the numbers of the rounds that count already. The caller appends each round that it releases, and the
            next one is checked against the longer list.
    """
    affordable = plan.num_affordable_rounds()
    for index in range(start, plan.num_rounds):
        if index >= affordable and not plan.fits([*released, index]):
            return
        yield index, plan.sampler.schedule.draw_users(index)


class _Population(typing.NamedTuple):
    """The data of a config and who holds them: `held` are the records that the protocol may use of `clients`."""

    dataset: Dataset
    clients: Clients
    held: Clients
    model: Model
    declared: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RoundPlanner:
    """What rounds depend on besides the config, which `defaults.complete_config` tries with several noises."""

    population: _Population
    published: bool
    spread: Spread
    records: int | None
    moments: Moments | None
    randomness: Randomness

    @functools.cached_property
    def dim(self) -> int:
        """How many numbers a client's update has."""
        return _num_parameters(self.population.model) if self.moments is None else self.moments.dim

    def plan_rounds(self, config: Config, held: Clients) -> tuple[Sampler, Server, Guarantee]:
        """Who takes part in the rounds of a config, under which noise; the server; and what that guarantees."""
        dataset, model = self.population.dataset, self.population.model
        protocol = protocol_of(config)
        schedule = schedule_of(
            config, protocol, population=held.num_clients, records=self.records, randomness=self.randomness
        )
        server = config.server.build().for_rounds(schedule.rounds, moments=self.moments)
        assumptions = (*server.notes, *data_assumptions(config, dataset, published=self.published))
        if model.learner is not None:
            assumptions += model.learner.notes
        guarantee = guarantee_of(
            *(config, protocol, schedule, self.dim, self.spread),
            assumptions=assumptions,
            declared=self.population.declared,
        )
        protocol, noise_of = calibrate_noise(guarantee, eps=config.privacy.eps)
        sampler = make_sampler(protocol, schedule=schedule, clients=held, subjects=dataset.subjects, noise_of=noise_of)
        return sampler, server, dataclasses.replace(guarantee, protocol=protocol)


def prepare(
    config: Config, *, task: Task | None = None, guests: Guests | None = None, open_keys: Collection[str] = ()
) -> Plan:
    """Load the data, schedule the cohorts, calibrate the noise; refuses whatever cannot work.

    Arguments:
        config: the config.
        task: the task, where it is not found by the config's name of it.
        guests: users or people that an audit adds.
        open_keys: what the caller left open, for `defaults.complete_config` to fill in; the plan has the whole config.
    """
    keep_programs()
    protocol = protocol_of(config)
    config.server.build()
    if not protocol.is_calibrated and config.privacy.eps is None:
        raise ValueError(f"set privacy.eps, or the noise of {protocol.name!r} itself: neither is given")
    _check_sections(config, protocol)

    config, task, population = _load_population(config, task or resolve(config.task.name), protocol, guests)
    dataset, held, model = population.dataset, population.held, population.model
    seeded = config.noise == "seeded"
    planner = _RoundPlanner(
        population=population,
        published=task.published,
        spread=spread_of(config.task, population.clients, held, dataset, protocol, published=task.published),
        records=num_records(config, held, protocol, published=task.published),
        moments=moments_of(config.client, model),
        randomness=Randomness.from_seed(config.seed) if seeded else Randomness.without_secrets(config.seed),
    )
    if config.client.local or (model.learner is not None and model.learner.ignores_settings):
        open_keys = ()  # clients' updates are steps already, which the server follows
    config = defaults.complete_config(
        config,
        open_keys,
        learned=defaults.Learned(
            target=dataset.target,
            dim=planner.dim,
            is_linear=model.constant is not None,
            has_known_scale=_has_known_scale(dataset),
        ),
        noise_ratio=lambda config: noise_ratio_of(planner.plan_rounds(config, held)[0], dim=planner.dim),
    )
    present = held if guests is None else guests.draw_presence(held, len(dataset.labels))
    sampler, server, guarantee = planner.plan_rounds(config, present)
    if isinstance(server, Ridge):
        std = sampler.noise_std(0, dim=planner.dim) / sampler.sum_divisor(0, learning_rate=1)
        server = dataclasses.replace(server, noise_std=std)
    engine = Engine(
        model=model,
        dataset=dataset,
        clients=sampler.engine_clients,
        update=config.client,
        protocol=sampler.protocol,
        server=server,
        moments=planner.moments,
        cohort_size=sampler.size,
        randomness=planner.randomness,
        performance=config.performance,
        diagnostics=config.diagnostics and protocol.samples == "users",  # they are of users' updates
        metrics=task.metrics,
    )
    plan = Plan(
        config=config,
        sampler=sampler,
        guarantee=guarantee,
        engine=engine,
        task=task,
        model=model,
        dataset=dataset,
        scores=None if guests is not None else prepare_scores(config, task, dataset, guarantee),
    )
    plan.guarantee.check_views()
    return plan.with_randomness(planner.randomness) if seeded else plan


def _load_population(
    config: Config, task: Task, protocol: protocols.Protocol, guests: Guests | None
) -> tuple[Config, Task, _Population]:
    """Load data and model, and let guests join; config and task come back with partition and model filled in."""
    dataset, clients, model = load_data(config, task)
    _check_model(config, protocol, dataset, model)
    declared = dataset.declared
    if task.model is not None or not isinstance(model.loss, str | None):
        model, declarations = inspect_model(
            model, dataset, records=protocol.samples == "records", own_model=task.model is not None
        )
        declared += declarations
    config = with_partition(config, dataset)
    check_counts(config, dataset, published=task.published)
    if task.model is not None:
        task = dataclasses.replace(task, model=model)
    if guests is not None:
        dataset, clients = guests.join(dataset, clients)
    held = usable_clients(protocol, clients, dataset.subjects)
    return config, task, _Population(dataset, clients, held, model, declared)


def _has_known_scale(dataset: Dataset) -> bool:
    """Whether a model's outputs are of a scale that is public: classes, labels, or numbers of a declared range."""
    if dataset.target != "number":
        return True
    return dataset.recipe is not None and dataset.recipe.answer.bounds is not None


def protocol_of(config: Config) -> protocols.Protocol:
    """The protocol that a config names, before anything is calibrated."""
    settings = config.protocol_settings
    name = config.protocol["name"]
    unit = config.privacy.unit
    if protocols.find(name).samples == "records" and "unit" not in settings:
        settings["unit"] = "item" if unit == "item" else "subject"
    if issubclass(protocols.find(name), protocols.CorrelatedNoise):
        settings.setdefault("server_momentum", float(config.server.options.get("momentum", 0.0)))
    return protocols.build(name, settings)


def _check_sections(config: Config, protocol: protocols.Protocol) -> None:
    """Refuse settings of [task], [client] and [privacy] that this protocol or partition would ignore."""
    task = config.task
    privacy = config.privacy
    if task.partition != "silos" and task.silos is not None:
        raise ValueError(f"task.silos needs task.partition = 'silos', got {task.partition!r}")
    if task.partition == "silos" and task.users is not None:
        raise ValueError(f"with task.partition = 'silos' set task.silos and not task.users, got users={task.users}")
    if protocol.samples == "records" and config.client.update != "fedsgd":
        raise ValueError(f"{protocol.name!r} needs client.update = 'fedsgd', got {config.client.update!r}")
    if protocol.samples == "records" and config.client.views:
        raise ValueError(
            f"{protocol.name!r} clips every record by itself, and would clip every view: leave out client.views = "
            f"{list(config.client.views)}"
        )
    if privacy.stop == "delta" and privacy.unit is not None and Unit(privacy.unit) is not protocol.protects:
        raise ValueError(
            f"privacy.stop = 'delta' is for the unit that {protocol.name!r} protects itself, got unit={privacy.unit!r}"
        )


def _check_model(config: Config, protocol: protocols.Protocol, dataset: Dataset, model: Model) -> None:
    """Refuse what moments cannot learn, and settings that a model's own learner would ignore."""
    client = config.client
    learner = model.learner
    if client.update == "moments" and (dataset.target != "classes" or model.loss not in (None, "cross_entropy")):
        raise ValueError(
            "client.update = 'moments' needs classes and no loss of the model's own, for it solves for the model; got "
            f"target={dataset.target!r}"
        )
    if learner is None:
        return
    if config.client.update == "moments":
        raise ValueError(f"client.update = 'moments' needs a linear model, got model={model.name!r}")
    defaults = ClientUpdate(views=client.views)
    changed = [
        field.name
        for field in dataclasses.fields(client)
        if getattr(client, field.name) != getattr(defaults, field.name)
    ]
    if learner.ignores_settings and changed:
        raise ValueError(
            f"model {model.name!r} trains by its own function and ignores client.{changed[0]}: leave it out"
        )
    if protocol.samples == "records" and not learner.gradients:
        raise ValueError(
            f"{protocol.name!r} needs a model with gradients, for it clips every record by itself, and model "
            f"{model.name!r} trains by its own function"
        )
    if jax.process_count() > 1:
        raise ValueError(f"model {model.name!r} trains outside JAX, in one process, got {jax.process_count()}")


def _num_parameters(model: Model) -> int:
    """How many parameters the model has; nothing is computed."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


_SIMULATED = (  # what the statement of every simulation assumes
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
    assumptions: tuple[str, ...] = (),
    declared: tuple[str, ...] = (),
) -> Guarantee:
    """What the simulated training of a config guarantees.

    Arguments:
        assumptions: what its statement rests on beside what every simulation does.
        declared: what only the author of code from outside the package knows.
    """
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
        assumptions=(*_SIMULATED, _SECRET[config.noise], *config.task.all_features.assumptions, *assumptions),
        declared=declared,
        reproducible=schedule.randomness.is_reproducible,
    )


def calibrate_noise(guarantee: Guarantee, *, eps: float | None) -> tuple[Protocol, Callable[[int], float] | None]:
    """Set the noise to meet a target, if there is one and the noise is not given.

    Returns: the settled protocol; and where SubDP's recipe sets the noise by the data, the noise for each Z, else None.
    """
    protocol = guarantee.protocol
    if protocol.samples == "records" and require_item_level(protocol).adaptive_z:
        return _calibrate_by_recipe(guarantee, eps)
    if eps is not None:
        _refuse_without_promise(guarantee, eps)
        if not protocol.is_calibrated:
            guarantee = guarantee.calibrate(eps)
    return guarantee.settled_protocol, None


def _refuse_without_promise(guarantee: Guarantee, eps: float) -> None:
    """Refuse a target eps for rounds that promise nothing, or nothing to the unit that the target is for."""
    protocol = guarantee.protocol
    if not protocol.is_calibrated:
        guarantee = dataclasses.replace(guarantee, protocol=protocol.with_noise(1.0))
    if accounting.reason_for_refusal(guarantee.rounds()) is not None:
        raise ValueError(f"{protocol.name!r} gives no guarantee with these settings: leave out privacy.eps = {eps}")
    if guarantee.target_unit is not guarantee.scope.unit:
        dataclasses.replace(guarantee, eps=None).bound(guarantee.cohorts[:1])


def _calibrate_by_recipe(guarantee: Guarantee, eps: float | None) -> tuple[Protocol, Callable[[int], float]]:
    """Set the noise as SubDP prints it: the target is what its recipe would promise, and nothing is certified.

    Returns: the protocol with the noise for a group of one record; and the noise for a batch that holds at most
    `group` records of one subject.
    """
    if eps is None:
        raise ValueError("adaptive_z derives the noise from privacy.eps: set it")
    cohorts = guarantee.cohorts
    settled = require_item_level(guarantee.protocol).settle(cohorts[0], guarantee.dim)
    batches = len(cohorts) * (settled.private_steps or cohorts[0].size)

    @functools.cache
    def noise_of(group: int) -> float:
        scale = subdp.noise_scale(eps=eps, delta=guarantee.delta, group=group, prob=settled.rate, steps=batches)
        return scale.value

    return dataclasses.replace(settled.with_noise(noise_of(1)), claimed_eps=eps), noise_of
