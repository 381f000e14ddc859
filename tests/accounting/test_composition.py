import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from grids import diagonal, later
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from dovetail.accounting import accountants, bound, certify, compose, fits, gaussian, smallest_noise
from dovetail.accounting.exposure import exposures_of
from dovetail.events import (
    Disjoint,
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    NonPrivate,
    Personalized,
    Poisson,
    Report,
    Round,
    SampledSubject,
    Shuffled,
    SplitAndMix,
)
from dovetail.statements import Bound, Neighbors, NotApplicable, Proof, Scope, Trust, Unit

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "gaussian.json").read_text())
DELTA = 1e-5
SAMPLED = {
    "everyone": Everyone(),
    "poisson": Poisson(prob=0.1),
    "fixed": FixedSize(size=10, population=100),
}
# Which accountant reaches which pair; everything else must raise NotApplicable.
SUPPORTED = {
    ("exact_gaussian", "everyone", Neighbors.ADD_REMOVE),
    ("exact_gaussian", "everyone", Neighbors.REPLACE_ONE),
    ("privacy_loss", "everyone", Neighbors.ADD_REMOVE),
    ("privacy_loss", "everyone", Neighbors.REPLACE_ONE),
    ("privacy_loss", "poisson", Neighbors.ADD_REMOVE),
    ("privacy_loss", "poisson", Neighbors.REPLACE_ONE),
    ("privacy_loss", "fixed", Neighbors.REPLACE_ONE),
    ("renyi", "everyone", Neighbors.ADD_REMOVE),
    ("renyi", "everyone", Neighbors.REPLACE_ONE),
    ("renyi", "poisson", Neighbors.ADD_REMOVE),
    ("renyi", "fixed", Neighbors.REPLACE_ONE),
}


def scope(neighbors=Neighbors.REPLACE_ONE):
    return Scope(
        trust=Trust.CURATOR, adversary="observer", neighbors=neighbors, unit=Unit.USER, assumptions=("honest",)
    )


def rounds(count, *, std=1.0, sensitivity=1.0, neighbors=Neighbors.REPLACE_ONE, participation=None):
    mechanism = Gaussian(std=std, sensitivity=sensitivity, neighbors=neighbors)
    return [Round(mechanism=mechanism, participation=participation or Everyone())] * count


@pytest.mark.parametrize("neighbors", Neighbors)
@pytest.mark.parametrize("accountant", [accountants.exact_gaussian, accountants.privacy_loss, accountants.renyi])
@pytest.mark.parametrize("std", [later(0.5), 1.0, 3.0])
def test_one_gaussian_against_the_analytic_formula(accountant, neighbors, std):
    """The sensitivity trap: a clipped sum (norm 1) has sensitivity 1 under add-remove and 2 under replacement."""
    sensitivity = 2.0 if neighbors is Neighbors.REPLACE_ONE else 1.0
    event = rounds(1, std=std, sensitivity=sensitivity, neighbors=neighbors)
    exact = gaussian.eps_of(sensitivity / std, delta=DELTA)
    ours = accountant(exposures_of(event)).eps(DELTA)
    loosest = 1.15 if accountant is accountants.renyi else 1 + 1e-5
    assert exact * (1 - 1e-12) <= ours <= exact * loosest
    delta = accountant(exposures_of(event)).delta(exact)
    assert DELTA * (1 - 1e-9) <= delta <= DELTA * (10 if accountant is accountants.renyi else 1 + 1e-4)


@pytest.mark.parametrize("neighbors", Neighbors)
@pytest.mark.parametrize("sampling", SAMPLED)
@pytest.mark.parametrize("accountant", [accountants.exact_gaussian, accountants.privacy_loss, accountants.renyi])
def test_every_pair_is_supported_or_not_applicable(accountant, sampling, neighbors):
    paid = exposures_of(rounds(3, neighbors=neighbors, participation=SAMPLED[sampling]))
    if (accountant.__name__, sampling, neighbors) in SUPPORTED:
        assert 0 < accountant(paid).eps(DELTA) < math.inf
    else:
        with pytest.raises(NotApplicable):
            accountant(paid)


def test_golden_trap_numbers():
    golden = GOLDEN["ten_fold_sigma_1_delta_1e-5"]
    added = exposures_of(rounds(10, neighbors=Neighbors.ADD_REMOVE))
    assert accountants.renyi(added).eps(DELTA) == pytest.approx(golden["add-remove renyi"], abs=0.006)
    replaced = certify(rounds(10, sensitivity=2.0), scope(), delta=DELTA)
    assert replaced.eps == pytest.approx(golden["replace-one exact"], abs=0.006)


