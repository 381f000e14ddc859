"""Exact privacy of a small shuffled crowd, by enumeration of every histogram."""

import itertools

import numpy as np


def randomized_response(eps_local: float, levels: int) -> np.ndarray:
    """Rows are inputs, columns are reports."""
    table = np.ones((levels, levels)) + np.expm1(eps_local) * np.eye(levels)
    return table / table.sum(axis=1, keepdims=True)


def laplace_cells(eps_local: float, inputs: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The Laplace mechanism on [0, 1] seen through a partition of the line: post-processing, so never more private."""
    gap = edges[None, :] - inputs[:, None]
    cdf = np.where(
        gap < 0, 0.5 * np.exp(eps_local * np.minimum(gap, 0)), 1 - 0.5 * np.exp(-eps_local * np.maximum(gap, 0))
    )
    full = np.hstack([np.zeros((len(inputs), 1)), cdf, np.ones((len(inputs), 1))])
    return np.diff(full, axis=1)


def histogram_law(reports: list[np.ndarray]) -> np.ndarray:
    """The law of the histogram of independent reports; the last output's count is implied."""
    outputs = len(reports[0])
    law = np.zeros((len(reports) + 1,) * (outputs - 1))
    law[(0,) * (outputs - 1)] = 1.0
    for probs in reports:
        law = probs[-1] * law + sum(probs[j] * np.roll(law, 1, axis=j) for j in range(outputs - 1))
    return law


def worst_delta(table: np.ndarray, num_users: int, eps: np.ndarray) -> np.ndarray:
    """The largest delta at each eps, over the victim's pairs of inputs and all inputs of the others."""
    inputs, worst = range(len(table)), np.zeros(len(eps))
    for others in itertools.combinations_with_replacement(inputs, num_users - 1):
        laws = [histogram_law([table[x], *(table[y] for y in others)]) for x in inputs]
        for p, q in itertools.permutations(laws, 2):
            gaps = np.maximum(p[None] - np.exp(eps).reshape(-1, *[1] * p.ndim) * q[None], 0)
            worst = np.maximum(worst, gaps.reshape(len(eps), -1).sum(axis=1))
    return worst


def random_ldp(rng: np.random.Generator, eps_local: float, inputs: int, outputs: int) -> np.ndarray:
    """A random randomizer that is exactly eps_local-LDP, near an extreme one."""
    corners = np.where(rng.random((inputs, outputs)) < 0.5, 1.0, np.exp(eps_local))
    table = corners * rng.dirichlet(np.ones(outputs))[None, :]
    low, high = 0.0, 1.0
    for _ in range(60):  # shrink towards the first row's shape until the ratio fits
        share = (low + high) / 2
        mixed = share * table + (1 - share) * table.mean(axis=0)
        mixed = mixed / mixed.sum(axis=1, keepdims=True)
        ratio = (mixed.max(axis=0) / mixed.min(axis=0)).max()
        low, high = (share, high) if ratio <= np.exp(eps_local) else (low, share)
    mixed = low * table + (1 - low) * table.mean(axis=0)
    return mixed / mixed.sum(axis=1, keepdims=True)
