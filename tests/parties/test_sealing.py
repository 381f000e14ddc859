"""Sealing: what was sealed opens for its purpose and for nothing else."""

from __future__ import annotations

import dataclasses
import hmac
import os
import signal

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.sealing import OVERHEAD, Purpose, Unsealable, Workers, open_sealed, seal

KEY = X25519PrivateKey.from_private_bytes(bytes(range(32)))
PURPOSE = Purpose(task_id=bytes(range(32)), round=3, role="report", key_id=b"abcdefghabcdefgh")

UPLOAD = dataclasses.replace(PURPOSE, role="upload", sender=bytes(range(16)), report=bytes(range(16, 32)))


def changed_at(sealed: bytes, index: int) -> bytes:
    """The message with one bit of one byte flipped: always another message, whatever was drawn."""
    changed = bytearray(sealed)
    changed[index] ^= 1
    return bytes(changed)


def test_what_was_sealed_opens_and_is_one_length_longer():
    for size in (0, 1, 1000):
        sealed = seal(bytes(size), KEY.public_key(), PURPOSE)
        assert len(sealed) == size + OVERHEAD
        assert open_sealed(sealed, KEY, PURPOSE) == bytes(size)


def opened_by_rfc_9180(sealed, key, info, *, aad=b""):
    """Base mode of DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-128-GCM, written down from the RFC."""
    kem, suite = b"KEM\x00\x20", b"HPKE\x00\x20\x00\x01\x00\x01"

    def extract(suite, salt, label, secret):
        return hmac.digest(salt, b"HPKE-v1" + suite + label + secret, "sha256")

    def expand(suite, secret, label, info, length):
        named = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
        return HKDFExpand(hashes.SHA256(), length, named).derive(secret)

    enc, ciphertext = sealed[:32], sealed[32:]
    exchanged = key.exchange(X25519PublicKey.from_public_bytes(enc))
    both = enc + key.public_key().public_bytes_raw()
    shared = expand(kem, extract(kem, b"", b"eae_prk", exchanged), b"shared_secret", both, 32)
    context = b"\0" + extract(suite, b"", b"psk_id_hash", b"") + extract(suite, b"", b"info_hash", info)
    secret = extract(suite, shared, b"secret", b"")
    nonce = expand(suite, secret, b"base_nonce", context, 12)
    return AESGCM(expand(suite, secret, b"key", context, 16)).decrypt(nonce, ciphertext, aad)


def test_messages_are_sealed_by_rfc_9180():
    """The first vector of its appendix (A.1.1) says that the test reads it right."""
    vector = X25519PrivateKey.from_private_bytes(
        bytes.fromhex("4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8")
    )
    sealed = bytes.fromhex(
        "37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431"
        "f938558b5d72f1a23810b4be2ab4f84331acc02fc97babc53a52ae8218a355a96d8770ac83d07bea87e13c512a"
    )
    verse = b"Beauty is truth, truth beauty"
    assert opened_by_rfc_9180(sealed, vector, b"Ode on a Grecian Urn", aad=b"Count-0") == verse
    assert opened_by_rfc_9180(seal(verse, KEY.public_key(), PURPOSE), KEY, PURPOSE.info) == verse


def test_every_message_has_an_encapsulation_of_its_own():
    sealed = {seal(b"same", KEY.public_key(), PURPOSE) for _ in range(50)}
    assert len({message[:32] for message in sealed}) == 50


@pytest.mark.parametrize(
    "other",
    [
        {"task_id": bytes(32)},
        {"round": 4},
        {"role": "model"},
        {"key_id": b"abcdefghabcdefgi"},
        {"version": 2},
    ],
)
def test_another_purpose_does_not_open(other):
    sealed = seal(b"value", KEY.public_key(), PURPOSE)
    with pytest.raises(Unsealable, match="this was not sealed for the key"):
        open_sealed(sealed, KEY, dataclasses.replace(PURPOSE, **other))


@pytest.mark.parametrize("other", [{"sender": bytes(16)}, {"report": bytes(16)}, {"role": "sum"}])
def test_an_upload_of_another_sender_does_not_open(other):
    sealed = seal(b"value", KEY.public_key(), UPLOAD)
    assert open_sealed(sealed, KEY, UPLOAD) == b"value"
    with pytest.raises(Unsealable):
        open_sealed(sealed, KEY, dataclasses.replace(UPLOAD, **other))


def test_another_key_or_a_changed_message_does_not_open():
    sealed = seal(b"value", KEY.public_key(), PURPOSE)
    changed = [changed_at(sealed, i) for i in range(len(sealed))]
    for wrong in (*changed, sealed[:-1], sealed + b"x", b"", bytes(OVERHEAD), bytes(200)):
        with pytest.raises(Unsealable):
            open_sealed(wrong, KEY, PURPOSE)
    with pytest.raises(Unsealable):
        open_sealed(sealed, X25519PrivateKey.generate(), PURPOSE)


def test_no_two_purposes_share_their_info():
    some = [
        dataclasses.replace(PURPOSE, **change)
        for change in ({}, {"round": 0}, {"round": 256}, {"role": "model"}, {"version": 2}, {"key_id": bytes(16)})
    ]
    assert len({purpose.info for purpose in some}) == len(some)
    assert len({len(purpose.info) for purpose in some}) == 1
    named = [
        dataclasses.replace(UPLOAD, **change)
        for change in ({}, {"role": "sum"}, {"sender": UPLOAD.report, "report": UPLOAD.sender}, {"report": bytes(16)})
    ]
    assert len({purpose.info for purpose in (*some, *named)}) == len(some) + len(named)


@pytest.mark.parametrize("workers", [1, 2])
def test_many_open_in_order_and_bad_ones_are_marked(workers):
    sealed = [seal(i.to_bytes(2, "big"), KEY.public_key(), PURPOSE) for i in range(1200)]
    sealed[7], sealed[900] = b"broken", changed_at(sealed[900], -1)
    pool = Workers(workers)
    opened = pool.open_all(sealed, KEY, PURPOSE)
    pool.stop()
    assert [i for i, plain in enumerate(opened) if plain is None] == [7, 900]
    assert all(plain == i.to_bytes(2, "big") for i, plain in enumerate(opened) if plain is not None)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"task_id": b"short"}, "expected a task id of 32 bytes"),
        ({"key_id": b""}, "expected a key id of 16 bytes"),
        ({"round": -1}, "expected 0 <= round"),
        ({"role": "anything"}, "expected role to be one of"),
        ({"role": "upload"}, "expected a sender of 16 bytes and a report of 16 for uploads and sums"),
        ({"role": "sum", "sender": bytes(16)}, "expected a sender of 16 bytes and a report of 16 for uploads and sums"),
        ({"sender": bytes(16)}, "none for others, got 16 and 0 for role='report'"),
    ],
)
def test_a_purpose_that_says_nothing_is_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(PURPOSE, **wrong)


def test_a_worker_that_is_killed_is_replaced_and_its_work_done_again():
    """One dead process once stopped an analyzer for good."""
    pair = KeyPair.generate("seal")
    purpose = Purpose(task_id=bytes(32), round=1, role="report", key_id=pair.public.key_id)
    pool, bodies = Workers(2), [bytes([i]) for i in range(80)]
    sealed = pool.seal_all(bodies, pair.public.sealing_key(), purpose)
    for _ in range(2):
        for pid in list(pool._pool._processes):
            os.kill(pid, signal.SIGKILL)
        assert pool.open_all(sealed, pair.opening_key(), purpose) == bodies
    pool.stop()
