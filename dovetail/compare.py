"""Every protocol at the same certified privacy: which learns most, who must be trusted for it, and what it costs.

A line-up (`dovetail/comparisons`) names for a model how each protocol is run: cohort, settings, clip and server step.
Noise is calibrated so that the same accountant certifies the same (eps, delta), for replacing one user, over the whole
training; then every protocol is trained for every seed. Costs are those of the deployed messages: each sealed on its
own, opened and added up by one core of the analyzer.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import math
import statistics
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dovetail import __version__, _validate, experiment, machine
from dovetail.config import Config, parse
from dovetail.figures import Figure, Line
from dovetail.folder import write_atomically
from dovetail.parties import sealing
from dovetail.parties.keys import KEY_ID
from dovetail.protocols import PROTOCOLS, Protocol
from dovetail.statements import Neighbors, NotApplicable, Statement, Trust, Unit
from dovetail.tasks import Task, resolve

__all__ = ["Comparison", "Contender", "Outcome", "compare", "line_up", "models", "noise_of"]

_NO_MODEL = "it adds up numbers and trains no model: see `dovetail reproduce survey`"
_SUBJECTS = "it protects people whose records lie at several users: see `dovetail reproduce subdp`"
_APART = {"binary_sum": _NO_MODEL, "real_sum": _NO_MODEL, "central_sub": _SUBJECTS, "local_sub": _SUBJECTS}
_SLOT_BYTES, _FLOAT_BYTES = 4, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A protocol's config in a comparison, or why it has none."""

    protocol: str
    config: Config | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What one round asks of a client and of the analyzer."""

    messages: int
    bytes: int
    server_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a protocol did."""

    contender: Contender
    results: tuple[experiment.Result, ...] = ()
    costs: Costs | None = None
    trust: str = ""
    shufflers: int = 0
    may_collude: int = 0  # shufflers that may work with the analyzer
    reason: str | None = None

    @property
    def accuracies(self) -> list[float]:
        """One for each seed."""
        return [result.accuracy for result in self.results]

    @property
    def mean(self) -> float:
        """Over the seeds; nothing learnt where nothing was run."""
        return statistics.fmean(self.accuracies) if self.results else -math.inf

    @property
    def statement(self) -> Statement:
        """What is certified."""
        return self.results[0].statement

    @property
    def private(self) -> bool:
        """Whether anything is promised."""
        return bool(self.results) and not self.statement.unbounded

    @property
    def no_trusted_party(self) -> bool:
        """Whether what is certified holds whichever one party colludes with the analyzer."""
        if not self.private:
            return False
        return self.statement.trust is Trust.LOCAL or (self.statement.trust is Trust.SHUFFLE and self.may_collude > 0)

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form; each user's own eps is left out."""
        name, config = self.contender.protocol, self.contender.config
        if not self.results or self.costs is None or config is None:
            return {"protocol": name, "reason": self.reason or self.contender.reason}
        first = self.results[0]
        slim = functools.partial(dataclasses.replace, per_user=None)
        return {
            "protocol": name,
            "trust": self.trust,
            "no_trusted_party": self.no_trusted_party,
            "accuracies": self.accuracies,
            "mean": self.mean,
            "spread": statistics.stdev(self.accuracies) if len(self.results) > 1 else None,
            "certified": slim(first.statement).to_json(),
            "local": slim(first.quote.local).to_json(),
            "shuffler": None if first.quote.shuffler is None else slim(first.quote.shuffler).to_json(),
            "messages_per_client": self.costs.messages,
            "bytes_per_client": self.costs.bytes,
            "server_seconds": self.costs.server_seconds,
            "seconds_per_round": first.seconds_per_round,
            "rounds": first.rounds,
            "settings": config.protocol,
            "server_step": config.server.learning_rate,
            "reason": None,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """All protocols of a line-up, the best first."""

    task: str
    model: str
    eps: float
    delta: float
    seeds: int
    outcomes: tuple[Outcome, ...]

    @property
    def ranked(self) -> list[Outcome]:
        """By mean accuracy; those that were not run last."""
        return sorted(self.outcomes, key=lambda outcome: -outcome.mean)

    @property
    def best_single_shuffler(self) -> Outcome | None:
        """The most accurate private protocol with one shuffler."""
        alone = [one for one in self.ranked if one.private and one.shufflers == 1]
        return alone[0] if alone else None

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        best = self.best_single_shuffler
        return {
            "task": self.task,
            "model": self.model,
            "eps": self.eps,
            "delta": self.delta,
            "neighbors": "replace-one",
            "seeds": self.seeds,
            "version": __version__,
            "machine": machine.describe(),
            "best_single_shuffler": best and best.contender.protocol,
            "rows": [outcome.to_json() for outcome in self.ranked],
            "figures": [figure.to_json() for figure in self.figures()],
        }

    def figures(self) -> list[Figure]:
        """Accuracy against what a client sends, by whom one must trust."""
        groups: dict[str, list[Outcome]] = {}
        for outcome in self.ranked:
            if outcome.private and outcome.costs is not None:
                groups.setdefault(outcome.contender.protocol, []).append(outcome)
        lines = tuple(
            Line(
                name=f"{name} ({members[0].trust})",
                x=tuple(float(one.costs.bytes) for one in members if one.costs),
                y=tuple(one.mean for one in members),
                low=tuple(min(one.accuracies) for one in members),
                high=tuple(max(one.accuracies) for one in members),
                style="points",
            )
            for name, members in groups.items()
        )
        return [
            Figure(
                title=f"Accuracy against upload, all at a certified ({self.eps:g}, {self.delta:g})",
                x_label="bytes a client sends in a round",
                y_label="test accuracy",
                log_x=True,
                percent_y=True,
                lines=lines,
            )
        ]


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
    _validate.known("model with a line-up", model, models())
    for name in protocols:
        _validate.known("protocol", name, PROTOCOLS)
    for key, _ in overrides:
        if key.startswith("privacy") or key in ("protocol", "protocol.name"):
            raise ValueError(
                f"expected the privacy of all by --eps and --delta, and protocols by name, got --set {key}"
            )
    resolve(task)
    data = tomllib.loads((resources.files("dovetail") / "comparisons" / f"{model}.toml").read_text())
    chosen = []
    for name in protocols or PROTOCOLS:
        if name not in data["protocols"]:
            chosen.append(
                Contender(protocol=name, reason=_APART.get(name, "this model's line-up has no settings for it"))
            )
            continue
        tree = _tree(name, data["base"], data["protocols"][name], task=task, eps=eps, delta=delta)
        chosen.append(Contender(protocol=name, config=parse(tree, overrides)))
    return chosen


def _tree(
    name: str, base: Mapping[str, Any], how: Mapping[str, Any], *, task: str, eps: float, delta: float
) -> dict[str, Any]:
    """A config as plain data: the line-up's base, the protocol's own settings, clip and step tuned near this eps."""
    _, clip, step = min(how["tuned"], key=lambda line: abs(math.log(line[0] / eps)))
    private = name != "fedavg"
    return {
        "diagnostics": False,
        "task": {**base["task"], "name": task},
        "cohort": how.get("cohort", base["cohort"]),
        "client": base["client"],
        "server": {**base["server"], **how.get("server", {}), "learning_rate": step},
        "protocol": {"name": name, **how.get("settings", {}), **({how["clip"]: clip} if "clip" in how else {})},
        "privacy": {"delta": delta, "neighbors": "replace-one", **({"eps": eps} if private else {})},
    }


def compare(
    contenders: Sequence[Contender],
    *,
    task: str | Task,
    model: str,
    eps: float,
    delta: float,
    seeds: int,
    out: Path | None = None,
    observe: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Train every contender for every seed; written to `out` after each, so that a stopped comparison leaves some.

    Guarantees:
        What is promised is at most (eps, delta) for replacing one user, or the comparison ends.
    """
    _validate.at_least(1, seeds=seeds)
    own = task if isinstance(task, Task) else None
    found = Comparison(
        task=task if isinstance(task, str) else task.name, model=model, eps=eps, delta=delta, seeds=seeds, outcomes=()
    )
    _write(found, out)
    for contender in contenders:
        outcome = _run(contender, own, seeds, observe)
        if outcome.private:
            _refuse_unequal(outcome.statement, eps=eps, delta=delta)
        found = dataclasses.replace(found, outcomes=(*found.outcomes, outcome))
        _write(found, out)
    return found


def _run(contender: Contender, task: Task | None, seeds: int, observe: Callable[[str], None]) -> Outcome:
    if contender.config is None:
        return Outcome(contender=contender, reason=contender.reason)
    results, config = [], contender.config
    for seed in range(seeds):
        observe(f"{contender.protocol}, seed {seed}")
        try:
            plan = experiment.prepare(_seeded(config, seed), task=task)
        except ValueError as refusal:  # no noise meets the target, or a theorem does not apply
            return Outcome(contender=contender, reason=str(refusal))
        config = _with_noise(config, plan.protocol)
        results.append(experiment.run(plan, evaluate_every=len(plan.rounds)))
    observe(f"{contender.protocol}, costs")
    size = int(plan.schedule.size_of(0))
    return Outcome(
        contender=contender,
        results=tuple(results),
        costs=costs(plan.protocol, size, plan.engine.dim),
        trust=_trust(results[0].statement, plan.protocol, plan.engine.dim),
        shufflers=plan.protocol.layout(plan.engine.dim).shufflers,
        may_collude=getattr(plan.protocol, "colluding_shufflers", 0),
    )


def _refuse_unequal(statement: Statement, *, eps: float, delta: float) -> None:
    alike = statement.neighbors is Neighbors.REPLACE_ONE and statement.unit is Unit.USER
    if not alike or statement.eps > eps or statement.delta > delta:
        raise ValueError(f"expected ({eps}, {delta})-DP for replacing one user, got {statement.headline()}")


def _seeded(config: Config, seed: int) -> Config:
    return msgspec.structs.replace(config, seed=seed)


def _with_noise(config: Config, protocol: Protocol) -> Config:
    """The config with the noise that was calibrated for it: other seeds need not search again."""
    return msgspec.structs.replace(config, protocol={**config.protocol, **noise_of(protocol)})


def noise_of(protocol: Protocol) -> dict[str, Any]:
    """What a calibrated protocol's config would say of its noise; personal budgets hold it themselves."""
    if protocol.noise_field is None:
        return {}
    scale = getattr(protocol, protocol.noise_field)
    return (
        {protocol.noise_field: scale}
        if scale is not None
        else {"budgets": protocol.budgets, protocol.noise_field: None}
    )


def _trust(statement: Statement, protocol: Protocol, dim: int) -> str:
    """Whom a user must trust, in words."""
    if statement.unbounded and statement.trust is not Trust.SHUFFLE:
        return "everybody"
    match statement.trust:
        case Trust.CURATOR:
            return "a curator who sees every update"
        case Trust.SHUFFLE:
            many, bad = protocol.layout(dim).shufflers, getattr(protocol, "colluding_shufflers", 0)
            if many == 1:
                return "one shuffler that does not collude"
            return f"{many} shufflers, of which {bad or 'none'} may collude"
        case _:
            return "nobody"


def costs(protocol: Protocol, size: int, dim: int) -> Costs:
    """A client's messages and bytes, and the analyzer's seconds, for one round of so many users."""
    layout = protocol.layout(dim)
    if not layout.shufflers:
        vector = _FLOAT_BYTES * dim
        return Costs(messages=1, bytes=vector, server_seconds=size * dim / _additions_a_second())
    try:
        deployed = protocol.messages(dim)
        messages, plain = deployed.per_client, deployed.size
    except (NotApplicable, ValueError):  # simulated only: a float a report
        messages = round(layout.reports_per_client * getattr(protocol, "beta", 1.0))
        plain = _FLOAT_BYTES
    received = size * messages if layout.padding is None else layout.padding.pad_to * layout.slots
    return Costs(
        messages=messages,
        bytes=messages * (_SLOT_BYTES + plain + sealing.OVERHEAD),
        server_seconds=received * _seconds_to_open(plain),
    )


@functools.cache
def _seconds_to_open(size: int, repeats: int = 200) -> float:
    """One message, opened by one core of this machine."""
    key = X25519PrivateKey.generate()
    purpose = sealing.Purpose(task_id=bytes(32), round=1, role="report", key_id=bytes(KEY_ID))
    sealed = sealing.seal(bytes(size), key.public_key(), purpose)
    begun = time.thread_time()
    for _ in range(repeats):
        sealing.open_sealed(sealed, key, purpose)
    return (time.thread_time() - begun) / repeats


@functools.cache
def _additions_a_second() -> float:
    """Numbers that this machine adds to a sum of vectors in a second."""
    block, total = np.ones((64, 65_536), np.float32), np.zeros(65_536, np.float32)
    begun = time.thread_time()
    total += block.sum(axis=0)
    return block.size / (time.thread_time() - begun)


def _write(found: Comparison, out: Path | None) -> None:
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        data = found.to_json()
        write_atomically(out / "comparison.json", (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())
        write_atomically(out / "comparison.csv", _csv(data["rows"]))
    except OSError as error:
        raise ValueError(f"expected a folder that can be written to, got {str(out)!r} ({error.strerror})") from error


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    names = ("protocol", "trust", "no_trusted_party", "mean", "spread", "certified_eps", "local_eps",
             "messages_per_client", "bytes_per_client", "server_seconds", "rounds", "reason")  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        eps = {f"{key}_eps": row[key]["eps"] for key in ("certified", "local") if key in row}
        writer.writerow({**row, **eps})
    return text.getvalue().encode()
