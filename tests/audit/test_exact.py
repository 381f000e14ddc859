"""Exact attacks: never above what the whole view allows, never above what is certified, and close to it."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from accounting import enumeration
from scipy.stats import binom

from dovetail import accounting
from dovetail.accounting import gaussian
from dovetail.accounting.releases import subjects
from dovetail.audit import exact
from dovetail.audit.attacks import shows_less_than_event, stronger_attacks
from dovetail.audit.bounds import ExactAttack, best_bound
from dovetail.audit.exact import cells, crowds
from dovetail.events import (
    Disjoint,
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    NonPrivate,
    PaddedBernoulli,
    PaddedTopk,
    Personalized,
    Poisson,
    Report,
    Round,
    SampledSubject,
    Shuffled,
)
from dovetail.guarantee import quotes
from dovetail.statements import Neighbors, NotApplicable

EPS = np.linspace(0.0, 2.5, 26)
BITS = Report(kind="rr", eps_local=1.2)
HIGH = math.exp(1.2) / (1 + math.exp(1.2))
DELTA = 5e-6


def stick(first: np.ndarray, second: np.ndarray, eps: float) -> float:
    return max(float(np.maximum(p - math.exp(eps) * q, 0).sum()) for p, q in ((first, second), (second, first)))


def eps_at(exact_attacks: list[ExactAttack], delta: float) -> float:
    return best_bound([exact_attack.eps(delta=delta) for exact_attack in exact_attacks]).eps


def audited(name: str, plan: quotes.Terms) -> float:
    protocol, cohort = quotes.settle_protocol(name, plan)
    found = stronger_attacks(protocol, cohort, plan.dim)
    mechanism = protocol.view(cohort, plan.dim, neighbors=plan.relation(protocol)).round.mechanism
    if not shows_less_than_event(protocol):
        try:
            found = [*found, *exact.exact_attacks(mechanism, rounds=plan.rounds)]
        except NotApplicable:
            assert found
    return eps_at(found, plan.delta)


def test_one_binary_coordinate_is_the_whole_view():
    table = enumeration.randomized_response(1.2, 2)
    for users in (2, 5):
        worlds = [enumeration.histogram_law([table[x]] + [table[0]] * (users - 1)) for x in (0, 1)]
        worst = enumeration.worst_delta(table, users, EPS)
        (exact_attack,) = exact.exact_attacks(Shuffled(report=BITS, num_users=users))
        for eps, most in zip(EPS, worst, strict=True):
            assert exact_attack.delta(eps=eps) == pytest.approx(stick(*worlds, eps), abs=1e-8)
            assert exact_attack.delta(eps=eps) <= most


def test_colluders_hide_nobody():
    alone = exact.exact_attacks(Shuffled(report=BITS, num_users=4))[0]
    crowd = exact.exact_attacks(Shuffled(report=BITS, num_users=9, colluders=5))[0]
    assert crowd.delta(eps=0.5) == alone.delta(eps=0.5)


def test_two_binary_coordinates_or_rounds_never_show_more_than_both_histograms():
    table = enumeration.randomized_response(1.2, 2)
    one = [enumeration.histogram_law([table[x]] + [table[0]] * 4) for x in (0, 1)]
    both = [np.multiply.outer(law, law).ravel() for law in one]
    for event, rounds in (
        (Shuffled(report=BITS, num_users=5, coordinates=2), 1),
        (Shuffled(report=BITS, num_users=5), 2),
    ):
        exact_attacks = exact.exact_attacks(event, rounds=rounds)
        for eps in EPS:
            found = max(exact_attack.delta(eps=eps) for exact_attack in exact_attacks)
            assert found <= stick(*both, eps)
            assert found == pytest.approx(stick(*both, eps), abs=2e-3), "likelihood ratios of both counts say it all"


def test_several_levels_never_show_more_than_the_histogram():
    report = Report(kind="rr", eps_local=1.2, levels=3)
    table = enumeration.randomized_response(1.2, 3)
    exact_attacks = exact.exact_attacks(Shuffled(report=report, num_users=4))
    worst = enumeration.worst_delta(table, 4, EPS)
    thirds = [enumeration.histogram_law([table[x]] + [table[1]] * 3) for x in (0, 2)]
    for eps, most in zip(EPS, worst, strict=True):
        found = max(exact_attack.delta(eps=eps) for exact_attack in exact_attacks)
        assert stick(*thirds, eps) - 1e-8 <= found <= most
        assert found >= 0.8 * most - 1e-3


def pairs_of_reports(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The law of two messages in any order."""
    both = np.multiply.outer(first, second)
    return np.triu(both + both.T, 1) + np.diag(np.diag(both))


