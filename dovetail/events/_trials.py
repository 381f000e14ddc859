"""The best of several trainings, of which nothing else is seen."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dovetail import _validate
from dovetail.statements import Neighbors

__all__ = ["BestTrial", "Repeated"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeated:
    """A mechanism that one user is exposed to `times` times within a trial."""

    mechanism: Any  # an event
    sampling: Any  # Everyone, FixedSize or Poisson
    times: int

    def __post_init__(self) -> None:
        _validate.integer(times=self.times)
        _validate.at_least(1, times=self.times)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestTrial:
    """The best of a random number K of trials, each with one of several settings, drawn whatever the data are.

    `settings` has for every setting all that one user is exposed to in a trial with it. K >= 1 follows the truncated
    negative binomial law: P[K = k] is proportional to (1 - gamma)^k prod_{l < k} (l + eta) / (l + 1), and to
    (1 - gamma)^k / k at eta = 0; eta = 1 is the geometric law. Neither K nor any other trial is seen.
    """

    settings: tuple[tuple[Repeated, ...], ...]
    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not self.settings or not all(self.settings):
            raise ValueError(f"expected settings with a release in each, got settings={self.settings!r}")
        if not -1 < self.eta < math.inf:
            raise ValueError(f"expected eta > -1, got eta={self.eta!r}")
        _validate.in_open_interval(0, 1, gamma=self.gamma)
        mechanisms = [repeated.mechanism for repeated in self.releases]
        relations = {mechanism.neighbors.value for mechanism in mechanisms if hasattr(mechanism, "neighbors")}
        if len(relations) > 1:
            raise ValueError(
                f"expected settings under one neighbouring relation, got {' and '.join(sorted(relations))}"
            )

    @property
    def releases(self) -> tuple[Repeated, ...]:
        """The releases of all settings, one after the other."""
        return tuple(repeated for setting in self.settings for repeated in setting)

    @property
    def neighbors(self) -> Neighbors:
        """The relation that all trials are stated under: that of the first release."""
        return self.settings[0][0].mechanism.neighbors
