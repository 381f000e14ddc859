"""The fleet against the simulation: the same protocol, rounds and clients; do they learn as much?

Each of five times the digits are dealt anew to 20 users; in the case of mnist-untrusted, 1000 users hold an image of
MNIST each. The fleet trains as processes over TLS, the simulation by the engine of `dovetail run`, from the same
config. The simulation's noise follows from the run's number, the fleet's is fresh, so accuracies differ from run to
run: the two means should differ by less than two standard errors of their difference, which five runs each that are
alike miss about one time in twelve. Rounds, steps and noise were chosen by simulation alone, so that accuracy is above
80 % and varies by several of the 360 test records.

Noise is most of what moves these models, and how far it does varies little from run to run: the distance between first
and last model shows differences of a few percent that accuracies hide.
"""

import argparse
import contextlib
import json
import math
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail import experiment
from dovetail.experiment import config as configs
from dovetail.experiment.config import CohortConfig, Config
from dovetail.parties.demo import demo_config
from dovetail.parties.fleet import Fleet, set_up_fleet
from dovetail.randomness import Randomness

MEASURES = ("accuracy", "distance")


class Case(NamedTuple):
    """What is trained: a protocol on the digits, or a preset, and for how long."""

    rounds: int
    clients: int = 20
    settings: tuple[str, ...] = ()
    preset: str | None = None


CASES = {
    "privunit": Case(10, settings=("server.learning_rate=0.3",)),
    "ss_topk": Case(10, settings=("server.learning_rate=0.3",)),
    "split_and_mix": Case(3, settings=("server.learning_rate=1.0", "protocol.noise_multiplier=1.0")),
    "secagg": Case(3, settings=("server.learning_rate=1.0", "protocol.noise_multiplier=1.0")),
    "mnist-untrusted": Case(3, clients=1000, preset="mnist-untrusted"),
    "apes": Case(3, clients=1000, settings=("task.users=1000",), preset="apes"),
}


class Trained(NamedTuple):
    """How a training ended."""

    accuracy: float
    distance: float


def one_run(name: str, *, seed: int, processes: int) -> tuple[Trained, Trained]:
    """A training of the fleet, and one of the simulation with the noise that the fleet was calibrated to."""
    case = CASES[name]
    overrides = [f"seed={seed}", *case.settings]
    if case.preset is None:
        config = demo_config(name, clients=case.clients, overrides=overrides)
    else:
        config = configs.read(case.preset, [configs.parse_override(text) for text in overrides])
    with tempfile.TemporaryDirectory(prefix="dovetail-fleet-") as folder:
        fleet_of = {"rounds": case.rounds, "clients": case.clients, "round_seconds": 600}
        deployment = set_up_fleet(Path(folder) / "fleet", config, **fleet_of)
        with Fleet(deployment) as fleet:
            fleet.start(processes=processes)
            history = fleet.wait_until_over(seconds=1800)["history"]
            with contextlib.closing(fleet.analyzer()) as link:
                moved = link.model(case.rounds) - link.model(0)
        if [entry["outcome"] for entry in history] != ["released"] * case.rounds:
            raise RuntimeError(f"expected {case.rounds} released rounds, got {history}")
        settings = deployment.task.settings
    return Trained(history[-1]["accuracy"], float(np.linalg.norm(moved))), simulate(config, case, settings)


def simulate(config: Config, case: Case, settings: Mapping[str, Any]) -> Trained:
    """The same users and rounds by the engine."""
    whole = config.task.users == case.clients
    who = {"kind": "everyone"} if whole else {"kind": "fixed", "size": case.clients}
    cohort = CohortConfig(rounds=case.rounds, **who)
    alike = {
        "cohort": cohort,
        "protocol": {"name": config.protocol["name"], **settings},
        "privacy": msgspec.structs.replace(config.privacy, eps=None),
    }
    plan = experiment.prepare(msgspec.structs.replace(config, **alike))
    plan = plan.with_randomness(Randomness.from_os(config.seed))
    training = plan.engine.start()
    first = _flat(plan.engine.model_arrays(training))
    for index in range(case.rounds):
        training = plan.step(training, index, np.arange(case.clients))
    moved = _flat(plan.engine.model_arrays(training)) - first
    return Trained(plan.engine.metrics(training)["accuracy"], float(np.linalg.norm(moved)))


def _flat(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays.values()])


def compare(name: str, *, runs: int, first: int, processes: int, console: Console) -> list[dict[str, Any]]:
    """One row a measure."""
    pairs = []
    for seed in range(first, first + runs):
        pair = one_run(name, seed=seed, processes=processes)
        shown = ", ".join(
            f"{side} {trained.accuracy:.4f} (distance {trained.distance:.3f})"
            for side, trained in zip(("fleet", "simulation"), pair, strict=True)
        )
        console.print(f"{name}, run {seed}: {shown}", highlight=False)
        pairs.append(pair)
    return [
        {
            "case": name,
            "rounds": CASES[name].rounds,
            "measure": measure,
            **_apart([getattr(fleet, measure) for fleet, _ in pairs], [getattr(sim, measure) for _, sim in pairs]),
        }
        for measure in MEASURES
    ]


def _apart(fleet: list[float], simulation: list[float]) -> dict[str, Any]:
    means = statistics.mean(fleet), statistics.mean(simulation)
    error = math.sqrt((statistics.variance(fleet) + statistics.variance(simulation)) / len(fleet))
    apart = abs(means[0] - means[1])
    return {
        "fleet": fleet,
        "simulation": simulation,
        "means": means,
        "standard_errors_apart": apart / error if error else (math.inf if apart else 0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    rows = [
        row
        for name in arguments.cases
        for row in compare(
            name,
            runs=arguments.runs,
            first=arguments.first_seed,
            processes=arguments.processes,
            console=console,
        )
    ]
    if arguments.json:
        print(json.dumps({"benchmark": "fleet", "rows": rows}))
        return
    table = Table("case", "rounds", "mean", "fleet", "simulation", "standard errors apart (below 2)")
    for row in rows:
        means = row["means"]
        apart = row["standard_errors_apart"]
        table.add_row(
            row["case"], str(row["rounds"]), row["measure"], f"{means[0]:.4f}", f"{means[1]:.4f}", f"{apart:.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
