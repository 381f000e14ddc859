"""Per-example clipped gradients: examples per second for Dovetail, Opacus, torch.func and jax-privacy, in one run.

The CNN of `dovetail bench clients` (113,674 parameters), 256 images of 28 x 28: forward, backward, clip each example's
gradient to L2 norm 1, sum. Every engine gets the same weights and images and two threads, in a process of its own, the
peers in environments of their own; a run in which two engines' sums differ is an error. Engines take turns, and each
one's fastest turn counts (the median of its repetitions); the slowest turn is shown beside it.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import _peers
from rich.console import Console
from rich.table import Table

AIMS = {("opacus", "ghost"): 1.0, ("jax_privacy", "default"): 10.0}
PEERS = (
    ("opacus", "ghost", {}),
    ("opacus", "hooks", {}),
    ("opacus", "vmap", {"repetitions": 5}),
    ("jax_privacy", "default", {"repetitions": 5, "warmup": 1}),
    ("jax_privacy", "microbatches of 32", {"repetitions": 5, "warmup": 1}),
    ("jax_privacy", "microbatches of 1", {"repetitions": 5, "warmup": 1}),
)
TURNS = 5
OURS = pathlib.Path(__file__).resolve().parent / "peers" / "dovetail_examples.py"


def ours() -> dict:
    command = [sys.executable, str(OURS), "--method", "factored", "--repetitions", "20", "--warmup", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"dovetail failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows(console: Console) -> list[dict]:
    turns: dict[tuple[str, str], list[dict]] = {}
    for turn in range(TURNS):
        console.print(f"turn {turn + 1}: dovetail", style="dim")
        turns.setdefault(("dovetail", ""), []).append(ours())
        for peer, method, options in PEERS:
            console.print(f"turn {turn + 1}: {peer}, {method} (environments are built on first use)", style="dim")
            result = _peers.measure(peer, "cnn", benchmark="examples", method=method, **options)
            turns.setdefault((peer, method), []).append(result)
    same_sums([result for results in turns.values() for result in results])
    best = {engine: min(results, key=seconds) for engine, results in turns.items()}
    return [
        {
            **result,
            "examples_per_second": result["examples"] / seconds(result),
            "slowest_turn": min(turn["examples"] / seconds(turn) for turn in turns[engine]),
            "dovetail_is_faster_by": seconds(result) / seconds(best["dovetail", ""]),
            "aim": AIMS.get(engine),
        }
        for engine, result in best.items()
    ]


def same_sums(results: list[dict]) -> None:
    """Raise unless every engine's sum has the same norm in every layer (their layouts differ)."""
    first = results[0]
    for result in results[1:]:
        for mine, other in zip(first["norms"], result["norms"], strict=True):
            if abs(mine - other) > 1e-4 * mine:
                raise RuntimeError(f"{result['engine']} and {first['engine']} give different sums: {other} and {mine}")


def seconds(result: dict) -> float:
    return statistics.median(result["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    results = rows(console)
    if arguments.json:
        print(json.dumps({"benchmark": "examples", "rows": results}))
        return
    table = Table("engine", "method", "examples/s", "slowest turn", "Dovetail is faster by", "aim", "peak memory")
    for row in results:
        table.add_row(
            row["engine"],
            row["method"],
            f"{row['examples_per_second']:,.0f}",
            f"{row['slowest_turn']:,.0f}",
            f"{row['dovetail_is_faster_by']:.1f}x",
            f">= {row['aim']:g}x" if row["aim"] else "",
            f"{row['peak_rss_mb']:.0f} MB",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
