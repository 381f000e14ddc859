"""Bounds from counting: they err as often as they say, they see what each view sees, and they repeat."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from scipy.stats import binom, binomtest

from dovetail import audit as audits
from dovetail.audit import runs
from dovetail.audit.runs.games import Game, TrialView, neighboring_worlds, sample_row_mask
from dovetail.audit.runs.scores import scores_of_trials
from dovetail.events import FixedSize
from dovetail.guarantee import quotes
from dovetail.statements import Neighbors, Trust


def games_of(name, *, num_users=10, dim=2, delta=0.01, rounds=1, colluders=0, **chosen):
    plan = audits.attack_terms(name, num_users, dim, delta, chosen=chosen, rounds=rounds, colluders=colluders)
    protocol, cohort = quotes.settle_protocol(name, plan)
    worlds = neighboring_worlds(protocol, cohort, dim, neighbors=protocol.relation, rounds=rounds)
    return [Game(protocol=protocol, cohort=cohort, worlds=pair) for pair in worlds]


def bound_of(name, *, view="analyzer", trust=Trust.SHUFFLE, trials=4000, seed=0, delta=0.01, **more):
    return runs.lower_bound(
        games_of(name, delta=delta, **more),
        view=view,
        trust=trust,
        delta=delta,
        trials=trials,
        confidence=0.95,
        seed=seed,
    )


@pytest.mark.parametrize("confidence", [0.9, 0.95])
@pytest.mark.parametrize(("hit_rate", "alarm_rate", "delta"), [(0.7, 0.3, 0.0), (0.3, 0.05, 0.01), (0.15, 0.02, 0.01)])
def test_a_bound_from_counts_errs_no_more_often_than_it_says(confidence, hit_rate, alarm_rate, delta):
    """All outcomes of 200 trials in either world, with their probabilities: no sampling."""
    trials, outcome = 200, np.arange(201)
    truth = math.log((hit_rate - delta) / alarm_rate)
    chance = np.outer(binom.pmf(outcome, trials, hit_rate), binom.pmf(outcome, trials, alarm_rate))
    bound = runs.eps_from_counts(outcome[:, None], outcome, trials, delta=delta, confidence=confidence)
    assert chance[bound > truth].sum() <= 1 - confidence
    assert chance[bound > truth].sum() > 0  # and a bound that is never wrong would be too careful to be of use
    assert chance[bound > 0.5 * truth].sum() > 0.1


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize(("hits", "alarms"), [(70, 3), (100, 0), (55, 50)])
def test_both_ends_are_clopper_and_pearsons(confidence, hits, alarms):
    """Each is wrong with half of what the bound may be wrong with."""
    low = binomtest(hits, 100).proportion_ci(confidence_level=confidence, method="exact").low
    high = binomtest(alarms, 100).proportion_ci(confidence_level=confidence, method="exact").high
    found = float(runs.eps_from_counts(hits, alarms, 100, delta=0.01, confidence=confidence))
    assert found == pytest.approx(math.log((low - 0.01) / high), abs=1e-9)


def test_extreme_counts_give_sound_bounds():
    bound = lambda hits, alarms: float(  # noqa: E731
        runs.eps_from_counts(hits, alarms, 100, delta=0.01, confidence=0.95)
    )
    assert bound(0, 0) == 0
    assert bound(100, 100) <= 0
    assert 3 < bound(100, 0) < math.log(100)


def test_the_same_seed_gives_the_same_bound():
    first, again, other = (bound_of("binary_sum", dim=1, trials=1000, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.eps != other.eps


def test_colluders_lend_the_analyzer_their_eyes():
    alone = bound_of("ss_simple", eps_local=1.0, trials=2000)
    helped = bound_of("ss_simple", eps_local=1.0, colluders=7, trials=2000)
    assert helped.eps > 1.5 * alone.eps


def test_shuffler_and_analyzer_together_find_the_local_eps():
    finding = bound_of("ss_simple", view="colluding", eps_local=1.0, delta=1e-9, trials=5000)
    assert 1.7 < finding.eps <= 2.0


def test_the_median_of_norms_shows_in_the_noise_of_the_running_code():
    finding = bound_of("dp_fl", trust=Trust.CURATOR, num_users=11, dim=200, clip="median")
    assert finding.eps > 5


def test_a_sample_hides_as_much_as_it_says():
    """Of 10 users 2 are drawn: what is left of the loss is far below that of a user who is always there."""
    always = bound_of("dp_fl", trust=Trust.CURATOR, noise_multiplier=1.0)
    drawn = FixedSize(size=2, population=10)
    settings = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    plan = quotes.Terms(num_users=2, dim=2, delta=0.01, participation=drawn, settings=settings)
    protocol, cohort = quotes.settle_protocol("dp_fl", plan)
    worlds = neighboring_worlds(protocol, cohort, 2, neighbors=protocol.relation)
    sampled = runs.lower_bound(
        [Game(protocol=protocol, cohort=cohort, worlds=pair) for pair in worlds],
        view="analyzer",
        trust=Trust.CURATOR,
        delta=0.01,
        trials=4000,
        confidence=0.95,
        seed=0,
    )
    assert 0.3 < sampled.eps < always.eps - 1


@pytest.mark.parametrize("wrong", [{"trials": 5}, {"confidence": 1.0}])
def test_bad_input_is_refused(wrong):
    settings = {"trials": 100, "confidence": 0.95, **wrong}
    with pytest.raises(ValueError, match="expected"):
        runs.lower_bound(games_of("dp_fl"), view="analyzer", trust=Trust.CURATOR, delta=0.01, seed=0, **settings)


@pytest.mark.soak
def test_false_alarms_are_as_rare_as_the_confidence_says():
    """200 audits of reports whose eps is exactly 1: at most as many above it as Bin(200, .05) has at alpha 1e-3."""
    alarms = 0
    games = games_of("ldp_fl", dim=1, randomizer="laplace", clip_value=1.0, eps_local=1.0)
    for seed in range(200):
        bound = runs.lower_bound(
            games, view="analyzer", trust=Trust.LOCAL, delta=0.0, trials=4000, confidence=0.95, seed=1000 * seed
        )
        alarms += bound.eps > 1.0
    assert alarms <= binom.isf(1e-3, 200, 0.05)


def test_a_subject_has_no_more_records_than_its_caps_allow():
    settings = {"items_per_subject": 8, "noise_multiplier": 1.0, "batch": 5.0, "sampling_rate": 0.5}
    for caps, name, rows in (
        ({}, "central_sub", 8),
        ({"items_per_user": 1, "users_per_subject": 1}, "central_sub", 1),
        ({"items_per_user": 2}, "local_sub", 2),
        ({"items_per_user": 2, "users_per_subject": 3}, "central_sub", 6),
    ):
        game = games_of(name, **settings, **caps)[0]
        assert game.worlds.victim.shape[2] == rows


@pytest.mark.parametrize(("name", "view", "colluders"), [("ss_double", "colluding", 0), ("ss_topk", "analyzer", 3)])
def test_whole_messages_are_seen_in_every_view(name, view, colluders):
    chosen = {"k": 2} if name == "ss_topk" else {"beta": 0.5}
    more = {"dim": 4, "num_users": 8, "published": True, "pad_to": 8, "eps_local": 1.0, **chosen}
    found = bound_of(name, view=view, colluders=colluders, trials=200, **more)
    assert found.eps > 0


def test_a_score_that_is_no_number_still_tells_the_worlds_apart():
    first, second = np.full(100, np.nan), np.zeros(100)
    cut = runs._best_cut(np.where(np.isnan(first), np.inf, first), second, 0.01, 0.95)
    assert cut.promise > 3
    assert np.isfinite(cut.threshold) or cut.threshold == np.inf


@pytest.mark.parametrize("seed", range(20))
def test_laws_that_are_far_apart_are_told_apart_in_every_counted_trial(seed):
    scores = np.random.default_rng(seed).normal([[10], [-10]], size=(2, 24))
    found = runs.lower_bound_from_scores({"score": scores}, delta=1e-5, confidence=0.95)
    assert found.eps == runs.eps_from_counts(12, 0, 12, delta=1e-5, confidence=0.95)


def removed_from_shares():
    return audits.attack_terms(
        *("split_and_mix", 12, 1, 0.01), chosen={"noise_multiplier": 1.0}, neighbors=Neighbors.ADD_REMOVE
    )


def test_a_user_removed_from_a_sum_of_shares_uploads_zero():
    protocol, cohort = quotes.settle_protocol("split_and_mix", removed_from_shares())
    (game,) = neighboring_worlds(protocol, cohort, 1, neighbors=Neighbors.ADD_REMOVE)
    np.testing.assert_array_equal(game.victim[1], 0)


@pytest.mark.soak
def test_a_user_removed_from_a_sum_of_shares_is_told_apart_by_no_count():
    found = audits.audit("split_and_mix", removed_from_shares(), trials=3000)
    assert found.certified.neighbors is Neighbors.ADD_REMOVE
    assert 0.2 * found.certified.eps < found.bound.eps <= found.certified.eps
    counted = [bound for bound in (found.bound, *found.others) if bound.trials]
    assert counted[0].eps <= found.certified.eps


def test_own_reports_are_attacked_exactly_under_the_relation_that_they_were_written_for():
    plan = audits.attack_terms(*("split_and_mix", 12, 1, 0.01), chosen={"noise_multiplier": 1.0})
    assert audits.audit("split_and_mix", plan, view="colluding", trials=0).exact_attacks
    plan = dataclasses.replace(plan, neighbors=Neighbors.ADD_REMOVE)
    assert not audits.audit("split_and_mix", plan, view="colluding", trials=0).exact_attacks


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_changes_are_looked_at_from_two_rounds_on(rounds):
    moves = np.arange(4 * rounds * 3.0).reshape(4, rounds, 3) ** 2
    worlds = SimpleNamespace(direction=np.ones((rounds, 3)))
    game = SimpleNamespace(rounds=rounds, knows_likelihood=False, worlds=worlds)
    shown = {**dict.fromkeys(TrialView._fields), "own": moves, "estimate": 2 * moves, "state": moves[:, :, :1]}
    found = scores_of_trials(game, TrialView(**shown), view="colluding", trust=Trust.LOCAL)
    reports = [found.get(f"change of the {what}") for what in ("victim's reports", "estimate")]
    assert [one is not None for one in reports] == [rounds > 1] * 2
    if rounds > 1:
        expected = -(np.diff(moves, axis=1) ** 2).sum(axis=(1, 2))
        np.testing.assert_allclose(reports, [expected, 4 * expected])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_sample_of_fixed_size_has_that_size_and_takes_every_row_alike(size):
    keys = jax.random.split(jax.random.key(3), 2_000)
    masks = np.asarray(jax.vmap(lambda key: sample_row_mask(FixedSize(size=size, population=7), 7, key=key))(keys))
    assert (masks.sum(axis=1) == size).all()
    assert np.abs(masks.mean(axis=0) - size / 7).max() < 5 * math.sqrt(0.25 / len(masks))
