"""Laplace noise on an interval, and Clip-Laplace noise, which is conditioned on one.

*Laplace*: y = x + Lap((high - low) / eps_local). The infimum over x in [low, high] of exp(-|y - x| / s) is exp(-(|y -
m| + (high - low) / 2) / s) with m the middle and s the scale, so the blanket is the randomizer at m, of mass gamma =
exp(-eps_local / 2). One 32-bit word makes one draw: its top bit is the sign, the other 31 are a uniform that is never
0, so that no draw is infinite: the largest is `LAPLACE_CUT` = 22.2 scales, which a true draw exceeds with probability
2^-32.

*Clip-Laplace* (APES, Def. 4): Laplace noise conditioned on [-A, A], for inputs in [-C, C], A >= C. With lambda = 2C /
eps the density is exp(-|y - x| / lambda) / (2 lambda S(x)) on [-A, A], where S(x) = 1 - exp(-A / lambda) cosh(x /
lambda). Because A >= |x|, log S changes by less than |dx| / lambda, so both -|y - x| / lambda - log S(x) and its mirror
image are monotone in x: over the box the density is largest and smallest at corners. Hence, for every A >= C and not
only for A = C, the largest log-ratio is exactly 2C / lambda = eps_local, and the infimum over x is exp(-(|y| + C) /
lambda) / (2 lambda S(C)): the blanket is the randomizer at 0, of mass gamma = exp(-eps / 2) S(0) / S(C), which is 2 /
(1 + exp(eps / 2)) at A = C. The mean report is strictly increasing in x but not affine: `invert_mean_report` inverts
it, also for a mixture of eps.

Both are for simulation only: floating-point noise is not for deployment (`grid_laplace` is).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt
from scipy import special

from dovetail import _validate
from dovetail._jax import ArrayLike, is_array, jax, jnp
from dovetail.mechanisms._base import (
    AtInput,
    LocalRandomizer,
    array_module,
    as_floating,
    check_interval,
    clamp,
    clamp_float64,
    convert_fields_to_float,
)
from dovetail.statements import NotApplicable

__all__ = [
    "LAPLACE_CUT",
    "ClipLaplace",
    "LaplaceRandomizer",
    "add_laplace",
    "draw_clip_laplace",
    "invert_mean_report",
    "laplace_from_bits",
    "mean_report",
]

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
        convert_fields_to_float(self, "eps_local", "low", "high")
        _validate.positive(scale=self.scale)

    @property
    def domain(self) -> tuple[float, float]:
        """The interval of inputs, [low, high]; others are clamped to it."""
        return self.low, self.high

    @property
    def scale(self) -> float:
        """The scale of the noise, (high - low) / eps_local; its standard deviation is sqrt(2) times that."""
        return (self.high - self.low) / self.eps_local

    def __call__(self, x: ArrayLike, *, key: jax.Array) -> jax.Array:
        """The clamped x plus Laplace noise, entry by entry."""
        return add_laplace(clamp(as_floating(x), self.low, self.high), self.scale, key=key)

    def noise_sum(self, counts: jax.Array, *, key: jax.Array) -> jax.Array:
        """For every entry m of counts, the sum of m independent noises, in one draw; 0 where m is 0.

        It has the law of the difference of two Gamma(m) variables, times the scale.
        """
        shape = jnp.maximum(counts, 1).astype(jnp.float32)
        up, down = (jax.random.gamma(half, shape) for half in jax.random.split(key))
        return jnp.where(counts > 0, self.scale * (up - down), 0.0)

    def log_density(self, y: npt.ArrayLike, x: npt.ArrayLike) -> np.ndarray:
        """The log density -|y - x| / scale - log(2 scale) of report y, with x clamped to the domain."""
        distance = np.abs(np.asarray(y, np.float64) - clamp_float64(x, *self.domain))
        return -distance / self.scale - math.log(2 * self.scale)

    def report_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """The variance of a report, 2 scale^2, whatever x; in the shape of x."""
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


_TABLE_SIZE = 128


@dataclasses.dataclass(frozen=True)
class ClipLaplace(LocalRandomizer):
    """Laplace noise conditioned on [-bound, bound], for inputs in the symmetric box [low, high] = [-C, C].

    `bound` (A) is `high` unless given. Any box but a symmetric one is refused: there the normaliser S breaks the bound.

    Guarantees:
        eps_local is the exact largest log-ratio for every bound >= high.
        Every report lies in [-bound, bound].
        `debias` maps the exact mean report of x to x, clamped to the box; on averages it is biased.

    References:
        Liu et al. (AAAI 2023, "Echo of Neighbors"), Def. 4 and Thm. 1; the extension to A > C is in the module's text.
    """

    eps_local: float
    low: float = -1.0
    high: float = 1.0
    bound: float | None = None
    affine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _validate.positive(eps_local=self.eps_local, high=self.high)
        _validate.finite(low=self.low)
        if self.low != -self.high:
            raise ValueError(f"expected a symmetric box with low = -high, got low={self.low!r}, high={self.high!r}")
        if self.bound is None:
            object.__setattr__(self, "bound", self.high)
        _check_box(self.high, self.output_bound)
        convert_fields_to_float(self, "eps_local", "low", "high", "bound")
        _validate.positive(scale=self.scale)

    @property
    def domain(self) -> tuple[float, float]:
        """The interval of inputs, [-C, C]; others are clamped to it."""
        return self.low, self.high

    @property
    def output_bound(self) -> float:
        """A: reports lie in [-A, A]."""
        return self.high if self.bound is None else self.bound

    @property
    def scale(self) -> float:
        """The scale lambda = 2C / eps_local of the noise before it is conditioned."""
        return (self.high - self.low) / self.eps_local

    def __call__(self, x: ArrayLike, *, key: jax.Array) -> jax.Array:
        """One draw for every entry of x, by inverse cdf."""
        return draw_clip_laplace(x, self.eps_local, self.high, self.output_bound, key=key)

    def log_density(self, y: npt.ArrayLike, x: npt.ArrayLike) -> np.ndarray:
        """The log of Def. 4's density at report y, with x clamped to the box; -inf where |y| > A."""
        report = np.asarray(y, np.float64)
        centre = clamp_float64(x, *self.domain)
        log_density = (
            -np.abs(report - centre) / self.scale - math.log(2 * self.scale) - np.log(self._mass_within(centre))
        )
        return np.where(np.abs(report) <= self.output_bound, log_density, -np.inf)

    def mean(self, x: npt.ArrayLike) -> np.ndarray:
        """The exact mean report (APES eq. 1)."""
        return mean_report(np.asarray(x, np.float64), self.eps_local, self.high, self.output_bound)

    def report_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """The exact variance of a report, in the shape of x.

        It comes from the incomplete gamma integrals of w e^-w and w^2 e^-w, where w = |y - x| / lambda.
        """
        centre = clamp_float64(x, *self.domain)
        right, left = (self.output_bound - centre) / self.scale, (self.output_bound + centre) / self.scale
        norm = 2 * self._mass_within(centre)
        first = (special.gammainc(2, right) - special.gammainc(2, left)) / norm
        second = 2 * (special.gammainc(3, right) + special.gammainc(3, left)) / norm
        return self.scale**2 * (second - first**2)

    def debiased_variance(self, x: npt.ArrayLike) -> NoReturn:
        """Refused: one report cannot be de-biased on its own, so there is no variance of a de-biased report."""
        raise NotApplicable("Clip-Laplace is de-biased by a non-linear clamped map of an average: use report_variance")

    def debias(self, mean: Any) -> Any:
        """The x whose mean report this is, clamped to the box."""
        return invert_mean_report(mean, self.eps_local, self.high, self.output_bound)

    def blanket(self) -> AtInput:
        """The randomizer at 0, with gamma = exp(-eps / 2) S(0) / S(C)."""
        ratio = float(self._mass_within(np.zeros(())) / self._mass_within(np.full((), self.high)))
        return AtInput(math.exp(-self.eps_local / 2) * ratio, self, 0.0)

    def _mass_within(self, x: np.ndarray) -> np.ndarray:
        """S(x), the mass that Laplace noise around x has on [-A, A]."""
        return _mass_in_bound(np.abs(x) / self.scale, self.output_bound / self.scale)


