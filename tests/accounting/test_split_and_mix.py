import dataclasses
import itertools
import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from dovetail.accounting import compose, gaussian
from dovetail.accounting.releases import split_and_mix
from dovetail.events import Everyone, Gaussian, Poisson, Round, SplitAndMix
from dovetail.statements import Neighbors, NotApplicable

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "split_and_mix.json").read_text())
DELTA = GOLDEN["delta"]
DESIGN = SplitAndMix(
    num_users=1000,
    coordinates=7850,
    clip_norm=1.0,
    scale=1900.0,
    noise_variance=2.7e8,
    modulus=2**22,
    shares=13,
)


# ---------------------------------------------------------------- mixing, by brute force


def views(values, slots, modulus):
    """The exact law of the shuffled shares (a multiset a slot) of these values, as {view: count}."""
    users = len(values)
    free = itertools.product(range(modulus), repeat=users * (slots - 1))
    law = Counter()
    for flat in free:
        rows = [flat[i * (slots - 1) : (i + 1) * (slots - 1)] for i in range(users)]
        rows = [(*row, (value - sum(row)) % modulus) for row, value in zip(rows, values, strict=True)]
        law[tuple(tuple(sorted(column)) for column in zip(*rows, strict=True))] += 1
    return law


def distance_to_ideal(values, slots, modulus):
    """Total variation between the view of these values and the mean view of all values of the same sum."""
    ideal, total = Counter(), sum(values) % modulus
    for others in itertools.product(range(modulus), repeat=len(values) - 1):
        ideal.update(views((*others, (total - sum(others)) % modulus), slots, modulus))
    mine = views(values, slots, modulus)
    norm, weight = sum(ideal.values()), sum(mine.values())
    return sum(abs(ideal[view] / norm - mine[view] / weight) for view in ideal) / 2


@pytest.mark.parametrize(("users", "slots", "modulus"), [(2, 3, 2), (2, 3, 3), (2, 4, 3), (2, 3, 5), (3, 3, 3)])
def test_eta_is_never_below_the_exact_distance(users, slots, modulus):
    ours = split_and_mix.mixing_distance(num_users=users, slots=slots, modulus=modulus)
    worst = max(
        distance_to_ideal(values, slots, modulus)
        for values in itertools.combinations_with_replacement(range(modulus), users)
        if users < 3 or values in ((0, 0, 0), (0, 1, 2), (0, 0, 1))
    )
    assert worst <= ours
    assert worst > 0


def components(permutations, n):
    parent = list(range(n))

    def find(i):
        while parent[i] != i:
            i = parent[i]
        return i

    for permutation in permutations:
        for i, j in enumerate(permutation):
            parent[find(i)] = find(j)
    return len({find(i) for i in range(n)})


@pytest.mark.parametrize(("n", "slots"), [(2, 3), (3, 3), (4, 3), (3, 4), (2, 5)])
@pytest.mark.parametrize("modulus", [5, 64])
def test_the_second_moment_against_all_permutations(n, slots, modulus):
    every = list(itertools.permutations(range(n)))
    moment = sum(
        Fraction(modulus) ** (components(drawn, n) - 1) for drawn in itertools.product(every, repeat=slots - 1)
    )
    exact = moment / len(every) ** (slots - 1) - 1
    assert math.exp(split_and_mix._log_excess(n, slots - 2, modulus)) == pytest.approx(float(exact), rel=1e-10)


def exact_excess(n, r, q):
    """E[q^(c-1)] - 1 in rational arithmetic, by the number of connected tuples."""
    factorial = [math.factorial(i) for i in range(n + 1)]
    connected = [0] * (n + 1)
    for size in range(1, n + 1):
        rest = sum(math.comb(size - 1, i - 1) * connected[i] * factorial[size - i] ** (r + 1) for i in range(1, size))
        connected[size] = factorial[size] ** (r + 1) - rest
    weighted = [1] + [0] * n
    for size in range(1, n + 1):
        weighted[size] = sum(
            math.comb(size - 1, i - 1) * q * connected[i] * weighted[size - i] for i in range(1, size + 1)
        )
    return Fraction(weighted[n], q * factorial[n] ** (r + 1)) - 1


