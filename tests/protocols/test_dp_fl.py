"""Client-level privacy: where updates are clipped, how much noise each round has, and what may follow from data."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import later
from scipy import optimize, stats

from dovetail import protocols
from dovetail.accounting import certify
from dovetail.events import Everyone, FixedSize, Gaussian, NonPrivate, Poisson
from dovetail.protocols import Cohort
from dovetail.protocols.curator.dp_fl import Clipping, DpFl
from dovetail.shufflers import deliver, mask_absent
from dovetail.statements import Neighbors

DIM, CLIENTS = 20, 200
COHORT = protocols.Cohort(participation=Poisson(prob=0.1), size=CLIENTS)


def dp_fl(**parameters):
    return protocols.build("dp_fl", {"noise_multiplier": 1.5, **parameters}).settle(COHORT, DIM)


def state_of(clip_norm, noise_scale=1.0):
    return Clipping(jnp.float32(clip_norm), jnp.float32(noise_scale))


@functools.partial(jax.jit, static_argnums=0)
def tally(protocol, updates, state, present=True):
    reports = jax.vmap(lambda x: protocol.randomize(x, state, key=jax.random.key(0)))(updates.astype(jnp.float32))
    return protocol.tally(deliver(mask_absent(reports, jnp.broadcast_to(present, len(updates)))), DIM)


@functools.partial(jax.jit, static_argnums=(0, 2))
def estimate(protocol, total, size, state, *, key):
    return protocol.estimate(total, size, state, key=key)


def with_norms(norms, seed=0):
    direction = np.random.default_rng(seed).normal(size=(len(norms), DIM))
    return direction / np.linalg.norm(direction, axis=1, keepdims=True) * np.asarray(norms)[:, None]


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("first", [0.05, 20.0])
def test_the_adaptive_clip_norm_finds_the_quantile(quantile, first):
    """From below and from above; at the end the share below is within what noise on 200 users leaves."""
    protocol = dp_fl(clip="adaptive", clip_norm=first, quantile=quantile)
    norms = np.random.default_rng(1).lognormal(size=CLIENTS)
    updates = jnp.asarray(with_norms(norms), jnp.float32)

    def step(state, key):
        return estimate(protocol, tally(protocol, updates, state), CLIENTS, state, key=key)[1], state.clip_norm

    _, clips = jax.jit(lambda keys: jax.lax.scan(step, protocol.init(DIM), keys))(
        jax.random.split(jax.random.key(0), 200)
    )
    settled = np.asarray(clips)[150:]
    assert np.mean([(norms <= clip).mean() for clip in settled]) == pytest.approx(quantile, abs=0.03)
    assert abs(float(clips[0]) / first - 1) < 1e-6


def test_the_adaptive_state_follows_the_noised_count_alone():
    """Other updates, as many below the clip norm, the same noise: the same next clip norm. One more above moves it."""
    protocol = dp_fl(clip="adaptive", clip_norm=1.0)
    one, other = with_norms([0.5] * 120 + [3.0] * 80), with_norms([1e-3] * 120 + [1e5] * 80, seed=5)
    moved = with_norms([0.5] * 119 + [3.0] * 81)
    state, key = protocol.init(DIM), jax.random.key(3)
    ends = [estimate(protocol, tally(protocol, x, state), CLIENTS, state, key=key)[1] for x in (one, other, moved)]
    assert float(ends[0].clip_norm) == float(ends[1].clip_norm) != float(ends[2].clip_norm)


def test_noise_on_the_count_is_what_the_event_is_charged_for():
    """Read back from the next clip norm over 4000 keys: relative standard error 1.1%, tolerance 4.5 of it."""
    protocol = dp_fl(clip="adaptive", clip_norm=1.0)
    assert protocol.std_count == 10.0, "a twentieth of the planned size"
    state, total = protocol.init(DIM), jnp.zeros(DIM + 1)
    keys = jax.random.split(jax.random.key(0), 4000)
    estimates, after = jax.vmap(lambda key: estimate(protocol, total, CLIENTS, state, key=key))(keys)
    below = 0.5 - np.log(np.asarray(after.clip_norm)) / protocol.clip_rate
    drawn = (below - protocol.quantile) * CLIENTS
    assert drawn.std() == pytest.approx(protocol.std_count, rel=0.05)
    assert abs(drawn.mean()) < 4.5 * protocol.std_count / math.sqrt(4000)
    mixed = np.corrcoef(drawn, np.asarray(estimates).T)[0, 1:]
    assert np.abs(mixed).max() < 4.5 / math.sqrt(4000), "independent of the noise on the sum"


@pytest.mark.parametrize("neighbors", list(Neighbors))
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_the_count_is_paid_for_beside_the_sum(neighbors, scale):
    """mu^2 adds up; the count's part does not shrink when a schedule adds noise to the sum."""
    protocol = dp_fl(clip="adaptive", clip_norm=0.3)
    cohort = dataclasses.replace(COHORT, noise_scale=scale)
    event = protocol.view(cohort, DIM, neighbors=neighbors).round.mechanism
    reach = 2 if neighbors is Neighbors.REPLACE_ONE else 1
    squared = (reach / (1.5 * scale)) ** 2 + (reach / 2 / protocol.std_count) ** 2
    assert event.mu**2 == pytest.approx(squared, rel=1e-12)
    assert event.mu**2 >= squared * (1 - 1e-15)


