"""The blanket composed over coordinates and rounds, against enumeration, the clones and the exact blanket of one."""

import functools
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from enumeration import histogram_law, laplace_cells, randomized_response
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, multinomial

from dovetail.accounting import certify, compose
from dovetail.accounting.amplification import blanket, clones
from dovetail.accounting.pairs import blanket_pair, symmetric
from dovetail.accounting.releases import crowds
from dovetail.events import Everyone, Report, Round, Shuffled
from dovetail.statements import Neighbors, NotApplicable, Scope, Trust, Unit

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "blanket_pair.json").read_text())
DELTA = GOLDEN["delta"]
EPS = np.array([0.0, 0.02, 0.1, 0.3, 0.7, 1.5, 3.0])
ORDERS = np.array([1.2, 3.0, 20.0])


def shuffled(kind, eps_local, n, d=1, levels=3, colluders=0):
    report = Report(kind=kind, eps_local=eps_local, levels=levels if kind == "rr" else 2)
    return Shuffled(report=report, num_users=n, coordinates=d, colluders=colluders)


def eps_of(event, delta=DELTA, pair=None):
    pair = pair or blanket_pair.pair(event)
    interval = min(1e-3, pair.std_loss * math.sqrt(pair.folds) / 100)
    return pair.loss(interval=interval).eps(delta)


def clones_eps(event):
    return eps_of(event, pair=crowds.pair(event))


def hockey_stick(p, q):
    return np.maximum(0, p[None] - np.exp(EPS)[:, None] * q[None]).sum(axis=1)


# ---------------------------------------------------------------- never below what is really run


@functools.cache
def certified(event):
    loss = blanket_pair.pair(event).loss(interval=1e-3)
    return np.array([loss.delta(eps) for eps in EPS]), blanket_pair.pair(event).renyi(ORDERS)


def covers(event, table, n, d):
    """No choice of the others' inputs, coordinate by coordinate, and of the victim's two inputs beats the pair."""
    deltas, divergences = certified(event)
    inputs = range(len(table))
    sharpest = np.zeros(len(EPS))
    for victim in itertools.permutations(inputs, 2):
        laws = [
            [histogram_law([table[x], *(table[y] for y in others)]).ravel() for x in victim]
            for others in itertools.combinations_with_replacement(inputs, n - 1)
        ]
        for chosen in itertools.combinations_with_replacement(laws, d):
            p, q = (functools.reduce(np.multiply.outer, [law[i] for law in chosen]).ravel() for i in (0, 1))
            seen = (p > 0) & (q > 0)
            p, q = p[seen], q[seen]
            exact = hockey_stick(p, q)
            assert np.all(exact <= deltas + 1e-13)
            sharpest = np.maximum(sharpest, exact)
            renyi = [math.log(p**order @ q ** (1 - order)) / (order - 1) for order in ORDERS]
            assert np.all(renyi <= divergences * (1 + 1e-12) + 1e-13)
    return sharpest


@pytest.mark.parametrize(("n", "d"), [(2, 1), (2, 3), (3, 2), (5, 1), (4, 2)])
@pytest.mark.parametrize("eps_local", [0.2, 2.0])
def test_ternary_response_is_covered(n, d, eps_local):
    event = shuffled("rr", eps_local, n, d)
    sharpest = covers(event, randomized_response(eps_local, 3), n, d)
    deltas, _ = certified(event)
    assert deltas[0] < 2 * sharpest[0], "the bound should not be far off either"


@pytest.mark.parametrize(("n", "d"), [(2, 2), (4, 1)])
def test_laplace_seen_through_cells_is_covered(n, d):
    table = laplace_cells(1.0, np.array([0.0, 0.6, 1.0]), np.array([0.0, 0.5, 1.0]))
    covers(shuffled("laplace", 1.0, n, d), table, n, d)


