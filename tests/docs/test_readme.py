"""The README's table is what the committed comparisons say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_headline_table_is_generated():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "headline.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", ["logistic", "scatter"])
@pytest.mark.parametrize("eps", ["0.24", "1", "2.5"])
def test_what_the_readme_says_of_the_comparisons_holds(model, eps):
    data = json.loads((ROOT / "papers" / "results" / "compare" / f"{model}-{eps}" / "comparison.json").read_text())
    rows = {row["protocol"]: row for row in data["rows"] if not row["reason"]}
    assert data["seeds"] == 3
    for name, row in rows.items():
        assert row["certified"]["unbounded"] == (name == "fedavg")
        assert name == "fedavg" or row["certified"]["eps"] <= float(eps)
    if eps != "0.24":
        assert abs(rows["split_and_mix"]["mean"] - rows["dp_fl"]["mean"]) < 0.01
        assert data["best_single_shuffler"] == "ss_topk"
