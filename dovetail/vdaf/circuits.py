"""Circuits about bits: vectors of bits, of small weight, of small integers, and one-hot ones.

A vector of bits satisfies b (b - 1) = 0 everywhere. All these products, multiplied by powers of a random element, add
up to zero, which is one call of the gadget for every chunk of the vector.
"""

from __future__ import annotations

import abc

import numpy as np

from dovetail import _validate
from dovetail.vdaf.field import Field
from dovetail.vdaf.flp import Circuit, Gadget, rows_of

__all__ = ["Bits", "Count", "Histogram", "MultihotCountVec", "SumVec", "bits_of", "bits_weights"]


def bits_weights(field: Field, largest: int) -> np.ndarray:
    """What the bits of a number up to `largest` count: powers of two, but for the last, so that all make up it."""
    bits = largest.bit_length()
    return field.elements([2**i for i in range(bits - 1)] + [largest - (2 ** (bits - 1) - 1)])


def bits_of(value: int, largest: int) -> list[int]:
    """The bits of a number, with the weights of `bits_weights`."""
    if not 0 <= value <= largest:
        raise ValueError(f"expected a number from 0 to {largest}, got {value}")
    bits = largest.bit_length()
    top = int(value > 2 ** (bits - 1) - 1)
    rest = value - top * (largest - (2 ** (bits - 1) - 1))
    return [(rest >> i) & 1 for i in range(bits - 1)] + [top]


class Count(Circuit):
    """One bit."""

    gadget, calls, length, joint = Gadget("products", 1), 1, 1, 0

    def __init__(self, field: Field) -> None:
        self.field, self.size = field, 1

    def rows(self, vector: np.ndarray, joint: np.ndarray, shares: int) -> np.ndarray:
        """The bit, twice."""
        return np.repeat(vector, 2, axis=-1)[..., None, :]

    def output(self, vector: np.ndarray, joint: np.ndarray, shares: int, called: np.ndarray) -> np.ndarray:
        """Its square less itself."""
        return self.field.sub(called, vector)

    def encode(self, measurement: int) -> np.ndarray:
        """The bit."""
        return self.field.elements(bits_of(int(measurement), 1))

    def truncate(self, vector: np.ndarray) -> np.ndarray:
        """The bit."""
        return vector


class Bits(Circuit, abc.ABC):
    """Vectors of `length` bits in chunks; `size` is the length of what is added up."""

    def __init__(self, field: Field, *, size: int, length: int, chunk: int) -> None:
        _validate.at_least(1, size=size, chunk=chunk)
        self.field, self.size, self.length, self._chunk = field, size, length, chunk
        self.gadget, self.calls = Gadget("products", chunk), -(-length // chunk)
        self.joint = self.calls

    def rows(self, vector: np.ndarray, joint: np.ndarray, shares: int) -> np.ndarray:
        """r^j b_j and b_j - 1 for every chunk, each with its own r."""
        field, chunk = self.field, self._chunk
        bits = rows_of(vector, chunk)
        powers = field.powers(joint, chunk + 1)[..., 1:]
        less = field.sub(bits, field.scalar(field.inverse(shares)))
        return np.stack([field.mul(powers, bits), less], axis=-1).reshape(*bits.shape[:-1], 2 * chunk)

    def output(self, vector: np.ndarray, joint: np.ndarray, shares: int, called: np.ndarray) -> np.ndarray:
        """The sum of the calls; more than that where a circuit asks for more than bits."""
        checks = [self.field.sum(called), *self.further(vector, shares)]
        return np.stack(checks, axis=-1)

    def further(self, vector: np.ndarray, shares: int) -> list[np.ndarray]:
        """Other values that must be zero."""
        return []

    @abc.abstractmethod
    def encode(self, measurement: np.ndarray) -> np.ndarray:
        """The vector of a measurement."""

    def truncate(self, vector: np.ndarray) -> np.ndarray:
        """What is added up."""
        return vector[..., : self.size]


class Histogram(Bits):
    """One bit of many is set."""

    outputs = 2

    def __init__(self, field: Field, *, size: int, chunk: int) -> None:
        super().__init__(field, size=size, length=size, chunk=chunk)

    def further(self, vector: np.ndarray, shares: int) -> list[np.ndarray]:
        """Their sum less one."""
        return [self.field.sub(self.field.sum(vector), self.field.scalar(self.field.inverse(shares)))]

    def encode(self, measurement: np.ndarray) -> np.ndarray:
        """The bit with this number is set."""
        return self.field.elements(np.arange(self.size) == int(measurement))


class MultihotCountVec(Bits):
    """At most `weight` bits of many are set: their number is part of the vector, in bits."""

    outputs = 2

    def __init__(self, field: Field, *, size: int, weight: int, chunk: int) -> None:
        _validate.in_interval(1, size, weight=weight)
        self._weight = weight
        super().__init__(field, size=size, length=size + weight.bit_length(), chunk=chunk)

    def further(self, vector: np.ndarray, shares: int) -> list[np.ndarray]:
        """Their sum less the number that is claimed."""
        field = self.field
        claimed = field.dot(vector[..., self.size :], bits_weights(field, self._weight))
        return [field.sub(field.sum(vector[..., : self.size]), claimed)]

    def encode(self, measurement: np.ndarray) -> np.ndarray:
        """The bits, and how many are set."""
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
        """The bits of every integer."""
        if len(measurement) != self.size:
            raise ValueError(f"expected {self.size} integers, got {len(measurement)}")
        return self.field.elements([bit for value in measurement for bit in bits_of(int(value), self._largest)])

    def truncate(self, vector: np.ndarray) -> np.ndarray:
        """The integers."""
        bits = vector.reshape(*vector.shape[:-1], self.size, -1)
        return self.field.dot(bits, bits_weights(self.field, self._largest))
