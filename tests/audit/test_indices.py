"""What the shuffler learns from indices: exact rates, brute force at tiny dimensions, and what must not be learned."""

import itertools
import json
import math

import jax
import numpy as np
import pytest
from scipy.stats import binom, binomtest

from dovetail.audit import indices
from dovetail.audit.indices import (
    KNOWLEDGE,
    Population,
    audit_indices,
    best_coordinates,
    claimed_nu,
    noiseless_updates,
    posterior_if_reported,
    score_coordinates,
)
from dovetail.claims import flame
from dovetail.events import Everyone
from dovetail.protocols import Cohort
from dovetail.protocols.flame.ss_topk import SsTopk
from dovetail.statements import NotApplicable

DIM, K, USERS = 40, 2, 1200
KEY = jax.random.key(0)


def topk(decoys, *, k=K, **more):
    return SsTopk(k=k, decoys=decoys, clip_value=1.0, eps_local=0.5, pad_to=USERS, **more)


def updates_of(sets, dim, *, rounds=1):
    """Updates that are large on these sets of coordinates, and nowhere else."""
    x = np.zeros((len(sets), rounds, dim), np.float32)
    for user, chosen in enumerate(sets):
        x[user][:, list(chosen)] = 1.0
    return x


@pytest.fixture(scope="module")
def audit():
    return audit_indices(topk(8), Population(users=USERS, dim=DIM), rounds=(1, 10), key=KEY)


def test_a_reported_index_is_one_of_the_largest_as_often_as_flame_says(audit):
    attack = audit.attack_with("uniform", 1)
    assert attack.success == pytest.approx(1 / 5, rel=1e-12)
    assert binomtest(attack.hits, attack.trials, 1 / 5).pvalue > 1e-3  # alpha of the accepting side
    for wrong in (2 / 7, 2 / 15):
        assert binomtest(attack.hits, attack.trials, wrong).pvalue < 1e-3
    assert attack.prior_success == pytest.approx(K / DIM)
    assert attack.amplification == pytest.approx(audit.nu) == pytest.approx(4.0)
    assert attack.verdict == attack.verdict_own_prior == "holds"


def test_whoever_knows_the_population_refutes_the_claim_in_one_round(audit):
    attack = audit.attack_with("population", 1)
    assert attack.lower / attack.beta > audit.nu
    assert attack.verdict == audit.verdict == "refuted"
    assert attack.success > attack.prior_success > attack.beta


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_more_rounds_tell_more(audit, knowledge):
    one, ten = audit.attack_with(knowledge, 1), audit.attack_with(knowledge, 10)
    assert ten.lower > one.success
    assert ten.lower > 0.8


def test_ten_rounds_refute_the_claim_even_where_no_coordinate_is_more_popular():
    flat = audit_indices(topk(8), Population(users=400, dim=DIM, scale_exponent=0.0), key=KEY)
    assert {attack.verdict for attack in flat.attacks if attack.rounds == 1} == {"holds"}
    assert {attack.verdict_own_prior for attack in flat.attacks if attack.rounds == 10} == {"refuted"}


def test_nothing_is_learned_where_everything_is_reported():
    everything = audit_indices(topk(DIM - K), Population(users=100, dim=DIM), rounds=(1, 3), key=KEY)
    assert everything.nu == everything.nu_any_prior == 1
    for attack in everything.attacks:
        assert attack.gain_over_prior == 1
        assert attack.chance == pytest.approx(attack.success, rel=1e-12)
    assert everything.verdict_own_prior == "holds"
    assert not any(inequality.is_violated for inequality in everything.inequalities if inequality.prior == "own")


def test_one_round_gives_everything_away_where_users_are_of_kinds():
    """Four kinds of users, each with coordinates of its own: the report tells the kind, the kind the coordinates."""
    rng = np.random.default_rng(0)
    first = 16 * (np.arange(400) % 4)
    sets = [{kind} | set(kind + rng.choice(np.arange(1, 16), 11, replace=False)) for kind in first]
    found = audit_indices(topk(24, k=12), updates_of(sets, 64), rounds=(1,), key=KEY)
    alone, alike = found.attack_with("population", 1), found.attack_with("similar users", 1)
    assert alike.lower > 0.95 > 0.6 > alone.success
    assert (alone.verdict_own_prior, alike.verdict_own_prior) == ("holds", "refuted")
    assert alike.success / alike.chance > found.nu_any_prior  # which is for an index seen by itself


