"""Personal budgets in the shuffle and local models: APES, S-APES, UniS, PLDP, LDP-Min.

Statistical checks run at fixed seeds; each says how far in the tail its threshold lies.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from grids import later
from scipy.stats import binom

from dovetail import accounting
from dovetail.accounting import gaussian
from dovetail.accounting.releases import personalized
from dovetail.events import Disjoint, Everyone, FixedSize, Laplace, NonPrivate, Personalized, Poisson
from dovetail.mechanisms import ClipLaplace, laplace
from dovetail.protocols import Cohort, fast_path
from dovetail.protocols.personal.apes import Apes
from dovetail.protocols.personal.pldp import LdpMin, Pldp, Unis
from dovetail.protocols.personal.s_apes import SApes
from dovetail.shufflers import SlotSums, deliver, mask_absent, shuffle
from dovetail.statements import Neighbors, Trust

DIM, CLIENTS, CLIP = 30, 200, 0.1
COHORT = Cohort(participation=Everyone(), size=CLIENTS, min_size=CLIENTS)
BUDGETS = [0.5, 4.0]
CASES = {
    "apes": (Apes, {}),
    "apes-wide": (Apes, {"bound": 2 * CLIP}),
    "apes-laplace": (Apes, {"randomizer": "laplace"}),
    "s_apes": (SApes, {}),
    "s_apes-top": (SApes, {"sparsify": "top"}),
    "s_apes-random": (SApes, {"sparsify": "random"}),
    "unis": (Unis, {}),
    "pldp": (Pldp, {}),
    "ldp_min": (LdpMin, {}),
}
LAPLACE = ("apes-laplace", "unis", "pldp", "ldp_min")


def make(case, budgets=BUDGETS, cohort=COHORT, dim=DIM, **more):
    cls, parameters = CASES[case]
    return cls(budgets=budgets, clip_value=CLIP, **parameters, **more).settle(cohort, dim)


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def updates():
    spread = np.linspace(0.2, 2.0, CLIENTS)[:, None]
    drift = np.linspace(-1.0, 1.0, DIM) * CLIP
    return jnp.asarray(drift + CLIP * spread * np.random.default_rng(0).normal(size=(CLIENTS, DIM)), jnp.float32)


# The compiler as it comes: the one that conftest asks for rounds a report that is used twice in two ways, and the
# largest reports of a client are then others from one program to the next.
SAME_ROUNDING = {"xla_cpu_use_fusion_emitters": True} if jaxlib.version.__version_info__ < (0, 11) else {}


def clipped(updates):
    return np.clip(np.asarray(updates, np.float64), -CLIP, CLIP)


def client_keys(seed):
    return jax.random.split(jax.random.key(seed), CLIENTS)


@functools.partial(jax.jit, static_argnums=0, compiler_options=SAME_ROUNDING)
def _reports(protocol, updates, keys, budgets):
    return jax.vmap(lambda x, k, b: protocol.randomize(x, (), key=k, budget=b))(updates, keys, budgets)


def reports_of(protocol, updates, seed=0, budgets=None):
    """Everybody's reports; other budgets than the settled ones need no new program."""
    budgets = jnp.asarray(protocol.budgets if budgets is None else budgets, jnp.float32)
    return _reports(protocol, jnp.asarray(updates, jnp.float32), client_keys(seed), budgets)


def tally_of(protocol, updates, seed=0, **more):
    return protocol.tally(deliver(reports_of(protocol, updates, seed, **more)), updates.shape[1])


@functools.partial(jax.jit, static_argnums=0)
def estimate_of(protocol, tally):
    return protocol.estimate(tally, CLIENTS, (), key=jax.random.key(0))[0]


@functools.partial(jax.jit, static_argnums=0, compiler_options=SAME_ROUNDING)
def draw(protocol, x, eps_local, key):
    return protocol.perturb(x, jnp.float32(eps_local), key=key)


def drawn_from(protocol, x, eps_local, seed):
    return np.asarray(draw(protocol, jnp.asarray(x, jnp.float32), eps_local, jax.random.key(seed)))


def mechanism_of(protocol, cohort=COHORT, dim=DIM):
    return protocol.view(cohort, dim, neighbors=Neighbors.REPLACE_ONE).round.mechanism


