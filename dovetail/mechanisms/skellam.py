"""Vectors as noisy integers in additive shares: what a client of split-and-mix computes (Agarwal, Kairouz, Liu 2021).

- *Encoding*: clip to an L2 norm, scale, round every coordinate up or down at random and without bias; repeat until the
  integer vector has at most the norm that the accountant presumes (conditional rounding; Kairouz, Liu, Steinke 2021).
- *Noise*: Skellam, the difference of two Poissons; sums of Skellams are Skellam.
- *Shares*: all but one uniform modulo a power of two, the last one makes up the value.

Integers live in 32-bit words: sums wrap modulo 2^32, of which every modulus here is a divisor. This is simulation: the
noise is drawn in float32, up to a variance of 1024 by inverting Skellam's law, above as a rounded Gaussian; deployed
clients need exact draws.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from dovetail import _validate
from dovetail._jax import jax, jnp, map_blocks
from dovetail.accounting.releases import split_and_mix
from dovetail.mechanisms._base import as_floating
from dovetail.mechanisms._words import PAGE, random_words, toss_coins
from dovetail.mechanisms.gaussian import clip_factors_of, normal, scale_by

__all__ = [
    "ATTEMPTS",
    "Encoding",
    "Resolution",
    "center",
    "choose_resolution",
    "draw_skellam",
    "shares_for",
    "split_into_shares",
    "to_residues",
]

_WORD = 2**32
_LARGEST = 65_000  # norm of integers whose squares add up in a word, with room for float32 clipping
ATTEMPTS = 8  # of rounding: each fails with probability at most 1e-3, and in fact far less
_ROUNDING_LOSS = 2e-3  # what rounding adds to norms at most, unless the scale is given
_GAUSSIAN_FROM = 1024.0  # a rounded Gaussian is within .06 / variance of Skellam
_REACH = 512  # Skellam noise of variance 1024 exceeds it with probability below 2^-180


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """Vectors of `dim` coordinates as integers: about `scale` times the vector, clipped to L2 norm `clip_norm`.

    Guarantees:
        The integer vector has norm at most `norm`, whatever the input.
        Unbiased but for `bias`, the L2 norm of what conditioning on the norm moves the mean by, at most.
        A vector whose norm is NaN or infinite counts as zero.

    References:
        Kairouz, Liu, Steinke (ICML 2021), "The distributed discrete Gaussian mechanism", Alg. 1.
    """

    clip_norm: float
    scale: float
    dim: int
    rounding_tail: float = 1e-3

    def __post_init__(self) -> None:
        _validate.positive(scale=self.scale)
        _validate.clip_norm(clip_norm=self.clip_norm)
        _validate.integer(dim=self.dim)
        _validate.at_least(1, dim=self.dim)
        _validate.in_open_interval(0, 1, rounding_tail=self.rounding_tail)
        if not _squares_fit(self.clip_norm, self.scale, self.dim):
            raise ValueError(
                f"expected scale * clip_norm + sqrt(dim) < {_LARGEST}, so that squares add up in 32 bits, "
                f"got scale={self.scale} with clip_norm={self.clip_norm} and dim={self.dim}"
            )

    @property
    def norm(self) -> float:
        """The largest L2 norm of an encoded vector, in integers."""
        return split_and_mix.rounded_norm(
            clip_norm=self.clip_norm, scale=self.scale, coordinates=self.dim, rounding_tail=self.rounding_tail
        )

    @property
    def bias(self) -> float:
        """The L2 distance, at most, of the mean of encoded / scale from the clipped vector.

        Rounding R of v is refused with probability at most t = rounding_tail, and is off by R - v, of norm below
        sqrt(d) and variance at most 1/4 in any direction; the mean of what is refused has norm at most min(t sqrt(d),
        sqrt(t) / 2), and what is kept is off by that over 1 - t.
        """
        tail = self.rounding_tail
        return min(tail * math.sqrt(self.dim), math.sqrt(tail) / 2) / (1 - tail) / self.scale

    def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        """The integers for one vector x of shape (dim,), as int32.

        Where rounding is refused eight times in a row, coordinates are rounded towards zero instead.
        """
        vector = as_floating(x)
        factor = clip_factors_of(vector, self.clip_norm)
        limit = jnp.uint32(math.floor(self.norm**2))

        def encode(integers: Callable[..., jax.Array], *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            """What `integers` makes of the scaled vector, and whether it is short enough."""

            def part(_: jax.Array, vector: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
                encoded = integers(scale_by(vector, factor) * self.scale, *arrays)
                return encoded, jnp.sum(to_residues(encoded * encoded), dtype=jnp.uint32)

            encoded, square = map_blocks(part, jnp.zeros(self.dim, jnp.int32), vector, *arrays)
            return encoded, square <= limit

        def attempt(count: jax.Array | int) -> tuple[jax.Array, jax.Array]:
            return encode(
                _round_randomly, random_words(jax.random.fold_in(key, count), self.dim, stored=self.dim > PAGE)
            )

        def again(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            """The loop's state after one more attempt.

            Their number, whether it was accepted, and the integers to keep.
            """
            count, _, kept = state
            encoded, done = attempt(count)
            return count + 1, done, jnp.where(done, encoded, kept)

        def retry() -> jax.Array:
            """The integers of an accepted attempt; where none is, those rounded towards zero, or zeros."""
            inward, short = encode(lambda value: jnp.trunc(value).astype(jnp.int32))
            start = jnp.int32(1), done, jnp.where(short, inward, 0)
            return jax.lax.while_loop(lambda state: ~state[1] & (state[0] < ATTEMPTS), again, start)[2]

        first, done = attempt(0)
        return jax.lax.cond(done, lambda: first, retry)


def _round_randomly(value: jax.Array, random: jax.Array) -> jax.Array:
    """Each number rounded up or down to int32, without bias to 2^-32, by one random word each."""
    low = jnp.floor(value)
    return low.astype(jnp.int32) + toss_coins(value - low, random)


def _squares_fit(clip_norm: float, scale: float, dim: int) -> bool:
    """Whether the squares of an encoded vector add up below 2^32, with room for rounding."""
    return scale * clip_norm + math.sqrt(dim) < _LARGEST


def draw_skellam(variance: float, shape: tuple[int, ...], *, key: jax.Array, times: int | jax.Array = 1) -> jax.Array:
    """Independent Skellam noise of mean zero as int32: each entry the sum of `times` draws of this variance.

    Guarantees:
        Up to a variance of 1024, probabilities are those of the difference of two Poissons to 1e-5 of each, down to
        2^-64, below which nothing comes up.
        Above, it is a rounded Gaussian of the same variance, within .06 / variance of Skellam in total variation; its
        tails end at `NORMAL_CUT` standard deviations, and integers beyond 2^24 are multiples of two and more.
    """
    total = jnp.float32(variance) * times
    if variance > _GAUSSIAN_FROM:
        return jnp.where(total > 0, _rounded_gaussian(total, shape, key), 0)
    if isinstance(times, int) and variance * times <= _GAUSSIAN_FROM:
        return _invert_tail(total, shape, key)
    return jax.lax.cond(
        total > _GAUSSIAN_FROM,
        lambda: _rounded_gaussian(total, shape, key),
        lambda: _invert_tail(total, shape, key),
    )


def _invert_tail(variance: jax.Array, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Skellam noise by a fair sign, and the magnitude by inverting its tail; small tail probabilities take 64 bits.

    Right for variances up to 1024, where the table of tails ends.
    """
    tail = _tail_probabilities(jnp.minimum(variance, _GAUSSIAN_FROM))  # where it is larger, this draw is not used
    size = math.prod(shape)
    high, low, sign = random_words(key, 3 * size, stored=size > PAGE).reshape(3, *shape)
    chance = (high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2.0**-32) * 2.0**-32
    magnitude = jnp.searchsorted(-tail, -chance).astype(jnp.int32)
    return jnp.where(sign >> 31, magnitude, -magnitude)