def test_the_bound_is_clopper_pearson_over_all_attacks(audit):
    error = (1 - audit.confidence) / (2 * len(audit.attacks))
    for attack in audit.attacks:
        exact = binomtest(attack.hits, attack.trials, alternative="greater").proportion_ci(1 - error, "exact").low
        assert attack.lower == pytest.approx(exact, rel=1e-6)
        assert attack.lower <= exact
        assert attack.chance < attack.chance_upper


@pytest.mark.parametrize("truth", [0.01, 0.2, 0.5, 0.97])
def test_the_lower_bound_exceeds_the_truth_as_seldom_as_it_says(truth):
    trials, error = 60, 0.05
    bounds = [indices._success_lower_bound(np.arange(trials) < hits, error) for hits in range(trials + 1)]
    above = [binom.pmf(hits, trials, truth) for hits, bound in enumerate(bounds) if bound > truth]
    assert math.fsum(above) <= error


def brute_force(law, dim, decoys):
    """Pr[j is among the k largest | j is reported] by listing every set and every choice of decoys."""
    top, reported = np.zeros(dim), np.zeros(dim)
    for chosen, weight in law.items():
        choices = list(itertools.combinations(sorted(set(range(dim)) - set(chosen)), decoys))
        for choice in choices:
            top[list(chosen)] += weight / len(choices)
            reported[[*chosen, *choice]] += weight / len(choices)
    return top / reported


def test_the_posterior_is_exact_for_any_law():
    dim, k = 5, 2
    rng = np.random.default_rng(1)
    for decoys in (1, 2, 3):
        sets = list(itertools.combinations(range(dim), k))
        law = dict(zip(sets, rng.dirichlet(np.full(len(sets), 0.3)), strict=True))
        prior = np.array([sum(weight for chosen, weight in law.items() if j in chosen) for j in range(dim)])
        exact, rate = brute_force(law, dim, decoys), decoys / (dim - k)
        np.testing.assert_allclose(posterior_if_reported(prior, decoy_rate=rate), exact, rtol=1e-12)
        assert np.all(exact <= prior / rate * (1 + 1e-12))
        assert np.all(1 - prior <= (1 - exact) / rate * (1 + 1e-12))


def test_one_round_is_guessed_as_brute_force_would():
    """Every report of a tiny user: the best guess is the reported index of highest exact posterior."""
    dim, decoys = 5, 2
    others = [(0, 1), (0, 1), (0, 2), (0, 3), (1, 2), (2, 4), (0, 1)]
    counted = {chosen: others.count(chosen) / len(others) for chosen in others}
    exact = brute_force(counted, dim, decoys)
    learned = updates_of(others, dim) > 0
    reports = [list(report) for report in itertools.combinations(range(dim), 2 + decoys)]
    reported = np.stack([np.isin(np.arange(dim), report) for report in reports])[:, None]
    best = best_coordinates(score_coordinates("population", learned, reported, decoys / (dim - 2)))
    for row, report in zip(best, reports, strict=True):
        assert list(np.flatnonzero(row)) == [max(report, key=lambda j: exact[j])]


