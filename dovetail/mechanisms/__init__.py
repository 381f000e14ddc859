"""Local randomizers, one file each: simulated in JAX, deployed by exact samplers on the OS's randomness.

`RANDOMIZERS` names the simulated ones as configs do.
"""

from __future__ import annotations

from dovetail.mechanisms._base import AtInput, Blanket, LocalRandomizer
from dovetail.mechanisms.deployed import DiscreteGaussian, DiscreteLaplace, ExactRandomizedResponse
from dovetail.mechanisms.exact import EntropyExhausted, ExactSampler
from dovetail.mechanisms.exact_skellam import ExactSkellam
from dovetail.mechanisms.gaussian import NORMAL_CUT, GaussianRandomizer, clip_l2
from dovetail.mechanisms.grid_laplace import GridLaplace, ReportGrid
from dovetail.mechanisms.laplace import LAPLACE_CUT, ClipLaplace, LaplaceRandomizer, add_laplace
from dovetail.mechanisms.privunit import PrivUnitRandomizer, UniformSphere
from dovetail.mechanisms.randomized_response import BinaryRandomizedResponse, RandomizedResponse, UniformLevels
from dovetail.mechanisms.seeds import SeededPrivUnit

__all__ = [
    "LAPLACE_CUT",
    "NORMAL_CUT",
    "RANDOMIZERS",
    "AtInput",
    "BinaryRandomizedResponse",
    "Blanket",
    "ClipLaplace",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "EntropyExhausted",
    "ExactRandomizedResponse",
    "ExactSampler",
    "ExactSkellam",
    "GaussianRandomizer",
    "GridLaplace",
    "LaplaceRandomizer",
    "LocalRandomizer",
    "PrivUnitRandomizer",
    "RandomizedResponse",
    "ReportGrid",
    "SeededPrivUnit",
    "UniformLevels",
    "UniformSphere",
    "add_laplace",
    "clip_l2",
]

RANDOMIZERS: dict[str, type[LocalRandomizer]] = {
    "rr2": BinaryRandomizedResponse,
    "rr": RandomizedResponse,
    "laplace": LaplaceRandomizer,
    "clip_laplace": ClipLaplace,
    "gaussian": GaussianRandomizer,
    "privunit": PrivUnitRandomizer,
}
