"""How well can n people add up their numbers, if nobody is trusted with them? (Survey 5.3 and 5.4, measured.)

Every protocol is calibrated to the same central (eps, delta) for each n, then run on the input that is worst for it.
At a fixed budget the squared error of a sum of bits, of split-and-mix and of unary messages should not grow with n; one
message a user for a number in [0, 1] should cost about n^(1/3).

    python examples/summation.py --out summation.png
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail import accounting
from dovetail.events import Everyone, Gaussian, Round
from dovetail.protocols import Cohort
from dovetail.protocols.binary_sum import BinarySum
from dovetail.protocols.real_sum import RealSum
from dovetail.statements import Neighbors

Sum = BinarySum | RealSum

EPS, DELTA = 1.0, 1e-6
SIZES = (100, 316, 1000, 3162, 10_000, 31_623, 100_000)
PROTOCOLS = {
    "binary": BinarySum(),
    "single": RealSum(method="single"),
    "unary": RealSum(method="unary"),
    "split": RealSum(method="split"),
}
CHUNK = 10_000  # users at a time
MOST_REPORTS = 10**8  # to draw for one point of the figure


@dataclasses.dataclass(frozen=True)
class Point:
    """One protocol at one n: reports a user, and the squared error, exact and measured in so many rounds."""

    size: int
    reports: int
    error: float
    measured: float
    rounds: int


def calibrated(protocol: Sum, size: int) -> Sum:
    """The protocol with the least noise that meets the target with so many users."""
    cohort = Cohort(participation=Everyone(), size=size, min_size=size)

    def eps_at(noise: float) -> float:
        candidate = protocol.with_noise(noise).settle(cohort, 1)
        return accounting.bound([candidate.view(cohort, 1, neighbors=Neighbors.REPLACE_ONE).round], delta=DELTA).eps

    return protocol.with_noise(accounting.smallest_noise(eps_at, eps=EPS, tolerance=1e-3)).settle(cohort, 1)


def worst_input(protocol: Sum) -> float:
    """The number that every user holds where the error is largest; the variance adds up over users."""
    if isinstance(protocol, BinarySum):
        return 0.0
    return max(np.linspace(0, 1, 1001).tolist(), key=lambda x: protocol.variance([x]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def collect(protocol: Sum, users: int, x: float, key: jax.Array) -> Any:
    """What some users send, added up."""
    xs, present = jnp.full((users, 1), x), jnp.ones(users, bool)
    return protocol.collect(xs, present, (), keys=jax.random.split(key, users))


@functools.partial(jax.jit, static_argnums=(0, 1))
def estimate(protocol: Sum, size: int, collected: Any, key: jax.Array) -> jax.Array:
    """The sum, from what all users sent."""
    return size * protocol.estimate(protocol.finish(collected, key=key), size, (), key=key)[0][0]


def estimated_sum(protocol: Sum, size: int, x: float, key: jax.Array) -> float:
    """One round."""
    sizes = [min(CHUNK, size - start) for start in range(0, size, CHUNK)]
    parts = [collect(protocol, users, x, jax.random.fold_in(key, i)) for i, users in enumerate(sizes)]
    total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    return float(estimate(protocol, size, total, jax.random.fold_in(key, size)))


def measure(protocol: Sum, size: int, most_rounds: int) -> Point:
    """The error of the calibrated protocol, exact and measured."""
    protocol = calibrated(protocol, size)
    x = worst_input(protocol)
    reports = protocol.layout(1).reports_per_client
    rounds = int(np.clip(MOST_REPORTS // (size * reports), 30, most_rounds))
    keys = jax.random.split(jax.random.key(size), rounds)
    errors = [estimated_sum(protocol, size, x, key) - size * x for key in keys]
    exact = protocol.variance(np.full(size, x))
    return Point(size, reports, exact, float(np.mean(np.square(errors))), rounds)


def curator() -> float:
    """The squared error of a trusted curator's Gaussian noise."""

    def eps_at(std: float) -> float:
        mechanism = Gaussian(std=std, sensitivity=1.0, neighbors=Neighbors.REPLACE_ONE)
        return accounting.bound([Round(mechanism=mechanism, participation=Everyone())], delta=DELTA).eps

    return accounting.smallest_noise(eps_at, eps=EPS) ** 2


def slope(points: list[Point], field: str) -> float:
    """The exponent of n in the squared error."""
    sizes, errors = [point.size for point in points], [getattr(point, field) for point in points]
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def main() -> None:
    """Calibrate, run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="summation.png", help="where the figure goes")
    parser.add_argument("--rounds", type=int, default=300, help="repetitions of a point at most")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of users")
    options = parser.parse_args()
    console = Console()
    found: dict[str, list[Point]] = {}
    for name, protocol in PROTOCOLS.items():
        found[name] = []
        table = Table("n", "reports a user", "squared error", "measured", "rounds", title=f"{name} at ({EPS}, {DELTA})")
        for size in options.sizes:
            point = measure(protocol, size, options.rounds)
            found[name].append(point)
            table.add_row(*(f"{value:.4g}" for value in dataclasses.astuple(point)))
        console.print(table)
        console.print(f"{name}: squared error ~ n^{slope(found[name], 'error'):.3f}", end="")
        console.print(f" (measured: n^{slope(found[name], 'measured'):.3f})")
    console.print(f"a curator's squared error: {curator():.4g}")
    draw(found, options.out)


def draw(found: dict[str, list[Point]], path: str) -> None:
    """Squared errors against n: lines are exact, dots measured."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, points in found.items():
        sizes = [point.size for point in points]
        (line,) = axes.loglog(sizes, [point.error for point in points], label=f"{name}: {slope(points, 'error'):+.2f}")
        axes.loglog(sizes, [point.measured for point in points], "o", color=line.get_color())
    axes.axhline(curator(), color="gray", linestyle=":", label="curator")
    axes.set(xlabel="users", ylabel="squared error of the sum", title=f"central ({EPS}, {DELTA})")
    axes.legend(title="exponent of n")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