@pytest.mark.parametrize(("n", "eps_local"), [(12, 0.5), (12, 3.0), (7, 1.0)])
def test_two_coordinates_of_the_blanket_itself(n, eps_local):
    """E[(L_1 + ... + L_M)_+] is the curve of the pair A mu/(gamma n), A' mu/(gamma n), composed outcome by outcome.

    A and A' are the sums over M blanket draws of the density ratios to the blanket, for either input of the victim.
    """
    event = shuffled("rr", eps_local, n, 2)
    gamma, big = event.report.gamma, math.exp(eps_local)
    p, q = [], []
    for draws in range(1, n + 1):
        for first, second in itertools.product(range(draws + 1), repeat=2):
            if first + second <= draws:
                mass = binom.pmf(draws, n, gamma)
                mass *= multinomial.pmf([first, second, draws - first - second], draws, [1 / 3] * 3)
                p.append(mass * (draws + (big - 1) * first) / n)
                q.append(mass * (draws + (big - 1) * second) / n)
    p, q = np.array(p), np.array(q)
    assert p.sum() == pytest.approx(1) and q.sum() == pytest.approx(1)
    exact = hockey_stick(np.outer(p, p).ravel(), np.outer(q, q).ravel())
    loss = blanket_pair.pair(event).loss(interval=1e-4)
    ours = np.array([loss.delta(eps) for eps in EPS])
    assert np.all(ours >= exact * (1 - 1e-9))
    assert np.all(ours <= exact * 1.02 + 1e-6)


# ---------------------------------------------------------------- the hull


