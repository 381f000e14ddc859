"""Who is compared: a model's line-up (`dovetail/comparisons`) as one config a protocol."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from dovetail import _validate
from dovetail.data import resolve
from dovetail.experiment.config import Config, parse
from dovetail.protocols import BUNDLED, PROTOCOLS, build, find

__all__ = ["Contender", "line_up", "models"]

_NO_SETTINGS = "there are no settings for it with this model"
_BY_DEFAULTS = {"tuned": [(1.0, 0.0, 1.0)]}  # of a protocol from outside: its own defaults, and a step of 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A protocol's config in a comparison, or why it has none."""

    protocol: str
    config: Config | None = None
    reason: str | None = None


def models() -> list[str]:
    """Models that have a line-up."""
    folder = resources.files("dovetail") / "comparisons"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def line_up(
    *,
    eps: float,
    delta: float,
    model: str = "logistic",
    task: str = "mnist",
    protocols: Sequence[str] = (),
    overrides: Sequence[tuple[str, Any]] = (),
) -> list[Contender]:
    """The protocols of a comparison with their configs; those asked for, or all."""
    _validate.positive(eps=eps)
    _validate.in_open_interval(0, 1, delta=delta)
    _validate.known("model to compare", model, models())
    for name in protocols:
        find(name)
    for key, _ in overrides:
        if key.startswith("privacy") or key in ("protocol", "protocol.name"):
            raise ValueError(f"expected --eps and --delta for privacy and --protocols for protocols, got --set {key}")
    resolve(task)
    data = tomllib.loads((resources.files("dovetail") / "comparisons" / f"{model}.toml").read_text())
    chosen = []
    for name in protocols or PROTOCOLS:
        if name not in data["protocols"] and find(name) not in BUNDLED:
            tree = _tree(name, data["base"], _BY_DEFAULTS, task=task, eps=eps, delta=delta)
            chosen.append(Contender(protocol=name, config=parse(tree, overrides)))
            continue
        if name not in data["protocols"]:
            chosen.append(Contender(protocol=name, reason=PROTOCOLS[name].uncompared or _NO_SETTINGS))
            continue
        tree = _tree(name, data["base"], data["protocols"][name], task=task, eps=eps, delta=delta)
        chosen.append(Contender(protocol=name, config=parse(tree, overrides)))
    return chosen


def _tree(
    name: str, base: Mapping[str, Any], how: Mapping[str, Any], *, task: str, eps: float, delta: float
) -> dict[str, Any]:
    """A config as plain data: the line-up's base, the protocol's own settings, clip and step tuned near this eps."""
    _, clip, step = min(how["tuned"], key=lambda line: abs(math.log(line[0] / eps)))
    private = build(name, how.get("settings", {})).noise_field is not None
    return {
        "diagnostics": False,
        "task": {**base["task"], "name": task},
        "cohort": how.get("cohort", base["cohort"]),
        "client": base["client"],
        "server": {**base["server"], **how.get("server", {}), "learning_rate": step},
        "protocol": {"name": name, **how.get("settings", {}), **({how["clip"]: clip} if "clip" in how else {})},
        "privacy": {"delta": delta, "neighbors": "replace-one", **({"eps": eps} if private else {})},
    }
