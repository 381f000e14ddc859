import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail import accounting
from dovetail.accounting import gaussian
from dovetail.events import Everyone
from dovetail.mechanisms import RandomizedResponse
from dovetail.mechanisms.exact import ExactSampler
from dovetail.protocols import Cohort, fast_path
from dovetail.protocols.sums.binary_sum import BinarySum
from dovetail.protocols.sums.real_sum import RealSum
from dovetail.protocols.sums.split_and_mix import SplitAndMixProtocol
from dovetail.shufflers import Reports, deliver, mask_absent, shuffle
from dovetail.statements import Neighbors

QUICK = {"xla_backend_optimization_level": "0"}  # compiles three times as fast
USERS, ROUNDS = 30, 4000
COHORT = Cohort(participation=Everyone(), size=USERS, min_size=20, colluders=1)
PROTOCOLS = {
    "binary": BinarySum(eps_local=1.5),
    "single": RealSum(eps_local=2.5),
    "unary": RealSum(method="unary", eps_local=1.0),
    "split": RealSum(method="split", noise_multiplier=1.5, mix={"shares": 3, "scale": 6.0}),
}
PROTOCOLS = {name: protocol.settle(COHORT, 1) for name, protocol in PROTOCOLS.items()}
NUMBERS = np.random.default_rng(0).uniform(size=USERS)
BITS = (NUMBERS > 0.4).astype(float)


def by_messages(protocol, xs, present, key):
    reports = jax.vmap(lambda x, k: protocol.randomize(x, (), key=k))(xs, jax.random.split(key, USERS))
    return protocol.tally(shuffle(mask_absent(reports, present), protocol.layout(1), key=key), 1)


def by_sums(protocol, xs, present, key):
    path = fast_path(protocol, 1)
    return path.finish(path.collect(xs, present, (), keys=jax.random.split(key, USERS)), key=key)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def rounds_of(path, protocol, xs, present):
    keys = jax.random.split(jax.random.key(1), ROUNDS)
    return jax.lax.map(
        lambda key: protocol.estimate(path(protocol, xs, present, key), USERS, (), key=key)[0] * USERS, keys
    )


def sums(path, protocol, numbers, present=USERS):
    xs = jnp.asarray(numbers, jnp.float32)[:, None]
    return np.asarray(rounds_of(path, protocol, xs, jnp.arange(USERS) < present), np.float64)[:, 0]


@pytest.fixture(params=PROTOCOLS)
def protocol(request):
    return PROTOCOLS[request.param]


def numbers_for(protocol):
    return BITS if protocol.name == "binary_sum" else NUMBERS


def test_the_estimated_sum_is_unbiased_with_the_declared_variance(protocol):
    """A z-test, and the ratio of variances within 5 deviations (4000 rounds: .11); also when a third stays away."""
    for present in (USERS, 20):
        numbers = numbers_for(protocol)
        found, declared = sums(by_sums, protocol, numbers, present), protocol.variance(numbers[:present])
        assert abs(found.mean() - numbers[:present].sum()) < 5 * math.sqrt(declared / ROUNDS)
        assert found.var() == pytest.approx(declared, rel=0.11)
    assert protocol.noise_std(USERS, 1) == pytest.approx(math.sqrt(protocol.variance(np.zeros(USERS))) / USERS)


@pytest.mark.parametrize("name", ["unary", "split"])
def test_fast_and_faithful_path_agree(name):
    """From the same keys, up to the last bits of a float32; with shares in distribution."""
    fast, faithful = (sums(path, PROTOCOLS[name], NUMBERS) for path in (by_sums, by_messages))
    if name == "split":
        spread = faithful.std()
        assert abs(fast.mean() - faithful.mean()) < 5 * spread * math.sqrt(2 / ROUNDS)
        assert fast.var() == pytest.approx(faithful.var(), rel=0.15)
    else:
        np.testing.assert_allclose(fast, faithful, rtol=1e-6)


