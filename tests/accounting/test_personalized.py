import dataclasses
import json
import math
from collections import defaultdict
from pathlib import Path

import mpmath
import numpy as np
import pytest
from grids import diagonal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dovetail.accounting.amplification import blanket
from dovetail.accounting.conversion import eps_of
from dovetail.accounting.pairs import binomial, personal, symmetric
from dovetail.accounting.pairs.binomial import Coins, PoissonBinomialPair, clone_counts, clone_counts_by_tail_bounds
from dovetail.accounting.releases import personalized
from dovetail.accounting.search import smallest_eps
from dovetail.events import Personalized

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "personalized.json").read_text())
GRID = tuple(np.linspace(0.05, 1, 10_000))
KINDS = ("clip_laplace", "laplace", "rr")


# ---------------------------------------------------------------- exact divergences, by enumeration


def shuffled(pmfs):
    """The exact law of the multiset of independent reports: {counts: probability}."""
    law = {(0,) * len(pmfs[0]): 1.0}
    for pmf in pmfs:
        grown = defaultdict(float)
        for counts, prob in law.items():
            for outcome, chance in enumerate(pmf):
                key = (*counts[:outcome], counts[outcome] + 1, *counts[outcome + 1 :])
                grown[key] += prob * chance
        law = grown
    return law


def hockey_stick(p, q, eps):
    return math.fsum(max(0.0, p[key] - math.exp(eps) * q.get(key, 0.0)) for key in p)


def exact_delta(first, second, others, eps):
    p, q = shuffled([first, *others]), shuffled([second, *others])
    return max(hockey_stick(p, q, eps), hockey_stick(q, p, eps))


def exact_renyi(first, second, others, order):
    p, q = shuffled([first, *others]), shuffled([second, *others])
    forward, backward = (math.fsum(a[k] ** order * b[k] ** (1 - order) for k in a) for a, b in ((p, q), (q, p)))
    return math.log(max(forward, backward)) / (order - 1)


def random_table(rng, eps_local, inputs, outcomes):
    """Rows within a factor e^eps_local of each other, often at the very edge of it."""
    base = rng.dirichlet(np.full(outcomes, rng.choice([0.5, 5.0])))
    rows = []
    for _ in range(inputs):
        tilt = rng.uniform(0, eps_local, outcomes) if rng.random() < 0.5 else eps_local * rng.integers(0, 2, outcomes)
        rows.append(base * np.exp(tilt / 2))
    rows = np.array(rows)
    return rows / rows.sum(axis=1, keepdims=True)


def clone_probs(event, victim, far=0.0):
    """q_i of the honest others for each region of the victim's outcomes."""
    return tuple(
        (mass, coins.probs_by_user()) for mass, coins in personal._fewest_clones(event, np.array([victim]), far)
    )


def clone_probs_of_tables(victim, others):
    """The victim's eps and the q_i (docs/proofs/personalized-clones.md) of tables, one row an input."""
    top, bottom = victim.max(axis=0), victim.min(axis=0)
    eps_local = float(np.log(top / bottom).max()) * (1 + 1e-13) + 1e-15
    floors = np.array([(table.min(axis=0) / top).min() for table in others])
    return eps_local, np.minimum(1.0, floors * 2 / (1 + math.exp(-eps_local)) * (1 - 1e-13))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(2, 3))
def test_never_below_the_exact_delta_of_random_heterogeneous_randomizers(seed, users, outcomes):
    rng = np.random.default_rng(seed)
    tables = [random_table(rng, rng.choice([0.3, 1.0, 3.0]), 2, outcomes) for _ in range(users)]
    victim, others = tables[0], tables[1:]
    eps_local, probs = clone_probs_of_tables(victim, others)
    inputs = [table[rng.integers(2)] for table in others]
    for share in (0.0, 0.2, 0.5, 0.9):
        exact = exact_delta(victim[0], victim[1], inputs, share * eps_local)
        assert PoissonBinomialPair(((1.0, probs),), eps_local).delta(share * eps_local) >= exact * (1 - 1e-12)
    exact = exact_renyi(victim[0], victim[1], inputs, 4.0)
    assert renyi_of_clones(probs, eps_local, np.array([4.0]))[0] >= exact * (1 - 1e-12) - 1e-15


