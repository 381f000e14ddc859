"""PrivUnit in 16 bytes: a report is the seed of its direction (Feldman, Talwar 2021; PrivUnit: see `privunit`).

A public generator expands a seed s into a direction v(s). The client tosses the exact coin of the cap, then draws
uniform seeds until <v(s), u> lies on the side of the threshold that the coin says: given the side, the seed is uniform
among all seeds of that side. Hence a seed has probability prob / (c 2^128) or (1 - prob) / ((1 - c) 2^128), with c the
share of seeds in the cap, and eps is that of `PrivUnitRandomizer` if c is the mass of the cap. No float leaves the
client: floating point only decides on which side a seed lies, and the seed was drawn before.

The time of a draw depends on the side, which with the seed reveals u: nobody but the client may time it.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dovetail.accounting.releases.privunit import cap_mass
from dovetail.mechanisms.exact import ExactSampler
from dovetail.mechanisms.privunit import PrivUnitRandomizer, polar_of_clipped
from dovetail.statements import NotApplicable

__all__ = ["SEED_BYTES", "SeededPrivUnit", "directions_of_seeds", "draw_seeds"]

SEED_BYTES = 16
_BLOCK = 2**17  # coordinates that are expanded at a time: they stay in the cache
_LEAST_MASS = 2.0**-20


@dataclasses.dataclass(frozen=True)
class SeededPrivUnit:
    """`PrivUnitRandomizer` whose reports are seeds; what reports average to, `debias` and variance are those of `law`.

    Guarantees:
        The coin for the cap is exact: the seed lies in it with probability `law.cap.prob`.
        Given the side, every seed on it is equally likely.
        Refuses a cap that takes more than about a million tries to hit.
        A vector whose norm is NaN or infinite, or below 1e-12 clip_norm, counts as zero.

    References:
        Feldman, Talwar (ICML 2021), "Lossless compression of efficient private local randomizers".
    """

    law: PrivUnitRandomizer

    def __post_init__(self) -> None:
        mass = cap_mass(dim=self.law.dim, threshold=self.law.cap.threshold)
        if mass < _LEAST_MASS:
            raise NotApplicable(
                f"a seed would take about {1 / mass:.1e} tries at eps_local={self.law.eps_local} in {self.law.dim} "
                f"dimensions, more than the {1 / _LEAST_MASS:.1e} that a client is asked for"
            )

    @property
    def mean_tries(self) -> float:
        """Seeds that a client draws for a report, on average."""
        cap = self.law.cap
        mass = cap_mass(dim=cap.dim, threshold=cap.threshold)
        return cap.prob / mass + (1 - cap.prob) / (1 - mass)

    def __call__(self, x: np.ndarray, *, sampler: ExactSampler) -> np.ndarray:
        """The seed that reports one vector x of shape (dim,): 16 bytes."""
        law = self.law
        if np.shape(x) != (law.dim,):
            raise ValueError(f"expected x of shape ({law.dim},), got shape={np.shape(x)}")
        radius, unit = polar_of_clipped(np.asarray(x, np.float64), law.clip_norm)
        keep = sampler.bernoulli(Fraction((1 + float(radius[0])) / 2))
        inside = sampler.bernoulli(Fraction(law.cap.prob))
        return self._search_seed(unit if keep else -unit, inside, sampler)

    def _search_seed(self, unit: np.ndarray, inside: bool, sampler: ExactSampler) -> np.ndarray:
        """The first of uniform seeds on this side of the threshold: in the cap around `unit`, or outside it.

        Seeds are tried in blocks that are about as large as the tries that are needed; those after the first hit are
        dropped.
        """
        mass = cap_mass(dim=self.law.dim, threshold=self.law.cap.threshold)
        tries = math.ceil(1 / mass) if inside else 1
        block = max(1, min(tries, _BLOCK // self.law.dim))
        while True:
            seeds = draw_seeds(block, sampler=sampler)
            normals = _normals_of_seeds(seeds, self.law.dim)
            above = normals @ unit >= self.law.cap.threshold * np.sqrt(np.vecdot(normals, normals))
            hits = np.flatnonzero(above == inside)
            if hits.size:
                return seeds[hits[0]]


def draw_seeds(count: int, *, sampler: ExactSampler) -> np.ndarray:
    """`count` independent uniform seeds, (count, 16) uint8."""
    return sampler.integers(2**32, 4 * count).astype("<u4").view(np.uint8).reshape(count, SEED_BYTES)


def directions_of_seeds(seeds: np.ndarray, dim: int) -> np.ndarray:
    """v(s) for every row of seeds, (count, 16) uint8: float32 unit vectors, (count, dim).

    The AES-128-CTR keystream under key s from counter 0, as 64-bit little-endian words; their upper 53 bits are
    uniforms on (0, 1); pairs become two normals each by Box and Muller; the normals are scaled to norm 1.

    That the share of seeds in a cap is its mass is an assumption on the generator. 53 bits leave room for it: even in
    the plane, where one uniform is the whole direction, the share of a cap of mass 2^-20 is within 2^-33 of it,
    relatively; 32 bits would miss by 2^-12.
    """
    expanded = np.empty((len(seeds), dim), np.float32)
    rows = max(1, _BLOCK // dim)
    for begin in range(0, len(seeds), rows):
        normals = _normals_of_seeds(seeds[begin : begin + rows], dim, np.float32)
        expanded[begin : begin + rows] = normals / np.linalg.norm(normals, axis=1, keepdims=True)
    return expanded


def _normals_of_seeds(seeds: np.ndarray, dim: int, dtype: type[np.floating] = np.float64) -> np.ndarray:
    """The normals of every seed before they are scaled: the cosines of all pairs, then the sines.

    An analyzer needs no more than `dtype` float32, whose cosines are a dozen times faster; a client decides in float64.
    """
    pairs = (dim + 1) // 2
    zeros = bytes(16 * pairs)
    counter = modes.CTR(bytes(16))
    stream = b"".join(
        Cipher(algorithms.AES(seed.tobytes()), counter).encryptor().update(zeros) for seed in np.asarray(seeds)
    )
    uniform = ((np.frombuffer(stream, "<u8") >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    first, second = uniform.reshape(len(seeds), 2, pairs).swapaxes(0, 1)
    radius = np.sqrt(-2 * np.log(first)).astype(dtype)
    angle = (2 * math.pi * second).astype(dtype)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :dim]
