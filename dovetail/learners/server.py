"""The server's step: any optax optimiser, fed with the negative of the estimated mean update.

The estimate is already private, so momentum and adaptive steps on it are post-processing. So is the mean of the models
after the last rounds, which may be published in place of the last model (Polyak, Juditsky 1992), and so is ridge
regression on estimated moments (`Ridge`).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dovetail import _validate
from dovetail._fields import with_fields_in_help
from dovetail.learners.moments import Moments

__all__ = ["AveragingState", "Ridge", "Server", "ServerSettings"]


class AveragingState(NamedTuple):
    """The optimiser's state, the mean of the models that count so far, and how many steps were taken."""

    optimizer: Any
    mean: jax.Array
    steps: jax.Array


@with_fields_in_help
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)  # slots: or msgspec leaves out the defaults
class ServerSettings:
    """The server's optimiser: the section [server] of a config."""

    optimizer: str = "sgd"
    """Name of an optax optimizer: `sgd`, `adam`, ...; `ridge` with `client.update = "moments"`."""
    learning_rate: float = 1.0
    """Learning rate of the server."""
    options: dict[str, float | bool] = dataclasses.field(default_factory=dict)
    """Further arguments of the optimizer, such as `momentum`."""
    average: float = 0.0
    """Publish the mean of the models after this last part of the rounds, for example 0.5; 0: the last model."""

    def build(self) -> Server:
        """The server of these settings: `Ridge` for "ridge", otherwise an optax optimiser."""
        kind = Ridge if self.optimizer == "ridge" else Server
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ServerSettings)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server(ServerSettings):
    """An optax optimiser with its options, for a training of so many `rounds` (see `for_rounds`).

    Guarantees:
        Without `average` the last model is published, and the state is the optimiser's.
        The mean is that of the models after the last ceil(average * rounds) steps; before them, the last model.
    """

    rounds: int | None = None

    def __post_init__(self) -> None:
        _validate.positive(learning_rate=self.learning_rate)
        _validate.in_interval(0, 1, average=self.average)
        _validate.known_name("optimizer", self.optimizer, _optimizer_names())
        accepted = inspect.signature(getattr(optax, self.optimizer)).parameters
        for key in self.options:
            _validate.known_name(f"option of optimizer {self.optimizer!r}", key, accepted)

    def for_rounds(self, rounds: int, *, moments: Moments | None = None, noise_std: float | None = None) -> Server:
        """The same server for a training of so many rounds.

        Arguments:
            moments: what is estimated; without, it is a move of the model.
            noise_std: standard deviation of the noise on every number of the estimate.
        """
        if moments is not None:
            raise ValueError(
                f"client.update = 'moments' needs server.optimizer = 'ridge', and it is {self.optimizer!r}"
            )
        return dataclasses.replace(self, rounds=rounds)

    @property
    def num_averaged(self) -> int:
        """How many of the last rounds' models are averaged; 0 for none."""
        if self.average and self.rounds is None:
            raise ValueError(f"average={self.average} of the rounds needs their number: call for_rounds(rounds) first")
        return math.ceil(self.average * (self.rounds or 0))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a statement says of the model that is published."""
        if not self.num_averaged:
            return ()
        return (
            f"the published model is the mean of the models after the last {self.num_averaged} of {self.rounds} "
            "rounds, each of which the statement covers (post-processing)",
        )

    @property
    def _optax_transform(self) -> optax.GradientTransformation:
        """The optax optimiser of these settings."""
        return getattr(optax, self.optimizer)(self.learning_rate, **self.options)

    def init(self, params: jax.Array) -> Any:
        """The optimiser's state before the first round."""
        state = self._optax_transform.init(params)
        return AveragingState(state, jnp.zeros_like(params), jnp.zeros((), jnp.int32)) if self.num_averaged else state

    def step(self, params: jax.Array, state: Any, estimate: jax.Array) -> tuple[jax.Array, Any]:
        """The parameters after a step along the estimated mean update, and the state after it.

        Optimisers descend, so they get the negative of the estimate in place of a gradient.
        """
        if not self.num_averaged:
            updates, state = self._optax_transform.update(-estimate, state, params)
            return optax.apply_updates(params, updates), state
        updates, optimizer = self._optax_transform.update(-estimate, state.optimizer, params)
        moved = optax.apply_updates(params, updates)
        steps = state.steps + 1
        count = self._num_models_in_mean(steps)
        mean = jnp.where(count > 0, state.mean + (moved - state.mean) / jnp.maximum(count, 1), state.mean)
        return moved, AveragingState(optimizer, mean, steps)

    def model_to_publish(self, params: jax.Array, state: Any) -> jax.Array:
        """The model to publish when training is at these parameters: the mean of the last ones, or the last."""
        return jnp.where(self._num_models_in_mean(state.steps) > 0, state.mean, params) if self.num_averaged else params

    def _num_models_in_mean(self, steps: jax.Array) -> jax.Array:
        """How many of the models after so many steps are averaged."""
        return steps - ((self.rounds or 0) - self.num_averaged)


