"""A user's way through a training, by itself and beside many others on a few threads."""

from __future__ import annotations

import dataclasses
import threading
import types

import msgspec
import numpy as np
import pytest
from parties.unique_buckets import ONE_SHUFFLER, THREE_SHUFFLERS

from dovetail.parties.common.http_clients import Conflict, Unreachable
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.wire import RETRY_AFTER, RoundStatus
from dovetail.parties.fleet import lenient_policy
from dovetail.parties.http.requests import Backoff
from dovetail.parties.user.client import Client
from dovetail.parties.user.participation import Participation, take_part, take_part_together
from dovetail.parties.user.policy import Refused


class Scripted:
    """A shuffler as a user sees it, by a script: the round that it tells of, None for silence, negative when over."""

    url, ends_after, retry_after = "scripted", None, None

    def __init__(self, deployment, rounds):
        self._deployment, self._script, self._round, self.got = deployment, list(rounds), 0, []

    def task(self):
        return self._deployment.signed

    def notices(self):
        return []

    def status(self):
        said = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if said is None:
            raise Unreachable("silence")
        self._round = abs(said)
        return RoundStatus(task_id=self._deployment.task.task_id, round=self._round, over=said < 0, head=bytes(32))

    def model(self, round, *, dim):
        return np.zeros(dim, np.float32)

    def upload(self, task_id, round, upload, *, sender, signature):
        if round > self._round:
            self.status()
            raise Unreachable("too early")
        self.got.append((round, upload.report))
        if len(self.got) == self.ends_after:
            self._script = [-self._round]


@pytest.mark.parametrize(
    ("scripts", "interrupted", "reported"),
    [
        ([[None, 1, -1], [0, 0, 1], [1]], False, {1}),  # some are silent, one hears of the round late
        ([[1, 1, 2, -2], [2], [2]], True, {2}),  # a user that comes back to a round that it has spent
    ],
    ids=["late", "interrupted"],
)
def test_a_user_waits_for_shufflers_and_for_the_next_round(tmp_path, scripts, interrupted, reported):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = THREE_SHUFFLERS.deployment(tmp_path / "deployment", keys, rounds=2, round_seconds=60.0)
    client = Client(tmp_path / "user", policy=lenient_policy(deployment.signed), key=keys[0])
    update = THREE_SHUFFLERS.update(0, 2)
    if interrupted:
        client.forget_envelope(client.report(deployment.signed, 1, update))
    services = [Scripted(deployment, script) for script in scripts]
    assert take_part(client, services, lambda model: update, patience=5.0) == len(reported)
    assert [{round for round, _ in service.got} for service in services] == [reported] * 3
    assert len({one for service in services for one in service.got}) == len(reported)


def test_a_user_whose_epoch_is_not_over_trains_once_and_sends_again_what_it_has(tmp_path):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = ONE_SHUFFLER.deployment(tmp_path / "deployment", keys, rounds=2, round_seconds=60.0)
    policy = msgspec.structs.replace(lenient_policy(deployment.signed), epoch_seconds=1.0)
    client = Client(tmp_path / "user", policy=policy, key=keys[0])
    update, trained = ONE_SHUFFLER.update(0, 2), []
    first = client.report(deployment.signed, 1, update)  # and then it was interrupted
    service = Scripted(deployment, [1, *[2] * 20, -2])
    service.ends_after = 2
    assert take_part(client, [service], lambda model: trained.append(model) or update, patience=5.0) == 2
    assert service.got[0] == (1, first.uploads[0].report)
    assert len(trained) == 2  # once per round, however often it was told to wait


def test_a_user_whose_key_has_expired_spends_nothing(tmp_path):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = ONE_SHUFFLER.deployment(tmp_path / "deployment", keys, rounds=2, round_seconds=60.0)
    expired = dataclasses.replace(keys[0], public=msgspec.structs.replace(keys[0].public, expires=1))
    client = Client(tmp_path / "user", policy=lenient_policy(deployment.signed), key=expired)
    with pytest.raises(Refused, match=r"this user's key .* has expired: make a new one"):
        take_part(client, [Scripted(deployment, [1])], lambda model: ONE_SHUFFLER.update(0, 2), patience=0.3)
    assert not list((tmp_path / "user" / "spending").glob("task-*"))


def test_a_user_loses_patience_with_a_shuffler_that_never_hears_of_the_round(tmp_path):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = THREE_SHUFFLERS.deployment(tmp_path / "deployment", keys, rounds=2, round_seconds=60.0)
    client = Client(tmp_path / "user", policy=lenient_policy(deployment.signed), key=keys[0])
    services = [Scripted(deployment, [1]), Scripted(deployment, [0]), Scripted(deployment, [1])]
    with pytest.raises(Unreachable, match="too early"):
        take_part(client, services, lambda model: THREE_SHUFFLERS.update(0, 2), patience=0.3)


