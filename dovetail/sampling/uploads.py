"""Who took part when: the limits of a schedule in which users come rarely, checked before anything is added up."""

from __future__ import annotations

import numpy as np

from dovetail.events import Separated

__all__ = ["UploadBook"]


class UploadBook:
    """The uploads of every user in one stream: how many there were, and the round of the last one.

    Rounds are counted as they come, released or not, because noise is taken back round by round.

    Arguments:
        schedule: what the users were promised.
    """

    def __init__(self, schedule: Separated) -> None:
        self._schedule = schedule
        self._next = 0
        self._counts: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def admit(self, users: np.ndarray, *, index: int) -> None:
        """Note that these users take part in round `index`; refuses all of them if one may not.

        Guarantees:
            After a refusal nothing is noted. No user is admitted more often, or sooner again, than was promised.
        """
        self._check_turn(index)
        schedule = self._schedule
        ids = users.tolist()
        if len(set(ids)) < len(ids):
            raise ValueError("a user takes part once in a round, got one twice")
        for user in ids:
            if self._counts.get(user, 0) >= schedule.uploads:
                raise ValueError(
                    f"user {user} was promised to take part {schedule.uploads} times at the most, and would again in "
                    f"round {index}"
                )
            last = self._last.get(user)
            if last is not None and index - last < schedule.separation:
                raise ValueError(
                    f"user {user} was promised {schedule.separation} rounds or more between two uploads, got rounds "
                    f"{last} and {index}"
                )
        for user in ids:
            self._counts[user] = self._counts.get(user, 0) + 1
            self._last[user] = index
        self._next += 1

    def skip(self, *, index: int) -> None:
        """Note that round `index` had its turn and was not released."""
        self._check_turn(index)
        self._next += 1

    def _check_turn(self, index: int) -> None:
        """Raise ValueError for a round that nobody was promised, or that is not the next one."""
        if not 0 <= index < self._schedule.rounds:
            raise ValueError(f"the users were promised {self._schedule.rounds} rounds, got round {index} (from 0)")
        if index != self._next:
            raise ValueError(f"round {self._next} (counted from 0) is next in this stream, got round {index}")
