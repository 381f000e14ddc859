import functools
import itertools
import json
import math
import pathlib
from collections import Counter

import mpmath
import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from grids import diagonal, later
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaln, logsumexp
from scipy.stats import binom

from dovetail.accounting import loss_distributions
from dovetail.accounting.pairs import binomial, symmetric
from dovetail.accounting.pairs.binomial import BinomialPair
from dovetail.accounting.releases import crowds
from dovetail.events import PaddedBernoulli, PaddedTopk, Report, Shuffled
from dovetail.statements import NotApplicable

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "pairs.json").read_text())
ORDERS = np.array([1.2, 3.0, 20.0])
EPS = (0.0, 0.02, 0.1, 0.3, 0.7, 1.5, 3.0)


def rr(eps_local, levels=2):
    return Report(kind="rr", eps_local=eps_local, levels=levels)


def clone_pair(n, eps_local, folds=1):
    tilt = math.tanh(eps_local / 2)
    return BinomialPair(others=n - 1, exposed=n - 1, prob_exposed=tilt, tilt=tilt, folds=folds)


# --- the pair against 50-digit arithmetic


def exact_renyi(pair, orders):
    with mpmath.workdps(50):
        q, tilt = mpmath.mpf(pair.prob_exposed), mpmath.mpf(pair.tilt)
        sums = [mpmath.mpf(0)] * len(orders)
        for gone in range(pair.exposed + 1):
            prob = mpmath.binomial(pair.exposed, gone) * q**gone * (1 - q) ** (pair.exposed - gone)
            n = 1 + max(pair.others - gone, 0)
            for heads in range(n + 1):
                s = mpmath.mpf(2 * heads - n) / n
                mass = prob * mpmath.binomial(n, heads) / mpmath.mpf(2) ** n
                log_p, log_q = mpmath.log(1 + tilt * s), mpmath.log(1 - tilt * s)
                for j, order in enumerate(orders):
                    sums[j] += mass * mpmath.exp(order * log_p + (1 - order) * log_q)
        return [
            pair.folds * mpmath.log(total) / (mpmath.mpf(order) - 1) for order, total in zip(orders, sums, strict=True)
        ]


@pytest.mark.parametrize(
    ("pair", "tolerance"),
    [
        (clone_pair(3, 0.01), 1e-8),
        (clone_pair(12, 0.5, folds=7850), 1e-8),
        (clone_pair(12, 6.0), 1e-8),
        (clone_pair(6, 15.0), 1e-8),
        (clone_pair(70, 1.0), 3e-5),  # beyond 64 coins: the gridded law
        later(clone_pair(70, 0.05), 3e-5),
        (BinomialPair(others=8, exposed=30, prob_exposed=0.1, tilt=0.05), 1e-8),
        (BinomialPair(others=80, exposed=20, prob_exposed=0.3, tilt=0.4), 3e-5),
    ],
)
def test_renyi_is_never_below_the_exact_divergence_at_any_order(pair, tolerance):
    orders = [1.00001, 1.1, 2.0, 7.5, 64.0, 369.0, 1024.0, 20000.0]
    ours = pair.renyi(np.array(orders))
    for mine, exact in zip(ours, exact_renyi(pair, orders), strict=True):
        assert exact <= mine <= exact * (1 + tolerance)


@pytest.mark.parametrize(("n", "eps_local"), [(1000, 0.5), (5000, 2.0), (3000, 0.01)])
def test_blocks_and_rings_only_round_up(n, eps_local):
    """Against a direct sum over all counts with mass above 1e-40, in floats."""
    pair = clone_pair(n, eps_local)
    orders = np.array([1.5, 4.0, 30.0])
    sums = np.zeros(3)
    for gone in range(n):
        prob = binom.pmf(gone, n - 1, pair.prob_exposed)
        if prob > 1e-40:
            size = n - gone
            u = pair.tilt * (2 * np.arange(size + 1) - size) / size
            base = prob * binom.pmf(np.arange(size + 1), size, 0.5)
            z = (2 * orders[:, None] - 1) * np.arctanh(u)
            sums += (np.sqrt(1 - u * u) * np.cosh(z) - 1) @ base
    exact = np.log1p(sums) / (orders - 1)
    ours = pair.renyi(orders)
    assert np.all(ours >= exact * (1 - 1e-7))
    assert np.all(ours <= exact * (1 + 1e-3))


