"""What the shuffler learns from indices: an attack on FLAME's nu-index privacy (Def. 3, Prop. 2, Thm. 5).

Under SS-Topk the shuffler sees, beside each user's name, which coordinates it reports: its k largest and some decoys.
Def. 3 wants Pr[j is among the k largest | j is reported] to be at most nu times the probability before, which the paper
takes to be beta = k / d for every coordinate, in one round and for one index by itself. The audit runs the protocol's
own `randomize` for many users and guesses one of the k largest coordinates of each, from the reports of all rounds.
It knows nothing (uniform), or the k largest of other users: how often each coordinate is among them (population), or
also which of those users have reports alike (similar users). Half of the users are learned from, the others attacked.
"""

from __future__ import annotations

import functools
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import beta as beta_law

from dovetail import _validate
from dovetail.audit.indices.findings import (
    KNOWLEDGE,
    ROUNDING,
    IndexAttack,
    IndexAudit,
    Inequality,
    Knowledge,
    best_of,
    rate,
    right,
    scores,
)
from dovetail.audit.indices.populations import Population
from dovetail.protocols.flame.ss_topk import SsTopk
from dovetail.statements import NotApplicable

__all__ = [
    "IndexAttack",
    "IndexAudit",
    "Inequality",
    "audit_indices",
    "claimed_nu",
    "posterior",
]

_CHUNK_VALUES = 2**22  # coordinates that are selected from at a time, over users and rounds


def claimed_nu(*, dim: int, top: int, decoys: int) -> float:
    """The smallest nu that FLAME claims for l = (k + decoys) / k messages (Prop. 2): 1 / (l beta), but for l near 1.

    Equal to Thm. 5 for whole l. Without decoys nothing is claimed.
    """
    if decoys == 0:
        raise NotApplicable(
            "FLAME Prop. 2 claims nothing without decoys (l = 1): the reported indices are the k largest"
        )
    sent, beta = (top + decoys) / top, top / dim
    return max(1.0, dim / (top + decoys), (1 - beta) * sent / (sent - 1))


