"""Where a run's randomness comes from: what is public, and what nobody may know.

What is public follows from `seed`: how records are dealt, the first model, the order in which a client visits its
records, batches that are disjoint. What statements rest on is secret: the noise, and who is drawn where a sample must
be unseen. It comes from a root of 256 bits of the operating system, of which every stream has a key of its own
(`chacha`, `secret`). With `reproducible` noise the secret part follows from the seed as well, for papers, tests and
comparisons: whoever knows the seed can subtract the noise, and no statement holds against them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets

import numpy as np

from dovetail import _validate
from dovetail._jax import jax
from dovetail.randomness import chacha

__all__ = ["ROOT_BYTES", "Randomness"]

ROOT_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Randomness:
    """The randomness of one run: a public seed and a secret root; without a root, all of it follows from the seed.

    Guarantees:
        Every secret stream depends on 128 bits of the root or more: keys have 256, generators 128.
        The root is in no `repr`.
    """

    seed: int
    root: bytes | None = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        _validate.integer(seed=self.seed)
        _validate.non_negative(seed=self.seed)
        if self.root and len(self.root) != ROOT_BYTES:
            raise ValueError(f"expected a root of {ROOT_BYTES} bytes, got {len(self.root)}")

    @classmethod
    def from_os(cls, seed: int) -> Randomness:
        """Randomness with a root from the operating system, so with noise that no other run has."""
        return cls(seed, secrets.token_bytes(ROOT_BYTES))

    @classmethod
    def from_seed(cls, seed: int) -> Randomness:
        """Randomness without a root: noise that anybody can draw again who knows the seed."""
        return cls(seed, None)

    @classmethod
    def without_secrets(cls, seed: int) -> Randomness:
        """Public randomness alone, for a plan before it is run: no noise can be drawn from it."""
        return cls(seed, b"")

    @property
    def has_secrets(self) -> bool:
        """Whether noise and secret samples can be drawn."""
        return self.root != b""

    @property
    def is_reproducible(self) -> bool:
        """Whether the noise follows from the public seed."""
        return self.root is None

    def public_generator(self, *path: int) -> np.random.Generator:
        """A generator of public randomness: a function of the seed and of `path`, numbers that name what it is for."""
        return np.random.default_rng((self.seed, *path))

    def secret_generator(self, *path: int) -> np.random.Generator:
        """A generator of secret randomness: a function of the root and of `path`, numbers that name what it is for.

        With reproducible noise it is `public(*path)`; refused without secrets.
        """
        if self.root is None:
            return self.public_generator(*path)
        self._require_secrets()
        name = b"".join(part.to_bytes(8, "little") for part in path)
        digest = hashlib.blake2b(name, key=self.root, person=b"dovetail draws", digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))

    @property
    def key_data(self) -> np.ndarray:
        """The noise key as uint32 words: an argument of compiled programs, never a constant in them.

        Eight words of the root, for keys of `chacha`; with reproducible noise the words of JAX's own key of the seed.
        """
        if self.root is None:
            return np.asarray(jax.random.key_data(jax.random.key(self.seed)))
        self._require_secrets()
        return np.frombuffer(self.root, "<u4").astype(np.uint32)

    def _require_secrets(self) -> None:
        """Refuse to draw noise for a plan that has no root yet."""
        if not self.has_secrets:
            raise ValueError("a plan draws no noise before it is run: give it randomness by Plan.with_randomness")

    @staticmethod
    def key_from_words(data: jax.Array) -> jax.Array:
        """The noise key of these words; their number says whether it is one of `chacha` or one of JAX's own."""
        return jax.random.wrap_key_data(
            data, impl=chacha.key_implementation() if data.shape[-1] == chacha.KEY_WORDS else None
        )
