"""Proofs of norm: what is honest is accepted, and its sum comes out; what is not is refused."""

import math

import numpy as np
import pytest
from pine_reports import KEY, SMALL, accepted, hostile, of_norm, sharded, sharded_all, small_checks, two_squares
from scipy import stats

from dovetail.vdaf.field import FIELD32, FIELD64, Malencoded
from dovetail.vdaf.norms import NormLayout, random_products
from dovetail.vdaf.pine import Pine
from dovetail.vdaf.systems import SharedReport
from dovetail.vdaf.xof import SEED


@pytest.fixture
def rng():
    return np.random.default_rng(25)


@pytest.mark.parametrize("shares", [2, 3])
@pytest.mark.parametrize("dim", [1, 7, 130])
def test_honest_reports_are_accepted_and_add_up(rng, shares, dim):
    pine = Pine.shipped_variant(dim=dim, squared=500**2 + 7, shares=shares)
    vectors = [of_norm(rng, dim, 500), np.zeros(dim, np.int64), -of_norm(rng, dim, 20)]
    reports = [sharded(pine, rng, x) for x in vectors]
    assert all(accepted(pine, reports))
    total = pine.field.zeros(dim)
    for report in reports:
        for index, one in enumerate(report):
            pine.check_encoding(index, one)
            total = pine.field.add(total, pine.output_share(index, one.share))
    assert np.array_equal(pine.field.center(total), sum(vectors))


def test_the_norm_is_exact(rng):
    """Of two vectors whose squared norms differ by one, the longer one is refused."""
    pine = Pine.shipped_variant(dim=4, squared=3**2 + 4**2)
    assert accepted(pine, [sharded(pine, rng, [3, 4, 0, 0])]) == [True]
    with pytest.raises(ValueError, match="squared norm of at most 25"):
        sharded(pine, rng, [3, 4, 1, 0])
    longer = [3, 4, -1, 0]
    assert accepted(pine, [sharded(hostile(pine, c), rng, longer) for c in (None, 25, 24, 0)]) == [False] * 4


def test_a_norm_of_1_001_times_the_bound_is_refused(rng):
    pine = Pine.shipped_variant(dim=50, squared=10_000**2)
    inside, outside = of_norm(rng, 50, 10_000), of_norm(rng, 50, 10_010)
    assert np.sum(inside**2) <= 10_000**2 < np.sum(outside**2)
    reports = [sharded(hostile(pine, claimed), rng, outside) for claimed in (None, 10_000**2, 0)]
    assert accepted(pine, [sharded(pine, rng, inside), *reports]) == [True, False, False, False]


def test_coordinates_that_wrap_around_are_refused(rng):
    """Their squares add up to nothing in the field; the random products give them away."""
    a, b = two_squares()
    assert a * a + b * b == FIELD64.modulus
    cheat = hostile(SMALL)
    vectors = [[a, b, 0, 0, 0, 0], [0, -a, 0, 0, b, 0], [a, 0, 3, 0, 4, b]]
    assert not any(accepted(SMALL, [sharded(cheat, rng, x) for x in vectors]))


def test_every_random_product_notices_half_of_the_wraparounds(rng):
    """With two checks instead of a hundred at most one report in four gets through: 100 of 400, within 4.5 sigma."""
    a, b = two_squares()
    pine = small_checks(2, squared=100, checks=2)
    assert pine.layout.has_visible_wraps
    passed = sum(accepted(pine, sharded_all(hostile(pine), rng, [[a, b]] * 400)))
    assert 0 < passed < 100 + 4.5 * math.sqrt(400 * 3 / 16)


