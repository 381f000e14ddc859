"""What the analyzer says to everybody, signed once for every round, with the key that the task names for it."""

from __future__ import annotations

from dovetail.parties.common._status import RoundStatus, sign_model, sign_status
from dovetail.parties.common.keys import KeyRing
from dovetail.parties.common.task import TrainingTask

__all__ = ["Announcer"]


class Announcer:
    """Signs a task's status and models; they stay as they are if the task names no key for it."""

    def __init__(self, task: TrainingTask, keys: KeyRing) -> None:
        self._task_id, named = task.task_id, task.analyzer_sign
        self._pair = None if named is None else KeyRing(keys.folder, "sign").find(named.key_id)
        self._said: tuple[RoundStatus, RoundStatus] | None = None
        self._model: tuple[int, bytes, bytes] | None = None

    def status(self, status: RoundStatus) -> RoundStatus:
        """The status with its signature."""
        if self._pair is None:
            return status
        known = self._said
        if known is None or known[0] != status:
            self._said = known = status, sign_status(status, self._pair)
        return known[1]

    def model(self, round: int, data: bytes) -> bytes:
        """The signature of the model after a round; empty if there is none."""
        if self._pair is None:
            return b""
        known = self._model
        if known is None or known[:2] != (round, data):
            signature = sign_model(data, task_id=self._task_id, round=round, pair=self._pair)
            self._model = known = round, data, signature
        return known[2]
