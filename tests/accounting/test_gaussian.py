import json
import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dovetail.accounting import bound, gaussian
from dovetail.cli import app
from dovetail.events import Everyone, FixedSize, Gaussian, Round
from dovetail.statements import Neighbors


def exact_delta(mu: float, eps: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        mu, eps = mpmath.mpf(mu), mpmath.mpf(eps)
        return mpmath.ncdf(mu / 2 - eps / mu) - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)


@settings(max_examples=300, deadline=None)
@given(st.floats(1e-3, 50), st.floats(0, 200))
def test_delta_is_never_below_the_exact_value_and_close_to_it(mu, eps):
    exact, ours = exact_delta(mu, eps), gaussian.delta_of(mu, eps=eps)
    assert ours >= exact
    if exact > 1e-15:
        assert ours <= exact * (1 + 1e-9) + mpmath.mpf(10) ** -22


@settings(max_examples=200, deadline=None)
@given(st.floats(0.1, 500), st.floats(36.9, 37.5))
def test_delta_near_the_smallest_numbers(mu, away):
    """At eps = mu (mu/2 + away) delta is about 1e-300; for large mu it was 1e-300 where it is 2.2e-300."""
    eps = mu * (mu / 2 + away)
    exact, ours = exact_delta(mu, eps), gaussian.delta_of(mu, eps=eps)
    assert ours >= max(exact, mpmath.mpf(10) ** -300 * (1 - mpmath.mpf(10) ** -15))
    assert ours <= max(exact, mpmath.mpf(10) ** -300) * (1 + 1e-6)
    assert gaussian.delta_of(mu, eps=eps * (1 + 1e-6)) <= ours


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 20), st.floats(1e-12, 0.4))
def test_eps_is_sound_and_tight(mu, delta):
    eps = gaussian.eps_of(mu, delta=delta)
    assert exact_delta(mu, eps) <= delta
    if eps > 1e-6:
        assert exact_delta(mu, eps * (1 - 1e-6)) > delta


def test_the_classical_formula_is_looser():
    for eps in (0.1, 0.5, 0.9):
        classical = eps / math.sqrt(2 * math.log(1.25 / 1e-5))
        assert gaussian.eps_of(classical, delta=1e-5) < eps


def test_edges():
    assert gaussian.eps_of(math.inf, delta=1e-5) == math.inf
    assert gaussian.eps_of(0.0, delta=1e-5) == 0
    assert gaussian.eps_of(0.001, delta=0.5) == 0
    assert gaussian.delta_of(0.0, eps=0.0) == 0
    for bad in ({"delta": 0.0}, {"delta": 1.0}, {"delta": math.nan}):
        with pytest.raises(ValueError, match="expected"):
            gaussian.eps_of(1.0, **bad)
    with pytest.raises(ValueError, match="expected eps >= 0"):
        gaussian.delta_of(1.0, eps=-1.0)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-3, 50), st.floats(1e-12, 0.4))
def test_both_ends_hold_the_exact_eps_and_are_close(mu, delta):
    lower, upper = gaussian.lower_eps_of(mu, delta=delta), gaussian.eps_of(mu, delta=delta)
    assert 0 <= lower <= upper
    assert exact_delta(mu, upper) <= delta
    assert upper == 0 or exact_delta(mu, lower) > delta
    assert upper - lower <= 1e-9 * upper + 1e-14


def test_a_lower_end_comes_with_the_bound_of_many_rounds():
    event = Gaussian(std=5.0, sensitivity=2.0, neighbors=Neighbors.REPLACE_ONE)
    found = bound([Round(mechanism=event, participation=Everyone())] * 100, delta=1e-6, both_ends=True)
    mu = 2.0 * math.sqrt(100) / 5.0
    assert exact_delta(mu, found.eps) <= 1e-6 < exact_delta(mu, found.lower)
    assert found.eps * (1 - 1e-9) < found.lower < found.eps
    drawn = Round(mechanism=event, participation=FixedSize(size=10, population=100))
    assert bound([drawn] * 100, delta=1e-6, both_ends=True).lower is None, "not known from below"


def test_account_shows_the_lower_end():
    asked = ["account", "protocol", "dp_fl", "--n", "1000", "--dim", "10", "--rounds", "20", "--delta", "1e-5"]
    asked += ["--set", "noise_multiplier=5"]
    said = CliRunner().invoke(app, asked)
    assert said.exit_code == 0
    assert "the same quantity is at least 8.72" in said.stdout
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["certified"]
    assert told["eps"] * (1 - 1e-9) <= told["lower"] <= told["eps"]
