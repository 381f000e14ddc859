"""The protocol interface: one parameter object, one method per role.

A client randomizes its update, a shuffler (where there is one) permutes the reports, the analyzer tallies and
estimates. `view` says in privacy terms what that round was. Who calls what:

- the simulation runs `randomize` for all clients at once, on float32 arrays, then `tally` and `estimate`, in one
  compiled program; a protocol that is `Fast` also lets it add up without messages;
- a deployed client draws from `messages` instead, which are exact and made of integers; the deployed analyzer reads
  them back and calls the same `tally` and `estimate`. With aggregators it draws from `contribution`, whose sum stands
  for the tally. `prepare` is called by simulation and audits alone;
- `guarantee` and audits ask `view`; `guarantee` also asks `own_reports` and `slots_seen`; what its paper says is in
  `Claimed`.

A protocol is a frozen dataclass of Python numbers: hashable, static under jit. `settle` fills in what follows from the
cohort and the dimension. Whatever changes from round to round is its public state, a pytree; `prepare` brings it up to
date before a round. What is known of a protocol as such (its references, settings that make sense, why it is not
deployed) is a fact of its class.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.events import DataIndependent, Everyone, FixedSize, Mechanism, NonPrivate, Participation, Poisson, View
from dovetail.protocols._contributions import Contribution
from dovetail.protocols._messages import Messages
from dovetail.shufflers import Layout, Reports, ShuffledReports
from dovetail.statements import Neighbors, NotApplicable, Unit

__all__ = ["CLIP_NORM", "CLIP_VALUE", "Cohort", "Protocol"]

# unless given: public, and the same whatever the data are
CLIP_NORM = 1.0
CLIP_VALUE = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohort:
    """What is public about who takes part in a round.

    `size` is the planned and the maximum number of users. The simulation divides noised sums by it; the deployed
    analyzer divides by the users who counted, where that number is public and the same for neighbours. Rounds with
    fewer than `min_size` users release nothing. The adversary controls up to `colluders` of the users. `noise_scale` is
    this round's noise over the protocol's own (a schedule). `records` is the public number of records of the whole
    federation, if records and not users are sampled. Where users decide secretly whether their data enter a round,
    those of `size` do on average, but all `uploads` users upload: the minimum counts these. `aggregators` is given
    where reports travel as shares of their sum between so many of them, not through a shuffler.
    """

    participation: Participation
    size: int
    min_size: int = 0
    colluders: int = 0
    noise_scale: float = 1.0
    records: int | None = None
    uploads: int | None = None
    aggregators: int | None = None

    def __post_init__(self) -> None:
        _validate.integer(size=self.size, min_size=self.min_size, colluders=self.colluders)
        _validate.at_least(1, size=self.size)
        if self.uploads is not None:
            _validate.integer(uploads=self.uploads)
            _validate.at_least(self.size, uploads=self.uploads)
            if self.participation != Poisson(prob=self.size / self.uploads):
                raise ValueError(f"expected {self.size} of {self.uploads} users by coins, got {self.participation}")
        _validate.in_interval(0, self.max_uploads, min_size=self.min_size)
        _validate.non_negative(colluders=self.colluders)
        _validate.positive(noise_scale=self.noise_scale)
        _validate.integer(**_validate.not_none(aggregators=self.aggregators))
        _validate.at_least(2, **_validate.not_none(aggregators=self.aggregators))

    @property
    def max_uploads(self) -> int:
        """The largest number of users that upload in this round: `uploads` where all do, else the planned size.

        More may come only of a Poisson sample that a curator draws. Sums of shares are made so wide that they hold it.
        """
        return self.size if self.uploads is None else self.uploads

    def refuse_minimum_if_secret(self) -> None:
        """Refuse a minimum if the sample is secret: a withheld round would reveal who was sampled.

        The number of uploads does not, where everybody uploads.
        """
        if self.uploads is None and self.participation.secret and self.min_size > 0:
            raise ValueError(
                "expected min_size = 0 with a secret sample (a withheld round would reveal who was sampled), "
                f"got min_size={self.min_size}"
            )

    @property
    def population(self) -> int:
        """How many users the federation has."""
        if self.uploads is not None:
            return self.uploads
        match self.participation:
            case FixedSize(population=population):
                return population
            case Poisson(prob=prob):
                return round(self.size / prob)
            case Everyone():
                return self.size
        raise ValueError("expected everyone in every round, or users sampled at random, got disjoint batches of users")

    @property
    def participation_of_honest(self) -> Participation:
        """How users are drawn for an adversary that sees which of its own `colluders` were drawn.

        Of a uniform sample of m of N users let j be the colluders drawn, of c. Given j, and so to the adversary, the
        others drawn are a uniform sample of m - j of the N - c others, the victim with probability (m - j) / (N - c);
        what the colluders add to the sum it knows and takes out. A smaller sample of the same users hides the victim
        better, so no j is worse than j = 0, sure to be possible where m <= N - c: a sample of m of N - c users. Where
        it is not, all the others may be drawn. The bound then holds for every j, hence also in each round of many,
        whatever the adversary saw before. Poisson draws are independent of each other and tell nothing.
        """
        match self.participation:
            case FixedSize(size=size, population=population) if self.colluders:
                others = population - self.colluders
                if others < 1:
                    raise ValueError(f"expected colluders < population={population}, got colluders={self.colluders}")
                return FixedSize(size=size, population=others) if size < others else Everyone()
        return self.participation

    def crowd(self) -> int:
        """The number of users that a shuffled round is sure to have: its enforced minimum; refuses one below 2."""
        if self.min_size < 2:
            raise ValueError(f"expected cohort.min_size >= 2 for a protocol that shuffles reports, got {self.min_size}")
        return self.min_size


class Protocol(abc.ABC):
    """A way to estimate the mean of the clients' updates, and what that reveals.

    A protocol of your own defines `name`, `layout`, `randomize`, `tally` (unless the default fits), `estimate`, `view`
    and `noise_std`; everything else has a default that claims nothing. It is a frozen dataclass, and its fields are
    config keys. `dovetail.testing.check_protocol` runs code against what it owes:

    Guarantees:
        `randomize` sends what `layout` declares, and nothing but `valid` says whether a client's reports count.
        Tallies of parts of the reports add up to that of all, in any order; reports that are not valid add nothing.
        `estimate` averages to the mean of `expected_update`, up to `bias`; on zero updates it spreads by `noise_std`.
        An update with NaN or infinite entries adds no more than any other, and one that is NaN counts as zero.
        `view` says no less than what a round reveals, `own_reports` no less than what one client's reports do.
        `with_noise` at more noise is more private; without noise the estimate is the mean of `expected_update`, where
        its randomness is noise alone.
        Where defined: `log_density` is the density of what `randomize` sends; the sums of `Fast` have the law of the
        messages; `messages` and `contribution` give the estimates of the simulation, from exact randomness.
    """

    name: ClassVar[str]
    references: ClassVar[tuple[str, ...]] = ()  # its papers, by their keys in `dovetail.references`
    shuffled: ClassVar[bool] = False  # whether reports hide in a crowd, which then must not be smaller than planned
    relation: ClassVar[Neighbors] = Neighbors.REPLACE_ONE  # what it is quoted under
    resizable: ClassVar[bool] = False  # whether rounds may be of different sizes
    only_dim: ClassVar[int | None] = None  # the dimension of updates, where it takes one alone
    read_off_data: ClassVar[tuple[str, ...]] = ()  # fields that the data set, for a claim alone: never published
    undeployed: ClassVar[str] = "has a trusted curator and no shuffler to deploy"  # why there are no `messages`
    unshared: ClassVar[str] = "does not say what a client adds to a sum"  # why there is no `contribution`
    samples: ClassVar[Literal["users", "records"]] = "users"  # what is drawn, clipped and noised
    secret_rounds: ClassVar[bool] = False  # whether users may decide secretly whether their data enter a round
    uncompared: ClassVar[str | None] = None  # why it is in no comparison of trainings, where there is a reason
    same_noise_as: ClassVar[str | None] = None  # a protocol whose estimate has the same law, and so the same accuracy
    # the settings that say whom to trust, where it sums any vectors: scores are summed by it, too
    trust_settings: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that make sense at this dimension beside `settings`, as its papers set them where they do."""
        return {}

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """Settings that tests and audits go through, each completed by `example`.

        Arguments:
            dim: coordinates of an update.
            num_users: users of a round.

        Returns: one dictionary for every way in which the code can run; the first is the usual one.
        """
        return [{}]

    @property
    def protects(self) -> Unit:
        """Whose privacy its own statements are about."""
        return Unit.USER

    @property
    def noise_field(self) -> str | None:
        """The name of the parameter that calibration sets; None where there is no noise to calibrate.

        "noise_multiplier", or a budget: the smaller that is, the more noise.
        """
        return None

    @property
    def is_calibrated(self) -> bool:
        """Whether its noise is set; if not, `with_noise` sets it."""
        return self.noise_field is None or getattr(self, self.noise_field) is not None

    def with_noise(self, noise: float) -> Self:
        """This protocol at a noise level; larger is more private.

        Arguments:
            noise: the noise multiplier, or one over the budget if `noise_field` is a budget.
        """
        if self.noise_field is None:
            raise ValueError(f"expected a protocol with noise to calibrate, got protocol.name={self.name!r}")
        value = noise if self.noise_field == "noise_multiplier" else 1 / noise
        return dataclasses.replace(self, **{self.noise_field: value})  # type: ignore[type-var]

    @property
    def needs_minimum(self) -> bool:
        """Whether a statement counts on a minimum number of users in every round, which then must be enforced."""
        return self.shuffled

    def require(self, name: str) -> Any:
        """A parameter that calibration or `settle` fills in; refuses if it is not set yet.

        Arguments:
            name: a field of this protocol.
        """
        value = getattr(self, name)
        if value is None:
            how = "set or calibrated" if name == self.noise_field else "given or settled"
            raise ValueError(f"expected {name} to be {how}, got {name}=None")
        return value

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """This protocol with everything set that follows from cohort and dimension; refuses invalid settings.

        Arguments:
            cohort: what is public about a round, with its planned size and its minimum.
            dim: coordinates of an update.
        """
        return self

    @abc.abstractmethod
    def layout(self, dim: int) -> Layout:
        """How many slots, reports and shufflers an update of this dimension needs.

        Returns: the shape of what `randomize` gives; the shuffler permutes each slot on its own, or whole messages.
        """

    def init(self, dim: int) -> Any:
        """The public state before the first round: a pytree of arrays, which `prepare` and `estimate` replace."""
        return ()

    def noise_scales(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """Each round's noise over the protocol's own, one factor per round; refuses sizes that have no accounting.

        Arguments:
            sizes: the planned number of users of every round, the first round first.
        """
        if not self.resizable and len(set(sizes)) > 1:
            raise ValueError(f"expected rounds of one size under {self.name!r}, got {min(sizes)} to {max(sizes)} users")
        return (1.0,) * len(sizes)

    def clip_update(self, x: jax.Array, state: Any) -> jax.Array:
        """Updates on the last axis, as far as they can count: clipped to the bound that the guarantee rests on.

        Where records are clipped (`samples` is "records") these are records' gradients.
        """
        return x

    def expected_update(self, x: jax.Array, state: Any) -> jax.Array:
        """What updates on the last axis add to the mean that is estimated: clipped, unless a protocol does more."""
        return self.clip_update(x, state)

    def bias(self, dim: int) -> float:
        """How far the average estimate of a coordinate may be from the mean of `expected_update`."""
        return 0.0

    def inclusion_rate(self, dim: int) -> float:
        """The share of its coordinates that a client reports, on average and whatever they are."""
        return 1.0

    def rows_of_unit(self, cohort: Cohort) -> int:
        """How many clipped rows one protected unit adds to a round, at most: one update, or so many records."""
        return 1

    @property
    def private_steps(self) -> int:
        """Noisy steps that a user takes on its own records in a round, each record's gradient clipped; 0: none."""
        return 0

    @property
    def needs_norms(self) -> bool:
        """Whether `prepare` needs the norms of all updates of a round."""
        return False

    def prepare(self, state: Any, *, noise_scale: jax.Array, norms: jax.Array | None = None) -> Any:
        """The state for this round, before anyone randomizes.

        Arguments:
            state: what `init`, or the round before, gave.
            noise_scale: this round's noise over the protocol's own.
            norms: L2 norms of all updates, NaN for absent users; None unless `needs_norms`.
        """
        return state

    @property
    def budgets(self) -> tuple[float, ...] | None:
        """Every user's own eps_local, where budgets are personal; public, and the same in every round."""
        return None

    @abc.abstractmethod
    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """Client: the reports for one update.

        Runs under `jax.vmap` and `jax.jit`, for all clients of a chunk at once.

        Arguments:
            x: the update, float32 of shape (dim,); any value may come, NaN and infinities included.
            state: the round's public state.
            key: this client's randomness in this round, used for nothing else.
            budget: the client's own eps_local, where `budgets` are personal.
        """

    def messages(self, dim: int) -> Messages:
        """What deployed clients send and the analyzer reads, for updates of this dimension, all settled."""
        raise NotApplicable(f"expected a protocol with messages to deploy, got {self.name!r}, which {self.undeployed}")

    def contribution(self, cohort: Cohort, dim: int) -> Contribution:
        """What deployed clients of this cohort share between aggregators and the analyzer reads, all settled."""
        raise self.not_shared()

    def not_shared(self) -> NotApplicable:
        """The exception to raise where a cohort has aggregators but this protocol has no contribution."""
        return NotApplicable(
            f"expected a protocol whose reports can be shared as sums, got {self.name!r}, which {self.unshared}"
        )

    def log_density(self, value: np.ndarray, x: np.ndarray, *, budget: float | None = None) -> np.ndarray | None:
        """The exact log density of each report that a client sends on update x; None if it has no simple form.

        `value` is (..., slots), one column per slot; so is the result, or (..., 1) if a client's reports are one draw.
        Reports are independent of each other. Audits use it, and tests compare it with `randomize`.
        """
        return None

    def tally(self, reports: ShuffledReports, dim: int) -> Any:
        """Analyzer: sums that add up over any split of the messages; here the sum of dense reports, slot by slot.

        What is not valid is masked before it is added, whatever it holds, and products are taken in full precision: a
        coarser one (TF32 on GPUs) would make a sum of clipped vectors longer than their clip norm.
        """
        valid = reports.valid if reports.valid.ndim > 1 else reports.valid[:, None]
        value = jnp.where(valid, reports.value, 0)
        if reports.valid.ndim > 1:
            return jnp.sum(value, axis=0)
        return jnp.einsum("c,cd->d", reports.valid.astype(value.dtype), value, precision=jax.lax.Precision.HIGHEST)

    @abc.abstractmethod
    def estimate(self, tally: Any, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """Analyzer: the estimated mean update, and the next public state.

        Arguments:
            tally: the sum of the tallies of all messages.
            size: a public number of users that the sum is divided by.
            state: the round's public state.
            key: the analyzer's randomness, for a curator's noise.
        """

    def public_state(self, state: Any) -> Any:
        """What everybody may see of the state: all of it, unless noise that later rounds take back is in it."""
        return state

    def noise_kept(self, rounds: int) -> float:
        """Of the noise that the mean of so many estimates would have, were rounds independent, the share that it has.

        1 unless rounds take back noise of earlier ones.
        """
        return 1.0

    def skip(self, state: Any, *, key: jax.Array) -> Any:
        """The state after a round that is not released, of which nobody learns anything.

        Arguments:
            state: the state before it.
            key: the analyzer's randomness of that round.
        """
        return state

    @abc.abstractmethod
    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """One round in privacy terms: what is certified follows from this, and nothing checks it but attacks.

        Arguments:
            cohort: what is public about the round.
            dim: coordinates of an update.
            neighbors: which inputs must look alike; refuse a relation that the protocol has no event for.

        Returns: the event of the round, with who takes part, and the scope: against whom, under which assumptions.
        """

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of one client's reports with its name on them: what remains if nobody is trusted.

        Of a shuffled event what counts here is what it says of the reports themselves, without their crowd.
        """
        return NonPrivate(reason="not certified: the protocol does not declare what a client's own reports reveal")

    def slots_seen(self, dim: int) -> DataIndependent | NonPrivate:
        """Whether the slots that a client fills depend on its data.

        All that the shuffler sees, which cannot read values.
        """
        return NonPrivate(
            reason="not certified: the protocol does not declare what a client's choice of slots depends on"
        )

    @abc.abstractmethod
    def noise_std(self, size: int, dim: int) -> float:
        """The exact standard deviation of a coordinate of the estimate when `size` users all send a zero update."""
