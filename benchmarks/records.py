"""Presets trained over several seeds, with the protocol's own noise: accuracy, statement and seconds of each.

    python benchmarks/records.py headline mnist-untrusted-1 --seeds 3 --out rows.jsonl

`--data` takes the images from NAME.npz in a folder, as benchmarks/tuning.py packs them: for machines without a network.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import tuning

from dovetail.data import Dataset, Task
from dovetail.experiment import config, prepare, run


def task_of_packed(home: Path, name: str) -> Task:
    """The task whose images were packed."""

    def load(*, folder: Path | None) -> Dataset:
        return tuning.load(home, name)

    return Task(name=name, load=load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="rows are appended to this file, one JSON object each")
    parser.add_argument("--data", type=Path, help="a folder of packed images")
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        for preset in arguments.presets:
            settings = config.read(preset, [("seed", seed)])
            start = time.perf_counter()
            plan = prepare(
                settings, task=task_of_packed(arguments.data, settings.task.name) if arguments.data else None
            )
            ready = time.perf_counter()
            result = run(plan, evaluate_every=settings.cohort.rounds)
            row = {
                "preset": preset,
                "seed": seed,
                "accuracy": result.accuracy,
                "auc": getattr(result, "auc", None),
                "eps": result.statement.eps,
                "delta": result.statement.delta,
                "neighbors": result.statement.neighbors.value,
                "dim": plan.engine.dim,
                "seconds to prepare": round(ready - start, 1),
                "seconds to train": round(time.perf_counter() - ready, 1),
                "peak memory, GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
            }
            with arguments.out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
