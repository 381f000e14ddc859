"""Every number that a randomizer is made of is checked, and is the same number whatever type it came in."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from dovetail.events import Gaussian, Laplace, ReplacedUsers, Report, SampledSubject
from dovetail.mechanisms import (
    ClipLaplace,
    DiscreteGaussian,
    DiscreteLaplace,
    GaussianRandomizer,
    LaplaceRandomizer,
    PrivUnitRandomizer,
)
from dovetail.mechanisms._base import LocalRandomizer
from dovetail.mechanisms.deployed import ExactRandomizedResponse
from dovetail.mechanisms.exact_skellam import ExactSkellam
from dovetail.mechanisms.grid_laplace import GridLaplace, ReportGrid
from dovetail.mechanisms.randomized_response import BinaryRandomizedResponse, RandomizedResponse
from dovetail.mechanisms.skellam import Encoding
from dovetail.statements import Neighbors

REPLACED = {"neighbors": Neighbors.REPLACE_ONE}
MADE = [
    GaussianRandomizer(std=2.0, clip_norm=1.0),
    LaplaceRandomizer(eps_local=2.0),
    ClipLaplace(eps_local=2.0, bound=4.0),
    PrivUnitRandomizer(eps_local=2.0, clip_norm=1.0, dim=4),
    RandomizedResponse(eps_local=2.0, levels=3),
    BinaryRandomizedResponse(eps_local=2.0),
    DiscreteLaplace(eps_local=2.0, spacing=Fraction(1, 8)),
    DiscreteGaussian(std=2.0, clip_norm=1.0, dim=4, spacing=Fraction(1, 8)),
    ExactRandomizedResponse(eps_local=2.0, levels=3),
    ExactSkellam(variance=4.0),
    ReportGrid(clip_value=2.0, steps=4, reach=8),
    GridLaplace(eps_local=2.0, grid=ReportGrid(clip_value=2.0, steps=4, reach=8)),
    Encoding(clip_norm=2.0, scale=8.0, dim=4),
    Gaussian(std=2.0, sensitivity=1.0, **REPLACED),
    Laplace(scale=2.0, sensitivity=1.0, count=2, **REPLACED),
    Report(kind="rr", eps_local=2.0),
    ReplacedUsers(std=2.0, clip_norm=1.0, users=2),
    SampledSubject(std=2.0, clip_norm=1.0, items=2, prob_item=0.5),
]
FROZEN = (LocalRandomizer, DiscreteLaplace, DiscreteGaussian, ExactSkellam, GridLaplace, ReportGrid)
ENDS = {"low", "high"}  # of an interval: the only numbers that may be negative
FIELDS = [
    pytest.param(one, field.name, isinstance(getattr(one, field.name), float), id=f"{type(one).__name__}.{field.name}")
    for one in MADE
    for field in dataclasses.fields(one)
    if field.init and type(getattr(one, field.name)) in (int, float)
]


@pytest.mark.parametrize(("one", "name", "real"), FIELDS)
def test_no_number_is_negative_infinite_none_at_all_or_a_word(one, name, real):
    for value in (math.nan, math.inf, -math.inf, "nonsense", *([] if name in ENDS else [-1]), *([] if real else [1.5])):
        with pytest.raises((ValueError, TypeError)) as said:
            dataclasses.replace(one, **{name: value})
        assert name in str(said.value), value


@pytest.mark.parametrize(("one", "name", "real"), FIELDS)
def test_a_whole_number_and_one_of_numpy_are_the_same_number(one, name, real):
    """They are compared and hashed: programs that were compiled for the one are used for the other."""
    value = getattr(one, name)
    for other in (int(value) if value == int(value) else value, np.float64(value) if real else np.int64(value)):
        same = dataclasses.replace(one, **{name: other})
        assert same == one and hash(same) == hash(one)
        assert not (real and isinstance(one, FROZEN)) or type(getattr(same, name)) is float