def renyi_of_clones(probs, eps_local, orders):
    return symmetric.pair_dominating_curve(
        PoissonBinomialPair(((1.0, probs),), eps_local).delta, eps_pure=eps_local
    ).renyi(orders)


def rr_row(eps_local, levels, value):
    row = np.full(levels, 1.0)
    row[value] = math.exp(eps_local)
    return row / row.sum()


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("eps_locals", [(0.4, 1.0, 2.0, 0.7, 1.3), (3.0, 0.1, 0.1, 0.1), (1.0, 4.0)])
def test_randomized_response_with_unequal_budgets_by_enumeration(eps_locals, levels):
    event = Personalized(kind="rr", eps_locals=eps_locals, levels=levels)
    for victim, eps_local in enumerate(eps_locals):
        rest = [e for i, e in enumerate(eps_locals) if i != victim]
        for value in range(levels):
            others = [rr_row(e, levels, value) for e in rest]
            pair = rr_row(eps_local, levels, 0), rr_row(eps_local, levels, 1)
            for eps in (0.0, 0.1 * eps_local, 0.5 * eps_local):
                ours = personalized.delta(event, eps=eps, victim=victim)
                assert ours >= exact_delta(*pair, others, eps) * (1 - 1e-12)
                assert personalized.delta(event, eps=eps) >= ours * (1 - 1e-12)


def binned(kind, eps_local, x, edges):
    """The law of the cell that a report falls in: by data processing, its divergences are lower bounds."""
    if kind == "laplace":
        return np.diff(stats.laplace.cdf(edges, x, 1 / eps_local))
    inside = np.clip(edges, 0, 1)
    cdf = stats.laplace.cdf(inside, x, 1 / eps_local)
    return np.diff((cdf - cdf[0]) / (cdf[-1] - cdf[0]))


@pytest.mark.parametrize("kind", ["laplace", "clip_laplace"])
@pytest.mark.parametrize("eps_locals", [(0.5, 0.6, 0.8), (1.0, 0.5, 0.3), (2.0, 2.1, 2.2, 2.3), (4.0, 1.0, 1.0, 1.0)])
def test_laplace_kinds_are_never_below_what_a_histogram_of_the_reports_shows(kind, eps_locals):
    event = Personalized(kind=kind, eps_locals=eps_locals)
    edges = np.array([-np.inf, -4, -1.5, -0.5, 0, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, np.inf])
    if kind == "clip_laplace":
        edges = np.linspace(0, 1, 9)
    pair = binned(kind, eps_locals[0], 0.0, edges), binned(kind, eps_locals[0], 1.0, edges)
    worlds = [[binned(kind, e, x, edges) for e in eps_locals[1:]] for x in (0.0, 1.0, 0.5)]
    clones = [PoissonBinomialPair(clone_probs(event, 0, far=far), eps_locals[0]) for far in (1e-3, 0.1, 0.4)]
    for eps in (0.0, 0.1 * eps_locals[0], 0.4 * eps_locals[0]):
        exact = max(exact_delta(*pair, others, eps) for others in worlds)
        assert personalized.delta(event, eps=eps, victim=0) >= exact * (1 - 1e-12)
        for one in clones:
            assert one.delta(eps) >= exact * (1 - 1e-12)


# ---------------------------------------------------------------- the pieces


def density(kind, eps_local, x, y):
    plain = eps_local / 2 * np.exp(-eps_local * np.abs(y - x))
    if kind == "laplace":
        return plain
    return plain / (1 - (np.exp(-eps_local * x) + np.exp(-eps_local * (1 - x))) / 2)


