"""The README's table is what the committed comparisons say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import opening_pictures
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


def test_the_opening_pictures_are_drawn_from_the_comparisons():
    assert opening_pictures.check() == []
    for path in opening_pictures.pictures():
        assert f"docs/{path.name}" in (ROOT / "README.md").read_text()
        assert path.name in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.torch
def test_the_ten_lines_run(tmp_path, monkeypatch, capsys):
    pandas = pytest.importorskip("pandas", reason="`make flower` has it")
    rng = np.random.default_rng(0)
    patients = rng.geometric(0.25, 3000)  # 1 to some 20 visits each
    ids = np.repeat([f"P-{number:04x}" for number in rng.permutation(3000)], patients)
    age, pressure = rng.uniform(18, 95, len(ids)), rng.normal(125, 15, len(ids))
    ill = np.where(age / 40 + pressure / 60 + rng.normal(0, 0.3, len(ids)) > 3.6, "yes", "no")
    frame = pandas.DataFrame({"patient": ids, "age": age, "pressure": pressure, "ill": ill})
    frame.to_csv(tmp_path / "visits.csv", index=False)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"## Ten lines.*?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    ran: dict = {}
    exec(code, ran)
    said = capsys.readouterr().out
    assert said.startswith("AUC ")
    assert "(2, 1e-05)-DP [curator; against the observer of every model; replace-one; one user, 100 rounds" in said
    low, high = ran["result"].intervals["auc"]
    assert 0.5 < low < ran["result"].auc < high  # 0.5 is guessing
