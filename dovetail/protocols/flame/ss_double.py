"""SS-Double (FLAME): every client reports a random share of its coordinates, and the shuffler hides which with dummies.

- ``inclusion = "bernoulli"`` (the repaired form): each coordinate independently with probability `beta`;
- ``inclusion = "fixed-k"`` (as published): exactly beta d of them.

Each slot is padded with fair draws to `pad_to` messages; of more, `pad_to` are kept (``overflow = "drop"``) or all.
From the same keys both paths sum the same reports; dummies and drops agree in distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np

from dovetail import _validate
from dovetail._jax import jax
from dovetail.claims import flame
from dovetail.events import Mechanism, PaddedBernoulli, Report, Shuffled
from dovetail.mechanisms import ExactSampler
from dovetail.protocols._base import Cohort
from dovetail.protocols._claimed import Claimed, Formula
from dovetail.protocols._messages import Messages
from dovetail.protocols.flame._flame import Padded
from dovetail.protocols.flame._select import top_mask
from dovetail.statements import NotApplicable

__all__ = ["SsDouble"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SsDouble(Padded, Claimed):
    """A random share of the coordinates, padded.

    Guarantees:
        The estimate is unbiased for the mean of the updates, clipped coordinate by coordinate, where no slot overflows.

    References:
        Liu et al. (AAAI 2021, FLAME), Alg. 2 and 3, Thm. 3 and 4; the repair: docs/proofs/ss-double.md.
    """

    name: ClassVar[str] = "ss_double"
    formula: ClassVar[Formula] = staticmethod(flame.ss_double)

    unshared: ClassVar[str] = "hides in dummies, which only a shuffler that counts the reports of a slot can add"

    beta: float = 0.1
    """Share of coordinates that a client reports."""
    inclusion: Literal["bernoulli", "fixed-k"] | None = None
    """`bernoulli` (each coordinate independently) or `fixed-k` (exactly beta d coordinates)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_default("inclusion", "fixed-k" if self.published else "bernoulli")
        _validate.one_of(("bernoulli", "fixed-k"), inclusion=self.inclusion)
        _validate.positive(beta=self.beta)
        _validate.at_most(1, beta=self.beta)
        if self.linkage == "vector" and self.inclusion == "bernoulli":
            raise ValueError("expected inclusion = 'fixed-k' with linkage = 'vector', got inclusion='bernoulli'")
        if self.overflow == "keep" and self.inclusion == "bernoulli":
            raise ValueError("expected overflow = 'drop' with inclusion = 'bernoulli', got overflow='keep'")

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """FLAME's own settings: one in fifty coordinates, and half of them where there are few."""
        return {"eps_local": 0.5, "beta": 0.02 if dim >= 50 else 0.5}

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: both ways to include coordinates, with bits and with Laplace noise."""
        half = {"beta": 0.3 if dim >= 10 else 0.5, "eps_local": 1.0}
        return [half, {**half, "randomizer": "laplace", "pad_to": max(2, num_users // 2), "published": True}]

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """The protocol with slots padded to the cohort's size, unless `pad_to` is set; refuses too small ones."""
        if cohort.aggregators is not None:
            raise self.not_shared()
        pad_to = self.padded_size(cohort)
        if self.inclusion == "fixed-k" and self.num_selected(dim) < 1:
            raise ValueError(f"expected beta * {dim} >= 1 reported coordinates, got beta={self.beta}")
        if self.beta * (cohort.size - cohort.colluders) > pad_to - cohort.colluders:
            raise NotApplicable(
                f"expected pad_to above the {self.beta * cohort.size:.0f} reports that a slot gets on average, "
                f"got pad_to={pad_to}"
            )
        return dataclasses.replace(self, pad_to=pad_to)

    def num_selected(self, dim: int) -> int:
        """k, the number of coordinates that a client reports as published."""
        return round(self.beta * dim)

    def inclusion_rate(self, dim: int) -> float:
        """The expected share of coordinates that a client reports: beta, or k of all."""
        return self.beta if self.inclusion == "bernoulli" else self.num_selected(dim) / dim

    def per_client(self, dim: int) -> int:
        """How many reports a client sends, at most: exactly k as published, otherwise any number up to all."""
        return self.num_selected(dim) if self.inclusion == "fixed-k" else dim

    def select_coordinates(self, x: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A random set of coordinates that does not depend on x, and is all that is reported; without decoys."""
        if self.inclusion == "bernoulli":
            is_reported = jax.random.bernoulli(key, self.beta, x.shape)
        else:
            is_reported = top_mask(jax.random.uniform(key, x.shape), self.num_selected(len(x)))
        return is_reported, is_reported

    def messages(self, dim: int) -> Messages:
        """Deployed messages, on exactly k coordinates.

        Refuses a random number of them, which the shuffler would see.
        """
        if self.inclusion == "bernoulli":
            raise NotApplicable(
                "expected inclusion = 'fixed-k' in a deployment, where every client must send the same number of "
                "messages, got inclusion='bernoulli'"
            )
        return super().messages(dim)

    def select_exactly(self, x: np.ndarray, *, sampler: ExactSampler) -> tuple[np.ndarray, np.ndarray]:
        """A uniformly random set of k coordinates: the first k of a shuffle by Fisher and Yates."""
        order = list(range(len(x)))
        k = self.num_selected(len(x))
        for place in range(k):
            other = place + sampler.randbelow(len(x) - place)
            order[place], order[other] = order[other], order[place]
        return np.sort(order[:k]), np.ones(k, bool)

    def mechanism(self, cohort: Cohort, dim: int) -> Mechanism:
        """The repaired form's own event; as published, one shuffled report on each of k known coordinates.

        With fixed k the neighbours can be coupled to select the same coordinates, so selection is no secret: every one
        of k slots has `pad_to` messages, of which at most the colluders' are no crowd. Linkable coordinates are one
        report with the budget of all.
        """
        if cohort.aggregators is not None:
            raise self.not_shared()
        if self.linkage == "vector":
            whole = Report(kind="generic", eps_local=self.num_selected(dim) * self.report.eps_local)
            return Shuffled(report=whole, num_users=cohort.crowd(), colluders=cohort.colluders)
        if self.inclusion == "fixed-k":
            crowd = self.padding.pad_to
            known = self.num_selected(dim)
            return Shuffled(report=self.report, num_users=crowd, colluders=cohort.colluders, coordinates=known)
        return self._padded_event(cohort, dim)

    def published_event(self, cohort: Cohort, dim: int) -> tuple[Mechanism, dict[str, Any]]:
        """The event that Thm. 3 and 4 speak of: a share beta of the coordinates, padded."""
        return self._padded_event(cohort, dim), {}

    def _padded_event(self, cohort: Cohort, dim: int) -> PaddedBernoulli:
        """The event of a round in which each coordinate is reported with probability beta, and slots are padded."""
        return PaddedBernoulli(
            report=self.report,
            num_users=cohort.size,
            colluders=cohort.colluders,
            coordinates=dim,
            pad_to=self.padding.pad_to,
            inclusion=self.beta,
        )
