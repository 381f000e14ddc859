"""Binary reports that nobody tells apart: against the enumeration of all outcomes and all inputs of the others."""

import dataclasses
import json
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from grids import later
from scipy.stats import binom

from dovetail.accounting import loss_distributions
from dovetail.accounting.amplification import clones
from dovetail.accounting.pairs import binary, symmetric
from dovetail.accounting.pairs.binary import BinaryReports
from dovetail.accounting.releases import crowds
from dovetail.events import PaddedBernoulli, PaddedTopk, Report, Shuffled
from dovetail.statements import NotApplicable

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "blankets.json").read_text())["binary"]


def ones(count, prob):
    return binom.pmf(np.arange(count + 1), count, prob)


def exact(others, dummies, eps_local, eps, tilt=None):
    """The largest delta of all inputs of the others, both directions, from all outcomes."""
    p = 1 / (1 + math.exp(-eps_local))
    high = (1 + (math.tanh(eps_local / 2) if tilt is None else tilt)) / 2
    found = 0.0
    for k in range(others + 1):
        law = np.convolve(np.convolve(ones(k, p), ones(others - k, 1 - p)), ones(dummies, 0.5))
        first, second = np.convolve(law, [1 - high, high]), np.convolve(law, [high, 1 - high])
        for a, b in ((first, second), (second, first)):
            found = max(found, float(np.maximum(a - math.exp(eps) * b, 0).sum()))
    return found


def random_instances(count, seed):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        others, dummies = int(rng.integers(0, 30)), int(rng.integers(0, 8))
        eps_local = float(10 ** rng.uniform(-1.5, 0.9))
        yield others, dummies, eps_local, eps_local * float(rng.uniform(0, 0.97))


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.soak)])
def test_never_below_enumeration_and_equal_to_it_in_small_crowds(count):
    ratios = []
    for others, dummies, eps_local, eps in random_instances(count, seed=count):
        true = exact(others, dummies, eps_local, eps)
        ours = BinaryReports(others=others, places=others + dummies, eps_local=eps_local).delta(eps)
        if true > 1e-200:
            ratios.append(true / ours)
    assert len(ratios) > 0.95 * count
    assert max(ratios) <= 1, f"worst exact / certified: {max(ratios)}"
    assert min(ratios) > 1 - 1e-9


def test_looking_at_the_ends_alone_would_be_caught():
    """The worst number of ones among the others is not always 0 or all of them."""
    caught = 0
    for others, dummies, eps_local, eps in random_instances(60, seed=1):
        p = 1 / (1 + math.exp(-eps_local))
        ends = 0.0
        for k in {0, others}:
            law = np.convolve(np.convolve(ones(k, p), ones(others - k, 1 - p)), ones(dummies, 0.5))
            first, second = np.convolve(law, [1 - p, p]), np.convolve(law, [p, 1 - p])
            ends = max(ends, float(np.maximum(first - math.exp(eps) * second, 0).sum()))
        caught += ends < exact(others, dummies, eps_local, eps) * (1 - 1e-9)
    assert caught > 0


def test_a_formula_without_its_second_term_is_far_off_and_without_its_first_is_caught():
    others, eps_local, eps = 20, 1.0, 0.3
    p, alpha = 1 / (1 + math.exp(-eps_local)), math.exp(eps)
    law = ones(others, 1 - p)
    tails = np.cumsum(law[::-1])[::-1]
    values = (p - alpha * (1 - p)) * law[:-1] - (alpha - 1) * tails[1:]
    true = exact(others, 0, eps_local, eps)
    assert values.max() <= true * (1 + 1e-12)
    assert ((p - alpha * (1 - p)) * law).max() > 1.1 * true
    shifted = (p - alpha * (1 - p)) * law[:-1] - (alpha - 1) * tails[:-1]  # P(X >= j - 1) for P(X >= j)
    assert shifted.max() < 0.9 * true


@pytest.mark.parametrize(("others", "dummies", "eps_local"), [(600, 0, 0.5), (150, 500, 1.0), later(900, 40, 3.0)])
def test_blocks_of_a_larger_crowd_cost_little(others, dummies, eps_local):
    reports = BinaryReports(others=others, places=others + dummies, eps_local=eps_local)
    for share in (0.0, 0.02, 0.1):
        true = exact(others, dummies, eps_local, share * eps_local)
        assert true <= reports.delta(share * eps_local) <= true * 1.03


def by_number(others, places, inclusion, eps_local, eps):
    """As `exact`, where the number of others that report is seen; the worst inputs for each number."""
    tilt = inclusion * math.tanh(eps_local / 2)
    chances = binom.pmf(np.arange(others + 1), others, inclusion)
    return sum(chances[h] * exact(h, places - h, eps_local, eps, tilt) for h in range(min(others, places) + 1))


@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=pytest.mark.soak)])
def test_users_that_may_not_report_are_never_below_enumeration(count):
    rng = np.random.default_rng(count)
    ratios = []
    for _ in range(count):
        others, places = int(rng.integers(1, 14)), int(rng.integers(1, 18))
        inclusion, eps_local = float(rng.uniform(0.05, 0.98)), float(10 ** rng.uniform(-1, 0.8))
        reports = BinaryReports(others=others, places=places, eps_local=eps_local, inclusion=inclusion)
        eps = float(rng.uniform(0, 0.95)) * reports.eps_pure
        true = by_number(others, places, inclusion, eps_local, eps)
        try:
            ours = reports.delta(eps)
        except NotApplicable:
            continue
        ratios.append(true / ours if true > 1e-200 else 0.0)
    assert len(ratios) > 0.7 * count
    assert max(ratios) <= 1


