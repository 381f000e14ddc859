"""APES, "Echo of Neighbors" (Liu, Zhao, Xiong, Liu, Chen, AAAI 2023): its tables and figures.

Nothing is trained for its budgets (Table 2) and its amplification bounds for one coordinate (Figure 2a). Trainings are
those of six frameworks (Table 3), of six distributions (Figure 2b), and over clip bound and sparsification (Figures 3a,
3b): 10,000 users, logistic regression, all users in every round; MNIST stands in for QMNIST, six images per user
instead of twelve. Uniform2 is 10,000 evenly spaced budgets from .05 to 1, with which Table 3 recomputes to the digit.
All eps are for one round, which the paper calls an epoch, and delta 3.6e-5. Table 1 and Figure 1 are prose and a
drawing; the figures of the paper's appendix are not reproduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail import audit
from dovetail.accounting.amplification import table
from dovetail.claims import apes as published
from dovetail.events import Report
from dovetail.experiment.config import read
from dovetail.figures import Figure, Line
from dovetail.guarantee import quotes
from dovetail.papers.exhibits import Paper, Part, Row, accuracy_figure, curve_lines, measured_mean, sweep_lines
from dovetail.papers.runner import Overrides, Runner
from dovetail.protocols.personal._personal import DISTRIBUTIONS
from dovetail.statements import NotApplicable

__all__ = ["PAPER"]

USERS = 10_000
DELTA_SHUFFLE = 1e-8
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


def terms_of_one_coordinate(name: str, budgets: str | list[float], *, num_users: int = USERS) -> quotes.Terms:
    """One shuffled coordinate at the paper's delta."""
    return quotes.Terms(
        num_users=num_users, dim=1, delta=DELTA_SHUFFLE, settings={"budgets": budgets, "clip_value": 1.0}
    )


def _table2_rows(runner: Runner) -> Iterable[Row]:
    """One row per distribution of budgets: its ends as printed, and what a draw for `USERS` users is like."""
    for name, title in NAMES.items():
        law = DISTRIBUTIONS[name]
        budgets = law.draw(USERS)
        yield Row(
            label=title,
            paper={"lowest": law.low, "highest": law.high},
            series=title,
            extra={
                "mean": float(budgets.mean()),
                "standard deviation": float(budgets.std()),
                "smallest": float(budgets.min()),
                "largest": float(budgets.max()),
                "share at the lower end": float(np.mean(budgets == law.low)),
                "share at the upper end": float(np.mean(budgets == law.high)),
            },
        )


def _histogram_figures(rows: Sequence[Row]) -> list[Figure]:
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
    rows=_table2_rows,
    figures=_histogram_figures,
)


def _figure2a_rows(runner: Runner) -> Iterable[Row]:
    """Every bound on one coordinate, for distributions and numbers of users; fewer of both in the quick form."""
    sizes = (1000, 10_000) if runner.quick else (1000, 2000, 5000, 10_000, 20_000, 50_000)
    for name in ("uniform2",) if runner.quick else ("uniform2", "gauss2"):
        for size in sizes:
            yield from _bound_rows(runner, name, size)


def _bound_rows(runner: Runner, name: str, size: int) -> Iterable[Row]:
    """Every bound on one coordinate at this number of users."""
    title = NAMES[name]
    x = float(size)
    about = terms_of_one_coordinate("apes", name, num_users=size)
    quoted = quotes.quote("apes", about)
    attacked = size <= USERS
    yield Row(
        label=f"{_OURS}, {title}, n = {size}",
        certified=quoted.certified,
        audited=runner.best_exact_bound("apes", about) if attacked else None,
        series=f"{_OURS}, {title}",
        x=x,
        extra={"eps": quoted.certified.eps},
        note="" if attacked else "Not attacked: it takes long for so many users.",
    )
    yield Row(
        label=f"EoN, numerical, {title}, n = {size}",
        claimed=quoted.claimed,
        series=f"EoN, numerical, {title}",
        x=x,
        extra={"eps": quoted.claimed.eps if quoted.claimed else None},
    )
    budgets = DISTRIBUTIONS[name].draw(size)
    try:
        closed = published.theorem4(budgets.tolist(), delta_shuffle=DELTA_SHUFFLE)
        note = closed.reason
    except NotApplicable as refusal:
        closed = None
        note = str(refusal)
    yield Row(
        label=f"EoN, Thm. 4, {title}, n = {size}",
        series=f"EoN, Thm. 4, {title}",
        x=x,
        extra={"eps": closed.eps if closed else None, "verdict": closed.verdict.value if closed else None},
        note=note,
    )
    if name == "uniform2":  # at the largest budget, which both distributions share
        for key, bound in _BOUNDS.items():
            yield _row_of_bound_at_largest(key, bound, float(budgets.max()), size)


