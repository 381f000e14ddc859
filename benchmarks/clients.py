"""Many clients on one machine: seconds per round for Dovetail, pfl and Flower, side by side in one run.

One round: 1000 clients x 60 samples of logistic regression (d = 7850), one local epoch of SGD in batches of 10, clip to
L2 norm 1, sum, Gaussian noise, average. The CNN row has 10 clients x 600 samples and 113,674 parameters. Peers run in
environments of their own, two workers each, at the fastest of the settings we tried; every engine has its own process,
for its own peak memory. Engines take turns, twice, and each one's faster turn counts (the median of its rounds).
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

PEERS = {
    "logistic": (("pfl", {"rounds": 5, "warmup": 1}), ("flower", {"rounds": 2, "warmup": 1})),
    "cnn": (("pfl", {"rounds": 3, "warmup": 1}),),
}
TURNS = 2
OURS = pathlib.Path(__file__).resolve().parent / "peers"


def ours(workload: str, *, rounds: int, script: str = "dovetail_clients.py") -> dict:
    command = [sys.executable, str(OURS / script), "--workload", workload, "--rounds", str(rounds), "--warmup", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"dovetail failed on the {workload} workload: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows(console: Console, peers_of: dict = PEERS, *, script: str = "dovetail_clients.py") -> list[dict]:
    """The result of every engine on every workload; ours is that of `script`."""
    measured = []
    for workload, peers in peers_of.items():
        turns: dict[str, list[dict]] = {}
        for turn in range(TURNS):
            console.print(f"{workload}, turn {turn + 1}: dovetail", style="dim")
            turns.setdefault("dovetail", []).append(ours(workload, rounds=10, script=script))
            for peer, options in peers:
                console.print(
                    f"{workload}, turn {turn + 1}: {peer} (its environment is built on first use)", style="dim"
                )
                turns.setdefault(peer, []).append(_peers.measure(peer, workload, workers=2, **options))
        best = [min(results, key=seconds) for results in turns.values()]
        measured += [
            {**result, "seconds": seconds(result), "dovetail_is_faster_by": seconds(result) / seconds(best[0])}
            for result in best
        ]
    return measured


def seconds(result: dict) -> float:
    return statistics.median(result["seconds_per_round"])


def show(name: str, results: list[dict], *, as_json: bool) -> None:
    """Print the rows of a benchmark of this name."""
    if as_json:
        print(json.dumps({"benchmark": name, "rows": results}))
        return
    table = Table("workload", "engine", "s/round", "Dovetail is faster by", "peak memory")
    for row in results:
        table.add_row(
            row["workload"],
            row["engine"],
            f"{row['seconds']:.3f}",
            f"{row['dovetail_is_faster_by']:.1f}x",
            f"{row['peak_rss_mb']:.0f} MB",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workloads", nargs="+", choices=PEERS, default=list(PEERS))
    arguments = parser.parse_args()
    chosen = {name: PEERS[name] for name in arguments.workloads}
    show("clients", rows(Console(stderr=True), chosen), as_json=arguments.json)


if __name__ == "__main__":
    main()