def _tail_probabilities(variance: jax.Array) -> jax.Array:
    """P(|X| > k) for k = 0.. of Skellam noise of mean zero, falling; P(X = k) = e^-v I_k(v), v the variance.

    The ratios r_k = I_k / I_(k-1) follow from r_k = 1 / (2k / v + r_(k+1)), from above the last that matters down: no
    term is negative, so every ratio is right to a few roundings.
    """
    steps = jnp.arange(_REACH, 0, -1, dtype=jnp.float32)
    scale = jnp.maximum(variance, jnp.float32(1e-30))

    def ratio(above: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        here = 1 / (2 * k / scale + above)
        return here, here

    _, ratios = jax.lax.scan(ratio, jnp.float32(0.0), steps)
    weights = 2 * jnp.cumprod(ratios[::-1])  # of |X| = 1.., over that of 0
    beyond = jnp.cumsum(weights[::-1])[::-1]
    return beyond / (1 + beyond[0])


def _rounded_gaussian(variance: jax.Array, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Rounded Gaussian noise of this variance in all, as int32; for variances of 1 and more."""
    std = jnp.sqrt(jnp.maximum(variance, 1.0) - 1 / 12)  # rounding adds 1/12
    away = jax.lax.RoundingMethod.AWAY_FROM_ZERO  # float32 has many ties, and rounding to even would prefer even noise
    return jax.lax.round(std * normal(key, shape), away).astype(jnp.int32)


def to_residues(integers: jax.Array) -> jax.Array:
    """Signed 32-bit integers as residues modulo 2^32, uint32."""
    return jax.lax.bitcast_convert_type(integers, jnp.uint32)


def split_into_shares(values: jax.Array, shares: int, modulus: int, *, key: jax.Array) -> jax.Array:
    """Additive shares of every value modulo `modulus`, a power of two up to 2^32, along a new last axis; uint32.

    Guarantees:
        The shares of a value add up to it modulo `modulus`.
        Any shares - 1 of them are independent and uniform, whatever the value.
    """
    mask = jnp.uint32(modulus - 1)
    free = random_words(key, values.size * (shares - 1)).reshape(*values.shape, shares - 1) & mask
    last = (to_residues(values) - jnp.sum(free, axis=-1, dtype=jnp.uint32)) & mask
    return jnp.concatenate([free, last[..., None]], axis=-1)


def center(residues: jax.Array, modulus: int) -> jax.Array:
    """The integers of smallest magnitude with these residues: int32 in [-modulus / 2, modulus / 2).

    The modulus is a power of two, at most 2^32, and residues are uint32.
    """
    unused = 32 - (modulus.bit_length() - 1)
    return jax.lax.bitcast_convert_type(residues << unused, jnp.int32) >> unused


class Resolution(NamedTuple):
    """How finely vectors are encoded (integers per unit), and modulo what their sum is taken."""

    scale: float
    modulus: int


def choose_resolution(
    *,
    clip_norm: float,
    dim: int,
    num_users: int,
    noise_std: float,
    scale: float | None = None,
    modulus: int | None = None,
) -> Resolution:
    """Scale and modulus for the sum of at most `num_users` users' vectors, with noise of `noise_std` in all.

    Without a scale, rounding adds at most .2 % to norms, and the scale is then raised to fill the modulus.

    Arguments:
        clip_norm: largest L2 norm of a vector.
        dim: coordinates of a vector.
        num_users: users whose integers are added up, at most.
        noise_std: standard deviation of all noise on a coordinate of the sum, in the units of the vectors.
        scale: integers per unit, if it is given.
        modulus: a power of two up to 2^32, if it is given.

    Guarantees:
        The sum wraps around only where a coordinate's noise exceeds 9 standard deviations.
        Refuses a modulus for which that does not hold, and sums that need more than 32 bits.
    """
    if modulus is not None:
        _validate.integer(modulus=modulus)
        if not 2 <= modulus <= _WORD or modulus & (modulus - 1):
            raise ValueError(f"expected modulus to be a power of two up to 2^32, got modulus={modulus}")

    def modulus_at(at: float) -> int:
        """The least modulus for this scale, which need not be a power of two."""
        norm = Encoding(clip_norm=clip_norm, scale=at, dim=dim).norm
        std = noise_std * at  # its square may be infinite, which is refused, where a power would be an OverflowError
        return split_and_mix.modulus_for(num_users=num_users, norm=norm, noise_variance=std * std)

    finest = _coarsest_scale(clip_norm, dim) if scale is None else scale
    least = modulus_at(finest)
    if least > (modulus or _WORD):
        raise ValueError(
            f"expected modulus >= {least} for the sum of {num_users} users at scale={finest:.6g}, "
            f"got modulus={modulus or 'at most 2^32'}"
        )
    if modulus is None:
        modulus = 1 << (least - 1).bit_length()
    while scale is None and _squares_fit(clip_norm, 1.01 * finest, dim) and modulus_at(1.01 * finest) <= modulus:
        finest *= 1.01
    return Resolution(float(finest), int(modulus))


def _coarsest_scale(clip_norm: float, dim: int) -> float:
    """The smallest scale at which `rounded_norm` is at most 1 + _ROUNDING_LOSS times the scaled norm r.

    The norm is the smaller of r + sqrt(d) and sqrt(r^2 + d/4 + t (r + sqrt(d)/2)); each gives an r.
    """
    excess = (1 + _ROUNDING_LOSS) ** 2 - 1
    t = math.sqrt(-2 * math.log(Encoding.rounding_tail))
    constant = dim / 4 + t * math.sqrt(dim) / 2
    by_square = (t + math.sqrt(t**2 + 4 * excess * constant)) / (2 * excess)
    return min(by_square, math.sqrt(dim) / _ROUNDING_LOSS) / clip_norm


@functools.lru_cache(maxsize=256)
def shares_for(*, honest: int, modulus: int, distance: float) -> int:
    """The fewest share slots that hide a coordinate's values up to this distance (total variation) from the ideal.

    All of these slots are unseen by the adversary. Cached: the search takes a while.
    """
    return split_and_mix.shares_for(num_users=honest, modulus=modulus, target=distance)
