"""Key pairs in files: private to their owner, found by id, never used after their time."""

from __future__ import annotations

import hashlib
import time

import msgspec
import pytest
from cryptography.exceptions import InvalidSignature

from dovetail.parties.common.keys import KeyPair, KeyRing, PublicKey, ServiceKeys, ServicePairs


def test_a_saved_key_is_the_same_and_for_its_owner_alone(tmp_path):
    pair = KeyPair.generate("seal")
    pair.save(tmp_path / "key.json")
    assert (tmp_path / "key.json").stat().st_mode & 0o777 == 0o600
    assert KeyPair.load(tmp_path / "key.json") == pair
    signed = b"dovetail key\0seal\0" + pair.public.public + pair.public.expires.to_bytes(8, "big")
    assert hashlib.sha256(signed).digest()[:16] == pair.public.key_id
    with pytest.raises(FileExistsError):
        pair.save(tmp_path / "key.json")


def test_a_private_key_is_not_shown():
    pair = KeyPair.generate("sign")
    assert pair.private.hex() not in repr(pair)
    assert repr(pair.private) not in repr(pair)


def test_signatures_verify_and_near_misses_do_not():
    pair = KeyPair.generate("sign")
    signature = pair.sign(b"task")
    pair.public.verifying_key().verify(signature, b"task")
    for wrong in ((signature, b"tasks"), (signature[:-1] + bytes([signature[-1] ^ 1]), b"task")):
        with pytest.raises(InvalidSignature):
            pair.public.verifying_key().verify(*wrong)


def test_a_key_serves_one_use():
    seal, sign = KeyPair.generate("seal"), KeyPair.generate("sign")
    for wrong in (sign.opening_key, lambda: seal.sign(b""), sign.public.sealing_key, seal.public.verifying_key):
        with pytest.raises(ValueError, match="this needs one to"):
            wrong()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"use": "seal", "private": "AAAA", "expires": 1}', b"\xff\xfe"])
def test_a_file_that_is_no_key_is_refused(tmp_path, content):
    path = tmp_path / "key.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is not a key file of this version"):
        KeyPair.load(path)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    KeyPair.generate("seal").save(tmp_path / "key.json")
    (tmp_path / "key.json").chmod(0o644)
    with pytest.raises(ValueError, match="others than its owner can read the key file"):
        KeyPair.load(tmp_path / "key.json")
    with pytest.raises(FileNotFoundError, match="there is no key file"):
        KeyPair.load(tmp_path / "none.json")


def test_rotation_uses_the_new_key_and_keeps_the_old(tmp_path):
    ring = KeyRing(tmp_path / "keys", "seal")
    with pytest.raises(ValueError, match="holds no key to seal with that has not expired"):
        ring.current()
    old, new = ring.add(days=1), ring.add(days=30)
    assert ring.current() == new
    assert ring.find(old.public.key_id) == old
    (tmp_path / "keys" / f"seal-{old.public.key_id.hex()}.json").unlink()
    with pytest.raises(ValueError, match=r"holds no key to .* with whose id is"):
        ring.find(old.public.key_id)
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0


def test_the_newest_key_is_used_also_if_both_were_made_in_one_second(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)
    ring = KeyRing(tmp_path, "sign")
    for _ in range(5):
        assert ring.add() == ring.current()


def test_an_expired_key_is_not_used_for_new_rounds(tmp_path, monkeypatch):
    ring = KeyRing(tmp_path, "seal")
    pair = ring.add(days=1)
    later = time.time() + 2 * 86_400
    assert not pair.public.is_expired()
    assert pair.public.is_expired(later)
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(ValueError, match="not expired"):
        ring.current()
    assert ring.find(pair.public.key_id) == pair


def test_a_key_has_a_use_and_lasts_a_day_or_more():
    with pytest.raises(ValueError, match=r"expected use to be one of .*, got use='lock'"):
        KeyPair.generate("lock")
    for days, words in ((0, "expected days >= 1, got days=0"), (1.5, "expected days to be a whole number")):
        with pytest.raises(ValueError, match=words):
            KeyPair.generate("sign", days=days)


def test_a_public_key_has_its_length():
    with pytest.raises(ValueError, match="expected a public key of 32 bytes, got 3"):
        PublicKey(use="seal", public=b"abc", expires=0)


def test_a_service_has_a_key_of_each_use_and_one_id_for_both(tmp_path):
    made, other = ServicePairs.add(tmp_path), ServicePairs.add(tmp_path)
    assert ServicePairs.find(tmp_path, made.public) == made
    assert ServicePairs.find(tmp_path, other.public) == other
    mixed = ServiceKeys(sign=made.sign.public, seal=other.seal.public)
    assert len({made.public.key_id, other.public.key_id, mixed.key_id}) == 3
    assert len(mixed.key_id) == 16
    with pytest.raises(ValueError, match=r"holds no key to .* with whose id is"):
        ServicePairs.find(tmp_path / "elsewhere", made.public)
    for sign, seal in ((made.seal, made.seal), (made.sign, made.sign), (made.seal, made.sign)):
        with pytest.raises(ValueError, match="a service has a key to sign with and one to seal with; these are for"):
            ServiceKeys(sign=sign.public, seal=seal.public)


@pytest.mark.parametrize("use", ["sign", "seal"])
def test_a_service_has_expired_with_the_first_of_its_keys(tmp_path, use):
    public = ServicePairs.add(tmp_path).public
    assert not public.is_expired()
    old = msgspec.structs.replace(getattr(public, use), expires=1)
    assert msgspec.structs.replace(public, **{use: old}).is_expired()