@pytest.mark.parametrize("kind", ["laplace", "clip_laplace"])
@pytest.mark.parametrize(("eps_victim", "eps_other"), [(1.0, 0.3), (0.3, 1.0), (2.0, 2.0), (8.0, 0.05)])
def test_clone_probabilities_are_the_infimum_of_the_density_ratio(kind, eps_victim, eps_other):
    x = np.linspace(0, 1, 41)
    y = np.linspace(0, 1, 41) if kind == "clip_laplace" else np.linspace(-40, 41, 1621)
    ours = density(kind, eps_other, x[:, None], y).min(axis=0)
    floor = (ours / density(kind, eps_victim, x[:, None], y).max(axis=0)).min()
    ((_, probs),) = clone_probs(Personalized(kind=kind, eps_locals=(eps_victim, eps_other)), 0)
    expected = min(1.0, floor * 2 / (1 + math.exp(-eps_victim)))
    assert probs[0] <= expected * (1 + 1e-12)
    assert probs[0] >= expected * (1 - 1e-9) - (1e-10 if eps_other > eps_victim else 0)


def test_a_far_region_gives_tighter_scales_their_share():
    event = Personalized(kind="laplace", eps_locals=(0.5, 0.6))
    (far, far_probs), (near, near_probs) = clone_probs(event, 0, far=0.01)
    assert (far, near) == (0.01, 0.99)
    assert far_probs[0] == 0
    reach = math.log(100) / 0.5
    exact = 0.99 * 0.6 / 0.5 * math.exp(-0.6 - 0.1 * reach) * 2 / (1 + math.exp(-0.5))
    assert near_probs[0] == pytest.approx(exact, rel=1e-9)


def test_the_law_of_the_clones_is_the_poisson_binomial():
    rng = np.random.default_rng(1)
    probs = rng.uniform(0, 1, 300)
    exact = [mpmath.mpf(1)]
    for q in probs:
        exact = [
            (exact[k] * (1 - mpmath.mpf(q)) if k < len(exact) else 0) + (exact[k - 1] * mpmath.mpf(q) if k else 0)
            for k in range(len(exact) + 1)
        ]
    law = clone_counts(probs)
    masses, first = law.weights, law.counts[0]
    assert 0 < law.below < 1e-280
    for k in range(0, len(masses), 7):
        assert masses[k] == pytest.approx(float(exact[first + k]), rel=1e-11, abs=0)
    assert masses.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("users", "eps_local"), [(2, 1.0), (30, 0.5), (30, 4.0), (400, 1.5)])
def test_equal_budgets_are_the_clone_bound_with_p_2_over_e_plus_1(users, eps_local):
    event = Personalized(kind="rr", eps_locals=(eps_local,) * users)
    ((_, probs),) = clone_probs(event, 0)
    assert probs == pytest.approx(np.full(users - 1, 2 / (math.exp(eps_local) + 1)), rel=1e-12)
    biased = math.exp(eps_local) / (1 + math.exp(eps_local))
    counts = np.arange(users)
    chance = stats.binom.pmf(counts, users - 1, 2 / (math.exp(eps_local) + 1))
    for eps in (0.0, 0.1 * eps_local, 0.3 * eps_local):
        total = 0.0
        for c, mass in zip(counts, chance, strict=True):
            a = np.arange(c + 2)
            coins, with_victim = stats.binom.pmf(a, c, 0.5), stats.binom.pmf(a - 1, c, 0.5)
            p, q = biased * with_victim + (1 - biased) * coins, (1 - biased) * with_victim + biased * coins
            total += mass * np.maximum(0, p - math.exp(eps) * q).sum()
        ours = personalized.delta(event, eps=eps)
        assert total * (1 - 1e-11) <= ours
        assert ours <= total * (1 + 1e-7) + 1e-14


