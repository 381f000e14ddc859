"""The gate of every bound, sums of privacy losses against exact arithmetic, and constants that grow with n."""

import math
import sys
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism as gaussian_loss
from grids import diagonal
from scipy.stats import binom

from dovetail.accounting import bound, compose, conversion, gaussian, loss_distributions, numerics, releases, tilting
from dovetail.accounting.accountants import Curve
from dovetail.accounting.exposure import exposures_of
from dovetail.accounting.loss_distributions import LossDistribution, Side
from dovetail.accounting.pairs import binomial
from dovetail.accounting.releases import personalized, split_and_mix
from dovetail.events import Everyone, Gaussian, Laplace, Personalized, Poisson, Round
from dovetail.statements import Neighbors, NotApplicable, Theorem

ADD = Neighbors.ADD_REMOVE
NAN, INF = math.nan, math.inf


def test_what_is_no_number_is_no_bound():
    assert [numerics.as_eps_bound(x) for x in (NAN, -INF, INF, -1.0, 0.5)] == [INF, INF, INF, 0.0, 0.5]
    assert [numerics.as_probability_bound(x) for x in (NAN, -INF, INF, -1e-9, 1.5, 0.5)] == [
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.5,
    ]
    assert numerics.smallest_bound([NAN, -INF, 3.0, 2.0]) == 2.0
    assert numerics.smallest_bound([NAN]) == numerics.smallest_bound([]) == INF
    assert numerics.exp_or_infinity(1e6) == numerics.exp_or_infinity(NAN) == INF


@pytest.mark.parametrize("value", [NAN, -1.0, -INF])
def test_a_curve_without_a_number_is_not_applicable(monkeypatch, value):
    broken = Curve(proof=Theorem(key="broken", where="nowhere").proof, eps=lambda delta: value, delta=lambda eps: value)
    monkeypatch.setattr(compose, "_TIGHTEST_FIRST", (lambda paid: broken,))
    monkeypatch.setattr(compose, "_CHEAPEST_FIRST", (lambda paid: broken,))
    rounds = gaussian_rounds(1.0, 3)
    for asked in ({"delta": 1e-6}, {"eps": 1.0}):
        with pytest.raises(NotApplicable, match="broken gives no number"):
            compose.best_bound(exposures_of(rounds), **asked)
    assert not compose.fits(rounds, eps=5.0, delta=1e-6)


def test_an_accountant_that_overflows_is_not_applicable(monkeypatch):
    def overflows(paid):
        raise OverflowError("math range error")

    monkeypatch.setattr(compose, "_TIGHTEST_FIRST", (overflows,))
    with pytest.raises(NotApplicable, match="beyond what a computer holds"):
        compose.best_bound(exposures_of(gaussian_rounds(1.0, 3)), delta=1e-6)


def test_orders_without_a_divergence_say_nothing():
    """dp-accounting's conversion gives eps 0 for a negative divergence, and delta 0 for one that underflows."""
    orders = np.array([2.0, 4.0, 8.0])
    only = conversion.eps_of(orders[2:], np.array([3.0]), delta=1e-6)
    assert conversion.eps_of(orders, np.array([NAN, -1e-17, 3.0]), delta=1e-6) == only
    assert conversion.delta_of(orders, np.array([NAN, -1e-17, 3.0]), eps=4.0) < 1
    assert conversion.eps_of(orders, np.full(3, NAN), delta=1e-6) == INF
    assert conversion.delta_of(orders, np.full(3, NAN), eps=1.0) == 1.0
    assert conversion.delta_of(orders, np.zeros(3), eps=1.0) > 0
    assert conversion.eps_of(orders, np.zeros(3), delta=1e-200) > 0


