"""FLAME's figures about privacy: how much is gained by the shuffle, claimed, certified and attacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dovetail.figures import Figure, Line
from dovetail.guarantee import quotes
from dovetail.papers._exhibit import Part, Row, sweep
from dovetail.papers._runner import Runner
from dovetail.papers.flame.privacy import (
    BETA,
    DIM,
    EPS_LOCAL,
    apart,
    claimed_on,
    eps_of,
    plan,
    row_on,
)

__all__ = ["FIG3", "FIG8", "FIG9"]

_LARGE_DIM, _CROWD = 75755, 10_000  # Figure 3: the dimension is printed, the number of users is ours
_PRINTED_FORM = "audited eps at least, as printed"


def _ratios(runner: Runner) -> Iterable[Row]:
    """eps_l / eps_c at the same budget of a report, where SS-Simple sends d of them and SS-Double beta d."""
    for eps_report in (0.25, 1.0) if runner.quick else (0.1, 0.25, 0.5, 1.0, 1.5, 2.0):
        for series, name, more, reports in (
            ("SS-Simple", "ss_simple", {}, _LARGE_DIM),
            ("SS-Double", "ss_double", {"beta": BETA, "pad_to": _CROWD // 3}, BETA * _LARGE_DIM),
        ):
            about = plan(num_users=_CROWD, dim=_LARGE_DIM, eps_local=eps_report, **more)
            claimed = claimed_on(name, about, evaluation="closed")
            certified, eps_local = quotes.quote(name, about).certified, reports * eps_report
            yield Row(
                label=f"{series}, {eps_report:g} a report",
                claimed=claimed,
                certified=certified,
                series=series,
                x=eps_report,
                extra={
                    "eps_l": eps_local,
                    "claimed ratio": eps_local / claimed.eps,
                    "certified ratio": eps_local / certified.eps,
                },
            )


def _ratio_lines(rows: Sequence[Row]) -> list[Figure]:
    lines = [
        *sweep(rows, lambda row: row.extra["claimed ratio"], suffix=", claimed", style="dashed"),
        *sweep(rows, lambda row: row.extra["certified ratio"], suffix=", certified"),
    ]
    return [
        Figure(
            title="Amplification eps_l / eps_c, d = 75,755",
            x_label="eps of one report",
            y_label="ratio",
            log_y=True,
            lines=lines,
        )
    ]


FIG3 = Part(
    key="fig3",
    title="Figure 3: amplification by one shuffle, and by two",
    caption="d = 75,755 as printed. The paper prints a ratio of 2.55 for SS-Simple and of 137.36 for SS-Double, and "
    "neither n, b, delta, beta nor n_p; we chose n = 10,000, b = 2, delta 5e-6, beta = 1/50, n/n_p = 3, for which its "
    "theorems (Lemma 1 with Thm. 1; Thm. 3 with Thm. 4) give ratios on both sides of these. Certified means that every "
    "coordinate is shuffled separately and, for SS-Double, also selected separately. The claim for SS-Simple holds but "
    "is loose by a factor of hundreds to thousands; with a tight bound, the second amplification adds little.",
    rows=_ratios,
    figures=_ratio_lines,
)


def _amplified(runner: Runner, x: float, dim: int, eps_local: float, label: str) -> Iterable[Row]:
    """One row per protocol, of its repaired form, with the attack on the printed one beside it."""
    selected = round(BETA * dim)
    for series, name, reports in (
        ("SS-Simple", "ss_simple", dim),
        ("SS-Double", "ss_double", selected),
        ("SS-Topk", "ss_topk", selected),
    ):
        eps_report = eps_local / reports
        row = row_on(runner, f"{series}, {label}", name, apart(name, dim=dim, eps_report=eps_report))
        extra: dict[str, Any] = {"eps of a report": eps_report}
        if name != "ss_topk":
            more: dict[str, Any] = {"beta": BETA, "pad_to": 333} if name == "ss_double" else {}
            printed = plan(dim=dim, eps_local=eps_report, published=True, randomizer="laplace", **more)
            extra[_PRINTED_FORM] = runner.audit(name, printed).eps
        yield dataclasses.replace(row, series=series, x=float(x), extra=extra)


def _by_budget(runner: Runner) -> Iterable[Row]:
    for eps_local in (40.0, 78.5, 157.0) if runner.quick else (10.0, 20.0, 40.0, 78.5, 157.0, 314.0):
        yield from _amplified(runner, eps_local, DIM, eps_local, f"eps_l = {eps_local:g}")


def _by_dimension(runner: Runner) -> Iterable[Row]:
    for dim in (2000, 7850, 31_400) if runner.quick else (1000, 2000, 4000, 7850, 15_700, 31_400):
        yield from _amplified(runner, dim, dim, EPS_LOCAL, f"d = {dim}")


def _amplified_lines(x_label: str) -> Callable[[Sequence[Row]], list[Figure]]:
    def figures(rows: Sequence[Row]) -> list[Figure]:
        return [
            Figure(
                title=name,
                x_label=x_label,
                y_label="eps_c, one epoch",
                log_x=True,
                log_y=True,
                lines=_four_lines([row for row in rows if row.series == name]),
            )
            for name in dict.fromkeys(row.series for row in rows)
        ]

    return figures


def _four_lines(rows: Sequence[Row]) -> list[Line]:
    """Claimed, certified, audited, and audited as printed, of one protocol."""
    looks: dict[str, tuple[Callable[[Row], float | None], str]] = {
        "claimed": (lambda row: eps_of(row.claimed), "dashed"),
        "certified, coordinates apart": (lambda row: eps_of(row.certified), "line"),
        "audited at least, coordinates apart": (lambda row: eps_of(row.audited), "points"),
        "audited at least, as printed": (lambda row: row.extra.get(_PRINTED_FORM), "points"),
    }
    x = [float(row.x or 0.0) for row in rows]
    lines = [
        Line(name=name, x=x, y=[value(row) for row in rows], style=style) for name, (value, style) in looks.items()
    ]
    return [line for line in lines if any(y is not None for y in line.y)]


_APART = (
    " Claimed is the paper's Bennett bound for Laplace reports with its Thm. 1 and 4. Certified and audited are for "
    "the repaired forms: coordinates shuffled separately, surplus dropped, binary reports where coordinates are "
    "selected. SS-Topk as printed is not drawn, because it has no guarantee."
)

FIG8 = Part(
    key="fig8",
    title="Figure 8: eps_c against eps_l",
    caption="d = 7850, n = 1000, beta = 1/50, n/n_p = 3, delta 5e-6. The budget eps_l of a client is shared by its "
    "reports, of which there are d or beta d. The paper draws this figure without printing numbers." + _APART,
    rows=_by_budget,
    figures=_amplified_lines("eps_l"),
)
FIG9 = Part(
    key="fig9",
    title="Figure 9: eps_c against d",
    caption="n = 1000, beta = 1/50, n/n_p = 3, delta 5e-6. The paper does not say what is fixed as d grows; we fixed "
    "eps_l = 78.5, so that reports become noisier." + _APART,
    rows=_by_dimension,
    figures=_amplified_lines("dimension d"),
)
