"""Who takes part in which round.

- `disjoint`: every epoch deals all users into batches of `size`; whoever is left over sits that epoch out;
- `separated`: all users stand in one order, and each round takes the next `size` of them, from the last user on to the
  first one again: a user comes back only after as many rounds as an epoch has, and at most `uploads` times in all;
- `fixed`: a uniformly random subset of `size` users;
- `poisson`: every user independently, `size` of them on average;
- `everyone`;
- `secret`: everyone uploads, and each decides by a coin of its own whether its data enter: those of `size` users on
  average. The others upload noise alone, and nobody can tell which.

Each round's draw depends on the run's randomness and the round alone. Batches that are disjoint are public; samples
are secret, and so is who drops out, independently with probability `dropout`. Samples may change in size from round to
round (`sizes`), and the noise with them (`noise_scales`): both are public.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from dovetail import _validate
from dovetail.events import Disjoint, Everyone, FixedSize, Participation, Poisson, Separated
from dovetail.protocols import Cohort
from dovetail.randomness import Randomness

__all__ = ["KINDS", "Schedule"]

KINDS = ("disjoint", "separated", "fixed", "poisson", "everyone", "secret")
_DRAW, _DROP, _COINS = 0, 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The cohorts of a whole training: who takes part in which round, counted from 0.

    `population` is how many users there are, `size` how many a round is planned for, `min_size` how many it needs to
    release anything, `uploads` how often one user may be asked where that is limited. `sizes` and `noise_scales` hold
    one entry per round, or nothing where all rounds are alike.
    """

    kind: Literal["disjoint", "separated", "fixed", "poisson", "everyone", "secret"]
    population: int
    size: int
    rounds: int
    randomness: Randomness
    min_size: int = 0
    colluders: int = 0
    dropout: float = 0.0
    sizes: tuple[int, ...] = ()
    noise_scales: tuple[float, ...] = ()
    records: int | None = None
    uploads: int | None = None

    def __post_init__(self) -> None:
        _validate.one_of(KINDS, kind=self.kind)
        _validate.integer(size=self.size, rounds=self.rounds, min_size=self.min_size)
        _validate.at_least(1, size=self.size, rounds=self.rounds)
        _validate.in_interval(0, 1, dropout=self.dropout)
        if self.size > self.population:
            raise ValueError(
                f"expected at most {self.population} clients per round (all there are), got size={self.size}"
            )
        if self.kind == "everyone" and self.size != self.population:
            raise ValueError(f"expected size = {self.population} with kind='everyone', got size={self.size}")
        _validate.in_interval(0, self.num_uploads_of(0), min_size=self.min_size)
        self._check_sizes()
        self._check_uploads()

    def _check_sizes(self) -> None:
        """Refuse sizes that are not one for each round, or that this kind of sample cannot have."""
        if not self.sizes:
            return
        if self.kind not in ("fixed", "poisson"):
            raise ValueError(f"expected one cohort size with kind={self.kind!r}, got a schedule of sizes")
        if len(self.sizes) < self.rounds:
            raise ValueError(f"expected a size for each of the {self.rounds} rounds, got {len(self.sizes)} sizes")
        for size in self.sizes:
            _validate.integer(size=size)
            _validate.in_interval(1, self.population, size=size)

    def _check_uploads(self) -> None:
        """Refuse a limit on uploads where nothing limits them, and one that so many rounds exceed."""
        if self.uploads is None:
            return
        if self.kind != "separated":
            raise ValueError(f"expected cohort.uploads with kind='separated' only, got kind={self.kind!r}")
        _validate.integer(uploads=self.uploads)
        _validate.at_least(1, uploads=self.uploads)
        if self.turns > self.uploads:
            raise ValueError(
                f"{self.rounds} rounds of {self.size} among {self.population} users ask somebody {self.turns} times, "
                f"and uploads={self.uploads} is the limit: plan at most "
                f"{self.uploads * self.population // self.size} rounds, or smaller ones"
            )

    @property
    def turns(self) -> int:
        """How often the users who come most often take part in all rounds, where all users take turns."""
        return -(-self.rounds * self.size // self.population)

    def size_of(self, round_index: int) -> int:
        """How many users a round is planned for."""
        return self.sizes[round_index] if self.sizes else self.size

    def num_uploads_of(self, round_index: int) -> int:
        """How many users a round plans to hear from: everybody where users decide secretly, else its size."""
        return self.population if self.kind == "secret" else self.size_of(round_index)

    def noise_scale_of(self, round_index: int) -> float:
        """A round's noise over the protocol's own, a factor."""
        return self.noise_scales[round_index] if self.noise_scales else 1.0

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds until every user has had its turn (disjoint, separated), or has on average."""
        return max(1, self.population // self.size)

    @property
    def capacity(self) -> int:
        """As many users as a round is prepared for; a larger Poisson draw (probability below 1e-14) only costs time."""
        size = max(self.sizes, default=self.size)
        if self.kind != "poisson":
            return self.population if self.kind == "secret" else size
        prob = size / self.population
        return min(self.population, int(size + 8 * np.sqrt(size * (1 - prob)) + 8))

    def cohort(self, round_index: int) -> Cohort:
        """What is public about the participants of a round."""
        return Cohort(
            participation=self._participation(round_index),
            size=self.size_of(round_index),
            min_size=self.min_size,
            colluders=self.colluders,
            noise_scale=self.noise_scale_of(round_index),
            records=self.records,
            uploads=self.population if self.kind == "secret" else None,
        )

    def draw_users(self, round_index: int) -> np.ndarray:
        """The users of a round that upload, ascending."""
        users = self.planned_users(round_index)
        if self.dropout:
            drops = self.randomness.secret_generator(round_index, _DROP)
            users = users[drops.random(len(users)) >= self.dropout]
        return np.sort(users).astype(np.int32)

    def planned_users(self, round_index: int) -> np.ndarray:
        """The users of a round if nobody drops out, in no particular order."""
        size = self.size_of(round_index)
        match self.kind:
            case "fixed":
                rng = self.randomness.secret_generator(round_index, _DRAW)
                return rng.choice(self.population, size, replace=False)
            case "poisson":
                rng = self.randomness.secret_generator(round_index, _DRAW)
                return np.flatnonzero(rng.random(self.population) < size / self.population)
            case "separated":
                order = self.randomness.public_generator(0, _DRAW).permutation(self.population)
                return order[(round_index * self.size + np.arange(self.size)) % self.population]
            case "disjoint":
                epoch, batch = divmod(round_index, self.rounds_per_epoch)
                order = self.randomness.public_generator(epoch, _DRAW).permutation(self.population)
                return order[batch * self.size : (batch + 1) * self.size]
        return np.arange(self.population)  # everyone, also where they decide in secret whether their data enter

    def entering_mask(self, round_index: int) -> np.ndarray:
        """Whose data enter a round, among those who upload: one truth value for every user of the federation."""
        if self.kind != "secret":
            return np.ones(self.population, bool)
        return (
            self.randomness.secret_generator(round_index, _COINS).random(self.population)
            < self.size_of(round_index) / self.population
        )

    def _participation(self, round_index: int) -> Participation:
        """How the users of a round are drawn, in the terms of accounting."""
        match self.kind:
            case "disjoint":
                return Disjoint(epoch=round_index // self.rounds_per_epoch)
            case "separated":
                return Separated(uploads=self.turns, separation=self.rounds_per_epoch, rounds=self.rounds)
            case "fixed":
                return FixedSize(size=self.size_of(round_index), population=self.population)
            case "poisson" | "secret":
                return Poisson(prob=self.size_of(round_index) / self.population)
        return Everyone()
