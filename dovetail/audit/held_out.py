"""An attack on private scores: who is the held-out person, by all noisy sums that the scores are computed from.

Both worlds of one person are played through the code that sums (`evaluation.release.noisy_sum`), many times; everybody
else is known and subtracts out, so others hold nothing here, and where everybody adds all the noise itself, the
person's own report is seen. The attacker sees the sums of all rounds, which is more
than the scores, and looks at their projection on the difference of the person's two vectors: for Gaussian noise no test
is better. Bins and ranges, which follow from the first round, are held fixed, as accounting lets an adversary do.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.audit import runs
from dovetail.audit.bounds import LowerBound
from dovetail.evaluation import Evaluation, People
from dovetail.evaluation.release import noisy_sum
from dovetail.evaluation.vectors import Records
from dovetail.statements import Trust

__all__ = ["attack_private_scores"]

_BATCH = 500  # trials that are run together


def attack_private_scores(
    evaluation: Evaluation,
    first: Records | None,
    second: Records | None,
    *,
    delta: float,
    trials: int = 4000,
    confidence: float = 0.95,
    seed: int = 0,
    shown_before: Sequence[np.ndarray] | None = None,
) -> LowerBound:
    """A lower bound on the eps of private scores at this delta; too high with probability at most 1 - confidence.

    Arguments:
        evaluation: the evaluation, its noise set.
        first: what the person holds in one world; None: nothing.
        second: what it holds in the other.
        trials: runs of each world, of which half choose the test.
        seed: of the noise that is played; that of a run is its own.
        shown_before: what earlier rounds showed, on which vectors depend; zeros unless given.
    """
    layout = evaluation.layout
    shown = [np.zeros(layout.dim)] * layout.rounds if shown_before is None else list(shown_before)
    seen = 1 if evaluation.guarantee.scope.trust is Trust.LOCAL else layout.people
    worlds = [_vectors_of_everybody(evaluation, records, shown)[:, :seen] for records in (first, second)]
    difference = worlds[0].sum(axis=1) - worlds[1].sum(axis=1)  # (rounds, dim)
    key = jax.random.key(seed)
    played = np.stack(
        [
            _play_world(evaluation, vectors, difference, trials, jax.random.fold_in(key, world))
            for world, vectors in enumerate(worlds)
        ]
    )
    name = "projection of all noisy sums on what the held-out person may change"
    return runs.lower_bound_from_scores({name: played}, delta=delta, confidence=confidence)


def _vectors_of_everybody(evaluation: Evaluation, records: Records | None, shown: Sequence[np.ndarray]) -> np.ndarray:
    """Everybody's vectors in all rounds, (rounds, places, dim), where the first place holds these records alone."""
    layout = evaluation.layout
    if records is None:
        return np.zeros((layout.rounds, layout.people, layout.dim), np.float32)
    people = People(np.zeros(len(next(iter(records.values()))), np.int64), layout.people)
    return np.stack([layout.encode_records(records, people, shown[:index]) for index in range(layout.rounds)])


def _play_world(
    evaluation: Evaluation, vectors: np.ndarray, difference: np.ndarray, trials: int, key: jax.Array
) -> np.ndarray:
    """The statistic in so many runs of one world, (trials,)."""

    @jax.jit
    def statistic(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(vectors))
        sums = [
            noisy_sum(evaluation.protocol, jnp.asarray(exact, jnp.float32), own)
            for exact, own in zip(vectors, keys, strict=True)
        ]
        return jnp.vdot(jnp.stack(sums), jnp.asarray(difference, jnp.float32))

    batches = [
        jax.vmap(statistic)(jax.random.split(jax.random.fold_in(key, low), min(_BATCH, trials - low)))
        for low in range(0, trials, _BATCH)
    ]
    return np.concatenate([np.asarray(batch, np.float64) for batch in batches])
