"""A ledger of what was spent on a task: append-only, hash-chained, written before anything leaves.

The analyzer keeps one of its task, a user one of every task that it takes part in.

Every entry carries the hash of the one before it. A round is *reserved*, with the bound that holds once it is released,
before anything of it is released; then the model is *released*, with its digest. What was reserved stays spent, whether
the model left or not: after a crash nobody can tell. A checkpoint of the model carries the hash of the entry that
released it, so a ledger or a checkpoint that was restored from an older copy does not fit the other and is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from dovetail import _validate
from dovetail._structs import resolve_fields
from dovetail.parties.common.database import Database

__all__ = ["Ledger", "LedgerEntry", "Overspent"]

_EMPTY = bytes(32)
_SAME = 1e-9  # relative: what other processors and libraries may round differently
_MIGRATIONS = ("CREATE TABLE IF NOT EXISTS entries (number INTEGER PRIMARY KEY, body BLOB, hash BLOB)",)


class Overspent(ValueError):  # noqa: N818 - it says that a round does not fit; not every refusal is an error
    """A round that does not fit into the budget."""


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry.

    Arguments:
        kind: "open" for the first entry, which holds the budget; "reserve" before anything of a round is released;
            "release" when its model is.
        task_id: the task.
        round: the round; 0 in the first entry.
        eps: of all rounds up to this one together; None if there is no bound.
        delta: the same.
        model: SHA-256 of the model, in a release.
    """

    kind: Literal["open", "reserve", "release"]
    task_id: bytes
    round: int
    eps: float | None
    delta: float
    model: bytes = b""

    @property
    def bound(self) -> float:
        """Its eps as a number, infinite where the file has null."""
        return math.inf if self.eps is None else self.eps


