"""Clients that are chunks of their own: the model is that of any other chunk."""

import dataclasses
import itertools

import numpy as np
import pytest
from grids import later
from test_engine import dataset, train

from dovetail.engine import examples, layers

PROTOCOLS = {
    "fedavg": {},
    "dp_fl": {"clip_norm": 0.3, "noise_multiplier": 1.0},
    "secagg": {"clip_norm": 0.3, "noise_multiplier": 1.0},
    "privunit": {"eps_local": 8.0, "clip_norm": 0.3},
    "ldp_fl": {"randomizer": "laplace", "clip_value": 0.1, "eps_local": 1.0},
    "ss_topk": {"clip_value": 0.1, "eps_local": 4.0, "k": 50},
}


SHORT = {("dp_fl", "fedsgd"), ("secagg", "fedsgd"), ("privunit", "fedavg")}  # every way to add, and to train
GRID = itertools.product(PROTOCOLS, ["fedsgd", "fedavg"])


@pytest.mark.parametrize(("protocol", "update"), [case if case in SHORT else later(*case) for case in GRID])
def test_a_client_alone_adds_what_it_adds_among_others(protocol, update):
    given = {"model": "mlp", "update": update, "protocol": protocol, "settings": PROTOCOLS[protocol]}
    alone, engine, _ = train(chunk=1, **given)
    assert all(layers.applies_to(one, (np.zeros((2, 1, 1)), None)) for one in engine._classes)
    among, _, _ = train(chunk=4, **given)
    assert np.abs(among).max() > 0.01
    np.testing.assert_allclose(alone, among, atol=3e-5)


@pytest.mark.parametrize("protocol", ["dp_fl", "secagg"])
def test_a_client_without_a_finite_norm_counts_as_zero(protocol):
    data = dataset()
    inputs = data.inputs.copy()
    inputs[::10] = 1e30
    broken = dataclasses.replace(data, inputs=inputs)
    given = {"model": "mlp", "update": "fedsgd", "protocol": protocol, "settings": PROTOCOLS[protocol]}
    alone, _, _ = train(chunk=1, data=broken, **given)
    among, _, _ = train(chunk=4, data=broken, **given)
    assert np.isfinite(alone).all()
    np.testing.assert_allclose(alone, among, atol=3e-5)


def test_clients_whose_updates_are_looked_at_go_the_other_way():
    _, engine, _ = train(model="mlp", chunk=1, diagnostics=True, rounds=1)
    assert not any(layers.applies_to(one, (np.zeros((2, 1, 1)), None)) for one in engine._classes)


def test_a_large_model_of_dense_layers_is_the_same_without_any_update_formed(monkeypatch):
    given = {"model": "mlp", "update": "fedsgd", "protocol": "dp_fl", "settings": PROTOCOLS["dp_fl"]}
    formed, engine, _ = train(**given)
    assert {work.strategy for work in engine._classes} == {"general"}
    monkeypatch.setattr(examples, "_LARGE_MODEL", 1)
    monkeypatch.setattr(examples, "_MOST_RECORDS", 100)
    products, engine, _ = train(**given)
    assert {work.strategy for work in engine._classes} == {"clipped"}
    np.testing.assert_allclose(products, formed, atol=3e-5)
    assert np.abs(formed).max() > 0.01
