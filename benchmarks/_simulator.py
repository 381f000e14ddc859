"""Many trainings at once, as `dp_fl` does them: clipped mean gradients of all users, Gaussian noise, a server's step.

One program trains one model on one set under many settings side by side, on whatever JAX computes on. It is for tuning
alone, where thousands of trainings are compared; what is reported of a rule comes from `dovetail.train` itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SGD, ADAM, DOG = 0, 1, 2


class Setting(NamedTuple):
    """One way to train."""

    rounds: int = 100
    kind: int = ADAM
    rate: float = 0.03
    clip: float = 0.3
    normalize: float = 0.0  # 1: all updates get the length `clip`
    momentum: float = 0.9  # of Adam's first moment, or of SGD
    second: float = 0.999  # of Adam's second moment
    subtract: float = 0.0  # of the noise's variance, from Adam's second moment
    floor: float = 0.0  # of the noise's standard deviation, added to Adam's denominator
    decay: float = 0.0  # 1: the step falls linearly to 0
    average: float = 0.0  # of the rounds whose models are averaged
    shrink: float = 0.0  # towards zero in each step, times the rate


@dataclasses.dataclass(frozen=True)
class Problem:
    """A set as the simulator reads it: users' records in rows, padded, and how many of a row count."""

    inputs: np.ndarray  # (users, records, numbers)
    labels: np.ndarray  # (users, records, outputs): one-hot classes, a number, or labels
    counts: np.ndarray  # (users,)
    test_inputs: np.ndarray
    test_labels: np.ndarray
    target: str
    hidden: int  # units of the hidden layer; 0 for a linear model

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the layers' matrices, the bias in the last row."""
        sizes = [self.inputs.shape[2], *([self.hidden] if self.hidden else []), self.labels.shape[2]]
        return [(fan + 1, out) for fan, out in itertools.pairwise(sizes)]

    @property
    def dim(self) -> int:
        """How many parameters there are."""
        return sum(fan * out for fan, out in self.shapes)


def problem_of(data: Any, *, hidden: int) -> Problem:
    """A `Dataset` as the simulator reads it."""

    def flat(inputs: np.ndarray) -> np.ndarray:
        inputs = inputs.reshape(len(inputs), -1)
        return inputs if inputs.dtype == np.uint8 else inputs.astype(np.float32)

    def wide(labels: np.ndarray) -> np.ndarray:
        if data.target == "classes":
            return np.eye(data.num_classes, dtype=np.float32)[labels]
        return labels.reshape(len(labels), -1).astype(np.float32)

    users = np.arange(len(data.labels)) if data.users is None else data.users
    order = np.argsort(users, kind="stable")
    counts = np.bincount(users)
    column = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (len(counts), counts.max())

    def rows(values: np.ndarray) -> np.ndarray:
        out = np.zeros((*shape, values.shape[1]), values.dtype)
        out[users[order], column] = values[order]
        return out

    return Problem(
        inputs=rows(flat(data.inputs)),
        labels=rows(wide(data.labels)),
        counts=counts,
        test_inputs=flat(data.test_inputs),
        test_labels=wide(data.test_labels),
        target=data.target,
        hidden=hidden,
    )


def train(problem: Problem, settings: list[Setting], noise: list[float], seeds: list[int], *, at_once: int) -> Any:
    """The test score of every training: AUC for two classes, accuracy for more or for labels, R2 for numbers.

    Arguments:
        settings: one for each training.
        noise: noise multiplier of each training, for one user in one round.
        seeds: of the noise and of the first parameters.
        at_once: how many trainings one call holds in memory.
    """
    run = _program(problem)
    scores = np.zeros(len(settings))
    order = np.argsort([setting.rounds for setting in settings], kind="stable")
    for low in range(0, len(order), at_once):
        part = order[low : low + at_once]
        filled = np.resize(part, at_once)
        table = np.array([settings[i] for i in filled], np.float32)
        args = (table, np.array([noise[i] for i in filled], np.float32), np.array([seeds[i] for i in filled]))
        most = max(settings[i].rounds for i in part)
        scores[part] = np.asarray(run(*map(jnp.asarray, args), most))[: len(part)]
    return scores


