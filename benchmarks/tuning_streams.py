"""Settings for trainings in which users upload rarely, found on other images: clip norm, server step, momentum.

As `tuning.py`, whose studies and benches it uses, for `cohort.kind = "separated"`: every round takes the next users,
the noise is that of the library's own coefficients for these rounds, uploads and momentum, of the size that the
accountant calibrates, once for a curator and once for two aggregators (sqrt 2 as much). Nothing of the target is read,
unless `--oracle` asks for what the transfer costs; that is marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tuning
from tuning import CLASSES, CONSTANT, Bench, _cosines

from dovetail import accounting
from dovetail.data import Dataset, views
from dovetail.events import CorrelatedGaussian, Round, Separated
from dovetail.features import Whitening
from dovetail.mechanisms import correlated
from dovetail.statements import Neighbors

ROWS, SLACK = 32, 1.01  # rows of noise that are kept; what rounding to integers costs at the most
PARTIES = {"curator": 1.0, "aggregators": math.sqrt(2)}  # of the certified noise, what is in the sum
AVERAGES = (0.0, 0.5)
_CHUNK = 4  # settings that are trained side by side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """How many users a round has, how many rounds there are, and the targets (eps, relation)."""

    size: int
    rounds: int
    targets: tuple[tuple[float, str], ...]
    delta: float = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What settings are for, where they are looked for, and the streams; features None are the pixels."""

    target: str
    found_on: str
    users: int
    streams: tuple[Stream, ...]
    images: str | None  # the study of `tuning` whose features and views are used
    rank: int = 0
    ridge: float = 0.0
    clips: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    reaches: tuple[float, ...] = (
        8.0,
        16.0,
        32.0,
        64.0,
        128.0,
        256.0,
    )  # server step times clip norm over (1 - momentum)
    momenta: tuple[float, ...] = (0.0, 0.9, 0.95)


_REPLACE = ((2.9, "replace-one"), (1.0, "replace-one"))
STUDIES = {
    "flame": Study(
        target="mnist",
        found_on="fashion-mnist",
        users=60_000,
        images=None,
        clips=(0.25, 0.5, 1.0, 2.0, 4.0),
        reaches=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
        streams=(
            Stream(
                size=1000,
                rounds=60,
                delta=5e-6,
                targets=((0.24, "replace-one"), (1.0, "replace-one"), (2.5, "replace-one")),
            ),
        ),
    ),
    "mnist": Study(
        target="mnist",
        found_on="fashion-mnist",
        users=60_000,
        images="mnist",
        rank=600,
        ridge=0.003,
        streams=(
            Stream(size=1000, rounds=60, targets=_REPLACE),
            Stream(size=1000, rounds=300, targets=_REPLACE),
        ),
    ),
    "fashion-mnist": Study(
        target="fashion-mnist",
        found_on="cifar10 in grey",
        users=60_000,
        images="fashion-mnist",
        rank=2000,
        ridge=0.001,
        streams=(Stream(size=1000, rounds=300, targets=_REPLACE),),
    ),
    "cifar10": Study(
        target="cifar10",
        found_on="fashion-mnist in colour",
        users=50_000,
        images="cifar10",
        rank=2000,
        ridge=0.0003,
        streams=(
            Stream(size=1000, rounds=250, targets=((1.0, "add-remove"), (3.0, "add-remove"))),
            Stream(size=2000, rounds=500, targets=((1.0, "add-remove"), (3.0, "add-remove"))),
            Stream(size=2000, rounds=1000, targets=((8.0, "add-remove"),)),
        ),
    ),
}


@functools.cache
def coefficients_of(stream: Stream, users: int, momentum: float) -> tuple[float, ...]:
    """The library's optimised coefficients for a stream over so many users."""
    schedule = schedule_of(stream, users)
    workload = correlated.Workload(
        rounds=stream.rounds, uploads=schedule.most_uploads, separation=schedule.separation, momentum=momentum
    )
    return correlated.optimize(workload, ROWS)


