"""The fleet against the simulation: the same protocol, rounds and clients; do they learn as much?

Each of five times the digits are dealt anew to 20 users; the fleet trains as processes over TLS, the simulation by
the engine of `dovetail run`, from the same config. The simulation's noise follows from the run's number, the fleet's is
fresh, so accuracies differ from run to run: the two means should differ by less than two standard errors of their
difference, which five runs each that are alike miss about one time in twelve. Rounds, steps and noise were chosen by
simulation alone, so that accuracy is above 80 % and varies by several of the 360 test records.

Noise is most of what moves these models, and how far it does varies little from run to run: the distance between first
and last model shows differences of a few percent that accuracies hide.
"""

import argparse
import contextlib
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail import experiment
from dovetail.experiment.config import CohortConfig
from dovetail.parties.demo import demo_config
from dovetail.parties.deployment import set_up
from dovetail.parties.fleet import Fleet

MEASURES = ("accuracy", "distance")
ROUNDS = {"privunit": 10, "ss_topk": 10, "split_and_mix": 3}
SETTINGS = {
    "privunit": ["server.learning_rate=0.3"],
    "ss_topk": ["server.learning_rate=0.3"],
    "split_and_mix": ["server.learning_rate=1.0", "protocol.noise_multiplier=1.0"],
}


class Trained(NamedTuple):
    """How a training ended."""

    accuracy: float
    distance: float


def one_run(protocol: str, *, clients: int, rounds: int, seed: int, processes: int) -> tuple[Trained, Trained]:
    """A training of the fleet, and one of the simulation."""
    config = demo_config(protocol, clients=clients, overrides=[f"seed={seed}", *SETTINGS[protocol]])
    with tempfile.TemporaryDirectory(prefix="dovetail-fleet-") as folder:
        deployment = set_up(Path(folder) / "fleet", config, rounds=rounds, clients=clients, round_seconds=600)
        with Fleet(deployment) as fleet:
            fleet.start(processes=processes)
            history = fleet.follow(seconds=1800)["history"]
            with contextlib.closing(fleet.analyzer()) as link:
                moved = link.model(rounds) - link.model(0)
        if [one["outcome"] for one in history] != ["released"] * rounds:
            raise RuntimeError(f"expected {rounds} released rounds, got {history}")
    simulated = msgspec.structs.replace(config, cohort=CohortConfig(kind="everyone", rounds=rounds))
    plan = experiment.prepare(simulated)
    training = plan.engine.start()
    first = np.array(training.params)
    for index in range(rounds):
        training = plan.step(training, index, np.arange(clients))
    return (
        Trained(history[-1]["accuracy"], float(np.linalg.norm(moved))),
        Trained(plan.engine.accuracy(training), float(np.linalg.norm(np.asarray(training.params) - first))),
    )


def compare(
    protocol: str, *, clients: int, runs: int, first: int, processes: int, console: Console
) -> list[dict[str, Any]]:
    """One row a measure."""
    pairs = []
    for seed in range(first, first + runs):
        pair = one_run(protocol, clients=clients, rounds=ROUNDS[protocol], seed=seed, processes=processes)
        shown = ", ".join(
            f"{side} {one.accuracy:.4f} (distance {one.distance:.3f})"
            for side, one in zip(("fleet", "simulation"), pair, strict=True)
        )
        console.print(f"{protocol}, run {seed}: {shown}", highlight=False)
        pairs.append(pair)
    return [
        {
            "protocol": protocol,
            "rounds": ROUNDS[protocol],
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
    parser.add_argument("--protocols", nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    rows = [
        row
        for name in arguments.protocols
        for row in compare(
            name,
            clients=arguments.clients,
            runs=arguments.runs,
            first=arguments.first_seed,
            processes=arguments.processes,
            console=console,
        )
    ]
    if arguments.json:
        print(json.dumps({"benchmark": "fleet", "clients": arguments.clients, "rows": rows}))
        return
    table = Table("protocol", "rounds", "mean", "fleet", "simulation", "standard errors apart (below 2)")
    for row in rows:
        means, apart = row["means"], row["standard_errors_apart"]
        table.add_row(
            row["protocol"], str(row["rounds"]), row["measure"], f"{means[0]:.4f}", f"{means[1]:.4f}", f"{apart:.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
