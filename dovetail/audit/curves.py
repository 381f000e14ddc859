"""Delta against eps: what is certified, what is claimed, and what the attacks show to be needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dovetail import plots, quotes
from dovetail.audit.findings import Finding

__all__ = ["draw", "trade_offs"]

_POINTS = 9


def trade_offs(finding: Finding) -> dict[str, list[tuple[float, float]]]:
    """By name, (eps, delta) of the certified, the claimed and the audited curve, at deltas around the finding's own.

    Counted bounds are for one delta alone and stand as a point. Where eps is unbounded a curve has no point.
    """
    middle = finding.bound.delta or finding.plan.delta
    found: dict[str, list[tuple[float, float]]] = {"certified": [], "claimed": [], "audited": [], "counted": []}
    for delta in np.geomspace(max(middle * 1e-3, 1e-15), min(middle * 1e3, 0.5), _POINTS).tolist():
        for name, eps in _at(finding, delta):
            if math.isfinite(eps):
                found[name].append((eps, delta))
    counted = [bound for bound in (finding.bound, *finding.others) if bound.trials and not bound.unbounded]
    found["counted"] = [(bound.eps, bound.delta) for bound in counted if bound.delta > 0]
    return {name: points for name, points in found.items() if points}


def _at(finding: Finding, delta: float) -> Iterator[tuple[str, float]]:
    quote = quotes.quote(finding.protocol, dataclasses.replace(finding.plan, delta=delta))
    colluding = finding.view == "colluding"
    certified = quote.local if colluding else quote.certified
    yield "certified", certified.eps
    if quote.claimed is not None and not colluding:
        yield "claimed", quote.claimed.eps
    if finding.duels:
        yield "audited", max(duel.eps(delta=delta).eps for duel in finding.duels)


def draw(path: Path, finding: Finding) -> None:
    """The three curves of a finding."""
    title = f"{finding.protocol}, {finding.plan.num_users} users, {finding.plan.dim} coordinates, {finding.view}"
    plots.trade_offs(path, trade_offs(finding), title=title)
