"""A second memory of what a user has spent, kept elsewhere than its ledgers: it notices if these are set back.

A ledger that is restored from a copy, shortened or deleted is in itself unbroken, and would let its user spend the same
budget again. The witness remembers how long every ledger was, its last hash, and what was spent. It is a file outside
of the user's folder, so that whoever restores the one does not restore the other. It is written after the ledger and
before anything is randomized: a ledger may be ahead of it after a crash, never behind.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dovetail._structs import ready
from dovetail.files import write_atomically
from dovetail.parties.common.ledger import Ledger

__all__ = ["Witness", "Witnessed", "default_witnesses"]


def default_witnesses() -> Path:
    """The folder that DOVETAIL_WITNESS names, else where the platform keeps what programs remember."""
    if named := os.environ.get("DOVETAIL_WITNESS"):
        return Path(named)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "dovetail" / "witness"


class Witnessed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ledger: its length, its last hash, what was spent; `closed` if it was set back and no round is spent on."""

    length: int
    head: bytes
    eps: float | None
    delta: float
    closed: bool = False


class Witness:
    """What is remembered of one user's ledgers, by task.

    Guarantees:
        A ledger that lacks an entry which was remembered is found.
        What was remembered as spent is never forgotten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def known(self) -> dict[str, Witnessed]:
        """All ledgers, by the task's id in hex."""
        if not self._path.exists():
            return {}
        return msgspec.json.decode(self._path.read_bytes(), type=dict[str, ready(Witnessed)])  # type: ignore[misc]

    def set_back(self, folder: Path) -> list[str]:
        """The tasks whose ledgers in a folder lack something, and have not been closed for it."""
        return [task for task, one in self.known().items() if not one.closed and not _holds(folder, task, one)]

    def note(self, ledger: Ledger) -> None:
        """Remember a ledger as it is now."""
        eps, delta = ledger.spent
        task, seen = ledger.entries[0].task_id.hex(), len(ledger.entries)
        finite = None if eps == float("inf") else eps
        self._write({task: Witnessed(length=seen, head=ledger.head, eps=finite, delta=delta)})

    def close(self, folder: Path) -> list[str]:
        """Accept that ledgers were set back: nothing more is spent on their tasks, and what was remembered counts."""
        tasks = self.set_back(folder)
        self._write({task: msgspec.structs.replace(self.known()[task], closed=True) for task in tasks})
        return tasks

    def _write(self, changed: dict[str, Witnessed]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(self._path, msgspec.json.encode({**self.known(), **changed}), mode=0o600)


def _holds(folder: Path, task: str, seen: Witnessed) -> bool:
    path = folder / f"task-{task}.db"
    if not path.exists() or not Ledger.begun(path):
        return False
    ledger = Ledger.reopen(path)
    try:
        return ledger.holds(seen.length, seen.head)
    finally:
        ledger.close()
