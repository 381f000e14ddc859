"""What clients add where aggregators take the shuffler's place: sums that `estimate` reads as it reads messages."""

import dataclasses
import functools
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

from dovetail import accounting, protocols
from dovetail.events import Everyone
from dovetail.mechanisms import ExactSampler
from dovetail.protocols import Cohort
from dovetail.shufflers import SlotSums, deliver
from dovetail.statements import Neighbors, NotApplicable, Trust

ALPHA = 1e-4
CLIENTS, DIM, ROUNDS = 8, 6, 300
COHORT = Cohort(participation=Everyone(), size=CLIENTS, min_size=CLIENTS, aggregators=2)
RR2 = {"clip_value": 0.1, "eps_local": 1.0}
RR5 = {**RR2, "randomizer": "rr", "levels": 5}
CENTRAL = {"clip_norm": 0.5, "noise_multiplier": 2.0}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    name: str
    parameters: dict[str, Any]
    bits: int | None = None
    dim: int = DIM

    @functools.cached_property
    def protocol(self):
        return protocols.build(self.name, self.parameters).settle(COHORT, self.dim)

    @functools.cached_property
    def contribution(self):
        return self.protocol.contribution(COHORT, self.dim)

    @property
    def updates(self):
        rng = np.random.default_rng(3)
        return rng.random((CLIENTS, 1)) if self.dim == 1 else 0.08 * rng.uniform(-1, 1, (CLIENTS, self.dim))

    @property
    def target(self):
        x = self.updates
        if self.name == "ss_topk":
            np.put_along_axis(x, np.argsort(np.abs(x), axis=1)[:, : self.dim - 2], 0, axis=1)
        return x.mean(axis=0)


SHARED = [
    Case("ss_simple", RR2, bits=4),
    Case("ss_simple", RR5, bits=6),
    Case("ss_topk", {**RR2, "k": 2}, bits=4),
    Case("binary_sum", {"eps_local": 1.0}, bits=4, dim=1),
    Case("real_sum", {"eps_local": 1.0, "levels": 4}, bits=5, dim=1),
    Case("real_sum", {"eps_local": 1.0, "method": "unary"}, bits=4, dim=1),
    Case("secagg", CENTRAL),
    Case("secagg", {**CENTRAL, "noise": "aggregators"}),
]


def label(case):
    return f"{case.name}-{'-'.join(str(value) for value in case.parameters.values())}"


@pytest.fixture(params=SHARED, ids=label)
def case(request):
    return request.param


def seeded(seed=0):
    return ExactSampler(np.random.default_rng(seed).bytes)


def summed(contribution, updates, draws, aggregators=2):
    """Every client splits its integers, every aggregator adds up its shares and its noise; all modulo 2^bits."""
    mask = (1 << contribution.bits) - 1
    sums = np.zeros((aggregators, contribution.length), np.int64)
    for x in updates:
        own = contribution.draw(x, sampler=draws)
        assert own.dtype == np.uint32
        assert int(own.max()) <= mask
        free = draws.integers(mask + 1, (aggregators - 1) * contribution.length).reshape(aggregators - 1, -1)
        sums += np.concatenate([free, (own - free.sum(axis=0))[None]])
    for index in range(aggregators):
        noise = contribution.noise(sampler=draws)
        sums[index] += 0 if noise is None else noise
    return (sums.sum(axis=0) & mask).astype(np.uint32)


@functools.cache
def estimates(case):
    """One for each of so many rounds."""
    draws, protocol = seeded(5), case.protocol
    found = []
    for _ in range(ROUNDS):
        tally = case.contribution.tally(summed(case.contribution, case.updates, draws), CLIENTS)
        found.append(protocol.estimate(tally, CLIENTS, protocol.init(case.dim), key=jax.random.key(0))[0])
    return np.stack([np.asarray(one, np.float64) for one in found])


def test_every_client_adds_as_many_integers_in_as_few_bits_as_hold_the_sum(case):
    contribution = case.contribution
    assert case.bits is None or contribution.bits == case.bits
    assert 1 <= contribution.bits <= 32
    assert contribution.length == case.protocol.layout(case.dim).slots
    assert any("uniform and independent" in said for said in contribution.assumptions)
    if case.bits is not None:
        highest = contribution.levels.response.levels - 1
        assert CLIENTS * highest < 2**contribution.bits <= 2 * CLIENTS * highest
        assert contribution.noise(sampler=seeded()) is None


