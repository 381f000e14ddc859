"""PrivUnit by seeds: the expansion that can never change, the exact coin, and the law on each side of the threshold."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from scipy import stats

from dovetail.accounting.releases.privunit import cap_mass
from dovetail.accounting.releases.privunit import eps as eps_of
from dovetail.mechanisms import ExactSampler, PrivUnitRandomizer, SeededPrivUnit, seeds
from dovetail.statements import NotApplicable

ALPHA = 1e-4
DIM, REPORTS = 8, 2000


def seeded(seed: int = 0) -> ExactSampler:
    return ExactSampler(np.random.default_rng(seed).bytes)


@pytest.fixture(scope="module")
def randomizer() -> SeededPrivUnit:
    return SeededPrivUnit(PrivUnitRandomizer(2.0, 0.5, DIM))


@pytest.fixture(scope="module")
def unit() -> np.ndarray:
    x = np.random.default_rng(1).normal(size=DIM)
    return x / np.linalg.norm(x)


@pytest.fixture(scope="module")
def heights(randomizer: SeededPrivUnit, unit: np.ndarray) -> np.ndarray:
    """<v(s), u> of reports on an input at the edge of the ball, where u is never turned round."""
    sampler = seeded(2)
    reports = np.array([randomizer(3 * unit, sampler=sampler) for _ in range(REPORTS)])
    assert reports.shape == (REPORTS, seeds.SEED_BYTES)
    return seeds.directions_of_seeds(reports, DIM).astype(float) @ unit


# Expansion


def test_the_expansion_never_changes() -> None:
    """Golden values of two seeds; deployed clients and analyzers of different versions must agree on them."""
    both = np.array([np.arange(16), np.arange(16)[::-1]], np.uint8)
    golden = [
        [0.49388748, -0.50903815, -0.67408680, 0.12602746, -0.16333827],
        [-0.39152136, 0.82295480, 0.35897312, -0.20132744, 0.00787232],
    ]
    np.testing.assert_allclose(seeds.directions_of_seeds(both, 5), golden, atol=1e-6)


def test_the_expansion_is_what_it_is_said_to_be() -> None:
    """By hand from the keystream of the standard's test key, 000102..0f: E(0), E(1), E(2)."""
    stream = bytes.fromhex(
        "c6a13b37878f5b826f4f8162a1c8d8797346139595c0b41e497bbde365f42d0a49d68753999ba68ce3897a686081b09d"
    )
    uniform = [((word >> 11) + 0.5) / 2**53 for word in struct.unpack("<6Q", stream)]
    radius = [math.sqrt(-2 * math.log(u)) for u in uniform[:3]]
    normals = [r * math.cos(2 * math.pi * u) for r, u in zip(radius, uniform[3:], strict=True)]
    normals += [r * math.sin(2 * math.pi * u) for r, u in zip(radius, uniform[3:], strict=True)]
    for dim in (5, 6):
        expected = np.array(normals[:dim]) / np.linalg.norm(normals[:dim])
        np.testing.assert_allclose(
            seeds.directions_of_seeds(np.arange(16, dtype=np.uint8)[None], dim)[0], expected, atol=1e-6
        )


def test_blocks_do_not_show() -> None:
    many = seeds.draw_seeds(300, sampler=seeded())
    whole = seeds.directions_of_seeds(many, 1001)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole[137:140], seeds.directions_of_seeds(many[137:140], 1001))
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("dim", [2, 3, 50])
def test_directions_are_as_good_as_uniform(dim: int) -> None:
    """Heights along an axis and across (KS, alpha = 1e-4); a sphere of one dimension more is told apart."""
    directions = seeds.directions_of_seeds(seeds.draw_seeds(20_000, sampler=seeded(3)), dim).astype(float)
    slanted = np.ones(dim) / math.sqrt(dim)
    for height in (directions[:, 0], directions[:, -1], directions @ slanted):
        assert stats.kstest((1 + height) / 2, stats.beta((dim - 1) / 2, (dim - 1) / 2).cdf).pvalue > ALPHA
    if dim < 50:
        assert stats.kstest((1 + directions[:, 0]) / 2, stats.beta(dim / 2, dim / 2).cdf).pvalue < 1e-9


# The law


def test_the_coin_for_the_cap_is_exact(randomizer: SeededPrivUnit, heights: np.ndarray) -> None:
    """Binomial test, alpha = 1e-4; a probability off by .08 is rejected."""
    cap = randomizer.law.cap
    inside = int((heights >= cap.threshold).sum())
    assert stats.binomtest(inside, REPORTS, cap.prob).pvalue > ALPHA
    assert stats.binomtest(inside, REPORTS, cap.prob - 0.08).pvalue < 1e-9
    assert stats.binomtest(inside, REPORTS, cap.prob + 0.08).pvalue < 1e-9


def test_given_the_side_heights_have_the_exact_law_of_the_cap(randomizer: SeededPrivUnit, heights: np.ndarray) -> None:
    """KS on either side of the threshold, alpha = 1e-4; the law of a wider cap is rejected."""
    cap = randomizer.law.cap
    uniform = stats.beta((DIM - 1) / 2, (DIM - 1) / 2)
    high, low = heights[heights >= cap.threshold], heights[heights < cap.threshold]
    edge = uniform.cdf((1 + cap.threshold) / 2)
    assert 1 - edge == pytest.approx(cap_mass(dim=DIM, threshold=cap.threshold), rel=1e-8)
    assert stats.kstest((1 + high) / 2, lambda t: (uniform.cdf(t) - edge) / (1 - edge)).pvalue > ALPHA
    assert stats.kstest((1 + low) / 2, lambda t: uniform.cdf(t) / edge).pvalue > ALPHA
    wider = uniform.cdf((0.9 + cap.threshold) / 2)
    assert stats.kstest((1 + high) / 2, lambda t: (uniform.cdf(t) - wider) / (1 - wider)).pvalue < 1e-9