@pytest.mark.parametrize("top", [720.0, 740.0, 1e4])
@pytest.mark.parametrize("coordinates", [1, 2])
@pytest.mark.parametrize("kind", ["clip_laplace", "laplace", "rr"])
def test_huge_budgets_are_not_certified_for_nothing(kind, coordinates, top):
    """Two coordinates of 720 were certified (0, 1e-6); 740 and one coordinate overflowed."""
    event = Personalized(kind=kind, eps_locals=(top,) * 5, coordinates=coordinates)
    found = personalized.eps(event, delta=1e-6).eps
    assert 600 < found <= coordinates * top * (1 + 1e-12)
    assert 0.9 < personalized.delta(event, eps=1.0) <= 1
    assert (personalized.renyi(event, np.array([1.5, 2.0, 64.0])) > 0.9 * coordinates * 700).all()


@pytest.mark.parametrize("tiny", [1e-300, 1e-30])
def test_tiny_budgets_have_tiny_bounds(tiny):
    event = Personalized(kind="laplace", eps_locals=(tiny,) * 5, coordinates=1)
    assert 0 <= personalized.eps(event, delta=1e-6).eps <= tiny * (1 + 1e-9)


def test_a_noise_beyond_all_numbers():
    def eps(std, delta, rounds=1):
        mechanism = Gaussian(std=std, sensitivity=1.0, neighbors=ADD)
        return bound([Round(mechanism=mechanism, participation=Everyone())] * rounds, delta=delta).eps

    assert eps(1e-300, 1e-6) == INF
    assert eps(1e300, 1e-6) == eps(1e300, 1e-200) == 0.0
    assert eps(1e12, 1e-20) < 1e-10
    assert 0 < gaussian.delta_of(1e-300, eps=1.0) <= 1e-300
    assert gaussian.delta_of(1e-14, eps=0.0) < 4.1e-15


def test_binomial_probabilities_are_right_to_their_factor():
    with mpmath.workdps(60):
        for trials in (10**3, 10**6, 10**9, 10**12):
            for prob in (0.5, 0.3, 1e-3, 1e-7, 0.999):
                std = math.sqrt(trials * prob * (1 - prob)) + 1
                for away in (-30, -6, 0, 9, 35):
                    k = round(trials * prob + away * std)
                    if 0 <= k <= trials and binom.pmf(k, trials, prob) > 1e-290:
                        exact = _binomial(k, trials, prob)
                        error = abs(float(mpmath.mpf(float(binom.pmf(k, trials, prob))) / exact - 1))
                        assert error < (numerics.binomial_outward_factor(trials) - 1) / 2


def _binomial(k, n, p):
    p = mpmath.mpf(p)
    log = mpmath.loggamma(n + 1) - mpmath.loggamma(k + 1) - mpmath.loggamma(n - k + 1)
    return mpmath.exp(log + k * mpmath.log(p) + (n - k) * mpmath.log1p(-p))


def test_the_coins_of_a_large_crowd_weigh_no_less_than_they_do():
    """At n = 1e12 a probability is off by 1e-9, more than a constant 1e-10 covers."""
    sizes, most = np.array([10**12]), np.ones(1)
    points, mass = binomial._law_of_coin_tosses(sizes, most)
    tails = np.cumsum(mass[::-1])[::-1]
    for place in range(1, len(points), 4000):
        beyond = (1 + points[place - 1]) / 2 * 10**12  # all of a block is put at its largest |s|
        exact = 2 * float(mpmath.ncdf(-(beyond - 5e11) / 5e5))
        if exact > 1e-12:
            assert tails[place] >= exact * (1 - 1e-5)
            assert tails[place] <= exact * 1.02
    assert 1 <= mass.sum() <= 1 + 1e-6


# Sums of losses


def gaussian_rounds(std, times, prob=None):
    taken = Everyone() if prob is None else Poisson(prob=prob)
    return [Round(mechanism=Gaussian(std=std, sensitivity=1.0, neighbors=ADD), participation=taken)] * times


STEP = 0.125


def a_loss(probs, lowest, infinite=0.0):
    return LossDistribution(STEP, (Side(lowest, np.array(probs, dtype=float), infinite),))