def _row_of_bound_at_largest(key: str, name: str, eps_local: float, size: int) -> Row:
    """A bound by name that knows one budget alone, asked at the largest; its refusal where it does not apply."""
    report = Report(kind="generic", eps_local=eps_local)
    try:
        eps, note = table.bound(key, report, num_users=size, delta=DELTA_SHUFFLE).eps, _NOT_PROVED
    except NotApplicable as refusal:
        eps, note = None, str(refusal)
    return Row(label=f"{name}, n = {size}", series=name, x=float(size), extra={"eps": eps}, note=note)


def _bound_figures(rows: Sequence[Row]) -> list[Figure]:
    """One figure: eps of one coordinate over users; dashed lines are bounds by the largest budget alone."""
    ours = [row for row in rows if row.certified is not None]
    lines = [
        *sweep_lines(ours, lambda row: row.extra["eps"]),
        *sweep_lines(
            ours, lambda row: row.audited.eps if row.audited else None, suffix=", audited at least", style="points"
        ),
        *sweep_lines([row for row in rows if row.certified is None], lambda row: row.extra["eps"], style="dashed"),
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
    rows=_figure2a_rows,
    figures=_bound_figures,
)


_DIM = 7850
_DELTA = 3.6e-5
_UNIFORM2 = [0.05, 1.0]
_KEPT = 0.2
_PRINTED: dict[str, dict[str, float]] = {
    "Non-Private": {"accuracy": 0.8435},
    "LDP-Min": {"eps_ul": 392.5, "eps_c": 0.05, "eps_uc": 40.1, "accuracy": 0.5611},
    "PLDP": {"eps_ul": 7850, "eps_c": 1, "eps_uc": 7850, "accuracy": 0.7754},
    "UniS": {"eps_ul": 7850, "eps_c": 0.069, "eps_uc": 76.9, "accuracy": 0.7754},
    "APES": {"eps_ul": 7850, "eps_c": 0.057, "eps_uc": 57.6, "accuracy": 0.7967},
    "S-APES": {"eps_ul": 1570, "eps_c": 0.057, "eps_uc": 25.6, "accuracy": 0.7814},
}
_PRESETS = {
    "Non-Private": "apes-nonprivate",
    "LDP-Min": "apes-ldp-min",
    "PLDP": "apes-pldp",
    "UniS": "apes-unis",
    "APES": "apes",
    "S-APES": "apes-s",
}
_THRESHOLD = "S-APES, by a public threshold (ours)"


def _rounds_setting(runner: Runner) -> tuple[str, int]:
    """The override that sets how long a training here is."""
    return ("cohort.rounds", 2 if runner.quick else 20)


def _budget_settings(preset: str, budgets: str | list[float]) -> list[tuple[str, Any]]:
    """The override that sets users' budgets; none for the preset without privacy, which knows no such key."""
    return [] if preset == "apes-nonprivate" else [("protocol.budgets", budgets)]


def _terms_of_one_round(preset: str, overrides: Overrides) -> tuple[str, quotes.Terms]:
    """One round of this config."""
    config = read(preset, overrides)
    plan = quotes.Terms(num_users=USERS, dim=_DIM, delta=_DELTA, settings=config.protocol_settings)
    return config.protocol["name"], plan


def _train_row(
    runner: Runner,
    label: str,
    preset: str,
    overrides: Overrides,
    *,
    attack: bool = False,
    extra: Mapping[str, Any] | None = None,
    **more: Any,
) -> Row:
    """The row of a training with what is claimed, certified and, if it is attacked, shown of one round of it."""
    row = runner.training_row(label, preset, overrides, **more)
    name, about = _terms_of_one_round(preset, overrides)
    whole = row.certified
    further = {"certified eps of all rounds": whole.eps if whole else None, **(extra or {})}
    if attack:
        finding = audit.audit(name, about, trials=0)
        claimed, certified, audited = finding.claimed, finding.certified, finding.bound
    else:
        quoted = quotes.quote(name, about)
        claimed, certified, audited = quoted.claimed, quoted.certified, None
    return dataclasses.replace(
        row, claimed=claimed, certified=certified, audited=audited, extra={**row.extra, **further}
    )