@pytest.mark.parametrize(("accountant", "row"), diagonal(["renyi", "privacy_loss"], GOLDEN["geyer_noise_multipliers"]))
def test_golden_noise_multipliers(row, accountant):
    """The noise that exhausts eps = 8 lies within 1 % of the golden one."""

    def eps_of(noise):
        event = rounds(
            row["rounds"], std=noise, neighbors=Neighbors.ADD_REMOVE, participation=Poisson(prob=row["prob"])
        )
        return getattr(accountants, accountant)(exposures_of(event)).eps(row["delta"])

    assert eps_of(1.01 * row[accountant]) < 8.0 < eps_of(0.99 * row[accountant])


def hockey_stick(prob, std, eps, *, one, other):
    """By integration, for the sampled pair (1-q) N(0) + q N(one) against (1-q) N(0) + q N(other)."""
    y = np.linspace(-12 * std, 12 * std, 20_001)
    null = (1 - prob) * stats.norm.pdf(y, 0, std)
    p, q = (null + prob * stats.norm.pdf(y, mean, std) for mean in (one, other))
    return integrate.simpson(np.maximum(0.0, p - math.exp(eps) * q), x=y)


@pytest.mark.parametrize(("prob", "std", "eps"), [(0.1, 1.0, 0.2), later(0.3, 0.7, 0.5), (0.05, 2.0, 0.02)])
def test_poisson_replacement_is_exactly_its_worst_pair(prob, std, eps):
    paid = exposures_of(rounds(1, std=std, sensitivity=2.0, participation=Poisson(prob=prob)))
    exact = hockey_stick(prob, std, eps, one=1.0, other=-1.0)
    assert accountants.privacy_loss(paid).delta(eps) == pytest.approx(exact, rel=1e-3)


@functools.cache
def poisson_replaced(prob, std):
    event = rounds(1, std=std, sensitivity=2.0, participation=Poisson(prob=prob))
    return accountants.privacy_loss(exposures_of(event))


@settings(max_examples=30, deadline=None)
@given(st.floats(-1, 1), st.floats(-1, 1), st.sampled_from([(0.02, 0.6), (0.4, 1.0), (0.9, 2.0)]), st.floats(0, 1))
def test_no_pair_of_clipped_contributions_beats_poisson_replacement(one, other, setting, eps):
    prob, std = setting
    assert hockey_stick(prob, std, eps, one=one, other=other) <= poisson_replaced(prob, std).delta(eps) + 1e-7


def test_poisson_replacement_in_the_plane_by_monte_carlo():
    """Contributions at an angle are no worse than opposite ones (the step of the proof that needs the plane)."""
    rng = np.random.default_rng(0)
    prob, eps = 0.3, 0.3
    worst = hockey_stick(prob, 1.0, eps, one=1.0, other=-1.0)
    for angle in (0.3, 1.0, 2.0, 3.0):
        one, other = np.array([1.0, 0.0]), np.array([math.cos(angle), math.sin(angle)])
        chosen = rng.random(400_000) < prob
        y = rng.normal(size=(400_000, 2)) + chosen[:, None] * one
        null = np.exp(-0.5 * (y**2).sum(1))
        p = (1 - prob) * null + prob * np.exp(-0.5 * ((y - one) ** 2).sum(1))
        q = (1 - prob) * null + prob * np.exp(-0.5 * ((y - other) ** 2).sum(1))
        estimate = np.maximum(0, 1 - math.exp(eps) * q / p).mean()
        assert estimate <= worst + 5 * 0.5 / math.sqrt(400_000)


def test_fixed_size_sampling_amplifies_but_never_below_the_brute_force():
    """n = 2, sample one: the view mixes the victim's and the other user's contribution; worst pair by scan."""
    paid = exposures_of(rounds(1, std=2.0, sensitivity=2.0, participation=FixedSize(size=1, population=2)))
    ours = accountants.renyi(paid).eps(DELTA)
    assert ours < gaussian.eps_of(1.0, delta=DELTA)
    y = np.linspace(-30, 30, 200_001)
    for other in (-1.0, 0.0, 1.0):
        p = 0.5 * (stats.norm.pdf(y, 1.0, 2.0) + stats.norm.pdf(y, other, 2.0))
        q = 0.5 * (stats.norm.pdf(y, -1.0, 2.0) + stats.norm.pdf(y, other, 2.0))
        delta = integrate.simpson(np.maximum(0, p - math.exp(ours) * q), x=y)
        assert delta <= DELTA


