"""Settings for images that nobody looked at, found on other images: clip norm, server step, ridge and rank.

A study names the images that settings are *for*, and those that they are *found on*: Fashion-MNIST for MNIST, coloured
Fashion-MNIST for CIFAR-10, grey CIFAR-10 for Fashion-MNIST. The first five sixths of the other images' training records
train, the last sixth judges; nothing of the target is read. Every candidate is trained as the library trains linear
models (one user per record, views averaged, clipped once, momentum on the server, the mean of the last half of the
iterates), with Gaussian noise of the size that the target's number of users and budget ask for.

Everything that was tried is written to a JSON file, which presets refer to. With `--oracle` the same grid is judged on
the target's own test records: not a way to choose settings, but what the transfer costs, and marked so.

Runs where there is JAX, NumPy and SciPy only: `--data` is a folder of NAME.npz with inputs, labels, test_inputs and
test_labels, as `--pack` writes them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dovetail import features
from dovetail.data import Dataset, views
from dovetail.features import CONSTANT, Features, Whitening
from dovetail.features.whitening import normalize_rows

MOMENTUM, DELTA, SLACK = 0.9, 1e-5, 1.03  # noise of the protocols is at most so much larger than a Gaussian's
CLASSES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What settings are for, and where they are looked for."""

    target: str
    found_on: str
    users: int
    features: Features
    ranks: tuple[int, ...]
    ridges: tuple[float, ...]
    views: tuple[str, ...] = ()
    targets: tuple[tuple[float, str], ...] = ((2.9, "replace-one"), (1.0, "replace-one"), (0.5, "replace-one"))
    clips: tuple[float, ...] = (0.05, 0.1, 0.2)
    reaches: tuple[float, ...] = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # server step times clip norm
    rounds: tuple[int, ...] = (160,)


PATCHES = Features(kind="scatter+patches", symmetric=True)

STUDIES = {
    "mnist": Study(
        target="mnist",
        found_on="fashion-mnist",
        users=60_000,
        features=Features(kind="scatter"),
        ranks=(600,),
        ridges=(0.003, 0.01, 0.03),
        views=("shift:1", "rotate:8"),
    ),
    "fashion-mnist": Study(
        target="fashion-mnist",
        found_on="cifar10 in grey",
        users=60_000,
        features=PATCHES,
        ranks=(2000,),
        ridges=(0.0003, 0.001, 0.003),
        targets=((2.9, "replace-one"), (1.0, "replace-one"), (3.0, "add-remove")),
    ),
    "cifar10": Study(
        target="cifar10",
        found_on="fashion-mnist in colour",
        users=50_000,
        features=PATCHES,
        ranks=(2000, 3000),
        ridges=(0.0001, 0.0003, 0.001),
        rounds=(160, 320),
        targets=((1.0, "add-remove"), (1.0, "replace-one"), (3.0, "add-remove"), (3.0, "replace-one")),
    ),
}


def noise_multiplier(eps: float, rounds: int, relation: str) -> float:
    """The noise on a sum of clipped vectors, over their clip norm, of Gaussian rounds that meet (eps, DELTA)."""

    def log_delta(mu: float) -> float:
        a, b = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
        return a + math.log(-math.expm1(b - a)) - math.log(DELTA)

    reach = 2.0 if relation == "replace-one" else 1.0
    return SLACK * reach * math.sqrt(rounds) / brentq(log_delta, 1e-3, 50.0)


def load(folder: Path, name: str) -> Dataset:
    """Images and labels.

    "in colour" gives every grey image a frame of two pixels, an ink and a ground of its own; "in grey" takes the mean
    of the colours and takes off a frame of two pixels.
    """
    plain = name.removesuffix(" in colour").removesuffix(" in grey")
    with np.load(folder / f"{plain}.npz") as held:
        parts = {key: held[key] for key in ("inputs", "labels", "test_inputs", "test_labels")}
    if name.endswith("in grey"):
        for key in ("inputs", "test_inputs"):
            parts[key] = np.rint(parts[key][:, 2:-2, 2:-2].mean(axis=3)).astype(np.uint8)
    elif name != plain:
        rng = np.random.default_rng(0)
        for key in ("inputs", "test_inputs"):
            framed = np.pad(parts[key], ((0, 0), (2, 2), (2, 2)))[..., None] / np.float32(255)
            ink, ground = rng.uniform(0, 1, (2, len(framed), 1, 1, 3)).astype(np.float32)
            parts[key] = np.rint(255 * (ground + framed * (ink - ground))).astype(np.uint8)
    return Dataset(
        inputs=parts["inputs"],
        labels=parts["labels"].astype(np.int32),
        test_inputs=parts["test_inputs"],
        test_labels=parts["test_labels"].astype(np.int32),
        num_classes=CLASSES,
    )


