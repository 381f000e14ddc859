"""What deployed clients send, for every registered protocol: sizes, ranges, laws, and how the analyzer reads it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dovetail import protocols, testing
from dovetail.events import Everyone
from dovetail.mechanisms import ExactRandomizedResponse, ExactSampler
from dovetail.protocols import Messages, Protocol, Sent
from dovetail.protocols._messages import from_bytes, to_bytes
from dovetail.statements import NotApplicable

ALPHA = 1e-4
CLIENTS, DIM, ROUNDS, TOP = 8, 6, 60, 2
COHORT = protocols.Cohort(participation=Everyone(), size=CLIENTS, min_size=CLIENTS)


def seeded(seed: int = 0) -> ExactSampler:
    return ExactSampler(np.random.default_rng(seed).bytes)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    parameters: dict[str, Any]
    dim: int = DIM

    @functools.cached_property
    def protocol(self) -> Protocol:
        return protocols.build(self.name, self.parameters).settle(COHORT, self.dim)

    @functools.cached_property
    def messages(self) -> Messages:
        return self.protocol.messages(self.dim)

    @property
    def updates(self) -> np.ndarray:
        """Within what the protocol clips to; numbers in [0, 1] where it sums numbers."""
        rng = np.random.default_rng(3)
        return rng.random((CLIENTS, 1)) if self.dim == 1 else 0.08 * rng.uniform(-1, 1, (CLIENTS, self.dim))

    def target(self, x: np.ndarray) -> np.ndarray:
        if self.name != "ss_topk":
            return x.mean(axis=0)
        smallest = np.argsort(np.abs(x), axis=1)[:, : self.dim - TOP]
        kept = x.copy()
        np.put_along_axis(kept, smallest, 0, axis=1)
        return kept.mean(axis=0)


RR2 = {"clip_value": 0.1, "eps_local": 1.0}
RR5 = {**RR2, "randomizer": "rr", "levels": 5}
PERSONAL = {"budgets": [2.0, 8.0], "clip_value": 0.1}
CENTRAL = {"clip_norm": 0.5, "noise_multiplier": 2.0}
SUBJECTS = {**CENTRAL, "items_per_subject": 3, "sampling_rate": 0.1}
DEPLOYED = [
    Case("ss_simple", RR2),
    Case("ss_simple", {**RR5, "levels": 300}),
    Case("ss_double", {**RR2, "beta": 0.5, "inclusion": "fixed-k"}),
    Case("ss_topk", {**RR2, "k": TOP}),
    Case("ss_topk", {**RR5, "k": TOP, "pad_to": CLIENTS + 4}),
    Case("privunit", {"clip_norm": 0.3, "eps_local": 3.0}),
    Case("split_and_mix", {"clip_norm": 0.3, "noise_multiplier": 2.0, "shares": 5, "shufflers": 3}),
    Case("binary_sum", {"eps_local": 1.0}, dim=1),
    Case("real_sum", {"eps_local": 1.0, "levels": 4}, dim=1),
    Case("real_sum", {"eps_local": 1.0, "method": "unary"}, dim=1),
    Case("real_sum", {"noise_multiplier": 1.0, "method": "split", "mix": {"shares": 3}}, dim=1),
]
CURATOR = "has a trusted curator and no shuffler to deploy"
REFUSED = [
    (Case("fedavg", {}), CURATOR),
    (Case("dp_fl", CENTRAL), CURATOR),
    (Case("central_sub", SUBJECTS), CURATOR),
    (Case("local_sub", SUBJECTS), "adds its noise within local training"),
    (Case("secagg", CENTRAL), "shares sums between aggregators"),
    (Case("ldp_fl", CENTRAL), "has no messages for a shuffler"),
    (Case("apes", PERSONAL), "has no messages for a shuffler"),
    (Case("s_apes", {**PERSONAL, "keep": 0.5}), "has no messages for a shuffler"),
    (Case("unis", PERSONAL), "has no messages for a shuffler"),
    (Case("pldp", PERSONAL), "has no messages for a shuffler"),
    (Case("ldp_min", PERSONAL), "has no messages for a shuffler"),
    (Case("ss_simple", {**RR2, "randomizer": "laplace"}), "got randomizer='laplace'"),
    (Case("ss_simple", {**RR2, "linkage": "vector"}), "got linkage='vector'"),
    (Case("ss_double", {**RR2, "beta": 0.5}), "got inclusion='bernoulli'"),
    (Case("ss_topk", {**RR2, "k": TOP, "decoys": 3}), "expected all other coordinates as decoys .* got decoys=3"),
    (Case("privunit", {"clip_norm": 0.3, "eps_local": 60.0}), "tries at eps_local=60"),
]


def label(case: Case) -> str:
    return f"{case.name}-{'-'.join(str(value) for value in case.parameters.values())}"


@pytest.fixture(params=DEPLOYED, ids=label)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def only(wanted: Callable[[Case], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in DEPLOYED if wanted(case)], ids=label, indirect=True)


def tallies_its_own_way(case: Case) -> bool:
    """One case for every `tally` there is, not for every parameter."""
    first = next(other for other in DEPLOYED if other.name == case.name)
    return case.name not in ("ss_double", "ss_topk") and (case is first or case.parameters.get("method") == "split")


def sent_by(case: Case, updates: np.ndarray, sampler: ExactSampler) -> Sent:
    """The messages of all clients; in a padded protocol with the shuffler's dummies."""
    each = [case.messages.randomize(x, sampler=sampler) for x in updates]
    slot, body = np.concatenate([sent.slot for sent in each]), np.concatenate([sent.body for sent in each])
    padding = case.protocol.layout(case.dim).padding
    if padding is None:
        return Sent(slot, body)
    missing = np.repeat(np.arange(case.dim), padding.pad_to - np.bincount(slot, minlength=case.dim))
    dummies = case.messages.dummies(len(missing), sampler=sampler)
    return Sent(np.concatenate([slot, missing]), np.concatenate([body, dummies]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def tally_of(protocol: Protocol, dim: int, shuffled: Any) -> Any:
    return protocol.tally(shuffled, dim)


@functools.partial(jax.jit, static_argnums=(0, 1))
def estimates_of(protocol: Protocol, dim: int, rounds: Any) -> jax.Array:
    """Of every round on the leading axis."""

    def estimate(part: Any) -> jax.Array:
        return protocol.estimate(protocol.tally(part, dim), CLIENTS, protocol.init(dim), key=jax.random.key(0))[0]

    return jax.vmap(estimate)(rounds)


@functools.cache
def estimates(index: int, still: bool) -> np.ndarray:
    """Estimates of `ROUNDS` rounds, read and tallied from messages: (rounds, dim)."""
    case, sampler = DEPLOYED[index], seeded(index)
    updates = np.zeros((CLIENTS, case.dim)) if still else case.updates
    rounds = [sent_by(case, updates, sampler) for _ in range(ROUNDS)]
    shuffled, refused = case.messages.read(*(np.concatenate(column) for column in zip(*rounds, strict=True)))
    assert refused == 0
    apart = jax.tree.map(lambda leaf: leaf.reshape(ROUNDS, -1, *leaf.shape[1:]), shuffled)
    return np.asarray(estimates_of(case.protocol, case.dim, apart), np.float64)


# The contract


def test_every_other_protocol_sends_what_it_simulates_or_says_why_not() -> None:
    listed = {case.name for case in DEPLOYED} | {case.name for case, _ in REFUSED}
    for name in set(protocols.PROTOCOLS) - listed:
        bench = testing.Bench.build(protocols.find(name), {}, clients=CLIENTS)
        try:
            testing.OBLIGATIONS["messages"](bench)
        except testing.NotOwed as reason:
            assert protocols.find(name).undeployed in str(reason)


@pytest.mark.parametrize(("case", "reason"), REFUSED, ids=lambda value: label(value) if isinstance(value, Case) else "")
def test_what_cannot_be_deployed_says_why(case: Case, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason) as refusal:
        _ = case.messages
    assert "\n" not in str(refusal.value)


def test_sizes_do_not_depend_on_the_update(case: Case) -> None:
    messages, sampler = case.messages, seeded()
    wild = [np.full(case.dim, value) for value in (0.0, 1.0, -1e300, np.nan, np.inf)]
    for x in (*case.updates[:2], *wild):
        slot, body = messages.randomize(x, sampler=sampler)
        assert slot.shape == (messages.per_client,)
        assert slot.dtype == np.int64
        assert body.shape == (messages.per_client, messages.size)
        assert body.dtype == np.uint8
        assert len(np.unique(slot)) == len(slot), "at most one message of a client in a slot"
        assert slot.min() >= 0
        assert slot.max() < messages.slots
        assert messages.read(slot, body)[1] == 0
    layout = case.protocol.layout(case.dim)
    assert messages.slots == (1 if case.name == "privunit" else layout.slots)
    shuffler = messages.shuffler_of(np.arange(messages.slots))
    assert set(shuffler) == set(range(layout.shufflers))


@only(lambda case: "split" in (*case.parameters.values(), case.name[:5]))
def test_no_shuffler_holds_all_shares_of_a_coordinate(case: Case) -> None:
    held = case.messages.shuffler_of(np.arange(case.messages.slots)).reshape(case.dim, -1)
    np.testing.assert_array_equal(held, np.tile(np.arange(held.shape[1]) % case.messages.shufflers, (case.dim, 1)))


def test_the_estimate_from_messages_is_unbiased(case: Case) -> None:
    """Each coordinate of the mean over 60 rounds within 4.9 standard errors: alpha = 1e-5 in all at most."""
    drawn = estimates(DEPLOYED.index(case), False)
    spread = drawn.std(axis=0, ddof=1) / np.sqrt(ROUNDS)
    bias = case.messages.encoding.bias if hasattr(case.messages, "encoding") else 0.0
    assert (np.abs(drawn.mean(axis=0) - case.target(case.updates)) <= 4.9 * spread + bias).all()
    assert (spread > 0).all()


def test_the_noise_of_messages_is_the_declared_noise(case: Case) -> None:
    """On zero updates: a chi-square bound on the variance, alpha = 1e-4; 40 % more or less noise is rejected."""
    drawn = estimates(DEPLOYED.index(case), True)
    drawn = drawn[:, TOP if case.dim > 1 else 0 :]
    declared = case.protocol.noise_std(CLIENTS, case.dim)

    def p_value(std: float) -> float:
        tail = stats.chi2(drawn.size - drawn.shape[1]).cdf(((drawn - drawn.mean(axis=0)) ** 2).sum() / std**2)
        return 2 * min(tail, 1 - tail)

    assert p_value(declared) > ALPHA
    if case.dim > 1:
        assert p_value(declared * 1.4) < ALPHA
        assert p_value(declared / 1.4) < ALPHA


@only(tallies_its_own_way)
def test_tallies_of_parts_add_up_to_the_tally_of_the_whole(case: Case) -> None:
    sent = sent_by(case, case.updates, seeded(5))
    order = np.random.default_rng(0).permutation(len(sent.slot))

    def tally(rows: np.ndarray) -> Any:
        return tally_of(case.protocol, case.dim, case.messages.read(sent.slot[rows], sent.body[rows])[0])

    parts = jax.tree.map(np.add, *(jax.tree.map(np.asarray, tally(half)) for half in np.split(order, 2)))
    same(tally(np.arange(len(order))), parts)


def test_nothing_is_read_from_no_messages(case: Case) -> None:
    none, refused = case.messages.read(np.zeros(0, np.int64), np.zeros((0, case.messages.size), np.uint8))
    assert (none.value.shape[0], refused) == (0, 0)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(case.protocol.tally(none, case.dim)))


def same(left: Any, right: Any) -> None:
    """Equal sums, up to the order in which floats are added."""
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@only(lambda case: tallies_its_own_way(case) and case.name != "privunit")  # there a message is a client's row already
def test_the_tally_is_that_of_the_same_reports_in_columns(case: Case) -> None:
    """One report per row, or one client per row as in the simulation: the same sums."""
    sampler = seeded(6)
    each = [case.messages.randomize(x, sampler=sampler) for x in case.updates]
    slot, body = (np.stack(column) for column in zip(*each, strict=True))
    assert (slot == np.arange(case.messages.slots)).all()
    shuffled, _ = case.messages.read(slot.ravel(), body.reshape(-1, case.messages.size))
    dense = type(shuffled)(None, *(leaf.reshape(CLIENTS, -1) for leaf in shuffled[1:]))
    same(*(tally_of(case.protocol, case.dim, reports) for reports in (shuffled, dense)))


def test_what_no_honest_client_sends_is_refused_and_counted(case: Case) -> None:
    messages, (slot, body) = case.messages, sent_by(case, case.updates, seeded(7))
    honest, _ = messages.read(slot, body)
    bad = np.array([1, 4, 7])
    rest = np.delete(np.arange(len(slot)), bad)
    valid = np.ones(honest.valid.shape, bool)
    valid[bad] = False
    without = honest._replace(valid=jnp.asarray(valid))
    elsewhere, strange = slot.copy(), body.copy()
    elsewhere[bad], strange[bad] = [messages.slots, -1, 2**40], 255
    readings = [messages.read(elsewhere, body)]
    if case.name != "privunit":  # any 16 bytes are a seed
        readings.append(messages.read(slot, strange))
    for shuffled, refused in readings:
        assert refused == 3
        np.testing.assert_array_equal(np.asarray(shuffled.value)[rest], np.asarray(honest.value)[rest])
        same(tally_of(case.protocol, case.dim, shuffled), tally_of(case.protocol, case.dim, without))


def test_other_shapes_are_refused(case: Case) -> None:
    messages, sampler = case.messages, seeded()
    slot, body = messages.randomize(case.updates[0], sampler=sampler)
    with pytest.raises(ValueError, match="expected an update of shape"):
        messages.randomize(np.zeros(case.dim + 1), sampler=sampler)
    for wrong in (body[:, 1:], body.astype(np.int64), body[1:]):
        with pytest.raises(ValueError, match="expected slot of shape"):
            messages.read(slot, wrong)


def test_dummies_exist_where_slots_are_padded(case: Case) -> None:
    if case.protocol.layout(case.dim).padding is None:
        with pytest.raises(ValueError, match="expected a protocol that pads its slots"):
            case.messages.dummies(3, sampler=seeded())
    else:
        assert case.messages.dummies(3, sampler=seeded()).shape == (3, case.messages.size)


def test_distance_and_assumptions_are_stated(case: Case) -> None:
    messages = case.messages
    if hasattr(messages, "noise"):
        assert messages.total_variation == case.dim * messages.noise.distance > 0
        assert messages.total_variation < 2.0**-230
    else:
        assert messages.total_variation == 0
    assert any("operating systems" in assumption for assumption in messages.assumptions)
    assert any("AES-128" in assumption for assumption in messages.assumptions) == (case.name == "privunit")


# Laws


@pytest.mark.parametrize(("parameters", "levels"), [(RR2, 2), (RR5, 5)])
def test_dummies_and_decoys_are_uniform_levels(parameters: dict[str, Any], levels: int) -> None:
    """Chi-square, alpha = 1e-4; decoys of a client at the edge of the box, 20 % off uniform is rejected."""
    case = Case("ss_topk", {**parameters, "k": TOP}, dim=20_000)
    dummies = case.messages.dummies(20_000, sampler=seeded(1))[:, 0]
    x = np.r_[0.2, -0.2, np.full(case.dim - TOP, 0.1)]
    decoys = case.messages.randomize(x, sampler=seeded(2)).body[TOP:, 0]
    for drawn in (dummies, decoys):
        counts = np.bincount(drawn, minlength=levels)
        uniform = np.full(levels, len(drawn) / levels)
        assert stats.chisquare(counts, uniform).pvalue > ALPHA
        skewed = uniform * np.r_[1.2, 1 - 0.2 / (levels - 1) * np.ones(levels - 1)]
        assert stats.chisquare(counts, skewed).pvalue < 1e-9


@pytest.mark.parametrize(("parameters", "levels"), [(RR2, 2), (RR5, 5)])
def test_told_reports_have_the_law_that_is_accounted(parameters: dict[str, Any], levels: int) -> None:
    """Chi-square on a value inside the box, alpha = 1e-4; a budget off by 20 % is rejected."""
    case = Case("ss_simple", parameters, dim=20_000)
    counts = np.bincount(
        case.messages.randomize(np.full(case.dim, -0.09), sampler=seeded(4)).body[:, 0], minlength=levels
    )

    def p_value(protocol: Protocol) -> float:
        law = np.exp(protocol.log_density(np.arange(levels)[:, None], np.full(1, -0.09))[:, 0])
        return stats.chisquare(counts, law * counts.sum()).pvalue

    assert p_value(case.protocol) > ALPHA
    assert p_value(case.protocol.with_noise(1 / 1.2)) < 1e-9


def test_the_binary_response_is_the_exact_one_with_two_levels() -> None:
    local = Case("ss_simple", RR2).protocol.local_randomizer
    exact = ExactRandomizedResponse(1.0, levels=2)
    assert float(exact.prob_truth) == pytest.approx(1 - local.gamma, rel=1e-15)
    assert float(exact.prob_truth) == pytest.approx(local.prob_truth, rel=1e-15)


def test_all_sets_of_k_coordinates_are_equally_likely_whatever_the_update() -> None:
    """Chi-square over the 20 sets of 3 out of 6, alpha = 1e-4; the same sets from the same bytes for another update."""
    case = next(case for case in DEPLOYED if case.name == "ss_double")
    samplers, sets = (seeded(9), seeded(9)), list(itertools.combinations(range(DIM), 3))
    counts = dict.fromkeys(sets, 0)
    for _ in range(2000):
        chosen, other = (
            case.protocol.select_exactly(sign * case.updates[0], sampler=sampler)[0]
            for sign, sampler in zip((1, -3), samplers, strict=True)
        )
        np.testing.assert_array_equal(chosen, other)
        counts[tuple(chosen.tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > ALPHA


@pytest.mark.parametrize("dim", [60, pytest.param(200, marks=pytest.mark.soak)])
def test_a_deployed_client_tells_of_the_same_coordinates_as_a_simulated_one(dim: int) -> None:
    protocol = protocols.build("ss_topk", {**RR2, "k": 5}).settle(COHORT, dim)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=dim), rng.integers(-2, 3, dim), np.where(rng.random(dim) < 0.3, np.nan, 1.0)]
    updates = np.array(xs, np.float32)
    updates[:, -1] = -np.inf
    simulated = np.asarray(jax.jit(jax.vmap(protocol.depends_on_data))(updates))
    for x, expected in zip(updates, simulated, strict=True):
        slot, depends = protocol.select_exactly(x, sampler=seeded())
        np.testing.assert_array_equal(slot, np.arange(dim))
        np.testing.assert_array_equal(depends, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_integers_survive_bytes(size: int) -> None:
    values = np.array([0, 1, 127, 128, 255, 256**size - 1])
    body = to_bytes(values, size)
    assert body.shape == (6, size)
    assert body[-1].tolist() == [255] * size
    assert body[1].tolist() == [1] + [0] * (size - 1), "little endian"
    np.testing.assert_array_equal(from_bytes(body), values)
