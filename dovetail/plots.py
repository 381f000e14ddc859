"""Figures, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dovetail import _validate
from dovetail.accounting import amplify

__all__ = ["amplification", "trade_offs"]


def amplification(path: Path, *, num_users: int, eps_local: float, delta: float, over: str = "n") -> None:
    """Every applicable bound against the number of users (over="n") or the local budget (over="eps-local")."""
    _validate.one_of(("n", "eps-local"), over=over)
    if over == "n":
        points = np.unique(np.geomspace(max(2, num_users / 100), num_users * 100, 13).astype(int)).tolist()
        tables = [amplify.table(eps_local, num_users=point, delta=delta) for point in points]
    else:
        points = np.geomspace(eps_local / 10, eps_local * 10, 13).tolist()
        tables = [amplify.table(point, num_users=num_users, delta=delta) for point in points]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for i, row in enumerate(tables[0]):
        eps = [bound.eps if (bound := table[i].bound) else np.nan for table in tables]
        if np.isfinite(eps).any():
            axes.plot(points, eps, marker=".", label=row.name)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="users" if over == "n" else "eps_local",
        ylabel="eps after the shuffle",
        title=f"delta {delta:g}, " + (f"eps_local {eps_local:g}" if over == "n" else f"{num_users} users"),
    )
    axes.legend(fontsize=7)
    _save(figure, path)


def trade_offs(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str) -> None:
    """Curves of delta against eps, by name; a single point stands as a mark."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        eps, delta = zip(*points, strict=True)
        axes.plot(eps, delta, marker="o" if len(points) == 1 else ".", label=name)
    axes.set(yscale="log", xlabel="eps", ylabel="delta", title=title)
    if curves:
        axes.legend()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a file to draw to (.svg, .png or .pdf), got {str(path)!r} ({error})") from error
