"""Your own protocol in one file: one bit of one coordinate per user, shuffled.

Every user draws one coordinate independently of its data, clips it to [-C, C], rounds it randomly to a bit and reports
that bit by randomized response. The message (coordinate, bit) is eps_local-LDP as a whole, so amplification by
shuffling applies to it. A user sends one message of a few bytes; the estimate is unbiased but noisy.

    python examples/own_protocol.py
"""

# [imports]
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from rich.console import Console

import dovetail
from dovetail.audit import audit
from dovetail.events import DataIndependent, Report, Round, Shuffled, View
from dovetail.mechanisms import BinaryRandomizedResponse
from dovetail.protocols import Cohort, register, shuffle_scope
from dovetail.shufflers import Layout, Reports, ShuffledReports
from dovetail.statements import Neighbors
from dovetail.testing import check_protocol


# [protocol]
@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBit(dovetail.Protocol):
    """One bit per user.

    Guarantees:
        The estimate is unbiased for the mean of the updates, clipped coordinate by coordinate.
    """

    name: ClassVar[str] = "one_bit"
    shuffled: ClassVar[bool] = True  # reports are shuffled: rounds below their planned size release nothing
    undeployed: ClassVar[str] = "is an example and has no messages yet"

    clip_value: float
    eps_local: float | None = None  # None: calibrated to the target

    def __post_init__(self) -> None:
        for name, value in (("clip_value", self.clip_value), ("eps_local", self.eps_local)):
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} > 0, got {name}={value!r}")

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that make sense: tests, audits and comparisons start from them."""
        return {"clip_value": 0.1, "eps_local": 1.0}

    @property
    def noise_field(self) -> str:
        """What calibration sets."""
        return "eps_local"

    @property
    def local(self) -> BinaryRandomizedResponse:
        """Randomized response on a bit, from a position in [0, 1]."""
        return BinaryRandomizedResponse(self.require("eps_local"))

    # [client]
    def layout(self, dim: int) -> Layout:
        """One report, in one of dim slots, through one shuffler."""
        return Layout(slots=dim, reports_per_client=1, shufflers=1)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """Client: a coordinate that does not depend on x, and a randomized bit of it."""
        key_slot, key_bit = jax.random.split(key)
        slot = jax.random.randint(key_slot, (1,), 0, len(x))
        position = (jnp.clip(x[slot], -self.clip_value, self.clip_value) / self.clip_value + 1) / 2
        return Reports(slot=slot, value=self.local(position, key=key_bit), valid=jnp.ones(1, bool))

    def clip_update(self, x: jax.Array, state: Any) -> jax.Array:
        """What an update counts as: the estimate is unbiased for the mean of these."""
        return jnp.clip(x, -self.clip_value, self.clip_value)

    # [analyzer]
    def tally(self, reports: ShuffledReports, dim: int) -> jax.Array:
        """Analyzer: per coordinate the sum of the bits, de-biased and centred; it adds up over any split."""
        centred = jnp.where(reports.valid, 2 * self.local.debias(reports.value) - 1, 0.0)
        if reports.slot is None:  # the shuffler hands slots over as columns
            return centred.sum(axis=0)
        return jnp.zeros(dim).at[reports.slot].add(centred)

    def estimate(self, tally: jax.Array, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """Analyzer: a coordinate was drawn with probability 1/d, so its sum counts d times."""
        return tally * self.clip_value * len(tally) / size, state

    # [privacy]
    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """What a round is in privacy terms: one shuffled report per user, with what every shuffled round relies on."""
        scope = shuffle_scope(cohort, neighbors, "the shuffler permutes uniformly")
        event = self.own_reports(cohort, dim)
        return View(round=Round(mechanism=event, participation=cohort.participation), scope=scope)

    def own_reports(self, cohort: Cohort, dim: int) -> Shuffled:
        """What remains if nobody is trusted: the same report, with its sender's name on it."""
        report = Report(kind="generic", eps_local=self.require("eps_local"))
        return Shuffled(report=report, num_users=cohort.crowd(), colluders=cohort.colluders)

    def slots_seen(self, dim: int) -> DataIndependent:
        """What the shuffler learns from the slot that a client fills."""
        return DataIndependent(reason="the coordinate is drawn without looking at the data")

    def noise_std(self, size: int, dim: int) -> float:
        """On zero updates: each of `size` users adds +-1 over the randomizer's slope, in one of dim coordinates."""
        slope = math.tanh(self.require("eps_local") / 2)
        return self.clip_value * math.sqrt(dim / size) / slope


# [use]
def train() -> dovetail.Result:
    """The digits, everybody in each of 10 rounds; without `eps_local` it would be calibrated to `eps`."""
    settings = {
        "cohort.kind": "everyone",
        "cohort.rounds": 10,
        "protocol.clip_value": 0.05,
        "protocol.eps_local": 3.0,
        "server.learning_rate": 2.0,
    }
    return dovetail.train("digits", protocol="one_bit", eps=2.0, delta=1e-5, settings=settings)


def quote_and_audit(console: Console) -> None:
    """What it promises for 1000 users, and what attacks on the running code find among ten."""
    large = dovetail.Terms(num_users=1000, dim=650, delta=1e-6, settings={"clip_value": 1.0, "eps_local": 3.0})
    console.print(str(dovetail.quote("one_bit", large).certified))
    small = dovetail.Terms(num_users=10, dim=2, delta=0.01, settings={"clip_value": 1.0, "eps_local": 1.5})
    finding = audit("one_bit", small, trials=1000)
    console.print(f"for ten users: {finding.certified.headline()}")
    console.print(f"an attack shows eps >= {finding.bound.eps:.3g}, by: {finding.bound.attack}")


def main() -> None:
    """Check, train, quote, audit."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(str(check_protocol(OneBit)))
    result = train()
    console.print(f"test accuracy {result.accuracy:.1%} after {result.rounds} rounds")
    console.print(result.statement.headline())
    quote_and_audit(console)


if __name__ == "__main__":
    main()
