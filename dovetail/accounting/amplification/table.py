"""Every amplification bound of one shuffled report, by name, and the best of them.

`table` asks all bounds and keeps either the number or the reason why there is none; `best` is the smallest that holds
for the report at hand. A bound proved for one randomizer says nothing about another: generic bounds hold for every
eps_local-LDP report, the Laplace and the binary randomized-response ones only for their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from dovetail import _validate
from dovetail.accounting.amplification import blanket, clones, closed_forms
from dovetail.events import Report, Shuffled
from dovetail.statements import Bound, NotApplicable, Theorem

__all__ = ["BOUNDS", "NamedBound", "TableRow", "best", "bound", "table"]

Kind = Literal["generic", "laplace", "rr"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedBound:
    """One named bound: how it is computed, by which theorem, and for which randomizer it is proved."""

    function: Callable[..., Bound]  # takes an event and the keyword `delta`
    theorem: Theorem
    kind: Kind = "generic"  # the kind of report that it is proved for; generic: any
    any_levels: bool = False  # whether it is proved for randomized response of more than two levels

    def __call__(self, event: Shuffled, *, delta: float) -> Bound:
        """The bound for this event at delta; `NotApplicable` if it is not proved for the event's report."""
        report = event.report
        wanted = {"generic": "", "laplace": "Laplace on [0, 1]", "rr": "randomized response"}[self.kind]
        if self.kind == "generic":
            report = Report(kind="generic", eps_local=report.eps_local)
        elif report.kind != self.kind:
            raise NotApplicable(f"proved for {wanted} only, the report is {report.kind}")
        elif self.kind == "rr" and not self.any_levels and report.levels != 2:
            raise NotApplicable(f"proved for binary {wanted} only, the report has levels={report.levels}")
        return self.function(dataclasses.replace(event, report=report), delta=delta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRow:
    """One line of the table: a bound, or the reason why there is none; the other of the two is None."""

    name: str  # a key of `BOUNDS`
    bound: Bound | None
    reason: str | None
    theorem: Theorem


BOUNDS: Mapping[str, NamedBound] = MappingProxyType(
    {
        "erlingsson19": NamedBound(function=closed_forms.erlingsson19, theorem=closed_forms.ERLINGSSON19),
        "blanket-hoeffding-generic": NamedBound(function=blanket.hoeffding, theorem=blanket.HOEFFDING),
        "blanket-hoeffding-laplace": NamedBound(function=blanket.hoeffding, theorem=blanket.HOEFFDING, kind="laplace"),
        "blanket-hoeffding-rr2": NamedBound(function=blanket.hoeffding, theorem=blanket.HOEFFDING, kind="rr"),
        "blanket-bennett-generic": NamedBound(function=blanket.bennett, theorem=blanket.BENNETT),
        "blanket-bennett-laplace": NamedBound(function=blanket.bennett, theorem=blanket.BENNETT, kind="laplace"),
        "blanket-bennett-rr2": NamedBound(function=blanket.bennett, theorem=blanket.BENNETT, kind="rr"),
        "blanket-exact-laplace": NamedBound(function=blanket.exact, theorem=blanket.EXACT, kind="laplace"),
        "blanket-exact-rr2": NamedBound(function=blanket.exact, theorem=blanket.EXACT, kind="rr"),
        "flame-lemma1": NamedBound(
            function=closed_forms.flame_lemma1, theorem=closed_forms.FLAME_LEMMA1, kind="rr", any_levels=True
        ),
        "clones22-closed": NamedBound(function=closed_forms.clones22, theorem=closed_forms.FMT22_CLOSED),
        "clones22-numerical": NamedBound(function=clones.numerical22, theorem=clones.FMT22),
        "clones23-closed": NamedBound(function=closed_forms.clones23, theorem=closed_forms.FMT23_CLOSED),
        "clones23-numerical": NamedBound(function=clones.numerical23, theorem=clones.FMT23),
        "girgis21": NamedBound(function=closed_forms.girgis21, theorem=closed_forms.GIRGIS21),
    }
)


def bound(name: str, report: Report, *, num_users: int, delta: float, colluders: int = 0) -> Bound:
    """One bound by its name, for this report; `NotApplicable` with the reason where it does not apply.

    Arguments:
        name: a key of `BOUNDS`.
        report: the local randomizer; it must be the one that the bound is proved for.
        num_users: reports in the shuffle, the victim's included.
        delta: at which eps is asked for.
        colluders: users that are the adversary's, or fake.
    """
    _validate.known_name("bound", name, BOUNDS)
    return _bound_by_name(name, Shuffled(report=report, num_users=num_users, colluders=colluders), delta)


def table(report: Report | float, *, num_users: int, delta: float, colluders: int = 0) -> list[TableRow]:
    """Every bound, with its number or the reason why it has none.

    Given a number, the eps_local of a report of unknown kind, each row is computed for the randomizer that it is proved
    for: a comparison. Given a `Report`, rows proved for another randomizer are not applicable.

    Arguments:
        report: the local randomizer, or its eps_local.
        num_users: reports in the shuffle, the victim's included.
        delta: at which eps is asked for.
        colluders: users that are the adversary's, or fake.

    Guarantees:
        One row for every name of `BOUNDS`, in its order.
        `colluders=t` gives the rows of n - t users.
    """
    rows = []
    for name, entry in BOUNDS.items():
        own = report if isinstance(report, Report) else Report(kind=entry.kind, eps_local=report)
        event = Shuffled(report=own, num_users=num_users, colluders=colluders)
        try:
            result, reason = _bound_by_name(name, event, delta), None
        except NotApplicable as refusal:
            result, reason = None, str(refusal)
        rows.append(TableRow(name=name, bound=result, reason=reason, theorem=entry.theorem))
    return rows


def best(report: Report | float, *, num_users: int, delta: float, colluders: int = 0) -> TableRow:
    """The smallest bound that holds for this report; a number stands for a generic report of that eps_local.

    Arguments:
        report: the local randomizer, or its eps_local.
        num_users: reports in the shuffle, the victim's included.
        delta: at which eps is asked for.
        colluders: users that are the adversary's, or fake.

    Guarantees:
        The row's bound is never None: `NotApplicable` where no bound improves on eps_local.
        A generic report is never given a bound that is proved for one randomizer.
    """
    own = report if isinstance(report, Report) else Report(kind="generic", eps_local=report)
    candidates = [
        (row.bound.eps, row) for row in table(own, num_users=num_users, delta=delta, colluders=colluders) if row.bound
    ]
    if not candidates:
        raise NotApplicable(
            f"no amplification bound improves on eps_local={own.eps_local:.4g} at "
            f"n={num_users - colluders}, delta={delta:.3g}"
        )
    return min(candidates, key=lambda pair: pair[0])[1]


@functools.lru_cache(maxsize=4096)
def _bound_by_name(name: str, event: Shuffled, delta: float) -> Bound:
    """The bound of this name for this event at delta, kept."""
    return BOUNDS[name](event, delta=delta)
