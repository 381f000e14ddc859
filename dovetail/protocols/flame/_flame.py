"""What FLAME's protocols share: coordinates clipped to [-C, C], mapped to [0, 1], randomized one by one, shuffled.

The analyzer knows the number of messages in every slot, not which of them are dummies. Dummies are drawn from the
*blanket*: the part of a report's distribution that is the same for every input. They average to the middle of the
interval, so C (2 S - count), with S the de-biased sum of a slot, estimates the sum of the clients' values.

Reports are binary randomized response (``rr2``, the default and the one that is certified throughout), randomized
response on more levels (``rr``) or Laplace noise (``laplace``).

`Flame` is the base of all; `Padded` adds slots of a public size, which dummies fill up and from which a surplus is
dropped or kept; `SharedLevels` adds sums over aggregators in the place of a shuffler, with a proof of range if asked
for.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar, Literal

import numpy as np

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.events import DataIndependent, Mechanism, NonPrivate, Report, Round, View
from dovetail.mechanisms import (
    BinaryRandomizedResponse,
    ExactRandomizedResponse,
    ExactSampler,
    LaplaceRandomizer,
    LocalRandomizer,
    RandomizedResponse,
)
from dovetail.protocols._base import CLIP_VALUE, Cohort, Protocol
from dovetail.protocols._contributions import Contribution
from dovetail.protocols._fast import Fast
from dovetail.protocols._messages import Levels, Messages, Positions
from dovetail.protocols._scopes import SLOTS_TELL_NOTHING, shuffle_scope
from dovetail.protocols._shared_sums import level_sums
from dovetail.shufflers import (
    LINKAGES,
    OVERFLOWS,
    Layout,
    Padding,
    Reports,
    ShuffledReports,
    SlotSums,
    deliver,
    pad,
    slot_sums,
)
from dovetail.statements import Neighbors, NotApplicable

__all__ = [
    "Flame",
    "Padded",
    "SharedLevels",
]

KINDS = ("rr2", "rr", "laplace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flame(Protocol, Fast):
    """Per-coordinate reports in the shuffle model."""

    references: ClassVar[tuple[str, ...]] = ("FLAME",)
    shuffled: ClassVar[bool] = True

    clip_value: float = CLIP_VALUE
    """Coordinates are clipped to plus or minus this."""
    eps_local: float | None = None
    """The budget of one report; calibrated if not given."""
    randomizer: Literal["rr2", "rr", "laplace"] = "rr2"
    """Randomizer of a report."""
    levels: int | None = None
    """Number of levels of `rr`."""
    linkage: Literal["coordinate", "vector"] | None = None
    """`coordinate` shuffles every coordinate separately; `vector` shuffles whole messages (as printed in FLAME)."""
    published: bool = False
    """Run the protocol as its paper prints it; the statement says what is then guaranteed."""

    def __post_init__(self) -> None:
        _validate.positive(clip_value=self.clip_value)
        _validate.one_of(KINDS, randomizer=self.randomizer)
        _validate.positive(**_validate.not_none(eps_local=self.eps_local))
        if (self.levels is not None) != (self.randomizer == "rr"):
            raise ValueError(
                f"expected levels if and only if randomizer='rr', got levels={self.levels} with {self.randomizer!r}"
            )
        self._set_default("linkage", "vector" if self.published else "coordinate")
        _validate.one_of(LINKAGES, linkage=self.linkage)
        if self.eps_local is not None:
            _ = self.local_randomizer

    def _set_default(self, name: str, value: Any) -> None:
        """Set a field that is None, for a frozen dataclass."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def noise_field(self) -> str:
        """The parameter that calibration sets: the budget of a report."""
        return "eps_local"

    @property
    def local_randomizer(self) -> LocalRandomizer:
        """The randomizer of one report, on [0, 1]."""
        eps_local = self.require("eps_local")
        match self.randomizer:
            case "rr2":
                return BinaryRandomizedResponse(eps_local)
            case "rr":
                return RandomizedResponse(eps_local, self.levels or 2)
        return LaplaceRandomizer(eps_local)

    @property
    def report(self) -> Report:
        """One report as an event: its kind, budget and levels."""
        local = self.local_randomizer
        kind: Literal["laplace", "rr"] = "laplace" if self.randomizer == "laplace" else "rr"
        return Report(kind=kind, eps_local=local.eps_local, levels=local.num_reports or 2)

    @property
    def padding(self) -> Padding | None:
        """How slots are filled up; None where they are not."""
        return None

    def needs_dummies(self, cohort: Cohort, dim: int) -> bool:
        """Whether a slot of a round that is released may have fewer reports than it is padded to."""
        return self.padding is not None

    @abc.abstractmethod
    def select_coordinates(self, x: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Client: which coordinates depend on x, and which are reported at all; two masks of shape (dim,).

        What is reported and does not depend on x is a decoy.
        """

    def depends_on_data(self, x: jax.Array) -> jax.Array:
        """Which coordinates, if they are reported, depend on x; a mask of its shape."""
        return jnp.ones(x.shape, bool)

    @abc.abstractmethod
    def mechanism(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of one round as the analyzer sees it."""

    def per_client(self, dim: int) -> int:
        """Reports that a client sends at most."""
        return dim

    def layout(self, dim: int) -> Layout:
        """One slot per coordinate, on one shuffler."""
        return Layout(
            slots=dim,
            reports_per_client=self.per_client(dim),
            shufflers=1,
            linkage=self.linkage or "coordinate",
            padding=self.padding,
        )

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """A report on every coordinate that is selected; a draw from the blanket on decoys."""
        value, is_reported = self._draw_reports(x, key)
        if self.linkage == "coordinate":
            return Reports(None, value, is_reported)
        slot = jnp.nonzero(is_reported, size=self.per_client(len(x)), fill_value=len(x))[0]
        return Reports(slot, value.at[slot].get(mode="fill", fill_value=0), slot < len(x))

    def messages(self, dim: int) -> Messages:
        """One level per message, if coordinates are sent separately and reports are levels."""
        if self.randomizer == "laplace":
            raise NotApplicable("expected a randomizer with integer reports in a deployment, got randomizer='laplace'")
        if self.linkage == "vector":
            raise NotApplicable(
                "expected one message per coordinate (linkage='coordinate') in a deployment, got linkage='vector'"
            )
        response = ExactRandomizedResponse(self.require("eps_local"), self.levels or 2)
        return _Coordinates(response=response, padded=self.padding is not None, protocol=self, dim=dim)

    def select_exactly(self, x: np.ndarray, *, sampler: ExactSampler) -> tuple[np.ndarray, np.ndarray]:
        """Deployed client: the `per_client` coordinates that it reports, and which of them depend on x."""
        return np.arange(len(x)), np.ones(len(x), bool)

    def _draw_reports(self, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Client: a report on every coordinate, and which of them are sent; decoys are draws from the blanket."""
        key_select, key_report = jax.random.split(key)
        depends_on_data, is_reported = self.select_coordinates(x, key=key_select)
        value = self.local_randomizer(self._position_in_unit_interval(x, depends_on_data), key=key_report)
        if self.randomizer == "rr":
            key_blanket = jax.random.fold_in(key_report, 1)
            value = jnp.where(depends_on_data, value, self.local_randomizer.blanket().sample(x.shape, key=key_blanket))
        return value, is_reported

    def clip_update(self, x: jax.Array, state: Any) -> jax.Array:
        """The update with each coordinate clipped to [-C, C]."""
        return jnp.clip(x, -self.clip_value, self.clip_value)

    def _position_in_unit_interval(self, x: jax.Array, depends_on_data: jax.Array) -> jax.Array:
        """The clipped value mapped to [0, 1]; the middle, 1/2, on decoys.

        Reports on the middle are draws from the blanket, for bits and for Laplace noise.
        """
        return jnp.where(depends_on_data, jnp.clip(x / (2 * self.clip_value) + 0.5, 0.0, 1.0), 0.5)

    def log_density(self, value: np.ndarray, x: np.ndarray, *, budget: float | None = None) -> np.ndarray:
        """The log density of each report: the randomizer's, at the clipped value; the blanket's on decoys."""
        depends_on_data = self.depends_on_data(jnp.asarray(x, jnp.float32))
        position = np.asarray(self._position_in_unit_interval(jnp.asarray(x, jnp.float32), depends_on_data))
        return np.where(
            np.asarray(depends_on_data),
            self.local_randomizer.log_density(value, position),
            self.local_randomizer.blanket().log_density(value),
        )

    def tally(self, reports: ShuffledReports, dim: int) -> SlotSums:
        """Sum and number of the messages in every slot."""
        return slot_sums(reports, dim, jnp.float32)

    @property
    def is_summable(self) -> bool:
        """Whether sums serve in the place of messages: a surplus can be dropped from sums of bits only."""
        return self.padding is None or self.padding.overflow == "keep" or self.padding.blanket.is_binary

    @property
    def matches_messages_exactly(self) -> bool:
        """Whether the fast path gives the messages' tally from the same keys.

        It does unless noise or dummies are drawn as sums.
        """
        return self.padding is None and not self._adds_noise

    @property
    def _adds_noise(self) -> bool:
        """Whether a report is its input plus noise, so that the noise of a slot can be drawn at once."""
        return self.randomizer == "laplace"

    def collect(
        self, xs: jax.Array, present: jax.Array, state: Any, *, keys: jax.Array, budgets: jax.Array | None = None
    ) -> SlotSums:
        """The sums of the clients' reports, from the same keys as the messages; of their inputs, if noise is added."""

        def draw(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            """A client's summands, a report or an input on each coordinate, and which of them count."""
            if not self._adds_noise:
                return self._draw_reports(x, key)
            depends_on_data, is_reported = self.select_coordinates(x, key=jax.random.split(key)[0])
            return jnp.nan_to_num(self._position_in_unit_interval(x, depends_on_data), nan=0.5), is_reported

        value, is_reported = jax.vmap(draw)(xs, keys)
        return self.tally(deliver(Reports(None, value, is_reported & present[:, None])), xs.shape[1])

    def finish(self, collected: SlotSums, *, key: jax.Array) -> SlotSums:
        """Added noise and dummies in one draw per slot, with the distribution of the clients' and shuffler's draws."""
        key_noise, key_pad = jax.random.split(key)
        noise = self.local_randomizer.noise_sum(collected.messages, key=key_noise) if self._adds_noise else None
        if noise is not None:
            collected = SlotSums(collected.total + noise, collected.messages)
        return collected if self.padding is None else pad(collected, self.padding, key=key_pad)

    def estimate(self, tally: SlotSums, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The sum of the clients' clipped values over the planned size, and over the share that is reported."""
        local = self.local_randomizer
        total = (tally.total - local.offset * tally.messages) / local.slope
        return self.clip_value * (2 * total - tally.messages) / (size * self.inclusion_rate(len(tally.total))), state

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of the estimate where everybody sends zeros.

        Zeros are reported from the middle of the interval, where dummies average too.
        """
        local = self.local_randomizer
        reported = self.inclusion_rate(dim) * size
        variance = reported * float(local.report_variance(0.5))
        if self.padding is not None:
            variance += (self.padding.pad_to - reported) * local.blanket().variance
        return 2 * self.clip_value / local.slope * math.sqrt(variance) / reported

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of one round; without its crowd it is what a client's own reports reveal."""
        return self.mechanism(cohort, dim)

    def slots_seen(self, dim: int) -> DataIndependent | NonPrivate:
        """Slots tell nothing: every one is filled, or they are drawn at random."""
        return SLOTS_TELL_NOTHING

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """One round as the analyzer sees it: its event, and the scope with what the shuffler is trusted for."""
        permuted = "every coordinate" if self.linkage == "coordinate" else "whole messages"
        more = [f"the shuffler permutes {permuted} uniformly, with fresh randomness"]
        if self.padding:
            dummies = "adds and hides the dummies, and " if self.needs_dummies(cohort, dim) else ""
            more.append(f"the shuffler {dummies}admits no more users than planned")
        scope = shuffle_scope(cohort, neighbors, *more)
        return View(round=Round(mechanism=self.mechanism(cohort, dim), participation=cohort.participation), scope=scope)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Coordinates(Levels):
    """One message for every coordinate that is reported."""

    protocol: Flame
    dim: int

    @property
    def slots(self) -> int:
        """How many slots there are: one per coordinate."""
        return self.dim

    @property
    def per_client(self) -> int:
        """How many messages a client sends: as many as the protocol reports."""
        return self.protocol.per_client(self.dim)

    def positions(self, x: np.ndarray, *, sampler: ExactSampler) -> Positions:
        """Client: the clipped values, mapped to [0, 1], of the coordinates that are reported."""
        x = self.check_update(x, self.dim)
        slot, depends_on_data = self.protocol.select_exactly(x, sampler=sampler)
        with np.errstate(over="ignore"):
            position = np.asarray(x, np.float64)[slot] / (2 * self.protocol.clip_value) + 0.5
        return Positions(slot, position, depends_on_data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Padded(Flame):
    """Slots of a public number of messages, `pad_to`, whatever clients send: the cohort's size unless given.

    So their numbers tell nothing of who reported what, except for a surplus that is kept.
    """

    pad_to: int | None = None
    """Number of messages per slot after adding dummies; default: the number of users."""
    overflow: Literal["drop", "keep"] | None = None
    """What to do with reports beyond `pad_to`: `drop` a random surplus, or `keep` it (which reveals counts)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_default("overflow", "keep" if self.published else "drop")
        _validate.one_of(OVERFLOWS, overflow=self.overflow)
        pad_to = _validate.not_none(pad_to=self.pad_to)
        _validate.integer(**pad_to)
        _validate.at_least(2, **pad_to)

    def padded_size(self, cohort: Cohort) -> int:
        """How many messages a slot is filled up to in this cohort.

        Refuses a number in which colluders leave no crowd.
        """
        pad_to = cohort.size if self.pad_to is None else self.pad_to
        if pad_to - cohort.colluders < 2:
            raise ValueError(f"expected pad_to - colluders >= 2, got pad_to={pad_to} with {cohort.colluders} colluders")
        return pad_to

    @property
    def padding(self) -> Padding:
        """Dummies fill every slot up to `pad_to`; a surplus is dropped or kept.

        Dummies are drawn from the blanket: the part of a report's distribution that is the same for every input. Needs
        `pad_to` and `eps_local` to be set.
        """
        return Padding(
            pad_to=self.require("pad_to"), overflow=self.require("overflow"), blanket=self.local_randomizer.blanket()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedLevels(Flame):
    """Reports that can be added up between aggregators; `verified`: each user proves that its reports are in range."""

    verified: bool = False
    """Deployed users prove to the aggregators that what they share is in range, and count only then."""

    def messages(self, dim: int) -> Messages:
        """Deployed messages for a shuffler; refuses `verified`, for a shuffler sees no shares to verify."""
        if self.verified:
            raise NotApplicable("expected aggregators for verified = true, who verify shares, got messages to shuffle")
        return super().messages(dim)

    def contribution(self, cohort: Cohort, dim: int) -> Contribution:
        """What clients share between aggregators: the level of every coordinate, decoys too, and no dummies."""
        return level_sums(dataclasses.replace(self, verified=False).messages(dim), cohort, verified=self.verified)
