"""What a user has spent, in two places: its ledgers, one a task, and a rollback guard elsewhere (its *witness*).

A client keeps its own ledgers and trusts nobody else's: a round that was reserved is spent, whether the report arrived
or not. A ledger that is restored from a copy, shortened or deleted is in itself unbroken, and would let its user spend
the same budget again. The rollback guard remembers how long every ledger was, its last hash, and what was spent. It is
a file outside of the user's folder, so that whoever restores the one does not restore the other. It is written after
the ledger and before anything is randomized: after a crash a ledger may be ahead of it, never behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dovetail import _validate
from dovetail._structs import resolve_fields
from dovetail.files import write_atomically
from dovetail.numbers import at_most
from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.ledger import Ledger, Overspent
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.user.policy import Policy, Refused

__all__ = ["BudgetSpent", "Later", "LedgerMark", "RollbackGuard", "SetBack", "Spending", "default_guard_folder"]

_LAST = "last-report"


class BudgetSpent(Refused):
    """A round that a user has reported to, or began to, or an earlier one: no round is reported to twice."""


class SetBack(Refused):
    """Ledgers that were restored from older copies, so that what they say was spent is too little."""


class Later(Refused):
    """A report that comes too soon after the one before it."""


class LedgerMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is remembered of one ledger: its length, its last hash, and what was spent.

    `closed` means that the ledger was set back and its task given up: nothing more is spent on it.
    """

    length: int
    head: bytes
    eps: float | None
    delta: float
    closed: bool = False

    @property
    def bound(self) -> float:
        """The eps that was spent as a number, infinite where the file has null."""
        return _infinite_if_none(self.eps)


