"""A user's own conditions: whom it reports to, in what company, and how much of its privacy it spends in all.

A client takes part in a task only if its policy admits it, and in a round only if what it has spent with that stays
below the policy's ceilings (`spending`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dovetail import _validate
from dovetail.numbers import at_most
from dovetail.parties.common.files import read_json
from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.notices import Notices
from dovetail.parties.common.task import SignedTask, TrainingTask, verify

__all__ = ["Policy", "Refused"]


class Refused(ValueError):  # noqa: N818 - a user's decision
    """What a user does not agree to."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user insists on. A ceiling that is None is none: the user also takes part in tasks that promise nothing.

    Arguments:
        signer: id of the key that signs the tasks it trusts.
        analyzer: id of the analyzer that it reports to: of both of its keys together, or of the key that reports are
            sealed to if the analyzer signs nothing.
        min_clients: honest users that it wants in a round, at least.
        eps_round: ceiling on one round of a task.
        eps_task: ceiling on all rounds of a task.
        eps_lifetime: ceiling on all tasks together, with `delta_lifetime`.
        eps_local: ceiling on all rounds of a task if nobody is trusted.
        epoch_seconds: time in which it reports once at most, to whatever task.
        shufflers: ids of the shufflers that it trusts, of which a task's must all be; None: any that it names.
        aggregators: the same of aggregators.
        number: its place in tasks' lists of personal budgets, from 0; only tasks with such budgets need one.
        verified: take part only where aggregators verify what users share, so that nobody can spoil the sum.
        follow_rotations: let a pinned key stand for the successors that the signer announces, too.
        recovery: id of the key that can revoke the signer's, if that is stolen.
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
        _validate.non_negative(epoch_seconds=self.epoch_seconds, **_validate.not_none(number=self.number))

    @classmethod
    def read(cls, path: Path) -> Policy:
        """The policy in a JSON file."""
        return read_json(path, cls, "a policy")

    def admit(self, signed: SignedTask, notices: Notices | None = None) -> TrainingTask:
        """The task, if the user agrees to it; else `Refused` says in one sentence why not.

        Arguments:
            signed: the task as its signer signed it.
            notices: what the signer has announced since; None: nothing.
        """
        received = notices or Notices(self.signer, recovery=self.recovery)
        task = self.verify_signer(signed, received)
        if reason := received.why_ended(signed):
            raise Refused(reason)
        if task.analyzer_id not in self._pinned_ids((self.analyzer,), received):
            raise Refused(
                f"this user has pinned the analyzer {self.analyzer.hex()}; the task names {task.analyzer_id.hex()}"
            )
        self._refuse_strangers(task, received)
        if self.verified and not task.has_proofs:
            raise Refused("this user takes part only where aggregators verify uploads; the task asks for no proofs")
        self.budget(task)
        honest = task.min_clients - task.colluders
        if honest < self.min_clients:
            raise Refused(
                f"this user wants at least {self.min_clients} honest users in a round; the task guarantees {honest}"
            )
        single, _ = certify_task(task, 1)
        if not single.eps <= _infinite_if_none(self.eps_round):
            raise Refused(
                f"a round costs eps {at_most(single.eps, 6)} at delta {at_most(single.delta)}, "
                f"above the policy's eps_round={self.eps_round}"
            )
        whole, local = certify_task(task, task.rounds)
        most = min(_infinite_if_none(self.eps_task), task.budget)
        if not whole.eps <= most:
            ceiling = "the policy's eps_task" if most == self.eps_task else "the task's own budget"
            raise Refused(
                f"all {task.rounds} rounds cost eps {at_most(whole.eps, 6)} at delta {at_most(whole.delta)}, "
                f"above {ceiling}, {most}"
            )
        if self.eps_local is not None and not local.eps <= self.eps_local:
            raise Refused(
                f"all {task.rounds} rounds cost eps {at_most(local.eps, 6)} at delta {at_most(local.delta)} if nobody "
                f"is trusted, above the policy's eps_local={self.eps_local}"
            )
        return task

    def verify_signer(self, signed: SignedTask, received: Notices, *, fresh: bool = True) -> TrainingTask:
        """The task, if the pinned signer has signed it, whatever it asks for.

        Arguments:
            signed: the task as it came.
            received: what the signer has announced, which may name a successor of its key.
            fresh: refuse a task that is over or has not begun, and expired keys.
        """
        signers = self._pinned_ids((self.signer,), received)
        try:
            signer = signed.signer.key_id if signed.signer.key_id in signers else self.signer
            return verify(signed, signer=signer, fresh=fresh)
        except ValueError as error:
            raise Refused(str(error)) from error

    def with_number(self, number: int) -> Policy:
        """The same policy for the user at this place in lists of personal budgets."""
        return msgspec.structs.replace(self, number=number)

    def budget(self, task: TrainingTask) -> float | None:
        """What this user spends on a coordinate, where a task has a budget for everybody; refuses to guess its own."""
        budgets = task.build()[0].budgets
        if budgets is None:
            return None
        if self.number is None or self.number >= len(budgets):
            raise Refused(
                f"the task has personal budgets for {len(budgets)} users, and this user's policy has "
                f"number={self.number}: whoever enrolled the user gave it one from 0 to {len(budgets) - 1}"
            )
        return float(budgets[self.number])

    def _pinned_ids(self, key_ids: Sequence[bytes], received: Notices) -> set[bytes]:
        """The keys that pinned ids stand for."""
        if not self.follow_rotations:
            return set(key_ids)
        return {successor for key_id in key_ids for successor in received.successors(key_id)}

    def _refuse_strangers(self, task: TrainingTask, received: Notices) -> None:
        """Refuse shufflers and aggregators that are not pinned, successors of pinned ones aside."""
        for kind, keys, pinned in (
            ("shufflers", task.shufflers, self.shufflers),
            ("aggregators", task.aggregators, self.aggregators),
        ):
            for service in keys:
                if pinned is not None and service.key_id not in self._pinned_ids(pinned, received):
                    raise Refused(
                        f"the task names {service.key_id.hex()}, which is not among this user's pinned {kind}"
                    )


def _infinite_if_none(eps: float | None) -> float:
    return math.inf if eps is None else eps
