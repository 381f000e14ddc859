"""What a task's signer announces later: that a task is withdrawn, that a key has a successor, that a key was stolen.

Notices are signed one by one and only ever added; services hand them out from a file, and users remember what they
received. A notice is one of three kinds:

- *withdraw* ends a task.
- *rotate* names the successor of a key. The old key endorses the new one, if it can sign: then neither the signer nor a
  thief of the new key alone can announce it. (An analyzer without a key to sign with cannot endorse: for that one the
  signer's word is all there is.) The rotation of the signer's own key ends that key: from then on nothing that it signs
  counts, except the tasks and notices that the rotation lists as standing.
- *revoke* ends a signer's key that was stolen, with everything signed by it or by a successor that a thief announced.
  It needs the recovery key, which users pin when they are made and which the signer keeps offline. The recovery key
  alone can only end the stolen key; to name a successor it takes both the recovery key and the stolen one, of which the
  signer still has a copy.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dovetail._structs import resolve_fields
from dovetail.files import write_atomically
from dovetail.parties.common.files import read_json
from dovetail.parties.common.keys import KeyPair, PublicKey, ServiceKeys
from dovetail.parties.common.task import SignedTask, task_id_of

__all__ = [
    "Notice",
    "Notices",
    "Rotation",
    "SignedNotice",
    "announce_rotation",
    "body_digest",
    "read_notices",
    "read_own_notices",
    "revoke_key",
    "rotate_key",
    "withdraw_task",
    "write_notices",
]


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
        return _id_of_halves(self.old_sign, self.old_seal)

    @property
    def new(self) -> bytes:
        """The id of the successor."""
        return _id_of_halves(self.new_sign, self.new_seal)

    def check(self) -> None:
        """Refuse a rotation of no key, a successor of another kind, or one that the old key has not endorsed."""
        if not self.old:
            raise ValueError("a rotation names the key that is replaced and its successor, and this one names no key")
        if (self.old_sign is None, self.old_seal is None) != (self.new_sign is None, self.new_seal is None):
            raise ValueError(
                f"the key {self.old.hex()} has a successor of another kind: a key to sign with is followed by a key to "
                "sign with, both keys of a service by both"
            )
        if self.old_sign is not None and not self.old_sign.has_signed(
            _endorsement_message(self.old, self.new), self.signature
        ):
            raise ValueError(f"the key {self.new.hex()} is not endorsed by the key {self.old.hex()} that it replaces")


def rotate_key(old: PublicKey | ServiceKeys, new: PublicKey | ServiceKeys, *, by: KeyPair | None = None) -> Rotation:
    """Name the successor of a key, or of a service's two.

    Arguments:
        old: the public key or keys that are replaced.
        new: the successor, of the same kind.
        by: the old key pair, which endorses the successor, if it is one to sign with.
    """
    old_sign, old_seal = _key_halves(old)
    new_sign, new_seal = _key_halves(new)
    rotation = Rotation(
        old_sign=old_sign,
        old_seal=old_seal,
        new_sign=new_sign,
        new_seal=new_seal,
        signature=b"" if by is None else by.sign(_endorsement_message(old.key_id, new.key_id)),
    )
    rotation.check()
    return rotation


class Notice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that a signer announces.

    Arguments:
        kind: what it announces.
        at: the second at which it was made.
        task_id: the task that is withdrawn.
        rotation: a key and its successor.
        key: id of a key that is revoked without a successor.
        standing: where a signer's own key ends, ids of the tasks signed by it that go on, and digests of its notices
            that still count.
    """

    kind: Literal["withdraw", "rotate", "revoke"]
    at: int
    task_id: bytes = b""
    rotation: Rotation | None = None
    key: bytes = b""
    standing: tuple[bytes, ...] = ()

    def check(self) -> None:
        """Refuse a notice that announces nothing, or two things at once."""
        is_present = {"task_id": bool(self.task_id), "rotation": self.rotation is not None, "key": bool(self.key)}
        present = [name for name in is_present if is_present[name]]
        allowed = {"withdraw": ("task_id",), "rotate": ("rotation",), "revoke": ("rotation", "key")}[self.kind]
        if len(present) != 1 or present[0] not in allowed:
            names = " and ".join(present) or "nothing"
            raise ValueError(f"a notice to {self.kind} names {' or '.join(allowed)}; this one names {names}")
        if self.rotation is not None:
            self.rotation.check()

    @property
    def ended_key(self) -> bytes:
        """The id of the key that a rotation or revocation ends."""
        return self.key if self.rotation is None else self.rotation.old


