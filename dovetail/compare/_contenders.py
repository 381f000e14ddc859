"""What goes into a comparison: each protocol's config, accuracies of earlier comparisons, and whom users must trust.

`line_up` makes one config per protocol from a model's file in `dovetail/comparisons`, which lists how each protocol is
run with that model. `committed_comparisons` reads the accuracies of the comparisons in `papers/results/compare`, and
`nearest_comparison` finds the one that resembles a given situation. `trust_in_words` says whom a user must trust.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from dovetail import _validate
from dovetail.data import resolve
from dovetail.experiment.config import Config, parse
from dovetail.protocols import BUNDLED, PROTOCOLS, Protocol, build, find
from dovetail.statements import Trust

__all__ = [
    "Committed",
    "Contender",
    "committed_comparisons",
    "line_up",
    "max_colluders",
    "models_with_line_up",
    "nearest_comparison",
    "trust_in_words",
]

_NO_SETTINGS = "there are no settings for it with this model"
_BY_DEFAULTS = {"tuned": [(1.0, 0.0, 1.0)]}  # the entry of a protocol from outside: its own defaults, and a step of 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A protocol's config in a comparison, or the reason why it cannot be compared: one of the two is None."""

    protocol: str
    config: Config | None = None
    reason: str | None = None


def models_with_line_up() -> list[str]:
    """The names of the models that have a line-up, sorted."""
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
    """The protocols of a comparison with their configs.

    Arguments:
        eps: the target of every protocol, with `delta`; clip and server step were tuned near it.
        model: the name of the line-up.
        task: the data to train on.
        protocols: the names of the protocols to compare; none means all.
        overrides: config keys by dotted path with their values, for all protocols; not for privacy or the protocol.
    """
    _validate.positive(eps=eps)
    _validate.in_open_interval(0, 1, delta=delta)
    _validate.known_name("model to compare", model, models_with_line_up())
    for name in protocols:
        find(name)
    for key, _ in overrides:
        if key.startswith("privacy") or key in ("protocol", "protocol.name"):
            raise ValueError(
                f"--set {key} cannot be set here: give --eps and --delta for privacy, --protocols for protocols"
            )
    resolve(task)
    data = tomllib.loads((resources.files("dovetail") / "comparisons" / f"{model}.toml").read_text(encoding="utf-8"))
    contenders = []
    for name in protocols or PROTOCOLS:
        if name not in data["protocols"] and find(name) not in BUNDLED:
            config_data = _config_data(name, data["base"], _BY_DEFAULTS, task=task, eps=eps, delta=delta)
            contenders.append(Contender(protocol=name, config=parse(config_data, overrides)))
            continue
        if name not in data["protocols"]:
            contenders.append(Contender(protocol=name, reason=PROTOCOLS[name].uncompared or _NO_SETTINGS))
            continue
        config_data = _config_data(name, data["base"], data["protocols"][name], task=task, eps=eps, delta=delta)
        contenders.append(Contender(protocol=name, config=parse(config_data, overrides)))
    return contenders


def _config_data(
    name: str, base: Mapping[str, Any], entry: Mapping[str, Any], *, task: str, eps: float, delta: float
) -> dict[str, Any]:
    """A config as plain data: the line-up's base, the protocol's own settings, clip and step tuned near this eps.

    Arguments:
        base: the line-up's tables `task`, `cohort`, `client` and `server`, for all protocols.
        entry: the protocol's table in the line-up: `tuned`, a list of (eps, clip, server step), of which the line with
            the nearest eps counts; `clip`, the name of the protocol's setting that the clip goes to, if it has one; and
            `settings`, `cohort` and `server`, what it sets in place of the base.
    """
    _, clip, step = min(entry["tuned"], key=lambda line: abs(math.log(line[0] / eps)))
    private = build(name, entry.get("settings", {})).noise_field is not None
    return {
        "diagnostics": False,
        "task": {**base["task"], "name": task},
        "cohort": entry.get("cohort", base["cohort"]),
        "client": base["client"],
        "server": {**base["server"], **entry.get("server", {}), "learning_rate": step},
        "protocol": {"name": name, **entry.get("settings", {}), **({entry["clip"]: clip} if "clip" in entry else {})},
        "privacy": {"delta": delta, "neighbors": "replace-one", **({"eps": eps} if private else {})},
    }


