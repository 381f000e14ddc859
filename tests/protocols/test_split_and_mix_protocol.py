import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dovetail import accounting
from dovetail.accounting import gaussian
from dovetail.accounting.releases import split_and_mix
from dovetail.events import Everyone
from dovetail.mechanisms import skellam
from dovetail.protocols import Cohort
from dovetail.protocols.sums.split_and_mix import SplitAndMixProtocol
from dovetail.shufflers import deliver, mask_absent, shuffle
from dovetail.statements import Neighbors, NotApplicable, Trust

QUICK = {"xla_backend_optimization_level": "0"}  # compiles three times as fast
USERS, DIM = 31, 3
COHORT = Cohort(participation=Everyone(), size=USERS, min_size=16, colluders=2)
PROTOCOL = SplitAndMixProtocol(clip_norm=0.5, noise_multiplier=2.0, shares=4).settle(COHORT, DIM)
QUIET = SplitAndMixProtocol(clip_norm=0.5, noise_multiplier=1e-12, shares=4, scale=2048.0).settle(COHORT, DIM)
UPDATES = jnp.asarray(np.random.default_rng(0).normal(size=(USERS, DIM)) * 0.4, jnp.float32)
SHORT = jnp.clip(UPDATES, -0.28, 0.28)  # none is clipped further: exact in float32, as the scale is a power of two
EVERYONE = jnp.ones(USERS, bool)


def event_of(protocol, cohort=COHORT, dim=DIM):
    return protocol.view(cohort, dim, neighbors=Neighbors.REPLACE_ONE).round.mechanism


def keys_of(key, count=USERS):
    return jax.random.split(key, count)


def by_messages(protocol, updates, present, key):
    reports = jax.vmap(lambda x, key: protocol.randomize(x, (), key=key))(updates, keys_of(key))
    messages = shuffle(mask_absent(reports, present), protocol.layout(DIM), key=key)
    return protocol.tally(messages, DIM), reports


def by_sums(protocol, updates, present, key):
    collected = protocol.collect(updates, present, (), keys=keys_of(key))
    return protocol.finish(collected, key=key), ()


def by_total(protocol, updates, present, key):
    scale = protocol.scaling(jnp.linalg.norm(updates, axis=1), ()) * present
    total = jnp.einsum("c,cd->d", scale, updates)
    return protocol.tally_of_sum(total, present.sum().astype(jnp.float32), key=key), ()


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def rounds_of(path, protocol, updates, present, keys):
    """The estimated sum, once for each key, and the reports."""
    tallies, reports = jax.lax.map(lambda key: path(protocol, updates, present, key), keys)
    return USERS * jax.vmap(lambda tally: protocol.estimate(tally, USERS, (), key=keys[0])[0])(tallies), reports


def keys_for(protocol):
    return keys_of(jax.random.key(1), 400 if protocol is QUIET else 3000)


def all_rounds(path, protocol, updates, present=EVERYONE):
    return rounds_of(path, protocol, jnp.asarray(updates, jnp.float32), present, keys_for(protocol))


def drawn(path, protocol, updates=UPDATES, present=EVERYONE):
    """The estimated sum in 3000 rounds; in 400 without noise."""
    return np.asarray(all_rounds(path, protocol, updates, present)[0], np.float64)


def quiet_reports(updates=UPDATES):
    return all_rounds(by_messages, QUIET, updates)[1]


def clipped(updates):
    updates = np.asarray(updates, np.float64)
    return updates * np.minimum(1, 0.5 / np.linalg.norm(updates, axis=1, keepdims=True))


# ---------------------------------------------------------------- the paths


