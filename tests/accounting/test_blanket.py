import itertools
import math

import mpmath
import numpy as np
import pytest
from enumeration import laplace_cells, randomized_response, worst_delta
from grids import later
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binom, multinomial

from dovetail.accounting import numerics
from dovetail.accounting.amplification import blanket, blanket_grid, clones
from dovetail.events import Report, Shuffled
from dovetail.statements import NotApplicable


def crowd(kind: str, eps_local: float, num_users: int, levels: int = 2, **more) -> Shuffled:
    return Shuffled(report=Report(kind=kind, eps_local=eps_local, levels=levels), num_users=num_users, **more)


def eps_or_none(bound, event, delta):
    try:
        return bound(event, delta=delta).eps
    except NotApplicable:
        return None


def laplace_ratio(eps_local: float, eps: float, nodes: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """L for inputs 0 and 1 as quadrature nodes and weights, from the densities alone."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    y = np.concatenate([(x + 1) / 4, (x + 3) / 4])
    omega = eps_local / 2 * np.exp(-eps_local * np.abs(y - 0.5))
    tail = math.exp(-eps_local / 2) / 2
    places, weights = np.concatenate([y, [-1.0, 2.0]]), np.concatenate([np.tile(w / 4, 2) * omega, [tail, tail]])
    near, far = np.exp(eps_local * (np.abs(places - 0.5) - np.abs(places))), np.abs(places - 0.5) - np.abs(places - 1)
    return near - math.exp(eps) * np.exp(eps_local * far), weights


def contour_delta(num_users: int, eps_local: float, eps: float) -> float:
    """The blanket expectation by another road: E[X_+] = 1/(2 pi) int M(s)^n / s^2 along a vertical line."""
    gamma, (ratios, weights) = math.exp(-eps_local / 2), laplace_ratio(eps_local, eps)

    def log_mgf(s):
        return num_users * np.log1p(gamma * (np.expm1(np.multiply.outer(s, ratios)) @ weights))

    slope = math.exp(minimize_scalar(lambda x: log_mgf(math.exp(x)) - 2 * x, bounds=(-14, 3), method="bounded").x)
    step = min(slope / 20, 0.05 / math.sqrt(num_users * gamma * (ratios**2 @ weights)))
    total = 0.0
    for chunk in np.array_split(np.arange(1, 10_001) * step, 20):
        s = slope + 1j * chunk
        total += 2 * (np.exp(log_mgf(s) - log_mgf(slope)) / s**2).real.sum()
    total += 1 / slope**2
    return total * step / (2 * math.pi) * math.exp(log_mgf(slope)) / (gamma * num_users)


@pytest.mark.parametrize(
    ("num_users", "eps_local", "eps"),
    [
        (50, 1.0, 0.6),
        later(1000, 0.1, 0.0097),
        (1000, 1.0, 0.13),
        later(1000, 6.0, 3.5),
        later(10**4, 4.0, 0.33),
        (10**6, 1.0, 0.003),
    ],
)
def test_exact_laplace_against_a_contour_integral(num_users, eps_local, eps):
    reference = contour_delta(num_users, eps_local, eps)
    ours = blanket.exact_delta(crowd("laplace", eps_local, num_users), eps=eps)
    assert reference * (1 - 1e-7) <= ours <= reference * (1 + 1e-3)


@pytest.mark.parametrize(("num_users", "eps_local", "eps"), [(26, 6.3, 6.0), (50, 4.0, 3.8), (900, 8.9, 6.8)])
def test_raising_hopeless_draws_to_a_floor_only_adds_and_adds_little(num_users, eps_local, eps):
    report = Report(kind="laplace", eps_local=eps_local)
    crowd_size = num_users * report.gamma
    whole, floored = (blanket._law_of_l(report, eps, mean_draws=size, resolution=0.01) for size in (1e9, crowd_size))
    assert floored.probs.size < whole.probs.size
    assert floored.probs.sum() == pytest.approx(whole.probs.sum(), abs=1e-12)
    exact, ours = (
        blanket_grid.mean_excess(grid, blanket_grid.BinomialDraws(num_users, report.gamma)) for grid in (whole, floored)
    )
    assert exact * (1 - 1e-6) <= ours <= exact * (1 + 1e-6)  # the longer grid is charged more for rounding


def test_bennett_of_huge_crowds_is_as_sharp_as_hoeffding_for_bits():
    """Where u is so small that its series is taken; both are then the Gaussian tail of a fair bit."""
    for num_users in (10**10, 10**12):
        event = crowd("rr", 1.0, num_users)
        ours, reference = (bound(event, delta=1e-6).eps for bound in (blanket.bennett, blanket.hoeffding))
        assert reference <= ours <= reference * (1 + 1e-4)


def test_exact_ternary_against_the_sum_over_all_counts():
    num_users, eps_local, levels = 7, 1.5, 3
    report = Report(kind="rr", eps_local=eps_local, levels=levels)
    for eps in (0.0, 0.4, 1.2):
        top, bottom = math.exp(eps_local) - math.exp(eps), 1 - math.exp(eps + eps_local)
        total = 0.0
        for draws in range(1, num_users + 1):
            for a, b in itertools.product(range(draws + 1), repeat=2):
                if a + b <= draws:
                    value = report.gamma * (a * top + b * bottom + (draws - a - b) * -math.expm1(eps))
                    prob = multinomial.pmf([a, b, draws - a - b], draws, [1 / 3] * 3)
                    total += binom.pmf(draws, num_users, report.gamma) * prob * max(value, 0)
        exact = total / (report.gamma * num_users)
        ours = blanket.exact_delta(crowd("rr", eps_local, num_users, levels), eps=eps)
        assert exact * (1 - 1e-12) <= ours <= exact * (1 + 1e-4)


def test_two_levels_by_the_grid_agree_with_the_clone_pair():
    for num_users, eps_local, eps in ((5, 1.0, 0.3), (1000, 0.5, 0.06), (10**5, 2.0, 0.03)):
        event = crowd("rr", eps_local, num_users)
        gamma = event.report.gamma
        grid = blanket._law_of_l(event.report, eps, mean_draws=num_users * gamma, resolution=0.002)
        by_grid = blanket_grid.mean_excess(grid, blanket_grid.BinomialDraws(num_users, gamma))
        pair = clones.delta_of(event, eps=eps)
        assert pair * (1 - 1e-8) <= by_grid <= pair * (1 + 1e-4)
        assert blanket.exact_delta(event, eps=eps) == pair


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("eps_local", [0.2, 1.0, 3.0])
def test_exact_is_never_below_enumeration_of_randomized_response(levels, eps_local):
    eps = np.linspace(0, eps_local, 9)
    table = randomized_response(eps_local, levels)
    for num_users in (2, 3, 5, 8):
        exact = worst_delta(table, num_users, eps)
        event = crowd("rr", eps_local, num_users, levels)
        ours = np.array([blanket.exact_delta(event, eps=float(x)) for x in eps])
        assert (exact <= ours + 1e-15).all()
        assert exact[4] > 0.3 * ours[4]


@pytest.mark.parametrize("eps_local", [0.5, 2.0, 4.0])
def test_exact_is_never_below_enumeration_of_laplace_through_a_partition(eps_local):
    eps = np.array([0.0, 0.3, 0.6, 0.9]) * eps_local
    cells = laplace_cells(eps_local, np.array([0.0, 0.5, 1.0]), np.array([0.0, 0.5, 1.0]))
    assert cells.sum(axis=1) == pytest.approx(1)
    for num_users in (2, 3, 5):
        exact = worst_delta(cells, num_users, eps)
        ours = np.array([blanket.exact_delta(crowd("laplace", eps_local, num_users), eps=float(x)) for x in eps])
        assert (exact <= ours + 1e-15).all()
        assert exact[1] > 0.3 * ours[1]


@settings(max_examples=200, deadline=None)
@given(st.floats(0.05, 8), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_zero_and_one_are_the_worst_inputs_of_laplace(eps_local, share, x, other, height):
    eps = share * eps_local
    quantile = (np.arange(20_000) + 0.5) / 20_000
    y = 0.5 - np.sign(0.5 - quantile) * -np.log(2 * np.minimum(quantile, 1 - quantile)) / eps_local  # omega's quantiles

    def ratio(first, second):
        log_omega = -np.abs(y - 0.5)
        near, far = (np.exp(eps_local * (-np.abs(y - centre) - log_omega)) for centre in (first, second))
        return near - math.exp(eps) * far

    worst = ratio(0.0, 1.0)
    level = worst.max() - height * np.ptp(worst)
    spread, ours = (np.maximum(z - level, 0).mean() for z in (worst, ratio(x, other)))
    assert ours <= spread + 1e-4 * np.ptp(worst)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["laplace", "rr"]), st.integers(2, 10**5), st.floats(0.05, 5), st.floats(1e-10, 1e-2))
def test_exact_is_never_above_hoeffding_or_bennett(kind, num_users, eps_local, delta):
    event = crowd(kind, eps_local, num_users)
    exact = eps_or_none(blanket.exact, event, delta)
    for bound in (blanket.hoeffding, blanket.bennett):
        looser = eps_or_none(bound, event, delta)
        if looser is not None:
            assert exact is not None
            assert exact <= looser * (1 + 1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(10, 10**5), st.floats(0.05, 4), st.floats(1e-9, 1e-2))
def test_the_root_of_the_exact_blanket_is_sound_and_tight(num_users, eps_local, delta):
    event = crowd("laplace", eps_local, num_users)
    eps = eps_or_none(blanket.exact, event, delta)
    if eps is None:
        assert blanket.exact_delta(event, eps=eps_local * 0.998) > delta
        return
    assert blanket.exact_delta(event, eps=eps) <= delta
    if eps > 0:
        assert blanket.exact_delta(event, eps=eps * (1 - 1e-3)) > delta


@pytest.mark.parametrize(
    ("kind", "levels", "num_users", "eps_local", "delta"),
    [
        ("generic", 2, 5000, 0.8, 1e-5),
        ("laplace", 2, 5000, 0.8, 1e-5),
        ("rr", 2, 5000, 0.8, 1e-5),
        ("laplace", 2, 5, 1.0, 0.6),
        ("rr", 5, 5, 1.0, 0.6),
    ],
)
def test_hoeffding_and_bennett_solve_their_own_formulas(kind, levels, num_users, eps_local, delta):
    event = crowd(kind, eps_local, num_users, levels)
    report, gamma = event.report, event.report.gamma
    eps = blanket.hoeffding(event, delta=delta).eps
    a, B = math.expm1(eps), float(blanket._range_of_l(report, eps))
    value = B**2 / (4 * a * gamma * num_users) * (1 - gamma * (1 - math.exp(-2 * a * a / B**2))) ** num_users
    assert value == pytest.approx(delta, rel=1e-6)
    eps = blanket.bennett(event, delta=delta).eps
    a, b, c = math.expm1(eps), float(blanket._largest_l(report, eps)), float(blanket._second_moment_of_l(report, eps))
    u = a * b / c
    draws = np.arange(1, num_users + 1)  # the expectation over the number of blanket draws, summed
    terms = b / math.log1p(u) * np.exp(-draws * c / b**2 * ((1 + u) * math.log1p(u) - u))
    assert (binom.pmf(draws, num_users, gamma) @ terms) / (gamma * num_users) == pytest.approx(delta, rel=1e-6)


def test_bennett_of_a_crowd_so_large_that_its_formula_is_a_series_is_not_below_it():
    event = crowd("rr", 1.0, 10**10, 2)
    report, gamma = event.report, mpmath.mpf(event.report.gamma)
    with mpmath.workdps(60):
        for delta in (1e-3, 1e-6, 1e-9):
            eps = blanket.bennett(event, delta=delta).eps
            a, b, c = (
                mpmath.mpf(float(x))
                for x in (eps, blanket._largest_l(report, eps), blanket._second_moment_of_l(report, eps))
            )
            a = mpmath.expm1(a)
            u = a * b / c
            assert u < 1e-4
            t = c / b**2 * ((1 + u) * mpmath.log1p(u) - u)
            draws = (1 - gamma + gamma * mpmath.exp(-t)) ** 10**10 - (1 - gamma) ** 10**10
            assert 1 - 1e-6 < b / mpmath.log1p(u) * draws / (gamma * 10**10) / delta <= 1 + 1e-9


@pytest.mark.parametrize("levels", [2, 3, 7])
def test_moments_of_randomized_response_are_those_of_its_law(levels):
    report, eps = Report(kind="rr", eps_local=1.3, levels=levels), 0.4
    table = randomized_response(1.3, levels)
    ratio = (table[0] - math.exp(eps) * table[1]) * levels
    assert float(blanket._largest_l(report, eps)) == pytest.approx(ratio.max())
    assert float(blanket._range_of_l(report, eps)) == pytest.approx(ratio.max() - ratio.min())
    assert float(blanket._second_moment_of_l(report, eps)) == pytest.approx((ratio**2).mean())


def test_moments_of_laplace_are_those_of_its_law():
    for eps_local, eps in ((0.3, 0.1), (4.0, 1.0)):
        ratio, weights = laplace_ratio(eps_local, eps)
        report = Report(kind="laplace", eps_local=eps_local)
        assert float(blanket._largest_l(report, eps)) == pytest.approx(ratio.max())
        assert float(blanket._range_of_l(report, eps)) == pytest.approx(ratio.max() - ratio.min())
        assert float(blanket._second_moment_of_l(report, eps)) == pytest.approx(ratio**2 @ weights)
        grid = blanket._law_of_l(report, eps, mean_draws=1e4, resolution=0.01)
        assert grid.probs.sum() == pytest.approx(1, abs=1e-13)
        assert grid.probs @ grid.values == pytest.approx(-math.expm1(eps), abs=1e-12)
        square = grid.probs @ grid.values**2
        assert ratio**2 @ weights * (1 - 1e-9) <= square <= ratio**2 @ weights * (1 + 1e-4)


def test_generic_moments_cover_every_randomizer_around_any_of_its_own_outputs():
    rng, eps_local = np.random.default_rng(3), 0.9
    report = Report(kind="generic", eps_local=eps_local)
    for _ in range(200):
        base = rng.dirichlet(np.ones(4))
        tables = [randomized_response(eps_local, 4)]
        weights = np.where(rng.random((3, 4)) < 0.5, 1, math.exp(eps_local / 2)) * base
        tables.append(weights / weights.sum(axis=1, keepdims=True))
        for table in tables:
            omega = table[2]
            eps = rng.uniform(0, eps_local)
            ratio = (table[0] - math.exp(eps) * table[1]) / omega
            top, reach = float(blanket._largest_l(report, eps)), float(blanket._range_of_l(report, eps))
            assert top - reach <= ratio.min() + 1e-12
            assert ratio.max() <= top + 1e-12
            assert omega @ ratio**2 <= float(blanket._second_moment_of_l(report, eps))
            assert (table >= math.exp(-eps_local) * omega - 1e-12).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.floats(0.01, 0.99), st.integers(0, 2**32 - 1))
def test_the_excess_of_a_sum_is_rounded_up(draws, prob, seed):
    rng = np.random.default_rng(seed)
    grid = blanket_grid.Grid(bottom=-5.0, top=3.0, step=0.5)
    for value in rng.uniform(-5, 3, 5):
        grid.add_points(np.array([value]), np.array([0.1]))
    grid.add_points(np.array([-4.0, 3.0]), np.full(2, 0.25))
    law = prob * grid.probs
    law[-grid.first] += 1 - prob
    total = np.ones(1)
    for _ in range(draws):
        total = np.convolve(total, law)
    values = (draws * grid.first + np.arange(total.size)) * grid.step
    exact = np.maximum(values, 0) @ total
    ours = blanket_grid.mean_excess(grid, blanket_grid.BinomialDraws(draws, prob)) * draws * prob
    assert exact * (1 - 1e-13) <= ours <= exact * (1 + 1e-8)


def test_the_charge_covers_the_error_of_the_fft():
    rng = np.random.default_rng(1)
    for size in (2**12, 3**8 * 5, 2**21):
        probs = rng.dirichlet(np.ones(1000))
        circle = np.zeros(size)
        circle[(np.arange(1000) - 700) % size] = probs
        computed = np.fft.rfft(circle)
        for k in (1, 2, 17, size // 3, size // 2):
            angle = np.arange(-700, 300).astype(np.longdouble) * k * 2 * np.longdouble(np.pi)
            angle += np.arange(-700, 300) * k * 2 * np.longdouble(1.2246467991473532e-16)  # pi to twenty digits
            turned = angle / size
            exact = (probs * np.cos(turned)).sum() - 1j * (probs * np.sin(turned)).sum()
            assert abs(complex(computed[k]) - complex(exact)) < numerics.transform_error(size) / 3


@pytest.mark.parametrize("draws", [1, 3, 1000])
def test_an_fft_that_errs_as_much_as_allowed_does_no_harm(draws, monkeypatch):
    grid = blanket_grid.Grid(bottom=-2.0, top=1.0, step=0.5)
    grid.add_points(np.array([-2.0, 1.0]), np.full(2, 0.5))
    prob = 0.4
    counts, heads = np.arange(1, draws + 1)[:, None], np.arange(draws + 1)[None, :]
    weights = binom.pmf(counts, draws, prob) * binom.pmf(heads, counts, 0.5)
    exact = (weights * np.maximum(3.0 * heads - 2.0 * counts, 0)).sum()
    monkeypatch.setattr(
        numerics, "rfft", lambda x, size: np.fft.rfft(x, size) * (1 - 0.9 * numerics.transform_error(size))
    )
    ours = blanket_grid.mean_excess(grid, blanket_grid.BinomialDraws(draws, prob)) * draws * prob
    assert exact <= ours <= exact * (1 + 1e-8)


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_power_law_keeps_its_mass_and_mean_on_any_grid(mirrored):
    low, high, shift, scale = -0.37, 2.91, 0.8, 0.6
    mass = 2 * scale * ((low + shift) ** -0.5 - (high + shift) ** -0.5)
    mean = 2 * scale * ((high + shift) ** 0.5 - (low + shift) ** 0.5) - shift * mass
    for step in (0.013, 0.3, 5.0):
        sides = (-high, -low) if mirrored else (low, high)
        grid = blanket_grid.Grid(bottom=sides[0], top=sides[1], step=step)
        grid.add_power_law(low=low, high=high, start=low + shift, scale=scale, mirrored=mirrored)
        assert grid.probs.min() >= 0
        assert grid.probs.sum() == pytest.approx(mass)
        assert grid.probs @ grid.values == pytest.approx(-mean if mirrored else mean)


def test_refusals():
    with pytest.raises(NotApplicable, match="generic"):
        blanket.exact(crowd("generic", 1.0, 1000), delta=1e-6)
    with pytest.raises(NotApplicable, match="resolves"):
        blanket.exact(crowd("laplace", 1.0, 10**10), delta=1e-6)
    for bound in (blanket.hoeffding, blanket.bennett, blanket.exact):
        with pytest.raises(NotApplicable, match="no gain"):
            bound(crowd("laplace", 8.0, 100), delta=1e-6)
        with pytest.raises(NotApplicable, match="no gain"):
            bound(crowd("laplace", 1000.0, 100), delta=1e-6)
        with pytest.raises(NotApplicable, match="one coordinate"):
            bound(crowd("rr", 1.0, 1000, coordinates=3), delta=1e-6)
        for delta in (0.0, 1.0, math.nan):
            with pytest.raises(ValueError, match="delta"):
                bound(crowd("rr", 1.0, 1000), delta=delta)
    with pytest.raises(ValueError, match="eps"):
        blanket.exact_delta(crowd("rr", 1.0, 1000), eps=-1.0)
