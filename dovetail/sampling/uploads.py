"""Who took part when: the limits of a schedule in which users come rarely, checked before anything is added up."""

from __future__ import annotations

import numpy as np

from dovetail.events import Separated

__all__ = ["UploadBook"]


class UploadBook:
    """The uploads of every user in one stream: how many there were, and the round of the last one.

    Arguments:
        schedule: what the users were promised.
    """

    def __init__(self, schedule: Separated) -> None:
        self._schedule = schedule
        self._counts: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def admit(self, users: np.ndarray, *, index: int) -> None:
        """Note that these users take part in round `index`; refuses all of them if one may not.

        Guarantees:
            After a refusal nothing is noted. No user is admitted more often, or sooner again, than was promised.
        """
        schedule = self._schedule
        if not 0 <= index < schedule.rounds:
            raise ValueError(f"the users were promised {schedule.rounds} rounds, got round {index} (counted from 0)")
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
