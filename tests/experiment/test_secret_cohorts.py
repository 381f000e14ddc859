"""Rounds that users' data enter secretly: everyone uploads, coins decide whose data count, all noise is there."""

import dataclasses
import json

import numpy as np
import pytest
from grids import later
from tiny import TASK
from watchers import AfterRound

from dovetail import accounting, experiment
from dovetail.accounting.releases import release_of
from dovetail.audit import curves
from dovetail.events import Everyone, FixedSize, Poisson, Round
from dovetail.experiment import config
from dovetail.experiment.verify import verify
from dovetail.protocols import Cohort, build
from dovetail.statements import Neighbors, NotApplicable

USERS, SIZE = 300, 60
BASE = {
    "noise": "seeded",
    "task": {"name": "tiny"},
    "cohort": {"kind": "secret", "size": SIZE, "rounds": 4},
    "server": {"learning_rate": 1.0},
    "protocol": {"name": "split_and_mix", "clip_norm": 1.0, "noise_multiplier": 8.0},
    "privacy": {"delta": 1e-5},
}
WAYS = {
    "linear": (),
    "clipped": (("task.model", "mlp"),),
    "local epochs": (("client.update", "fedavg"), ("client.epochs", 2), ("task.partition", "iid"), ("task.users", 300)),
    "messages": (("performance.fast", False),),
}


def plan(*overrides):
    return experiment.prepare(config.parse(BASE, overrides), task=TASK)


def moved(ready, index, users):
    """By how much a round with these users moves the first model, times the planned size: the sum."""
    after = ready.step(ready.engine.start(), index, users)
    return (np.asarray(after.params, np.float64) - ready.engine.first) * ready.sampler.schedule.size_of(index)


def only(ready, index, users):
    """The sum of these users alone, with a minimum or without."""
    start, drawn = ready.engine.start(), ready.sampler.sample_round(index, users)
    after = ready.engine.step(
        start, users, index=index, capacity=USERS, sample=drawn, randomness=ready.sampler.schedule.randomness
    )
    return (np.asarray(after.params, np.float64) - ready.engine.first) * drawn.size


@pytest.mark.parametrize("way", ["linear", *(later(way) for way in WAYS if way != "linear")])
def test_the_sum_has_the_data_of_those_whose_coin_says_so_and_of_no_one_else(way):
    quiet = ("protocol.noise_multiplier", 1e-3)
    secret = plan(quiet, *WAYS[way])
    enters_round = np.flatnonzero(secret.sampler.schedule.entering_mask(2)).astype(np.int32)
    assert 30 < len(enters_round) < 90
    found = moved(secret, 2, secret.sampler.schedule.draw_users(2))
    all_of_them = plan(quiet, *WAYS[way], ("cohort", {"kind": "everyone", "rounds": 4}))
    assert np.abs(found - only(all_of_them, 2, enters_round)).max() < 0.05, "rounding errors and noise alone"
    others = np.setdiff1d(np.arange(USERS, dtype=np.int32), enters_round)
    assert np.abs(found - only(all_of_them, 2, others)).max() > 1


@pytest.mark.parametrize("way", [later("linear"), "messages"])
def test_the_noise_is_that_of_everyone_whoever_enters(way):
    """Noise of 400 clip norms on the sum, data of two users on average; all coordinates of 60 rounds, 5 deviations."""
    ready = plan(("protocol.noise_multiplier", 400.0), ("cohort.rounds", 60), ("cohort.size", 2), *WAYS[way])
    sums = np.stack([moved(ready, index, ready.sampler.schedule.draw_users(index)) for index in range(60)])
    planned = ready.sampler.noise_std(0, dim=ready.engine.dim)
    assert planned == pytest.approx(400.0, rel=1e-3)
    error = 5 / np.sqrt(2 * sums.size)
    assert abs(sums.std() / planned - 1) < error
    assert abs(sums.std() / (planned * np.sqrt(2 / USERS)) - 1) > error, "not that of those alone who enter"


def test_entering_is_a_coin_of_every_user_and_everyone_uploads():
    ready = plan(("cohort.rounds", 2000))
    schedule = ready.sampler.schedule
    coins = np.stack([schedule.entering_mask(index) for index in range(2000)])
    assert np.abs((coins.mean(axis=0) - 0.2) / np.sqrt(0.16 / 2000)).max() < 4.5
    assert 0.85 < coins.sum(axis=1).var() / (USERS * 0.16) < 1.15, "binomial: neither fixed nor twice as much"
    assert all(len(schedule.draw_users(index)) == USERS for index in range(10))
    cohort = schedule.cohort(0)
    assert (cohort.participation, cohort.size, cohort.uploads) == (Poisson(prob=0.2), SIZE, USERS)
    assert cohort.min_size == cohort.crowd() == cohort.population == USERS
    cohort.refuse_minimum_if_secret()
    assert ready.sampler.sample_round(0, schedule.draw_users(0)).size == SIZE
    assert (schedule.num_uploads_of(0), schedule.capacity) == (USERS, USERS)


def test_the_estimate_is_unbiased_over_coins():
    ready = plan(("protocol.noise_multiplier", 1e-3), ("cohort.rounds", 150))
    sums = np.stack([moved(ready, index, ready.sampler.schedule.draw_users(index)) for index in range(150)]) / SIZE
    everyone = plan(("protocol.noise_multiplier", 1e-3), ("cohort", {"kind": "everyone", "rounds": 1}))
    mean = moved(everyone, 0, np.arange(USERS, dtype=np.int32)) / USERS
    assert (np.abs(sums.mean(axis=0) - mean) <= 5 * sums.std(axis=0) / np.sqrt(150) + 1e-3).all()