def draw_clip_laplace(
    x: ArrayLike, eps_local: ArrayLike, clip_value: float, bound: float, *, key: jax.Array
) -> jax.Array:
    """Clip-Laplace reports, where eps_local may differ from entry to entry (personal budgets); x is clamped to the box.

    Left and right of x the density is a truncated exponential of mass 1 - exp(-distance to the wall); one uniform
    picks a point t of the joined masses (-left, right), and y = x + sign(t) lambda (-log(1 - |t|)).
    """
    _check_box(clip_value, bound)
    centre: jax.Array = clamp(as_floating(x), -clip_value, clip_value)
    scale = 2 * clip_value / jnp.asarray(eps_local, centre.dtype)
    left, right = -jnp.expm1(-(bound + centre) / scale), -jnp.expm1(-(bound - centre) / scale)
    shape = jnp.broadcast_shapes(centre.shape, scale.shape)
    t = jax.random.uniform(key, shape, centre.dtype) * (left + right) - left
    wall = _bound_in_dtype(bound, centre.dtype)
    return jnp.clip(centre - jnp.sign(t) * scale * jnp.log1p(-jnp.abs(t)), -wall, wall)


def mean_report(x: Any, eps_local: Any, clip_value: float, bound: float) -> Any:
    """E[y | x], stable from tiny to large eps_local; broadcasts x against eps_local (NumPy or JAX alike).

    References:
        Liu et al. (AAAI 2023), eq. (1).
    """
    _check_box(clip_value, bound)
    return _mean_report_at_scale(clamp(x, -clip_value, clip_value), 2 * clip_value / eps_local, bound)


