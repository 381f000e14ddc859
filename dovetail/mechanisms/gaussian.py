"""Gaussian noise on vectors clipped in L2 norm, y = clip(x) + N(0, std^2 I): clipping, the randomizer, normal draws.

Two clipped vectors are at most 2 clip_norm apart, which is the sensitivity under replacement. The density ratio is
unbounded in y, so no finite pure eps_local exists: the guarantee is (eps, delta) and belongs to the accountants, which
need nothing but `std` and `sensitivity`.

`normal` draws standard normal noise whose tails have as many random bits as they need. `jax.random.normal` makes a
float32 of 23 random bits, so that nothing beyond 5.4 standard deviations ever comes up and a rounded Gaussian of large
scale takes few values. Here a pair is r cos a and r sin a (Box and Muller 1958), where r^2 / 2 = -log u has 64 random
bits and the angle a has 32: floats near 0 and near 1 alike keep their precision. Large draws are made page by page, so
that words never leave the cache.

`NORMAL_CUT`, in standard deviations, is where this ends: u is at least 2^-65, so r is at most 9.49; a true pair is
farther out with probability 2^-65. Simulation only: floating-point noise is not for deployment.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from dovetail import _validate
from dovetail._jax import ArrayLike, jax, jnp, trace_once
from dovetail.mechanisms._base import LocalRandomizer, array_module, as_floating, convert_fields_to_float
from dovetail.mechanisms._words import draw_by_page, num_pages, random_page
from dovetail.statements import NotApplicable

__all__ = [
    "NORMAL_CUT",
    "GaussianRandomizer",
    "clip_factor",
    "clip_factors_of",
    "clip_l2",
    "fast_normal",
    "finite_or_zero",
    "normal",
    "normal_pairs_from_words",
    "scale_by",
]


@dataclasses.dataclass(frozen=True)
class GaussianRandomizer(LocalRandomizer):
    """Gaussian noise on the last axis, after clipping it to `clip_norm`.

    Guarantees:
        Reports are unbiased for the clipped vector, with variance std^2 in every coordinate.
        As a pure randomizer eps_local is infinite, and `blanket` raises `NotApplicable`.
        A vector whose norm is NaN or infinite counts as zero.

    References:
        Dwork, Roth (2014), Thm. A.1; Balle, Wang (ICML 2018), Thm. 8, for the exact (eps, delta).
    """

    std: float
    clip_norm: float
    eps_local: float = dataclasses.field(default=math.inf, init=False)
    vector: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.positive(std=self.std)
        _validate.clip_norm(clip_norm=self.clip_norm)
        convert_fields_to_float(self, "std", "clip_norm")

    @property
    def domain(self) -> tuple[float, float]:
        """The interval of one coordinate; the vector lies in the ball of radius clip_norm."""
        return -self.clip_norm, self.clip_norm

    @property
    def sensitivity(self) -> float:
        """The L2 distance of two clipped vectors, at most: 2 clip_norm, for neighbours that replace one user."""
        return 2 * self.clip_norm

    def __call__(self, x: ArrayLike, *, key: jax.Array) -> jax.Array:
        """The clipped vector plus independent noise of standard deviation `std` on every coordinate."""
        clipped = clip_l2(as_floating(x), self.clip_norm)
        return clipped + self.std * normal(key, clipped.shape, clipped.dtype)

    def log_density(self, y: npt.ArrayLike, x: npt.ArrayLike) -> np.ndarray:
        """The joint log density of report y over the last axis, which it takes away."""
        scaled = (np.asarray(y, np.float64) - self.mean(x)) / self.std
        return np.sum(-(scaled**2) / 2 - math.log(self.std * math.sqrt(2 * math.pi)), axis=-1)

    def mean(self, x: npt.ArrayLike) -> np.ndarray:
        """The mean report, which is the clipped vector."""
        return clip_l2(np.asarray(x, np.float64), self.clip_norm)

    def report_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """The variance of each coordinate of a report, std^2, in the shape of x."""
        return np.full(np.shape(x), self.std**2)

    def blanket(self) -> NoReturn:
        """Refused: a blanket needs a finite eps_local."""
        raise NotApplicable(
            "Gaussian noise has no finite eps_local (its density ratio is unbounded; the guarantee is (eps, delta)), "
            "so no blanket bound applies to it"
        )


def clip_l2(x: Any, clip_norm: Any) -> Any:
    """The last axis scaled down to norm clip_norm where it is longer (NumPy in, NumPy out; JAX in, JAX out).

    Guarantees:
        The result's norm is at most clip_norm up to rounding; shorter vectors are returned unchanged.
        The zero vector stays zero, with a finite gradient; a norm of NaN or infinity gives the zero vector.
    """
    return scale_by(x, clip_factors_of(x, clip_norm))


def clip_factors_of(x: Any, clip_norm: Any) -> Any:
    """The factor in [0, 1] by which `clip_l2` scales each vector on the last axis, which is kept with length 1."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x / clip_norm
        square = (scaled * scaled).sum(axis=-1, keepdims=True)
    return _factor_to_unit_norm(square)


def scale_by(x: Any, factor: Any) -> Any:
    """x, or some entries of it, times a factor of `clip_factors_of`; zero where that is 0, even if x is NaN there."""
    xp = array_module(x)
    kept = factor > 0
    return xp.where(kept, xp.where(kept, x, 0) * factor, 0)


def clip_factor(norm: Any, clip_norm: Any) -> Any:
    """The factor by which `clip_l2` scales a vector of this norm: for sums of vectors never formed one by one.

    Guarantees:
        Equal to min(1, clip_norm / norm); 1 at zero, 0 where the norm or its square is NaN or infinite.
    """
    scaled = norm / clip_norm
    return _factor_to_unit_norm(scaled * scaled)


