"""SS-Topk (FLAME): every client reports its k largest coordinates, and draws from the blanket on `decoys` others.

With all other coordinates as decoys (the default) the shuffler learns nothing from the indices, nothing overflows, and
the local guarantee is k eps_local. With fewer, the selection, a function of the data, is seen by the shuffler.
Each slot is padded to `pad_to` messages; of more, `pad_to` are kept (``overflow = "drop"``) or all (as published,
which shows the counts). The fast path agrees with the messages in distribution: where reports are bits and slots do not
overflow with decoys, only the k largest of every client are collected, and all coins of a slot are drawn at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.claims import flame
from dovetail.events import DataIndependent, Mechanism, NonPrivate, PaddedTopk, Report, Shuffled
from dovetail.mechanisms import BinaryRandomizedResponse, ExactSampler
from dovetail.protocols._base import Cohort
from dovetail.protocols._claimed import Claimed, Formula
from dovetail.protocols._messages import Messages
from dovetail.protocols._scopes import SLOTS_TELL_NOTHING
from dovetail.protocols.flame._flame import Padded, SharedLevels
from dovetail.protocols.flame._select import signed_counts, top_mask
from dovetail.shufflers import SlotSums
from dovetail.statements import NotApplicable

__all__ = ["SsTopk"]

_COUNTS_SHOW = "surplus reports are kept and show how many users report a coordinate, which depends on the data"
_SHARE = 50
_SLOTS_SHOW = "the shuffler sees which coordinates a client reports"
_INDICES_SHOW = "the indices in an unsplit message depend on its sender's data"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SsTopk(SharedLevels, Padded, Claimed):
    """The largest coordinates, hidden among decoys and dummies.

    Guarantees:
        The estimate is unbiased for the mean of the clients' k largest coordinates, clipped, where no slot overflows.

    References:
        Liu et al. (AAAI 2021, FLAME), Alg. 4, Prop. 2, Thm. 4 and 5; docs/proofs/ss-topk.md.
    """

    name: ClassVar[str] = "ss_topk"
    formula: ClassVar[Formula] = staticmethod(flame.ss_topk)

    k: int = 0  # one in fifty coordinates, unless given
    """Number of largest coordinates that a client reports."""
    decoys: int | None = None
    """Number of other coordinates for which a client reports a fair coin; default: all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(k=self.k)
        _validate.non_negative(k=self.k)
        decoys = _validate.not_none(decoys=self.decoys)
        _validate.integer(**decoys)
        _validate.non_negative(**decoys)

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """FLAME's own settings: k is one in fifty coordinates."""
        return {"eps_local": 0.5, "k": max(1, dim // _SHARE)}

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: all decoys (the usual way, so first), some and none, and every randomizer.

        Some of their slots overflow, and some lack reports.
        """
        k = max(1, dim // 5)
        some = min(k + 1, dim - k)
        few = max(2, num_users * 14 // 15) if some < dim - k else num_users
        bits = {"eps_local": 1.0, "k": k}
        levels = {"randomizer": "rr", "levels": 5, "decoys": 0, "pad_to": max(2, num_users * 4 // 5)}
        laplace = {"randomizer": "laplace", "decoys": some, "pad_to": max(2, num_users * 2 // 5), "published": True}
        return [bits, {**bits, "decoys": some, "pad_to": few}, {**bits, **levels}, {**bits, **laplace}]

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """The protocol with k, decoys and padding set.

        Unless given, k is one in fifty coordinates, all others are decoys (none as published), and slots are padded to
        the cohort's size. Refuses slots that would overflow where everybody fills them.
        """
        if self.k == 0:
            return dataclasses.replace(self, k=max(1, dim // _SHARE)).settle(cohort, dim)
        if self.k > dim:
            raise ValueError(f"expected k <= {dim}, the dimension, got k={self.k}")
        most = dim - self.k
        decoys = self.per_client(dim) - self.k
        if decoys > most:
            raise ValueError(f"expected decoys from 0 to dimension - k = {most}, got decoys={decoys}")
        if cohort.aggregators is not None:
            return self._settle_for_sums(cohort, decoys, most)
        pad_to = self.padded_size(cohort)
        if decoys == most and pad_to < cohort.size:
            raise ValueError(
                f"expected pad_to >= {cohort.size}, the number of users per slot, or fewer decoys, got {pad_to=}"
            )
        return dataclasses.replace(self, decoys=decoys, pad_to=pad_to)

    def _settle_for_sums(self, cohort: Cohort, decoys: int, most: int) -> Self:
        """The protocol settled for aggregators: everybody reports every coordinate, and no slot is filled up.

        Nobody sees what a slot lacks there.
        """
        if decoys != most:
            raise ValueError(
                f"expected all other coordinates as decoys where sums are shared (decoys={most}), got decoys={decoys}"
            )
        if self.pad_to not in (None, cohort.crowd()):
            raise ValueError(
                "expected no pad_to where sums are shared, for aggregators add no dummies and the crowd is "
                f"cohort.min_size, got pad_to={self.pad_to}"
            )
        alone = dataclasses.replace(self, decoys=decoys, pad_to=cohort.crowd(), overflow="keep")
        alone.padded_size(cohort)
        return alone

    def per_client(self, dim: int) -> int:
        """How many reports a client sends: on the k largest coordinates and on the decoys."""
        usual = 0 if self.published else dim - self.k
        return self.k + (usual if self.decoys is None else self.decoys)

    def needs_dummies(self, cohort: Cohort, dim: int) -> bool:
        """Whether a slot may lack reports: not if everybody reports every slot, and the enforced minimum fills them."""
        return self.per_client(dim) < dim or cohort.min_size < self.padding.pad_to

    def depends_on_data(self, x: jax.Array) -> jax.Array:
        """The coordinates whose reports depend on x: the k largest, as a mask."""
        return top_mask(x, self.k)

    def select_coordinates(self, x: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The k largest coordinates, and those with a uniformly random set of the others as decoys; two masks."""
        largest = self.depends_on_data(x)
        reported = self.per_client(len(x))
        if reported == len(x):
            return largest, jnp.ones(x.shape, bool)
        tags = jnp.where(largest, 0.0, 0.5 + jax.random.uniform(key, x.shape))
        return largest, largest | top_mask(tags, reported - self.k) if reported > self.k else largest

    def expected_update(self, x: jax.Array, state: Any) -> jax.Array:
        """The update with all but its k largest coordinates 0, clipped."""
        return jnp.where(top_mask(x, self.k), self.clip_update(x, state), 0.0)

    @property
    def matches_messages_exactly(self) -> bool:
        """False: the fast path draws decoys with the dummies."""
        return False

    def messages(self, dim: int) -> Messages:
        """Deployed messages, one for every coordinate: fewer would show the shuffler which are largest."""
        if self.per_client(dim) != dim:
            raise NotApplicable(
                f"expected all other coordinates as decoys in a deployment (decoys = {dim - self.k}), "
                f"got decoys={self.per_client(dim) - self.k}"
            )
        return super().messages(dim)

    def select_exactly(self, x: np.ndarray, *, sampler: ExactSampler) -> tuple[np.ndarray, np.ndarray]:
        """All coordinates; the k largest depend on x: those of `depends_on_data`, here by sorting, for one client."""
        magnitude = np.nan_to_num(np.abs(np.asarray(x, np.float64)), nan=0.0, posinf=np.inf)
        depends_on_data = np.zeros(len(x), bool)
        depends_on_data[np.argsort(-magnitude, kind="stable")[: self.k]] = True
        return np.arange(len(x)), depends_on_data

    def collect(
        self, xs: jax.Array, present: jax.Array, state: Any, *, keys: jax.Array, budgets: jax.Array | None = None
    ) -> SlotSums:
        """The k largest alone, where reports are bits: decoys are fair coins like the dummies that fill the slots."""
        local = self.local_randomizer
        dim = xs.shape[1]
        bits_alone = isinstance(local, BinaryRandomizedResponse) and self.per_client(dim) in (self.k, dim)
        as_many_as_come = self.per_client(dim) == dim and self.overflow == "keep"
        if not bits_alone or as_many_as_come:  # decoys take places in slots that may overflow, or are all there is
            return super().collect(xs, present, state, keys=keys)
        ones, zeros = signed_counts(xs, self.k, self.clip_value, key=keys, present=present, gamma=local.blanket().gamma)
        return SlotSums(ones.astype(jnp.float32), ones + zeros)

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of the estimate of a coordinate that nobody counts among its largest.

        All of its messages are draws from the blanket.
        """
        messages = max(self.padding.pad_to, size if self.per_client(dim) == dim else 0)
        return (
            2
            * self.clip_value
            / self.local_randomizer.slope
            * math.sqrt(messages * self.local_randomizer.blanket().variance)
            / size
        )

    def mechanism(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of the proof; nothing is certified if counts or indices are visible."""
        if self.linkage == "vector":
            if self.per_client(dim) < dim:
                return NonPrivate(reason=_INDICES_SHOW)
            whole = Report(kind="generic", eps_local=self.k * self.report.eps_local)
            return Shuffled(report=whole, num_users=cohort.crowd(), colluders=cohort.colluders)
        if self.overflow == "keep" and cohort.size > self.padding.pad_to and cohort.aggregators is None:
            return NonPrivate(reason=_COUNTS_SHOW)
        return self._proven_event(cohort, dim)

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of the proof; without its crowd it is what the values of the k largest reveal.

        Their places tell of the data too, unless every coordinate is reported: that is `slots_seen`.
        """
        return self._proven_event(cohort, dim)

    def slots_seen(self, dim: int) -> DataIndependent | NonPrivate:
        """Slots tell nothing where every coordinate is reported; else they are the places of the largest ones."""
        return SLOTS_TELL_NOTHING if self.per_client(dim) == dim else NonPrivate(reason=_SLOTS_SHOW)

    def published_event(self, cohort: Cohort, dim: int) -> tuple[Mechanism, dict[str, Any]]:
        """The event that Thm. 4 speaks of: k of d coordinates, padded."""
        return self._proven_event(cohort, dim), {}

    def claim_about_slots(self, cohort: Cohort, dim: int) -> str | None:
        """A sentence on what indices tell by FLAME's own measure, Thm. 5; None where every coordinate is reported."""
        if self.per_client(dim) == dim:
            return None
        try:
            nu = flame.theorem5(num_users=cohort.size, pad_to=self.padding.pad_to, beta=self.k / dim)
        except NotApplicable as refusal:
            return f"FLAME Thm. 5: {refusal}"
        return f"FLAME Thm. 5 allows {nu.quantity} and nu {nu.value:.4g} at the best. {nu.reason}"

    def _proven_event(self, cohort: Cohort, dim: int) -> PaddedTopk:
        """The event of the proof; where sums are shared, with no more in a slot than the users that must be there."""
        if cohort.aggregators is not None and self.per_client(dim) < dim:
            raise NotApplicable("expected all other coordinates as decoys where sums are shared, got fewer")
        shared = cohort.aggregators is not None
        return PaddedTopk(
            report=self.report,
            num_users=cohort.crowd() if shared else cohort.size,
            colluders=cohort.colluders,
            coordinates=dim,
            pad_to=cohort.crowd() if shared else self.padding.pad_to,
            top=self.k,
            decoys=self.per_client(dim) - self.k,
        )