@pytest.mark.parametrize("eps_local", [0.2, 0.5, 2.0])
def test_rare_outcomes_are_kept_for_high_orders(eps_local):
    """A thousand users, orders that live on the rarest outcomes, against a direct sum in logarithms."""
    n, tilt = 1000, math.tanh(eps_local / 2)
    size, heads = (grid.ravel() for grid in np.mgrid[1 : n + 1, 0 : n + 1])
    size, heads = size[heads <= size], heads[heads <= size]
    log_w = gammaln(n) - gammaln(size) - gammaln(n - size + 1) + (size - 1) * math.log1p(-tilt)
    log_w += (n - size) * math.log(tilt) + gammaln(size + 1) - gammaln(heads + 1) - gammaln(size - heads + 1)
    log_w -= size * math.log(2)
    u = tilt * (2 * heads - size) / size
    for order in (50.0, 369.0, 1024.0, 5000.0):
        exact = logsumexp(log_w + order * np.log1p(u) + (1 - order) * np.log1p(-u)) / (order - 1)
        ours = clone_pair(n, eps_local).renyi(np.array([order]))[0]
        assert exact * (1 - 1e-9) <= ours <= exact * 1.1


@pytest.mark.parametrize(
    "pair",
    [
        clone_pair(1000, 0.5),
        clone_pair(20_000, 1.0),
        clone_pair(300_000, 0.3),
        BinomialPair(others=100, exposed=5000, prob_exposed=0.01, tilt=0.1),
        BinomialPair(others=30, exposed=5000, prob_exposed=0.01, tilt=0.1),
    ],
)
def test_crowds_are_only_made_smaller(pair):
    sizes, mass = binomial._numbers_of_coins(pair)
    for size in np.unique(np.concatenate([sizes, sizes + 1, np.linspace(1, pair.others + 1, 50).astype(int)])):
        smaller = binom.sf(pair.others - size, pair.exposed, pair.prob_exposed)  # P(others - gone < size)
        assert mass[sizes <= size].sum() >= smaller * (1 - 1e-11)
    assert mass.sum() == pytest.approx(1, abs=1e-11)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 1001, 30_000])
