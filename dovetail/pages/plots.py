"""Figures that are computed by the accountants, for the command line: how bounds grow with users or local budget."""

from __future__ import annotations

import math

import numpy as np

from dovetail import _validate
from dovetail.accounting.amplification import table
from dovetail.figures import Figure, Line

__all__ = ["amplification_figure"]


def amplification_figure(*, num_users: int, eps_local: float, delta: float, over: str = "n") -> Figure:
    """Every applicable amplification bound against the number of users or the local budget.

    Arguments:
        num_users: how many users; with `over="n"` the middle of the x axis, which goes from 1/100 to 100 times it.
        eps_local: the budget of a report; with `over="eps-local"` the middle, from 1/10 to 10 times it.
        over: "n" or "eps-local", what the x axis is.
    """
    _validate.one_of(("n", "eps-local"), over=over)
    if over == "n":
        points = np.unique(np.geomspace(max(2, num_users / 100), num_users * 100, 13).astype(int)).tolist()
        tables = [table.table(eps_local, num_users=point, delta=delta) for point in points]
    else:
        points = np.geomspace(eps_local / 10, eps_local * 10, 13).tolist()
        tables = [table.table(point, num_users=num_users, delta=delta) for point in points]
    lines = []
    for i, row in enumerate(tables[0]):
        eps = [bound.eps if (bound := rows[i].bound) else None for rows in tables]
        if any(value is not None and math.isfinite(value) for value in eps):
            lines.append(Line(name=row.name, x=points, y=eps))
    return Figure(
        title=f"Amplification at delta {delta:g}, "
        + (f"eps_local {eps_local:g}" if over == "n" else f"{num_users} users"),
        x_label="users" if over == "n" else "eps_local",
        y_label="eps after the shuffle",
        lines=lines,
        log_x=True,
        log_y=True,
    )
