"""Users: one envelope a round, nothing that the policy does not admit, and the agent that does it for shipped code."""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
from parties.household import opened
from parties.sharing import Sharing

from dovetail.parties.common.http_clients import Rejected, Unreachable
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.notices import withdraw_task
from dovetail.parties.common.sealing import Unsealable, open_sealed
from dovetail.parties.common.task import sign
from dovetail.parties.common.wire import (
    Packed,
    RoundStatus,
    Unknown,
    Upload,
    authenticate_request,
    request_headers,
    sign_status,
    upload_path,
)
from dovetail.parties.fleet import lenient_policy, make_deployment
from dovetail.parties.user.agent import Agent
from dovetail.parties.user.client import Client, Envelope, RoundCall
from dovetail.parties.user.policy import Refused

FIELDS = {
    "name": "small",
    "protocol": "split_and_mix",
    "settings": {"clip_norm": 4.0, "noise_multiplier": 1.0, "shufflers": 2, "shares": 4},
    "dim": 5,
    "rounds": 2,
    "min_clients": 4,
    "max_clients": 4,
    "round_seconds": 60.0,
    "delta": 1e-5,
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    return make_deployment(tmp_path_factory.mktemp("deployment") / "fleet", FIELDS, shufflers=2, enrolled=[])


def client_of(folder, signed, **changed):
    policy = msgspec.structs.replace(lenient_policy(signed), **changed)
    return Client(folder, policy=policy, key=KeyPair.generate("sign"))


def call_to(deployment, round=1, **changed):
    """What the analyzer and the signer say of a round, for whoever passes it on."""
    pair = KeyRing(deployment.folder / "analyzer" / "keys", "sign").current()
    where = {"over": False, "head": bytes(32), "closes": int(time.time()) + 60, **changed}
    status = sign_status(RoundStatus(task_id=deployment.task.task_id, round=round, **where), pair)
    return RoundCall(signed=deployment.signed, status=status)


def service_pairs(deployment):
    return [
        ServicePairs.find(deployment.folder / name / "keys", keys)
        for name, keys in zip(deployment.services, deployment.task.intermediaries, strict=True)
    ]


def test_a_round_has_one_envelope_also_for_a_client_that_was_interrupted(tmp_path, deployment):
    first = client_of(tmp_path, deployment.signed).report(deployment.signed, 1, np.ones(5))
    again = client_of(tmp_path, deployment.signed).report(deployment.signed, 1, np.zeros(5))
    assert first == again == Envelope.decode(first.encode())
    client = client_of(tmp_path, deployment.signed)
    client.forget_envelope(first)
    with pytest.raises(Refused, match="has reported to round 1 before"):
        client.report(deployment.signed, 1, np.ones(5))
    assert client.report(deployment.signed, 2, np.ones(5)) != first


def test_what_is_sealed_opens_to_the_shares_of_the_update(tmp_path, deployment):
    task = deployment.task
    client, pairs = client_of(tmp_path, deployment.signed), service_pairs(deployment)
    envelope = client.report(deployment.signed, 1, np.array([1, -1, 0, 2, 0]))
    key = KeyRing(deployment.folder / "analyzer" / "keys", "seal").find(task.analyzer.key_id).opening_key()
    deal, total = task.assign_slots(), np.zeros(5, np.uint64)
    assert len({upload.report for upload in envelope.uploads}) == 1
    for index, upload in enumerate(envelope.uploads):
        packed = Packed.decode(opened(task, upload, pairs[index], client.key, index=index), length=task.message_bytes)
        assert len(packed.slots) == 10  # half of the slots each
        for slot, sealed in zip(deal.slots[index][packed.slots], packed.ciphertexts(), strict=True):
            share = int.from_bytes(open_sealed(sealed, key, task.message_purpose(1)), "little")
            total[slot // 4] += np.uint64(share)
    protocol, _ = task.build()
    modulus, scale = protocol.modulus, protocol.scale
    centred = (total.astype(np.int64) + modulus // 2) % modulus - modulus // 2
    std = np.sqrt(protocol.part_variance) / scale
    assert np.all(np.abs(centred / scale - [1, -1, 0, 2, 0]) < 6 * std + 2 / scale)


def test_an_upload_opens_for_its_shuffler_as_its_senders_and_for_nobody_else(tmp_path, deployment):
    """Whoever carries it, the analyzer included, reads nothing; under another name or id it does not open."""
    task, client, pairs = deployment.task, client_of(tmp_path, deployment.signed), service_pairs(deployment)
    envelope = client.report(deployment.signed, 1, np.ones(5))
    upload = envelope.uploads[0]
    inside = opened(task, upload, pairs[0], client.key)
    assert len(upload.sealed) == len(inside) + 48
    assert all(sealed not in upload.sealed for sealed in Packed.decode(inside, length=task.message_bytes).ciphertexts())
    analyzer = KeyRing(deployment.folder / "analyzer" / "keys", "seal").current()
    impostor = ServicePairs(sign=KeyPair.generate("sign"), seal=KeyPair.generate("seal"))
    for keys, sender, changed, where in (
        (pairs[1], client.key, upload, {}),  # the other shuffler
        (impostor, client.key, upload, {}),
        (ServicePairs(sign=pairs[0].sign, seal=analyzer), client.key, upload, {}),
        (pairs[0], KeyPair.generate("sign"), upload, {}),  # passed on as somebody else's
        (pairs[0], client.key, Upload(bytes(16), upload.sealed), {}),  # as another report
        (pairs[0], client.key, upload, {"round": 2}),
        (pairs[1], client.key, upload, {"index": 1}),
    ):
        with pytest.raises(Unsealable):
            opened(task, changed, keys, sender, **where)


def test_every_upload_is_signed_by_its_user_for_one_shuffler(tmp_path, deployment):
    client = client_of(tmp_path, deployment.signed)
    envelope = client.report(deployment.signed, 1, np.ones(5))
    assert envelope.sender == client.key.public.key_id
    known = {client.key.public.key_id: client.key.public}
    for index, (upload, signature) in enumerate(zip(envelope.uploads, envelope.signatures, strict=True)):
        body = upload.encode()
        headers = {**request_headers(envelope.sender, signature, body), "content-length": str(len(body))}
        for path_index in (0, 1):
            path = upload_path(deployment.task.task_id, 1, path_index)
            if path_index == index:
                assert authenticate_request(known, "POST", path, headers, upload.encode()) == envelope.sender
            else:
                with pytest.raises(Unknown, match="not signed by a key that is enrolled here"):
                    authenticate_request(known, "POST", path, headers, upload.encode())


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"analyzer": bytes(16)}, "this user has pinned the analyzer 0000000000000000"),
        ({"shufflers": (bytes(16),)}, "not among this user's pinned shufflers"),
        ({"signer": bytes(16)}, "expected a task signed by 0000000000000000"),
        ({"min_clients": 5}, "wants at least 5 honest users in a round; the task guarantees 4"),
        ({"eps_round": 1e-3}, "above the policy's eps_round=0.001"),
    ],
)
def test_nothing_is_randomized_that_the_policy_does_not_admit(tmp_path, deployment, changed, sentence):
    client = client_of(tmp_path, deployment.signed, **changed)
    with pytest.raises(Refused, match=sentence):
        client.report(deployment.signed, 1, np.ones(5))
    assert not list((tmp_path / "outbox").iterdir())
    assert not list((tmp_path / "spending").glob("task-*"))


