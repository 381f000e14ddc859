"""The randomizers that deployed parties run: exact laws on a grid, drawn by `mechanisms.exact`.

Rounding an input to the grid is pre-processing: it may use floating point, for the noise that follows is exact for
whatever grid point it gives, and the sensitivity is that of the grid points themselves. Rounding is random and
unbiased, so it can move a value by one grid step: intervals are widened to whole steps, the L2 ball by sqrt(dim)
steps, and these widened bounds are enforced on the integers, not assumed. Reports are integers (int64).
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail import _validate
from dovetail.mechanisms._base import check_interval, clamp_float64, convert_fields_to_float
from dovetail.mechanisms.exact import ExactSampler, round_at_random
from dovetail.mechanisms.gaussian import clip_l2
from dovetail.mechanisms.randomized_response import RandomizedResponse

__all__ = ["DiscreteGaussian", "DiscreteLaplace", "ExactRandomizedResponse"]

_MAX_STEPS = 2**40


@dataclasses.dataclass(frozen=True)
class ExactRandomizedResponse:
    """`RandomizedResponse` with an exact coin; `levels=2` is the binary one.

    The probability of telling the truth, 1 - gamma, is rounded down to a dyadic rational, that is towards uniform.

    Guarantees:
        The exact eps of the implemented coin, `eps_implemented`, is at most eps_local, and within 1e-12 of it.
        Every floating-point input is covered: clamped to [0, 1], NaN counts as 1/2.

    References:
        Balle et al. (CRYPTO 2019), Alg. 1.
    """

    eps_local: float
    levels: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps_local", self.law.eps_local)

    @property
    def law(self) -> RandomizedResponse:
        """The same randomizer in floating point: density, de-bias, variance and blanket are read from it."""
        return RandomizedResponse(self.eps_local, self.levels)

    @property
    def prob_truth(self) -> Fraction:
        """1 - gamma rounded down: (e - 1) / (e + b - 1) with e a rational not above exp(eps_local), then dyadic."""
        return _prob_truth_rounded_down(self.eps_local, self.levels)

    @property
    def likelihood_ratio(self) -> Fraction:
        """The exact likelihood ratio of truth against any other report: exp of the implemented eps."""
        return 1 + self.levels * self.prob_truth / (1 - self.prob_truth)

    @property
    def eps_implemented(self) -> float:
        """The eps that the integer probabilities really have, rounded up."""
        with decimal.localcontext(prec=_digits_for_exp(self.eps_local)):
            exact = (Decimal(self.likelihood_ratio.numerator) / Decimal(self.likelihood_ratio.denominator)).ln()
            rounded = float(exact)
            return rounded if Decimal(rounded) >= exact else math.nextafter(rounded, math.inf)

    def __call__(self, x: npt.ArrayLike, *, sampler: ExactSampler) -> np.ndarray:
        """A level index for every entry of x, int64 in its shape."""
        position = clamp_float64(x, 0.0, 1.0) * (self.levels - 1)
        truth = np.clip(round_at_random(position, sampler), 0, self.levels - 1)
        keep = sampler.bernoullis(self.prob_truth, truth.size).reshape(truth.shape)
        return np.where(keep, truth, sampler.integers(self.levels, truth.size).reshape(truth.shape))


@dataclasses.dataclass(frozen=True)
class DiscreteLaplace:
    """Discrete Laplace noise on the grid of multiples of `spacing`, for inputs in [low, high].

    Guarantees:
        Pure eps_local per entry, exactly: scale = sensitivity / eps_local is an exact rational.
        `sensitivity` is in grid steps and covers the rounding: ceil(high / spacing) - floor(low / spacing).
        `debias` of the mean report is unbiased, up to the float64 rounding of x / spacing.

    References:
        Ghosh, Roughgarden, Sundararajan (STOC 2009); Canonne, Kamath, Steinke (NeurIPS 2020), Alg. 2.
    """

    eps_local: float
    spacing: Fraction
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _validate.positive(eps_local=self.eps_local)
        check_interval(self.low, self.high)
        convert_fields_to_float(self, "eps_local", "low", "high")
        _check_spacing(self.spacing)
        _validate.at_most(
            _MAX_STEPS, scale=float(self.scale), highest=abs(self.highest_index), lowest=abs(self.lowest_index)
        )

    @property
    def lowest_index(self) -> int:
        """The smallest grid index that an input rounds to."""
        return math.floor(Fraction(self.low) / self.spacing)

    @property
    def highest_index(self) -> int:
        """The largest grid index that an input rounds to."""
        return math.ceil(Fraction(self.high) / self.spacing)

    @property
    def sensitivity(self) -> int:
        """The distance of two rounded inputs, at most, in grid steps."""
        return self.highest_index - self.lowest_index

    @property
    def scale(self) -> Fraction:
        """The scale of the noise, an exact number of grid steps."""
        return self.sensitivity / Fraction(self.eps_local)

    def __call__(self, x: npt.ArrayLike, *, sampler: ExactSampler) -> np.ndarray:
        """A grid index for every entry of x."""
        rounded = np.clip(round_at_random(self._grid_position(x), sampler), self.lowest_index, self.highest_index)
        scale = self.scale
        size = rounded.size
        noise = np.fromiter((sampler.discrete_laplace(scale) for _ in range(size)), np.int64, size)
        return rounded + noise.reshape(rounded.shape)

    def log_density(self, y: npt.ArrayLike, x: npt.ArrayLike) -> np.ndarray:
        """The log pmf of grid index y on input x: a mixture of the two grid points next to x."""
        position = self._grid_position(x)
        rate = 1 / float(self.scale)
        lower = np.floor(position)
        distance = np.asarray(y, np.float64) - lower
        with np.errstate(divide="ignore"):
            near, far = np.log(1 - position + lower), np.log(position - lower)
        mixture = np.logaddexp(near - np.abs(distance) * rate, far - np.abs(distance - 1) * rate)
        return mixture + math.log(math.tanh(rate / 2))

    def debias(self, mean: Any) -> Any:
        """The mean of grid indices as a value: times the spacing."""
        return mean * float(self.spacing)

    def debiased_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """The variance of one report as a value: noise and rounding."""
        fraction = self._grid_position(x) % 1.0
        noise = 1 / (2 * math.sinh(1 / (2 * float(self.scale))) ** 2)
        return (noise + fraction * (1 - fraction)) * float(self.spacing) ** 2

    def _grid_position(self, x: npt.ArrayLike) -> np.ndarray:
        """x, clamped to [low, high], in grid steps."""
        return clamp_float64(x, self.low, self.high) / float(self.spacing)


@dataclasses.dataclass(frozen=True)
class DiscreteGaussian:
    """Discrete Gaussian noise of standard deviation `std` on vectors of `dim` entries clipped to L2 norm `clip_norm`.

    Guarantees:
        Rounded inputs have norm at most `norm_bound` grid steps, clip_norm / spacing + sqrt(dim), checked on integers;
        where a rounded vector exceeds it, every entry is rounded towards zero instead.
        Hence one report is `rho`-zCDP under replacement, rho = (2 norm_bound)^2 / (2 sigma_squared), rounded up.
        There is no pure eps_local.

    References:
        Canonne, Kamath, Steinke (NeurIPS 2020), Alg. 3 and Thm. 14.
    """

    std: float
    clip_norm: float
    dim: int
    spacing: Fraction

    def __post_init__(self) -> None:
        _validate.positive(std=self.std)
        _validate.clip_norm(clip_norm=self.clip_norm)
        convert_fields_to_float(self, "std", "clip_norm")
        _validate.integer(dim=self.dim)
        _validate.at_least(1, dim=self.dim)
        _check_spacing(self.spacing)
        _validate.at_most(_MAX_STEPS, norm_bound=float(self.norm_bound), sigma=math.sqrt(self.sigma_squared))

    @property
    def sigma_squared(self) -> Fraction:
        """The noise parameter sigma^2 in squared grid steps; an exact number."""
        return (Fraction(self.std) / self.spacing) ** 2

    @property
    def norm_bound(self) -> Fraction:
        """The L2 norm of a rounded vector at most, in grid steps; sqrt(dim) is rounded up."""
        return Fraction(self.clip_norm) / self.spacing + Fraction(math.isqrt(self.dim << 64) + 1, 1 << 32)

    @property
    def sensitivity(self) -> float:
        """The L2 distance of two rounded inputs at most, in the units of x; rounded up."""
        return _float_rounded_up(2 * self.norm_bound * self.spacing)

    @property
    def rho(self) -> float:
        """The zCDP parameter of one report, under replacement; rounded up."""
        return _float_rounded_up(2 * self.norm_bound**2 / self.sigma_squared)

    def __call__(self, x: npt.ArrayLike, *, sampler: ExactSampler) -> np.ndarray:
        """Grid indices for every entry of x; the last axis is one vector."""
        if np.shape(x)[-1:] != (self.dim,):
            raise ValueError(f"expected x to end in an axis of {self.dim} entries, got shape={np.shape(x)}")
        steps = clip_l2(np.asarray(x, np.float64), self.clip_norm) / float(self.spacing)
        rounded = round_at_random(steps, sampler)
        limit = math.floor(self.norm_bound**2)
        too_long = np.sum(rounded.astype(object) ** 2, axis=-1, keepdims=True) > limit
        rounded = np.where(too_long, np.trunc(steps).astype(np.int64), rounded)
        sigma_squared = self.sigma_squared
        size = rounded.size
        noise = np.fromiter((sampler.discrete_gaussian(sigma_squared) for _ in range(size)), np.int64, size)
        return rounded + noise.reshape(rounded.shape)

    def debias(self, mean: Any) -> Any:
        """The mean of grid indices as a value: times the spacing."""
        return mean * float(self.spacing)


def _check_spacing(spacing: Fraction) -> None:
    """Refuse a spacing that is no exact positive number."""
    if not isinstance(spacing, Fraction) or spacing <= 0:
        raise ValueError(f"expected spacing to be a positive Fraction, got spacing={spacing!r}")


def _digits_for_exp(eps: float) -> int:
    """Decimal digits that hold exp(eps) with sixty to spare."""
    return 60 + math.ceil(eps)


@functools.lru_cache(maxsize=256)
def _prob_truth_rounded_down(eps_local: float, levels: int) -> Fraction:
    """The probability of the truth, 1 - gamma, rounded down to a multiple of 2^-bits with 128 bits to spare."""
    e = _exp_rounded_down(eps_local)
    bits = 128 + math.ceil(eps_local * math.log2(math.e))
    return Fraction(math.floor((e - 1) / (e + levels - 1) * 2**bits), 2**bits)


def _exp_rounded_down(eps: float) -> Fraction:
    """A rational not above exp(eps): the correctly rounded decimal, one unit in its last place down."""
    with decimal.localcontext(prec=_digits_for_exp(eps)) as context:
        return Fraction(context.next_minus(Decimal(eps).exp()))


def _float_rounded_up(value: Fraction) -> float:
    """The least float that is not below the value: rounded up."""
    rounded = float(value)
    return rounded if Fraction(rounded) >= value else math.nextafter(rounded, math.inf)
