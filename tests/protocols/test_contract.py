"""What every registered protocol owes, without a list to forget one in."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import products

from dovetail import accounting, protocols, testing
from dovetail.accounting.releases import crowds
from dovetail.accounting.releases.split_and_mix import rounded_norm
from dovetail.events import (
    Disjoint,
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    NonPrivate,
    Personalized,
    Poisson,
    SampledSubject,
    SkellamNoise,
)
from dovetail.learners.client import private_update
from dovetail.mechanisms import ClipLaplace
from dovetail.mechanisms import LaplaceRandomizer as RealLaplace
from dovetail.protocols import Fast, fast_path
from dovetail.shufflers import Reports, ShuffledReports, deliver, shuffle
from dovetail.statements import Neighbors, NotApplicable

DIM, CLIENTS = 40, 150
RR2 = {"clip_value": 0.1, "eps_local": 1.0}
CENTRAL = {"clip_norm": 0.5, "noise_multiplier": 2.0}
COHORT = protocols.Cohort(participation=Everyone(), size=CLIENTS, min_size=CLIENTS)
SHORT = {"ss_simple": 3}  # variants that are in `make test`; two unless given


@dataclasses.dataclass(frozen=True)
class Case:
    """A protocol under one of its `variants`."""

    name: str
    settings: dict[str, Any]
    soak: bool

    @functools.cached_property
    def bench(self) -> testing.Bench:
        return testing.Bench.build(protocols.find(self.name), self.settings, clients=CLIENTS)

    @property
    def adaptive(self) -> bool:
        return self.settings.get("clip") == "adaptive"


CASES = [
    Case(name, settings, soak=number >= SHORT.get(name, 2))
    for name, cls in protocols.PROTOCOLS.items()
    for number, settings in enumerate(cls.variants(cls.only_dim or DIM, CLIENTS))
]
VECTORS = [case for case in CASES if protocols.PROTOCOLS[case.name].only_dim is None]  # test_sums has the others


def label(case):
    return "-".join([case.name, *(str(value) for value in case.settings.values())])


def listed(cases):
    return [pytest.param(case, marks=[pytest.mark.soak] if case.soak else [], id=label(case)) for case in cases]


@pytest.fixture(scope="module", params=listed(CASES))  # all tests of a case one after the other, in one process
def case(request):
    return request.param


def only(is_wanted):
    """Cases that a test applies to."""
    return pytest.mark.parametrize("case", listed(filter(is_wanted, CASES)), indirect=True)


of_vectors = pytest.mark.parametrize("case", listed(VECTORS), indirect=True)


@pytest.fixture
def protocol(case):
    return case.bench.protocol


@pytest.fixture
def updates(case):
    return jnp.asarray(case.bench.updates)


@pytest.mark.parametrize("obligation", testing.OBLIGATIONS)
def test_it_keeps_its_contract(case, protocol, obligation):
    try:
        testing.OBLIGATIONS[obligation](case.bench)
    except testing.NotOwed:
        assert not is_owed(case, protocol, obligation)


def is_owed(case, protocol, obligation):
    """An obligation that a protocol has is not skipped."""
    with_noise_alone = ("fedavg", "dp_fl", "ldp_fl", "central_sub", "local_sub", "unis", "pldp", "secagg")
    scaled = ("fedavg", "dp_fl", "central_sub", "split_and_mix", "secagg")
    match obligation:
        case "sum path":
            return case.name in scaled and not case.adaptive
        case "fast path":
            return isinstance(protocol, Fast) and protocol.is_summable
        case "NaN and infinity count as zero":
            return case.name != "local_sub" and (not promises_nothing(protocol) or protocol.needs_norms)
        case "without noise it is the plain mean":
            return case.name in with_noise_alone
        case "density":
            return case.name in ("ldp_fl", "privunit", "apes", "unis", "pldp", "ldp_min", "binary_sum")
        case "messages":
            return case.name in ("privunit", "split_and_mix", "binary_sum", "real_sum")
        case "contribution":
            return case.name in ("secagg", "apes", "unis", "binary_sum")
    return True


def promises_nothing(protocol):
    return isinstance(mechanism_of(protocol), NonPrivate)


@only(lambda case: case.name in ("apes", "s_apes"))
def test_the_bias_of_apes_is_small_at_large_budgets(case, protocol):
    """Of what it states, the whole box, a part: a fifth of an end of it, two fifths if reports are sparsified."""
    drawn = case.bench.estimates(case.bench.updates, testing.tally_from_messages)
    error = np.abs(drawn.mean(axis=0) - case.bench.expected_mean(case.bench.updates))
    spread = drawn.std(axis=0, ddof=1) / np.sqrt(len(drawn)) + 1e-6
    assert (error <= 5 * spread + {"apes": 0.2, "s_apes": 0.4}[case.name] * protocol.clip_value).all()


def client_keys(seed):
    return jax.random.split(jax.random.key(seed), CLIENTS)


def reports_of(protocol, updates, seed=0):
    return testing.Bench(unsettled=protocol, dim=updates.shape[1], clients=CLIENTS).reports(updates, seed)


def tally_of(protocol, reports):
    return protocol.tally(deliver(reports), DIM)


def settled(protocol):
    return protocol.settle(COHORT, DIM)


shuffled = jax.jit(shuffle, static_argnums=1)


@of_vectors
def test_sums_over_clients_are_in_full_precision(case, protocol, updates):
    """No product may be coarser (TF32 on a GPU): it would make a sum of clipped vectors longer than the clip norm."""
    found = products(lambda x: tally_of(protocol, reports_of(protocol, x)), updates)
    way = fast_path(protocol, DIM)
    if way.is_summable:
        found += products(lambda x: testing.tally_on_fast_path(case.bench, x, 0), updates)
    if way.clip_norm_at(protocol.init(DIM)) is not None:
        found += products(
            lambda x: way.tally_of_sum(x, jnp.float32(CLIENTS), key=jax.random.key(0)), updates.sum(axis=0)
        )
    assert all(full for terms, full in found)
    if type(protocol).tally is protocols.Protocol.tally:
        assert (CLIENTS, True) in found, "this test sees the product of the tally"


@only(lambda case: case.name == "ss_double")
def test_thinning_alone_is_an_unbiased_sparsifier(case, protocol, updates):
    reported = np.asarray(jax.vmap(lambda x, k: protocol.select_coordinates(x, key=k)[1])(updates, client_keys(0)))
    assert reported.mean() == pytest.approx(protocol.beta, abs=0.02)
    other = np.asarray(jax.vmap(lambda x, k: protocol.select_coordinates(-3 * x, key=k)[1])(updates, client_keys(0)))
    np.testing.assert_array_equal(reported, other)


def mechanism_of(protocol, cohort=COHORT):
    return protocol.view(cohort, DIM, neighbors=protocol.relation).round.mechanism


@of_vectors
def test_events_match_what_ran(case, protocol, updates):
    """The noise in the event is the noise in the estimate, and the sensitivity covers the farthest replacement."""
    mechanism = mechanism_of(protocol)
    match mechanism:
        case NonPrivate():
            assert case.name == "fedavg" or "published" in case.settings or protocol.needs_norms
        case Gaussian() if case.adaptive:
            sum_and_count_match(protocol, mechanism)
        case SampledSubject():
            sampled_sum_matches(case, protocol, mechanism)
        case Gaussian() | Laplace():
            declared = mechanism.std if isinstance(mechanism, Gaussian) else mechanism.scale * np.sqrt(2)
            if protocol.budgets is None:
                assert protocol.noise_std(1, DIM) == pytest.approx(declared, rel=1e-6)
            quiet = settled(protocol.with_noise(1e-9))
            ends = [np.asarray(tally_of(quiet, reports_of(quiet, sign * 1e6 * jnp.ones((1, DIM))))) for sign in (1, -1)]
            gap = ends[0] - ends[1]
            reached = np.linalg.norm(gap) if isinstance(mechanism, Gaussian) else np.abs(gap).max()
            assert reached <= mechanism.sensitivity * (1 + 1e-5)
            assert reached >= mechanism.sensitivity * (1 - 1e-5)
            if isinstance(mechanism, Laplace):
                assert mechanism.count == DIM
        case Personalized():
            assert mechanism.eps_locals == protocol.budgets
            assert mechanism.coordinates == DIM
            largest_ratio(protocol, ClipLaplace if mechanism.kind == "clip_laplace" else RealLaplace)
        case SkellamNoise():
            still = np.zeros_like(case.bench.updates)
            noise = case.bench.estimates(still, testing.tally_from_messages) * CLIENTS * mechanism.scale
            whole = getattr(protocol, "noise", "users") == "aggregators"
            times = protocol.aggregators if whole else 1  # all users are honest; of the aggregators one is counted
            assert noise.var() == pytest.approx(times * mechanism.noise_variance, rel=0.06)
            assert mechanism.num_users == (0 if whole else CLIENTS)
            assert protocol.layout(DIM).slots == DIM * getattr(mechanism, "shares", 1)
            big = np.asarray(jax.vmap(lambda key: protocol.encoding(DIM)(1e6 * jnp.ones(DIM), key=key))(client_keys(0)))
            norm = rounded_norm(
                clip_norm=mechanism.clip_norm,
                scale=mechanism.scale,
                coordinates=DIM,
                rounding_tail=mechanism.rounding_tail,
            )
            assert np.linalg.norm(big.astype(float), axis=1).max() <= norm
        case _:
            shuffled_event_matches(case, protocol, mechanism, updates)


def sum_and_count_match(protocol, mechanism):
    """In units in which sum and count have the same noise, the farthest replacement is exactly the sensitivity."""
    assert protocol.noise_std(1, DIM) == pytest.approx(mechanism.std, rel=1e-6)
    below = jnp.ones((1, DIM)) * protocol.clip_norm / np.sqrt(DIM) * (1 - 1e-6)
    ends = [np.asarray(tally_of(protocol, reports_of(protocol, x)), np.float64) for x in (below, -1e6 * below)]
    gap = ends[0] - ends[1]
    assert len(gap) == DIM + 1
    assert gap[-1] == 1, "one is counted as below, the other as above"
    reached = np.hypot(np.linalg.norm(gap[:-1]), gap[-1] * mechanism.std / protocol.std_count)
    assert reached == pytest.approx(mechanism.sensitivity, rel=1e-5)
    assert mechanism.sensitivity > 2 * protocol.clip_norm * 1.001, "the count is paid for"


def sampled_sum_matches(case, protocol, mechanism):
    """The noise of the sum, wherever it is added, and how far one record reaches."""
    assert (mechanism.items, mechanism.prob_item) == (3, 0.5)
    assert mechanism.users_spanned == 3, "without a cap on users, each of its records may be at another"
    if case.name == "central_sub":
        assert (mechanism.noise, mechanism.steps) == ("sum", 1)
        assert protocol.noise_std(1, DIM) == pytest.approx(mechanism.std, rel=1e-6)
        one = np.asarray(tally_of(protocol, reports_of(protocol, 1e6 * jnp.ones((1, DIM)))))
        assert np.linalg.norm(one) == pytest.approx(mechanism.clip_norm, rel=1e-5)
        return
    assert (mechanism.noise, mechanism.steps) == ("user", protocol.private_steps)
    assert mechanism.clip_norm == protocol.clip_norm
    nothing = private_update(lambda params, row: jnp.zeros(4000), learning_rate=1.0, batch=1.0, std=protocol.std)
    rows, scales = jnp.zeros((mechanism.steps, 1), int), jnp.ones(mechanism.steps)
    moved = np.asarray(nothing(jnp.zeros(4000), rows, scales, jax.random.key(0)))
    assert moved.std() == pytest.approx(mechanism.std * np.sqrt(mechanism.steps), rel=0.05), "4.5 sigma at 4000 draws"


def shuffled_event_matches(case, protocol, mechanism, updates):
    """Budget from the exact densities; coordinates, users and padding from the messages that the analyzer gets."""
    layout = protocol.layout(DIM)
    messages = shuffled(reports_of(protocol, updates), layout, key=jax.random.key(5))
    if layout.linkage == "vector":
        assert mechanism.coordinates == 1
        each = 1 if case.name == "privunit" else layout.reports_per_client
        assert mechanism.report.eps_local == pytest.approx(each * protocol.eps_local)
        return
    ends = np.linspace(0, 1, protocol.local_randomizer.num_reports or 7)
    log = protocol.local_randomizer.log_density(
        ends[:, None] * ((protocol.local_randomizer.num_reports or 2) - 1), np.array([[0.0, 1.0]])
    )
    assert np.abs(log[:, 0] - log[:, 1]).max() == pytest.approx(mechanism.report.eps_local, rel=1e-9)
    in_slot = np.asarray(messages.valid).reshape(len(messages.valid), -1).sum(axis=0)
    released = np.broadcast_to(in_slot, DIM)
    assert (released == getattr(mechanism, "pad_to", mechanism.num_users)).all()
    assert mechanism.coordinates == DIM
    if case.name == "ss_topk":
        sent = np.asarray(reports_of(protocol, updates).valid).sum(axis=1)
        assert (sent == mechanism.top + mechanism.decoys).all()
        depends = protocol.depends_on_data(updates)
        assert (depends.sum(axis=1) == mechanism.top).all()
    if case.name == "ss_double":
        assert mechanism.inclusion == protocol.beta


def largest_ratio(protocol, randomizer):
    """The densities of the extreme inputs differ by exactly the budget."""
    for eps_local in (min(protocol.budgets), max(protocol.budgets)):
        one = randomizer(eps_local, -protocol.clip_value, protocol.clip_value)
        y = np.linspace(-protocol.clip_value, protocol.clip_value, 101)
        ratio = one.log_density(y, protocol.clip_value) - one.log_density(y, -protocol.clip_value)
        assert np.abs(ratio).max() == pytest.approx(eps_local, rel=1e-9)
        key = jax.random.key(3)
        drawn = protocol.perturb(jnp.zeros(1000), jnp.float32(eps_local), key=key)
        if protocol.name != "s_apes":
            np.testing.assert_allclose(drawn, one(jnp.zeros(1000), key=key), rtol=1e-5)


PARTICIPATIONS = [Everyone(), Disjoint(epoch=0), FixedSize(size=CLIENTS, population=3000), Poisson(prob=0.1)]


def sampled_cases():
    """Every case has one kind of participation in `make test`, by turns."""
    for number, (case, one) in enumerate(itertools.product(VECTORS, PARTICIPATIONS)):
        row, column = divmod(number, len(PARTICIPATIONS))
        soak = case.soak or row % len(PARTICIPATIONS) != column
        yield pytest.param(case, one, marks=[pytest.mark.soak] * soak, id=f"{label(case)}-{type(one).__name__}")


def said_of(protocol, delta=1e-4):
    """What is certified of two rounds, or the reason why nothing is, with all that is assumed."""
    view = protocol.view(COHORT, DIM, neighbors=protocol.relation)
    try:
        return view.scope, accounting.bound([view.round] * 2, delta=delta).eps
    except NotApplicable as refusal:
        return view.scope, str(refusal)


def length_of(case):
    """The field that says how long a clipped update may be."""
    lengths = (key for key in ("clip_norm", "clip_value") if getattr(case.bench.unsettled, key, None) is not None)
    return next(lengths, None)


@only(length_of)
def test_only_lengths_change_with_the_unit_that_updates_are_measured_in(case, updates):
    """In an eighth of the unit whatever has a length is eight times as long; no bound and no sentence changes."""
    key, given = length_of(case), case.bench.unsettled
    one, longer = settled(given), settled(dataclasses.replace(given, **{key: 8 * getattr(given, key)}))
    np.testing.assert_allclose(
        longer.clip_update(8 * updates, longer.init(DIM)), 8 * one.clip_update(updates, one.init(DIM)), rtol=1e-6
    )
    assert longer.noise_std(CLIENTS, DIM) == pytest.approx(8 * one.noise_std(CLIENTS, DIM), rel=1e-6)
    (scope, eps), (other_scope, other_eps) = said_of(one), said_of(longer)
    assert scope == other_scope
    assert other_eps == (eps if isinstance(eps, str) else pytest.approx(eps, rel=1e-9))


@pytest.mark.parametrize(("case", "participation"), list(sampled_cases()), indirect=["case"])
def test_every_view_certifies_or_says_why_not(case, protocol, participation):
    size = protocols.Cohort(participation=participation, size=CLIENTS, min_size=CLIENTS if protocol.shuffled else 0)
    try:
        view = protocol.settle(size, DIM).view(size, DIM, neighbors=protocol.relation)
        statement = accounting.certify([view.round] * 3, view.scope, delta=1e-6)
    except (NotApplicable, ValueError) as refusal:
        of_items = protocol.samples == "records" and isinstance(participation, Disjoint | FixedSize)
        assert protocol.shuffled or protocol.budgets is not None or of_items, refusal
        assert len(str(refusal)) > 30
        return
    assert statement.trust is view.scope.trust
    assert statement.is_unbounded == isinstance(view.round.mechanism, NonPrivate)


def test_a_local_guarantee_is_not_amplified_by_sampling():
    protocol = protocols.build("ldp_fl", {"clip_norm": 0.5, "noise_multiplier": 2.0})

    def eps(participation):
        view = protocol.view(
            protocols.Cohort(participation=participation, size=10), DIM, neighbors=Neighbors.REPLACE_ONE
        )
        return accounting.certify([view.round] * 3, view.scope, delta=1e-6).eps

    assert eps(Poisson(prob=0.01)) == eps(FixedSize(size=1, population=100)) == eps(Everyone())
    assert eps(Disjoint(epoch=0)) < eps(Everyone())


def test_shuffled_is_made_only_by_shufflers():
    assert issubclass(ShuffledReports, tuple)
    assert not issubclass(Reports, ShuffledReports)
    assert not issubclass(ShuffledReports, Reports)


CLIPPED_BY_VALUE = [
    name
    for name, cls in protocols.PROTOCOLS.items()
    if any(field.name == "clip_value" and field.default is not None for field in dataclasses.fields(cls))
]


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("dpfl", {}, "unknown protocol 'dpfl': did you mean 'dp_fl'"),
        ("dp_fl", {"clip_nrom": 1.0}, "did you mean 'clip_norm'"),
        ("dp_fl", {"clip_norm": -1.0}, "expected clip_norm > 0"),
        ("dp_fl", {"clip_norm": 1.0, "noise_multiplier": 0.0}, "expected noise_multiplier > 0"),
        ("ldp_fl", {"randomizer": "cauchy", "clip_norm": 1.0}, "expected randomizer to be one of"),
        ("ldp_fl", {"clip_norm": 1.0, "eps_local": 1.0}, "expected no eps_local with randomizer='gaussian'"),
        ("ldp_fl", {"randomizer": "laplace", "clip_value": 0.0}, "expected clip_value > 0"),
        ("ss_simple", {"clip_value": 1.0, "randomizer": "rr"}, "expected levels if and only if randomizer='rr'"),
        ("ss_simple", {**RR2, "levels": 4}, "expected levels if and only if randomizer='rr'"),
        ("ss_simple", {**RR2, "linkage": "both"}, "expected linkage to be one of"),
        ("ss_simple", {"clip_value": 1.0, "eps_local": 0.0}, "expected eps_local > 0"),
        *((name, {"clip_value": 0.0}, "expected clip_value > 0, got clip_value=0") for name in CLIPPED_BY_VALUE),
        *((name, {"clip_value": -0.1}, "expected clip_value > 0, got clip_value=-0.1") for name in CLIPPED_BY_VALUE),
        ("ss_double", {**RR2, "beta": 1.5}, "expected beta <= 1"),
        (
            "ss_double",
            {**RR2, "beta": 0.1, "linkage": "vector"},
            "expected inclusion = 'fixed-k' with linkage = 'vector'",
        ),
        ("ss_double", {**RR2, "beta": 0.1, "overflow": "keep"}, "expected overflow = 'drop'"),
        ("ss_double", {**RR2, "beta": 0.1, "pad_to": 1}, "expected pad_to >= 2"),
        ("ss_double", {**RR2, "beta": 0.5, "pad_to": 50}, "expected pad_to above the 75 reports"),
        ("ss_topk", {**RR2, "k": -1}, "expected k >= 0"),
        ("ss_topk", {**RR2, "k": 41}, "expected k <= 40, the dimension, got k=41"),
        ("ss_topk", {**RR2, "k": 8, "decoys": 33}, "expected decoys from 0 to dimension - k = 32, got decoys=33"),
        ("ss_topk", {**RR2, "k": 8, "decoys": -1}, "expected decoys >= 0"),
        ("split_and_mix", {"clip_norm": 1.0, "noise_multiplier": 1.0, "shufflers": 1}, "one shuffler would hold all"),
        ("privunit", {"clip_norm": 1.0, "eps_local": -1.0}, "expected eps_local > 0"),
        ("apes", {"clip_value": 1.0, "budgets": [0.0, 1.0]}, "expected eps_local > 0"),
        ("apes", {"clip_value": 1.0, "budgets": "uniform3"}, "did you mean 'uniform"),
        ("apes", {"clip_value": 1.0, "budgets": "uniform2", "bound": 0.5}, "expected bound >= clip_value"),
        ("ss_topk", {**RR2, "k": 8, "pad_to": 50}, "expected pad_to >= 150"),
    ],
)
def test_bad_parameters_are_refused(name, parameters, sentence):
    with pytest.raises(ValueError, match=sentence):
        settled(protocols.build(name, parameters))


@pytest.mark.parametrize("participation", [Poisson(prob=0.1), FixedSize(size=10, population=100)])
def test_withholding_a_round_on_a_secret_sample_would_leak_and_is_refused(participation):
    cohort = protocols.Cohort(participation=participation, size=10, min_size=5)
    with pytest.raises(ValueError, match="expected min_size = 0 with a secret sample"):
        protocols.build("dp_fl", {"clip_norm": 1.0, "noise_multiplier": 2.0}).view(
            cohort, DIM, neighbors=Neighbors.REPLACE_ONE
        )


def test_add_remove_says_what_removing_means():
    cohort = protocols.Cohort(participation=Everyone(), size=10, min_size=5)
    protocol = protocols.build("dp_fl", {"clip_norm": 1.0, "noise_multiplier": 2.0})
    view = protocol.view(cohort, DIM, neighbors=Neighbors.ADD_REMOVE)
    assert any("roster" in assumption for assumption in view.scope.assumptions)


def test_shuffled_protocols_are_stated_for_replacement_and_need_a_minimum():
    protocol = settled(protocols.build("ss_simple", RR2))
    with pytest.raises(ValueError, match="expected neighbors = replace-one in the shuffle model"):
        protocol.view(COHORT, DIM, neighbors=Neighbors.ADD_REMOVE)
    with pytest.raises(ValueError, match=r"expected cohort\.min_size >= 2"):
        protocol.view(dataclasses.replace(COHORT, min_size=0), DIM, neighbors=Neighbors.REPLACE_ONE)


def test_ss_topk_relies_on_dummies_only_where_slots_may_lack_reports():
    cohort = dataclasses.replace(COHORT, colluders=3)

    def relied_on(cohort: protocols.Cohort, **more: Any) -> str:
        protocol = protocols.build("ss_topk", {**RR2, "k": 8, **more}).settle(cohort, DIM)
        return " | ".join(protocol.view(cohort, DIM, neighbors=Neighbors.REPLACE_ONE).scope.assumptions)

    assert "dummies" not in relied_on(cohort)
    assert "the shuffler admits no more users than planned" in relied_on(cohort)
    for lacking in ({"pad_to": CLIENTS + 1}, {"decoys": DIM - 9}):
        assert "the shuffler adds and hides the dummies, and admits no more" in relied_on(cohort, **lacking)
    assert "adds and hides the dummies" in relied_on(dataclasses.replace(cohort, min_size=CLIENTS - 1))
    event = protocols.build("ss_topk", {**RR2, "k": 8}).settle(cohort, DIM).mechanism(cohort, DIM)
    assert crowds.pair(event).others == CLIENTS - 3 - 1  # as if dummies were none: the other honest users


def test_uncalibrated_noise_cannot_run():
    with pytest.raises(ValueError, match="to be set or calibrated"):
        _ = protocols.build("dp_fl", {"clip_norm": 1.0}).std
    with pytest.raises(ValueError, match="to be set or calibrated"):
        _ = protocols.build("ldp_fl", {"clip_norm": 1.0}).local_randomizer
    with pytest.raises(ValueError, match="to be set or calibrated"):
        _ = protocols.build("ss_simple", {"clip_value": 1.0}).local_randomizer
    with pytest.raises(ValueError, match="noise to calibrate"):
        protocols.build("fedavg", {}).with_noise(1.0)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", ["central_sub", "local_sub"])
def test_a_unit_brings_as_many_records_as_its_caps_leave_it(name, adaptive):
    """What attacks let a unit bring; at one user, where users see no more than their own sums."""
    for items, at_one, rows in ((None, None, 1), (1, None, 1), (5, None, 5), (5, 2, 4), (2, 7, 2)):
        caps = {"items_per_subject": items, "items_per_user": at_one, "users_per_subject": 2}
        protocol = protocols.build(name, {**CENTRAL, "sampling_rate": 0.1, "adaptive_z": adaptive, **caps})
        expected = {"central_sub": rows, "local_sub": min(items or 1, at_one or items or 1)}[name]
        if adaptive:  # nothing is certified, and no cap but the number of items is spoken of
            expected = items or 1
        assert settled(protocol).rows_of_unit(COHORT) == expected
    assert protocols.build("dp_fl", CENTRAL).rows_of_unit(COHORT) == 1


@pytest.mark.parametrize("colluders", [0, 1, CLIENTS - 2])
@pytest.mark.parametrize("name", ["secagg", "split_and_mix"])
def test_only_the_noise_of_users_that_do_not_collude_is_certified(name, colluders):
    """Of a cohort that is smaller than the planned one too, where parts of the noise are missing."""
    settings = {**CENTRAL, "shares": 5} if name == "split_and_mix" else CENTRAL
    cohort = dataclasses.replace(COHORT, colluders=colluders)
    protocol: Any = protocols.build(name, settings).settle(cohort, DIM)
    event = protocol.view(cohort, DIM, neighbors=protocol.relation).round.mechanism
    assert event.noise_variance == pytest.approx(protocol.part_variance * (CLIENTS - colluders), rel=1e-12)
    least = 1 if name == "secagg" else 2  # honest users
    fewer = dataclasses.replace(cohort, min_size=CLIENTS - 3, colluders=min(colluders, CLIENTS - 3 - least))
    certified = protocol.view(fewer, DIM, neighbors=protocol.relation).round.mechanism.noise_variance
    assert certified == pytest.approx(protocol.part_variance * (fewer.min_size - fewer.colluders), rel=1e-12)
