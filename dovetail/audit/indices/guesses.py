"""How the shuffler guesses which of the reported coordinates are a user's k largest.

Every coordinate gets a score, the larger the likelier. Decoys are drawn anew in every round while the k largest mostly
stay, so what is reported again and again is likely one of them; beyond that, other users tell what to expect.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from scipy.special import logit

__all__ = ["KNOWLEDGE", "Knowledge", "best_of", "rate", "right", "scores"]

Knowledge = Literal["uniform", "population", "similar users"]
KNOWLEDGE: tuple[Knowledge, ...] = ("uniform", "population", "similar users")


def scores(knowledge: Knowledge, other: np.ndarray, reported: np.ndarray, decoy_rate: float) -> np.ndarray:
    """How likely each coordinate is among a user's k largest, up to order: (users, dim); -inf if not reported last.

    `other` are the k largest of the users learned from, (others, rounds, dim). Rounds are combined as if they were
    independent given the last one, at the rate at which others keep a coordinate.
    """
    if knowledge == "uniform":
        return np.where(reported[:, -1], reported.sum(axis=1, dtype=np.float64), -np.inf)
    num_others, rounds, dim = other.shape
    top = np.count_nonzero(other[0, 0])
    beta = top / dim
    marginal = (other[:, -1].sum(axis=0) + beta) / (num_others + 1)
    score: np.ndarray = logit(marginal)[None]
    if knowledge == "similar users":
        score = logit((num_others * _of_similar(other, reported, decoy_rate) + marginal) / (num_others + 1))
    for t in range(rounds - 1):
        kept = np.count_nonzero(other[:, t] & other[:, -1])
        stays = (kept + beta) / (num_others * top + 1)
        comes = (1 - stays) * beta / (1 - beta)
        evidence = math.log((stays + (1 - stays) * decoy_rate) / (comes + (1 - comes) * decoy_rate))
        score = score + reported[:, t] * (evidence - math.log((1 - stays) / (1 - comes)))
    return np.where(reported[:, -1], score, -np.inf)


def _of_similar(other: np.ndarray, reported: np.ndarray, decoy_rate: float) -> np.ndarray:
    """How often a coordinate is among the k largest of others, who count by how well they would explain the reports.

    A coordinate is taken to be shared with such a user at the rate at which any two users share theirs.
    """
    _, rounds, dim = other.shape
    frequency = np.mean(other, axis=(0, 1))
    shared = min(float(np.sum(frequency**2) / np.sum(frequency)), 1 - 1 / dim)
    weight = math.log1p(shared / (1 - shared) / decoy_rate)
    overlap = sum(reported[:, t].astype(np.float32) @ other[:, t].astype(np.float32).T for t in range(rounds))
    likelihood = np.exp(weight * (overlap - np.max(overlap, axis=1, keepdims=True)).astype(np.float64))
    return likelihood @ other[:, -1].astype(np.float64) / likelihood.sum(axis=1, keepdims=True)


def best_of(score: np.ndarray) -> np.ndarray:
    """The coordinates of highest score."""
    return score == np.max(score, axis=1, keepdims=True)


def rate(best: np.ndarray, largest: np.ndarray) -> float:
    """How often a guess among the best is right, every one of them being as likely."""
    return math.fsum(np.count_nonzero(best & largest, axis=1) / np.count_nonzero(best, axis=1)) / len(largest)


def right(best: np.ndarray, largest: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """Whether the guess that the coin makes among the best is right, user by user."""
    guess = np.argmax(np.where(best, coins, -1.0), axis=1)
    return largest[np.arange(len(guess)), guess]
