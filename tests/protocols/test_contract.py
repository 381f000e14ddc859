"""What every registered protocol owes, without a list to forget one in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail import accounting, protocols
from dovetail.events import Disjoint, Everyone, FixedSize, Gaussian, Laplace, NonPrivate, Poisson
from dovetail.shufflers import Reports, Shuffled, deliver
from dovetail.statements import Neighbors

DIM, CLIENTS = 40, 300
VARIANTS = {
    "fedavg": [{}],
    "dp_fl": [{"clip_norm": 0.5, "noise_multiplier": 2.0}],
    "ldp_fl": [
        {"clip_norm": 0.5, "noise_multiplier": 2.0},
        {"randomizer": "laplace", "clip_value": 0.05, "eps_local": 1.0},
    ],
}


def test_every_registered_protocol_is_under_contract():
    assert set(VARIANTS) == set(protocols.PROTOCOLS)


@pytest.fixture(
    params=[(name, i) for name, variants in VARIANTS.items() for i in range(len(variants))],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def protocol(request):
    name, variant = request.param
    return protocols.build(name, VARIANTS[name][variant])


@pytest.fixture
def updates():
    scale = np.linspace(0.1, 3.0, CLIENTS)[:, None]
    return jnp.asarray(np.random.default_rng(0).normal(size=(CLIENTS, DIM)) * scale / np.sqrt(DIM), jnp.float32)


def reports_of(protocol, updates, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(updates))
    state = protocol.init(DIM)
    return jax.vmap(lambda x, k: protocol.randomize(x, state, key=k))(updates, keys)


def tally_of(protocol, reports):
    return protocol.tally(deliver(reports, protocol.layout(DIM)))


def clipped(protocol, updates):
    """What the protocol's noise is added to."""
    if isinstance(getattr(protocol, "clip_value", None), float):
        return jnp.clip(updates, -protocol.clip_value, protocol.clip_value)
    norms = jnp.linalg.norm(updates, axis=1)
    return updates * protocol.scaling(norms)[:, None]


def without_noise(protocol):
    """The same protocol with noise too small to matter."""
    if not dataclasses.fields(protocol):
        return protocol
    return protocol.with_noise(1e-9)


def test_tally_is_additive_and_symmetric(protocol, updates):
    reports = reports_of(protocol, updates)
    whole = tally_of(protocol, reports)
    first, second = (jax.tree.map(lambda leaf, s=s: leaf[s], reports) for s in (slice(100), slice(100, None)))
    np.testing.assert_allclose(whole, tally_of(protocol, first) + tally_of(protocol, second), rtol=1e-4, atol=1e-4)
    order = np.random.default_rng(1).permutation(CLIENTS)
    mixed = jax.tree.map(lambda leaf: leaf[order], reports)
    np.testing.assert_allclose(whole, tally_of(protocol, mixed), rtol=1e-4, atol=1e-4)


def test_absent_clients_do_not_count(protocol, updates):
    reports = reports_of(protocol, updates)
    mask = jnp.arange(CLIENTS) < 120
    masked = Reports(reports.slot, reports.value, reports.valid * mask)
    present = jax.tree.map(lambda leaf: leaf[:120], reports)
    np.testing.assert_allclose(tally_of(protocol, masked), tally_of(protocol, present), rtol=1e-4, atol=1e-4)


def test_estimate_is_unbiased_for_the_mean_of_clipped_updates(protocol, updates):
    truth = np.asarray(clipped(protocol, updates)).mean(axis=0)

    def one_round(seed):
        tally = tally_of(protocol, reports_of(protocol, updates, seed))
        return protocol.estimate(tally, CLIENTS, protocol.init(DIM), key=jax.random.fold_in(jax.random.key(7), seed))[0]

    estimates = np.stack([one_round(seed) for seed in range(60)])
    error = estimates.mean(axis=0) - truth
    spread = estimates.std(axis=0, ddof=1) / np.sqrt(len(estimates)) + 1e-6
    z = error / spread
    assert np.abs(z).max() < 5, "each coordinate within 5 standard errors (40 coordinates, alpha below 1e-4)"
    if len(dataclasses.fields(protocol)):
        assert spread.min() > 1e-6, "there is noise"