@pytest.mark.parametrize(("n", "r", "q"), [(5, 2, 16), (20, 3, 2**10), (60, 11, 2**22), (60, 4, 101), (40, 1, 2**16)])
def test_the_second_moment_against_rational_arithmetic(n, r, q):
    exact = exact_excess(n, r, q)
    ours = split_and_mix._log_excess(n, r, q)
    assert ours == pytest.approx(math.log(exact.numerator) - math.log(exact.denominator), abs=1e-8)


@pytest.mark.parametrize(("n", "r", "q"), [(800, 11, 2**22), (1500, 3, 2**12), (1000, 2, 4096), (3000, 8, 2**25)])
def test_large_crowds_are_bounded_from_small_ones(n, r, q, monkeypatch):
    ours = split_and_mix._log_excess(n, r, q)
    monkeypatch.setattr(split_and_mix, "_BASE", 10**9)
    split_and_mix._log_moments.cache_clear()
    exact = split_and_mix._log_excess(n, r, q)
    assert exact - 1e-9 <= ours <= exact + 0.05


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 400), st.integers(3, 16), st.integers(9, 24))
def test_eta_falls_with_users_and_slots_and_rises_with_the_modulus(n, slots, bits):
    at = {"num_users": n, "slots": slots, "modulus": 2**bits}
    base = split_and_mix.mixing_distance(**at)
    assert 0 < base <= 1
    assert split_and_mix.mixing_distance(**(at | {"num_users": n + 1})) <= base * (1 + 1e-9)
    assert split_and_mix.mixing_distance(**(at | {"slots": slots + 1})) <= base
    assert split_and_mix.mixing_distance(**(at | {"modulus": 2 ** (bits + 1)})) >= base
    leading = 0.5 * math.sqrt(2**bits * (1 - 2 / n) * n ** float(2 - slots))
    assert base >= min(1.0, leading)


def closed_form_shares(*, num_users, modulus, bits):
    """Shares for a distance of 2^-bits by the closed form of Balle et al."""
    return 2 + math.ceil((2 * bits + math.log2(modulus)) / math.log2(num_users / math.e))


@pytest.mark.parametrize("num_users", [30, 100, 1000, 20_000])
def test_shares_are_the_fewest_and_below_the_closed_form(num_users):
    fewest = split_and_mix.shares_for(num_users=num_users, modulus=2**22, target=2.0**-40)
    at = {"num_users": num_users, "modulus": 2**22}
    assert (
        split_and_mix.mixing_distance(slots=fewest, **at)
        <= 2.0**-40
        < split_and_mix.mixing_distance(slots=fewest - 1, **at)
    )
    assert fewest <= closed_form_shares(bits=40, **at)


# ---------------------------------------------------------------- noise


@pytest.mark.parametrize("shift", [1, 3, 10])
@pytest.mark.parametrize("variance", [4.0, 30.0, 300.0])
@pytest.mark.parametrize("order", [2, 5, 16])
def test_the_divergence_is_never_below_skellams_own(shift, variance, order):
    reach = int(shift + 40 * math.sqrt(variance) + 40)
    x = np.arange(-reach, reach + 1)
    p = stats.skellam.pmf(x - shift, variance / 2, variance / 2)
    q = stats.skellam.pmf(x, variance / 2, variance / 2)
    seen = (p > 0) & (q > 0)
    exact = math.log(np.sum(np.exp(order * np.log(p[seen]) + (1 - order) * np.log(q[seen])))) / (order - 1)
    ours = split_and_mix._skellam_renyi(shift, 1, variance, np.array([order]))[0]
    assert ours >= exact * (1 - 1e-9)
    if order * shift < variance / 4:
        assert ours <= exact * 1.1


def test_the_divergence_is_the_published_formula():
    assert split_and_mix._skellam_renyi(3.0, 1, 30.0, np.array([2.0]))[0] == pytest.approx(0.3 + 45 / 3600, rel=1e-12)
    assert split_and_mix._skellam_renyi(3.0, 9, 2.0, np.array([50.0]))[0] == pytest.approx(112.5 + 27 / 4, rel=1e-12)


def test_orders_between_integers_cost_the_next_one_and_bad_ones_are_dropped():
    ours = split_and_mix.renyi(DESIGN, np.array([1.2, 2.0, 2.01, 3.0, 1.0, 0.5, np.inf, np.nan]))
    assert ours[0] == ours[1] < ours[2] == ours[3]
    assert np.isinf(ours[4:]).all()


