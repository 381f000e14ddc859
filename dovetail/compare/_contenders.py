"""Who is compared: a model's line-up (`dovetail/comparisons`) as one config a protocol.

Accuracies of comparisons that were run before (`papers/results/compare`), and which of them is near a setting.

Whom a user must trust, in words.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from dovetail import _validate, protocols
from dovetail.data import resolve
from dovetail.experiment.config import Config, parse
from dovetail.protocols import BUNDLED, PROTOCOLS, Protocol, build, find
from dovetail.statements import Trust

__all__ = [
    "Committed",
    "Contender",
    "committed_comparisons",
    "line_up",
    "may_collude",
    "models",
    "near",
    "whom",
]

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
    _validate.known_name("model to compare", model, models())
    for name in protocols:
        find(name)
    for key, _ in overrides:
        if key.startswith("privacy") or key in ("protocol", "protocol.name"):
            raise ValueError(
                f"--set {key} cannot be set here: give --eps and --delta for privacy, --protocols for protocols"
            )
    resolve(task)
    data = tomllib.loads((resources.files("dovetail") / "comparisons" / f"{model}.toml").read_text())
    contenders = []
    for name in protocols or PROTOCOLS:
        if name not in data["protocols"] and find(name) not in BUNDLED:
            tree = _tree(name, data["base"], _BY_DEFAULTS, task=task, eps=eps, delta=delta)
            contenders.append(Contender(protocol=name, config=parse(tree, overrides)))
            continue
        if name not in data["protocols"]:
            contenders.append(Contender(protocol=name, reason=PROTOCOLS[name].uncompared or _NO_SETTINGS))
            continue
        tree = _tree(name, data["base"], data["protocols"][name], task=task, eps=eps, delta=delta)
        contenders.append(Contender(protocol=name, config=parse(tree, overrides)))
    return contenders


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


_NEAR_EPS, _NEAR_SIZE = 2.0, 4.0  # as many times more or less is still called near
_SIZES = math.log(_NEAR_SIZE) + 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Committed:
    """One comparison: its terms, and how each protocol did; every user had one record.

    `runs` holds, by protocol, the mean `accuracy` over the seeds, the number of `rounds`, and users `per_round`.
    """

    name: str
    task: str
    model: str
    eps: float
    delta: float
    seeds: int
    users: int
    dim: int
    runs: Mapping[str, Mapping[str, float]]

    def accuracy(self, name: str, *, rounds: int, per_round: int) -> float | None:
        """A protocol's, or that of one whose estimate has the same law; None if it was run in other rounds or not run.

        Rounds are near with at most four times or a quarter as many users, and four times or a quarter as many rounds.
        """
        run = self.runs.get(name) or self.runs.get(protocols.find(name).same_noise_as or "")
        if run is None or _far(run["rounds"], rounds) > _SIZES or _far(run["per_round"], per_round) > _SIZES:
            return None
        return run["accuracy"]

    def __str__(self) -> str:
        return (
            f"{self.task}, {self.model}, eps {self.eps:g} ({self.users:,} users with one record each, {self.dim:,} "
            f"coordinates, mean of {self.seeds} seeds)"
        )


def committed_comparisons() -> list[Committed]:
    """All comparisons, as `benchmarks/headline.py` wrote them down."""
    text = (resources.files("dovetail") / "comparisons" / "results.json").read_text()
    return [Committed(name=name, **facts) for name, facts in json.loads(text).items()]


def near(*, eps: float, users: int, dim: int) -> Committed | None:
    """The nearest comparison with at most twice or half the eps, and four times or a quarter of users and dimension."""

    def distance(other: Committed) -> float:
        return _far(other.eps, eps) + _far(other.users, users) + _far(other.dim, dim)

    candidates = [
        other
        for other in committed_comparisons()
        if _far(other.eps, eps) <= math.log(_NEAR_EPS) + 1e-9
        and max(_far(other.users, users), _far(other.dim, dim)) <= _SIZES
    ]
    return min(candidates, key=distance, default=None)


def _far(then: float, now: float) -> float:
    return abs(math.log(then / now))


def may_collude(protocol: Protocol) -> int:
    """How many shufflers or aggregators may work with the analyzer."""
    many = getattr(protocol, "aggregators", None)
    return getattr(protocol, "colluding_shufflers", 0) if many is None else many - 1


def whom(trust: Trust, protocol: Protocol, dim: int) -> str:
    """Who must be honest for the statement of this protocol."""
    may = may_collude(protocol)
    match trust:
        case Trust.CURATOR:
            return "a curator who sees every update"
        case Trust.SHUFFLE:
            many = protocol.layout(dim).shufflers
            if many == 1:
                return "one shuffler that does not collude"
            return f"{many} shufflers, of which {may or 'none'} may collude"
        case Trust.SHARES:
            return f"{may + 1} aggregators, of which {may} may collude"
        case _:
            return "nobody"