def test_without_noise_messages_decode_to_the_sum_of_encoded_updates():
    def encoded(key):
        return jax.vmap(lambda x, k: QUIET.encoding(DIM)(x, key=jax.random.split(k, 3)[0]))(SHORT, keys_of(key))

    whole = np.asarray(jax.jit(jax.vmap(encoded), compiler_options=QUICK)(keys_for(QUIET)), np.int64).sum(axis=1)
    for path in (by_messages, by_sums):
        np.testing.assert_array_equal(drawn(path, QUIET, SHORT) * QUIET.scale, whole)
        found = drawn(path, QUIET)
        np.testing.assert_allclose(found, [clipped(UPDATES).sum(axis=0)] * 400, atol=USERS / QUIET.scale)


def test_every_path_has_the_law_of_the_messages():
    """Mean (z-test) and variance (3 coordinates x 3000 rounds: a tenth off would show by 4.7 deviations)."""
    truth = clipped(UPDATES).sum(axis=0)
    noise = USERS * PROTOCOL.part_variance / PROTOCOL.scale**2
    rounding = USERS / 4 / PROTOCOL.scale**2
    for path in (by_messages, by_sums, by_total):
        found = drawn(path, PROTOCOL)
        assert np.abs(found.mean(axis=0) - truth).max() < 5 * math.sqrt((noise + rounding) / 3000)
        assert found.var(axis=0).mean() == pytest.approx(noise + rounding, rel=0.07)


def test_the_sum_path_errs_by_no_less_than_rounding_does():
    """Updates halfway between integers are the worst, and theirs is the variance that is drawn (1200 draws, 10 %)."""
    halfway = jnp.full((USERS, DIM), 100.5 / QUIET.scale)
    worst, other = drawn(by_sums, QUIET, halfway), drawn(by_sums, QUIET, halfway - 0.3 / QUIET.scale)
    total = drawn(by_total, QUIET, halfway)
    assert worst.var() * QUIET.scale**2 == pytest.approx(USERS / 4, rel=0.15)
    assert other.var() < 0.8 * worst.var()
    assert total.var() * QUIET.scale**2 == pytest.approx(USERS / 4 + 1 / 12, rel=0.15)


def test_the_tally_adds_up_over_any_split_and_any_order():
    reports = jax.tree.map(lambda leaf: leaf[0], quiet_reports())
    whole = QUIET.tally(deliver(reports), DIM)
    order = np.random.default_rng(1).permutation(USERS)
    parts = [jax.tree.map(lambda leaf, s=s: leaf[order[s]], reports) for s in (slice(12), slice(12, None))]
    np.testing.assert_array_equal(sum(QUIET.tally(deliver(part), DIM) for part in parts), whole)


def test_a_client_that_is_absent_is_left_out_with_all_its_shares():
    present = jnp.arange(USERS) < 16
    assert quiet_reports().valid.shape == (400, USERS)
    truth = clipped(UPDATES)[:16].sum(axis=0)
    for path in (by_messages, by_sums):
        found = drawn(path, QUIET, present=present)
        np.testing.assert_allclose(found, [truth] * 400, atol=USERS / QUIET.scale)
    noisy = drawn(by_total, PROTOCOL, present=present)
    assert np.abs(noisy.mean(axis=0) - truth).max() < 5 * noisy.std() / math.sqrt(3000)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_wrap_around_and_larger_ones_do(sign):
    assert 2 * USERS * 0.5 * QUIET.scale > 0.9 * QUIET.modulus, "the modulus is nearly filled"
    updates = jnp.zeros((USERS, DIM)).at[:, 1].set(sign * 1e6)
    for path in (by_messages, by_sums):
        np.testing.assert_allclose(drawn(path, QUIET, updates), [[0, sign * USERS * 0.5, 0]] * 400, atol=0.5)
    twice = skellam.to_residues(jnp.full(1, sign * 2 * round(USERS * 0.5 * QUIET.scale), jnp.int32))
    assert abs(float(QUIET.estimate(twice, 1, (), key=jax.random.key(0))[0][0])) < USERS * 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_poisoned_update_counts_as_zero(bad):
    poisoned, zeroed = UPDATES.at[0, 1].set(bad), UPDATES.at[0].set(0.0)
    for path in (by_messages, by_sums):
        np.testing.assert_array_equal(drawn(path, QUIET, poisoned), drawn(path, QUIET, zeroed))
    assert float(PROTOCOL.scaling(jnp.array(bad), ())) == 0


