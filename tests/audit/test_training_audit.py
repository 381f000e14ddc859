"""Canaries in real trainings: what is found is below what is certified, not far below, and above what is broken.

Every training runs once, with a fixed seed; at confidence 95 % each would fail by chance with probability 5 % at most.
"""

import dataclasses
import json

import numpy as np
import pytest

from dovetail.audit import training
from dovetail.audit.training.attacker import Attacker
from dovetail.audit.training.canaries import Canaries
from dovetail.data import Dataset, Task, partition
from dovetail.experiment import config, preparation
from dovetail.protocols.curator.dp_fl import DpFl
from dovetail.statements import Neighbors, Unit, Verdict

FEATURES, CLASSES, RECORDS = 50, 5, 200


def load(*, folder=None):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, RECORDS + 50).astype(np.int32)
    inputs = rng.normal(size=(CLASSES, FEATURES))[labels] + rng.normal(size=(RECORDS + 50, FEATURES))
    inputs = inputs.astype(np.float32) / 5
    return Dataset(
        inputs=inputs[:RECORDS],
        labels=labels[:RECORDS],
        test_inputs=inputs[RECORDS:],
        test_labels=labels[RECORDS:],
        num_classes=CLASSES,
    )


def load_people(*, folder=None):
    return dataclasses.replace(load(), subjects=np.arange(RECORDS, dtype=np.int32) // 4)


TASK, PEOPLE = (Task(name=name, load=of, published=True) for name, of in (("blobs", load), ("people", load_people)))
BASE = {
    "noise": "seeded",
    "task": {"name": "blobs"},
    "cohort": {"kind": "disjoint", "size": 150, "epochs": 1},
    "protocol": {"name": "dp_fl", "clip_norm": 0.5},
    "privacy": {"eps": 8.0, "delta": 1e-5, "neighbors": "add-remove"},
}
REPLACE = {"delta": 1e-5, "neighbors": "replace-one"}
MOMENTS = [
    ("client", {"update": "moments", "project": 10}),
    ("server", {"optimizer": "ridge"}),
    ("cohort", {"kind": "everyone", "rounds": 1}),
]
SILOS = {"name": "people", "partition": "silos", "silos": 5, "spread": 2}
CENTRAL = {"name": "central_sub", "clip_norm": 0.5, "items_per_subject": 3, "batch": 900}
LOCAL = {"name": "local_sub", "clip_norm": 0.5, "items_per_subject": 3, "items_per_user": 2, "batch": 100, "steps": 2}


def audited(*overrides, canaries=400, task=TASK, **more):
    return training.audit(config.parse(BASE, overrides), canaries=canaries, task=task, **more)


def subjects(protocol):
    return [("task", SILOS), ("protocol", protocol), ("cohort", {"kind": "everyone", "rounds": 3})]


@pytest.mark.parametrize("neighbors", ["add-remove", pytest.param("replace-one", marks=pytest.mark.soak)])
def test_a_sound_training_is_attacked_well_and_within_what_is_certified(neighbors):
    result = audited(("privacy.neighbors", neighbors))
    assert 1.2 < result.bound.eps <= result.statement.eps <= 8.0
    assert result.is_consistent
    assert result.statement.verdict is Verdict.REPRODUCIBLE, "an audit is repeated by its seed"
    assert result.statement.neighbors is Neighbors(neighbors)
    assert result.bound.delta == result.statement.delta == 1e-5
    written = json.loads(json.dumps(result.to_json()))
    assert written["eps_lower"] == result.bound.eps
    assert (written["canaries"], written["attack"], written["confidence"]) == (400, "white-box", 0.95)
    assert written["guesses"] in (40, 80, 200, 400)
    assert 0 <= written["right"] <= written["guesses"]
    assert written["consistent"] is True
    assert written["certified"] == json.loads(json.dumps(result.statement.to_json()))
    assert "Steinke" in written["theorem"]["where"]


POISSON = [
    ("cohort", {"kind": "poisson", "size": 150, "rounds": 3}),
    ("protocol.noise_multiplier", 0.8),
    ("privacy", {"neighbors": "add-remove"}),
]
MIXED = [("protocol", {"name": "split_and_mix", "clip_norm": 0.5}), ("privacy", REPLACE | {"eps": 8.0})]
REMOVED = [("protocol", {"name": "split_and_mix", "clip_norm": 0.5})]
SHUFFLED = [("protocol", {"name": "ss_simple", "clip_value": 0.05, "eps_local": 1.0}), ("privacy", REPLACE)]


@pytest.mark.parametrize(
    ("overrides", "least"),
    [
        pytest.param(MIXED, 0.5, id="split_and_mix"),
        pytest.param(REMOVED, 0.5, id="split_and_mix, removed"),
        pytest.param(SHUFFLED, 0.5, id="ss_simple", marks=pytest.mark.soak),
        pytest.param(POISSON, 0.0, id="poisson", marks=pytest.mark.soak),
        pytest.param([("cohort", {"kind": "everyone", "rounds": 3})], 0.8, id="everyone", marks=pytest.mark.soak),
    ],
)
def test_other_cohorts_and_shuffled_protocols_hold(overrides, least):
    result = audited(*overrides)
    assert least <= result.bound.eps <= result.statement.eps < 40


@pytest.mark.parametrize(
    ("protocol", "least"),
    [
        pytest.param(CENTRAL, 0.8, id="central"),
        pytest.param(LOCAL, 0.0, id="local", marks=pytest.mark.soak),
    ],
)
def test_canary_subjects_hold_too(protocol, least):
    result = audited(*subjects(protocol), task=PEOPLE)
    assert least <= result.bound.eps <= result.statement.eps <= 8.0
    assert result.statement.unit is Unit.SUBJECT
    assert "canary subjects" in result.bound.attack


def test_the_last_model_alone_tells_less():
    everyone, server = ("cohort", {"kind": "everyone", "rounds": 2}), ("server.options", {"momentum": 0.9})
    result = audited(everyone, server, attack="black-box")
    assert 0.3 < result.bound.eps <= result.statement.eps


@pytest.mark.parametrize(
    ("attack", "least"), [("white-box", 4.2), pytest.param("black-box", 1.5, marks=pytest.mark.soak)]
)
def test_without_noise_every_coin_is_read_off_the_sums_and_many_off_the_model(attack, least):
    result = audited(("protocol", {"name": "fedavg"}), ("privacy", REPLACE), attack=attack)
    assert result.statement.is_unbounded
    assert result.bound.eps > least
    assert result.is_consistent
    if attack == "white-box":
        assert result.right == result.guesses == 400


def test_a_tenth_of_the_noise_is_found_out(monkeypatch):
    honest = DpFl.estimate

    def sabotaged(self, tally, size, state, *, key):
        estimate, after = honest(self, tally, size, state._replace(noise_scale=state.noise_scale / 10), key=key)
        return estimate, after._replace(noise_scale=state.noise_scale)

    monkeypatch.setattr(DpFl, "estimate", sabotaged)
    result = audited(("privacy.eps", 2.0))
    assert not result.is_consistent
    assert result.bound.eps > 3.0 > result.statement.eps


def ready(canaries, *overrides, task=TASK):
    return preparation.prepare(config.parse(BASE, overrides), task=task, guests=canaries)


def tossed(coins, unit=Unit.USER, *, swapped=False, items=1):
    return Canaries(coins=np.asarray(coins, bool), unit=unit, swapped=swapped, seed=0, items=items, clip_norm=0.5)


def holdings(prepared):
    """Who holds which records, and who has none."""
    owners, records = prepared.sampler.clients.owners_and_records()
    return {user: sorted(records[owners == user].tolist()) for user in range(prepared.sampler.clients.num_clients)}


@pytest.mark.parametrize(
    ("unit", "swapped", "items", "overrides", "task"),
    [
        pytest.param(Unit.USER, False, 1, [], TASK, id="users"),
        pytest.param(Unit.USER, True, 1, [("privacy.neighbors", "replace-one")], TASK, id="replaced users"),
        pytest.param(Unit.SUBJECT, False, 3, subjects(CENTRAL), PEOPLE, id="subjects"),
        pytest.param(Unit.USER, False, 1, [("task", SILOS), ("cohort.size", 10)], PEOPLE, id="users beside silos"),
    ],
)
def test_a_coin_changes_one_canary_and_nothing_that_is_public(unit, swapped, items, overrides, task):
    coins = np.random.default_rng(1).random(300) < 0.5
    flipped = coins.copy()
    flipped[7] = ~flipped[7]
    one, other = (ready(tossed(c, unit, swapped=swapped, items=items), *overrides, task=task) for c in (coins, flipped))
    everything = list(range(one.num_rounds))
    assert one.record(everything).certified_statement() == other.record(everything).certified_statement()
    assert dataclasses.replace(one.sampler.protocol, **without_z(one)) == dataclasses.replace(
        other.sampler.protocol, **without_z(one)
    )
    assert one.sampler.schedule == other.sampler.schedule
    np.testing.assert_array_equal(one.dataset.inputs, other.dataset.inputs)
    mine, theirs = holdings(one), holdings(other)
    changed = {record for user in mine for record in set(mine[user]) ^ set(theirs[user])}
    first, second = tossed(coins, unit, swapped=swapped, items=items).record_numbers(len(one.dataset.labels))
    expected = set(range(first[7], first[7] + items)) | (set() if second is None else {int(second[7])})
    assert changed == expected
    if one.dataset.subjects is not None:
        about = one.dataset.subjects
        assert len({int(about[record]) for record in changed}) == 1
        guests = {int(about[row]) for start in first for row in range(start, start + items)}
        real = set(np.delete(about, [row for start in first for row in range(start, start + items)]).tolist())
        assert guests.isdisjoint(real) and len(guests) == 300, "canaries are people of their own"


def without_z(prepared):
    """What the data says of the paper's Z, which is for its claim alone."""
    return {"group_in_batch": None} if hasattr(prepared.sampler.protocol, "group_in_batch") else {}


def test_who_was_removed_contributes_nothing_and_who_was_replaced_something_else():
    coins = np.array([True, False] * 10)
    canaries = tossed(coins)
    users = np.arange(RECORDS + 20)
    there = canaries.contributing_users(users, RECORDS + 20)
    assert len(there) == RECORDS + 10
    assert set(users) - set(there) == set(range(RECORDS + 1, RECORDS + 20, 2))
    replaced = tossed(coins, swapped=True)
    assert len(replaced.contributing_users(users, RECORDS + 20)) == len(users)
    data, clients = replaced.join(load(), partition.one_record(RECORDS, users=None, seed=0))
    held = replaced.draw_presence(clients, len(data.labels))
    first, second = replaced.record_numbers(len(data.labels))
    np.testing.assert_array_equal(held.records[RECORDS:], np.where(coins, first, second))
    np.testing.assert_array_equal(data.inputs[first], -data.inputs[second])


def test_canaries_look_in_directions_of_their_own():
    """Orthogonal inputs, and other labels where a direction comes again."""
    data, _ = tossed(np.ones(4 * FEATURES)).join(load(), partition.one_record(RECORDS, users=None, seed=0))
    inputs, labels = data.inputs[RECORDS:].astype(np.float64), data.labels[RECORDS:]
    square = np.sum(inputs[0] ** 2)
    np.testing.assert_allclose(inputs[:FEATURES] @ inputs[:FEATURES].T, square * np.eye(FEATURES), atol=1e-5 * square)
    for place in range(FEATURES):
        assert len(set(labels[place::FEATURES].tolist())) == 4


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            [
                ("privacy", {"neighbors": "add-remove"}),
                ("server", {"learning_rate": 0.5, "options": {"momentum": 0.9, "nesterov": True}}),
            ],
            id="removed",
        ),
        pytest.param([("privacy", REPLACE), *MOMENTS], id="moments"),
        pytest.param([("privacy", REPLACE)], id="replaced", marks=pytest.mark.soak),
        pytest.param(
            [
                ("privacy", REPLACE),
                ("task", {"name": "blobs", "partition": "iid", "users": 100}),
                ("client", {"update": "fedavg", "epochs": 2}),
                ("cohort.size", 50),
            ],
            id="local steps",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_the_attacker_explains_a_released_sum_up_to_its_noise(overrides):
    noise = ("protocol.noise_multiplier", 1e-6)
    swapped = overrides[0][1]["neighbors"] == "replace-one"
    coins = np.random.default_rng(2).random(100) < 0.5
    canaries = tossed(coins, swapped=swapped)
    prepared = ready(canaries, noise, *overrides)
    attacker, signs = Attacker(prepared, canaries), np.where(coins, 1.0, -1.0)
    for seen in training._train(prepared, canaries, []):
        weights = attacker.canary_weights(seen)
        middle, half = attacker.mean_and_half_difference_of_worlds(seen)
        explained = attacker.sum_of_others(seen) + weights @ middle + (weights * signs) @ half
        scale = np.abs(explained).max()
        few_records = prepared.sampler.clients.max_records == 1
        np.testing.assert_allclose(attacker.released_sum(seen), explained, atol=(1e-4 if few_records else 0.05) * scale)


@pytest.mark.parametrize(
    ("overrides", "more", "sentence"),
    [
        ([], {"canaries": 19}, "expected canaries >= 20, got canaries=19"),
        ([], {"canaries": 20.5}, "expected canaries to be a whole number"),
        ([], {"attack": "grey-box"}, "expected attack to be one of white-box, black-box"),
        ([], {"confidence": 1.0}, "expected 0.5 < confidence < 1"),
        ([], {"guesses": 401}, "expected 1 <= guesses <= 400"),
        ([], {"seed": -1}, "seed=-1"),
        (
            [("server", {"optimizer": "adam"})],
            {},
            "a white-box attack reads sums off the steps of models and needs server.optimizer = 'sgd'",
        ),
        (
            [("privacy.unit", "item")],
            {},
            "an attack on 'dp_fl' needs privacy.unit='user', the unit that it protects, got 'item'",
        ),
        ([("protocol.name", "dp_lf")], {}, "did you mean 'dp_fl'"),
        (
            [*subjects(CENTRAL), ("privacy.neighbors", "replace-one")],
            {"task": PEOPLE},
            "expected neighbors = add-remove",
        ),
        (
            [*subjects(CENTRAL | {"items_per_user": 1, "items_per_subject": 9})],
            {"task": PEOPLE},
            "9 records need 9 users to hold them",
        ),
    ],
)
def test_bad_input_is_one_sentence(overrides, more, sentence):
    with pytest.raises(ValueError, match=sentence):
        audited(*overrides, **more)