def posterior(prior: np.ndarray, *, decoy_rate: float) -> np.ndarray:
    """Pr[among the k largest | reported], index by index: others are reported as decoys, at this rate.

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
    """Attack the indices that users report in as many rounds as are listed; updates are (users, rounds, dim).

    Guarantees:
        All bounds hold together with this confidence.
        If everything is reported, no adversary learns anything: every `gain` is 1, and `chance` is `success`.
        No user that is attacked is learned from.
    """
    users, dim = _shape(updates, rounds)
    _validate.in_open_interval(0, 1, confidence=confidence)
    top, decoys = protocol.k, cast(int, protocol.known("decoys"))
    if top + decoys > dim:
        raise ValueError(f"expected k + decoys <= {dim}, the dimension, got {top} + {decoys}")
    nu = claimed_nu(dim=dim, top=top, decoys=decoys)
    decoy_rate = decoys / (dim - top)
    key_split, key_look, key_ties = jax.random.split(key, 3)
    order = np.asarray(jax.random.permutation(key_split, users))
    largest, reported = _look(protocol, updates, max(rounds), key=key_look)
    learned, attacked = order[: users // 2], order[users // 2 :]
    coins = np.asarray(jax.random.uniform(key_ties, (len(attacked), dim)))
    error = (1 - confidence) / (2 * len(KNOWLEDGE) * len(rounds))

    def attack(knowledge: Knowledge, seen: int) -> IndexAttack:
        other, mine = largest[learned, :seen], largest[attacked, seen - 1]
        best = best_of(scores(knowledge, other, reported[attacked, :seen], decoy_rate))
        blind = best_of(scores(knowledge, other, np.ones((1, seen, dim), bool), decoy_rate))
        neighbour = np.roll(mine, 1, axis=0)
        hits = right(best, mine, coins)
        by_chance = right(best, neighbour, coins)[1::2]  # each user in one pair only: independent trials
        return IndexAttack(
            knowledge=knowledge,
            rounds=seen,
            trials=len(hits),
            hits=int(np.count_nonzero(hits)),
            lower=_lower(hits, error),
            success=rate(best, mine),
            prior_success=rate(blind, mine),
            chance=rate(best, neighbour),
            chance_upper=1 - _lower(~by_chance, error),
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
        attacks=tuple(attack(knowledge, seen) for seen in rounds for knowledge in KNOWLEDGE),
        inequalities=_inequalities(np.mean(largest[:, 0], axis=0), reported[:, 0], top / dim, nu, decoy_rate),
    )


def _shape(updates: np.ndarray | Population, rounds: tuple[int, ...]) -> tuple[int, int]:
    """The number of users and of coordinates; refuses what cannot be attacked."""
    if not rounds:
        raise ValueError(f"expected at least one number of rounds, got {rounds=}")
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


def _look(
    protocol: SsTopk, updates: np.ndarray | Population, rounds: int, *, key: jax.Array
) -> tuple[np.ndarray, np.ndarray]:
    """Which coordinates are each user's k largest, and which it reports: two masks (users, rounds, dim)."""
    users, dim = _shape(updates, (rounds,))
    key_updates, key_reports = jax.random.split(key)
    draw = jax.jit(Population.updates, static_argnums=(0, 2))
    step = min(users, max(1, _CHUNK_VALUES // (rounds * dim)))
    largest, sent = np.empty((users, rounds, dim), bool), np.empty((users, rounds, dim), bool)
    for start in range(0, users, step):
        names = np.minimum(np.arange(start, start + step), users - 1)  # the last ones may be looked at twice
        if isinstance(updates, Population):
            xs = draw(updates, jnp.asarray(names), rounds, key=key_updates)
        else:
            xs = jnp.asarray(updates[names, :rounds], jnp.float32)
        largest[names], sent[names] = _masks(protocol, xs, jnp.asarray(names), key_reports)
    return largest, sent


@functools.partial(jax.jit, static_argnums=0)
def _masks(protocol: SsTopk, xs: jax.Array, names: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two masks of some users, from the protocol's own messages; every user and round has a key of its own."""
    _, rounds, dim = xs.shape

    def client(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        reports = protocol.randomize(x, protocol.init(dim), key=key)
        sent = reports.valid
        if reports.slot is not None:
            sent = jnp.zeros(dim, bool).at[reports.slot].max(reports.valid, mode="drop")
        return protocol.select(x, key=key)[0], sent

    keys = jax.vmap(lambda name: jax.random.split(jax.random.fold_in(key, name), rounds))(names)
    return jax.vmap(jax.vmap(client))(xs, keys)


def _lower(right: np.ndarray, error: float) -> float:
    """The Clopper-Pearson bound: under a smaller probability, as many are right with probability below `error`."""
    hits, misses = np.count_nonzero(right), np.count_nonzero(~right)
    return float(beta_law.ppf(error, hits, misses + 1)) * (1 - ROUNDING) if hits else 0.0


def _inequalities(
    own: np.ndarray, reported: np.ndarray, beta: float, nu: float, decoy_rate: float
) -> tuple[Inequality, ...]:
    """Both of Def. 3 under both priors; where a probability is 0 before, there is nothing to compare."""
    after = posterior(own, decoy_rate=decoy_rate)
    found = []
    for name, prior in (("beta", np.full_like(own, beta)), ("own", own)):
        for number, above, below in ((1, after, prior), (2, 1 - prior, 1 - after)):
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(above > 0, above / below, 0.0)
            failing = ratio > nu * (1 + ROUNDING)
            found.append(
                Inequality(
                    number=cast(Literal[1, 2], number),
                    prior=cast(Literal["beta", "own"], name),
                    worst=float(np.max(ratio)),
                    nu=nu,
                    share=float(np.mean(np.any(reported & failing, axis=1))),
                )
            )
    return tuple(found)
