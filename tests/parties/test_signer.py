"""The signer's key when it is replaced, stolen or expired: what a thief of it can still do, and who hears of it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time

import msgspec
import numpy as np
import pytest
from parties.sharing import Sharing, Straight

from dovetail.parties.common.http_clients import Unreachable
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.notices import (
    Notices,
    announce_rotation,
    body_digest,
    read_notices,
    revoke_key,
    rotate_key,
    withdraw_task,
    write_notices,
)
from dovetail.parties.common.task import sign, task_id_of, verify
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.user.client import Client
from dovetail.parties.user.consent import leave_tasks
from dovetail.parties.user.participation import Participation
from dovetail.parties.user.policy import Policy, Refused
from dovetail.parties.user.spending import SetBack


class Signer:
    """A signer whose key is stolen, its recovery key, and a user that has pinned both and follows rotations."""

    def __init__(self, folder):
        self.sharing = Sharing(folder, "ss_simple", rounds=3)
        self.old, self.new, self.recovery, self.thief = (
            self.sharing.signer,
            *(KeyPair.generate("sign") for _ in range(3)),
        )
        self.policy = msgspec.structs.replace(
            self.sharing.policy,
            follow_rotations=True,
            recovery=self.recovery.public.key_id,
            aggregators=None,  # so that everything hangs on the signer's key
        )

    def task(self, key, **changed):
        """Another task, signed with this key; the thief's names aggregators of the thief's own."""
        return sign(msgspec.structs.replace(self.sharing.task, name="another", **changed), key)

    def notices(self, *signed):
        return Notices(self.policy.signer, signed, recovery=self.policy.recovery)

    def admits(self, signed, notices):
        try:
            self.policy.admit(signed, notices)
        except Refused:
            return False
        return True

    def rotation(self, *, standing=()):
        rotation = rotate_key(self.old.public, self.new.public, by=self.old)
        return announce_rotation(self.old, rotation, standing=standing)

    def usurpation(self):
        """The thief makes a key of its own the successor."""
        return announce_rotation(self.old, rotate_key(self.old.public, self.thief.public, by=self.old))

    def revocation(self, *, successor=True, standing=()):
        if not successor:
            return revoke_key(self.recovery, key=self.old.public.key_id, standing=standing)
        rotation = rotate_key(self.old.public, self.new.public, by=self.old)
        return revoke_key(self.recovery, rotation=rotation, stolen=self.old, standing=standing)


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path)


# --- expiry


def test_a_thief_cannot_make_a_key_last_longer(tmp_path, signer):
    """Outcome: another expiry makes another key, which nobody has pinned."""
    soon = dataclasses.replace(signer.old, public=msgspec.structs.replace(signer.old.public, expires=2**40))
    assert soon.public.public == signer.old.public.public and soon.public.key_id != signer.old.public.key_id
    with pytest.raises(Refused, match="expected a task signed by"):
        signer.policy.admit(sign(signer.sharing.task, soon), signer.notices())
    assert signer.admits(signer.task(signer.old), signer.notices(withdraw_task(soon, signer.sharing.task.task_id)))


def test_an_expired_key_announces_nothing_and_signs_nothing(monkeypatch, signer):
    """What it announced while it lasted is remembered."""
    signed, withdrawal = signer.task(signer.old), withdraw_task(signer.old, signer.sharing.task.task_id)
    heard, after = signer.notices(withdrawal), signer.old.public.expires + 1
    monkeypatch.setattr(time, "time", lambda: after)
    assert not signer.admits(signed, signer.notices())
    late = signer.notices(withdrawal, signer.usurpation())
    assert late.signed == [] and late.current == signer.old.public.key_id
    assert heard.why_ended(signer.sharing.signed)


# --- rotation


def test_a_rotation_ends_the_old_key_for_everything_but_what_it_lists(signer):
    running, kept = signer.sharing.signed, withdraw_task(signer.old, bytes(32))
    known = signer.notices(kept, signer.rotation(standing=(signer.sharing.task.task_id, body_digest(kept))))
    assert signer.admits(running, known) and kept in known.signed
    assert signer.admits(signer.task(signer.new), known)
    mine = signer.task(signer.old, aggregators=tuple(ServicePairs.add(signer.sharing.folder / n).public for n in "xy"))
    with pytest.raises(Refused, match=f"the key {signer.old.public.key_id.hex()} that signed the task has a successor"):
        signer.policy.admit(mine, known)


def test_a_key_that_was_rotated_away_withdraws_and_announces_nothing(signer):
    known, successors = signer.notices(signer.rotation()), signer.task(signer.new)
    later = [
        withdraw_task(signer.old, verify(successors, signer=signer.new.public.key_id).task_id),
        signer.usurpation(),
    ]
    known.receive(later)
    assert signer.admits(successors, known) and known.current == signer.new.public.key_id
    assert not signer.admits(signer.task(signer.thief), known)


def test_the_successor_withdraws_tasks_of_the_key_before_it(signer):
    standing = (signer.sharing.task.task_id,)
    known = signer.notices(signer.rotation(standing=standing), withdraw_task(signer.new, signer.sharing.task.task_id))
    with pytest.raises(Refused, match="the signer has withdrawn the task"):
        signer.policy.admit(signer.sharing.signed, known)


def test_of_two_successors_neither_counts_until_the_owner_revokes(signer):
    known = signer.notices(signer.usurpation(), signer.rotation(standing=(signer.sharing.task.task_id,)))
    for signed in (signer.sharing.signed, signer.task(signer.new), signer.task(signer.thief)):
        assert not signer.admits(signed, known)
    assert "two successors" in known.why_ended(signer.sharing.signed)
    known.receive([signer.revocation(standing=(signer.sharing.task.task_id,))])
    assert signer.admits(signer.sharing.signed, known) and signer.admits(signer.task(signer.new), known)
    assert not signer.admits(signer.task(signer.thief), known)


# --- revocation


@pytest.mark.parametrize("successor", [False, True])
def test_a_revocation_ends_a_stolen_key_and_all_that_its_thief_announced(signer, successor):
    known = signer.notices(signer.usurpation())
    assert signer.admits(signer.task(signer.thief), known), "the thief has the key: until it is revoked it signs"
    known.receive([signer.revocation(successor=successor, standing=(signer.sharing.task.task_id,))])
    assert signer.admits(signer.sharing.signed, known)
    assert signer.admits(signer.task(signer.new), known) == successor
    for key in (signer.old, signer.thief):
        assert not signer.admits(signer.task(key), known)
    known.receive([signer.usurpation(), signer.rotation(), withdraw_task(signer.thief, signer.sharing.task.task_id)])
    assert signer.admits(signer.sharing.signed, known) and not signer.admits(signer.task(signer.thief), known)


def test_only_the_pinned_recovery_key_revokes(signer):
    """Neither the thief with the stolen key, nor somebody with another recovery key, nor one where none is pinned."""
    rotation = rotate_key(signer.old.public, signer.thief.public, by=signer.old)
    forged = [
        revoke_key(signer.old, key=signer.old.public.key_id),
        revoke_key(signer.thief, key=signer.old.public.key_id),
        revoke_key(signer.thief, rotation=rotation, stolen=signer.old),
        msgspec.structs.replace(signer.revocation(), cosigner=None),
        msgspec.structs.replace(signer.revocation(), cosignature=bytes(64)),
    ]
    for notice in forged:
        assert signer.notices(notice).signed == []
    assert Notices(signer.policy.signer, [signer.revocation()]).signed == []


def test_a_successor_after_a_theft_takes_both_keys(signer):
    """A thief of the recovery key alone can end the signer's key, and put none in its place."""
    rotation = rotate_key(signer.old.public, signer.new.public, by=signer.old)
    with pytest.raises(ValueError, match="needs that key's signature, too"):
        revoke_key(signer.recovery, rotation=rotation)
    forged = revoke_key(signer.recovery, rotation=rotation, stolen=signer.old)
    alone = msgspec.structs.replace(forged, signature=forged.cosignature, signer=signer.recovery.public)
    assert signer.notices(alone).signed == []


