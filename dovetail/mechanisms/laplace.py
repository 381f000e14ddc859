"""Laplace noise on an interval: y = x + Lap((high - low) / eps_local).

The infimum over x in [low, high] of exp(-|y - x| / s) is exp(-(|y - m| + (high - low) / 2) / s) with m the middle and
s the scale, so the blanket is the randomizer at m, of mass gamma = exp(-eps_local / 2).
One 32-bit word makes one draw: its top bit is the sign, the other 31 are a uniform that is never 0, so that no draw is
infinite: the largest is `LAPLACE_CUT` = 22.2 scales, which a true draw exceeds with probability 2^-32. Simulation only:
floating-point noise is not for deployment.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from dovetail import _validate
from dovetail._jax import ArrayLike, jax, jnp
from dovetail.mechanisms._base import (
    AtInput,
    LocalRandomizer,
    as_floating,
    check_interval,
    clamp,
    clamp64,
    freeze_floats,
)

__all__ = ["LAPLACE_CUT", "LaplaceRandomizer", "add_laplace", "laplace_from_bits"]

LAPLACE_CUT = 32 * math.log(2)  # no draw is farther out, in scales: 22.2


@dataclasses.dataclass(frozen=True)
class LaplaceRandomizer(LocalRandomizer):
    """Laplace noise on [low, high], calibrated to eps_local.

    Guarantees:
        Reports are unbiased, with variance 2 scale^2; `debias` is the identity.
        Every report is finite.

    References:
        Dwork, McSherry, Nissim, Smith (TCC 2006), Prop. 1; blanket: Balle et al. (CRYPTO 2019), section 5.
    """

    eps_local: float
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _validate.positive(eps_local=self.eps_local)
        check_interval(self.low, self.high)
        freeze_floats(self, "eps_local", "low", "high")
        _validate.positive(scale=self.scale)

    @property
    def domain(self) -> tuple[float, float]:
        """[low, high]."""
        return self.low, self.high

    @property
    def scale(self) -> float:
        """The scale of the noise."""
        return (self.high - self.low) / self.eps_local

    def __call__(self, x: ArrayLike, *, key: jax.Array) -> jax.Array:
        """The clamped x plus Laplace noise, entry by entry."""
        return add_laplace(clamp(as_floating(x), self.low, self.high), self.scale, key=key)

    def noise_sum(self, counts: jax.Array, *, key: jax.Array) -> jax.Array:
        """The sum of m Laplace noises is the difference of two Gamma(m) variables, scaled."""
        shape = jnp.maximum(counts, 1).astype(jnp.float32)
        up, down = (jax.random.gamma(half, shape) for half in jax.random.split(key))
        return jnp.where(counts > 0, self.scale * (up - down), 0.0)

    def log_density(self, y: npt.ArrayLike, x: npt.ArrayLike) -> np.ndarray:
        """-|y - x| / scale - log(2 scale)."""
        distance = np.abs(np.asarray(y, np.float64) - clamp64(x, *self.domain))
        return -distance / self.scale - math.log(2 * self.scale)

    def report_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """2 scale^2, whatever x."""
        return np.full(np.shape(x), 2 * self.scale**2)

    def blanket(self) -> AtInput:
        """The randomizer at the middle of its interval, with gamma = exp(-eps_local / 2)."""
        return AtInput(math.exp(-self.eps_local / 2), self, self.low + (self.high - self.low) / 2)


def add_laplace(x: ArrayLike, scale: ArrayLike, *, key: jax.Array) -> jax.Array:
    """Laplace noise added to x, which is not clamped.

    The scale may differ from entry to entry (personal budgets).
    """
    centre = as_floating(x)
    shape = jnp.broadcast_shapes(centre.shape, jnp.shape(scale))
    noise = laplace_from_bits(jax.random.bits(key, shape, jnp.uint32))
    return centre + jnp.asarray(scale, centre.dtype) * noise.astype(centre.dtype)


def laplace_from_bits(bits: jax.Array) -> jax.Array:
    """Standard Laplace noise from uniform 32-bit words: finite for each of the 2^32 words."""
    uniform = ((bits & 0x7FFFFFFF).astype(jnp.float32) + 0.5) * 2.0**-31
    magnitude = -jnp.log(uniform)
    return jnp.where(bits >> 31 == 1, magnitude, -magnitude)
