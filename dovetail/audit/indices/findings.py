"""What an attack on reported indices found, beside FLAME's claim of nu-index privacy (Def. 3).

How the shuffler guesses which of the reported coordinates are a user's k largest.

Every coordinate gets a score, the larger the likelier. Decoys are drawn anew in every round while the k largest mostly
stay, so what is reported again and again is likely one of them; beyond that, other users tell what to expect.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from scipy.special import logit

from dovetail.protocols.flame.ss_topk import SsTopk

__all__ = [
    "KNOWLEDGE",
    "ROUNDING",
    "IndexAttack",
    "IndexAudit",
    "Inequality",
    "Knowledge",
    "best_of",
    "rate",
    "right",
    "scores",
]

ROUNDING = 1e-9  # by which a ratio or a bound may be off


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexAttack:
    """One guess for each of `trials` users, after `rounds` rounds; it is right if among the k largest of the last one.

    `prior_success` is that of the same adversary without the reports. `chance` is that of the same guesses about
    other users: the probability, before, of the coordinates guessed. These three are averaged over the coin that breaks
    ties. `lower` and `chance_upper` are Clopper-Pearson bounds from guesses made, `hits` of them right, with the
    confidence of the whole audit: users count as independent draws from their population.
    """

    knowledge: Knowledge
    rounds: int
    trials: int
    hits: int
    lower: float
    success: float
    prior_success: float
    chance: float
    chance_upper: float
    beta: float
    nu: float

    @property
    def amplification(self) -> float:
        """Success over beta, the probability of a random guess: what Def. 3 bounds by nu."""
        return self.success / self.beta

    @property
    def gain(self) -> float:
        """Success over that of the same adversary without the reports: what seeing them adds."""
        return self.success / self.prior_success if self.prior_success else math.inf

    @property
    def verdict(self) -> str:
        """Refuted where even the lower bound is above nu beta, and not by the prior alone.

        "holds" says no more than that this attack does not refute it.
        """
        return _verdict(refuted=self.lower > self.nu * self.beta and self.gain > 1)

    @property
    def verdict_own_prior(self) -> str:
        """The same with the own prior of the coordinates guessed for beta: popularity by itself refutes nothing."""
        return _verdict(refuted=self.lower > self.nu * self.chance_upper)

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite gain is null."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "amplification": self.amplification,
            "amplification_lower": self.lower / self.beta,
            "gain": self.gain if math.isfinite(self.gain) else None,
            "verdict": self.verdict,
            "verdict_own_prior": self.verdict_own_prior,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inequality:
    """One of the two of Def. 3, in one round, over all coordinates; exact for a user drawn from the audited ones.

    The prior is ``beta`` for every coordinate, as in the paper, or its ``own``: how often it is among the k largest.
    The posterior is always the true one. `worst` is the largest Pr[top | reported] / prior of the first inequality, or
    (1 - prior) / Pr[not top | reported] of the second. `share` of the users report a coordinate at which it exceeds nu.
    """

    number: Literal[1, 2]
    prior: Literal["beta", "own"]
    worst: float
    nu: float
    share: float

    @property
    def fails(self) -> bool:
        """Whether some coordinate exceeds nu, by more than rounding."""
        return self.worst > self.nu * (1 + ROUNDING)

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite ratio (a coordinate that is among everybody's k largest) is null."""
        worst = self.worst if math.isfinite(self.worst) else None
        return {**dataclasses.asdict(self), "worst": worst, "fails": self.fails}


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexAudit:
    """What each adversary achieves, beside the claim.

    `verdict` takes the prior to be beta, as the paper does. Def. 3 is about one index in one round; whole reports and
    several rounds are attacks on what it is meant to say. `verdict_own_prior` and each attack's `gain` tell what the
    reports give away beyond what is known of all users.

    `nu_any_prior` is (d - k) / decoys: in one round, an index that is seen by itself multiplies no probability by more,
    whatever the prior. It is not the paper's, and says nothing about a whole report or several rounds.
    """

    dim: int
    top: int
    decoys: int
    nu: float
    nu_any_prior: float
    confidence: float
    attacks: tuple[IndexAttack, ...]
    inequalities: tuple[Inequality, ...]

    @property
    def verdict(self) -> str:
        """Refuted if any attack refutes the claim; `confidence` is for all of them together."""
        return _verdict(refuted=any(attack.verdict == "refuted" for attack in self.attacks))

    @property
    def verdict_own_prior(self) -> str:
        """The same where the prior in Def. 3 is each coordinate's own."""
        return _verdict(refuted=any(attack.verdict_own_prior == "refuted" for attack in self.attacks))

    def attack(self, knowledge: Knowledge, rounds: int) -> IndexAttack:
        """The attack with this knowledge after this many rounds."""
        for attack in self.attacks:
            if (attack.knowledge, attack.rounds) == (knowledge, rounds):
                return attack
        raise ValueError(f"expected an attack that was made, got {knowledge=} with {rounds=}")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "protocol": SsTopk.name,
            "dim": self.dim,
            "k": self.top,
            "decoys": self.decoys,
            "claimed_nu": self.nu,
            "nu_any_prior": self.nu_any_prior,
            "confidence": self.confidence,
            "attacks": [attack.to_json() for attack in self.attacks],
            "inequalities": [inequality.to_json() for inequality in self.inequalities],
            "verdict": self.verdict,
            "verdict_own_prior": self.verdict_own_prior,
        }


def _verdict(*, refuted: bool) -> str:
    return "refuted" if refuted else "holds"


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
