"""Losses of a Gaussian on a sample, for all eps at once: dp-accounting's own, which finds them one by one."""

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld

from dovetail.accounting.gaussian import gaussian_losses


@pytest.mark.parametrize("add_remove", [True, False])
@pytest.mark.parametrize("prob", [1.0, 0.6, 0.01, 1e-6])
@pytest.mark.parametrize("std", [0.3, 1.0, 20.0])
def test_losses_are_dp_accountings_own(std, prob, add_remove):
    interval = 0.02 if std < 1 else 1e-3
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if add_remove else NeighboringRelation.REPLACE_ONE
    theirs = pld.from_gaussian_mechanism(
        std, sampling_prob=prob, neighboring_relation=relation, value_discretization_interval=interval
    )
    ours = gaussian_losses(std, sensitivity=1.0, prob=prob, add_remove=add_remove, interval=interval)
    assert ours._symmetric == theirs._symmetric
    for side in ("_pmf_remove", "_pmf_add"):
        mine, its = (getattr(of, side).to_dense_pmf() for of in (ours, theirs))
        assert mine._lower_loss == its._lower_loss
        rounding = 16 * np.finfo(float).eps / interval  # masses are differences of deltas over the interval
        np.testing.assert_allclose(mine._probs, its._probs, rtol=0, atol=rounding)
        assert mine._infinity_mass == pytest.approx(its._infinity_mass, rel=1e-9, abs=1e-300)
    shifted = gaussian_losses(std * 1.01, sensitivity=1.0, prob=prob, add_remove=add_remove, interval=interval)
    assert shifted.get_delta_for_epsilon(prob / std) < theirs.get_delta_for_epsilon(prob / std) * (1 - 1e-5)
