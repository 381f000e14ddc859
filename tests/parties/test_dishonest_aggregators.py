"""Attacks on shares: an aggregator that chooses whom to count, one whose store is set back, and who poses as one."""

from __future__ import annotations

import contextlib
import math
import shutil

import msgspec
import numpy as np
import pytest
from parties.household import opened
from parties.sharing import Sharing, Straight, close, open_round

from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.http_clients import Gone, Unreachable
from dovetail.parties.common.keys import KeyPair, ServicePairs
from dovetail.parties.common.sealing import Unsealable, open_sealed
from dovetail.parties.common.sharing import add_share, decode_sum
from dovetail.parties.common.task import sign
from dovetail.parties.common.wire import RoundStatus, TooLate, decode_vector
from dovetail.parties.user.client import Client
from dovetail.parties.user.participation import take_part
from dovetail.parties.user.policy import Refused

USERS, DIM = 8, 400


def taken_by_all(sharing):
    """Two aggregators that have everybody's shares, the second one honest; and the ids of the reports, by user."""
    analyzer, parties = sharing.analyzer(), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    reports = [sharing.accept(parties, user).uploads[0].report for user in range(len(sharing.users))]
    return analyzer, parties, reports


@pytest.mark.parametrize("counted", [0, 1, 5])
def test_an_aggregator_that_names_fewer_users_than_the_minimum_gets_nothing_from_the_honest_one(tmp_path, counted):
    """Outcome: the round is void, and not a byte about its sum leaves the honest aggregator."""
    sharing = Sharing(tmp_path, clients=USERS, min_clients=6)
    analyzer, (_, honest), reports = taken_by_all(sharing)
    made_up = [bytes([i]) * 16 for i in range(20)]  # users that only the dishonest one has heard of
    lie = [*reports[:counted], *made_up]
    honest.store.freeze(1)
    _, digest = honest.decide_whom_to_count(1, [lie])
    assert honest.close_round(1, [lie], agreed=[digest]) == "void"
    honest.forward(1, link := Straight(analyzer, 1))
    assert link.parts == [] and link.said[0].state == "void"
    assert list(honest.store.parts(1, size=1)) == []


def test_an_aggregator_that_names_other_users_later_gets_the_sum_of_the_first_ones_again(tmp_path):
    """Outcome: one set of users and one sum in a round, so that no two of them differ by a user."""
    sharing = Sharing(tmp_path, clients=USERS, min_clients=6)
    _, (_, honest), reports = taken_by_all(sharing)
    _, digest = honest.decide_whom_to_count(1, [reports])
    with pytest.raises(ValueError, match="the rosters of round 1 are not those of before"):
        honest.decide_whom_to_count(1, [reports[1:]])
    assert honest.close_round(1, [reports], agreed=[digest]) == "sent"
    ((_, first),) = honest.store.parts(1, size=1)
    assert honest.close_round(1, [reports[1:]], agreed=[digest]) == "sent"
    ((_, again),) = honest.store.parts(1, size=1)
    assert first == again and honest.store.num_uploads(1) == USERS


def test_an_aggregator_that_decides_otherwise_than_it_says_gets_nothing(tmp_path):
    """Outcome: the honest aggregator voids a round whose users the other one did not confirm."""
    sharing = Sharing(tmp_path, clients=USERS, min_clients=6)
    _, (_, honest), reports = taken_by_all(sharing)
    honest.decide_whom_to_count(1, [reports])
    assert honest.close_round(1, [reports], agreed=[bytes(32)]) == "void"


def left_of_the_victim(sharing, *, unknown=1):
    """What analyzer and first aggregator find who also know all users but the last; and what that one shared."""
    task, form = sharing.task, sharing.task.contribution()
    _, parties, _ = taken_by_all(sharing)
    known, victim = (np.zeros(form.length, np.uint32) for _ in range(2))
    for user in range(USERS):
        for index, upload in enumerate(sharing.envelope(user).uploads):
            share = sharing.content(user, upload, index=index)
            add_share(victim if user >= USERS - unknown else known, share, form.bits, last=index == 1)
    close(parties)
    found = np.zeros(form.length, np.uint32)
    for index, party in enumerate(parties):
        ((_, sealed),) = party.store.parts(1, size=1)
        purpose = task.sum_purpose(1, index, batch=party.store.batch_id(1))
        found += decode_sum(open_sealed(sealed, sharing.ring.current().opening_key(), purpose), form.length, form.bits)
    return signed(found - known, form.bits), signed(victim, form.bits)