@pytest.mark.parametrize("kind", ["laplace", "clip_laplace"])
def test_real_reports_never_show_more_than_all_pairs_of_cells(kind):
    event = Personalized(kind=kind, eps_locals=(0.8, 2.0))
    family = cells.cells_of_randomizer(kind, narrowest=2.0, widest=0.8)
    (exact_attack,) = exact.exact_attacks(event)
    other = family.masses(0.8, 0.0)
    worlds = [pairs_of_reports(np.float64(family.masses(2.0, x)), np.float64(other)) for x in (1.0, 0.0)]
    for eps in EPS:
        assert exact_attack.delta(eps=eps) <= stick(*worlds, eps) + 1e-12
    assert exact_attack.delta(eps=0.5) > 0.5 * stick(*worlds, 0.5)


def test_personal_budgets_by_enumeration_and_equal_ones_as_one_crowd():
    budgets = (0.4, 1.2, 0.8)
    tables = {budget: enumeration.randomized_response(budget, 2) for budget in budgets}
    (exact_attack, _) = exact.exact_attacks(Personalized(kind="rr", eps_locals=budgets))
    worlds = [enumeration.histogram_law([tables[1.2][x], tables[0.4][0], tables[0.8][0]]) for x in (1, 0)]
    for eps in EPS:
        assert exact_attack.delta(eps=eps) == pytest.approx(stick(*worlds, eps), abs=1e-8)
    for kind in ("rr", "laplace"):
        equal = exact.exact_attacks(Personalized(kind=kind, eps_locals=(0.5,) * 80, coordinates=3, colluders=20))
        crowd = exact.exact_attacks(Shuffled(report=Report(kind=kind, eps_local=0.5), num_users=60, coordinates=3))
        assert eps_at(equal, 1e-5) == pytest.approx(eps_at(crowd, 1e-5), rel=5e-3)


def test_bernoulli_slots_by_enumeration_of_who_reports():
    event = PaddedBernoulli(report=BITS, num_users=3, pad_to=4, inclusion=0.4, coordinates=2)
    bias = {"dummy": 0.5, "low": 1 - HIGH, "high": HIGH}

    def slot(victim: str) -> np.ndarray:
        law = np.zeros(5)
        for who in itertools.product([False, True], repeat=3):
            weight = math.prod(0.4 if here else 0.6 for here in who)
            names = [victim if who[0] else "dummy"] + ["low" if here else "dummy" for here in who[1:]] + ["dummy"]
            ones = np.ones(1)
            for name in names:
                ones = np.convolve(ones, [1 - bias[name], bias[name]])
            law += weight * ones
        return law

    both = [np.multiply.outer(slot(victim), slot(victim)).ravel() for victim in ("high", "low")]
    (exact_attack,) = exact.exact_attacks(event)
    for eps in EPS[:10]:
        assert exact_attack.delta(eps=eps) <= stick(*both, eps)
    summed = [np.convolve(slot(victim), slot(victim)) for victim in ("high", "low")]
    assert exact_attack.delta(eps=0.2) == pytest.approx(stick(*summed, 0.2), abs=1e-8)


def test_slots_that_overflow_with_some_probability_are_charged():
    event = PaddedBernoulli(report=BITS, num_users=6, pad_to=3, inclusion=0.4)
    (exact_attack,) = exact.exact_attacks(event)
    assert exact_attack.slack >= binom.sf(2, 5, 0.4)


@pytest.mark.parametrize(("users", "pad_to", "decoys"), [(300, 60, 20), (300, 60, 1), (80, 60, 190), (40, 39, 379)])
def test_as_many_sit_on_the_victims_coordinates_as_decoys_leave_room_for(users, pad_to, decoys, monkeypatch):
    event = PaddedTopk(report=BITS, num_users=users, coordinates=400, pad_to=pad_to, top=20, decoys=decoys)
    places, others, slots = pad_to - 1, users - 1, 3
    overflow = [
        slots * float(binom.sf(places - sitting, others - sitting, decoys / 380)) for sitting in range(places + 1)
    ]
    fit = [sitting for sitting in range(places) if overflow[sitting] * 1.01 <= crowds._NEGLIGIBLE] or [0]
    asked = itertools.count()

    def sf(*law):
        assert next(asked) < 20, "it halves what is left, and so it ends"
        return binom.sf(*law)

    monkeypatch.setattr(crowds, "binom", SimpleNamespace(sf=sf))
    sitting, slack = crowds._companions_and_overflow_prob(event, places, others, slots)
    assert sitting == fit[-1]
    assert overflow[sitting] <= slack <= overflow[sitting] * 1.02


