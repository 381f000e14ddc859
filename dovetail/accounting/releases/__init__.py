"""What an event implies, one family of events per file; nobody else asks for the type of an event.

`release_of` finds the release of an event: `noise` (Gaussian, Laplace, none at all), `crowds` (shuffled coordinates),
`personalized`, `replaced_users` (a subject at several sampled users), `skellam_sums` (sums by shares), `split_and_mix`,
`subjects`, `selection` (the best of several trainings). A plug-in registers its own with
``@releases(MyEvent)``. `renyi` and `losses` keep answers, for they are asked for again and again; `privunit` is the
geometry of PrivUnit, whose rounds are crowds.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from dovetail.accounting.loss_distributions import Loss
from dovetail.accounting.releases import (
    crowds,
    noise,
    personalized,
    replaced_users,
    selection,
    skellam_sums,
    split_and_mix,
    subjects,
)
from dovetail.accounting.releases._base import INTERVAL, Curve, Release, Sampling, Scale, release_of, releases

__all__ = [
    "Curve",
    "Release",
    "Sampling",
    "Scale",
    "crowds",
    "losses",
    "noise",
    "personalized",
    "release_of",
    "releases",
    "renyi",
    "replaced_users",
    "selection",
    "skellam_sums",
    "split_and_mix",
    "subjects",
]

_FINE = 4 * INTERVAL  # losses on finer grids are large, and few of them are kept


@functools.lru_cache(maxsize=2048)
def renyi(event: Any, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
    """The Renyi divergence of one release of an event at every order: see `Release.renyi`. Kept: do not write to it."""
    return release_of(event).renyi(sampling, orders)


def losses(event: Any, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
    """The privacy loss of one release of an event on multiples of `interval`: see `Release.losses`. Kept."""
    return (_fine_losses if interval < _FINE else _coarse_losses)(event, sampling, interval)


def _losses(event: Any, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
    return release_of(event).losses(sampling, interval)


_fine_losses = functools.lru_cache(maxsize=64)(_losses)
_coarse_losses = functools.lru_cache(maxsize=1024)(_losses)
