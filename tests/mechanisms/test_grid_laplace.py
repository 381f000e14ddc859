"""Reports on a grid: the table in high precision, the law against the continuous one, the sampler against the law."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dovetail.mechanisms import ClipLaplace, GridLaplace, LaplaceRandomizer, ReportGrid, grid_laplace
from dovetail.mechanisms.exact import ExactSampler
from dovetail.mechanisms.exact_skellam import BITS

ALPHA = 1e-4
CLIP = 0.3
BOX = ReportGrid(clip_value=CLIP, steps=16, reach=16)
LINE = ReportGrid(clip_value=CLIP, steps=16, reach=400)


def seeded(seed: int = 0) -> ExactSampler:
    return ExactSampler(np.random.default_rng(seed).bytes)


def law(conditioned: bool, eps_local: float = 2.0) -> GridLaplace:
    return GridLaplace(eps_local, BOX if conditioned else LINE, conditioned)


def masses(law: GridLaplace, edge: int) -> np.ndarray:
    return np.exp(law.log_mass(np.arange(-law.grid.reach, law.grid.reach), edge))


@pytest.mark.parametrize("eps_local", [1e-6, 0.05, 2.0, 90.0, 20_000.0])
@pytest.mark.parametrize("conditioned", [True, False])
def test_the_table_is_geometric_in_high_precision(conditioned: bool, eps_local: float) -> None:
    """Every entry of the distribution function is within the proven distance of the exact one."""
    drawn = law(conditioned, eps_local)
    below = grid_laplace._offset_table(eps_local, drawn.grid, conditioned).below
    with decimal.localcontext(prec=150, Emin=-(10**9), Emax=10**9):
        q = (-Decimal(eps_local) / 32).exp()
        size = drawn.grid.steps + drawn.grid.reach
        whole = 1 - q**size if conditioned else Decimal(1)
        for d, entry in enumerate(below):
            exact = Decimal(1) if d == size - 1 else (1 - q ** (d + 1)) / whole
            assert abs(entry / Decimal(2) ** BITS - exact) <= Decimal(drawn.distance)
        assert len(below) == size or 1 - exact <= Decimal(drawn.distance)
    assert drawn.distance <= 2.0**-240


def test_distances_stay_below_what_is_promised() -> None:
    """At the smallest budget and the largest grid that there can be."""
    widest = ReportGrid(clip_value=1.0, steps=2**16, reach=2**19)
    assert GridLaplace(1e-9, widest).distance <= 2.0**-230
    assert GridLaplace(1e-9, ReportGrid(clip_value=1.0, steps=2**16, reach=2**16), True).distance <= 2.0**-230


@pytest.mark.parametrize("eps_local", [0.05, 2.0, 30.0])
@pytest.mark.parametrize("edge", [-16, -5, 0, 1, 16])
def test_masses_are_the_integrals_of_the_continuous_density(eps_local: float, edge: int) -> None:
    nodes, weights = np.polynomial.legendre.leggauss(20)
    y = (np.arange(-16, 16)[:, None] + (nodes + 1) / 2) * BOX.width
    for conditioned, continuous in (
        (True, ClipLaplace(eps_local, -CLIP, CLIP)),
        (False, LaplaceRandomizer(eps_local, -CLIP, CLIP)),
    ):
        drawn = law(conditioned, eps_local)
        integrals = np.exp(continuous.log_density(y, edge * BOX.width)) @ weights * BOX.width / 2
        inner = np.exp(drawn.log_mass(np.arange(-16, 16), edge))
        np.testing.assert_allclose(inner, integrals, rtol=1e-9)
        assert masses(drawn, edge).sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("conditioned", [True, False])
def test_the_largest_ratio_of_masses_is_that_of_the_budget(conditioned: bool) -> None:
    drawn = law(conditioned)
    table = np.array([np.log(masses(drawn, edge)) for edge in range(-16, 17)])
    largest = (table.max(axis=0) - table.min(axis=0)).max()
    assert largest <= 2.0 * (1 + 1e-12)
    assert largest >= 2.0 * (1 - 1 / 16)


@pytest.mark.parametrize("edge", [-16, -3, 0, 16])
@pytest.mark.parametrize("conditioned", [True, False])
def test_draws_follow_the_masses_and_no_others(conditioned: bool, edge: int) -> None:
    """Chi-square over cells of 40 expected draws, at alpha = 1e-4; 10 % of the budget or a cell off is rejected."""
    drawn = law(conditioned)
    cells = drawn(np.full(60_000, edge), sampler=seeded(edge + 16))
    assert cells.dtype == np.int64
    counts = np.bincount(cells + drawn.grid.reach, minlength=2 * drawn.grid.reach)

    def p_value(share: np.ndarray) -> float:
        expected = share * len(cells)
        often = expected >= 40
        pooled = [np.append(a[often], a[~often].sum()) for a in (counts, expected)]
        observed, predicted = (a[:-1] if pooled[1][-1] < 5 else a for a in pooled)
        return stats.chisquare(observed, predicted * observed.sum() / predicted.sum()).pvalue

    assert p_value(masses(drawn, edge)) > ALPHA
    assert p_value(masses(law(conditioned, 2.2), edge)) < 1e-5
    if edge != 0 or not conditioned:
        assert p_value(np.roll(masses(drawn, edge), 1) + 1e-9) < 1e-9


def moments(drawn: GridLaplace, edge: int) -> tuple[float, float]:
    share, middle = masses(drawn, edge), (np.arange(-drawn.grid.reach, drawn.grid.reach) + 0.5) * drawn.grid.width
    mean = float(share @ middle)
    return mean, float(share @ middle**2) - mean**2


@pytest.mark.parametrize("eps_local", [0.05, 1.0, 4.0])
def test_the_grid_adds_little_to_mean_and_variance(eps_local: float) -> None:
    """At 4 eps_local steps: rounding to an edge adds h^2 / 4 at most, cells h^2 / 12; means move by h^2 / 12 scale."""
    extra = BOX.width**2 / 4
    for edge in range(-16, 17, 4):
        mean, variance = moments(law(True, eps_local), edge)
        continuous = ClipLaplace(eps_local, -CLIP, CLIP)
        assert abs(mean - continuous.mean(edge * BOX.width)) <= BOX.width**2 / continuous.scale / 12
        assert variance + extra <= 1.01 * continuous.report_variance(edge * BOX.width)
        assert variance >= 0.999 * continuous.report_variance(edge * BOX.width) - BOX.width**2 / 12
    reach = 16 + math.ceil(math.log(1e12) * 32 / eps_local)
    wide = GridLaplace(eps_local, ReportGrid(clip_value=CLIP, steps=16, reach=reach))
    for edge in (-16, 3):
        mean, variance = moments(wide, edge)
        assert mean == pytest.approx(edge * BOX.width, abs=1e-11 * CLIP / eps_local)
        assert variance + extra <= 1.01 * 8 * (CLIP / eps_local) ** 2


@pytest.mark.parametrize("size", [Fraction(0), Fraction(7), Fraction(15, 2), Fraction(129, 10), Fraction(1, 3)])
@pytest.mark.parametrize("edge", [-16, 0, 5, 7, 8])
def test_a_threshold_within_a_cell_is_that_of_the_continuous_report(size: Fraction, edge: int) -> None:
    """Coins of the cell that holds the threshold make up the probability of the continuous report (to 1e-12)."""
    drawn, h = law(True, 8.0), BOX.width
    cells = np.arange(-16, 16)
    whole, part = divmod(size, 1)
    magnitude = np.where(cells >= 0, cells, -1 - cells)
    falling = (cells >= edge) == (cells >= 0)
    open_cells = (magnitude == whole) & (part > 0)
    coins = [float(grid_laplace._prob_beyond_in_cell(8.0, 16, part, bool(out))) if part else 0.0 for out in falling]
    kept = np.where(open_cells, coins, magnitude >= size)
    y = (np.arange(2_000_000) + 0.5) / 1_000_000 - 1
    share = np.exp(ClipLaplace(8.0, -CLIP, CLIP).log_density(y * CLIP, edge * h))
    exact = share[np.abs(y) >= float(size) / 16].sum() / share.sum()
    assert masses(drawn, edge) @ kept == pytest.approx(exact, abs=3e-6)
    drawn_cells = drawn(np.full(20_000, edge), sampler=seeded(3))
    reached = drawn.reaches_size(size, drawn_cells, np.full(20_000, edge), sampler=seeded(4))
    assert stats.binomtest(int(reached.sum()), 20_000, min(1.0, exact)).pvalue > ALPHA or exact > 1 - 1e-9
    assert not reached[np.where(drawn_cells >= 0, drawn_cells, -1 - drawn_cells) + 1 <= size].any()
    assert reached[np.where(drawn_cells >= 0, drawn_cells, -1 - drawn_cells) >= size].all()


def test_edges_are_unbiased_and_in_the_box() -> None:
    """Means of 200,000 coins within 5 standard errors (alpha below 1e-6)."""
    sampler = seeded(5)
    for x in (-0.2, 0.0311, 0.29):
        drawn = BOX.round_to_edges(np.full(200_000, x), sampler=sampler)
        assert len(np.unique(drawn)) <= 2
        assert abs(drawn.mean() * BOX.width - x) < 5 * BOX.width / 2 / math.sqrt(200_000)
    odd = BOX.round_to_edges(np.array([CLIP, -CLIP, 9.0, -np.inf, np.inf, 0.0], np.float32), sampler=sampler)
    assert odd.tolist() == [16, -16, 16, -16, 16, 0]
    assert abs(int(BOX.round_to_edges(np.array([np.nan]), sampler=sampler)[0])) <= 16


def test_values_are_midpoints() -> None:
    assert BOX.sum_of_midpoints(np.array([-16 + 15]), 2) == pytest.approx(0.0)
    assert BOX.sum_of_midpoints(3, 1) == pytest.approx(3.5 * CLIP / 16)


def test_reports_beyond_the_grid_are_drawn_again_or_clamped() -> None:
    cells = law(True, 0.05)(np.full(5000, 16), sampler=seeded(6))
    assert cells.min() >= -16
    assert cells.max() == 15
    narrow = GridLaplace(0.05, ReportGrid(clip_value=CLIP, steps=16, reach=20))
    cells = narrow(np.zeros(5000, np.int64), sampler=seeded(7))
    assert {-20, 19} <= set(np.unique(cells)) <= set(range(-20, 20))
    assert np.mean(cells == 19) == pytest.approx(masses(narrow, 0)[-1], abs=5 * math.sqrt(0.25 / 5000))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ReportGrid(clip_value=0.0, steps=4, reach=4), "expected clip_value > 0"),
        (lambda: ReportGrid(clip_value=1.0, steps=0, reach=4), "expected .*steps"),
        (lambda: ReportGrid(clip_value=1.0, steps=8, reach=4), "expected .*reach"),
        (lambda: GridLaplace(0.0, LINE), "expected eps_local"),
        (lambda: GridLaplace(math.inf, LINE), "expected eps_local"),
        (lambda: GridLaplace(1.0, LINE, True), "expected the box of the inputs for conditioned reports alone"),
        (lambda: GridLaplace(1.0, BOX), "expected the box of the inputs for conditioned reports alone"),
    ],
)
def test_refusals(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize("conditioned", [False, True])
def test_the_distance_is_what_its_parts_add_up_to_rounded_up(conditioned: bool) -> None:
    """Those of the module's page: weights and tail, the table, and four times as much where reports are conditioned."""
    steps, reach, eps = 8, 8 if conditioned else 40, 0.25
    cells = steps + reach
    error = Fraction(cells**2 + 2 * cells + 3 + 2 * cells, 2**BITS) + 2 * steps / Fraction(eps) / 2**BITS
    exact = error * (4 if conditioned else 1)
    drawn = GridLaplace(eps, ReportGrid(clip_value=1.0, steps=steps, reach=reach), conditioned)
    assert exact <= Fraction(drawn.distance) <= exact * (1 + Fraction(1, 2**40))
