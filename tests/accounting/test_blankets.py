"""A common blanket of unequal randomizers: against all outcomes of small crowds, and what a dropped term would do."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from enumeration import histogram_law
from grids import later
from scipy import stats

from dovetail.accounting import loss_distributions
from dovetail.accounting.amplification import blanket, frontier
from dovetail.accounting.amplification.frontier import Frontier
from dovetail.accounting.pairs import personal, symmetric
from dovetail.accounting.pairs.binomial import clone_counts
from dovetail.accounting.pairs.blanket_pair import BlanketCrowd
from dovetail.accounting.releases import crowds, personalized, privunit
from dovetail.events import Personalized, Report, Shuffled
from dovetail.protocols import Cohort
from dovetail.protocols.personal.s_apes import SApes

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "blankets.json").read_text())
GRID = tuple(np.linspace(0.05, 1, 10_000).tolist())


def exact_delta(first, second, others, eps):
    """Of shuffled reports with these laws over the same outcomes, the worse direction."""
    p, q = histogram_law([first, *others]), histogram_law([second, *others])
    grow = math.exp(eps)
    return max(float(np.maximum(p - grow * q, 0).sum()), float(np.maximum(q - grow * p, 0).sum()))


# ---------------------------------------------------------------- random randomizers with a common blanket


def frontier_of_tables(table, base):
    """F of a victim's rows against a blanket: the excess of every row at every ratio that occurs."""
    ratios = table / base
    at = np.unique(np.concatenate([ratios.ravel(), [ratios.min() * 0.99, ratios.max() * 1.01]]))
    excess = np.max([(base * np.maximum(row / base - at[:, None], 0)).sum(axis=1) for row in table], axis=0)
    return frontier.from_excess(at, np.maximum(excess, np.maximum(1 - at, 0)))


def random_crowd(rng):
    outcomes, users = int(rng.integers(2, 4)), int(rng.integers(1, 6))
    base = rng.dirichlet(np.full(outcomes, 2.0))
    tables, floors = [], []
    for _ in range(users):
        floor = float(rng.uniform(0.05, 0.95))
        rest = rng.dirichlet(np.full(outcomes, 0.4), size=2)
        tables.append(floor * base + (1 - floor) * rest)
        floors.append(float((tables[-1] / base).min()))
    victim = rng.dirichlet(np.full(outcomes, rng.choice([0.5, 5.0])), size=int(rng.integers(2, 4))) + 1e-3
    victim /= victim.sum(axis=1, keepdims=True)
    others = [table[rng.integers(2)] for table in tables]
    return base, victim, np.array(floors), others


def ratios_of(count, seed, bound):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        base, victim, floors, others = random_crowd(rng)
        known, law = frontier_of_tables(victim, base), clone_counts(floors * (1 - 1e-12))
        eps = float(rng.uniform(0, 1.5))
        first, second = victim[rng.permutation(len(victim))[:2]]
        true = exact_delta(first, second, others, eps)
        if true > 1e-12:
            found.append(true / max(bound(known, law, eps), 1e-300))
    return np.array(found)


@pytest.mark.parametrize("count", [250, pytest.param(2500, marks=pytest.mark.soak)])
def test_never_below_enumeration_of_random_randomizers(count):
    ratios = ratios_of(count, count, lambda known, law, eps: BlanketCrowd(known, law).delta(eps))
    assert len(ratios) > 0.6 * count
    assert ratios.max() <= 1 + 1e-9
    assert ratios.max() > 0.6, "the bound should not be far off either"


def test_dropping_a_term_is_caught():
    """One draw more than there is, or the second input's frontier not reversed."""

    def one_more(known, law, eps):
        return BlanketCrowd(known, clone_counts(np.ones(1 + int(law.counts[-1])))).delta(eps)

    def not_reversed(known, law, eps):
        values = known.slopes * (1 - math.exp(eps))
        return float(np.maximum(values, 0) @ known.masses)

    for wrong in (one_more, not_reversed):
        assert ratios_of(200, 7, wrong).max() > 1.01


