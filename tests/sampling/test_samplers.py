"""Users and records are sampled behind one interface, and nobody else asks which of them it is."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import dovetail
from dovetail import protocols
from dovetail.data import Clients
from dovetail.randomness import Randomness
from dovetail.sampling import RecordSampler, Schedule, UserSampler, make_sampler, usable_clients

USERS, RECORDS, ROUNDS = 12, 60, 6
SUBJECTS = (np.arange(RECORDS) // 4).astype(np.int32)
OWNERS = np.random.default_rng(3).integers(0, USERS - 1, RECORDS)  # the last user holds nothing
CLIENTS = Clients.from_owners(np.arange(RECORDS), OWNERS, num_clients=USERS)
SETTINGS = {
    "dp_fl": {"noise_multiplier": 2.0},
    "central_sub": {"noise_multiplier": 2.0, "sampling_rate": 0.3, "batch": 18.0},
    "local_sub": {"noise_multiplier": 2.0, "sampling_rate": 0.3, "batch": 1.5, "steps": 3},
}
KINDS = ["everyone", "poisson", "fixed"]


def sampler(name, kind="everyone", *, seed=0, subjects=SUBJECTS, noise_of=None, noise_scales=(), **more):
    schedule = Schedule(
        kind=kind,
        population=USERS,
        size=USERS if kind == "everyone" else 5,
        rounds=ROUNDS,
        randomness=Randomness.from_seed(seed),
        records=RECORDS,
        noise_scales=noise_scales,
    )
    protocol = protocols.build(name, SETTINGS[name] | more)
    return make_sampler(protocol, schedule=schedule, clients=CLIENTS, subjects=subjects, noise_of=noise_of)


def owners_of(records):
    return set(OWNERS[np.asarray(records, int)].tolist())


def same(one, other):
    """Whether two rounds work on the same."""
    if (one.items is None) != (other.items is None) or one[1:3] != other[1:3]:
        return False
    parts = (
        [(one.users, other.users)]
        if one.items is None
        else [(one.users, other.users), *zip(*(one.items, other.items), strict=True)]
    )
    return all(np.array_equal(a, b) for a, b in parts)


every_sampler = pytest.mark.parametrize("name", SETTINGS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_sampler
def test_the_protocol_says_which_sampler_it_needs(name):
    by_record = protocols.find(name).samples == "records"
    assert type(sampler(name)) is (RecordSampler if by_record else UserSampler)
    assert by_record == name.endswith("_sub")


@every_kind
@every_sampler
def test_only_users_that_are_there_and_what_they_hold_are_drawn(name, kind):
    ready = sampler(name, kind)
    for index in range(ROUNDS):
        users = ready.schedule.draw_users(index)
        drawn = ready.sample_round(index, users)
        held = ready.engine_clients
        for place, client in enumerate(drawn.users):
            mine = held.records_of(client)
            if drawn.items is not None:
                mine = drawn.items.rows[place].ravel()
                assert owners_of(mine[mine >= 0]) <= {int(client)}, "a user's steps are on its own records"
            assert owners_of(mine[mine >= 0]) <= set(users.tolist())


@every_kind
@every_sampler
def test_what_joins_is_what_the_engine_works_on(name, kind):
    ready = sampler(name, kind)
    for index in range(ROUNDS):
        users = ready.schedule.draw_users(index)
        drawn, (rows, counts) = ready.sample_round(index, users), ready.rows_in_sum(index, users)
        if drawn.items is not None:
            worked_on = drawn.items.rows[drawn.items.rows >= 0]
        else:
            table = ready.engine_clients
            worked_on = np.concatenate([table.records_of(i) for i in drawn.users] or [[]])
        joined = np.concatenate([row[:count] for row, count in zip(rows, counts, strict=True)] or [[]])
        np.testing.assert_array_equal(np.sort(joined), np.sort(worked_on))


@every_kind
@every_sampler
def test_nobody_there_is_a_round_of_nobody(name, kind):
    ready = sampler(name, kind)
    nobody = np.array([], np.int32)
    assert len(ready.sample_round(0, nobody).users) == 0
    assert len(ready.rows_in_sum(0, nobody)[1]) == 0
    assert len(ready.rows_in_sum(0, np.array([USERS - 1]))[1]) == (name == "dp_fl"), "a user without records"


@every_kind
@every_sampler
def test_a_resumed_sampler_draws_what_it_drew_before(name, kind):
    root = Randomness.from_seed(7)
    first = sampler(name, kind).with_randomness(root)
    again = sampler(name, kind, seed=1).with_randomness(Randomness(root.seed, root.root))
    other = first.with_randomness(Randomness.from_seed(8))
    changed = False
    for index in range(ROUNDS):
        users = first.schedule.draw_users(index)
        np.testing.assert_array_equal(users, again.schedule.draw_users(index))
        assert same(first.sample_round(index, users), again.sample_round(index, users))
        assert same(first.sample_round(index, users), first.sample_round(index, users)), "asking twice changes nothing"
        moved = other.schedule.draw_users(index)
        changed |= not np.array_equal(users, moved) or not same(
            first.sample_round(index, users), other.sample_round(index, users)
        )
    assert changed == (name != "dp_fl" or kind != "everyone"), "another run draws anew, where there is a draw"


@every_kind
@every_sampler
def test_the_capacity_covers_what_is_drawn(name, kind):
    ready = sampler(name, kind)
    assert 1 <= ready.size <= ready.capacity <= ready.engine_clients.num_clients
    for index in range(ROUNDS):
        assert len(ready.sample_round(index, ready.schedule.draw_users(index)).users) <= ready.capacity


@every_kind
@every_sampler
def test_how_often_someone_is_in_a_sum_is_the_mean_over_draws(name, kind):
    """Joined rows over 400 rounds, within five standard errors or more: a user's records come and go together."""
    ready = sampler(name, kind)
    total = sum(len(ready.rows_in_sum(index, ready.schedule.draw_users(index))[1]) for index in range(400))
    units = USERS if name == "dp_fl" else RECORDS
    expected = 400 * units * ready.expected_times_in_sum(0, records=1)
    error = 0 if name == "dp_fl" and kind != "poisson" else 10 * np.sqrt(expected)
    assert abs(total - expected) <= error + 1e-6


