"""SubDP (Marathe, Kanani 2022): people whose records lie in several silos. The paper has no experiments.

MNIST with its 539 true writers over ten silos, each writer's images at r = 1, 2 or 5 of them, scattering features and a
linear model. Everything but the item level aims at a certified (4, 1e-5) for adding or removing one writer; the column
with the paper's accounting shows what its theorems would say of the same noise.
"""

from __future__ import annotations

from typing import Any

from dovetail import accounting
from dovetail.accounting import gaussian, subjects
from dovetail.accounting.published import subdp
from dovetail.events import Everyone, Gaussian, Round, SampledSubject
from dovetail.papers._table import Row, Table
from dovetail.statements import Neighbors

__all__ = ["table"]

_DELTA = 1e-5


def table(*, quick: bool) -> Table:
    """Every protocol at r = 1, 2, 5; `quick` is CentralSubDP at r = 2."""
    rows = [row for spread in (1, 2, 5) for row in _rows(spread)]
    rows += [
        Row(name="every writer a user, DP-FL", preset="subdp-writers"),
        Row(name="every writer a user, split-and-mix (no trusted party)", preset="subdp-writers-untrusted"),
    ]
    if quick:
        rows = [row for row in rows if row.name == "r = 2, central_sub"]
    return Table(title="SubDP (Marathe, Kanani 2022): first measurements", rows=tuple(rows), recomputed=_figures)


def _rows(spread: int) -> list[Row]:
    over = ("task.spread", spread)
    capped: list[tuple[str, Any]] = [over, ("protocol.users_per_subject", spread)]

    def row(name: str, preset: str, overrides: list[tuple[str, Any]], note: str = "") -> Row:
        return Row(name=f"r = {spread}, {name}", preset=preset, overrides=tuple(overrides), note=note)

    return [
        row(
            "item-level DP-FL",
            "subdp-item",
            [over],
            note="(4, 1e-5) for one item; what a writer gets is in the last column",
        ),
        row("central_sub", "subdp-central", capped),
        row(
            "central_sub, Z of the batch (as published)",
            "subdp-central",
            [*capped, ("protocol.adaptive_z", True), ("protocol.sampling_rate", 0.01)],
            note="the noise follows the data and tells of it: nothing is certified",
        ),
        row("local_sub", "subdp-local", [*capped, ("protocol.items_per_user", -(-80 // spread))]),
        row("user-level DP-FL", "subdp-user", [over]),
        row("user-level LDP", "subdp-user", [over, ("protocol", {"name": "ldp_fl", "clip_norm": 0.1}), _REPLACE]),
    ]


_REPLACE = ("privacy.neighbors", "replace-one")


def _figures() -> list[str]:
    """What the paper's accounting misses, recomputed."""
    item = {"std": 0.96, "clip_norm": 1.0, "prob_item": 0.01}
    alone = {
        items: subjects.eps(SampledSubject(items=items, **item), rounds=1000, delta=_DELTA).eps  # type: ignore[arg-type]
        for items in (1, 2, 5, 10)
    }
    first, shown = (
        {
            items: subjects.eps(
                SampledSubject(items=items, std=0.96, clip_norm=1.0, prob_item=0.1, prob_user=0.1, alone=hidden),
                rounds=1000,
                delta=_DELTA,
            ).eps
            for items in (2, 5)
        }
        for hidden in (True, False)
    )
    one = Gaussian(std=1.0, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)
    spanned = {users: gaussian.eps_of(subjects.spanning(one, users=users).mu, delta=_DELTA) for users in (1, 2, 5, 10)}
    recipe = subdp.noise_scale(eps=4.0, delta=_DELTA, group=2, prob=0.01, steps=1000).value
    event = SampledSubject(items=131, std=recipe, clip_norm=1.0, prob_item=0.01)
    true = accounting.bound([Round(mechanism=event, participation=Everyone())] * 1000, delta=_DELTA).eps
    return [
        "Recomputed, all at delta 1e-5 and for adding or removing one subject:",
        f"- q .01, T 1000, noise .96, items sampled alone: {_said(alone, 'items')}",
        f"- users first (q .1), then items (q .1), at users with nobody else's records: {_said(first, 'items')}; "
        f"at users whose other records show that they were drawn: {_said(shown, 'items')}",
        f"- noise of every user apart, mu 1: {_said(spanned, 'users')}",
        f"- the paper's recipe for (4, 1e-5) where a batch holds 2 items of a subject (q .01, T 1000): noise "
        f"{recipe:.3g}; a subject with 131 items gets eps {true:.4g}",
    ]


def _said(values: dict[int, float], unit: str) -> str:
    return ", ".join(f"{count} {unit} eps {eps:.4g}" for count, eps in values.items())