def test_conditional_rounding_keeps_most_roundings():
    rng = np.random.default_rng(0)
    d, scale = 500, 20.0
    x = rng.normal(size=d)
    x *= scale / np.linalg.norm(x)
    rounded = np.floor(x) + (rng.random((4000, d)) < x - np.floor(x))
    norms = np.linalg.norm(rounded, axis=1)
    for tail in (0.6, 1e-3):
        bound = split_and_mix.rounded_norm(clip_norm=1.0, scale=scale, coordinates=d, rounding_tail=tail)
        assert np.mean(norms > bound) <= tail
        assert bound <= scale + math.sqrt(d) + 1e-9
    tight = split_and_mix.rounded_norm(clip_norm=1.0, scale=1e6, coordinates=d, rounding_tail=1e-3)
    assert 1e6 < tight < 1e6 * (1 + 1e-5)


# ---------------------------------------------------------------- together


@pytest.mark.parametrize("row", GOLDEN["designs"], ids=str)
def test_golden_designs(row):
    shared = {"coordinates": GOLDEN["coordinates"], "clip_norm": 1.0, "eps": row["eps"], "delta": DELTA}
    design = split_and_mix.calibrate(num_users=row["num_users"], **shared)
    assert math.log2(design.modulus) == row["log2_modulus"]
    at = {"num_users": row["num_users"], "modulus": design.modulus}
    assert split_and_mix.shares_for(target=2.0**-40, **at) == row["shares"][0]
    assert closed_form_shares(bits=40, **at) == row["shares"][1]
    mu = optimize.brentq(lambda mu: gaussian.delta_of(mu, eps=row["eps"]) - DELTA, 1e-3, 80.0)
    error = math.sqrt(design.noise_variance + design.num_users / 4) / design.scale  # noise and, at the most, rounding
    assert error / (2 / mu) == pytest.approx(row["error"], abs=3e-4), "beside a curator's"
    assert split_and_mix.eps(design, delta=DELTA).eps <= row["eps"]


@settings(max_examples=15, deadline=None)
@example(num_users=194, eps=6.0, delta=0.0007660512274584912, coordinates=1608, colluders=0)  # one route ends there
@given(st.integers(30, 5000), st.floats(0.05, 8), st.floats(1e-9, 1e-3), st.integers(1, 10_000), st.integers(0, 10))
def test_calibration_is_never_on_the_unsafe_side(num_users, eps, delta, coordinates, colluders):
    design = split_and_mix.calibrate(
        num_users=num_users, coordinates=coordinates, clip_norm=0.3, eps=eps, delta=delta, colluders=colluders
    )
    found = split_and_mix.eps(design, delta=delta)
    assert found.eps <= eps
    less = dataclasses.replace(design, noise_variance=0.99 * design.noise_variance)
    assert split_and_mix.eps(less, delta=delta).eps > eps * (1 - 1e-9), "no less noise would do"
    assert split_and_mix.delta(design, eps=found.eps) <= delta
    assert design.modulus >= 2 * num_users * 0.3 * design.scale


def test_the_smallest_of_three_routes_and_less_noise_for_the_same_eps():
    by_renyi, by_distance, by_ratio = (
        split_and_mix._bound_by_renyi,
        split_and_mix._bound_by_distance,
        split_and_mix._bound_by_ratio,
    )
    found = {delta: split_and_mix.eps(DESIGN, delta=delta) for delta in (1e-4, DELTA, 1e-7, 1e-8)}
    for delta, bound in found.items():
        possible = [by_renyi(DESIGN, delta, 1).eps, by_ratio(DESIGN, delta, 1).eps]
        if delta > 1e-7:
            possible.append(by_distance(DESIGN, delta, 1).eps)
        assert bound.eps == min(possible)
    assert found[DELTA].eps < by_renyi(DESIGN, DELTA, 1).eps * 0.95
    assert "skellam" in found[DELTA].proof.key and "skellam" in found[1e-8].proof.key
    assert found[1e-8].eps < by_renyi(DESIGN, 1e-8, 1).eps * 0.95
    with pytest.raises(NotApplicable, match="spent beside the noise"):
        by_distance(DESIGN, 1e-8, 1)


