"""A user's new key in the place of its old one; everything else in its folder stays, its ledgers above all."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dovetail.files import write_atomically
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.notices import rotate_key
from dovetail.parties.user.client import USER

__all__ = ["rotate_user"]


def rotate_user(folder: Path, *, days: int = 365) -> bytes:
    """Make a successor to the key of a user's folder; the new key's id.

    The old key endorses the new one in `rotation-ID.json`, which is for whoever enrolled the user, and is kept as
    `key-ID.json`. The new key takes its place last: who is interrupted has the old one, and begins again.
    """
    old, new = KeyPair.load(folder / "key.json"), KeyPair.generate("sign", days=days)
    name = old.public.key_id.hex()
    if not (folder / USER).exists():
        write_atomically(folder / USER, f"{name}\n".encode(), mode=0o600)
    if not (folder / f"key-{name}.json").exists():
        old.save(folder / f"key-{name}.json")
    rotation = rotate_key(old.public, new.public, by=old)
    write_atomically(folder / f"rotation-{name}.json", msgspec.json.encode(rotation))
    write_atomically(folder / "public.json", msgspec.json.encode(new.public))
    (folder / "key-new.json").unlink(missing_ok=True)
    new.save(folder / "key-new.json")
    (folder / "key-new.json").replace(folder / "key.json")
    return new.public.key_id
