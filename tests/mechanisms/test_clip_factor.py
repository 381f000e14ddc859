import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.mechanisms.gaussian import clip_factor, clip_l2


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 1.5, 1e6])
def test_the_factor_is_what_clipping_does(norm):
    x = np.zeros(4)
    x[2] = norm
    np.testing.assert_allclose(clip_l2(x, 1.0), x * clip_factor(np.float64(norm), 1.0), rtol=1e-12)
    assert float(clip_factor(jnp.float32(norm), 1.0)) == pytest.approx(min(1.0, 1.0 / max(norm, 1e-30)), rel=1e-6)


@pytest.mark.parametrize("norm", [np.nan, np.inf, 1e30])
def test_norms_that_cannot_be_trusted_count_as_nothing(norm):
    assert float(clip_factor(jnp.float32(norm), 1.0)) == 0.0
