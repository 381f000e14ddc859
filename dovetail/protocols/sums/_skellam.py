"""Vectors as integers with Skellam noise, added up: what sums over shares have in common, whoever adds the noise.

A client clips its update to L2 norm `clip_norm` and encodes it in integers; what is added up is read modulo `modulus`.
Fast and faithful path encode the same integers from the same keys (up to the last bit of a float32) and add them up
exactly; the noise, one draw per coordinate instead of one per client, agrees in distribution; shares cancel. The sum
path draws the rounding errors as one Gaussian of the largest variance that they can have, 1/4 per client.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.mechanisms import ExactSampler, ExactSkellam, skellam
from dovetail.mechanisms.gaussian import clip_l2, normal
from dovetail.protocols._base import CLIP_NORM, Cohort, Protocol
from dovetail.protocols._fast import Fast
from dovetail.statements import Neighbors

__all__ = ["Collected", "NoisySum", "WholeNoise", "removal_assumption", "resolve_encoding", "rounding_assumption"]

_REMOVAL = "a user that is removed stays on the public roster and uploads all shares of zero"
_LARGEST_PART = 2.0**26  # variance of one exact draw: a table of some hundred thousand entries
_ROUNDING_SHARE = 0.01  # of the certified noise's variance that rounding adds at most


class Collected(NamedTuple):
    """The encoded updates of some clients added up, uint32 modulo 2^32, and how many clients that were."""

    residues: jax.Array
    users: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisySum(Protocol, Fast):
    """Central noise without a curator: `noise_multiplier` is its standard deviation on the sum over `clip_norm`.

    Scale, modulus and `honest`, the number of clients that reach this noise, follow from the cohort unless given.
    """

    shuffled: ClassVar[bool] = True
    secret_rounds: ClassVar[bool] = True

    clip_norm: float = CLIP_NORM
    """Largest L2 norm of an update; larger ones are scaled down."""
    noise_multiplier: float | None = None
    """Standard deviation of the noise divided by the clip norm; calibrated if not given."""
    scale: float | None = None
    """Number of integers per unit of the clipped update; follows from the noise and the number of users."""
    modulus: int | None = None
    """Shares are numbers modulo this; follows from the scale and the number of users."""
    honest: int | None = None
    """Filled in: how many users' noise a round is sure to have."""

    def __post_init__(self) -> None:
        _validate.clip_norm(clip_norm=self.clip_norm)
        _validate.positive(**_validate.not_none(noise_multiplier=self.noise_multiplier, scale=self.scale))
        _validate.integer(**_validate.not_none(honest=self.honest))
        _validate.at_least(2, **_validate.not_none(honest=self.honest))

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a first try: noise of twice the clip norm."""
        return {"noise_multiplier": 2.0}

    @property
    def noise_field(self) -> str:
        """The parameter that calibration sets: the noise multiplier."""
        return "noise_multiplier"

    @property
    def std(self) -> float:
        """Standard deviation of the certified noise on each coordinate of the sum."""
        return float(self.require("noise_multiplier") * self.clip_norm)

    def count_honest(self, cohort: Cohort) -> int:
        """How many clients of the enforced minimum bring noise that is counted on; refuses fewer than 2."""
        present = cohort.crowd() - cohort.colluders
        honest = present if self.honest is None else self.honest
        if not 2 <= honest <= present:
            raise ValueError(f"expected 2 to {present} honest users (min_size - colluders), got {honest}")
        return honest

    def encoding(self, dim: int) -> skellam.Encoding:
        """How an update becomes integers."""
        return skellam.Encoding(clip_norm=self.clip_norm, scale=self.require("scale"), dim=dim)

    @property
    def part_variance(self) -> float:
        """The variance of one client's noise on a coordinate, in squared integers.

        It is an equal part, one of `honest`, of what is certified.
        """
        return (self.std * self.require("scale")) ** 2 / self.require("honest")

    @abc.abstractmethod
    def draw_whole_noise(self, shape: tuple[int, ...], users: jax.Array, *, key: jax.Array) -> jax.Array:
        """All noise on the sum of so many users, in one draw a coordinate, as int32.

        In integers, not in the data's units.
        """

    def collect(
        self, xs: jax.Array, present: jax.Array, state: Any, *, keys: jax.Array, budgets: jax.Array | None = None
    ) -> Collected:
        """The encoded updates, added up: those of the messages from the same keys."""
        encode = self.encoding(xs.shape[1])
        each = (
            jax.vmap if len(xs) > 1 else _vmap_one_client
        )  # mapped, a second rounding would run whether it is needed or not
        encoded = each(lambda x, key: encode(x, key=self._split_client_key(key)[0]))(xs, keys)
        residues = jnp.sum(jnp.where(present[:, None], skellam.to_residues(encoded), 0), axis=0, dtype=jnp.uint32)
        return Collected(residues, jnp.sum(present, dtype=jnp.int32))

    @staticmethod
    def _split_client_key(key: jax.Array) -> jax.Array:
        """A client's three keys, for rounding, noise and shares: the same ones on every path."""
        return jax.random.split(key, 3)

    def finish(self, collected: Collected, *, key: jax.Array) -> jax.Array:
        """The residues with all noise on them, in one draw a coordinate."""
        noise = self.draw_whole_noise(collected.residues.shape, collected.users, key=key)
        return collected.residues + skellam.to_residues(noise)

    def clip_update(self, x: jax.Array, state: Any) -> jax.Array:
        """Updates scaled down to the clip norm."""
        return clip_l2(x, self.clip_norm)

    def clip_norm_at(self, state: Any) -> float:
        """The clip norm, for rounding has no bias beside `bias`."""
        return self.clip_norm

    def tally_of_sum(self, total: jax.Array, count: jax.Array, *, key: jax.Array) -> jax.Array:
        """The scaled sum with all noise, and a Gaussian for the clients' rounding errors."""
        key_round, key_noise = jax.random.split(key)
        errors = jnp.sqrt(count / 4) * normal(key_round, total.shape, total.dtype)
        rounded = jnp.round(total * self.require("scale") + errors).astype(jnp.int32)
        return self.finish(Collected(skellam.to_residues(rounded), count), key=key_noise)

    def bias(self, dim: int) -> float:
        """How far the mean estimate may be off because the norm of the integers is bounded."""
        return self.encoding(dim).bias

    def estimate(self, tally: Any, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The sum, centred around zero modulo `modulus` and scaled back, over the planned size."""
        integers = skellam.center(tally, self.require("modulus"))
        return integers.astype(jnp.float32) / (self.require("scale") * size), state


def _vmap_one_client(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`jax.vmap` of a single client."""
    return lambda *rows: function(*(row[0] for row in rows))[None]


def resolve_encoding(protocol: NoisySum, *, dim: int, num_users: int, noise_std: float) -> skellam.Resolution:
    """Scale and modulus for a sum of so many users with so much noise in all: `skellam.resolve`, or finer.

    Beside norms, which grow by at most .2 %, rounding must not add more than 1 % to the certified variance: with errors
    of variance 1/4 or less from every user that takes scale^2 std^2 / 100 >= num_users / 4, or as much as 32 bits hold.
    """
    resolve = functools.partial(
        skellam.choose_resolution, clip_norm=protocol.clip_norm, dim=dim, num_users=num_users, noise_std=noise_std
    )
    resolution = resolve(scale=protocol.scale, modulus=protocol.modulus)
    finer = math.sqrt(num_users / 4 / _ROUNDING_SHARE) / protocol.std
    if protocol.scale is not None or finer <= resolution.scale:
        return resolution
    try:
        return resolve(scale=finer, modulus=protocol.modulus)
    except ValueError:
        return resolve(modulus=protocol.modulus or 2**32)


@dataclasses.dataclass(frozen=True)
class WholeNoise:
    """Exact Skellam noise of any variance: the sum of 2^j draws of 2^-j of it, which floats divide exactly."""

    variance: float

    @property
    def draws(self) -> int:
        """How many draws are added up: a power of two."""
        return 1 << max(0, math.ceil(math.log2(self.variance / _LARGEST_PART)))

    @property
    def law_of_one_draw(self) -> ExactSkellam:
        """The law of one of the draws that are added up."""
        return ExactSkellam(self.variance / self.draws)

    @property
    def distance(self) -> float:
        """The total variation from the Skellam law of this variance, at most."""
        return self.draws * self.law_of_one_draw.distance

    def __call__(self, size: int, *, sampler: ExactSampler) -> np.ndarray:
        """`size` independent draws, as int64."""
        total = np.zeros(size, np.int64)
        part = self.law_of_one_draw
        for _ in range(self.draws):
            total += part(size, sampler=sampler)
        return total


def rounding_assumption(encoding: skellam.Encoding) -> str:
    """The assumption that every user bounds the norm of its integers, with what that costs in bias."""
    bias = encoding.bias / encoding.clip_norm
    return (
        f"every user repeats the rounding until its integers have norm at most {encoding.norm:.6g} (which "
        f"biases its update by at most {bias:.2g} of the clip norm); a simulation that adds up clipped updates rounds "
        "their sum alone, with Gaussian errors for the users', which is taken to be as good"
    )


def removal_assumption(neighbors: Neighbors, *, noise: bool) -> tuple[str, ...]:
    """The assumption of what a removed user still does, if neighbours differ by removal; nothing otherwise.

    Arguments:
        neighbors: which inputs must look alike.
        noise: whether users bring noise, of which a removed one still adds its part.
    """
    return (_REMOVAL + " with its part of the noise" * noise,) if neighbors is Neighbors.ADD_REMOVE else ()
