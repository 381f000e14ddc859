"""Privacy statements: what is guaranteed, and by which proof.

Every privacy number comes with its context. A `Statement` says how much (eps, delta), about what (`Unit`,
`Neighbors`), against whom (`adversary`), who must be trusted (`Trust`), by which `Proof`, under which assumptions,
and whether we certify it or only repeat a claim (`Verdict`). Statements nest: `premises` is the proof tree, and
``str(statement)`` prints it, with a warning where the numbers mean little.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from dovetail import _validate
from dovetail.numbers import at_most
from dovetail.proofs import Proof, Spent, Theorem

__all__ = [
    "TUNING_ASSUMPTION",
    "Bound",
    "Neighbors",
    "NotApplicable",
    "Proof",
    "Scope",
    "Spent",
    "Statement",
    "Theorem",
    "Trust",
    "Unit",
    "Verdict",
    "check_guarantee",
    "no_guarantee",
]

TUNING_ASSUMPTION = "hyper-parameters were chosen without the private data"
_LARGE_EPS = 10.0  # odds may change by a factor of 22,000


class NotApplicable(ValueError):  # noqa: N818 - it says why a theorem does not apply; it is not always an error
    """A theorem was applied outside its hypotheses; the message says which hypothesis fails."""


class Trust(enum.Enum):
    """The trust model of a statement: who must be honest for it to hold."""

    NONE = "none"  # nobody is trusted, and nothing is promised either; no bundled protocol has it
    CURATOR = "curator"  # a server that sees every update and adds the noise
    LOCAL = "local"  # nobody but the user's own device
    SHUFFLE = "shuffle"  # the shuffler, not to collude with the analyzer; of several, those that the assumptions name
    SHARES = "shares"  # at least one of several aggregators


class Neighbors(enum.Enum):
    """Which pairs of inputs count as neighbours."""

    REPLACE_ONE = "replace-one"  # the data of one unit are others; how many units there are stays the same
    ADD_REMOVE = "add-remove"  # one unit is there or not


class Unit(enum.Enum):
    """Whose data may differ between neighbours."""

    ITEM = "item"  # one record
    USER = "user"  # all records on one device, or at one silo
    SUBJECT = "subject"  # all records about one person, whichever users hold them


class Verdict(enum.Enum):
    """Whether we vouch for the number, or who does.

    *As declared*: code from outside the package has to do what its author says, and only the accounting is ours: a
    protocol declares what it releases, or an assumption declares what a learner, module, view or feature looks at.
    *Simulation only*: the noise is derived from a seed, and whoever knows the seed can subtract the noise.
    """

    CERTIFIED = "certified"
    DECLARED = "as declared"
    REPRODUCIBLE = "simulation only, noise is reproducible"
    DECLARED_REPRODUCIBLE = "as declared; simulation only, noise is reproducible"
    CLAIMED_HOLDS = "claimed, holds"
    CLAIMED_UNPROVEN = "claimed, unproven"
    CLAIMED_REFUTED = "claimed, refuted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """An upper bound (eps, delta) and its proof; with `sample_known` it holds even if it is known who was sampled.

    `lower` is a lower end of the eps that was computed, where there is one: the same quantity, rounded down. It says
    how exact the computation is, and where the theorem is an equivalence also that no smaller eps holds.
    """

    eps: float
    delta: float
    proof: Proof
    sample_known: bool = False
    lower: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scope:
    """Everything a statement says apart from its numbers and its proof.

    `tuning` is what is assumed of how hyper-parameters were chosen.
    """

    trust: Trust
    adversary: str
    neighbors: Neighbors
    unit: Unit
    assumptions: tuple[str, ...] = ()
    population: int | None = None  # how many such units there are, where that is known
    tuning: str = TUNING_ASSUMPTION

    def state(
        self,
        bound: Bound,
        verdict: Verdict,
        *,
        span: str = "",
        premises: tuple[Statement, ...] = (),
        per_user: tuple[float, ...] | None = None,
    ) -> Statement:
        """The statement that this bound makes within this scope.

        Arguments:
            bound: the numbers and their proof.
            verdict: who vouches for them.
            span: what they cover, in words ("12 rounds").
            premises: statements that this one rests on, to be printed below it.
            per_user: every user's eps, where users differ.
        """
        return Statement(
            eps=bound.eps,
            delta=bound.delta,
            trust=self.trust,
            adversary=self.adversary,
            neighbors=self.neighbors,
            unit=self.unit,
            proof=bound.proof,
            assumptions=self.assumptions,
            verdict=verdict,
            span=span,
            premises=premises,
            lower=bound.lower,
            per_user=per_user,
            population=self.population,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statement:
    """One guarantee: (eps, delta) for a unit, against an adversary, by a proof, under assumptions.

    Guarantees:
        eps is in [0, inf] and delta in [0, 1]; anything else is refused.
        `to_json` and `from_json` are inverses of each other, also for an infinite eps.
    """

    eps: float
    delta: float
    trust: Trust
    adversary: str
    neighbors: Neighbors
    unit: Unit
    proof: Proof
    assumptions: tuple[str, ...]
    verdict: Verdict
    span: str = ""
    premises: tuple[Statement, ...] = ()
    per_user: tuple[float, ...] | None = None  # every user's eps, in the users' order, where users differ
    population: int | None = None  # how many such units there are, where that is known
    lower: float | None = dataclasses.field(default=None, compare=False)  # `Bound.lower`; not in `to_json`

    def __post_init__(self) -> None:
        check_guarantee(eps=self.eps, delta=self.delta)
        if self.lower is not None and not 0 <= self.lower <= self.eps:
            raise ValueError(f"expected a lower end in [0, {self.eps}], got lower={self.lower}")

    @property
    def is_unbounded(self) -> bool:
        """Whether there is no guarantee, which is an infinite eps."""
        return math.isinf(self.eps)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the numbers mean little, if they do."""
        if self.is_unbounded:
            return ()
        texts = []
        if self.eps > _LARGE_EPS:
            texts.append(f"eps is above {_LARGE_EPS:g}: such a bound rules out little")
        if self.population is not None and self.delta > 1 / self.population:
            texts.append(
                f"delta is above 1/{self.population}, one over the number of {self.unit.value}s: it would allow "
                f"publishing everything about one {self.unit.value} picked at random"
            )
        return tuple(texts)

    def with_verdict(self, verdict: Verdict) -> Statement:
        """The same guarantee and its premises, with this verdict instead of *certified*.

        Arguments:
            verdict: what takes the place of *certified*; any other verdict stays.
        """
        premises = tuple(premise.with_verdict(verdict) for premise in self.premises)
        own = verdict if self.verdict is Verdict.CERTIFIED else self.verdict
        return dataclasses.replace(self, verdict=own, premises=premises)

    def without_users(self) -> Statement:
        """The same guarantee, and its premises, without the list `per_user`, which may have thousands of entries."""
        premises = tuple(premise.without_users() for premise in self.premises)
        return dataclasses.replace(self, per_user=None, premises=premises)

    def __str__(self) -> str:
        return "\n".join(self._lines(indent="", stated=()))

    def headline(self) -> str:
        """The statement's first line: numbers, scope, verdict."""
        whose = f"one {self.unit.value}" + (f", {self.span}" if self.span else "")
        scope = f"{self.trust.value}; against the {self.adversary}; {self.neighbors.value}; {whose}"
        if self.is_unbounded:
            return f"no guarantee [{scope}]"
        numbers = f"({at_most(self.eps)}, {at_most(self.delta)})-DP"
        return f"{numbers} [{scope}]   {self.verdict.value}{', with a warning' * bool(self.warnings)}"

    def _lines(self, indent: str, stated: tuple[str, ...]) -> list[str]:
        """The printed lines of this statement and its premises; assumptions in `stated` are not printed again."""
        lines = [indent + self.headline(), *(f"{indent}  warning: {text}" for text in self.warnings)]
        lines.append(f"{indent}  {'reason:' if self.is_unbounded else 'by'} {self.proof}")
        lines += [f"{indent}  if {assumption}" for assumption in self.assumptions if assumption not in stated]
        if self.per_user is not None:
            low, high = min(self.per_user), max(self.per_user)
            lines.append(f"{indent}  for {len(self.per_user)} users with eps from {at_most(low)} to {at_most(high)}")
        for premise in self.premises:
            lines += premise._lines(indent + "  ", stated + self.assumptions)
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain data for `privacy.json`; an infinite eps becomes ``null`` with ``unbounded: true``."""
        return {
            "eps": None if self.is_unbounded else self.eps,
            "unbounded": self.is_unbounded,
            "delta": self.delta,
            "trust": self.trust.value,
            "adversary": self.adversary,
            "neighbors": self.neighbors.value,
            "unit": self.unit.value,
            "theorem": {"key": self.proof.key, "where": str(self.proof), "url": self.proof.url},
            "proof": self.proof.to_json(),
            "assumptions": list(self.assumptions),
            "verdict": self.verdict.value,
            "span": self.span,
            "premises": [premise.to_json() for premise in self.premises],
            "per_user": None if self.per_user is None else list(self.per_user),
            "population": self.population,
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Statement:
        """The statement that `to_json` wrote."""
        return cls(
            eps=math.inf if data["unbounded"] else data["eps"],
            delta=data["delta"],
            trust=Trust(data["trust"]),
            adversary=data["adversary"],
            neighbors=Neighbors(data["neighbors"]),
            unit=Unit(data["unit"]),
            proof=Proof.from_json(data["proof"]),
            assumptions=tuple(data["assumptions"]),
            verdict=Verdict(data["verdict"]),
            span=data["span"],
            premises=tuple(cls.from_json(premise) for premise in data["premises"]),
            per_user=None if data["per_user"] is None else tuple(data["per_user"]),
            population=data.get("population"),
        )


def check_guarantee(*, eps: float, delta: float) -> None:
    """Raise ValueError unless eps is in [0, inf] and delta in [0, 1]."""
    if math.isnan(eps) or eps < 0:
        raise ValueError(f"expected eps >= 0, got eps={eps!r}")
    _validate.in_interval(0, 1, delta=delta)


def no_guarantee(scope: Scope, *, reason: str, delta: float = 0.0, span: str = "") -> Statement:
    """A statement whose eps is infinite, with the reason in place of a proof.

    Arguments:
        scope: what the statement says beside its numbers.
        reason: why nothing is promised, in words.
        delta: the one that was asked for, if any.
        span: what it covers, in words.
    """
    nothing = Bound(eps=math.inf, delta=delta, proof=Proof(missing=reason))
    return scope.state(nothing, Verdict.CERTIFIED, span=span)
