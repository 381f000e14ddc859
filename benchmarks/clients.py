"""Many clients on one machine: seconds a round for Dovetail, pfl and Flower, side by side in one run.

One round: 1000 clients x 60 samples of logistic regression (d = 7850), one local epoch of SGD in batches of 10, clip to
L2 norm 1, sum, Gaussian noise, average. The CNN row has 10 clients x 600 samples and 113,674 parameters. Peers run in
environments of their own, at their fastest setting; each engine in its own process, for its own peak memory.
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

PEERS = (("logistic", "pfl", {"rounds": 5, "warmup": 1}), ("logistic", "flower", {"rounds": 1, "warmup": 1}))
CNN_PEERS = (("cnn", "pfl", {"rounds": 3, "warmup": 1}),)
OURS = pathlib.Path(__file__).resolve().parent / "peers" / "dovetail_clients.py"


def ours(workload: str, *, rounds: int) -> dict:
    command = [sys.executable, str(OURS), "--workload", workload, "--rounds", str(rounds), "--warmup", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"dovetail failed on the {workload} workload: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows(console: Console) -> list[dict]:
    """Every engine's median round; our own runs before and after the peers, and the slower one counts."""
    found = []
    for group, rounds in ((PEERS, 10), (CNN_PEERS, 5)):
        workload = group[0][0]
        console.print(f"{workload}: dovetail", style="dim")
        before = ours(workload, rounds=rounds)
        peers = []
        for _, peer, options in group:
            console.print(f"{workload}: {peer} (its environment is built on first use)", style="dim")
            peers.append(_peers.measure(peer, workload, workers=2, **options))
        after = ours(workload, rounds=rounds)
        mine = max(before, after, key=lambda result: statistics.median(result["seconds_per_round"]))
        for result in (mine, *peers):
            seconds = statistics.median(result["seconds_per_round"])
            ratio = seconds / statistics.median(mine["seconds_per_round"])
            found.append({**result, "seconds": seconds, "dovetail_is_faster_by": ratio})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    found = rows(console)
    if arguments.json:
        print(json.dumps({"benchmark": "clients", "rows": found}))
        return
    table = Table("workload", "engine", "s/round", "Dovetail is faster by", "peak memory")
    for row in found:
        table.add_row(
            row["workload"],
            row["engine"],
            f"{row['seconds']:.3f}",
            f"{row['dovetail_is_faster_by']:.1f}x",
            f"{row['peak_rss_mb']:.0f} MB",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
