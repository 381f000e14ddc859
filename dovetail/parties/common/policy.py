"""A user's own conditions: whom it reports to, in what company, and how much of its privacy it spends in all.

A client takes part in a task only if its policy admits it, and in a round only if what it has spent with it stays below
its ceilings. It keeps its own ledgers, one per task, and trusts nobody else's: what was reserved is spent, whether the
report arrived or not.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dovetail import _validate
from dovetail.files import write_atomically
from dovetail.numbers import at_most
from dovetail.parties.common.costs import cost
from dovetail.parties.common.ledger import Ledger, Overspent
from dovetail.parties.common.notices import Notices
from dovetail.parties.common.records import read_record
from dovetail.parties.common.task import SignedTask, TrainingTask, verify

if TYPE_CHECKING:
    from dovetail.parties.user.witness import Witness

__all__ = ["BudgetSpent", "Later", "Policy", "Refused", "SetBack", "Spending"]

_LAST = "last-report"


class Refused(ValueError):  # noqa: N818 - a user's decision
    """What a user does not agree to."""


class BudgetSpent(Refused):
    """A round that a user has reported to, or began to, or one before it: it does not do so twice."""


class SetBack(Refused):
    """Ledgers that were restored from older copies: what they say was spent is too little."""


class Later(Refused):
    """A report that comes too soon after another one."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user insists on.

    `signer` and `analyzer` are the ids of the keys that it trusts; the analyzer's is that of both of its keys, or that
    of the key that reports are sealed to if the analyzer signs nothing. `recovery` is the id of the key that can revoke
    the signer's, if that is stolen. If `shufflers` or `aggregators` are given, a task's must all be among these; None:
    whoever holds the signer's key may name others. `min_clients` is the
    least company it wants in a round. `eps_round` bounds one round of a task, `eps_task` all of them, `eps_lifetime`
    and `delta_lifetime` what all tasks together may cost, `eps_local` what all rounds of a task cost if nobody is
    trusted; None: the user does not care, and takes part in tasks that promise nothing. In `epoch_seconds` it reports
    once at most, to whatever task. `number` is the user's place in a task's list of personal budgets, from 0; only
    tasks with such budgets need one. With `verified` it takes part only where aggregators verify what users share, so
    that nobody else can spoil the sum. With `follow_rotations` a pinned key also stands for the successors that the
    signer announces.
    """

    signer: bytes
    analyzer: bytes
    min_clients: int
    eps_round: float | None
    eps_task: float | None
    eps_lifetime: float | None
    delta_lifetime: float
    eps_local: float | None = None
    epoch_seconds: float = 0.0
    shufflers: tuple[bytes, ...] | None = None
    aggregators: tuple[bytes, ...] | None = None
    number: int | None = None
    verified: bool = False
    follow_rotations: bool = False
    recovery: bytes | None = None

    def __post_init__(self) -> None:
        _validate.at_least(1, min_clients=self.min_clients)
        for name in ("eps_round", "eps_task", "eps_lifetime", "eps_local"):
            if getattr(self, name) is not None:
                _validate.positive(**{name: getattr(self, name)})
        _validate.in_open_interval(0, 1, delta_lifetime=self.delta_lifetime)
        _validate.non_negative(epoch_seconds=self.epoch_seconds, **_validate.given(number=self.number))

    @classmethod
    def read(cls, path: Path) -> Policy:
        """The policy in a JSON file."""
        return read_record(path, cls, "a policy")

    def admit(self, signed: SignedTask, notices: Notices | None = None) -> TrainingTask:
        """The task, if the user agrees to it, given what the signer announced; says in one sentence why not."""
        received = notices or Notices(self.signer, recovery=self.recovery)
        task = self.verify_signer(signed, received)
        if reason := received.why_ended(signed):
            raise Refused(reason)
        if task.analyzer_id not in self._pinned((self.analyzer,), received):
            raise Refused(
                f"this user has pinned the analyzer {self.analyzer.hex()}; the task names {task.analyzer_id.hex()}"
            )
        self._refuse_strangers(task, received)
        if self.verified and not task.verified:
            raise Refused("expected a task whose aggregators verify what users share, got one without proofs")
        self.budget(task)
        honest = task.min_clients - task.colluders
        if honest < self.min_clients:
            raise Refused(f"expected at least {self.min_clients} honest users in a round, got {honest}")
        one, _ = cost(task, 1)
        if not one.eps <= _ceiling(self.eps_round):
            raise Refused(
                f"expected at most eps {self.eps_round} for a round, "
                f"got {at_most(one.eps, 6)} at delta {at_most(one.delta)}"
            )
        whole, local = cost(task, task.rounds)
        most = min(_ceiling(self.eps_task), task.budget)
        if not whole.eps <= most:
            raise Refused(
                f"expected at most eps {most} for all {task.rounds} rounds, "
                f"got {at_most(whole.eps, 6)} at delta {at_most(whole.delta)}"
            )
        if self.eps_local is not None and not local.eps <= self.eps_local:
            raise Refused(
                f"expected at most eps {self.eps_local} for all {task.rounds} rounds if nobody is trusted, "
                f"got {at_most(local.eps, 6)} at delta {at_most(local.delta)}"
            )
        return task

    def verify_signer(self, signed: SignedTask, received: Notices, *, fresh: bool = True) -> TrainingTask:
        """The task, if the pinned signer has signed it, whatever it asks for."""
        signers = self._pinned((self.signer,), received)
        try:
            whose = signed.signer.key_id if signed.signer.key_id in signers else self.signer
            return verify(signed, signer=whose, fresh=fresh)
        except ValueError as error:
            raise Refused(str(error)) from error

    def numbered(self, number: int) -> Policy:
        """The same policy for the user at this place in lists of personal budgets."""
        return msgspec.structs.replace(self, number=number)

    def budget(self, task: TrainingTask) -> float | None:
        """What this user spends on a coordinate, where a task has a budget for everybody; refuses to guess its own."""
        budgets = task.build()[0].budgets
        if budgets is None:
            return None
        if self.number is None or self.number >= len(budgets):
            raise Refused(
                f"expected this user's number, from 0 to {len(budgets) - 1}, in its policy for a task with personal "
                f"budgets, got {self.number}"
            )
        return float(budgets[self.number])

    def _pinned(self, key_ids: Sequence[bytes], received: Notices) -> set[bytes]:
        """The keys that pinned ids stand for."""
        if not self.follow_rotations:
            return set(key_ids)
        return {successor for key_id in key_ids for successor in received.successors(key_id)}

    def _refuse_strangers(self, task: TrainingTask, received: Notices) -> None:
        for kind, keys, pinned in (
            ("shufflers", task.shufflers, self.shufflers),
            ("aggregators", task.aggregators, self.aggregators),
        ):
            for one in keys:
                if pinned is not None and one.key_id not in self._pinned(pinned, received):
                    raise Refused(f"the task names {one.key_id.hex()}, which is not among this user's pinned {kind}")


class Spending:
    """What a user has spent, in a folder of its own: a ledger for every task.

    Guarantees:
        No round is spent twice, and none is spent that would exceed a ceiling, also by two processes at once.
        What was spent is on disk before `spend` returns.
        With a witness, ledgers that were set back are noticed, and nothing is spent.
    """

    def __init__(self, folder: Path, policy: Policy, witness: Witness | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._policy, self._witness = folder, policy, witness

    def total(self) -> tuple[float, float]:
        """(eps, delta) of all tasks, added up; of a task that was set back, what the witness remembers."""
        spent = {path.stem.partition("-")[2]: _spent(path) for path in sorted(self._folder.glob("task-*.db"))}
        for task, seen in ({} if self._witness is None else self._witness.known()).items():
            eps, delta = spent.get(task, (0.0, 0.0))
            spent[task] = max(eps, _ceiling(seen.eps)), max(delta, seen.delta)
        return sum(eps for eps, _ in spent.values()), sum(delta for _, delta in spent.values())

    def refuse_set_back(self, task_id: bytes) -> None:
        """Refuse to spend on ledgers that were restored from older copies, and on tasks that were closed for it."""
        if self._witness is None:
            return
        if lacking := self._witness.set_back(self._folder):
            raise SetBack(
                f"expected ledgers in {str(self._folder)!r} with all that was spent, got {len(lacking)} set back: "
                "bring them back, or give up their tasks (dovetail client mend)"
            )
        seen = self._witness.known().get(task_id.hex())
        if seen is not None and seen.closed:
            raise SetBack("expected a task whose ledger is whole, got one that was set back and given up")

    def refuse_early(self) -> None:
        """Refuse a second report in an epoch; a clock that was set back neither shortens it nor goes on for ever."""
        path, wait = self._folder / _LAST, self._policy.epoch_seconds
        if wait and path.exists() and time.time() < (last := float(path.read_text())) + wait:
            if last > time.time() + wait:  # the clock was ahead: the epoch begins again, by the clock as it is
                write_atomically(path, repr(last := time.time()).encode())
            raise Later(f"expected one report in {wait:g} seconds, got another one {time.time() - last:.1f} s later")

    def spend(self, task: TrainingTask, round: int) -> None:
        """Reserve a round of a task, once; refuses a round that was spent before."""
        _validate.integer(round=round)
        _validate.in_interval(1, task.rounds, round=round)
        with self._alone():
            self.refuse_set_back(task.task_id)
            path = self._folder / f"task-{task.task_id.hex()}.db"
            before, before_delta = self.total()
            self.refuse_early()
            ledger = Ledger(path, task_id=task.task_id, eps=task.budget, delta=task.delta)
            try:
                rounds = ledger.reserved
                if round in rounds:
                    raise BudgetSpent(f"expected a round that was not reported to before, got round {round}")
                if rounds and round < rounds[-1]:
                    raise BudgetSpent(f"expected a round after {rounds[-1]}, got round {round}, which is over")
                eps = cost(task, len(rounds) + 1)[0].eps
                spent, spent_delta = ledger.spent
                eps = max(eps, spent)
                if eps > _ceiling(self._policy.eps_task):
                    raise Refused(
                        f"expected at most eps {self._policy.eps_task} for a task, "
                        f"got {at_most(eps, 6)} at delta {at_most(task.delta)}"
                    )
                others = before - spent if spent < math.inf else 0.0
                eps_after, delta_after = others + eps, before_delta - spent_delta + task.delta
                ceiling = _ceiling(self._policy.eps_lifetime)
                if eps_after > ceiling or delta_after > self._policy.delta_lifetime:
                    raise Refused(
                        f"expected at most ({self._policy.eps_lifetime}, {self._policy.delta_lifetime}) in a lifetime, "
                        f"got ({at_most(eps_after, 6)}, {at_most(delta_after, 6)}) with round {round}"
                    )
                ledger.reserve(round, eps=eps, delta=task.delta)
                if self._witness is not None:
                    self._witness.note(ledger)
                write_atomically(self._folder / _LAST, repr(time.time()).encode())
            except Overspent as error:
                raise Refused(str(error)) from error
            finally:
                ledger.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time."""
        descriptor = os.open(self._folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _spent(path: Path) -> tuple[float, float]:
    if not Ledger.begun(path):
        return 0.0, 0.0
    with contextlib.closing(Ledger.reopen(path)) as ledger:
        return ledger.spent


def _ceiling(eps: float | None) -> float:
    return math.inf if eps is None else eps
