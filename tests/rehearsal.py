"""A runner that prepares no data and trains nothing: it checks the configs that a paper asks for, and keeps them."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

from dovetail.audit import LowerBound
from dovetail.experiment.config import Config, read
from dovetail.guarantee import quotes
from dovetail.papers import runner as runners
from dovetail.papers.exhibits import Part, Row, write

EPS_ATTACKED = 0.01


class Rehearsal(runners.Runner):
    """Every training takes 60 rounds and gets half of the test records right."""

    def __init__(self, out: Path, *, quick: bool, num_users: int) -> None:
        super().__init__(out, quick=quick, seeds=1)
        self.num_users = num_users
        self.asked: list[Config] = []

    def train(self, preset: str, overrides: runners.Overrides = (), *, label: str = "") -> Any:
        config = read(preset, overrides)
        settings = config.protocol_settings
        plan = quotes.Terms(num_users=self.num_users, dim=7850, delta=config.privacy.delta, settings=settings)
        quotes.settle_protocol(config.protocol["name"], plan)
        self.asked.append(config)
        result = types.SimpleNamespace(
            quote=types.SimpleNamespace(claimed=None),
            statement=None,
            rounds=60,
            uploads=60_000,
            accuracy=0.5,
            metrics={"accuracy": 0.5},
        )
        return runners.SeedRuns(
            results=(result,),  # type: ignore[arg-type]
            accuracy=((30.0, 0.4), (60.0, 0.5)),
            diagnostics={},
            config="configs/one.toml",
            rounds=(),
            seconds=1.0,
        )

    def audit(self, protocol: str, plan: quotes.Terms) -> LowerBound:
        return LowerBound(eps=EPS_ATTACKED, delta=plan.delta, attack="none: a rehearsal")


def well_formed(part: Part, rows: list[Row], out: Path) -> None:
    """Its files are written, its figures have lines with points, and no two lines share a name."""
    write(part, rows, out, run={}, finished=True)
    figures = part.figures(rows)
    assert figures
    for figure in figures:
        names = [line.name for line in figure.lines]
        assert names and len(set(names)) == len(names)
        assert all(any(y is not None for y in line.y) for line in figure.lines)