def test_without_noise_it_is_fedavg_of_the_clipped_updates(protocol, updates):
    quiet = without_noise(protocol)
    estimate, _ = quiet.estimate(
        tally_of(quiet, reports_of(quiet, updates)), CLIENTS, quiet.init(DIM), key=jax.random.key(0)
    )
    np.testing.assert_allclose(estimate, np.asarray(clipped(protocol, updates)).mean(axis=0), atol=2e-6)


def test_the_sum_path_has_the_law_of_the_message_path(protocol, updates):
    """Mean and variance of the tally agree (z-test and F-test far in the tail at fixed seeds)."""
    scale = protocol.scaling(jnp.linalg.norm(updates, axis=1))
    if scale is None:
        assert getattr(protocol, "randomizer", None) == "laplace"
        return
    total = (updates * scale[:, None]).sum(axis=0)
    keys = jax.random.split(jax.random.key(3), 200)
    fast = np.asarray(jax.vmap(lambda k: protocol.tally_of_sum(total, jnp.float32(CLIENTS), key=k))(keys))
    slow = np.stack([tally_of(protocol, reports_of(protocol, updates, seed)) for seed in range(40)])
    noise_fast, noise_slow = fast - np.asarray(total), slow - np.asarray(total)
    assert abs(noise_fast.mean() - noise_slow.mean()) <= 5 * (noise_slow.std() + 1e-5) / np.sqrt(noise_slow.size) + 1e-4
    if noise_slow.std() > 1e-3:
        assert 0.9 < noise_fast.std() / noise_slow.std() < 1.1
    else:
        assert noise_fast.std() < 1e-3


def test_events_match_what_ran(protocol, updates):
    """The noise in the event is the noise in the estimate, and the sensitivity covers the farthest replacement."""
    cohort = protocols.Cohort(participation=Everyone(), size=CLIENTS)
    mechanism = protocol.view(cohort, DIM, neighbors=Neighbors.REPLACE_ONE).round.mechanism
    if isinstance(mechanism, NonPrivate):
        return
    noise = np.stack(
        [
            protocol.estimate(
                tally_of(protocol, reports_of(protocol, jnp.zeros_like(updates[:1]), seed)),
                1,
                protocol.init(DIM),
                key=jax.random.fold_in(jax.random.key(9), seed),
            )[0]
            for seed in range(150)
        ]
    )
    declared = mechanism.std if isinstance(mechanism, Gaussian) else mechanism.scale * np.sqrt(2)
    assert noise.std() == pytest.approx(declared, rel=0.05)
    big = 1e6 * jnp.ones((1, DIM))
    quiet = without_noise(protocol)
    ends = [tally_of(quiet, reports_of(quiet, sign * big)) for sign in (1, -1)]
    if isinstance(mechanism, Gaussian):
        assert float(jnp.linalg.norm(ends[0] - ends[1])) <= mechanism.sensitivity * (1 + 1e-5)
    else:
        assert float(jnp.abs(ends[0] - ends[1]).max()) <= mechanism.sensitivity * (1 + 1e-5)
        assert mechanism.count == DIM


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_poisoned_update_changes_the_tally_no_more_than_any_other(protocol, updates, bad):
    quiet = without_noise(protocol)
    mechanism = quiet.view(
        protocols.Cohort(participation=Everyone(), size=2), DIM, neighbors=Neighbors.REPLACE_ONE
    ).round.mechanism
    if isinstance(mechanism, NonPrivate):
        return
    poisoned = updates[:2].at[0, 3].set(bad)
    tally = tally_of(quiet, reports_of(quiet, poisoned))
    clean = tally_of(quiet, reports_of(quiet, updates[:2]))
    assert np.isfinite(tally).all()
    distance = jnp.abs(tally - clean).max() if isinstance(mechanism, Laplace) else jnp.linalg.norm(tally - clean)
    assert float(distance) <= mechanism.sensitivity * (1 + 1e-5)
    if isinstance(mechanism, Gaussian):
        assert float(quiet.scaling(jnp.array(np.nan))) == 0
        assert float(quiet.scaling(jnp.array(np.inf))) == 0