def test_a_user_remembers_a_revocation_through_a_restart(tmp_path, signer):
    user = Client(tmp_path / "user", policy=signer.policy, key=signer.sharing.users[0])
    user.receive_notices([signer.usurpation()])
    user.receive_notices([signer.revocation(standing=(signer.sharing.task.task_id,))])
    again = Client(tmp_path / "user", policy=signer.policy, key=signer.sharing.users[0])
    for one in (user, again):
        assert one.admit(signer.sharing.signed) and one.admit(signer.task(signer.new))
        for key in (signer.old, signer.thief):
            with pytest.raises(Refused):
                one.report(signer.task(key), 1, np.zeros(signer.sharing.task.dim))
    assert not list((tmp_path / "user" / "spending").glob("task-*"))


def test_a_rotation_does_not_forget_what_was_heard_before_it(signer):
    """A thief who rotates the key away cannot bring a withdrawn task back."""
    known = signer.notices(withdraw_task(signer.old, signer.sharing.task.task_id))
    known.receive([announce_rotation(signer.old, rotate_key(signer.old.public, signer.thief.public, by=signer.old),
                                     standing=(signer.sharing.task.task_id,))])  # fmt: skip
    assert not signer.admits(signer.sharing.signed, known)


def named(old, new, **options):
    """The notice of an old key that a new one follows it."""
    return announce_rotation(old, rotate_key(old.public, new.public, by=old), **options)