def split(dataset: Dataset) -> Dataset:
    """The training records alone, of which the last sixth judges."""
    cut = len(dataset.labels) * 5 // 6
    return dataclasses.replace(
        dataset,
        inputs=dataset.inputs[:cut],
        labels=dataset.labels[:cut],
        test_inputs=dataset.inputs[cut:],
        test_labels=dataset.labels[cut:],
    )


@dataclasses.dataclass(eq=False)
class Bench:
    """Features of one dataset on the device, and the training of a linear model on them."""

    rows: jax.Array  # (records, views, features)
    cosines: jax.Array
    labels: jax.Array
    test_rows: jax.Array
    test_labels: np.ndarray

    @classmethod
    def of(cls, dataset: Dataset, chosen: Features, cache: Path) -> Bench:
        made = features.apply(dataset, chosen, cache=cache)
        rows = jnp.asarray(made.inputs).reshape(len(made.labels), -1, made.inputs.shape[-1])
        return cls(rows, _cosines(rows), jnp.asarray(made.labels), jnp.asarray(made.test_inputs), made.test_labels)

    def with_scale(self, scale: np.ndarray) -> Bench:
        """With every feature multiplied by its scale, and rows of unit norm again: another ridge, a smaller rank."""
        rows, test_rows = normalize_rows(self.rows * scale), normalize_rows(self.test_rows * scale)
        return Bench(rows, _cosines(rows), self.labels, test_rows, self.test_labels)

    def accuracies(self, settings: list[dict[str, Any]], *, noise: float, rounds: int, users: int, seed: int) -> Any:
        """Of the mean of the last half of the iterates, for several clip norms and steps at once."""
        clip, step = (jnp.asarray([setting[key] for setting in settings]) for key in ("clip", "step"))
        std = noise * clip / users
        key = jax.random.key(seed)
        weights = _train(self.rows, self.cosines, self.labels, clip, step, std, key, rounds=rounds)
        logits = jnp.einsum("nf,fsc->nsc", self.test_rows, weights[:-1]) + CONSTANT * weights[-1]
        return np.mean(np.asarray(logits.argmax(axis=2)) == self.test_labels[:, None], axis=0)


@jax.jit
def _cosines(rows: jax.Array) -> jax.Array:
    return jnp.einsum("nif,njf->nij", rows, rows, precision="highest") + CONSTANT**2