@pytest.mark.parametrize(
    ("name", "divisor", "noise"), [("dp_fl", 12, 2.0), ("central_sub", 18, 2.0), ("local_sub", 36, 12.0)]
)
def test_a_sum_has_a_public_divisor_and_its_noise(name, divisor, noise):
    """Noise of one draw, or of one for each of 12 users and 3 steps; the learning rate is part of users' own steps."""
    ready = sampler(name)
    assert ready.sum_divisor(0, learning_rate=0.5) == pytest.approx(divisor)
    assert ready.noise_std(0, dim=4) == pytest.approx(noise)
    assert ready.sample_round(0, np.arange(3)).size == {"dp_fl": 12, "central_sub": 18, "local_sub": 12}[name]


SCALES = (1.0, 0.5, 3.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, kind) for name in SETTINGS for kind in KINDS), ("dp_fl", "secret")]
)
def test_a_round_has_the_protocols_noise_times_its_own_scale(name, kind):
    """For every kind of round, in what is planned with; where users are sampled, in what the engine is told."""
    plain, ready = sampler(name, kind), sampler(name, kind, noise_scales=SCALES)
    for index, scale in enumerate(SCALES):
        assert ready.noise_std(index, dim=4) == pytest.approx(scale * plain.noise_std(index, dim=4))
        assert name != "dp_fl" or ready.sample_round(index, np.arange(3)).noise_scale == scale
        assert ready.sum_divisor(index, learning_rate=0.5) == plain.sum_divisor(index, learning_rate=0.5)


def test_users_keep_all_they_hold_and_a_subjects_records_are_capped():
    assert usable_clients(sampler("dp_fl").protocol, CLIENTS, SUBJECTS) is CLIENTS
    capped = usable_clients(sampler("central_sub", items_per_subject=2).protocol, CLIENTS, SUBJECTS)
    assert np.bincount(SUBJECTS[capped.owners_and_records()[1]]).max() == 2
    assert usable_clients(sampler("central_sub", unit="item").protocol, CLIENTS, SUBJECTS) is CLIENTS
    twice = Clients.from_owners(np.zeros(2, int), np.arange(2), num_clients=2)
    with pytest.raises(ValueError, match="expected every record at one user where records are protected"):
        usable_clients(sampler("central_sub").protocol, twice, SUBJECTS)


@pytest.mark.parametrize("name", ["central_sub", "local_sub"])
def test_z_is_measured_on_request_and_again_for_another_run(name):
    plain = sampler(name)
    assert plain.protocol.group_in_batch is None
    assert plain.with_randomness(Randomness.from_seed(5)).protocol.group_in_batch is None, (
        "the data is not read unasked"
    )
    found = plain.with_data_for_claim()
    largest = found.draws.largest_group_of_rounds(ROUNDS, np.arange(USERS), steps=max(1, plain.protocol.private_steps))
    assert found.protocol.group_in_batch == largest > 1
    again = found.with_randomness(Randomness.from_seed(5))
    assert again.protocol == again.with_data_for_claim().protocol
    assert dataclasses.replace(again.protocol, group_in_batch=None) == plain.protocol


def test_users_have_no_z():
    ready = sampler("dp_fl")
    assert ready.with_data_for_claim() is ready
    assert not ready.is_noise_set_by_data


def test_subjects_that_nobody_knows_are_users():
    ready = sampler("central_sub", subjects=None, sampling_rate=1.0, batch=60.0)
    np.testing.assert_array_equal(ready.draws.largest_group_by_user(0, np.arange(USERS)), CLIENTS.counts)


@pytest.mark.parametrize("name", ["central_sub", "local_sub"])
def test_a_recipe_sets_the_noise_by_z(name):
    table = {z: float(z) for z in range(1, 5)}
    ready = sampler(name, noise_of=table.__getitem__, adaptive_z=True)
    users = np.arange(USERS)
    scales = ready.noise_scales(0, users)
    assert ready.is_noise_set_by_data
    assert scales.max() > 1
    drawn = ready.sample_round(0, users)
    if drawn.items is None:
        assert drawn.noise_scale == pytest.approx(np.sqrt(np.sum(scales**2)))
    else:
        np.testing.assert_array_equal(drawn.items.noise_scale, scales)
    with pytest.raises(KeyError):
        sampler(name, noise_of={1: 1.0}.__getitem__, adaptive_z=True).with_data_for_claim()


SEAM = ("protocols/subjects/", "sampling/records.py")


def test_no_other_module_knows_the_class_of_record_level_protocols():
    package = Path(dovetail.__file__).parent
    known = [path.relative_to(package).as_posix() for path in package.rglob("*.py") if "ItemLevel" in path.read_text()]
    assert "sampling/records.py" in known
    assert [path for path in known if not path.startswith(SEAM)] == []