def test_many_users_take_part_on_a_few_threads_and_a_failure_stops_nobody_else(tmp_path):
    keys = [KeyPair.generate("sign") for _ in range(12)]
    deployment = ONE_SHUFFLER.deployment(tmp_path / "deployment", keys, rounds=2, round_seconds=60.0)
    training, services, participations = set(), [], []

    def train(user):
        training.add(threading.current_thread())
        if user == 7:
            raise ValueError("expected records, got none")
        return ONE_SHUFFLER.update(user, len(keys))

    for user, key in enumerate(keys):
        client = Client(tmp_path / f"user-{user}", policy=lenient_policy(deployment.signed), key=key)
        services.append(Scripted(deployment, [None, 1, 1, 2, -2]))
        participations.append(Participation(client, services[-1:], lambda model, user=user: train(user)))
    heard = []
    with pytest.raises(ValueError, match="expected records, got none"):
        take_part_together(participations, threads=3, failed=lambda one, error: heard.append((one, str(error))))
    assert heard == [(participations[7], "expected records, got none")]
    assert len(training) <= 3
    assert [one.reported for one in participations] == [0 if user == 7 else 2 for user in range(12)]
    assert [len({round for round, _ in one.got}) for one in services] == [one.reported for one in participations]


def test_who_has_reported_comes_back_when_told_and_not_all_at_once(tmp_path):
    keys = [KeyPair.generate("sign") for _ in range(4)]
    deployment = ONE_SHUFFLER.deployment(tmp_path / "deployment", keys, rounds=1, round_seconds=60.0)
    service, update = Scripted(deployment, [1]), ONE_SHUFFLER.update(0, 4)
    service.retry_after = 600.0
    policy, pauses = lenient_policy(deployment.signed), set()
    for user, key in enumerate(keys):
        client = Client(tmp_path / f"user-{user}", policy=policy, key=key)
        pauses.add(Participation(client, [service], lambda model: update).step())
    assert len(service.got) == 4
    assert all(600 <= pause <= 750 for pause in pauses) and len(pauses) == 4


@pytest.mark.parametrize("round", [0, 2, 9])
def test_a_round_that_the_task_does_not_have_is_refused(tmp_path, round):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = ONE_SHUFFLER.deployment(tmp_path / "deployment", keys, rounds=1, round_seconds=60.0)
    client = Client(tmp_path / "user", policy=lenient_policy(deployment.signed), key=keys[0])
    participation = Participation(client, [Scripted(deployment, [round])], lambda model: model)
    if round == 0:
        assert participation.step() is not None  # nothing is open yet
        return
    with pytest.raises(Refused, match=f"has opened round {round}, and the task has rounds 1 to 1"):
        participation.step()


class Taken(Scripted):
    """A shuffler that has something else of this user."""

    def upload(self, *said, **more):
        raise Conflict("this client has another upload in round 1: one counts per client and round")


def test_a_user_whose_round_is_taken_goes_on_to_the_next(tmp_path):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = ONE_SHUFFLER.deployment(tmp_path / "deployment", keys, rounds=1, round_seconds=60.0)
    client, update = Client(tmp_path / "user", policy=lenient_policy(deployment.signed), key=keys[0]), ONE_SHUFFLER
    assert take_part(client, [Taken(deployment, [1, -1])], lambda model: update.update(0, 2), patience=5.0) == 0


def test_pacing_tells_the_time_that_is_left_and_nothing_of_who_reported():
    task = types.SimpleNamespace(min_clients=5, max_clients=9, round_seconds=600.0)
    backoff = Backoff(task)
    assert backoff.headers(0.0) == {}
    backoff.note_round(1, 100.0)
    assert backoff.headers(100.0) == {RETRY_AFTER: "60.00"} and backoff.headers(650.0) == {RETRY_AFTER: "50.00"}
    assert backoff.headers(701.0) == {RETRY_AFTER: "60.00"}  # it takes longer than it should


def test_a_round_that_needs_all_is_expected_to_take_as_long_as_the_last_one():
    backoff = Backoff(types.SimpleNamespace(min_clients=5, max_clients=5, round_seconds=600.0))
    backoff.note_round(1, 100.0)
    assert backoff.headers(101.0) == {}
    backoff.note_round(2, 130.0)
    assert backoff.headers(140.0) == {RETRY_AFTER: "20.00"}