@pytest.mark.parametrize("eps_local", [1e-4, 0.3, 2.0, 9.0])
def test_renyi_of_the_clones_as_a_pair_against_fifty_digits(eps_local):
    probs = np.linspace(0.05, 0.6, 20)
    law = clone_counts(probs)
    masses, first = law.weights, law.counts[0]
    orders = np.array([1.05, 2.0, 7.5, 60.0, 400.0])
    ours = renyi_of_clones(probs, eps_local, orders)
    with mpmath.workdps(50):
        big = mpmath.exp(eps_local)
        for order, value in zip(orders, ours, strict=True):
            total = mpmath.mpf(0)
            for k, mass in enumerate(masses):
                n = first + k + 1
                for a in range(n + 1):
                    common = mpmath.binomial(n, a) * mpmath.mpf(2) ** (1 - n) / (n * (big + 1))
                    p, q = common * (big * a + n - a), common * (a + big * (n - a))
                    total += mpmath.mpf(mass) * p ** mpmath.mpf(order) * q ** (1 - mpmath.mpf(order))
            total /= mpmath.fsum(mpmath.mpf(m) for m in masses)
            exact = mpmath.log(total) / (order - 1)
            assert value >= exact
            assert value <= exact * 1.05


def test_nodes_and_rounding_counts_cost_little_and_never_help():
    probs = np.linspace(0.1, 0.9, 2000)
    law = clone_counts(probs)
    orders = np.array([1.5, 4.0, 32.0, 200.0])
    ours = renyi_of_clones(probs, 1.0, orders)
    masses, first = law.weights, law.counts[0]
    moments = np.zeros(len(orders))
    for c in range(first, first + len(masses)):
        if masses[c - first] < 1e-200:
            continue
        a = np.arange(c + 2)
        log_binomial = stats.binom.logpmf(a, c + 1, 0.5) + math.log(2)
        e = math.e
        log_p = log_binomial + np.log((e * a + c + 1 - a) / ((c + 1) * (e + 1)))
        log_q = log_binomial + np.log((a + e * (c + 1 - a)) / ((c + 1) * (e + 1)))
        for i, order in enumerate(orders):
            moments[i] += masses[c - first] * np.exp(order * log_p + (1 - order) * log_q).sum()
    exact = np.log(moments) / (orders - 1)
    assert (ours >= exact * (1 - 1e-9)).all()
    assert (ours <= exact * [1.01, 1.01, 1.01, 1.05]).all(), "far tails are asked at few eps"


# ---------------------------------------------------------------- golden numbers


@pytest.mark.parametrize("row", GOLDEN["one_coordinate"], ids=str)
def test_golden_one_coordinate(row):
    event, delta = Personalized(kind=row["kind"], eps_locals=GRID), GOLDEN["one_coordinate_delta"]
    victim = int(np.argmin(np.abs(np.array(GRID) - row["eps_local"])))
    assert clones_eps(event, delta, victim) == pytest.approx(row["eps"], abs=6e-5)
    ours = personalized.eps(event, delta=delta, victim=victim)
    assert ours.eps <= row["eps"] + 6e-5, "the blanket only helps"
    assert personalized.delta(event, eps=ours.eps, victim=victim) <= delta


def clones_eps(event, delta, victim):
    """By clones alone, the best of the regions."""
    top = event.eps_locals[victim]
    pairs = [PoissonBinomialPair(hiding, top) for hiding in personal._ways_to_hide(event, np.array([victim]))]
    return min(smallest_eps(pair.delta, delta=delta, high=top) for pair in pairs)


@pytest.mark.parametrize("row", GOLDEN["all_coordinates"], ids=str)
def test_golden_all_coordinates(row):
    event, delta = Personalized(kind=row["kind"], eps_locals=GRID), GOLDEN["all_coordinates_delta"]
    orders = 1 + np.geomspace(0.5, 200, 200)
    by_order = [
        eps_of(orders, 7850 * renyi_of_clones(probs, 1.0, orders), delta=delta)
        for ((_, probs),) in personal._ways_to_hide(event, np.array([len(GRID) - 1]))
    ]
    assert min(by_order) == pytest.approx(row["eps"], rel=4e-3)
    whole = dataclasses.replace(event, coordinates=7850)
    assert personalized.eps(whole, delta=delta, victim=len(GRID) - 1).eps < row["eps"]


def test_golden_an_outlier_among_careful_users():
    event = Personalized(kind="clip_laplace", eps_locals=(8.0,) + (0.05,) * 9999)
    assert clones_eps(event, 1e-8, 0) == pytest.approx(GOLDEN["eight_among_0.05"], abs=5e-4)
    own = personalized.eps(event, delta=1e-8, victim=0).eps
    assert own < GOLDEN["eight_among_0.05"]
    assert personalized.eps(event, delta=1e-8).eps == own


