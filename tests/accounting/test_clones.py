import math

import mpmath
import numpy as np
import pytest
from enumeration import random_ldp, randomized_response, worst_delta
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from dovetail.accounting.amplification import clones
from dovetail.events import Report, Shuffled
from dovetail.statements import NotApplicable


def crowd(eps_local: float, num_users: int, **more) -> Shuffled:
    return Shuffled(report=Report(kind="generic", eps_local=eps_local), num_users=num_users, **more)


def exact_one_step(count: int, eps: float, eps_local: float) -> mpmath.mpf:
    """Sum of (P - e^eps Q)_+ over the pair itself, from its definition."""
    with mpmath.workdps(40):
        heads = 1 / (1 + mpmath.exp(-mpmath.mpf(eps_local)))
        coin = [mpmath.binomial(count, k) / mpmath.mpf(2) ** count for k in range(count + 1)]
        coin = [mpmath.mpf(0), *coin, mpmath.mpf(0)]
        total = mpmath.mpf(0)
        for k in range(count + 2):
            p = heads * coin[k] + (1 - heads) * coin[k + 1]
            q = (1 - heads) * coin[k] + heads * coin[k + 1]
            total += max(p - mpmath.exp(eps) * q, 0)
        return total


def exact_delta(num_users: int, eps: float, eps_local: float, prob: float) -> mpmath.mpf:
    with mpmath.workdps(40):
        p, n = mpmath.mpf(prob), num_users - 1
        law = [mpmath.binomial(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        return mpmath.fsum(law[c] * exact_one_step(c, eps, eps_local) for c in range(n + 1))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 80), st.floats(0.01, 8), st.floats(0, 0.999))
def test_one_step_is_the_hockey_stick_of_the_pair(count, eps_local, share):
    exact = exact_one_step(count, share * eps_local, eps_local)
    ours = clones.delta_by_clone_count(np.array([count]), eps=share * eps_local, eps_local=eps_local)[0]
    assert exact * (1 - mpmath.mpf(10) ** -14) <= ours
    assert ours <= exact * (1 + mpmath.mpf(10) ** -8) + mpmath.mpf(10) ** -13


def test_one_step_of_a_million_clones_against_fifty_digits():
    count, eps_local = 10**6, 1.0
    for eps in (0.001, 0.003, 0.005):
        with mpmath.workdps(50):
            u = (mpmath.exp(eps_local) - mpmath.exp(eps)) / (1 + mpmath.exp(eps_local))
            tilt = mpmath.tanh(mpmath.mpf(eps) / 2) / mpmath.tanh(mpmath.mpf(eps_local) / 2)
            k = int(mpmath.floor((count + 1) * (1 + tilt) / 2)) + 1
            edge = mpmath.binomial(count, k - 1) * mpmath.mpf(2) ** -count
            term, beyond, j = edge * (count - k + 1) / k, mpmath.mpf(0), k
            while term > edge * mpmath.mpf(10) ** -30:
                beyond += term
                term, j = term * (count - j) / (j + 1), j + 1
            exact = u * edge - mpmath.expm1(eps) * beyond
        ours = clones.delta_by_clone_count(np.array([count]), eps=eps, eps_local=eps_local)[0]
        assert exact <= ours <= exact * (1 + mpmath.mpf(10) ** -8)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.01, 8), st.floats(0, 0.999))
def test_a_clone_more_never_hurts(eps_local, share):
    steps = clones.delta_by_clone_count(np.arange(400), eps=share * eps_local, eps_local=eps_local)
    assert (np.diff(steps) <= 1e-11 * steps[:-1] + 1e-15).all()


@pytest.mark.parametrize(
    ("num_users", "eps_local", "eps"), [(2, 1.0, 0.5), (40, 2.0, 0.7), (40, 0.3, 0.05), (60, 5.0, 4.0)]
)
@pytest.mark.parametrize("year", [2022, 2023])
def test_delta_is_the_mean_over_counts_rounded_up(num_users, eps_local, eps, year):
    prob = math.exp(-eps_local) if year == 2022 else 2 / (math.exp(eps_local) + 1)
    exact = exact_delta(num_users, eps, eps_local, prob)
    ours = clones.delta_of(crowd(eps_local, num_users), eps=eps, year=year)
    assert exact <= ours <= exact * (1 + mpmath.mpf(10) ** -9)


def test_mass_outside_the_window_is_added():
    prob, eps, eps_local = 0.3, 0.4, 1.5
    exact = clones.expected_delta(clones.binomial_counts(199, prob, tail=1e-60), eps=eps, eps_local=eps_local)
    for tail in (0.9, 0.1, 1e-3):
        law = clones.binomial_counts(199, prob, tail=tail)
        assert law.counts.size < 200
        assert 1 <= law.weights.sum() + law.below + law.above <= 1 + 2 * tail
        assert stats.binom.cdf(law.counts[0] - 1, 199, prob) <= law.below == tail
        assert stats.binom.sf(law.counts[-1], 199, prob) <= law.above == tail
        assert clones.expected_delta(law, eps=eps, eps_local=eps_local) >= exact * (1 - 1e-12)
    narrow = clones.binomial_counts(199, prob, tail=0.9)
    assert clones.expected_delta(narrow, eps=eps, eps_local=eps_local) > 1.05 * exact