def test_the_statement_is_never_above_the_one_with_everyones_data_and_names_only_what_it_uses():
    ready = plan()
    (one,) = set(ready.guarantee.rounds())
    assert one.participation == Poisson(prob=0.2)
    plain = [Round(mechanism=one.mechanism, participation=Everyone())] * 4
    bound = accounting.bound(ready.guarantee.rounds(), delta=1e-5)
    assert 0 < bound.eps <= accounting.bound(plain, delta=1e-5).eps
    said = " ".join(ready.record(range(4)).certified_statement().assumptions)
    assert ("decides secretly" in said) != bound.sample_known
    coin = release_of(one.mechanism).sampling_assumption(one.participation)
    assert "decides secretly and independently, with probability 0.2" in coin
    assert "when and how long it uploads does not depend on that choice" in coin
    assert "uniform sample" in release_of(one.mechanism).sampling_assumption(FixedSize(size=300, population=400))


def test_a_run_is_resumed_verified_and_counts_uploads(tmp_path):
    class Interruption(Exception):  # noqa: N818
        pass

    def interrupt(progress):
        if progress.round == 2:
            raise Interruption

    whole = experiment.run(plan(), out=tmp_path / "whole")
    with pytest.raises(Interruption):
        experiment.run(plan(), out=tmp_path / "run", checkpoint_every=1, callbacks=[AfterRound(interrupt)])
    result = experiment.run(plan(), out=tmp_path / "run", resume=True)
    assert result.uploads == 4 * USERS
    assert all(np.array_equal(result.parameters[name], whole.parameters[name]) for name in whole.parameters)
    assert verify(tmp_path / "run").agrees
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert "Poisson" in json.dumps(ledger)


def test_dropouts_need_a_minimum_of_uploads_and_void_a_round_below_it(tmp_path):
    lossy = plan(("cohort.dropout", 0.3), ("cohort.min_size", 208), ("cohort.rounds", 12))
    uploads = [len(lossy.sampler.schedule.draw_users(index)) for index in range(12)]
    result = experiment.run(lossy, out=tmp_path / "run")
    assert 0 < result.rounds == sum(count >= 208 for count in uploads) < 12


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [("protocol", {"name": "dp_fl", "noise_multiplier": 1.0})],
            r"all users' noise adds up \(split_and_mix, secagg\)",
        ),
        ([("protocol", {"name": "fedavg"})], "got protocol.name='fedavg'"),
        ([("protocol", {"name": "ss_simple", "eps_local": 1.0})], "got protocol.name='ss_simple'"),
        ([("cohort", {"kind": "secret", "rounds": 2})], r"cohort\.kind = 'secret' needs one cohort\.size"),
        ([("cohort.size", [50, 60, 70, 80])], r"needs one cohort\.size .* got size=\[50, 60, 70, 80\]"),
        ([("cohort.size_end", 80)], "got size=60 and size_end=80"),
        ([("cohort.size", 301)], "expected at most 300 clients per round"),
        ([("cohort.min_size", 301)], "expected 0 <= min_size <= 300"),
        ([("cohort.min_size", 1)], "expected cohort.min_size >= 2"),
        ([("cohort.dropout", 0.1)], "with dropout=0.1 set cohort.min_size"),
        ([("cohort.kind", "covert")], "cohort.kind must be one of"),
    ],
)
def test_what_cannot_be_secret_is_refused(overrides, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(*overrides)


def test_a_sample_that_a_server_draws_by_coins_shows_its_size_and_is_refused():
    with pytest.raises(NotApplicable, match=r"with cohort\.kind = 'secret' all upload"):
        plan(("cohort.kind", "poisson"))


def test_a_cohort_says_the_rate_of_its_coins():
    with pytest.raises(ValueError, match="expected 60 of 300 users by coins"):
        Cohort(participation=Poisson(prob=0.3), size=60, uploads=300)
    with pytest.raises(ValueError, match="expected uploads >= 60"):
        Cohort(participation=Poisson(prob=1.0), size=60, uploads=59)
    cohort = Cohort(participation=Poisson(prob=0.2), size=60, uploads=300, min_size=300)
    wide = build("split_and_mix", {"noise_multiplier": 2.0}).settle(cohort, 12)
    whole = build("split_and_mix", {"noise_multiplier": 2.0}).settle(
        Cohort(participation=Everyone(), size=300, min_size=300), 12
    )
    assert wide == whole, "the modulus has room for everybody's data, should all coins say so"
    event = wide.view(cohort, 12, neighbors=Neighbors.REPLACE_ONE).round.mechanism
    assert (
        event
        == whole.view(
            dataclasses.replace(cohort, participation=Everyone(), size=300, uploads=None),
            12,
            neighbors=Neighbors.REPLACE_ONE,
        ).round.mechanism
    )


def test_neither_a_fleet_nor_an_audit_of_a_round_knows_coins(tmp_path):
    fleet = pytest.importorskip("dovetail.parties.fleet")
    with pytest.raises(ValueError, match="cannot be deployed: users' data enter every round"):
        fleet.set_up_fleet(tmp_path / "fleet", config.parse(BASE), rounds=1, clients=3)
    with pytest.raises(NotApplicable, match="enter secretly"):
        curves.terms_of_round(plan(), 0)
