"""Circuits about the norm of a vector of field elements that stand for small integers (PINE; Rothblum et al. 2023).

The sum of squares in the field is compared with a bound by the bits of both their difference and itself. That says
something about the integers only if the sum does not wrap around the modulus. So the vector is multiplied by random
vectors of entries -1, 0, 1 (with probabilities 1/4, 1/2, 1/4): all these products are small if the vector is short, and
each is large with probability 1/2 if it is long. Their bits, and the norm's, are part of the vector that is proven
about; the products themselves follow from it, and whoever verifies computes them.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dovetail import _validate
from dovetail.vdaf.field import Field
from dovetail.vdaf.flp import Circuit, Gadget, cut_into_rows, next_power_of_two

__all__ = ["ALPHA", "NormBits", "NormEquality", "NormLayout", "random_products"]

ALPHA = 8.7
_TABLE = np.array(
    [[((byte >> shift) & 1) + ((byte >> shift + 1) & 1) - 1 for shift in (0, 2, 4, 6)] for byte in range(256)]
)
_COEFFICIENTS = _TABLE.astype(np.float64)
_BLOCK = 256  # bytes of coefficients at a time, for every product
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormLayout:
    """What is in the vector, in this order, and which bounds its proofs use.

    `dim` integers; the bits of the squared norm, and of what it lacks to `squared`, the bound; for each of `checks`
    random products its bits and whether it counts as small, of which `successes` must; and last, not shared but
    computed, the products.
    """

    field: Field
    dim: int
    squared: int
    checks: int = 100
    successes: int = 100
    alpha: float = ALPHA

    def __post_init__(self) -> None:
        _validate.at_least(1, dim=self.dim, squared=self.squared, checks=self.checks)
        _validate.in_interval(1, self.checks, successes=self.successes)
        modulus = self.field.modulus
        if not 3 * self.squared + 2 < modulus:
            raise ValueError(f"expected a squared norm below a third of the field's size, got squared={self.squared}")
        if modulus < max(2 * self.checks, 2600 * self.product_bound, -(-(self.product_bound**2) // 4000)):
            raise ValueError(f"expected a norm for which wraparounds show in {self.field.name}, got {self.norm_bound}")

    @property
    def norm_bound(self) -> int:
        """The norm's bound: the square root of `squared`, rounded up to an integer."""
        return math.isqrt(self.squared - 1) + 1

    @property
    def product_bound(self) -> int:
        """The bound on small products, which are those from -product_bound + 1 to product_bound.

        A power of two, at least alpha times the norm plus one: so what is added to a small product, product_bound - 1,
        gives a number of `product_bits` bits.
        """
        return next_power_of_two(math.ceil(self.alpha * self.norm_bound) + 1)

    @property
    def has_visible_wraps(self) -> bool:
        """Whether a vector whose squares wrap around has an entry of 2 `product_bound` or more.

        Then a random product of it is small with probability 1/2 at most, whatever the other entries are
        (`docs/proofs/verified.md`, 3).
        """
        return 4 * self.dim * self.product_bound**2 < self.field.modulus

    @property
    def prob_unlucky(self) -> float:
        """The probability, at most, that too few random products of an honest vector are small.

        Rounded up, and never 0.

        A product exceeds t with probability at most 2 exp(-t^2 / squared norm), by Hoeffding.
        """
        large = 2 * math.exp(-(self.product_bound**2) / self.squared)
        failures = self.checks - self.successes + 1
        return min(1.0, max(2.0**-1000, math.comb(self.checks, failures) * large**failures * (1 + 1e-9)))

    @property
    def norm_bits(self) -> int:
        """How many bits hold the squared norm."""
        return self.squared.bit_length()

    @property
    def product_bits(self) -> int:
        """How many bits hold a small product, plus product_bound - 1."""
        return (2 * self.product_bound - 1).bit_length()

    @property
    def norm_part_length(self) -> int:
        """How many elements come before those of the random products: the integers, and the norm's bits."""
        return self.dim + 2 * self.norm_bits

    @property
    def num_bits(self) -> int:
        """How many elements must be 0 or 1."""
        return 2 * self.norm_bits + (self.product_bits + 1) * self.checks

    @property
    def num_shared(self) -> int:
        """How many elements of the vector are shared: all but the products."""
        return self.dim + self.num_bits

    @property
    def length(self) -> int:
        """How many elements the whole vector has, with the products."""
        return self.num_shared + self.checks

    def number_from_bits(self, bits: np.ndarray) -> np.ndarray:
        """The number with these bits along the last axis, lowest first."""
        return self.field.dot(bits, self.field.elements([2**i for i in range(bits.shape[-1])]))

    def claimed_norm_and_gap(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The squared norm that is claimed, and what it lacks to the bound, put together from their bits.

        Linear in the vector.
        """
        bits = self.norm_bits
        start = self.dim
        return self.number_from_bits(vector[..., start : start + bits]), self.number_from_bits(
            vector[..., start + bits : start + 2 * bits]
        )

    def product_claims(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For every product, what is claimed of it, and whether it is claimed small; (..., checks) each.

        What is claimed is the product plus `product_bound` - 1, so that it is not negative.
        """
        rows = vector[..., self.norm_part_length : self.num_shared].reshape(*vector.shape[:-1], self.checks, -1)
        return self.number_from_bits(rows[..., :-1]), rows[..., -1]

    def encode_norm_part(self, integers: np.ndarray) -> np.ndarray:
        """The first part of the vector: the integers as elements, with the norm's bits.

        Refuses a vector that is too long.
        """
        if integers.shape != (self.dim,):
            raise ValueError(f"expected {self.dim} integers, got shape={integers.shape}")
        squared = int(np.sum(integers.astype(object) ** 2))
        if squared > self.squared:
            raise ValueError(f"expected a squared norm of at most {self.squared}, got {squared}")
        bits = [(value >> i) & 1 for value in (squared, self.squared - squared) for i in range(self.norm_bits)]
        return np.concatenate([self.field.elements(integers), self.field.elements(bits)])

    def encode_product_part(self, products: np.ndarray) -> np.ndarray | None:
        """The second part: the bits of every product, each followed by whether it counts as small.

        None if too few are small.

        Exactly `successes` are counted, the first ones; the bits of products that are not small are zeros.
        """
        shifted = self.field.add(products, self.field.scalar(self.product_bound - 1))
        small = shifted < 2 * self.product_bound
        counted = small & (np.cumsum(small) <= self.successes)
        if int(np.sum(counted)) < self.successes:
            return None
        bits = (np.where(small, shifted, 0)[:, None] >> np.arange(self.product_bits, dtype=np.uint64)) & np.uint64(1)
        return np.concatenate([bits, counted[:, None].astype(np.uint64)], axis=1).reshape(-1)


def random_products(field: Field, vector: np.ndarray, stream: bytes, checks: int) -> np.ndarray:
    """The products of a vector with `checks` random vectors of entries -1, 0, 1, as field elements, (checks,).

    Two bits of the stream make one entry: 00 is -1, 11 is 1, the others 0. Elements of 64 bits are multiplied in
    halves, in float64, whose sums stay below 2^53 within a block, so that everything is exact.
    """
    dim = len(vector)
    coded = np.frombuffer(stream, np.uint8).reshape(checks, -(-dim // 4))
    halves = np.zeros((4 * coded.shape[1], 2))
    halves[:dim, 0], halves[:dim, 1] = vector & _LOW, vector >> _HALF
    total = np.zeros((checks, 2), np.int64)
    for low in range(0, coded.shape[1], _BLOCK):
        part = _COEFFICIENTS.take(coded[:, low : low + _BLOCK], axis=0).reshape(checks, -1)
        total += (part @ halves[4 * low : 4 * (low + _BLOCK)]).astype(np.int64)
    halves = field.elements(total)
    return field.add(halves[:, 0], field.mul(halves[:, 1], field.scalar(2**32)))


class NormEquality(Circuit):
    """Accepts vectors whose sum of squares, in the field, is the squared norm that their bits claim."""

    joint = 0

    def __init__(self, layout: NormLayout, *, chunk: int) -> None:
        self.layout = layout
        self.field = layout.field
        self.length = layout.length
        self.gadget = Gadget("squares", chunk)
        self.calls = -(-layout.dim // chunk)

    def gadget_inputs(self, vector: np.ndarray, joint: np.ndarray, shares: int) -> np.ndarray:
        """The integers, in chunks of as many as the gadget squares at once."""
        return cut_into_rows(vector[..., : self.layout.dim], self.gadget.arity)

    def output(self, vector: np.ndarray, joint: np.ndarray, shares: int, gadget_outputs: np.ndarray) -> np.ndarray:
        """The claimed squared norm less the sum of squares."""
        claimed, _ = self.layout.claimed_norm_and_gap(vector)
        return self.field.sub(claimed, self.field.sum(gadget_outputs))[..., None]


class NormBits(Circuit):
    """Accepts if bits are bits, the claimed norm is within the bound, and products are what is claimed of them."""

    joint = 3

    def __init__(self, layout: NormLayout, *, chunk: int) -> None:
        self.layout = layout
        self.field = layout.field
        self.length = layout.length
        self.gadget = Gadget("products", chunk)
        self._bit_calls = -(-layout.num_bits // chunk)
        self.calls = self._bit_calls + -(-layout.checks // chunk)

    def gadget_inputs(self, vector: np.ndarray, joint: np.ndarray, shares: int) -> np.ndarray:
        """The pairs (r^j b_j, b_j - 1) of all bits, then (s^i (product - claim), is_small) of all products.

        r and s are the first two elements of joint randomness; each kind of pair starts a row of its own.
        """
        field = self.field
        layout = self.layout
        share_of_one = field.scalar(field.inverse(shares))
        bits = vector[..., layout.dim : layout.num_shared]
        weighted = field.mul(field.powers(joint[..., 0], layout.num_bits), bits)
        bit_pairs = np.stack([weighted, field.sub(bits, share_of_one)], axis=-1)
        claimed, small = layout.product_claims(vector)
        claimed = field.sub(claimed, field.mul(field.scalar(layout.product_bound - 1), share_of_one))
        off = field.mul(
            field.powers(joint[..., 1], layout.checks), field.sub(vector[..., layout.num_shared :], claimed)
        )
        pairs = [bit_pairs, np.stack([off, small], axis=-1)]
        arity = self.gadget.arity
        flat = [cut_into_rows(kind.reshape(*kind.shape[:-2], -1), arity) for kind in pairs]
        return np.concatenate(flat, axis=-2)

    def output(self, vector: np.ndarray, joint: np.ndarray, shares: int, gadget_outputs: np.ndarray) -> np.ndarray:
        """One random combination, by powers of the third joint element, of four values that must all be zero.

        The bits' calls; the claimed norm and what it lacks, less the bound; the products' calls; the number counted as
        small, less `successes`.
        """
        field = self.field
        layout = self.layout
        share_of_one = field.scalar(field.inverse(shares))
        squared, lacking = layout.claimed_norm_and_gap(vector)
        _, small = layout.product_claims(vector)
        checks = np.stack(
            [
                field.sum(gadget_outputs[..., : self._bit_calls]),
                field.sub(field.add(squared, lacking), field.mul(field.scalar(layout.squared), share_of_one)),
                field.sum(gadget_outputs[..., self._bit_calls :]),
                field.sub(field.sum(small), field.mul(field.scalar(layout.successes), share_of_one)),
            ],
            axis=-1,
        )
        return field.dot(field.powers(joint[..., 2], 4), checks)[..., None]
