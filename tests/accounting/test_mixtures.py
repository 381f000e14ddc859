import functools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import special, stats

from dovetail.accounting import loss_distributions
from dovetail.accounting.loss_distributions import LossDistribution
from dovetail.accounting.pairs import mixtures
from dovetail.accounting.pairs.mixtures import ShiftLaw

LAWS = {
    "one item": ([0.0, 1.25], [0.99, 0.01]),
    "rare and large": ([0.0, 0.5, 6.0], [0.9, 0.0999, 1e-4]),
    "always there": ([0.7, 1.4], [0.5, 0.5]),
    "tiny": ([0.0, 2e-3], [0.995, 0.005]),
    "one Gaussian": ([2.0], [1.0]),
}
EPS = (0.0, 1e-4, 0.01, 0.3, 1.0, 3.0)


def law_of(name):
    shifts, weights = LAWS[name]
    return ShiftLaw.dominating(np.array(shifts), np.array(weights))


@functools.cache
def tails(name):
    """P(x > a), Q(x > a), P(x <= a) and Q(x <= a) for a scan of thresholds a."""
    shifts, weights = map(np.array, LAWS[name])
    a = np.linspace(-12, 16, 28_001)[:, None]
    return (
        special.ndtr(shifts - a) @ weights,
        special.ndtr(-a[:, 0]),
        special.ndtr(a - shifts) @ weights,
        special.ndtr(a[:, 0]),
    )


def exact_delta(name, eps, *, removed):
    """By the best threshold: P(x > a) - e^eps Q(x > a), or Q(x <= a) - e^eps P(x <= a)."""
    p_above, q_above, p_below, q_below = tails(name)
    gain = p_above - math.exp(eps) * q_above if removed else q_below - math.exp(eps) * p_below
    return max(0.0, float(gain.max()))


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("coarse", [1, 16])
def test_one_release_is_never_below_the_best_test_and_close_on_a_fine_grid(name, coarse):
    law = law_of(name)
    interval = coarse * mixtures.interval_for(*law.std_and_width_of_loss, num_releases=1)
    loss = mixtures.loss(law, interval=interval)
    for eps in EPS:
        for side, removed in zip(loss.sides, (True, False), strict=True):
            exact = exact_delta(name, eps, removed=removed)
            ours = LossDistribution(interval, (side,)).delta(eps)
            assert ours >= exact * (1 - 1e-12)
            if coarse == 1:
                assert ours <= exact * 1.01 + 1e-4 * exact_delta(name, 0.0, removed=removed) + 1e-15


def test_many_releases_agree_with_an_independent_implementation():
    law = law_of("one item")
    theirs = pld.from_mixture_gaussian_mechanism(
        1.0, *LAWS["one item"], value_discretization_interval=2e-3
    ).self_compose(200)
    ours = loss_distributions.self_compose(mixtures.loss(law, interval=2e-3), 200)
    for delta in (1e-3, 1e-5, 1e-8):
        assert ours.eps(delta) == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=1e-6)


def test_masses_are_kept_but_for_what_is_rounded_up():
    for name in LAWS:
        loss = mixtures.loss(law_of(name), interval=2e-3)
        for side in loss.sides:
            assert 1 <= side.probs.sum() + side.infinite <= 1 + 1e-9
            assert side.infinite < 1e-18


def test_few_shifts_that_dominate():
    """Every shift is rounded up, by little; rare ones at the top are lost, and rare ones at the bottom rounded up."""
    shifts = np.arange(1, 3001) / 10
    weights = stats.binom.pmf(np.arange(3000), 2999, 0.4)
    law = ShiftLaw.dominating(shifts, weights / weights.sum())
    assert len(law.shifts) <= 400
    assert law.weights.sum() + law.lost == pytest.approx(1, abs=1e-12)
    assert 0 < law.lost < 1e-18
    for x in (100.0, 118.0, 120.0, 125.0, 140.0):
        at_least = law.weights[law.shifts >= x].sum() + law.lost
        assert at_least >= weights[shifts >= x].sum() * (1 - 1e-9)
        assert law.weights[law.shifts >= x * 1.02].sum() <= weights[shifts >= x].sum() * (1 + 1e-9)
    small = ShiftLaw.dominating(np.array([0.0, 1.0, 2.0]), np.array([0.25, 0.5, 0.25]))
    assert list(small.shifts) == [0, 1, 2] and list(small.weights) == [0.25, 0.5, 0.25]


def test_a_lost_shift_is_an_infinite_loss():
    law = ShiftLaw(shifts=np.array([0.0, 1.0]), weights=np.array([0.5, 0.4]), lost=0.1)
    loss = mixtures.loss(law, interval=1e-2)
    removed, added = (LossDistribution(1e-2, (side,)) for side in loss.sides)
    assert removed.delta(50.0) >= 0.1
    assert added.delta(math.log(2)) <= 1e-6


def test_an_interval_is_a_power_of_two_that_follows_the_scale():
    assert mixtures.interval_for(1.0, 10.0, num_releases=10_000) == 1 / 16
    assert mixtures.interval_for(1.0, 10.0, num_releases=1) == 1 / 128
    assert mixtures.interval_for(1e-3, 2.0**12, num_releases=10_000) == 1 / 8
