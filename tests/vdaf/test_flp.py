"""Fully linear proofs: complete, sound but for bad luck, and linear in shares, whatever the circuit and the basis."""

import numpy as np
import pytest
from field_samples import elements

from dovetail.vdaf.circuits import Count, Histogram, MultihotCountVec, SumVec, bit_weights, bits_of
from dovetail.vdaf.field import FIELD64
from dovetail.vdaf.flp import FullyLinearProof, Gadget

F = FIELD64
CIRCUITS = {
    "count": (Count(F), 1, [2]),
    "histogram": (Histogram(F, size=5, chunk=2), 3, [0, 1, 1, 0, 0]),
    "multihot": (MultihotCountVec(F, size=7, weight=3, chunk=4), [1, 0, 1, 0, 0, 0, 1], [1] * 7 + [1, 1]),
    "sums": (SumVec(F, size=3, largest=5, chunk=2), [0, 5, 3], [2] * 9),
}


@pytest.fixture
def rng():
    return np.random.default_rng(25)


@pytest.fixture(params=[(name, basis) for name in CIRCUITS for basis in ("coefficients", "values")], ids="-".join)
def case(request):
    name, basis = request.param
    circuit, good, bad = CIRCUITS[name]
    return FullyLinearProof(circuit, basis), circuit.encode(good), F.elements(bad)


def shared(rng, vector, count):
    shares = [elements(rng, *vector.shape) for _ in range(count - 1)]
    last = vector
    for share in shares:
        last = F.sub(last, share)
    return [last, *shares]


def verified(rng, flp, vector, *, shares=2, spoil=None, proofs=3):
    """Whether `proofs` proofs at once are accepted, each with randomness of its own."""
    vector = np.broadcast_to(vector, (proofs, len(vector)))
    joint, query = elements(rng, proofs, flp.circuit.joint), elements(rng, proofs, flp.query_length)
    query[..., -1] = F.elements(rng.integers(2**40, 2**60, proofs))  # no root of unity
    proof = flp.prove(vector, elements(rng, proofs, flp.prove_length), joint)
    assert proof.shape == (proofs, flp.proof_length)
    if spoil is not None:
        proof[:, spoil] = F.add(proof[:, spoil], F.scalar(1))
    parts = zip(shared(rng, vector, shares), shared(rng, proof, shares), strict=True)
    total = F.zeros(proofs, flp.verifier_length)
    for part, proof_part in parts:
        total = F.add(total, flp.query(part, proof_part, query, joint, shares))
    return flp.decide(total)


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_what_a_circuit_accepts_is_proven(rng, case, shares):
    flp, good, _ = case
    assert verified(rng, flp, good, shares=shares).all()


def test_what_it_does_not_accept_is_not(rng, case):
    flp, _, bad = case
    assert len(bad) == flp.circuit.length
    assert not verified(rng, flp, bad).any()


def test_a_proof_with_one_element_changed_is_refused(rng, case):
    flp, good, _ = case
    for place in range(flp.proof_length):
        assert not verified(rng, flp, good, spoil=place, proofs=1).any()


def test_bits_with_their_weights_are_the_number():
    for largest in (1, 2, 5, 8, 255):
        weights = [int(weight) for weight in bit_weights(F, largest)]
        assert sum(weights) == largest
        for value in range(largest + 1):
            assert sum(w * b for w, b in zip(weights, bits_of(value, largest), strict=True)) == value
    with pytest.raises(ValueError, match="from 0 to 5"):
        bits_of(6, 5)


def test_gadgets_multiply_and_square():
    x = F.elements([3, 5, -2, 7])
    assert int(Gadget("products", 2)(F, x)) == 1
    assert int(Gadget("squares", 4)(F, x)) == 9 + 25 + 4 + 49


def test_what_is_added_up():
    circuit, good, _ = CIRCUITS["sums"]
    assert [int(x) for x in circuit.truncate(circuit.encode(good))] == [0, 5, 3]
    with pytest.raises(ValueError, match="expected 7 bits"):
        CIRCUITS["multihot"][0].encode([2] * 7)
