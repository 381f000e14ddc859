"""The README's table, from the comparisons in papers/results/compare; `--check` only says whether it is theirs."""

import argparse
import json
import sys
from pathlib import Path

from dovetail import compare

ROOT = Path(__file__).resolve().parents[1]
RESULTS, README = ROOT / "papers" / "results" / "compare", ROOT / "README.md"
BEGIN, END = "<!-- headline: written by benchmarks/headline.py -->", "<!-- end of headline -->"
MODELS, EPS = ("logistic", "scatter"), ("0.24", "1", "2.5")


def accuracies() -> dict[str, dict[str, str]]:
    """Accuracy by protocol and column, whom one must trust, and what a user sends in a round."""
    found: dict[str, dict[str, str]] = {}
    for folder in sorted(RESULTS.iterdir()):
        data = json.loads((folder / "comparison.json").read_text())
        column = f"{data['model']} {data['eps']:g}"
        for row in data["rows"]:
            if row["reason"]:
                continue
            line = found.setdefault(row["protocol"], {"trust": row["trust"]})
            line[column] = f"{100 * row['mean']:.1f}"
            line[f"sent {data['model']}"] = compare.in_bytes(row["bytes_per_client"])
    return found


def table() -> str:
    """The table in Markdown, the best first."""
    columns = [f"{model} {float(eps):g}" for model in MODELS for eps in EPS]
    head = ["protocol", "a user must trust", "sent per user and round: logistic / scatter"]
    head += [f"{model}, eps {eps}" for model in MODELS for eps in EPS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    found = accuracies()
    for name in sorted(found, key=lambda one: -float(found[one].get("logistic 1", 0))):
        sent = " / ".join(found[name].get(f"sent {model}", "-") for model in MODELS)
        cells = [f"`{name}`", found[name]["trust"], sent, *(found[name].get(column, "-") for column in columns)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if arguments.check:
        sys.exit(
            0 if written == text else "expected the README's table to be benchmarks/headline.py's, got another one"
        )
    README.write_text(written)


if __name__ == "__main__":
    main()
