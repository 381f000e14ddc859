"""Searches that meet a target: the point that they return was evaluated, and little less would not do."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.accounting import search, smallest_integer, smallest_noise
from dovetail.statements import NotApplicable


def test_impossible_targets_are_refused():
    with pytest.raises(ValueError, match="expected eps > 0"):
        smallest_noise(lambda noise: 1 / noise, eps=-1.0)
    with pytest.raises(ValueError, match="no noise up to 2\\^40 meets eps="):
        smallest_noise(lambda noise: 1.0, eps=0.5)


@pytest.mark.parametrize("high", [7, 10, 1000])
def test_the_smallest_whole_number(high):
    asked = []

    def eps_of(number):
        asked.append(number)
        return 1 / number

    found = smallest_integer(eps_of, eps=0.15, low=2, high=high)
    assert found == 7 and found in asked
    assert smallest_integer(eps_of, eps=5.0, low=2, high=high) == 2


@settings(max_examples=200, deadline=None)
@given(st.floats(0.1, 50), st.floats(0.5, 3), st.floats(1e-12, 0.4), st.floats(0.01, 100))
def test_smallest_eps_lands_on_the_safe_side(rate, power, delta, high):
    def delta_at(eps):
        return 0.5 * math.exp(-rate * eps**power)

    eps = search.smallest_eps(delta_at, delta=delta, high=high)
    assert delta_at(eps) <= delta
    assert delta_at(eps * (1 - 1e-8)) > delta


def test_smallest_eps_gives_up_where_nothing_holds():
    assert search.smallest_eps(lambda eps: 0.5, delta=0.1, high=1.0) == math.inf
    assert search.smallest_eps(lambda eps: math.exp(-eps), delta=1e-3, high=0.1) == pytest.approx(math.log(1e3))


def test_the_smallest_point_is_one_that_holds_to_the_last_digits():
    found = search.smallest_point(lambda x: x * x >= 2, low=0.0, high=3.0)
    assert found * found >= 2 and found == pytest.approx(math.sqrt(2), rel=2e-15)
    assert search.smallest_point(lambda x: False, low=0.0, high=3.0) == math.inf
    below = search.smallest_point(lambda x: x >= -5, low=-8.0, high=0.0)
    assert -5 <= below <= -5 * (1 - 1e-14)


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.5, 0.7])
def test_what_is_spent_is_solved_for_from_above(share):
    def eps_at(delta):
        return math.sqrt(-math.log(delta)) / 5

    def spent(eps):
        return share * 1e-6 * math.exp(eps - eps_at(1e-6))

    found = search.eps_after_spending(eps_at, spent, delta=1e-6)
    assert eps_at(1e-6 - spent(found)) <= found
    below = found * (1 - 1e-5)
    assert eps_at(1e-6 - spent(below)) > below, "not larger than it has to be"


def test_nothing_left_of_delta():
    with pytest.raises(NotApplicable, match="spent beside the noise"):
        search.eps_after_spending(lambda delta: -math.log(delta), lambda eps: 1e-8 * math.exp(eps), delta=1e-6)
    with pytest.raises(NotApplicable, match="no eps found"):
        search.eps_after_spending(lambda delta: 1 + 1e3 * delta, lambda eps: 0.0, delta=0.5, steps=1)


@settings(max_examples=300, deadline=None)
@given(
    st.floats(-6, 8),
    st.floats(0.4, 3),
    st.floats(-2, 2),
    st.sampled_from([0.0, 1e-3, 0.1]),
    st.floats(-3, 2),
    st.sampled_from([1e-6, 1e-3]),
)
def test_the_smallest_noise_meets_the_target_and_a_little_less_does_not(
    size, power, curvature, jump, log_eps, tolerance
):
    asked = []

    def eps_of(noise):
        asked.append(noise)
        mu = 10**size / noise**power
        return mu * (1 + 10**curvature * mu) * math.exp(-jump * math.floor(3 * math.log(noise)))

    eps = 10**log_eps
    try:
        noise = smallest_noise(eps_of, eps=eps, tolerance=tolerance)
    except ValueError:
        assert eps_of(2.0**40) > eps
        return
    assert noise in asked
    assert len(asked) <= (12 if jump == 0 else 60)
    assert eps_of(noise) <= eps
    assert eps_of(noise / (1 + 2 * tolerance)) > eps or noise <= 2.0**-20 * (1 + 1e-9)


def test_noise_below_which_nothing_is_known():
    assert smallest_noise(lambda noise: math.inf if noise < 1000 else 0.0, eps=1.0) == pytest.approx(1000, rel=1e-5)
    assert smallest_noise(lambda noise: math.nan if noise < 0.01 else 1e-3 / noise, eps=1.0) >= 0.01
    assert smallest_noise(lambda noise: 0.0, eps=1.0) == pytest.approx(2.0**-20)