def test_disjoint_batches_cost_one_round_an_epoch():
    def epoch(number, std=1.0):
        return rounds(60, std=std, participation=Disjoint(epoch=number))

    one = certify(rounds(1), scope(), delta=DELTA).eps
    assert certify(epoch(0), scope(), delta=DELTA).eps == one
    assert certify(epoch(0) + epoch(1), scope(), delta=DELTA).eps == certify(rounds(2), scope(), delta=DELTA).eps
    mixed = certify(epoch(0, std=2.0) + epoch(0, std=1.0), scope(), delta=DELTA)
    assert mixed.eps == one, "the worst batch of the epoch counts"
    laplace = [
        Round(
            mechanism=Laplace(scale=s, sensitivity=1.0, count=1, neighbors=Neighbors.REPLACE_ONE),
            participation=Disjoint(epoch=0),
        )
        for s in (1.0, 2.0)
    ]
    with pytest.raises(NotApplicable, match="no order between them"):
        certify(laplace, scope(), delta=DELTA)


def test_full_rate_sampling_is_no_sampling():
    plain = certify(rounds(3), scope(), delta=DELTA).eps
    assert certify(rounds(3, participation=Poisson(prob=1.0)), scope(), delta=DELTA).eps == plain
    assert certify(rounds(3, participation=FixedSize(size=5, population=5)), scope(), delta=DELTA).eps == plain
    assert certify(rounds(3, participation=Poisson(prob=0.0)), scope(), delta=DELTA).eps == 0


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from([0.8, 1.5, 4.0]), min_size=1, max_size=6), st.sampled_from([Everyone(), Poisson(prob=0.2)])
)
def test_more_rounds_never_cost_less(stds, participation):
    history = list(itertools.chain(*(rounds(1, std=s, participation=participation) for s in stds)))
    spent = [certify(history[:t], scope(), delta=DELTA).eps for t in range(len(history) + 1)]
    assert spent[0] == 0
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(spent))


def laplace_round(count, eps_each=0.01):
    event = Laplace(scale=2 / eps_each, sensitivity=2.0, count=count, neighbors=Neighbors.REPLACE_ONE)
    return Round(mechanism=event, participation=Everyone())


def test_laplace_coordinates_add_up_pure_or_with_a_delta():
    pure = certify([laplace_round(7850)], scope(), delta=0.0)
    assert pure.eps == pytest.approx(78.5)
    assert pure.eps >= 78.5
    with_delta = certify([laplace_round(7850)], scope(), delta=5e-6)
    assert 3.8 < with_delta.eps < 4.0
    one = certify([laplace_round(1, eps_each=0.5)], scope(), delta=1e-9)
    assert one.eps == pytest.approx(0.5, rel=1e-6)


def test_a_release_without_noise_is_unbounded_and_never_fits():
    history = [*rounds(2), Round(mechanism=NonPrivate(reason="no noise"), participation=Everyone())]
    statement = certify(history, scope(), delta=DELTA)
    assert statement.is_unbounded
    assert str(statement.proof) == "no noise"
    assert not fits(history, eps=1e9, delta=DELTA)
    assert certify(rounds(1, std=0.0), scope(), delta=DELTA).is_unbounded


def test_the_statement_names_theorem_assumptions_and_premises():
    statement = certify(rounds(4, participation=Poisson(prob=0.25)), scope(), delta=DELTA)
    assert "poisson-replacement" in str(statement.proof)
    assert "honest" in statement.assumptions
    assert any("probability 0.25" in assumption for assumption in statement.assumptions)
    assert any("hyper-parameters" in assumption for assumption in statement.assumptions)
    (premise,) = statement.premises
    assert premise.span == "one of 4 rounds"
    assert premise.eps < statement.eps


def test_events_of_another_relation_are_refused():
    with pytest.raises(ValueError, match="stated under add-remove, but an event under replace-one"):
        certify(rounds(1), scope(Neighbors.ADD_REMOVE), delta=DELTA)


@pytest.mark.parametrize(
    "ask",
    [lambda mixed: bound(mixed, delta=DELTA), lambda mixed: fits(mixed, eps=100.0, delta=DELTA), exposures_of],
    ids=["bound", "fits", "exposures"],
)
def test_rounds_under_different_relations_are_never_added_up(ask):
    mixed = rounds(1) + rounds(1, neighbors=Neighbors.ADD_REMOVE)
    with pytest.raises(ValueError, match="one neighbouring relation, got add-remove and replace-one"):
        ask(mixed)