class SignedNotice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A notice's JSON, as it was signed; a revocation that names a successor is also signed by the recovery key."""

    body: bytes
    signature: bytes
    signer: PublicKey
    cosignature: bytes = b""
    cosigner: PublicKey | None = None


def withdraw_task(pair: KeyPair, task_id: bytes) -> SignedNotice:
    """Sign the notice that a task is withdrawn."""
    return _sign_notice(pair, Notice(kind="withdraw", at=int(time.time()), task_id=task_id))


def announce_rotation(pair: KeyPair, rotation: Rotation, *, standing: Iterable[bytes] = ()) -> SignedNotice:
    """Sign the notice that a key has a successor.

    Arguments:
        pair: the signer's key pair.
        rotation: the key and its successor.
        standing: for the rotation of the signer's own key, ids of its tasks that go on and digests of its notices that
            still count; everything else that the old key signed ends.
    """
    return _sign_notice(pair, Notice(kind="rotate", at=int(time.time()), rotation=rotation, standing=tuple(standing)))


def revoke_key(
    recovery: KeyPair,
    *,
    key: bytes = b"",
    rotation: Rotation | None = None,
    stolen: KeyPair | None = None,
    standing: Iterable[bytes] = (),
) -> SignedNotice:
    """Sign the notice that a signer's key was stolen.

    Arguments:
        recovery: the key pair that users pinned to recover from a theft.
        key: the id of the stolen key, if it gets no successor: nothing of this signer goes on but what is standing.
        rotation: the stolen key and its successor, instead of `key`.
        stolen: the stolen key pair itself, which must sign too where there is a successor.
        standing: ids of tasks that go on, and digests of notices that still count.
    """
    notice = Notice(kind="revoke", at=int(time.time()), key=key, rotation=rotation, standing=tuple(standing))
    if rotation is None:
        return _sign_notice(recovery, notice)
    if stolen is None or stolen.public.key_id != rotation.old:
        raise ValueError(f"the successor of the stolen key {rotation.old.hex()} needs that key's signature, too")
    signed = _sign_notice(stolen, notice)
    cosignature = recovery.sign(_announcement_message(signed.body))
    return msgspec.structs.replace(signed, cosignature=cosignature, cosigner=recovery.public)


def body_digest(signed: SignedNotice) -> bytes:
    """The digest of a notice's body, whoever signed it: by it a rotation names a notice that still counts after it."""
    return hashlib.sha256(_announcement_message(signed.body)).digest()