# ---------------------------------------------------------------- frontiers


def clip_laplace_row(eps_local, x, edges):
    cdf = stats.laplace.cdf(edges, x, 1 / eps_local)
    return np.diff((cdf - cdf[0]) / (cdf[-1] - cdf[0]))


def excess(slopes, masses, at):
    return np.maximum(slopes - at[:, None], 0) @ masses


@pytest.mark.parametrize("eps_local", [0.03, 0.7, 3.0, 12.0])
def test_the_frontier_of_clip_laplace_is_above_every_input_and_close_to_the_end(eps_local):
    known, edges, at = frontier.clip_laplace(eps_local), np.linspace(0, 1, 2001), np.linspace(0, eps_local + 2, 60)
    ours = excess(known.slopes, known.masses, at)
    for x in (0.0, 0.1, 0.37, 0.5, 1.0):
        row = clip_laplace_row(eps_local, x, edges)
        assert (excess(row * 2000, np.full(2000, 1 / 2000), at) <= ours + 1e-12).all()
    end = clip_laplace_row(eps_local, 0.0, edges)
    assert ours == pytest.approx(excess(end * 2000, np.full(2000, 1 / 2000), at), abs=2e-4)


def thresholded_row(eps_local, x, fresh, threshold, edges):
    """The law of a thresholded report in cells of [-1, 1]; the middle of a cell decides whether it is kept."""
    box = (edges + 1) / 2
    plain, anew = clip_laplace_row(eps_local, (x + 1) / 2, box), clip_laplace_row(fresh, 0.5, box)
    kept = np.abs((edges[:-1] + edges[1:]) / 2) >= threshold
    return plain * kept + plain[~kept].sum() * anew


@pytest.mark.parametrize(("eps_local", "threshold"), [(1.0, 0.8), (1.0, 0.2), (4.0, 0.5), (0.1, 0.9)])
def test_the_frontier_behind_a_threshold_is_above_every_input_and_budget(eps_local, threshold):
    edges = np.unique(np.round(np.concatenate([np.linspace(-1, 1, 2001), [-threshold, threshold]]), 9))
    known = blanket.threshold_frontier(eps_local, 0.05, threshold)
    width = np.diff(edges) / 2
    kept = np.abs((edges[:-1] + edges[1:]) / 2) >= threshold
    base = width * kept + threshold * clip_laplace_row(0.05, 0.5, (edges + 1) / 2)
    at = np.linspace(0, eps_local + 2, 200)
    ours = excess(known.slopes, known.masses, at)
    for budget in (0.05, 0.4 * eps_local, 0.9 * eps_local, eps_local):
        for x in (-1.0, -0.7, 0.0, 0.3, 0.95, 1.0):
            row = thresholded_row(budget, x, 0.05, threshold, edges)
            assert (excess(row / base, base, at) <= ours + 1e-9).all()
    end = thresholded_row(eps_local, 1.0, 0.05, threshold, edges)
    assert known.spread == pytest.approx(_spread(end / base, base), rel=0.08)


def _spread(ratio, masses):
    order = np.argsort(-ratio)
    return Frontier(ratio[order], masses[order] / masses.sum()).spread


