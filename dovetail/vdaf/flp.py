"""Fully linear proofs: that a circuit accepts a vector which verifiers hold in shares (Boneh et al., CRYPTO 2019).

A circuit is affine but for one gadget of degree two, which it calls several times. Put the inputs of the calls, one row
each, below a row of random seeds, and read every column as a polynomial by its values at roots of unity. The gadget
applied to these polynomials is a polynomial of at most twice the degree; it and the seeds are the *proof*. Who has the
proof evaluates the circuit without multiplying: the outputs of the gadget are values of the proof's polynomial. A
*query* at a random point shows whether that polynomial is the right one. Everything but the *decision* is linear, so
that verifiers work on shares and add up what they computed: a circuit output, a value for every column, and one of the
gadget.

All arrays may have leading axes: one proof each. The file begins with the gadget, the circuit's interface and the
proof; below them is the arithmetic of polynomials, given by their coefficients or by their values at roots of unity.
Its transforms run along the last axis but one, for all of the last axis at once: a matrix holds one polynomial per
column.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Literal

import numpy as np

from dovetail.vdaf.field import Field, pad_zeros

__all__ = [
    "Circuit",
    "FullyLinearProof",
    "Gadget",
    "coefficients_from_values",
    "cut_into_rows",
    "lagrange_weights",
    "next_power_of_two",
    "values_at_roots",
    "values_between_roots",
]


@dataclasses.dataclass(frozen=True)
class Gadget:
    """The sum of `count` products of neighbouring inputs, or of `count` squares."""

    kind: Literal["products", "squares"]
    count: int

    @property
    def arity(self) -> int:
        """How many field elements one call of the gadget takes."""
        return self.count * (2 if self.kind == "products" else 1)

    def __call__(self, field: Field, inputs: np.ndarray) -> np.ndarray:
        """The output, for inputs along the last axis."""
        if self.kind == "squares":
            return field.dot(inputs, inputs)
        return field.dot(inputs[..., 0::2], inputs[..., 1::2])


class Circuit(abc.ABC):
    """A circuit that outputs zeros for vectors that it accepts, if the joint randomness is not unlucky.

    `gadget_inputs` and `output` are affine in the vector and the called outputs, and are evaluated on one share of
    them: `shares` says how many shares there are, and the circuit's constants are divided by it, so that the shares of
    the results add up. `joint` has `joint` elements on its last axis; all other axes are proofs.
    """

    field: Field
    gadget: Gadget
    calls: int
    length: int  # of the vector
    joint: int  # elements of joint randomness
    outputs: int = 1

    @abc.abstractmethod
    def gadget_inputs(self, vector: np.ndarray, joint: np.ndarray, shares: int) -> np.ndarray:
        """The inputs of the gadget's calls, of shape (..., calls, arity)."""

    @abc.abstractmethod
    def output(self, vector: np.ndarray, joint: np.ndarray, shares: int, gadget_outputs: np.ndarray) -> np.ndarray:
        """The outputs, (..., outputs), from the vector and what the gadget's calls gave, (..., calls)."""


def cut_into_rows(inputs: np.ndarray, arity: int) -> np.ndarray:
    """Inputs along the last axis cut into rows of `arity`, the last one filled up with zeros: (..., rows, arity)."""
    return pad_zeros(inputs, -inputs.shape[-1] % arity).reshape(*inputs.shape[:-1], -1, arity)