def test_rounds_are_combined_by_their_likelihood():
    """Two rounds by hand, for users who keep three quarters of what they had."""
    dim, k, rate = 8, 2, 0.5
    before, after = [(0, 1), (0, 2), (1, 2), (0, 3)] * 50, [(0, 1), (0, 2), (1, 4), (0, 5)] * 50
    learned = np.concatenate([updates_of(before, dim), updates_of(after, dim)], axis=1) > 0
    reported = np.ones((1, 2, dim), bool)
    reported[0, 0, [1, 4]] = False
    found = score_coordinates("population", learned, reported, rate)[0]
    prior = (np.mean(learned[:, 1], axis=0) * 200 + k / dim) / 201
    stays = (300 + k / dim) / 401
    comes = (1 - stays) * k / (dim - k)
    yes, no = (stays + (1 - stays) * rate) / (comes + (1 - comes) * rate), (1 - stays) / (1 - comes)
    expected = np.log(prior / (1 - prior)) + np.log(np.where(reported[0, 0], yes, no))
    np.testing.assert_allclose(found - found[0], expected - expected[0], atol=1e-9)


def test_both_inequalities_by_hand():
    """Coordinate 0 is among everybody's two largest, the second is 1, 2 or 3 for a half, a quarter, a quarter."""
    sets = [(0, 1), (0, 1), (0, 2), (0, 3)] * 10
    found = audit_indices(topk(3), updates_of(sets, 8), rounds=(1,), key=KEY)
    rate, beta, nu = 3 / 6, 2 / 8, 8 / 5
    after = {pi: pi / (pi + (1 - pi) * rate) for pi in (0.5, 0.25)}
    worst = {(inequality.number, inequality.prior): inequality for inequality in found.inequalities}
    assert worst[1, "beta"].worst == pytest.approx(1 / beta)
    assert worst[2, "beta"].worst == math.inf
    assert worst[1, "own"].worst == pytest.approx(after[0.25] / 0.25) == pytest.approx(nu)
    assert worst[2, "own"].worst == pytest.approx(0.5 / (1 - after[0.5]))
    assert [worst[1, "beta"].is_violated, worst[1, "own"].is_violated, worst[2, "own"].is_violated] == [
        True,
        False,
        False,
    ]
    assert (worst[2, "beta"].share, worst[2, "own"].share) == (1.0, 0.0)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [row["worst"] for row in data["inequalities"] if row["fails"]] == [pytest.approx(4.0), None]
    assert data["verdict"] == found.verdict


def test_nobody_who_is_attacked_is_learned_from():
    """Users with coordinates of their own: the others tell nothing about them."""
    found = audit_indices(
        topk(2), updates_of([(2 * user, 2 * user + 1) for user in range(20)], 40), rounds=(1,), key=KEY
    )
    attack = found.attack_with("population", 1)
    assert attack.prior_success == 0
    assert attack.gain_over_prior == math.inf
    assert attack.to_json()["gain"] is None


def test_neither_messages_that_travel_whole_nor_chunks_change_what_is_seen(monkeypatch):
    users = Population(users=20, dim=DIM)
    whole = audit_indices(topk(8, linkage="vector"), users, rounds=(2,), key=KEY)
    monkeypatch.setattr(indices, "_CHUNK_VALUES", 7 * 2 * DIM)
    assert whole == audit_indices(topk(8), users, rounds=(2,), key=KEY)


@pytest.mark.parametrize(("dim", "top", "decoys"), [(7850, 157, 2355), (7850, 157, 157), (7850, 157, 7693), (10, 5, 5)])
def test_the_claim_is_that_of_theorem_5(dim, top, decoys):
    nu, sent, beta = claimed_nu(dim=dim, top=top, decoys=decoys), (top + decoys) // top, top / dim
    printed = flame.theorem5(num_users=1000, pad_to=1000 * sent * beta * (1 + 1e-12), beta=beta)
    assert nu == pytest.approx(printed.value)


@pytest.mark.parametrize("decoys", [1, 3, 157, 2355, 7693])
def test_no_smaller_claim_has_messages_enough(decoys):
    nu, sent, beta = claimed_nu(dim=7850, top=157, decoys=decoys), (157 + decoys) / 157, 157 / 7850
    assert flame.messages_range(nu=nu, beta=beta)[0].value == pytest.approx(sent)


