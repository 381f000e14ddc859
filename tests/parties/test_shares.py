"""Shares: what they add up to, what they look like as bytes, and what one of them alone tells."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dovetail.parties.common import sharing
from dovetail.parties.common.wire import Malformed

VECTORS = Path(__file__).parents[1] / "golden" / "shares.json"


def values_of(length, bits, seed=0):
    return np.random.default_rng(seed).integers(0, 2**bits, length, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize("bits", range(1, 33))
def test_packing_is_what_it_says_bit_by_bit(bits):
    values = values_of(19, bits)
    text = "".join(format(int(value), f"0{bits}b")[::-1] for value in values)
    text += "0" * (-len(text) % 8)
    plain = bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))
    assert sharing.pack(values, bits) == plain
    assert np.array_equal(sharing.unpack(plain, 19, bits), values)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(("length", "bits"), [(1, 1), (8, 32), (1000, 27), (70_001, 13)])
def test_shares_add_up(count, length, bits):
    values, total = values_of(length, bits), np.zeros(length, np.uint32)
    made = sharing.shard_additively(values, bits, count)
    for index, share in enumerate(made):
        last = index == count - 1
        assert len(share) == sharing.share_size(length, bits, last=last)
        sharing.add_share(total, share, bits, last=last)
    assert np.array_equal(total & np.uint32(2**bits - 1), values)


def test_all_but_one_share_are_uniform_whatever_the_value():
    """Each of two shares of a constant: 40,000 integers below 16 by chi square, alpha 1e-4; 400 moved are seen."""
    length, bits = 40_000, 4
    for share, last in zip(sharing.shard_additively(np.zeros(length, np.uint32), bits, 2), (False, True), strict=True):
        total = np.zeros(length, np.uint32)
        sharing.add_share(total, share, bits, last=last)
        counts = np.bincount(total & np.uint32(15), minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-4
    counts[:2] += np.array([-400, 400])
    assert stats.chisquare(counts).pvalue < 1e-4


def test_seeds_are_fresh():
    first, second = (sharing.shard_additively(np.zeros(8, np.uint32), 8, 3) for _ in range(2))
    assert len({*first, *second}) == 6


@pytest.mark.parametrize("field", range(8))
def test_a_share_of_another_form_is_refused(field):
    for index, share in enumerate(sharing.shard_additively(values_of(100, 20), 20, 2)):
        changed = bytearray(share)
        changed[field] ^= 1
        with pytest.raises(Malformed, match="integers modulo 2\\^20"):
            sharing.add_share(np.zeros(100, np.uint32), bytes(changed), 20, last=index == 1)
        with pytest.raises(Malformed, match="bytes"):
            sharing.add_share(np.zeros(100, np.uint32), share[:-1], 20, last=index == 1)


def test_a_seed_is_no_packed_share_of_the_same_size():
    """32 bytes hold 8 integers of 32 bits: the form tells them apart."""
    seed, packed = sharing.shard_additively(values_of(8, 32), 32, 2)
    assert len(seed) == len(packed)
    with pytest.raises(Malformed):
        sharing.add_share(np.zeros(8, np.uint32), seed, 32, last=True)


def test_the_test_vectors_of_the_wire_format():
    """Those of docs/wire.md: a client in another language makes the same bytes."""
    for vector in json.loads(VECTORS.read_text()):
        seeds = [bytes.fromhex(text) for text in vector["seeds"]]
        values, draw = np.array(vector["values"], np.uint32), iter(seeds)
        made = sharing.shard_additively(
            values, vector["bits"], len(seeds) + 1, random_bytes=lambda size, draw=draw: next(draw)
        )
        assert [share.hex() for share in made] == vector["shares"]


def test_sums_travel_in_the_form_of_a_packed_share():
    total = values_of(33, 11)
    assert np.array_equal(sharing.decode_sum(sharing.encode_sum(total, 11), 33, 11), total)
    with pytest.raises(Malformed):
        sharing.decode_sum(sharing.encode_sum(total, 11), 34, 11)