def exact_deltas(parts, eps):
    """By whole numbers: the law of the sum, then E[(1 - e^(eps - loss))_+] and the infinite loss, in 60 digits."""
    law, start, finite = [1], 0, Fraction(1)
    for probs, lowest, infinite, times in parts:
        whole = [int(Fraction(p) * 2**60) for p in probs]
        for _ in range(times):
            grown = [0] * (len(law) + len(whole) - 1)
            for i, a in enumerate(law):
                for j, b in enumerate(whole):
                    grown[i + j] += a * b
            law, start, finite = grown, start + lowest, finite * (1 - Fraction(infinite))
    scale = mpmath.mpf(2) ** (60 * sum(times for *_, times in parts))
    with mpmath.workdps(60):
        found = []
        for one in eps:
            total = 1 - mpmath.mpf(finite.numerator) / finite.denominator
            for index, mass in enumerate(law, start):
                if index * STEP > one:
                    total += mpmath.mpf(mass) / scale * -mpmath.expm1(mpmath.mpf(one) - mpmath.mpf(index * STEP))
            found.append(total)
        return found


FIRST = [2**-30, 2**-10, 0.25, 0.5, 0.25 - 2**-10 - 2**-29, 2**-20, 2**-30]
SECOND = [0.5, 0.25, 0.125, 2**-40]


@pytest.mark.parametrize(
    "parts",
    [[(FIRST, -3, 0.0, 40)], [(FIRST, -3, 0.0, 17), (SECOND, -1, 0.0, 9)], [(FIRST, -3, 2.0**-70, 12)]],
    ids=["copies", "together", "infinite"],
)
def test_sums_at_every_delta_against_whole_numbers(parts):
    ours = loss_distributions.compose(
        [loss_distributions.self_compose(a_loss(probs, lowest, gone), times) for probs, lowest, gone, times in parts]
    )
    eps = [0.0, 0.3, 1.0, 2.5, 5.0, 7.3, 9.0]
    for one, exact in zip(eps, exact_deltas(parts, eps), strict=True):
        delta = ours.delta(one)
        assert exact <= delta
        assert delta <= float(exact) * (1 + 1e-7) + 1e-290
        if 1e-280 < delta < 1 and float(exact) > 2.0**-66:
            assert ours.eps(delta) == pytest.approx(one, rel=1e-7, abs=1e-9)
            assert ours.delta(ours.eps(delta)) <= delta * (1 + 1e-9)


def test_gaussian_rounds_with_a_negligible_one_cost_no_less_than_without():
    """The error of the transform, uncharged, took 1e5 rounds at delta 1e-12 below the exact Gaussian formula."""
    rounds = [*gaussian_rounds(500.0, 100_000), *gaussian_rounds(1e4, 1, prob=1e-4)]
    exact = gaussian.eps_of(math.sqrt(100_000) / 500, delta=1e-12)
    assert exact <= bound(rounds, delta=1e-12).eps <= exact * 1.01


def test_many_sampled_rounds_at_a_small_delta():
    """36.85 before; the same at any slope of the tilt."""
    found = bound(gaussian_rounds(1.0, 100_000, prob=0.01), delta=1e-12).eps
    assert found == pytest.approx(37.5413, abs=2e-4)


@pytest.mark.parametrize("shift", [-3, -1, 1, 3])
def test_any_slope_gives_an_upper_bound_and_good_ones_the_same(shift):
    loss = releases.losses(Gaussian(std=1.0, sensitivity=1.0, neighbors=ADD), Poisson(prob=0.01), 1e-4)[0]
    total = loss_distributions.self_compose(loss, 3000)._totals_by_direction[0]
    best = total.eps(1e-9)
    level = math.floor(math.log(1e-9) / tilting._LEVEL)
    view = total._compute_view((level + shift) * tilting._LEVEL, None)
    total._views = {level: view}
    assert total.eps(1e-9) == pytest.approx(best, rel=1e-6)


