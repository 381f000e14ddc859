"""Clip norms that float32 cannot clip to are refused wherever one enters."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail import experiment, mechanisms, protocols
from dovetail._validate import SMALLEST_CLIP_NORM
from dovetail.experiment.config import parse
from dovetail.mechanisms.gaussian import clip_factor
from dovetail.mechanisms.skellam import Encoding

CLIPPED = [
    name
    for name, kind in protocols.PROTOCOLS.items()
    if "clip_norm" in {field.name for field in dataclasses.fields(kind)}
]
REFUSED = r"expected clip(_norm)? >= 1e-09 \(float32 cannot measure shorter updates"


def test_what_is_refused_is_what_float32_would_not_clip():
    """An update of 1e7 equal coordinates: measured as zero at half of 2^-59, and measured well at the smallest norm."""
    for norm, measured in ((2.0**-60, False), (2 * SMALLEST_CLIP_NORM, True)):
        update = jnp.full(10_000_000, norm / np.sqrt(1e7), jnp.float32)
        factor = float(clip_factor(jnp.linalg.norm(update), norm / 2))
        assert factor == (pytest.approx(0.5, rel=1e-5) if measured else 1.0)


@pytest.mark.parametrize("clip_norm", [2.0**-60, 1e-21])
@pytest.mark.parametrize("name", CLIPPED)
def test_every_protocol_with_a_clip_norm_refuses_one_that_is_too_small(name, clip_norm):
    with pytest.raises(ValueError, match=REFUSED):
        protocols.build(name, {"clip_norm": clip_norm})
    protocols.build(name, {"clip_norm": SMALLEST_CLIP_NORM})
    with pytest.raises(ValueError, match=REFUSED):
        experiment.prepare(parse({"task": {"name": "digits"}, "protocol": {"name": name, "clip_norm": clip_norm}}))


def test_a_clip_norm_that_follows_the_data_stays_above_the_smallest():
    with pytest.raises(ValueError, match=REFUSED):
        protocols.build("dp_fl", {"clip": 1e-21})
    adaptive = protocols.build(
        "dp_fl", {"clip": "adaptive", "clip_norm": SMALLEST_CLIP_NORM, "noise_multiplier": 1.0, "std_count": 1.0}
    )
    after = adaptive._move_clip_norm(jnp.float32(50.0), 100, adaptive.init(3), key=jax.random.key(0))
    assert float(after.clip_norm) >= np.float32(SMALLEST_CLIP_NORM)
    median = protocols.build("dp_fl", {"clip": "median", "noise_multiplier": 1.0})
    state = median.prepare(median.init(3), noise_scale=jnp.float32(1), norms=jnp.full(3, 1e-15))
    assert float(state.clip_norm) == 1.0


@pytest.mark.parametrize(
    "build",
    [
        lambda clip: mechanisms.GaussianRandomizer(std=1.0, clip_norm=clip),
        lambda clip: mechanisms.PrivUnitRandomizer(eps_local=1.0, clip_norm=clip, dim=4),
        lambda clip: mechanisms.DiscreteGaussian(std=1.0, clip_norm=clip, dim=4, spacing=Fraction(1, 8)),
        lambda clip: Encoding(clip_norm=clip, scale=1.0, dim=4),
    ],
)
def test_randomizers_refuse_it_too(build):
    with pytest.raises(ValueError, match=REFUSED):
        build(1e-21)
