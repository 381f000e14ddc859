"""Which records join which step, where records and not users are drawn.

Every record joins a step independently with the same probability, in a secret draw that depends on the run's
randomness, the round and the step alone: the draw of one record says nothing about another's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from dovetail import _validate
from dovetail.data import Clients
from dovetail.randomness import Randomness

__all__ = ["ItemDraws"]

_ITEMS = 2  # beside the draws of users and of who drops out; secret coins, also 2, never meet sampled records


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ItemDraws:
    """The records of all steps of a training.

    `clients` is who holds what, `subjects` whom each record is about (by record), `rate` the probability that a record
    joins a step. `_owners` and `_records` list every record that is held, with its user.
    """

    clients: Clients
    subjects: np.ndarray
    rate: float
    randomness: Randomness
    _owners: np.ndarray = dataclasses.field(init=False, repr=False)
    _records: np.ndarray = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        _validate.positive(rate=self.rate)
        _validate.at_most(1, rate=self.rate)
        owners, records = self.clients.owners_and_records()
        object.__setattr__(self, "_owners", owners)
        object.__setattr__(self, "_records", records)

    def draw_entries(self, round_index: int, users: np.ndarray, *, step: int = 0) -> np.ndarray:
        """Which of these users' entries join a step, ascending, as places in `clients.owners_and_records()`.

        Arguments:
            round_index: the round.
            users: who is there.
            step: of the round, from 0.
        """
        rng = self.randomness.secret_generator(round_index, _ITEMS, step)
        joins = rng.random(len(self._records)) < self.rate
        present = np.zeros(self.clients.num_clients, bool)
        present[users] = True
        return np.flatnonzero(joins & present[self._owners])

    def records_of_step(self, round_index: int, users: np.ndarray, *, step: int = 0) -> np.ndarray:
        """The records of these users that join a step, int32, over the whole federation."""
        return self._records[self.draw_entries(round_index, users, step=step)].astype(np.int32)

    def records_by_user_and_step(self, round_index: int, users: np.ndarray, *, steps: int) -> np.ndarray:
        """The records of each user and step, padded with -1: int32 of shape (users, steps, width)."""
        joining = [self.draw_entries(round_index, users, step=step) for step in range(steps)]
        counts = [np.bincount(self._owners[entries], minlength=self.clients.num_clients) for entries in joining]
        width = max(self.width, max((int(count.max(initial=0)) for count in counts), default=0))
        rows = np.full((self.clients.num_clients, steps, width), -1, np.int32)
        for step, (entries, count) in enumerate(zip(joining, counts, strict=True)):
            owners = self._owners[entries]
            starts = np.cumsum(count) - count
            rows[owners, step, np.arange(len(entries)) - starts[owners]] = self._records[entries]
        return rows[users]

    @property
    def width(self) -> int:
        """How many records a user's step is prepared for; a larger draw (probability below 1e-14) costs time alone."""
        return _capacity_of_draw(int(self.clients.counts.max()), self.rate)

    @property
    def capacity(self) -> int:
        """How many records a step of the whole federation is prepared for."""
        return _capacity_of_draw(len(self._records), self.rate)

    def largest_group_by_user(self, round_index: int, users: np.ndarray, *, step: int = 0) -> np.ndarray:
        """For each of these users, the most records of one subject in its batch (SubDP's Z); 0 for an empty batch."""
        entries = self.draw_entries(round_index, users, step=step)
        pairs, counts = np.unique(
            np.stack([self._owners[entries], self.subjects[self._records[entries]]]), axis=1, return_counts=True
        )
        most = np.zeros(self.clients.num_clients, np.int64)
        np.maximum.at(most, pairs[0], counts)
        return most[users]

    def largest_group_of_rounds(self, rounds: int, users: np.ndarray, *, steps: int) -> int:
        """The paper's Z over the first `rounds`: the most records of one subject in a batch.

        It is data, and so for the paper's claim only.
        """
        looked_at = [(round_index, step) for round_index in range(rounds) for step in range(steps)]
        return max(
            1,
            *(int(self.largest_group_by_user(round_index, users, step=step).max()) for round_index, step in looked_at),
        )

    def recipe_noise_scales(
        self, round_index: int, users: np.ndarray, *, steps: int, noise_of: Callable[[int], float]
    ) -> np.ndarray:
        """The noise that SubDP's Z asks for at every user and step, over that for Z = 1; float32 (users, steps).

        Arguments:
            round_index: the round.
            users: who is there.
            steps: of the round.
            noise_of: the recipe's noise for each Z from 1 on.
        """
        groups = np.stack([self.largest_group_by_user(round_index, users, step=step) for step in range(steps)], axis=1)
        table = np.array([noise_of(max(1, z)) / noise_of(1) for z in range(int(groups.max(initial=0)) + 1)])
        return table[groups].astype(np.float32)


def _capacity_of_draw(count: int, rate: float) -> int:
    """A number of records that a draw at this rate exceeds with probability below 1e-14, at most all of them."""
    return max(1, min(count, int(count * rate + 8 * math.sqrt(count * rate * (1 - rate)) + 8)))
