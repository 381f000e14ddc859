"""Sums by shares: certified deltas against exact ones at small sizes, and what all aggregators but one see."""

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import special, stats

from dovetail import accounting
from dovetail.accounting.releases import release_of, skellam_sums
from dovetail.accounting.releases.skellam_sums import rounded_norm
from dovetail.events import Everyone, FixedSize, Poisson, Round, SkellamSum, SplitAndMix, from_plain, to_plain
from dovetail.statements import Neighbors

DELTA = 1e-5
SMALL = SkellamSum(num_users=4, coordinates=2, clip_norm=1.0, scale=3.0, noise_variance=120.0, modulus=2**12)
LARGE = SkellamSum(num_users=900, coordinates=100, clip_norm=1.0, scale=2000.0, noise_variance=4e7, modulus=2**24)
REPLACE, REMOVE = Neighbors.REPLACE_ONE, Neighbors.ADD_REMOVE


def certified(event, *, eps, rounds=1):
    return accounting.bound([Round(mechanism=event, participation=Everyone())] * rounds, eps=eps).delta


def exact_delta(shift, variance, eps):
    """Independent Skellam noise on two coordinates, moved by whole numbers; in both directions."""
    x = np.arange(-130, 131)
    law = [stats.skellam.pmf(x - by, variance / 2, variance / 2) for by in (*shift, 0)]
    moved, still = np.outer(law[0], law[1]), np.outer(law[2], law[2])
    return max(np.maximum(p - math.exp(eps) * q, 0).sum() for p, q in ((moved, still), (still, moved)))


def shifts(event):
    """Every whole vector by which neighbours may be apart, up to symmetry."""
    norm = rounded_norm(clip_norm=1.0, scale=event.scale, coordinates=2, rounding_tail=event.rounding_tail)
    reach = range(-math.ceil(norm), math.ceil(norm) + 1)
    ends = [pair for pair in itertools.product(reach, reach) if math.hypot(*pair) <= norm]
    if event.neighbors is REPLACE:
        ends = {(a - c, b - d) for (a, b), (c, d) in itertools.product(ends, ends)}
    return {(a, b) for a, b in ends if a >= b >= 0}


@pytest.mark.parametrize("relation", [REPLACE, REMOVE])
@pytest.mark.parametrize("eps", [0.1, 0.5, 1.5])
def test_no_neighbours_show_more_than_is_certified(eps, relation):
    event = dataclasses.replace(SMALL, neighbors=relation)
    worst = max(exact_delta(shift, event.noise_variance, eps) for shift in shifts(event))
    assert worst <= certified(event, eps=eps)
    halve = dataclasses.replace(event, clip_norm=0.5, scale=event.scale / 2)
    assert eps > 1 or certified(halve, eps=eps) < worst, "half of this sensitivity would be refuted"


def test_random_small_sums_are_below_what_is_certified_and_not_far():
    """One coordinate, one or two rounds, by the sum of Skellam's probabilities."""
    rng, worst = np.random.default_rng(6), 0.0
    for _ in range(60):
        count = int(rng.integers(1, 3))
        variance = math.exp(rng.uniform(math.log(110), math.log(4000)))
        scale = math.sqrt(variance) * rng.uniform(0.1, 0.8)
        event = dataclasses.replace(SMALL, coordinates=1, scale=scale, noise_variance=variance, modulus=2**20)
        shift, eps = 2 * math.floor(scale), float(rng.uniform(0.05, 2))
        reach = math.ceil(9 * math.sqrt(variance)) + shift
        k = np.arange(-reach, reach + 1)
        p, q = (special.ive(np.abs(k - moved), variance) for moved in (shift, 0))
        first, second = (p, q) if count == 1 else (np.outer(p, p), np.outer(q, q))
        exact = float(np.maximum(first - math.exp(eps) * second, 0).sum())
        worst = max(worst, exact / certified(event, eps=eps, rounds=count))
    assert 0.5 < worst < 1


def view(values, modulus, aggregators):
    """The exact law of what all aggregators but the last show: their shares, and the last one's sum."""
    users, law = len(values), Counter()
    for free in itertools.product(range(modulus), repeat=users * (aggregators - 1)):
        rows = [free[user * (aggregators - 1) : (user + 1) * (aggregators - 1)] for user in range(users)]
        last = sum(value - sum(row) for value, row in zip(values, rows, strict=True)) % modulus
        law[free, last] += 1
    return law


