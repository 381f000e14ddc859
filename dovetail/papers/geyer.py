"""Geyer, Klein, Nabi (2017), Table 1: client-level privacy, eps 8, training until delta would be exceeded.

MNIST by two shards a client, 600 records each, an MLP of 784-200-200-10; the paper prints neither model nor local
training nor clip norm, so these were searched (see the presets). Each K is run with a fixed clip norm, with the private
quantile, with the paper's median (nothing certified), and with m_t rising threefold while sigma_t^2/m_t is held, at the
same budget and the same uploads.
"""

from __future__ import annotations

import jax

from dovetail.accounting.published import geyer
from dovetail.papers._table import Row, Table

__all__ = ["table"]

_PRINTED = {
    100: {"accuracy": 0.78, "rounds": 11, "uploads": 550},
    1000: {"accuracy": 0.92, "rounds": 54, "uploads": 11880},
    10000: {"accuracy": 0.96, "rounds": 412, "uploads": 209500},
}
_SIZES = {100: (25, 75), 1000: (110, 330), 10000: (254, 762)}
_DELTAS = {100: 1e-3, 1000: 1e-5, 10000: 1e-6}
_LONG = "it takes an hour or more without an accelerator"


def table(*, quick: bool) -> Table:
    """Table 1 and its variants; `quick` is K = 100 with the fixed norm and the median."""
    rows = [row for clients in _PRINTED for row in _rows(clients)]
    if quick:
        rows = [row for row in rows if row.name in ("K = 100, fixed clip", "K = 100, median (as published)")]
    else:
        rows.append(
            Row(
                name="K = 100, non-private",
                preset="geyer-100",
                overrides=(
                    ("protocol", {"name": "fedavg"}),
                    ("cohort", {"kind": "everyone", "rounds": 380}),
                    ("privacy", {"delta": 1e-3, "neighbors": "add-remove"}),
                ),
                printed={"accuracy": 0.97, "rounds": 380, "uploads": 38000},
                not_here=_away(),
            )
        )
    return Table(title="Geyer et al. 2017, Table 1", rows=tuple(rows), recomputed=_noise_multipliers)


def _away() -> str | None:
    return _LONG if jax.default_backend() == "cpu" else None


def _rows(clients: int) -> list[Row]:
    preset, printed = f"geyer-{clients}", _PRINTED[clients]
    away = _away() if clients == 10000 else None
    first, last = _SIZES[clients]
    rounds = int(printed["rounds"])
    private = {"delta": _DELTAS[clients], "neighbors": "add-remove"}

    def row(name: str, overrides: list[tuple[str, object]], note: str = "") -> Row:
        return Row(
            name=f"K = {clients}, {name}",
            preset=preset,
            overrides=tuple(overrides),
            printed=printed,
            not_here=away,
            note=note,
        )

    return [
        row("fixed clip", []),
        row(
            "private quantile",
            [("protocol", {"name": "dp_fl", "clip": "adaptive", "clip_norm": 1.0}), ("cohort.rounds", rounds)],
        ),
        row(
            "median (as published)",
            [("protocol.clip", "median"), ("cohort.rounds", rounds), ("privacy", private)],
            note="the noise is scaled to the un-noised median, which it tells: nothing is certified",
        ),
        row(
            "rising m_t",
            [
                ("protocol", {"name": "dp_fl", "clip": 1.0, "schedule": "held"}),
                ("cohort", {"kind": "poisson", "size": first, "size_end": last, "rounds": rounds}),
            ],
        ),
    ]


def _noise_multipliers() -> list[str]:
    """The noise that exhausts eps 8 at the printed rounds and uploads, by three accountants."""
    lines = ["Noise multipliers that exhaust (8, delta) at the printed rounds and uploads, Poisson, add-remove:"]
    for clients, printed in _PRINTED.items():
        rounds = int(printed["rounds"])
        prob = printed["uploads"] / rounds / clients
        found = {
            name: geyer.noise_multiplier(
                prob=prob, rounds=rounds, eps=8.0, delta=_DELTAS[clients], accountant=name
            ).value
            for name in ("privacy-loss", "renyi", "moments")
        }
        text = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        lines.append(f"- K = {clients}, delta {_DELTAS[clients]:g}, q {prob:.4g}, {rounds} rounds: {text}")
    return lines