class RollbackGuard:
    """Remembers one user's ledgers, in a file elsewhere; options and files call it the user's witness.

    Guarantees:
        A ledger that lacks an entry which was remembered is noticed.
        What was remembered as spent is never forgotten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, LedgerMark]:
        """What is remembered of every ledger, by the task's id in hex."""
        if not self._path.exists():
            return {}
        return msgspec.json.decode(self._path.read_bytes(), type=dict[str, resolve_fields(LedgerMark)])  # type: ignore[misc]

    def find_set_back(self, folder: Path) -> list[str]:
        """The tasks whose ledgers in a folder lack entries, without those that were given up for it."""
        marks = self.read()
        return [
            task for task, mark in marks.items() if not mark.closed and not _has_remembered_entries(folder, task, mark)
        ]

    def remember(self, ledger: Ledger) -> None:
        """Remember a ledger as it is now."""
        eps, delta = ledger.total
        mark = LedgerMark(
            length=len(ledger.entries), head=ledger.head, eps=None if eps == math.inf else eps, delta=delta
        )
        self._write({ledger.entries[0].task_id.hex(): mark})

    def give_up(self, folder: Path) -> list[str]:
        """Accept that ledgers were set back: nothing more is spent on their tasks, and what was remembered counts.

        Returns: the ids of these tasks, in hex.
        """
        marks = self.read()
        tasks = self.find_set_back(folder)
        self._write({task: msgspec.structs.replace(marks[task], closed=True) for task in tasks})
        return tasks

    def _write(self, changed: dict[str, LedgerMark]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(self._path, msgspec.json.encode({**self.read(), **changed}), mode=0o600)


def default_guard_folder() -> Path:
    """The folder that DOVETAIL_WITNESS names, else the one where the platform keeps the state of programs."""
    if folder := os.environ.get("DOVETAIL_WITNESS"):
        return Path(folder)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "dovetail" / "witness"


class Spending:
    """What a user has spent, in a folder of its own: a ledger for every task.

    Guarantees:
        No round is spent twice, and none is spent that would exceed a ceiling, also by two processes at once.
        What was spent is on disk before `spend` returns.
        With a rollback guard, ledgers that were set back are noticed, and nothing is spent.
    """

    def __init__(self, folder: Path, policy: Policy, guard: RollbackGuard | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._policy = policy
        self._guard = guard

    def total(self) -> tuple[float, float]:
        """(eps, delta) of all tasks, added up; for a ledger that was set back, what the guard remembers."""
        spent = {path.stem.partition("-")[2]: _total_of_ledger(path) for path in sorted(self._folder.glob("task-*.db"))}
        for task, mark in ({} if self._guard is None else self._guard.read()).items():
            eps, delta = spent.get(task, (0.0, 0.0))
            spent[task] = max(eps, mark.bound), max(delta, mark.delta)
        return sum(eps for eps, _ in spent.values()), sum(delta for _, delta in spent.values())

    def refuse_set_back(self, task_id: bytes) -> None:
        """Refuse to spend while ledgers lack entries, and on a task that was given up because its ledger did."""
        if self._guard is None:
            return
        if tasks := self._guard.find_set_back(self._folder):
            raise SetBack(
                f"{len(tasks)} of the ledgers in {str(self._folder)!r} lack what was spent, as if restored from an "
                "older copy: bring the newest ones back, or give up their tasks (dovetail client mend)"
            )
        mark = self._guard.read().get(task_id.hex())
        if mark is not None and mark.closed:
            raise SetBack(
                f"the ledger of task {task_id.hex()} was set back and the task given up (dovetail client mend): "
                "this user takes no further part in it"
            )

    def refuse_early(self) -> None:
        """Refuse a second report in an epoch; a clock that was set back does not prolong it for ever."""
        path = self._folder / _LAST
        wait = self._policy.epoch_seconds
        if wait and path.exists() and time.time() < (last := float(path.read_text(encoding="utf-8"))) + wait:
            if last > time.time() + wait:  # the clock was ahead: the epoch begins again, by the clock as it is
                write_atomically(path, repr(last := time.time()).encode())
            raise Later(
                f"this user's last report was {time.time() - last:.1f} seconds ago, and its policy allows one in "
                f"{wait:g} seconds (epoch_seconds)"
            )

    def spend(self, task: TrainingTask, round: int) -> None:
        """Reserve a round of a task in its ledger, once.

        Raises `BudgetSpent` if the round or a later one was reserved before, `Later` before the epoch is over,
        `SetBack` if ledgers lack entries, and `Refused` where a ceiling of the policy would be exceeded.
        """
        _validate.integer(round=round)
        _validate.in_interval(1, task.rounds, round=round)
        with self._lock():
            self.refuse_set_back(task.task_id)
            path = self._folder / f"task-{task.task_id.hex()}.db"
            before, before_delta = self.total()
            self.refuse_early()
            ledger = Ledger(path, task_id=task.task_id, eps=task.budget, delta=task.delta)
            try:
                rounds = ledger.reserved_rounds
                if round in rounds:
                    raise BudgetSpent(f"this user has reported to round {round} before, or began to: never twice")
                if rounds and round < rounds[-1]:
                    raise BudgetSpent(f"round {round} is over for this user, which has spent round {rounds[-1]}")
                eps = certify_task(task, len(rounds) + 1)[0].eps
                spent, spent_delta = ledger.total
                eps = max(eps, spent)
                if eps > _infinite_if_none(self._policy.eps_task):
                    raise Refused(
                        f"round {round} would bring this task to eps {at_most(eps, 6)} at delta {at_most(task.delta)}, "
                        f"above the policy's eps_task={self._policy.eps_task}"
                    )
                others = before - spent if spent < math.inf else 0.0
                eps_after = others + eps
                delta_after = before_delta - spent_delta + task.delta
                ceiling = _infinite_if_none(self._policy.eps_lifetime)
                if eps_after > ceiling or delta_after > self._policy.delta_lifetime:
                    raise Refused(
                        f"round {round} would bring all tasks to ({at_most(eps_after, 6)}, {at_most(delta_after, 6)}), "
                        f"above the policy's eps_lifetime={self._policy.eps_lifetime}, "
                        f"delta_lifetime={self._policy.delta_lifetime}"
                    )
                ledger.reserve(round, eps=eps, delta=task.delta)
                if self._guard is not None:
                    self._guard.remember(ledger)
                write_atomically(self._folder / _LAST, repr(time.time()).encode())
            except Overspent as error:
                raise Refused(str(error)) from error
            finally:
                ledger.close()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One process at a time."""
        descriptor = os.open(self._folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _has_remembered_entries(folder: Path, task: str, mark: LedgerMark) -> bool:
    """Whether the ledger of a task still has every entry that was remembered."""
    path = folder / f"task-{task}.db"
    if not path.exists() or not Ledger.has_entries(path):
        return False
    with contextlib.closing(Ledger.reopen(path)) as ledger:
        return ledger.holds_entry(mark.length, mark.head)


def _total_of_ledger(path: Path) -> tuple[float, float]:
    if not Ledger.has_entries(path):
        return 0.0, 0.0
    with contextlib.closing(Ledger.reopen(path)) as ledger:
        return ledger.total


def _infinite_if_none(eps: float | None) -> float:
    return math.inf if eps is None else eps