@pytest.mark.parametrize(  # that of samples in `make test` is in tests/experiment/test_experiment.py
    ("eps", "count", "participation"),
    [
        *((eps, count, Everyone()) for eps, count in ((1.0, 1), (5.0, 20))),
        *(later(eps, count, FixedSize(size=20, population=100)) for eps, count in ((1.0, 1), (5.0, 20))),
    ],
)
def test_calibration_meets_the_target_from_the_safe_side(eps, count, participation):
    def eps_of(noise):
        return certify(rounds(count, std=noise, participation=participation), scope(), delta=DELTA).eps

    noise = smallest_noise(eps_of, eps=eps, tolerance=1e-3)
    assert eps_of(noise) <= eps
    assert eps_of(noise / (1 + 1e-2)) > eps
    history = rounds(count, std=noise, participation=participation)
    assert fits(history, eps=eps, delta=DELTA)
    assert not fits(history + rounds(1, std=noise / 2, participation=participation), eps=eps, delta=DELTA)


def test_disjoint_batches_of_users_do_not_protect_a_subject():
    """Its data may sit in several batches."""
    about = dataclasses.replace(scope(), unit=Unit.SUBJECT)
    with pytest.raises(NotApplicable, match="several batches"):
        certify(rounds(2, participation=Disjoint(epoch=0)), about, delta=DELTA)
    assert certify(rounds(2), about, delta=DELTA).eps > certify(rounds(1), about, delta=DELTA).eps


# ---------------------------------------------------------------- delta at a fixed eps

SHARES = SplitAndMix(
    num_users=500, coordinates=200, clip_norm=1.0, scale=300.0, noise_variance=4e7, modulus=2**19, shares=13
)
CROWD = Shuffled(num_users=60, coordinates=1, report=Report(kind="rr", eps_local=0.5))
HISTORIES = {
    "gaussian": rounds(5),
    "poisson": rounds(3, participation=Poisson(prob=0.1)),
    "fixed size": rounds(3, participation=FixedSize(size=10, population=100)),
    "laplace": [laplace_round(20, 0.1)],
    "shuffled": [Round(mechanism=CROWD, participation=Everyone())] * 2,
    "shuffled samples": [Round(mechanism=CROWD, participation=FixedSize(size=60, population=600))] * 2,
    "personal": [Round(mechanism=Personalized(kind="rr", eps_locals=(0.2, 0.4) * 30), participation=Everyone())],
    "shares": [Round(mechanism=SHARES, participation=Everyone())] * 3,
    "subject": [
        Round(mechanism=SampledSubject(std=2.0, clip_norm=1.0, items=3, prob_item=0.2), participation=Everyone())
    ]
    * 5,
}


@pytest.mark.parametrize("kind", HISTORIES)
def test_delta_at_an_eps_answers_eps_at_a_delta(kind):
    """At what was certified for a delta, no more than about that delta; and what fits is what is bounded."""
    history = HISTORIES[kind]
    there = bound(history, delta=DELTA)
    back = bound(history, eps=there.eps)
    assert back.eps == there.eps
    assert back.delta == pytest.approx(DELTA, rel=2e-2) or back.delta < DELTA
    if kind == "gaussian":
        assert back.delta == pytest.approx(gaussian.delta_of(math.sqrt(5), eps=there.eps), rel=1e-9)
    for share in (0.8, 1.2):
        at = bound(history, eps=share * there.eps)
        assert at.eps == share * there.eps
        assert (at.delta <= DELTA) == (share > 1)
        if at.delta < 1:
            assert fits(history, eps=at.eps * (1 + 1e-6), delta=at.delta * 1.01)
            assert at.delta < 1e-290 or not fits(history, eps=at.eps, delta=at.delta * 0.95)


def test_a_statement_at_a_fixed_eps():
    history = rounds(4, participation=Poisson(prob=0.25))
    statement = certify(history, scope(), eps=2.0)
    assert statement.eps == 2.0
    assert statement.delta == bound(history, eps=2.0).delta
    (premise,) = statement.premises
    assert premise.eps == 2.0 and premise.span == "one of 4 rounds"
    assert 0 < premise.delta < statement.delta < 1
    more = certify(history * 2, scope(), eps=2.0)
    assert more.delta > statement.delta
    personal = Round(mechanism=Personalized(kind="rr", eps_locals=(0.2, 0.4) * 30), participation=Everyone())
    assert max(certify([personal], scope(), eps=0.2).per_user) <= 0.2
    assert certify([personal], scope(), eps=0.5).delta == 0, "the local guarantee"


