"""Randomized response on b levels (FLAME Alg. 1, with b levels that cover [0, 1] evenly).

x in [0, 1] is rounded to a level of {0, 1/(b-1), ..., 1} at random and without bias; then with probability
gamma = b / (e^eps + b - 1) the report is uniform over the b levels, else it is the level. Reports are level indices.
The uniform part is the blanket. FLAME prints {0..b} against Unif{1..b}, off by one; this is the even form.
With b = 2 the report is a bit that tells the rounded bit with probability e^eps / (1 + e^eps).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dovetail import _validate
from dovetail._jax import ArrayLike, jax, jnp
from dovetail.mechanisms import _words
from dovetail.mechanisms._base import (
    Blanket,
    LocalRandomizer,
    as_floating,
    clamp,
    clamp_float64,
    convert_fields_to_float,
)

__all__ = ["BinaryRandomizedResponse", "RandomizedResponse", "UniformLevels"]


@dataclasses.dataclass(frozen=True)
class RandomizedResponse(LocalRandomizer):
    """Randomized response over `levels` evenly spaced levels of [0, 1]; reports are int32 in 0 .. levels - 1.

    Guarantees:
        `debias` of the mean report is unbiased for the mean input, by the exact offset and slope.

    References:
        Balle et al. (CRYPTO 2019), Alg. 1 and section 3; Liu et al. (AAAI 2021, FLAME), Alg. 1 and eq. (1).
    """

    eps_local: float
    levels: int

    def __post_init__(self) -> None:
        _validate.positive(eps_local=self.eps_local)
        _validate.integer(levels=self.levels)
        _validate.at_least(2, levels=self.levels)
        _validate.at_most(2**24, levels=self.levels)
        convert_fields_to_float(self, "eps_local")
        object.__setattr__(self, "levels", int(self.levels))

    @property
    def domain(self) -> tuple[float, float]:
        """The interval of inputs, [0, 1]; others are clamped to it."""
        return 0.0, 1.0

    @property
    def num_reports(self) -> int:
        """How many different reports there are: the levels."""
        return self.levels

    @property
    def gamma(self) -> float:
        """The probability of a uniform report, b / (e^eps + b - 1)."""
        return self.levels * math.exp(-self.eps_local) / (1 + (self.levels - 1) * math.exp(-self.eps_local))

    @property
    def prob_truth(self) -> float:
        """1 - gamma, without cancellation."""
        return -math.expm1(-self.eps_local) / (1 + (self.levels - 1) * math.exp(-self.eps_local))

    @property
    def offset(self) -> float:
        """The mean report at x = 0: gamma (b - 1) / 2."""
        return self.gamma * (self.levels - 1) / 2

    @property
    def slope(self) -> float:
        """The change of the mean report, a level index, per unit of x: (1 - gamma) (b - 1)."""
        return self.prob_truth * (self.levels - 1)

    def __call__(self, x: ArrayLike, *, key: jax.Array) -> jax.Array:
        """A level index for every entry of x."""
        position: jax.Array = clamp(as_floating(x), 0.0, 1.0) * (self.levels - 1)
        key_round, key_lie, key_level = jax.random.split(key, 3)
        lower = jnp.minimum(jnp.floor(position), self.levels - 2)
        truth = lower.astype(jnp.int32) + jax.random.bernoulli(key_round, position - lower)
        uniform = jax.random.randint(key_level, position.shape, 0, self.levels, jnp.int32)
        lie = _toss_coins(jnp.full(position.shape, self.gamma, position.dtype), key_lie)
        return jnp.where(lie, uniform, truth)

    def log_density(self, y: npt.ArrayLike, x: npt.ArrayLike) -> np.ndarray:
        """The exact log pmf of level index y; -inf where y is no level."""
        level = np.asarray(y, np.float64)
        position = clamp_float64(x, 0.0, 1.0) * (self.levels - 1)
        chance = np.maximum(0.0, 1 - np.abs(level - position))
        return np.where(
            _is_level(level, self.levels), np.log(self.gamma / self.levels + self.prob_truth * chance), -np.inf
        )

    def report_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """The variance of a report, in squared level indices, by the law of total variance.

        It adds up the uniform level's, the rounding's, and that of the choice between the two.
        """
        position = clamp_float64(x, 0.0, 1.0) * (self.levels - 1)
        fraction = position - np.floor(position)
        uniform = self.gamma * (self.levels**2 - 1) / 12
        choice = self.gamma * self.prob_truth * ((self.levels - 1) / 2 - position) ** 2
        return uniform + self.prob_truth * fraction * (1 - fraction) + choice

    def blanket(self) -> UniformLevels:
        """The blanket: a uniform level, of mass gamma."""
        return UniformLevels(self.gamma, self.levels)


@dataclasses.dataclass(frozen=True)
class BinaryRandomizedResponse(RandomizedResponse):
    """Randomized response on a bit, after unbiased rounding of x in [0, 1] to a bit; one random word a report.

    Guarantees:
        The law is that of `RandomizedResponse` with two levels; gamma = 2 / (e^eps + 1), the blanket a fair coin.

    References:
        Warner (1965); Balle et al. (CRYPTO 2019), section 3.
    """

    levels: int = dataclasses.field(default=2, init=False)

    def __call__(self, x: ArrayLike, *, key: jax.Array) -> jax.Array:
        """A bit for every entry of x.

        The rarer of the two reports is drawn, so that its small probability keeps its relative precision.
        """
        prob: jax.Array = clamp(as_floating(x), 0.0, 1.0)
        likely = prob > 0.5
        distance = jnp.where(likely, 1 - prob, prob)
        rarer = _toss_coins(self.gamma / 2 + self.prob_truth * distance, key)
        return (rarer ^ likely).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class UniformLevels(Blanket):
    """The blanket of randomized response: a uniform level."""

    gamma: float
    levels: int

    def sample(self, shape: Sequence[int], *, key: jax.Array) -> jax.Array:
        """Independent uniform levels, int32 of this shape."""
        return jax.random.randint(key, tuple(shape), 0, self.levels, jnp.int32)

    @property
    def is_binary(self) -> bool:
        """Whether dummies are fair bits, which they are with two levels."""
        return self.levels == 2

    def sample_sum(self, counts: jax.Array, max_count: int, *, key: jax.Array) -> jax.Array:
        """For every entry of counts (at most `max_count`), the sum of that many uniform levels.

        Fair bits are counted 32 at a time.
        """
        if not self.is_binary:
            return super().sample_sum(counts, max_count, key=key)

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            """The totals with the ones among the i-th 32 fair bits, as far as they are asked for."""
            word = jax.random.bits(jax.random.fold_in(key, i), counts.shape, jnp.uint32)
            unused = jnp.clip(32 * (i + 1) - counts, 0, 32).astype(jnp.uint32)
            kept = jnp.where(unused < 32, word >> jnp.minimum(unused, 31), 0)
            return total + jax.lax.population_count(kept).astype(total.dtype)

        return jax.lax.fori_loop(0, -(-max_count // 32), add, jnp.zeros(counts.shape, jnp.float32))

    def log_density(self, y: npt.ArrayLike) -> np.ndarray:
        """The log pmf, -log b on the b levels and -inf elsewhere."""
        return np.where(_is_level(np.asarray(y, np.float64), self.levels), -math.log(self.levels), -np.inf)

    @property
    def mean(self) -> float:
        """The mean of a dummy, (b - 1) / 2."""
        return (self.levels - 1) / 2

    @property
    def variance(self) -> float:
        """The variance of a dummy, (b^2 - 1) / 12."""
        return (self.levels**2 - 1) / 12


def _is_level(y: np.ndarray, levels: int) -> np.ndarray:
    """Where y is one of the indices 0 .. levels - 1."""
    return (y >= 0) & (y < levels) & (y == np.floor(y))


def _toss_coins(prob: jax.Array, key: jax.Array) -> jax.Array:
    """True with this probability, rounded up by 2^-32 at most, independently for every entry."""
    return _words.toss_coins(prob, jax.random.bits(key, prob.shape, jnp.uint32))
