"""The server's step: any optax optimiser, fed with the negative of the estimated mean update.

The estimate is already private, so momentum and adaptive steps on it are post-processing.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import optax

from dovetail import _validate

__all__ = ["Server"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """An optax optimiser by name, its learning rate and its further options by keyword."""

    optimizer: str = "sgd"
    learning_rate: float = 1.0
    options: tuple[tuple[str, float | bool], ...] = ()

    def __post_init__(self) -> None:
        _validate.positive(learning_rate=self.learning_rate)
        _validate.known("optimizer", self.optimizer, _optimizers())
        accepted = inspect.signature(getattr(optax, self.optimizer)).parameters
        for key, _ in self.options:
            _validate.known(f"option of optimizer {self.optimizer!r}", key, accepted)

    @classmethod
    def build(cls, optimizer: str, learning_rate: float, options: Mapping[str, float | bool]) -> Server:
        """The server of these settings."""
        return cls(optimizer=optimizer, learning_rate=learning_rate, options=tuple(sorted(options.items())))

    @property
    def _transform(self) -> optax.GradientTransformation:
        return getattr(optax, self.optimizer)(self.learning_rate, **dict(self.options))

    def init(self, params: jax.Array) -> Any:
        """The optimiser's state before the first round."""
        return self._transform.init(params)

    def step(self, params: jax.Array, state: Any, estimate: jax.Array) -> tuple[jax.Array, Any]:
        """Move the parameters along the estimated mean update."""
        updates, state = self._transform.update(-estimate, state, params)
        return optax.apply_updates(params, updates), state


def _optimizers() -> list[str]:
    """The names in optax that take a learning rate and give an optimiser."""
    return [
        name
        for name, value in vars(optax).items()
        if inspect.isfunction(value) and next(iter(inspect.signature(value).parameters), None) == "learning_rate"
    ]
