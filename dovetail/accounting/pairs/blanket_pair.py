"""The blanket's curve as one dominating pair, so that it composes over coordinates and rounds.

The exact blanket bounds delta(eps) of one shuffled coordinate in both directions, at every eps below eps_local; so does
the clone pair, and both are 0 beyond. The smaller of the two is asked at some eps. In t = tanh(eps/2), a symmetric
pair has ``delta(eps)/(1 + e^eps) = E[(s - t)_+]``, convex in t (see `symmetric`). So is the left side for any pair, and
the lower convex hull of the points asked, mirrored to t < 0, is still above it in both directions. A convex function of
that kind is the curve of a symmetric pair: its kinks are the law of s (docs/proofs/blanket-composition.md).
"""

from __future__ import annotations

import contextlib
import functools
import math

import numpy as np

from dovetail.accounting.amplification import blanket, clones
from dovetail.accounting.pairs import symmetric
from dovetail.events import Report, Shuffled
from dovetail.statements import NotApplicable, Theorem

__all__ = ["BLANKET_PAIR", "law", "pair"]

BLANKET_PAIR = Theorem(
    key="dovetail.blanket-composition",
    where="the smaller of the exact blanket (Balle, Bell, Gascon, Nissim, CRYPTO 2019, Lemma 5.3) and the clones of "
    "Feldman, McMillan, Talwar (SODA 2023), as one pair (docs/proofs/blanket-composition.md)",
    url="https://arxiv.org/abs/1903.02837",
)

_LEAST = 1e-290  # stands for every delta that may have underflowed
_OUTWARD = 1 + 1e-10  # more than the error of the slopes between nodes
_FINE, _MIDDLE, _COARSE = (0.125, 5.5), (0.25, 9.0), 1.2  # steps and reach in standard deviations, then a ratio
_COARSER = 5.0  # than the blanket of one coordinate: an error below the one of few nodes
_LARGEST_LOSS = 20.0  # beyond, tanh is too close to 1


def pair(event: Shuffled) -> symmetric.SymmetricPair:
    """The pair that dominates one round of Laplace reports or of randomized response with more than two levels.

    Guarantees:
        Never below enumeration at small num_users, composed over coordinates.
        Never above the clone pair by more than the grid's error; one coordinate is the exact blanket within 1 %.
        Refuses generic and binary reports, for which the blanket says no more than the clones.
    """
    report = event.report
    if report.kind == "generic" or (report.kind == "rr" and report.levels == 2):
        raise NotApplicable("the blanket says no more than the clones for generic and binary reports")
    if report.eps_local > _LARGEST_LOSS:
        raise NotApplicable(f"no blanket pair for a report with a loss of {report.eps_local:.4g}")
    points, mass = law(report, event.honest)
    eps_pure = 2 * math.atanh(float(points[-1])) * (1 + 1e-15)
    return symmetric.SymmetricPair(points=points, mass=mass, eps_pure=eps_pure, folds=event.coordinates)


@functools.lru_cache(maxsize=64)
def law(report: Report, num_users: int) -> tuple[np.ndarray, np.ndarray]:
    """The points and masses of |s| for one coordinate of so many honest users."""
    event = Shuffled(report=report, num_users=num_users)

    def delta(eps: float) -> float:
        found = clones.delta_of(event, eps=eps)
        with contextlib.suppress(NotApplicable):
            found = min(found, blanket.exact_delta(event, eps=eps, coarser=_COARSER))
        return max(found, _LEAST)

    eps, deltas = [0.0], [blanket.exact_delta(event, eps=0.0, coarser=_COARSER)]
    for node in _nodes(math.sqrt(2 * math.pi) * deltas[0], report.eps_local):
        eps.append(float(node))
        deltas.append(delta(float(node)))
        if deltas[-1] <= _LEAST:
            break
    eps.append(report.eps_local)
    deltas.append(0.0)
    points, mass = _kinks(np.tanh(np.array(eps) / 2) * (1 + 1e-15), np.array(deltas) / (1 + np.exp(eps)))
    for array in (points, mass):
        array.flags.writeable = False
    return points, mass


def _nodes(std: float, eps_local: float) -> np.ndarray:
    """Where to ask, when the loss has about this standard deviation (if it is Gaussian, sqrt(2 pi) delta(0))."""
    std = min(std, eps_local / 4)
    fine, middle = np.arange(_FINE[0], _FINE[1], _FINE[0]), np.arange(_FINE[1], _MIDDLE[1], _MIDDLE[0])
    count = math.ceil(math.log(max(1.0, eps_local / (std * _MIDDLE[1]))) / math.log(_COARSE))
    nodes = std * np.concatenate([fine, middle, _MIDDLE[1] * _COARSE ** np.arange(count + 1)])
    return nodes[nodes < eps_local * (1 - 1e-6)]


def _kinks(t: np.ndarray, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The law of |s| whose E[(s - t)_+] is the lower convex hull of the points; E[(s + t)_+] = t + E[(s - t)_+]."""
    hull: list[tuple[float, float]] = []
    for point in zip(np.concatenate([-t[:0:-1], t]), np.concatenate([(t + excess)[:0:-1], excess]), strict=True):
        while len(hull) > 1 and _slope(hull[-1], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    ends = np.array(hull)
    slopes = np.append(np.diff(ends[:, 1]) / np.diff(ends[:, 0]), 0.0)
    right = np.flatnonzero(ends[:, 0] > 0)
    mass = 2 * (slopes[right] - slopes[right - 1])
    middle = max(0.0, 1 - float(mass.sum()))
    return np.append(0.0, ends[right, 0]), np.append(middle, mass) * _OUTWARD


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
