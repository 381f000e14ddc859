"""Personal privacy budgets: every user's own eps_local, public and chosen without looking at anybody's data.

Given as the name of a distribution of APES, Table 2, as ``[low, high]`` for evenly spaced ones, or as a file with one
number per line. The table's ``N(m, 1)`` is read as a normal distribution of standard deviation 1, and "clip range" as
its caption says: values outside move to the nearer end, so the Gaussian budgets pile up at both ends of their range
(41 to 48 % at the lower one). A mixture draws its component for each user. The draws come from one fixed seed:
whoever knows the number of users knows the budgets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import special

from dovetail import _validate

__all__ = ["DISTRIBUTIONS", "Distribution", "resolve", "resolved"]

_SEED = 2023
_FORMS = "the name of a distribution, [low, high] or a file with one number per line"


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Budgets in [low, high]: uniform, or a mixture of normal laws, given as (share, mean), clipped to the range."""

    low: float
    high: float
    normals: tuple[tuple[float, float], ...] = ()

    def draw(self, num_users: int) -> np.ndarray:
        """One budget per user.

        Guarantees:
            The same in every process, and within [low, high].
            A user that is there in a smaller federation has the same budget in a larger one.
        """
        position, component = np.random.default_rng(_SEED).random((num_users, 2)).T
        if not self.normals:
            return self.low + (self.high - self.low) * position
        shares, means = np.array(self.normals).T
        which = np.searchsorted(np.cumsum(shares)[:-1], component, side="right")
        return np.clip(means[which] + special.ndtri(position), self.low, self.high)


DISTRIBUTIONS = {
    "uniform1": Distribution(0.05, 0.5),
    "uniform2": Distribution(0.05, 1.0),
    "gauss1": Distribution(0.05, 0.5, ((1.0, 0.1),)),
    "gauss2": Distribution(0.05, 1.0, ((1.0, 0.2),)),
    "mixgauss1": Distribution(0.05, 0.5, ((0.9, 0.1), (0.1, 0.5))),
    "mixgauss2": Distribution(0.05, 1.0, ((0.9, 0.2), (0.1, 1.0))),
}


def resolve(given: str | Sequence[float], num_users: int) -> tuple[float, ...]:
    """Every user's budget, from any of the forms in which budgets may be given.

    Guarantees:
        One positive, finite number per user.
        What was resolved resolves to itself.
    """
    return tuple(resolved(given, num_users).tolist())


def resolved(given: str | Sequence[float], num_users: int) -> np.ndarray:
    """The same as an array, which of many users takes less time."""
    if isinstance(given, str):
        values = _named(given, num_users)
    elif not isinstance(given, list | tuple) or len(given) == 0:
        raise ValueError(f"expected budgets as {_FORMS}, got budgets={given!r}")
    else:
        for value in given:
            _validate.positive(eps_local=value)
        values = np.array(given, np.float64)
        if len(values) == 2:
            values = np.linspace(values[0], values[1], num_users)
    if len(values) != num_users:
        raise ValueError(f"expected one budget for each of {num_users} users, got {len(values)}")
    wrong = values[~(np.isfinite(values) & (values > 0))]
    if len(wrong):
        raise ValueError(f"expected every budget to be a finite number > 0, got {float(wrong[0])}")
    return values


def _named(given: str, num_users: int) -> np.ndarray:
    if given in DISTRIBUTIONS:
        return _drawn(given, num_users)
    path = Path(given)
    if path.is_file():
        return _from_file(path)
    if path.suffix or len(path.parts) > 1:
        raise FileNotFoundError(f"expected budgets as {_FORMS}, got {given!r}, which is not a file")
    _validate.known("budgets", given, DISTRIBUTIONS)
    raise ValueError(f"expected budgets as {_FORMS}, got {given!r}")


@functools.lru_cache(maxsize=4)  # a calibration asks for the same ones at every scale
def _drawn(name: str, num_users: int) -> np.ndarray:
    found = DISTRIBUTIONS[name].draw(num_users)
    found.flags.writeable = False
    return found


def _from_file(path: Path) -> np.ndarray:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    values = []
    for line in lines:
        try:
            values.append(float(line))
        except ValueError as error:
            raise ValueError(f"expected one number per line in {str(path)!r}, got {line!r}") from error
    return np.array(values)
