"""What every engine of `dovetail bench examples` is given: one batch, one model, one clip norm, and a stopwatch.

The gradient part only: forward, backward, clip each example's gradient to L2 norm CLIP, sum; no noise, no optimiser.
The model is the CNN of `workload`, with the same weights for everyone, so that everyone's sum must be the same. Needs
NumPy only.
"""

import argparse
import json
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import workload

BATCH = 256
CLIP = 1.0
THREADS = 2

# convolution kernels (height, width, in, out), then dense ones (in, out); a flattened image runs over (row, column,
# channel).
SHAPES = ((5, 5, 1, 16), (5, 5, 16, 32), (512, 192), (192, 10))


def options(description: str, *, methods: Collection[str]) -> argparse.Namespace:
    """Parse the command line that all scripts of this benchmark share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", choices=("cnn",), default="cnn")
    parser.add_argument("--method", choices=methods, required=True)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    return parser.parse_args()


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Images of shape (BATCH, 28, 28) and labels."""
    ((pixels, labels),) = workload.clients(count=1, samples=BATCH)
    return pixels.reshape(BATCH, 28, 28), labels


def layers() -> list[tuple[np.ndarray, np.ndarray]]:
    """A kernel and a bias for each layer: normal kernels of variance 2 / fan-in, small biases."""
    rng = np.random.default_rng([workload.SEED, 2])
    made = []
    for shape in SHAPES:
        kernel = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))
        made.append((kernel.astype(np.float32), rng.normal(0, 0.1, shape[-1]).astype(np.float32)))
    count = sum(kernel.size + bias.size for kernel, bias in made)
    if count != workload.PARAMETERS["cnn"]:
        raise ValueError(f"expected {workload.PARAMETERS['cnn']} parameters, got {count}")
    return made


def measure(
    engine: str,
    step: Callable[[], Any],
    parts: Callable[[Any], Iterable[Any]],
    arguments: argparse.Namespace,
) -> None:
    """Time `step`, whose result `parts` takes apart into one array a parameter, and print one JSON line."""
    seconds = []
    for _ in range(arguments.warmup + arguments.repetitions):
        began = time.perf_counter()
        result = step()
        seconds.append(time.perf_counter() - began)
    arrays = [np.asarray(part, np.float64) for part in parts(result)]
    count = sum(array.size for array in arrays)
    if count != workload.PARAMETERS["cnn"]:
        raise ValueError(f"expected a sum of {workload.PARAMETERS['cnn']} parameters, got {count}")
    found = {
        "engine": engine,
        "workload": arguments.workload,
        "method": arguments.method,
        "examples": BATCH,
        "seconds": [round(value, 5) for value in seconds[arguments.warmup :]],
        "norms": [float(np.linalg.norm(array)) for array in arrays],
        "peak_rss_mb": round(workload.peak_rss_mb(), 1),
    }
    print(json.dumps(found), flush=True)