def finite_or_zero(x: Any) -> Any:
    """The vectors on the last axis that have a finite squared norm, zeros for all others: what an update counts as.

    Guarantees:
        The result is finite, and one vector never depends on another.
    """
    xp = array_module(x)
    with np.errstate(over="ignore", invalid="ignore"):
        square = (x * x).sum(axis=-1, keepdims=True)
    return xp.where(xp.isfinite(square), x, 0)


def _factor_to_unit_norm(square: Any) -> Any:
    """min(1, 1 / sqrt(square)), and 0 where the square is NaN or infinite.

    `square` is of the norm over the clip norm.
    """
    xp = array_module(square)
    long = square > 1
    factor = xp.where(long, 1 / xp.sqrt(xp.where(long, square, 1)), 1)
    return xp.where(xp.isfinite(square), factor, 0)


NORMAL_CUT = math.sqrt(2 * 65 * math.log(2))  # no draw is farther out: 9.49
_SMALL = 2**12  # a smaller word, once in a million, needs more than eight further bits


def normal(key: jax.Array, shape: tuple[int, ...] = (), dtype: jax.typing.DTypeLike = np.float32) -> jax.Array:
    """Independent standard normal numbers of this shape, for a key of any kind.

    Guarantees:
        Normal up to the rounding of float32 and to NORMAL_CUT, beyond which a true pair lies with probability 2^-65.
        Finite, and never exactly 0.
    """
    return _draw_pairs(key, shape, 3, lambda _, *words: normal_pairs_from_words(*words)).astype(dtype)


def fast_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`normal` from little more than one word a number, for vectors of millions of them: angles have 24 bits.

    The others of the second word lengthen the first. Where that is too small for them to make a float32, a third word
    takes their place: pages without such pairs, almost all of them, do not draw it.

    Guarantees:
        Those of `normal`, with multiples of 2 pi / 2^24, off by half of one, as angles.
    """
    tails = jax.random.fold_in(key, 1)

    def pairs_of(i: jax.Array, high: jax.Array, mixed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pairs of normals from two words each, and from a third where the first is too small."""
        low = (mixed << 24) | np.uint32(1 << 23)
        small = high < np.uint32(_SMALL)
        low = jax.lax.cond(jnp.any(small), lambda: jnp.where(small, random_page(tails, i, len(high)), low), lambda: low)
        return normal_pairs_from_words(high, low, (mixed & ~np.uint32(255)) | np.uint32(128))

    return _draw_pairs(key, shape, 2, pairs_of)


def _draw_pairs(
    key: jax.Array, shape: tuple[int, ...], words_per_pair: int, pairs_of: Callable[..., tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """Numbers of this shape that come in pairs, page by page.

    Arguments:
        words_per_pair: random words that a pair takes.
        pairs_of: makes two arrays of numbers from the page's number and that many arrays of words.
    """
    size = math.prod(shape)
    pages = num_pages(key, words_per_pair * size // 2)
    pairs = 16 * math.ceil(
        size / (32 * pages)
    )  # words in whole vectors: an odd number takes CPUs fifteen times as long

    def draw(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pairs_of(i, *random_page(key, i, words_per_pair * pairs).reshape(words_per_pair, pairs))

    return draw_by_page(draw, pages)[:size].reshape(shape)


@trace_once
def normal_pairs_from_words(high: jax.Array, low: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two independent standard normals from every three uniform 32-bit words: two for the length, one for the angle."""
    radius = jnp.sqrt(2 * _exponential_from_words(high, low))
    across, along = _cos_and_sin_of_turn(turn)
    return radius * across, radius * along


def _exponential_from_words(high: jax.Array, low: jax.Array) -> jax.Array:
    """-log u for u = (2^32 high + low + 1/2) / 2^64, with full relative precision at both ends.

    Above 1/2, where float32 cannot tell u from 1, it is -log(1 - v) for v = 1 - u, which the complements of the words
    give exactly: v / (1 - t) times -log t, with t the float next to 1 - v (Kahan's log1p).
    """
    upper = high >> 31 == 1
    flip = jnp.where(upper, np.uint32(2**32 - 1), np.uint32(0))
    small = ((low ^ flip).astype(jnp.float32) + 0.5) * 2.0**-64 + (high ^ flip).astype(jnp.float32) * 2.0**-32
    t = jnp.where(upper, 1 - small, small)
    gap = 1 - t
    log = -jnp.log(t)
    return jnp.where(upper, jnp.where(gap == 0, small, small * (log / jnp.where(gap == 0, 1, gap))), log)


def _cos_and_sin_of_turn(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of a uniform angle: the upper two bits are quarter turns, the others up to an eighth either way.

    On [-pi / 4, pi / 4] polynomials are as good as float32 (those of Cephes, Moshier 1989).
    """
    middle = jax.lax.bitcast_convert_type(turn << 2, jnp.int32) >> 2  # of 30 bits, with a sign
    x = (middle.astype(jnp.float32) + 0.5) * np.float32(math.pi / 2**31)
    square = x * x
    sine = x + x * square * ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1)
    cosine = 1 + square * (
        ((2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2) * square - 0.5
    )
    swap = (turn >> 30 & 1) == 1
    negative = turn >> 31 == 1
    across = jnp.where(swap, -sine, cosine)
    along = jnp.where(swap, cosine, sine)
    return jnp.where(negative, -across, across), jnp.where(negative, -along, along)
