"""PrivUnit: a whole vector of an L2 ball in one message (Bhowmick et al. 2018; Asi, Feldman, Talwar 2022).

The clipped input is clip_norm r u with u a unit vector and 0 <= r <= 1. u is kept with probability (1 + r) / 2, else
turned round: that is unbiased and cannot raise eps. The report v is uniform on the cap {<v, u> >= threshold} of the
unit sphere with probability `prob`, else uniform on the rest; `accounting.privunit` chooses both and proves eps. With c
the mass of the cap, the density against the uniform law is a mixture of prob / c and (1 - prob) / (1 - c), so the
smaller value, with a uniform point of the sphere, is the blanket. The mean report is m r u, m = `mean_projection`.

A draw is v = t u + sqrt(1 - t^2) w, with w uniform on the unit sphere orthogonal to u. The height t comes by the
inverse of its exact cdf, which the end of this file tabulates in cubics (`inverse_cdf_cubics`). Simulation only: the
coin for the cap is exact, but a report is a float32 vector.
"""

from __future__ import annotations

import dataclasses
import fractions
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy import special

from dovetail import _validate
from dovetail._jax import ArrayLike, jax, jnp, map_blocks
from dovetail.accounting.releases import privunit as accounting
from dovetail.accounting.releases.privunit import Cap
from dovetail.mechanisms._base import Blanket, LocalRandomizer, array_module, convert_fields_to_float
from dovetail.mechanisms.gaussian import fast_normal, normal

__all__ = [
    "PER_UNIT",
    "UNITS",
    "PrivUnitRandomizer",
    "UniformSphere",
    "inverse_cdf_cubics",
    "polar_of_clipped",
]

_SHORTEST = 1e-12  # of clip_norm: below it a float32 sum of squares may lose coordinates to underflow
_OFF_SPHERE = 1e-4  # what float32 may take from the norm of a report, with much to spare
_COIN_BITS = 53
_LONG = 2**17  # coordinates from which a report alone keeps a core busy
_LONGEST = 2**22  # and from which it outgrows a cache