@pytest.mark.parametrize(
    "participation",
    [Everyone(), Disjoint(epoch=0), FixedSize(size=10, population=100), Poisson(prob=0.1)],
    ids=lambda p: type(p).__name__,
)
def test_every_view_certifies_or_says_why_not(protocol, participation):
    cohort = protocols.Cohort(participation=participation, size=10)
    view = protocol.view(cohort, DIM, neighbors=Neighbors.REPLACE_ONE)
    statement = accounting.certify([view.round] * 3, view.scope, delta=1e-6)
    assert statement.trust is view.scope.trust
    assert statement.unbounded == (protocol.name == "fedavg")


def test_a_local_guarantee_is_not_amplified_by_sampling():
    protocol = protocols.build("ldp_fl", VARIANTS["ldp_fl"][0])

    def eps(participation):
        view = protocol.view(
            protocols.Cohort(participation=participation, size=10), DIM, neighbors=Neighbors.REPLACE_ONE
        )
        return accounting.certify([view.round] * 3, view.scope, delta=1e-6).eps

    assert eps(Poisson(prob=0.01)) == eps(FixedSize(size=1, population=100)) == eps(Everyone())
    assert eps(Disjoint(epoch=0)) < eps(Everyone())


def test_shuffled_is_made_only_by_shufflers():
    assert issubclass(Shuffled, tuple)
    assert not issubclass(Reports, Shuffled)
    assert not issubclass(Shuffled, Reports)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("dpfl", {}, "unknown protocol 'dpfl': did you mean 'dp_fl'"),
        ("dp_fl", {"clip": 1.0}, "did you mean 'clip_norm'"),
        ("dp_fl", {}, "expected protocol.clip_norm"),
        ("dp_fl", {"clip_norm": -1.0}, "expected clip_norm > 0"),
        ("dp_fl", {"clip_norm": 1.0, "noise_multiplier": 0.0}, "expected noise_multiplier > 0"),
        ("ldp_fl", {"randomizer": "cauchy", "clip_norm": 1.0}, "expected randomizer to be one of"),
        ("ldp_fl", {"clip_norm": 1.0, "eps_local": 1.0}, "expected no eps_local with randomizer='gaussian'"),
        ("ldp_fl", {"randomizer": "laplace"}, "expected clip_value with randomizer='laplace'"),
    ],
)
def test_bad_parameters_are_refused(name, parameters, sentence):
    with pytest.raises(ValueError, match=sentence):
        protocols.build(name, parameters)


@pytest.mark.parametrize("participation", [Poisson(prob=0.1), FixedSize(size=10, population=100)])
def test_withholding_a_round_on_a_secret_sample_would_leak_and_is_refused(participation):
    cohort = protocols.Cohort(participation=participation, size=10, min_size=5)
    with pytest.raises(ValueError, match="expected min_size = 0 where the sample is secret"):
        protocols.build("dp_fl", VARIANTS["dp_fl"][0]).view(cohort, DIM, neighbors=Neighbors.REPLACE_ONE)


def test_add_remove_says_what_removing_means():
    cohort = protocols.Cohort(participation=Everyone(), size=10, min_size=5)
    view = protocols.build("dp_fl", VARIANTS["dp_fl"][0]).view(cohort, DIM, neighbors=Neighbors.ADD_REMOVE)
    assert any("roster" in assumption for assumption in view.scope.assumptions)


def test_uncalibrated_noise_cannot_run():
    with pytest.raises(ValueError, match="to be set or calibrated"):
        _ = protocols.build("dp_fl", {"clip_norm": 1.0}).std
    with pytest.raises(ValueError, match="to be set or calibrated"):
        _ = protocols.build("ldp_fl", {"clip_norm": 1.0}).local
    with pytest.raises(ValueError, match="noise to calibrate"):
        protocols.build("fedavg", {}).with_noise(1.0)
