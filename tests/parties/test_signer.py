"""The signer's key when it is replaced, stolen or expired: what a thief of it can still do, and who hears of it."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import msgspec
import numpy as np
import pytest
from parties.sharing import Sharing

from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.links import Unreachable
from dovetail.parties.common.notices import (
    Notices,
    announce_rotation,
    digest_of,
    read_notices,
    revoke_key,
    rotate_key,
    withdraw_task,
)
from dovetail.parties.common.policy import Policy, Refused, SetBack
from dovetail.parties.common.task import sign, verify
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.user.client import Client
from dovetail.parties.user.consent import leave_tasks
from dovetail.parties.user.participation import Participation


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
    known = signer.notices(kept, signer.rotation(standing=(signer.sharing.task.task_id, digest_of(kept))))
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


class Followed:
    """The analyzer as an aggregator sees it: it goes on whatever its signer says."""

    def __init__(self, analyzer):
        self.analyzer, self.sums = analyzer, []

    def status(self):
        return self.analyzer.status()

    def signed_model(self, round, *, dim):
        return self.analyzer.model(round), b""

    def part(self, *sum):
        self.sums.append(sum)


def serving(sharing, index, analyzer, notices, **places):
    party = sharing.aggregator(index, **places)
    service = IntermediaryService(
        party, enrolled=sharing.enrolled, analyzer=Followed(analyzer), peers=[], notices=lambda: notices
    )
    asyncio.run(service._follow())
    return party, service


def test_withdrawal_makes_aggregators_drop_their_rounds_for_good(tmp_path):
    """A sum was handed over after the withdrawal, and the next round opened."""
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    analyzer, notices = sharing.analyzer(), Notices(sharing.signer.public.key_id)
    places = {"segments": tmp_path / "segments"}
    (tmp_path / "segments").mkdir()
    party, service = serving(sharing, 0, analyzer, notices, **places)
    for user in range(4):
        envelope = sharing.envelope(user)
        party.accept(1, client=sharing.users[user].public.key_id, upload=envelope.uploads[0])
    assert party.store.uploads(1) == 4 and party.full(1)
    notices.receive([withdraw_task(sharing.signer, sharing.task.task_id)])
    asyncio.run(service._close())
    asyncio.run(service._follow())
    assert service._analyzer.sums == [] and party.store.unfinished() == []
    assert "withdrawn" in party.store.why_ended()
    analyzer.give_up(1, "nobody closes it")  # an analyzer that does not heed the notice
    asyncio.run(service._follow())
    asyncio.run(service._close())
    assert party.store.unfinished() == []
    party.shut()
    again, service = serving(sharing, 0, analyzer, Notices(sharing.signer.public.key_id), **places)  # it lost the file
    asyncio.run(service._close())
    assert again.store.unfinished() == [] and service._analyzer.sums == []
    again.shut()
    analyzer.shut()


def test_withdrawal_ends_the_analyzer_for_good(tmp_path):
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    analyzer = sharing.analyzer()
    analyzer.end_task("the signer has withdrawn the task")
    analyzer.shut()
    again = sharing.analyzer()
    assert again.status().over and [one["outcome"] for one in again.privacy()["history"]] == ["void"]
    again.shut()


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
    analyzer.shut()


def test_python_users_have_a_witness_unless_they_say_otherwise(tmp_path, monkeypatch):
    """Without one, a ledger that is deleted frees the budget that was spent."""
    monkeypatch.setenv("DOVETAIL_WITNESS", str(tmp_path / "state"))
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    sharing.envelope(0)
    for ledger in (tmp_path / "user-0" / "spending").glob("task-*"):
        ledger.unlink()
    with pytest.raises(SetBack, match="got 1 set back"):
        sharing.envelope(0, round=2)
    careless = Client(tmp_path / "user-0", policy=sharing.policy, key=sharing.users[0], witness=False)
    assert careless.report(sharing.signed, 2, np.zeros(sharing.task.dim))