class Notices:
    """What a signer has announced, as far as it counts.

    `handed_out` is all that there was to read, for others who know another signer; `signed` is what counts of it.

    Arguments:
        signer: id of the signer's first key.
        signed: notices to begin with, in whatever order.
        recovery: id of the key that may revoke the signer's.

    Guarantees:
        Only what the signer, or a successor that it announced itself, has signed counts; of a key that has a successor
        or was revoked, only what it signed before and what is listed as standing.
        No key that has expired announces anything new.
        What was received is never forgotten, and a task that was withdrawn stays so; a revocation alone undoes what a
        thief announced of other keys.
        Where one key has two successors in one reading, nobody knows which one the thief made: neither counts.
        The successor that a revocation names counts, also if the stolen key or its thief had named it before.
    """

    def __init__(self, signer: bytes, signed: Iterable[SignedNotice] = (), *, recovery: bytes | None = None) -> None:
        self._recovery = recovery
        self.handed_out = tuple(signed)
        self.signed: list[SignedNotice] = []
        self._lineage = [signer]  # the signer's key, its successor, and so on; none twice
        self._standing: dict[bytes, frozenset[bytes]] = {}  # by key that has ended: what of it goes on
        self._revoked: set[bytes] = set()
        self._disputed: set[bytes] = set()
        self._withdrawn: set[bytes] = set()
        self._rotations: dict[tuple[bytes, bytes, bytes], SignedNotice] = {}  # of other keys, by (announcer, old, new)
        self.receive(self.handed_out)

    def receive(self, signed: Iterable[SignedNotice], *, remembered: bool = False) -> bool:
        """Add notices, in whatever order; what somebody else signed is passed over.

        Arguments:
            signed: the notices.
            remembered: whether they counted when they were first received: then they do, also if the key that signed
                them has expired since.

        Returns: whether anything was new.
        """
        before = len(self.signed)
        new = [(item, notice) for item in signed if (notice := _read_if_signed(item)) is not None]
        if not remembered:
            new = [(item, notice) for item, notice in new if not _announcing_key(item, notice).is_expired()]
        while self._revoke(new) or self._rotate_signer(new):
            pass
        for item, notice in new:
            if self._is_in_force(item):
                self._remember(item, notice)
        return len(self.signed) > before

    def why_ended(self, signed: SignedTask) -> str | None:
        """Why a task that the signer has signed ended before its time, in a sentence; None if it stands."""
        task_id = task_id_of(signed.body)
        key = signed.signer.key_id
        if task_id in self._withdrawn:
            return f"the signer has withdrawn the task {task_id.hex()}"
        if key in self._disputed:
            return (
                f"the signer's key {key.hex()} has two successors, so one of them is a thief's: the owner must revoke "
                "it with the recovery key (dovetail task revoke)"
            )
        if key in self._standing and task_id not in self._standing[key]:
            how = "was revoked" if key in self._revoked else "has a successor"
            return f"the key {key.hex()} that signed the task {how}, and the task is not among those that go on"
        return None

    @property
    def current(self) -> bytes:
        """The id of the signer's latest key."""
        return self._lineage[-1]

    def successors(self, key_id: bytes) -> set[bytes]:
        """A key's id, and those of all its successors."""
        if key_id in self._lineage:
            return set(self._lineage[self._lineage.index(key_id) :])
        reached = {key_id}
        left = [key_id]
        while left:
            old = left.pop()
            fresh = {after for _, before, after in self._rotations if before == old} - reached
            reached |= fresh
            left += fresh
        return reached

    def standing_digests(self, key_id: bytes) -> tuple[bytes, ...]:
        """The digests of a key's notices that count now: what the rotation of that key lists, beside its tasks."""
        return tuple(body_digest(signed) for signed in self.signed if signed.signer.key_id == key_id)

    def _revoke(self, new: Sequence[tuple[SignedNotice, Notice]]) -> bool:
        """End a key with all its successors, which a thief may have made; the first revocation of a key counts."""
        for signed, notice in new:
            if notice.kind != "revoke" or notice.ended_key not in self._lineage or notice.ended_key in self._revoked:
                continue
            if _announcing_key(signed, notice).key_id != self._recovery:
                continue
            place = self._lineage.index(notice.ended_key)
            ended = self._lineage[place:]
            kept: list[bytes] = []
            if notice.rotation is not None and notice.rotation.new in ended[1:]:  # it was announced before
                at = ended.index(notice.rotation.new)
                ended, kept = ended[:at], ended[at:]
            self._revoked.update(ended)
            self._standing.update(dict.fromkeys(ended, frozenset(notice.standing)))
            self._disputed.difference_update(ended)
            self._lineage[place + 1 :] = kept
            if notice.rotation is not None and notice.rotation.new not in self._lineage:
                self._set_current_key(notice.rotation.new)
            self._rotations = {names: item for names, item in self._rotations.items() if self._is_in_force(item)}
            self.signed.append(signed)
            return True
        return False

    def _set_current_key(self, new: bytes) -> None:
        """Make this the signer's latest key, whatever somebody else's announcement of it came to."""
        self._standing.pop(new, None)
        self._revoked.discard(new)
        self._lineage.append(new)

    def _rotate_signer(self, new: Sequence[tuple[SignedNotice, Notice]]) -> bool:
        """Follow the signer's latest key to its successor, if it announced one."""
        last = self._lineage[-1]
        if last in self._standing or last in self._disputed:
            return False
        announced = [
            (item, notice, notice.rotation)
            for item, notice in new
            if notice.kind == "rotate" and notice.rotation is not None
            if item.signer.key_id == last == notice.ended_key
            if notice.rotation.new not in self._lineage
        ]
        if len({rotation.new for _, _, rotation in announced}) > 1:
            self._disputed.add(last)
            self.signed += {rotation.new: item for item, _, rotation in announced}.values()
        if not announced or last in self._disputed:
            return False
        signed, notice, rotation = announced[0]
        self._standing[last] = frozenset(notice.standing)
        self._set_current_key(rotation.new)
        self.signed.append(signed)
        return True

    def _is_in_force(self, signed: SignedNotice) -> bool:
        """Whether a notice counts, given what is known of the key that signed it."""
        key = signed.signer.key_id
        if key in self._standing:
            return body_digest(signed) in self._standing[key]
        return key in self._lineage and key not in self._disputed

    def _remember(self, signed: SignedNotice, notice: Notice) -> None:
        """Count a withdrawal or a rotation that is in force, once; revocations count by `_revoke`."""
        if notice.kind == "withdraw" and notice.task_id not in self._withdrawn:
            self._withdrawn.add(notice.task_id)
            self.signed.append(signed)
        elif notice.kind == "rotate" and notice.rotation is not None and notice.ended_key not in self._lineage:
            names = signed.signer.key_id, notice.rotation.old, notice.rotation.new
            if names not in self._rotations:
                self._rotations[names] = signed
                self.signed.append(signed)


