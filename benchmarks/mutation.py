"""How many one-line mistakes the tests notice: mutants at drawn sites, each run against the tests that know its module.

    python benchmarks/mutation.py --seed 3 --count 84 --out mutants.jsonl

Sites are drawn by stratum (a few packages each, in fixed shares), then a module by its length, then a place in it. A
mutant changes one expression: a comparison, an operator, a constant, min and max, a condition, or it leaves out a call
that returns nothing. It is made in a copy of the tree; test files that name the module or the function are run first,
those that name them most often ahead, then the package's own folder of tests. `killed` says by which test.

Run it with a Python that has PyTorch, or mutants of the PyTorch learner meet none of its tests. A survivor may be
equivalent (no input tells it apart), or be noticed by a test elsewhere: run `make test` in the copy before calling it
one.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STRATA = {  # packages, and their share of 84 mutants
    "mechanisms": (("mechanisms",), 9),
    "protocols": (("protocols",), 9),
    "accounting": (("accounting",), 11),
    "parties": (("parties",), 16),
    "guarantee and experiment": (("guarantee", "experiment", "sampling"), 10),
    "audit": (("audit",), 7),
    "vdaf": (("vdaf",), 6),
    "engine and learners": (("engine", "learners"), 9),
    "data": (("data", "features"), 7),
}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor"}
SKIPPED = ("__repr__", "_repr_html_", "__str__")


def sites(source: str) -> list[tuple[ast.AST, str, str]]:
    """Nodes that can be mutated, what replaces their text, and the function they are in."""
    found: list[tuple[ast.AST, str, str]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Raise | ast.JoinedStr) or function in SKIPPED:
            return  # words are tested as words, and have no places of their own
        if function and (text := _mutated(node)) is not None:
            found.append((node, text, function))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.arguments) and child not in getattr(node, "decorator_list", ()):
                visit(child, function)

    visit(ast.parse(source), "")
    return found


def _mutated(node: ast.AST) -> str | None:
    inner: Any = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            inner.ops = [SWAPS[type(op)]()]
        case ast.BinOp(op=op) if type(op) in SWAPS:
            inner.op = SWAPS[type(op)]()
        case ast.BoolOp(op=op):
            inner.op = SWAPS[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            inner = inner.operand
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            inner.func.id = NAMES[name]
        case ast.Call(func=ast.Attribute(attr=name)) if name in NAMES:
            inner.func.attr = NAMES[name]
        case ast.Constant(value=bool(value)):
            return repr(not value)
        case ast.Constant(value=int(value)):
            return repr(value + 1)
        case ast.Constant(value=float(value)):
            return repr(value * 1.25 if value else 1.0)
        case ast.Expr(value=ast.Call()):
            return "pass"
        case _:
            return None
    return f"({ast.unparse(inner)})"


def replaced(source: str, node: ast.AST, text: str) -> str:
    """The source with this node's text replaced."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    whole = source.encode()
    return (whole[:first] + text.encode() + whole[last:]).decode()


def draw(seed: int, count: int) -> list[dict]:
    """Mutants by stratum, each at another line."""
    rng, mutants = random.Random(seed), []
    shares = sum(share for _, share in STRATA.values())
    for stratum, (packages, share) in STRATA.items():
        files = [path for package in packages for path in sorted((ROOT / "dovetail" / package).rglob("*.py"))]
        files = [path for path in files if path.name != "__init__.py" or path.parent.name in packages]
        weights, chosen = [len(path.read_text().splitlines()) for path in files], set()
        while len(chosen) < round(share * count / shares):
            path = rng.choices(files, weights)[0]
            source = path.read_text()
            places = sites(source)
            if not places:
                continue
            node, text, function = rng.choice(places)
            if (path, node.lineno) in chosen:
                continue
            chosen.add((path, node.lineno))
            mutants.append(
                {
                    "stratum": stratum,
                    "file": str(path.relative_to(ROOT)),
                    "line": node.lineno,
                    "function": function,
                    "before": ast.get_source_segment(source, node),
                    "after": text,
                    "source": replaced(source, node, text),
                }
            )
    return mutants


def test_files(mutant: dict) -> list[str]:
    """Test files that name the module or the function, those that do it most often first; then the package's folder."""
    parts = Path(mutant["file"]).with_suffix("").parts
    module, package = parts[-1].strip("_"), parts[1]
    words = {module if module != "init" else parts[-2], mutant["function"].strip("_")} - {""}
    pattern = re.compile(r"\b_*(" + "|".join(map(re.escape, words)) + r")\b")
    counted = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        hits = len(pattern.findall(path.read_text())) + 3 * (path.parent.name == package)
        if hits:
            counted[str(path.relative_to(ROOT))] = hits
    return sorted(counted, key=counted.get, reverse=True)


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def run(mutant: dict, tree: Path, *, limit: float, workers: int) -> dict:
    """The mutant with what killed it, if anything did."""
    file = tree / mutant["file"]
    original = file.read_text()
    began, files = time.time(), test_files(mutant)
    file.write_text(mutant["source"])
    marks = "not soak and not flower and not browser and not postgres" + " and not torch" * (not _has_torch())
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", str(workers), "-p", "no:cacheprovider", "-m", marks]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    killed, left = None, limit
    try:
        for batch in (files[:6], files[6:20], files[20:]):
            if not batch or left <= 0:
                continue
            try:
                done = subprocess.run(
                    [*command, *batch],
                    cwd=tree,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=left,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                killed = None if batch == files[20:] else killed
                break
            if done.returncode not in (0, 5):
                named = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                killed = named[0] if named else done.stdout[-200:]
                break
            left = limit - (time.time() - began)
    finally:
        file.write_text(original)
    told = {key: value for key, value in mutant.items() if key != "source"}
    return {**told, "killed": killed, "seconds": round(time.time() - began, 1)}


def main() -> None:
    """Draw, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=84)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tree", type=Path, help="where the copy is made", default=ROOT.parent / "mutants")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strata", nargs="*", default=list(STRATA))
    parser.add_argument("--list", action="store_true", help="draw only")
    asked = parser.parse_args()
    mutants = [mutant for mutant in draw(asked.seed, asked.count) if mutant["stratum"] in asked.strata]
    mutants.sort(key=lambda mutant: asked.strata.index(mutant["stratum"]))
    if asked.out.exists():  # go on where an earlier study ended
        done = {(found["file"], found["line"]) for found in map(json.loads, asked.out.read_text().splitlines())}
        mutants = [mutant for mutant in mutants if (mutant["file"], mutant["line"]) not in done]
    if asked.list:
        for mutant in mutants:
            print(f"{mutant['file']}:{mutant['line']} {mutant['before']!r} -> {mutant['after']!r}")
        return
    shutil.rmtree(asked.tree, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in filter(None, listed):
        (asked.tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, asked.tree / name)
    for mutant in mutants:
        found = run(mutant, asked.tree, limit=asked.limit, workers=asked.workers)
        with asked.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        fate = "killed  " if found["killed"] else "SURVIVED"
        print(f"{fate} {found['seconds']:5.0f} s {found['file']}:{found['line']}", flush=True)


if __name__ == "__main__":
    main()