@pytest.mark.parametrize("before", ["the owner", "the thief", "a key of the thief's"])
def test_a_successor_that_was_announced_before_the_theft_was_noticed_is_the_successor(signer, before):
    """Revoking the old key ended it, too, for whoever had heard of it already, and it could not be revoked itself."""
    by = {"the owner": [signer.rotation()], "the thief": [named(signer.old, signer.new)]}
    through = [named(signer.old, signer.thief), named(signer.thief, signer.new)]
    known = signer.notices(*by.get(before, through))
    known.receive([signer.revocation()])
    assert known.current == signer.new.public.key_id and signer.admits(signer.task(signer.new), known)
    for key in (signer.old, signer.thief):
        assert not signer.admits(signer.task(key), known)
    last = KeyPair.generate("sign")
    rotation = rotate_key(signer.new.public, last.public, by=signer.new)
    known.receive([revoke_key(signer.recovery, rotation=rotation, stolen=signer.new)])
    assert signer.admits(signer.task(last), known) and not signer.admits(signer.task(signer.new), known)


def test_an_old_revocation_brings_no_key_back_that_was_revoked_since(signer):
    """The successor that it names was stolen, too, and the user heard of that first."""
    last = KeyPair.generate("sign")
    rotation = rotate_key(signer.new.public, last.public, by=signer.new)
    second = revoke_key(signer.recovery, rotation=rotation, stolen=signer.new)
    known = signer.notices(signer.rotation())
    for notice in (second, signer.revocation(), signer.rotation(), second):
        known.receive([notice])
        assert signer.admits(signer.task(last), known) and not signer.admits(signer.task(signer.new), known)
    assert not signer.admits(signer.task(signer.old), known)


def test_a_list_that_a_thief_made_stand_falls_with_its_key(signer):
    theirs = tuple(ServicePairs.add(signer.sharing.folder / name).public for name in "xy")
    mine = signer.task(signer.old, aggregators=theirs)
    known = signer.notices(named(signer.old, signer.thief, standing=(task_id_of(mine.body),)))
    assert signer.admits(mine, known)
    known.receive([signer.revocation()])
    assert not signer.admits(mine, known)