def test_full_slots_by_enumeration_of_drops():
    event = PaddedTopk(report=BITS, num_users=5, pad_to=2, coordinates=2, top=1, decoys=0)

    def slot(bits: list[float]) -> np.ndarray:
        """The law of the number of ones among two reports that are kept of these."""
        law, kept = np.zeros(3), list(itertools.combinations(range(len(bits)), 2))
        for chosen in kept:
            ones = np.ones(1)
            for index in chosen:
                ones = np.convolve(ones, [1 - bits[index], bits[index]])
            law += ones / len(kept)
        return law

    low, high = 1 - HIGH, HIGH
    first = np.multiply.outer(slot([low, low, high]), slot([high, high])).ravel()
    second = np.multiply.outer(slot([low, low]), slot([high, high, low])).ravel()
    exact_attack = next(exact_attack for exact_attack in exact.exact_attacks(event) if "full" in exact_attack.attack)
    ones = np.add.outer(np.arange(3), np.arange(3)).ravel()
    summed = [np.bincount(ones, law) for law in (first, second)]
    for eps in EPS:
        assert exact_attack.delta(eps=eps) == pytest.approx(stick(*summed, eps), abs=1e-8)
        assert exact_attack.delta(eps=eps) <= stick(first, second, eps) + 1e-12


def test_gaussian_and_laplace_noise_against_closed_forms():
    event = Gaussian(std=2.0, sensitivity=1.0, neighbors=Neighbors.REPLACE_ONE)
    for rounds in (1, 16):
        found = eps_at(exact.exact_attacks(event, rounds=rounds), 1e-6)
        assert found <= gaussian.eps_of(0.5 * math.sqrt(rounds), delta=1e-6)
        assert found == pytest.approx(gaussian.eps_of(0.5 * math.sqrt(rounds), delta=1e-6), rel=1e-4)
    assert exact.exact_attacks(event)[0].eps(delta=0).is_unbounded
    silent = Gaussian(std=0.0, sensitivity=1.0, neighbors=Neighbors.REPLACE_ONE)
    assert exact.exact_attacks(silent)[0].eps(delta=0.9).is_unbounded
    one = exact.exact_attacks(Laplace(scale=0.5, sensitivity=1.0, count=1, neighbors=Neighbors.REPLACE_ONE))
    for delta in (1e-6, 0.1):
        assert eps_at(one, delta) == pytest.approx(2 + 2 * math.log1p(-delta), rel=1e-4)
    many = exact.exact_attacks(
        Laplace(scale=10.0, sensitivity=1.0, count=50, neighbors=Neighbors.REPLACE_ONE), rounds=2
    )
    assert many[0].eps(delta=0).eps == pytest.approx(10.0, rel=1e-6)


@pytest.mark.parametrize(
    ("items", "rate", "rounds"), [(1, 0.3, 1), (3, 0.05, 40), (2, 1.0, 4)], ids=["one", "several", "always"]
)
def test_sampled_items_come_close_to_the_accountant_and_never_above(items, rate, rounds):
    event = SampledSubject(std=2.0, clip_norm=1.0, items=items, prob_item=rate)
    certified = subjects.eps(event, rounds=rounds, delta=1e-5).eps
    found = eps_at(exact.exact_attacks(event, rounds=rounds), 1e-5)
    assert 0.99 * certified <= found <= certified


def test_items_at_several_users_with_noise_of_their_own():
    spread = SampledSubject(std=2.0, clip_norm=1.0, items=3, prob_item=0.2, users_spanned=3, noise="user", steps=4)
    found = eps_at(exact.exact_attacks(spread), 1e-5)
    assert 0 < found <= subjects.eps(spread, rounds=1, delta=1e-5).eps
    drawn = SampledSubject(std=2.0, clip_norm=1.0, items=2, prob_item=0.2, prob_user=0.5, alone=True)
    assert eps_at(exact.exact_attacks(drawn), 1e-5) == pytest.approx(
        subjects.eps(drawn, rounds=1, delta=1e-5).eps, rel=0.01
    )
    with pytest.raises(NotApplicable, match="drawn first"):
        exact.exact_attacks(SampledSubject(std=2.0, clip_norm=1.0, items=2, prob_item=0.2, prob_user=0.5, steps=2))


