"""Skellam noise beside a rounded Gaussian: every inequality of docs/proofs/skellam.md, and deltas by brute force."""

import contextlib
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from grids import later
from mpmath import mpf
from numpy.polynomial import polynomial
from scipy.special import ive

from dovetail.accounting import gaussian
from dovetail.accounting.releases import skellam_sums
from dovetail.statements import NotApplicable

VARIANCES = (100.0, 117.3, 150.5, 200.0, 333.3, 500.0, 1000.0, 1500.0, 3000.0, 1e4, 1e5)


def masses(variance, std, width=14):
    """Both laws on 0, 1, 2, ...: Skellam's by Miller's recurrence, and round(N(0, std^2))'s."""
    top = int(width * mpmath.sqrt(variance)) + 20
    values = [mpf(0)] * (top + 202)
    values[-2] = mpf(1)
    for k in range(top + 200, 0, -1):
        values[k - 1] = values[k + 1] + 2 * k / mpf(variance) * values[k]
    total = values[0] + 2 * sum(values[1:])
    cuts = [mpmath.erfc((k - mpf(1) / 2) / (std * mpmath.sqrt(2))) / 2 for k in range(top + 2)]
    return [value / total for value in values[: top + 1]], [cuts[k] - cuts[k + 1] for k in range(top + 1)]


def divergence(variance, added=Fraction(1, 12)):
    """KL(round N(0, variance - added) || Skellam), summed in 60 digits."""
    with mpmath.workdps(60):
        std = mpmath.sqrt(mpf(variance) - mpf(added.numerator) / added.denominator)
        skellam, rounded = masses(variance, std)
        terms = (q * mpmath.log(q / p) + p - q for p, q in zip(skellam, rounded, strict=True))
        return sum((2 if k else 1) * term for k, term in enumerate(terms))


# ---------------------------------------------------------------- the theorem


@pytest.mark.parametrize("variance", [*VARIANCES[:-1], later(VARIANCES[-1])])
def test_the_divergence_is_never_below_the_sum_of_both_laws(variance):
    exact, ours = divergence(variance), skellam_sums.divergence_from_gaussian(variance)
    assert 0.98 <= exact * 48 * variance**2 <= 1
    assert exact <= ours <= exact * (1 + 28 / variance)
    if variance >= 1500:
        assert ours <= exact * 1.02


@pytest.mark.soak
@pytest.mark.parametrize("variance", [1e6, *np.geomspace(100, 20_000, 60)])
def test_the_divergence_at_many_variances(variance):
    exact, ours = divergence(variance), skellam_sums.divergence_from_gaussian(variance)
    assert exact <= ours <= exact * (1 + 28 / variance)


@pytest.mark.parametrize("variance", [3000.0, later(1e4), later(1e5)])
def test_near_misses_are_caught(variance):
    ours, exact = skellam_sums.divergence_from_gaussian(variance), divergence(variance)
    assert divergence(variance, added=Fraction(0)) > ours, "a Gaussian of Skellam's own variance is further away"
    assert divergence(variance, added=Fraction(1, 6)) > ours
    assert exact > ours / 2, "half the constant would not do"
    assert exact > ours * (1 - 28 / variance), "and hardly less than the constant"