def averages(protocol, updates, rounds, **more):
    """The average report on every coordinate, round by round."""
    totals = [np.asarray(tally_of(protocol, updates, seed, **more).total, np.float64) for seed in range(rounds)]
    return np.stack(totals) / CLIENTS


@pytest.mark.parametrize("case", ["apes", "s_apes-top", "pldp"])
def test_both_paths_give_the_same_tally_from_the_same_keys(case, updates):
    protocol = make(case)
    layout = protocol.layout(DIM)
    assert layout.shufflers == protocol.shuffled
    messages = shuffle(reports_of(protocol, updates), layout, key=jax.random.key(1))
    slow = protocol.tally(messages, DIM)
    path = fast_path(protocol, DIM)
    collect = jax.jit(
        lambda keys: path.collect(
            updates, jnp.arange(CLIENTS) < CLIENTS, (), keys=keys, budgets=jnp.asarray(protocol.budgets, jnp.float32)
        ),
        compiler_options=SAME_ROUNDING,
    )
    quick = path.finish(collect(client_keys(0)), key=jax.random.key(2))
    np.testing.assert_allclose(slow.total, quick.total, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(slow.messages, quick.messages)
    assert (quick.messages == CLIENTS).all()


def test_the_tally_adds_up_over_clients_and_does_not_see_their_order(case, updates):
    protocol = make(case)
    reports = reports_of(protocol, updates)
    whole = protocol.tally(deliver(reports), DIM)
    here = jnp.arange(CLIENTS) < 70
    first, second = (protocol.tally(deliver(mask_absent(reports, mask)), DIM) for mask in (here, ~here))
    np.testing.assert_allclose(first.total + second.total, whole.total, rtol=1e-5, atol=1e-4)
    assert (first.messages == 70).all()
    order = np.random.default_rng(1).permutation(CLIENTS)
    mixed = protocol.tally(deliver(jax.tree.map(lambda leaf: leaf[order], reports)), DIM)
    np.testing.assert_allclose(mixed.total, whole.total, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(estimate_of(protocol, mixed), estimate_of(protocol, whole), atol=1e-4 * CLIP)


@pytest.mark.parametrize("case", LAPLACE)
def test_laplace_estimates_are_unbiased(case, updates):
    """Each of 30 coordinates within 5 standard errors (alpha below 1e-4); the noise is the stated one to 5 %."""
    protocol = make(case)
    drawn = averages(protocol, updates, 150)
    np.testing.assert_allclose(estimate_of(protocol, tally_of(protocol, updates)), drawn[0], rtol=1e-5, atol=1e-6)
    error, deviation = drawn.mean(axis=0) - clipped(updates).mean(axis=0), drawn.std(axis=0, ddof=1)
    assert (np.abs(error) < 5 * deviation / math.sqrt(150)).all()
    assert math.sqrt((deviation**2).mean()) == pytest.approx(protocol.noise_std(CLIENTS, DIM), rel=0.05)


def test_apes_finds_the_value_that_all_users_hold():
    """200 times 400 reports on each of 30 values: within 5 standard errors (alpha below 1e-4), and those are small."""
    protocol, budgets = make("apes"), np.asarray(make("apes").budgets)
    values = np.linspace(-0.9, 0.9, DIM) * CLIP
    drawn = averages(protocol, jnp.tile(jnp.asarray(values, jnp.float32), (CLIENTS, 1)), 400)
    mean, error = drawn.mean(axis=0), drawn.std(axis=0, ddof=1) / math.sqrt(400)
    low, high = (laplace.invert_mean_report(mean + sign * 5 * error, budgets, CLIP, CLIP) for sign in (-1, 1))
    assert (low < values).all()
    assert (values < high).all()
    tally = SlotSums(jnp.asarray(mean * CLIENTS, jnp.float32), jnp.full(DIM, CLIENTS))
    assert np.abs(np.asarray(estimate_of(protocol, tally)) - values).max() < 0.1 * CLIP


def test_the_bias_of_apes_is_the_stated_one():
    """Users with larger budgets count for more: where they hold other values, the estimate is not the mean."""
    protocol, budgets = make("apes"), np.asarray(make("apes").budgets)
    held = np.where(budgets > 2.25, 0.8, -0.8) * CLIP
    drawn = averages(protocol, jnp.tile(jnp.asarray(held, jnp.float32)[:, None], (1, DIM)), 60)
    expected = np.mean([laplace.mean_report(x, eps, CLIP, CLIP) for x, eps in zip(held, budgets, strict=True)])
    error = drawn.std() / math.sqrt(drawn.size)
    assert abs(drawn.mean() - expected) < 5 * error, "the mean of the reports is known (alpha below 1e-6)"
    assert abs(drawn.mean()) > 20 * error
    assert laplace.invert_mean_report(expected, budgets, CLIP, CLIP) > 0.2 * CLIP, "although the values' mean is 0"


def signal_left(sparsify, x, eps_local):
    """Which part of the mean report on x survives sparsification, by integration; all coordinates are x or -x."""
    law, size = ClipLaplace(eps_local, -CLIP, CLIP), (np.arange(20_000) + 0.5) / 20_000 * CLIP
    right, left = (np.exp(law.log_density(sign * size, x)) for sign in (1, -1))
    below = (np.cumsum(right + left) - (right + left) / 2) / np.sum(right + left)
    threshold = make("s_apes", budgets=[eps_local, eps_local]).threshold
    kept = {"threshold": size > threshold, "top": binom.cdf(5, DIM - 1, 1 - below), "random": 0.2}[sparsify]
    return float(np.sum(size * (right - left) * kept) / np.sum(size * (right - left)))


@pytest.mark.parametrize("sparsify", ["threshold", "top", "random"])
def test_s_apes_pulls_towards_zero_as_stated(sparsify):
    """The mean of 30 x 200 x 150 reports is within 5 standard errors of the integral (alpha below 1e-6)."""
    protocol = make("s_apes" if sparsify == "threshold" else f"s_apes-{sparsify}")
    sign = (-1.0) ** np.arange(DIM)
    held = jnp.tile(jnp.asarray(0.9 * CLIP * sign, jnp.float32), (CLIENTS, 1))
    drawn = averages(protocol, held, 150, budgets=np.full(CLIENTS, 0.5)) * sign
    whole = laplace.mean_report(0.9 * CLIP, 0.5, CLIP, CLIP)
    error = drawn.std() / math.sqrt(drawn.size) / whole
    assert error < 0.02
    assert abs(drawn.mean() / whole - signal_left(sparsify, 0.9 * CLIP, 0.5)) < 5 * error


def test_at_small_budgets_the_pull_is_between_the_stated_factors():
    for keep_power, x in ((2, 1e-3 * CLIP), (3, CLIP)):
        assert signal_left("threshold", x, 0.01) == pytest.approx(1 - 0.8**keep_power, rel=0.02)
        assert signal_left("top", x, 0.01) == pytest.approx(1 - 0.8**keep_power, rel=0.04)


@pytest.mark.parametrize("case", ["apes", "apes-wide", "apes-laplace", "unis", "pldp", "ldp_min"])
def test_with_large_budgets_it_is_the_mean_of_the_clipped_updates(case, updates):
    large = make(case, budgets=[1e5, 2e5])
    tally = tally_of(make(case), updates, budgets=large.budgets)
    np.testing.assert_allclose(estimate_of(large, tally), clipped(updates).mean(axis=0), atol=1e-4 * CLIP)


def test_with_large_budgets_s_apes_is_the_mean_of_the_largest_entries(updates):
    large = make("s_apes-top", budgets=[1e5, 2e5])
    inside = updates * CLIP / jnp.abs(updates).max() * 0.99  # nothing is clipped, so there are no ties
    values = np.asarray(inside, np.float64)
    kept = np.abs(values) >= np.sort(np.abs(values), axis=1)[:, -6:-5]
    tally = tally_of(make("s_apes-top"), inside, budgets=large.budgets)
    np.testing.assert_allclose(estimate_of(large, tally), np.where(kept, values, 0).mean(axis=0), atol=2e-4 * CLIP)


@pytest.mark.parametrize("sparsify", ["threshold", "top"])
def test_s_apes_that_keeps_everything_is_apes(sparsify):
    protocol = SApes(budgets=BUDGETS, clip_value=CLIP, sparsify=sparsify, keep=1.0).settle(COHORT, DIM)
    x = jnp.linspace(-CLIP, CLIP, DIM)
    plain = draw(make("apes"), x, 2.0, jax.random.split(jax.random.key(1), 3)[0])
    np.testing.assert_array_equal(drawn_from(protocol, x, 2.0, 1), plain)


def test_the_repaired_s_apes_treats_every_report_alike_and_on_its_own():
    """What is put in a report's place depends neither on its value, nor on its sender's budget or other coordinates."""
    protocol = make("s_apes")
    rare, often = (drawn_from(protocol, np.full(40_000, x), eps, 3) for x, eps in ((0.0, 0.5), (0.05, 4.0)))
    both = (np.abs(rare) < protocol.threshold) & (np.abs(often) < protocol.threshold)
    assert both.mean() > 0.3
    np.testing.assert_array_equal(rare[both], often[both])
    mixed = drawn_from(protocol, np.where(np.arange(40_000) < 100, 0.0, CLIP), 0.5, 3)
    np.testing.assert_array_equal(mixed[:100], rare[:100])
    plain = drawn_from(make("apes"), np.zeros(40_000), 0.5, 3)
    share = (np.abs(plain) >= protocol.threshold).mean()
    assert share == pytest.approx(0.2, abs=5 * math.sqrt(0.16 / 40_000)), "5 standard errors, alpha below 1e-6"


def test_a_random_selection_does_not_look_at_the_data(updates):
    protocol, inside = make("s_apes-random"), updates * CLIP / jnp.abs(updates).max()
    first, second = (np.asarray(reports_of(protocol, x).value) for x in (inside, -inside))
    assert ((first == second).sum(axis=1) == DIM - 6).all(), "replaced in the same places by the same draws"


def test_the_published_s_apes_keeps_the_b_largest_reports():
    zeros, keys = jnp.zeros((CLIENTS, DIM)), client_keys(6)
    budgets = jnp.asarray(make("apes").budgets, jnp.float32)
    plain = np.asarray(
        _reports(make("apes"), zeros, jax.vmap(lambda k: jax.random.split(k, 3)[0])(keys), budgets).value
    )
    drawn = np.asarray(_reports(make("s_apes-top"), zeros, keys, budgets).value)
    largest = np.sort(np.abs(plain), axis=1)[:, -6:-5]
    np.testing.assert_array_equal(plain == drawn, np.abs(plain) >= largest)


@pytest.mark.parametrize("case", ["apes", "apes-wide", "s_apes"])
def test_calibration_clamps_and_never_turns_back(case):
    protocol = make(case)
    wall = protocol.output_bound
    means = jnp.linspace(-1, 1, 2001) * wall
    estimates = np.asarray(estimate_of(protocol, SlotSums(CLIENTS * means, jnp.full(2001, CLIENTS))))
    assert estimates[0] == pytest.approx(-CLIP)
    assert estimates[-1] == pytest.approx(CLIP)
    assert np.abs(estimates).max() <= CLIP * (1 + 1e-6)
    assert (np.diff(estimates) >= -1e-6 * CLIP).all()
    corner = laplace.mean_report(CLIP, np.asarray(protocol.budgets), CLIP, wall).mean()
    assert (estimates[np.asarray(means) > corner * 1.001] >= CLIP * (1 - 1e-6)).all(), "beyond what can be attained"


@pytest.mark.parametrize("case", ["apes", "s_apes", "s_apes-top", later("s_apes-random")])
def test_noise_std_is_that_of_the_estimate_on_zeros(case):
    """4,500 draws know the deviation to 1.1 % (one sigma), and it must agree to 5 %; much noise is clamped."""
    for budgets in (BUDGETS, [0.5, 0.5]):
        protocol = make(case, budgets=budgets)
        drawn = averages(make(case), jnp.zeros((CLIENTS, DIM)), 150, budgets=protocol.budgets)
        estimates = laplace.invert_mean_report(drawn, np.asarray(protocol.budgets), CLIP, CLIP)
        assert np.std(estimates) == pytest.approx(protocol.noise_std(CLIENTS, DIM), rel=0.05)
    loud = make(case, budgets=[0.05, 0.05])
    assert 0.5 * CLIP < loud.noise_std(CLIENTS, DIM) < CLIP


def test_events_tell_the_budgets_and_the_law_that_ran(case):
    """The variance of 40,000 reports at a corner is that of the event's law for its eps, and not of 4/5 of it.

    Sparsified reports have another law and the event of what they are made from; wider boxes have none.
    """
    protocol = make(case)
    event = mechanism_of(protocol)
    if isinstance(event, NonPrivate):
        return
    if isinstance(event, Personalized):
        assert event.eps_locals == protocol.budgets
        assert event.coordinates == DIM
        kind, eps_local, user = event.kind, event.eps_locals[120], 120
    else:
        kind, eps_local, user = "laplace", event.eps_each, int(np.argmax(protocol.budgets))
        assert event.count == DIM
        assert event.sensitivity == 2 * CLIP
    runs = make("apes") if isinstance(protocol, SApes) else protocol
    drawn = drawn_from(runs, np.full(40_000, 7.0), protocol.budgets[user], 8).astype(np.float64)

    def variance(eps):
        law = ClipLaplace(eps, -CLIP, CLIP)
        return float(law.report_variance(CLIP)) if kind == "clip_laplace" else 8 * (CLIP / eps) ** 2

    assert drawn.var() == pytest.approx(variance(eps_local), rel=0.06)
    assert drawn.var() != pytest.approx(variance(0.8 * eps_local), rel=0.06)


def test_local_baselines_state_the_user_that_spends_the_most():
    views = {case: make(case).view(COHORT, DIM, neighbors=Neighbors.REPLACE_ONE) for case in ("pldp", "ldp_min")}
    for case, eps_each in (("pldp", 4.0), ("ldp_min", 0.5)):
        view = views[case]
        assert isinstance(view.round.mechanism, Laplace)
        assert view.round.mechanism.eps_each == pytest.approx(eps_each)
        assert view.scope.trust is Trust.LOCAL
        assert view.round.mechanism.count == DIM
    assert set(make("ldp_min").budgets) == {0.5}


def eps_of(protocol, cohort, dim=1):
    view = protocol.view(cohort, dim, neighbors=Neighbors.REPLACE_ONE)
    return accounting.bound([view.round], delta=1e-6).eps


def test_missing_users_hide_nobody_and_count_like_colluders():
    cohort = Cohort(participation=Everyone(), size=40, min_size=40)
    protocol = make("apes", dim=1, cohort=cohort, budgets=[1.0, 1.5])
    missing = dataclasses.replace(cohort, min_size=30)
    colluding = dataclasses.replace(cohort, colluders=10)
    both = dataclasses.replace(cohort, min_size=35, colluders=5)
    assert mechanism_of(protocol, missing) == mechanism_of(protocol, colluding) == mechanism_of(protocol, both)
    assert mechanism_of(protocol, missing).colluders == 10
    assert eps_of(protocol, cohort) < eps_of(protocol, missing)
    with pytest.raises(ValueError, match="min_size >= 2 for a protocol that shuffles reports"):
        eps_of(protocol, dataclasses.replace(cohort, min_size=0))


def test_what_a_shuffled_statement_relies_on():
    for case in ("apes", "unis", "s_apes"):
        view = make(case).view(COHORT, DIM, neighbors=Neighbors.REPLACE_ONE)
        assert view.scope.trust is Trust.SHUFFLE
        said = "; ".join(view.scope.assumptions)
        assert "budgets are public and do not change when a user's data is replaced" in said
        assert "permutes every coordinate" in said
    for case in ("apes", "pldp"):
        with pytest.raises(ValueError, match="expected neighbors = replace-one"):
            make(case).view(COHORT, DIM, neighbors=Neighbors.ADD_REMOVE)


def test_what_is_not_proven_is_not_certified():
    """Reports beyond the box of the inputs, and a selection that couples the coordinates."""
    apes = mechanism_of(make("apes"))
    for case, reason in (("apes-wide", "bound = C"), ("s_apes-top", "depends on all coordinates")):
        view = make(case).view(COHORT, DIM, neighbors=Neighbors.REPLACE_ONE)
        statement = accounting.certify([view.round], view.scope, delta=1e-6)
        assert statement.is_unbounded
        assert reason in str(statement.proof)
    assert mechanism_of(make("s_apes-random")) == apes
    behind = mechanism_of(make("s_apes"))
    assert 0 < behind.threshold < 1
    assert dataclasses.replace(behind, threshold=0.0) == apes
    assert mechanism_of(make("s_apes", keep=1.0)) == apes
    assert mechanism_of(make("s_apes-top", keep=1.0)) == apes
    assert SApes(budgets=BUDGETS, clip_value=CLIP, published=True).sparsify == "top"


def test_the_largest_reports_of_a_client_tell_of_its_other_coordinates():
    """Why the published selection is not certified: coordinate 0 of x and x' is the same, the law of its report is not.

    Where the other coordinates are at a corner, fewer reports on coordinate 0 are among the largest: its average over
    200 x 60 reports differs by more than 10 standard errors (alpha below 1e-20).
    """
    protocol = make("s_apes-top")
    averages_of_first = []
    for others in (0.0, CLIP):
        x = jnp.full((CLIENTS, DIM), others).at[:, 0].set(CLIP)
        averages_of_first.append(averages(protocol, x, 60, budgets=np.full(CLIENTS, 4.0))[:, 0])
    alone, among = averages_of_first
    error = math.sqrt((alone.var() + among.var()) / 60)
    assert alone.mean() - among.mean() > 10 * error


def test_the_published_selection_breaks_the_bound_of_apes():
    """A count of reports shows more than APES's certified eps, at small budgets and many coordinates.

    All users hold C in every coordinate, and so does the victim, or else 0. The size below which a client's reports
    are replaced is a quantile of its own reports, which differs: of sizes between the two, with 4 deviations of a
    quantile left free at either end, a victim of zeros keeps all its reports and gets fresh ones besides, everyone else
    has only fresh ones there. Their number, over all coordinates and users, is nearly normal.
    """
    eps_local, dim, num_users, dropped, delta = 0.05, 16_000_000, 40_000, 0.3, 1e-5
    rate = eps_local / 2  # C = 1
    of_zeros = -math.log1p(dropped * math.expm1(-rate)) / rate
    of_corners = math.asinh(dropped * math.sinh(rate)) / rate
    free = 4 * math.sqrt(dropped * (1 - dropped) / dim)
    low, high = of_zeros + free, of_corners - free
    between = dim * (math.exp(-rate * low) - math.exp(-rate * high)) / -math.expm1(-rate)
    fresh, kept = dropped * between, between
    shown = gaussian.eps_of(kept / math.sqrt(num_users * fresh + kept), delta=delta)
    event = Personalized(kind="clip_laplace", eps_locals=(eps_local,) * num_users, coordinates=dim)
    certified = personalized.eps(event, delta=delta).eps
    assert 2.3 < certified < 2.45
    assert shown > 7


@pytest.mark.parametrize(
    ("case", "eps"), [("apes", 57.6), ("s_apes", 25.6), ("unis", 76.9), ("pldp", 7850.0), ("ldp_min", 40.1)]
)
def test_published_events_recompute_table_3(case, eps):
    cohort = Cohort(participation=Everyone(), size=10_000, min_size=10_000)
    protocol = make(case, budgets=[0.05, 1.0], cohort=cohort, dim=7850)
    event, extra = protocol.published_event(cohort, 7850)
    assert protocol.formula(event, delta=3.6e-5, **extra).eps == pytest.approx(eps, rel=0.003)


def test_noise_scales_every_budget():
    loud = Apes(budgets=BUDGETS, clip_value=CLIP).with_noise(4.0).settle(COHORT, DIM)
    np.testing.assert_allclose(np.asarray(loud.budgets) * 4, make("apes").budgets)
    np.testing.assert_allclose(make("apes").with_noise(4.0).budgets, loud.budgets)
    assert loud.settle(COHORT, DIM) == loud, "settling twice changes nothing"
    assert loud.is_calibrated
    open_scale = Apes(budgets=BUDGETS, clip_value=CLIP, budget_scale="fit")
    assert not open_scale.is_calibrated
    with pytest.raises(ValueError, match="expected budget_scale to be a number, or a privacy target"):
        open_scale.settle(COHORT, DIM)
    assert open_scale.with_noise(4.0).settle(COHORT, DIM) == loud


def test_only_what_is_settled_runs():
    unsettled = Apes(budgets=BUDGETS, clip_value=CLIP)
    for run in (
        lambda: unsettled.randomize(jnp.zeros(DIM), (), key=jax.random.key(0), budget=jnp.float32(1)),
        lambda: unsettled.noise_std(CLIENTS, DIM),
        lambda: unsettled.estimate(SlotSums(jnp.zeros(DIM), jnp.ones(DIM)), CLIENTS, (), key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match="expected a protocol that has been settled on its cohort"):
            run()
    pair = Apes(budgets=BUDGETS, clip_value=CLIP).settle(dataclasses.replace(COHORT, size=2, min_size=2), DIM)
    with pytest.raises(ValueError, match="expected one budget for each of 200 users, got 2"):
        pair.settle(COHORT, DIM)


def test_more_noise_is_more_private():
    cohort = Cohort(participation=Everyone(), size=30, min_size=30)
    protocol = make("apes", cohort=cohort, dim=1, budgets=[1.0, 1.0])
    eps = [eps_of(protocol.with_noise(noise).settle(cohort, 1), cohort) for noise in (1, 2, 8)]
    assert eps == sorted(eps, reverse=True)
    assert eps[2] < eps[0] / 4


def test_a_poisoned_update_gives_a_report_like_any_other(case, updates):
    poisoned = updates.at[0].set(jnp.nan).at[1].set(jnp.inf).at[2].set(-jnp.inf)
    report = np.asarray(reports_of(make(case), poisoned, budgets=np.full(CLIENTS, 1e5)).value)
    assert np.isfinite(report).all()
    assert np.abs(report).max() <= CLIP * 1.01


@pytest.mark.parametrize("participation", [Disjoint(epoch=0), FixedSize(size=5, population=9), Poisson(prob=0.5)])
@pytest.mark.parametrize("case", ["apes", "pldp"])
def test_a_user_keeps_its_budget_so_everyone_takes_part(case, participation):
    cohort = dataclasses.replace(COHORT, participation=participation)
    with pytest.raises(ValueError, match="expected everyone to take part in every round with personal budgets"):
        make(case, cohort=cohort)


def test_a_client_needs_its_own_budget():
    with pytest.raises(ValueError, match="expected the client's own budget, got budget=None"):
        make("apes").randomize(jnp.zeros(DIM), (), key=jax.random.key(0))


@pytest.mark.parametrize(
    ("cls", "parameters", "sentence"),
    [
        (Apes, {"budgets": BUDGETS, "clip_value": 0.0}, "expected clip_value > 0"),
        (Apes, {"budgets": BUDGETS, "clip_value": 0.1, "bound": 0.05}, "expected bound >= clip_value"),
        (Apes, {"budgets": BUDGETS, "clip_value": 0.1, "randomizer": "rr"}, "expected randomizer to be one of"),
        (
            Apes,
            {"budgets": BUDGETS, "clip_value": 0.1, "randomizer": "laplace", "bound": 1.0},
            "expected no bound with randomizer='laplace'",
        ),
        (Apes, {"budgets": BUDGETS, "clip_value": 0.1, "budget_scale": -1.0}, "expected budget_scale > 0"),
        (
            Apes,
            {"budgets": BUDGETS, "clip_value": 0.1, "budget_scale": "fits"},
            "expected budget_scale to be a finite number",
        ),
        (SApes, {"budgets": BUDGETS, "clip_value": 0.1, "keep": 0.0}, "expected keep > 0"),
        (SApes, {"budgets": BUDGETS, "clip_value": 0.1, "keep": 1.1}, "expected keep <= 1"),
        (SApes, {"budgets": BUDGETS, "clip_value": 0.1, "sparsify": "best"}, "expected sparsify to be one of"),
        (SApes, {"budgets": BUDGETS, "clip_value": 0.1, "randomizer": "laplace"}, "expected randomizer to be one of"),
        (SApes, {"budgets": BUDGETS, "clip_value": 0.1, "keep": 0.01}, "expected keep \\* 30 >= 1 coordinates"),
        (Unis, {"budgets": "unifrom1", "clip_value": 0.1}, "did you mean 'uniform1'"),
        (Pldp, {"budgets": [0.1, -1.0], "clip_value": 0.1}, "expected eps_local > 0, got eps_local=-1.0"),
        (LdpMin, {"budgets": [0.1, 0.2, 0.3], "clip_value": 0.1}, "expected one budget for each of 200 users, got 3"),
    ],
)
def test_bad_parameters_get_one_sentence(cls, parameters, sentence):
    with pytest.raises(ValueError, match=sentence):
        cls(**parameters).settle(COHORT, DIM)
