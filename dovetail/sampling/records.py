"""Records as they are sampled: those of the users that are there, one sum over all or batches for users' own steps.

Without private steps a record is a client of its own: what it adds is what is clipped. With them users stay clients,
and every step at a user has a batch. SubDP's printed recipe sets the noise by Z, the most records of one subject in a
batch: `noise_of` is its noise for each Z, and the protocol's `group_in_batch` the largest Z of the rounds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Self

import numpy as np

from dovetail.data import Clients, subjects
from dovetail.protocols.subjects._items import ItemLevel
from dovetail.randomness import Randomness
from dovetail.sampling.items import ItemDraws
from dovetail.sampling.samplers import Items, RoundSample, Sampler

__all__ = ["RecordSampler", "cap_records"]

_STEPS_FOR_CLAIM = 50  # that a claim's Z is read off; where Z sets the noise, it is all of them


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordSampler(Sampler):
    """Records of the users that the schedule draws, each joining independently with the protocol's rate.

    `subjects` is whom each record is about; None: its user.
    """

    protocol: ItemLevel
    subjects: np.ndarray | None = None
    noise_of: Callable[[int], float] | None = None

    @functools.cached_property
    def draws(self) -> ItemDraws:
        """The draws of records of the whole training, for who joins which step."""
        return ItemDraws(
            clients=self.clients,
            subjects=_subject_of_each_record(self.clients, self.subjects),
            rate=self.protocol.rate,
            randomness=self.schedule.randomness,
        )

    @property
    def is_noise_set_by_data(self) -> bool:
        """Whether Z, and so the data, sets the noise."""
        return self.noise_of is not None

    @property
    def engine_clients(self) -> Clients:
        """The clients that the engine runs on: users with steps of their own, or every record as a client by itself."""
        if self.protocol.private_steps:
            return self.clients
        return Clients.from_rows(np.arange(_num_record_rows(self.clients), dtype=np.int32)[:, None])

    @property
    def size(self) -> int:
        """How many of the `engine_clients` a round has: users as planned, or records with room for a large draw."""
        return self.schedule.size if self.protocol.private_steps else self.draws.capacity

    @property
    def capacity(self) -> int:
        """How many users or records a round is prepared for."""
        return self.schedule.capacity if self.protocol.private_steps else self.draws.capacity

    def sample_round(self, round_index: int, users: np.ndarray) -> RoundSample:
        """Users with a batch for each step, or the records that join, whose sum has the noise of all users."""
        if self.protocol.private_steps:
            rows = self.draws.records_by_user_and_step(round_index, users, steps=self._steps_per_round)
            return RoundSample(
                users, self.schedule.size_of(round_index), items=Items(rows, self.noise_scales(round_index, users))
            )
        scale = float(np.sqrt(np.sum(self.noise_scales(round_index, users) ** 2))) if self.is_noise_set_by_data else 1.0
        return RoundSample(self.draws.records_of_step(round_index, users), self._expected_batch, noise_scale=scale)

    def noise_scales(self, round_index: int, users: np.ndarray) -> np.ndarray:
        """The noise of every user and step over the protocol's own: 1, or what the recipe asks for; (users, steps)."""
        if self.noise_of is None:
            return np.ones((len(users), self._steps_per_round), np.float32)
        return self.draws.recipe_noise_scales(round_index, users, steps=self._steps_per_round, noise_of=self.noise_of)

    def rows_in_sum(self, round_index: int, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a single record, once for each step that it joins, and the count 1 for each."""
        steps = self.protocol.private_steps
        rows = (
            self.draws.records_by_user_and_step(round_index, users, steps=steps).ravel()
            if steps
            else self.draws.records_of_step(round_index, users)
        )
        rows = rows[rows >= 0]
        return rows[:, None], np.ones(len(rows), np.int32)

    def expected_times_in_sum(self, round_index: int, *, records: int) -> float:
        """The expected number of times that these records join a step of the round, together."""
        prob = self.schedule.size_of(round_index) / self.schedule.population
        return prob * self.protocol.rate * records * self._steps_per_round

    def sum_divisor(self, round_index: int, *, learning_rate: float) -> float:
        """What the round's sum is divided by: the expected batch.

        Where users take steps of their own it is also times the planned size, and over the learning rate.
        """
        if self.protocol.private_steps:
            return self._expected_batch * self.schedule.size_of(round_index) / learning_rate
        return self._expected_batch

    def noise_std(self, round_index: int, *, dim: int) -> float:
        """The standard deviation of the noise on a coordinate of the sum: one draw, or one for each user and step."""
        draws = self.schedule.size_of(round_index) * self.protocol.private_steps or 1
        return self.protocol.std * self.schedule.noise_scale_of(round_index) * float(draws**0.5)

    def with_randomness(self, randomness: Randomness) -> Self:
        """The same sampler with draws of this randomness, and their Z where one was measured."""
        other = super().with_randomness(randomness)
        return other if self.protocol.group_in_batch is None else other.with_data_for_claim()

    def with_data_for_claim(self) -> Self:
        """With the paper's Z, from all rounds if it sets the noise, else from some for the claim."""
        rounds = self.schedule.rounds
        if not self.protocol.adaptive_z:
            rounds = min(rounds, max(1, _STEPS_FOR_CLAIM // self._steps_per_round))
        largest = self.draws.largest_group_of_rounds(
            rounds, np.arange(self.schedule.population), steps=self._steps_per_round
        )
        if self.noise_of is not None:
            self.noise_of(largest)  # refuses a Z that its recipe has no noise for
        return dataclasses.replace(self, protocol=dataclasses.replace(self.protocol, group_in_batch=largest))

    @property
    def _steps_per_round(self) -> int:
        """Draws of records in a round: a user's private steps, or one."""
        return max(1, self.protocol.private_steps)

    @property
    def _expected_batch(self) -> float:
        """The expected number of records in a step, as settled."""
        return float(self.protocol.require("batch"))


def cap_records(protocol: ItemLevel, clients: Clients, subject_of_record: np.ndarray | None) -> Clients:
    """Who holds what after the cap that the protocol puts on a subject's records; refuses records at several users."""
    _, records = clients.owners_and_records()
    if len(np.unique(records)) < len(records):
        raise ValueError("expected every record at one user where records are protected, got records at several users")
    if protocol.unit == "item":
        return clients
    return subjects.cap_records(
        clients,
        _subject_of_each_record(clients, subject_of_record),
        items_per_subject=protocol.items_per_subject or 1,
        users_per_subject=protocol.users_per_subject,
        items_per_user=protocol.items_per_user,
    )


def _subject_of_each_record(clients: Clients, subject_of_record: np.ndarray | None) -> np.ndarray:
    """Whom each record is about; where nobody knows, its user."""
    return (
        subjects.subjects_by_user(clients, _num_record_rows(clients))
        if subject_of_record is None
        else subject_of_record
    )


def _num_record_rows(clients: Clients) -> int:
    """The first number above all records of the clients, so that many rows hold one entry per record."""
    return int(clients.records.max(initial=0)) + 1