def signed(residues, bits):
    """Integers modulo 2^bits, those around zero."""
    return ((residues.astype(np.int64) + 2 ** (bits - 1)) % 2**bits) - 2 ** (bits - 1)


def test_whoever_knows_all_users_but_one_is_left_with_that_users_own_noise(tmp_path):
    """Outcome: the victim's contribution with its part of the noise (1/8): there are more colluders than stated."""
    sharing = Sharing(tmp_path, clients=USERS, dim=DIM, settings={"noise_multiplier": 2.0, "clip_norm": 1.0})
    found, victim = left_of_the_victim(sharing)
    assert np.array_equal(found, victim)
    protocol, _ = sharing.task.build()
    whole = protocol.std * protocol.scale
    assert 0.8 < victim.std() / (whole / math.sqrt(USERS)) < 1.2  # the update was zero: this is its noise
    promised, local = certify_task(sharing.task, 1)
    assert any("at least 8 honest users and no fake or colluding ones" in one for one in promised.assumptions)
    assert not promised.is_unbounded and local.is_unbounded
    assert "up to 1 of the 2 aggregators" in promised.adversary


def test_a_task_that_states_so_many_colluders_leaves_the_others_all_of_the_noise(tmp_path):
    """Outcome: with 6 of 8 stated as colluders, the sum of the two others bears all of the noise that is certified."""
    settings = {"noise_multiplier": 2.0, "clip_norm": 1.0}
    sharing = Sharing(tmp_path, clients=USERS, dim=DIM, settings=settings, colluders=USERS - 2)
    found, victim = left_of_the_victim(sharing, unknown=2)
    assert np.array_equal(found, victim)
    protocol, _ = sharing.task.build()
    assert 0.8 < victim.std() / (protocol.std * protocol.scale) < 1.2


def test_noise_of_aggregators_does_not_depend_on_whom_the_others_know(tmp_path):
    """Outcome: with noise = 'aggregators' what is left of the victim bears the whole noise of both aggregators.

    Of these the dishonest one knows its own; the honest one's is what is certified.
    """
    settings = {"noise_multiplier": 2.0, "clip_norm": 1.0, "noise": "aggregators"}
    sharing = Sharing(tmp_path, clients=USERS, dim=DIM, settings=settings)
    found, victim = left_of_the_victim(sharing)
    assert not victim.any()  # its update was zero, and it adds no noise of its own
    protocol, _ = sharing.task.build()
    assert 0.8 < found.std() / (protocol.std * protocol.scale * math.sqrt(2)) < 1.2
    promised, _ = certify_task(sharing.task, 1)
    assert not any("honest users" in one for one in promised.assumptions)


def test_of_counts_whoever_knows_all_users_but_one_has_that_users_report(tmp_path):
    """Outcome: the randomized report, for which the local guarantee is what remains, as against a shuffler."""
    sharing = Sharing(tmp_path, "ss_simple", clients=USERS, dim=DIM)
    found, victim = left_of_the_victim(sharing)
    assert np.array_equal(found, victim)
    _, local = certify_task(sharing.task, 1)
    assert local.eps == pytest.approx(DIM * sharing.task.settings["eps_local"], rel=1e-3)


class Failing(Straight):
    """An analyzer that takes the sum, and of which nothing more is heard; later it answers as over HTTP."""

    def __init__(self, analyzer, index, *, silent):
        super().__init__(analyzer, index)
        self._silent = silent

    def send_part(self, round, batch, number, part):
        with gone():
            super().send_part(round, batch, number, part)
        if self._silent:
            raise Unreachable("silence")

    def report_closed(self, round, closed):
        with gone():
            super().report_closed(round, closed)


@contextlib.contextmanager
def gone():
    """Status 410, to a link."""
    try:
        yield
    except TooLate as error:
        raise Gone(str(error)) from error


