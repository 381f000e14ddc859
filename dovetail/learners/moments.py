"""One upload in a lifetime: a user's update is the second moments of its records, and ridge regression makes the model.

With z a record's features, the model's constant behind them, and y its label as one-hot less 1 / classes, a user sends
the mean over its records of the upper triangle of z z^T and of z y^T, once. The model does not enter, so there is
nothing to come back for. From the noised mean over all users, the analyzer solves (G + ridge) W = M.

The off-diagonal entries of z z^T are sent times sqrt(2): the norm of the vector is that of the two matrices, and noise
of one standard deviation on every number of the vector is symmetric noise on G whose spectral norm is about
std sqrt(2 m) (Wigner's semicircle). Clipping scales both matrices of a user alike: it gives the user a smaller weight
in the regression, and where all users have the same norm it changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import _validate
from dovetail.data._base import Model
from dovetail.learners.client import ClientUpdate

__all__ = ["Moments", "moments_of"]

_EXACT = jax.lax.Precision.HIGHEST  # what is measured is what is added up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
    """How the statistics of records become a vector, and a noised mean of such vectors a linear model.

    Called with the records of one user, it returns the user's vector.

    Arguments:
        features: how many numbers a record has.
        classes: how many classes there are.
        constant: the value of the constant feature at the end of z.
        project: to how many numbers records are first reduced, by a random matrix, fixed and public; None: not at all.
        weight: what z y^T is multiplied by in the vector, a public balance of the two parts.

    Guarantees:
        `unpack` gives back the matrices that `pack` took, and the norm of the vector is theirs.
        The norm of one record's vector is `norm_of_vector`, up to rounding.
        Without noise the model is that of ridge regression on the records.
    """

    features: int
    classes: int
    constant: float
    project: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.project is not None and not 1 <= self.project < self.features:
            raise ValueError(
                f"expected client.project below the {self.features} features of a record, got project={self.project}"
            )

    @property
    def size(self) -> int:
        """How many numbers z has."""
        return (self.project or self.features) + 1

    @property
    def dim(self) -> int:
        """How many numbers the vector has."""
        return self.size * (self.size + 1) // 2 + self.size * self.classes

    def __call__(self, inputs: jax.Array, labels: jax.Array, count: jax.Array) -> jax.Array:
        """A user's vector: the mean over the first `count` of these records, or zero without any."""
        weight = (jnp.arange(len(labels)) < count).astype(jnp.float32)
        z, y = self.augmented_features(inputs.reshape(len(labels), -1)), self.centered_targets(labels)
        record_weights = jnp.where(weight > 0, 1 / jnp.maximum(jnp.sum(weight), 1.0), 0.0)
        return self.scaled_sum(z, y, record_weights)

    def augmented_features(self, inputs: jax.Array) -> jax.Array:
        """z of each record, (records, size), from its flat features (records, features): the last entry is constant."""
        kept = inputs if self.project is None else jnp.matmul(inputs, self._projection, precision=_EXACT)
        return jnp.pad(kept, ((0, 0), (0, 1)), constant_values=self.constant)

    def centered_targets(self, labels: jax.Array) -> jax.Array:
        """y of each record, (records, classes): its class as one-hot, less 1 / classes."""
        return jax.nn.one_hot(labels, self.classes, dtype=jnp.float32) - 1 / self.classes

    def norm_of_vector(self, z_norm: jax.Array) -> jax.Array:
        """The norm of the vector of one record whose z has this norm: |z z^T|^2 = |z|^4 and |z y^T|^2 = |z|^2 |y|^2."""
        return z_norm * jnp.hypot(z_norm, self.weight * math.sqrt(1 - 1 / self.classes))

    def scaled_sum(self, z: jax.Array, y: jax.Array, scale: jax.Array) -> jax.Array:
        """The sum of the vectors of these records, each times its scale, by two matrix products."""
        scaled = scale[:, None] * z
        return self.pack(
            jnp.matmul(z.T, scaled, precision=_EXACT), self.weight * jnp.matmul(scaled.T, y, precision=_EXACT)
        )

    def pack(self, gram: jax.Array, cross: jax.Array) -> jax.Array:
        """A vector (dim,) of a symmetric matrix (size, size) and one of (size, classes), with the same norm as the two.

        First come the rows of the upper triangle, off-diagonal entries times sqrt(2), then the rows of the other.
        """
        row, column = np.triu_indices(self.size)
        return jnp.concatenate([gram[row, column] * _triangle_factor(row, column), cross.ravel()])

    def unpack(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two matrices that `pack` made the vector of, in float64: (size, size) and (size, classes)."""
        row, column = np.triu_indices(self.size)
        vector = np.asarray(vector, np.float64)
        gram = np.zeros((self.size, self.size))
        gram[row, column] = gram[column, row] = vector[: len(row)] / _triangle_factor(row, column).astype(np.float64)
        return gram, vector[len(row) :].reshape(self.size, self.classes)

    def solve_model(self, mean: np.ndarray, *, ridge: float, relative_ridge: float) -> np.ndarray:
        """The flat linear model of a noised mean vector: eigenvalues of G below zero are set to it, then raised.

        Arguments:
            mean: the noised mean of the users' vectors.
            ridge: an absolute number that is added to every eigenvalue.
            relative_ridge: what part of the eigenvalues' own mean is added to each of them, too.
        """
        gram, cross = self.unpack(mean)
        values, vectors = np.linalg.eigh(gram)
        values = np.maximum(values, 0.0)
        raised = values + ridge + relative_ridge * values.mean()
        inverse = np.divide(1.0, raised, out=np.zeros_like(raised), where=raised > 0)
        small = vectors @ (inverse[:, None] * (vectors.T @ cross)) / self.weight
        if self.project is not None:
            small = np.concatenate([self._projection.astype(np.float64) @ small[:-1], small[-1:]])
        return small.astype(np.float32).ravel()

    def noise_norm(self, std: float) -> float:
        """About the spectral norm of the noise on G where every number of the vector has noise of this std."""
        return std * math.sqrt(2 * self.size)

    @property
    def _projection(self) -> np.ndarray:
        """The random matrix (features, project) that reduces records."""
        return _projection(self.features, self.size - 1)


def moments_of(settings: ClientUpdate, model: Model) -> Moments | None:
    """The statistics that clients with these settings send for this model; None where they send an update of it."""
    if settings.update != "moments":
        return None
    if model.constant is None:
        raise ValueError(f"expected a linear model with client.update = 'moments', got model={model.name!r}")
    rows, classes = jax.eval_shape(model.init, jax.random.key(0)).shape
    return Moments(
        features=rows - 1,
        classes=classes,
        constant=model.constant,
        project=settings.project,
        weight=settings.weight,
    )


def _triangle_factor(row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """What entries of the triangle are multiplied by, so that its norm is that of the whole matrix."""
    return np.where(row == column, np.float32(1), np.float32(math.sqrt(2)))


@functools.lru_cache(maxsize=4)
def _projection(features: int, kept: int) -> np.ndarray:
    """A matrix (features, kept) of independent normal entries of variance 1 / kept, the same in every training.

    On average it keeps the length of a record. Cached: do not write to it.
    """
    _validate.at_least(1, kept=kept)
    matrix = np.random.default_rng(0).standard_normal((features, kept), dtype=np.float32)
    return matrix / np.float32(math.sqrt(kept))
