"""Keys that are replaced, tasks that end or are withdrawn, users that come and go, ledgers that were set back."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time

import httpx
import msgspec
import numpy as np
import pytest
from parties.sharing import Sharing

from dovetail.cli.parties import _await_beginning
from dovetail.parties.common import files
from dovetail.parties.common.files import WatchedFile
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.notices import (
    Notices,
    Rotation,
    SignedNotice,
    announce_rotation,
    body_digest,
    read_notices,
    rotate_key,
    withdraw_task,
)
from dovetail.parties.common.task import sign, verify
from dovetail.parties.common.wire import upload_path
from dovetail.parties.http.analyzer import AnalyzerService
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.intermediary.enrolment import Enrolled, Enrolment, enrol, read_enrolled, revoke, user_of
from dovetail.parties.user.client import Client, rotate_user
from dovetail.parties.user.policy import Policy, Refused
from dovetail.parties.user.spending import SetBack


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    return Sharing(tmp_path_factory.mktemp("sharing"), "ss_simple", rounds=5)


def resigned(sharing, **changed):
    return sign(msgspec.structs.replace(sharing.task, **changed), sharing.signer)


# --- tasks


@pytest.mark.parametrize(
    ("begins", "ends", "admitted"),
    [(None, None, True), (-10, None, True), (-10, 10, True), (10, None, False), (10, 20, False)],
)
def test_users_take_part_while_a_task_is_valid(sharing, begins, ends, admitted):
    now = int(time.time())
    window = {"begins": begins and now + begins, "ends": ends and now + 3600 * ends}
    signed = resigned(sharing, **window)
    if admitted:
        assert sharing.policy.admit(signed).begins == window["begins"]
    else:
        with pytest.raises(Refused, match=r"this task runs from .*; it is now"):
            sharing.policy.admit(signed)


def test_a_task_that_is_over_is_neither_signed_nor_admitted(sharing, monkeypatch):
    signed = resigned(sharing, ends=int(time.time()) + 60)
    with pytest.raises(ValueError, match=r"this task ran until .*; it is now"):
        resigned(sharing, ends=int(time.time()) - 1)
    with pytest.raises(ValueError, match="a task must end after it begins"):
        resigned(sharing, begins=100, ends=100)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    with pytest.raises(Refused, match=r"this task runs until .*; it is now"):
        sharing.policy.admit(signed)
    assert verify(signed, signer=sharing.signer.public.key_id, fresh=False).is_over()


def test_tasks_without_a_window_have_the_id_that_they_had(sharing):
    """Nor those without a key to sign with."""
    plain = msgspec.structs.replace(sharing.task, analyzer_sign=None)
    assert b"begins" not in plain.body and b'"version":2}' in plain.body
    limited = msgspec.structs.replace(plain, ends=2**40)
    assert limited.body.endswith(b',"begins":null,"ends":1099511627776}')
    assert b',"begins":null,"ends":null,"analyzer_sign":{' in sharing.task.body
    spelled = plain.body[:-1] + b',"begins":null,"ends":null}'
    signature = sharing.signer.sign(b"dovetail task\0" + spelled)
    other = msgspec.structs.replace(sharing.signed, body=spelled, signature=signature)
    with pytest.raises(ValueError, match="canonical JSON"):
        verify(other, signer=sharing.signer.public.key_id)


def test_an_analyzer_opens_no_round_after_the_end(tmp_path, monkeypatch):
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    sharing.signed = resigned(sharing, ends=int(time.time()) + 60)
    analyzer = sharing.analyzer()
    now = time.time()
    monkeypatch.setattr("dovetail.parties.common.task.time.time", lambda: now + 61)
    analyzer.give_up_round(1)
    assert analyzer.status().over
    analyzer.close()


def test_an_analyzer_waits_for_the_beginning(monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for begins, wait in ((None, []), (time.time() - 9, []), (time.time() + 90, [pytest.approx(90, abs=5)])):
        waited.clear()
        _await_beginning(begins)
        assert waited == wait


def test_a_withdrawn_task_is_over_for_analyzer_and_users(tmp_path):
    sharing = Sharing(tmp_path, "ss_simple", rounds=3)
    notice = withdraw_task(sharing.signer, sharing.task.task_id)
    analyzer = sharing.analyzer()
    analyzer.end_task("the signer has withdrawn the task")
    assert analyzer.status().over and [one["outcome"] for one in analyzer.privacy()["history"]] == ["void"]
    analyzer.end_task("the signer has withdrawn the task")
    analyzer.close()
    client = Client(tmp_path / "user", policy=sharing.policy, key=sharing.users[0])
    client.admit(sharing.signed)
    client.receive_notices([notice])
    for one in (client, Client(tmp_path / "user", policy=sharing.policy, key=sharing.users[0])):  # it remembers
        with pytest.raises(Refused, match="the signer has withdrawn the task"):
            one.report(sharing.signed, 1, np.zeros(sharing.task.dim))


# --- notices


def test_only_the_signers_word_counts(sharing):
    stranger = KeyPair.generate("sign")
    notices = Notices(sharing.signer.public.key_id, [withdraw_task(stranger, sharing.task.task_id)])
    forged = msgspec.structs.replace(withdraw_task(stranger, sharing.task.task_id), signer=sharing.signer.public)
    notices.receive([forged])
    assert notices.why_ended(sharing.signed) is None and notices.signed == []
    notices.receive([withdraw_task(sharing.signer, sharing.task.task_id)])
    assert notices.why_ended(sharing.signed)


def test_pinned_keys_stand_for_their_successors_if_the_user_follows(tmp_path):
    sharing = Sharing(tmp_path, "ss_simple")
    pinned = msgspec.structs.replace(
        sharing.policy, aggregators=tuple(keys.public.key_id for keys in sharing.keys), follow_rotations=True
    )
    old = ServicePairs(sign=KeyRing(sharing.ring.folder, "sign").current(), seal=sharing.ring.current())
    analyzer, aggregator, signer = *(ServicePairs.add(tmp_path / name) for name in "ab"), KeyPair.generate("sign")
    notices = [
        announce_rotation(sharing.signer, rotate_key(old.public, analyzer.public, by=old.sign)),
        announce_rotation(
            sharing.signer, rotate_key(sharing.keys[0].public, aggregator.public, by=sharing.keys[0].sign)
        ),
    ]
    own = rotate_key(sharing.signer.public, signer.public, by=sharing.signer)
    notices.append(announce_rotation(sharing.signer, own, standing=map(body_digest, notices)))
    named = {"analyzer": analyzer.seal.public, "analyzer_sign": analyzer.sign.public}
    named["aggregators"] = (aggregator.public, sharing.keys[1].public)
    signed = sign(msgspec.structs.replace(sharing.task, **named), signer)
    heard = Notices(pinned.signer, reversed(notices))
    assert pinned.admit(signed, heard).analyzer == analyzer.seal.public
    for missing in range(3):
        with pytest.raises(Refused):
            pinned.admit(signed, Notices(pinned.signer, [one for i, one in enumerate(notices) if i != missing]))
    with pytest.raises(Refused):
        msgspec.structs.replace(pinned, follow_rotations=False).admit(signed, heard)


def test_an_analyzer_is_pinned_by_both_keys(tmp_path):
    """No other key may say what the analyzer says; users follow to successors that the old key names."""
    sharing, old, new = Sharing(tmp_path, "ss_simple"), *(ServicePairs.add(tmp_path / name) for name in ("old", "new"))

    def of(keys):
        task = msgspec.structs.replace(sharing.task, analyzer=keys.seal, analyzer_sign=keys.sign)
        return sign(task, sharing.signer)

    both = msgspec.structs.replace(sharing.policy, analyzer=old.public.key_id, follow_rotations=True)
    other = msgspec.structs.replace(old.public, sign=new.public.sign)
    assert both.admit(of(old.public))
    for signed in (of(other), of(new.public), sign(msgspec.structs.replace(sharing.task), sharing.signer)):
        with pytest.raises(Refused, match="this user has pinned the analyzer"):
            both.admit(signed)
    with pytest.raises(Refused, match="this user has pinned the analyzer"):  # the thief of the signer's key could sign
        msgspec.structs.replace(both, analyzer=old.public.seal.key_id).admit(of(old.public))
    sealing = sign(msgspec.structs.replace(sharing.task, analyzer=old.public.seal, analyzer_sign=None), sharing.signer)
    assert msgspec.structs.replace(both, analyzer=old.public.seal.key_id).admit(sealing)  # it has no other key
    rotation = rotate_key(old.public, new.public, by=old.sign)
    heard = Notices(both.signer, [announce_rotation(sharing.signer, rotation)])
    assert both.admit(of(new.public), heard)
    halves = Notices(both.signer, [announce_rotation(sharing.signer, rotate_key(old.public.seal, new.public.seal))])
    with pytest.raises(Refused, match="this user has pinned the analyzer"):
        both.admit(of(new.public), halves)


def test_a_successor_needs_the_old_keys_word(tmp_path):
    old, new, thief = (ServicePairs.add(tmp_path / name) for name in ("old", "new", "thief"))
    with pytest.raises(
        ValueError, match=f"{new.public.key_id.hex()} is not endorsed by the key {old.public.key_id.hex()}"
    ):
        rotate_key(old.public, new.public, by=thief.sign)
    with pytest.raises(ValueError, match="this one names no key"):
        Rotation().check()
    with pytest.raises(ValueError, match="has a successor of another kind"):
        rotate_key(old.public, new.public.sign, by=old.sign)
    stolen = msgspec.structs.replace(rotate_key(old.public, new.public, by=old.sign), new_seal=thief.public.seal)
    with pytest.raises(ValueError, match="is not endorsed"):
        announce_rotation(KeyPair.generate("sign"), stolen)


def test_a_successor_that_would_end_before_its_key_is_refused(tmp_path, command):
    assert command("keys", str(tmp_path), "--days", "365")[0] == 0
    before = sorted(tmp_path.iterdir())
    status, _, err = command("keys", str(tmp_path), "--days", "30", "--rotate")
    assert status == 2 and "longer than its successor would: give --days 365 or more" in " ".join(err.split())
    assert sorted(tmp_path.iterdir()) == before


# --- users that come and go


def user(folder):
    folder.mkdir(parents=True)
    pair = KeyPair.generate("sign")
    pair.save(folder / "key.json")
    (folder / "public.json").write_bytes(msgspec.json.encode(pair.public))
    return pair


def test_a_list_of_users_is_read_again_when_it_changes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "_LOOK", 0.0)
    pairs = [user(tmp_path / str(i)) for i in range(3)]
    clients = tmp_path / "clients.json"
    assert enrol(clients, [tmp_path / "0" / "public.json"]) == 1
    assert clients.stat().st_mode & 0o077 == 0
    enrolled = Enrolled(clients)
    assert enrol(clients, [tmp_path / str(i) / "public.json" for i in (1, 2)]) == 3
    assert set(enrolled) == {pair.public.key_id for pair in pairs} and len(enrolled) == 3
    assert revoke(clients, [pairs[1].public.key_id]) == 2
    assert pairs[1].public.key_id not in enrolled and pairs[2].public.key_id in enrolled
    with pytest.raises(ValueError, match=r"no user on .* has the key"):
        revoke(clients, [pairs[1].public.key_id])
    assert not caplog.messages
    clients.write_text("half of a li")
    assert len(enrolled) == 2 and len(enrolled) == 2  # what it said before
    (said,) = caplog.messages  # operators hear of it, once
    assert str(clients) in said and said.endswith("; what it said before still holds")


def test_a_user_that_rotates_its_key_stays_the_user_that_it_was(tmp_path):
    first, clients = user(tmp_path / "0"), tmp_path / "clients.json"
    enrol(clients, [tmp_path / "0" / "public.json"])
    assert user_of(read_enrolled(clients), first.public.key_id) == first.public.key_id
    for _ in range(2):
        before = KeyPair.load(tmp_path / "0" / "key.json").public.key_id
        new = rotate_user(tmp_path / "0")
        assert KeyPair.load(tmp_path / "0" / "key.json").public.key_id == new != before
        rotation = tmp_path / "0" / f"rotation-{before.hex()}.json"
        assert enrol(clients, [rotation]) == enrol(clients, [rotation]) == 1
        assert set(read_enrolled(clients)) == {new}
        assert user_of(read_enrolled(clients), new) == first.public.key_id
    user(tmp_path / "1")
    rotate_user(tmp_path / "1")
    (stranger,) = (tmp_path / "1").glob("rotation-*.json")
    with pytest.raises(ValueError, match="which no enrolled user has"):
        enrol(clients, [stranger])


def test_a_new_key_does_not_count_twice_in_a_round(tmp_path):
    sharing = Sharing(tmp_path, "ss_simple")
    party = sharing.aggregator(0)
    party.store.open_round(1, head=b"head", closes=0.0)
    old, new = sharing.users[:2]
    listed = Enrolment(use="sign", public=new.public.public, expires=new.public.expires, user=old.public.key_id)
    keys = {old.public.key_id: old.public, new.public.key_id: listed}
    for sender, pair in enumerate((old, new)):
        upload = sharing.envelope(sender).uploads[0]
        client = user_of(keys, pair.public.key_id)
        if sender == 0:
            assert party.accept(1, client=client, sender=pair.public.key_id, upload=upload) == "accepted"
        else:
            with pytest.raises(ValueError, match="this client has another upload in round"):
                party.accept(1, client=client, sender=pair.public.key_id, upload=upload)
    party.close()


# --- services that go on running


def ask(app, method, path, **options):
    async def asked():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            return await http.request(method, path, **options)

    return asyncio.run(asked())


def test_services_hand_out_notices_and_heed_them_without_a_restart(tmp_path, monkeypatch, command):
    monkeypatch.setattr(files, "_LOOK", 0.0)
    sharing, file = Sharing(tmp_path, "ss_simple"), tmp_path / "notices.json"
    (tmp_path / "task.json").write_bytes(msgspec.json.encode(sharing.signed))
    (tmp_path / "owner").mkdir()
    sharing.signer.save(tmp_path / "owner" / f"sign-{sharing.signer.public.key_id.hex()}.json")
    heard = WatchedFile(file, lambda path: read_notices(path, sharing.signer.public.key_id)).current_content
    analyzer, party = sharing.analyzer(), sharing.aggregator(0)
    watching = AnalyzerService(analyzer, notices=heard)
    service = IntermediaryService(party, enrolled=sharing.enrolled, analyzer=None, notices=heard)
    for app in (watching.app, service.app):
        assert ask(app, "GET", "/v1/notices").json() == []
    words = ["--task", str(tmp_path / "task.json"), "--signer", str(tmp_path / "owner")]
    status, out, _ = command("task", "withdraw", str(file), *words)
    assert status == 0 and sharing.task.task_id.hex() in "".join(out.split())
    for app in (watching.app, service.app):
        (found,) = msgspec.json.decode(ask(app, "GET", "/v1/notices").content, type=list[SignedNotice])
        assert Notices(sharing.signer.public.key_id, [found]).why_ended(sharing.signed)
    asyncio.run(watching._check_progress())
    assert analyzer.status().over
    refused = ask(service.app, "POST", upload_path(sharing.task.task_id, 1, 0), content=b"anything")
    assert (refused.status_code, refused.text) == (
        410,
        f"this upload comes too late: the signer has withdrawn the task {sharing.task.task_id.hex()}",
    )
    analyzer.close()
    party.close()


def test_keys_are_rotated_and_announced_by_commands(tmp_path, command):
    made = {}
    for name, use in (("owner", "sign"), ("analyzer", "seal"), ("aggregator", "service")):
        for more in ([], ["--rotate"]):
            words = ["--use", use, "--public", str(tmp_path / f"{name}.json"), "--json", *more]
            status, out, err = command("keys", str(tmp_path / name), *words)
            assert status == 0, err
            made.setdefault(name, []).append(json.loads(out))
    rotations = [word for old, new in made.values() for word in ("--rotation", new["rotation"])]
    status, out, err = command(
        "task", "announce", str(tmp_path / "n.json"), *rotations, "--signer", str(tmp_path / "owner")
    )
    assert status == 0, err
    notices = read_notices(tmp_path / "n.json", bytes.fromhex(made["owner"][0]["id"]))
    for old, new in made.values():
        assert notices.successors(bytes.fromhex(old["id"])) == {bytes.fromhex(old["id"]), bytes.fromhex(new["id"])}
    pins = ["--signer", str(tmp_path / "owner.json"), "--analyzer", made["analyzer"][1]["id"]]
    words = [*pins, "--aggregator", str(tmp_path / "aggregator.json"), "--min-clients", "1", "--follow-rotations"]
    assert command("client", "new", str(tmp_path / "user"), *words)[0] == 0
    policy = Policy.read(tmp_path / "user" / "policy.json")
    assert policy.follow_rotations and policy.signer.hex() == made["owner"][1]["id"]
    assert policy.aggregators == (bytes.fromhex(made["aggregator"][1]["id"]),)
    for words in (["enrol", "clients.json", "user/public.json"], ["rotate", "user"], ["mend", "user"]):
        status, out, err = command("client", words[0], *(str(tmp_path / word) for word in words[1:]))
        assert status == 0, err
    key = KeyPair.load(tmp_path / "user" / "key.json").public.key_id.hex()
    status, _, err = command("client", "revoke", str(tmp_path / "clients.json"), key)
    assert status == 2 and "nobody was revoked" in " ".join(err.split())
    (rotation,) = (tmp_path / "user").glob("rotation-*.json")
    assert command("client", "enrol", str(tmp_path / "clients.json"), str(rotation))[0] == 0
    status, out, _ = command("client", "revoke", str(tmp_path / "clients.json"), key)
    assert status == 0 and "0 users" in out


# --- ledgers that were set back


def reporting(tmp_path, sharing, number=0):
    return Client(tmp_path / "user", policy=sharing.policy, key=sharing.users[number], witness=tmp_path / "elsewhere")


def spend(client, sharing, round):
    return client.report(sharing.signed, round, np.zeros(sharing.task.dim))


@pytest.mark.parametrize("harm", ["restored", "deleted", "emptied"])
def test_a_ledger_that_was_set_back_is_noticed(tmp_path, sharing, harm):
    spending = tmp_path / "user" / "spending"
    spend(reporting(tmp_path, sharing), sharing, 1)
    shutil.copytree(spending, tmp_path / "copy")
    spend(reporting(tmp_path, sharing), sharing, 2)
    total = reporting(tmp_path, sharing)._spending.total()
    shutil.rmtree(spending)
    if harm == "restored":
        shutil.copytree(tmp_path / "copy", spending)
    elif harm == "emptied":
        spending.mkdir()
        for file in (tmp_path / "copy").iterdir():
            (spending / file.name).touch()
    client = reporting(tmp_path, sharing)
    assert client._spending.total() == total  # nothing of it is forgotten
    for ask in (lambda: spend(client, sharing, 3), lambda: client.refuse_early(sharing.task, 3)):
        with pytest.raises(SetBack, match=r"1 of the ledgers in .* lack what was spent"):
            ask()
    other = Sharing(tmp_path / "other", "ss_simple")
    mended = Client(tmp_path / "user", policy=other.policy, key=sharing.users[0], witness=tmp_path / "elsewhere")
    with pytest.raises(SetBack):
        spend(mended, other, 1)  # of another task, too, as long as nobody has decided
    assert mended._spending._guard.give_up(spending) == [sharing.task.task_id.hex()]
    spend(mended, other, 1)
    with pytest.raises(SetBack, match="was set back and the task given up"):
        spend(reporting(tmp_path, sharing), sharing, 3)
    assert mended._spending.total()[0] > total[0]


def test_a_ledger_ahead_of_its_witness_goes_on(tmp_path, sharing, monkeypatch):
    """Killed between the ledger and the witness: nothing was randomized."""
    spend(reporting(tmp_path, sharing), sharing, 1)
    with monkeypatch.context() as broken:
        broken.setattr("dovetail.parties.user.spending.RollbackGuard.remember", lambda guard, ledger: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            spend(reporting(tmp_path, sharing), sharing, 2)
    spend(reporting(tmp_path, sharing), sharing, 3)


def test_a_ledger_and_its_witness_stay_with_the_user_through_rotation(tmp_path, sharing):
    sharing.users[0].save(tmp_path / "first.json")
    client = reporting(tmp_path, sharing)
    spend(client, sharing, 1)
    shutil.copy(tmp_path / "first.json", tmp_path / "user" / "key.json")
    rotate_user(tmp_path / "user")
    key = KeyPair.load(tmp_path / "user" / "key.json")
    rotated_client = Client(tmp_path / "user", policy=sharing.policy, key=key, witness=tmp_path / "elsewhere")
    assert rotated_client._spending.total() == client._spending.total()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    with pytest.raises(Refused, match="has reported to round 1 before"):
        (tmp_path / "user" / "outbox" / f"{sharing.task.task_id.hex()}-1").unlink()
        spend(rotated_client, sharing, 1)
    shutil.rmtree(tmp_path / "user" / "spending")
    with pytest.raises(SetBack):
        spend(Client(tmp_path / "user", policy=sharing.policy, key=key, witness=tmp_path / "elsewhere"), sharing, 2)


def test_a_rotation_that_the_old_key_did_not_sign_replaces_nobody(tmp_path):
    """Nor one signed by somebody else, nor for another successor."""
    user, thief = KeyPair.generate("sign"), KeyPair.generate("sign")
    path, file = tmp_path / "enrolled.json", tmp_path / "rotation.json"
    (tmp_path / "key.json").write_bytes(msgspec.json.encode(user.public))
    enrol(path, [tmp_path / "key.json"])
    before = path.read_bytes()
    honest = rotate_key(user.public, KeyPair.generate("sign").public, by=user)
    forged = msgspec.structs.replace(honest, new_sign=thief.public)
    for rotation in (
        msgspec.structs.replace(forged, signature=bytes(64)),
        forged,
        msgspec.structs.replace(forged, signature=thief.sign(b"dovetail")),
    ):
        file.write_bytes(msgspec.json.encode(rotation))
        with pytest.raises(ValueError, match="is not endorsed by the key"):
            enrol(path, [file])
        assert path.read_bytes() == before
    file.write_bytes(msgspec.json.encode(honest))
    assert enrol(path, [file]) == 1


def test_a_key_that_is_replaced_in_the_same_list_of_files_is_not_enrolled_again(tmp_path):
    """All files of one command, in whatever order: a user stays one user, and nothing is written of a command."""
    keys, path = [KeyPair.generate("sign") for _ in range(2)], tmp_path / "enrolled.json"
    files = [tmp_path / name for name in ("old.json", "rotation.json", "new.json")]
    rotation = rotate_key(keys[0].public, keys[1].public, by=keys[0])
    for file, what in zip(files, (keys[0].public, rotation, keys[1].public), strict=True):
        file.write_bytes(msgspec.json.encode(what))
    old, new, latest = files
    with pytest.raises(ValueError, match="would make two users of one"):
        enrol(path, [old, new, old])
    assert not path.exists()
    assert enrol(path, [old, new, latest]) == 1


def test_enrolling_again_after_rotations_leaves_one_user(tmp_path):
    """The list forgot whose key it was, or took an old key for another user: one user had two uploads in a round."""
    keys = [KeyPair.generate("sign") for _ in range(3)]
    path = tmp_path / "enrolled.json"
    for number, key in enumerate(keys):
        (tmp_path / f"key{number}.json").write_bytes(msgspec.json.encode(key.public))
    for number, (old, new) in enumerate(itertools.pairwise(keys)):
        rotation = rotate_key(old.public, new.public, by=old)
        (tmp_path / f"rotation{number}.json").write_bytes(msgspec.json.encode(rotation))
    enrol(path, [tmp_path / "key0.json"])
    assert enrol(path, [tmp_path / "rotation0.json", tmp_path / "rotation1.json"]) == 1
    assert enrol(path, [tmp_path / "key2.json"]) == 1
    known = read_enrolled(path)
    assert user_of(known, keys[2].public.key_id) == keys[0].public.key_id
    before = path.read_bytes()
    for number in (0, 1):
        with pytest.raises(ValueError, match="would make two users of one"):
            enrol(path, [tmp_path / f"key{number}.json"])
    assert path.read_bytes() == before