def schedule_of(stream: Stream, users: int) -> Separated:
    """The participation of a stream in which so many users take turns."""
    turns = -(-stream.rounds * stream.size // users)
    return Separated(uploads=turns, separation=users // stream.size, rounds=stream.rounds)


@functools.cache
def noise_multiplier(stream: Stream, users: int, momentum: float, eps: float, relation: str) -> float:
    """The noise of a row over the clip norm with which the accountant certifies the stream."""
    neighbors = Neighbors(relation)
    reach = 2.0 if neighbors is Neighbors.REPLACE_ONE else 1.0

    def eps_at(noise: float) -> float:
        event = CorrelatedGaussian(
            std=noise,
            sensitivity=reach,
            coefficients=coefficients_of(stream, users, momentum),
            neighbors=neighbors,
        )
        rounds = [Round(mechanism=event, participation=schedule_of(stream, users))] * stream.rounds
        return accounting.bound(rounds, delta=stream.delta).eps

    return SLACK * accounting.smallest_noise(eps_at, eps=eps, tolerance=1e-4)


@functools.partial(jax.jit, static_argnames=("rounds", "size", "momentum"))
def train(
    rows: jax.Array,
    gram: jax.Array,
    labels: jax.Array,
    clip: jax.Array,
    step: jax.Array,
    std: jax.Array,
    coefficients: jax.Array,
    key: jax.Array,
    *,
    rounds: int,
    size: int,
    momentum: float,
) -> tuple[jax.Array, jax.Array]:
    """The last weights (features, settings, classes), and the mean of the last half, for several settings at once."""
    records, number, width = rows.shape
    targets = jax.nn.one_hot(labels, CLASSES)
    order = jax.random.permutation(jax.random.fold_in(key, 2**31 - 1), records)
    kept = len(coefficients)

    def iterate(state: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        weights, velocity, total, ring = state
        batch = order[(index * size + jnp.arange(size)) % records]
        x, near = rows[batch], gram[batch]
        flat_x = x.reshape(-1, width)
        logits = (flat_x @ weights[:-1].reshape(width, -1)).reshape(size, number, -1, CLASSES)
        residual = (jax.nn.softmax(logits + CONSTANT * weights[-1]) - targets[batch][:, None, None]) / number
        square = jnp.einsum("nij,nisc,njsc->ns", near, residual, residual)
        residual = residual * jnp.minimum(1.0, clip / jnp.sqrt(square + 1e-12))[:, None, :, None]
        flat = residual.reshape(size * number, -1)
        gradient = jnp.concatenate([flat_x.T @ flat, CONSTANT * flat.sum(axis=0, keepdims=True)])
        ring = ring.at[index % kept].set(jax.random.normal(jax.random.fold_in(key, index), (width + 1, CLASSES)))
        ages = (index - jnp.arange(kept)) % kept
        noise = jnp.tensordot(coefficients[ages], ring, 1)[:, None]
        velocity = momentum * velocity + gradient.reshape(weights.shape) / size + std[:, None] * noise
        weights = weights - step[:, None] * velocity
        return (weights, velocity, total + jnp.where(2 * index >= rounds, 1.0, 0.0) * weights, ring), None

    start = jnp.zeros((width + 1, len(clip), CLASSES))
    ring = jnp.zeros((kept, width + 1, CLASSES))
    (last, _, total, _), _ = jax.lax.scan(iterate, (start, start, start, ring), jnp.arange(rounds))
    return last, total / (rounds - math.ceil(rounds / 2))


def accuracies(bench: Bench, weights: jax.Array) -> np.ndarray:
    """The share of test records that each setting's weights classify."""
    logits = jnp.einsum("nf,fsc->nsc", bench.test_rows, weights[:-1]) + CONSTANT * weights[-1]
    return np.mean(np.asarray(logits.argmax(axis=2)) == bench.test_labels[:, None], axis=0)


def candidates(study: Study, stream: Stream, bench: Bench, seeds: int) -> list[dict[str, Any]]:
    """Every clip, step, momentum and average for every target and kind of party, with its accuracy on the bench."""
    grid = [{"clip": clip, "step": reach / clip} for clip, reach in itertools.product(study.clips, study.reaches)]
    found = []
    for momentum, (eps, relation), party in itertools.product(study.momenta, stream.targets, PARTIES):
        coefficients = coefficients_of(stream, study.users, momentum)
        noise = noise_multiplier(stream, study.users, momentum, eps, relation)
        settings = [dict(setting, step=setting["step"] * (1 - momentum)) for setting in grid]
        scores = np.zeros((len(settings), len(AVERAGES)))
        for seed, first in itertools.product(range(seeds), range(0, len(settings), _CHUNK)):
            part = settings[first : first + _CHUNK]
            clip, step = (jnp.asarray([setting[key] for setting in part]) for key in ("clip", "step"))
            std = noise * PARTIES[party] * clip / stream.size
            last, mean = train(
                bench.rows,
                bench.cosines,
                bench.labels,
                clip,
                step,
                std,
                jnp.asarray(coefficients),
                jax.random.key(seed),
                rounds=stream.rounds,
                size=stream.size,
                momentum=momentum,
            )
            for column, weights in enumerate((last, mean)):
                scores[first : first + _CHUNK, column] += accuracies(bench, weights) / seeds
        for setting, row in zip(settings, scores, strict=True):
            found += [
                {
                    "size": stream.size,
                    "rounds": stream.rounds,
                    "eps": eps,
                    "neighbors": relation,
                    "noise of": party,
                    "momentum": momentum,
                    "average": average,
                    **setting,
                    "noise": noise,
                    "accuracy": float(score),
                }
                for average, score in zip(AVERAGES, row, strict=True)
            ]
    return found


def bench_of(study: Study, folder: Path, name: str, *, held_out: bool) -> Bench:
    """The images of a study as a linear model reads them: whitened features with views, or the pixels."""
    data = tuning.load(folder, name)
    data = tuning.split(data) if held_out else data
    if study.images is None:
        return _pixels(data)
    images = tuning.STUDIES[study.images]
    whiten = Whitening(rank=study.rank, ridge=study.ridge)
    chosen = dataclasses.replace(images.features, whiten=whiten)
    return Bench.of(views.add_views(data, images.views), chosen, folder / "features")


def _pixels(data: Dataset) -> Bench:
    """Flat pixels in [0, 1], as the tasks have them."""
    rows, test_rows = (
        jnp.asarray(inputs.reshape(len(inputs), -1), jnp.float32) / 255 for inputs in (data.inputs, data.test_inputs)
    )
    return Bench(rows[:, None], _cosines(rows[:, None]), jnp.asarray(data.labels), test_rows, data.test_labels)


def run(study: Study, folder: Path, *, seeds: int, oracle: bool, out: Path) -> None:
    """All candidates on the other images, and with `oracle` on the target's own test records, marked."""
    record: dict[str, Any] = {"study": dataclasses.asdict(study), "seeds": seeds, "noise rows": ROWS}
    sources = {"found": (study.found_on, True)} | ({"oracle": (study.target, False)} if oracle else {})
    for label, (name, held_out) in sources.items():
        start = time.perf_counter()
        bench = bench_of(study, folder, name, held_out=held_out)
        print(f"{label} {name}: features {time.perf_counter() - start:.0f} s", flush=True)
        tried = [entry for stream in study.streams for entry in candidates(study, stream, bench, seeds)]
        print(f"{label} {name}: {time.perf_counter() - start:.0f} s with all candidates", flush=True)
        del bench
        looked = f"{name}, training records alone" if held_out else f"{name}: its test records"
        record[label] = {"looked at": looked, "tried": tried, "best": _best(tried)}
        out.write_text(json.dumps(record, indent=1) + "\n")
        for best in record[label]["best"]:
            print(label, json.dumps(best), flush=True)
    if oracle:
        record["transferred"] = [tuning._same(record["oracle"]["tried"], best) for best in record["found"]["best"]]
        for candidate in record["transferred"]:
            print("transferred", json.dumps(candidate), flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


def _best(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best candidate of every stream, target and kind of party."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in tried:
        goal = tuple(entry[key] for key in ("size", "rounds", "eps", "neighbors", "noise of"))
        if goal not in best or entry["accuracy"] > best[goal]["accuracy"]:
            best[goal] = entry
    return list(best.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", nargs="*", default=list(STUDIES), help=f"some of {', '.join(STUDIES)}")
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with the images, as `tuning.py --pack` writes"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the records")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--oracle", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.study:
        out = arguments.out / f"streams-{name}.json"
        run(STUDIES[name], arguments.data, seeds=arguments.seeds, oracle=arguments.oracle, out=out)


if __name__ == "__main__":
    main()
