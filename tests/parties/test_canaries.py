"""Deployed rounds under attack: below the certificate as they are, above it when a party is sabotaged."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from grids import later

from dovetail.audit.runs import lower_bound_from_scores
from dovetail.parties.aggregator.party import Aggregator
from dovetail.parties.canaries import CanaryRounds
from dovetail.parties.common.sharing import PlainSharing

DELTA, CONFIDENCE = 1e-5, 0.95
USERS = {"clip_norm": 1.0, "noise_multiplier": 16.0}
AGGREGATORS = {**USERS, "noise": "aggregators"}
COUNTS = {"clip_value": 1.0, "eps_local": 0.1}
CASES = {"noise of users": ("secagg", USERS), "noise of aggregators": ("secagg", AGGREGATORS)}
CASES["counts"] = ("ss_simple", COUNTS)
ENOUGH = 24  # trials in each world: half of them counted refute eps 1 if the attack never errs


def attacked(protocol, settings, trials, *, users=4, sabotage=lambda canaries: None):
    """The certified eps of a round, and the lower bound from so many trials in each world."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        canaries = CanaryRounds(Path(folder), protocol, settings, dim=4, users=users, delta=DELTA, trials=2 * trials)
        sabotage(canaries)
        try:
            found = lower_bound_from_scores(canaries.run(trials), delta=DELTA, confidence=CONFIDENCE)
        finally:
            canaries.close()
        return canaries.statement().eps, found


@pytest.mark.parametrize("case", [later("noise of users"), "noise of aggregators", later("counts")])
def test_deployed_rounds_stay_below_their_certificate(case):
    certified, found = attacked(*CASES[case], ENOUGH)
    assert 0.2 < certified < 0.9
    assert found.eps <= certified


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_deployed_rounds_stay_below_their_certificate_in_many_trials(case):
    certified, found = attacked(*CASES[case], 400)
    assert found.eps <= certified


def test_the_analyzer_gets_the_sums_of_every_round(tmp_path):
    """They are rounds as deployed ones are, to their end: each is released, and the last one ends the task."""
    canaries = CanaryRounds(tmp_path, "secagg", AGGREGATORS, dim=4, users=4, delta=DELTA, trials=2)
    try:
        scores = canaries.run(1)
        is_over, last = canaries._analyzer.status().over, canaries._analyzer.ledger.last_release
    finally:
        canaries.close()
    assert {name: values.shape for name, values in scores.items()} == dict.fromkeys(scores, (2, 1))
    assert is_over and last.round == 2


def refuted(settings, sabotage, *, trials=ENOUGH, users=4):
    certified, found = attacked("secagg", settings, trials, sabotage=sabotage, users=users)
    return found.eps > certified


def test_an_aggregator_that_forgets_its_noise_is_caught(monkeypatch):
    """Both do: the statement needs the honest one's."""

    def forget(canaries):
        monkeypatch.setattr(type(canaries.parties[0]._contribution), "noise", lambda self, *, sampler: None)

    assert refuted(AGGREGATORS, forget)


@pytest.mark.soak
def test_noise_that_is_drawn_anew_on_resending_is_caught(monkeypatch):
    """The adversary asks for a sum 800 times, and averages: in 3,000 draws of such scores, 0 refuted too little."""
    monkeypatch.setattr("dovetail.parties.canaries._REPETITIONS", 800)

    def redraw(canaries):
        for party in canaries.parties:
            totals, finish = {}, party.store._finish

            def leave(round, total, totals=totals, finish=finish):
                totals[round] = total
                return finish(round, total)

            def again(round, *, size, party=party, totals=totals):
                return [(0, Aggregator._seal_noisy_sum(party, round, totals[round]))]

            party.store._finish, party.store.parts = leave, again

    assert refuted({**AGGREGATORS, "noise_multiplier": 6.0}, redraw, trials=72)


def test_a_seed_that_is_used_twice_is_caught(monkeypatch):
    """The honest aggregator's seeds are the same in every round: what the other one holds moves as the update does."""
    monkeypatch.setattr(PlainSharing.shard, "__kwdefaults__", {"random_bytes": bytes})
    assert refuted(AGGREGATORS, lambda canaries: None)


def test_a_minimum_that_is_ignored_is_caught():
    """A round of one user, where 4,000 were accounted for: its own part of the noise is all there is."""

    def alone(canaries):
        canaries.present = 1
        for party in canaries.parties:
            party.store._min_uploads = 1

    assert refuted(USERS, alone, users=4000)


def test_scores_of_one_law_refute_nothing():
    """400 pairs of equal laws: the bound is above 0 in at most 5 percent, within 6 standard deviations."""
    rng = np.random.default_rng(0)
    wrong = sum(
        lower_bound_from_scores({"score": rng.normal(size=(2, 40))}, delta=0.0, confidence=CONFIDENCE).eps > 0
        for _ in range(400)
    )
    assert wrong <= 20 + 6 * np.sqrt(400 * 0.05 * 0.95)