@dataclasses.dataclass(frozen=True)
class PrivUnitRandomizer(LocalRandomizer):
    """One unit vector for each input of `dim` coordinates, which is clipped to L2 norm `clip_norm`.

    Guarantees:
        The largest log-ratio of two densities is that of `cap`: at most eps_local, and within 1e-6 of it.
        `debias` of the mean report is unbiased for the mean of the clipped inputs.
        Reports have norm 1 up to rounding.
        A vector whose norm is NaN or infinite, or below 1e-12 clip_norm, counts as zero.

    References:
        Bhowmick, Duchi, Freudiger, Kapoor, Rogers (2018), Alg. 1; Asi, Feldman, Talwar (ICML 2022).
    """

    eps_local: float
    clip_norm: float
    dim: int
    vector: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.positive(eps_local=self.eps_local)
        _validate.clip_norm(clip_norm=self.clip_norm)
        _validate.integer(dim=self.dim)
        convert_fields_to_float(self, "eps_local", "clip_norm")
        object.__setattr__(self, "dim", int(self.dim))
        _best_cap(self.dim, self.eps_local)

    @property
    def domain(self) -> tuple[float, float]:
        """The interval of one coordinate; the vector lies in the ball of radius clip_norm."""
        return -self.clip_norm, self.clip_norm

    @property
    def cap(self) -> Cap:
        """The best cap at eps_local, its probability rounded down to a coin that 53 bits toss exactly."""
        return _best_cap(self.dim, self.eps_local)

    @property
    def cap_mass(self) -> float:
        """The mass of the cap, rounded down by less than 1e-9 of it."""
        return accounting.cap_mass(dim=self.dim, threshold=self.cap.threshold)

    @property
    def slope(self) -> float:
        """The change of the mean report, a unit vector, per unit of the clipped vector."""
        return accounting.mean_projection(self.cap) / self.clip_norm

    def __call__(self, x: ArrayLike, *, key: jax.Array) -> jax.Array:
        """A float32 unit vector for every vector on the last axis of x."""
        vectors = jnp.asarray(x, jnp.float32)
        self._check_dim(x=vectors)
        return self._add_reports(0.0, vectors, 1.0, key)

    def sum_reports(
        self, xs: jax.Array, present: jax.Array, *, keys: jax.Array, onto: jax.Array | float = 0.0
    ) -> jax.Array:
        """The sum of `onto` and the reports on those rows of xs, (vectors, dim), that are `present`, each with its key.

        Guarantees:
            The sum of what `__call__` gives, up to the order of floating-point sums.
            Where vectors are long, one report is formed at a time.
        """
        xs = jnp.asarray(xs, jnp.float32)
        present = jnp.asarray(present)
        self._check_dim(xs=xs)
        if self.dim < _LONG:
            reports = jax.vmap(lambda x, key: self(x, key=key))(xs, keys)
            times = present.astype(reports.dtype)
            return onto + jnp.einsum("n,nd->d", times, reports, precision=jax.lax.Precision.HIGHEST)
        times = present.astype(jnp.float32)
        total = jnp.broadcast_to(jnp.float32(onto), (self.dim,))

        def add(i: jax.Array | int, total: jax.Array) -> jax.Array:
            return self._add_reports(total, xs[i], times[i], keys[i])

        return add(0, total) if len(xs) == 1 else jax.lax.fori_loop(0, len(xs), add, total)

    def _add_reports(
        self, total: jax.Array | float, x: jax.Array, times: jax.Array | float, key: jax.Array
    ) -> jax.Array:
        """`total` plus `times` times the report on x, for every vector on the last axis of x.

        One key for all of them.
        """
        radius, unit = polar_of_clipped(x, self.clip_norm)
        key_words, key_rest = jax.random.split(key)
        turn, high, low, where = jax.random.bits(key_words, (4, *radius.shape), jnp.uint32)
        keep = _open_uniform(turn) <= (1 + radius) / 2
        height, slice_radius = _draw_heights(self.cap, _draw_whether_in_cap(self.cap, high, low), where)
        unit = jnp.where(keep, unit, -unit)
        noise, (along, across, first) = _draw_parts_around(unit, height, slice_radius, key=key_rest)

        def add(total: Any, unit: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
            return total + ((times * along) * unit + (times * across) * noise), jnp.float32(0)

        if x.ndim == 1 and self.dim >= _LONGEST:
            sums, _ = map_blocks(add, jnp.broadcast_to(jnp.float32(total), x.shape), unit, noise)
        else:
            sums, _ = add(total, unit, noise)
        return sums.at[..., :1].add(times * first)

    def log_density(self, y: npt.ArrayLike, x: npt.ArrayLike) -> np.ndarray:
        """The log density of v = y against the uniform law of the sphere; -inf where y is not on the sphere.

        The mass of the cap is rounded down, by less than 1e-9, so that density ratios are rounded up.
        """
        report = np.asarray(y, np.float64)
        inputs = np.asarray(x, np.float64)
        self._check_dim(y=report, x=inputs)
        radius, unit = polar_of_clipped(inputs, self.clip_norm)
        norm = np.linalg.norm(report, axis=-1)
        height = np.vecdot(report, unit) / np.where(norm > 0, norm, 1)
        towards = height >= self.cap.threshold
        away = height <= -self.cap.threshold
        chance = (towards * (1 + radius[..., 0]) + away * (1 - radius[..., 0])) / 2
        log_outside, log_ratio = self._log_density_outside_and_step
        return np.where(_is_on_sphere(norm), log_outside + np.log1p(chance * np.expm1(log_ratio)), -np.inf)

    def mean(self, x: npt.ArrayLike) -> np.ndarray:
        """The mean report, in the shape of x: the clipped vector times `slope`."""
        inputs = np.asarray(x, np.float64)
        self._check_dim(x=inputs)
        radius, unit = polar_of_clipped(inputs, self.clip_norm)
        return accounting.mean_projection(self.cap) * radius * unit

    def report_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """The variance of each coordinate, in the shape of x; over all coordinates they add up to 1 - (m r)^2.

        E[v v^T] is E[t^2] u u^T + E[1 - t^2] (I - u u^T) / (dim - 1).
        """
        along = self.mean(x)
        squares = polar_of_clipped(np.asarray(x, np.float64), self.clip_norm)[1] ** 2
        across = _mean_square_radius(self.cap)
        return (1 - across) * squares + across * (1 - squares) / (self.dim - 1) - along**2

    def blanket(self) -> UniformSphere:
        """A uniform point of the sphere, of mass (1 - prob) / (1 - c): every report lies outside some input's cap."""
        return UniformSphere(math.exp(self._log_density_outside_and_step[0]), self.dim)

    @property
    def _log_density_outside_and_step(self) -> tuple[float, float]:
        """The log density outside the cap, and by how much that inside it is higher."""
        prob = self.cap.prob
        mass = accounting.cap_mass(dim=self.dim, threshold=self.cap.threshold)
        outside = math.log1p(-prob) - math.log1p(-mass)
        return outside, math.log(prob) - math.log(mass) - outside

    def _check_dim(self, **arrays: Any) -> None:
        """Refuse, by their names, arrays whose last axis has not `dim` entries."""
        for name, array in arrays.items():
            if array.shape[-1:] != (self.dim,):
                raise ValueError(f"expected {name} with {self.dim} entries on its last axis, got shape={array.shape}")


@dataclasses.dataclass(frozen=True)
class UniformSphere(Blanket):
    """The blanket of PrivUnit: a uniform point of the unit sphere; `mean` and `variance` are those of a coordinate."""

    gamma: float
    dim: int

    def sample(self, shape: Sequence[int], *, key: jax.Array) -> jax.Array:
        """An array of dummies of this shape; each is a vector, on one more axis."""
        return _draw_directions((*shape, self.dim), key)

    def log_density(self, y: npt.ArrayLike) -> np.ndarray:
        """0 on the sphere, against its uniform law."""
        return np.where(_is_on_sphere(np.linalg.norm(np.asarray(y, np.float64), axis=-1)), 0.0, -np.inf)

    @property
    def mean(self) -> float:
        """The mean of a coordinate of a dummy, which is zero, for directions cancel."""
        return 0.0

    @property
    def variance(self) -> float:
        """The variance of a coordinate of a dummy, 1 / dim."""
        return 1 / self.dim


@functools.lru_cache(maxsize=64)
def _best_cap(dim: int, eps_local: float) -> Cap:
    """The cap that accounting chooses, with `prob` rounded down to a multiple of 2^-53.

    So the coin that 53 bits toss never tells more than promised.
    """
    cap = accounting.least_variance_cap(dim=dim, eps_local=eps_local)
    return dataclasses.replace(cap, prob=1 - _num_words_outside(cap) / 2**_COIN_BITS)


def _num_words_outside(cap: Cap) -> int:
    """How many of 2^53 words leave the cap: rounded up, so that the coin never tells more than promised."""
    return math.ceil((1 - fractions.Fraction(cap.prob)) * 2**_COIN_BITS)


def polar_of_clipped(x: Any, clip_norm: float) -> tuple[Any, Any]:
    """r (with the last axis kept) and u such that the clipped x is clip_norm r u; u is the first axis where r is 0."""
    xp = array_module(x)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x / clip_norm
        square = (scaled * scaled).sum(axis=-1, keepdims=True)
    usable = xp.isfinite(square) & (square > _SHORTEST**2)
    norm = xp.sqrt(xp.where(usable, square, 1))
    first = (xp.arange(x.shape[-1]) == 0).astype(x.dtype)
    unit = xp.where(usable, xp.where(usable, scaled, 0) / norm, first)
    return xp.where(usable, xp.minimum(norm, 1), 0), unit


def _draw_whether_in_cap(cap: Cap, high: jax.Array, low: jax.Array) -> jax.Array:
    """True with probability cap.prob exactly, from all bits of one random word and the upper 21 of another."""
    bound, rest = divmod(_num_words_outside(cap), 2 ** (_COIN_BITS - 32))
    return ~((high < np.uint32(bound)) | ((high == np.uint32(bound)) & (low >> (64 - _COIN_BITS) < np.uint32(rest))))


def _draw_heights(cap: Cap, inside: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """t = <v, u> given on which side of the threshold it lies, and sqrt(1 - t^2), which t in float32 may not tell.

    With T the height of a uniform point, P(T >= t) is uniform on (0, c) inside the cap and on (c, 1) outside it.
    Outside, the smaller of P(T >= t) and P(T <= t) gives |t|.
    """
    uniform = _open_uniform(words)
    rest = _open_uniform(~words)
    mass = accounting.cap_mass(dim=cap.dim, threshold=cap.threshold)
    above = mass + (1 - mass) * uniform
    below = (1 - mass) * rest
    exponent = -jnp.log(jnp.where(inside, uniform, jnp.minimum(1, 2 * jnp.minimum(above, below))))
    position = exponent * PER_UNIT
    index = jnp.minimum(position.astype(jnp.int32), PER_UNIT * UNITS - 1)
    cubic = jnp.asarray(inverse_cdf_cubics(cap))[inside.astype(jnp.int32), index]
    fraction = (position - index)[..., None]
    value = ((cubic[..., 3] * fraction + cubic[..., 2]) * fraction + cubic[..., 1]) * fraction + cubic[..., 0]
    return jnp.where(inside | (above < below), value[..., 0], -value[..., 0]), value[..., 1]


def _open_uniform(words: jax.Array) -> jax.Array:
    """A float32 in (0, 1] from 32 bits, with full relative precision near 0."""
    return (words.astype(jnp.float32) + 0.5) * 2.0**-32


def _draw_parts_around(
    unit: jax.Array, height: jax.Array, slice_radius: jax.Array, *, key: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """A draw around u, in parts: noise z, and a, b, c for which height u + radius w is a u + b z + c e.

    The radius is that of the slice. w is uniform on the unit sphere orthogonal to u; e is the first axis, and z has
    normal entries but for a zero there. The report is drawn around e, as height e + radius z / |z|, then carried to u
    by the reflection in m = u + sign(u_1) e, which takes e to -sign(u_1) u: there nothing cancels, where subtracting a
    projection on u would in few dimensions.
    """
    draw = fast_normal if unit.shape[-1] >= _LONG else normal
    noise = draw(key, unit.shape).at[..., 0].set(0)
    scale = slice_radius / jnp.linalg.norm(noise, axis=-1, keepdims=True)
    first = unit[..., :1]
    sign = jnp.where(first < 0, -1, 1).astype(unit.dtype)
    along = height * (first + sign) + scale * jnp.sum(unit * noise, axis=-1, keepdims=True)  # <m, what is carried>
    projection = along / (1 + jnp.abs(first))
    return noise, (sign * projection, -sign * scale, projection - sign * height)


def _draw_directions(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Independent uniform points of a sphere, along the last axis of this shape.

    Normals are never exactly 0, so that even one coordinate has a direction.
    """
    point = normal(key, shape)
    return point / jnp.linalg.norm(point, axis=-1, keepdims=True)


def _mean_square_radius(cap: Cap) -> float:
    """E[1 - t^2] of a report with height t: a sum of positive terms, where 1 - E[t^2] would round off near 0."""
    mass = accounting.cap_mass(dim=cap.dim, threshold=cap.threshold)
    whole = (cap.dim - 1) / cap.dim
    inner = whole * special.betainc((cap.dim + 1) / 2, 0.5, (1 - cap.threshold) * (1 + cap.threshold)) / 2
    return cap.prob * inner / mass + (1 - cap.prob) * (whole - inner) / (1 - mass)


def _is_on_sphere(norm: np.ndarray) -> np.ndarray:
    """Where a norm is 1, but for what float32 may take from it."""
    return np.abs(norm - 1) <= _OFF_SPHERE


PER_UNIT = 32  # cubics per unit of the exponent: the error is below that of float32
UNITS = 23  # -log of the smallest uniform, 2^-33, is 22.9


@functools.lru_cache(maxsize=16)
def inverse_cdf_cubics(cap: Cap) -> np.ndarray:
    """Cubics for (t, sqrt(1 - t^2)) by exponent, float32 of shape (2, intervals, 2, 4), for outside and inside the cap.

    The last axis has a cubic's coefficients, lowest first. Cached: do not write to it.
    """
    mass = accounting.cap_mass(dim=cap.dim, threshold=cap.threshold)
    return np.stack([_tail_inverse_cubics(cap.dim, 0.0), _tail_inverse_cubics(cap.dim, -math.log(2 * mass))]).astype(
        np.float32
    )


def _tail_inverse_cubics(dim: int, start: float) -> np.ndarray:
    """Hermite cubics of t and sqrt(1 - t^2) in e, where P(T >= t) = exp(-start - e) / 2 and 0 <= e <= 23.

    In e both are smooth and evenly spread, however thin the tail: beyond a threshold near which all of it crowds, too.
    """
    exponent = start + np.arange(PER_UNIT * UNITS + 1) / PER_UNIT
    tail = np.exp(-exponent)
    b = (dim - 1) / 2
    t = np.sqrt(special.betainccinv(0.5, b, tail))
    slice_radius = np.sqrt(special.betaincinv(b, 0.5, tail))
    # P(T >= t) over T's density
    slope = np.exp(special.betaln(0.5, b) - exponent - (dim - 3) * np.log(slice_radius)) / 2
    value = np.stack([t, slice_radius], axis=-1)
    step = np.stack([slope, -slope * t / slice_radius], axis=-1) / PER_UNIT
    rise = np.diff(value, axis=0)
    square = 3 * rise - 2 * step[:-1] - step[1:]
    cube = step[:-1] + step[1:] - 2 * rise
    return np.stack([value[:-1], step[:-1], square, cube], axis=-1)
