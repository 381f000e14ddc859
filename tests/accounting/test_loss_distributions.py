"""Privacy-loss distributions composed, against sums of all their outcomes."""

import math
import warnings

import numpy as np
import pytest

from dovetail.accounting import bound, loss_distributions
from dovetail.accounting.loss_distributions import LossDistribution, Side
from dovetail.events import Everyone, Report, Round, Shuffled

STEP = 0.25


def loss(probs, *, lowest=-2, infinite=0.0):
    return LossDistribution(STEP, (Side(lowest, np.array(probs), infinite),))


def exact_delta(parts, eps):
    """By convolution: E[(1 - e^(eps - loss))_+] and the infinite loss."""
    law, lowest, finite = np.ones(1), 0, 1.0
    for probs, infinite in parts:
        law, lowest, finite = np.convolve(law, probs), lowest - 2, finite * (1 - infinite)
    losses = STEP * (lowest + np.arange(len(law)))
    return float(law @ np.maximum(0, -np.expm1(eps - losses))) + 1 - finite


FIRST, SECOND = [0.1, 0.2, 0.3, 0.25, 0.15], [0.0, 0.3, 0.4, 0.2, 0.05]


@pytest.mark.parametrize("eps", [0.0, 0.3, 1.1])
def test_copies_and_different_releases_against_convolution(eps):
    found = loss_distributions.self_compose(loss(FIRST), 7).delta(eps)
    assert found == pytest.approx(exact_delta([(FIRST, 0.0)] * 7, eps), rel=1e-9)
    for count in (1, 2, 3, 5):
        losses = [loss(FIRST), *[loss(SECOND, infinite=0.05)] * (count - 1)]
        parts = [(FIRST, 0.0), *[(SECOND, 0.05)] * (count - 1)]
        found = loss_distributions.compose(losses).delta(eps)
        assert found == pytest.approx(exact_delta(parts, eps), rel=1e-9)


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_a_release_that_is_drawn_costs_the_average(eps):
    parts = [(0.2, loss(FIRST)), (0.3, loss(SECOND, infinite=0.05)), (0.5, None)]
    ours = loss_distributions.loss_of_mixture(parts, interval=STEP).delta(eps)
    exact = 0.2 * exact_delta([(FIRST, 0.0)], eps) + 0.3 * exact_delta([(SECOND, 0.05)], eps)
    assert exact * (1 - 1e-12) <= ours <= exact * (1 + 1e-9)


def test_the_worst_of_several_counts():
    losses = [loss(FIRST), loss(SECOND, infinite=0.05)]
    deltas = [one.delta(0.3) for one in losses]
    assert max(deltas) <= loss_distributions.worst_delta(losses, eps=0.3) <= max(deltas) * (1 + 1e-8)
    assert loss_distributions.worst_eps(losses, delta=0.04) == math.inf
    eps = loss_distributions.worst_eps(losses, delta=0.1)
    assert loss_distributions.worst_delta(losses, eps=eps) <= 0.1 * (1 + 1e-8)


def test_a_moment_that_overflows_warns_nobody_and_cuts_nothing_off():
    """The outermost probability is subnormal: Chernoff's bound has no finite moment at some slopes."""
    tail = 5e-324
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = loss_distributions.self_compose(loss([tail, 0.2, 0.6, 0.2, tail]), 4)
    for eps in (0.0, 0.3, 0.6):
        exact = exact_delta([([0.0, 0.2, 0.6, 0.2, 0.0], 0.0)] * 4, eps)
        assert exact <= ours.delta(eps) <= exact * (1 + 1e-12)


def test_rounds_of_a_large_crowd_warn_nobody():
    crowd = Shuffled(report=Report(kind="generic", eps_local=2.0), num_users=10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0.1 < bound([Round(mechanism=crowd, participation=Everyone())] * 4, delta=1e-6).eps < 0.3