def test_numbers_outside_are_moved_in_and_nan_is_a_half(protocol):
    strange = numbers_for(protocol).copy()
    strange[:4] = [7.0, -3.0, np.nan, np.inf]
    plain = strange.copy()
    plain[:4] = [1.0, 0.0, 0.5, 1.0]
    np.testing.assert_array_equal(sums(by_sums, protocol, strange), sums(by_sums, protocol, plain))


@pytest.mark.parametrize(("outside", "end"), [(1.2, 1.0), (7.0, 1.0), (math.inf, 1.0), (-0.3, 0.0), (-math.inf, 0.0)])
def test_a_deployed_user_moves_its_number_in_too(outside, end):
    messages = PROTOCOLS["split"].messages(1)
    sent = [
        messages.randomize(np.array([x]), sampler=ExactSampler(np.random.default_rng(0).bytes)) for x in (outside, end)
    ]
    np.testing.assert_array_equal(sent[0].body, sent[1].body)


def test_the_binary_estimator_is_the_surveys_with_its_sign_put_right():
    protocol = PROTOCOLS["binary"]
    p = 2 / (math.exp(1.5) + 1)
    bits = jnp.asarray(BITS, jnp.int32)[:, None]
    tally = protocol.tally(deliver(Reports(None, bits, jnp.ones(USERS, bool))), 1)
    found = float(protocol.estimate(tally, USERS, (), key=jax.random.key(0))[0][0]) * USERS
    assert found == pytest.approx((BITS.sum() - USERS * p / 2) / (1 - p), rel=1e-5)
    assert protocol.variance(BITS) == pytest.approx(USERS * p * (2 - p) / (1 - p) ** 2 / 4)


def test_unary_reports_are_the_unary_code():
    quiet = RealSum(method="unary", eps_local=50.0, levels=9)
    x = jnp.asarray([[0.0], [0.25], [0.625], [1.0]])
    report = jax.jit(jax.vmap(lambda x, key: quiet.randomize(x, (), key=key).value), compiler_options=QUICK)
    value = report(x, jax.random.split(jax.random.key(0), 4))
    np.testing.assert_array_equal(value, [[i < ones for i in range(8)] for ones in (0, 2, 5, 8)])


# ---------------------------------------------------------------- how the error grows


@pytest.mark.parametrize("eps_local", [0.3, 1.0, 2.0, 2.4, 3.3, 5.0, 8.0])
def test_the_levels_are_nearly_the_best_ones(eps_local):
    def worst(levels):
        return RandomizedResponse(eps_local, levels).debiased_variance(np.linspace(0, 1, 1001)).max()

    chosen = RealSum(eps_local=eps_local).settle(COHORT, 1).levels
    assert worst(chosen) <= 1.06 * min(worst(levels) for levels in range(2, 60))


def test_at_the_budgets_that_a_fixed_target_allows_errors_grow_as_they_should():
    """Lies as rare as 40 / n, which is about what a central eps of 1 allows; slopes of the worst squared error."""
    sizes = np.array([1e3, 1e4, 1e5, 1e6])

    def slope(protocols):
        worst = [
            n * max(p.variance([x]) for x in np.linspace(0, 1, 201)) for p, n in zip(protocols, sizes, strict=True)
        ]
        return np.polyfit(np.log(sizes), np.log(worst), 1)[0]

    budgets = [math.log(n / 40) for n in sizes]
    single = [RealSum(eps_local=budget).settle(COHORT, 1) for budget in budgets]
    assert slope(single) == pytest.approx(1 / 3, abs=0.04)
    assert slope([RealSum(eps_local=budget, levels=4) for budget in budgets]) > 0.6, "a fixed number of levels is worse"
    bits = [n * BinarySum(eps_local=budget).variance([0.0]) for budget, n in zip(budgets, sizes, strict=True)]
    assert max(bits) < 1.1 * min(bits)


