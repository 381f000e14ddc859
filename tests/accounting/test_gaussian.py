import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.accounting import gaussian


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
