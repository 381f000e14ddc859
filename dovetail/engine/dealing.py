"""What lies where: the data on every device, and the users of a round dealt in chunks, each of one size class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh

from dovetail.data import Clients, Dataset
from dovetail.engine import gram
from dovetail.engine.chunks import ClientWork, Data, Work, Works
from dovetail.engine.devices import on_every_device, split_over_devices
from dovetail.engine.sizes import SizeClass
from dovetail.sampling import Drawn, Items

__all__ = ["Dealer", "placed"]


def placed(dataset: Dataset, clients: Clients, classes: Sequence[tuple[ClientWork, SizeClass]], mesh: Mesh) -> Data:
    """The data of these clients on the devices of a mesh, and whose rows are whose."""
    places = np.zeros(clients.num_clients, np.int32)
    products: list[gram.Products | None] = []
    for work, one in classes:
        places[one.members] = np.arange(len(one.members))
        one_step = work.way == "linear" and not (work.update.local or work.diagnostics)
        if one_step and gram.serves(one.width, dataset.num_classes):
            own, constant = clients.only(one.members), cast(float, work.model.constant)
            products.append(gram.products(dataset.inputs, own, constant=constant))
        else:
            products.append(None)
    data = Data(
        inputs=dataset.inputs,
        labels=np.repeat(dataset.labels, dataset.views, axis=0),
        rows=clients.records if len(clients.records) else np.zeros(1, np.int32),
        starts=clients.starts,
        counts=clients.counts,
        places=places,
        products=tuple(products),
    )
    return jax.tree.map(lambda array: on_every_device(array, mesh), data)


class Dealer:
    """Deals users of these classes, so many at a time to each device of a mesh."""

    def __init__(self, classes: Sequence[SizeClass], chunks: Sequence[int], mesh: Mesh) -> None:
        self._mesh, self._chunks, self._members = mesh, chunks, [len(one.members) for one in classes]
        self._class_of = np.empty(sum(self._members), np.int32)
        for number, one in enumerate(classes):
            self._class_of[one.members] = number

    def dealt(self, drawn: Drawn, capacity: int) -> tuple[Works, jax.Array]:
        """What a round works on, class by class, and how many chunks of each class hold anybody.

        There are chunks for as many users of a class as may come if `capacity` come in all, so that rounds have one
        shape; -1 is where nobody is.
        """
        of_class = self._class_of[drawn.users]
        works, used = [], []
        for number, (chunk, members) in enumerate(zip(self._chunks, self._members, strict=True)):
            here, width = np.flatnonzero(of_class == number), self._mesh.size * chunk
            chunks = max(1, math.ceil(max(min(capacity, members), len(here)) / width))
            works.append(self._work(drawn, here, (chunks, self._mesh.size, chunk)))
            used.append(math.ceil(len(here) / width))
        return tuple(works), on_every_device(np.asarray(used, np.int32), self._mesh)

    def _work(self, drawn: Drawn, here: np.ndarray, shape: tuple[int, int, int]) -> Work:
        """Those of the users that are at these places, in chunks of every device."""

        def dealt(rows: np.ndarray, empty: float) -> jax.Array:
            padded = np.full((math.prod(shape), *rows.shape[1:]), empty, rows.dtype)
            padded[: len(here)] = rows[here]
            return split_over_devices(padded.reshape(*shape, *rows.shape[1:]), self._mesh, axis=1)

        ids, items = dealt(np.asarray(drawn.users, np.int32), -1), drawn.items
        return ids, None if items is None else Items(dealt(items.rows, -1), dealt(items.noise_scale, 1.0))