# ---------------------------------------------------------------- what is seen


def test_shares_of_one_client_are_uniform_but_for_their_sum():
    """Chi-square over 16 cells for each of 12 shares, two opposite updates; what all slots but one show is the same."""
    for update in (1.0, -1.0):
        value = np.asarray(quiet_reports(jnp.full((USERS, DIM), update)).value)
        assert value.shape == (400, USERS, DIM * 4)
        value = value.reshape(-1, DIM * 4)
        assert value.max() < QUIET.modulus
        cells = value // (QUIET.modulus // 16)
        assert min(stats.chisquare(np.bincount(column, minlength=16)).pvalue for column in cells.T) > 1e-3 / 12
        first = value.reshape(-1, DIM, 4)[:, 0]
        for left_out in range(4):
            others = np.delete(first, left_out, axis=1).sum(axis=1, dtype=np.uint64) % QUIET.modulus
            assert stats.chisquare(np.bincount(others // (QUIET.modulus // 16), minlength=16)).pvalue > 1e-3 / 4
        whole = first.sum(axis=1, dtype=np.uint64) % QUIET.modulus
        assert len(np.unique(whole)) <= 2, "all four give it away"


def test_every_slot_is_permuted_on_its_own():
    layout = PROTOCOL.layout(DIM)
    assert (layout.slots, layout.reports_per_client, layout.shufflers) == (DIM * 4, DIM * 4, 2)
    reports = jax.tree.map(lambda leaf: leaf[0], quiet_reports())
    mixed = shuffle(reports, layout, key=jax.random.key(1))
    np.testing.assert_array_equal(np.sort(mixed.value, axis=0), np.sort(reports.value, axis=0))
    places = [np.argsort(np.argsort(column)).tolist() for column in np.asarray(mixed.value).T]
    before = [np.argsort(np.argsort(column)).tolist() for column in np.asarray(reports.value).T]
    assert len({tuple(np.argsort(p)[b].tolist()) for p, b in zip(places, before, strict=True)}) == DIM * 4


# ---------------------------------------------------------------- noise and privacy


def test_the_declared_noise_is_that_of_the_enforced_minimum_of_honest_clients():
    event = event_of(PROTOCOL)
    assert event.honest == PROTOCOL.honest == 14
    assert event.noise_variance == pytest.approx((2.0 * 0.5 * PROTOCOL.scale) ** 2)
    still = jnp.zeros_like(UPDATES)
    for honest in (14, 16, USERS):
        measured = drawn(by_messages, PROTOCOL, still, jnp.arange(USERS) < honest).var() * PROTOCOL.scale**2
        assert measured == pytest.approx(event.noise_variance * honest / 14, rel=0.06), "9000 draws, 4 deviations"
        assert measured > 0.94 * event.noise_variance
    assert PROTOCOL.noise_std(USERS, DIM) == pytest.approx(drawn(by_sums, PROTOCOL, still).std() / USERS, rel=0.03)


def test_integers_are_wide_enough_for_the_noise_of_everybody_who_may_come():
    """Each honest client adds its part of the noise that a minimum of honest ones owes; more come, and add more."""
    std = PROTOCOL.noise_multiplier * PROTOCOL.clip_norm
    everybody = std * math.sqrt(USERS / 14)  # 16 at least, of whom 2 collude
    assert (PROTOCOL.scale, PROTOCOL.modulus) == skellam.choose_resolution(
        clip_norm=PROTOCOL.clip_norm, dim=DIM, num_users=USERS, noise_std=everybody
    )
    variance = PROTOCOL.part_variance * USERS
    assert math.sqrt(variance) == pytest.approx(everybody * PROTOCOL.scale)


def test_a_smaller_crowd_than_settled_for_is_declared_with_less_noise():
    fewer = dataclasses.replace(COHORT, min_size=9)
    assert event_of(PROTOCOL, fewer).noise_variance == pytest.approx(event_of(PROTOCOL).noise_variance * 7 / 14)


def test_no_two_encoded_updates_are_farther_apart_than_presumed():
    event = event_of(QUIET)
    norm = split_and_mix.rounded_norm(
        clip_norm=event.clip_norm, scale=event.scale, coordinates=DIM, rounding_tail=event.rounding_tail
    )
    ends = [drawn(by_sums, QUIET, jnp.zeros_like(UPDATES).at[0].set(sign * 1e6)) for sign in (1, -1)]
    gaps = np.linalg.norm(ends[0] - ends[1], axis=1) * QUIET.scale
    assert norm * 1.9 < gaps.max() <= 2 * norm


def test_calibrated_to_a_target_the_noise_is_nearly_that_of_a_curator():
    cohort = Cohort(participation=Everyone(), size=1000, min_size=1000)

    def settled(noise):
        return SplitAndMixProtocol(clip_norm=1.0).with_noise(noise).settle(cohort, 7850)

    def eps_at(noise):
        view = settled(noise).view(cohort, 7850, neighbors=Neighbors.REPLACE_ONE)
        return accounting.bound([view.round], delta=5e-6).eps

    noise = accounting.smallest_noise(eps_at, eps=1.0, tolerance=1e-4)
    curator = accounting.smallest_noise(lambda std: gaussian.eps_of(2 / std, delta=5e-6), eps=1.0)
    assert curator < noise < 1.09 * curator
    protocol = settled(noise)
    known = split_and_mix.calibrate(num_users=1000, coordinates=7850, clip_norm=1.0, eps=1.0, delta=5e-6)
    assert protocol.modulus == known.modulus == 2**22
    assert known.shares <= protocol.shares <= known.shares + 3, "what it costs not to know delta"
    assert (noise * protocol.scale) ** 2 == pytest.approx(known.noise_variance, rel=0.02)


def test_the_statement_says_who_is_trusted_with_what():
    view = PROTOCOL.view(COHORT, DIM, neighbors=Neighbors.REPLACE_ONE)
    assert view.scope.trust is Trust.SHUFFLE
    assert view.scope.adversary == "analyzer"
    said = " | ".join(view.scope.assumptions)
    promised = (
        "none holds all of them",
        "at least 14 honest users",
        "at most 2 fake or colluding",
        "whose shares all arrived",
    )
    for words in (*promised, "biases", "whoever enrols users is trusted", "do not all collude, with or without"):
        assert words in said
    assert "is removed" not in said


def test_under_add_remove_it_says_who_is_removed_and_what_stays():
    replaced, removed = (PROTOCOL.view(COHORT, DIM, neighbors=relation) for relation in Neighbors)
    assert removed.round.mechanism.neighbors is removed.scope.neighbors is Neighbors.ADD_REMOVE
    assert removed.round == dataclasses.replace(
        replaced.round, mechanism=dataclasses.replace(replaced.round.mechanism, neighbors=Neighbors.ADD_REMOVE)
    )
    (said,) = set(removed.scope.assumptions) - set(replaced.scope.assumptions)
    assert "stays on the public roster and uploads all shares of zero with its part of the noise" in said


def test_zero_is_encoded_as_zero_and_nothing_is_longer_than_the_norm():
    """What the sensitivity under add-remove rests on."""
    encode = PROTOCOL.encoding(DIM)
    keys = jax.random.split(jax.random.key(0), 200)
    assert not np.any(jax.vmap(lambda key: encode(jnp.zeros(DIM), key=key))(keys))
    far = jax.vmap(lambda key: encode(1e3 * jax.random.normal(key, (DIM,)), key=key))(keys)
    lengths = np.linalg.norm(np.asarray(far, np.float64), axis=1)
    assert encode.clip_norm * encode.scale < lengths.max() <= encode.norm


@pytest.mark.parametrize(("shufflers", "colluding"), [(2, 1), (3, 1), (3, 2), (5, 2)])
def test_shufflers_that_collude_are_made_up_for_with_shares(shufflers, colluding):
    cohort = Cohort(participation=Everyone(), size=500, min_size=500)
    alone = SplitAndMixProtocol(clip_norm=1.0, noise_multiplier=5.0, shufflers=shufflers).settle(cohort, 10)
    wary = dataclasses.replace(alone, shares=None, colluding_shufflers=colluding).settle(cohort, 10)
    event = event_of(wary, cohort, 10)
    holders = np.arange(wary.shares) % shufflers
    worst = sum(sorted(np.bincount(holders).tolist())[-colluding:])
    assert event.colluding_slots == worst
    assert event.slots >= alone.shares
    fewer = dataclasses.replace(wary, shares=wary.shares - 1)
    assert event_of(fewer, cohort, 10).slots < alone.shares
    assert "of the shufflers" in wary.view(cohort, 10, neighbors=Neighbors.REPLACE_ONE).scope.adversary


def test_shares_hide_as_well_as_asked_for():
    cohort = Cohort(participation=Everyone(), size=500, min_size=400, colluders=10)
    for error in (1e-6, 1e-12):
        protocol = SplitAndMixProtocol(clip_norm=1.0, noise_multiplier=5.0, mixing_error=error).settle(cohort, 10)

        def distance(shares, protocol=protocol):
            return 10 * split_and_mix.mixing_distance(num_users=390, slots=shares, modulus=protocol.modulus)

        assert distance(protocol.shares) <= error < distance(protocol.shares - 1)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"shufflers": 1}, r"expected shufflers >= 2 \(one shuffler would hold all shares\), got 1"),
        ({"shufflers": 5, "shares": 4}, "expected at least one share for each of 5 shufflers, got shares=4"),
        ({"colluding_shufflers": 2}, "expected 0 <= colluding_shufflers <= 1"),
        ({"clip_norm": 0.0}, "expected clip_norm > 0"),
        ({"noise_multiplier": 0.0}, "expected noise_multiplier > 0"),
        ({"scale": -1.0}, "expected scale > 0"),
        ({"shares": 2.5}, "expected shares to be a whole number"),
        ({"mixing_error": 0.0}, "expected 0 < mixing_error < 1"),
        ({"honest": 1}, "expected honest >= 2"),
        ({"honest": 15}, r"expected 2 to 14 honest users \(min_size - colluders\), got 15"),
        ({"modulus": 1024}, "expected modulus >= .* for the sum of 31 users"),
        ({"modulus": 1000}, "expected modulus to be a power of two"),
        ({"noise_multiplier": None}, "expected noise_multiplier to be set or calibrated"),
    ],
)
def test_bad_parameters_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        SplitAndMixProtocol(**{"clip_norm": 0.5, "noise_multiplier": 2.0, **given}).settle(COHORT, DIM)


def test_too_few_users_are_not_certified():
    with pytest.raises(NotApplicable, match="not certified: 4 honest users need more than 32 shares"):
        SplitAndMixProtocol(clip_norm=0.5, noise_multiplier=2.0).settle(dataclasses.replace(COHORT, min_size=6), DIM)
    with pytest.raises(ValueError, match="expected 2 to 1 honest users"):
        PROTOCOL.settle(dataclasses.replace(COHORT, min_size=3), DIM)
    with pytest.raises(ValueError, match=r"expected cohort\.min_size >= 2"):
        PROTOCOL.settle(dataclasses.replace(COHORT, min_size=0), DIM)


def test_what_is_not_settled_cannot_run():
    with pytest.raises(ValueError, match="expected scale to be given or settled"):
        SplitAndMixProtocol(clip_norm=1.0, noise_multiplier=1.0).randomize(jnp.zeros(3), (), key=jax.random.key(0))
    assert not SplitAndMixProtocol(clip_norm=1.0).is_calibrated
    assert SplitAndMixProtocol(clip_norm=1.0).with_noise(3.0).noise_multiplier == 3.0
