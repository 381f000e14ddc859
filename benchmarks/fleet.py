"""The fleet against the simulation: the same protocol, rounds and clients; do they learn as much?

Each of five times the digits are dealt anew to 20 users; the fleet trains as processes over TLS, the simulation by
the engine of `dovetail run`, from the same config. Noise is fresh in both, so accuracies differ from run to run: the
two means should differ by less than two standard errors of their difference. Rounds, steps and noise were chosen by
simulation alone, so that accuracy is above 80 % and varies by several of the 360 test records.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail import experiment
from dovetail.config import CohortConfig
from dovetail.parties.demo import demo_config
from dovetail.parties.fleet import Fleet, set_up

ROUNDS = {"privunit": 10, "ss_topk": 10, "split_and_mix": 3}
SETTINGS = {
    "privunit": ["server.learning_rate=0.3"],
    "ss_topk": ["server.learning_rate=0.3"],
    "split_and_mix": ["server.learning_rate=1.0", "protocol.noise_multiplier=1.0"],
}


def one_run(protocol: str, *, clients: int, rounds: int, seed: int, processes: int) -> tuple[float, float]:
    """The accuracy of the fleet, and of the simulation."""
    config = demo_config(protocol, clients=clients, overrides=[f"seed={seed}", *SETTINGS[protocol]])
    with tempfile.TemporaryDirectory(prefix="dovetail-fleet-") as folder:
        ground = set_up(Path(folder) / "fleet", config, rounds=rounds, clients=clients, round_seconds=600)
        with Fleet(ground) as fleet:
            fleet.start(processes=processes)
            history = fleet.follow(seconds=1800)["history"]
        if [one["outcome"] for one in history] != ["released"] * rounds:
            raise RuntimeError(f"expected {rounds} released rounds, got {history}")
    simulated = msgspec.structs.replace(config, cohort=CohortConfig(kind="everyone", rounds=rounds))
    plan = experiment.prepare(simulated)
    training = plan.engine.start()
    for index in range(rounds):
        training = plan.step(training, index, np.arange(clients))
    return history[-1]["accuracy"], plan.engine.accuracy(training)


def compare(
    protocol: str, *, clients: int, runs: int, first: int, processes: int, console: Console
) -> dict[str, object]:
    fleet, simulation = [], []
    for seed in range(first, first + runs):
        real, simulated = one_run(protocol, clients=clients, rounds=ROUNDS[protocol], seed=seed, processes=processes)
        console.print(f"{protocol}, run {seed}: fleet {real:.4f}, simulation {simulated:.4f}", highlight=False)
        fleet.append(real)
        simulation.append(simulated)
    error = (statistics.variance(fleet) / runs + statistics.variance(simulation) / runs) ** 0.5
    means = statistics.mean(fleet), statistics.mean(simulation)
    return {
        "protocol": protocol,
        "rounds": ROUNDS[protocol],
        "fleet": fleet,
        "simulation": simulation,
        "means": means,
        "standard_errors_apart": abs(means[0] - means[1]) / error if error else 0.0,
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
        compare(
            name,
            clients=arguments.clients,
            runs=arguments.runs,
            first=arguments.first_seed,
            processes=arguments.processes,
            console=console,
        )
        for name in arguments.protocols
    ]
    if arguments.json:
        print(json.dumps({"benchmark": "fleet", "clients": arguments.clients, "rows": rows}))
        return
    table = Table("protocol", "rounds", "fleet, mean accuracy", "simulation", "standard errors apart (below 2)")
    for row in rows:
        means = row["means"]
        assert isinstance(means, tuple)  # noqa: S101
        table.add_row(
            str(row["protocol"]), str(row["rounds"]), f"{means[0]:.4f}", f"{means[1]:.4f}",
            f"{row['standard_errors_apart']:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
