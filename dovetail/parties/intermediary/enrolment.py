"""Who may upload: a list of users' keys in a file, which may change while the service runs.

A user that rotates its key stays the user that it was: the list says by whose first key a later one goes, so that
nobody counts twice in a round by way of a new key.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from dovetail._structs import ready
from dovetail.files import write_atomically
from dovetail.parties.common.files import WatchedFile, read_json
from dovetail.parties.common.keys import PublicKey
from dovetail.parties.common.notices import Rotation

__all__ = ["Enrolled", "Enrolment", "enrol", "read_enrolled", "revoke", "user_of"]


_LOG = logging.getLogger(__name__)


class Enrolment(PublicKey, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A user's key; `user` is the id of its first one, if it is another, `replaced` the ids of all before it."""

    user: bytes = b""
    replaced: tuple[bytes, ...] = ()


def read_enrolled(path: Path) -> dict[bytes, Enrolment]:
    """The keys of the users that may report, from a JSON file, by id."""
    return {key.key_id: key for key in read_json(path, list[Enrolment], "the public keys of the clients")}


def user_of(keys: Mapping[bytes, PublicKey], sender: bytes) -> bytes:
    """Who the holder of a key is in the rounds of a task."""
    found = keys.get(sender)
    return found.user or sender if isinstance(found, Enrolment) else sender


class Enrolled(Mapping[bytes, PublicKey]):
    """The users on a list as it is now, by the ids of their keys.

    `most` is how many a round of the task takes. If there are more of them, and several `services` that might admit
    different ones first, a service does not start with the list; one that runs says so, for a list that takes users
    off must hold.
    """

    def __init__(self, path: Path, *, most: int | None = None, services: int = 1) -> None:
        self._file = WatchedFile(path, functools.partial(_read_and_count, most=most, services=services))
        if services > 1 and (said := _too_many(self._file.now(), path, most, services)):
            raise ValueError(said)

    def __getitem__(self, key_id: bytes) -> PublicKey:
        return self._file.now()[key_id]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file.now())

    def __len__(self) -> int:
        return len(self._file.now())


def _read_and_count(path: Path, *, most: int | None, services: int) -> dict[bytes, Enrolment]:
    found = read_enrolled(path)
    if said := _too_many(found, path, most, services):
        _LOG.warning("%s", said)
    return found


def _too_many(found: Mapping[bytes, Enrolment], path: Path, most: int | None, services: int) -> str | None:
    """What is wrong with a list of more users than a round takes."""
    if most is None or len(found) <= most:
        return None
    why = (
        f"{services} services would admit different users first, and every such round would be void and charged"
        if services > 1
        else "whoever comes late in a round is turned away and charged for it"
    )
    return (
        f"{str(path)!r} has {len(found)} users and a round of this task takes {most} (max_clients): {why}; "
        "revoke some, or sign a task with a larger --max-clients"
    )


def enrol(path: Path, files: Iterable[Path]) -> int:
    """Add the users of these files to a list: public keys, or rotations of users that are on it; how many there are.

    Guarantees:
        A user stays one user: a key that is on the list stays as it is there, and one that was replaced is refused.
    """
    known = read_enrolled(path) if path.exists() else {}
    earlier = {key_id for entry in known.values() for key_id in (entry.user, *entry.replaced)}
    id_by_bytes = {entry.public: entry.key_id for entry in known.values()}
    for file in files:
        made = _successor(file, known) or _enrolment(read_json(file, PublicKey, "a public key"))
        if made.key_id in earlier:
            raise ValueError(
                f"the key {made.key_id.hex()} was replaced by a newer one of the same user, which is enrolled: "
                "enrolling it again would make two users of one"
            )
        if id_by_bytes.setdefault(made.public, made.key_id) != made.key_id:
            raise ValueError(
                f"the key {made.key_id.hex()} is enrolled with another expiry: enrolling it again would make two users "
                "of one"
            )
        earlier.update((made.user, *made.replaced))
        known.setdefault(made.key_id, made)
    _write(path, known)
    return len(known)


def revoke(path: Path, key_ids: Iterable[bytes]) -> int:
    """Take users off a list; refuses one that is not on it. How many are left."""
    known = read_enrolled(path)
    for key_id in key_ids:
        if known.pop(key_id, None) is None:
            raise ValueError(f"expected the key of an enrolled user, got {key_id.hex()}")
    _write(path, known)
    return len(known)


def _successor(file: Path, known: dict[bytes, Enrolment]) -> Enrolment | None:
    """The new key of a user that is on the list, in the place of the old one; None if the file is no rotation."""
    try:
        rotation = msgspec.json.decode(file.read_bytes(), type=ready(Rotation))
    except (OSError, msgspec.MsgspecError):
        return None
    rotation.check()
    if rotation.new_sign is None or rotation.new_seal is not None:
        raise ValueError("expected the rotation of a user's key, got that of a service or an analyzer")
    if rotation.new in known:
        return known[rotation.new]  # said again
    old = known.pop(rotation.old, None)
    if old is None:
        raise ValueError(f"expected the rotation of an enrolled user's key, got one of {rotation.old.hex()}")
    return _enrolment(rotation.new_sign, user=old.user or old.key_id, replaced=(*old.replaced, old.key_id))


def _enrolment(key: PublicKey, *, user: bytes = b"", replaced: tuple[bytes, ...] = ()) -> Enrolment:
    if key.use != "sign":
        raise ValueError("expected a key to sign with, got one to seal with")
    return Enrolment(use=key.use, public=key.public, expires=key.expires, user=user, replaced=replaced)


def _write(path: Path, known: Mapping[bytes, Enrolment]) -> None:
    write_atomically(path, msgspec.json.encode(list(known.values())), mode=0o600)
