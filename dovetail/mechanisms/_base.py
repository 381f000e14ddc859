"""What every local randomizer offers, and the blanket inside it.

A local randomizer R maps one private input x to one report y such that the densities of any two inputs differ by at
most a factor exp(eps_local). Its blanket is the part of the report that says nothing about x: the largest gamma and
the law omega with R(x)(y) >= gamma omega(y) for all x and y. Dummies are drawn from omega.

`__call__` simulates in JAX. Laws (`log_density`, `mean`, `variance`) are exact, in NumPy float64. Deployment draws its
reports from `mechanisms.deployed`, not from here.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dovetail import _validate
from dovetail._jax import ArrayLike, is_array, jax, jnp

__all__ = [
    "AtInput",
    "Blanket",
    "LocalRandomizer",
    "array_module",
    "as_floating",
    "check_interval",
    "clamp",
    "clamp_float64",
    "convert_fields_to_float",
]


class Blanket(abc.ABC):
    """The input-independent part of a randomizer: a mass `gamma` and the law that dummies are drawn from.

    Guarantees:
        R(x)(y) >= gamma omega(y) for every input x and report y.
        No larger gamma would do: gamma is the integral of the infimum over x of the densities.

    References:
        Balle, Bell, Gascon, Nissim (CRYPTO 2019), "The privacy blanket of the shuffle model", section 3.
    """

    gamma: float

    @abc.abstractmethod
    def sample(self, shape: Sequence[int], *, key: jax.Array) -> jax.Array:
        """Independent dummies of this shape."""

    @abc.abstractmethod
    def log_density(self, y: npt.ArrayLike) -> np.ndarray:
        """The exact log density (or log pmf) of a dummy."""

    @property
    def is_binary(self) -> bool:
        """Whether dummies are fair bits."""
        return False

    def sample_sum(self, counts: jax.Array, max_count: int, *, key: jax.Array) -> jax.Array:
        """For every entry of counts, the sum of that many dummies, of which there are at most `max_count`.

        Where a dummy is a vector, so is the sum: on one more axis.
        """
        shape = jax.eval_shape(lambda: self.sample(counts.shape, key=key)).shape
        wanted = counts.reshape(counts.shape + (1,) * (len(shape) - counts.ndim))

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            draw = self.sample(counts.shape, key=jax.random.fold_in(key, i))
            return total + jnp.where(i < wanted, draw, 0).astype(total.dtype)

        return jax.lax.fori_loop(0, max_count, add, jnp.zeros(shape, jnp.float32))

    @property
    @abc.abstractmethod
    def mean(self) -> float:
        """The mean of a dummy, on the scale of reports; of a coordinate, where dummies are vectors."""

    @property
    @abc.abstractmethod
    def variance(self) -> float:
        """The variance of a dummy, on the scale of reports; of a coordinate, where dummies are vectors."""


class LocalRandomizer(abc.ABC):
    """A randomizer of one input, as a frozen and hashable dataclass: static under jit.

    Reports average to `offset + slope x`, and `debias` undoes that, unless `affine` is False. Inputs are scalars; where
    `vector` is True the last axis is one input.

    Guarantees:
        The log-ratio of the densities of any two inputs is at most eps_local, and reaches it.
        This holds for every floating-point input: values outside `domain` are clamped to it, NaN counts as its middle.
        `debias` maps the mean of reports on equal inputs x to an unbiased estimate of x, where `affine`.
    """

    eps_local: float
    affine: ClassVar[bool] = True
    vector: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def domain(self) -> tuple[float, float]:
        """The interval of inputs that the guarantee is stated for."""

    @property
    def num_reports(self) -> int | None:
        """Reports are the integers 0 .. num_reports - 1; None where they are real numbers."""
        return None

    @property
    def offset(self) -> float:
        """The mean report at x = 0, where `affine`."""
        return 0.0

    @property
    def slope(self) -> float:
        """The change of the mean report per unit of x, where `affine`."""
        return 1.0

    @abc.abstractmethod
    def __call__(self, x: ArrayLike, *, key: jax.Array) -> jax.Array:
        """One report for every entry of x, with independent noise."""

    @abc.abstractmethod
    def log_density(self, y: npt.ArrayLike, x: npt.ArrayLike) -> np.ndarray:
        """The exact log density (log pmf where reports are integers) of report y on input x; broadcasts."""

    @abc.abstractmethod
    def report_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """The exact variance of one raw report on input x."""

    @abc.abstractmethod
    def blanket(self) -> Blanket:
        """The largest part of a report's distribution that is the same for every input: its law and its mass gamma."""

    def noise_sum(self, counts: jax.Array, *, key: jax.Array) -> jax.Array | None:
        """For every entry of counts, the sum of the noise of that many reports.

        None where noise is not added to the input.
        """
        return None

    def mean(self, x: npt.ArrayLike) -> np.ndarray:
        """The exact mean of one raw report on input x."""
        return self.offset + self.slope * clamp_float64(x, *self.domain)

    def debias(self, mean: Any) -> Any:
        """The estimate of the mean input from the mean of reports (NumPy in, NumPy out; JAX in, JAX out).

        Arguments:
            mean: the mean of reports, on their own scale.
        """
        return (mean - self.offset) / self.slope

    def debiased_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """The exact variance of one de-biased report on input x."""
        return self.report_variance(x) / self.slope**2