def excess(points, mass, t):
    """E[(s - t)_+] for t >= 0, from the law of |s|."""
    return np.array([np.maximum(points - x, 0) @ mass / 2 for x in t])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.01, 0.9), min_size=1, max_size=6, unique=True),
    st.lists(st.floats(0, 1e-2), min_size=12, max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_the_hull_is_above_the_curve_and_below_the_points(atoms, lifts, seed):
    rng = np.random.default_rng(seed)
    s, w = np.array(sorted(atoms)), rng.dirichlet(np.ones(len(atoms) + 1))[1:]
    t = np.concatenate([[0.0], np.linspace(0.05, 0.85, 10), [0.95]])
    asked = excess(s, w, t) + np.append(np.array(lifts)[:-1], 0.0)
    points, mass = symmetric.law_of_lower_hull(t, asked)
    assert mass.min() >= 0 and mass.sum() == pytest.approx(1, abs=1e-9)
    assert np.all(excess(points, mass, t) <= asked * (1 + 1e-9) + 1e-12)
    between = np.linspace(0, 0.99, 200)
    assert np.all(excess(points, mass, between) >= excess(s, w, between) * (1 - 1e-9) - 1e-15)


def test_a_curve_asked_at_its_kinks_is_found_again():
    s, w = np.array([0.0, 0.1, 0.3, 0.7]), np.array([0.4, 0.3, 0.2, 0.1])
    points, mass = symmetric.law_of_lower_hull(s, excess(s, w, s))
    assert points == pytest.approx(s) and mass == pytest.approx(w, rel=1e-9)


# ---------------------------------------------------------------- how sharp it is


@pytest.mark.parametrize("row", GOLDEN["figures"], ids=lambda row: f"{row['kind']}-{row['eps_local']}")
def test_golden_figures_of_many_coordinates(row):
    event = shuffled(row["kind"], row["eps_local"], GOLDEN["num_users"], GOLDEN["coordinates"], levels=row["levels"])
    bound = compose.bound([Round(mechanism=event, participation=Everyone())], delta=DELTA)
    assert row["blanket"] <= bound.eps <= row["blanket"] * 1.003
    assert bound.eps < row["clones"]
    assert bound.eps == pytest.approx(crowds.eps(event, delta=DELTA).eps, rel=1e-3)
    assert clones_eps(event) == pytest.approx(row["clones"], rel=3e-4)


@pytest.mark.parametrize(("kind", "eps_local", "n"), [("laplace", 0.5, 1000), ("laplace", 3.0, 300), ("rr", 1.0, 2000)])
def test_one_coordinate_is_the_exact_blanket(kind, eps_local, n):
    event = shuffled(kind, eps_local, n)
    for delta in (1e-3, 5e-6):
        exact = blanket.exact(event, delta=delta).eps
        assert exact * (1 - 1e-6) <= eps_of(event, delta) <= exact * 1.01


@pytest.mark.parametrize("kind", ["laplace", "rr"])
@pytest.mark.parametrize(("eps_local", "n", "d"), [(0.01, 10, 40), (0.3, 100, 20), (4.0, 300, 3), (8.0, 30, 2)])
def test_never_above_the_clones_by_more_than_the_grid(kind, eps_local, n, d):
    event = shuffled(kind, eps_local, n, d)
    assert eps_of(event) <= clones_eps(event) * 1.005
    assert np.all(blanket_pair.pair(event).renyi(ORDERS) <= crowds.pair(event).renyi(ORDERS) * 1.01)
    smaller = np.minimum(blanket_pair.pair(event).renyi(ORDERS), crowds.pair(event).renyi(ORDERS))
    assert crowds.renyi(event, ORDERS) == pytest.approx(np.minimum(smaller, d * eps_local), rel=1e-12)


def test_monotone_up_to_the_grid():
    base = eps_of(shuffled("laplace", 0.5, 200, 10))
    slack = 1 + 3e-3
    assert eps_of(shuffled("laplace", 0.5, 200, 11)) > base
    assert eps_of(shuffled("laplace", 0.51, 200, 10)) * slack > base
    assert eps_of(shuffled("laplace", 0.5, 210, 10)) <= base * slack
    assert eps_of(shuffled("rr", 0.5, 200, 10, levels=4)) <= eps_of(shuffled("rr", 0.5, 200, 10)) * slack
    assert eps_of(shuffled("laplace", 0.5, 250, 10, colluders=50)) == base
    assert eps_of(shuffled("laplace", 0.5, 200, 10), 1e-7) > base


def test_rounds_compose_like_coordinates_and_the_statement_names_the_proof():
    scope = Scope(trust=Trust.SHUFFLE, adversary="analyzer", neighbors=Neighbors.REPLACE_ONE, unit=Unit.USER)
    three = [Round(mechanism=shuffled("laplace", 0.5, 200, 10), participation=Everyone())] * 3
    statement = certify(three, scope, delta=DELTA)
    assert statement.eps == pytest.approx(eps_of(shuffled("laplace", 0.5, 200, 30)), rel=2e-3)
    assert "blanket-composition.md" in str(statement.proof)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (shuffled("generic", 0.5, 100), "generic and binary"),
        (shuffled("laplace", 25.0, 100), "loss of 25"),
    ],
)
def test_where_the_blanket_does_not_reach_the_clones_are_used(event, reason):
    with pytest.raises(NotApplicable, match=reason):
        blanket_pair.pair(event)
    assert crowds.theorem(event) is crowds.CLONES
    assert np.all(crowds.renyi(event, ORDERS) == np.minimum(crowds.pair(event).renyi(ORDERS), event.report.eps_local))


def test_in_a_crowd_that_no_grid_resolves_the_pair_is_that_of_the_clones():
    event = shuffled("laplace", 0.5, 10**10)
    with pytest.raises(NotApplicable, match="n=10000000000"):
        blanket.exact_delta(event, eps=0.0)
    pair = blanket_pair.pair(event)
    for eps in (0.0, 1e-5, 5e-5):
        ours = (1 + math.exp(eps)) * np.maximum(pair.points - math.tanh(eps / 2), 0) @ pair.mass / 2
        assert clones.delta_of(event, eps=eps) <= ours * (1 + 1e-12) <= clones.delta_of(event, eps=eps) * 1.03 + 1e-12


@pytest.mark.parametrize("kind", ["laplace", "rr"])
def test_a_coarser_grid_of_the_blanket_is_a_little_larger(kind):
    event = shuffled(kind, 0.5, 1000)
    for eps in (0.0, 0.02, 0.06):
        fine = blanket.exact_delta(event, eps=eps)
        assert fine * (1 - 1e-4) <= blanket.exact_delta(event, eps=eps, coarser=5.0) <= fine * 1.005
