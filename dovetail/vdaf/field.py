"""Prime fields on NumPy arrays, with roots of unity of every order that transforms need.

Elements are canonical, from 0 to modulus - 1, in arrays of any shape. `FIELD64` has a modulus for which products reduce
by shifts and additions; `FIELD32` lets uint64 do the work; `FIELD128` holds Python integers, for tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

__all__ = ["FIELD32", "FIELD64", "FIELD128", "Field", "Malencoded", "pad_zeros"]

_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_P64 = np.uint64(2**64 - 2**32 + 1)
_BLOCK = 1 << 14  # products at a time: what they need stays in a cache
_WRAPPING = np.errstate(over="ignore")  # NumPy warns of scalars alone


class Malencoded(ValueError):  # noqa: N818 - it says what is wrong with bytes
    """Bytes that do not encode what they should."""


def pad_zeros(x: np.ndarray, after: int, *, before: int = 0, axis: int = -1) -> np.ndarray:
    """The array with this many zeros added before and after it along one axis; the array itself where both are 0."""
    if not before and not after:
        return x
    axis %= x.ndim
    shape = [*x.shape]
    shape[axis] += before + after
    filled = np.zeros(shape, x.dtype)  # np.pad would put NumPy's integers among Python's
    filled[(slice(None),) * axis + (slice(before, before + x.shape[axis]),)] = x
    return filled


@dataclasses.dataclass(frozen=True)
class Field:
    """Integers modulo a prime; `size` bytes encode an element, `root` has order 2^`log_order`.

    Methods take and return arrays of canonical elements (0 .. modulus - 1) of any shape and never write to their
    arguments; they do not check that elements are canonical.

    Guarantees:
        Whatever comes out is canonical if what goes in is.
        `decode` refuses what `encode` does not write.
    """

    name: str
    modulus: int
    size: int
    root: int
    log_order: int

    @property
    def dtype(self) -> type:
        """The NumPy type of arrays of elements: uint64, or object (Python integers) for fields of more than 64 bits."""
        return np.uint64 if self.size <= 8 else object

    def zeros(self, *shape: int) -> np.ndarray:
        """An array of this shape filled with the element 0."""
        return np.zeros(shape, self.dtype)

    def elements(self, integers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Integers of either sign, reduced modulo the prime.

        int64 arrays take a fast path; in a field of 64 bits it needs nothing but that |x| < 2^63 is below the modulus.
        """
        values = np.asarray(integers)
        if values.dtype == np.int64 and self.size <= 8:
            lifted = values if self.size == 8 else values % self.modulus
            return lifted.view(np.uint64) + (lifted < 0) * np.uint64(self.modulus)  # 2^63 is below a modulus of 64 bits
        return np.mod(values.astype(object), self.modulus).astype(self.dtype)

    def center(self, x: np.ndarray) -> np.ndarray:
        """Elements as the integers of least magnitude that they stand for: int64, or Python's."""
        small = x <= (self.modulus - 1) // 2
        if self.dtype is object:
            return np.where(small, x, x - self.modulus)
        return np.where(small, x, x - np.uint64(self.modulus)).view(np.int64)

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a + b in the field, element by element."""
        return (a + b) % self._modulus

    def sub(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a - b in the field, element by element."""
        return (a + (self._modulus - b)) % self._modulus

    def mul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a b in the field, element by element."""
        return (a * b) % self._modulus

    def sum(self, x: np.ndarray, axis: int = -1) -> np.ndarray:
        """The sum of elements along an axis, in the field; exact for up to 2^31 terms."""
        return np.asarray(np.sum(x, axis=axis) % self._modulus, self.dtype)

    def dot(self, a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        """The sum of products a b along an axis, in the field."""
        return self.sum(self.mul(a, b), axis=axis)

    def scalar(self, value: int) -> np.ndarray:
        """One element, of shape ()."""
        return np.asarray(value % self.modulus, self.dtype)

    def inverse(self, value: int) -> int:
        """The multiplicative inverse of an integer, as an integer."""
        return pow(value, -1, self.modulus)

    def root_of(self, order: int) -> int:
        """A root of unity of exactly this order, as an integer; the order is a power of two, at most 2^`log_order`."""
        return pow(self.root, (1 << self.log_order) // order, self.modulus)

    def powers(self, x: np.ndarray, count: int) -> np.ndarray:
        """1, x, ..., x^(count-1) along a new last axis; count >= 1."""
        x = np.asarray(x, self.dtype)
        powers = np.broadcast_to(self.scalar(1), (*x.shape, 1))
        step = x[..., None]  # x to the number of powers
        while powers.shape[-1] < count:
            powers = np.concatenate([powers, self.mul(powers, step)], axis=-1)
            step = self.mul(step, step)
        return powers[..., :count]

    def power(self, x: np.ndarray, exponent: int) -> np.ndarray:
        """x^exponent, element by element; the exponent is one integer >= 0."""
        powers: np.ndarray = np.broadcast_to(self.scalar(1), np.shape(x))
        square: np.ndarray = np.asarray(x, self.dtype)
        while exponent:
            if exponent & 1:
                powers = self.mul(powers, square)
            square = self.mul(square, square)
            exponent = exponent >> 1
        return powers

    def encode(self, x: np.ndarray) -> bytes:
        """Elements one after the other, each little endian."""
        if self.dtype is object:
            return b"".join(int(value).to_bytes(self.size, "little") for value in x.reshape(-1))
        return np.ascontiguousarray(x, f"<u{self.size}").tobytes()

    def decode_unchecked(self, data: bytes) -> np.ndarray:
        """The integers in these bytes, without a check that they are below the modulus, as `decode` makes."""
        if len(data) % self.size:
            raise Malencoded(f"expected elements of {self.size} bytes, got {len(data)} bytes in all")
        if self.dtype is object:
            elements = [int.from_bytes(data[i : i + self.size], "little") for i in range(0, len(data), self.size)]
            return np.array(elements, object)
        return np.frombuffer(data, f"<u{self.size}").astype(np.uint64)

    def decode(self, data: bytes) -> np.ndarray:
        """The elements in these bytes; refuses any that is not below the modulus."""
        elements = self.decode_unchecked(data)
        if np.any(elements >= self.modulus):
            raise Malencoded("expected elements below the modulus, got a larger one")
        return elements

    @property
    def _modulus(self) -> int | np.uint64:
        """The modulus in the type of the arrays' entries, so that NumPy does not promote them."""
        return self.modulus if self.dtype is object else np.uint64(self.modulus)