def _program(problem: Problem) -> Any:
    """The compiled function from settings, noise, seeds and the largest number of rounds to scores."""
    users, width = problem.inputs.shape[:2]
    inputs = jnp.asarray(problem.inputs)
    labels = jnp.asarray(problem.labels)
    weights = jnp.asarray((np.arange(width) < problem.counts[:, None]) / np.maximum(problem.counts, 1)[:, None])
    weights = weights.astype(jnp.float32)
    test_inputs, test_labels = jnp.asarray(problem.test_inputs), jnp.asarray(problem.test_labels)
    shapes, dim, target = problem.shapes, problem.dim, problem.target

    def as_float(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x

    def layers(params: jax.Array) -> list[jax.Array]:
        parts, start = [], 0
        for fan, out in shapes:
            parts.append(params[start : start + fan * out].reshape(fan, out))
            start += fan * out
        return parts

    def forward(params: jax.Array, x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        seen = []
        for number, matrix in enumerate(layers(params)):
            x = jnp.tanh(x) if number else x
            x = jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1))], axis=-1)
            seen.append(x)
            x = x @ matrix
        return seen, x

    def slope(outputs: jax.Array, y: jax.Array) -> jax.Array:
        if target == "classes":
            return jax.nn.softmax(outputs) - y
        return 2 * (outputs - y) if target == "number" else jax.nn.sigmoid(outputs) - y

    def clipped_sum(params: jax.Array, clip: jax.Array, normalize: jax.Array, x: Any, y: Any, w: Any) -> jax.Array:
        seen, outputs = forward(params, as_float(x))
        deltas = [slope(outputs, y) * w[..., None]]
        for number in range(len(shapes) - 1, 0, -1):
            back = deltas[0] @ layers(params)[number][:-1].T
            deltas.insert(0, back * (1 - seen[number][..., :-1] ** 2))
        if width == 1:
            squares = sum(jnp.sum(a**2, -1) * jnp.sum(d**2, -1) for a, d in zip(seen, deltas, strict=True))
            factor = factor_of(jnp.sqrt(squares[:, 0]), clip, normalize)
            sums = [(a[:, 0] * factor[:, None]).T @ d[:, 0] for a, d in zip(seen, deltas, strict=True)]
        else:
            each = [jnp.einsum("urp,urk->upk", a, d) for a, d in zip(seen, deltas, strict=True)]
            factor = factor_of(jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in each)), clip, normalize)
            sums = [jnp.einsum("u,upk->pk", factor, g) for g in each]
        return jnp.concatenate([part.ravel() for part in sums])

    def factor_of(norm: jax.Array, clip: jax.Array, normalize: jax.Array) -> jax.Array:
        norm = jnp.maximum(norm, 1e-12)
        return jnp.where(normalize > 0, clip / (norm + 0.01 * clip), jnp.minimum(1, clip / norm))

    def first(key: jax.Array) -> jax.Array:
        if len(shapes) == 1:
            return jnp.zeros(dim)
        keys = jax.random.split(key, len(shapes))
        bounds = [(fan - 1) ** -0.5 for fan, _ in shapes]
        parts = zip(keys, shapes, bounds, strict=True)
        return jnp.concatenate([jax.random.uniform(k, (fan * out,), minval=-b, maxval=b) for k, (fan, out), b in parts])

    def one(row: jax.Array, noise: jax.Array, seed: jax.Array, most: jax.Array) -> jax.Array:
        s = Setting(*row)
        key = jax.random.key(seed)
        start = first(jax.random.fold_in(key, 1 << 20))
        std = noise * s.clip / users

        def step(index: jax.Array, state: Any) -> Any:
            params, mean, m, v, far, total = state
            g = clipped_sum(params, s.clip, s.normalize, inputs, labels, weights) / users
            g = g + std * jax.random.normal(jax.random.fold_in(key, index), (dim,))
            t = index + 1.0
            decayed = 1 - s.decay * index / s.rounds
            m_adam = s.momentum * m + (1 - s.momentum) * g
            v_adam = s.second * v + (1 - s.second) * g**2
            seen_v = v_adam / (1 - s.second**t)
            seen_v = jnp.maximum(seen_v - s.subtract * std**2, 1e-4 * seen_v)
            adam = m_adam / (1 - s.momentum**t) / (jnp.sqrt(seen_v) + s.floor * std + 1e-8)
            m_sgd = s.momentum * m + g
            total_after = total + jnp.sum(g**2)
            far_after = jnp.maximum(far, jnp.linalg.norm(params - start))
            dog = far_after / jnp.sqrt(total_after + 1e-12) * g
            is_adam = s.kind == ADAM
            move = jnp.where(is_adam, adam, jnp.where(s.kind == SGD, m_sgd, dog)) * s.rate * decayed
            move = move + s.shrink * s.rate * decayed * params
            after = params - move
            counted = jnp.maximum(0.0, t - jnp.floor(s.rounds * (1 - s.average)))
            mean_after = jnp.where(
                (s.average > 0) & (counted > 0), mean + (after - mean) / jnp.maximum(counted, 1), after
            )
            new = (after, mean_after, jnp.where(is_adam, m_adam, m_sgd), v_adam, far_after, total_after)
            return jax.tree.map(lambda a, b: jnp.where(index < s.rounds, a, b), new, state)

        far = jnp.where(s.kind == DOG, s.floor, 0.0) * (1 + jnp.linalg.norm(start))
        state = (start, start, jnp.zeros(dim), jnp.zeros(dim), far, jnp.zeros(()))
        state = jax.lax.fori_loop(0, most, step, state)
        return score(forward(state[1], as_float(test_inputs))[1])

    def score(outputs: jax.Array) -> jax.Array:
        if target == "number":
            spread = jnp.mean((test_labels - jnp.mean(test_labels)) ** 2)
            return 1 - jnp.mean((outputs - test_labels) ** 2) / spread
        if target == "labels":
            return jnp.mean((outputs > 0) == (test_labels > 0))
        if test_labels.shape[1] > 2:
            return jnp.mean(jnp.argmax(outputs, 1) == jnp.argmax(test_labels, 1))
        rank = jnp.argsort(jnp.argsort(outputs[:, 1] - outputs[:, 0])) + 1.0
        high = jnp.sum(test_labels[:, 1])
        low = len(test_labels) - high
        return (jnp.sum(rank * test_labels[:, 1]) - high * (high + 1) / 2) / (high * low)

    return jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None)))


def tuning_grid() -> list[Setting]:
    """27 settings that somebody would try: 18 of SGD, 9 of Adam."""
    sgd = [
        Setting(rounds=rounds, kind=SGD, momentum=0.0, clip=clip, rate=rate)
        for rounds in (30, 100)
        for clip in (0.1, 0.3, 1.0)
        for rate in (0.2, 1.0, 4.0)
    ]
    adam = [
        Setting(rounds=rounds, rate=rate, clip=clip)
        for rounds, clip in ((30, 0.3), (100, 0.3), (100, 1.0))
        for rate in (0.01, 0.03, 0.1)
    ]
    return [*sgd, *adam]