def test_an_update_of_another_shape_is_not_spent(tmp_path, deployment):
    client = client_of(tmp_path, deployment.signed)
    with pytest.raises(ValueError, match=r"the task takes updates of shape \(5,\), got shape=\(6,\)"):
        client.report(deployment.signed, 1, np.ones(6))
    client.report(deployment.signed, 1, np.ones(5))


def test_the_agent_reports_for_shipped_code_and_keeps_its_own_counsel(tmp_path, deployment):
    home, socket = tmp_path / "node", tmp_path / "agent.sock"
    home.mkdir()
    KeyPair.generate("sign").save(home / "key.json")
    (home / "policy.json").write_bytes(msgspec.json.encode(lenient_policy(deployment.signed)))
    words, call = ["client", "agent", "--folder", str(home), "--socket", str(socket)], call_to(deployment)
    process = subprocess.Popen([sys.executable, "-m", "dovetail.cli", *words])
    try:
        agent, end = Agent(socket), time.monotonic() + 60
        while True:
            try:
                envelope = agent.answer(call, np.ones(5, np.float32))
                break
            except Unreachable:
                assert time.monotonic() < end
                time.sleep(0.1)
        assert agent.answer(call, np.zeros(5, np.float32)) == envelope
        assert (socket.stat().st_mode & 0o077) == 0
        stranger = sign(deployment.task, KeyPair.generate("sign"))  # a task that came with a message
        with pytest.raises(Rejected, match="expected a task signed by"):
            agent.answer(msgspec.structs.replace(call, signed=stranger), np.ones(5, np.float32))
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"over": True}, "the training is over: round 1 was the last"),
        ({"closes": 1}, "round 1 closed [0-9]+ seconds ago by this machine's clock"),
    ],
)
def test_a_relay_cannot_make_a_user_spend_on_a_round_that_is_not_open(tmp_path, deployment, changed, sentence):
    client = client_of(tmp_path, deployment.signed)
    with pytest.raises(Refused, match=sentence):
        client.answer(call_to(deployment, **changed), np.ones(5))
    honest = call_to(deployment)
    forged = msgspec.structs.replace(honest, status=msgspec.structs.replace(honest.status, round=2))
    with pytest.raises(Refused, match="the status does not bear the analyzer's signature"):
        client.answer(forged, np.ones(5))
    signer = KeyRing(deployment.folder / "signer", "sign").current()
    other = sign(msgspec.structs.replace(deployment.task, name="other"), signer)
    with pytest.raises(Refused, match="this status belongs to another task than"):
        client.answer(msgspec.structs.replace(honest, signed=other), np.ones(5))
    unsigned = sign(msgspec.structs.replace(deployment.task, analyzer_sign=None), signer)
    policy = msgspec.structs.replace(lenient_policy(unsigned))
    with pytest.raises(Refused, match="names no key that its analyzer signs with"):
        Client(tmp_path / "other", policy=policy, key=client.key).answer(
            msgspec.structs.replace(honest, signed=unsigned), np.ones(5)
        )
    ended = msgspec.structs.replace(honest, notices=(withdraw_task(signer, deployment.task.task_id),))
    with pytest.raises(Refused, match="the signer has withdrawn the task"):
        client.answer(ended, np.ones(5))
    assert not list((tmp_path / "spending").glob("task-*")), "something was spent"


@pytest.mark.parametrize("protocol", ["secagg", "ss_simple"])
def test_what_a_task_says_of_uploads_is_what_users_send(tmp_path, deployment, protocol):
    """To shufflers, and to aggregators."""
    sharing = Sharing(tmp_path / protocol, protocol)
    client = client_of(tmp_path, deployment.signed)
    shuffled = client.report(deployment.signed, 1, np.ones(5))
    for task, envelope in ((deployment.task, shuffled), (sharing.task, sharing.envelope(0))):
        assert task.upload_bytes == sum(len(upload.encode()) for upload in envelope.uploads)


def test_uploads_and_messages_have_one_shape():
    packed = Packed(np.array([3, 1]), b"aabb")
    assert packed.ciphertexts() == [b"aa", b"bb"]
    back = Packed.decode(packed.encode(), length=2)
    assert back.slots.tolist() == [3, 1]
    assert back.sealed == b"aabb"
    with pytest.raises(ValueError, match="expected messages of 3 bytes with their slots, got 12 bytes"):
        Packed.decode(packed.encode(), length=3)
    with pytest.raises(ValueError, match="expected an upload that begins with a report id"):
        Upload.decode(b"short")
