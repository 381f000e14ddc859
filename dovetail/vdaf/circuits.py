"""Circuits about bits: vectors of bits, of small weight, of small integers, and one-hot ones.

A vector of bits satisfies b (b - 1) = 0 everywhere. All these products, multiplied by powers of a random element, add
up to zero, which is one call of the gadget for every chunk of the vector.
"""

from __future__ import annotations

import abc

import numpy as np

from dovetail import _validate
from dovetail.vdaf.field import Field
from dovetail.vdaf.flp import Circuit, Gadget, cut_into_rows

__all__ = ["Bits", "Count", "Histogram", "MultihotCountVec", "SumVec", "bit_weights", "bits_of"]


def bit_weights(field: Field, largest: int) -> np.ndarray:
    """The weights of the bits of a number up to `largest`: powers of two, but the last is what is left to `largest`.

    Every choice of bits is then a number from 0 to `largest`, so that a proof that they are bits is a proof of the
    range.
    """
    bits = largest.bit_length()
    return field.elements([2**i for i in range(bits - 1)] + [largest - (2 ** (bits - 1) - 1)])


def bits_of(value: int, largest: int) -> list[int]:
    """The bits of a number from 0 to `largest`, as weighted by `bit_weights`: lowest first, then the odd top one."""
    if not 0 <= value <= largest:
        raise ValueError(f"expected a number from 0 to {largest}, got {value}")
    bits = largest.bit_length()
    top = int(value > 2 ** (bits - 1) - 1)
    rest = value - top * (largest - (2 ** (bits - 1) - 1))
    return [(rest >> i) & 1 for i in range(bits - 1)] + [top]


class Count(Circuit):
    """Accepts a vector of one element that is 0 or 1."""

    gadget = Gadget("products", 1)
    calls = 1
    length = 1
    joint = 0

    def __init__(self, field: Field) -> None:
        self.field = field
        self.size = 1

    def gadget_inputs(self, vector: np.ndarray, joint: np.ndarray, shares: int) -> np.ndarray:
        """One call of the gadget, which multiplies the bit by itself."""
        return np.repeat(vector, 2, axis=-1)[..., None, :]

    def output(self, vector: np.ndarray, joint: np.ndarray, shares: int, gadget_outputs: np.ndarray) -> np.ndarray:
        """b^2 - b, which is zero for bits alone."""
        return self.field.sub(gadget_outputs, vector)

    def encode(self, measurement: int) -> np.ndarray:
        """The measurement, 0 or 1, as a vector of one element; refuses any other."""
        return self.field.elements(bits_of(int(measurement), 1))

    def truncate(self, vector: np.ndarray) -> np.ndarray:
        """The vector itself: its one bit is what is added up."""
        return vector


class Bits(Circuit, abc.ABC):
    """Accepts vectors of `length` bits; `size` is the length of what is added up.

    The bits are checked in chunks of `chunk`, a call of the gadget each, with one element of joint randomness for each
    call.
    """

    def __init__(self, field: Field, *, size: int, length: int, chunk: int) -> None:
        _validate.at_least(1, size=size, chunk=chunk)
        self.field = field
        self.size = size
        self.length = length
        self._chunk = chunk
        self.gadget = Gadget("products", chunk)
        self.calls = -(-length // chunk)
        self.joint = self.calls

    def gadget_inputs(self, vector: np.ndarray, joint: np.ndarray, shares: int) -> np.ndarray:
        """For call c, with its own random r: the pairs (r^j b_j, b_j - 1) of its chunk, j from 1.

        (..., calls, 2 chunk).
        """
        field = self.field
        chunk = self._chunk
        bits = cut_into_rows(vector, chunk)
        powers = field.powers(joint, chunk + 1)[..., 1:]
        less = field.sub(bits, field.scalar(field.inverse(shares)))
        return np.stack([field.mul(powers, bits), less], axis=-1).reshape(*bits.shape[:-1], 2 * chunk)

    def output(self, vector: np.ndarray, joint: np.ndarray, shares: int, gadget_outputs: np.ndarray) -> np.ndarray:
        """The sum over the calls, zero if all are bits, followed by the circuit's `further` checks."""
        checks = [self.field.sum(gadget_outputs), *self.further_checks(vector, shares)]
        return np.stack(checks, axis=-1)

    def further_checks(self, vector: np.ndarray, shares: int) -> list[np.ndarray]:
        """Further values that must be zero, one array of shape (...) each; here none."""
        return []

    @abc.abstractmethod
    def encode(self, measurement: np.ndarray) -> np.ndarray:
        """The vector of `length` bits that stands for a measurement; refuses measurements out of range."""

    def truncate(self, vector: np.ndarray) -> np.ndarray:
        """What aggregators add up, `size` elements: a linear function of the vector, here its first entries."""
        return vector[..., : self.size]


class Histogram(Bits):
    """Accepts vectors of bits of which exactly one is set: a measurement is the number of a bucket."""

    outputs = 2

    def __init__(self, field: Field, *, size: int, chunk: int) -> None:
        super().__init__(field, size=size, length=size, chunk=chunk)

    def further_checks(self, vector: np.ndarray, shares: int) -> list[np.ndarray]:
        """The sum of the bits less one."""
        return [self.field.sub(self.field.sum(vector), self.field.scalar(self.field.inverse(shares)))]

    def encode(self, measurement: np.ndarray) -> np.ndarray:
        """The vector whose bit with this number is set."""
        return self.field.elements(np.arange(self.size) == int(measurement))


class MultihotCountVec(Bits):
    """At most `weight` bits of many are set: their number is part of the vector, in bits."""

    outputs = 2

    def __init__(self, field: Field, *, size: int, weight: int, chunk: int) -> None:
        _validate.in_interval(1, size, weight=weight)
        self._weight = weight
        super().__init__(field, size=size, length=size + weight.bit_length(), chunk=chunk)

    def further_checks(self, vector: np.ndarray, shares: int) -> list[np.ndarray]:
        """The number of bits that are set, less the number that the vector claims in its last entries."""
        field = self.field
        claimed = field.dot(vector[..., self.size :], bit_weights(field, self._weight))
        return [field.sub(field.sum(vector[..., : self.size]), claimed)]

    def encode(self, measurement: np.ndarray) -> np.ndarray:
        """The bits, then the bits of how many are set.

        Refuses anything but `size` bits, and more than `weight` ones.
        """
        bits = [int(bit) for bit in measurement]
        if len(bits) != self.size or not set(bits) <= {0, 1}:
            raise ValueError(f"expected {self.size} bits, got others")
        return self.field.elements(bits + bits_of(sum(bits), self._weight))


class SumVec(Bits):
    """Integers from 0 to `largest`, in bits."""

    def __init__(self, field: Field, *, size: int, largest: int, chunk: int) -> None:
        _validate.at_least(1, largest=largest)
        self._largest = largest
        super().__init__(field, size=size, length=size * largest.bit_length(), chunk=chunk)

    def encode(self, measurement: np.ndarray) -> np.ndarray:
        """The bits of every integer, one integer after the other; refuses integers out of range."""
        if len(measurement) != self.size:
            raise ValueError(f"expected {self.size} integers, got {len(measurement)}")
        return self.field.elements([bit for value in measurement for bit in bits_of(int(value), self._largest)])

    def truncate(self, vector: np.ndarray) -> np.ndarray:
        """The integers, put together from their bits: (..., size)."""
        bits = vector.reshape(*vector.shape[:-1], self.size, -1)
        return self.field.dot(bits, bit_weights(self.field, self._largest))