@pytest.mark.soak  # tests/guarantee/test_quotes.py has the same figures from the command's side
def test_the_maximum_over_users_of_the_published_settings():
    for kind, one, every in (("clip_laplace", 0.0287, 2.196), ("laplace", 0.0656, 4.73)):
        assert personalized.eps(Personalized(kind=kind, eps_locals=GRID), delta=1e-8).eps <= one
        event = Personalized(kind=kind, eps_locals=GRID, coordinates=7850)
        assert personalized.eps(event, delta=3.6e-5).eps <= every


# ---------------------------------------------------------------- every user


@pytest.mark.parametrize(("kind", "coordinates"), diagonal(KINDS, [1, 50]))
def test_no_user_is_answered_below_its_own_bound(kind, coordinates):
    rng = np.random.default_rng(0)
    budgets = tuple(rng.uniform(0.2, 2.0, 24))
    event = Personalized(kind=kind, eps_locals=budgets, coordinates=coordinates, levels=3)
    shared = [bound.eps for bound in personalized.bounds_per_user(event, delta=1e-4)]
    worst = personalized.eps(event, delta=1e-4).eps
    some = range(0, 24, 8)
    own = [personalized.eps(event, delta=1e-4, victim=user).eps for user in some]
    for user, mine in zip(some, own, strict=True):
        assert mine * 0.98 <= shared[user] <= min(1.3 * mine, coordinates * budgets[user] * 1.1 + 1e-12)
        assert mine <= worst * (1 + 1e-9)
    largest = personalized.eps(event, delta=1e-4, victim=int(np.argmax(budgets))).eps
    assert worst <= max(*own, largest) * 1.03


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from(KINDS),
    st.lists(st.floats(0.05, 4), min_size=3, max_size=12),
    st.floats(0.01, 0.9),
    st.floats(1.01, 3),
)
def test_a_group_is_never_answered_below_its_members(kind, budgets, share, factor):
    event = Personalized(kind=kind, eps_locals=tuple(budgets), levels=3)
    members = np.argsort(budgets)[: max(2, int(share * len(budgets)))]
    top = max(budgets[m] for m in members)
    hidings = personal._ways_to_hide(event, members)
    for eps in (0.0, 0.1, 0.5):
        group = min(PoissonBinomialPair(hiding, top).delta(eps) for hiding in hidings)
        for member in members:
            assert group >= personalized.delta(event, eps=eps, victim=int(member)) * (1 - 1e-9) - 1e-15


@pytest.mark.parametrize("kind", KINDS)
def test_colluders_cost_and_more_users_help(kind):
    base = Personalized(kind=kind, eps_locals=(1.0,) * 200)
    fewer = Personalized(kind=kind, eps_locals=(1.0,) * 200, colluders=50)
    same = Personalized(kind=kind, eps_locals=(1.0,) * 150)
    at = {"delta": 1e-5, "victim": 0}
    assert personalized.eps(fewer, **at).eps == personalized.eps(same, **at).eps > personalized.eps(base, **at).eps
    mixed = Personalized(kind=kind, eps_locals=(1.0, *[0.2] * 100, *[0.9] * 100), colluders=100)
    careless = Personalized(kind=kind, eps_locals=(1.0, *[0.9] * 100))
    ((_, left),), ((_, expected),) = clone_probs(mixed, 0), clone_probs(careless, 0)
    if kind != "laplace":
        assert left == pytest.approx(expected, rel=1e-9)
    assert left.sum() <= clone_probs(Personalized(kind=kind, eps_locals=mixed.eps_locals), 0)[0][1].sum()


# ---------------------------------------------------------------- outside its hypotheses