@_WRAPPING
def _multiply_goldilocks(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a b modulo 2^64 - 2^32 + 1, for canonical uint64; the 128-bit product is put together from products of halves."""
    a_low, b_low, a_high, b_high = a & _LOW, b & _LOW, a >> _HALF, b >> _HALF
    low = np.asarray(a_low * b_low)
    middle = np.asarray(a_high * b_low)
    middle += low >> _HALF
    other = np.asarray(a_low * b_high)
    other += middle & _LOW
    high = np.asarray(a_high * b_high)
    high += middle >> _HALF
    high += other >> _HALF
    other <<= _HALF
    low &= _LOW
    low |= other
    return _reduce_modulo(low, high)


@_WRAPPING
def _reduce_modulo(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """low + 2^64 high modulo p = 2^64 - 2^32 + 1, canonical.

    Modulo p, 2^64 is 2^32 - 1 and 2^96 is -1: so the upper half of `high` counts -1, the lower half 2^32 - 1.
    """
    top = high >> _HALF
    total = np.asarray(low - top)
    total -= (low < top) * _LOW  # 2^64 was borrowed
    more = (high & _LOW) * _LOW
    total += more
    total += (total < more) * _LOW  # 2^64 was carried
    total -= (total >= _P64) * _P64
    return total


class _Goldilocks(Field):
    """The field of p = 2^64 - 2^32 + 1 in uint64 arithmetic, whose overflows are corrected by hand."""

    @_WRAPPING
    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = np.asarray(a + b)
        return total - ((total < a) | (total >= self._modulus)) * self._modulus

    @_WRAPPING
    def sub(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(a - b) + np.asarray(a < b) * self._modulus

    def mul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a b in the field, in blocks that fit the cache."""
        if np.broadcast(a, b).size <= _BLOCK:
            return _multiply_goldilocks(np.asarray(a), np.asarray(b))
        blocks = np.nditer(
            [a, b, None],
            flags=["external_loop", "buffered"],
            op_flags=[["readonly"], ["readonly"], ["writeonly", "allocate"]],
            buffersize=_BLOCK,
        )
        with blocks:
            for left, right, out in blocks:
                out[...] = _multiply_goldilocks(left, right)
            return blocks.operands[2]

    @_WRAPPING
    def sum(self, x: np.ndarray, axis: int = -1) -> np.ndarray:
        """The sum along an axis: upper and lower halves add up on their own, without overflow for up to 2^31 terms."""
        low, high = np.sum(x & _LOW, axis=axis), np.sum(x >> _HALF, axis=axis)
        carried = np.asarray(high + (low >> _HALF))  # below 2^63 for up to 2^31 terms
        return _reduce_modulo(np.asarray(carried << _HALF) | np.asarray(low & _LOW), np.asarray(carried >> _HALF))


FIELD32 = Field("Field32", 4293918721, 4, 3925978153, 20)
FIELD64 = _Goldilocks("Field64", 2**64 - 2**32 + 1, 8, pow(7, 2**32 - 1, 2**64 - 2**32 + 1), 32)
_P128 = 2**66 * 4611686018427387897 + 1
FIELD128 = Field("Field128", _P128, 16, pow(7, 4611686018427387897, _P128), 66)