@pytest.mark.parametrize(("users", "modulus", "aggregators"), [(2, 5, 2), (3, 4, 2), (2, 3, 3)])
def test_all_aggregators_but_one_see_a_function_of_the_sum_alone(users, modulus, aggregators):
    """By enumeration: equal sums have equal views; others have disjoint ones, so that no less is seen either."""
    laws = {}
    for values in itertools.product(range(modulus), repeat=users):
        found = view(values, modulus, aggregators)
        assert laws.setdefault(sum(values) % modulus, found) == found
    for one, other in itertools.combinations(laws.values(), 2):
        assert not set(one) & set(other)
        assert Counter(shares for shares, _ in one) == Counter(shares for shares, _ in other), "shares tell nothing"


def test_it_costs_what_split_and_mix_does_without_the_mixing():
    mixed = SplitAndMix(
        **{field: getattr(LARGE, field) for field in ("num_users", "coordinates", "clip_norm", "scale")},
        noise_variance=LARGE.noise_variance,
        modulus=LARGE.modulus,
        shares=20,
    )
    orders = skellam_sums.ORDERS
    np.testing.assert_array_equal(skellam_sums.renyi(LARGE, orders), skellam_sums.renyi(mixed, orders))
    assert skellam_sums.near_gaussian_of(LARGE) == skellam_sums.near_gaussian_of(mixed)
    assert release_of(LARGE).delta_spent(1.0) == ()
    assert release_of(mixed).delta_spent(1.0)[0].delta > 0
    ours, theirs = (
        accounting.bound([Round(mechanism=event, participation=Everyone())] * 7, delta=DELTA)
        for event in (LARGE, mixed)
    )
    assert theirs.eps * (1 - 1e-3) < ours.eps <= theirs.eps
    assert "dovetail.secagg" in ours.proof.key
    assert "mixing" not in str(ours.proof)


def test_samples_that_are_seen_cost_as_much_as_everyone_and_secret_coins_less():
    def eps(participation, event=LARGE):
        return accounting.bound([Round(mechanism=event, participation=participation)] * 5, delta=DELTA).eps

    assert eps(FixedSize(size=900, population=9000)) == pytest.approx(eps(Everyone()), rel=1e-9)
    assert eps(Poisson(prob=0.1)) < 0.5 * eps(Everyone())
    small = FixedSize(size=5, population=9000)
    assert not release_of(LARGE).full_round_covers_known_sample(small), "fewer than whose noise is counted on"
    whole = dataclasses.replace(LARGE, num_users=0)
    assert eps(small, whole) == pytest.approx(eps(Everyone()), rel=1e-9), "where an aggregator adds it, any number"


def test_the_event_is_plain_data_and_refuses_what_makes_no_sense():
    assert from_plain(to_plain(dataclasses.replace(LARGE, neighbors=REMOVE))) == dataclasses.replace(
        LARGE, neighbors=REMOVE
    )
    for change, sentence in (
        ({"num_users": -1}, "num_users >= 0"),
        ({"colluders": 900}, "fewer colluders than num_users=900"),
        ({"noise_variance": 0.0}, "noise_variance > 0"),
        ({"modulus": 1}, "modulus >= 2"),
        ({"coordinates": 0}, "coordinates >= 1"),
        ({"rounding_tail": 1.0}, "0 < rounding_tail < 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dataclasses.replace(LARGE, **change)


@pytest.mark.parametrize("coordinates", [1, 7, 10_000])
@pytest.mark.parametrize("l2", [1.0, 3.0, 250.0])
@pytest.mark.parametrize("variance", [0.5, 20.0, 1e5])
def test_the_divergence_is_the_theorems(coordinates, l2, variance):
    """Agarwal, Kairouz, Liu (2021), Thm. 3.5, for integers: sum |x| <= sum x^2, and <= sqrt(d) of the root of that."""
    l1 = l2**2 if l2**2 < math.sqrt(coordinates) * l2 else math.sqrt(coordinates) * l2
    for order in (2, 3, 17, 400):
        first = order * l2**2 / (2 * variance)
        second = ((2 * order - 1) * l2**2 + 6 * l1) / (4 * variance**2)
        third = 3 * l1 / (2 * variance)
        (found,) = skellam_sums._skellam_renyi(l2, coordinates, variance, np.array([float(order)]))
        assert found == pytest.approx(first + (second if second < third else third), rel=1e-12)
        (between,) = skellam_sums._skellam_renyi(l2, coordinates, variance, np.array([order - 0.5]))
        assert between == found, "an order between integers costs the next integer"