@pytest.mark.parametrize("prob", [0.537, 0.01])
def test_blocks_of_counts_stay_on_the_safe_side(monkeypatch, prob):
    law = clones.binomial_counts(10**6, prob, tail=1e-20)
    monkeypatch.setattr(clones, "_WIDEST", 100)
    monkeypatch.setattr(clones, "_BLOCKS", 500)
    blocks = clones.binomial_counts(10**6, prob, tail=1e-20)
    assert blocks.counts.size == 500 < law.counts.size
    assert 1 <= blocks.weights.sum() + blocks.below + blocks.above <= 1 + 1e-6
    for edge in (50, 200, 450):  # every block holds at least the mass of its counts
        assert blocks.weights[:edge].sum() >= law.weights[law.counts < blocks.counts[edge]].sum() * (1 - 1e-12)
    for eps in (0.0, 0.004):
        fine, coarse = (clones.expected_delta(x, eps=eps, eps_local=1.0) for x in (law, blocks))
        assert fine <= coarse <= fine * 1.01


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 10**6), st.floats(0.01, 6), st.floats(1e-12, 0.3))
@example(788_139, 5.064305468588673, 1e-12)  # the widest gap found in 20,000 random cases: 0.34 %
def test_the_root_is_sound_and_tight(num_users, eps_local, delta):
    event = crowd(eps_local, num_users)
    law = clones.binomial_counts(num_users - 1, clones.clone_probability(eps_local, year=2023), tail=1e-100)

    def delta_of(eps):
        return clones.expected_delta(law, eps=eps, eps_local=eps_local)

    try:
        eps = clones.numerical23(event, delta=delta).eps
    except NotApplicable:
        assert delta_of(eps_local * 0.998) > delta
        return
    assert delta_of(eps) <= delta * (1 + 1e-8)
    assert delta_of(eps) <= clones.delta_of(event, eps=eps) <= delta * (1 + 5e-3), "counts in blocks: a little more"
    if eps > 0:
        assert delta_of(eps * (1 - 1e-5)) > delta * (1 - 1e-8)


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("eps_local", [0.2, 1.0, 3.0])
def test_never_below_enumeration_of_randomized_response(levels, eps_local):
    eps = np.linspace(0, eps_local, 9)
    table = randomized_response(eps_local, levels)
    for num_users in (2, 3, 5, 8):
        exact = worst_delta(table, num_users, eps)
        for year in (2022, 2023):
            ours = [clones.delta_of(crowd(eps_local, num_users), eps=float(x), year=year) for x in eps]
            assert (exact <= np.array(ours) + 1e-15).all()


def test_never_below_enumeration_of_random_randomizers():
    rng, tightest = np.random.default_rng(5), 0.0
    for _ in range(40):
        eps_local, num_users = float(rng.choice([0.5, 1.5, 3.0])), int(rng.integers(2, 5))
        table = random_ldp(rng, eps_local, inputs=3, outputs=4)
        assert (table.max(axis=0) / table.min(axis=0)).max() <= math.exp(eps_local) * (1 + 1e-9)
        eps = np.linspace(0, 0.9, 4) * eps_local
        exact = worst_delta(table, num_users, eps)
        ours = np.array([clones.delta_of(crowd(eps_local, num_users), eps=float(x)) for x in eps])
        assert (exact <= ours + 1e-15).all()
        tightest = max(tightest, float((exact / ours).max()))
    assert tightest > 0.5  # the search comes near


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 10**6), st.floats(0.01, 8), st.floats(0, 0.99))
def test_the_stronger_clones_are_never_weaker(num_users, eps_local, share):
    event = crowd(eps_local, num_users)
    newer, older = (clones.delta_of(event, eps=share * eps_local, year=year) for year in (2023, 2022))
    assert newer <= older * (1 + 1e-9) + 1e-95


def test_probabilities_are_rounded_down():
    for eps_local in (1e-6, 0.5, 3.0, 40.0):
        with mpmath.workdps(40):
            assert clones.clone_probability(eps_local, year=2022) < mpmath.exp(-mpmath.mpf(eps_local))
            assert clones.clone_probability(eps_local, year=2023) < 2 / (mpmath.exp(mpmath.mpf(eps_local)) + 1)


def test_edges():
    assert clones.delta_of(crowd(1.0, 10), eps=1.0) == 0
    assert clones.numerical23(crowd(1.0, 1000), delta=0.5).eps == 0
    assert (
        clones.numerical23(crowd(1.0, 10**15), delta=1e-9).eps <= clones.numerical23(crowd(1.0, 10**11), delta=1e-9).eps
    )
    colluding = Shuffled(report=Report(kind="rr", eps_local=1.0), num_users=1000, colluders=100)
    assert clones.numerical23(colluding, delta=1e-6) == clones.numerical23(crowd(1.0, 900), delta=1e-6)


def test_refusals():
    for hopeless in (crowd(6.0, 1000), crowd(400.0, 1000), crowd(10_000.0, 1000)):
        with pytest.raises(NotApplicable, match="no gain"):
            clones.numerical23(hopeless, delta=1e-6)
    with pytest.raises(NotApplicable, match="one coordinate"):
        clones.numerical22(crowd(1.0, 1000, coordinates=2), delta=1e-6)
    for delta in (0.0, 1.0, -1e-6, math.nan):
        with pytest.raises(ValueError, match="delta"):
            clones.numerical23(crowd(1.0, 1000), delta=delta)
    with pytest.raises(ValueError, match="eps"):
        clones.delta_of(crowd(1.0, 1000), eps=-0.1)
    with pytest.raises(ValueError, match="eps_local"):
        clones.clone_probability(0.0, year=2023)
    with pytest.raises(ValueError, match="year"):
        clones.clone_probability(1.0, year=2024)