def test_the_estimate_from_shares_is_unbiased(case):
    drawn = estimates(case)
    spread = drawn.std(axis=0, ddof=1) / np.sqrt(ROUNDS)
    assert (np.abs(drawn.mean(axis=0) - case.target) <= 5 * spread + 1e-3 * (case.name == "secagg")).all()


def test_the_estimate_from_shares_has_the_spread_of_the_simulation(case):
    """Of all coordinates together, within what 300 rounds resolve (six deviations of a variance)."""
    drawn, protocol = estimates(case), case.protocol
    keys = jax.random.split(jax.random.key(7), (ROUNDS, CLIENTS))
    updates = np.asarray(case.updates, np.float32)

    @jax.jit
    @jax.vmap
    def simulated(each):
        reports = jax.vmap(lambda x, key: protocol.randomize(x, protocol.init(case.dim), key=key))(updates, each)
        tally = protocol.tally(deliver(reports), case.dim)
        return protocol.estimate(tally, CLIENTS, protocol.init(case.dim), key=each[0])[0]

    ours, theirs = (values.var(axis=0, ddof=1).mean() for values in (drawn, np.asarray(simulated(keys), np.float64)))
    resolved = 6 * np.sqrt(4 / ROUNDS / case.dim)
    assert abs(np.log(ours / theirs)) < resolved


def test_sums_of_levels_read_like_messages_one_for_one():
    """From the same randomness a client's integers are the levels of its messages."""
    case = SHARED[1]
    x = case.updates[0]
    drawn = case.contribution.draw(x, sampler=seeded(9))
    sent = case.protocol.messages(DIM).randomize(x, sampler=seeded(9))
    np.testing.assert_array_equal(drawn[sent.slot], sent.body[:, 0])
    tally = case.contribution.tally(drawn, 1)
    assert isinstance(tally, SlotSums)
    np.testing.assert_array_equal(tally.total, drawn)
    assert set(np.asarray(tally.messages).tolist()) == {1}


def test_the_count_of_a_slot_is_binomial_and_a_near_miss_shows():
    """All clients at the upper end: each bit is one with probability e / (e + 1); 6 slots, 300 rounds."""
    case, draws = SHARED[0], seeded(11)
    everyone = np.full((CLIENTS, DIM), 1.0)
    counts = np.concatenate([summed(case.contribution, everyone, draws) for _ in range(ROUNDS)])
    truth = np.e / (1 + np.e)

    def accepted(prob):
        law = stats.binom.pmf(np.arange(CLIENTS + 1), CLIENTS, prob)
        cells = np.minimum(np.arange(CLIENTS + 1), CLIENTS).clip(3)  # rare counts in one cell
        expected = np.bincount(cells, law)[3:]
        found = np.bincount(np.clip(counts, 3, None), minlength=CLIENTS + 1)[3:]
        return stats.chisquare(found, expected * len(counts)).pvalue > ALPHA

    assert accepted(truth)
    assert not accepted(truth - 0.03)
    assert not accepted(truth + 0.03)


def topk(cohort, **settings):
    return protocols.build("ss_topk", {**RR2, "k": 2} | settings).settle(cohort, DIM)


def eps_of(protocol, cohort):
    view = protocol.view(cohort, DIM, neighbors=Neighbors.REPLACE_ONE)
    return accounting.certify([view.round], view.scope, delta=1e-6)


def test_on_shares_the_crowd_of_ss_topk_is_the_minimum_without_colluders():
    cohort = Cohort(participation=Everyone(), size=1000, min_size=400, colluders=100)
    shared = dataclasses.replace(cohort, aggregators=2)
    alone = Cohort(participation=Everyone(), size=300, min_size=300)
    padded, ours, few = (eps_of(topk(one), one) for one in (cohort, shared, dataclasses.replace(alone, aggregators=2)))
    assert ours.eps == pytest.approx(few.eps, rel=1e-6)
    assert ours.eps == pytest.approx(eps_of(topk(alone), alone).eps, rel=1e-6), "bits show no more than their count"
    assert padded.eps < 0.8 * ours.eps, "a shuffler's dummies stand for those who are absent"
    event = topk(shared).view(shared, DIM, neighbors=Neighbors.REPLACE_ONE).round.mechanism
    assert (event.num_users, event.pad_to, event.colluders) == (400, 400, 100)
    assert ours.trust is Trust.SHARES
    assert not any("shuffler" in said for said in ours.assumptions)