def test_refusals():
    event = Personalized(kind="rr", eps_locals=(1.0, 2.0))
    for delta in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="delta"):
            personalized.eps(event, delta=delta)
    with pytest.raises(ValueError, match="eps"):
        personalized.delta(event, eps=-1.0)
    with pytest.raises(ValueError, match="victim"):
        personalized.eps(event, delta=1e-5, victim=2)
    with pytest.raises(ValueError, match="probabilities"):
        PoissonBinomialPair(((1.0, np.array([0.5, 1.5])),), 1.0).delta(0.1)
    for given_budgets in ((), (1.0,), (1.0, -1.0), (1.0, math.nan)):
        with pytest.raises(ValueError, match="expected"):
            Personalized(kind="rr", eps_locals=given_budgets)
    assert np.isinf(personalized.renyi(event, np.array([1.0, 0.5, np.inf]), 0)).all()


def test_never_worse_than_the_local_guarantee():
    event = Personalized(kind="laplace", eps_locals=(0.05, 3.0, 3.0), coordinates=4)
    assert personalized.eps(event, delta=1e-12, victim=0).eps <= 4 * 0.05
    assert personalized.delta(event, eps=0.05, victim=0) == 0


# ---------------------------------------------------------------- many users


@pytest.mark.parametrize("kind", KINDS)
def test_classes_of_budgets_hide_no_more_than_their_members(kind, monkeypatch):
    monkeypatch.setattr(personal, "_MOST_CLASSES", 20)
    event = Personalized(kind=kind, eps_locals=tuple(np.geomspace(0.05, 3.0, 1500).tolist()), levels=3, colluders=40)
    victims = np.arange(700, 720)
    one_by_one = personal._ways_to_hide(event, victims), personal._estimate_clone_and_plateau_stds(event, victims)
    for cached in (personal.budget_classes, personal._draws_for_any_victim):
        cached.cache_clear()
    monkeypatch.setattr(personal, "MANY_COINS", 1000)
    together = personal._ways_to_hide(event, victims), personal._estimate_clone_and_plateau_stds(event, victims)
    personal.budget_classes.cache_clear()
    for fine, coarse in zip(one_by_one[0], together[0], strict=True):
        for (_, every), (_, classes) in zip(fine, coarse, strict=True):
            more, fewer = every.probs_by_user(), classes.probs_by_user()
            assert len(more) == 1500 - 1 - 40
            assert len(fewer) == len(more)
            assert (fewer <= more * (1 + 1e-12)).all(), "sorted, no user hides more than in truth"
            assert fewer.sum() >= 0.8 * more.sum()
    assert all(coarse >= fine for fine, coarse in zip(one_by_one[1], together[1], strict=True))


@pytest.mark.parametrize("half_width", [0.02, 0.5, 3.0])
@pytest.mark.parametrize("eps_victim", [0.2, 1.0, 6.0])
def test_who_hides_behind_a_plateau_rises_and_then_falls_with_the_budget(eps_victim, half_width):
    floors = blanket.laplace_blanket_probs(np.geomspace(1e-3, eps_victim, 4000), eps_victim, half_width)
    rising = np.diff(floors) > 1e-12
    assert not np.any(rising[1:] & ~rising[:-1] & (np.diff(floors)[:-1] < -1e-12)), "no second rise after a fall"
    top = int(np.argmax(floors))
    assert (np.diff(floors[: top + 1]) >= -1e-12).all()
    assert (np.diff(floors[top:]) <= 1e-12).all()


def test_a_million_coins_in_classes_are_never_more_heads_than_there_are():
    rng = np.random.default_rng(4)
    probs = rng.uniform(0.0, 1.0, 30_000)
    law = clone_counts(probs)
    mean = float(law.counts @ law.weights)
    assert 0.99 * probs.sum() <= mean <= probs.sum()
    assert law.weights.sum() + law.below == pytest.approx(1, abs=1e-9)
    coins = Coins(np.array([0.01, 0.02]), np.array([10**6, 10**6]))
    many = binomial._clone_counts_by_classes(coins)
    assert float(many.counts @ many.weights) == pytest.approx(3e4, rel=1e-8)
    deviation = math.sqrt(float((many.counts - 3e4) ** 2 @ many.weights))
    assert deviation == pytest.approx(math.sqrt(10**6 * (0.0099 + 0.0196)), rel=1e-6)
    assert 3e4 - 0.5 * deviation < float(clone_counts(coins).counts @ clone_counts(coins).weights) < 3e4


