"""Curves of delta against eps (certified, claimed, and shown by attacks), and the audit of a run's costliest round.

`trade_off_curves` computes the curves of a finding, `figure_of_finding` draws them, and `write_audit` attacks one round
of a finished run and writes `audit.json`, curves included, into its folder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dovetail import accounting
from dovetail.audit.findings import Finding, audit
from dovetail.events import Round
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.preparation import Plan
from dovetail.figures import Figure, Line, save
from dovetail.files import write_json
from dovetail.guarantee import quotes
from dovetail.protocols import BUNDLED
from dovetail.statements import NotApplicable

__all__ = ["draw_curves", "figure_of_finding", "save_figure", "terms_of_round", "trade_off_curves", "write_audit"]

_POINTS = 9  # deltas of a curve
_FEW_POINTS = 5  # in a run's audit.json, for which somebody waits
_ONLY_DECLARED = (
    "what a protocol from outside the package declares proves nothing, and its code is too slow to run thousands of "
    "times at this size; `dovetail audit` runs it at a smaller size"
)


def trade_off_curves(finding: Finding, *, points: int = _POINTS) -> dict[str, list[tuple[float, float]]]:
    """By name, (eps, delta) of what is stated (by its verdict), claimed and audited, at deltas around the finding's.

    Counted bounds are for one delta alone and stand as a point. Where eps is unbounded a curve has no point.
    """
    middle = finding.bound.delta or finding.terms.delta
    stated = finding.certified.verdict.value
    curves: dict[str, list[tuple[float, float]]] = {stated: [], "claimed": [], "audited": [], "counted": []}
    for delta in np.geomspace(max(middle * 1e-3, 1e-15), min(middle * 1e3, 0.5), points).tolist():
        for name, eps in _named_eps_at(finding, delta):
            if math.isfinite(eps):
                curves[name].append((eps, delta))
    counted = [bound for bound in (finding.bound, *finding.others) if bound.trials and not bound.is_unbounded]
    curves["counted"] = [(bound.eps, bound.delta) for bound in counted if bound.delta > 0]
    return {name: points for name, points in curves.items() if points}


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str) -> Figure:
    """A figure of delta against eps from curves of (eps, delta) by name; a single point is drawn as a mark."""
    lines = [
        Line(
            name=name,
            x=[eps for eps, _ in points],
            y=[delta for _, delta in points],
            style="points" if len(points) == 1 else "dashed" if name == "claimed" else "line",
        )
        for name, points in curves.items()
    ]
    return Figure(title=title, x_label="eps", y_label="delta", lines=lines, log_y=True)


def _named_eps_at(finding: Finding, delta: float) -> Iterator[tuple[str, float]]:
    """The eps at this delta of what is stated, claimed and shown by exact attacks, each with its curve's name."""
    quote = quotes.quote(finding.protocol, dataclasses.replace(finding.terms, delta=delta))
    colluding = finding.view == "colluding"
    certified = quote.local if colluding else quote.certified
    yield finding.certified.verdict.value, certified.eps
    if quote.claimed is not None and not colluding:
        yield "claimed", quote.claimed.eps
    if finding.exact_attacks:
        yield "audited", max(exact_attack.eps(delta=delta).eps for exact_attack in finding.exact_attacks)


def figure_of_finding(finding: Finding, *, points: int = _POINTS) -> Figure:
    """The figure of a finding's curves, with `points` deltas each."""
    title = f"{finding.protocol}, {finding.terms.num_users} users, {finding.terms.dim} coordinates, {finding.view}"
    return draw_curves(trade_off_curves(finding, points=points), title=title)


def save_figure(path: Path, finding: Finding) -> None:
    """Draw the curves of a finding into a file, .svg, .png or .pdf."""
    save(figure_of_finding(finding), path)


def terms_of_round(plan: Plan, index: int) -> quotes.Terms:
    """The terms under which round `index` (from 0) of a training is attacked: users, settings, noise, sampling."""
    fields = dataclasses.fields(plan.sampler.protocol)  # type: ignore[arg-type]
    cohort = plan.sampler.schedule.cohort(index)
    if cohort.uploads is not None:
        raise NotApplicable("no attack is known on rounds that users' data enter secretly")
    return quotes.Terms(
        num_users=cohort.size,
        dim=plan.engine.dim,
        delta=plan.config.privacy.delta,
        colluders=cohort.colluders,
        min_size=cohort.min_size,
        noise_scale=cohort.noise_scale,
        participation=cohort.participation,
        settings={field.name: getattr(plan.sampler.protocol, field.name) for field in fields if field.init},
    )


def _costliest_round(plan: Plan, released: Sequence[Round]) -> int:
    """The index in the plan, from 0, of a released round with the largest eps at the config's delta.

    Raises NotApplicable if nothing was released, or a round was that is not in the plan.
    """
    first = {item: index for index, item in reversed(list(enumerate(plan.guarantee.rounds()))) if item in set(released)}
    if not first or set(first) != set(released):
        raise NotApplicable("nothing was released" if not released else "the plan does not match the rounds that ran")

    def eps_of(item: Round) -> float:
        try:
            return accounting.bound([item], delta=plan.config.privacy.delta).eps
        except NotApplicable:
            return math.inf

    return first[max(first, key=eps_of)]


def write_audit(plan: Plan, folder: Path) -> Path:
    """Attack the costliest round of a run exactly and write `audit.json`: what was found, or why nothing was.

    Which rounds there were is read off the run's ledger. Of a protocol from outside the package the code is run, for
    its event is what somebody declared. Nothing else in the folder is touched.
    """
    ledger = RunFolder(folder).read_ledger(trust_code=True)  # it is that of the plan, whose code has run
    try:
        index = _costliest_round(plan, ledger.own.rounds)
        declared = type(plan.sampler.protocol) not in BUNDLED
        finding = audit(plan.config.protocol["name"], terms_of_round(plan, index), trials=None if declared else 0)
        if declared and finding.counted_bound is None:
            raise NotApplicable(_ONLY_DECLARED)
        finding = dataclasses.replace(finding, certified=finding.certified.with_verdict(ledger.verdict))
        drawing = figure_of_finding(finding, points=_FEW_POINTS).to_json()
        content = {**finding.to_json(), "about": "one round", "figure": drawing, "reason": None}
        del content["settings"]  # privacy.json has them
    except NotApplicable as refusal:
        content = {"about": "one round", "reason": str(refusal)}
    target = folder / "audit.json"
    write_json(target, content)
    return target
