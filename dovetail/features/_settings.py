"""Which features, in plain data."""

from __future__ import annotations

import dataclasses

from dovetail import _validate
from dovetail.features import synthetic

__all__ = ["KINDS", "Features", "Whitening"]

KINDS = ("none", "scatter", "patches", "scatter+patches")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)  # slots: or msgspec leaves out the defaults
class Whitening:
    """Whitening on public images: `rank` directions, variances raised by `ridge` times the largest.

    `on` says which images: "synthetic" (strokes; with patches strokes and leaves; in colour leaves), one of "strokes",
    "leaves" and "strokes+leaves", or the name of a task whose training images are thereby declared public. The first
    `images` of them are used.
    """

    on: str = "synthetic"
    rank: int = 600
    ridge: float = 0.01
    images: int = 24_000

    def __post_init__(self) -> None:
        _validate.integer(rank=self.rank, images=self.images)
        _validate.at_least(1, rank=self.rank)
        _validate.at_least(2, images=self.images)
        _validate.non_negative(ridge=self.ridge)

    @property
    def task(self) -> str | None:
        """The task whose images it reads; None if they are synthetic."""
        return None if self.on in ("synthetic", *synthetic.KINDS) else self.on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """A fixed function of one record: its kind ("module:object" for one's own), and what is done with its values.

    `patches` are pairs (side of a patch, number of filters), by default those that `features.patches` lists for grey or
    colour. With `symmetric`, the features of a record and of its mirror image are added.
    """

    kind: str = "none"
    symmetric: bool = False
    patches: tuple[tuple[int, int], ...] | None = None
    whiten: Whitening | None = None

    def __post_init__(self) -> None:
        if ":" not in self.kind:
            _validate.known_name("features", self.kind, KINDS)
        if self.kind == "none" and (self.symmetric or self.whiten is not None):
            raise ValueError("expected features to be symmetric or whitened, got features='none'")
        if self.patches is not None and ("patches" not in self.kind.split("+") or not self.patches):
            raise ValueError(f"expected sides and filters with features of patches, got patches={self.patches!r}")

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a statement about a training on these features takes for granted."""
        said = []
        if ":" in self.kind:
            said.append(f"the features {self.kind!r} were made without the private data")
        if self.whiten is not None and self.whiten.task is not None:
            said.append(f"the images of {self.whiten.task!r}, on which features were whitened, are public")
        return tuple(said)
