"""The densities that protocols state are those of the reports that they send."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dovetail import audit as audits
from dovetail.guarantee import quotes

KNOWN = {
    "ss_simple": {"eps_local": 1.0},
    "ss_simple laplace": {"eps_local": 1.0, "randomizer": "laplace"},
    "ss_simple rr": {"eps_local": 1.0, "randomizer": "rr", "levels": 4},
    "ss_double": {"eps_local": 1.0, "beta": 0.5},
    "ss_topk": {"eps_local": 1.0, "k": 2},
    "privunit": {"eps_local": 2.0},
    "apes": {"budgets": [1.0, 1.0]},
    "unis": {"budgets": [1.0, 1.0]},
    "pldp": {"budgets": [1.0, 1.0]},
    "ldp_fl": {"noise_multiplier": 2.0, "clip_norm": 1.0},
    "ldp_fl laplace": {"randomizer": "laplace", "clip_value": 1.0, "eps_local": 1.0},
    "binary_sum": {"eps_local": 1.0},
    "real_sum": {"eps_local": 1.0, "method": "single", "levels": 4},
    "real_sum unary": {"eps_local": 1.0, "method": "unary", "levels": 4},
}


@pytest.mark.parametrize("case", KNOWN)
def test_ratios_of_densities_average_to_one_under_the_law_they_are_of(case):
    """E_x[f(y | x') / f(y | x)] = 1, at six standard errors; under a wrong x it is not (a near miss must fail)."""
    name, dim = case.split()[0], 1 if "sum" in case else 4
    protocol, _ = quotes.settle_protocol(name, audits.attack_terms(name, 8, dim, 0.01, chosen=KNOWN[case]))
    x, other = np.linspace(1.0, 0.4, dim), np.linspace(-1.0, 0.3, dim)
    if dim == 1:
        other = np.zeros(1)
    budget = None if protocol.budgets is None else 1.0
    keys = jax.random.split(jax.random.key(0), 20_000)
    state = protocol.init(dim)
    reports = jax.vmap(
        lambda key: protocol.randomize(x.astype(np.float32), state, key=key, budget=None if budget is None else 1.0)
    )(keys)
    value = np.asarray(reports.value)
    mine, theirs = (protocol.log_density(value, held, budget=budget) for held in (x, other))
    assert mine.shape in (value.shape, (*value.shape[:-1], 1))
    ratio = np.exp(theirs - mine)
    sent = np.asarray(reports.valid).reshape(len(value), -1) > 0
    ratio = np.where(sent, ratio, np.nan) if sent.shape == ratio.shape else ratio
    assert _average_is_one(ratio)
    assert not _average_is_one(1 / ratio)


def _average_is_one(ratio):
    error = np.nanstd(ratio, axis=0) / np.sqrt(np.sum(~np.isnan(ratio), axis=0))
    return bool((np.abs(np.nanmean(ratio, axis=0) - 1) <= 6 * error + 1e-9).all())
