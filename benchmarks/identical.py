"""Whether a change of the code left every number alone: to be recorded before a refactoring, and compared after.

    python benchmarks/identical.py record before.json
    python benchmarks/identical.py compare before.json

Asks the command line, which stays when modules move: `account`, `calibrate`, exact and counted audits, and trainings on
the bundled digits with seeded noise. A number is the same if it is the same float; a model, if all its bytes are.
Numbers that came or went are told, too. Other machines may compute other last digits: record on the one you compare on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from dovetail.cli import app

_CHANGES_ANYWAY = ("seconds", "bytes_per_second", "version")
_SHUFFLED = {
    "ss_simple": ["eps_local=0.5"],
    "ss_double": ["eps_local=0.5", "beta=0.2"],
    "ss_topk": ["eps_local=0.5", "k=2"],
    "privunit": ["eps_local=2"],
    "split_and_mix": ["noise_multiplier=2"],
    "binary_sum": ["eps_local=1"],
    "real_sum": ["eps_local=1"],
}
_PERSONAL = {name: ["budgets=uniform2", "budget_scale=1.0"] for name in ("apes", "s_apes", "unis", "pldp", "ldp_min")}
_NOISY = {
    "dp_fl": ["noise_multiplier=1.5"],
    "ldp_fl": ["noise_multiplier=1"],
    "central_sub": ["noise_multiplier=1", "items_per_subject=3", "batch=5", "sampling_rate=0.5"],
    "local_sub": ["noise_multiplier=1", "items_per_subject=3", "batch=5", "sampling_rate=0.5"],
    "fedavg": [],
}
_EVERY = {**_SHUFFLED, **_PERSONAL, **_NOISY}
_MORE = [
    ("ss_simple", ["eps_local=0.5", "levels=4", "randomizer=rr"]),
    ("ss_simple", ["eps_local=0.2", "randomizer=laplace"]),
    ("ss_double", ["eps_local=0.5", "inclusion=fixed-k"]),
    ("ss_topk", ["eps_local=0.5", "k=2", "decoys=2"]),
    ("apes", ["budgets=mixgauss1", "budget_scale=0.5"]),
    ("s_apes", ["budgets=uniform2", "budget_scale=1.0", "keep=0.5"]),
    ("real_sum", ["method=split", "noise_multiplier=2"]),
    ("ldp_fl", ["randomizer=laplace", "eps_local=1"]),
]


def _sets_noise(setting: str) -> bool:
    return setting.split("=")[0] in ("eps_local", "noise_multiplier", "budget_scale")


def _dim(name: str, size: int) -> int:
    return 1 if name in ("binary_sum", "real_sum") else size


def _sets(settings: list[str], prefix: str = "") -> list[str]:
    return [word for setting in settings for word in ("--set", prefix + setting)]


def accounts() -> Iterator[list[str]]:
    """Accounting questions."""
    for n, eps_local, delta in ((100, 0.5, 1e-4), (1000, 1.0, 1e-6), (10_000, 3.0, 1e-6), (10**6, 6.0, 1e-9)):
        yield ["account", "amplify", "--n", f"{n}", "--eps-local", f"{eps_local}", "--delta", f"{delta}"]
    sizes = ((50, 10, 1e-4, 1, 0), (2000, 100, 1e-5, 20, 0), (1000, 25, 1e-6, 3, 100))
    questions = [(name, settings, size) for name, settings in _EVERY.items() for size in sizes]
    questions += [(name, settings, size) for name, settings in _MORE for size in sizes[:2]]
    for name, settings, (n, size, delta, rounds, colluders) in questions:
        dim = _dim(name, size)
        options = ["--n", f"{n}", "--dim", f"{dim}", "--delta", f"{delta}", "--rounds", f"{rounds}"]
        options += ["--colluders", f"{colluders}"] if colluders else []
        yield ["account", "protocol", name, *options, *_sets(settings)]
    for name, settings in _EVERY.items():
        if name != "fedavg":
            free = [setting for setting in settings if not _sets_noise(setting)]
            yield [
                "calibrate",
                name,
                *f"--n 1000 --dim {_dim(name, 10)} --eps 1 --delta 1e-5 --rounds 5".split(),
                *_sets(free),
            ]


def audits() -> Iterator[list[str]]:
    """Attacks."""
    for name, settings in _EVERY.items():
        small = ["audit", name, "--n", "30", "--dim", f"{_dim(name, 4)}", "--delta", "1e-3", *_sets(settings)]
        for view in ("analyzer", "colluding"):
            yield [*small, "--trials", "0", "--view", view]
    for name in ("ss_simple", "dp_fl", "apes", "split_and_mix"):
        yield ["audit", name, "--n", "20", "--dim", "3", "--delta", "1e-2", "--trials", "300", *_sets(_EVERY[name])]


def trainings() -> Iterator[list[str]]:
    """Trainings of a few rounds."""
    everyone = ["cohort.kind=everyone", "cohort.rounds=3", "privacy.delta=1e-4", "task.users=300"]
    for name, settings in _EVERY.items():
        if name not in ("binary_sum", "real_sum"):
            own = [f"protocol.{setting}" for setting in settings if not setting.startswith("batch")]
            own += ["privacy.neighbors=add-remove"] if name.endswith("_sub") else []
            yield [*everyone, f"protocol.name={name}", *own]
    items = ["privacy.neighbors=add-remove", "protocol.items_per_subject=1", "task.partition=iid"]
    for name, more in {
        "central_sub": ["protocol.noise_multiplier=1", "protocol.sampling_rate=0.1", "privacy.unit=item"],
        "local_sub": ["protocol.noise_multiplier=1", "protocol.sampling_rate=0.3", "protocol.steps=2"],
    }.items():
        yield [*everyone, f"protocol.name={name}", *more, *items]
    dp_fl = ["cohort.kind=fixed", "cohort.size=150", *everyone[1:], "protocol.name=dp_fl"]
    dp_fl += ["protocol.noise_multiplier=1"]
    yield [*dp_fl, "client.update=fedavg", "client.epochs=2"]
    yield [*dp_fl, "client.update=fedprox", "client.mu=0.1"]
    yield [*dp_fl, "task.model=mlp"]
    yield [*dp_fl, "protocol.clip=adaptive"]
    yield [*dp_fl, "cohort.kind=poisson", "privacy.neighbors=add-remove"]
    yield [*dp_fl, "server.optimizer=adam", "server.learning_rate=0.05", "cohort.dropout=0.1"]
    yield [*dp_fl, "task.partition=dirichlet", "performance.chunk=40"]
    yield [*everyone, "protocol.name=ss_simple", "privacy.eps=2", "performance.fast=false"]
    yield [*everyone, "protocol.name=split_and_mix", "privacy.eps=2"]
    yield [
        "cohort.kind=disjoint",
        "cohort.size=100",
        *everyone[1:],
        "protocol.name=ss_topk",
        "privacy.eps=4",
        "protocol.k=20",
    ]


def ask_command(arguments: list[str]) -> Any:
    """What the command line answers, as JSON; a refusal is an answer, too."""
    done = CliRunner().invoke(app, [*arguments, "--json"])
    if isinstance(done.exception, ValueError | OSError):
        print(f"refused: {done.exception}", file=sys.stderr)
        return {"refused": 2}
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout)


def train_and_hash(overrides: list[str]) -> Any:
    """A training's numbers: metrics, all statements, and a hash of every array of the model."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        config = Path(folder) / "config.toml"
        config.write_text('noise = "seeded"\n[task]\nname = "digits"\nmodel = "logistic"\n')
        answer = ask_command(["run", str(config), *_sets(overrides), "--out", str(out)])
        if "refused" in answer:
            return answer
        with np.load(out / "model.npz") as model:
            hashes = {name: hashlib.sha256(model[name].tobytes()).hexdigest() for name in sorted(model.files)}
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        privacy = json.loads((out / "privacy.json").read_text())
    return {"model": hashes, "metrics": metrics, "privacy": privacy}


