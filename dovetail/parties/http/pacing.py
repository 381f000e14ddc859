"""When users shall come back: told with every answer, from what is public, so that nobody has to ask again and again.

Nothing here depends on how many have reported: who watches an answer must not learn when somebody reports.
"""

from __future__ import annotations

import time

from dovetail.parties.common.task import TrainingTask
from dovetail.parties.common.wire import AGAIN

__all__ = ["Pacing"]

_SOONEST = 0.05  # seconds
_LOOKS = 10  # at a round, in the time that it is expected to take: it may end early, when all have reported


class Pacing:
    """How long rounds of a task take, as far as anybody can tell.

    A round that needs all of its users ends when the last one has reported: as the last one did, as far as is known.
    Others end when their time is up, or sooner if all come: users look now and then, and never so late that they miss
    the next round.
    """

    def __init__(self, task: TrainingTask) -> None:
        self._needs_all = task.min_clients == task.max_clients
        self._expected = None if self._needs_all else task.round_seconds
        self._round, self._since = 0, 0.0

    def saw(self, round: int, now: float | None = None) -> None:
        """A round is open."""
        now = time.monotonic() if now is None else now
        if round == self._round:
            return
        if self._round and self._needs_all:
            self._expected = now - self._since
        self._round, self._since = round, now

    def headers(self, now: float | None = None) -> dict[str, str]:
        """Tells who has reported, or is too late, in how many seconds another round may be open."""
        if self._expected is None or not self._round:
            return {}
        left = self._since + self._expected - (time.monotonic() if now is None else now)
        longest = self._expected / _LOOKS
        soon = left if left > 0 and (self._needs_all or left < longest) else longest
        return {AGAIN: f"{max(_SOONEST, soon):.2f}"}