def invert_mean_report(mean: Any, eps_local: Any, clip_value: float, bound: float) -> Any:
    """The g with average_i E[CLap(g; eps_i)] = mean, clamped to [-C, C]; vectorised over `mean`.

    `eps_local` is one number or the vector of all users' budgets. The mean M(g) is tabulated once over 0 <= g <= A and
    inverted by interpolation. Its slope vanishes at g = A (there the density no longer depends on g), so the inverse
    has a square-root end; arcsin(M(g) / M(A)) takes that away and is smooth in g throughout.

    Guarantees:
        calibrate(M(g)) = g to 1e-6 C in float64 for eps_local up to 20 and bound up to 3C; float32 loses half its
        digits at the corners if A = C, as any inverse there must.
        Monotone, and exactly -C or C beyond the attainable means.

    References:
        Liu et al. (AAAI 2023), Alg. 1 and eq. (1).
    """
    _check_box(clip_value, bound)
    nodes = np.linspace(0.0, bound, _TABLE_SIZE + 1)
    eps_local = eps_local if is_array(eps_local) else np.asarray(eps_local, np.float64)
    table = _mean_report_over_scales(nodes, 2 * clip_value / eps_local, bound)
    largest = table[-1] if is_array(table) else float(table[-1])
    angles = array_module(table).arcsin(array_module(table).clip(table / largest, 0.0, 1.0))
    xp = array_module(mean, table)
    mean = as_floating(mean) if xp is jnp else np.asarray(mean, np.float64)
    angle = xp.arcsin(xp.clip(xp.abs(mean) / largest, 0.0, 1.0))
    inverse = _interpolate_cubic(angle, xp.asarray(angles, mean.dtype), xp.asarray(nodes, mean.dtype), xp)
    return xp.sign(mean) * xp.clip(inverse, 0.0, clip_value)


