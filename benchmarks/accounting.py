"""The accountant against a yardstick of the same run: one `scipy.stats.binom.cdf` call on a million points.

Numerical clones at a million users, Renyi composition over 7850 shuffled coordinates, and one victim's bound among
10,000 users with 10,000 different budgets. Nothing is cached between repetitions; the fastest of five counts.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import binom

from dovetail.accounting.amplification import clones
from dovetail.accounting.pairs import binomial
from dovetail.accounting.releases import crowds, personalized
from dovetail.events import Personalized, Report, Shuffled


def yardstick() -> None:
    binom.cdf(np.arange(1_000_000), 1_000_000, 0.5)


def numerical_clones() -> None:
    report = Report(kind="generic", eps_local=1.0)
    clones.numerical23(Shuffled(report=report, num_users=1_000_000), delta=1e-6)


def renyi_coordinates() -> None:
    binomial._compact.cache_clear()
    report = Report(kind="generic", eps_local=0.5)
    crowds.renyi(Shuffled(report=report, num_users=1000, coordinates=7850), crowds.ORDERS)


def personal_budgets() -> None:
    budgets = tuple(np.linspace(0.05, 1.0, 10_000))
    personalized.eps(Personalized(kind="clip_laplace", eps_locals=budgets), delta=1e-8, victim=9_999)


WORK: dict[str, tuple[Callable[[], None], float]] = {
    "clones23-numerical, n = 1e6": (numerical_clones, 3.0),
    "Renyi over d = 7850 coordinates, n = 1000": (renyi_coordinates, 10.0),
    "personalised, n = 10,000 budgets": (personal_budgets, 30.0),
}


def seconds(work: Callable[[], None]) -> float:
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    unit = seconds(yardstick)
    rows = [
        {"work": name, "seconds": taken, "yardsticks": taken / unit, "aim": aim}
        for name, (work, aim) in WORK.items()
        for taken in [seconds(work)]
    ]
    if arguments.json:
        print(json.dumps({"benchmark": "accounting", "yardstick_seconds": unit, "rows": rows}))
        return
    table = Table("work", "seconds", "yardsticks", "aim")
    table.add_row("binom.cdf on a million points", f"{unit:.4f}", "1.00", "")
    for row in rows:
        table.add_row(row["work"], f"{row['seconds']:.4f}", f"{row['yardsticks']:.2f}", f"at most {row['aim']:g}")
    Console().print(table)


if __name__ == "__main__":
    main()
