"""How well can n people add up their numbers, if nobody is trusted with them? (Survey 5.3 and 5.4, measured.)

Every protocol is calibrated to the same central (1, 1e-6) for each n, then run on the input that is worst for it. At a
fixed budget the squared error of a sum of bits, of split-and-mix and of unary messages should not grow with n; one
message per user for a number in [0, 1] should cost about n^(1/3).

    python examples/summation.py --out summation.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dovetail.figures import Figure, Line, save
from dovetail.papers import survey

WAYS = {
    "binary": ("binary_sum", {}),
    "single": ("real_sum", {"method": "single"}),
    "unary": ("real_sum", {"method": "unary"}),
    "split": ("real_sum", {"method": "split"}),
}


def main() -> None:
    """Calibrate, run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("summation.svg"), help="where the figure goes")
    parser.add_argument("--rounds", type=int, default=300, help="repetitions of a point at most")
    parser.add_argument("--sizes", type=int, nargs="+", default=(100, 1000, 10_000, 100_000), help="numbers of users")
    options = parser.parse_args()
    console, lines = Console(), []
    for name, (protocol, settings) in WAYS.items():
        table = Table("n", "reports per user", "squared error", "measured", title=f"{name} at (1, 1e-6)")
        rows = [
            survey.measure_sum(protocol, size, settings, seeds=1, most_rounds=options.rounds)[0]
            for size in options.sizes
        ]
        for row in rows:
            cells = row.x, row.extra["reports per user"], row.extra["exact"], row.ours.mean
            table.add_row(*(f"{value:.4g}" for value in cells))
        console.print(table)
        console.print(f"{name}: squared error ~ n^{survey.error_exponent(rows, 'exact'):.3f}", end="")
        console.print(f" (measured: n^{survey.error_exponent(rows):.3f})")
        lines.append(Line(name=name, x=options.sizes, y=[row.extra["exact"] for row in rows]))
        lines.append(Line(name=f"{name}, measured", x=options.sizes, y=[row.ours.mean for row in rows], style="points"))
    console.print(f"a curator's squared error: {survey.curator_error():.4g}")
    labels = {"x_label": "users", "y_label": "squared error of the sum"}
    save(Figure(title="Sums at a central (1, 1e-6)", log_x=True, log_y=True, lines=lines, **labels), options.out)


if __name__ == "__main__":
    main()