def test_of_few_seeds_each_has_its_exact_probability(monkeypatch: pytest.MonkeyPatch, unit: np.ndarray) -> None:
    """48 seeds in all: chi-square of the reports against prob or 1 - prob over the seeds of the side."""
    randomizer, pool = SeededPrivUnit(PrivUnitRandomizer(1.5, 1.0, DIM)), seeds.draw_seeds(48, sampler=seeded(5))
    monkeypatch.setattr(seeds, "draw_seeds", lambda count, *, sampler: pool[sampler.integers(48, count)])
    cap, sampler = randomizer.law.cap, seeded(6)
    above = seeds.directions_of_seeds(pool, DIM) @ unit >= cap.threshold
    law = np.where(above, cap.prob / above.sum(), (1 - cap.prob) / (~above).sum())
    place = {bytes(seed): i for i, seed in enumerate(pool)}
    counts = np.zeros(48)
    for _ in range(REPORTS):
        counts[place[bytes(randomizer(unit, sampler=sampler))]] += 1
    assert stats.chisquare(counts, law * REPORTS).pvalue > ALPHA
    flatter = np.where(above, 0.8 * law, law * (1 - 0.8 * cap.prob) / (1 - cap.prob))
    assert stats.chisquare(counts, flatter * REPORTS).pvalue < 1e-9


@pytest.mark.parametrize(("dim", "eps_local"), [(2, 1.0), (8, 2.0), (40, 5.0)])
def test_the_share_of_seeds_in_a_cap_is_its_mass_so_that_ratios_are_bounded(dim: int, eps_local: float) -> None:
    """Of 2^15 seeds, caps round axes and random points hold their mass (binomial, alpha = 1e-4 over 8 caps).

    With shares that are masses the largest log-ratio is log(prob (1 - c) / ((1 - prob) c)), at most eps_local.
    """
    law = SeededPrivUnit(PrivUnitRandomizer(eps_local, 1.0, dim)).law
    directions = seeds.directions_of_seeds(seeds.draw_seeds(2**15, sampler=seeded(7)), dim).astype(float)
    units = np.concatenate(
        [np.eye(dim)[[0, -1]], -np.eye(dim)[[0, -1]], np.random.default_rng(0).normal(size=(4, dim))]
    )
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    mass = cap_mass(dim=dim, threshold=law.cap.threshold)
    for inside in (directions @ units.T >= law.cap.threshold).sum(axis=0):
        assert stats.binomtest(int(inside), 2**15, mass).pvalue > ALPHA / 8
        assert stats.binomtest(int(inside), 2**15, 1.5 * mass).pvalue < 1e-5
    ratio = math.log(law.cap.prob) - math.log1p(-law.cap.prob) + math.log1p(-mass) - math.log(mass)
    assert eps_local - 1e-6 <= ratio <= eps_of(law.cap).eps <= eps_local


def test_shorter_inputs_are_turned_round_and_stay_unbiased(randomizer: SeededPrivUnit, unit: np.ndarray) -> None:
    """The mean de-biased report is the input (z-test over coordinates, 5 standard errors: alpha below 1e-5)."""
    sampler, x = seeded(8), 0.3 * unit
    reports = seeds.directions_of_seeds(np.array([randomizer(x, sampler=sampler) for _ in range(REPORTS)]), DIM)
    estimate = randomizer.law.debias(reports.astype(float).mean(axis=0))
    spread = np.sqrt(randomizer.law.debiased_variance(x) / REPORTS)
    assert (np.abs(estimate - x) < 5 * spread).all()
    assert (np.abs(estimate + x) > 5 * spread).any()
    assert (np.abs(estimate) > 5 * spread).any()


@pytest.mark.parametrize("x", [np.zeros(DIM), np.full(DIM, np.nan), np.full(DIM, np.inf), np.full(DIM, 1e300)])
def test_every_input_gives_a_seed(randomizer: SeededPrivUnit, x: np.ndarray) -> None:
    assert randomizer(x, sampler=seeded()).shape == (16,)


def test_refusals(randomizer: SeededPrivUnit) -> None:
    with pytest.raises(NotApplicable, match=r"about .* tries at eps_local=40"):
        SeededPrivUnit(PrivUnitRandomizer(40.0, 1.0, 650))
    with pytest.raises(ValueError, match=r"expected x of shape \(8,\), got shape=\(7,\)"):
        randomizer(np.zeros(7), sampler=seeded())


def test_tries_are_few(randomizer: SeededPrivUnit) -> None:
    drawn = []

    def entropy(count: int) -> bytes:
        drawn.append(count)
        return rng.bytes(count)

    rng = np.random.default_rng(0)
    for _ in range(300):
        randomizer(np.zeros(DIM), sampler=ExactSampler(entropy, pool_words=1))
    assert SeededPrivUnit(PrivUnitRandomizer(8.0, 1.0, 7850)).mean_tries < 400
    assert sum(drawn) / 300 / 32 < 4 * randomizer.mean_tries, "blocks take some more"