@pytest.mark.parametrize("variance", [100.0, 133.7, 500.0, 5000.0])
def test_the_inequalities_of_the_proof(variance):
    """R, E_p, E_q, E, what is beyond W and what is up to it, from the middle to far out in the tail."""
    root = math.sqrt(variance)
    ks = {int(c * root) for c in np.linspace(0, 12, 25)} | {int(c * variance**0.75) for c in (1.0, 1.99, 2.01, 3.0)}
    tiny = mpf(10) ** -9
    for k in sorted(ks | {0, 1, 2, int(variance / 2), int(variance)}):
        with mpmath.workdps(60):
            mu = mpf(variance)
            square = mu - mpf(1) / 12
            x, y, t, r = k / mpmath.sqrt(mu), k / mpmath.sqrt(square), k / mu, mpmath.sqrt(k * k + mu * mu)
            tau = k / r
            log_p = mpmath.log(mpmath.besseli(k, mu)) - mu
            log_g = -mpmath.log(2 * mpmath.pi * mu) / 2 - x * x / 2
            far, near = ((k + side) / mpmath.sqrt(2 * square) for side in (mpf(1) / 2, -mpf(1) / 2))
            log_q = mpmath.log((mpmath.erfc(near) - mpmath.erfc(far)) / 2)
            outer = mu * (mpmath.sqrt(1 + t * t) - t * mpmath.asinh(t) - 1)
            rest = (mpmath.exp(log_p - outer) * mpmath.sqrt(2 * mpmath.pi * r) - 1) * r - (3 - 5 * tau**2) / 24
            assert -(0.532 * tau**2 + tiny) <= rest * r <= 0.0892 + 0.539 * tau**4 + tiny
            he4 = x**4 - 6 * x**2 + 3
            e_p = (log_p - log_g - he4 / (24 * mu)) * mu**2
            assert -(x**6 / 80 + 13 * x**2 / 48 + 0.532 * tau**2 + 0.0091) <= e_p
            assert e_p <= x**4 / 8 + 0.0893 + 0.539 * tau**4
            e_q = (log_q - log_g) * square**2
            assert -(y**4 / 960 + mpf(1) / 576) <= e_q <= x**2 / 288 + (y**2 - 1) ** 2 / 512
            assert log_q - log_g <= 1 / (24 * square) + x**2 / (288 * square**2)
            assert abs(log_q - log_p + he4 / (24 * mu)) * mu**2 <= x**6 / 75 + x**2 / 3 + mpf(1) / 8
            if k >= 2 * mu ** mpf("0.75"):
                assert log_q <= log_p
            else:
                assert log_p - log_q <= 0.7 and e_q / square**2 <= 0.033 / mu


def test_the_exact_formula_of_lemma_1():
    for k, mu in [(0, 100), (37, 150), (900, 400)]:
        with mpmath.workdps(40):
            r, t = mpmath.sqrt(k * k + mu * mu), mpf(k) / mu
            integral = mpmath.quad(
                lambda a, k=k, r=r: mpmath.exp(-r * (1 - mpmath.cos(a))) * mpmath.cos(k * (a - mpmath.sin(a))),
                [*np.linspace(0, math.pi, 40).tolist()[:-1], mpmath.pi],
            )
            ours = integral / mpmath.pi * mpmath.exp(mu * (mpmath.sqrt(1 + t * t) - t * mpmath.asinh(t) - 1))
            assert abs(ours / (mpmath.besseli(k, mu) * mpmath.exp(-mu)) - 1) < 1e-25


def test_the_constants_of_the_proof():
    def expected(poly):
        return sum(c * math.prod(range(1, m, 2)) for m, c in enumerate(poly) if m % 2 == 0)

    he4, rest = np.array([3.0, 0, -6, 0, 1]), np.array([1 / 8, 0, 1 / 3, 0, 0, 0, 1 / 75])
    squares = [polynomial.polymul(poly, poly) for poly in (he4, rest)]
    fourths = [polynomial.polymul(square, square) for square in squares]
    assert expected(squares[0]) == pytest.approx(24)
    assert expected(squares[1]) <= 1.807**2
    assert expected(fourths[0]) == pytest.approx(368064)
    assert expected(fourths[1]) <= 11.2**4
    d, g = 2 / math.sqrt(3), 2 * math.pi - 3 * math.sqrt(3)
    assert d - 9 / 8 <= 0.02971 and d * g**2 <= 1.36445 and d * g**4 <= 1.6124
    assert 3 * 0.02971 <= 0.0892 and 10395 * 1.6124 / 24 / 1296 <= 0.539 and 105 * 0.36445 / 72 <= 0.532
    third = 0.201 * 48 / math.sqrt(24) * 1.0886 * 1.1384**2
    assert (math.exp(0.7) - 1.7 - 0.245) / 0.343 <= 0.201 and third <= 2.78
    for mu in (100, 300, 1e3, 1e4, 1e6):
        assert (1 + 1.807 * math.sqrt(24) / mu) ** 2 <= (1 + 8.86 / mu) ** 2 <= 1 + 18.51 / mu
        beyond = 48 * mu**2 * 3.9 * math.exp(-2 * math.sqrt(mu))
        assert beyond <= 0.39 / mu
        assert (1 + 0.034 / mu) * (1 + (18.51 + third) / mu) + beyond <= 1 + 24 / mu


def test_not_known_for_little_noise():
    with pytest.raises(NotApplicable, match="variance >= 100"):
        skellam_sums.divergence_from_gaussian(99.999)
    with pytest.raises(NotApplicable, match="variance >= 100"):
        skellam_sums.near_gaussian(sensitivity=1.0, coordinates=2, variance=99.0)
    with pytest.raises(ValueError, match="variance"):
        skellam_sums.divergence_from_gaussian(math.nan)
    assert skellam_sums.divergence_from_gaussian(1e200) > 0, "what underflows is not 0"