def test_a_long_vector_has_a_small_product_with_probability_one_half_at_most():
    """By enumeration, for every vector of a small field whose squares wrap around."""
    field, reach, dim = 97, 2, 3  # 4 dim reach^2 < 97
    half = range(-(field // 2), field // 2 + 1, 6)
    z = [(u, v, w) for u in (-1, 0, 0, 1) for v in (-1, 0, 0, 1) for w in (-1, 0, 0, 1)]
    worst = 0.0
    for x in ((i, j, k) for i in half for j in half for k in half):
        if sum(c * c for c in x) >= field:
            small = sum((sum(p * q for p, q in zip(x, row, strict=True)) + reach - 1) % field < 2 * reach for row in z)
            worst = max(worst, small / len(z))
    assert worst <= 0.5
    assert 4 * dim * reach**2 < field


def test_one_changed_element_anywhere_is_refused(rng):
    report = sharded(SMALL, rng, [300, -200, 100, 0, 5, -700])
    leader, helper = report
    size = len(leader.share) // 8 - 2 * SEED // 8
    places = rng.choice(size, 120, replace=False)
    changed = []
    for place in [*places, 0, SMALL.layout.dim - 1, SMALL.layout.dim, SMALL.layout.num_shared, size - 1]:
        elements = FIELD64.decode(leader.share[: -2 * SEED])
        elements[place] = FIELD64.add(elements[place : place + 1], FIELD64.scalar(int(rng.integers(1, 2**60))))[0]
        share = FIELD64.encode(elements) + leader.share[-2 * SEED :]
        changed.append([leader._replace(share=share), helper])
    assert accepted(SMALL, [report]) == [True]
    assert not any(accepted(SMALL, changed))


def test_changed_seeds_blinds_public_shares_and_nonces_are_refused(rng):
    leader, helper = sharded(SMALL, rng, [300, -200, 100, 0, 5, -700])

    def flip(data, place):
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    changed = [[leader, helper._replace(share=flip(helper.share, place))] for place in (0, 33, 70, 127)]
    blinds = len(leader.share) - 2 * SEED
    changed += [[leader._replace(share=flip(leader.share, place)), helper] for place in (blinds, blinds + SEED)]
    for place in (0, SEED, 2 * SEED, 3 * SEED):
        public = flip(leader.public, place)
        changed.append([leader._replace(public=public), helper._replace(public=public)])
    other = rng.bytes(16)
    changed += [[leader._replace(nonce=other), helper._replace(nonce=other)], [leader._replace(nonce=other), helper]]
    assert not any(accepted(SMALL, changed))


def test_seeds_that_are_swapped_are_refused(rng):
    pine = Pine.shipped_variant(dim=6, squared=1000**2, shares=3)
    first, second = (sharded(pine, rng, of_norm(rng, 6, 900)) for _ in range(2))
    mixed = [
        [first[0], second[1], first[2]],
        [second[0], first[1], first[2]],
        [first[0], first[2], first[1]],
        [first[0], first[1]._replace(share=second[1].share), first[2]],
    ]
    assert accepted(pine, [first, second]) == [True, True]
    assert not any(accepted(pine, mixed))


def test_aggregators_with_different_keys_refuse(rng):
    report = sharded(SMALL, rng, [1, 2, 3, 4, 5, 6])
    assert accepted(SMALL, [report], keys=[KEY, bytes(32)]) == [False]


def test_what_has_another_form_is_refused(rng):
    leader, helper = sharded(SMALL, rng, [1, 2, 3, 4, 5, 6])
    for index, wrong in (
        (0, leader._replace(share=leader.share[:-1])),
        (0, leader._replace(share=b"\xff" * 8 + leader.share[8:])),
        (0, leader._replace(public=b"")),
        (1, helper._replace(share=leader.share)),
    ):
        with pytest.raises(Malencoded):
            SMALL.check_encoding(index, wrong)
    verifiers = [SMALL.query(KEY, i, [one])[0].verifier for i, one in enumerate((leader, helper))]
    assert SMALL.decide([verifiers]) != [None]
    assert (
        SMALL.decide([[verifiers[0], b"\xff" * len(verifiers[1])], [verifiers[0]], [verifiers[0], b""]]) == [None] * 3
    )


def test_what_a_user_puts_in_has_its_length(rng):
    nonce, rand, vector = rng.bytes(16), rng.bytes(SMALL.rand_size), np.array([1, 2, 3, 4, 5, 6])
    assert len(SMALL.shard_all([vector], [nonce], [rand])) == 1
    for wrong in (rand[:-1], rand + b"1"):
        with pytest.raises(ValueError, match=f"expected {SMALL.rand_size} random bytes, got {len(wrong)}"):
            SMALL.shard_all([vector], [nonce], [wrong])
    for wrong in (vector[:-1], np.append(vector, 0)):
        with pytest.raises(ValueError, match="expected 6 integers, got shape"):
            SMALL.shard_all([wrong], [nonce], [rand])
    assert SMALL.query(KEY, 0, []) == [] and SMALL.decide([]) == []


def test_a_test_point_that_is_a_root_of_unity_shows_nothing(rng):
    """What is told instead is refused, and does not depend on the report."""
    flp = SMALL.flps[0][0]
    root = np.array([[FIELD64.root_of(flp.order)]], np.uint64)
    told = [
        flp.query(rng.integers(0, 99, (1, SMALL.layout.length)).astype(np.uint64), proof, root, root[:, :0], 2)
        for proof in rng.integers(0, 2**60, (2, 1, flp.proof_length)).astype(np.uint64)
    ]
    assert np.array_equal(told[0], told[1])
    assert not flp.decide(FIELD64.add(told[0], told[1])).any()


def test_what_a_share_and_a_verifier_show_is_uniform(rng):
    """For two very different vectors: the leader's share of the first integer, and the first column at the point."""
    pine = small_checks(2, squared=1000**2, checks=2)
    for x in ([1000, 0], [0, 0]):
        reports = sharded_all(pine, rng, [x] * 240)
        shares = np.array([FIELD64.decode(report[0].share[:8])[0] for report in reports])
        queried = [pine.query(KEY, i, [report[i] for report in reports]) for i in range(2)]
        told = [np.stack([FIELD64.decode(one.verifier[:16]) for one in each]) for each in queried]
        output, column = FIELD64.add(*told).T
        assert not output.any()
        for values in (shares, column):
            assert stats.chisquare(np.bincount((values >> np.uint64(60)).astype(int), minlength=16)).pvalue > 1e-4


def test_random_products_are_products(rng):
    for field, dim, checks in ((FIELD64, 4099, 3), (FIELD64, 5, 7), (FIELD32, 9, 2)):
        x = np.array([int.from_bytes(rng.bytes(16), "little") % field.modulus for _ in range(dim)], np.uint64)
        stream = rng.bytes(checks * -(-dim // 4))
        rows = np.frombuffer(stream, np.uint8).reshape(checks, -1)
        for row, found in zip(rows, random_products(field, x, stream, checks), strict=True):
            signs = [{0: -1, 1: 0, 2: 0, 3: 1}[(int(row[i // 4]) >> (2 * (i % 4))) & 3] for i in range(dim)]
            assert int(found) == sum(s * int(v) for s, v in zip(signs, x, strict=True)) % field.modulus


def test_errors_are_what_the_page_says():
    pine = Pine.shipped_variant(dim=6010, squared=60_000**2)
    assert pine.layout.prob_unlucky <= 2.0**-361
    assert NormLayout(field=FIELD64, dim=6010, squared=60_000**2).prob_unlucky <= 2.0**-100
    assert 2.0**-58 < pine.soundness_error(2.0**40) <= 2.0**-54
    assert pine.soundness_error(2.0**100) == 1.0
    assert small_checks(2, squared=100, checks=10).soundness_error(1) >= 2.0**-10


def test_an_honest_vector_fails_as_often_as_a_union_over_its_failures_allows():
    """Of n products, those that must fail are large independently of each other: the exponent is their number."""
    for checks, successes in ((10, 10), (10, 8), (30, 24)):
        layout = NormLayout(field=FIELD64, dim=6, squared=50, checks=checks, successes=successes, alpha=1.2)
        large = 2 * math.exp(-(layout.product_bound**2) / layout.squared)
        assert 1e-3 < large < 1, "or the choice of numbers shows nothing"
        failures = checks - successes + 1
        expected = math.exp(math.log(math.comb(checks, failures)) + failures * math.log(large))
        assert layout.prob_unlucky == pytest.approx(min(1.0, expected), rel=1e-6)
        exact = stats.binom.sf(failures - 1, checks, large)
        assert exact <= layout.prob_unlucky


def test_fields_that_are_too_small_are_refused():
    with pytest.raises(ValueError, match="wraparounds"):
        NormLayout(field=FIELD32, dim=10, squared=30_000**2, alpha=100.0)
    with pytest.raises(ValueError, match="third"):
        NormLayout(field=FIELD32, dim=10, squared=2**31)
    with pytest.raises(ValueError, match="every wraparound"):
        Pine.shipped_variant(dim=2**30, squared=60_000**2)


def test_reports_of_one_batch_do_not_mix(rng):
    """A refused report among accepted ones is the one that is refused."""
    reports = [sharded(SMALL, rng, of_norm(rng, 6, 800)) for _ in range(5)]
    reports[3] = [reports[3][0], SharedReport(*reports[2][1])]
    assert accepted(SMALL, reports) == [True, True, True, False, True]
