"""The README's table and what `dovetail choose` knows of accuracies, from the comparisons in papers/results/compare.

`--check` only says whether they are theirs.
"""

import argparse
import json
import sys
from pathlib import Path

from dovetail import compare

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "papers" / "results" / "compare"
README = ROOT / "README.md"
CHOOSING = ROOT / "dovetail" / "comparisons" / "results.json"
USERS = {"mnist": 60_000}  # one per training record
BEGIN, END = "<!-- headline: written by benchmarks/headline.py -->", "<!-- end of headline -->"
MODELS, EPS = ("logistic", "scatter"), ("0.24", "1", "2.5")


def accuracies() -> dict[str, dict[str, str]]:
    """Accuracy by protocol and column, whom one must trust, and what a user sends in a round."""
    by_protocol: dict[str, dict[str, str]] = {}
    for folder in sorted(RESULTS.iterdir()):
        data = json.loads((folder / "comparison.json").read_text())
        column = f"{data['model']} {data['eps']:g}"
        for row in data["rows"]:
            if row["reason"]:
                continue
            line = by_protocol.setdefault(row["protocol"], {"trust": row["trust"]})
            line[column] = f"{100 * row['mean']:.1f}"
            line[f"sent {data['model']}"] = compare.bytes_in_words(row["bytes_per_client"])
    return by_protocol


def table() -> str:
    """The table in Markdown, the best first."""
    columns = [f"{model} {float(eps):g}" for model in MODELS for eps in EPS]
    head = ["protocol", "a user must trust", "sent per user and round: logistic / scatter"]
    head += [f"{model}, eps {eps}" for model in MODELS for eps in EPS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    by_protocol = accuracies()
    for name in sorted(by_protocol, key=lambda name: -float(by_protocol[name].get("logistic 1", 0))):
        sent = " / ".join(by_protocol[name].get(f"sent {model}", "-") for model in MODELS)
        cells = [
            f"`{name}`",
            by_protocol[name]["trust"],
            sent,
            *(by_protocol[name].get(column, "-") for column in columns),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def per_round(data: dict, name: str) -> int:
    """How many users took part in a round of a protocol's."""
    (contender,) = compare.line_up(eps=data["eps"], delta=data["delta"], model=data["model"], protocols=[name])
    return contender.config.cohort.size or USERS[data["task"]]


def in_short() -> str:
    """Every comparison's terms and accuracies as JSON."""
    comparisons = {}
    for folder in sorted(RESULTS.iterdir()):
        data = json.loads((folder / "comparison.json").read_text())
        rows = {row["protocol"]: row for row in data["rows"] if not row["reason"]}
        comparisons[folder.name] = {
            **{name: data[name] for name in ("task", "model", "eps", "delta", "seeds")},
            "users": USERS[data["task"]],
            "dim": rows["fedavg"]["bytes_per_client"] // 4,
            "runs": {
                name: {"accuracy": round(row["mean"], 4), "rounds": row["rounds"], "per_round": per_round(data, name)}
                for name, row in sorted(rows.items())
            },
        }
    return json.dumps(comparisons, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if arguments.check:
        if written != text:
            sys.exit("expected the README's table to be benchmarks/headline.py's, got another one")
        if CHOOSING.read_text() != in_short():
            sys.exit(f"expected {CHOOSING.name} to be benchmarks/headline.py's, got another one")
        return
    README.write_text(written)
    CHOOSING.write_text(in_short())


if __name__ == "__main__":
    main()