def test_what_is_not_known_is_refused():
    with pytest.raises(NotApplicable, match="generic"):
        exact.exact_attacks(Shuffled(report=Report(kind="generic", eps_local=1.0), num_users=10))
    with pytest.raises(NotApplicable, match="without a guarantee"):
        exact.exact_attacks(NonPrivate(reason="no noise"))
    with pytest.raises(NotApplicable, match="overflow as a rule"):
        exact.exact_attacks(PaddedBernoulli(report=BITS, num_users=5000, pad_to=10, inclusion=0.9))
    with pytest.raises(ValueError, match="rounds"):
        exact.exact_attacks(Shuffled(report=BITS, num_users=10), rounds=0)


def plan(*, num_users=1000, dim=7850, delta=DELTA, rounds=1, **settings):
    return quotes.Terms(num_users=num_users, dim=dim, delta=delta, rounds=rounds, settings=settings)


def removing(terms):
    return dataclasses.replace(terms, neighbors=Neighbors.ADD_REMOVE)


CASES = {
    "ss_simple": ("ss_simple", plan(eps_local=0.01), 0.97),
    "ss_simple, laplace": ("ss_simple", plan(eps_local=0.1, dim=50, num_users=200, randomizer="laplace"), 0.95),
    "ss_simple, rounds": ("ss_simple", plan(eps_local=0.5, dim=10, num_users=200, rounds=2), 0.6),
    "ss_double": ("ss_double", plan(beta=0.02, eps_local=0.5, pad_to=333), 0.97),
    "ss_double, fixed k": ("ss_double", plan(beta=0.02, eps_local=0.5, pad_to=333, inclusion="fixed-k"), 0.1),
    "ss_topk": ("ss_topk", plan(k=157, eps_local=0.5), 0.85),
    "ss_topk, surplus dropped": ("ss_topk", plan(k=157, eps_local=0.5, pad_to=333, decoys=0), 0.85),
    "binary_sum": ("binary_sum", plan(dim=1, eps_local=1.0), 0.8),
    "real_sum, single": ("real_sum", plan(dim=1, eps_local=4.0, levels=5), 0.95),
    "real_sum, unary": ("real_sum", plan(dim=1, eps_local=1.0, method="unary"), 0.7),
    "real_sum, split": ("real_sum", plan(dim=1, method="split", noise_multiplier=5.0), 0.85),
    "privunit": ("privunit", plan(eps_local=2.0, dim=1000), 0.6),
    "apes": ("apes", plan(num_users=40, dim=2, delta=1e-4, budgets=[0.3, 1.0]), 0.4),
    "s_apes": ("s_apes", plan(num_users=40, dim=2, delta=1e-4, budgets=[0.3, 1.0], keep=0.5), 0.1),
    "unis": ("unis", plan(num_users=20, dim=1, delta=1e-4, budgets=[0.3, 1.0]), 0.4),
    "split_and_mix": ("split_and_mix", plan(dim=100, noise_multiplier=8.0), 0.85),
    "split_and_mix, removed": ("split_and_mix", removing(plan(dim=100, noise_multiplier=4.0)), 0.85),
    "secagg": ("secagg", plan(dim=100, noise_multiplier=8.0), 0.85),
    "secagg, aggregators' noise": (
        "secagg",
        plan(dim=100, num_users=5, noise_multiplier=8.0, noise="aggregators"),
        0.85,
    ),
    "secagg, removed": ("secagg", removing(plan(dim=100, noise_multiplier=4.0)), 0.85),
    "dp_fl, removed": ("dp_fl", removing(plan(noise_multiplier=5.0, rounds=10)), 0.999),
    "dp_fl": ("dp_fl", plan(noise_multiplier=5.0, rounds=10), 0.999),
    "dp_fl, adaptive": ("dp_fl", plan(noise_multiplier=5.0, clip="adaptive"), 0.999),
    "ldp_fl": ("ldp_fl", plan(noise_multiplier=5.0, clip_norm=1.0), 0.999),
    "ldp_fl, laplace": ("ldp_fl", plan(randomizer="laplace", eps_local=0.01, clip_value=1.0, dim=100), 0.999),
    "central_sub": (
        "central_sub",
        plan(items_per_subject=3, sampling_rate=0.01, noise_multiplier=1.0, rounds=20),
        0.99,
    ),
    "local_sub": ("local_sub", plan(items_per_subject=2, sampling_rate=0.1, noise_multiplier=2.0, steps=3), 0.5),
    "pldp": ("pldp", plan(dim=10, budgets=[0.05, 1.0]), 0.999),
    "pldp, many coordinates": ("pldp", plan(dim=500, num_users=10, budgets=[0.05, 1.0]), 0.9),
    "ldp_min": ("ldp_min", plan(dim=10, budgets=[0.05, 1.0]), 0.999),
}


