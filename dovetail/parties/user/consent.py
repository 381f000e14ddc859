"""A user's consent: tasks that it has left, kinds of task that it refuses for ever, and what it has spent on whom.

All of it is in the user's own folder, and is looked at before every report: who leaves a task reports to it no more,
whatever runs. What was spent stays spent: a training on the same users is another task against the same lifetime.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dovetail.files import write_atomically
from dovetail.parties.common.files import read_json
from dovetail.parties.common.ledger import Ledger
from dovetail.parties.common.task import SignedTask, TrainingTask, task_id_of
from dovetail.parties.user.policy import Refused
from dovetail.parties.user.spending import RollbackGuard

__all__ = ["Consent", "leave_tasks", "spending_by_task", "task_id_from"]

_FILE = "consent.json"
_TASK_ID = 32  # bytes


_MEANING = "for one user, by the task's own statement and under its assumptions (dovetail task show)"


class _KnownTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom a task that this user has reported to is for."""

    name: str
    protocol: str
    analyzer: bytes


class Consent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a user does not take part in.

    Arguments:
        left: ids of tasks that it has left.
        refused: names of tasks or protocols that it refuses.
        known: tasks that it reported to, by id in hex.
    """

    left: list[bytes] = []
    refused: list[str] = []
    known: dict[str, _KnownTask] = {}

    @classmethod
    def read(cls, folder: Path) -> Consent:
        """The consent of the user with this folder."""
        path = folder / _FILE
        return read_json(path, cls, "a user's consent") if path.exists() else cls()

    def write(self, folder: Path) -> None:
        """Save it in the user's folder; it holds from now on."""
        write_atomically(folder / _FILE, msgspec.json.encode(self), mode=0o600)

    def check(self, task: TrainingTask) -> None:
        """Refuse a task that the user has left, or one of a kind that it refuses."""
        if task.task_id in self.left:
            raise Refused(f"this user has left the task {task.task_id.hex()} (dovetail client leave)")
        for kind in (task.name, task.protocol):
            if kind in self.refused:
                raise Refused(f"this user refuses tasks of the name or protocol {kind!r} (dovetail client refuse)")

    def remember_task(self, task: TrainingTask, folder: Path) -> None:
        """Remember whom a task is for, before anything is spent on it."""
        name = task.task_id.hex()
        if name not in self.known:
            self.known[name] = _KnownTask(name=task.name, protocol=task.protocol, analyzer=task.analyzer_id)
            self.write(folder)


def leave_tasks(folder: Path, tasks: Sequence[bytes]) -> Consent:
    """Leave these tasks for good; what waits to be sent to them is deleted.

    Returns: the user's consent from now on.
    """
    consent = Consent.read(folder)
    consent.left += [task for task in tasks if task not in consent.left]
    consent.write(folder)
    for task in tasks:
        for envelope in (folder / "outbox").glob(f"{task.hex()}-*"):
            envelope.unlink(missing_ok=True)
    return consent


def spending_by_task(folder: Path, guard: RollbackGuard | None = None) -> list[dict[str, Any]]:
    """What a user has spent, a row for every task: on whom, in how many rounds, and whether it left.

    Arguments:
        folder: the user's folder.
        guard: its rollback guard, which remembers what a ledger that was set back has lost.

    Returns: plain data, which commands print and give out as JSON, by task: `task` (id in hex), `name`, `protocol` and
        `analyzer` (its id in hex; all three None where nothing was noted of the task), `rounds`, `eps` (None where it
        is infinite), `delta`, `means` (a phrase for all rows), `left` and `set_back` (truth values).
    """
    consent = Consent.read(folder)
    spent = {}
    for path in sorted((folder / "spending").glob("task-*.db")):
        if not Ledger.has_entries(path):
            continue
        with contextlib.closing(Ledger.reopen(path)) as ledger:
            spent[path.stem.removeprefix("task-")] = len(ledger.reserved_rounds), *ledger.total
    lacking = set()
    for task, mark in ({} if guard is None else guard.read()).items():
        rounds, eps, delta = spent.get(task, (0, 0.0, 0.0))
        if rounds < (remembered := mark.length - 1):  # entries but the first are rounds
            lacking.add(task)
            spent[task] = remembered, max(eps, mark.bound), max(delta, mark.delta)
    return [
        {
            "task": task,
            **_known_facts(consent.known.get(task)),
            "rounds": rounds,
            "eps": None if math.isinf(eps) else eps,
            "delta": delta,
            "means": _MEANING,
            "left": bytes.fromhex(task) in consent.left,
            "set_back": task in lacking,
        }
        for task, (rounds, eps, delta) in sorted(spent.items())
    ]


def _known_facts(known: _KnownTask | None) -> dict[str, str | None]:
    """What the user noted of a task, as fields of a row of `spending_by_task`; None for a task unknown to it."""
    if known is None:
        return dict.fromkeys(("name", "protocol", "analyzer"))
    return {"name": known.name, "protocol": known.protocol, "analyzer": known.analyzer.hex()}


def task_id_from(text: str) -> bytes:
    """The id of a task from what was typed: the id in hex, or the file of the signed task."""
    if Path(text).is_file():
        return task_id_of(read_json(Path(text), SignedTask, "a signed task").body)
    try:
        task_id = bytes.fromhex(text)
    except ValueError:
        task_id = b""
    if len(task_id) != _TASK_ID:
        raise ValueError(
            f"{text!r} is neither the file of a signed task nor the id of one, {2 * _TASK_ID} hexadecimal digits"
        )
    return task_id
