"""How the simulation adds up a round without its messages: speed, and the same law.

The simulation collects from some clients at a time, adds up what it collected, and finishes once a round. Where a
protocol only rescales updates, it adds up updates that were never formed one by one, and asks for the tally of their
sum. A protocol says whether its tally is that of the messages from the same keys, or one of the same law. Deployed
parties know nothing of this.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from dovetail._jax import jax
from dovetail.mechanisms.gaussian import clip_factor
from dovetail.protocols._base import Protocol
from dovetail.shufflers import deliver, mask_absent

__all__ = ["Fast", "fast_path"]


class Fast:
    """A mix-in for protocols that have a faster way than their messages; what is not overridden follows those."""

    @property
    def is_summable(self) -> bool:
        """Whether sums serve with these parameters; if not, every report must be held."""
        return True

    @property
    def matches_messages_exactly(self) -> bool:
        """Whether `collect` and `finish` give the tally of the messages from the same keys, and not only its law."""
        return type(self).collect is Fast.collect and type(self).finish is Fast.finish

    def collect(
        self, xs: jax.Array, present: jax.Array, state: Any, *, keys: jax.Array, budgets: jax.Array | None = None
    ) -> Any:
        """What adds up over clients, for some of them: here the tally of their reports.

        Arguments:
            xs: their updates, (clients, dim).
            present: which of them take part; the others add nothing.
            state: the round's public state.
            keys: each client's randomness.
            budgets: each client's own eps_local, where budgets are personal.
        """
        return _tally(cast(Protocol, self), xs, present, state, keys, budgets)

    def collect_onto(
        self,
        total: Any,
        xs: jax.Array,
        present: jax.Array,
        state: Any,
        *,
        keys: jax.Array,
        budgets: jax.Array | None = None,
    ) -> Any:
        """`total` and what `collect` gives, in fewer passes over long vectors where there is a way to."""
        return jax.tree.map(jax.numpy.add, total, self.collect(xs, present, state, keys=keys, budgets=budgets))

    def finish(self, collected: Any, *, key: jax.Array) -> Any:
        """The tally of all that was collected, with what is drawn once a round."""
        return collected

    def clip_norm_at(self, state: Any) -> Any | None:
        """The L2 norm that `randomize` scales updates down to; None if it does more than that to their mean."""
        return None

    def scaling(self, norm: jax.Array, state: Any) -> jax.Array | None:
        """The factor by which `randomize` shrinks an update of this L2 norm.

        None if it does more than that to its mean.
        """
        clip_norm = self.clip_norm_at(state)
        return None if clip_norm is None else clip_factor(norm, clip_norm)

    def tally_of_sum(self, total: jax.Array, count: jax.Array, *, key: jax.Array) -> Any:
        """The tally of `count` clients whose scaled updates add up to `total`: equal in distribution to `tally`."""
        return total


@dataclasses.dataclass(frozen=True)
class _Messages(Fast):
    """The way of a protocol that has no faster one; messages need not be held where the shuffler adds none."""

    protocol: Protocol
    dim: int

    @property
    def is_summable(self) -> bool:
        """Whether sums serve: they do unless slots are padded."""
        return self.protocol.layout(self.dim).padding is None

    @property
    def matches_messages_exactly(self) -> bool:
        """True: the sums are those of the messages themselves."""
        return True

    def collect(
        self, xs: jax.Array, present: jax.Array, state: Any, *, keys: jax.Array, budgets: jax.Array | None = None
    ) -> Any:
        """The tally of the clients' reports."""
        return _tally(self.protocol, xs, present, state, keys, budgets)


def fast_path(protocol: Protocol, dim: int) -> Fast:
    """How a round of this protocol is added up: by a way of its own, or by its messages."""
    return protocol if isinstance(protocol, Fast) else _Messages(protocol, dim)


def _tally(
    protocol: Protocol, xs: jax.Array, present: jax.Array, state: Any, keys: jax.Array, budgets: jax.Array | None
) -> Any:
    """The analyzer's sums of these clients' reports; those who are not present add nothing."""
    reports = jax.vmap(lambda x, key, budget: protocol.randomize(x, state, key=key, budget=budget))(xs, keys, budgets)
    return protocol.tally(deliver(mask_absent(reports, present)), xs.shape[1])