@pytest.mark.parametrize("size", [300, 30_000])
def test_split_errs_like_a_curator_at_any_size(size):
    cohort = Cohort(participation=Everyone(), size=size, min_size=size)
    protocol = RealSum(method="split").with_noise(4.5).settle(cohort, 1)
    assert 4.5**2 <= protocol.variance(np.full(size, 0.3)) <= 4.5**2 * 1.01
    view = protocol.view(cohort, 1, neighbors=Neighbors.REPLACE_ONE)
    curators = gaussian.eps_of(1 / 4.5, delta=1e-6)
    assert curators < accounting.bound([view.round], delta=1e-6).eps < curators * 1.005


# ---------------------------------------------------------------- views and refusals


def test_views_are_what_was_sent():
    def event(name):
        return PROTOCOLS[name].view(COHORT, 1, neighbors=Neighbors.REPLACE_ONE).round.mechanism

    for name, levels, slots in (("binary", 2, 1), ("single", PROTOCOLS["single"].levels, 1), ("unary", 2, 6)):
        found = event(name)
        assert (found.report.kind, found.report.levels, found.coordinates) == ("rr", levels, slots)
        assert (found.num_users, found.colluders) == (20, 1)
        assert PROTOCOLS[name].layout(1).slots == slots
    assert event("split").clip_norm == 0.5
    assert event("split").coordinates == 1


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: BinarySum(eps_local=0.0), "expected eps_local > 0"),
        (lambda: BinarySum().local_randomizer, "expected eps_local to be set or calibrated"),
        (
            lambda: BinarySum(eps_local=1.0).settle(COHORT, 2),
            r"expected one number per user \(dim = 1\) with 'binary_sum'",
        ),
        (
            lambda: RealSum(eps_local=1.0).layout(3),
            r"expected one number per user \(dim = 1\) with 'real_sum', got dim=3",
        ),
        (lambda: RealSum(method="double"), "expected method to be one of single, unary, split"),
        (lambda: RealSum(levels=1), "expected levels >= 2"),
        (lambda: RealSum(method="split", eps_local=1.0), "expected no eps_local with method='split'"),
        (lambda: RealSum(method="split", levels=5), "expected no levels with method='split'"),
        (lambda: RealSum(mix={"shufflers": 3}), "expected no mix with method='single'"),
        (lambda: RealSum(method="split", mix={"shufflers": 1}), "one shuffler would hold all shares"),
        (lambda: RealSum(method="split", mix=SplitAndMixProtocol(clip_norm=1.0)), "expected mix with clip_norm=0.5"),
        (
            lambda: RealSum(method="split", mix={"noise_multiplier": 1.0}),
            "without noise, which is a setting of real_sum",
        ),
        (lambda: RealSum(method="split", noise_multiplier=0.0), "expected noise_multiplier > 0"),
        (lambda: RealSum(noise_multiplier=1.0), "expected no noise_multiplier with method='single'"),
        (lambda: RealSum().settle(COHORT, 1), "expected eps_local to be set or calibrated"),
        (lambda: RealSum(eps_local=1.0).local_randomizer, "expected levels to be given or settled"),
        (lambda: RealSum(method="split").settle(COHORT, 1), "expected noise_multiplier to be set or calibrated"),
    ],
)
def test_bad_parameters_are_refused(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()


def test_noise_is_set_by_one_number():
    for name in PROTOCOLS:
        fresh = {"binary": BinarySum(), "single": RealSum()}.get(name) or RealSum(method=name)
        assert not fresh.is_calibrated
        assert fresh.with_noise(2.0).is_calibrated
    assert RealSum().with_noise(4.0).eps_local == 0.25
    assert RealSum(method="split").with_noise(4.0).sharing.std == 4.0
    settled = PROTOCOLS["split"]
    assert settled.with_noise(1.5).settle(COHORT, 1) == settled
    assert hash(settled)
