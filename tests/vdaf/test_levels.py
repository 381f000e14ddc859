"""Proofs that small integers are in range."""

import dataclasses

import numpy as np
import pytest
from pine_reports import KEY, accepted

from dovetail.vdaf.circuits import SumVec
from dovetail.vdaf.field import FIELD64, Malencoded
from dovetail.vdaf.levels import LevelProofs
from dovetail.vdaf.systems import SharedReport
from dovetail.vdaf.xof import SEED


@pytest.fixture
def rng():
    return np.random.default_rng(25)


def sharded(proofs, rng, integers):
    nonce = rng.bytes(16)
    public, shares = proofs.shard(np.asarray(integers), nonce, rng.bytes(proofs.rand_size))
    return [SharedReport(nonce, public, share) for share in shares]


class AnyBits(SumVec):
    """Encodes bits that are none."""

    def encode(self, measurement):
        return self.field.elements(measurement)


def hostile(proofs, rng, bits):
    circuit = AnyBits(FIELD64, size=proofs.prio3.valid_type.size, largest=1, chunk=proofs.chunk)
    object.__setattr__(lying := type(proofs.prio3)(**vars(proofs.prio3)), "valid_type", circuit)
    nonce = rng.bytes(16)
    public, shares = lying.shard(bits, nonce, rng.bytes(proofs.rand_size))
    return [SharedReport(nonce, public, share) for share in shares]


@pytest.mark.parametrize(("largest", "shares"), [(1, 2), (1, 3), (6, 2)])
def test_levels_in_range_are_accepted_and_add_up(rng, largest, shares):
    proofs = LevelProofs.shipped_variant(size=40, largest=largest, shares=shares)
    vectors = [rng.integers(0, largest + 1, 40) for _ in range(3)]
    reports = [sharded(proofs, rng, x) for x in vectors]
    assert all(accepted(proofs, reports))
    total = FIELD64.zeros(40)
    for report in reports:
        for index, one in enumerate(report):
            proofs.check_encoding(index, one)
            assert len(one.share) == proofs.share_size(index)
            total = FIELD64.add(total, proofs.output_share(index, one.share))
    assert np.array_equal(FIELD64.center(total), sum(vectors))


@pytest.mark.parametrize("wrong", [2, -1, 1000, 2**62])
def test_one_level_out_of_range_is_refused(rng, wrong):
    proofs = LevelProofs.shipped_variant(size=30, largest=1)
    with pytest.raises(ValueError, match="from 0 to 1"):
        sharded(proofs, rng, [wrong] + [0] * 29)
    assert accepted(proofs, [hostile(proofs, rng, [wrong] + [0] * 29)]) == [False]
    assert accepted(proofs, [hostile(proofs, rng, [1] + [0] * 29)]) == [True]


def test_changed_reports_are_refused(rng):
    proofs = LevelProofs.shipped_variant(size=12, largest=1)
    leader, helper = sharded(proofs, rng, [1, 0] * 6)
    changed = []
    for place in range(len(leader.share) // 8 - SEED // 8):
        elements = FIELD64.decode(leader.share[:-SEED])
        elements[place] = FIELD64.add(elements[place : place + 1], FIELD64.scalar(1))[0]
        changed.append([leader._replace(share=FIELD64.encode(elements) + leader.share[-SEED:]), helper])
    for place in range(0, len(helper.share), 7):
        share = helper.share[:place] + bytes([helper.share[place] ^ 4]) + helper.share[place + 1 :]
        changed.append([leader, helper._replace(share=share)])
    for place in (0, 40):
        public = leader.public[:place] + bytes([leader.public[place] ^ 4]) + leader.public[place + 1 :]
        changed.append([leader._replace(public=public), helper._replace(public=public)])
    changed.append([leader._replace(nonce=bytes(16)), helper._replace(nonce=bytes(16))])
    assert not any(accepted(proofs, changed))


def test_what_has_another_form_is_refused(rng):
    proofs = LevelProofs.shipped_variant(size=12, largest=1)
    leader, helper = sharded(proofs, rng, [1, 0] * 6)
    for index, wrong in (
        (0, leader._replace(share=leader.share[1:])),
        (0, leader._replace(share=b"\xff" * 8 + leader.share[8:])),
        (1, helper._replace(public=b"")),
        (1, leader),
    ):
        with pytest.raises(Malencoded):
            proofs.check_encoding(index, wrong)
    told = [proofs.query(KEY, i, [one])[0].verifier for i, one in enumerate((leader, helper))]
    assert len(told[0]) == proofs.verifier_size
    assert proofs.public_share_of(told) == leader.public
    assert proofs.decide([[told[0], b""], [told[0]], [told[0], b"\xff" * len(told[1])]]) == [None] * 3


def test_what_a_user_or_an_aggregator_puts_in_has_its_length(rng):
    """A share with too few random bytes behind it is not uniform, and is not made."""
    proofs = LevelProofs.shipped_variant(size=4, largest=1)
    nonce, rand = rng.bytes(16), rng.bytes(proofs.rand_size)
    proofs.shard(np.ones(4, int), nonce, rand)
    for wrong in ((nonce, rand[:-1]), (nonce, rand + b"1"), (nonce[:-1], rand), (nonce + b"1", rand)):
        with pytest.raises(ValueError, match=f"expected {proofs.rand_size} random bytes and a nonce of 16"):
            proofs.shard(np.ones(4, int), *wrong)
    for size in (3, 5):
        with pytest.raises(ValueError, match=f"expected 4 integers, got {size}"):
            proofs.shard(np.ones(size, int), nonce, rand)
    report = sharded(proofs, rng, [0, 1, 1, 0])
    told = [proofs.query(KEY, index, [one])[0].verifier for index, one in enumerate(report)]
    inner = [one[: len(one)] for one in told]
    assert proofs.decide([told]) != [None]
    for wrong in ([inner[0] + b"1", inner[1]], [inner[0], inner[1][:-1]], [inner[0]], [*inner, inner[1]]):
        assert proofs.decide([wrong]) == [None]
    assert proofs.decide([]) == []
    assert proofs.query(KEY, 0, []) == []


def test_the_error_is_what_the_page_says():
    proofs = LevelProofs.shipped_variant(size=7850, largest=1)
    assert proofs.zero_knowledge_error == 0.0
    assert 2.0**-70 < proofs.soundness_error(2.0**45) < 2.0**-63


@pytest.mark.parametrize("wrong", [{"proofs": 0}, {"proofs": 256}, {"shares": 1}, {"shares": 256}])
def test_numbers_of_proofs_and_shares_fit_in_a_byte(wrong):
    """No proofs at all would accept everything."""
    known = LevelProofs.shipped_variant(size=4, largest=1).prio3
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"expected .*{name}.* 255.*, got {name}={value}"):
        dataclasses.replace(known, **wrong)
