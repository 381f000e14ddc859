"""Gaussian noise that is correlated between rounds: rows of C^-1 Z, and the coefficients of C^-1 that serve a training.

A model is a sum over rounds of noised updates. If round t adds sum over j of d_j z_(t-j), with d_0 = 1 and the other
d_j below 0, most of a round's noise is taken back by the next ones, and the model carries less of it. A user who comes
in few rounds, far apart, is hidden almost as well as by independent noise (`accounting.streams`). Nothing is gained
where everyone is in every round.

Coefficients of C^-1, of which `rows` differ from 0 at the most:

- `square_root`: those of (1 - x)^(1/2), for which C^-1 and C share the work (Kalinin, Lampert 2024);
- `optimize`: the best for a `Workload`, found from there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter
from scipy.special import expit, logit

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.accounting.streams import amplification_of_uploads
from dovetail.mechanisms.gaussian import normal

__all__ = [
    "NoiseRows",
    "Workload",
    "as_drawn",
    "draw_row",
    "error_of_model",
    "optimize",
    "share_kept",
    "square_root",
    "start_rows",
]

_FARTHEST = 30.0  # logits stay within it: partial sums that differ by less are equal in what they do
_FAR, _TINY = 1e6, 1e-30  # a first coefficient is within a factor of _FAR of 1; those below _TINY are 0
_MOST_STEPS = 200  # of the search for coefficients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What noise is chosen for: so many rounds, who comes when, and what the server does with each round's estimate.

    `momentum` is that of the server's optimiser (heavy ball), 0 for plain steps.
    """

    rounds: int
    uploads: int
    separation: int
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _validate.integer(rounds=self.rounds, uploads=self.uploads, separation=self.separation)
        _validate.at_least(1, rounds=self.rounds, uploads=self.uploads, separation=self.separation)
        _validate.in_interval(0, 1, momentum=self.momentum)

    @property
    def steps(self) -> np.ndarray:
        """By how much the model has moved t rounds after an estimate of 1, for t = 0, 1, ..."""
        return np.cumsum(self.momentum ** np.arange(self.rounds))


def as_drawn(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """The coefficients as 32-bit floats, with which rows are added: the accountant must know no others.

    Refuses a first one that is far from 1, for then products with it may vanish in 32 bits: the noise multiplier is for
    its size. Others that are too small for 32 bits are 0.
    """
    first = coefficients[0] if coefficients else 0.0
    if not 1 / _FAR <= first <= _FAR or not all(abs(other) <= _FAR for other in coefficients[1:]):
        raise ValueError(
            f"expected coefficients of at most {_FAR:g} and a first one of at least {1 / _FAR:g} (noise_multiplier is "
            f"for the size of the noise), got {coefficients[:4]}"
        )
    drawn = np.asarray(coefficients, np.float32)
    return tuple(np.where(np.abs(drawn) < _TINY, 0, drawn).tolist())


def square_root(rows: int) -> tuple[float, ...]:
    """The first `rows` coefficients of (1 - x)^(1/2): 1, -1/2, -1/8, -1/16, ..."""
    coefficients = [1.0]
    for power in range(1, rows):
        coefficients.append(coefficients[-1] * (power - 1.5) / power)
    return tuple(coefficients)


def error_of_model(coefficients: tuple[float, ...], workload: Workload) -> float:
    """The noise in a model, root mean square over its rounds and coordinates, for users of sensitivity 1 at mu = 1.

    Arguments:
        coefficients: of the noise, the first positive and the others at most 0.
        workload: the training that they serve.
    """
    amplification = amplification_of_uploads(coefficients, workload.rounds, workload.uploads, workload.separation)
    return amplification * math.sqrt(_mean_square(np.asarray(coefficients), workload))


def _mean_square(coefficients: np.ndarray, workload: Workload) -> float:
    """The mean square of the noise in the models after every round, for rows of variance 1."""
    in_model = lfilter(coefficients, [1.0], workload.steps)
    left = np.arange(workload.rounds, 0, -1) / workload.rounds  # the share of rounds that a row is in the model
    return float(np.dot(in_model**2, left))


def share_kept(coefficients: tuple[float, ...], rounds: int) -> float:
    """The noise on the sum of so many rounds, over that of independent rounds that begin with as much."""
    weights = np.zeros(rounds)
    weights[: len(coefficients)] = coefficients[:rounds]
    return float(np.linalg.norm(np.cumsum(weights)) / (coefficients[0] * math.sqrt(rounds)))


@functools.lru_cache(maxsize=64)
def optimize(workload: Workload, rows: int) -> tuple[float, ...]:
    """The coefficients with the least `error_of_model`, about, of which `rows` differ from 0 at the most.

    What is searched are the ratios of their partial sums, each in (0, 1): so d_0 = 1 and no other is above 0.

    Guarantees:
        Never worse than independent noise, or the square root cut to as many rows.
    """
    rows = min(rows, workload.rounds)
    start = square_root(rows)
    known = [(1.0,), start]
    if rows > 1:
        sums = np.cumsum(start)
        ratios = np.clip(sums[1:] / sums[:-1], 1e-6, 1 - 1e-6)
        search = minimize(
            lambda logits: math.log(error_of_model(_coefficients(logits), workload)),
            logit(ratios),
            method="L-BFGS-B",
            bounds=[(-_FARTHEST, _FARTHEST)] * len(ratios),
            options={"maxiter": _MOST_STEPS, "ftol": 1e-5},
        )
        known.append(_coefficients(search.x))
    return min(map(as_drawn, known), key=lambda coefficients: error_of_model(coefficients, workload))


def _coefficients(logits: np.ndarray) -> tuple[float, ...]:
    """The coefficients whose partial sums have ratios of these logits."""
    sums = np.concatenate([[1.0], np.cumprod(expit(logits))])
    return (1.0, *np.minimum(np.diff(sums), 0.0).tolist())


class NoiseRows(NamedTuple):
    """The rows of Z that later rounds still take back, in a ring, and how many were drawn."""

    rows: jax.Array  # (as many as are kept, dim); the row of round t is at t modulo their number
    drawn: jax.Array


def start_rows(coefficients: tuple[float, ...], dim: int) -> NoiseRows:
    """No rows drawn yet, and room for those that these coefficients take back."""
    return NoiseRows(jnp.zeros((len(coefficients) - 1, dim)), jnp.zeros((), jnp.int32))


def draw_row(before: NoiseRows, coefficients: tuple[float, ...], *, key: jax.Array) -> tuple[jax.Array, NoiseRows]:
    """A round's noise in units of its standard deviation, and the rows that are kept for the rounds after it.

    A round that is not released draws its row too: the next one would take its place otherwise, and users would be
    fewer rounds apart than was promised.
    """
    kept, dim = before.rows.shape
    new = normal(key, (dim,), before.rows.dtype)
    if not kept:
        return coefficients[0] * new, NoiseRows(before.rows, before.drawn + 1)
    ages = (before.drawn - 1 - jnp.arange(kept)) % kept + 1
    taken_back = jnp.asarray(coefficients, before.rows.dtype)[ages]
    noise = coefficients[0] * new + jnp.dot(taken_back, before.rows, precision=jax.lax.Precision.HIGHEST)
    return noise, NoiseRows(before.rows.at[before.drawn % kept].set(new), before.drawn + 1)