def test_what_is_remembered_is_what_was_heard_in_whatever_order(tmp_path):
    """120 random histories of four keys, some of them stolen: a user that starts again knows just the same."""
    keys, recovery = [KeyPair.generate("sign") for _ in range(4)], KeyPair.generate("sign")
    notices = [withdraw_task(key, bytes([i]) * 32) for i, key in enumerate(keys)]
    notices += [revoke_key(recovery, key=key.public.key_id) for key in keys]
    for old, new in itertools.permutations(keys, 2):
        notices.append(named(old, new))
        rotation = rotate_key(old.public, new.public, by=old)
        notices.append(revoke_key(recovery, rotation=rotation, stolen=old))
    options = {"signer": keys[0].public.key_id, "recovery": recovery.public.key_id}
    random, disputes = np.random.default_rng(0), 0
    for _ in range(120):
        live = Notices(**options)
        for _ in range(random.integers(1, 6)):
            live.receive([notices[i] for i in random.choice(len(notices), random.integers(1, 4), replace=False)])
        write_notices(tmp_path / "notices.json", live.signed)
        again = read_notices(tmp_path / "notices.json", **options, in_order=True)
        for name in ("_lineage", "_standing", "_revoked", "_disputed", "_withdrawn", "_rotations"):
            assert getattr(again, name) == getattr(live, name), name
        assert len(set(live._lineage)) == len(live._lineage)
        disputes += bool(live._disputed)
    assert disputes > 1


def test_a_thief_cannot_use_up_the_owners_next_key(signer):
    """It makes that key its own successor, so that the revocation ends it; the owner's latest key brings it back."""
    next_one = KeyPair.generate("sign")
    known = signer.notices(named(signer.old, signer.thief), named(signer.thief, next_one))
    known.receive([signer.revocation()])
    assert not signer.admits(signer.task(next_one), known)
    known.receive([named(signer.new, next_one)])
    assert signer.admits(signer.task(next_one), known) and not signer.admits(signer.task(signer.new), known)


def test_a_key_in_the_middle_is_revoked_in_any_order(signer):
    middle, standing = KeyPair.generate("sign"), (signer.sharing.task.task_id,)
    first, stolen = named(signer.old, middle, standing=standing), named(middle, signer.thief)
    rotation = rotate_key(middle.public, signer.new.public, by=middle)
    revocation = revoke_key(signer.recovery, rotation=rotation, stolen=middle)
    for order in itertools.permutations([first, stolen, revocation]):
        known = signer.notices(*order)
        assert signer.admits(signer.task(signer.new), known) and signer.admits(signer.sharing.signed, known)
        assert not signer.admits(signer.task(signer.thief), known) and not signer.admits(signer.task(middle), known)
    known = signer.notices(first, stolen)
    known.receive([revocation])
    known.receive([stolen, first])
    assert signer.admits(signer.task(signer.new), known) and not signer.admits(signer.task(signer.thief), known)


def test_no_key_follows_itself_or_its_own_successor(signer):
    """A ring of keys would leave the owner without any."""
    known = signer.notices(named(signer.old, signer.old))
    assert known.signed == [] and signer.admits(signer.task(signer.old), known)
    known = signer.notices(named(signer.old, signer.new), named(signer.new, signer.old))
    assert signer.admits(signer.task(signer.new), known) and not signer.admits(signer.task(signer.old), known)


def test_two_successors_are_remembered_through_a_restart(tmp_path, signer):
    """Whoever had forgotten the dispute would believe the thief, if that one's word came alone."""
    pair = signer.sharing.users[0]
    user = Client(tmp_path / "user", policy=signer.policy, key=pair)
    user.receive_notices([signer.usurpation(), signer.rotation()])
    again = Client(tmp_path / "user", policy=signer.policy, key=pair)
    for one in (user, again):
        one.receive_notices([signer.usurpation()])
        for key in (signer.old, signer.thief, signer.new):
            assert not signer.admits(signer.task(key), one.notices)
    again.receive_notices([signer.revocation()])
    assert signer.admits(signer.task(signer.new), Client(tmp_path / "user", policy=signer.policy, key=pair).notices)


