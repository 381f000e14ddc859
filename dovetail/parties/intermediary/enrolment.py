"""Who may upload: a list of users' keys in a file, which may change while the service runs.

A user that rotates its key stays the same user: the list has the id of the first key beside a later one, so that nobody
counts twice in a round by means of a new key.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from dovetail._structs import resolve_fields
from dovetail.files import write_atomically
from dovetail.parties.common.files import WatchedFile, read_json
from dovetail.parties.common.keys import PublicKey
from dovetail.parties.common.notices import Rotation

__all__ = ["Enrolled", "Enrolment", "enrol", "read_enrolled", "revoke", "user_of"]


_LOG = logging.getLogger(__name__)


class Enrolment(PublicKey, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A user's key; `user` is the id of the user's first key, if another, `replaced` the ids of all before it."""

    user: bytes = b""
    replaced: tuple[bytes, ...] = ()


def read_enrolled(path: Path) -> dict[bytes, Enrolment]:
    """The keys of the users that may report, from a JSON file, by id."""
    return {key.key_id: key for key in read_json(path, list[Enrolment], "the public keys of the clients")}


def user_of(keys: Mapping[bytes, PublicKey], sender: bytes) -> bytes:
    """The user that holds a key, by the id of the user's first key; for an unknown key, its own id."""
    key = keys.get(sender)
    return key.user or sender if isinstance(key, Enrolment) else sender


class Enrolled(Mapping[bytes, PublicKey]):
    """The users on a list as it is now, by the ids of their keys.

    A list with more users than a round takes is refused at the start if several services might admit different ones
    first. A service that runs logs a warning instead, for a list that revokes users must take effect.

    Arguments:
        path: the list, a JSON file, which is read again when it changes.
        max_users: users that a round of the task takes; None: any number.
        services: shufflers or aggregators of the task.
    """

    def __init__(self, path: Path, *, max_users: int | None = None, services: int = 1) -> None:
        self._file = WatchedFile(path, functools.partial(_read_and_count, max_users=max_users, services=services))
        if services > 1 and (problem := _why_too_many(self._file.current_content(), path, max_users, services)):
            raise ValueError(problem)

    def __getitem__(self, key_id: bytes) -> PublicKey:
        return self._file.current_content()[key_id]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file.current_content())

    def __len__(self) -> int:
        return len(self._file.current_content())


def _read_and_count(path: Path, *, max_users: int | None, services: int) -> dict[bytes, Enrolment]:
    enrolled = read_enrolled(path)
    if problem := _why_too_many(enrolled, path, max_users, services):
        _LOG.warning("%s", problem)
    return enrolled


def _why_too_many(enrolled: Mapping[bytes, Enrolment], path: Path, max_users: int | None, services: int) -> str | None:
    """What is wrong with a list that has more users than a round takes; None if it has not."""
    if max_users is None or len(enrolled) <= max_users:
        return None
    why = (
        f"{services} services would admit different users first, and every such round would be void and charged"
        if services > 1
        else "whoever comes late in a round is turned away and charged for it"
    )
    return (
        f"{str(path)!r} has {len(enrolled)} users and a round of this task takes {max_users} (max_clients): {why}; "
        "revoke some, or sign a task with a larger --max-clients"
    )


def enrol(path: Path, files: Iterable[Path]) -> int:
    """Add users to a list.

    Guarantees:
        A user stays one user: a key that is on the list stays as it is there, and one that was replaced is refused.

    Arguments:
        path: the list, which is made if it does not exist.
        files: public keys, or rotations of keys of users that are on the list.

    Returns: how many users are on the list.
    """
    enrolled = read_enrolled(path) if path.exists() else {}
    earlier = {key_id for entry in enrolled.values() for key_id in (entry.user, *entry.replaced)}
    id_by_bytes = {entry.public: entry.key_id for entry in enrolled.values()}
    for file in files:
        enrolment = _remove_rotated_key(file, enrolled) or _make_enrolment(read_json(file, PublicKey, "a public key"))
        if enrolment.key_id in earlier:
            raise ValueError(
                f"the key {enrolment.key_id.hex()} was replaced by a newer one of the same user, which is enrolled: "
                "enrolling it again would make two users of one"
            )
        if id_by_bytes.setdefault(enrolment.public, enrolment.key_id) != enrolment.key_id:
            raise ValueError(
                f"the key {enrolment.key_id.hex()} is enrolled with another expiry: enrolling it again would make two "
                "users of one"
            )
        earlier.update((enrolment.user, *enrolment.replaced))
        enrolled.setdefault(enrolment.key_id, enrolment)
    _write_enrolled(path, enrolled)
    return len(enrolled)


def revoke(path: Path, key_ids: Iterable[bytes]) -> int:
    """Take the users with these keys off a list, and return how many are left; refuses a key that is not on it."""
    enrolled = read_enrolled(path)
    for key_id in key_ids:
        if enrolled.pop(key_id, None) is None:
            raise ValueError(f"no user on {str(path)!r} has the key {key_id.hex()}; nobody was revoked")
    _write_enrolled(path, enrolled)
    return len(enrolled)


def _remove_rotated_key(file: Path, enrolled: dict[bytes, Enrolment]) -> Enrolment | None:
    """Take the old key of a rotation off the list and return its successor; None if the file is not a rotation."""
    try:
        rotation = msgspec.json.decode(file.read_bytes(), type=resolve_fields(Rotation))
    except (OSError, msgspec.MsgspecError):
        return None
    rotation.check()
    if rotation.new_sign is None or rotation.new_seal is not None:
        raise ValueError(f"{str(file)!r} rotates the keys of a service or an analyzer; only users' keys are enrolled")
    if rotation.new in enrolled:
        return enrolled[rotation.new]  # enrolled before
    old = enrolled.pop(rotation.old, None)
    if old is None:
        raise ValueError(f"{str(file)!r} rotates the key {rotation.old.hex()}, which no enrolled user has")
    return _make_enrolment(rotation.new_sign, user=old.user or old.key_id, replaced=(*old.replaced, old.key_id))


def _make_enrolment(key: PublicKey, *, user: bytes = b"", replaced: tuple[bytes, ...] = ()) -> Enrolment:
    if key.use != "sign":
        raise ValueError(
            f"the key {key.key_id.hex()} is for sealing; users are enrolled by the key that they sign with"
        )
    return Enrolment(use=key.use, public=key.public, expires=key.expires, user=user, replaced=replaced)


def _write_enrolled(path: Path, enrolled: Mapping[bytes, Enrolment]) -> None:
    write_atomically(path, msgspec.json.encode(list(enrolled.values())), mode=0o600)