_NEAR_EPS, _NEAR_SIZE = 2.0, 4.0  # as many times more or less is still called near
_MAX_LOG_SIZE_RATIO = math.log(_NEAR_SIZE) + 1e-9


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
        """The accuracy of a protocol, or of one whose estimate has the same law; None if neither was run like this.

        The number of rounds, and of users per round, may differ by a factor of four from those of the comparison.

        Arguments:
            name: the protocol.
            rounds: in how many rounds it is to be run.
            per_round: how many users take part in each of them.
        """
        run = self.runs.get(name) or self.runs.get(find(name).same_noise_as or "")
        if run is None:
            return None
        log_ratios = (_abs_log_ratio(run["rounds"], rounds), _abs_log_ratio(run["per_round"], per_round))
        return None if max(log_ratios) > _MAX_LOG_SIZE_RATIO else run["accuracy"]

    def __str__(self) -> str:
        return (
            f"{self.task}, {self.model}, eps {self.eps:g} ({self.users:,} users with one record each, {self.dim:,} "
            f"coordinates, mean of {self.seeds} seeds)"
        )


def committed_comparisons() -> list[Committed]:
    """All comparisons in `results.json`, which `benchmarks/headline.py` writes."""
    text = (resources.files("dovetail") / "comparisons" / "results.json").read_text(encoding="utf-8")
    return [Committed(name=name, **facts) for name, facts in json.loads(text).items()]


def nearest_comparison(*, eps: float, users: int, dim: int) -> Committed | None:
    """The nearest comparison with at most twice or half the eps, and four times or a quarter of users and dimension."""

    def distance(other: Committed) -> float:
        return _abs_log_ratio(other.eps, eps) + _abs_log_ratio(other.users, users) + _abs_log_ratio(other.dim, dim)

    candidates = [
        other
        for other in committed_comparisons()
        if _abs_log_ratio(other.eps, eps) <= math.log(_NEAR_EPS) + 1e-9
        and max(_abs_log_ratio(other.users, users), _abs_log_ratio(other.dim, dim)) <= _MAX_LOG_SIZE_RATIO
    ]
    return min(candidates, key=distance, default=None)


def _abs_log_ratio(first: float, second: float) -> float:
    """|log(first / second)|: 0 for equal numbers, the same for twice as for half."""
    return abs(math.log(first / second))


def max_colluders(protocol: Protocol) -> int:
    """How many shufflers or aggregators may work with the analyzer without breaking the statement.

    All aggregators but one; of shufflers as many as the protocol's setting `colluding_shufflers` says.
    """
    aggregators = getattr(protocol, "aggregators", None)
    return getattr(protocol, "colluding_shufflers", 0) if aggregators is None else aggregators - 1


def trust_in_words(trust: Trust, protocol: Protocol, dim: int) -> str:
    """Who must be honest for the statement of this protocol, as a phrase: "one shuffler that does not collude".

    Arguments:
        trust: the statement's.
        dim: the dimension of the model, on which the number of shufflers may depend.
    """
    colluders = max_colluders(protocol)
    match trust:
        case Trust.CURATOR:
            return "a curator who sees every update"
        case Trust.SHUFFLE:
            shufflers = protocol.layout(dim).shufflers
            if shufflers == 1:
                return "one shuffler that does not collude"
            return f"{shufflers} shufflers, of which {colluders or 'none'} may collude"
        case Trust.SHARES:
            return f"{colluders + 1} aggregators, of which {colluders} may collude"
        case _:
            return "nobody"