def test_a_transform_that_errs_as_much_as_allowed_does_no_harm(monkeypatch):
    parts = [(FIRST, -3, 0.0, 40)]
    eps = [0.0, 1.0, 5.0]
    exact = exact_deltas(parts, eps)
    rng = np.random.default_rng(5)
    rfft, irfft = numerics.rfft, numerics.irfft

    def worse(values, size):
        found = rfft(values, size)
        turned = np.exp(2j * math.pi * rng.random(found.shape))
        return found - 0.9 * numerics.transform_error(size) * np.where(rng.random() < 0.5, found, turned)

    def worse_back(values, size):
        found = irfft(values, size)
        return found - 0.9 * numerics.transform_error(size) * np.linalg.norm(found) / math.sqrt(size)

    monkeypatch.setattr(numerics, "rfft", worse)
    monkeypatch.setattr(numerics, "irfft", worse_back)
    for _ in range(20):
        ours = loss_distributions.self_compose(a_loss(FIRST, -3), 40)
        assert all(ours.delta(one) >= delta for one, delta in zip(eps, exact, strict=True))


def test_the_error_of_a_transform_is_within_its_bound():
    rng = np.random.default_rng(3)
    for size in (1000, 2048, 3**6, 11**3):
        law = rng.dirichlet(np.full(size, 0.1))
        angles = np.arange(size // 2 + 1)[:, None] * np.arange(size) % size
        turns = np.exp(-2j * np.pi * angles.astype(np.longdouble) / size)
        exact = turns @ law.astype(np.longdouble)
        assert np.abs(numerics.rfft(law, size) - exact).max() < numerics.transform_error(size) / 3


@pytest.mark.parametrize(
    ("mu", "prob", "interval"), diagonal([(0.002, 1e-4), (3.0, 0.5), (1.0, 0.01), (0.05, 1.0)], [1e-4, 1e-2])
)
def test_one_release_of_dp_accounting_is_never_below_50_digits(mu, prob, interval):
    loss = gaussian_loss(1 / mu, sensitivity=1.0, sampling_prob=prob, value_discretization_interval=interval)
    ours = loss_distributions.from_dp_accounting(loss)
    with mpmath.workdps(40):
        for index, exact in enumerate((_loss_when_removed, _loss_when_added)):
            lowest, probs, infinite = ours.side_in_direction(index)
            total = tilting.Total([tilting.LossPart(lowest, probs, infinite, 1)], interval)
            for part in (0.0, 0.3, 0.5, 0.6, 0.8, 0.97, 0.999):
                index = lowest + int(part * (len(probs) - 1))
                if index >= 0:
                    assert total.delta(index * interval) >= exact(mu, prob, index * interval)


def _loss_when_removed(mu, prob, eps):
    mu, prob, ratio = mpmath.mpf(mu), mpmath.mpf(prob), mpmath.exp(mpmath.mpf(eps))
    cut = (mpmath.log((ratio - (1 - prob)) / prob) + mu**2 / 2) / mu
    return (1 - prob - ratio) * mpmath.ncdf(-cut) + prob * mpmath.ncdf(mu - cut)


def _loss_when_added(mu, prob, eps):
    mu, prob, ratio = mpmath.mpf(mu), mpmath.mpf(prob), mpmath.exp(mpmath.mpf(eps))
    if 1 / ratio <= 1 - prob:
        return mpmath.mpf(0)
    cut = (mpmath.log((1 / ratio - (1 - prob)) / prob) + mu**2 / 2) / mu
    return mpmath.ncdf(cut) * (1 - ratio * (1 - prob)) - ratio * prob * mpmath.ncdf(cut - mu)


@pytest.mark.parametrize("delta", [1e-300, 1e-100, 1e-17, 0.5])
def test_any_delta_has_a_true_number_or_none(delta):
    rounds = gaussian_rounds(2.0, 1000, prob=0.05)
    found = bound(rounds, delta=delta).eps
    assert found >= bound(rounds, delta=max(delta, 1e-15)).eps
    assert not math.isnan(found)
    pure = bound(
        [Round(mechanism=Laplace(scale=10.0, sensitivity=1.0, count=3, neighbors=ADD), participation=Everyone())],
        delta=delta,
    )
    assert pure.eps <= 0.3 * (1 + 1e-9)


def test_probabilities_that_are_no_numbers_are_refused():
    with pytest.raises(NotApplicable, match="could not be computed"):
        loss_distributions.self_compose(a_loss([0.5, NAN], 0), 3).eps(1e-6)
    with pytest.raises(ValueError, match="on one grid"):
        other = LossDistribution(2 * STEP, (Side(0, np.ones(1), 0.0),))
        loss_distributions.compose([a_loss(SECOND, 0), other])


def test_losses_that_are_all_infinite_promise_nothing():
    ours = loss_distributions.self_compose(a_loss([0.0, 0.0], 0, infinite=1.0), 3)
    assert ours.eps(0.5) == INF
    assert ours.delta(3.0) == 1.0


def test_a_divergence_of_shares_that_is_no_number_is_no_eps(monkeypatch):
    monkeypatch.setattr(split_and_mix, "renyi", lambda event, orders: np.full(len(orders), NAN))
    assert split_and_mix._eps_by_renyi(np.full(len(split_and_mix.ORDERS), NAN), 1e-6) == INF


def test_floats_are_what_these_constants_assume():
    assert sys.float_info.epsilon == numerics.ULP


@pytest.mark.parametrize("prob", [0.0, 1e-12, 0.3, 0.5, 0.999999, 1.0])
@pytest.mark.parametrize("trials", [0, 1, 7, 10**6, 10**12])
def test_binomial_laws_are_those_of_scipy(trials, prob):
    spread = np.round(trials * prob + np.linspace(-9, 9, 41) * math.sqrt(trials * prob * (1 - prob) + 1))
    counts = np.unique(np.concatenate([np.arange(-3, 6), spread, [trials - 1, trials, trials + 1]]))
    assert np.array_equal(numerics.binomial_pmf(counts, trials, prob), binom.pmf(counts, trials, prob))
    assert np.array_equal(numerics.binomial_cdf(counts, trials, prob), binom.cdf(counts, trials, prob))
    assert np.array_equal(numerics.binomial_sf(counts, trials, prob), binom.sf(counts, trials, prob))


@pytest.mark.parametrize("size", [8, 20, 64])
def test_sums_on_a_circle_are_right_to_their_error(size):
    rng = np.random.default_rng(size)
    laws = [(rng.dirichlet(np.full(4, 0.3)), 3), (rng.dirichlet(np.full(11, 0.3)), 2)]
    with mpmath.workdps(40):
        exact = [mpmath.mpf(1)]
        for law, times in laws:
            for _ in range(times):
                longer = [mpmath.mpf(0)] * (len(exact) + len(law) - 1)
                for i, a in enumerate(exact):
                    for j, b in enumerate(law.tolist()):
                        longer[i + j] += a * mpmath.mpf(b)
                exact = longer
        circle = [mpmath.fsum(exact[i::size]) for i in range(size)]
        found, error = numerics.law_of_sum(laws, size)
        off = mpmath.sqrt(mpmath.fsum((mpmath.mpf(x) - y) ** 2 for x, y in zip(found.tolist(), circle, strict=True)))
        assert off <= error < 1e-12


@pytest.mark.parametrize(
    ("slope", "interval", "count"),
    [(0.1, 1e-12, 500), (2.0, 1e-13, 40), (0.5, 60.0, 100), (0.01, 4000.0, 5000), (0.0, 1e4, 70), (1e-12, 1e4, 70)],
)
def test_the_norm_of_a_decay_is_no_less_than_its_terms_and_hardly_more(slope, interval, count):
    terms = -np.expm1(-interval * np.arange(1, count + 1)) * np.exp(-slope * np.arange(1, count + 1))
    exact = math.sqrt(math.fsum(terms**2))
    assert exact <= numerics.decaying_norm(slope, interval, count) <= exact * (1 + 1e-8)