def numbers(answer: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every number of an answer by its place in it, exactly; and hashes."""
    if isinstance(answer, dict):
        for key, value in answer.items():
            if not any(word in key for word in _CHANGES_ANYWAY):
                yield from numbers(value, f"{path}/{key}")
    elif isinstance(answer, list):
        for index, value in enumerate(answer):
            yield from numbers(value, f"{path}/{index}")
    elif isinstance(answer, int | float) and not isinstance(answer, bool):
        yield path, float(answer).hex()
    elif path.startswith("/model/"):
        yield path, str(answer)


def everything() -> dict[str, dict[str, str]]:
    """All questions and the numbers of their answers."""
    logging.disable(logging.WARNING)
    asks = [(" ".join(question), lambda q=question: ask_command(q)) for question in (*accounts(), *audits())]
    asks += [("train " + " ".join(overrides), lambda o=overrides: train_and_hash(o)) for overrides in trainings()]
    answers = {}
    for index, (name, ask) in enumerate(asks):
        start = time.perf_counter()
        answers[name] = dict(numbers(ask()))
        took = time.perf_counter() - start
        print(f"{index + 1}/{len(asks)} {took:5.1f} s {len(answers[name]):4d} numbers  {name}", file=sys.stderr)
    return answers


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> Iterator[str]:
    """A line for every number that is not what it was."""
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, {}), after.get(name, {})
        for path in dict.fromkeys([*old, *new]):
            if old.get(path) != new.get(path):
                yield f"{name} {path}: {_readable(old.get(path))} -> {_readable(new.get(path))}"


def _readable(number: str | None) -> str:
    if number is None:
        return "nothing"
    return repr(float.fromhex(number)) if "0x" in number or number in ("inf", "nan") else number


def main() -> None:
    """Record, or compare and exit with status 1 where a number differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    before = json.loads(arguments.file.read_text()) if arguments.what == "compare" else None
    after = everything()
    count = sum(map(len, after.values()))
    if before is None:
        arguments.file.write_text(json.dumps(after, indent=1))
        print(f"recorded {count} numbers of {len(after)} questions")
        return
    lines = list(differences(before, after))
    came = sum(": nothing -> " in line for line in lines)
    print("\n".join([*lines, f"{count} numbers of {len(after)} questions: {len(lines) - came} differ, {came} are new"]))
    sys.exit(len(lines) > came)


if __name__ == "__main__":
    main()