@pytest.mark.parametrize("eps_local", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("half_width", [0.1, 0.5, 1.0, 2.5])
def test_the_plateau_and_its_floors(eps_local, half_width):
    """Against densities on a fine grid: floors are infima, and no input beats the frontier."""
    y = np.linspace(-1, 1, 20_001) * (half_width + 30 / eps_local)
    step = y[1] - y[0]
    centres = np.linspace(-half_width, half_width, 401)
    weights = np.ones(401) / 400
    weights[[0, -1]] /= 2
    plateau = sum(w * eps_local / 2 * np.exp(-eps_local * np.abs(y - z)) for w, z in zip(weights, centres, strict=True))
    budgets = eps_local * np.array([0.05, 0.4, 0.9, 1.0])
    floors = blanket.laplace_blanket_probs(np.append(budgets, 2 * eps_local), eps_local, half_width)
    assert floors[-1] == 0
    for budget, floor in zip(budgets, floors, strict=False):
        least = (budget / 2 * np.exp(-budget * (np.abs(y) + 0.5)) / plateau).min()
        assert floor == pytest.approx(least, rel=2e-3)
    known, at = blanket.laplace_frontier(eps_local, half_width), np.linspace(0, 8, 100)
    ours = excess(known.slopes, known.masses, at)
    for x in (-0.5, -0.2, 0.0, 0.31, 0.5):
        ratio = eps_local / 2 * np.exp(-eps_local * np.abs(y - x)) / plateau
        assert (excess(ratio, plateau * step, at) <= ours + 2e-3).all()
    smaller = blanket.laplace_frontier(0.6 * eps_local, half_width)
    assert (excess(smaller.slopes, smaller.masses, at) <= ours + 1e-9).all()
    lower = blanket.laplace_blanket_probs(budgets[:2], 0.6 * eps_local, half_width)
    assert (lower >= floors[:2]).all(), "floors fall as the victim's budget rises"


# ---------------------------------------------------------------- users of unequal budgets, by enumeration


def personal_instances(count, seed):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        budgets = tuple((10 ** rng.uniform(-0.7, 0.7, int(rng.integers(2, 6)))).tolist())
        yield rng, budgets, float(rng.uniform(0, 0.7)) * budgets[0]


@pytest.mark.parametrize(
    ("kind", "count", "seed"),
    [
        *(("clip_laplace", 16, 16), ("laplace", 16, 16), ("threshold", 5, 16), ("rr", 16, 16)),
        *(later(kind, 2000, 2000) for kind in ("clip_laplace", "laplace", "threshold", "rr")),
    ],
)
def test_users_of_unequal_budgets_are_never_below_what_cells_show(kind, count, seed):
    worst = 0.0
    for rng, budgets, eps in personal_instances(count, seed):
        threshold = float(rng.uniform(0.1, 0.9)) if kind == "threshold" else 0.0
        event = Personalized(
            kind="clip_laplace" if kind == "threshold" else kind, eps_locals=budgets, levels=3, threshold=threshold
        )
        rows = cells_of(kind, threshold, min(budgets))
        ends = (rows(budgets[0], 0.0), rows(budgets[0], 1.0))
        others = [rows(budget, float(rng.choice([0.0, 0.5, 1.0]))) for budget in budgets[1:]]
        true, ours = exact_delta(*ends, others, eps), personalized.delta(event, eps=eps, victim=0)
        worst = max(worst, true / max(ours, 1e-300))
        assert true <= ours * (1 + 1e-9) + 1e-15
    assert worst > 0.5


def cells_of(kind, threshold, least):
    """The law of a report in four cells, or its level, on an input in [0, 1]."""

    def row(budget, x):
        match kind:
            case "rr":
                law = np.ones(3) + math.expm1(budget) * (np.arange(3) == round(2 * x))
                return law / law.sum()
            case "laplace":
                return np.diff(stats.laplace.cdf([-np.inf, 0.0, 0.5, 1.0, np.inf], x, 1 / budget))
            case "clip_laplace":
                return clip_laplace_row(budget, x, np.array([0, 0.2, 0.5, 0.8, 1]))
        edges = np.array([-1, -(1 + threshold) / 2, -threshold, threshold, (1 + threshold) / 2, 1])
        whole = thresholded_row(budget, 2 * x - 1, least, threshold, edges)
        return np.array([whole[0], whole[1:4].sum(), whole[4]])

    return row


# ---------------------------------------------------------------- golden numbers


def composed(pair, delta):
    return loss_distributions.worst_eps(
        [symmetric.folded_loss(pair, interval=symmetric.composition_interval(pair))], delta=delta
    )


def test_golden_apes():
    golden = GOLDEN["apes"]
    event = Personalized(kind="clip_laplace", eps_locals=GRID, coordinates=golden["coordinates"])
    ours = personalized.eps(event, delta=golden["delta"]).eps
    assert golden["audited"] < ours <= golden["eps"]
    assert ours > 0.96 * golden["eps"]
    one = personalized.eps(Personalized(kind="clip_laplace", eps_locals=GRID), delta=golden["one_coordinate_delta"]).eps
    assert 0.96 * golden["one_coordinate"] < one <= golden["one_coordinate"]


def test_golden_s_apes_and_unis():
    protocol = SApes(budgets=GRID, keep=GOLDEN["s_apes"]["keep"])
    event = protocol.mechanism(Cohort(participation=personalized.Everyone(), size=len(GRID), min_size=len(GRID)), 7850)
    ours = personalized.eps(event, delta=3.6e-5).eps
    assert GOLDEN["s_apes"]["audited"] < ours < 1.03 * GOLDEN["s_apes"]["estimate"]
    laplace = Personalized(kind="laplace", eps_locals=GRID, coordinates=7850)
    largest = composed(personal.pair(laplace, np.array([len(GRID) - 1])), 3.6e-5)
    assert GOLDEN["unis"]["audited"] < largest < GOLDEN["unis"]["estimate"]


@pytest.mark.parametrize("row", GOLDEN["privunit"], ids=str)
def test_golden_privunit(row):
    cap = privunit.least_variance_cap(dim=row["dim"], eps_local=row["eps_local"])
    mass = privunit.cap_mass(dim=row["dim"], threshold=cap.threshold)
    report = Report(kind="cap", eps_local=row["eps_local"], cap_mass=mass)
    event = Shuffled(report=report, num_users=row["n"])
    assert crowds.eps(event, delta=row["delta"]).eps == pytest.approx(row["eps"], rel=4e-3)
    generic = Shuffled(report=Report(kind="generic", eps_local=row["eps_local"]), num_users=row["n"])
    assert crowds.eps(event, delta=row["delta"]).eps < crowds.eps(generic, delta=row["delta"]).eps


def test_caps_by_enumeration():
    """A cap of mass 1/b is a level of b."""
    for levels, eps_local in ((3, 1.0), (4, 2.5)):
        cap = Shuffled(report=Report(kind="cap", eps_local=eps_local, cap_mass=1 / levels), num_users=5)
        rr = Shuffled(report=Report(kind="rr", eps_local=eps_local, levels=levels), num_users=5)
        for eps in (0.0, 0.3, 0.8):
            assert blanket.exact_delta(cap, eps=eps) == pytest.approx(blanket.exact_delta(rr, eps=eps), rel=1e-6)
            table = np.ones((levels, levels)) + math.expm1(eps_local) * np.eye(levels)
            rows = table / table.sum(axis=1, keepdims=True)
            for other in range(levels):
                assert exact_delta(rows[0], rows[1], [rows[other]] * 4, eps) <= blanket.exact_delta(cap, eps=eps)


def test_refusals():
    for bad in ({"kind": "cap"}, {"kind": "rr", "cap_mass": 0.1}, {"kind": "cap", "cap_mass": 0.6}):
        with pytest.raises(ValueError, match="expected"):
            Report(eps_local=1.0, **bad)
    for bad in ({"kind": "laplace", "threshold": 0.5}, {"kind": "clip_laplace", "threshold": 1.0}):
        with pytest.raises(ValueError, match="expected"):
            Personalized(eps_locals=(1.0, 1.0), **bad)
    with pytest.raises(ValueError, match="mean slope"):
        Frontier(np.array([2.0, 0.5]), np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="falling slopes and masses"):
        Frontier(np.array([0.5, 1.5]), np.array([0.5, 0.5]))
