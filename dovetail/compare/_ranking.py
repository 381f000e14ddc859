"""The results of a comparison: one outcome per protocol, the most accurate first.

A `Comparison` holds an `Outcome` for each protocol: its `Run`, or the reason why there is none. All three become plain
data and are read back (`to_json`, `from_json`); `Comparison.write` keeps them in a folder, as JSON and as CSV.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.compare._costs import Costs
from dovetail.figures import Figure, Line
from dovetail.files import write_json, write_table
from dovetail.numbers import at_most
from dovetail.statements import Statement, Trust

__all__ = ["Comparison", "Outcome", "Run"]

_DATA, _TABLE = "comparison.json", "comparison.csv"
_TERMS = ("task", "model", "eps", "delta", "seeds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How accurate a protocol was, what it guarantees and costs, by which settings, and on which machine."""

    accuracies: tuple[float, ...]  # one for each seed
    certified: Statement
    local: Statement
    shuffler: Statement | None
    trust: str  # whom a user must trust, in words
    shufflers: int
    may_collude: int  # shufflers or aggregators that may work with the analyzer
    costs: Costs
    rounds: int
    seconds_per_round: float
    settings: Mapping[str, Any]
    server_step: float
    version: str
    machine: str
    baseline: float | None = None  # the accuracy of the best constant guess; not recorded by earlier versions

    @property
    def beats_baseline(self) -> bool:
        """Whether it beats the best constant guess with every seed; True where that guess was not recorded."""
        return self.baseline is None or min(self.accuracies) > self.baseline

    @property
    def mean(self) -> float:
        """The mean accuracy over the seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def is_private(self) -> bool:
        """Whether anything is certified: a finite eps."""
        return not self.certified.is_unbounded

    @property
    def statement_without_trust(self) -> Statement:
        """What holds if nobody is trusted: the certified statement where it needs no trust, otherwise the local one."""
        return self.certified if self.certified.trust is Trust.LOCAL else self.local

    @property
    def needs_no_trusted_party(self) -> bool:
        """Whether what is certified holds whichever one party colludes with the analyzer."""
        if not self.is_private:
            return False
        shuffled = self.certified.trust is Trust.SHUFFLE and self.may_collude > 0
        return shuffled or self.certified.trust in (Trust.LOCAL, Trust.SHARES)

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "trust": self.trust,
            "shufflers": self.shufflers,
            "may_collude": self.may_collude,
            "no_trusted_party": self.needs_no_trusted_party,
            "accuracies": list(self.accuracies),
            "mean": self.mean,
            "baseline": self.baseline,
            "learned": self.beats_baseline,
            "spread": statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None,
            "certified": self.certified.to_json(),
            "local": self.local.to_json(),
            "shuffler": None if self.shuffler is None else self.shuffler.to_json(),
            "messages_per_client": self.costs.messages,
            "bytes_per_client": self.costs.bytes,
            "server_seconds": self.costs.server_seconds,
            "client_seconds": self.costs.client_seconds,
            "seconds_per_round": self.seconds_per_round,
            "rounds": self.rounds,
            "settings": dict(self.settings),
            "server_step": self.server_step,
            "version": self.version,
            "machine": self.machine,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Run:
        """What `to_json` wrote."""
        same = ("trust", "shufflers", "may_collude", "rounds", "seconds_per_round", "settings", "server_step",
                "version", "machine")  # fmt: skip
        return cls(
            **{name: row[name] for name in same},
            accuracies=tuple(row["accuracies"]),
            baseline=row.get("baseline"),
            certified=Statement.from_json(row["certified"]),
            local=Statement.from_json(row["local"]),
            shuffler=None if row["shuffler"] is None else Statement.from_json(row["shuffler"]),
            costs=Costs(
                messages=row["messages_per_client"],
                bytes=row["bytes_per_client"],
                server_seconds=row["server_seconds"],
                client_seconds=row.get("client_seconds"),
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A protocol's run, or the reason why there is none."""

    protocol: str
    run: Run | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        run = {} if self.run is None else self.run.to_json()
        return {"protocol": self.protocol, **run, "reason": self.reason}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Outcome:
        """What `to_json` wrote."""
        run = Run.from_json(row) if row["reason"] is None else None
        return cls(protocol=row["protocol"], run=run, reason=row["reason"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """All protocols of a line-up, the best first.

    Guarantees:
        `write` and `read` are inverse to each other.
    """

    task: str
    model: str
    eps: float
    delta: float
    seeds: int
    outcomes: tuple[Outcome, ...] = ()

    def with_outcome(self, outcome: Outcome) -> Comparison:
        """The comparison with this outcome in place of its protocol's earlier one, the most accurate first.

        Protocols that were not run come last.
        """
        others = [other for other in self.outcomes if other.protocol != outcome.protocol]
        ranked = sorted((*others, outcome), key=lambda item: -(item.run.mean if item.run else -math.inf))
        return dataclasses.replace(self, outcomes=tuple(ranked))

    @property
    def runs(self) -> dict[str, Run]:
        """The runs by protocol, the most accurate first; without the protocols that were not run."""
        return {outcome.protocol: outcome.run for outcome in self.outcomes if outcome.run is not None}

    @property
    def best_single_shuffler(self) -> str | None:
        """The name of the most accurate private protocol with one shuffler, of those that beat a constant guess."""
        ranked = (
            name for name, run in self.runs.items() if run.is_private and run.beats_baseline and run.shufflers == 1
        )
        return next(ranked, None)

    @property
    def baseline(self) -> float | None:
        """The accuracy of the best constant guess, the same for all protocols; None if no run recorded it."""
        return next((run.baseline for run in self.runs.values() if run.baseline is not None), None)

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            **self.terms,
            "neighbors": "replace-one",
            "baseline": self.baseline,
            "best_single_shuffler": self.best_single_shuffler,
            "rows": [outcome.to_json() for outcome in self.outcomes],
            "figures": [self.figure().to_json()],
        }

    @property
    def terms(self) -> dict[str, Any]:
        """What is the same for all protocols: task, model, eps, delta and number of seeds, by name."""
        return {name: getattr(self, name) for name in _TERMS}

    def figure(self) -> Figure:
        """Accuracy against the bytes that a client sends, one point for each private protocol."""
        lines = tuple(
            Line(
                name=f"{name} ({run.trust})",
                x=(float(run.costs.bytes),),
                y=(run.mean,),
                low=(min(run.accuracies),),
                high=(max(run.accuracies),),
                style="points",
            )
            for name, run in self.runs.items()
            if run.is_private
        )
        return Figure(
            title=f"Accuracy against upload, all calibrated to ({at_most(self.eps)}, {at_most(self.delta)})",
            x_label="bytes per client and round",
            y_label="test accuracy",
            log_x=True,
            percent_y=True,
            lines=lines,
        )

    def write(self, folder: Path) -> None:
        """Write `comparison.json`, and its rows as `comparison.csv`, into a folder that exists."""
        write_json(folder / _DATA, self.to_json())
        write_table(folder / _TABLE, [_csv_row(outcome) for outcome in self.outcomes])

    @classmethod
    def read(cls, folder: Path) -> Comparison:
        """What `write` wrote."""
        try:
            data = json.loads((folder / _DATA).read_text(encoding="utf-8"))
            return cls(
                **{name: data[name] for name in _TERMS},
                outcomes=tuple(Outcome.from_json(row) for row in data["rows"]),
            )
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{str(folder)!r} is not a folder that `dovetail compare` wrote") from error

    def resume_from(self, folder: Path) -> Comparison:
        """This comparison with the outcomes of an earlier one that was written to `folder`, if there is one.

        Call it before any outcome is added: what the folder holds is not ranked among the outcomes that are there.
        Refuses a folder whose comparison was on other terms.
        """
        if not (folder / _DATA).exists():
            return self
        before = Comparison.read(folder)
        if before.terms != self.terms:
            raise ValueError(
                f"{str(folder)!r} holds a comparison on other terms, {before.terms}: choose another folder for "
                f"{self.terms}"
            )
        return dataclasses.replace(self, outcomes=(*before.outcomes, *self.outcomes))


def _csv_row(outcome: Outcome) -> dict[str, Any]:
    """One line of `comparison.csv`, by column; columns that the outcome has no value for are None or left out."""
    row = outcome.to_json()
    run = outcome.run
    shown = ("protocol", "trust", "no_trusted_party", "mean", "spread", "baseline", "messages_per_client",
             "bytes_per_client", "client_seconds", "server_seconds", "rounds", "machine", "reason")  # fmt: skip
    eps = (
        {}
        if run is None
        else {
            "verdict": run.certified.verdict.value,
            "eps": run.certified.eps,
            "eps_without_trust": run.statement_without_trust.eps,
        }
    )
    return {**{name: row.get(name) for name in shown}, **eps}
