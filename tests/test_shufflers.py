"""The faithful shuffler permutes, pads and drops as it says; the fast one has the law of its sums."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dovetail import shufflers
from dovetail.mechanisms import BinaryRandomizedResponse, LaplaceRandomizer, RandomizedResponse
from dovetail.shufflers import Layout, Padding, Reports, SlotSums, mask_absent, pad

ALPHA = 1e-4
COIN = BinaryRandomizedResponse(1.0).blanket()
shuffle = jax.jit(shufflers.shuffle, static_argnums=1)  # one program instead of an operation at a time


def padded(pad_to, overflow="drop", blanket=COIN):
    return Padding(pad_to=pad_to, overflow=overflow, blanket=blanket)


def layout(slots, *, linkage="coordinate", padding=None, shufflers=1):
    return Layout(slots=slots, reports_per_client=slots, shufflers=shufflers, linkage=linkage, padding=padding)


def many(function, count=6000, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda key: function(key=key)))(keys))


def chi_square(counts, probs):
    counts, probs = np.asarray(counts, float), np.asarray(probs, float)
    return stats.chisquare(counts, counts.sum() * probs / probs.sum()).pvalue


def test_every_order_of_a_slot_is_equally_likely_and_slots_are_independent():
    reports = Reports(None, jnp.array([[1, 10], [2, 20], [3, 30]]), jnp.ones(3))
    seen = many(lambda key: shuffle(reports, layout(2), key=key)).value
    orders = {order: i for i, order in enumerate(itertools.permutations((1, 2, 3)))}
    first = np.array([orders[tuple(column)] for column in seen[:, :, 0]])
    second = np.array([orders[tuple(column // 10)] for column in seen[:, :, 1]])
    joint = np.bincount(6 * first + second, minlength=36)
    assert chi_square(joint, np.ones(36)) > ALPHA


def test_whole_messages_stay_whole_in_a_uniform_order():
    reports = Reports(None, jnp.array([[1, 10], [2, 20], [3, 30]]), jnp.ones(3))
    seen = many(lambda key: shuffle(reports, layout(2, linkage="vector"), key=key)).value
    np.testing.assert_array_equal(seen[:, :, 1], 10 * seen[:, :, 0])
    orders = {order: i for i, order in enumerate(itertools.permutations((1, 2, 3)))}
    counts = np.bincount([orders[tuple(row)] for row in seen[:, :, 0]], minlength=6)
    assert chi_square(counts, np.ones(6)) > ALPHA


def test_without_a_shuffler_reports_arrive_as_they_were_sent():
    reports = Reports(None, jnp.arange(6.0).reshape(3, 2), jnp.ones(3))
    np.testing.assert_array_equal(shuffle(reports, layout(2, shufflers=0), key=jax.random.key(0)).value, reports.value)


@pytest.mark.parametrize("sparse", [False, True])
def test_padding_fills_every_slot_and_loses_nothing(sparse):
    value = jnp.array([[5, 0, 7], [5, 6, 0], [0, 0, 7]])
    valid = value > 0
    reports = Reports(None, value, valid)
    if sparse:  # the same reports as (slot, value), with room to spare
        slot = jnp.array([[0, 2, 9], [1, 0, 9], [2, 9, 9]])
        reports = Reports(slot, jnp.array([[5, 7, 0], [6, 5, 0], [7, 0, 0]]), slot < 3)
    out = shuffle(reports, layout(3, padding=padded(4)), key=jax.random.key(1))
    assert out.value.shape == (4, 3)
    assert np.asarray(out.valid).all()
    got = np.asarray(out.value)
    for slot, real in enumerate(([5, 5], [6], [7, 7])):
        column = got[:, slot]
        assert sorted(column[column > 1]) == real
        assert set(column[column <= 1]) <= {0, 1}


def test_dummies_are_blanket_draws_in_uniform_places():
    reports = Reports(None, jnp.array([[9], [0]]), jnp.array([[True], [False]]))
    seen = many(lambda key: shuffle(reports, layout(1, padding=padded(3)), key=key)).value[:, :, 0]
    place = np.argmax(seen == 9, axis=1)
    bits = np.sort(np.where(seen == 9, -1, seen), axis=1)[:, 1:]
    assert chi_square(np.bincount(place, minlength=3), np.ones(3)) > ALPHA
    assert chi_square(np.bincount(bits.sum(axis=1), minlength=3), [0.25, 0.5, 0.25]) > ALPHA


def test_a_surplus_is_dropped_uniformly_or_kept():
    reports = Reports(None, jnp.array([[1], [2], [3], [4]]), jnp.ones(4))
    seen = many(lambda key: shuffle(reports, layout(1, padding=padded(2)), key=key)).value[:, :, 0]
    pairs = np.bincount(seen[:, 0] * 5 + seen[:, 1], minlength=25)[
        [a * 5 + b for a in range(1, 5) for b in range(1, 5)]
    ]
    probs = [0 if a == b else 1 for a in range(4) for b in range(4)]
    assert not pairs[np.asarray(probs) == 0].any()
    assert chi_square(pairs[np.asarray(probs) == 1], np.ones(12)) > ALPHA
    kept = shuffle(reports, layout(1, padding=padded(2, "keep")), key=jax.random.key(0))
    assert sorted(np.asarray(kept.value[:, 0])) == [1, 2, 3, 4]


def test_the_number_of_messages_does_not_depend_on_what_was_sent():
    few = Reports(None, jnp.ones((5, 3), int), jnp.zeros((5, 3), bool).at[0].set(True))
    many_ = Reports(None, jnp.ones((5, 3), int), jnp.ones((5, 3), bool))
    for reports in (few, many_):
        out = shuffle(reports, layout(3, padding=padded(4)), key=jax.random.key(0))
        np.testing.assert_array_equal(np.asarray(out.valid).sum(axis=0), [4, 4, 4])


def test_dummy_messages_look_like_real_ones():
    rng = np.random.default_rng(0)
    slots = jnp.asarray(np.stack([rng.choice(12, 3, replace=False) for _ in range(6)]))
    reports = Reports(slots, jnp.full((6, 3), 1), jnp.ones(6))
    out = shuffle(reports, layout(12, linkage="vector", padding=padded(6, "keep")), key=jax.random.key(2))
    slot, valid = np.asarray(out.slot), np.asarray(out.valid)
    lengths = valid.sum(axis=1)
    assert (lengths[lengths > 0] == 3).all()
    for row, mask in zip(slot, valid, strict=True):
        assert len(set(row[mask])) == mask.sum(), "no message holds a slot twice"
    np.testing.assert_array_equal(np.bincount(slot[valid], minlength=12), 6)


@pytest.mark.parametrize(("ones", "zeros", "pad_to"), [(3, 4, 12), (0, 0, 5), (6, 5, 7), (2, 9, 3), (7, 0, 7)])
def test_covered_sums_have_the_exact_law(ones, zeros, pad_to):
    """Binomial dummies where there is room, the hypergeometric law where there is none."""
    sums = SlotSums(jnp.array([float(ones)]), jnp.array([ones + zeros]))
    got = many(lambda key: pad(sums, padded(pad_to), key=key))
    assert (got.messages == pad_to).all()
    counts = np.bincount(got.total[:, 0].astype(int), minlength=pad_to + 1)
    support = np.arange(pad_to + 1)
    if ones + zeros <= pad_to:
        probs = stats.binom.pmf(support - ones, pad_to - ones - zeros, 0.5)
    else:
        probs = stats.hypergeom.pmf(support, ones + zeros, ones, pad_to)
    assert not counts[probs == 0].any()
    common = probs > 1e-3
    if common.sum() > 1:
        assert chi_square(counts[common], probs[common]) > ALPHA


def test_the_law_of_drops_is_not_that_of_independent_thinning():
    """A near miss is rejected: keeping each report with probability pad_to/count has a wider law."""
    sums = SlotSums(jnp.array([6.0]), jnp.array([11]))
    got = many(lambda key: pad(sums, padded(7), key=key)).total[:, 0].astype(int)
    counts = np.bincount(got, minlength=8)
    wrong = stats.binom.pmf(np.arange(8), 7, 6 / 11)
    common = wrong > 1e-3
    assert chi_square(counts[common], wrong[common]) < ALPHA


@pytest.mark.parametrize(
    ("blanket", "count"),
    [(COIN, 77), (LaplaceRandomizer(2.0).blanket(), 77), (RandomizedResponse(1.0, 5).blanket(), 40)],
    ids=["coins", "laplace", "levels"],
)
def test_sums_of_dummies_have_their_mean_and_variance(blanket, count):
    counts = jnp.array([0, 1, 31, 32, 33, count])
    draws = many(lambda key: blanket.sample_sum(counts, count, key=key), count=4000)
    n = np.asarray(counts)
    assert (draws[:, 0] == 0).all()
    error = np.abs(draws.mean(axis=0) - n * blanket.mean) / np.sqrt(np.maximum(n, 1) * blanket.variance / 4000)
    assert error.max() < 4.5
    ratio = draws.var(axis=0)[1:] / (n[1:] * blanket.variance)
    assert (np.abs(ratio - 1) < 0.15).all()


def test_one_dummy_has_the_blankets_law():
    noise = many(lambda key: LaplaceRandomizer(2.0).blanket().sample_sum(jnp.array([1]), 1, key=key))[:, 0]
    assert stats.kstest(noise, stats.laplace(0.5, 0.5).cdf).pvalue > ALPHA
    assert stats.kstest(noise, stats.laplace(0.5, 0.6).cdf).pvalue < ALPHA


def test_kept_sums_count_what_is_there():
    got = pad(SlotSums(jnp.array([5.0, 1.0]), jnp.array([9, 2])), padded(4, "keep"), key=jax.random.key(0))
    np.testing.assert_array_equal(got.messages, [9, 4])
    assert float(got.total[0]) == 5.0


def test_only_sums_of_bits_can_lose_a_surplus():
    with pytest.raises(ValueError, match="expected binary reports"):
        pad(
            SlotSums(jnp.zeros(1), jnp.array([9])),
            padded(4, blanket=LaplaceRandomizer(1.0).blanket()),
            key=jax.random.key(0),
        )


def test_absent_clients_are_masked_whole():
    reports = Reports(None, jnp.ones((3, 2)), jnp.ones((3, 2), bool))
    np.testing.assert_array_equal(mask_absent(reports, jnp.array([True, False, True])).valid.sum(axis=1), [2, 0, 2])


@pytest.mark.parametrize("linked", [False, True])
def test_reports_that_are_not_valid_count_nowhere_though_their_slots_are_in_range(linked):
    slot = jnp.array([[0, 2], [1, 2], [0, 1]])
    reports = Reports(slot, jnp.ones((3, 2)), jnp.array([[True, False], [True, True], [False, False]]))
    layout = Layout(slots=3, reports_per_client=2, shufflers=1, **({"linkage": "vector"} if linked else {}))
    got = shufflers.shuffle(reports, layout, key=jax.random.key(0))
    if got.slot is None:
        counts = np.asarray(got.valid).sum(axis=0)
    else:
        counts = np.bincount(np.asarray(got.slot)[np.asarray(got.valid)], minlength=3)
    np.testing.assert_array_equal(counts, [1, 1, 1])