def test_edges_of_a_fixed_eps():
    assert bound([], eps=1.0).delta == 0
    assert bound([laplace_round(20, 0.1)], eps=2.0 * (1 + 1e-9)).delta == 0
    assert bound(rounds(1, std=0.0), eps=3.0).delta == 1
    assert bound(HISTORIES["shuffled samples"], eps=0.0).delta > 1e-3
    history = [Round(mechanism=NonPrivate(reason="no noise"), participation=Everyone())]
    assert bound(history, eps=3.0).delta == 1
    nothing = certify(history, scope(), eps=3.0)
    assert nothing.is_unbounded and nothing.delta == 1
    for wrong in ({}, {"eps": 1.0, "delta": 0.1}):
        with pytest.raises(ValueError, match="exactly one of delta and eps"):
            bound(rounds(1), **wrong)
        with pytest.raises(ValueError, match="exactly one of delta and eps"):
            certify(rounds(1), scope(), **wrong)
    with pytest.raises(ValueError, match="eps >= 0"):
        bound(rounds(1), eps=-1.0)


# ---------------------------------------------------------------- many different rounds


def schedule(count, noises=(1.2, 0.9), probs=(0.05, 0.2)):
    return [
        *itertools.chain(
            *(
                rounds(1, std=std, neighbors=Neighbors.ADD_REMOVE, participation=Poisson(prob=prob))
                for std, prob in zip(np.linspace(*noises, count), np.linspace(*probs, count), strict=True)
            )
        )
    ]


def test_many_different_rounds_lose_little_by_a_coarser_grid(monkeypatch):
    """Against the same rounds on a grid eight times finer."""
    history = schedule(8)
    ours = accountants.privacy_loss(exposures_of(history)).eps(DELTA)
    grid = accountants._grid_interval(exposures_of(history))
    assert grid > 1e-3
    monkeypatch.setattr(accountants, "_grid_interval", lambda paid: grid / 8)
    finer = accountants.privacy_loss(exposures_of(history)).eps(DELTA)
    assert finer * (1 - 1e-9) <= ours <= finer * 1.001


def test_many_small_rounds_get_a_finer_grid():
    history = schedule(6, noises=(30.0, 20.0), probs=(0.01, 0.02))
    assert accountants._grid_interval(exposures_of(history)) < 1e-4
    few = schedule(4, noises=(30.0, 20.0), probs=(0.01, 0.02))
    assert accountants._grid_interval(exposures_of(few)) < 2e-5, "what is lost in a round on a small sample is little"
    few = schedule(4, noises=(30.0, 20.0), probs=(0.4, 0.5))
    assert accountants._grid_interval(exposures_of(few)) == 1e-4


def test_different_rounds_are_composed_in_any_order():
    history = schedule(7)
    ours = bound(history, delta=DELTA).eps
    assert bound(history[::-1], delta=DELTA).eps == pytest.approx(ours, rel=1e-6)
    assert bound(history + history[:2], delta=DELTA).eps > ours
    statement = certify(history + schedule(2, probs=(0.5, 0.6)), scope(Neighbors.ADD_REMOVE), delta=DELTA)
    assert statement.premises == (), "too many to tell one by one"


@pytest.mark.soak
def test_noise_is_calibrated_by_the_smallest_bound():
    """The noise that exhausts eps = 8 over all accountants is that of privacy-loss distributions, to 1 %."""
    row = GOLDEN["geyer_noise_multipliers"][1]

    def eps_of(noise):
        event = rounds(
            row["rounds"], std=noise, neighbors=Neighbors.ADD_REMOVE, participation=Poisson(prob=row["prob"])
        )
        return compose.bound(event, delta=row["delta"]).eps

    noise = smallest_noise(eps_of, eps=8.0, tolerance=9e-3)
    assert noise == pytest.approx(row["privacy_loss"], rel=0.01)


@pytest.mark.parametrize(
    ("eps", "delta"), [(math.nan, 0.5), (-1e-9, 0.5), (0.5, math.nan), (0.5, -1e-9), (0.5, 1.5), (-math.inf, 0.0)]
)
def test_an_answer_that_is_no_guarantee_is_none(eps, delta):
    """Either number alone is reason enough: a bound that overflowed somewhere must not be the smallest."""
    with pytest.raises(NotApplicable, match="gives no number here"):
        compose._note_delta_spent(Bound(eps=eps, delta=delta, proof=Proof(missing="nothing")), None)
    largest = Bound(eps=math.inf, delta=1.0, proof=Proof(missing="nothing"))
    assert compose._note_delta_spent(largest, None) == largest