FLAME = {"ss_simple": 0.09028, "ss_double": 0.16034, "ss_topk": 0.7617, "ss_topk, surplus dropped": 2.0247}


@pytest.mark.parametrize(("name", "asked", "least"), CASES.values(), ids=CASES)
def test_certified_is_never_below_the_exact_lower_bound_and_not_far_above(name, asked, least):
    certified = quotes.quote(name, asked).certified.eps
    found = audited(name, asked)
    assert found <= certified
    assert found >= least * certified
    golden = [eps for label, eps in FLAME.items() if CASES[label] == (name, asked, least)]
    assert not golden or found == pytest.approx(golden[0], rel=1e-3)


@pytest.mark.soak
def test_ten_thousand_different_budgets_within_memory_and_time():
    event = Personalized(kind="clip_laplace", eps_locals=tuple(np.linspace(0.05, 1, 10_000)), coordinates=7850)
    found = eps_at(exact.exact_attacks(event), 3.6e-5)
    assert found == pytest.approx(1.872, rel=1e-2)
    assert found < 4.29


def gaussian_rounds(stds, participations):
    return [
        Round(mechanism=Gaussian(std=std, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE), participation=participation)
        for std, participation in zip(stds, participations, strict=True)
    ]


@pytest.mark.parametrize(
    ("stds", "probs"),
    [((1.0,) * 20, (0.1,) * 20), ((0.8, 1.0, 1.5), (0.05, 0.2, 0.5)), ((2.0, 2.0), (1.0, 1.0))],
    ids=["alike", "different", "always"],
)
def test_poisson_rounds_come_close_to_the_accountant_and_never_above(stds, probs):
    rounds = gaussian_rounds(stds, [Poisson(prob=prob) for prob in probs])
    certified = accounting.bound(rounds, delta=1e-5).eps
    found = eps_at(exact.exact_attacks_on_rounds(rounds), 1e-5)
    assert 0.98 * certified <= found <= certified


def test_a_training_is_attacked_in_every_round_that_a_user_is_in():
    stds = (3.0,) * 6
    everyone = gaussian_rounds(stds, [Everyone()] * 6)
    two_epochs = gaussian_rounds(stds, [Disjoint(epoch=i // 3) for i in range(6)])
    for rounds in (everyone, two_epochs):
        certified = accounting.bound(rounds, delta=1e-5).eps
        assert 0.98 * certified <= eps_at(exact.exact_attacks_on_rounds(rounds), 1e-5) <= certified
    assert eps_at(exact.exact_attacks_on_rounds(two_epochs), 1e-5) < eps_at(
        exact.exact_attacks_on_rounds(everyone), 1e-5
    )


@pytest.mark.parametrize(
    ("rounds", "why"),
    [
        ([], "nothing was released"),
        (gaussian_rounds((1.0, 2.0), [Everyone()] * 2), "differ from each other"),
        (gaussian_rounds((1.0,), [FixedSize(size=5, population=10)]), "this kind of participation"),
        (gaussian_rounds((1.0, 1.0), [Everyone(), Poisson(prob=0.5)]), "this kind of participation"),
        ([Round(mechanism=Shuffled(report=BITS, num_users=10), participation=Poisson(prob=0.5))], "Gaussian sums"),
    ],
)
def test_trainings_that_no_attack_is_known_on_are_refused(rounds, why):
    with pytest.raises(NotApplicable, match=why):
        exact.exact_attacks_on_rounds(rounds)
