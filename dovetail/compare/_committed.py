"""Accuracies of comparisons that were run before (`papers/results/compare`), and which of them is near a setting."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from importlib import resources

from dovetail import protocols

__all__ = ["Committed", "committed", "near"]

_NEAR_EPS, _NEAR_SIZE = 2.0, 4.0  # as many times more or less is still called near
_SIZES = math.log(_NEAR_SIZE) + 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Committed:
    """One comparison: its terms, and how each protocol did; every user had one record.

    `runs` holds, by protocol, the mean `accuracy` over the seeds, the number of `rounds`, and users `per_round`.
    """

    name: str
    task: str
    model: str
    eps: float
    delta: float
    seeds: int
    users: int
    dim: int
    runs: Mapping[str, Mapping[str, float]]

    def accuracy(self, name: str, *, rounds: int, per_round: int) -> float | None:
        """A protocol's, or that of one whose estimate has the same law; None if it was run in other rounds or not run.

        Rounds are near with at most four times or a quarter as many users, and four times or a quarter as many rounds.
        """
        run = self.runs.get(name) or self.runs.get(protocols.find(name).same_noise_as or "")
        if run is None or _far(run["rounds"], rounds) > _SIZES or _far(run["per_round"], per_round) > _SIZES:
            return None
        return run["accuracy"]

    def __str__(self) -> str:
        return (
            f"{self.task}, {self.model}, eps {self.eps:g} ({self.users:,} users with one record each, {self.dim:,} "
            f"coordinates, mean of {self.seeds} seeds)"
        )


def committed() -> list[Committed]:
    """All comparisons, as `benchmarks/headline.py` wrote them down."""
    text = (resources.files("dovetail") / "comparisons" / "results.json").read_text()
    return [Committed(name=name, **facts) for name, facts in json.loads(text).items()]


def near(*, eps: float, users: int, dim: int) -> Committed | None:
    """The nearest comparison with at most twice or half the eps, and four times or a quarter of users and dimension."""

    def far(one: Committed) -> float:
        return _far(one.eps, eps) + _far(one.users, users) + _far(one.dim, dim)

    able = [
        one
        for one in committed()
        if _far(one.eps, eps) <= math.log(_NEAR_EPS) + 1e-9
        and max(_far(one.users, users), _far(one.dim, dim)) <= _SIZES
    ]
    return min(able, key=far, default=None)


def _far(then: float, now: float) -> float:
    return abs(math.log(then / now))
