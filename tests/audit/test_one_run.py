"""The bound from one run: exact error probabilities of mechanisms small enough to count out."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from dovetail.audit.training import one_run


def lower(right, *, canaries, guesses=None, delta=0.0, confidence=0.95):
    guesses = canaries if guesses is None else guesses
    return one_run.lower_bound(
        canaries=canaries, guesses=guesses, right=right, delta=delta, confidence=confidence, attack="test"
    )


def false_alarm(law, eps, *, delta=0.0, confidence=0.95, guesses=None):
    """The exact probability that the bound is above eps, for this law of the number of right guesses."""
    canaries = len(law) - 1 if guesses is None else guesses[0]
    guessed = len(law) - 1
    bounds = [
        lower(v, canaries=canaries, guesses=guessed, delta=delta, confidence=confidence).eps for v in range(len(law))
    ]
    return sum(prob for prob, bound in zip(law, bounds, strict=True) if bound > eps)


@pytest.mark.parametrize("eps", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("canaries", [7, 60])
def test_the_error_on_randomized_response_is_exact_and_nearly_used_up(eps, canaries):
    law = stats.binom.pmf(np.arange(canaries + 1), canaries, 1 / (1 + math.exp(-eps)))
    for confidence in (0.8, 0.95):
        error = false_alarm(law, eps, confidence=confidence)
        tails = np.cumsum(law[::-1])
        assert error <= 1 - confidence
        assert error == pytest.approx(max(tails[tails <= 1 - confidence], default=0.0), rel=1e-6)


@pytest.mark.parametrize(("eps", "delta"), [(0.5, 1e-3), (1.0, 0.01), (2.0, 1e-4)])
def test_the_error_where_coins_are_sometimes_shown(eps, delta):
    """Each coin is shown with probability delta, or all coins at once: both are (eps, delta)-DP for one coin."""
    canaries, truth = 50, 1 / (1 + math.exp(-eps))
    v = np.arange(canaries + 1)
    each = stats.binom.pmf(v, canaries, delta + (1 - delta) * truth)
    at_once = (1 - delta) * stats.binom.pmf(v, canaries, truth) + delta * (v == canaries)
    for law in (each, at_once):
        tails = np.cumsum(law[::-1])[::-1]
        for right in range(canaries + 1):
            bound = one_run.p_value(eps=eps, delta=delta, canaries=canaries, guesses=canaries, right=right)
            assert tails[right] <= bound * (1 + 1e-12)
        assert false_alarm(law, eps, delta=delta) <= 0.05


def test_without_the_price_of_delta_the_error_would_be_too_large():
    """The term in delta is needed: randomized response with shown coins breaks the bound for delta = 0."""
    canaries, eps, delta = 200, 1.0, 0.02
    law = stats.binom.pmf(np.arange(canaries + 1), canaries, delta + (1 - delta) / (1 + math.exp(-eps)))
    assert false_alarm(law, eps, delta=0.0) > 0.05
    assert false_alarm(law, eps, delta=delta) <= 0.05


def test_guessing_only_the_clearest_coins_costs_nothing():
    """Five coins, each seen through a channel of strong and weak evidence; the two clearest are guessed."""
    eps, canaries, guesses = 1.5, 5, 2
    ratios = np.array([math.exp(eps), math.exp(eps / 3), math.exp(-eps / 3), math.exp(-eps)])
    tails_side = np.array([1.0, 3.0, 3.0 * math.exp(eps / 3), math.exp(eps)])  # P[y | tails], up to a constant
    tails = tails_side / tails_side.sum()
    heads = tails[::-1]
    assert np.allclose(heads / tails, ratios), "log ratios of at most eps, in order"
    law = np.zeros(guesses + 1)
    strength = np.abs(np.log(ratios))
    for seen in itertools.product(range(4), repeat=canaries):
        chosen = sorted(range(canaries), key=lambda i: -strength[seen[i]])[:guesses]
        right = [heads[seen[i]] / (heads[seen[i]] + tails[seen[i]]) for i in chosen]
        right = [max(p, 1 - p) for p in right]  # guesses the likelier side
        prob = math.prod((heads[y] + tails[y]) / 2 for y in seen)
        law += prob * np.array([(1 - right[0]) * (1 - right[1]), 0, right[0] * right[1]])
        law[1] += prob * (right[0] * (1 - right[1]) + right[1] * (1 - right[0]))
    assert law.sum() == pytest.approx(1)
    above = np.cumsum(law[::-1])[::-1]
    for right_guesses in range(guesses + 1):
        bound = one_run.p_value(eps=eps, delta=0, canaries=canaries, guesses=guesses, right=right_guesses)
        assert above[right_guesses] <= bound
    assert false_alarm(law, eps, confidence=0.6, guesses=(canaries,)) <= 0.4
    assert above[2] > one_run.p_value(eps=eps / 2, delta=0, canaries=canaries, guesses=guesses, right=2)


def test_several_numbers_of_guesses_are_paid_for():
    """Three disjoint sets of randomized responses: the exact error of the best of three bounds, by counting."""
    eps, numbers = 0.5, (5, 6, 7)
    laws = {n: stats.binom.pmf(np.arange(n + 1), n, 1 / (1 + math.exp(-eps))) for n in numbers}
    error = 0.0
    for counts in itertools.product(*(range(n + 1) for n in numbers)):
        tried = dict(zip(numbers, counts, strict=True))
        _, best = one_run.best_bound_of_guesses(tried, canaries=sum(numbers), delta=0.0, confidence=0.8, attack="test")
        error += math.prod(laws[n][v] for n, v in tried.items()) * (best.eps > eps)
    assert error <= 0.2 < 1 - math.prod(1 - false_alarm(laws[n], eps, confidence=0.8) for n in numbers)
    assert best.confidence == 0.8


def test_the_bound_grows_with_right_guesses_and_shrinks_with_delta_and_confidence():
    for delta in (0.0, 1e-5, 1e-3, 1e-2):
        found = [lower(v, canaries=200, guesses=60, delta=delta).eps for v in range(61)]
        assert found == sorted(found)
        assert found[30] == 0
    at = [lower(58, canaries=200, guesses=60, delta=delta).eps for delta in (0.0, 1e-6, 1e-4, 1e-2)]
    assert at == sorted(at, reverse=True)
    assert at[0] > at[-1]
    sure = [lower(58, canaries=200, guesses=60, confidence=c).eps for c in (0.6, 0.9, 0.99, 0.9999)]
    assert sure == sorted(sure, reverse=True)


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "printed"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
)
def test_the_numbers_that_the_paper_prints(canaries, guesses, right, delta, printed):
    """arXiv:2305.08846, App. D and Sec. 7, at 95 %; one is rounded there, the other cut off."""
    assert lower(right, canaries=canaries, guesses=guesses, delta=delta).eps == pytest.approx(printed, abs=1e-3)


def test_all_right_without_delta_is_a_closed_form():
    """P[all r right] = (e^eps / (1 + e^eps))^r."""
    for guesses in (1, 10, 1000):
        root = 0.05 ** (1 / guesses)
        exact = math.log(root / (1 - root)) if root > 0.5 else 0.0
        found = lower(guesses, canaries=1000, guesses=guesses).eps
        assert found <= exact
        assert found == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"guesses": 11}, "expected 1 <= guesses <= 10"),
        ({"guesses": 0}, "expected 1 <= guesses <= 10"),
        ({"right": 6}, "expected 0 <= right <= 5"),
        ({"right": 2.5}, "expected right to be a whole number"),
        ({"delta": 1.5}, "expected 0 <= delta <= 1"),
        ({"confidence": 1.0}, "expected 0.5 < confidence < 1"),
    ],
)
def test_bad_input_is_one_sentence(changes, sentence):
    good = {"canaries": 10, "guesses": 5, "right": 3, "delta": 0.0, "confidence": 0.95, "attack": "test"}
    one_run.lower_bound(**good)
    with pytest.raises(ValueError, match=sentence):
        one_run.lower_bound(**(good | changes))
    with pytest.raises(ValueError, match="no number of guesses to try"):
        one_run.best_bound_of_guesses({}, canaries=10, delta=0.0, confidence=0.95, attack="test")