def _check_box(clip_value: float, bound: float) -> None:
    """Refuse a clip value that is not positive, and a bound that is not finite or below it."""
    _validate.positive(clip_value=clip_value)
    _validate.finite(bound=bound)
    if bound < clip_value:
        raise ValueError(f"expected bound >= clip_value, got bound={bound!r}, clip_value={clip_value!r}")


def _mean_report_over_scales(nodes: np.ndarray, scales: Any, bound: float) -> Any:
    """The mean report averaged over all scales, at every node; never holds more than 16 nodes' terms at a time."""
    if is_array(scales):
        points = jnp.asarray(nodes, jnp.float32)
        return jax.lax.map(lambda g: _mean_report_at_scale(g, scales, bound).mean(), points, batch_size=16)
    if np.ndim(scales) == 0:
        return _mean_report_at_scale(nodes, float(scales), bound)
    return np.array([_mean_report_at_scale(g, scales, bound).mean() for g in nodes])


def _mean_report_at_scale(x: Any, scale: Any, bound: float) -> Any:
    """E[y | x] for |x| <= A; NumPy and JAX alike, and broadcasts.

    With u = x / lambda and a = A / lambda: E / lambda = (u e^a - (1 + a) sinh u) / (e^a - cosh u), here times e^-a and
    with the leading terms, which cancel at small eps, taken out by hand.
    """
    xp = array_module(x, scale)
    size = xp.abs(x) / scale
    a = bound / scale
    numerator = size * _exp_remainder(a, xp) - (1 + a) * _sinh_remainder(size, a, xp)
    return xp.sign(x) * scale * numerator / _mass_in_bound(size, a)


def _mass_in_bound(size: Any, a: Any) -> Any:
    """S = 1 - e^-a cosh(size), for 0 <= size <= a, without overflow and without cancellation at small a."""
    xp = array_module(size, a)
    return -xp.expm1(-a) - xp.exp(size - a) * xp.expm1(-size) ** 2 / 2


def _exp_remainder(a: Any, xp: Any) -> Any:
    """1 - (1 + a) e^-a: a series below 1."""
    small = xp.minimum(a, 1.0)
    series = 1.0
    for k in range(16, 0, -1):
        series = 1 + series * small / (k + 2)
    return xp.where(a < 1, xp.exp(-a) * small**2 / 2 * series, 1 - (1 + a) * xp.exp(-a))


def _sinh_remainder(size: Any, a: Any, xp: Any) -> Any:
    """e^-a (sinh(size) - size): a series below 1."""
    small = xp.minimum(size, 1.0)
    series = 1.0
    for k in range(8, 0, -1):
        series = 1 + series * small**2 / ((2 * k + 2) * (2 * k + 3))
    large = (xp.exp(size - a) - xp.exp(-size - a)) / 2 - size * xp.exp(-a)
    return xp.where(size < 1, xp.exp(-a) * small**3 / 6 * series, large)


def _bound_in_dtype(bound: float, dtype: Any) -> float:
    """The bound rounded down to a number of this dtype, so that clipping to it never exceeds the bound."""
    rounded = np.asarray(bound, dtype)
    return float(rounded if float(rounded) <= bound else np.nextafter(rounded, np.asarray(0, dtype)))


def _interpolate_cubic(x: Any, xs: Any, ys: Any, xp: Any) -> Any:
    """The cubic through the four nodes around x.

    `xs` ascend and have at least four entries, `xp` is the arrays' module.
    """
    first = xp.clip(xp.searchsorted(xs, x) - 2, 0, len(xs) - 4)
    near = [xs[first + j] for j in range(4)]
    total = xp.zeros_like(x)
    for j in range(4):
        others = [near[k] for k in range(4) if k != j]
        weights = [(x - other) / (near[j] - other) for other in others]
        total = total + ys[first + j] * weights[0] * weights[1] * weights[2]
    return total