def test_tosses_are_only_moved_outwards(size):
    points, mass = binomial._law_of_coin_tosses(np.array([size]), np.ones(1))
    for heads in np.unique(np.linspace(size // 2 + 1, size, 200).astype(int)):
        further = 2 * binom.sf(heads - 1, size, 0.5)
        assert mass[points >= (2 * heads - size) / size * (1 - 1e-14)].sum() >= further
    assert mass.sum() == pytest.approx(1, abs=1e-9)
    assert points.max() == 1


def test_folds_of_the_loss_are_composed_within_the_error_that_is_charged():
    rng = np.random.default_rng(1)
    for folds in (2, 3, 50, 200):
        probs = rng.dirichlet(np.ones(31) / 2)
        lowest, composed, infinite = symmetric._self_compose(probs, folds)
        exact = functools.reduce(np.convolve, [probs] * folds)
        start = lowest + 15 * folds
        inside = exact[start : start + len(composed)]
        assert np.abs(composed - inside).sum() + exact.sum() - inside.sum() <= infinite + 1e-13
        assert symmetric._TAIL + folds * 2.0**-52 < infinite < 1e-10


def test_a_coarser_grid_of_losses_dominates():
    fine, coarse = (clone_pair(40, 0.7, folds=5).loss(interval=interval) for interval in (1e-4, 0.05))
    for eps in np.linspace(0, 1.2, 40):
        assert fine.delta(eps) <= coarse.delta(eps) * (1 + 1e-9) + 1e-12


def test_the_compact_law_is_proper():
    for pair in (
        clone_pair(5, 1.0),
        clone_pair(2000, 0.3),
        BinomialPair(others=9, exposed=50, prob_exposed=0.3, tilt=0.2),
    ):
        points, mass = binomial._compact_law(pair)
        assert mass.sum() == pytest.approx(1, abs=1e-8) and mass.min() >= 0
        assert points.min() >= 0 and 2 * math.atanh(points.max() * pair.tilt) <= pair.eps_pure


def test_renyi_and_privacy_loss_are_the_same_pair():
    """The Renyi divergence of the composed privacy loss is the composed Renyi divergence, a little above."""
    pair = clone_pair(200, 0.5, folds=40)
    ((lowest, probs, _),) = pair.loss(interval=1e-4).sides
    losses = (np.arange(len(probs)) + lowest) * 1e-4
    for order in (1.5, 3.0, 8.0):
        of_loss = math.log(np.exp((order - 1) * losses) @ probs) / (order - 1)
        assert of_loss == pytest.approx(pair.renyi(np.array([order]))[0], rel=1e-3)


# --- what is really run, enumerated


def coin(eps_local, bit):
    p = 1 / (1 + math.exp(-eps_local))
    return p if bit == 1 else 1 - p if bit == 0 else 0.5


def ones_law(biases):
    law = np.ones(1)
    for bias in biases:
        law = np.convolve(law, [1 - bias, bias])
    return law


def released(reports, pad_to):
    """Law of (kept marks, ones): reports are biases, or "mark" for a colluder's recognisable report."""
    law = Counter()
    keep = min(pad_to, len(reports))
    subsets = list(itertools.combinations(reports, keep))
    for subset in subsets:
        marks = sum(report == "mark" for report in subset)
        honest = [report for report in subset if report != "mark"]
        for ones, prob in enumerate(ones_law(honest + [0.5] * (pad_to - keep))):
            law[marks, ones] += prob / len(subsets)
    return law


def mixture(parts):
    law = Counter()
    for weight, part in parts:
        for outcome, prob in part.items():
            law[outcome] += weight * prob
    return law


def product(laws):
    total = {(): 1.0}
    for law in laws:
        total = {(*a, b): p * q for a, p in total.items() for b, q in law.items()}
    return total


def hockey_stick(p, q, eps):
    both = ((p.get(o, 0.0), q.get(o, 0.0)) for o in p.keys() | q.keys())
    return sum(max(0.0, a - math.exp(eps) * b) for a, b in both)


@functools.cache
def certified(event):
    composed = crowds.loss(event, interval=1e-3)
    by_loss = [loss_distributions.worst_delta([composed], eps=eps) + crowds.overflow_delta(event) for eps in EPS]
    by_either = [crowds.delta(event, eps=eps) for eps in EPS]
    return np.minimum(by_loss, by_either) * (1 + 1e-9), crowds.renyi(event, ORDERS)


def covers(event, p, q, renyi=True):
    """The certified bounds hold for this pair of output laws, in both directions."""
    deltas, divergences = certified(event)
    outcomes = sorted(p.keys() | q.keys())
    p, q = (np.array([law.get(outcome, 0.0) for outcome in outcomes]) for law in (p, q))
    for a, b in ((p, q), (q, p)):
        for eps, mine in zip(EPS, deltas, strict=True):
            assert np.maximum(0, a - math.exp(eps) * b).sum() <= mine + 1e-13
        if renyi:
            for order, mine in zip(ORDERS, divergences, strict=True):
                assert math.log(a**order @ b ** (1 - order)) / (order - 1) <= mine * (1 + 1e-12) + 1e-13


@pytest.mark.parametrize(
    ("n", "d", "eps_local", "levels"),
    diagonal([(2, 1), (2, 3), (3, 2), (4, 2), (5, 1)], [(0.2, 2), (2.0, 3), (2.0, 2)]),
)
def test_shuffled_covers_randomized_response(n, d, eps_local, levels):
    event = Shuffled(report=rr(eps_local, levels), num_users=n, coordinates=d)
    stay = math.exp(eps_local) / (math.exp(eps_local) + levels - 1)
    other = 1 / (math.exp(eps_local) + levels - 1)

    def histogram(values):
        law = {(0,) * levels: 1.0}
        for value in values:
            law = mixture(
                (
                    stay if level == value else other,
                    {(*h[:level], h[level] + 1, *h[level + 1 :]): p for h, p in law.items()},
                )
                for level in range(levels)
            )
        return law

    for rest in itertools.combinations_with_replacement(range(levels), n - 1):
        p, q = histogram((0, *rest)), histogram((1, *rest))
        if d > 1 and len(p) ** d > 2500:
            continue
        covers(event, product([p] * d), product([q] * d))


def test_the_clone_pair_is_what_an_adversary_sees_who_is_told_which_of_the_others_answered_truly():
    event = Shuffled(report=Report(kind="generic", eps_local=1.0), num_users=4)
    pair = crowds.pair(event)
    for eps in (0.05, 0.2, 0.5):
        exact = 0.0
        for gone in range(4):
            size = 4 - gone
            s = (2 * np.arange(size + 1) - size) / size
            mass = binom.pmf(gone, 3, pair.prob_exposed) * binom.pmf(np.arange(size + 1), size, 0.5)
            exact += np.maximum(0, (1 + pair.tilt * s) - math.exp(eps) * (1 - pair.tilt * s)) @ mass
        ours = crowds.delta(event, eps=eps)
        assert exact <= ours <= exact * (1 + 1e-3)


@functools.cache
def double_law(eps_local, victim, others, marks, inclusion, pad_to):
    """One coordinate of SS-Double: the law of what the analyzer sees."""
    users = [coin(eps_local, victim)] + [coin(eps_local, bit) for bit in others]
    parts = []
    for joined in itertools.product((0, 1), repeat=len(users)):
        weight = math.prod(inclusion if j else 1 - inclusion for j in joined)
        reports = [bias for bias, j in zip(users, joined, strict=True) if j] + ["mark"] * marks
        parts.append((weight, released(reports, pad_to)))
    return mixture(parts)


@pytest.mark.parametrize(
    ("honest", "marks", "pad_to", "inclusion", "eps_local"),
    diagonal(
        [(2, 0, 2), (3, 0, 5), (4, 0, 3), (5, 0, 2), (3, 1, 3), (4, 2, 4)],
        [(0.1, 2.0), (0.6, 0.3), (1.0, 2.0), (0.1, 0.3), (0.6, 2.0), (1.0, 0.3)],
    ),
)
def test_padded_bernoulli_covers_what_is_run(honest, marks, pad_to, inclusion, eps_local):
    for d in (1, 2):
        event = PaddedBernoulli(
            report=rr(eps_local),
            num_users=honest + marks,
            colluders=marks,
            pad_to=pad_to,
            inclusion=inclusion,
            coordinates=d,
        )
        for ones in range(honest):
            others = (1,) * ones + (0,) * (honest - 1 - ones)
            p = double_law(eps_local, 1, others, marks, inclusion, pad_to)
            q = double_law(eps_local, 0, others, marks, inclusion, pad_to)
            covers(event, product([p] * d), product([q] * d), renyi=crowds.overflow_delta(event) == 0)


def test_without_subtracting_colluders_the_padded_bound_breaks():
    p = double_law(1.0, 1, (1,), 2, 0.5, 4)
    q = double_law(1.0, 0, (1,), 2, 0.5, 4)
    naive = PaddedBernoulli(report=rr(1.0), num_users=4, pad_to=4, inclusion=0.5)
    assert hockey_stick(p, q, 0.0) > crowds.delta(naive, eps=0.0)


def topk_law(eps_local, users, marks, pad_to, d, decoys):
    """SS-Topk: users are {coordinate: bit}; every choice of decoys of every user is enumerated."""
    free = [[c for c in range(d) if c not in user] for user in users]
    choices = list(itertools.product(*(itertools.combinations(f, decoys) for f in free)))
    parts = []
    for choice in choices:
        laws = []
        for c in range(d):
            reports = [coin(eps_local, user[c]) for user in users if c in user]
            reports += [0.5 for chosen in choice if c in chosen]
            laws.append(released(reports + ["mark"] * marks, pad_to))
        parts.append((1 / len(choices), product(laws)))
    return mixture(parts)


TOPK = [  # honest, marks, pad_to, d, k, decoys
    (2, 0, 2, 2, 1, 0),
    (2, 0, 2, 2, 1, 1),
    (3, 0, 3, 2, 1, 0),
    (3, 0, 4, 2, 1, 1),
    (3, 0, 2, 2, 1, 0),
    (3, 0, 2, 2, 1, 1),
    (4, 0, 2, 2, 1, 0),
    (3, 0, 2, 3, 1, 1),
    (2, 0, 2, 3, 2, 1),
    (2, 1, 3, 2, 1, 0),
]


@pytest.mark.parametrize(("honest", "marks", "pad_to", "d", "k", "decoys", "eps_local"), diagonal(TOPK, [2.0, 0.3]))
def test_padded_topk_covers_what_is_run(honest, marks, pad_to, d, k, decoys, eps_local):
    event = PaddedTopk(
        report=rr(eps_local),
        num_users=honest + marks,
        colluders=marks,
        pad_to=pad_to,
        top=k,
        decoys=decoys,
        coordinates=d,
    )
    inputs = [
        dict(zip(top, bits, strict=True))
        for top in itertools.combinations(range(d), k)
        for bits in itertools.product((0, 1), repeat=k)
    ]
    first = dict.fromkeys(range(k), 1)
    for rest in ([inputs[0]] * (honest - 1), [inputs[-1]] * (honest - 1), (inputs * honest)[: honest - 1]):
        laws = [topk_law(eps_local, [victim, *rest], marks, pad_to, d, decoys) for victim in (first, *inputs)]
        for other in laws[1:]:
            covers(event, laws[0], other)


def test_surplus_with_colluders_is_refused_and_would_be_unsound():
    event = PaddedTopk(report=rr(0.01), num_users=4, colluders=1, pad_to=3, top=1, decoys=0, coordinates=2)
    with pytest.raises(NotApplicable, match="colluders see"):
        crowds.renyi(event, np.array([2.0]))
    victim_here = topk_law(0.01, [{0: 1}, {0: 1}, {0: 1}], 1, 3, 2, 0)
    victim_away = topk_law(0.01, [{1: 1}, {0: 1}, {0: 1}], 1, 3, 2, 0)
    two_full = BinomialPair(others=1, exposed=1, prob_exposed=math.tanh(0.005), tilt=math.tanh(0.005), folds=2)
    assert hockey_stick(victim_here, victim_away, 0.1) > 10 * two_full.loss().delta(0.1)


def test_one_full_dominates_a_half_and_a_reversed_half():
    """docs/proofs/ss-topk.md, Lemma: at every eps, for random crowds, and in Renyi divergence."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        tilt, sizes = rng.uniform(0.02, 1), rng.integers(1, 12, size=3)
        weights = rng.dirichlet(np.ones(3))
        s = np.concatenate([(2 * np.arange(n + 1) - n) / n for n in sizes])
        w = np.concatenate([a * binom.pmf(np.arange(n + 1), n, 0.5) for a, n in zip(weights, sizes, strict=True)])
        two = np.multiply.outer(w, w)
        p, q = 1 + tilt * s[:, None], 1 + tilt * s[None, :]
        for eps in np.linspace(-3, 3, 25):
            full = np.maximum(0, (1 + tilt * s) - math.exp(eps) * (1 - tilt * s)) @ w
            assert np.sum(two * np.maximum(0, p - math.exp(eps) * q)) <= full + 1e-14
        if tilt < 0.99:
            for order in (1.5, 4.0, 40.0):
                full = math.log(((1 + tilt * s) ** order * (1 - tilt * s) ** (1 - order)) @ w)
                half, reversed_half = (math.log((1 + tilt * s) ** a @ w) for a in (order, 1 - order))
                assert half + reversed_half <= full + 1e-12


# --- golden figures


def figure(name):
    clones = 1 - 2 / (math.exp(0.5) + 1)
    double = {"report": rr(0.5), "num_users": 1000, "coordinates": 7850}
    topk = {"report": rr(0.5), "coordinates": 7850, "top": 157}
    any_n = {"prob_exposed": clones, "folds": 7850}
    return {
        "ss-simple": lambda: Shuffled(report=Report(kind="laplace", eps_local=0.01), num_users=1000, coordinates=7850),
        "ss-double-any-n-02": lambda: BinomialPair(others=332, exposed=332, tilt=0.02 * math.tanh(0.25), **any_n),
        "ss-double-any-n-10": lambda: BinomialPair(others=666, exposed=666, tilt=0.1 * math.tanh(0.25), **any_n),
        "ss-double-02": lambda: PaddedBernoulli(pad_to=333, inclusion=0.02, **double),
        "ss-double-10": lambda: PaddedBernoulli(pad_to=667, inclusion=0.1, **double),
        "ss-topk-333": lambda: PaddedTopk(num_users=333, pad_to=333, decoys=0, **topk),
        "ss-topk-1000": lambda: PaddedTopk(num_users=1000, pad_to=1000, decoys=7693, **topk),
        "ss-topk-333-surplus": lambda: PaddedTopk(num_users=1000, pad_to=333, decoys=0, **topk),
    }[name]()


@pytest.mark.parametrize("name", GOLDEN["figures"])
def test_golden_figures(name):
    event = figure(name)
    pair = event if isinstance(event, BinomialPair) else crowds.pair(event)
    by_renyi = compute_epsilon(crowds.ORDERS, pair.renyi(crowds.ORDERS), 5e-6)[0]
    by_loss = pair.loss().eps(5e-6)
    assert by_renyi == pytest.approx(GOLDEN["figures"][name]["renyi"], rel=5e-4)
    assert by_loss == pytest.approx(GOLDEN["figures"][name]["loss"], rel=1e-4)
    assert 0.85 * by_renyi < by_loss < by_renyi
    if not isinstance(event, BinomialPair):
        bound = crowds.eps(event, delta=5e-6)
        assert by_loss * 0.88 <= bound.eps <= by_loss * (1 + 1e-4), "reports that are not revealed hide more"
        assert crowds.delta(event, eps=bound.eps) <= 5e-6 * (1 + 1e-6)
        assert bound.proof.theorems[0] == crowds.theorem(event)


@pytest.mark.parametrize("row", GOLDEN["clones23"], ids=lambda row: f"{row['n']}-{row['eps_local']}")
def test_one_coordinate_matches_the_reference_table(row):
    event = Shuffled(report=Report(kind="generic", eps_local=row["eps_local"]), num_users=row["n"])
    assert crowds.eps(event, delta=row["delta"]).eps == pytest.approx(row["eps"], rel=1e-4)


def test_local_statements():
    golden = GOLDEN["most_reports"]
    double = figure("ss-double-02")
    k_max = crowds.most_sampled_coordinates(double, delta=golden["delta"])
    assert k_max == golden["k_max"]
    assert binom.sf(k_max, 7850, 0.02) <= 5e-6 < binom.sf(k_max - 1, 7850, 0.02)
    assert crowds.most_sampled_coordinates(double, delta=0.0) == 7850
    assert crowds.local_bound(double, delta=5e-6).eps == pytest.approx(215 * 0.5)
    assert crowds.local_bound(figure("ss-topk-1000")).eps == pytest.approx(157 * 0.5)
    assert crowds.local_bound(figure("ss-topk-333")).eps == math.inf
    assert crowds.local_bound(figure("ss-simple")).eps == pytest.approx(78.5)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 400), st.integers(2, 400), st.floats(0.01, 1), st.integers(0, 20))
def test_spent_delta_is_at_most_the_probability_of_an_overflow(n, pad_to, inclusion, colluders):
    if min(n, pad_to) - colluders < 2:
        return
    event = PaddedBernoulli(
        report=rr(0.5), num_users=n, pad_to=pad_to, inclusion=inclusion, coordinates=3, colluders=colluders
    )
    overflow = binom.sf(pad_to - colluders, n - colluders, inclusion)
    assert crowds.overflow_delta(event) <= min(1, 3 * overflow) * (1 + 1e-6) + 1e-299
    if n <= pad_to:
        assert crowds.overflow_delta(event) == 0
    full = 3 * inclusion * binom.sf(pad_to - colluders - 1, n - colluders - 1, inclusion)
    assert crowds.overflow_delta(event) == pytest.approx(min(1, full), rel=1e-6, abs=1e-298)


def test_delta_spent_by_overflow_is_not_free():
    event = PaddedBernoulli(report=rr(0.5), num_users=1000, pad_to=30, inclusion=0.02, coordinates=7850)
    assert crowds.overflow_delta(event) > 5e-6
    tight = PaddedBernoulli(report=rr(0.5), num_users=1000, pad_to=51, inclusion=0.02, coordinates=7850)
    spent = crowds.overflow_delta(tight)
    assert spent > 1e-8
    assert crowds.delta(tight, eps=crowds.eps(tight, delta=1.5 * spent).eps) <= 1.5 * spent * (1 + 1e-9)
    assert crowds.delta(tight, eps=40.0) >= spent
    with pytest.raises(NotApplicable, match="overflow"):
        crowds.eps(event, delta=5e-6)


# --- order


@settings(max_examples=5, deadline=None)
@given(st.integers(2, 1000), st.floats(0.01, 5), st.integers(1, 300), st.floats(1.05, 1.6))
def test_monotone_in_users_reports_and_coordinates(n, eps_local, d, factor):
    orders = np.array([1.3, 2.0, 9.0, 70.0, 900.0])

    def renyi(n=n, eps_local=eps_local, d=d):
        return crowds.renyi(Shuffled(report=rr(eps_local), num_users=n, coordinates=d), orders)

    base, slack = renyi(), 1 + 2e-3
    assert np.all(np.diff(base) >= -1e-12 * base[1:])
    assert np.all(renyi(n=math.ceil(n * factor) + 1) <= base * slack)
    assert np.all(renyi(eps_local=eps_local * factor) * slack >= base)
    assert np.all(renyi(d=d + 1) > base)
    assert np.all(base <= d * eps_local)


def test_colluders_do_not_hide_anybody():
    orders = np.array([1.5, 10.0])
    among = crowds.renyi(Shuffled(report=rr(1.0), num_users=100, colluders=60), orders)
    assert np.array_equal(among, crowds.renyi(Shuffled(report=rr(1.0), num_users=40), orders))


@settings(max_examples=5, deadline=None)
@given(st.integers(3, 200), st.floats(0.1, 2), st.integers(1, 50), st.integers(0, 5))
def test_monotone_for_padded_events(n, eps_local, top, colluders):
    orders = np.array([1.3, 4.0, 30.0])
    slack = 1 + 2e-3

    def topk(n=n, pad=n, t=0):
        event = PaddedTopk(
            report=rr(eps_local), num_users=n, pad_to=pad, top=top, decoys=0, coordinates=50, colluders=t
        )
        return crowds.renyi(event, orders)

    usual = topk()
    assert np.all(topk(pad=n + 10) <= usual * slack)
    assert np.all(topk(n=n + 1, pad=n) >= usual / slack)
    if n - colluders >= 2:
        assert np.all(topk(t=colluders) * slack >= usual)


@pytest.mark.parametrize(("n", "eps_local"), [(4, 1.5), later(9, 0.2), later(150, 0.7), later(200, 2.0)])
def test_more_that_report_cost_more(n, eps_local):
    orders = np.array([1.3, 4.0, 30.0])
    few, some, all_of_them = (
        crowds.renyi(
            PaddedBernoulli(report=rr(eps_local), num_users=n, pad_to=n + 5, inclusion=b, coordinates=9), orders
        )
        for b in (0.1, 0.5, 1.0)
    )
    assert np.all(few <= some * (1 + 2e-3)) and np.all(some <= all_of_them * (1 + 2e-3))


@pytest.mark.parametrize("eps_local", [1e-6, 0.01, 1.0, 12.0, 25.0, 40.0, 800.0])
def test_extreme_reports(eps_local):
    event = Shuffled(report=rr(eps_local), num_users=30, coordinates=4)
    bounds = crowds.renyi(event, np.array([1.01, 2.0, 500.0, 1e5]))
    assert np.all(np.isfinite(bounds)) and np.all(bounds > 0) and np.all(bounds <= 4 * eps_local)
    assert 0 <= crowds.eps(event, delta=1e-5).eps <= 4 * eps_local + 15


def test_outside_the_hypotheses():
    laplace, ternary = Report(kind="laplace", eps_local=0.5), rr(0.5, 3)
    for report in (laplace, ternary, Report(kind="generic", eps_local=0.5)):
        for event in (
            PaddedBernoulli(report=report, num_users=10, pad_to=10, inclusion=0.1),
            PaddedTopk(report=report, num_users=10, pad_to=10, top=1, decoys=0),
        ):
            for ask in (lambda e: crowds.renyi(e, crowds.ORDERS), crowds.loss, crowds.pair):
                with pytest.raises(NotApplicable, match="binary randomized response"):
                    ask(event)
    good = Shuffled(report=laplace, num_users=10)
    for bad in (0.0, 1.0, math.nan, -1.0):
        with pytest.raises(ValueError, match="expected"):
            crowds.eps(good, delta=bad)
    with pytest.raises(ValueError, match="expected eps >= 0"):
        crowds.delta(good, eps=-0.1)
    with pytest.raises(ValueError, match="order > 1"):
        crowds.renyi(good, np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="order > 1"):
        crowds.renyi(good, np.array([math.nan]))
    with pytest.raises(ValueError, match="expected interval > 0"):
        crowds.loss(good, interval=0.0)
    with pytest.raises(NotApplicable, match="loss of"):
        crowds.loss(Shuffled(report=rr(31.0), num_users=10))
    with pytest.raises(ValueError, match="expected"):
        BinomialPair(others=3, exposed=3, prob_exposed=1.5, tilt=0.5)