def test_two_processes_of_a_user_do_not_forget_what_the_other_heard(tmp_path, signer):
    user, agent = (Client(tmp_path / "user", policy=signer.policy, key=signer.sharing.users[0]) for _ in range(2))
    user.receive_notices([withdraw_task(signer.old, signer.sharing.task.task_id)])
    agent.receive_notices([withdraw_task(signer.old, bytes(32))])
    for one in (agent, Client(tmp_path / "user", policy=signer.policy, key=signer.sharing.users[0])):
        assert not signer.admits(signer.sharing.signed, one.notices) and len(one.notices.signed) == 2


def test_copies_of_a_notice_are_no_more_notices(signer):
    """Without any key, a service could fill the memory of users with an owner's one withdrawal."""
    withdrawal = withdraw_task(signer.old, bytes(32))
    copies = [msgspec.structs.replace(withdrawal, cosignature=bytes([i])) for i in range(9)]
    assert signer.notices(*copies).signed == []
    copies = [msgspec.structs.replace(withdrawal, cosigner=KeyPair.generate("sign").public) for _ in range(9)]
    assert signer.notices(withdrawal, *copies, withdrawal).signed == [withdrawal]


def test_what_a_thief_announced_of_an_analyzer_without_a_key_to_sign_with_ends_with_its_key(tmp_path, signer):
    """Nobody but the signer can name that one's successor."""
    old, theirs = KeyPair.generate("seal").public, KeyPair.generate("seal").public
    known = signer.notices(announce_rotation(signer.old, rotate_key(old, theirs)))
    assert known.successors(old.key_id) == {old.key_id, theirs.key_id}
    known.receive([signer.revocation()])
    assert known.successors(old.key_id) == {old.key_id}


def test_who_pins_aggregators_gives_a_thief_nothing(tmp_path, signer):
    theirs = tuple(ServicePairs.add(tmp_path / name).public for name in "xy")
    stolen, ours = signer.task(signer.old, aggregators=theirs), signer.sharing.task.aggregators
    assert signer.admits(stolen, signer.notices())
    pinned = msgspec.structs.replace(signer.policy, aggregators=tuple(keys.key_id for keys in ours))
    with pytest.raises(Refused, match="not among this user's pinned aggregators"):
        pinned.admit(stolen, signer.notices())