def _settings_as_printed(label: str) -> list[tuple[str, Any]]:
    """S-APES as printed: the b largest of each client; one step for all protocols, as in the others' presets."""
    return [("protocol.published", True), ("server.learning_rate", 0.3)] if label == "S-APES" else []


def _table3_rows(runner: Runner) -> Iterable[Row]:
    """One training per protocol of the table, and S-APES by a threshold, beside what the paper prints."""
    for label, preset in {**_PRESETS, _THRESHOLD: "apes-s"}.items():
        overrides = [_rounds_setting(runner), *_budget_settings(preset, _UNIFORM2), *_settings_as_printed(label)]
        name, _ = _terms_of_one_round(preset, overrides)
        yield _train_row(
            runner,
            label,
            preset,
            overrides,
            attack=not runner.quick or name in ("fedavg", "ldp_min", "pldp", "apes"),
            paper=_PRINTED.get(label, {}),
            extra=_eps_by_coordinate(label, name),
            note=_NOTES.get(label, ""),
        )


def _eps_by_coordinate(label: str, name: str) -> dict[str, Any]:
    """eps of one coordinate and of all of a user's reports, claimed and certified."""
    if name == "fedavg":
        return {}
    quoted = quotes.quote("apes" if name == "s_apes" else name, terms_of_one_coordinate(name, _UNIFORM2))
    largest = min(_UNIFORM2) if name == "ldp_min" else max(_UNIFORM2)
    certified = {} if label == "S-APES" else {"certified eps_c": quoted.certified.eps}
    claimed_local = _DIM * largest * (_KEPT if name == "s_apes" else 1)
    return {
        "claimed eps_c": quoted.claimed.eps if quoted.claimed else None,
        **certified,
        "claimed eps_ul": claimed_local,
        "certified eps_ul": _DIM * largest,
    }


_NOTES = {
    "LDP-Min": "Not shuffled; certified is the exact composition of d Laplace reports.",
    "PLDP": "Not shuffled; the claim is basic composition.",
    "UniS": "The paper calls its number an approximation; ours is proven for unequal scales.",
    "APES": "The claim averages over budgets as if the victim's were secret, and composes crudely. The certified eps "
    "holds for every user, including the one with the largest budget.",
    "S-APES": "As printed: keeping the b largest of d noisy reports is post-processing of all d, so neither b eps nor "
    "a 2b-fold composition holds. What is kept of one coordinate depends on the others, so nothing is certified.",
    _THRESHOLD: "Every report is kept or replaced independently, so the certified eps of APES holds; twice the step.",
}

TABLE3 = Part(
    key="table3",
    title="Table 3: six frameworks under Uniform2",
    caption="eps_ul is for all reports of a user before the shuffle (the user with the largest budget), eps_c for one "
    "shuffled coordinate at delta 1e-8, and eps_uc for all d = 7850 coordinates at delta 3.6e-5. Claimed and certified "
    "are eps_uc; the values for one coordinate are in the other columns. The claims recompute to the printed digits by "
    "numerics that the paper does not describe, not by its Thm. 4, and at a delta' that differs from row to row. The "
    "paper prints neither C nor step nor rounds; we chose C = .3, step .3 and 20 rounds (2 in a quick run), and FedSGD "
    "instead of FedProx. In a quick run UniS and S-APES are not attacked, because that takes a while.",
    rows=_table3_rows,
    figures=lambda rows: [accuracy_figure("Accuracy over rounds", "rounds", curve_lines(rows))],
)


def _figure2b_rows(runner: Runner) -> Iterable[Row]:
    """One training per distribution and protocol; the quick form says which ones it leaves out."""
    for name, title in NAMES.items():
        if runner.quick and name not in ("uniform2", "gauss1"):
            continue
        budgets: str | list[float] = _UNIFORM2 if name == "uniform2" else name
        for series in ("UniS", "APES", "S-APES"):
            if runner.quick and series == "UniS" and name != "uniform2":
                slow = "left out of --quick: the accounting of unequal Laplace scales takes minutes"
                yield Row(label=f"{series}, {title}", series=series, extra={"distribution": title}, not_here=slow)
                continue
            preset = _PRESETS[series]
            overrides = [_rounds_setting(runner), *_budget_settings(preset, budgets), *_settings_as_printed(series)]
            yield _train_row(
                runner, f"{series}, {title}", preset, overrides, series=series, extra={"distribution": title}
            )


