"""Where a paper's experiments are run: configs are trained, each once for every seed, and protocols are attacked."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import audit, experiment, machine
from dovetail.audit import attacks
from dovetail.events import Round
from dovetail.experiment.config import parse, read, to_toml
from dovetail.experiment.folder import RunFolder
from dovetail.files import write_atomically
from dovetail.guarantee import quotes
from dovetail.papers.exhibits import Curve, Measurement, Row

__all__ = ["Overrides", "Runner", "SeedRuns"]

Overrides = Sequence[tuple[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedRuns:
    """The runs of one config: a result for each seed, and curves that are means over the seeds.

    `diagnostics` are curves by the diagnostic's name, `config` is the path of the config's file below the paper's
    folder, and `seconds` is what all seeds took. `rounds` are the rounds as they are certified, to be attacked; none
    where the analyzer sees less than they say, or the statement is about another unit than they are.
    """

    results: tuple[experiment.Result, ...]
    accuracy: Curve
    diagnostics: Mapping[str, Curve]
    config: str
    seconds: float
    rounds: tuple[Round, ...]

    @property
    def first(self) -> experiment.Result:
        """The result of the first seed; statements do not depend on the seed."""
        return self.results[0]

    @property
    def accuracies(self) -> Measurement:
        """Test accuracies, one a seed."""
        return Measurement(metric="accuracy", values=tuple(result.metrics["accuracy"] for result in self.results))


class Runner:
    """Trains configs and attacks protocols for one reproduction.

    Arguments:
        out: the folder of the paper, where configs are kept.
        quick: whether parts leave out what takes long.
        seeds: how often each config is trained.
        observe: called with what is computed next.

    Guarantees:
        The same config is trained once, however many parts ask for it.
        Every config that was trained lies in `out`/configs.
    """

    def __init__(
        self, out: Path, *, quick: bool, seeds: int, observe: Callable[[str], None] = lambda text: None
    ) -> None:
        self.out = out
        self.quick = quick
        self.seeds = seeds
        self.observe = observe
        self._trained: dict[str, SeedRuns] = {}

    @property
    def has_accelerator(self) -> bool:
        """Whether long trainings are worth starting here."""
        return machine.has_accelerator()

    def train(self, preset: str, overrides: Overrides = (), *, label: str = "") -> SeedRuns:
        """Train a preset with these overrides, once for every seed.

        Arguments:
            label: what the training is called in messages and in the name of its config's file.
        """
        config = read(preset, overrides)
        text = to_toml(config)
        if text not in self._trained:
            self._trained[text] = self._train_config(text, label or preset)
        return self._trained[text]

    def training_row(
        self,
        label: str,
        preset: str,
        overrides: Overrides = (),
        *,
        paper: Mapping[str, float] | None = None,
        attack: bool = False,
        **more: Any,
    ) -> Row:
        """The row of a training: its statements, its accuracy, its curve, and the best exact attack on all of it.

        Arguments:
            preset: the name of a preset, whose config is trained with `overrides`.
            paper: what the paper prints.
            attack: whether the training is attacked.
            more: other fields of the row.
        """
        trained = self.train(preset, overrides, label=label)
        first = trained.first
        attacked = attack and not first.statement.is_unbounded
        return Row(
            label=label,
            paper=paper or {},
            claimed=first.quote.claimed,
            certified=first.statement,
            audited=audit.attack_training(trained.rounds, delta=first.statement.delta) if attacked else None,
            ours=trained.accuracies,
            curve=trained.accuracy,
            extra={"rounds": first.rounds, "uploads": first.uploads, **more.pop("extra", {})},
            config=trained.config,
            seconds=trained.seconds,
            **more,
        )

    def best_exact_bound(self, protocol: str, terms: quotes.Terms) -> audit.LowerBound:
        """The best exact attack on a protocol at these parameters."""
        return audit.audit(protocol, terms, trials=0).bound

    def _train_config(self, text: str, label: str) -> SeedRuns:
        """Train a config, given as TOML, once for every seed, and keep it as a file."""
        results = []
        accuracies = []
        diagnoses = []
        begun = time.perf_counter()
        for seed in range(self.seeds):
            self.observe(label if self.seeds == 1 else f"{label}, seed {seed}")
            plan = experiment.prepare(parse({**tomllib.loads(text), "seed": seed, "noise": "seeded"}))
            with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
                results.append(experiment.run(plan, out=Path(folder) / "run"))
                lines = RunFolder(Path(folder) / "run")
                accuracies.append([(line["round"], line["accuracy"]) for line in lines.read_metrics()])
                diagnoses.append(lines.read_diagnostics())
        as_certified = plan.guarantee.target_unit is plan.guarantee.scope.unit and not attacks.shows_less_than_event(
            plan.sampler.protocol
        )
        names = diagnoses[0][0].keys() - {"round"} if diagnoses[0] else ()
        return SeedRuns(
            results=tuple(results),
            accuracy=_mean_curve(accuracies),
            diagnostics={
                name: _mean_curve([[(line["round"], line[name]) for line in lines] for lines in diagnoses])
                for name in names
            },
            config=self._keep_config(text, label),
            rounds=plan.guarantee.rounds()[: results[-1].rounds] if as_certified else (),
            seconds=time.perf_counter() - begun,
        )

    def _keep_config(self, text: str, label: str) -> str:
        """Write the config to a file that is named after its label; returns the path below the paper's folder."""
        folder = self.out / "configs"
        folder.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-")
        taken = {runs.config for runs in self._trained.values()}
        name = f"configs/{stem}.toml"
        for number in range(2, len(taken) + 3):
            if name not in taken:
                break
            name = f"configs/{stem}-{number}.toml"
        write_atomically(self.out / name, text.encode())
        return name


def _mean_curve(curves: Sequence[Sequence[tuple[float, float | None]]]) -> Curve:
    """The mean of curves, each (round, value) by round, at the rounds at which all of them have a value."""
    by_round = [{x: y for x, y in curve if y is not None} for curve in curves]
    shared = sorted(set.intersection(*(set(curve) for curve in by_round)))
    return tuple((float(x), float(np.mean([curve[x] for curve in by_round]))) for x in shared)
