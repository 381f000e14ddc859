"""Key pairs of parties, in files that their owner alone can read.

A party seals or opens with X25519 and signs with Ed25519. A key pair has an id and a last day; the id is a hash of both
the public half and the last day, so whoever pins an id has pinned when it ends. A `KeyRing` is a folder of key pairs:
the one that expires last is used for new tasks, others stay as long as there are rounds of tasks that name them.
A service has one of each use: `ServiceKeys` are their public halves, `ServicePairs` both halves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from pathlib import Path
from typing import Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from dovetail import _validate
from dovetail._structs import resolve_fields

__all__ = ["KEY_ID", "KeyPair", "KeyRing", "PublicKey", "ServiceKeys", "ServicePairs"]

KEY_ID = 16  # bytes: whoever pins one relies on nobody finding another key with it

Use = Literal["seal", "sign"]
_DAY = 86_400
_PRIVATE: dict[str, type[X25519PrivateKey] | type[Ed25519PrivateKey]] = {
    "seal": X25519PrivateKey,
    "sign": Ed25519PrivateKey,
}


class PublicKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The half of a key pair that others know: what it is for, its 32 bytes, and the second it expires."""

    use: Use
    public: bytes
    expires: int

    def __post_init__(self) -> None:
        if len(self.public) != 32:
            raise ValueError(f"expected a public key of 32 bytes, got {len(self.public)} bytes")
        if not 0 <= self.expires < 1 << 63:
            raise ValueError(f"expected the second at which a key expires, got expires={self.expires}")

    @property
    def key_id(self) -> bytes:
        """The first 16 bytes of a hash of use, public bytes and expiry: with another expiry a key has another id."""
        named = self.use.encode() + b"\0" + self.public + self.expires.to_bytes(8, "big")
        return hashlib.sha256(b"dovetail key\0" + named).digest()[:KEY_ID]

    def is_expired(self, now: float | None = None) -> bool:
        """Whether it has expired by the second `now`, by default the present one."""
        return (time.time() if now is None else now) >= self.expires

    def sealing_key(self) -> X25519PublicKey:
        """The key that one seals with to its owner."""
        self._require_use("seal")
        return X25519PublicKey.from_public_bytes(self.public)

    def verifying_key(self) -> Ed25519PublicKey:
        """The key that one verifies with what its owner signed."""
        self._require_use("sign")
        return Ed25519PublicKey.from_public_bytes(self.public)

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether this is its owner's signature of a message."""
        try:
            self.verifying_key().verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def _require_use(self, use: Use) -> None:
        if self.use != use:
            raise ValueError(f"the key {self.key_id.hex()} is to {self.use} with; this needs one to {use} with")


class ServiceKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The public halves of a service's keys: the one it signs with, and the one that others seal to."""

    sign: PublicKey
    seal: PublicKey

    def __post_init__(self) -> None:
        if self.sign.use != "sign" or self.seal.use != "seal":
            raise ValueError(
                "a service has a key to sign with and one to seal with; "
                f"these are for {self.sign.use!r} and {self.seal.use!r}"
            )

    @property
    def key_id(self) -> bytes:
        """The id of both together: what a policy pins."""
        return hashlib.sha256(b"dovetail service\0" + self.sign.key_id + self.seal.key_id).digest()[:KEY_ID]

    def is_expired(self, now: float | None = None) -> bool:
        """Whether either has expired by the second `now`, by default the present one."""
        return self.sign.is_expired(now) or self.seal.is_expired(now)