@pytest.mark.parametrize("std_count", [0.5, 3.0, 40.0])
def test_what_the_count_costs_is_said_as_it_is_charged(std_count):
    """Its share of mu^2: what is left of it without the sum's."""
    protocol = dp_fl(clip="adaptive", clip_norm=0.3, std_count=std_count)
    view = protocol.view(COHORT, DIM, neighbors=Neighbors.ADD_REMOVE)
    share = 1 - (1 / 1.5) ** 2 / view.round.mechanism.mu**2
    (said,) = [line for line in view.scope.assumptions if "set from noised counts" in line]
    assert f"their {share:.2%} of the first round's mu^2 is included" in said
    plain = dp_fl(clip_norm=0.3).view(COHORT, DIM, neighbors=Neighbors.ADD_REMOVE).scope.assumptions
    assert not any("noised counts" in line for line in plain)


@pytest.mark.parametrize(("noise", "size", "std_count"), [(1.5, 200, 10.0), (0.3, 10, 1.0), (40.0, 200, 40.0)])
def test_the_count_is_never_most_of_the_cost(noise, size, std_count):
    """In a small cohort a twentieth of it would hide nothing, and no noise on the sum would meet a target."""
    cohort = dataclasses.replace(COHORT, size=size)
    protocol = protocols.build("dp_fl", {"clip": "adaptive", "noise_multiplier": noise}).settle(cohort, DIM)
    assert protocol.std_count == std_count
    event = protocol.view(cohort, DIM, neighbors=Neighbors.ADD_REMOVE).round.mechanism
    assert event.mu <= 1.12 / noise
    given = protocols.build("dp_fl", {"clip": "adaptive", "noise_multiplier": noise, "std_count": 3.0})
    assert given.settle(cohort, DIM).std_count == 3.0


