"""From a curve to a pair: an upper bound on delta(eps) as a symmetric pair, so that it composes.

In t = tanh(eps/2), a symmetric pair has ``delta(eps)/(1 + e^eps) = E[(s - t)_+]``, convex in t (see `symmetric`). So is
the left side for any pair. A curve that bounds both directions of a release is asked at some eps; the lower convex hull
of the points, mirrored to t < 0, is still above both, and it is the curve of a symmetric pair: its kinks are the law of
s (docs/proofs/blanket-composition.md). `sampled_pair` does so for a round on a secret sample of fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.pairs.symmetric import SymmetricPair
from dovetail.statements import NotApplicable

__all__ = [
    "COARSE",
    "FINE",
    "LARGEST_LOSS",
    "MANY",
    "Nodes",
    "kinks",
    "larger",
    "nodes_for",
    "pair_of",
    "sampled_pair",
]

_OUTWARD = 1 + 1e-10  # more than the error of the slopes between nodes
LARGEST_LOSS = 20.0  # beyond, tanh is too close to 1
_LEAST_DRAWN = 1e-60  # a delta of a sampled round that is not told from a smaller one
_LARGEST_EXPONENT, _MODERATE = 700.0, 30.0  # of a loss that is asked about, and that is exponentiated


class Nodes(NamedTuple):
    """Where a curve is asked: two steps and how far they reach, in standard deviations of the loss; then a ratio."""

    fine: float
    fine_to: float
    middle: float
    middle_to: float
    ratio: float
    least: float = 1e-290  # stands for every delta that may have underflowed, or that does not matter

    def at(self, std: float, eps_pure: float) -> np.ndarray:
        """The eps to ask about, when the loss has about this standard deviation."""
        std = min(std, eps_pure / 4)
        steps = [np.arange(self.fine, self.fine_to, self.fine), np.arange(self.fine_to, self.middle_to, self.middle)]
        count = math.ceil(math.log(max(1.0, eps_pure / (std * self.middle_to))) / math.log(self.ratio))
        nodes = np.unique(std * np.concatenate([*steps, self.middle_to * self.ratio ** np.arange(count + 1)]))
        nodes = nodes[np.diff(nodes, prepend=0.0) > 1e-6 * std]
        return nodes[nodes < eps_pure * (1 - 1e-6)]


FINE = Nodes(0.1, 5.5, 0.25, 9.0, 1.2)
COARSE = Nodes(0.3, 4.8, 0.6, 9.0, 1.5)
MANY = 1000  # folds, of whose sum the bulk of one decides
_FINE_BULK = Nodes(0.1, 3.5, 0.3, 6.0, 1.3, least=1e-50)
_COARSE_BULK = Nodes(0.3, 3.3, 0.8, 6.0, 1.5, least=1e-50)


def nodes_for(folds: int, *, coarse: bool = False) -> Nodes:
    """Where to ask about a curve that is composed so often: of many folds, less about the tails."""
    _validate.at_least(1, folds=folds)
    if folds < MANY:
        return COARSE if coarse else FINE
    return _COARSE_BULK if coarse else _FINE_BULK


def pair_of(
    delta_at: Callable[[float], float],
    *,
    eps_pure: float,
    folds: int = 1,
    nodes: Nodes = FINE,
    least: float | None = None,
) -> SymmetricPair:
    """A symmetric pair that dominates, in both directions, every pair whose delta(eps) is at most this curve.

    `delta_at(eps)` holds at every eps in [0, eps_pure), and beyond delta is 0. Below `least` the curve is not asked.

    Guarantees:
        Never below any pair that the curve bounds; equal to the curve where it was asked, if it is that of a pair.
    """
    if not 0 < eps_pure <= LARGEST_LOSS:
        raise NotApplicable(f"no pair for a report with a loss of {eps_pure:.4g}")
    least = nodes.least if least is None else least
    eps, deltas = [0.0], [delta_at(0.0)]
    for node in nodes.at(math.sqrt(2 * math.pi) * deltas[0], eps_pure):  # of a Gaussian loss, its deviation
        eps.append(float(node))
        deltas.append(max(delta_at(float(node)), least))
        if deltas[-1] <= least:
            break
    eps.append(eps_pure)
    deltas.append(0.0)
    return _pair(np.tanh(np.array(eps) / 2) * (1 + 1e-15), np.array(deltas) / (1 + np.exp(eps)), folds)


def sampled_pair(
    delta_at: Callable[[float], float], *, prob: float, eps_pure: float, std: float, nodes: Nodes = FINE
) -> SymmetricPair:
    """The symmetric pair of a round on a secret sample of fixed size, in which a user is drawn with this probability.

    `delta_at(eps)` bounds both directions of the round itself under replacement, whose loss has about this std and is
    at most `eps_pure`, which may be infinite. Of the sampled round delta is ``prob delta_at(log1p(expm1(eps) / prob))``
    (docs/proofs/fixed-size.md). It is asked at nodes of the round's own eps; a loss beyond `LARGEST_LOSS`, or
    less likely than 1e-60, counts as infinite, which is a point at 1.

    Guarantees:
        Never below the sampled round, at any eps, in either direction and composed; at prob = 1 that of the round.
    """
    _validate.in_interval(0, 1, prob=prob)
    _validate.positive(prob=prob, eps_pure=min(eps_pure, LARGEST_LOSS), std=std)
    eps, deltas = [0.0], [delta_at(0.0) * prob]
    inner = nodes.at(std, min(eps_pure, _LARGEST_EXPONENT))
    inner = np.append(inner, eps_pure) if eps_pure < _LARGEST_EXPONENT else inner
    end = 1.0
    for node, outer in zip(inner, _log1p_expm1(prob, inner) * (1 + 8 * numerics.ULP), strict=True):
        if outer > LARGEST_LOSS:
            break
        if node == eps_pure:
            end = math.tanh(outer / 2) * (1 + 4e-15)
            break
        eps.append(float(outer))
        deltas.append(max(delta_at(float(node)) * prob, _LEAST_DRAWN))
        if deltas[-1] <= _LEAST_DRAWN:
            break
    t = np.append(np.tanh(np.array(eps) / 2) * (1 + 2e-15), end)
    excess = np.append(np.array(deltas) * (1 + 4 * numerics.ULP) / (1 + np.exp(eps)), 0.0)
    return _pair(t, excess, folds=1)


def _log1p_expm1(prob: float, eps: np.ndarray) -> np.ndarray:
    """ln(1 + prob (e^eps - 1)) without overflow: the loss of a sampled round where that of the round is eps."""
    small = np.log1p(prob * np.expm1(np.minimum(eps, _MODERATE)))
    large = eps + np.log(prob + (1 - prob) * np.exp(-np.maximum(eps, _MODERATE)))
    return np.where(eps <= _MODERATE, small, large)


def _pair(t: np.ndarray, excess: np.ndarray, folds: int) -> SymmetricPair:
    """The pair of the lower hull of these points; the last t is its largest, 1 where a loss may be infinite."""
    points, mass = kinks(t, excess)
    for array in (points, mass):
        array.flags.writeable = False
    last = float(points[-1])
    most = 2 * math.atanh(last) * (1 + 1e-15) if last < 1 else math.inf
    return SymmetricPair(points=points, mass=mass, eps_pure=most, folds=folds)


def larger(first: SymmetricPair, second: SymmetricPair) -> SymmetricPair:
    """A pair that dominates both of these, of as many folds: the chords of the larger of their curves.

    Guarantees:
        Never below either of them, at any eps.
    """
    if first.folds != second.folds:
        raise ValueError(f"expected pairs of as many folds, got {first.folds} and {second.folds}")
    t = np.unique(np.concatenate([[0.0], first.points, second.points]))
    excess = np.maximum(first.excess(t), second.excess(t)) * (1 + 1e-13)
    excess[-1] = 0.0
    points, mass = kinks(t, excess)
    return SymmetricPair(points=points, mass=mass, eps_pure=max(first.eps_pure, second.eps_pure), folds=first.folds)


def kinks(t: np.ndarray, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The law of |s| whose E[(s - t)_+] is the lower convex hull of the points; E[(s + t)_+] = t + E[(s - t)_+]."""
    mirrored = np.concatenate([-t[:0:-1], t]), np.concatenate([(t + excess)[:0:-1], excess])
    ends = numerics.lower_hull(*mirrored)
    slopes = np.append(np.diff(ends[:, 1]) / np.diff(ends[:, 0]), 0.0)
    right = np.flatnonzero(ends[:, 0] > 0)
    mass = 2 * (slopes[right] - slopes[right - 1])
    middle = max(0.0, 1 - float(mass.sum()))
    return np.append(0.0, ends[right, 0]), np.append(middle, mass) * _OUTWARD