class _Stored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    use: Use
    private: bytes
    expires: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A private key with what is public about it; `repr` shows the public half alone."""

    public: PublicKey
    private: bytes = dataclasses.field(repr=False)

    @classmethod
    def generate(cls, use: Use, *, days: int = 365) -> KeyPair:
        """A fresh key pair that expires after so many days."""
        _validate.one_of(tuple(_PRIVATE), use=use)
        _validate.integer(days=days)
        _validate.at_least(1, days=days)
        private = _PRIVATE[use].generate()
        public = PublicKey(
            use=use, public=private.public_key().public_bytes_raw(), expires=int(time.time()) + days * _DAY
        )
        return cls(public=public, private=private.private_bytes_raw())

    def opening_key(self) -> X25519PrivateKey:
        """The key that opens what was sealed to this pair."""
        self.public._require_use("seal")
        return X25519PrivateKey.from_private_bytes(self.private)

    def sign(self, message: bytes) -> bytes:
        """The signature of a message, 64 bytes."""
        self.public._require_use("sign")
        return Ed25519PrivateKey.from_private_bytes(self.private).sign(message)

    def save(self, path: Path) -> None:
        """Write to a new file that its owner alone can read; never over another one."""
        stored = _Stored(use=self.public.use, private=self.private, expires=self.public.expires)
        data = msgspec.json.encode(stored)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)

    @classmethod
    def load(cls, path: Path) -> KeyPair:
        """Read a key pair; refuses a file that others than its owner can read, or that is no key."""
        if not path.is_file():
            raise FileNotFoundError(f"there is no key file {str(path)!r}")
        if path.stat().st_mode & 0o077:
            raise ValueError(f"others than its owner can read the key file {str(path)!r}: chmod 600 it")
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=resolve_fields(_Stored))
            public = _PRIVATE[stored.use].from_private_bytes(stored.private).public_key().public_bytes_raw()
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a key file of this version ({error})") from error
        return cls(public=PublicKey(use=stored.use, public=public, expires=stored.expires), private=stored.private)


@dataclasses.dataclass(frozen=True)
class KeyRing:
    """The key pairs of one use in a folder, by id.

    Guarantees:
        `current` never gives an expired key.
        An older or expired key can still be found by its id until its file is removed.
    """

    folder: Path
    use: Use

    def add(self, *, days: int = 365) -> KeyPair:
        """Make a key pair that becomes the current one, and save it in the folder."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        pair = KeyPair.generate(self.use, days=days)
        latest = max((old.public.expires for old in self.all_pairs()), default=0)
        if pair.public.expires <= latest < pair.public.expires + _DAY:  # else it would not be the current one
            pair = dataclasses.replace(pair, public=msgspec.structs.replace(pair.public, expires=latest + 1))
        pair.save(self.folder / f"{self.use}-{pair.public.key_id.hex()}.json")
        return pair

    def all_pairs(self) -> list[KeyPair]:
        """Every key pair of this use, the one that expires last first."""
        pairs = [KeyPair.load(path) for path in sorted(self.folder.glob(f"{self.use}-*.json"))]
        return sorted(pairs, key=lambda pair: pair.public.expires, reverse=True)

    def current(self) -> KeyPair:
        """The key pair for new tasks: the one that expires last, if it has not expired."""
        for pair in self.all_pairs():
            if not pair.public.is_expired():
                return pair
        raise ValueError(
            f"{str(self.folder)!r} holds no key to {self.use} with that has not expired: make one with dovetail keys"
        )

    def find(self, key_id: bytes) -> KeyPair:
        """The key pair with this id, expired or not."""
        for pair in self.all_pairs():
            if pair.public.key_id == key_id:
                return pair
        raise ValueError(f"{str(self.folder)!r} holds no key to {self.use} with whose id is {key_id.hex()}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServicePairs:
    """Both key pairs of a service."""

    sign: KeyPair
    seal: KeyPair

    @classmethod
    def add(cls, folder: Path, *, days: int = 365) -> ServicePairs:
        """Make both, which become the current ones, and save them in a folder."""
        return cls(sign=KeyRing(folder, "sign").add(days=days), seal=KeyRing(folder, "seal").add(days=days))

    @classmethod
    def find(cls, folder: Path, public: ServiceKeys) -> ServicePairs:
        """The pairs of these public keys, expired or not."""
        return cls(
            sign=KeyRing(folder, "sign").find(public.sign.key_id), seal=KeyRing(folder, "seal").find(public.seal.key_id)
        )

    @classmethod
    def current(cls, folder: Path) -> ServicePairs:
        """The pairs for new tasks."""
        return cls(sign=KeyRing(folder, "sign").current(), seal=KeyRing(folder, "seal").current())

    @property
    def public(self) -> ServiceKeys:
        """The public halves."""
        return ServiceKeys(sign=self.sign.public, seal=self.seal.public)