def read_notices(path: Path, signer: bytes, *, recovery: bytes | None = None, in_order: bool = False) -> Notices:
    """The notices in a file; none if there is no file yet.

    Arguments:
        path: the file.
        signer: id of the signer's first key.
        recovery: id of the key that may revoke the signer's.
        in_order: whether the file is somebody's memory, in which each notice counted when it was received, whatever
            came after it.
    """
    signed = read_json(path, list[SignedNotice], "notices") if path.exists() else []
    if not in_order:
        return Notices(signer, signed, recovery=recovery)
    notices = Notices(signer, recovery=recovery)
    for _, group in itertools.groupby(signed, _dispute_id):
        notices.receive(group, remembered=True)
    return notices


def _dispute_id(signed: SignedNotice) -> bytes:
    """What notices have in common that are remembered together: two successors of a signer's own key are a dispute."""
    notice = _read_if_signed(signed)
    if notice is not None and notice.kind == "rotate" and notice.ended_key == signed.signer.key_id:
        return notice.ended_key
    return signed.body


def read_own_notices(path: Path, signer: bytes) -> Notices:
    """The notices in the signer's own file: whichever recovery key revoked something there is the signer's."""
    handed_out = read_notices(path, signer).handed_out
    notices = [(item, notice) for item in handed_out if (notice := _read_if_signed(item)) is not None]
    recovery = next((_announcing_key(item, notice).key_id for item, notice in notices if notice.kind == "revoke"), None)
    return Notices(signer, handed_out, recovery=recovery)


def write_notices(path: Path, signed: Sequence[SignedNotice]) -> None:
    """Write notices to a file, complete or not at all."""
    write_atomically(path, msgspec.json.encode(list(signed)))


def _sign_notice(pair: KeyPair, notice: Notice) -> SignedNotice:
    notice.check()
    body = msgspec.json.encode(notice)
    return SignedNotice(body=body, signature=pair.sign(_announcement_message(body)), signer=pair.public)


def _read_if_signed(signed: SignedNotice) -> Notice | None:
    """The notice, if everybody who must sign it has, and it announces something; else None."""
    try:
        notice = msgspec.json.decode(signed.body, type=resolve_fields(Notice))
        notice.check()
        message = _announcement_message(signed.body)
        has_successor = notice.kind == "revoke" and notice.rotation is not None
        if not has_successor and (signed.cosigner is not None or signed.cosignature):
            return None
        if not signed.signer.has_signed(message, signed.signature):
            return None
        if has_successor:
            if signed.cosigner is None or signed.signer.key_id != notice.ended_key:
                return None
            return notice if signed.cosigner.has_signed(message, signed.cosignature) else None
    except (msgspec.MsgspecError, ValueError):
        return None
    return notice


def _announcing_key(signed: SignedNotice, notice: Notice) -> PublicKey:
    """The key on whose authority a notice counts: the cosigner's, where the stolen key signs its own revocation."""
    needs_cosigner = notice.kind == "revoke" and notice.rotation is not None
    return signed.cosigner if needs_cosigner and signed.cosigner is not None else signed.signer


def _key_halves(keys: PublicKey | ServiceKeys) -> tuple[PublicKey | None, PublicKey | None]:
    if isinstance(keys, ServiceKeys):
        return keys.sign, keys.seal
    return (keys, None) if keys.use == "sign" else (None, keys)


def _id_of_halves(sign: PublicKey | None, seal: PublicKey | None) -> bytes:
    if sign is not None and seal is not None:
        return ServiceKeys(sign=sign, seal=seal).key_id
    single = sign or seal
    return b"" if single is None else single.key_id


def _endorsement_message(old: bytes, new: bytes) -> bytes:
    return b"dovetail rotation\0" + old + new


def _announcement_message(body: bytes) -> bytes:
    return b"dovetail notice\0" + body
