"""Models that users bring: Dovetail beside what they have today, Opacus per record and pfl per client, in one run.

Each row is one model, written as people write it, in PyTorch and in JAX; every engine trains the same model on the same
records with two workers, in a process of its own, the peers in environments of their own. Engines take turns, and each
one's fastest turn counts (the median of its rounds). `--unequal` asks another question: 200 clients with log-normal
sizes, their seconds per record over those of 200 clients with equal ones.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

import _peers
from rich.console import Console
from rich.table import Table

OURS = pathlib.Path(__file__).resolve().parent / "peers" / "dovetail_own.py"


class Row(NamedTuple):
    """A workload of `peers/own_workload.py`, the peer, and our aims by method (`peers/dovetail_own.py`).

    `others` are further peers to look at, with a method each.
    """

    peer: str
    aims: dict[str, float]
    rounds: int = 5
    others: tuple[tuple[str, str], ...] = ()


IN_JAX = (("jax_privacy", "clipped_grad"), ("jax_privacy", "microbatches of 32"), ("jax_privacy", "vmap by hand"))


ROWS = {
    "record-mlp": Row("opacus", {"torch": 0.8, "jax": 0.95, "jax-transposed": 0.95}, rounds=40, others=IN_JAX),
    "record-cnn": Row("opacus", {"torch": 0.9, "jax": 1.0}, rounds=10, others=IN_JAX),
    "resnet": Row("pfl", {"torch": 1.3, "jax": 0.8}, rounds=3),
    "lstm": Row("pfl", {"torch": 1.25, "jax": 1.25}),
    "transformer": Row("pfl", {"torch": 1.1, "jax": 1.0}),
    "tabular": Row("pfl", {"torch": 5.0, "jax": 15.0}, rounds=3),
    "logistic": Row("pfl", {"jax": 20.0}),
    "cnn": Row("pfl", {"torch": 1.15, "jax": 1.5}, rounds=3),
}
METHODS = ["torch", "jax", "jax-transposed"]  # of `peers/dovetail_own.py`, measured unless others are asked for
UNEQUAL_AIM = 1.3


def ours(workload: str, method: str, rounds: int, **options: Any) -> dict:
    command = [sys.executable, str(OURS), "--workload", workload, "--method", method, "--rounds", str(rounds)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError(f"dovetail failed on {workload}, {method}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows(names: list[str], methods: list[str], turns: int, console: Console) -> list[dict]:
    """The best turn of every engine on these workloads, with the peer's seconds over ours and the aim."""
    found = []
    for name in names:
        row = ROWS[name]
        engines: list[str | tuple[str, str] | None] = [None, *(method for method in row.aims if method in methods)]
        if any(method.startswith("jax") for method in methods):
            engines += row.others
        results: dict[str | tuple[str, str] | None, list[dict]] = {engine: [] for engine in engines}
        for turn in range(turns):
            for engine in engines:
                console.print(f"{name}, turn {turn + 1}: {engine or row.peer}", style="dim")
                if engine is None:
                    result = _peers.measure(row.peer, name, benchmark="own", rounds=row.rounds)
                elif isinstance(engine, tuple):
                    result = _peers.measure(engine[0], name, benchmark="own", rounds=row.rounds, method=engine[1])
                else:
                    result = ours(name, engine, row.rounds)
                results[engine].append(result)
        check_sums([result for every in results.values() for result in every])
        best = {engine: min(every, key=seconds) for engine, every in results.items()}
        found += [
            {
                **result,
                "seconds": seconds(result),
                "peer_over_ours": seconds(best[None]) / seconds(result) if isinstance(engine, str) else None,
                "aim": row.aims.get(engine) if isinstance(engine, str) else None,
            }
            for engine, result in best.items()
        ]
    return found


def unequal_rows(names: list[str], methods: list[str], turns: int, console: Console) -> list[dict]:
    """For each model the seconds per record of unequal clients over those of equal ones, the best turns of both."""
    found = []
    for name in names:
        for method in ROWS[name].aims:
            if method not in methods or ROWS[name].peer != "pfl":
                continue
            per_record: dict[str, list[float]] = {"equal": [], "log-normal": []}
            for turn in range(turns):
                for sizes, every in per_record.items():
                    console.print(f"{name}, {method}, turn {turn + 1}: {sizes}", style="dim")
                    result = ours(name, method, 3, users=200, sizes=sizes)
                    every.append(seconds(result) / result["records"])
            equal, unequal = (min(every) for every in per_record.values())
            found.append({"workload": name, "method": method, "unequal_over_equal": unequal / equal})
    return found


def check_sums(results: list[dict]) -> None:
    """Raise unless every engine's clipped sum has the same norms, parameter by parameter (layouts differ)."""
    first = results[0]["norms"]
    for result in results[1:]:
        for mine, other in zip(first, result["norms"], strict=True):
            if abs(mine - other) > 1e-3 * first[-1]:
                raise RuntimeError(
                    f"{result['engine']} and {results[0]['engine']} give different sums: {other}, {mine}"
                )


def seconds(result: dict) -> float:
    return statistics.median(result["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--unequal", action="store_true")
    arguments = parser.parse_args()
    measure = unequal_rows if arguments.unequal else rows
    results = measure(arguments.rows, arguments.methods, arguments.turns, Console(stderr=True))
    if arguments.json:
        print(json.dumps({"benchmark": "own", "rows": results}))
        return
    if arguments.unequal:
        table = Table("model", "written in", "unequal over equal, per record", "aim")
        for row in results:
            table.add_row(row["workload"], row["method"], f"{row['unequal_over_equal']:.2f}", f"<= {UNEQUAL_AIM:g}")
    else:
        table = Table("model", "engine", "method", "ms", "peer / ours", "aim", "peak memory")
        for row in results:
            table.add_row(
                row["workload"],
                row["engine"],
                row["method"],
                f"{1e3 * row['seconds']:,.1f}",
                f"{row['peer_over_ours']:.2f}" if row["peer_over_ours"] else "",
                f">= {row['aim']:g}" if row["aim"] else "",
                f"{row['peak_rss_mb']:.0f} MB",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
