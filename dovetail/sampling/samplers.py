"""Who takes part in a round and with what, asked the same way whether users or records are sampled.

A round starts from its users, as the schedule draws them. A sampler says what the engine then works on: which clients
there are (`engine_clients`) and which of them, with what, in a round (`sample`). And it says what a round's sum is:
whose updates add up to it, how often, divided by what and under which noise, which is all that an attack on the sum has
to know.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple, Self

import numpy as np

from dovetail.data import Clients
from dovetail.protocols import Protocol
from dovetail.randomness import Randomness
from dovetail.sampling.schedule import Schedule

__all__ = ["Items", "RoundSample", "Sampler", "SecretSampler", "UserSampler"]


class Items(NamedTuple):
    """What users' private steps are on: `rows` of records, (users, steps, width), padded with -1.

    `noise_scale`, (users, steps), is each step's noise over the protocol's own.
    """

    rows: Any
    noise_scale: Any


class RoundSample(NamedTuple):
    """What a round works on: `users` by their place among `engine_clients`, with private steps on `items` if any.

    `size` is the public number that a noised sum is divided by, `noise_scale` the noise over the protocol's own.
    """

    users: np.ndarray
    size: float
    noise_scale: float = 1.0
    items: Items | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampler(abc.ABC):
    """The samples of a whole training: `clients` is who holds what, `protocol` is settled.

    Guarantees:
        A draw depends on the schedule's randomness, the round and the users that are there, and on nothing else.
        Only what users that are there hold is drawn.
    """

    protocol: Protocol
    schedule: Schedule
    clients: Clients

    @property
    def is_noise_set_by_data(self) -> bool:
        """Whether the data sets the noise, by the recipe of a paper: then nothing is certified."""
        return False

    @property
    @abc.abstractmethod
    def engine_clients(self) -> Clients:
        """The clients that the engine runs on: the rows that `RoundSample.users` counts."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """How many of the `engine_clients` a round has as planned; chunks are laid out for them."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """As many of the `engine_clients` as a round is prepared for; a larger draw is rare, and costs time alone."""

    @abc.abstractmethod
    def sample_round(self, round_index: int, users: np.ndarray) -> RoundSample:
        """What round `round_index` works on where these users are there."""

    @abc.abstractmethod
    def rows_in_sum(self, round_index: int, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whose clipped updates add up to the round's sum: rows of records, and how many of each row count."""

    @abc.abstractmethod
    def expected_times_in_sum(self, round_index: int, *, records: int) -> float:
        """How often somebody's records enter the round's sum, on average over all draws.

        Arguments:
            round_index: the round.
            records: how many records that somebody has.
        """

    @abc.abstractmethod
    def sum_divisor(self, round_index: int, *, learning_rate: float) -> float:
        """What the round's sum is divided by to give the estimate.

        Arguments:
            round_index: the round.
            learning_rate: of clients; users' own private steps have it in what they send.
        """

    @abc.abstractmethod
    def noise_std(self, round_index: int, *, dim: int) -> float:
        """The standard deviation of the noise on a coordinate of the round's sum (not of its mean)."""

    def with_randomness(self, randomness: Randomness) -> Self:
        """The same sampler with draws of this randomness."""
        return dataclasses.replace(self, schedule=dataclasses.replace(self.schedule, randomness=randomness))

    def with_data_for_claim(self) -> Self:
        """The same sampler, its protocol with what only the data tells and a paper's claim needs; here nothing."""
        return self


class UserSampler(Sampler):
    """Users with all that they hold, as the schedule draws them."""

    @property
    def engine_clients(self) -> Clients:
        """The clients that the engine runs on: the users themselves."""
        return self.clients

    @property
    def size(self) -> int:
        """How many users a round is planned for."""
        return self.schedule.size

    @property
    def capacity(self) -> int:
        """The most users that a round is prepared for, by the schedule."""
        return self.schedule.capacity

    def sample_round(self, round_index: int, users: np.ndarray) -> RoundSample:
        """These users, a sum over whom is divided by how many were planned."""
        return RoundSample(users, self.schedule.size_of(round_index), self.schedule.noise_scale_of(round_index))

    def rows_in_sum(self, round_index: int, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each user's records in a row, padded to one width, and how many of them count."""
        return self.clients.rows(users, width=self.clients.max_records), self.clients.counts[users]

    def expected_times_in_sum(self, round_index: int, *, records: int) -> float:
        """The probability that a user is drawn, for it is then in the sum once, with all of its records."""
        return self.schedule.size_of(round_index) / self.schedule.population

    def sum_divisor(self, round_index: int, *, learning_rate: float) -> float:
        """What the round's sum is divided by: the planned number of users."""
        return self.schedule.size_of(round_index)

    def noise_std(self, round_index: int, *, dim: int) -> float:
        """The standard deviation of the noise on a coordinate of the sum: that of the estimate, times the size."""
        size = self.schedule.size_of(round_index)
        return self.protocol.noise_std(size, dim) * size * self.schedule.noise_scale_of(round_index)


class SecretSampler(UserSampler):
    """Every user uploads in every round; those whose coin says no do so without data.

    Among the `engine_clients` user i has a twin at population + i that holds nothing: its update is zero, and its noise
    is like anyone's, with keys of its own.
    """

    @property
    def engine_clients(self) -> Clients:
        """The clients that the engine runs on: the users, and then their twins without records."""
        counts = self.clients.counts
        return Clients(records=self.clients.records, counts=np.concatenate([counts, np.zeros_like(counts)]))

    @property
    def size(self) -> int:
        """How many clients a round has: all users, each of them or its twin."""
        return self.schedule.population

    def sample_round(self, round_index: int, users: np.ndarray) -> RoundSample:
        """These users or, where their coins say no, their twins.

        The sum is divided by how many users enter on average.
        """
        enters = self.schedule.entering_mask(round_index)[users]
        rows = np.where(enters, users, users + self.schedule.population).astype(np.int32)
        return RoundSample(rows, self.schedule.size_of(round_index), self.schedule.noise_scale_of(round_index))

    def rows_in_sum(self, round_index: int, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The records of each user whose data enter, in a row, and how many of them count."""
        return super().rows_in_sum(round_index, users[self.schedule.entering_mask(round_index)[users]])

    def noise_std(self, round_index: int, *, dim: int) -> float:
        """The standard deviation of the noise on a coordinate of the sum: of all that upload, with data or without."""
        uploads = self.schedule.population
        return self.protocol.noise_std(uploads, dim) * uploads * self.schedule.noise_scale_of(round_index)