def restored_while_forwarding(sharing, *, after_closing):
    """An aggregator whose sum was counted goes on from a copy of its store, from before or after closing."""
    home, copy = sharing.folder / "aggregator-0", sharing.folder / "copy"
    analyzer, parties, _ = taken_by_all(sharing)
    if not after_closing:
        shutil.copytree(home, copy)
    assert close(parties) == ["sent", "sent"]
    if after_closing:
        shutil.copytree(home, copy)
    with pytest.raises(Unreachable):
        parties[0].forward(1, first := Failing(analyzer, 0, silent=True))
    analyzer.close()  # it starts again, too: what it has seen is on disk
    parties[0].close()
    shutil.rmtree(home)
    shutil.move(copy, home)
    analyzer, parties[0] = sharing.analyzer(), sharing.aggregator(0)
    close(parties)
    links = [Failing(analyzer, index, silent=False) for index in range(2)]
    for party, link in zip(parties, links, strict=True):
        party.forward(1, link)
    return analyzer, (*first.parts, *links[0].parts)


@pytest.mark.parametrize("noise", ["users", "aggregators"])
def test_an_aggregator_whose_store_was_restored_before_closing_spoils_the_round(tmp_path, noise):
    """Outcome: noticed, though it agrees on the same users; neither of its two sums is used, the cost stays."""
    sharing = Sharing(tmp_path, clients=4, settings={"noise": noise})
    analyzer, (first, second) = restored_while_forwarding(sharing, after_closing=False)
    assert first != second
    assert [one["outcome"] for one in analyzer.privacy()["history"]] == ["spoiled"]
    assert np.array_equal(decode_vector(analyzer.model(1), 6), np.zeros(6))
    assert [entry.kind for entry in analyzer.ledger.entries] == ["open", "reserve", "reserve"]
    assert analyzer.status().round == 2


def test_an_aggregator_whose_store_was_copied_after_closing_sends_the_same_sum(tmp_path):
    """Outcome: the sum counts once, and the round is released."""
    sharing = Sharing(tmp_path, clients=4, settings={"noise": "aggregators"})
    analyzer, (first, second) = restored_while_forwarding(sharing, after_closing=True)
    assert first == second
    assert [(one["outcome"], one["uploads"]) for one in analyzer.privacy()["history"]] == [("released", 4)]


class Impostor:
    """Who ends the line to an aggregator without having its keys: it says what it likes, and keeps what it is given."""

    def __init__(self, signed, task):
        self._signed, self._task, self.given = signed, task, []

    def task(self):
        return self._signed

    def notices(self):
        return []

    def status(self):
        return RoundStatus(task_id=self._task.task_id, round=1, over=bool(self.given), head=bytes(32))

    def model(self, round, *, dim):
        return np.zeros(dim, np.float32)

    def upload(self, task_id, round, upload, *, sender, signature):
        self.given.append(upload)


def pinning(sharing):
    pinned = tuple(keys.public.key_id for keys in sharing.keys)
    policy = msgspec.structs.replace(sharing.policy, aggregators=pinned)
    return Client(sharing.folder / "user-0", policy=policy, key=sharing.users[0])


def test_impostors_in_the_place_of_all_aggregators_get_no_share(tmp_path):
    """Outcome: what they are given opens with the aggregators' keys alone, not even with the analyzer's."""
    sharing = Sharing(tmp_path)
    impostors = [Impostor(sharing.signed, sharing.task) for _ in range(2)]
    assert take_part(pinning(sharing), impostors, np.ones_like) == 1
    own = ServicePairs(sign=KeyPair.generate("sign"), seal=KeyPair.generate("seal"))
    for index, impostor in enumerate(impostors):
        (upload,) = impostor.given
        for seal in (own.seal, sharing.ring.current(), sharing.keys[1 - index].seal):
            keys = ServicePairs(sign=own.sign, seal=seal)
            with pytest.raises(Unsealable):
                opened(sharing.task, upload, keys, sharing.users[0], index=index)
        assert sharing.content(0, upload, index=index)  # its own aggregator opens it


def test_impostors_with_a_signed_task_of_their_own_get_nothing_from_who_has_pinned_aggregators(tmp_path):
    """Outcome: refused before anything is spent."""
    sharing = Sharing(tmp_path)
    theirs = tuple(ServicePairs.add(tmp_path / f"impostor-{i}").public for i in range(2))
    other = msgspec.structs.replace(sharing.task, aggregators=(sharing.task.aggregators[0], theirs[1]))
    impostors = [Impostor(sign(other, sharing.signer), other) for _ in range(2)]
    with pytest.raises(Refused, match="not among this user's pinned aggregators"):
        take_part(pinning(sharing), impostors, np.ones_like)
    assert [impostor.given for impostor in impostors] == [[], []]
    assert not list((tmp_path / "user-0" / "spending").glob("task-*"))
