"""Protocols that clip the gradient of every record separately and protect items, or people with several items.

A person (a *subject*) may have records at several users. The certified form caps how many of a subject's records are
used at all: `items_per_subject` (Z_max) over the whole federation, at most `items_per_user` at one user, at most
`users_per_subject` users. The cap is public and enforced by leaving out records by a rule that looks at that subject's
records alone; the noise is the same in every step. Each record joins a step independently with `sampling_rate`, and the
accounting uses how many of a subject's records enter the same sum (`events.SampledSubject`).

`adaptive_z` sets the noise by the largest number of records of one subject that a batch happens to hold, as the paper
does: the noise then reveals that number, so there is no guarantee.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from dovetail import _validate
from dovetail._jax import jax
from dovetail.claims import Claim
from dovetail.events import Disjoint, Gaussian, Mechanism, NonPrivate, Poisson, Round, SampledSubject, Separated
from dovetail.mechanisms.gaussian import clip_l2
from dovetail.protocols._base import CLIP_NORM, Cohort, Protocol
from dovetail.protocols._claimed import FROM_DATA, Claimed
from dovetail.protocols._scopes import DROPOUT
from dovetail.shufflers import Layout
from dovetail.statements import Neighbors, Scope, Unit

__all__ = ["ItemLevel"]

_RATE = 0.1
_REMOVAL = "users stay on the public roster and take part as before, even if records of theirs are removed"
_LEAKS = "the noise depends on the largest number of records that one subject has in a batch, and so reveals it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemLevel(Protocol, Claimed):
    """Per-record clipping; `batch` is the expected number of records in a step, a public constant."""

    references: ClassVar[tuple[str, ...]] = ("SubDP",)
    relation: ClassVar[Neighbors] = Neighbors.ADD_REMOVE
    uncompared: ClassVar[str | None] = (
        "it protects people with records at several users; see `dovetail reproduce subdp`"
    )
    read_off_data: ClassVar[tuple[str, ...]] = ("group_in_batch",)
    claimed_for: ClassVar[Literal["round", "training"]] = "training"
    samples: ClassVar[Literal["users", "records"]] = "records"

    clip_norm: float = CLIP_NORM
    """Largest L2 norm of a record's gradient; larger ones are scaled down."""
    items_per_subject: int | None = None
    """Maximum number of records of a subject that are used, over all users."""
    users_per_subject: int | None = None
    """Maximum number of users at which a subject's records are used."""
    items_per_user: int | None = None
    """Maximum number of records of a subject that are used at one user."""
    batch: float | None = None
    """Expected number of records per sum; or give `sampling_rate`."""
    sampling_rate: float | None = None
    """Probability that a record joins a sum; or give `batch`."""
    noise_multiplier: float | None = None
    """Standard deviation of the noise divided by the clip norm; calibrated if not given."""
    unit: Literal["subject", "item"] = "subject"
    """`subject` or `item`; follows `privacy.unit`."""
    adaptive_z: bool = False
    """Set the noise by the largest group in the batch, as published: no guarantee."""
    group_in_batch: int | None = None  # the paper's Z as the data has it: for its claim, never for what is certified
    """Filled in: the most records of one subject in a batch, as the data have it; for the paper's claim alone."""
    claimed_eps: float | None = None  # what the paper's recipe was asked for, where it sets the noise (adaptive_z)
    """Filled in: the eps that the paper's recipe would promise."""

    def __post_init__(self) -> None:
        _validate.clip_norm(clip_norm=self.clip_norm)
        _validate.one_of(("subject", "item"), unit=self.unit)
        if self.items_per_subject is None:
            object.__setattr__(self, "items_per_subject", 1)
        counts = _validate.not_none(
            items_per_subject=self.items_per_subject,
            users_per_subject=self.users_per_subject,
            items_per_user=self.items_per_user,
            group_in_batch=self.group_in_batch,
        )
        _validate.integer(**counts)
        _validate.at_least(1, **counts)
        if self.unit == "item" and self.items_per_subject != 1:
            raise ValueError(f"expected items_per_subject = 1 with unit = 'item', got {self.items_per_subject}")
        if self.batch is None and self.sampling_rate is None:
            object.__setattr__(self, "sampling_rate", _RATE)
        _validate.positive(**_validate.not_none(batch=self.batch, noise_multiplier=self.noise_multiplier))
        rate = _validate.not_none(sampling_rate=self.sampling_rate)
        _validate.positive(**rate)
        _validate.at_most(1, **rate)

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a first try: three records of a subject, each in half of all batches of 5."""
        return {"noise_multiplier": 1.0, "items_per_subject": 3, "batch": 5.0, "sampling_rate": 0.5}

    @property
    def protects(self) -> Unit:
        """The unit that is protected: subjects, or single items."""
        return Unit(self.unit)

    @property
    def noise_field(self) -> str:
        """The parameter that calibration sets: the noise multiplier."""
        return "noise_multiplier"

    @property
    def std(self) -> float:
        """Standard deviation of the noise on each coordinate of a sum of clipped gradients."""
        return float(self.require("noise_multiplier") * self.clip_norm)

    @property
    def rate(self) -> float:
        """The probability with which a record joins a step."""
        return float(self.require("sampling_rate"))

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """The protocol with the sampling rate that follows from the batch, or the batch from the rate.

        Neither depends on the data, for the number of records is public. Refuses batch and rate that do not agree.
        """
        if isinstance(cohort.participation, Disjoint | Separated):
            kind = "disjoint" if isinstance(cohort.participation, Disjoint) else "separated"
            raise ValueError(
                f"expected no batches of users that are fixed under {self.name!r}, got cohort.kind={kind!r}"
            )
        if cohort.records is None:
            return self
        records = self._expected_records(cohort)
        if self.batch is None:
            return dataclasses.replace(self, batch=self.rate * records)
        rate = self.batch / records
        if self.sampling_rate is not None and abs(rate - self.sampling_rate) > 1e-9 * rate:
            raise ValueError(
                f"expected batch or sampling_rate, got batch={self.batch} of {records:g} records and "
                f"sampling_rate={self.sampling_rate}"
            )
        if rate > 1:
            raise ValueError(f"expected a sampling rate of at most 1, got batch={self.batch} of {records:g} records")
        return dataclasses.replace(self, sampling_rate=rate)

    @abc.abstractmethod
    def _expected_records(self, cohort: Cohort) -> float:
        """How many records a step draws from, on average."""

    def check_relation(self, neighbors: Neighbors) -> None:
        """Refuse any relation but add-remove: subjects and items are added or removed."""
        if neighbors is not Neighbors.ADD_REMOVE:
            raise ValueError(f"expected neighbors = add-remove under {self.name!r}, got neighbors={neighbors.value!r}")

    def layout(self, dim: int) -> Layout:
        """One slot per coordinate of a sum, or of a model; there is no shuffler."""
        return Layout(slots=dim, reports_per_client=dim, shufflers=0)

    def clip_update(self, x: jax.Array, state: Any) -> jax.Array:
        """The gradients of records, scaled down to the clip norm."""
        return clip_l2(x, self.clip_norm)

    def rows_of_unit(self, cohort: Cohort) -> int:
        """How many records the caps leave a subject; with private steps, at one user, for users see no more.

        Without a cap that is certified (adaptive_z), as many as the protocol speaks of.
        """
        if self.adaptive_z:
            return self.items_per_subject or 1
        event = self._sampled_subject(cohort)
        return event.most_at_user if self.private_steps else event.most_items

    def _mechanism(self, cohort: Cohort, **more: Any) -> Mechanism:
        """The event of a round; nothing is certified where the data set the noise."""
        return NonPrivate(reason=_LEAKS) if self.adaptive_z else self._sampled_subject(cohort, **more)

    def _sampled_subject(self, cohort: Cohort, **more: Any) -> SampledSubject:
        """The event of a subject with as many records, at as many users, as the caps allow."""
        spanned = self.users_per_subject or cohort.population
        items = self.items_per_subject or 1
        return SampledSubject(
            std=self.std,
            clip_norm=self.clip_norm,
            items=items,
            prob_item=self.rate,
            users_spanned=min(spanned, items),
            items_per_user=None if self.items_per_user is None else min(self.items_per_user, items),
            **more,
        )

    def _assumptions(self) -> tuple[str, ...]:
        """What both protocols take for granted, and the cap that is enforced."""
        public = (
            "the sampling rate and the batch size are public and do not depend on who takes part",
            DROPOUT,
            _REMOVAL,
        )
        if self.unit == "item":
            return public
        parts = [f"at most {self.items_per_subject} records of a subject are used in total"]
        if self.items_per_user is not None:
            parts.append(f"at most {self.items_per_user} at one user")
        if self.users_per_subject is not None:
            parts.append(f"at no more than {self.users_per_subject} user{'s' * (self.users_per_subject > 1)}")
        return (f"{', '.join(parts)}; the choice depends on that subject's records alone", *public)

    def published_event(self, cohort: Cohort, dim: int) -> tuple[Mechanism, dict[str, Any]] | None:
        """The paper counts items under Poisson sampling, in groups of as many as a batch holds of one subject."""
        if self.group_in_batch is None:
            return None
        noise = Gaussian(std=self.std, sensitivity=self.clip_norm, neighbors=Neighbors.ADD_REMOVE)
        spanned = self.users_per_subject or cohort.population
        return noise, {"items_per_subject": self.group_in_batch, "users_per_subject": spanned}

    def published_rounds(self, event: Mechanism, cohort: Cohort) -> list[Round]:
        """Every step of a round, on a Poisson sample of records."""
        return [Round(mechanism=event, participation=Poisson(prob=self.rate))] * max(1, self.private_steps)

    def published_scope(self, scope: Scope) -> Scope:
        """The scope of the paper's claim: records are added or removed, and Z is read off the data."""
        return dataclasses.replace(scope, neighbors=Neighbors.ADD_REMOVE, assumptions=(*scope.assumptions, FROM_DATA))

    def claim(self, cohorts: Sequence[Cohort], dim: int, *, delta: float) -> Claim | None:
        """The paper's claim; where its recipe set the noise batch by batch, the target that the recipe was given."""
        claim = super().claim(cohorts, dim, delta=delta)
        if claim is None or self.claimed_eps is None:
            return claim
        return dataclasses.replace(claim, eps=self.claimed_eps)