@dataclasses.dataclass(frozen=True)
class AtInput(Blanket):
    """A blanket whose law is the randomizer's own at one input, as for Laplace noise at the middle of its interval."""

    gamma: float
    randomizer: LocalRandomizer
    x: float

    def sample(self, shape: Sequence[int], *, key: jax.Array) -> jax.Array:
        """Independent reports on the one input."""
        return self.randomizer(jnp.full(tuple(shape), self.x, jnp.float32), key=key)

    def sample_sum(self, counts: jax.Array, max_count: int, *, key: jax.Array) -> jax.Array:
        """For every entry of counts, the sum of that many dummies: one draw where noise is added to the input."""
        noise = self.randomizer.noise_sum(counts, key=key)
        return super().sample_sum(counts, max_count, key=key) if noise is None else self.x * counts + noise

    def log_density(self, y: npt.ArrayLike) -> np.ndarray:
        """The randomizer's log density on the one input."""
        return self.randomizer.log_density(y, self.x)

    @property
    def mean(self) -> float:
        """The mean report on the one input."""
        return float(self.randomizer.mean(self.x))

    @property
    def variance(self) -> float:
        """The variance of a report on the one input."""
        return float(self.randomizer.report_variance(self.x))


def check_interval(low: float, high: float) -> None:
    """Refuse ends that are not finite, or not in order."""
    _validate.finite(low=low, high=high)
    if not low < high:
        raise ValueError(f"expected low < high, got low={low!r}, high={high!r}")


def convert_fields_to_float(instance: Any, *names: str) -> None:
    """Make fields of a frozen dataclass Python floats: a NumPy scalar would promote float32 data to float64."""
    for name in names:
        object.__setattr__(instance, name, float(getattr(instance, name)))


def as_floating(x: ArrayLike) -> jax.Array:
    """x as a JAX array of floating dtype."""
    array = jnp.asarray(x)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def array_module(*arrays: Any) -> Any:
    """The module of these arrays: jax.numpy if any of them is a JAX array (tracers are), else numpy."""
    return jnp if any(is_array(array) for array in arrays) else np


def clamp(x: Any, low: float, high: float) -> Any:
    """x moved into [low, high], with NaN in the middle: so that a guarantee on [low, high] covers every input."""
    xp = array_module(x)
    return xp.clip(xp.where(xp.isnan(x), low + (high - low) / 2, x), low, high)


def clamp_float64(x: npt.ArrayLike, low: float, high: float) -> np.ndarray:
    """`clamp` in NumPy float64, for exact laws."""
    return clamp(np.asarray(x, np.float64), low, high)
