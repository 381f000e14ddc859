"""The pictures that README and docs open with: `python docs/_ext/opening_pictures.py` writes them, `--check` compares.

Who sees what, and accuracy against eps in the committed comparisons. Both have a background of their own, so that they
can be read on any page, and colours for light and dark.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from pathlib import Path

from dovetail.compare._contenders import committed_comparisons
from dovetail.figures import STYLE, Figure, Line, render_svg
from dovetail.figures.drawing import escape_xml

__all__ = ["accuracy", "check", "pictures", "who_sees_what"]

DOCS = Path(__file__).resolve().parents[1]
MODEL = "scatter"
WIDTH, LEFT, GAP, HEIGHT, PAD = 920, 152, 26, 112, 14
PAPER = '<rect width="100%" height="100%" rx="8" fill="var(--dt-paper)"/>'


def accuracy() -> str:
    """Test accuracy against eps, of every protocol that was compared with this model."""
    compared = sorted((item for item in committed_comparisons() if item.model == MODEL), key=lambda item: item.eps)
    eps = [item.eps for item in compared]
    (delta,) = {item.delta for item in compared}
    (users,) = {item.users for item in compared}
    names = sorted(compared[-1].runs, key=lambda name: -compared[0].runs[name]["accuracy"])
    lines = [
        Line(
            name=f"{name} (no privacy)" if name == "fedavg" else name,
            x=eps,
            y=[item.runs[name]["accuracy"] for item in compared],
            style="dashed" if name == "fedavg" else "line",
        )
        for name in names
    ]
    figure = Figure(
        title=f"MNIST, {users:,} users with one image each: accuracy at the same proven privacy",
        x_label=f"eps, at delta {delta:g}, for replacing one user over the whole training",
        y_label=f"test accuracy, mean of {compared[0].seeds} seeds",
        lines=lines,
        log_x=True,
        percent_y=True,
    )
    return _on_paper(render_svg(figure))


@dataclasses.dataclass(frozen=True)
class Box:
    """A party: what it sees, and whether the noise is added there."""

    name: str
    sees: str
    noise: bool = False

    @property
    def verb(self) -> str:
        """Of one party, or of several."""
        return "see" if self.name.endswith("s") else "sees"


ROWS = (
    (
        "Trust a curator",
        "dp_fl",
        Box("Users", "their own records"),
        Box("Curator", "every update, and whose it is", noise=True),
    ),
    (
        "Trust one shuffler",
        "ss_topk, privunit, apes",
        Box("Users", "their own records", noise=True),
        Box("Shuffler", "who uploads; messages are sealed"),
        Box("Analyzer", "all messages, in random order, without names"),
    ),
    (
        "Trust one of several aggregators",
        "secagg",
        Box("Users", "their own records", noise=True),
        Box("Aggregators", "who uploads; each gets one share, which alone looks random"),
        Box("Analyzer", "the sum over all users, with noise"),
    ),
    (
        "Trust nobody",
        "ldp_fl",
        Box("Users", "their own records", noise=True),
        Box("Server", "every report, with noise, and whose it is"),
    ),
)
PUBLIC = Box("Public", "models, and the statement")


def who_sees_what() -> str:
    """One row per model of trust, from the users to the public."""
    parts = [
        f'<text class="dt-title" x="{PAD}" y="28">Who sees what: four models of trust</text>',
        f'<text x="{PAD}" y="49">Deployed, raw records stay with the users. The mark shows who adds the noise.</text>',
    ]
    top = 66
    for title, protocols, *boxes in ROWS:
        parts += _lines(PAD, top + 24, title, 18, style="dt-name")
        below = top + 24 + 18 * len(textwrap.wrap(title, 18))
        parts += _lines(PAD, below, protocols, 20)
        parts += _row(top, [*boxes, PUBLIC])
        top += HEIGHT + 18
    description = "Who sees what in four models of trust: " + "; ".join(
        f"{title}: " + ", then ".join(f"{box.name} ({box.sees})" for box in boxes) for title, _, *boxes in ROWS
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="dt-figure" viewBox="0 0 {WIDTH} {top}" role="img" '
        f'aria-label="{escape_xml(description)}"><style>{STYLE}</style>{PAPER}{"".join(parts)}</svg>\n'
    )


def _row(top: float, boxes: list[Box]) -> list[str]:
    width = (WIDTH - LEFT - PAD - GAP * (len(boxes) - 1)) / len(boxes)
    parts = []
    for i, box in enumerate(boxes):
        left = LEFT + i * (width + GAP)
        colour = 1 if box.noise else 7
        parts.append(
            f'<rect class="dt-s{colour}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{HEIGHT}" rx="8" '
            f'fill="none" stroke-width="{2 if box.noise else 1}"/>'
        )
        parts.append(f'<text class="dt-title" x="{left + 12:.1f}" y="{top + 25}">{escape_xml(box.name)}</text>')
        parts += _lines(left + 12, top + 46, f"{box.verb} {box.sees}", int((width - 18) / 7.1))
        if box.noise:
            parts.append(
                f'<text class="dt-f1" style="fill:var(--dt-1);font-weight:600" x="{left + 12:.1f}" '
                f'y="{top + HEIGHT - 12}">+ noise</text>'
            )
        if i:
            x, y = left - GAP + 4, top + HEIGHT / 2
            parts.append(
                f'<path class="dt-line dt-s7" d="M{x:.1f} {y}h{GAP - 9}m-6 -5l6 5l-6 5" stroke-linecap="round"/>'
            )
    return parts


def _lines(x: float, y: float, text: str, most: int, *, style: str = "") -> list[str]:
    mark = f' class="{style}" style="font-weight:600"' if style else ""
    return [
        f'<text{mark} x="{x:.1f}" y="{y + 18 * i:.1f}">{escape_xml(line)}</text>'
        for i, line in enumerate(textwrap.wrap(text, most, break_long_words=False))
    ]


def _on_paper(figure: str) -> str:
    """The figure with a background of its own."""
    return re.sub(r"(</style>)", rf"\1{PAPER}", figure, count=1) + "\n"


def pictures() -> dict[Path, str]:
    """Both pictures by their files."""
    return {DOCS / "who-sees-what.svg": who_sees_what(), DOCS / "accuracy-against-eps.svg": accuracy()}


def check() -> list[str]:
    """The files that are not what would be drawn now."""
    return [path.name for path, text in pictures().items() if not path.is_file() or path.read_text() != text]


if __name__ == "__main__":
    if "--check" in sys.argv:
        stale = check()
        sys.exit(f"not up to date, run this script without --check: {', '.join(stale)}" if stale else 0)
    for path, text in pictures().items():
        path.write_text(text)