def test_little_noise_is_accounted_by_renyi_orders():
    """Just below a variance of 100 nothing is known of the distance; just above it is too large at such deltas."""
    at = {"coordinates": 1, "scale": 3.0, "modulus": 2**10}
    for variance in (99.0, 101.0):
        event = dataclasses.replace(DESIGN, noise_variance=variance, **at)
        assert split_and_mix.eps(event, delta=DELTA).proof.key == "dovetail.split-and-mix+CKS20.prop12"
    assert split_and_mix.eps(event, delta=0.1).proof.key.endswith("skellam-gaussian+BW18.thm8")
    assert split_and_mix.delta(event, eps=0.2) < split_and_mix.delta(
        dataclasses.replace(event, noise_variance=99.0), eps=0.2
    )


def test_no_neighbours_of_a_small_sum_have_a_delta_above_the_certified_one():
    """One coordinate, one or two rounds, by the sum of Skellam's probabilities: what is certified is more."""
    rng, worst = np.random.default_rng(5), 0.0
    for _ in range(150):
        count = int(rng.integers(1, 3))
        variance = math.exp(rng.uniform(math.log(110), math.log(4000)))
        scale = math.sqrt(variance) * rng.uniform(0.1, 0.8)
        event = dataclasses.replace(DESIGN, coordinates=1, scale=scale, noise_variance=variance, modulus=2**20)
        shift, eps = 2 * math.floor(scale), float(rng.uniform(0.05, 2))
        reach = math.ceil(9 * math.sqrt(variance)) + shift
        k = np.arange(-reach, reach + 1)
        p, q = (special.ive(np.abs(k - moved), variance) for moved in (shift, 0))
        first, second = (p, q) if count == 1 else (np.outer(p, p), np.outer(q, q))
        exact = float(np.maximum(first - math.exp(eps) * second, 0).sum())
        worst = max(worst, exact / split_and_mix.delta(event, eps=eps, rounds=count))
    assert 0.5 < worst < 1


def test_what_collusion_costs():
    at = {"eps": 1.0}
    base = split_and_mix.mixing_delta(DESIGN, **at)
    distance = split_and_mix.mixing_distance(num_users=1000, slots=13, modulus=2**22)
    assert base == pytest.approx((1 + math.e) * 7850 * distance, rel=1e-8, abs=0)
    fewer_slots = dataclasses.replace(DESIGN, colluding_slots=3)
    fewer_users = dataclasses.replace(DESIGN, colluders=500)
    assert split_and_mix.mixing_delta(fewer_slots, **at) == split_and_mix.mixing_delta(
        dataclasses.replace(DESIGN, shares=10), **at
    )
    assert base < split_and_mix.mixing_delta(fewer_users, **at) < split_and_mix.mixing_delta(fewer_slots, **at)
    everyone = dataclasses.replace(DESIGN, colluding_slots=13)
    assert split_and_mix.mixing_delta(everyone, **at) == 1
    with pytest.raises(NotApplicable, match="not certified"):
        split_and_mix.eps(everyone, delta=DELTA)
    assert split_and_mix.delta(everyone, eps=1.0) == 1


def test_not_certified_with_too_few_users():
    with pytest.raises(NotApplicable, match="not certified"):
        split_and_mix.calibrate(num_users=5, coordinates=7850, clip_norm=1.0, eps=1.0, delta=1e-9)
    with pytest.raises(NotApplicable, match="modulus"):
        split_and_mix.mixing_distance(num_users=100, slots=5, modulus=64)
    with pytest.raises(NotApplicable, match="not certified"):
        split_and_mix.mixing_distance(num_users=50_000, slots=3, modulus=2**30)


def test_refusals():
    for bad in (
        {"num_users": 1},
        {"colluders": 999},
        {"noise_variance": 0.0},
        {"noise_variance": math.nan},
        {"scale": -1.0},
        {"modulus": 1},
        {"shares": 0},
        {"rounding_tail": 1.0},
        {"coordinates": 0},
    ):
        with pytest.raises(ValueError, match="expected"):
            dataclasses.replace(DESIGN, **bad)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="delta"):
            split_and_mix.eps(DESIGN, delta=delta)
    with pytest.raises(ValueError, match="eps"):
        split_and_mix.mixing_delta(DESIGN, -1.0)


# ---------------------------------------------------------------- removed users, by brute force

SMALL = SplitAndMix(
    num_users=4,
    coordinates=2,
    clip_norm=1.0,
    scale=3.0,
    noise_variance=120.0,
    modulus=2**12,
    shares=60,
    neighbors=Neighbors.ADD_REMOVE,
)


