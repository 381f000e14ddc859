"""A run's folder -> `report.html`: one page that opens offline, the statement first."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from dovetail import __version__
from dovetail.folder import BANNER, RunFolder, write_atomically
from dovetail.statements import Statement

__all__ = ["write"]

_WIDTH, _HEIGHT, _MARGIN = 640, 240, 40


def write(folder: Path) -> Path:
    """Write the report of a finished run and return its path."""
    summary = json.loads((folder / "privacy.json").read_text())
    statement = Statement.from_json(summary["certified"])
    page = _PAGE.format(
        version=html.escape(__version__),
        accuracy=f"{summary['accuracy']:.2%}",
        rounds=summary["rounds"],
        uploads=summary["uploads"],
        headline=html.escape(statement.headline()),
        proof=html.escape(str(statement)),
        units=_units(summary),
        beside=_beside(summary),
        people=_histogram(statement.per_user),
        curve=_curve(RunFolder(folder).metrics()),
        diagnostics=_diagnostics(RunFolder(folder).diagnostics()),
        config=html.escape((folder / "config.toml").read_text()),
    )
    target = folder / "report.html"
    write_atomically(target, page.encode())
    return target


def _units(summary: dict[str, Any]) -> str:
    """What the run promises for an item, a user and a subject."""
    rows = []
    for unit, data in summary["units"].items():
        statement = Statement.from_json(data)
        numbers = "nothing" if statement.unbounded else f"({statement.eps:.4g}, {statement.delta:.3g})-DP"
        said = "; ".join((statement.theorem.where, *(f"if {text}" for text in statement.assumptions)))
        cells = (f"one {unit}", numbers, statement.neighbors.value, statement.adversary, said)
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{text}</th>" for text in ("for", "certified", "neighbours", "against the", "by, or why not"))
    return f"<h2>Whose privacy</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _diagnostics(lines: list[dict[str, Any]]) -> str:
    """How large and how different the raw updates were, each over its own largest, as an inline SVG."""
    lines = [line for line in lines if None not in line.values()]
    if len(lines) < 2:
        return ""
    titles = {"variance": "between-clients variance V_c", "scale": "update scale U_s"}
    last, plots = lines[-1]["round"], []
    for style, (key, title) in zip(("", "stroke-dasharray:6 4"), titles.items(), strict=True):
        most = max(line[key] for line in lines) or 1.0
        points = _points([(line["round"] / last, line[key] / most) for line in lines])
        plots.append(f'<polyline points="{points}" style="{style}"/>')
        plots.append(
            f'<text x="{_MARGIN + 8}" y="{_MARGIN - 22 + 14 * len(plots) // 2}">'
            f"{title}{', dashed' if style else ''}: at most {most:.3g}</text>"
        )
    return f"<h2>Diagnostics</h2><p><b>{html.escape(BANNER)}</b></p>" + _axes("".join(plots), f"round {last}")


def _points(shares: list[tuple[float, float]]) -> str:
    """Points of the unit square in the picture."""
    return " ".join(
        f"{_MARGIN + (_WIDTH - 2 * _MARGIN) * x:.1f},{_HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * y:.1f}"
        for x, y in shares
    )


def _axes(content: str, end: str) -> str:
    low, high = _HEIGHT - _MARGIN, _MARGIN
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="over the rounds">'
        f'<line x1="{_MARGIN}" y1="{low}" x2="{_WIDTH - _MARGIN}" y2="{low}"/>'
        f'<line x1="{_MARGIN}" y1="{low}" x2="{_MARGIN}" y2="{high}"/>{content}'
        f'<text x="{_WIDTH - _MARGIN}" y="{low + 18}" text-anchor="end">{end}</text></svg>'
    )


def _beside(summary: dict[str, Any]) -> str:
    """What the paper claims, what the shuffler learns, what is left without trust."""
    titles = {
        "claimed": "What the protocol's paper claims",
        "shuffler": "What the shuffler learns",
        "local": "What is left if nobody is trusted",
    }
    parts = []
    for key, title in titles.items():
        if summary.get(key) is not None:
            text = html.escape(str(Statement.from_json(summary[key])))
            parts.append(f"<h2>{title}</h2><pre>{text}</pre>")
    return "".join(parts)


def _histogram(per_user: tuple[float, ...] | None, bins: int = 24) -> str:
    """How many users have which eps, as an inline SVG."""
    if not per_user:
        return ""
    low, high = min(per_user), max(per_user)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for eps in per_user:
        counts[min(bins - 1, int((eps - low) / width))] += 1
    step, floor = (_WIDTH - 2 * _MARGIN) / bins, _HEIGHT - _MARGIN
    heights = [(floor - _MARGIN) * count / max(counts) for count in counts]
    bars = "".join(
        f'<rect x="{_MARGIN + i * step:.1f}" y="{floor - height:.1f}" width="{step - 1:.1f}" height="{height:.1f}"/>'
        for i, height in enumerate(heights)
    )
    return (
        f"<h2>Each user's own eps</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="number of users by eps">{bars}'
        f'<text x="{_MARGIN}" y="{floor + 18}">{low:.3g}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{floor + 18}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{_MARGIN}" y="{_MARGIN - 8}">up to {max(counts)} of {len(per_user)} users</text></svg>'
    )


def _curve(metrics: list[dict[str, Any]]) -> str:
    """Accuracy over rounds as an inline SVG."""
    if len(metrics) < 2:
        return ""
    last = metrics[-1]["round"]
    points = _points([(line["round"] / last, line["accuracy"]) for line in metrics])
    low, high = _HEIGHT - _MARGIN, _MARGIN
    labels = (
        f'<text x="{_MARGIN - 6}" y="{high + 4}" text-anchor="end">100%</text>'
        f'<text x="{_MARGIN - 6}" y="{low}" text-anchor="end">0%</text>'
    )
    return _axes(f'<polyline points="{points}"/>{labels}', f"round {last}")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Dovetail report</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }}
pre {{ background: #f5f6f8; padding: 1rem; overflow-x: auto; white-space: pre-wrap }}
svg {{ width: 100%; font-size: 12px }} line {{ stroke: #8a929c }}
rect {{ fill: #0b63ce }}
td, th {{ text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; font-size: 14px }}
polyline {{ fill: none; stroke: #0b63ce; stroke-width: 2 }}
</style></head><body>
<h1>{headline}</h1>
<p>Test accuracy {accuracy} after {rounds} rounds and {uploads} uploads.</p>
<h2>What is promised, and why</h2><pre>{proof}</pre>{units}{people}{beside}
<h2>Accuracy</h2>{curve}{diagnostics}
<h2>Config</h2><pre>{config}</pre>
<footer>dovetail {version}</footer></body></html>
"""
