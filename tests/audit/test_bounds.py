"""Duels against enumeration: no set of values may show more, and errors only weaken an attack."""

import itertools
import math

import numpy as np
import pytest

from dovetail.audit.bounds import ExactAttack, LowerBound, best_bound, disjoint_attack


def law(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.dirichlet(np.full(size, 0.7))


def exact_attack(first: np.ndarray, second: np.ndarray, **more: float) -> ExactAttack:
    with np.errstate(divide="ignore"):
        return ExactAttack(attack="a statistic", log_first=np.log(first), log_second=np.log(second), **more)


def eps_of_all_sets(first: np.ndarray, second: np.ndarray, delta: float) -> float:
    largest = 0.0
    for size in range(1, len(first) + 1):
        for chosen in itertools.combinations(range(len(first)), size):
            for p, q in ((first, second), (second, first)):
                power = p[list(chosen)].sum() - delta
                if power > 0:
                    largest = max(largest, math.log(power / q[list(chosen)].sum()))
    return largest


@pytest.mark.parametrize("seed", range(4))
def test_no_set_of_values_shows_more_and_one_shows_as_much(seed):
    rng = np.random.default_rng(seed)
    first, second = law(rng, 8), law(rng, 8)
    for delta in (0.0, 1e-3, 0.1, 0.4):
        found = exact_attack(first, second).eps(delta=delta).eps
        assert found <= eps_of_all_sets(first, second, delta)
        assert found == pytest.approx(eps_of_all_sets(first, second, delta), abs=1e-7)


def test_delta_is_the_hockey_stick_and_the_inverse_of_eps():
    rng = np.random.default_rng(5)
    first, second = law(rng, 50), law(rng, 50)
    fight = exact_attack(first, second)
    for eps in (0.0, 0.3, 1.0, 2.0):
        sticks = [np.maximum(p - math.exp(eps) * q, 0).sum() for p, q in ((first, second), (second, first))]
        assert fight.delta(eps=eps) <= max(sticks)
        assert fight.delta(eps=eps) == pytest.approx(max(sticks), abs=1e-8)
        if fight.delta(eps=eps) > 1e-6:
            assert fight.eps(delta=fight.delta(eps=eps)).eps == pytest.approx(eps, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_errors_within_the_slack_never_make_an_attack_look_stronger(seed):
    rng = np.random.default_rng(seed)
    first, second = law(rng, 30), law(rng, 30)
    slack = 1e-3
    for _ in range(20):
        wrong = [np.maximum(0, p + rng.uniform(-1, 1, 30) * slack / 30) for p in (first, second)]
        seen = exact_attack(*wrong, slack=slack)
        for delta in (0.0, 1e-3, 0.05):
            assert seen.eps(delta=delta).eps <= eps_by_ratio(first, second, delta) + 1e-9
        for eps in (0.0, 0.5, 2.0):
            assert seen.delta(eps=eps) <= exact_attack(first, second).delta(eps=eps) + 1e-8


def test_errors_that_all_help_the_attack_are_made_up_for():
    first, second, slack = np.array([0.3, 0.7]), np.array([0.01, 0.99]), 1e-3
    moved = slack * np.array([1, -1])
    helped = exact_attack(first + moved, second - moved, slack=slack)
    for delta in (0.0, 0.01, 0.2):
        assert helped.eps(delta=delta).eps <= eps_by_ratio(first, second, delta)
    for eps in (0.0, 1.0, 3.0):
        assert helped.delta(eps=eps) <= exact_attack(first, second).delta(eps=eps) + 1e-8


def eps_by_ratio(first: np.ndarray, second: np.ndarray, delta: float) -> float:
    largest = 0.0
    for p, q in ((first, second), (second, first)):
        order = np.argsort(-p / q)
        power = np.cumsum(p[order]) - delta
        alarm = np.cumsum(q[order])
        largest = max(largest, *np.log(power[power > 0] / alarm[power > 0]))
    return largest


def test_disjoint_supports_have_no_finite_eps_and_slack_takes_that_away():
    assert disjoint_attack("a name").eps(delta=0.5).is_unbounded
    partly = exact_attack(np.array([0.1, 0.9]), np.array([0.0, 1.0]))
    assert partly.eps(delta=0.05).is_unbounded
    assert partly.eps(delta=0.1).eps < 1e-6
    assert not exact_attack(np.array([0.1, 0.9]), np.array([0.0, 1.0]), slack=1e-9).eps(delta=0.05).is_unbounded


def test_what_is_known_at_delta_0_counts_there_alone():
    half = np.full(2, 0.5)
    fight = exact_attack(half, half, pure_eps=3.0)
    assert fight.eps(delta=0.0).eps == 3.0
    assert fight.eps(delta=1e-9).eps == 0.0


def test_the_best_of_several_and_bad_input():
    low, high = (LowerBound(eps=eps, delta=0.1, attack="a") for eps in (0.5, math.inf))
    assert best_bound([low, high]) is high
    assert high.is_unbounded
    assert not low.is_unbounded
    with pytest.raises(ValueError, match="expected eps >= 0"):
        LowerBound(eps=math.nan, delta=0.1, attack="a")
    with pytest.raises(ValueError, match="same values"):
        ExactAttack(attack="a", log_first=np.zeros(2), log_second=np.zeros(3))
    with pytest.raises(ValueError, match="pure_eps must not be negative"):
        exact_attack(np.ones(1), np.ones(1), pure_eps=-1.0)
