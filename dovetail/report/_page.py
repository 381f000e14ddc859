"""The frame of every page and the pieces it is made of; all text that comes in is escaped here."""

from __future__ import annotations

import decimal
import html
from collections.abc import Iterable, Sequence
from typing import Any

from dovetail import numbers
from dovetail.figures import STYLE, Figure, svg
from dovetail.figures.axes import short

__all__ = [
    "at_least",
    "at_most",
    "badge",
    "details",
    "escape",
    "figures",
    "number",
    "page",
    "section",
    "table",
    "tiles",
]

_VERDICTS = {
    "certified": "good",
    "claimed, holds": "good",
    "claimed, unproven": "fair",
    "claimed, refuted": "bad",
    "no guarantee": "bad",
}


def escape(text: Any) -> str:
    """Text as text."""
    return html.escape(str(text))


def number(value: float | None, digits: int = 4, *, rounding: str = decimal.ROUND_HALF_EVEN) -> str:
    """A number in few characters, without a trailing zero; a dash for none."""
    if value is None:
        return "-"
    shown = numbers.rounded(value, digits, rounding)
    return short(shown) if shown == 0 or not 1e-3 <= abs(shown) < 1e3 else f"{shown:g}"


def at_most(value: float) -> str:
    """An upper bound in few characters, rounded up."""
    return number(value, rounding=decimal.ROUND_CEILING)


def at_least(value: float) -> str:
    """A lower bound in few characters, rounded down."""
    return number(value, rounding=decimal.ROUND_FLOOR)


def badge(verdict: str, *, doubtful: bool = False) -> str:
    """A verdict that can be told by its word as well as by its colour; never green if it is doubtful."""
    word, colour = verdict.removeprefix("claimed, "), _VERDICTS.get(verdict, "fair")
    return f'<span class="badge {"fair" if doubtful and colour == "good" else colour}">{escape(word)}</span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table that scrolls within itself where it is too wide; cells are HTML, `numbers` are aligned to the right."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        marks = (' class="number"' if i in numbers else "" for i in range(len(texts)))
        return "".join(f"<{tag}{mark}>{text}</{tag}>" for mark, text in zip(marks, texts, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{cells("th", [escape(text) for text in head])}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def details(summary: str, content: str, *, opened: bool = False) -> str:
    """What is folded away until it is asked for; print shows it anyway. Both parts are HTML."""
    return f"<details{' open' if opened else ''}><summary>{summary}</summary>{content}</details>"


def figures(drawn: Sequence[Figure]) -> str:
    """Figures side by side where there is room."""
    if not drawn:
        return ""
    return '<div class="figures">' + "".join(f"<figure>{svg(one, style=False)}</figure>" for one in drawn) + "</div>"


def section(title: str, content: str) -> str:
    """A part of the page under its heading; nothing if there is nothing in it."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """A few figures in large type: (name, value)."""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="tiles">{inner}</dl>'


def page(title: str, body: str, *, kind: str, footer: str) -> bytes:
    """The whole document; `title` and `kind` are text, `body` and `footer` HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} - Dovetail</title><style>{_CSS}{STYLE}</style></head><body><main>"
        f'<p class="kind">Dovetail · {escape(kind)}</p>{body}'
        f"</main><footer>{footer}</footer></body></html>\n"
    ).encode()