def test_a_clip_norm_that_runs_away_is_held():
    protocol = dp_fl(clip="adaptive", clip_norm=1.0, clip_rate=50.0)
    for count, end in ((CLIENTS / 2, 1e-6), (-CLIENTS / 2, 1e6)):
        total = jnp.zeros(DIM + 1).at[-1].set(count)
        state = protocol.init(DIM)
        for index in range(20):
            state = estimate(protocol, total, CLIENTS, state, key=jax.random.key(index))[1]
        assert float(state.clip_norm) == pytest.approx(end)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_the_median_is_that_of_those_who_are_there(count):
    protocol = dp_fl(clip="median")
    norms = np.random.default_rng(count).lognormal(size=count).astype(np.float32)
    padded = np.concatenate([norms, np.full(9, np.nan, np.float32)])
    order = np.random.default_rng(0).permutation(len(padded))
    state = protocol.prepare(state_of(5.0), noise_scale=jnp.float32(0.7), norms=jnp.asarray(padded[order]))
    assert float(state.clip_norm) == pytest.approx(float(np.median(norms)), rel=1e-6)
    assert float(state.noise_scale) == pytest.approx(0.7)


def test_the_median_of_nobody_or_of_nothing_is_the_last_one():
    protocol = dp_fl(clip="median")
    for norms in ([np.nan, np.nan], [0.0, 0.0, 1.0], [np.inf, np.nan]):
        state = protocol.prepare(state_of(5.0), noise_scale=jnp.float32(1.0), norms=jnp.asarray(norms))
        assert float(state.clip_norm) == 5.0
    two = protocol.prepare(state_of(5.0), noise_scale=jnp.float32(1.0), norms=jnp.asarray([np.inf, 2.0, np.nan, 4.0]))
    assert float(two.clip_norm) == 3.0, "an infinite norm is nobody's"


def test_the_median_promises_nothing_and_only_it_is_measured():
    assert [dp_fl(clip=clip, clip_norm=1.0).needs_norms for clip in ("fixed", "adaptive", "median")] == [
        False,
        False,
        True,
    ]
    protocol = dp_fl(clip="median")
    view = protocol.view(COHORT, DIM, neighbors=Neighbors.ADD_REMOVE)
    assert isinstance(view.round.mechanism, NonPrivate)
    assert "exact median" in view.round.mechanism.reason
    event, extra = protocol.published_event(COHORT, DIM)
    assert isinstance(event, Gaussian)
    assert extra == {"clip": "median"}


