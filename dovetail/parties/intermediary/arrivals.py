"""Uploads on their way into a store, and why some are turned away."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = ["Accepted", "Arrival", "Over", "Turned", "Unopened"]

Accepted = Literal["accepted", "known"]


class Turned(ValueError):  # noqa: N818 - an upload that is turned away
    """An upload that is not taken, and why."""


class Unopened(Turned):
    """An upload to a round that has not been heard of here."""


class Over(Turned):
    """An upload to a round that is closed, or has as many as it takes."""


class Arrival(NamedTuple):
    """An upload on its way into the store: who sent it, its random id, and what was in it.

    For a shuffler that is pairs of slot and ciphertext, for an aggregator a share.
    """

    round: int
    client: bytes
    report: bytes
    content: Any
