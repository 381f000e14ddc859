"""The workloads of `dovetail bench own`: models that users bring, in one place for every engine. Needs NumPy only.

Per record: the batch's gradients are clipped one by one to an L2 norm of CLIP and summed; no noise, no optimiser.
Per client: a round of `workload`: local SGD, clip, sum, noise, average; log-normal sizes are drawn once, from a fixed
seed, and capped at MOST records.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

import numpy as np
import workload

BATCH = 256  # records of a batch, per record
CLIP = workload.CLIP
MOST = 200  # records of the largest client
SPREAD = 1.0  # of the logarithm of a size


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and who trains it.

    Arguments:
        parameters: how many the model has: that they are the same for every engine is checked.
        shape: of a record; token sequences hold whole numbers below `vocabulary`.
        clients: per record, no clients but records.
        records: of each client; of unequal ones, their mean.
    """

    kind: Literal["record", "client"]
    parameters: int
    shape: tuple[int, ...]
    clients: int = BATCH
    records: int = 1
    unequal: bool = False
    classes: int = 10
    vocabulary: int = 0
    batch: int = 10


SEQUENCE, VOCABULARY = 20, 64
WORKLOADS = {
    "record-mlp": Workload("record", 203_530, (784,)),
    "record-cnn": Workload("record", 113_674, (1, 28, 28)),
    "resnet": Workload("client", 77_850, (3, 32, 32), clients=50, records=100),
    "lstm": Workload("client", 38_592, (SEQUENCE,), 200, 25, unequal=True, classes=64, vocabulary=VOCABULARY),
    "transformer": Workload("client", 76_480, (SEQUENCE,), 200, 25, unequal=True, classes=64, vocabulary=VOCABULARY),
    "tabular": Workload("client", 8_610, (75,), clients=5_000, records=20),
    "logistic": Workload("client", 7_850, (784,), clients=1_000, records=60),
    "cnn": Workload("client", 113_674, (1, 28, 28), clients=10, records=600),
}


def sizes(chosen: Workload, *, unequal: bool | None = None) -> np.ndarray:
    """How many records each client has; as many in all, up to rounding, with unequal clients as with equal ones."""
    if not (chosen.unequal if unequal is None else unequal):
        return np.full(chosen.clients, chosen.records)
    drawn = np.random.default_rng([workload.SEED, 3]).lognormal(0, SPREAD, chosen.clients)
    scaled = drawn * chosen.records / drawn.mean()
    return np.clip(scaled.round(), 1, MOST).astype(int)


def data(chosen: Workload, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (records, ...), float32, and labels (records,), int64, of all clients, one after the other."""
    rng = np.random.default_rng([workload.SEED, 4])
    shape = (int(np.sum(counts)), *chosen.shape)
    tokens = chosen.vocabulary
    inputs = rng.integers(tokens, size=shape).astype(np.float32) if tokens else rng.random(shape, dtype=np.float32)
    return inputs, rng.integers(chosen.classes, size=len(inputs))


LAYERS = {
    "record-mlp": ((256, 784), (10, 256)),
    "record-cnn": ((16, 1, 5, 5), (32, 16, 5, 5), (192, 512), (10, 192)),
}


def layers(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The weights and biases that every engine starts from, per record; weights in PyTorch's layout, (out, in, ...)."""
    rng = np.random.default_rng([workload.SEED, 5])
    found = []
    for shape in LAYERS[name]:
        weight = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        found.append((weight.astype(np.float32), rng.normal(0, 0.1, shape[0]).astype(np.float32)))
    return found


def options(description: str | None, *, variants: Sequence[str] = ("",)) -> argparse.Namespace:
    """Parse the command line that all scripts of this benchmark share; `variants` are an engine's own methods."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--method", choices=variants, default=variants[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--users", type=int, help="another number of clients")
    parser.add_argument("--sizes", choices=("equal", "log-normal"), help="other sizes of clients")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> Workload:
    """The workload that the command line asks for."""
    asked = WORKLOADS[arguments.workload]
    unequal = asked.unequal if arguments.sizes is None else arguments.sizes == "log-normal"
    return dataclasses.replace(asked, clients=arguments.users or asked.clients, unequal=unequal)


def report(
    arguments: argparse.Namespace,
    *,
    engine: str,
    seconds: Sequence[float],
    records: int,
    peak_mb: float,
    sums: Sequence[float] = (),
) -> None:
    """Print the one JSON line that is an engine's result.

    Arguments:
        seconds: of each round or batch that counts.
        records: how many there are in a round.
        sums: per record, the norm of the clipped sum for each parameter, sorted: the same for every engine.
    """
    result = {
        "engine": engine,
        "method": arguments.method,
        "workload": arguments.workload,
        "seconds": [round(value, 6) for value in seconds],
        "records": records,
        "norms": sorted(float(value) for value in sums),
        "peak_rss_mb": round(peak_mb, 1),
    }
    print(json.dumps(result), flush=True)
