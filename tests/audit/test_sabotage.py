"""Planted errors, each of which the audit must find at 95 % confidence; the same audit of the honest code must not."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from grids import later

from dovetail import audit as audits
from dovetail import events, shufflers
from dovetail.accounting import certification
from dovetail.audit.runs import games
from dovetail.mechanisms.laplace import LaplaceRandomizer
from dovetail.protocols import PROTOCOLS
from dovetail.protocols.curator.dp_fl import DpFl
from dovetail.protocols.flame.ss_simple import SsSimple
from dovetail.protocols.local.ldp_fl import LdpFl
from dovetail.protocols.sums.secagg import SecAgg
from dovetail.statements import Neighbors

TRIALS = 3_000


@pytest.fixture(autouse=True)
def fresh_programs():
    """A compiled round does not notice what a test replaces under it."""
    games._run_trials.clear_cache()
    yield
    games._run_trials.clear_cache()


def find(name, *, num_users=10, dim=2, delta=0.01, view="analyzer", rounds=1, trials=TRIALS, **chosen):
    plan = audits.attack_terms(name, num_users, dim, delta, chosen=chosen, rounds=rounds)
    return audits.audit(name, plan, view=view, trials=trials, confidence=0.95, seed=1)


def replaced_by(monkeypatch, protocol):
    monkeypatch.setitem(PROTOCOLS, protocol.name, protocol)


def test_the_honest_code_passes_the_same_audits():
    honest = [
        find("ldp_fl", randomizer="laplace", clip_value=1.0, eps_local=1.0),
        find("ss_simple", eps_local=1.0),
        find("ldp_fl", randomizer="laplace", clip_value=1.0, eps_local=1.0, rounds=2),
    ]
    assert [finding.protocol for finding in honest if not finding.is_consistent] == []
    assert all(finding.bound.eps > 0.5 * finding.certified.eps for finding in honest)  # and they are not weak


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfTheNoise(LdpFl):
    @property
    def local_randomizer(self):
        return LaplaceRandomizer(eps_local=2 * self.eps_local, low=-self.clip_value, high=self.clip_value)

    def _mechanism(self, dim):
        return LdpFl._mechanism(LdpFl(**dataclasses.asdict(self)), dim)


def test_a_randomizer_that_adds_half_the_noise(monkeypatch):
    replaced_by(monkeypatch, HalfTheNoise)
    finding = find("ldp_fl", randomizer="laplace", clip_value=1.0, eps_local=1.0)
    assert not finding.is_consistent
    assert finding.bound.confidence == 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfTheCuratorsNoise(DpFl):
    def estimate(self, tally, size, state, *, key):
        return super().estimate(tally, size, state._replace(noise_scale=state.noise_scale / 2), key=key)


def test_a_curator_that_adds_half_the_noise(monkeypatch):
    replaced_by(monkeypatch, HalfTheCuratorsNoise)
    assert not find("dp_fl", trials=20_000).is_consistent


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgottenNoise(SecAgg):
    def draw_whole_noise(self, shape, users, *, key):
        return jnp.zeros(shape, jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnAnew(SecAgg):
    """As if every aggregator had sent its sum nine times, each time with new noise: the analyzer takes the mean."""

    def draw_whole_noise(self, shape, users, *, key):
        draws = jnp.stack(
            [super(DrawnAnew, self).draw_whole_noise(shape, users, key=one) for one in jax.random.split(key, 9)]
        )
        return draws.sum(axis=0) // 9


@pytest.mark.parametrize("sabotaged", [ForgottenNoise, pytest.param(DrawnAnew, marks=pytest.mark.soak)])
def test_aggregators_that_forget_their_noise_or_draw_it_anew_for_every_copy(monkeypatch, sabotaged):
    asked = {"num_users": 5, "dim": 1, "noise": "aggregators", "noise_multiplier": 2.0}
    assert find("secagg", **asked).is_consistent
    games._run_trials.clear_cache()
    replaced_by(monkeypatch, sabotaged)
    assert not find("secagg", **asked).is_consistent


def test_a_shuffler_that_keeps_the_order(monkeypatch):
    in_order = lambda valid, key: jnp.broadcast_to(jnp.arange(len(valid))[:, None], valid.shape)  # noqa: E731
    monkeypatch.setattr(shufflers, "_uniform_order", in_order)
    finding = find("ss_simple", num_users=20, eps_local=2.0, trials=4000)
    assert not finding.is_consistent
    assert "stand first" in finding.bound.attack


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        later("ss_topk", {"dim": 4, "num_users": 8, "k": 2, "decoys": 0, "pad_to": 12, "eps_local": 1.0}),
        ("ss_double", {"num_users": 8, "dim": 2, "beta": 0.5, "pad_to": 40, "eps_local": 3.0, "delta": 1e-3}),
    ],
)
def test_a_shuffler_that_forgets_the_dummies(monkeypatch, name, settings):
    honest = games.shuffle

    def forgetful(reports, layout, *, key):
        return honest(reports, dataclasses.replace(layout, padding=None), key=key)

    monkeypatch.setattr(games, "shuffle", forgetful)
    assert not find(name, **settings).is_consistent


def test_an_accountant_that_divides_by_the_number_of_users_once_too_often(monkeypatch):
    honest = certification.best_bound

    def optimistic(*arguments, **target):
        bound = honest(*arguments, **target)
        return dataclasses.replace(bound, eps=bound.eps / 1000, lower=None)

    monkeypatch.setattr(certification, "best_bound", optimistic)
    finding = find("ss_simple", num_users=1000, dim=100, delta=5e-6, trials=0)
    assert not finding.is_consistent
    assert finding.bound.confidence == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneKeyForever(SsSimple):
    def randomize(self, x, state, *, key, budget=None):
        return super().randomize(x, state, key=jax.random.key(7), budget=budget)


def test_a_client_that_always_uses_the_same_key(monkeypatch):
    replaced_by(monkeypatch, OneKeyForever)
    assert not find("ss_simple", eps_local=1.0).is_consistent


def test_a_client_that_uses_its_key_in_two_rounds(monkeypatch):
    honest = games.client_keys
    monkeypatch.setattr(games, "client_keys", lambda key, index, users: honest(key, 0, users))
    finding = find("ldp_fl", randomizer="laplace", clip_value=1.0, eps_local=1.0, rounds=2)
    assert not finding.is_consistent
    assert "turning" in finding.bound.attack


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrongNeighbours(DpFl):
    def _gaussian(self, noise_scale, neighbors):
        alone = super()._gaussian(noise_scale, Neighbors.ADD_REMOVE)
        return events.Gaussian(std=alone.std, sensitivity=alone.sensitivity, neighbors=neighbors)


def test_a_replaced_user_accounted_as_a_removed_one(monkeypatch):
    replaced_by(monkeypatch, WrongNeighbours)
    assert not find("dp_fl").is_consistent


def test_a_shuffler_with_one_order_for_all_coordinates(monkeypatch):
    """FLAME's own flaw, planted where coordinates should be shuffled apart."""
    honest = shufflers._uniform_order
    one_order = lambda valid, key: jnp.broadcast_to(honest(valid[:, :1], key), valid.shape)  # noqa: E731
    monkeypatch.setattr(shufflers, "_uniform_order", one_order)
    finding = find("ss_simple", num_users=20, dim=8, eps_local=1.0, trials=2000)
    assert not finding.is_consistent
    assert "share a shuffle" in finding.bound.attack


