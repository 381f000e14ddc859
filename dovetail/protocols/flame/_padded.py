"""FLAME's slots of a public size: dummies fill them up, a surplus is dropped or kept."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dovetail import _validate
from dovetail.protocols._base import Cohort
from dovetail.protocols.flame._flame import Flame
from dovetail.shufflers import OVERFLOWS, Padding

__all__ = ["Padded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Padded(Flame):
    """Slots of a public number of messages, `pad_to`, whatever clients send: the cohort's size unless given."""

    pad_to: int | None = None
    overflow: Literal["drop", "keep"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._default("overflow", "keep" if self.published else "drop")
        _validate.one_of(OVERFLOWS, overflow=self.overflow)
        pad_to = _validate.given(pad_to=self.pad_to)
        _validate.integer(**pad_to)
        _validate.at_least(2, **pad_to)

    def padded_to(self, cohort: Cohort) -> int:
        """The number of messages in a slot; refuses one in which colluders leave no crowd."""
        pad_to = cohort.size if self.pad_to is None else self.pad_to
        if pad_to - cohort.colluders < 2:
            raise ValueError(f"expected pad_to - colluders >= 2, got pad_to={pad_to} with {cohort.colluders} colluders")
        return pad_to

    @property
    def padding(self) -> Padding:
        """Draws from the blanket up to `pad_to`."""
        return Padding(pad_to=self.known("pad_to"), overflow=self.known("overflow"), blanket=self.local.blanket())