def test_keys_are_revoked_by_commands(tmp_path, command):
    def run(*words):
        status, out, err = command(*map(str, words))
        assert status == 0, err
        return out

    for name in ("owner", "recovery"):
        run("keys", tmp_path / name, "--use", "sign", "--public", tmp_path / f"{name}.json")
    words = ("--signer", tmp_path / "owner.json", "--recovery", tmp_path / "recovery.json", "--analyzer", "00" * 16)
    run("client", "new", tmp_path / "user", *words, "--min-clients", "1", "--any-service", "--follow-rotations")
    policy = Policy.read(tmp_path / "user" / "policy.json")
    stolen = KeyRing(tmp_path / "owner", "sign").current()
    assert policy.recovery == KeyRing(tmp_path / "recovery", "sign").current().public.key_id
    run("keys", tmp_path / "owner", "--use", "sign", "--rotate", "--public", tmp_path / "owner.json")
    rotation, notices = tmp_path / "owner" / f"rotation-{stolen.public.key_id.hex()}.json", tmp_path / "notices.json"
    status, _, err = command("task", "revoke", str(notices), "--recovery", str(tmp_path / "recovery"))
    assert status == 2 and "name the stolen key by --key" in " ".join(err.split()) and not notices.exists()
    run(
        "task",
        "revoke",
        notices,
        "--recovery",
        tmp_path / "recovery",
        "--rotation",
        rotation,
        "--signer",
        tmp_path / "owner",
    )
    known = read_notices(notices, policy.signer, recovery=policy.recovery)
    assert known.current == KeyRing(tmp_path / "owner", "sign").current().public.key_id != stolen.public.key_id
    other = tmp_path / "alone.json"
    run("task", "revoke", other, "--recovery", tmp_path / "recovery", "--key", stolen.public.key_id.hex())
    alone = read_notices(other, policy.signer, recovery=policy.recovery)
    assert alone.signed and alone.current == stolen.public.key_id
    before = other.read_bytes()
    words = ["--recovery", str(tmp_path / "recovery"), "--rotation", str(rotation), "--signer", str(tmp_path / "owner")]
    status, _, err = command("task", "revoke", str(other), *words)
    assert status == 2 and "this revocation would have no effect" in " ".join(err.split())
    (tmp_path / "task.json").write_bytes(msgspec.json.encode(sign(Sharing(tmp_path / "s", "ss_simple").task, stolen)))
    words = ["--task", str(tmp_path / "task.json"), "--signer", str(tmp_path / "owner")]
    status, _, err = command("task", "withdraw", str(other), *words)
    assert status == 2 and "this withdrawal would have no effect: the key" in " ".join(err.split())
    assert other.read_bytes() == before


def test_after_a_revocation_commands_sign_with_the_key_that_users_believe(tmp_path, command):
    """They read the owner's file as if nothing had been revoked, and signed a withdrawal with the stolen key."""

    def run(*words):
        status, out, err = command(*map(str, words))
        assert status == 0, err
        return out

    sharing, owner, notices = Sharing(tmp_path / "sharing", "ss_simple"), tmp_path / "owner", tmp_path / "notices.json"
    owner.mkdir()
    stolen, task = sharing.signer, tmp_path / "task.json"
    stolen.save(owner / f"sign-{stolen.public.key_id.hex()}.json")
    task.write_bytes(msgspec.json.encode(sharing.signed))
    run("keys", tmp_path / "recovery", "--use", "sign", "--public", tmp_path / "recovery.json")
    run("keys", owner, "--use", "sign", "--rotate", "--public", tmp_path / "owner.json")
    rotation = owner / f"rotation-{stolen.public.key_id.hex()}.json"
    words = ("--recovery", tmp_path / "recovery", "--rotation", rotation, "--signer", owner, "--task", task)
    run("task", "revoke", notices, *words)
    recovery = KeyRing(tmp_path / "recovery", "sign").current().public.key_id
    told = {"signer": stolen.public.key_id, "recovery": recovery}
    assert read_notices(notices, **told).why_ended(sharing.signed) is None
    ServicePairs.add(tmp_path / "service")
    run("keys", tmp_path / "service", "--use", "service", "--rotate", "--public", tmp_path / "service.json")
    (other,) = (tmp_path / "service").glob("rotation-*.json")
    run("task", "announce", notices, "--rotation", other, "--signer", owner)
    run("task", "withdraw", notices, "--task", task, "--signer", owner)
    known = read_notices(notices, **told)
    assert len(known.signed) == 3 and "withdrawn" in known.why_ended(sharing.signed)