@pytest.mark.soak  # an order that is kept altogether is above
@pytest.mark.parametrize("reach", [2, 10])
def test_a_shuffler_that_only_mixes_neighbours(monkeypatch, reach):
    honest = shufflers._uniform_order

    def in_blocks(valid, key):
        keys = jax.random.split(key, -(-len(valid) // reach))
        blocks = [
            start + honest(valid[start : start + reach], keys[i]) for i, start in enumerate(range(0, len(valid), reach))
        ]
        return jnp.concatenate(blocks)

    monkeypatch.setattr(shufflers, "_uniform_order", in_blocks)
    assert not find("ss_simple", num_users=20, eps_local=2.0).is_consistent


@dataclasses.dataclass(frozen=True, kw_only=True)
class BareCount(DpFl):
    def estimate(self, tally, size, state, *, key):
        told, after = super().estimate(tally, size, state, key=key)
        moved = state.clip_norm * jnp.exp(-self.clip_rate * (0.5 + tally[-1] / size - self.quantile))
        return told, after._replace(clip_norm=moved)


def test_a_clip_norm_that_follows_the_count_itself(monkeypatch):
    replaced_by(monkeypatch, BareCount)
    finding = find("dp_fl", clip="adaptive", clip_norm=1.0, noise_multiplier=4.0)
    assert not finding.is_consistent
    assert "public state" in finding.bound.attack