# the options of `Ridge` and their defaults: chosen on Fashion-MNIST; half or twice as much hardly matters
_RIDGE = {"ridge": 0.35, "share": 0.001}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ridge(Server):
    """Solves for a linear model once; what it holds in place of parameters are the estimated moments.

    Two options raise the eigenvalues of the Gram matrix: by `ridge` times the spectral norm that its noise is known to
    have, and by `share` times their own mean. Both are computed from public numbers and the noised matrix alone.

    Guarantees:
        The model is a function of the estimate and of public numbers alone.
        Refuses more than one round, updates that are not moments, and settings that would do nothing.
    """

    optimizer: str = "ridge"
    moments: Moments | None = None
    noise_std: float | None = None

    def __post_init__(self) -> None:
        for key, value in self.options.items():
            _validate.known_name("option of optimizer 'ridge'", key, _RIDGE)
            _validate.non_negative(**{key: float(value)})
        if self.average or self.learning_rate != 1:
            raise ValueError(
                "server.optimizer = 'ridge' takes no steps: leave out server.average = "
                f"{self.average} and server.learning_rate = {self.learning_rate}"
            )

    def for_rounds(self, rounds: int, *, moments: Moments | None = None, noise_std: float | None = None) -> Ridge:
        """The same server for moments of this layout; `rounds` must be 1.

        Arguments:
            moments: the layout of the statistics that are estimated.
            noise_std: standard deviation of the noise on every number of the estimate.
        """
        if moments is None:
            raise ValueError(
                "server.optimizer = 'ridge' solves for a model from moments: set client.update = 'moments'"
            )
        if rounds != 1:
            raise ValueError(f"expected cohort.rounds = 1 with client.update = 'moments', got {rounds} rounds")
        return dataclasses.replace(self, rounds=rounds, moments=moments, noise_std=noise_std)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a statement says of the model that is published."""
        return (
            "every user uploads once; the published model is solved from the noised moments by ridge regression, whose "
            "ridge follows from the noise level (post-processing)",
        )

    def init(self, params: jax.Array) -> Any:
        """No state, (): there is one round."""
        return ()

    def step(self, params: jax.Array, state: Any, estimate: jax.Array) -> tuple[jax.Array, Any]:
        """The moments so far plus the estimated ones, and the state as it is; `params` begin at zero."""
        return params + estimate, state

    def model_to_publish(self, params: jax.Array, state: Any) -> jax.Array:
        """The flat linear model of ridge regression on the estimated moments `params`, with a ridge for their noise."""
        if self.moments is None or self.noise_std is None:
            raise ValueError(
                "ridge regression needs the layout of the moments and their noise: call for_rounds(rounds, ...) first"
            )
        options = {**_RIDGE, **self.options}
        ridge = options["ridge"] * self.moments.noise_norm(self.noise_std)
        return jnp.asarray(self.moments.solve_model(np.asarray(params), ridge=ridge, relative_ridge=options["share"]))


def _optimizer_names() -> list[str]:
    """The optimisers of optax by name: its functions whose first parameter is the learning rate."""
    return [
        name
        for name, value in vars(optax).items()
        if inspect.isfunction(value) and next(iter(inspect.signature(value).parameters), None) == "learning_rate"
    ]
