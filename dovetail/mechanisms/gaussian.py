"""Gaussian noise on vectors clipped in L2 norm: y = clip(x) + N(0, std^2 I).

Two clipped vectors are at most 2 clip_norm apart, which is the sensitivity under replacement. The density ratio is
unbounded in y, so no finite pure eps_local exists: the guarantee is (eps, delta) and belongs to the accountants, which
need nothing but `std` and `sensitivity`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from dovetail import _validate
from dovetail._jax import ArrayLike, jax
from dovetail.mechanisms._base import LocalRandomizer, as_floating, freeze_floats, namespace
from dovetail.mechanisms._normal import normal
from dovetail.statements import NotApplicable

__all__ = ["GaussianRandomizer", "clip_factor", "clip_l2", "clipping", "finite_or_zero", "scaled_by"]


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
        freeze_floats(self, "std", "clip_norm")

    @property
    def domain(self) -> tuple[float, float]:
        """The interval of one coordinate; the vector lies in the ball of radius clip_norm."""
        return -self.clip_norm, self.clip_norm

    @property
    def sensitivity(self) -> float:
        """The L2 distance of two clipped vectors at most: replacement."""
        return 2 * self.clip_norm

    def __call__(self, x: ArrayLike, *, key: jax.Array) -> jax.Array:
        """The clipped vector plus noise."""
        clipped = clip_l2(as_floating(x), self.clip_norm)
        return clipped + self.std * normal(key, clipped.shape, clipped.dtype)

    def log_density(self, y: npt.ArrayLike, x: npt.ArrayLike) -> np.ndarray:
        """The joint log density over the last axis."""
        scaled = (np.asarray(y, np.float64) - self.mean(x)) / self.std
        return np.sum(-(scaled**2) / 2 - math.log(self.std * math.sqrt(2 * math.pi)), axis=-1)

    def mean(self, x: npt.ArrayLike) -> np.ndarray:
        """The clipped vector."""
        return clip_l2(np.asarray(x, np.float64), self.clip_norm)

    def report_variance(self, x: npt.ArrayLike) -> np.ndarray:
        """std^2 in every coordinate."""
        return np.full(np.shape(x), self.std**2)

    def blanket(self) -> NoReturn:
        """Never: the blanket bounds need a finite eps_local."""
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
    return scaled_by(x, clipping(x, clip_norm))


def clipping(x: Any, clip_norm: Any) -> Any:
    """The factor by which `clip_l2` scales each vector on the last axis, which is kept."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x / clip_norm
        square = (scaled * scaled).sum(axis=-1, keepdims=True)
    return _shrink(square)


def scaled_by(x: Any, factor: Any) -> Any:
    """x, or some entries of it, times a factor of `clipping`: zero where that is, whatever x holds."""
    xp, kept = namespace(x), factor > 0
    return xp.where(kept, xp.where(kept, x, 0) * factor, 0)


def clip_factor(norm: Any, clip_norm: Any) -> Any:
    """The factor by which `clip_l2` scales a vector of this norm: for sums of vectors never formed one by one.

    Guarantees:
        Equal to min(1, clip_norm / norm); 1 at zero, 0 where the norm or its square is NaN or infinite.
    """
    scaled = norm / clip_norm
    return _shrink(scaled * scaled)


def finite_or_zero(x: Any) -> Any:
    """The vectors on the last axis that have a finite squared norm, zeros for all others: what an update counts as.

    Guarantees:
        The result is finite, and one vector never depends on another.
    """
    xp = namespace(x)
    with np.errstate(over="ignore", invalid="ignore"):
        square = (x * x).sum(axis=-1, keepdims=True)
    return xp.where(xp.isfinite(square), x, 0)


def _shrink(square: Any) -> Any:
    """min(1, 1 / sqrt(square)), and 0 where the square is not finite."""
    xp = namespace(square)
    long = square > 1
    factor = xp.where(long, 1 / xp.sqrt(xp.where(long, square, 1)), 1)
    return xp.where(xp.isfinite(square), factor, 0)