# ---------------------------------------------------------------- deltas, by brute force


def skellam_pair(shift, variance):
    """One coordinate's masses for two inputs that are `shift` apart."""
    reach = math.ceil(9.5 * math.sqrt(variance) + abs(shift))
    k = np.arange(-reach, reach + 1)
    return ive(np.abs(k - shift), variance), ive(np.abs(k), variance)


def exact_delta(pairs, eps):
    """sup over sets S of P(S) - e^eps Q(S) for independent coordinates: the last is searched, the others enumerated."""
    first, second = np.ones(1), np.ones(1)
    for p, q in pairs[:-1]:
        first, second = np.outer(first, p).ravel(), np.outer(second, q).ravel()
    p, q = pairs[-1]
    p, q = p[p > 1e-200], q[p > 1e-200]
    loss = np.log(p) - np.log(np.maximum(q, 1e-290))
    by_loss = np.argsort(loss)
    above = [np.append(np.cumsum(mass[by_loss][::-1])[::-1], 0.0) for mass in (p, q)]
    kept = first > 1e-25
    first, second = first[kept], second[kept]
    at = np.searchsorted(loss[by_loss], eps + np.log(second) - np.log(first))
    return float(np.sum(first * above[0][at] - math.exp(eps) * second * above[1][at]))