def shortfall(coins):
    """The largest exact P(C <= k) over that of the tail bounds, with what they leave out below at no clones."""
    exact = binomial._convolve([(np.array([1 - q, q]), 0, 0.0) for q in coins.probs_by_user()], 0.0, 0)
    cdf = np.concatenate([np.zeros(exact.counts[0]), np.cumsum(exact.weights)])
    law = clone_counts_by_tail_bounds(coins)
    ours = law.below + np.cumsum(law.weights)
    assert ours[-1] == pytest.approx(1, abs=1e-9)
    last = np.append(law.counts[1:], len(cdf)) - 1  # counts from one on are rounded down to it until the next
    before = cdf[law.counts[0] - 1] / law.below if law.counts[0] else 0.0
    return max(before, float((cdf[np.minimum(last, len(cdf) - 1)] / ours).max()))


@pytest.mark.parametrize("seed", range(8))
def test_a_law_that_is_bounded_is_never_more_heads_than_there_are(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(600, 1500))
    drawn = (rng.uniform(0, 1, size), rng.beta(0.2, 3, size), rng.beta(9, 0.4, size), np.full(size, 0.5))[seed % 4]
    coins = Coins(*np.unique(drawn, return_counts=True))
    if coins.std < 8:
        coins = Coins(coins.probs, coins.counts * math.ceil(70 / coins.std**2))
    worst = shortfall(coins)
    assert worst <= 1 + 1e-9
    monkeypatch.setattr(binomial, "_BERRY_ESSEEN", 0.0)
    assert shortfall(coins) > 1 + 1e-9, "a Gaussian's tails without what the limit costs"


def test_lower_tails_far_out_are_no_less_than_chernoffs_at_its_best_slope():
    coins = Coins(np.array([0.05, 0.5]), np.array([400, 1000]))
    law, slopes = clone_counts_by_tail_bounds(coins), np.geomspace(1e-3, 3, 20_000)
    fewer = law.below + np.cumsum(law.weights) - law.weights  # P(C <= count - 1)
    log_mean = np.log1p(np.multiply.outer(np.expm1(-slopes), coins.probs)) @ coins.counts
    best = np.exp((np.multiply.outer(law.counts - 1, slopes) + log_mean).min(axis=1))
    far = (best > 1e-12) & (best < 0.3 / coins.std)  # where the normal approximation's error is larger
    assert far.sum() >= 5
    assert (best[far] <= fewer[far] * (1 + 1e-5)).all() and (fewer[far] <= 1.03 * best[far]).all()


def test_the_larger_of_two_pairs_dominates_both():
    event = Personalized(kind="laplace", eps_locals=tuple(np.linspace(0.1, 1.0, 300).tolist()), coordinates=5)
    small, large = (personal.pair(event, np.array([user])) for user in (20, 299))
    assert not small.dominates(large)
    both = symmetric.upper_envelope(small, large)
    t = np.linspace(0, 0.5, 1001)
    for one in (small, large):
        assert (both.excess(t) >= one.excess(t) * (1 - 1e-12)).all()
    assert (
        both.excess(large.points) <= 1.05 * np.maximum(small.excess(large.points), large.excess(large.points))
    ).all()


def test_a_pair_dominates_those_whose_curves_are_below_its_own_and_no_others():
    event = Personalized(kind="clip_laplace", eps_locals=tuple(np.linspace(0.1, 1.0, 300).tolist()), coordinates=5)
    small, large = (personal.pair(event, np.array([user])) for user in (150, 299))
    assert large.dominates(small)
    assert not small.dominates(large)
    assert not large.dominates(dataclasses.replace(small, folds=6))
    higher = dataclasses.replace(small, mass=small.mass + 1e-3 * (small.points == small.points[-1]))
    assert not large.dominates(higher), "a curve that is above at its far end only"