@dataclasses.dataclass(frozen=True, eq=False)
class FullyLinearProof:
    """Proofs that a circuit accepts; `basis` is how the gadget's polynomial is written down.

    "coefficients" is the way up to draft-irtf-cfrg-vdaf-13, "values" (at the first roots of unity) the later one. In
    both, the polynomial has degree 2 `order` - 2 and is written as 2 `order` - 1 elements.
    """

    circuit: Circuit
    basis: Literal["coefficients", "values"]

    @property
    def order(self) -> int:
        """How many rows the table has, a power of two: one of seeds, one for each call, and zeros."""
        return next_power_of_two(1 + self.circuit.calls)

    @property
    def prove_length(self) -> int:
        """How many random elements a prover needs: one seed for each input of the gadget."""
        return self.circuit.gadget.arity

    @property
    def query_length(self) -> int:
        """How many random elements a query takes: a weight for each output if there are several, then the point."""
        return 1 + (self.circuit.outputs if self.circuit.outputs > 1 else 0)

    @property
    def proof_length(self) -> int:
        """Elements of a proof: the seeds, and the gadget's polynomial."""
        return self.circuit.gadget.arity + 2 * self.order - 1

    @property
    def verifier_length(self) -> int:
        """How many elements a verifier has: the circuit's output, the value of each column, and the gadget's value."""
        return 2 + self.circuit.gadget.arity

    def prove(self, vector: np.ndarray, seeds: np.ndarray, joint: np.ndarray) -> np.ndarray:
        """The proof that the circuit accepts a vector.

        `seeds` are `prove_length` random elements, `joint` the circuit's own.
        """
        field = self.circuit.field
        gadget = self.circuit.gadget
        order = self.order
        table = self._gadget_table(seeds, self.circuit.gadget_inputs(vector, joint, 1))
        halves = [gadget(field, table), gadget(field, values_between_roots(field, table))]
        polynomial = np.stack(halves, axis=-1).reshape(*table.shape[:-2], 2 * order)
        if self.basis == "coefficients":
            polynomial = coefficients_from_values(field, polynomial[..., None])[..., 0]
        return np.concatenate([seeds, polynomial[..., : 2 * order - 1]], axis=-1)

    def query(
        self, vector: np.ndarray, proof: np.ndarray, query: np.ndarray, joint: np.ndarray, shares: int
    ) -> np.ndarray:
        """One verifier's answer at a random point, computed from its share of vector and proof.

        Arguments:
            vector: this verifier's share of the vector.
            proof: its share of the proof, `proof_length` elements.
            query: `query_length` random elements, the same for all verifiers.
            joint: the joint randomness, the same for prover and verifiers.
            shares: how many verifiers there are.

        Returns: a share of the verifier, `verifier_length` elements; the sum of all shares is what `decide` takes.

        Guarantees:
            If the query point is a root of unity, the answer would reveal a gadget's output: a share of a verifier that
            `decide` always rejects is returned instead.
        """
        circuit = self.circuit
        field = self.circuit.field
        order = self.order
        seeds = proof[..., : circuit.gadget.arity]
        polynomial = proof[..., circuit.gadget.arity :]
        table = self._gadget_table(seeds, circuit.gadget_inputs(vector, joint, shares))
        point = query[..., -1]
        at_roots, at_point = self._evaluate_gadget(polynomial, point)
        called = at_roots[..., 2 : 2 * (circuit.calls + 1) : 2]
        outputs = circuit.output(vector, joint, shares, called)
        reduced = outputs[..., 0] if circuit.outputs == 1 else field.dot(query[..., :-1], outputs)
        columns = field.dot(lagrange_weights(field, point, order)[..., None], table, axis=-2)
        verifier = np.concatenate([reduced[..., None], columns, at_point[..., None]], axis=-1)
        refusal = np.zeros_like(verifier)
        refusal[..., 0] = 1
        return np.where((field.power(point, order) == 1)[..., None], refusal, verifier)

    def decide(self, verifier: np.ndarray) -> np.ndarray:
        """Whether to accept, given the sum of all shares of the verifier."""
        output = self.circuit.gadget(self.circuit.field, verifier[..., 1:-1])
        return (verifier[..., 0] == 0) & (output == verifier[..., -1])

    def _gadget_table(self, seeds: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The gadget's inputs as columns of `order` values: the seeds, one row for each call, and zeros below."""
        table = pad_zeros(rows, self.order - 1 - rows.shape[-2], before=1, axis=-2)
        table[..., 0, :] = seeds
        return table

    def _evaluate_gadget(self, polynomial: np.ndarray, point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The gadget's polynomial at the roots of unity of twice the order, and at the point."""
        field = self.circuit.field
        order = 2 * self.order
        if self.basis == "coefficients":
            at_point = field.dot(field.powers(point, order - 1), polynomial)
            return values_at_roots(field, polynomial[..., None], order)[..., 0], at_point
        root = field.root_of(order)
        weighted = field.dot(field.powers(field.scalar(root), order - 1), polynomial)
        last = field.mul(weighted, field.scalar(-root))  # for which the highest coefficient is zero
        at_roots = np.concatenate([polynomial, last[..., None]], axis=-1)
        return at_roots, field.dot(lagrange_weights(field, point, order), at_roots)


def next_power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def values_at_roots(field: Field, columns: np.ndarray, order: int) -> np.ndarray:
    """The values of polynomials at the roots of unity of this order, from their coefficients, lowest first.

    Arguments:
        columns: coefficients, (..., at most `order`, columns).
        order: a power of two.

    Returns: values at w^0, w^1, ... for w = `root_of(order)`, (..., order, columns).
    """
    return _transform(field, pad_zeros(columns, order - columns.shape[-2], axis=-2), inverse=False)


def coefficients_from_values(field: Field, columns: np.ndarray) -> np.ndarray:
    """The coefficients, lowest first, of the polynomials with these values at the roots of unity.

    a power of two of them.
    """
    order = columns.shape[-2]
    return field.mul(_transform(field, columns, inverse=True), field.scalar(field.inverse(order)))


def values_between_roots(field: Field, columns: np.ndarray) -> np.ndarray:
    """Values halfway between: at w, w^3, w^5, ... for polynomials with these values at 1, w^2, w^4, ...

    The number of values, the last axis but one, is a power of two; w is the root of unity of twice that order.
    """
    order = columns.shape[-2]
    powers = field.powers(field.scalar(field.root_of(2 * order)), order)
    twist = field.mul(powers, field.scalar(field.inverse(order)))
    turned = field.mul(_transform(field, columns, inverse=True), twist[:, None])
    return _transform(field, turned, inverse=False)


def lagrange_weights(field: Field, point: np.ndarray, order: int) -> np.ndarray:
    """Lagrange weights, along a new last axis.

    Weights times values at the roots of unity add up to the value at `point`.

    Holds for polynomials of a degree below `order`, a power of two. The polynomial that is 1 at w^k and 0 at the other
    roots is the sum of x^j w^(-jk) / order over j, so that its values at a point, for all k, are an inverse transform
    of the point's powers.
    """
    return coefficients_from_values(field, field.powers(point, order)[..., None])[..., 0]


def _transform(field: Field, columns: np.ndarray, *, inverse: bool) -> np.ndarray:
    """The number-theoretic transform of each column, not divided by the order: Cooley and Tukey, decimating in time.

    The order, the length of the last axis but one, must be a power of two.
    """
    order, width = columns.shape[-2:]
    lead = columns.shape[:-2]
    half = 1
    transform = columns[..., _reverse_bits(order), :]
    while half < order:
        pairs = transform.reshape(*lead, order // (2 * half), 2, half, width)
        even = pairs[..., 0, :, :]
        odd = pairs[..., 1, :, :]
        if half > 1:
            odd = field.mul(odd, _twiddles(field, half, inverse)[:, None])
        transform = np.stack([field.add(even, odd), field.sub(even, odd)], axis=-3)
        half *= 2
    return transform.reshape(*lead, order, width)


@functools.lru_cache(maxsize=64)
def _twiddles(field: Field, half: int, inverse: bool) -> np.ndarray:
    """The powers 0 .. half - 1 of a root of order 2 half (or of its inverse). Cached: do not write to it."""
    root = field.root_of(2 * half)
    return field.powers(field.scalar(field.inverse(root) if inverse else root), half)


@functools.lru_cache(maxsize=32)
def _reverse_bits(order: int) -> np.ndarray:
    """0 .. order - 1, each with its bits in reverse; order is a power of two. Cached: do not write to it."""
    numbers = np.zeros(1, np.int64)
    while len(numbers) < order:
        numbers = np.concatenate([2 * numbers, 2 * numbers + 1])
    return numbers