_CSS = """
:root{--ink:#1b1f24;--soft:#59616b;--line:#dfe3e8;--panel:#f5f7f9;--paper:#fff;--accent:#0b62c4;
--good:#0b6b4d;--good-bg:#e3f4ec;--fair:#7a5300;--fair-bg:#fbf0d4;--bad:#a32015;--bad-bg:#fde8e4}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e8ebef;--soft:#a9b2bd;--line:#343b44;--panel:#1c2128;
--paper:#14181d;--accent:#6cb0ff;--good:#63dbae;--good-bg:#12382b;--fair:#f0c75e;--fair-bg:#3d3010;
--bad:#ff9b8c;--bad-bg:#46201b}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:17px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,footer{max-width:62rem;margin:0 auto;padding:0 1.25rem}
main{padding-top:2.5rem}
p,li{max-width:44rem;overflow-wrap:anywhere}
h1{font-size:clamp(1.7rem,5vw,2.6rem);line-height:1.15;margin:.2rem 0 1rem;letter-spacing:-.015em}
h2{font-size:1.35rem;line-height:1.25;margin:0 0 .8rem}
h3{font-size:1.05rem;margin:1.5rem 0 .4rem}
section{margin:3rem 0}
a{color:var(--accent)}
.kind{color:var(--soft);margin:0;font-size:.9rem;letter-spacing:.02em}
.lead{font-size:1.15rem;line-height:1.55}
.soft,figcaption,.kind{color:var(--soft)}
small,.small{font-size:.85rem;color:var(--soft)}
.statement{border:1px solid var(--line);border-left:5px solid var(--good);background:var(--panel);border-radius:6px;
padding:1.3rem 1.5rem;margin:1.5rem 0}
.statement.nothing{border-left-color:var(--bad)}.statement.doubtful{border-left-color:var(--fair)}
.statement p{margin:.5rem 0}.statement p:first-child{margin-top:0}.statement p:last-child{margin-bottom:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:1rem 1.5rem;margin:1.5rem 0}
.tiles dt{font-size:.85rem;color:var(--soft)}.tiles dd{margin:0;font-size:1.35rem;line-height:1.3;font-weight:600;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;width:100%;font-size:.92rem;line-height:1.45}
th,td{text-align:left;vertical-align:top;padding:.55rem .9rem .55rem 0;border-bottom:1px solid var(--line);
min-width:6rem}
th{color:var(--soft);font-weight:600;font-size:.85rem;white-space:nowrap}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;min-width:0}
td:last-child,th:last-child{padding-right:0}
.dp{white-space:nowrap}
.badge{display:inline-block;padding:.05rem .55rem;border-radius:1rem;font-size:.8rem;font-weight:600;white-space:nowrap}
.good{color:var(--good);background:var(--good-bg)}.fair{color:var(--fair);background:var(--fair-bg)}
.bad{color:var(--bad);background:var(--bad-bg)}
.banner{border:1px solid var(--bad);color:var(--bad);background:var(--bad-bg);padding:.6rem 1rem;border-radius:6px}
.tree,.tree ul{list-style:none;padding-left:1.1rem;border-left:2px solid var(--line);margin:.6rem 0}
.tree{padding-left:0;border:0}.tree li{margin:.6rem 0}.tree p{margin:.15rem 0}
.checklist{list-style:none;padding:0}.checklist li{padding-left:1.8rem;text-indent:-1.8rem;margin:.35rem 0}
.checklist li::before{content:"\\2610";display:inline-block;width:1.8rem;text-indent:0;color:var(--soft)}
details{margin:.6rem 0}td details{margin:.1rem 0}td details p{margin:.2rem 0}
summary{cursor:pointer;color:var(--accent);overflow-wrap:anywhere}
pre{background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:1rem;overflow-x:auto;
font-size:.82rem;line-height:1.5;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1.5rem;margin:1rem 0}
figure{margin:0;max-width:34rem}
.dt-figure{width:100%;height:auto;display:block}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,18rem),1fr));gap:1.25rem}
.card{border:1px solid var(--line);border-radius:8px;padding:1.2rem 1.3rem;background:var(--panel)}
.card h2{font-size:1.1rem}.card p{margin:.4rem 0}
footer{color:var(--soft);font-size:.85rem;border-top:1px solid var(--line);padding-top:1rem;padding-bottom:3rem;
margin-top:3rem}
@media (max-width:30rem){body{font-size:16px}main{padding-top:1.5rem}section{margin:2.2rem 0}
.statement{padding:1rem 1.1rem}}
@media print{body{font-size:10.5pt}main,footer{max-width:none}section{margin:1.6rem 0}
h2,h3,summary{break-after:avoid}figure,tr,.statement,.card{break-inside:avoid}.wide{overflow:visible}
pre{white-space:pre-wrap;overflow:visible}summary{color:var(--ink);list-style:none}
details::details-content{content-visibility:visible;height:auto;display:block}
details:not([open])>*{display:block}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
