"""Uploads on their way into a shuffler's store, and why some are turned away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = ["Accepted", "Arrival", "Over", "Shape", "Turned", "Unopened"]

Accepted = Literal["accepted", "known"]


class Turned(ValueError):  # noqa: N818 - an upload that is turned away
    """An upload that is not taken, and why."""


class Unopened(Turned):
    """An upload to a round that this shuffler has not heard of."""


class Over(Turned):
    """An upload to a round that is closed, or has as many as it takes."""


class Shape(NamedTuple):
    """What is public about the uploads of a task: the same for all of them.

    `reports` messages per upload (None: any number up to one per slot), each `length` bytes, in `slots` slots. `pad_to`
    messages per slot leave, whatever came; None: as many as came.
    """

    slots: int
    reports: int | None
    length: int
    min_uploads: int
    max_uploads: int
    pad_to: int | None = None


class Arrival(NamedTuple):
    """An upload on its way into the store: who sent it, its random id, its (slot, ciphertext) pairs."""

    round: int
    client: bytes
    report: bytes
    messages: Sequence[tuple[int, bytes]]
