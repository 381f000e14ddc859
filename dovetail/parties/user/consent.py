"""A user's consent: tasks that it has left, kinds of task that it refuses for ever, and what it has spent on whom.

All of it is in the user's own folder, and is looked at before every report: who leaves a task reports to it no more,
whatever runs. What was spent stays spent: a training on the same users is another task against the same lifetime.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import msgspec

from dovetail.files import write_atomically
from dovetail.parties.common.ledger import Ledger
from dovetail.parties.common.policy import Refused
from dovetail.parties.common.records import read_record
from dovetail.parties.common.task import SignedTask, TrainingTask, task_id_of

__all__ = ["Consent", "named", "spent_on"]

_FILE = "consent.json"
_TASK_ID = 32  # bytes


MEANS = "for one user, by the task's own statement and under its assumptions (dovetail task show)"


class _Known(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom a task is for."""

    name: str
    protocol: str
    analyzer: bytes


class Consent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a user does not take part in; `refused` names tasks or protocols, `known` are tasks that it reported to."""

    left: list[bytes] = []
    refused: list[str] = []
    known: dict[str, _Known] = {}

    @classmethod
    def read(cls, folder: Path) -> Consent:
        """That of the user with this folder."""
        path = folder / _FILE
        return read_record(path, cls, "a user's consent") if path.exists() else cls()

    def write(self, folder: Path) -> None:
        """Keep it; it holds from now on."""
        write_atomically(folder / _FILE, msgspec.json.encode(self), mode=0o600)

    def check(self, task: TrainingTask) -> None:
        """Refuse a task that the user has left, or one of a kind that it refuses."""
        if task.task_id in self.left:
            raise Refused(f"expected a task that this user has not left, got {task.task_id.hex()}")
        for kind in (task.name, task.protocol):
            if kind in self.refused:
                raise Refused(f"expected a kind of task that this user does not refuse, got {kind!r}")

    def note(self, task: TrainingTask, folder: Path) -> None:
        """Remember whom a task is for, before anything is spent on it."""
        name = task.task_id.hex()
        if name not in self.known:
            self.known[name] = _Known(name=task.name, protocol=task.protocol, analyzer=task.analyzer.key_id)
            self.write(folder)


def spent_on(folder: Path) -> list[dict[str, Any]]:
    """What the user with this folder has spent, by task: on whom, in how many rounds, and whether it left."""
    consent, found = Consent.read(folder), []
    for path in sorted((folder / "spending").glob("task-*.db")):
        task = path.stem.removeprefix("task-")
        known = consent.known.get(task)
        if not Ledger.begun(path):
            continue
        with contextlib.closing(Ledger.reopen(path)) as ledger:
            eps, delta = ledger.spent
            rounds = sum(entry.kind == "reserve" for entry in ledger.entries)
        found.append(
            {
                "task": task,
                "name": None if known is None else known.name,
                "protocol": None if known is None else known.protocol,
                "analyzer": None if known is None else known.analyzer.hex(),
                "rounds": rounds,
                "eps": None if math.isinf(eps) else eps,
                "delta": delta,
                "means": MEANS,
                "left": bytes.fromhex(task) in consent.left,
            }
        )
    return found


def named(text: str) -> bytes:
    """The id of a task, given as such or by its file."""
    if Path(text).is_file():
        return task_id_of(read_record(Path(text), SignedTask, "a signed task").body)
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != _TASK_ID:
        raise ValueError(f"expected a task.json, or the id of a task, {2 * _TASK_ID} hexadecimal digits, got {text!r}")
    return found
