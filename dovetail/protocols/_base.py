"""The protocol interface: one parameter object, one method a party.

A round runs `randomize` at every client, hands the reports to the shuffler (or straight on, where there is none),
`tally` and `estimate` at the analyzer. `view` says in privacy terms what that round was. The simulation and the
deployed parties call these same methods; only who calls changes.

A protocol is a frozen dataclass of Python numbers: hashable, static under jit. Whatever changes from round to round is
its public state, a pytree.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dovetail import _validate
from dovetail.events import Participation, View
from dovetail.shufflers import Layout, Reports, Shuffled
from dovetail.statements import Neighbors

__all__ = ["Cohort", "Protocol"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohort:
    """What is public about who takes part in a round.

    `size` is the planned number of users, the constant by which noised sums are divided; the realised number is never
    used for that. Rounds with fewer than `min_size` users release nothing.
    """

    participation: Participation
    size: int
    min_size: int = 0

    def __post_init__(self) -> None:
        _validate.at_least(1, size=self.size)
        _validate.in_interval(0, self.size, min_size=self.min_size)


class Protocol(abc.ABC):
    """A way to learn the mean of the clients' updates, and what that leaks."""

    name: ClassVar[str]

    @property
    def calibrated(self) -> bool:
        """Whether its noise is set; if not, `with_noise` sets it."""
        return True

    def with_noise(self, noise: float) -> Protocol:
        """This protocol at a noise level; larger is more private."""
        raise ValueError(f"expected a protocol with noise to calibrate, got protocol.name={self.name!r}")

    @abc.abstractmethod
    def layout(self, dim: int) -> Layout:
        """How many slots, reports and shufflers an update of this dimension takes."""

    def init(self, dim: int) -> Any:
        """The public state before the first round."""
        return ()

    @abc.abstractmethod
    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array) -> Reports:
        """Client: the reports for one update x of shape (dim,)."""

    def tally(self, reports: Shuffled) -> Any:
        """Analyzer: sums that add up over any split of the clients; here for dense reports."""
        return jnp.einsum("c,cd->d", reports.valid.astype(reports.value.dtype), reports.value)

    @abc.abstractmethod
    def estimate(self, tally: Any, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """Analyzer: the estimated mean update, and the next public state; `size` is the cohort's public size."""

    @abc.abstractmethod
    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """One round in privacy terms."""

    def scaling(self, norm: jax.Array) -> jax.Array | None:
        """The factor by which `randomize` shrinks an update of this L2 norm, if that is all it does to its mean.

        A protocol that answers lets the engine add up updates that were never formed one by one; `tally_of_sum` then
        gives the tally for their scaled sum.
        """
        return None

    def tally_of_sum(self, total: jax.Array, count: jax.Array, *, key: jax.Array) -> Any:
        """The tally of `count` clients whose scaled updates add up to `total`: equal in distribution to `tally`."""
        return total
