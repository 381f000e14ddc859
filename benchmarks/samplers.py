"""Samplers and the cap on subjects' records, as ratios inside one run.

Simulated normal noise is held against `jax.random.normal`, compiled, at three shapes; deployed samplers, from the
operating system's randomness, and `data.subjects.cap_records` against a yardstick: one `numpy.sort` of a million
floats. Tables are made anew in every turn, unless a row says otherwise. Works take turns with what they are held
against; each one's fastest turn counts.
"""

import argparse
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.data import partition
from dovetail.data.subjects import cap_records
from dovetail.mechanisms import (
    ExactRandomizedResponse,
    ExactSampler,
    ExactSkellam,
    GridLaplace,
    ReportGrid,
    exact_skellam,
    grid_laplace,
)
from dovetail.mechanisms.gaussian import normal
from dovetail.mechanisms.skellam import Encoding

TURNS = 7
FLOATS = np.random.default_rng(0).random(1_000_000)
SUBJECTS = np.random.default_rng(0).integers(0, 539, 60_000).astype(np.int32)
SILOS = partition.silos(SUBJECTS, num_silos=10, spread=5, seed=0)


def yardstick() -> None:
    np.sort(FLOATS)


def responses() -> None:
    ExactRandomizedResponse(1.0)(np.full(100_000, 0.5), sampler=ExactSampler())


def skellam(variance: float) -> Callable[[], None]:
    def work() -> None:
        exact_skellam._skellam_law.cache_clear()
        ExactSkellam(variance)(10_000, sampler=ExactSampler())

    return work


def encoder(dim: int, times: int = 1) -> Callable[[], None]:
    """What a client of a noisy sum draws for one update, its table at hand."""
    encoding, noise, x = Encoding(clip_norm=1.0, scale=2e4, dim=dim), ExactSkellam(1e4), np.full(dim, 1.0, np.float32)
    noise(1, sampler=ExactSampler())

    def work() -> None:
        for _ in range(times):
            _ = exact_skellam.encode(encoding, x, sampler=ExactSampler()) + noise(dim, sampler=ExactSampler())

    return work


def on_a_grid(reach: int) -> Callable[[], None]:
    """Ten clients' reports on 7850 coordinates at budgets of their own, each with a table of its own."""
    grid = ReportGrid(clip_value=0.1, steps=64 if reach == 64 else 4, reach=reach)

    def work() -> None:
        grid_laplace._offset_table.cache_clear()
        for client in range(10):
            edges = grid.round_to_edges(np.full(7850, 0.01), sampler=ExactSampler())
            GridLaplace(0.05 + 0.1 * client, grid, reach == 64)(edges, sampler=ExactSampler())

    return work


def cap_subjects() -> None:
    cap_records(SILOS, SUBJECTS, items_per_subject=20, users_per_subject=3, items_per_user=8)


def noise(draw: Callable[..., jax.Array], shape: tuple[int, ...], *, clients: int | None = None) -> Callable[[], None]:
    """Noise added to zeros; for so many clients, each from its own key."""
    key = jax.random.key(0) if clients is None else jax.random.split(jax.random.key(0), clients)
    zeros = jnp.zeros(shape if clients is None else (clients, *shape))

    @jax.jit
    def add(key: jax.Array, x: jax.Array) -> jax.Array:
        return x + (draw(key, shape) if clients is None else jax.vmap(lambda client_key: draw(client_key, shape))(key))

    def work() -> None:
        for _ in range(max(1, 1_000_000 // zeros.size)):
            add(key, zeros).block_until_ready()

    work()  # compiles
    return work


def against_jax(shape: tuple[int, ...], clients: int | None = None) -> tuple[Callable[[], None], Callable[[], None]]:
    return noise(normal, shape, clients=clients), noise(jax.random.normal, shape, clients=clients)


def works() -> dict[str, tuple[Callable[[], None], Callable[[], None], float]]:
    """What is measured, what it is held against, and the ratio aimed at."""
    return {
        "normal noise, 1000 x 7850, one key": (*against_jax((1000, 7850)), 1.3),
        "normal noise, 51,850, one key": (*against_jax((51_850,)), 1.3),
        "normal noise, 7850, 1000 keys": (*against_jax((7850,), 1000), 1.3),
        "100,000 exact randomized responses": (responses, yardstick, 1.0),
        "exact Skellam noise of variance 1e7: table and 10,000 draws": (skellam(1e7), yardstick, 10.0),
        "exact Skellam noise of variance 2^29: table and 10,000 draws": (skellam(2.0**29), yardstick, 25.0),
        "encoding and exact noise, 10 times 6010, table at hand": (encoder(6010, 10), yardstick, 1.0),
        "encoding and exact noise, 1,000,000, table at hand": (encoder(1_000_000), yardstick, 15.0),
        "10 clients' exact Clip-Laplace reports, 7850 each, tables included": (on_a_grid(64), yardstick, 5.0),
        "10 clients' exact Laplace reports, 7850 each, tables included": (on_a_grid(4425), yardstick, 10.0),
        "cap on the records of 539 subjects, 60,000 records": (cap_subjects, yardstick, 1.0),
    }


def fastest(*works: Callable[[], None]) -> list[float]:
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(TURNS):
        for work, seconds in zip(works, taken, strict=True):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return [min(seconds) for seconds in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [
        {"work": name, "seconds": taken, "ratio": taken / unit, "aim": aim}
        for name, (work, other, aim) in works().items()
        for taken, unit in [fastest(work, other)]
    ]
    if arguments.json:
        print(json.dumps({"benchmark": "samplers", "rows": rows}))
        return
    table = Table("work", "seconds", "ratio", "aim")
    for row in rows:
        table.add_row(row["work"], f"{row['seconds']:.4f}", f"{row['ratio']:.2f}", f"at most {row['aim']:g}")
    Console().print(table)


if __name__ == "__main__":
    main()