def test_the_population_has_the_scales_and_the_persistence_that_it_says():
    users = Population(users=4000, dim=3, scale_exponent=0.5, persistence=0.8)
    x = np.asarray(jax.jit(lambda names: users.draw_updates(names, 2, key=KEY))(np.arange(4000)))
    np.testing.assert_allclose(x[:, 0].std(axis=0), np.arange(1, 4) ** -0.5, rtol=0.05)
    kept = [np.corrcoef(x[:, 0, j], x[:, 1, j])[0, 1] for j in range(3)]
    np.testing.assert_allclose(kept, 0.8, atol=0.03)
    assert abs(np.corrcoef(x[:, 0, 0], x[:, 0, 1])[0, 1]) < 0.08


def test_gradients_are_those_of_logistic_regression_from_zero():
    x = noiseless_updates("tiny:TASK", users=20, rounds=2, learning_rate=0.5)
    assert x.shape == (20, 2, 12)
    table = x.reshape(20, 2, 4, 3)
    np.testing.assert_allclose(np.sort(table[:, 0, 3]), [[-1 / 3, -1 / 3, 2 / 3]] * 20, rtol=1e-5)
    np.testing.assert_allclose(table[:, 0].sum(axis=2), 0, atol=1e-6)
    still = noiseless_updates("tiny:TASK", users=20, rounds=2, learning_rate=1e-9)
    np.testing.assert_allclose(still[:, 0], still[:, 1], atol=1e-6)
    assert np.abs(x[:, 0] - x[:, 1]).max() > 1e-3


@pytest.mark.parametrize(
    ("protocol", "updates", "more", "message"),
    [
        (topk(None), np.zeros((8, 1, 16)), {}, "decoys"),
        (topk(15), np.zeros((8, 1, 16)), {}, r"k \+ decoys = 2 \+ 15 is more than the 16 coordinates"),
        (topk(4), np.zeros((8, 16)), {}, "users, rounds, dim"),
        (topk(4), np.zeros((3, 1, 16)), {}, "at least 4 users"),
        (topk(4), np.zeros((8, 1, 16)), {"rounds": (1, 2)}, "in 2 rounds"),
        (topk(4), np.full((8, 1, 16), np.nan), {}, "finite"),
        (topk(4), np.zeros((8, 1, 16)), {"rounds": ()}, "at least one"),
        (topk(4), np.zeros((8, 1, 16)), {"rounds": (0,)}, "rounds >= 1"),
        (topk(4), np.zeros((8, 1, 16)), {"confidence": 1.0}, "confidence"),
    ],
)
def test_what_cannot_be_attacked_is_refused(protocol, updates, more, message):
    with pytest.raises(ValueError, match=message):
        audit_indices(protocol, updates, **{"rounds": (1,), "key": KEY, **more})


def test_without_decoys_nothing_is_claimed():
    with pytest.raises(NotApplicable, match="without decoys"):
        audit_indices(topk(0), np.zeros((8, 1, 16)), rounds=(1,), key=KEY)


@pytest.mark.parametrize("bad", [{"users": 3}, {"dim": 1}, {"persistence": 1.5}, {"scale_exponent": -1.0}])
def test_populations_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Population(**{"users": 10, "dim": 10, **bad})


def test_an_attack_that_was_not_made_is_not_found(audit):
    with pytest.raises(ValueError, match=r"no attack with .* was made after"):
        audit.attack_with("uniform", 5)


@pytest.mark.soak
def test_flames_own_setting():
    """n = 1000, d = 7850, k = 157, l = 16: nu = 3.125 holds for one round under a uniform prior, and nowhere else."""
    cohort = Cohort(participation=Everyone(), size=1000, min_size=1000)
    protocol = SsTopk(
        k=157, decoys=2355, clip_value=0.1, eps_local=0.5, published=True, randomizer="laplace", pad_to=333
    )
    found = audit_indices(protocol.settle(cohort, 7850), Population(users=1000, dim=7850), key=KEY)
    assert found.nu == pytest.approx(3.125)
    assert found.nu_any_prior == pytest.approx(7693 / 2355)
    assert [attack.verdict for attack in found.attacks] == ["holds"] + ["refuted"] * 5
    assert found.attack_with("uniform", 10).lower > 0.9
