"""How often the intervals of private scores cover the score of all people, and how wide they are.

Each table has a population: everybody in it. A model is trained once, with privacy, on people of its own. Then, again
and again, so many people are drawn from the population, with replacement, and their scores are released as a run with
`evaluate="private"` releases them: the same vectors, protocol, noise and intervals. The score of the population is
known exactly, with every person counting the same. An interval should cover it in 95 % of the runs or more.

    python benchmarks/evaluation.py [--runs 200] [--eps 2] [--protocol dp_fl] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import dovetail
from dovetail.data import Dataset, resolve
from dovetail.evaluation import People
from dovetail.experiment import config as configs
from dovetail.experiment import scores as private
from dovetail.experiment import training
from dovetail.experiment.preparation import prepare
from dovetail.protocols import PROTOCOLS
from dovetail.randomness import Randomness

DELTA = 1e-5
POPULATION = 20_000  # people of a table that is made here
HELD_OUT = (280, 2500)


def visits(rng: np.random.Generator, people: int, *, base: float, slope: float) -> tuple[dict, str, dict]:
    """One to six visits of each person, who is like itself; a share `base` of them about is ill."""
    rows = rng.integers(1, 7, people)
    person = np.repeat(np.arange(people), rows)
    own = rng.normal(size=people)
    age = np.clip(55 + 12 * own[person] + rng.normal(0, 6, len(person)), 0, 100)
    pressure = np.clip(125 + 10 * rng.normal(size=people)[person] + rng.normal(0, 12, len(person)), 80, 200)
    risk = slope * ((age - 55) / 15 + (pressure - 125) / 25) + np.log(base / (1 - base))
    ill = rng.random(len(person)) < 1 / (1 + np.exp(-risk))
    bounds = {"age": (0, 100), "pressure": (80, 200)}
    columns = {"person": person, "age": age, "pressure": pressure, "target": np.where(ill, "yes", "no")}
    return columns, "classes", {"bounds": bounds, "classes": ["no", "yes"]}


def charges(rng: np.random.Generator, people: int, *, heavy: bool = False) -> tuple[dict, str, dict]:
    """A number for each of one to three stays of a person; with `heavy`, errors of a Student law with five degrees."""
    rows = rng.integers(1, 4, people)
    person = np.repeat(np.arange(people), rows)
    own = rng.normal(size=people)
    days = np.clip(10 + 4 * own[person] + rng.normal(0, 2, len(person)), 0, 40)
    age = np.clip(55 + 12 * rng.normal(size=people)[person], 0, 100)
    noise = rng.standard_t(5, len(person)) if heavy else rng.normal(0, 1.3, len(person))
    charge = np.clip(8 + 0.6 * days + 0.05 * age + noise, 0, 50)
    bounds = {"days": (0, 40), "age": (0, 100), "target": (0, 50)}
    return {"person": person, "days": days, "age": age, "target": charge}, "number", {"bounds": bounds}


TABLES: dict[str, Callable[[np.random.Generator, int], tuple[dict, str, dict]]] = {
    "visits": lambda rng, people: visits(rng, people, base=0.4, slope=1.0),
    "visits, 7 % ill": lambda rng, people: visits(rng, people, base=0.06, slope=1.0),
    "charges": charges,
    "charges, heavy tails": lambda rng, people: charges(rng, people, heavy=True),
}


def read(columns: dict, kind: str, how: dict) -> Dataset:
    """A table as a dataset, a fifth of whose people are held out."""
    return Dataset.from_pandas(
        {name: values.tolist() for name, values in columns.items()},
        user="person",
        target="target",
        kind=kind,
        test_share=0.2,
        **how,
    )


def population(name: str) -> tuple[Dataset, Dataset]:
    """What a model is trained on, and everybody that people to be held out are drawn from, as test records."""
    if name == "digits":
        data = resolve("digits").load(folder=None)
        return data, data
    made = TABLES[name]
    train = read(*made(np.random.default_rng(0), 1400))
    everybody = read(*made(np.random.default_rng(1), POPULATION))
    return train, everybody


def study(name: str, *, people: int, runs: int, eps: float, protocol: str) -> list[dict]:
    """A row for each score of a table: its true value, coverage, and the half width of its intervals."""
    train, everybody = population(name)
    settings = {"cohort.rounds": 30, "task.partition": "one-record"} if name == "digits" else {}
    result = dovetail.train(train, eps=eps, delta=DELTA, settings=settings)
    inputs, labels = everybody.test_inputs, everybody.test_labels
    outputs = result.predictor.logits(inputs)
    owner = np.arange(len(labels)) if name == "digits" else everybody.held_out_people.people
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner)
    starts = np.cumsum(counts) - counts
    true = _true_scores(outputs, everybody, owner)

    release = _release(train, people=people, eps=eps, protocol=protocol)
    rng = np.random.default_rng(2)
    hits = dict.fromkeys(true, 0)
    widths: dict[str, list[float]] = {score: [] for score in true}
    for _ in range(runs):
        drawn = rng.integers(0, len(counts), people)
        rows = np.concatenate([order[starts[one] : starts[one] + counts[one]] for one in drawn])
        places = np.repeat(np.arange(people), counts[drawn])
        chosen = _with_test(everybody, inputs[rows], labels[rows])
        found = private.PrivateScores(release=release, people=People(places, people), dataset=chosen).draw(
            outputs[rows], Randomness.from_os(0)
        )
        for score, value in true.items():
            low, high = (np.nan if end is None else end for end in found.intervals[score])
            hits[score] += not (low > value or high < value)
            widths[score].append((high - low) / 2)
    return [
        {
            "table": name,
            "people": people,
            "protocol": protocol,
            "eps": eps,
            "score": score,
            "true": true[score],
            "covered": hits[score] / runs,
            "half_width": float(np.nanmedian(widths[score])) if np.isfinite(widths[score]).any() else None,
            "runs": runs,
        }
        for score in true
    ]


def _with_test(data: Dataset, inputs: np.ndarray, labels: np.ndarray) -> Dataset:
    """The dataset with these test records."""
    return Dataset(
        inputs=data.inputs[:1],
        labels=data.labels[:1],
        test_inputs=inputs,
        test_labels=labels,
        num_classes=data.num_classes,
        target=data.target,
        recipe=data.recipe,
    )


def _release(train: Dataset, *, people: int, eps: float, protocol: str) -> private.Evaluation:
    """The evaluation that a run on this data would have with so many held-out people."""
    rows = np.arange(people) % len(train.test_labels)
    shaped = _with_test(train, train.test_inputs[rows], train.test_labels[rows])
    tree = {
        "task": {"name": "dataset", "evaluate": "private"},
        "protocol": {"name": protocol, "noise_multiplier": 100.0},
        "privacy": {"eps": eps, "delta": DELTA, "neighbors": PROTOCOLS[protocol].relation.value},
        "cohort": {"kind": "everyone", "rounds": 1},
    }
    doubled = Dataset(
        inputs=train.inputs[:20],
        labels=train.labels[:20],
        test_inputs=shaped.test_inputs,
        test_labels=shaped.test_labels,
        num_classes=train.num_classes,
        target=train.target,
        recipe=train.recipe,
    )
    plan = prepare(configs.parse(tree), task=training.task_of(doubled))
    if plan.scores is None:
        raise RuntimeError("the config asks for private scores, and the plan has none")
    return plan.scores.release


def _true_scores(outputs: np.ndarray, data: Dataset, owner: np.ndarray) -> dict[str, float]:
    """The scores of everybody, each person counting the same, without noise, bins or clipping."""
    weight = 1 / np.bincount(owner)[owner] / (owner.max() + 1)
    labels = data.test_labels
    if data.target == "number":
        predicted = np.clip(outputs.reshape(len(labels)), -1, 1)
        mse = float(weight @ (predicted - labels) ** 2)
        return {"r2": 1 - mse / float(weight @ (labels - weight @ labels) ** 2), "rmse": mse**0.5}
    right = np.argmax(outputs, axis=1) == labels
    true = {"accuracy": float(weight @ right)}
    if data.num_classes == 2:
        true["auc"] = _weighted_auc(outputs[:, 1] - outputs[:, 0], labels, weight)
    return true


def _weighted_auc(scores: np.ndarray, labels: np.ndarray, weight: np.ndarray) -> float:
    """The area under the ROC curve where records have weights; ties count half."""
    different, place = np.unique(scores, return_inverse=True)
    above = np.bincount(place, weight * (labels == 1), len(different))
    below = np.bincount(place, weight * (labels == 0), len(different))
    return float(above @ (np.cumsum(below) - below / 2) / (above.sum() * below.sum()))


def main() -> None:
    """Print a row for each table, number of people and score."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--eps", type=float, default=2.0)
    parser.add_argument("--protocol", default="dp_fl")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = []
    for name in (*TABLES, "digits"):
        for people in HELD_OUT:
            found += study(name, people=people, runs=chosen.runs, eps=chosen.eps, protocol=chosen.protocol)
            jax.clear_caches()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if chosen.json:
        console.print(json.dumps(found, indent=1))
        return
    table = Table("table", "held-out people", "score", "true", "covered", "half width", box=None)
    for row in found:
        half = "unbounded" if row["half_width"] is None else f"{row['half_width']:.3f}"
        table.add_row(
            row["table"], f"{row['people']:,}", row["score"], f"{row['true']:.3f}", f"{row['covered']:.1%}", half
        )
    console.print(table)


if __name__ == "__main__":
    main()
