"""The workloads every peer runs, in one place: sizes, hyper-parameters, synthetic data and the command line.

One round: every client starts from the global model, does one local epoch of plain SGD, its model delta is clipped
to an L2 norm of CLIP, the deltas are summed, Gaussian noise of standard deviation NOISE * CLIP is added to the sum,
and the average is applied to the global model. Needs NumPy only.
"""

import argparse
import json
import pathlib
import resource
import sys
import zipfile
from collections.abc import Collection, Iterator

import numpy as np

FEATURES = 784
CLASSES = 10
LEARNING_RATE = 0.1
CLIP = 1.0
NOISE = 1.0
SEED = 20240

# (clients, samples per client) when the command line does not say.
SIZES = {"logistic": (1000, 60), "cnn": (10, 600)}

# logistic: dense 784 -> 10 with bias: 7850 parameters.
# cnn, on 1 x 28 x 28 images, all layers with bias, 113674 parameters in total:
#   conv 5x5, 1 -> 16, stride 1, no padding, ReLU     416   (28 -> 24)
#   max pool 2x2, stride 2                                  (24 -> 12)
#   conv 5x5, 16 -> 32, stride 1, no padding, ReLU  12832   (12 -> 8)
#   max pool 2x2, stride 2                                  (8 -> 4), flattened to 32 * 4 * 4 = 512
#   dense 512 -> 192, ReLU                          98496
#   dense 192 -> 10, softmax cross-entropy           1930
PARAMETERS = {"logistic": 7850, "cnn": 113674}

Client = tuple[np.ndarray, np.ndarray]


def options(description: str, *, workloads: Collection[str]) -> argparse.Namespace:
    """Parse the command line that all peer scripts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", choices=workloads, default="logistic")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=pathlib.Path, help=".npz with `features` and `labels`, clients first")
    parsed = parser.parse_args()
    clients, samples = SIZES[parsed.workload]
    parsed.clients = parsed.clients or clients
    parsed.samples = parsed.samples or samples
    return parsed


def clients(*, count: int, samples: int, data: pathlib.Path | None = None) -> Iterator[Client]:
    """Yield the (features, labels) of clients 0 to count - 1, one at a time so that a worker can keep its share only.

    The synthetic arrays are those of `rng.random((count, samples, 784), dtype=float32)` followed by
    `rng.integers(10, size=(count, samples))`, each from its own generator: `default_rng([SEED, 0])` and
    `default_rng([SEED, 1])`.
    """
    if data is None:
        pixels, classes = np.random.default_rng([SEED, 0]), np.random.default_rng([SEED, 1])
        for _ in range(count):
            yield pixels.random((samples, FEATURES), dtype=np.float32), classes.integers(CLASSES, size=samples)
        return
    for x, y in zip(_rows(data, "features", count), _rows(data, "labels", count), strict=True):
        if x.size != samples * FEATURES or y.shape != (samples,):
            raise ValueError(f"{data.name}: expected {samples} samples per client, got {x.shape} and {y.shape}")
        yield x.astype(np.float32).reshape(samples, FEATURES), y.astype(np.int64)


def _rows(path: pathlib.Path, name: str, count: int) -> Iterator[np.ndarray]:
    """Yield the first rows (first axis) of one array of an .npz without holding the whole array in memory."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
        np.lib.format.read_magic(member)
        shape, columns_first, dtype = np.lib.format.read_array_header_1_0(member)
        if columns_first or shape[0] < count:
            raise ValueError(f"{path.name}: {name} must be in C order and hold {count} clients, its shape is {shape}")
        size = dtype.itemsize * int(np.prod(shape[1:]))
        for _ in range(count):
            yield np.frombuffer(member.read(size), dtype).reshape(shape[1:])


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def children_peak_rss_mb() -> float:
    """Return the sum of the peak resident memory of this process's children in MiB."""
    threads = pathlib.Path("/proc/self/task")
    children = [int(pid) for path in threads.glob("*/children") for pid in path.read_text().split()]
    lines = [line for pid in children for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM"))


def report(*, engine: str, workers: int, workload: str, seconds: list[float], peak_mb: float) -> None:
    """Print the one JSON line that is a peer's result."""
    result = {
        "engine": engine,
        "workers": workers,
        "workload": workload,
        "seconds_per_round": [round(value, 4) for value in seconds],
        "peak_rss_mb": round(peak_mb, 1),
    }
    print(json.dumps(result), flush=True)