def test_a_revocation_spares_only_tasks_that_would_end(tmp_path, command, signer):
    """Who names a task that another key signed meant another task."""
    recovery, notices = tmp_path / "recovery", tmp_path / "notices.json"
    assert command("keys", str(recovery), "--use", "sign")[0] == 0
    files = {"own": signer.task(signer.old), "other": signer.task(signer.thief)}
    for name, signed in files.items():
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(signed))
    revoked, by = signer.old.public.key_id, signer.thief.public.key_id
    words = ("task", "revoke", str(notices), "--recovery", str(recovery), "--key", revoked.hex())
    spared = ("--task", str(tmp_path / "own.json"))
    status, _, err = command(*words, *spared, "--task", str(tmp_path / "other.json"))
    said = " ".join(err.split())
    assert status == 2 and not notices.exists()
    assert f"other.json' was signed by the key {by.hex()}, not by {revoked.hex()}, which is revoked" in said
    status, out, _ = command(*words, *spared)
    assert status == 0 and "1 of its tasks go on" in " ".join(out.split())
    pinned = KeyRing(recovery, "sign").current().public.key_id
    known = read_notices(notices, revoked, recovery=pinned)
    assert known.why_ended(files["own"]) is None
    assert "was revoked" in known.why_ended(signer.task(signer.old, rounds=2))


# --- withdrawal stops everybody


class Followed(Straight):
    """The analyzer as an aggregator sees it: it goes on whatever its signer says."""

    def status(self):
        return self._analyzer.status()

    def signed_model(self, round, *, dim):
        return self._analyzer.model(round), b""


class Peer:
    """Another aggregator of the task, without a network between them."""

    def __init__(self, party):
        self._store = party.store

    def roster(self, round):
        return self._store.roster(round)

    def agreed_digest(self, round):
        return self._store.agreed_digest(round)


class Aggregators:
    """Both aggregators of a task as services; `run` lets them close what is full and follow the analyzer."""

    def __init__(self, sharing, analyzer, notices):
        self.parties, self.links = [], [Followed(analyzer, index) for index in range(2)]
        for index in range(2):
            (sharing.folder / f"segments-{index}").mkdir(exist_ok=True)
            self.parties.append(sharing.aggregator(index, segments=sharing.folder / f"segments-{index}"))
        self.services = [
            IntermediaryService(
                party,
                enrolled=sharing.enrolled,
                analyzer=self.links[index],
                peers=[Peer(self.parties[1 - index])],
                notices=lambda: notices,
            )
            for index, party in enumerate(self.parties)
        ]

    def run(self):
        async def steps():
            for _ in range(4):  # they wait for each other
                for service in self.services:
                    await service._close_rounds()
                for service in self.services:
                    await service._follow_analyzer()

        asyncio.run(steps())

    @property
    def sums(self):
        """What the analyzer was sent."""
        return [part for link in self.links for part in link.parts]

    @property
    def rounds(self):
        """Those that are open, or closed and not yet sent."""
        return [round for party in self.parties for round, *_ in party.store.pending_rounds()]

    def close(self):
        for party in self.parties:
            party.close()


@pytest.fixture
def full(tmp_path):
    """A task, its analyzer, and both aggregators with all uploads of round 1."""
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    analyzer, notices = sharing.analyzer(), Notices(sharing.signer.public.key_id)
    aggregators = Aggregators(sharing, analyzer, notices)
    asyncio.run(aggregators.services[0]._follow_analyzer())
    asyncio.run(aggregators.services[1]._follow_analyzer())
    for user in range(4):
        sharing.accept(aggregators.parties, user)
    assert all(party.store.num_uploads(1) == 4 and party.is_full(1) for party in aggregators.parties)
    yield sharing, analyzer, notices, aggregators
    analyzer.close()


def test_without_a_withdrawal_sums_are_handed_over_and_the_next_round_opens(full):
    """What a withdrawal has to stop."""
    _, analyzer, _, aggregators = full
    aggregators.run()
    assert len(aggregators.sums) == 2 and aggregators.rounds == [2, 2] and analyzer.status().round == 2
    aggregators.close()