def _train(
    rows: jax.Array, gram: jax.Array, labels: jax.Array, clip: Any, step: Any, std: Any, key: jax.Array, *, rounds: int
) -> jax.Array:
    """The averaged weights (features, settings, classes)."""
    records, number, size = rows.shape
    flat_rows = rows.reshape(-1, size)
    targets = jax.nn.one_hot(labels, CLASSES)[:, None, None]

    def iterate(state: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        weights, velocity, total = state
        logits = (flat_rows @ weights[:-1].reshape(size, -1)).reshape(records, number, -1, CLASSES)
        residual = (jax.nn.softmax(logits + CONSTANT * weights[-1]) - targets) / number
        square = jnp.einsum("nij,nisc,njsc->ns", gram, residual, residual)
        residual = residual * jnp.minimum(1.0, clip / jnp.sqrt(square + 1e-12))[:, None, :, None]
        flat = residual.reshape(records * number, -1)
        gradient = jnp.concatenate([flat_rows.T @ flat, CONSTANT * flat.sum(axis=0, keepdims=True)])
        noise = jax.random.normal(jax.random.fold_in(key, index), weights.shape)
        velocity = MOMENTUM * velocity + gradient.reshape(weights.shape) / records + std[:, None] * noise
        weights = weights - step[:, None] * velocity
        return (weights, velocity, total + jnp.where(2 * index >= rounds, 1.0, 0.0) * weights), None

    start = jnp.zeros((size + 1, len(clip), CLASSES))
    (_, _, total), _ = jax.lax.scan(iterate, (start, start, start), jnp.arange(rounds))
    return total / (rounds - math.ceil(rounds / 2))


_train = jax.jit(_train, static_argnames="rounds")


def candidates(study: Study, bench: Bench, fixed: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Every clip, step and number of rounds for every target, with its accuracy on the bench."""
    settings = [{"clip": clip, "step": reach / clip} for clip, reach in itertools.product(study.clips, study.reaches)]
    for (eps, relation), rounds in itertools.product(study.targets, study.rounds):
        size = {"noise": noise_multiplier(eps, rounds, relation), "rounds": rounds, "users": study.users}
        accuracies = np.mean([bench.accuracies(settings, **size, seed=seed) for seed in range(seeds)], axis=0)
        for setting, accuracy in zip(settings, accuracies, strict=True):
            yield {"eps": eps, "neighbors": relation, **fixed, **setting, **size, "accuracy": float(accuracy)}


def run(study: Study, folder: Path, *, seeds: int, oracle: bool, out: Path) -> None:
    """All candidates on the other images, and with `oracle` on the target's own test records, marked."""
    sources = {"found": (study.found_on, True)} | ({"oracle": (study.target, False)} if oracle else {})
    record: dict[str, Any] = {"study": dataclasses.asdict(study), "delta": DELTA, "momentum": MOMENTUM, "seeds": seeds}
    for label, (name, held_out) in sources.items():
        data = load(folder, name)
        data = views.add_views(split(data) if held_out else data, study.views)
        tried = []
        start = time.perf_counter()
        whiten = Whitening(rank=max(study.ranks), ridge=study.ridges[0])
        whitened = dataclasses.replace(study.features, whiten=whiten)
        bench = Bench.of(data, whitened, folder / "features")
        shape = data.test_inputs.shape[1:]
        variances = features.build_pipeline(whitened, shape, cache=folder / "features").variances
        print(f"{label} {name}: features {time.perf_counter() - start:.0f} s", flush=True)
        for rank, ridge in itertools.product(study.ranks, study.ridges):
            scale = np.sqrt((variances + whiten.ridge * variances[0]) / (variances + ridge * variances[0]))
            scale[rank:] = 0
            tried += list(candidates(study, bench.with_scale(scale), {"rank": rank, "ridge": ridge}, seeds))
        print(f"{label} {name}: {time.perf_counter() - start:.0f} s with all candidates", flush=True)
        del bench
        record[label] = {
            "looked at": f"{name}, training records alone" if held_out else f"{name}: its test records",
            "tried": tried,
            "best": [
                max(
                    (candidate for candidate in tried if (candidate["eps"], candidate["neighbors"]) == goal),
                    key=lambda candidate: candidate["accuracy"],
                )
                for goal in study.targets
            ],
        }
        out.write_text(json.dumps(record, indent=1) + "\n")
        for best in record[label]["best"]:
            print(label, json.dumps(best), flush=True)
    if oracle:
        record["transferred"] = [_same(record["oracle"]["tried"], best) for best in record["found"]["best"]]
        for candidate in record["transferred"]:
            print("transferred", json.dumps(candidate), flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


def _same(tried: list[dict[str, Any]], setting: dict[str, Any]) -> dict[str, Any]:
    """The candidate with these settings."""
    return next(
        candidate for candidate in tried if all(candidate[key] == setting[key] for key in setting if key != "accuracy")
    )


def pack(folder: Path, names: list[str]) -> None:
    """The named tasks as files that need nothing but NumPy to read."""
    from dovetail.data import resolve

    for name in names:
        held = resolve(name).load(folder=None)
        parts = {key: getattr(held, key) for key in ("inputs", "labels", "test_inputs", "test_labels")}
        np.savez_compressed(folder / f"{name}.npz", **parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", nargs="*", default=list(STUDIES), help=f"some of {', '.join(STUDIES)}")
    parser.add_argument("--data", type=Path, required=True, help="a folder with the images, and room for a cache")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the records")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--pack", nargs="*", default=[], help="first write these tasks to the folder of images")
    arguments = parser.parse_args()
    pack(arguments.data, arguments.pack)
    for name in arguments.study:
        out = arguments.out / f"{name}.json"
        run(STUDIES[name], arguments.data, seeds=arguments.seeds, oracle=arguments.oracle, out=out)


if __name__ == "__main__":
    main()
