"""The noisy sum that private scores come from: which protocol makes it, how much noise it has, and one drawing of it.

The sum is made by a protocol of the training's own trust model, among held-out people who all take part in every
round: a curator's sum with Gaussian noise, sums by shares (`secagg`) or by split-and-mix with the training's settings;
and where people trust nobody, or a single shuffler, every person adds Laplace noise to one number itself. So it is a
`Guarantee` like any other, calibrated and accounted for by the same accountant.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from dovetail import protocols
from dovetail._jax import jax, jnp
from dovetail.evaluation.vectors import NoisyScores, People, Records, ScoreVectors
from dovetail.events import Everyone
from dovetail.guarantee import Guarantee, Spread
from dovetail.protocols import Cohort, Protocol, fast_path
from dovetail.protocols.sums._skellam import NoisySum
from dovetail.randomness import Randomness
from dovetail.statements import Neighbors, NotApplicable, Trust

__all__ = ["Evaluation", "calibrate_evaluation", "noisy_sum", "people_add_own_noise"]

_STREAM = 2**30  # rounds of an evaluation are numbered from here: no training has so many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation that is ready to run: a layout of vectors, and the guarantee of the sums of all its rounds."""

    layout: ScoreVectors
    guarantee: Guarantee

    @property
    def protocol(self) -> Protocol:
        """The protocol that makes the sums, with its noise."""
        return self.guarantee.settled_protocol

    @property
    def noise_std(self) -> float:
        """Standard deviation of what is added to each number of a round's sum, rounding errors included."""
        people = self.layout.people
        std = self.protocol.noise_std(people, self.layout.dim) * people
        if isinstance(self.protocol, NoisySum):
            std = math.hypot(std, math.sqrt(people) / (2 * self.protocol.require("scale")))
        return float(std)

    def run_rounds(self, records: Records, people: People, randomness: Randomness) -> NoisyScores:
        """Run all rounds, each with noise of its own, and read the scores off their sums.

        Guarantees:
            What is returned is a function of the noisy sums and of public numbers.
        """
        sums: list[np.ndarray] = []
        for index in range(self.layout.rounds):
            vectors = self.layout.encode_records(records, people, sums)
            sums.append(self._noisy_sum_of_round(vectors, index, randomness))
        return self.layout.scores_from_sums(sums, self.noise_std)

    def _noisy_sum_of_round(self, vectors: np.ndarray, index: int, randomness: Randomness) -> np.ndarray:
        """The noisy sum of everybody's vectors in round `index`."""
        key = jax.random.fold_in(Randomness.key_from_words(jnp.asarray(randomness.key_data)), _STREAM + index)
        return np.asarray(noisy_sum(self.protocol, jnp.asarray(vectors, jnp.float32), key), np.float64)


@functools.partial(jax.jit, static_argnums=0)
def noisy_sum(protocol: Protocol, vectors: jax.Array, key: jax.Array) -> jax.Array:
    """The noisy sum of vectors (places, dim) by a settled protocol, as the engine makes one of updates."""
    places, dim = vectors.shape
    key_users, key_tally, key_estimate = jax.random.split(key, 3)
    state = protocol.prepare(protocol.init(dim), noise_scale=jnp.float32(1.0))
    fast = fast_path(protocol, dim)
    keys = jax.random.split(key_users, places)
    collected = fast.collect(vectors, jnp.ones(places, bool), state, keys=keys)
    tally = fast.finish(collected, key=key_tally)
    estimate, _ = protocol.estimate(tally, places, state, key=key_estimate)
    return estimate * places


def people_add_own_noise(training: Guarantee) -> bool:
    """Whether held-out people add all noise themselves: beside a training where they trust nobody, or one shuffler."""
    trust = training.scope.trust
    return trust is Trust.LOCAL or (trust is Trust.SHUFFLE and training.protocol.trust_settings is None)


def calibrate_evaluation(
    training: Guarantee,
    layout: ScoreVectors,
    *,
    eps: float,
    colluders: int,
    spread: Spread,
    assumptions: tuple[str, ...],
) -> Evaluation:
    """The evaluation with the least noise that keeps to eps, at the training's delta and under its relation.

    Arguments:
        training: what its protocol promises; the evaluation trusts nobody whom this does not trust.
        layout: what people add.
        eps: the target.
        colluders: how many of the held-out people may be the adversary's, as in the training.
        spread: how many of them there are, where that is public.
        assumptions: what its statement rests on beside the protocol's own.

    Guarantees:
        Refuses protocols whose trust model has no such sum, with a sentence.
    """
    protocol = _summing_protocol(training)
    needs_minimum = protocol.needs_minimum
    if needs_minimum and layout.people - colluders < 2:
        raise ValueError(
            f"evaluate='private' with protocol {protocol.name!r} needs two honest held-out people or more, got "
            f"{layout.people} people and {colluders} colluders: hold out more, or use public test records"
        )
    cohort = Cohort(
        participation=Everyone(),
        size=layout.people,
        min_size=layout.people if needs_minimum else 0,
        colluders=colluders,
    )
    guarantee = Guarantee(
        protocol=protocol,
        cohorts=(cohort,) * layout.rounds,
        dim=layout.dim,
        relation=training.relation,
        delta=training.delta,
        unit=training.target_unit,
        spread=spread,
        assumptions=assumptions,
        declared=training.declared,
        reproducible=training.reproducible,
    )
    return Evaluation(layout=layout, guarantee=guarantee.calibrate(eps))


def _summing_protocol(training: Guarantee) -> Protocol:
    """The protocol that sums the vectors, its noise open: of the training's trust model, or one that needs less."""
    protocol = training.protocol
    instead = "score on test records that are public (evaluate='public'), or choose another protocol"
    if protocol.budgets is not None:
        raise NotApplicable(
            f"{protocol.name!r} has a budget for every user, and evaluate='private' has one for all: {instead}"
        )
    if protocol.private_steps:
        raise NotApplicable(
            f"under {protocol.name!r} users add noise for the subjects of their records, and evaluate='private' has no "
            f"such sum of scores: {instead}"
        )
    if people_add_own_noise(training):
        if training.relation is not Neighbors.REPLACE_ONE:
            raise NotApplicable(f"evaluate='private' with protocol {protocol.name!r} needs replace-one: {instead}")
        return protocols.build("ldp_fl", {"randomizer": "laplace", "clip_value": 1.0})
    if protocol.trust_settings is not None and type(protocol) in protocols.BUNDLED:
        return protocols.build(protocol.name, {key: getattr(protocol, key) for key in protocol.trust_settings})
    if training.scope.trust is Trust.CURATOR:
        return protocols.build("dp_fl", {"clip_norm": 1.0})
    raise NotApplicable(f"evaluate='private' does not know how to sum scores as {protocol.name!r} does: {instead}")