class Ledger(Database):
    """The ledger of one task, in a file, or in the database of an analyzer's replicas.

    Arguments:
        where: the file, or the URL of the database.
        task_id: the task whose ledger this is or becomes; a ledger of another one is refused.
        eps: budget of all rounds together.
        delta: the same.

    Guarantees:
        What is spent never decreases, and every released model was reserved before, with all rounds before it.
        A round is reserved once, and released once; saying the same again changes nothing. What was reserved counts:
        another machine may compute a bound that differs in its last digits.
        An entry that was changed, removed or inserted is noticed when the file is opened.
        An entry is on disk before a method returns.
    """

    def __init__(self, where: Path | str, *, task_id: bytes, eps: float, delta: float) -> None:
        if len(task_id) != 32:
            raise ValueError(f"expected a task id of 32 bytes, got {len(task_id)} bytes")
        if not eps > 0:
            raise ValueError(f"expected eps > 0, got eps={eps!r}")
        _validate.in_open_interval(0, 1, delta=delta)
        self._where = repr(str(where)) if isinstance(where, Path) else "the database"
        super().__init__(where, {"ledger": _MIGRATIONS})
        opening = LedgerEntry(kind="open", task_id=task_id, round=0, eps=_none_if_infinite(eps), delta=delta)
        self._entries, self._hashes = self._read_entries()
        if not self._entries:
            with self._as_only_writer():
                if not self._entries:
                    self._append_entry(opening)
        if self._entries[0] != opening:
            first = self._entries[0]
            raise ValueError(
                f"the ledger in {self._where} is that of task {first.task_id.hex()} with a budget of "
                f"({first.bound}, {first.delta}), not of task {task_id.hex()} with ({eps}, {delta})"
            )

    @classmethod
    def reopen(cls, path: Path) -> Ledger:
        """Open the ledger in a file, whatever its task and budget."""
        body = _first_body(path)
        if not isinstance(body, bytes):
            raise ValueError(f"{str(path)!r} holds no ledger")
        first = msgspec.json.decode(body, type=resolve_fields(LedgerEntry))
        return cls(path, task_id=first.task_id, eps=first.bound, delta=first.delta)

    @staticmethod
    def has_entries(path: Path) -> bool:
        """Whether a file holds a ledger: a process that was killed while it made one leaves an empty file."""
        return _first_body(path) is not None

    @property
    def head(self) -> bytes:
        """The hash of the last entry: who remembers it notices if the ledger is set back."""
        return self._hashes[-1]

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """All entries, in order."""
        return tuple(self._entries)

    @property
    def total(self) -> tuple[float, float]:
        """(eps, delta) of all rounds that were reserved, together; zeros before the first."""
        reservations = [entry for entry in self._entries if entry.kind == "reserve"]
        return (reservations[-1].bound, reservations[-1].delta) if reservations else (0.0, 0.0)

    @property
    def reserved_rounds(self) -> list[int]:
        """The rounds that were reserved, in order."""
        return [entry.round for entry in self._entries if entry.kind == "reserve"]

    @property
    def last_release(self) -> LedgerEntry | None:
        """The entry of the last model that was released, if any was."""
        return next((entry for entry in reversed(self._entries) if entry.kind == "release"), None)

    def reserve(self, round: int, *, eps: float, delta: float) -> bytes:
        """Reserve a round, before anything of it leaves; `Overspent` if the budget does not allow for it.

        Arguments:
            round: the round; reserving it again at the same bound changes nothing.
            eps: of all rounds up to this one together.
            delta: the same.

        Returns: the hash of the entry.
        """
        _validate.integer(round=round)
        _validate.at_least(1, round=round)
        if not eps >= 0:
            raise ValueError(f"expected eps >= 0, got eps={eps!r}")
        _validate.non_negative(delta=delta)
        entry = LedgerEntry(kind="reserve", task_id=self._task_id, round=round, eps=_none_if_infinite(eps), delta=delta)
        with self._as_only_writer():
            earlier = self._find_entry("reserve", round)
            if earlier is not None:
                if abs(eps - earlier.bound) > _SAME * earlier.bound or delta != earlier.delta:
                    raise ValueError(
                        f"round {round} was reserved at ({earlier.bound}, {earlier.delta}), and is now said to cost "
                        f"({eps}, {delta}): the task, or the accountant, is another one"
                    )
                return self._hashes[self._entries.index(earlier)]
            budget = self._entries[0]
            spent, spent_delta = self.total
            last = max((item.round for item in self._entries), default=0)
            if round <= last:
                raise ValueError(f"round {round} comes too late: round {last} is in the ledger already")
            if eps < spent or delta < spent_delta:
                raise ValueError(f"expected at least what is spent, ({spent}, {spent_delta}), got ({eps}, {delta})")
            if eps > budget.bound or delta > budget.delta:
                raise Overspent(
                    f"round {round} would bring the task to ({eps}, {delta}), above its budget of "
                    f"({budget.bound}, {budget.delta})"
                )
            self._append_entry(entry)
            return self.head

    def release(self, round: int, *, model: bytes) -> bytes:
        """Note that the model of a reserved round is released.

        Arguments:
            round: the round.
            model: SHA-256 of the model.

        Returns: the hash of the entry, which belongs into the model's checkpoint.
        """
        if len(model) != 32:
            raise ValueError(f"expected a model's SHA-256 of 32 bytes, got {len(model)} bytes")
        with self._as_only_writer():
            reservation = self._find_entry("reserve", round)
            earlier = self._find_entry("release", round)
            if reservation is None:
                raise ValueError(f"round {round} was not reserved, so that its model cannot be released")
            entry = msgspec.structs.replace(reservation, kind="release", model=model)
            if earlier is not None:
                if earlier != entry:
                    raise ValueError(f"round {round} has released another model, {earlier.model.hex()}")
                return self._hashes[self._entries.index(earlier)]
            self._append_entry(entry)
            return self.head

    def check(self, *, model: bytes, head: bytes) -> None:
        """Refuse a checkpoint that does not belong to the last release: one of the two was restored from a copy."""
        last = self.last_release
        if last is None or last.model != model or self._hashes[self._entries.index(last)] != head:
            raise ValueError(
                f"the checkpoint is not of the last model that the ledger in {self._where} has released: one of the "
                "two was restored from an older copy; restore both from one backup"
            )

    def holds_entry(self, length: int, head: bytes) -> bool:
        """Whether its entry number `length` has this hash: whether nothing before it was taken away or changed."""
        return len(self._hashes) >= length and self._hashes[length - 1] == head

    def refresh(self) -> bool:
        """Read what other replicas wrote.

        Returns: whether they wrote anything.
        """
        (last,) = self._fetch_row("SELECT MAX(number) FROM entries") or (None,)
        if last is not None and last + 1 == len(self._entries):
            return False
        self._entries, self._hashes = self._read_entries()
        return True

    @property
    def _task_id(self) -> bytes:
        return self._entries[0].task_id

    def _find_entry(self, kind: str, round: int) -> LedgerEntry | None:
        return next((entry for entry in self._entries if entry.kind == kind and entry.round == round), None)

    @contextlib.contextmanager
    def _as_only_writer(self) -> Iterator[None]:
        """One writer at a time, also among processes; what others wrote is read first."""
        with self._transaction():
            self._entries, self._hashes = self._read_entries()
            yield

    def _append_entry(self, entry: LedgerEntry) -> None:
        body = msgspec.json.encode(entry)
        digest = _hash_entry(self._hashes[-1] if self._hashes else _EMPTY, body)
        self._execute("INSERT INTO entries VALUES (?, ?, ?)", len(self._entries), body, digest)
        self._entries.append(entry)
        self._hashes.append(digest)

    def _read_entries(self) -> tuple[list[LedgerEntry], list[bytes]]:
        """All entries with their hashes; refuses a chain that was changed, for what was spent is then unknown."""
        entries: list[LedgerEntry] = []
        hashes: list[bytes] = []
        before = _EMPTY
        for number, body, digest in self._fetch_rows("SELECT number, body, hash FROM entries ORDER BY number"):
            if number != len(entries) or not isinstance(body, bytes) or digest != _hash_entry(before, body):
                raise ValueError(
                    f"the ledger in {self._where} was changed at entry {number}, so what was spent is not known: "
                    "restore it from a backup"
                )
            entries.append(msgspec.json.decode(body, type=resolve_fields(LedgerEntry)))
            hashes.append(digest)
            before = digest
        return entries, hashes


def _first_body(path: Path) -> object:
    """The body of the first entry in a file; None if there is none. A file that cannot be read is refused."""
    where = f"{path.absolute().as_uri()}?mode=ro"  # which quotes what a URI would read as something else: # ? %
    try:
        with contextlib.closing(sqlite3.connect(where, uri=True)) as database:
            if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchone() is None:
                return None
            (body,) = database.execute("SELECT body FROM entries WHERE number = 0").fetchone() or (None,)
    except sqlite3.Error as error:
        raise ValueError(
            f"the ledger {str(path)!r} cannot be read ({error}), so what was spent is not known: restore a backup"
        ) from error
    return body


def _none_if_infinite(eps: float) -> float | None:
    return None if math.isinf(eps) else eps


def _hash_entry(before: bytes, body: bytes) -> bytes:
    return hashlib.sha256(before + body).digest()
