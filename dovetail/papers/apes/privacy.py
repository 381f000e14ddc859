"""APES's budgets (Table 2) and its amplification bounds for one coordinate (Figure 2a); nothing is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dovetail.accounting.amplification import table
from dovetail.claims import apes as published
from dovetail.events import Report
from dovetail.figures import Figure, Line
from dovetail.guarantee import quotes
from dovetail.papers._exhibit import Part, Row, sweep
from dovetail.papers._runner import Runner
from dovetail.protocols.personal._personal import DISTRIBUTIONS
from dovetail.statements import NotApplicable

__all__ = ["DELTA_SHUFFLE", "FIG2A", "NAMES", "TABLE2", "USERS", "one_coordinate"]

USERS, DELTA_SHUFFLE = 10_000, 1e-8
NAMES = {
    "uniform1": "Uniform1",
    "uniform2": "Uniform2",
    "gauss1": "Gauss1",
    "gauss2": "Gauss2",
    "mixgauss1": "MixGauss1",
    "mixgauss2": "MixGauss2",
}
_BINS = 19
_BOUNDS = {
    "blanket-bennett-generic": "BBGN'19, Bennett",
    "clones22-numerical": "FMT'22, numerical",
    "girgis21": "GDDTK'21",
    "erlingsson19": "Erlingsson'19",
}
_OURS = "personalised clones (ours)"
_NOT_PROVED = "Everybody at the largest budget: a comparison, not proved where budgets and noise differ."


def one_coordinate(name: str, budgets: str | list[float], *, num_users: int = USERS) -> quotes.Terms:
    """One shuffled coordinate at the paper's delta."""
    return quotes.Terms(
        num_users=num_users, dim=1, delta=DELTA_SHUFFLE, settings={"budgets": budgets, "clip_value": 1.0}
    )


def _table2(runner: Runner) -> Iterable[Row]:
    for name, shown in NAMES.items():
        law = DISTRIBUTIONS[name]
        budgets = law.draw(USERS)
        yield Row(
            label=shown,
            paper={"lowest": law.low, "highest": law.high},
            series=shown,
            extra={
                "mean": float(budgets.mean()),
                "standard deviation": float(budgets.std()),
                "smallest": float(budgets.min()),
                "largest": float(budgets.max()),
                "share at the lower end": float(np.mean(budgets == law.low)),
                "share at the upper end": float(np.mean(budgets == law.high)),
            },
        )


def _histograms(rows: Sequence[Row]) -> list[Figure]:
    """Those of one range share a figure."""
    figures = []
    for names in (("uniform1", "gauss1", "mixgauss1"), ("uniform2", "gauss2", "mixgauss2")):
        law = DISTRIBUTIONS[names[0]]
        edges = np.linspace(law.low, law.high, _BINS + 1)
        middles = ((edges[1:] + edges[:-1]) / 2).tolist()
        shares = {name: np.histogram(DISTRIBUTIONS[name].draw(USERS), edges)[0] / USERS for name in names}
        figures.append(
            Figure(
                title=f"Budgets in [{law.low:g}, {law.high:g}]",
                x_label="eps of one coordinate",
                y_label="share of users",
                percent_y=True,
                lines=[Line(name=NAMES[name], x=middles, y=shares[name].tolist(), style="bars") for name in names],
            )
        )
    return figures


TABLE2 = Part(
    key="table2",
    title="Table 2: personal budgets",
    caption="Budgets of 10,000 users from our sampler. The table prints N(m, 1), which we read as a standard deviation "
    "of 1, and a clip range: values outside of it move to the nearer end. So more than four in ten Gaussian users have "
    "the smallest budget, and many have the largest.",
    rows=_table2,
    figures=_histograms,
)


def _figure2a(runner: Runner) -> Iterable[Row]:
    sizes = (1000, 10_000) if runner.quick else (1000, 2000, 5000, 10_000, 20_000, 50_000)
    for name in ("uniform2",) if runner.quick else ("uniform2", "gauss2"):
        for size in sizes:
            yield from _bounds(runner, name, size)


def _bounds(runner: Runner, name: str, size: int) -> Iterable[Row]:
    """Every bound on one coordinate at this number of users."""
    shown, x = NAMES[name], float(size)
    about = one_coordinate("apes", name, num_users=size)
    quoted = quotes.quote("apes", about)
    attacked = size <= USERS
    yield Row(
        label=f"{_OURS}, {shown}, n = {size}",
        certified=quoted.certified,
        audited=runner.audit("apes", about) if attacked else None,
        series=f"{_OURS}, {shown}",
        x=x,
        extra={"eps": quoted.certified.eps},
        note="" if attacked else "Not attacked: it takes long for so many users.",
    )
    yield Row(
        label=f"EoN, numerical, {shown}, n = {size}",
        claimed=quoted.claimed,
        series=f"EoN, numerical, {shown}",
        x=x,
        extra={"eps": quoted.claimed.eps if quoted.claimed else None},
    )
    budgets = DISTRIBUTIONS[name].draw(size)
    try:
        closed, why = published.theorem4(budgets.tolist(), delta_shuffle=DELTA_SHUFFLE), ""
    except NotApplicable as refusal:
        closed, why = None, str(refusal)
    yield Row(
        label=f"EoN, Thm. 4, {shown}, n = {size}",
        series=f"EoN, Thm. 4, {shown}",
        x=x,
        extra={"eps": closed.eps if closed else None, "verdict": closed.verdict.value if closed else None},
        note=closed.reason if closed else why,
    )
    if name == "uniform2":  # at the largest budget, which both distributions share
        for key, bound in _BOUNDS.items():
            yield _at_largest(key, bound, float(budgets.max()), size)


def _at_largest(key: str, name: str, eps_local: float, size: int) -> Row:
    report = Report(kind="generic", eps_local=eps_local)
    try:
        eps, note = table.bound(key, report, num_users=size, delta=DELTA_SHUFFLE).eps, _NOT_PROVED
    except NotApplicable as refusal:
        eps, note = None, str(refusal)
    return Row(label=f"{name}, n = {size}", series=name, x=float(size), extra={"eps": eps}, note=note)


def _bound_lines(rows: Sequence[Row]) -> list[Figure]:
    ours = [row for row in rows if row.certified is not None]
    lines = [
        *sweep(ours, lambda row: row.extra["eps"]),
        *sweep(ours, lambda row: row.audited.eps if row.audited else None, suffix=", audited at least", style="points"),
        *sweep([row for row in rows if row.certified is None], lambda row: row.extra["eps"], style="dashed"),
    ]
    return [
        Figure(
            title="One coordinate, delta 1e-8",
            x_label="users n",
            y_label="eps_c",
            log_x=True,
            log_y=True,
            lines=lines,
        )
    ]


FIG2A = Part(
    key="fig2a",
    title="Figure 2(a): amplification bounds for one coordinate",
    caption="eps_c of the user with the largest budget against the number of users, delta 1e-8. The paper draws its "
    "own bound (EoN) and four others with everybody at the largest budget; it prints no values. Its Thm. 4 takes the "
    "mean over all budgets as if the victim's own were secret, which is refuted in general. For these budgets our "
    "bound, which is proven for that very user, is below the paper's. Erlingsson'19 needs budgets of at most 1/2 and "
    "does not apply to a largest budget of 1.",
    rows=_figure2a,
    figures=_bound_lines,
)