@pytest.mark.parametrize("row", GOLDEN, ids=str)
def test_golden(row):
    pair = BinaryReports(others=row["n"] - 1, places=row["n"] - 1, eps_local=row["eps_local"]).pair(folds=row["folds"])
    loss = symmetric.folded_loss(pair, interval=symmetric.composition_interval(pair))
    ours = loss_distributions.worst_eps([loss], delta=row["delta"])
    assert ours == pytest.approx(row["eps"], rel=4e-3)
    assert ours > row.get("audited", 0.0)


def test_the_pair_composes_over_coordinates_with_different_inputs_of_the_others():
    eps_local, others = 0.8, 4
    pair = BinaryReports(others=others, places=others, eps_local=eps_local).pair(folds=2)
    loss = symmetric.folded_loss(pair, interval=1e-3)
    p = 1 / (1 + math.exp(-eps_local))
    laws = []
    for k in range(others + 1):
        law = np.convolve(ones(k, p), ones(others - k, 1 - p))
        laws.append((np.convolve(law, [1 - p, p]), np.convolve(law, [p, 1 - p])))
    for eps in (0.0, 0.1, 0.4, 0.9, 1.3):
        ours = loss_distributions.worst_delta([loss], eps=eps)
        for a, b in laws:
            for c, d in (*laws, *(pair[::-1] for pair in laws)):
                assert np.maximum(np.outer(a, c) - math.exp(eps) * np.outer(b, d), 0).sum() <= ours + 1e-13


def test_a_half_and_a_reversed_half_pair_cost_at_most_a_full_one_with_any_inputs():
    rng = np.random.default_rng(3)
    for _ in range(300):
        eps_local, others = float(rng.uniform(0.1, 3)), int(rng.integers(0, 7))
        p = 1 / (1 + math.exp(-eps_local))
        pairs = []
        for k in rng.integers(0, others + 1, 2):
            law = np.convolve(ones(int(k), p), ones(others - int(k), 1 - p))
            pairs.append((np.convolve(law, [1 - p, p]), np.convolve(law, [p, 1 - p])))
        (a1, b1), (a2, b2) = pairs
        eps = float(rng.uniform(0, 1)) * eps_local
        first, second = np.outer(a1, (a2 + b2) / 2), np.outer((a1 + b1) / 2, a2)
        found = float(np.maximum(first - math.exp(eps) * second, 0).sum())
        assert found <= exact(others, 0, eps_local, eps) * (1 + 1e-12)


def test_it_is_what_crowds_use_and_what_they_name():
    report = Report(kind="rr", eps_local=0.5)
    simple = Shuffled(report=report, num_users=100, coordinates=3)
    assert crowds.theorem(simple) is binary.BINARY
    topk = PaddedTopk(report=report, num_users=100, pad_to=120, coordinates=30, top=3, decoys=0)
    double = PaddedBernoulli(report=report, num_users=100, pad_to=60, coordinates=3, inclusion=0.3)
    for event in (simple, topk, double):
        coins = crowds.pair(event)
        by_coins = loss_distributions.worst_eps([coins.loss(interval=1e-3)], delta=1e-4)
        assert crowds.eps(dataclasses.replace(event), delta=1e-4).eps < by_coins


@pytest.mark.parametrize(("eps_local", "inclusion"), [(1e-6, 1.0), (1e-3, 0.05), (0.5, 1e-3), (1.0, 1.0)])
def test_what_is_left_of_a_report_near_its_largest_loss_is_rounded_up(eps_local, inclusion):
    reports = BinaryReports(others=1, places=1, eps_local=eps_local, inclusion=inclusion)
    for share in (0.0, 0.5, 0.9, 0.9999, 0.999998):
        eps = share * reports.eps_pure
        with mpmath.workdps(50):
            tilt = mpmath.mpf(inclusion) * mpmath.tanh(mpmath.mpf(eps_local) / 2)
            left = ((1 + tilt) - mpmath.exp(mpmath.mpf(eps)) * (1 - tilt)) / 2
        assert left <= reports.gain_of_one(eps) <= left * (1 + 1e-6)


def test_a_law_of_counts_in_blocks_is_refused(monkeypatch):
    monkeypatch.setattr(clones, "_WIDEST", 2)
    with pytest.raises(NotApplicable, match="too many to tell apart"):
        BinaryReports(others=13, places=12, eps_local=2.0, inclusion=0.51).delta(0.3)


def test_refusals():
    for bad in ({"others": -1}, {"eps_local": 0.0}, {"inclusion": 0.0}, {"inclusion": 1.1}, {"others": 1.5}):
        with pytest.raises(ValueError, match="expected"):
            BinaryReports(**({"others": 3, "places": 3, "eps_local": 1.0} | bad))
    with pytest.raises(NotApplicable, match="messages are more than the"):
        BinaryReports(others=10**8, places=10**8, eps_local=1.0).delta(0.1)
    with pytest.raises(NotApplicable, match="report as a rule"):
        BinaryReports(others=500, places=3, eps_local=1.0, inclusion=0.9).delta(0.1)
    with pytest.raises(NotApplicable, match="loss of 30"):
        BinaryReports(others=3, places=3, eps_local=30.0).pair(folds=1)
    assert BinaryReports(others=3, places=3, eps_local=1.0).delta(1.0) == 0