@pytest.mark.parametrize("clip", ["fixed", "adaptive", "median"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_poisoned_updates_are_harmless(clip, bad):
    """They count as zero, or as clipped, and as above an adaptive clip norm."""
    protocol, state = dp_fl(clip=clip, clip_norm=1.0), state_of(1.0)
    updates = with_norms([0.5] * 10)
    poisoned = updates.copy()
    poisoned[3, 2] = bad
    clean, seen = (np.asarray(tally(protocol, x, state)) for x in (updates, poisoned))
    assert np.isfinite(seen).all()
    assert np.linalg.norm((seen - clean)[:DIM]) <= 1.5 + 1e-5
    if clip == "adaptive":
        assert clean[-1] == 5.0
        assert seen[-1] == 4.0
    after = estimate(protocol, jnp.asarray(seen), 10, state, key=jax.random.key(0))
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(after))


def test_absent_clients_are_not_counted():
    protocol = dp_fl(clip="adaptive", clip_norm=1.0)
    updates = with_norms([0.5, 0.5, 3.0, 3.0, 3.0])
    some = tally(protocol, updates, state_of(1.0), present=np.array([1, 1, 1, 0, 0], bool))
    assert float(some[-1]) == 0.5


SIZES = (100, 150, 225, 50)


def test_schedules():
    assert dp_fl(clip=1.0).noise_scales(SIZES) == (1.0,) * 4
    linear = dp_fl(clip=1.0, schedule="linear", schedule_end=2.5).noise_scales(SIZES)
    assert linear == pytest.approx((1.0, 1.5, 2.0, 2.5))
    held = dp_fl(clip=1.0, schedule="held").noise_scales(SIZES)
    assert [scale**2 / size for scale, size in zip(held, SIZES, strict=True)] == pytest.approx([1 / 100] * 4)
    listed = dp_fl(clip=1.0, schedule=[1.0, 0.5, 2.0, 4.0, 9.0])
    assert listed.noise_scales(SIZES) == (1.0, 0.5, 2.0, 4.0), "what is left over is not run"
    assert hash(listed) == hash(dp_fl(clip=1.0, schedule=(1.0, 0.5, 2.0, 4.0, 9.0)))
    with pytest.raises(ValueError, match="expected a schedule of at least 4 rounds, got 2 factors"):
        dp_fl(clip=1.0, schedule=[1.0, 2.0]).noise_scales(SIZES)


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_the_noise_drawn_is_that_of_the_round(scale):
    """Relative standard error 0.5% at 20000 draws; the event's std over its sensitivity is the same number."""
    protocol = dp_fl(clip=0.4, schedule=[scale])
    state = protocol.prepare(protocol.init(DIM), noise_scale=jnp.float32(scale))
    drawn = estimate(protocol, jnp.zeros(20_000), 10, state, key=jax.random.key(0))[0] * 10
    assert np.std(drawn) == pytest.approx(1.5 * 0.4 * scale, rel=0.025)
    cohort = dataclasses.replace(COHORT, participation=FixedSize(size=200, population=1000), noise_scale=scale)
    event = protocol.view(cohort, DIM, neighbors=Neighbors.ADD_REMOVE).round.mechanism
    assert event.std == pytest.approx(1.5 * 0.4 * scale)
    assert event.sensitivity == pytest.approx(0.4)


def test_a_moved_clip_norm_moves_the_noise_with_it():
    protocol = dp_fl(clip="adaptive", clip_norm=0.4)
    total = jnp.zeros(20_001)
    drawn = estimate(protocol, total, 10, state_of(3.0, 2.0), key=jax.random.key(0))[0] * 10
    assert np.std(drawn) == pytest.approx(1.5 * 3.0 * 2.0, rel=0.025)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"clip": 1.0, "clip_norm": 2.0}, "expected one clip norm, got clip=1.0 and clip_norm=2.0"),
        ({"clip": -1.0}, "expected clip > 0, got clip=-1.0"),
        ({"clip": "sometimes", "clip_norm": 1.0}, "expected clip to be one of fixed, adaptive, median"),
        ({"clip": "fixed", "clip_norm": -1.0}, "expected clip_norm > 0"),
        ({"clip": "adaptive", "clip_norm": 0.0}, "expected clip_norm > 0"),
        ({"clip": "adaptive", "quantile": 1.0}, "expected 0 < quantile < 1, got quantile=1.0"),
        ({"clip": "adaptive", "clip_rate": 0.0}, "expected clip_rate > 0"),
        ({"clip": "adaptive", "std_count": 0.0}, "expected std_count > 0"),
        ({"clip": 1.0, "std_count": 2.0}, "expected std_count with clip = 'adaptive' only, got clip='fixed'"),
        ({"clip": 1.0, "schedule": "cosine"}, "expected schedule to be one of constant, linear, held"),
        ({"clip": 1.0, "schedule": [1.0, 0.0]}, "expected schedule > 0, got schedule=0.0"),
        ({"clip": 1.0, "schedule": [1.0, "many"]}, "expected schedule to be a finite number, got schedule='many'"),
        ({"clip": 1.0, "schedule": 2.0}, "expected schedule to be one of constant, linear, held"),
        ({"clip": 1.0, "schedule_end": 2.0}, "expected schedule_end with schedule = 'linear' only"),
        ({"clip": 1.0, "schedule": "linear", "schedule_end": 0.0}, "expected schedule_end > 0"),
    ],
)
def test_bad_parameters_are_one_sentence(parameters, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        dp_fl(**parameters)
    assert "\n" not in str(caught.value)


def test_a_number_is_a_fixed_clip_norm():
    assert dp_fl(clip=0.7) == dp_fl(clip_norm=0.7) == dp_fl(clip="fixed", clip_norm=0.7)
    assert dp_fl(clip="median").first_clip_norm == 1.0


def test_a_user_without_records_adds_nothing_to_sum_or_count():
    """Else the count would move by 1, and not by 1/2, when a user is removed."""
    protocol = dp_fl(clip="adaptive", clip_norm=1.0)
    sent = protocol.randomize(jnp.zeros(DIM), state_of(1.0, 1.0), key=jax.random.key(0))
    np.testing.assert_array_equal(sent.value, np.zeros(DIM + 1))
    inside = protocol.randomize(jnp.full(DIM, 1e-20), state_of(1.0, 1.0), key=jax.random.key(0))
    assert inside.value[-1] in (0.0, 0.5)


def exact_eps(size, population, colluders, *, noise, delta):
    """One user sends 1 or -1, all others 0; seen are the noised sum and how many colluders were drawn."""
    t, step = np.linspace(-1 - 12 * noise, 1 + 12 * noise, 200_001, retstep=True)
    up, middle, down = (stats.norm.pdf(t, mean, noise) for mean in (1, 0, -1))
    others = population - colluders

    def excess(eps):
        found = 0.0
        for drawn in range(min(size, others) + 1):
            q = drawn / others
            ratio = q * (up - math.exp(eps) * down) + (1 - q) * (1 - math.exp(eps)) * middle
            found += stats.hypergeom.pmf(drawn, population, others, size) * np.maximum(0, ratio).sum() * step
        return found - delta

    return optimize.brentq(excess, 0, 60) if excess(0.0) > 0 else 0.0


@pytest.mark.parametrize(
    ("size", "population", "colluders", "noise", "delta", "old_fails"),
    [
        (1, 100, 98, 2.0, 1e-5, True),
        later(1, 100, 98, 2.0, 1e-3, True),
        (2, 12, 6, 1.0, 1e-3, False),
        (3, 8, 5, 1.5, 1e-4, False),
    ],
)
def test_colluders_see_whether_they_were_drawn(size, population, colluders, noise, delta, old_fails):
    """Against brute force: a sample of all users is less than they can tell, one of the others is never."""
    protocol = DpFl(clip_norm=1.0, noise_multiplier=noise)
    sample = FixedSize(size=size, population=population)
    cohort = Cohort(participation=sample, size=size, colluders=colluders)
    view = protocol.view(cohort, 3, neighbors=Neighbors.REPLACE_ONE)
    truth = exact_eps(size, population, colluders, noise=noise, delta=delta)
    assert truth > exact_eps(size, population, 0, noise=noise, delta=delta)
    assert certify([view.round], view.scope, delta=delta).eps >= truth
    unaware = dataclasses.replace(view.round, participation=sample)
    if old_fails:
        assert certify([unaware], view.scope, delta=delta).eps < truth
    told = [line for line in view.scope.assumptions if "see whether they were sampled" in line]
    assert len(told) == 1
    assert f"drawn from the other {population - colluders} users" in told[0]


def test_a_sample_that_may_hold_all_others_hides_nobody():
    def seen(participation, size, colluders):
        cohort = Cohort(participation=participation, size=size, colluders=colluders)
        return DpFl(clip_norm=1.0, noise_multiplier=1.0).view(cohort, 3, neighbors=Neighbors.REPLACE_ONE)

    assert seen(FixedSize(size=5, population=12), 5, 7).round.participation == Everyone()
    assert seen(FixedSize(size=5, population=12), 5, 6).round.participation == FixedSize(size=5, population=6)
    assert seen(Poisson(prob=0.1), 5, 6).round.participation == Poisson(prob=0.1)
    alone = seen(FixedSize(size=5, population=12), 5, 0)
    assert alone.round.participation == FixedSize(size=5, population=12)
    assert not any("see whether" in line for line in alone.scope.assumptions)
    with pytest.raises(ValueError, match="expected colluders < population=12, got colluders=12"):
        seen(FixedSize(size=5, population=12), 5, 12)