def _figures_by_distribution(rows: Sequence[Row]) -> list[Figure]:
    """One figure: bars of accuracy for each distribution of budgets, a colour per protocol."""
    lines = [
        Line(
            name=series,
            x=[str(row.extra["distribution"]) for row in rows if row.series == series],
            y=[measured_mean(row) for row in rows if row.series == series],
            style="bars",
        )
        for series in dict.fromkeys(row.series for row in rows)
    ]
    return [accuracy_figure("Accuracy by distribution of budgets", "distribution", lines)]


FIG2B = Part(
    key="fig2b",
    title="Figure 2(b): six distributions of budgets",
    caption="UniS, APES and S-APES as printed under the budgets of Table 2; C, step and rounds as in Table 3. The "
    "paper draws bars and prints no values. It finds APES and S-APES above UniS, except for S-APES under Gauss1. No "
    "attack was run for these rows.",
    rows=_figure2b_rows,
    figures=_figures_by_distribution,
)


def _figure3a_rows(runner: Runner) -> Iterable[Row]:
    """Trainings by the clip value C, with Clip-Laplace and with Laplace noise."""
    for series, preset in (("Clip-Laplace", "apes"), ("Laplace", "apes-unis")):
        for clip in (0.3, 1.0) if runner.quick else (0.03, 0.1, 0.3, 1.0):
            overrides = [_rounds_setting(runner), *_budget_settings(preset, _UNIFORM2)]
            if clip != 0.3:  # the preset's own, trained for Table 3
                overrides.append(("protocol.clip_value", clip))
            yield _train_row(runner, f"{series}, C = {clip:g}", preset, overrides, series=series, x=clip)


def _figure3b_rows(runner: Runner) -> Iterable[Row]:
    """Trainings by the share of coordinates kept, for each rule of selection."""
    rules = {"post-sparsification": "top", "random sparsification": "random", "threshold (ours)": "threshold"}
    for series, rule in rules.items():
        if runner.quick and rule == "threshold":
            continue
        for keep in (0.05, _KEPT) if runner.quick else (0.01, 0.05, 0.1, _KEPT):
            setting = ("protocol.published", True) if rule == "top" else ("protocol.sparsify", rule)
            overrides = [
                _rounds_setting(runner),
                *_budget_settings("apes-s", _UNIFORM2),
                setting,
                ("server.learning_rate", 0.3),
            ]
            if keep != _KEPT:
                overrides.append(("protocol.keep", keep))
            yield _train_row(runner, f"{series}, b/d = {keep:g}", "apes-s", overrides, series=series, x=keep)


FIG3A = Part(
    key="fig3a",
    title="Figure 3(a): the clip bound C",
    caption="APES with Clip-Laplace, and with plain Laplace noise (which is UniS), Uniform2, step .3 at every C. The "
    "paper finds the best accuracy with Clip-Laplace at C = .1, and Laplace good only at small C; it prints no "
    "values. What is certified does not depend on C. No attack was run for these rows.",
    rows=_figure3a_rows,
    figures=lambda rows: [accuracy_figure("Accuracy by clip bound", "C", sweep_lines(rows, measured_mean), log_x=True)],
)
FIG3B = Part(
    key="fig3b",
    title="Figure 3(b): the share that is kept, b/d",
    caption="S-APES keeps the b largest noisy coordinates of each client as printed (no guarantee), b random ones, or "
    "those above a public threshold (both certified like APES), Uniform2, C = .3, step .3. The paper finds "
    "the random choice worse at every ratio; it prints no values. No attack was run for these rows.",
    rows=_figure3b_rows,
    figures=lambda rows: [accuracy_figure("Accuracy by the share kept", "b/d", sweep_lines(rows, measured_mean))],
)

PAPER = Paper(
    name="apes",
    title="Echo of Neighbors: Privacy Amplification for Personalized Private Federated Learning with Shuffle Model",
    citation="APES (Liu et al., AAAI 2023)",
    reference="APES",
    parts=(TABLE2, TABLE3, FIG2A, FIG2B, FIG3A, FIG3B),
    minutes={"cpu": 100, "gpu": 25},
)