def test_on_shares_no_dummies_are_added_and_everybody_counts():
    shared = Cohort(participation=Everyone(), size=20, min_size=10, aggregators=2)
    protocol = topk(shared)
    assert protocol.settle(shared, DIM) == protocol
    path, updates = protocols.fast_path(protocol, DIM), np.zeros((20, DIM), np.float32)
    collected = path.collect(updates, np.arange(20) < 15, (), keys=jax.random.split(jax.random.key(0), 20))
    messages = path.finish(collected, key=jax.random.key(1)).messages
    assert set(np.asarray(messages).tolist()) == {15}
    for settings, sentence in (({"pad_to": 20}, "expected no pad_to"), ({"decoys": 3}, "expected all other coord")):
        with pytest.raises(ValueError, match=sentence):
            topk(shared, **settings)


def test_ss_simple_states_the_same_on_shares_with_other_trust():
    plain = dataclasses.replace(COHORT, size=500, min_size=500, aggregators=None)
    shared = dataclasses.replace(plain, aggregators=3)
    protocol = protocols.build("ss_simple", RR2).settle(shared, DIM)
    first, second = (eps_of(protocol, cohort) for cohort in (plain, shared))
    assert first.eps == second.eps
    assert (first.trust, second.trust) == (Trust.SHUFFLE, Trust.SHARES)
    assert second.adversary == "analyzer with up to 2 of the 3 aggregators"


UNSHARED = {
    "fedavg": ({}, "no privacy"),
    "dp_fl": (CENTRAL, "needs a curator"),
    "central_sub": ({**CENTRAL, "items_per_subject": 3, "sampling_rate": 0.1}, "needs a curator"),
    "local_sub": ({**CENTRAL, "items_per_subject": 3, "sampling_rate": 0.1}, "local training"),
    "privunit": ({"eps_local": 2.0}, "a seed of 16 bytes"),
    "ss_double": (RR2, "hides in dummies"),
    "split_and_mix": (CENTRAL, "use 'secagg'"),
    "real_sum": ({"method": "split", "noise_multiplier": 1.0}, "method='split'"),
}


@pytest.mark.parametrize("name", UNSHARED)
def test_what_cannot_be_shared_says_why_in_one_sentence(name):
    parameters, why = UNSHARED[name]
    dim = protocols.PROTOCOLS[name].only_dim or DIM
    plain = dataclasses.replace(COHORT, size=500, min_size=500, aggregators=None)
    protocol = protocols.build(name, parameters).settle(plain, dim)
    with pytest.raises(NotApplicable, match=f"shared as sums, got '{name}', which .*{why}"):
        protocol.contribution(dataclasses.replace(plain, aggregators=2), dim)


@pytest.mark.parametrize("name", ["privunit", "ss_double", "split_and_mix", "real_sum"])
def test_nothing_is_stated_of_shares_that_are_not_there(name):
    shared = dataclasses.replace(COHORT, size=500, min_size=500)
    dim = protocols.PROTOCOLS[name].only_dim or DIM
    with pytest.raises(NotApplicable, match="shared as sums"):
        protocols.build(name, UNSHARED[name][0]).settle(shared, dim).view(shared, dim, neighbors=Neighbors.REPLACE_ONE)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [({**RR2, "randomizer": "laplace"}, "randomizer='laplace'"), ({**RR2, "linkage": "vector"}, "linkage='vector'")],
)
def test_reports_that_are_no_levels_are_refused(parameters, sentence):
    with pytest.raises(NotApplicable, match=sentence):
        protocols.build("ss_simple", parameters).settle(COHORT, DIM).contribution(COHORT, DIM)


def test_sums_that_do_not_fit_a_word_are_refused():
    many = dataclasses.replace(COHORT, size=2**33, min_size=2)
    with pytest.raises(NotApplicable, match="at most 32 bits, got 34"):
        SHARED[0].protocol.contribution(many, DIM)


@pytest.mark.parametrize("clip_norm", [0.5, 1.0, 7.3])
@pytest.mark.parametrize("dim", [1, 6, 650])
def test_the_norm_that_is_proven_is_the_one_that_is_accounted_and_not_one_more(dim, clip_norm):
    """Squared norms of integers are integers: the largest below the accounted one is let through, the next is not."""
    settings = {**CENTRAL, "clip_norm": clip_norm, "noise": "aggregators", "aggregators": 2, "verified": True}
    protocol = protocols.build("secagg", settings).settle(COHORT, dim)
    proven = protocol.contribution(COHORT, dim)
    accounted = Fraction(protocol.encoding(dim).norm) ** 2
    assert proven.squared_norm <= accounted < proven.squared_norm + 1
    assert proven.proof.layout.squared == proven.squared_norm and proven.proof.shares == 2
