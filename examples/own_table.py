"""Your own table: read it, train on it, and get a model that predicts new rows.

The table here is synthetic (1,500 visits of 250 patients); replace it by your own file.

    python examples/own_table.py [FOLDER]
"""

# [imports]
from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

import dovetail


# [file]
def write_visits(path: Path) -> None:
    """A CSV file with a row per visit; a patient may have several."""
    rng = np.random.default_rng(0)
    patient, age = rng.integers(0, 250, 1500), rng.uniform(18, 95, 1500).round(1)
    pressure, smoker = rng.normal(125, 15, 1500).round(1), rng.choice(["never", "former", "current"], 1500)
    risk = age / 40 + pressure / 60 + 0.8 * (smoker == "current") + rng.normal(0, 0.2, 1500)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["patient", "age", "pressure", "smoker", "outcome"])
        outcomes = np.where(risk > 3.8, "ill", "well")
        writer.writerows(zip([f"P{number:03}" for number in patient], age, pressure, smoker, outcomes, strict=True))


# [read]
def read(path: Path) -> dovetail.Dataset:
    """Whose each row is, what to predict, and what is public about the columns."""
    return dovetail.Dataset.from_csv(
        path,
        user="patient",
        target="outcome",
        classes=["well", "ill"],
        bounds={"age": (0, 100), "pressure": (80, 200)},
        categories={"smoker": ["never", "former", "current"]},
        test_share=0.2,
    )


# [train]
def train(data: dovetail.Dataset, out: Path) -> dovetail.Result:
    """All patients take part in each of 100 rounds; the noise is calibrated to (2, 1e-5) for all rows of a patient."""
    return dovetail.train(data, protocol="dp_fl", eps=2.0, delta=1e-5, out=out)


# [score]
def score(data: dovetail.Dataset) -> str:
    """The same, scored with noise on patients who are held out, and protected like the others."""
    result = dovetail.train(data, eps=2.0, delta=1e-5, evaluate="private")
    low, high = result.intervals["accuracy"]
    return f"accuracy {result.accuracy:.2f}, between {low:.2f} and {high:.2f} with 95 % confidence"


# [ask]
def ask(run: Path) -> np.ndarray:
    """New rows, read like those that were trained on: the same columns, bounds and categories."""
    model = dovetail.load(run)
    visits = {"age": [35.0, 88.0], "pressure": [118.0, 161.0], "smoker": ["never", "current"]}
    return model.predict(visits)


# [end]
def main() -> None:
    """Write the table, read it, train, predict."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/visits")
    write_visits(folder / "visits.csv")
    result = train(read(folder / "visits.csv"), folder / "run")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(repr(result))
    console.print(str(result.statement))
    console.print(score(read(folder / "visits.csv")))
    console.print(f"predicted: {', '.join(ask(folder / 'run'))}")


if __name__ == "__main__":
    main()