def exact_delta(shift, variance, eps):
    """Of the ideal sum: independent Skellam noise on two coordinates, moved by whole numbers; in both directions."""
    x = np.arange(-120, 121)
    law = [stats.skellam.pmf(x - by, variance / 2, variance / 2) for by in (*shift, 0)]
    moved, still = np.outer(law[0], law[1]), np.outer(law[2], law[2])
    return max(np.maximum(p - math.exp(eps) * q, 0).sum() for p, q in ((moved, still), (still, moved)))


def rounded_vectors(event):
    """Every pair of whole numbers that the encoding may give."""
    norm = split_and_mix.rounded_norm(
        clip_norm=event.clip_norm, scale=event.scale, coordinates=2, rounding_tail=event.rounding_tail
    )
    reach = range(math.ceil(norm) + 1)
    return [pair for pair in itertools.product(reach, reach) if math.hypot(*pair) <= norm and pair[0] >= pair[1]]


@pytest.mark.parametrize("eps", [0.1, 0.5, 1.5])
def test_no_removed_user_shows_more_than_is_certified(eps):
    worst = max(exact_delta(shift, SMALL.noise_variance, eps) for shift in rounded_vectors(SMALL))
    certified = split_and_mix.delta(SMALL, eps=eps)
    assert worst <= certified < split_and_mix.delta(replaced(SMALL), eps=eps)
    halve = dataclasses.replace(SMALL, clip_norm=SMALL.clip_norm / 2, scale=SMALL.scale / 2)
    assert eps > 1 or split_and_mix.delta(halve, eps=eps) < worst  # half of it once more would be refuted


def replaced(event):
    return dataclasses.replace(event, neighbors=Neighbors.REPLACE_ONE)


def test_a_removed_user_moves_the_sum_by_the_norm_that_rounding_enforces():
    removed = dataclasses.replace(DESIGN, neighbors=Neighbors.ADD_REMOVE)
    norm = split_and_mix.rounded_norm(clip_norm=1.0, scale=1900.0, coordinates=7850, rounding_tail=1e-3)
    assert split_and_mix.near_gaussian_of(removed).mu == pytest.approx(norm / math.sqrt(2.7e8 - 1 / 12))
    assert split_and_mix.near_gaussian_of(DESIGN).mu == pytest.approx(2 * split_and_mix.near_gaussian_of(removed).mu)
    assert norm > 1900  # more than the scaled clip norm: rounding is in it
    assert split_and_mix.mixing_delta(removed, 1.0) == split_and_mix.mixing_delta(DESIGN, 1.0)
    one, other = (split_and_mix.eps(event, delta=DELTA, rounds=20) for event in (removed, DESIGN))
    assert one.eps < 0.6 * other.eps
    rounds = [Round(mechanism=removed, participation=Everyone())] * 20
    assert compose.bound(rounds, delta=DELTA).eps == pytest.approx(one.eps, rel=1e-6)


def test_noise_for_removed_users_is_about_half():
    removed, other = (
        split_and_mix.calibrate(num_users=1000, coordinates=100, clip_norm=1.0, eps=1.0, delta=1e-5, neighbors=relation)
        for relation in (Neighbors.ADD_REMOVE, Neighbors.REPLACE_ONE)
    )
    assert split_and_mix.eps(removed, delta=1e-5).eps <= 1.0
    std, twice = (math.sqrt(event.noise_variance) / event.scale for event in (removed, other))
    assert std == pytest.approx(twice / 2, rel=0.05)


def test_secret_coins_of_a_removed_user_are_those_of_a_sampled_gaussian():
    removed = dataclasses.replace(DESIGN, neighbors=Neighbors.ADD_REMOVE)
    coins = Poisson(prob=0.05)
    sums = [Round(mechanism=removed, participation=coins)] * 10
    near = split_and_mix.near_gaussian_of(removed)
    gaussians = [
        Round(mechanism=Gaussian(std=1 / near.mu, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE), participation=coins)
    ] * 10
    ours, ideal = (compose.bound(rounds, delta=DELTA).eps for rounds in (sums, gaussians))
    assert ideal <= ours <= ideal * 1.05
    other = [dataclasses.replace(one, mechanism=DESIGN) for one in sums]
    assert ours < compose.bound(other, delta=DELTA).eps
