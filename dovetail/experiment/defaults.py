"""Clip norm, rounds, optimiser, step and averaging where the caller leaves them open, from public numbers alone.

What a training needs to know of its noise is known before the first round. Let rho be the length of the noise on an
estimate over the longest update: std * sqrt(parameters) / clip norm. It follows from the number of users, parameters
and rounds, from (eps, delta), from who takes part and from the protocol's own noise, and from nothing in the data. The
rule (docs/concepts/defaults.md has the study that it was chosen by, and its limits):

- everybody takes part in each of 100 rounds, and the server's optimiser is Adam, whose steps do not depend on how long
  updates are;
- classes and labels: updates are clipped to 1. The bundled linear model takes steps of .1 / (1 + 4 rho), and the mean
  of its models after the last fifth of the rounds is published; others take steps of .03, and the last model is
  published. Noise turns a decision only where it outweighs what was learned, so steps are long;
- numbers: every error of a prediction counts, and so does what noise adds. Updates are clipped to .3, steps are
  .05 / (1 + 4 rho) for the bundled linear model and .05 / (1 + 2 rho) for others, and the mean of the last half is
  published. Where the range of the number was not declared they are twice as long, for there may be far to go;
- of other models with more than 1,000 parameters steps are shorter, by sqrt(1000 / parameters), for the many inputs of
  a unit move it together.

Optimiser and step belong together: who gives one of them has the documented defaults of the other, and of clip norm and
averaging. So has who lets clients take steps of their own (`client.update = "fedavg"`, or a function that trains).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from dovetail import protocols
from dovetail.data import Target
from dovetail.experiment.config import Config

__all__ = ["ROUNDS", "Learned", "cohort_for_dataset", "complete_config", "open_keys"]

ROUNDS = 100
_MANY_PARAMETERS = 1000
_STEP_KEYS = ("optimizer", "learning_rate", "options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """What is public about what is learned.

    Arguments:
        target: what labels are.
        dim: how many parameters the model has.
        is_linear: whether it is the bundled linear model, which begins at zero and has one best solution.
        has_known_scale: whether outputs are classes or labels, or numbers of a declared range, which becomes [-1, 1].
    """

    target: Target
    dim: int
    is_linear: bool
    has_known_scale: bool

    @property
    def clip_norm(self) -> float:
        """The clip norm of updates."""
        return 0.3 if self.target == "number" else 1.0

    def server_settings(self, noise_ratio: float) -> dict[str, Any]:
        """Optimiser, step and averaging under this much noise, as keys of [server].

        Arguments:
            noise_ratio: rho, the length of a round's noise over the longest update.
        """
        if self.target != "number":
            step = 0.1 / (1 + 4 * noise_ratio) if self.is_linear else 0.03
        else:
            step = (0.05 if self.has_known_scale else 0.1) / (1 + (4 if self.is_linear else 2) * noise_ratio)
        if not self.is_linear:
            step *= min(1.0, math.sqrt(_MANY_PARAMETERS / self.dim))
        average = 0.5 if self.target == "number" else 0.2 if self.is_linear else 0.0
        return {"optimizer": "adam", "learning_rate": float(f"{step:.2g}"), "average": average}


def cohort_for_dataset(settings: Collection[str]) -> dict[str, Any]:
    """The keys of [cohort] for a dataset: everyone in each round, as far as these settings leave it open.

    Arguments:
        settings: config keys by dotted path that the caller gives.
    """
    cohort: dict[str, Any] = {}
    if not {"cohort", "cohort.kind", "cohort.size", "cohort.epochs"} & set(settings):
        cohort["kind"] = "everyone"
    if not {"cohort", "cohort.rounds", "cohort.epochs"} & set(settings):
        cohort["rounds"] = ROUNDS
    return cohort


def open_keys(settings: Mapping[str, Any], *, protocol: str) -> frozenset[str]:
    """The keys that `complete_config` may fill in, by dotted path.

    Arguments:
        settings: config keys by dotted path that the caller gives; they stay as they are.
        protocol: the name of the protocol.
    """
    given = {_dotted_path(key) for key in settings}
    update = settings.get("client.update", settings.get("client", {}).get("update"))
    if "server" in given or update == "moments" or given & {f"server.{key}" for key in _STEP_KEYS}:
        return frozenset()
    keys = {"server.optimizer", "server.learning_rate"}
    if _has_clip_norm(protocol) and not given & {"protocol", "protocol.clip", "protocol.clip_norm"}:
        keys.add("protocol.clip_norm")
    if "server.average" not in given:
        keys.add("server.average")
    return frozenset(keys)


def complete_config(
    config: Config, keys: Collection[str], *, learned: Learned, noise_ratio: Callable[[Config], float]
) -> Config:
    """The config with these keys filled in by the rule.

    Arguments:
        keys: as `open_keys` gives them; none leaves the config as it is.
        learned: what is public about model and labels.
        noise_ratio: the length of a round's noise over the longest update under a config, both public.
    """
    if not keys:
        return config
    if "protocol.clip_norm" in keys and config.protocol.get("randomizer") != "laplace":
        config = msgspec.structs.replace(config, protocol={**config.protocol, "clip_norm": learned.clip_norm})
    chosen = {
        key: value for key, value in learned.server_settings(noise_ratio(config)).items() if f"server.{key}" in keys
    }
    return msgspec.structs.replace(config, server=dataclasses.replace(config.server, **chosen))


def _dotted_path(key: str) -> str:
    """The dotted path of a key of the protocol that stands alone, such as "clip_norm"; others as they are."""
    return f"protocol.{key}" if key in ("clip", "clip_norm") else key


def _has_clip_norm(protocol: str) -> bool:
    """Whether the protocol scales updates to an L2 norm that it has as a setting."""
    return any(field.name == "clip_norm" for field in dataclasses.fields(protocols.find(protocol)))  # type: ignore[arg-type]
