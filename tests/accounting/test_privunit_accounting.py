import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from dovetail.accounting import gaussian
from dovetail.accounting.amplification import clones
from dovetail.accounting.releases import privunit
from dovetail.accounting.releases.privunit import Cap
from dovetail.events import Report, Shuffled
from dovetail.statements import NotApplicable


def exact_mass(dim, threshold):
    with mpmath.workdps(50):
        return mpmath.betainc((mpmath.mpf(dim) - 1) / 2, 0.5, 0, 1 - mpmath.mpf(threshold) ** 2, regularized=True) / 2


@pytest.mark.parametrize("dim", [2, 3, 10, 785, 7850, 1_000_000])
@pytest.mark.parametrize("deviations", [0.0, 0.1, 1.0, 3.0, 8.0, 20.0])
def test_the_mass_of_the_cap_is_rounded_down_and_close(dim, deviations):
    threshold = min(deviations / math.sqrt(dim), 0.99)
    ours, exact = privunit.cap_mass(dim=dim, threshold=threshold), exact_mass(dim, threshold)
    assert exact * (1 - mpmath.mpf(10) ** -9) <= ours <= exact


def test_a_mass_that_underflows_is_bounded_from_below():
    for dim, threshold in ((7850, 0.5), (1_000_000, 0.04)):
        ours, exact = privunit.cap_mass(dim=dim, threshold=threshold), exact_mass(dim, threshold)
        assert exact < 1e-290
        assert ours <= exact


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 10**6), st.floats(0, 6), st.floats(0.01, 0.999))
def test_eps_is_the_log_ratio_of_the_two_densities_rounded_up(dim, deviations, prob):
    cap = Cap(dim=dim, threshold=min(deviations / math.sqrt(dim), 0.98), prob=prob)
    with mpmath.workdps(50):
        mass, p = exact_mass(dim, cap.threshold), mpmath.mpf(prob)
        exact = abs(mpmath.log(p * (1 - mass) / ((1 - p) * mass)))
    ours = privunit.eps(cap)
    assert ours.delta == 0
    assert exact <= ours.eps <= exact + 1e-8


def draw(cap, trials, rng):
    """<report, u> and reports by rejection from the sphere, u the first axis."""
    inside = rng.random(trials) < cap.prob
    reports = np.empty((trials, cap.dim))
    todo = np.arange(trials)
    while len(todo):
        v = rng.normal(size=(len(todo), cap.dim))
        v /= np.linalg.norm(v, axis=1, keepdims=True)
        fits = (v[:, 0] >= cap.threshold) == inside[todo]
        reports[todo[fits]] = v[fits]
        todo = todo[~fits]
    return reports


@pytest.mark.parametrize(("dim", "eps_local"), [(2, 1.0), (5, 3.0), (40, 4.0)])
def test_the_mean_projection_is_that_of_the_mechanism(dim, eps_local):
    cap = privunit.least_variance_cap(dim=dim, eps_local=eps_local)
    reports = draw(cap, 60_000, np.random.default_rng(0))
    mean, error = reports[:, 0].mean(), reports[:, 0].std() / math.sqrt(len(reports))
    m = privunit.mean_projection(cap)
    assert abs(mean - m) < 4 * error
    assert abs(mean - 0.95 * m) > 4 * error
    square = np.mean(np.sum((reports / m - np.eye(1, dim)) ** 2, axis=1))
    assert math.sqrt(square) == pytest.approx(privunit.rms_error(cap), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 10**6), st.floats(0.01, 12), st.floats(0.5, 1.5))
def test_the_best_split_meets_eps_from_below_and_no_other_threshold_is_better(dim, eps_local, factor):
    cap = privunit.least_variance_cap(dim=dim, eps_local=eps_local)
    assert eps_local * (1 - 1e-6) <= privunit.eps(cap).eps <= eps_local
    assert cap.threshold == pytest.approx(privunit.mean_projection(cap), rel=1e-5)
    threshold = min(cap.threshold * factor, 0.999999)
    mass = privunit.cap_mass(dim=dim, threshold=threshold)
    odds = math.exp(eps_local) * mass / (1 - mass)
    if mass > 0 and odds / (1 + odds) < 1:
        other = Cap(dim=dim, threshold=threshold, prob=odds / (1 + odds))
        assert privunit.mean_projection(other) <= privunit.mean_projection(cap) * (1 + 1e-6)


def test_golden_noise_against_the_curator():
    """At n 1000, d 7850, delta 5e-6, shuffled: 1.8 and 3.1 times the curator's noise at central .24 and 1."""
    for central, eps_local, ratio in ((0.24, 1.537, 1.8), (1.0, 3.421, 3.1)):
        event = Shuffled(report=Report(kind="generic", eps_local=eps_local), num_users=1000)
        assert clones.numerical23(event, delta=5e-6).eps == pytest.approx(central, rel=2e-3)
        cap = privunit.least_variance_cap(dim=7850, eps_local=eps_local)
        noise = privunit.rms_error(cap) * math.sqrt(1000 / 7850)
        mu = optimize.brentq(lambda mu, eps=central: gaussian.delta_of(mu, eps=eps) - 5e-6, 1e-3, 80.0)
        assert noise * mu / 2 == pytest.approx(ratio, rel=5e-3)


def test_refusals():
    for bad in (
        {"dim": 1},
        {"dim": 2.5},
        {"threshold": -0.1},
        {"threshold": 1.0},
        {"threshold": math.nan},
        {"prob": 0.0},
        {"prob": 1.0},
    ):
        with pytest.raises(ValueError, match="expected"):
            Cap(**({"dim": 10, "threshold": 0.1, "prob": 0.6} | bad))
    for eps_local in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="eps_local"):
            privunit.least_variance_cap(dim=10, eps_local=eps_local)
    with pytest.raises(NotApplicable, match="eps_local"):
        privunit.least_variance_cap(dim=10, eps_local=1e4)
    with pytest.raises(NotApplicable, match="too small"):
        privunit.least_variance_cap(dim=2, eps_local=300.0)
    with pytest.raises(NotApplicable, match="no mass"):
        privunit.eps(Cap(dim=1_000_000, threshold=0.9, prob=0.5))
