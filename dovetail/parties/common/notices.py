"""What a task's signer announces after it has signed: that a task is withdrawn, that a key has a successor.

Notices are signed one by one and only ever added; services hand them out from a file, and who hears one remembers it. A
holder of a key makes its successor and, where the old key can sign, endorses the new one with it: then neither the
signer nor a thief of the new key alone can announce it. An analyzer without a key to sign with cannot endorse: of that
one the signer's word is all there is. Users say in their policy whether they follow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from cryptography.exceptions import InvalidSignature

from dovetail._structs import ready
from dovetail.files import write_atomically
from dovetail.parties.common.keys import KeyPair, PublicKey, ServiceKeys
from dovetail.parties.common.records import read_record

__all__ = ["Notice", "Notices", "Rotation", "SignedNotice", "announce", "read_notices", "rotated", "write_notices"]


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key, or a service's two, and what comes in its place; signed by the old key, if that signs."""

    old_sign: PublicKey | None = None
    old_seal: PublicKey | None = None
    new_sign: PublicKey | None = None
    new_seal: PublicKey | None = None
    signature: bytes = b""

    @property
    def old(self) -> bytes:
        """The id of what is replaced."""
        return _id(self.old_sign, self.old_seal)

    @property
    def new(self) -> bytes:
        """The id of the successor."""
        return _id(self.new_sign, self.new_seal)

    def check(self) -> None:
        """Refuse a successor of another kind, or one that the old key has not endorsed."""
        if (self.old_sign is None, self.old_seal is None) != (self.new_sign is None, self.new_seal is None):
            raise ValueError("expected a successor of the same kind, got another one")
        if self.old_sign is None:
            return
        try:
            self.old_sign.verifying().verify(self.signature, _endorsed(self.old, self.new))
        except InvalidSignature as error:
            raise ValueError("expected a successor that the old key has endorsed, got another one") from error


def rotated(old: PublicKey | ServiceKeys, new: PublicKey | ServiceKeys, *, by: KeyPair | None = None) -> Rotation:
    """A key and its successor; `by` is the old key pair, if it signs."""
    before, after = _halves(old), _halves(new)
    words = {
        "old_sign": before[0],
        "old_seal": before[1],
        "new_sign": after[0],
        "new_seal": after[1],
        "signature": b"" if by is None else by.sign(_endorsed(old.key_id, new.key_id)),
    }
    made = Rotation(**words)  # type: ignore[arg-type]
    made.check()
    return made


class Notice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that a signer announces, and when."""

    kind: Literal["withdraw", "rotate"]
    at: int
    task_id: bytes = b""
    rotation: Rotation | None = None

    def check(self) -> None:
        """Refuse one that announces nothing."""
        if self.kind == "withdraw" and len(self.task_id) == 32 and self.rotation is None:
            return
        if self.kind != "rotate" or self.rotation is None or self.task_id:
            raise ValueError("expected a notice about a task or a key, got another one")
        self.rotation.check()


class SignedNotice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A notice's JSON, as it was signed."""

    body: bytes
    signature: bytes
    signer: PublicKey


def announce(pair: KeyPair, *, task_id: bytes = b"", rotation: Rotation | None = None) -> SignedNotice:
    """A notice that a task is withdrawn, or that a key has a successor."""
    kind: Literal["withdraw", "rotate"] = "withdraw" if rotation is None else "rotate"
    notice = Notice(kind=kind, at=int(time.time()), task_id=task_id, rotation=rotation)
    notice.check()
    body = msgspec.json.encode(notice)
    return SignedNotice(body=body, signature=pair.sign(_announced(body)), signer=pair.public)


class Notices:
    """What was heard of a signer; `told` is all that there was to read, for others who know another signer.

    Guarantees:
        Only what the signer, or a successor that it announced itself, has signed counts.
        What was heard once is never unheard.
    """

    def __init__(self, signer: bytes, signed: Iterable[SignedNotice] = ()) -> None:
        self._signers, self.told = {signer}, tuple(signed)
        self.signed: list[SignedNotice] = []
        self._withdrawn: set[bytes] = set()
        self._successors: dict[bytes, set[bytes]] = {}
        self.hear(self.told)

    def hear(self, signed: Iterable[SignedNotice]) -> bool:
        """Add what is new, in whatever order; whether there was any. What somebody else signed is passed over."""
        waiting, before = [one for one in signed if one not in self.signed], len(self.signed)
        while waiting:
            known = [one for one in waiting if one.signer.key_id in self._signers]
            waiting = [one for one in waiting if one.signer.key_id not in self._signers]
            if not known:
                break
            for one in known:
                self._add(one)
        return len(self.signed) > before

    def withdrawn(self, task_id: bytes) -> bool:
        """Whether a task was withdrawn."""
        return task_id in self._withdrawn

    def known_as(self, key_id: bytes) -> set[bytes]:
        """A key's id, and those of all its successors."""
        found, new = {key_id}, [key_id]
        while new:
            fresh = self._successors.get(new.pop(), set()) - found
            found |= fresh
            new += fresh
        return found

    def _add(self, signed: SignedNotice) -> None:
        try:
            signed.signer.verifying().verify(signed.signature, _announced(signed.body))
            notice = msgspec.json.decode(signed.body, type=ready(Notice))
            notice.check()
        except (InvalidSignature, msgspec.MsgspecError, ValueError):
            return
        self.signed.append(signed)
        if notice.rotation is None:
            self._withdrawn.add(notice.task_id)
            return
        self._successors.setdefault(notice.rotation.old, set()).add(notice.rotation.new)
        if notice.rotation.old in self._signers:
            self._signers.add(notice.rotation.new)


def read_notices(path: Path, signer: bytes) -> Notices:
    """The notices in a file; none if there is no file yet."""
    return Notices(signer, read_record(path, list[SignedNotice], "notices") if path.exists() else ())


def write_notices(path: Path, signed: Sequence[SignedNotice]) -> None:
    """All of them, complete or not at all."""
    write_atomically(path, msgspec.json.encode(list(signed)))


def _halves(keys: PublicKey | ServiceKeys) -> tuple[PublicKey | None, PublicKey | None]:
    if isinstance(keys, ServiceKeys):
        return keys.sign, keys.seal
    return (keys, None) if keys.use == "sign" else (None, keys)


def _id(sign: PublicKey | None, seal: PublicKey | None) -> bytes:
    if sign is not None and seal is not None:
        return ServiceKeys(sign=sign, seal=seal).key_id
    one = sign or seal
    return b"" if one is None else one.key_id


def _endorsed(old: bytes, new: bytes) -> bytes:
    return b"dovetail rotation\0" + old + new


def _announced(body: bytes) -> bytes:
    return b"dovetail notice\0" + body