def test_withdrawal_makes_aggregators_drop_their_rounds_for_good(full):
    """A sum was handed over after the withdrawal, and the next round opened."""
    sharing, analyzer, notices, aggregators = full
    notices.receive([withdraw_task(sharing.signer, sharing.task.task_id)])
    aggregators.run()
    assert aggregators.sums == [] and aggregators.rounds == [] and analyzer.status().round == 1
    assert all("withdrawn" in party.store.why_ended() for party in aggregators.parties)
    analyzer.give_up_round(1, "nobody closes it")  # an analyzer that does not heed the notice
    aggregators.run()
    assert aggregators.rounds == []
    aggregators.close()
    again = Aggregators(sharing, analyzer, Notices(sharing.signer.public.key_id))  # they lost the file
    again.run()
    assert again.rounds == [] and again.sums == []
    again.close()


def test_withdrawal_ends_the_analyzer_for_good(tmp_path):
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    analyzer = sharing.analyzer()
    analyzer.end_task("the signer has withdrawn the task")
    analyzer.close()
    again = sharing.analyzer()
    assert again.status().over and [one["outcome"] for one in again.privacy()["history"]] == ["void"]
    again.close()


# --- users


class Down:
    """A service that is down, then up."""

    def __init__(self, sharing, analyzer):
        self.sharing, self.analyzer, self.up, self.got = sharing, analyzer, False, []

    def task(self):
        return self.sharing.signed

    def status(self):
        return self.analyzer.status()

    def notices(self):
        return []

    def model(self, round, *, dim):
        return np.zeros(dim, np.float32)

    def upload(self, *args, **options):
        if not self.up:
            raise Unreachable("down")
        self.got.append(args)


@pytest.mark.parametrize("how", ["left", "withdrawn"])
def test_who_leaves_while_an_envelope_waits_uploads_nothing_more(tmp_path, how):
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    analyzer = sharing.analyzer()
    links = [Down(sharing, analyzer) for _ in range(2)]
    user = Client(tmp_path / "user", policy=sharing.policy, key=sharing.users[0])
    participation = Participation(user, links, np.ones_like)
    links[0].up = True
    participation.step()
    assert len(links[0].got) == 1 and list((tmp_path / "user" / "outbox").iterdir())
    if how == "left":
        leave_tasks(tmp_path / "user", [sharing.task.task_id])
        assert not list((tmp_path / "user" / "outbox").iterdir())
    else:
        user.receive_notices([withdraw_task(sharing.signer, sharing.task.task_id)])
    links[1].up = True
    with pytest.raises(Refused, match="left" if how == "left" else "the signer has withdrawn the task"):
        participation.step()
    assert links[1].got == [] and not list((tmp_path / "user" / "outbox").iterdir())
    analyzer.close()


@pytest.mark.parametrize("tells", [0, 1])
def test_one_service_cannot_keep_a_withdrawal_from_users(tmp_path, tells):
    """They ask all of them, and remember."""
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    analyzer = sharing.analyzer()
    links = [Down(sharing, analyzer) for _ in range(2)]
    links[tells].notices = lambda: [withdraw_task(sharing.signer, sharing.task.task_id)]
    for _ in range(2):
        user = Client(tmp_path / "user", policy=sharing.policy, key=sharing.users[0])
        with pytest.raises(Refused, match="the signer has withdrawn the task"):
            Participation(user, links, np.ones_like).step()
        links[tells].notices = list
    assert not list((tmp_path / "user" / "spending").glob("task-*"))
    analyzer.close()


def test_python_users_have_a_witness_unless_they_say_otherwise(tmp_path, monkeypatch):
    """Without one, a ledger that is deleted frees the budget that was spent."""
    monkeypatch.setenv("DOVETAIL_WITNESS", str(tmp_path / "state"))
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    sharing.envelope(0)
    for ledger in (tmp_path / "user-0" / "spending").glob("task-*"):
        ledger.unlink()
    with pytest.raises(SetBack, match=r"1 of the ledgers in .* lack what was spent"):
        sharing.envelope(0, round=2)
    careless = Client(tmp_path / "user-0", policy=sharing.policy, key=sharing.users[0], witness=False)
    assert careless.report(sharing.signed, 2, np.zeros(sharing.task.dim))
