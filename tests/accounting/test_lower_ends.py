"""Lower ends of composed losses: never above the exact number, close to the upper end, shown with the statement."""

import json
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from typer.testing import CliRunner

from dovetail.accounting import bound, loss_distributions, numerics, tilting
from dovetail.accounting.loss_distributions import LossDistribution, Side
from dovetail.accounting.pairs import symmetric
from dovetail.accounting.releases import crowds
from dovetail.accounting.tilting import LossPart
from dovetail.cli import app
from dovetail.events import Everyone, Report, Round, Shuffled

STEP = 0.125


def exact_delta(probs, lowest, times, eps):
    """The delta of a sum of so many losses, by whole numbers and in 40 digits."""
    law = [1]
    whole = [int(Fraction(float(p)) * 2**80) for p in probs]
    for _ in range(times):
        grown = [0] * (len(law) + len(whole) - 1)
        for i, a in enumerate(law):
            for j, b in enumerate(whole):
                grown[i + j] += a * b
        law = grown
    with mpmath.workdps(40):
        return sum(
            mpmath.mpf(mass) / mpmath.mpf(2) ** (80 * times) * -mpmath.expm1(mpmath.mpf(eps) - index * STEP)
            for index, mass in enumerate(law, lowest * times)
            if index * STEP > eps
        )


def lower_end(probs, lowest, times, delta):
    loss = LossDistribution(STEP, (Side(lowest, probs, 0.0),))
    return loss_distributions.self_compose(loss, times).lower_eps(delta)


@pytest.mark.parametrize("seed", range(12))
def test_never_above_the_exact_eps_and_one_step_below_at_most(seed):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(int(rng.integers(2, 7)), 0.7))
    lowest, times, delta = int(rng.integers(-4, 0)), int(rng.integers(1, 20)), 10.0 ** rng.uniform(-9, -1)
    found = lower_end(probs, lowest, times, delta)
    if found > 0:
        assert exact_delta(probs, lowest, times, found) > delta
    assert exact_delta(probs, lowest, times, found + 1.001 * STEP) <= delta


def too_large(probs, lowest, times):
    """Whether any delta that is said to be reached is not."""
    total = tilting.TotalBelow([LossPart(lowest, probs, 0.0, times)], STEP)
    first, least = total._lower_deltas(math.log(1e-3))
    said = [(first + place) * STEP for place in range(len(least)) if least[place] > 0 and first + place >= 0]
    return any(least[round(eps / STEP) - first] > exact_delta(probs, lowest, times, eps) for eps in said[::3])


def test_what_is_wrapped_around_and_the_error_of_the_transform_are_taken_away(monkeypatch):
    probs = np.array([0.3, 0.0, 0.2, 0.0, 0.5])
    summed, extent = numerics.law_of_sum, tilting.TotalBelow._choose_circle

    def smaller(self, slope, last, index):
        first, size = extent(self, slope, last, index)
        return first + size // 3, size - size // 2

    def worse(laws, size):
        law, error = summed(laws, size)
        return law + 1e-4 / math.sqrt(size), error + charged * 1e-4

    assert not too_large(probs, -2, 20)
    with monkeypatch.context() as patched:
        patched.setattr(tilting.TotalBelow, "_choose_circle", smaller)
        assert not too_large(probs, -2, 20)
        patched.setattr(tilting.TotalBelow, "_mass_outside_circle", lambda *_: 0.0)
        assert too_large(probs, -2, 20), "a near miss: what wraps around would be counted"
    for charged in (1, 0):
        monkeypatch.setattr(numerics, "law_of_sum", worse)
        assert too_large(probs, -2, 20) is (not charged)


@pytest.mark.parametrize(("folds", "eps_local"), [(1, 0.4), (3, 1.5), (40, 0.2)])
def test_both_ends_hold_the_composition_of_a_pair(folds, eps_local):
    pair = crowds._exact_pair(
        Shuffled(report=Report(kind="laplace", eps_local=eps_local), num_users=30, coordinates=folds)
    )
    finest = symmetric.repeated_loss(pair, 1).eps(1e-4)
    for parts in (24, 200, 3000):
        lower = symmetric.loss_rounded_down(pair, interval=pair.std_loss / parts).lower_eps(1e-4)
        assert (1 - 4 / parts) * finest <= lower <= finest


def test_many_rounds_are_composed_on_a_grid_that_grows_with_what_they_add_up_to():
    pair = crowds._exact_pair(Shuffled(report=Report(kind="laplace", eps_local=4.0), num_users=3))
    for times in (1, 30, 10**4, 10**6):
        loss = symmetric.repeated_loss(pair, times)
        interval = loss.interval if times == 1 else loss._interval
        points = 40 * pair.std_loss * math.sqrt(times) / interval
        assert points <= 2**20 * (1 + 1e-9), "of forty deviations"
        assert interval == symmetric.composition_interval(pair) or points >= 2**20 * (1 - 1e-9), (
            "no coarser than it must be"
        )


@pytest.mark.parametrize("times", [1, 25])
def test_bits_and_personal_budgets_come_with_a_lower_end(times):
    event = Shuffled(report=Report(kind="rr", eps_local=1.0), num_users=200, coordinates=3)
    found = bound([Round(mechanism=event, participation=Everyone())] * times, delta=1e-6, both_ends=True)
    assert 0.998 * found.eps < found.lower <= found.eps
    assert bound([Round(mechanism=event, participation=Everyone())] * times, delta=1e-6).lower is None, "on request"


def test_account_shows_it():
    asked = ["account", "protocol", "binary_sum", "--n", "1000", "--dim", "1", "--delta", "5e-6"]
    told = json.loads(CliRunner().invoke(app, [*asked, "--set", "eps_local=1", "--json"]).stdout)["certified"]
    assert 0.998 * told["eps"] < told["lower"] <= told["eps"]


def test_a_hundred_thousand_folds_are_as_tight_at_any_delta():
    event = Shuffled(report=Report(kind="rr", eps_local=0.2), num_users=1000, coordinates=100_000)
    for delta in (1e-5, 1e-12):
        found = bound([Round(mechanism=event, participation=Everyone())], delta=delta, both_ends=True)
        assert 0.99 * found.eps < found.lower
        assert "privacy-loss" in str(found.proof)
