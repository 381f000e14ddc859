"""What the shuffler learns from indices: an attack on FLAME's nu-index privacy (Def. 3, Prop. 2, Thm. 5).

Under SS-Topk the shuffler sees, beside each user's name, which coordinates it reports: its k largest and some decoys.
Def. 3 wants Pr[j is among the k largest | j is reported] to be at most nu times the probability before, which the paper
takes to be beta = k / d for every coordinate, in one round and for one index by itself. The audit runs the protocol's
own `randomize` for many users and guesses one of the k largest coordinates of each, from the reports of all rounds.
It knows nothing (uniform), or the k largest of other users: how often each coordinate is among them (population), or
also which of those users have reports alike (similar users). Half of the users are learned from, the others attacked.

*Guesses.* Every coordinate gets a score, the larger the likelier. Decoys are drawn anew in every round while the k
largest mostly stay, so what is reported again and again is likely one of them; beyond that, other users tell what to
expect.

*Users to attack.* `Population` is a model that needs no data: coordinates of power-law scale, partly the same in all of
a user's rounds. `noiseless_updates` takes them from a task: logistic regression, one record a user, the model moving by
noiseless FedSGD.

First come the results, then scores and guesses, users to attack, the claim, and `audit_indices`, which runs it all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logit
from scipy.stats import beta as beta_law

from dovetail import _validate
from dovetail.data import Task, partition, resolve
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate, local_update
from dovetail.protocols.flame.ss_topk import SsTopk
from dovetail.statements import NotApplicable

__all__ = [
    "KNOWLEDGE",
    "ROUNDING",
    "IndexAttack",
    "IndexAudit",
    "Inequality",
    "Knowledge",
    "Population",
    "audit_indices",
    "best_coordinates",
    "claimed_nu",
    "is_guess_right",
    "noiseless_updates",
    "posterior_if_reported",
    "score_coordinates",
    "success_rate",
]

_CHUNK_VALUES = 2**22  # coordinates that are selected from at a time, over users and rounds
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
    def gain_over_prior(self) -> float:
        """Success over that of the same adversary without the reports: what seeing them adds."""
        return self.success / self.prior_success if self.prior_success else math.inf

    @property
    def verdict(self) -> str:
        """Refuted where even the lower bound is above nu beta, and not by the prior alone.

        "holds" says no more than that this attack does not refute it.
        """
        return _verdict_word(refuted=self.lower > self.nu * self.beta and self.gain_over_prior > 1)

    @property
    def verdict_own_prior(self) -> str:
        """The verdict if Def. 3 takes each coordinate's own prior for beta: popularity by itself refutes nothing."""
        return _verdict_word(refuted=self.lower > self.nu * self.chance_upper)

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite gain is null."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "amplification": self.amplification,
            "amplification_lower": self.lower / self.beta,
            "gain": self.gain_over_prior if math.isfinite(self.gain_over_prior) else None,
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
    def is_violated(self) -> bool:
        """Whether some coordinate exceeds nu, by more than rounding."""
        return self.worst > self.nu * (1 + ROUNDING)

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite ratio (a coordinate that is among everybody's k largest) is null."""
        worst = self.worst if math.isfinite(self.worst) else None
        return {**dataclasses.asdict(self), "worst": worst, "fails": self.is_violated}


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexAudit:
    """What each adversary achieves, beside the claim.

    `verdict` takes the prior to be beta, as the paper does. Def. 3 is about one index in one round; whole reports and
    several rounds are attacks on what it is meant to say. `verdict_own_prior` and each attack's `gain_over_prior` tell
    what the reports give away beyond what is known of all users.

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
        return _verdict_word(refuted=any(attack.verdict == "refuted" for attack in self.attacks))

    @property
    def verdict_own_prior(self) -> str:
        """The verdict if Def. 3 takes each coordinate's own prior: refuted if any attack refutes the claim then."""
        return _verdict_word(refuted=any(attack.verdict_own_prior == "refuted" for attack in self.attacks))

    def attack_with(self, knowledge: Knowledge, rounds: int) -> IndexAttack:
        """The attack with this knowledge after this many rounds."""
        for attack in self.attacks:
            if (attack.knowledge, attack.rounds) == (knowledge, rounds):
                return attack
        raise ValueError(f"no attack with {knowledge=} was made after {rounds=}")

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `dovetail audit ss_topk --view shuffler --json` prints them."""
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


def _verdict_word(*, refuted: bool) -> str:
    return "refuted" if refuted else "holds"


Knowledge = Literal["uniform", "population", "similar users"]
KNOWLEDGE: tuple[Knowledge, ...] = ("uniform", "population", "similar users")


def score_coordinates(
    knowledge: Knowledge, others_largest: np.ndarray, reported: np.ndarray, decoy_rate: float
) -> np.ndarray:
    """Scores (users, dim): the larger, the likelier a coordinate is among a user's k largest of the last round.

    Rounds are combined as if they were independent given the last one, at the rate at which others keep a coordinate.
    A coordinate that was not reported in the last round has -inf.

    Arguments:
        knowledge: what the adversary knows beside the reports.
        others_largest: a mask of the k largest of the users learned from, (others, rounds, dim).
        reported: a mask of what the attacked users reported, (users, rounds, dim).
        decoy_rate: how often a coordinate that is not among the k largest is reported.
    """
    if knowledge == "uniform":
        return np.where(reported[:, -1], reported.sum(axis=1, dtype=np.float64), -np.inf)
    num_others, rounds, dim = others_largest.shape
    top = np.count_nonzero(others_largest[0, 0])
    beta = top / dim
    marginal = (others_largest[:, -1].sum(axis=0) + beta) / (num_others + 1)
    score: np.ndarray = logit(marginal)[None]
    if knowledge == "similar users":
        score = logit(
            (num_others * _frequency_among_similar(others_largest, reported, decoy_rate) + marginal) / (num_others + 1)
        )
    for t in range(rounds - 1):
        kept = np.count_nonzero(others_largest[:, t] & others_largest[:, -1])
        stays = (kept + beta) / (num_others * top + 1)
        comes = (1 - stays) * beta / (1 - beta)
        evidence = math.log((stays + (1 - stays) * decoy_rate) / (comes + (1 - comes) * decoy_rate))
        score = score + reported[:, t] * (evidence - math.log((1 - stays) / (1 - comes)))
    return np.where(reported[:, -1], score, -np.inf)


def _frequency_among_similar(others_largest: np.ndarray, reported: np.ndarray, decoy_rate: float) -> np.ndarray:
    """How often each coordinate is among the k largest of similar users: (users, dim).

    Every other user counts by how well its k largest would explain the reports. A coordinate is taken to be shared with
    such a user at the rate at which any two users share theirs. Arguments are those of `score_coordinates`.
    """
    _, rounds, dim = others_largest.shape
    frequency = np.mean(others_largest, axis=(0, 1))
    shared = min(float(np.sum(frequency**2) / np.sum(frequency)), 1 - 1 / dim)
    weight = math.log1p(shared / (1 - shared) / decoy_rate)
    overlap = sum(reported[:, t].astype(np.float32) @ others_largest[:, t].astype(np.float32).T for t in range(rounds))
    likelihood = np.exp(weight * (overlap - np.max(overlap, axis=1, keepdims=True)).astype(np.float64))
    return likelihood @ others_largest[:, -1].astype(np.float64) / likelihood.sum(axis=1, keepdims=True)


def best_coordinates(score: np.ndarray) -> np.ndarray:
    """A mask (users, dim) of the coordinates with a user's highest score, all of them where several are equal."""
    return score == np.max(score, axis=1, keepdims=True)


def success_rate(best: np.ndarray, largest: np.ndarray) -> float:
    """How often a uniform guess among each user's best coordinates is among its k largest, on average over users.

    Arguments:
        best: a mask (users, dim); `largest` likewise, of the k largest.
    """
    return math.fsum(np.count_nonzero(best & largest, axis=1) / np.count_nonzero(best, axis=1)) / len(largest)


def is_guess_right(best: np.ndarray, largest: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """Whether each user's guess is among its k largest, (users,): the best coordinate with the largest coin.

    Arguments:
        best: a mask (users, dim); `largest` likewise, of the k largest.
        coins: uniform numbers (users, dim) that break ties.
    """
    guess = np.argmax(np.where(best, coins, -1.0), axis=1)
    return largest[np.arange(len(guess)), guess]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Population:
    """Users with made-up updates: coordinate j, counted from 1, is normal with standard deviation j^-scale_exponent.

    `persistence` is the share of its variance that a user keeps over all rounds; the rest is drawn anew in each. The
    defaults give about what MNIST's logistic regression does with one image per user, d = 7850 and k = 157: the most
    popular coordinate is among the k largest of 60 % of the users, and seven in ten of the k largest stay from one
    round to another. Unlike there, coordinates are independent.
    """

    users: int
    dim: int
    scale_exponent: float = 0.2
    persistence: float = 0.95

    def __post_init__(self) -> None:
        _validate.integer(users=self.users, dim=self.dim)
        _validate.at_least(4, users=self.users)
        _validate.at_least(2, dim=self.dim)
        _validate.non_negative(scale_exponent=self.scale_exponent)
        _validate.in_interval(0, 1, persistence=self.persistence)

    def draw_updates(self, users: jax.Array, rounds: int, *, key: jax.Array) -> jax.Array:
        """The updates of these users, (users, rounds, dim)."""
        scale = jnp.arange(1, self.dim + 1, dtype=jnp.float32) ** -self.scale_exponent

        def updates_of(user: jax.Array) -> jax.Array:
            own, fresh = jax.random.split(jax.random.fold_in(key, user))
            lasting = math.sqrt(self.persistence) * jax.random.normal(own, (1, self.dim))
            return scale * (lasting + math.sqrt(1 - self.persistence) * jax.random.normal(fresh, (rounds, self.dim)))

        return jax.vmap(updates_of)(users)


def noiseless_updates(
    task: str | Task, *, users: int, rounds: int, learning_rate: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Updates of one-record users who all take part in every round of noiseless FedSGD: (users, rounds, dim).

    The model is logistic regression from zero, so `rounds` models are seen, each a step on.
    """
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)
    _validate.positive(learning_rate=learning_rate)
    dataset, model = models.build("logistic", resolve(task).load(folder=None))
    records = partition.one_record(len(dataset.labels), users=users, seed=seed).records[:, None]
    inputs = dataset.inputs[records] / np.float32(255 if dataset.inputs.dtype == np.uint8 else 1)
    first = model.init(jax.random.key(seed))
    update = local_update(ClientUpdate(), lambda params, x: model.apply(params.reshape(first.shape), x))
    everyone = jax.jit(jax.vmap(update, in_axes=(None, 0, 0, None)))
    params = first.ravel()
    updates = []
    for _ in range(rounds):
        updates.append(np.asarray(everyone(params, inputs, dataset.labels[records], 1)))
        params = params + learning_rate * np.mean(updates[-1], axis=0)
    return np.stack(updates, axis=1)


def claimed_nu(*, dim: int, top: int, decoys: int) -> float:
    """The smallest nu that FLAME claims for l = (k + decoys) / k messages (Prop. 2): 1 / (l beta), but for l near 1.

    Equal to Thm. 5 for whole l. Without decoys nothing is claimed.
    """
    if decoys == 0:
        raise NotApplicable(
            "FLAME Prop. 2 claims nothing without decoys (l = 1): the reported indices are the k largest"
        )
    sent = (top + decoys) / top
    beta = top / dim
    return max(1.0, dim / (top + decoys), (1 - beta) * sent / (sent - 1))


def posterior_if_reported(prior: np.ndarray, *, decoy_rate: float) -> np.ndarray:
    """Pr[among the k largest | reported], index by index.

    Arguments:
        prior: the probability before that each index is among the k largest.
        decoy_rate: how often an index that is not among them is reported.

    Guarantees:
        Exact for every law of the updates, the decoy rate being decoys / (d - k).
    """
    _validate.in_interval(0, 1, decoy_rate=decoy_rate)
    reported = prior + (1 - prior) * decoy_rate
    return np.divide(prior, reported, out=np.zeros_like(reported), where=reported > 0)


def audit_indices(
    protocol: SsTopk,
    updates: np.ndarray | Population,
    *,
    rounds: tuple[int, ...] = (1, 10),
    confidence: float = 0.95,
    key: jax.Array,
) -> IndexAudit:
    """Attack the indices that users report under SS-Topk.

    Arguments:
        protocol: SS-Topk, settled for these updates.
        updates: (users, rounds, dim), or a population that makes them.
        rounds: after how many rounds each attack is made.
        confidence: with which all bounds hold together.

    Guarantees:
        All bounds hold together with this confidence.
        If everything is reported, no adversary learns anything: every gain over the prior is 1, and `chance` is
        `success`.
        No user that is attacked is learned from.
    """
    users, dim = _num_users_and_dim(updates, rounds)
    _validate.in_open_interval(0, 1, confidence=confidence)
    top = protocol.k
    decoys = cast(int, protocol.require("decoys"))
    if top + decoys > dim:
        raise ValueError(f"k + decoys = {top} + {decoys} is more than the {dim} coordinates of an update")
    nu = claimed_nu(dim=dim, top=top, decoys=decoys)
    decoy_rate = decoys / (dim - top)
    key_split, key_reports, key_ties = jax.random.split(key, 3)
    order = np.asarray(jax.random.permutation(key_split, users))
    largest, reported = _select_and_report(protocol, updates, max(rounds), key=key_reports)
    learned = order[: users // 2]
    attacked = order[users // 2 :]
    coins = np.asarray(jax.random.uniform(key_ties, (len(attacked), dim)))
    error = (1 - confidence) / (2 * len(KNOWLEDGE) * len(rounds))

    def attack_after(knowledge: Knowledge, seen: int) -> IndexAttack:
        other = largest[learned, :seen]
        own = largest[attacked, seen - 1]
        best = best_coordinates(score_coordinates(knowledge, other, reported[attacked, :seen], decoy_rate))
        blind = best_coordinates(score_coordinates(knowledge, other, np.ones((1, seen, dim), bool), decoy_rate))
        neighbour = np.roll(own, 1, axis=0)
        hits = is_guess_right(best, own, coins)
        by_chance = is_guess_right(best, neighbour, coins)[1::2]  # each user in one pair only: independent trials
        return IndexAttack(
            knowledge=knowledge,
            rounds=seen,
            trials=len(hits),
            hits=int(np.count_nonzero(hits)),
            lower=_success_lower_bound(hits, error),
            success=success_rate(best, own),
            prior_success=success_rate(blind, own),
            chance=success_rate(best, neighbour),
            chance_upper=1 - _success_lower_bound(~by_chance, error),
            beta=top / dim,
            nu=nu,
        )

    return IndexAudit(
        dim=dim,
        top=top,
        decoys=decoys,
        nu=nu,
        nu_any_prior=1 / decoy_rate,
        confidence=confidence,
        attacks=tuple(attack_after(knowledge, seen) for seen in rounds for knowledge in KNOWLEDGE),
        inequalities=_check_inequalities(np.mean(largest[:, 0], axis=0), reported[:, 0], top / dim, nu, decoy_rate),
    )


def _num_users_and_dim(updates: np.ndarray | Population, rounds: tuple[int, ...]) -> tuple[int, int]:
    """The number of users and of coordinates; refuses what cannot be attacked."""
    if not rounds:
        raise ValueError("rounds is empty: name at least one number of rounds to attack after")
    for seen in rounds:
        _validate.integer(rounds=seen)
        _validate.at_least(1, rounds=seen)
    if isinstance(updates, Population):
        return updates.users, updates.dim
    if updates.ndim != 3 or len(updates) < 4 or updates.shape[1] < max(rounds):
        raise ValueError(
            f"expected updates (users, rounds, dim) of at least 4 users in {max(rounds)} rounds, got {updates.shape}"
        )
    _validate.finite_array(updates=updates)
    return updates.shape[0], updates.shape[2]


def _select_and_report(
    protocol: SsTopk, updates: np.ndarray | Population, rounds: int, *, key: jax.Array
) -> tuple[np.ndarray, np.ndarray]:
    """Which coordinates are each user's k largest, and which it reports: two masks (users, rounds, dim)."""
    users, dim = _num_users_and_dim(updates, (rounds,))
    key_updates, key_reports = jax.random.split(key)
    draw = jax.jit(Population.draw_updates, static_argnums=(0, 2))
    step = min(users, max(1, _CHUNK_VALUES // (rounds * dim)))
    largest = np.empty((users, rounds, dim), bool)
    sent = np.empty((users, rounds, dim), bool)
    for start in range(0, users, step):
        names = np.minimum(np.arange(start, start + step), users - 1)  # the last ones may be looked at twice
        if isinstance(updates, Population):
            xs = draw(updates, jnp.asarray(names), rounds, key=key_updates)
        else:
            xs = jnp.asarray(updates[names, :rounds], jnp.float32)
        largest[names], sent[names] = _select_and_report_chunk(protocol, xs, jnp.asarray(names), key_reports)
    return largest, sent


@functools.partial(jax.jit, static_argnums=0)
def _select_and_report_chunk(
    protocol: SsTopk, xs: jax.Array, names: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The two masks of `_select_and_report` for some users, from the protocol's own messages.

    Arguments:
        xs: their updates, (users, rounds, dim).
        names: their numbers, from which every user and round gets a key of its own.
    """
    _, rounds, dim = xs.shape

    def client(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        reports = protocol.randomize(x, protocol.init(dim), key=key)
        sent = reports.valid
        if reports.slot is not None:
            sent = jnp.zeros(dim, bool).at[reports.slot].max(reports.valid, mode="drop")
        return protocol.select_coordinates(x, key=key)[0], sent

    keys = jax.vmap(lambda name: jax.random.split(jax.random.fold_in(key, name), rounds))(names)
    return jax.vmap(jax.vmap(client))(xs, keys)


def _success_lower_bound(outcomes: np.ndarray, error: float) -> float:
    """The Clopper-Pearson lower bound on the probability of True, from independent outcomes; rounded down.

    If the probability is smaller than the bound, so many outcomes are True with probability at most `error`.
    """
    hits, misses = np.count_nonzero(outcomes), np.count_nonzero(~outcomes)
    return float(beta_law.ppf(error, hits, misses + 1)) * (1 - ROUNDING) if hits else 0.0


def _check_inequalities(
    top_frequency: np.ndarray, reported: np.ndarray, beta: float, nu: float, decoy_rate: float
) -> tuple[Inequality, ...]:
    """Both inequalities of Def. 3 under both priors; where a probability is 0 before, there is nothing to compare.

    Arguments:
        top_frequency: how often each coordinate is among the k largest, (dim,).
        reported: a mask of what users reported in the first round, (users, dim).
        beta: the prior that the paper takes for every coordinate.
    """
    after = posterior_if_reported(top_frequency, decoy_rate=decoy_rate)
    results = []
    for name, prior in (("beta", np.full_like(top_frequency, beta)), ("own", top_frequency)):
        for number, above, below in ((1, after, prior), (2, 1 - prior, 1 - after)):
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(above > 0, above / below, 0.0)
            failing = ratio > nu * (1 + ROUNDING)
            results.append(
                Inequality(
                    number=cast(Literal[1, 2], number),
                    prior=cast(Literal["beta", "own"], name),
                    worst=float(np.max(ratio)),
                    nu=nu,
                    share=float(np.mean(np.any(reported & failing, axis=1))),
                )
            )
    return tuple(results)
