"""The laws behind the exact attacks: cells against the randomizers' densities, sums against convolutions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import integrate
from scipy.special import ive, ndtr
from scipy.stats import binom

from dovetail.audit.bounds import ExactAttack, best_bound
from dovetail.audit.exact import cells, noise, sums
from dovetail.audit.exact.cells import Binomial
from dovetail.audit.exact.sums import Mixture, RepeatedCells, SumPart, attack_likelihood_ratios, attacks_on_far_worlds
from dovetail.audit.findings import audit
from dovetail.events import Report, SampledSubject
from dovetail.guarantee.quotes import Terms
from dovetail.mechanisms import ClipLaplace, LaplaceRandomizer, RandomizedResponse
from dovetail.statements import NotApplicable


@pytest.mark.parametrize("position", [0.0, 0.3, 1.0])
def test_levels_are_those_of_randomized_response(position):
    for levels in (2, 5):
        masses = cells.cells_of_report(Report(kind="rr", eps_local=0.7, levels=levels)).masses(0.7, position)
        exact = np.exp(RandomizedResponse(0.7, levels).log_density(np.arange(levels), position))
        np.testing.assert_allclose(np.float64(masses), exact, rtol=1e-14)
        assert abs(masses.sum() - 1) < 1e-18


@pytest.mark.parametrize("position", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("reach", [None, 0.0, 0.5])
def test_cells_are_integrals_of_the_density(position, reach):
    eps_local = 1.3
    if reach is None:
        family, local, ends = cells.cells_of_randomizer("laplace"), LaplaceRandomizer(eps_local), (-30.0, 31.0)
    else:
        cuts = np.linspace(-reach, 1 + reach, 9)[1:-1]
        family = cells.Cells(kind="clip_laplace", cuts=cuts, overhang=reach)
        local, ends = ClipLaplace(eps_local, -1.0, 1.0, 1 + 2 * reach), (-reach, 1 + reach)
    edges = np.concatenate([[ends[0]], family.cuts, [ends[1]]])

    def density(u):  # positions have unit length, Clip-Laplace is on [-1, 1]
        if reach is None:
            return math.exp(local.log_density(u, position))
        return 2 * math.exp(local.log_density(2 * u - 1, 2 * position - 1))

    masses = family.masses(eps_local, position)
    for cell in (0, 1, len(edges) // 2 - 1, len(edges) - 2):
        low, high = edges[cell], edges[cell + 1]
        points = [position] if low < position < high else None
        mass = integrate.quad(density, low, high, points=points, limit=200, epsabs=1e-13)[0]
        assert float(masses[cell]) == pytest.approx(mass, abs=1e-10)
    assert abs(masses.sum() - 1) < 1e-17


def test_sums_are_convolutions_within_their_slack():
    rng = np.random.default_rng(0)
    some, other, victim = (rng.dirichlet(np.ones(4)) for _ in range(3))
    law = np.ones(1)
    for one in [some] * 6 + [other] * 5:
        law = np.convolve(law, one)
    crowd = [SumPart(masses=some, times=6), SumPart(masses=other, times=5)]
    fight = sums.attack_sums("a sum", [*crowd, SumPart(masses=victim)], crowd)
    for exact, found in ((np.convolve(law, victim), fight.log_first), (law, fight.log_second)):
        padded = np.zeros(len(found))
        padded[: len(exact)] = exact
        shift = int(np.argmax(found)) - int(np.argmax(exact))
        assert np.abs(np.roll(padded, shift) - np.exp(found)).sum() < 1e-14
    assert fight.slack < 1e-13


def test_errors_of_huge_powers_stay_within_the_slack():
    trials, prob = 3_000_000, np.longdouble(1) / 7
    law = np.array([1 - prob, prob])
    parts = [SumPart(masses=law, times=trials, error=4 * sums.ULP)]
    fight = sums.attack_sums("ones", parts, parts)
    middle = round(trials / 7)
    values = middle + np.arange(-len(fight.log_first) // 2, len(fight.log_first) // 2)
    start, exact = cells.binomial_law(trials, prob)
    inside = (values >= start) & (values < start + len(exact))
    gap = np.abs(np.exp(fight.log_first[inside]) - exact[values[inside] - start]).sum()
    assert float(gap) < fight.slack < 1e-9
    assert float(gap) < 1e-12


def test_a_mixture_is_the_sum_over_its_counts():
    some, rest = np.array([0.3, 0.7]), np.array([0.5, 0.5])
    start, weights = cells.binomial_law(5, 0.4)
    fight = sums.attack_sums(
        "ones",
        [Mixture(some=SumPart(masses=some), rest=SumPart(masses=rest), total=6, start=start, weights=weights, times=2)],
        [SumPart(masses=rest, times=12)],
    )
    one = sum(
        binom.pmf(c, 5, 0.4) * np.convolve(binom.pmf(np.arange(c + 1), c, 0.7), binom.pmf(np.arange(7 - c), 6 - c, 0.5))
        for c in range(6)
    )
    law = np.convolve(one, one)
    found = np.exp(fight.log_first)
    assert np.sort(found)[-13:] == pytest.approx(np.sort(law), abs=1e-14)


def test_binomials_keep_their_precision():
    start, masses = cells.binomial_law(2000, 0.3)
    prob = Fraction(0.3)
    for value in (600, 650, 560):
        exact = math.comb(2000, value) * prob**value * (1 - prob) ** (2000 - value)
        assert float(masses[value - start]) == pytest.approx(float(exact), rel=2e-16)
    logs = cells.log_binomial_pmf(20_000, 0.4)
    assert logs[20_000] == pytest.approx(20_000 * math.log(0.4), rel=1e-14)
    assert logs[8000] == pytest.approx(binom.logpmf(8000, 20_000, 0.4), abs=1e-9)
    assert cells.binomial_law(7, 1.0) == (7, np.ones(1))


def test_counts_and_pairs_of_counts_by_enumeration():
    first, second = [Binomial(trials=3, prob=0.2), Binomial(trials=1, prob=0.9)], [Binomial(trials=4, prob=0.2)]
    fight = cells.attack_counts("ones", first, second)
    law = np.convolve(binom.pmf(np.arange(4), 3, 0.2), [0.1, 0.9])
    np.testing.assert_allclose(np.exp(fight.log_first), law, rtol=1e-13)
    np.testing.assert_allclose(np.exp(fight.log_second), binom.pmf(np.arange(5), 4, 0.2), rtol=1e-13)

    pair = cells.attack_two_counts("pairs", 2, (0.2, 0.3), (0.6, 0.1), (0.1, 0.6))
    table = np.zeros((4, 4))
    reports = ((1, 0), (0, 1), (0, 0))
    for i, p in zip(reports, (0.2, 0.3, 0.5), strict=True):
        for j, q in zip(reports, (0.2, 0.3, 0.5), strict=True):
            for k, r in zip(reports, (0.6, 0.1, 0.3), strict=True):
                table[i[0] + j[0] + k[0], i[1] + j[1] + k[1]] += p * q * r
    np.testing.assert_allclose(np.exp(pair.log_first).reshape(4, 4), table, atol=1e-15)


def test_likelihoods_of_one_observation_lose_nothing_and_know_the_pure_ratio():
    rng = np.random.default_rng(3)
    first, second = (np.longdouble(rng.dirichlet(np.ones(6))) for _ in range(2))
    fight = attack_likelihood_ratios("cells", [RepeatedCells(first, second, 1, 1e-17)])
    for eps in (0.0, 0.5, 1.0):
        exact = max(np.maximum(p - math.exp(eps) * q, 0).sum() for p, q in ((first, second), (second, first)))
        assert fight.delta(eps=eps) == pytest.approx(float(exact), abs=1e-6)
    largest = float(np.abs(np.log(first / second)).max())
    assert fight.eps(delta=0).eps == pytest.approx(largest, rel=1e-8)
    assert attack_likelihood_ratios("cells", [RepeatedCells(first, second, 7, 1e-17)]).eps(delta=0).eps <= 7 * largest


@pytest.mark.parametrize(("count", "eps_local"), [(400, 0.5), (3000, 1.0)])
def test_worlds_that_are_far_apart_by_a_change_of_measure(count, eps_local):
    prob = np.longdouble(math.exp(eps_local) / (1 + math.exp(eps_local)))
    seen = RepeatedCells(np.array([1 - prob, prob]), np.array([prob, 1 - prob]), count, 1e-18)
    logs = [cells.log_binomial_pmf(count, float(p)) for p in (prob, 1 - prob)]
    exact = ExactAttack(attack="ones", log_first=logs[0], log_second=logs[1])
    for delta in (1e-6, 1e-3, 0.3):
        found = best_bound([exact_attack.eps(delta=delta) for exact_attack in attacks_on_far_worlds("ones", seen)]).eps
        assert 0.9 * exact.eps(delta=delta).eps < found <= exact.eps(delta=delta).eps
    assert attacks_on_far_worlds("ones", seen._replace(times=3)) == []


def test_skellam_is_the_difference_of_poissons():
    fight = noise.attack_skellam("a value", 9.0, 3, modulus=2**12)
    middle = int(np.argmax(fight.log_second))
    values = np.arange(-20, 21)
    np.testing.assert_allclose(np.exp(fight.log_second[middle + values]), ive(np.abs(values), 9.0), atol=1e-15)
    np.testing.assert_allclose(np.exp(fight.log_first[middle + 3 + values]), ive(np.abs(values), 9.0), atol=1e-15)
    assert noise.attack_skellam("a value", 9.0, 3, modulus=101).eps(delta=1e-3).eps == pytest.approx(
        fight.eps(delta=1e-3).eps, rel=1e-6
    )
    with pytest.raises(NotApplicable, match="spreads over"):
        noise.attack_skellam("a value", 1e14, 3, modulus=2**32)


def test_narrow_cells_of_a_normal_law():
    masses = noise._normal_masses_of_narrow_cells(
        np.array([0.00125, 3.00125, -6.00125], np.longdouble), np.longdouble(1) / 400
    )
    for mass, low in zip(masses, (0.0, -3.0025, -6.0025), strict=True):
        exact = ndtr(low + 1 / 400) - ndtr(low)
        assert float(mass) == pytest.approx(exact, rel=1e-12, abs=0)


def test_what_rounds_to_certainty_is_not_taken_for_it():
    """A probability of 1 - 1e-20 is the float 1.0: that a bit is 0 must not count as impossible."""
    almost = float(1 - 1e-20)
    assert almost == 1.0
    worlds = [[Binomial(trials=1, prob=0.5)], [Binomial(trials=1, prob=almost)]]
    found = cells.attack_counts("a bit", *worlds).eps(delta=1e-6)
    assert found.eps <= math.log(0.5 / 1e-20)
    assert found.eps > math.log(0.5 / 1e-15)


@pytest.mark.parametrize(("randomizer", "eps_local"), [("rr2", 3.0), ("laplace", 4.0), ("rr2", 8.0)])
def test_large_budgets_in_whole_messages_stay_below_what_is_certified(randomizer, eps_local):
    settings = {"beta": 0.02, "pad_to": 333, "published": True, "randomizer": randomizer, "eps_local": eps_local}
    found = audit("ss_double", Terms(num_users=1000, dim=7850, delta=5e-6, settings=settings), trials=0)
    assert 20 < found.bound.eps <= found.certified.eps


def test_items_at_several_users_are_in_one_sum_or_in_as_many_as_there_are_users():
    """Under one noise it is no matter who holds them; with noise at every user, users are releases of their own."""
    terms = {"std": 2.0, "clip_norm": 1.0, "prob_item": 0.3}
    together = SampledSubject(**terms, items=3, users_spanned=3)
    apart = SampledSubject(**terms, items=3, users_spanned=3, noise="user")

    def eps(event, split, releases):
        return noise._attack_mixture("", event, split, releases).eps(delta=1e-5).eps

    for split in ((1, 1, 1), (2, 1)):
        assert eps(together, split, 2) == pytest.approx(eps(together, (3,), 2), rel=1e-12)
    assert eps(apart, (1, 1, 1), 2) == pytest.approx(eps(apart, (1,), 6), rel=1e-12)
    assert eps(apart, (1,), 6) < eps(apart, (2, 1), 2) < eps(apart, (3,), 2)
