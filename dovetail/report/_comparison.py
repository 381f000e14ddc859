"""`comparison.json` -> `report.html`: every protocol at the same certified privacy, the most accurate first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.figures import Figure
from dovetail.folder import write_atomically
from dovetail.report import _words
from dovetail.report._page import details, escape, figures, number, page, section, table, tiles
from dovetail.statements import Statement

__all__ = ["comparison"]

_UNITS = ("B", "kB", "MB", "GB", "TB")


def comparison(folder: Path) -> Path:
    """Write the page of a comparison and return its path."""
    data = json.loads((folder / "comparison.json").read_text())
    ran = [row for row in data["rows"] if not row.get("reason")]
    ran.sort(key=lambda row: -1.0 if row.get("mean") is None else row["mean"], reverse=True)
    left_out = [row for row in data["rows"] if row.get("reason")]
    heading = f"Accuracy at ({number(data['eps'])}, {number(data['delta'])})-DP"
    body = (
        f"<h1>{escape(heading)}</h1>"
        + _equal(data, ran)
        + tiles(_facts(data, ran))
        + section("Ranking", _ranking(ran))
        + section("Accuracy and cost", figures([Figure.from_json(figure) for figure in data.get("figures", [])]))
        + section("Not in the comparison", _left_out(left_out))
    )
    footer = f"dovetail {escape(data.get('version', ''))} · {escape(data.get('machine', ''))}"
    target = folder / "report.html"
    write_atomically(target, page(heading, body, kind="comparison of protocols", footer=footer))
    return target


def _equal(data: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """What is the same for all, and what is not."""
    units = sorted({row["certified"]["unit"] for row in rows if row.get("certified")})
    unit = " or ".join(units) or "user"
    return (
        f'<div class="statement"><p class="lead">Every protocol in the ranking that promises anything is certified '
        f"with eps at most {number(data['eps'])} at delta {number(data['delta'])} for one {escape(unit)} "
        f"({escape(data['neighbors'])}), "
        f"over its whole training, and trains the same model ({escape(data['model'])}) on the same data "
        f"({escape(data['task'])}).</p><p>That is what equal means here. Not equal is whom one must trust and against "
        "whom the promise holds: the table says so for each. A row that asks for less trust is worth more at the same "
        "accuracy. Clip and server step of the bundled line-ups were searched on MNIST's training images, which no "
        "statement accounts for.</p></div>"
    )


def _facts(data: dict[str, Any], rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    facts = [("task", data["task"]), ("model", data["model"]), ("seeds", str(data["seeds"]))]
    private = [row for row in rows if row.get("mean") is not None and not row["certified"]["unbounded"]]
    if private:
        facts.append(("most accurate", f"{private[0]['protocol']}, {private[0]['mean']:.1%}"))
    trusted = next((row for row in rows if row.get("no_trusted_party") and row.get("mean") is not None), None)
    if trusted is not None:
        facts.append(("without a trusted party", f"{trusted['protocol']}, {trusted['mean']:.1%}"))
    if data.get("best_single_shuffler"):
        facts.append(("best with one shuffler", data["best_single_shuffler"]))
    return facts


def _ranking(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "<p>No protocol has been compared.</p>"
    head = (
        "",
        "protocol",
        "accuracy",
        "whom one must trust",
        "certified",
        "without that trust",
        "sent in a round",
        "rounds",
    )
    return table(head, [_row(place, row) for place, row in enumerate(rows, 1)], numbers=(0, 2, 6, 7))


def _row(place: int, row: dict[str, Any]) -> list[str]:
    certified = Statement.from_json(row["certified"]) if row.get("certified") else None
    local = Statement.from_json(row["local"]) if row.get("local") else None
    accuracy = "-" if row.get("mean") is None else f"<b>{row['mean']:.2%}</b>"
    if row.get("spread") is not None:
        accuracy += f"<br><small>± {row['spread']:.2%}</small>"
    stated = "-"
    if certified is not None:
        shown = f'<span class="dp">{escape(_words.numbers(certified))}</span>'
        stated = f"{shown}<br><small>against the {escape(certified.adversary)}</small>"
    return [
        str(place),
        f"<b>{escape(row['protocol'])}</b>{_settings(row.get('settings') or {})}",
        accuracy,
        escape(row.get("trust", "")),
        stated,
        "-" if local is None else f'<span class="dp">{escape(_words.numbers(local))}</span>',
        f"{_bytes(row.get('bytes_per_client'))}<br><small>{number(row.get('messages_per_client'))} messages</small>",
        f"{number(row.get('rounds'))}<br><small>server {number(row.get('server_seconds'), 2)} s each</small>",
    ]


def _settings(settings: dict[str, Any]) -> str:
    """How the protocol was set, folded away."""
    items = "<br>".join(f"{escape(name)} = {escape(value)}" for name, value in settings.items())
    return details("settings", f'<p class="small">{items}</p>') if items else ""


def _bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _left_out(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    return table(("protocol", "why"), [[f"<b>{escape(row['protocol'])}</b>", escape(row["reason"])] for row in rows])