def random_releases(count, seed):
    """Shifts of one to three coordinates, a variance, and an eps, of any size that says something."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        coordinates = int(rng.choice([1, 2, 3], p=[0.5, 0.45, 0.05]))
        variance = math.exp(rng.uniform(math.log(100), math.log((1e5, 5e3, 250)[coordinates - 1])))
        size = math.sqrt(variance / coordinates) * rng.uniform(0.05, 2)
        shifts = np.maximum(1, np.round(size * rng.uniform(0.3, 1, coordinates))).astype(int)
        yield shifts, variance, float(rng.uniform(0, 2.5))


def certified(shifts, variance, eps):
    near = skellam_sums.near_gaussian(
        sensitivity=math.sqrt(float(shifts @ shifts)), coordinates=len(shifts), variance=variance
    )
    return gaussian.delta_of(near.mu, eps=eps), gaussian.distance_delta(near.divergence, eps=eps)


@pytest.mark.parametrize("count", [600, later(2200)])
def test_no_release_of_many_has_a_delta_above_the_certified_one(count):
    worst, without = 0.0, 0
    for shifts, variance, eps in random_releases(count, seed=3):
        exact = exact_delta([skellam_pair(shift, variance) for shift in shifts], eps)
        noise, distance = certified(shifts, variance, eps)
        worst = max(worst, exact / (noise + distance))
        without += exact > noise
    assert 0.99 < worst < 1
    assert without >= count / 11, "the distance must matter for this test to say anything"


def test_the_spent_delta_is_pinskers_and_grows():
    assert gaussian.distance_delta(0.0, eps=3.0) == 0
    spent = gaussian.distance_delta(2e-10, eps=1.0)
    assert (1 + math.e) * 1e-5 <= spent <= (1 + math.e) * 1e-5 * (1 + 1e-9)
    assert gaussian.distance_delta(2e-10, eps=1.1) > spent < gaussian.distance_delta(3e-10, eps=1.0)
    assert gaussian.distance_delta(2e-10, eps=900.0) == gaussian.distance_delta(1.0, eps=5.0) == 1


@pytest.mark.parametrize("rounds", [2, 3, 7, 1000])
def test_rounds_add_up_to_no_less_than_they_are(rounds):
    """In fractions: not even the last digit is rounded in favour of the bound."""
    for part in (0.1, 1 / 3, 0.7, 0.9):
        whole = gaussian.NearGaussian(mu=part, divergence=part * 1e-9).repeat(rounds)
        divergence, square = rounds * Fraction(part * 1e-9), rounds * Fraction(part) ** 2
        assert divergence <= Fraction(whole.divergence) <= divergence * (1 + Fraction(1, 10**14))
        assert square <= Fraction(whole.mu) ** 2 <= square * (1 + Fraction(1, 10**14))


# ---------------------------------------------------------------- the ratio of both laws


def log_ratios(variance):
    """log(q / p), and both laws, on all whole numbers that matter: q rounded Gaussian, p Skellam."""
    with mpmath.workdps(40):
        skellam, rounded = masses(variance, mpmath.sqrt(mpf(variance) - mpf(1) / 12), width=11)
        ratio = np.array([float(mpmath.log(q / p)) for p, q in zip(skellam, rounded, strict=True)])
    p, q = (np.array([float(value) for value in law]) for law in (skellam, rounded))
    return (np.concatenate([one[:0:-1], one]) for one in (ratio, p, q))


def tail_of_sums(values, probs, count, level):
    """P(the sum of so many draws > level), from below: values are rounded down to a grid."""
    step = level / 400
    index = np.floor(values / step).astype(int)
    index = np.clip(index, -2000, 2000)
    law = np.bincount(index + 2000, probs, 4001)
    size = 2**20
    spectrum = np.fft.rfft(law, size) ** count
    total = np.fft.irfft(spectrum, size)
    first = -2000 * count
    at = math.floor(level / step) + 1 - first
    return float(total[at : 4000 * count + 1].sum())


@pytest.mark.parametrize("count", [1, 30, 200])
@pytest.mark.parametrize("tail", [1e-2, 1e-6])
def test_the_slack_is_never_below_the_quantile_of_either_direction(count, tail):
    variance = 20_000.0
    slack = gaussian.log_ratio_slack([gaussian.SkellamDraws(count, variance)], tail=tail)
    ratio, p, q = log_ratios(variance)
    for values, law in ((ratio, q), (-ratio, p)):
        assert tail_of_sums(values, law, count, slack) <= tail
    assert tail_of_sums(-ratio, p, count, 1e-3 * slack) > tail, "the slack must matter for this test to say anything"


def test_the_slack_grows_with_draws_and_falls_with_noise():
    one = gaussian.SkellamDraws(1000, 1e8)
    base = gaussian.log_ratio_slack([one], tail=1e-9)
    assert gaussian.log_ratio_slack([one, one], tail=1e-9) > base
    assert gaussian.log_ratio_slack([one], tail=1e-12) > base
    assert gaussian.log_ratio_slack([one._replace(variance=4e8)], tail=1e-9) < base / 3
    assert gaussian.log_ratio_slack([], tail=1e-9) == 0
    with pytest.raises(NotApplicable, match="variance >= 100"):
        gaussian.log_ratio_slack([gaussian.SkellamDraws(1, 99.0)], tail=0.1)
    with pytest.raises(NotApplicable, match="too far from a Gaussian"):
        gaussian.log_ratio_slack([gaussian.SkellamDraws(1, 500.0)], tail=1e-6)


@pytest.mark.parametrize("eps", [0.5, 3.0, 8.0])
def test_the_tail_of_the_ratio_is_charged_under_either_law(eps):
    """e^slack delta + tail (1 + e^(eps - slack)): as much as the tail weighs where the other law has e^eps of it."""
    draws, delta = [gaussian.SkellamDraws(100, 1e12)], 1e-6
    about, charged = gaussian._ratio_tail_probability(delta, eps), []
    for tail in (about / gaussian._TAILS, about, about * gaussian._TAILS):
        slack = gaussian.log_ratio_slack(draws, tail=tail)
        charged.append(math.expm1(slack) * delta + tail * (1 + math.exp(eps - slack)))
    found = gaussian.delta_by_ratio(lambda at: delta, draws, eps=eps) - delta
    assert min(charged) * (1 - 1e-6) <= found <= min(charged) * (1 + 1e-3)


def test_no_release_has_a_delta_above_what_the_ratio_certifies():
    rng, compared, closest = np.random.default_rng(8), 0, 0.0
    while compared < 150:
        variance = math.exp(rng.uniform(math.log(2e4), math.log(1e5)))
        shift = max(1, round(math.sqrt(variance) * rng.uniform(0.05, 2)))
        eps = float(rng.uniform(0.3, 2.5))
        exact = exact_delta([skellam_pair(shift, variance)], eps)
        near = skellam_sums.near_gaussian(sensitivity=float(shift), coordinates=1, variance=variance)
        with contextlib.suppress(NotApplicable):
            ours = gaussian.delta_by_ratio(lambda at, mu=near.mu: gaussian.delta_of(mu, eps=at), [near.draws], eps=eps)
            assert exact <= ours
            compared += exact > 1e-9
            closest = max(closest, exact / ours)
    assert closest > 0.7
