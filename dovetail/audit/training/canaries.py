"""Canaries: users or people added to a federation, each in one of two neighbouring worlds by a fair coin.

Where users are added or removed, a canary is a user with one record who is there or not; where they are replaced, a
user with one of two opposite inputs, x or -x. Where people or records are protected, a canary is a person with as many
equal records as a person may have, at users who were there before; all of these records are there or none.

Canaries look in directions of their own: their inputs are orthogonal as long as there are dimensions, then orthogonal
again with other labels, so that their updates hardly cover each other. They are long enough for the clipping to bite.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dovetail import _validate
from dovetail.data import Clients, Dataset
from dovetail.statements import Unit

__all__ = ["Canaries"]

_BEYOND_CLIP = 4.0  # an update is this much longer than the clip norm at first: it shrinks as a canary is learned
_PLACES = 2**31 + 1  # from which canaries are drawn: no other draw of a run starts from this number
_SAMPLED_RECORDS = 1000  # real records whose norms say what is usual


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Canaries:
    """As many canaries as `coins`; True is the first world (there, or with x), False the other one.

    `unit` is whom a canary is: a user, or a person or record with `items` records at users, at most `items_per_user` at
    any. With `swapped` a user's record is replaced and not removed. `clip_norm` or `clip_value` say where updates are
    clipped, `step` how far an update goes along the gradient.

    Guarantees:
        The two worlds of a canary are neighbours, whatever the others' coins.
        What `join` gives depends on no coin.
        Nobody else's records change.
    """

    coins: np.ndarray
    unit: Unit
    swapped: bool
    seed: int
    items: int = 1
    items_per_user: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    step: float = 1.0

    def __post_init__(self) -> None:
        _validate.at_least(2, canaries=self.count)
        _validate.at_least(1, items=self.items)
        _validate.positive(step=self.step)
        if self.swapped and self.unit is not Unit.USER:
            raise ValueError(
                f"where one {self.unit.value} is protected, canaries are added or removed: swapped must be False"
            )

    @property
    def count(self) -> int:
        """How many canaries there are."""
        return len(self.coins)

    @property
    def _records_of_a_world(self) -> int:
        """How many records all canaries have together in one world."""
        return self.count * self.items

    @property
    def num_records(self) -> int:
        """Records of both worlds of all canaries; in the dataset they are the last."""
        return self._records_of_a_world * (2 if self.swapped else 1)

    def join(self, dataset: Dataset, clients: Clients) -> tuple[Dataset, Clients]:
        """The dataset with both worlds' records of canaries at its end, and who holds which if all coins are True."""
        if dataset.target != "classes":
            raise ValueError(f"canaries need a task of classes to hide in; this one has target={dataset.target!r}")
        rng = np.random.default_rng((_PLACES, self.seed))
        real = _to_float(dataset.inputs)
        directions, labels = _unit_directions(self.count, math.prod(real.shape[1:]), dataset.num_classes, rng)
        inputs = (self._input_norm(real, dataset.num_classes) * directions).astype(np.float32)
        inputs = np.repeat(inputs, self.items * dataset.views, axis=0).reshape(-1, *real.shape[1:])
        labels = np.repeat(labels, self.items)
        about = None
        if dataset.subjects is not None:
            about = dataset.subjects.max() + 1 + np.repeat(np.arange(self.count, dtype=np.int32), self.items)
        owners, num_clients = self._assign_owners(clients, dataset, rng)
        if self.swapped:
            inputs = np.concatenate([inputs, -inputs])
            labels = np.tile(labels, 2)
            about = None if about is None else np.tile(about, 2)
        joined = dataclasses.replace(
            dataset,
            inputs=np.concatenate([real, inputs]),
            labels=np.concatenate([dataset.labels, labels]),
            subjects=None if about is None else np.concatenate([dataset.subjects, about]),
            users=None,  # `clients` says whose records are
        )
        before, records = clients.owners_and_records()
        new = len(dataset.labels) + np.arange(self._records_of_a_world)
        return joined, Clients.from_owners(
            np.concatenate([records, new]), np.concatenate([before, owners]), num_clients=num_clients
        )

    def draw_presence(self, held: Clients, num_records: int) -> Clients:
        """Who holds which records in the worlds that the coins say: where one is False, no records or the other ones.

        Arguments:
            held: who holds which records in the first world.
            num_records: of the dataset with all canaries in it.
        """
        owners, records = held.owners_and_records()
        place = records - (num_records - self.num_records)
        canary = place >= 0
        other = canary.copy()
        other[canary] = ~self.coins[place[canary] // self.items]
        if self.swapped:
            records = np.where(other, records + self._records_of_a_world, records)
        else:
            owners, records = owners[~other], records[~other]
        return Clients.from_owners(records, owners, num_clients=held.num_clients)

    def contributing_users(self, users: np.ndarray, num_clients: int) -> np.ndarray:
        """Of the users of a round, those that contribute: who was removed stays on the roster and does not.

        Arguments:
            users: the planned users of the round.
            num_clients: how many users there are in all, canaries included.
        """
        if self.unit is not Unit.USER or self.swapped:
            return users
        place = users - (num_clients - self.count)
        return users[(place < 0) | self.coins[np.maximum(place, 0)]]

    def record_numbers(self, num_records: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The number of one record of each canary in the first world, and in the second; None if it has none there.

        Arguments:
            num_records: of the dataset with all canaries in it.
        """
        first = num_records - self.num_records + self.items * np.arange(self.count)
        return first, first + self._records_of_a_world if self.swapped else None

    def _input_norm(self, real: np.ndarray, num_classes: int) -> float:
        """The norm of a canary's input: the median of real ones, or more if updates would not be clipped otherwise."""
        usual = float(
            np.median(np.linalg.norm(real[:_SAMPLED_RECORDS].reshape(min(len(real), _SAMPLED_RECORDS), -1), axis=1))
        )
        wanted = _BEYOND_CLIP * (self.clip_norm or 0.0) / self.step
        if self.clip_value is not None:  # the slope of another class is about 1 / num_classes of the input
            width = math.sqrt(math.prod(real.shape[1:]))
            wanted = max(wanted, _BEYOND_CLIP * self.clip_value * num_classes * width / self.step)
        return max(usual, wanted) or 1.0

    def _assign_owners(self, clients: Clients, dataset: Dataset, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """The user who holds each of the canaries' records, (canaries * items,), and how many users there are then.

        Users, and subjects in data that name none, come new; other canaries' records go to users who are there.
        """
        if self.unit is Unit.USER or (self.unit is Unit.SUBJECT and dataset.subjects is None):
            return clients.num_clients + np.repeat(np.arange(self.count), self.items), clients.num_clients + self.count
        at_one = min(self.items, self.items_per_user or self.items)
        needed = math.ceil(self.items / at_one)
        if needed > clients.num_clients:
            raise ValueError(
                f"a person's {self.items} records need {needed} users to hold them; there are {clients.num_clients}"
            )
        hosts = [rng.choice(clients.num_clients, needed, replace=False) for _ in range(self.count)]
        return np.concatenate([np.repeat(host, at_one)[: self.items] for host in hosts]), clients.num_clients


def _to_float(inputs: np.ndarray) -> np.ndarray:
    """Inputs as float32; bytes are scaled to [0, 1]."""
    return inputs.astype(np.float32) / np.float32(255) if inputs.dtype == np.uint8 else inputs


def _unit_directions(
    count: int, features: int, num_classes: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows and labels: a basis once for each label, all labels in turn, and then another basis."""
    size = min(count, features)
    block, place = np.divmod(np.arange(count), size)
    bases = [np.linalg.qr(rng.normal(size=(features, size)))[0].T for _ in range(block[-1] // num_classes + 1)]
    return np.stack(bases)[block // num_classes, place], ((place + block) % num_classes).astype(np.int32)
