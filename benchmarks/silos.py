"""Five silos, one of which drops out in every round, with the noise of aggregators, against a curator of that noise.

Adult's training records are dealt to five users. In every round another one of them uploads to one aggregator alone, as
if its connection had died; the round counts the other four, and none is void. Clients, aggregators and analyzer are the
deployed ones, without the network. Beside it a curator that adds up the same four clipped updates and draws Gaussian
noise of the same standard deviation. Noise and steps are round numbers that were not tuned; with so few users the
statement per user is weak, and is printed.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.experiment.config import parse
from dovetail.mechanisms.gaussian import clip_l2
from dovetail.parties.aggregator.party import Aggregator
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.task import TrainingTask, sign
from dovetail.parties.common.wire import decode_vector
from dovetail.parties.federation import Federation, load_federation
from dovetail.parties.fleet import lenient_policy
from dovetail.parties.user.client import Client

SILOS, CLIP, NOISE = 5, 1.0, 1.0


def config_of(task: str) -> Any:
    return parse(
        {
            "diagnostics": False,
            "task": {"name": task, "model": "logistic", "partition": "iid", "users": SILOS},
            "cohort": {"kind": "everyone"},
            "client": {"update": "fedavg", "epochs": 1, "batch": 32, "learning_rate": 0.1},
            "server": {"optimizer": "sgd", "learning_rate": 0.5, "average": 0.5},
            "protocol": {"name": "secagg", "clip_norm": CLIP, "noise_multiplier": NOISE, "noise": "aggregators"},
            "privacy": {"delta": 1e-5},
        }
    )


class Straight:
    """The analyzer as an aggregator sees it, without a network between them."""

    def __init__(self, analyzer: Analyzer, index: int) -> None:
        self._analyzer = analyzer
        self._index = index

    def send_part(self, round: int, batch: bytes, number: int, part: bytes) -> None:
        self._analyzer.count_part(self._index, round, batch, number, part)

    def report_closed(self, round: int, closed: Any) -> None:
        self._analyzer.note_closed(self._index, round, closed)


def run_deployed(folder: Path, learned: Federation, rounds: int) -> dict[str, Any]:
    """What the analyzer says after so many rounds, each with a silo that drops out halfway."""
    ring = KeyRing(folder / "analyzer" / "keys", "seal")
    pairs = [ServicePairs.add(folder / f"aggregator-{i}" / "keys") for i in range(2)]
    task = TrainingTask(
        name="silos",
        protocol="secagg",
        settings=learned.config.protocol_settings,
        dim=learned.dim,
        rounds=rounds,
        min_clients=2,
        max_clients=SILOS,
        round_seconds=60.0,
        delta=1e-5,
        analyzer=ring.add().public,
        aggregators=tuple(pair.public for pair in pairs),
    )
    signed = sign(task, signer := KeyPair.generate("sign"))
    common = {"signed": signed, "signer": signer.public.key_id}
    parties = [Aggregator(folder / f"aggregator-{i}", **common, index=i, keys=pair) for i, pair in enumerate(pairs)]
    analyzer = Analyzer(folder / "analyzer", **common, keys=ring, learning=learned.learning(), workers=1)
    policy = lenient_policy(signed)
    silos = [Client(folder / f"silo-{i}", policy=policy, key=KeyPair.generate("sign")) for i in range(SILOS)]
    trains = [learned.train(i) for i in range(SILOS)]
    for round in range(1, rounds + 1):
        for party in parties:
            party.store.open_round(round, head=analyzer.status().head, closes=0.0)
        model = decode_vector(analyzer.model(round - 1), learned.dim)
        for number, silo in enumerate(silos):
            envelope = silo.report(signed, round, trains[number](model))
            for party in parties[: 1 if number == round % SILOS else 2]:
                party.accept(round, client=envelope.sender, upload=envelope.uploads[party.index])
        rosters = [party.store.freeze(round) for party in parties]
        for index, party in enumerate(parties):
            party.close_round(round, [rosters[1 - index]])
            party.forward(round, Straight(analyzer, index))
    privacy = analyzer.privacy()
    statement = certify_task(task, rounds)[0]
    for party in parties:
        party.close()
    analyzer.close()
    return {"history": privacy["history"], "accuracy": privacy["history"][-1]["accuracy"], "eps": statement.eps}


def train_by_curator(learned: Federation, rounds: int, seed: int) -> float:
    """The accuracy with a curator: the same silos, dropouts and noise."""
    rng = np.random.default_rng(seed)
    learning = learned.learning()
    server = learning.server.for_rounds(rounds, moments=None, noise_std=None)
    params = jax.numpy.asarray(learning.initial)
    state = server.init(params)
    std = NOISE * CLIP * np.sqrt(2)
    for round in range(1, rounds + 1):
        present = [i for i in range(SILOS) if i != round % SILOS]
        total = sum(clip_l2(learned.train(i)(np.asarray(params)).astype(np.float64), CLIP) for i in present)
        mean = (total + rng.normal(0, std, learned.dim)) / SILOS
        params, state = server.step(params, state, jax.numpy.asarray(mean, jax.numpy.float32))
    score = learning.evaluate or (lambda model: float("nan"))
    return score(np.asarray(server.model_to_publish(params, state)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--task", default="adult")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    learned = load_federation(config_of(arguments.task))
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    runs = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            runs.append(run_deployed(Path(folder), learned, arguments.rounds))
    void = sum(entry["outcome"] != "released" for run in runs for entry in run["history"])
    results = {
        "task": arguments.task,
        "rounds": arguments.rounds,
        "void": void,
        "eps_per_silo": runs[0]["eps"],
        "deployed": [run["accuracy"] for run in runs],
        "curator": [train_by_curator(learned, arguments.rounds, seed) for seed in range(arguments.runs)],
    }
    if arguments.json:
        print(json.dumps({"benchmark": "silos", **results}))
        return
    table = Table("mean accuracy", "five silos, two aggregators", "a curator with the same noise", "void rounds")
    means = [f"{100 * statistics.mean(results[name]):.2f} %" for name in ("deployed", "curator")]
    table.add_row(f"{arguments.task}, {arguments.rounds} rounds", *means, str(void))
    Console().print(table)
    Console().print(f"certified eps per silo: {runs[0]['eps']:.4g} at delta 1e-5", highlight=False)


if __name__ == "__main__":
    main()
