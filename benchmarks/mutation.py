"""How many one-line mistakes the tests notice: mutants at drawn sites, each run against the tests that know its module.

    python benchmarks/mutation.py --seed 3 --count 84 --out mutants.jsonl

Sites are drawn by stratum (a few packages each, in fixed shares), then a module by its length, then a place in it. A
mutant changes one expression: a comparison, an operator, a constant, min and max, a condition, or it leaves out a call
that returns nothing. It is made in a copy of the tree; test files that name the module or the function are run in
batches, those that name them most often ahead, then the package's own folder of tests.

Verdicts:

- `killed`: a test failed, and ran again at once, by itself, without the mutant, it passed. A test that fails then, too,
  tells nothing: it is left out from there on, and the batch runs again. (A test that does not exist without the mutant,
  one of many that the mutated code makes, counts as one that passes.) Or a test hung: when the limit came it had been
  under way for a minute or more, and without the mutant it passes in a tenth of that time or less.
- `survived`: all batches ended, and no test failed.
- `cut off`: the limit or the end of the study came first, or a failed test could not be run again in time (`suspect`).
  It counts neither way. A further call with the same --out goes on with the batches that are missing.

On a machine where some tests fail as it is, `--baseline --deselect FILE` runs the whole suite and writes the names of
those into FILE; a study with `--deselect FILE` leaves them out, and adds those that it finds itself. The tree must be
the same from call to call.

Run it with a Python that has PyTorch, or mutants of the PyTorch learner meet none of its tests. A survivor may be
equivalent (no input tells it apart), or be noticed by a test elsewhere: run `make test` in the copy before calling it
one.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _mutation_reports

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
HANG = 60.0  # seconds under way after which a test may be said to hang
CONFIRM = 60.0  # seconds that a test gets to pass without the mutant
_NO_SUCH_TEST = 4  # pytest's status; such a test comes from what the mutant changed
LAST = 20.0  # seconds before the end from which on no mutant is begun


def sites(source: str) -> list[tuple[ast.AST, str, str]]:
    """Nodes that can be mutated, what replaces their text, and the function they are in."""
    places: list[tuple[ast.AST, str, str]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Raise | ast.JoinedStr) or function in SKIPPED:
            return  # words are tested as words, and have no places of their own
        if function and (text := _mutate(node)) is not None:
            places.append((node, text, function))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.arguments) and child not in getattr(node, "decorator_list", ()):
                visit(child, function)

    visit(ast.parse(source), "")
    return places


def _mutate(node: ast.AST) -> str | None:
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


def replace_text(source: str, node: ast.AST, text: str) -> str:
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
                    "source": replace_text(source, node, text),
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


def batches(files: list[str]) -> list[list[str]]:
    """Small ones ahead: most mutants fall to the files that name them most."""
    return [
        batch for batch in (files[:6], files[6:20], *(files[at : at + 30] for at in range(20, len(files), 30))) if batch
    ]


@dataclasses.dataclass
class Ended:
    """How a run of pytest ended: its status (None where it was stopped), and what it reported."""

    status: int | None
    reports: list[dict]
    at: float
    output: str

    def failures(self) -> list[dict]:
        """Reports of tests that failed, or of files that could not be collected, one each."""
        return list({report["test"]: report for report in self.reports if report.get("outcome") == "failed"}.values())

    def passes(self) -> dict[str, float]:
        """Tests that were run to their end and did not fail, with their seconds."""
        failed = {report["test"] for report in self.failures()}
        seconds = collections.Counter()
        over = set()
        for report in self.reports:
            seconds[report["test"]] += report.get("seconds", 0.0)
            if report.get("when") == "teardown":
                over.add(report["test"])
        return {test: seconds[test] for test in over - failed}

    def under_way(self) -> dict[str, float]:
        """Tests that had begun and not ended, with the seconds since."""
        begun = {report["test"]: report["began"] for report in self.reports if "began" in report}
        over = {report["test"] for report in self.reports if report.get("when") not in (None, "setup", "call")}
        return {test: self.at - began for test, began in begun.items() if test not in over}


class Lane:
    """A copy of the tree in which one pytest runs at a time."""

    def __init__(self, folder: Path, *, workers: int, deselected: set[str]) -> None:
        self.tree = folder / "tree"
        self.notes = folder / "notes"
        self.scratch = folder / "tmp"
        self.workers = workers
        self.deselected = deselected
        self.process: subprocess.Popen | None = None
        shutil.rmtree(folder, ignore_errors=True)
        self.plugins = self.notes / "plugins"  # alone in a folder: this one has modules that tests have, too
        self.plugins.mkdir(parents=True)
        shutil.copy2(_mutation_reports.__file__, self.plugins)
        for name in _tracked_files():
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.tree / name)
        (self.tree / "benchmarks" / "__init__.py").touch()  # so that no other package of that name comes first

    def pytest(self, *arguments: str, until: float, workers: int | None = None) -> Ended:
        """Stopped at the time `until`, with all processes of its group."""
        reports, deselected, output = self.notes / "reports", self.notes / "deselected", self.notes / "output"
        reports.write_text("")
        deselected.write_text("\n".join(sorted(self.deselected)))
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        marks = "not soak and not flower and not browser and not postgres" + " and not torch" * (not _has_torch())
        count = self.workers if workers is None else workers
        options = ["-q", "-p", "no:cacheprovider", "-p", "_mutation_reports", "-n", str(count), "-m", marks]
        places = [str(self.tree), str(self.plugins), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(places),
            "TMPDIR": str(self.scratch),
            _mutation_reports.REPORTS: str(reports),
            _mutation_reports.DESELECTED: str(deselected),
        }
        with output.open("w") as file:
            self.process = process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *arguments],
                cwd=self.tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            over = None
            try:
                while over is None and time.time() < until:
                    time.sleep(0.1)
                    over = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            finally:  # it is not waited for before, so that its number is still its own
                at = time.time()
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        reported = [json.loads(line) for line in reports.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return Ended(process.returncode if over else None, reported, at, output.read_text(errors="replace")[-2000:])

    @contextlib.contextmanager
    def apply_mutant(self, mutant: dict, turn: int) -> Iterator[None]:
        """The file's time is that of no other mutant: bytecode made for one is not taken for another."""
        file = self.tree / mutant["file"]
        original, before = file.read_text(), file.stat()
        file.write_text(mutant["source"])
        os.utime(file, (before.st_atime, int(before.st_mtime) + 1 + turn))
        try:
            yield
        finally:
            file.write_text(original)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    def stop(self) -> None:
        """End what runs in this lane."""
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def passes_unchanged(self, test: str, *, until: float) -> float | None:
        """Its seconds in the tree as it is; 0 if it does not exist there, None if it fails, infinite if cut off."""
        whole = "::" not in test  # a file that could not be collected
        ended = self.pytest(test, *(["--collect-only"] if whole else []), until=until, workers=0)
        if ended.status is None:
            return math.inf
        if whole:
            return 0.0 if ended.status == 0 else None
        return 0.0 if ended.status == _NO_SUCH_TEST else ended.passes().get(test)


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _tracked_files() -> list[str]:
    """What git tracks; without git, all files but those in caches and in hidden folders of other things."""
    command = ["git", "ls-files", "-z"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout:
            return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    names = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name in (".ci", ".github") or not (name.startswith(".") or name == "__pycache__")
        ]
        names += [str((Path(folder) / name).relative_to(ROOT)) for name in files]
    return names


def run(mutant: dict, lane: Lane, *, limit: float, end: float, turn: int) -> dict:
    """The mutant with its verdict; `batches` ended before, and those of an earlier call are not run again."""
    began = time.time()
    files = batches(test_files(mutant))
    done = mutant.get("batches", 0)
    left = limit
    cut_off = {"verdict": "cut off", "killed": None}
    outcome = None
    while outcome is None and done < len(files):
        batch = [file for file in files[done] if file not in lane.deselected]
        if not batch:
            done += 1
            continue
        started = time.time()
        stop = min(started + left, end)
        with lane.apply_mutant(mutant, turn):
            ended = lane.pytest("-x", *batch, until=stop)
        left -= time.time() - started
        if ended.failures():
            outcome = _judge_failures(lane, ended.failures(), end)
        elif ended.status in (0, 5):
            done += 1
        elif ended.status is None:
            outcome = _judge_hang(lane, ended, end) if stop < end else cut_off
        else:  # pytest itself broke: nothing is known
            outcome = {**cut_off, "said": ended.output}
        if outcome is None and done < len(files) and (left <= 0 or time.time() >= end):
            outcome = cut_off
    outcome = outcome or {"verdict": "survived", "killed": None}
    facts = {key: value for key, value in mutant.items() if key not in ("source", "batches")}
    return {**facts, **outcome, "batches": done, "of": len(files), "seconds": round(time.time() - began, 1)}


def _judge_failures(lane: Lane, failed: list[dict], end: float) -> dict | None:
    """The first of these tests that passes without the mutant killed it; None if all fail without it, too."""
    for report in failed[:5]:
        seconds = lane.passes_unchanged(report["test"], until=min(time.time() + CONFIRM, end))
        if seconds is not None and math.isinf(seconds):
            return {"verdict": "cut off", "killed": None, "suspect": report["test"], "said": report["said"][-300:]}
        if seconds is not None:
            return {"verdict": "killed", "killed": report["test"], "said": report["said"][-300:]}
        print(f"fails as it is, left out from here on: {report['test']}", flush=True)
        lane.deselected.add(report["test"])
    return None


def _judge_hang(lane: Lane, ended: Ended, end: float) -> dict:
    for test, waited in sorted(ended.under_way().items(), key=lambda item: -item[1]):
        if waited >= HANG:
            seconds = lane.passes_unchanged(test, until=min(time.time() + CONFIRM, end))
            if seconds is not None and seconds * 10 <= waited:
                reason = f"under way for {waited:.0f} s, {seconds:.1f} s without the mutant"
                return {"verdict": "killed", "killed": test, "said": reason}
    return {"verdict": "cut off", "killed": None}


def study(mutants: list[dict], lanes: list[Lane], out: Path, *, limit: float, end: float) -> None:
    """Each lane takes the next mutant until none is left, or too little time; results are written as they come."""
    waiting = collections.deque(enumerate(mutants))
    lock = threading.Lock()

    def work(lane: Lane) -> None:
        while time.time() < end - LAST:
            try:
                turn, mutant = waiting.popleft()
            except IndexError:
                return
            outcome = run(mutant, lane, limit=limit, end=end, turn=turn)
            with lock:
                with out.open("a") as file:
                    file.write(json.dumps(outcome) + "\n")
                place = f"{outcome['file']}:{outcome['line']}"
                print(
                    f"{outcome['verdict']:8} {outcome['seconds']:5.0f} s {place} {outcome['killed'] or ''}", flush=True
                )

    with concurrent.futures.ThreadPoolExecutor(len(lanes)) as pool:
        try:
            for done in [pool.submit(work, lane) for lane in lanes]:
                done.result()
        except KeyboardInterrupt:
            for lane in lanes:
                lane.stop()
            os._exit(130)  # results are written
    print(f"{len(waiting)} not begun" if waiting else "all begun", flush=True)


def baseline(lane: Lane, *, until: float, deselect: Path) -> int:
    """The whole suite as it is; tests that fail, and those that have not ended after a minute, into the file."""
    ended = lane.pytest(
        "tests", "--dist", "worksteal", "--continue-on-collection-errors", "-rfE", "--durations", "20", until=until
    )
    print((lane.notes / "output").read_text(errors="replace"))
    for report in ended.failures():
        print(f"--- {report['test']} ({report['when']})\n{report['said']}\n")
    hung = {test for test, waited in ended.under_way().items() if waited >= HANG}
    dropped = sorted({report["test"] for report in ended.failures()} | hung)
    deselect.write_text("".join(f"{test}\n" for test in dropped))
    passed = ended.passes()
    print(
        f"{len(passed)} passed or skipped, {len(dropped)} left out",
        "all were run" if ended.status is not None else "stopped",
    )
    return 0 if len(passed) > 3 * len(dropped) else 1


def earlier(out: Path) -> dict[tuple[str, int], dict]:
    """The last word on each mutant of an earlier call."""
    lines = map(json.loads, out.read_text().splitlines()) if out.exists() else ()
    return {(outcome["file"], outcome["line"]): outcome for outcome in lines}


def main() -> int:
    """Draw, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--count", type=int, default=84)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tree", type=Path, help="where the copies are made", default=ROOT.parent / "mutants")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one mutant, or for the baseline")
    parser.add_argument("--workers", type=int, default=2, help="of pytest, in each lane")
    parser.add_argument("--lanes", type=int, default=1, help="mutants at a time")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds after which the study ends")
    parser.add_argument("--deselect", type=Path, help="tests to leave out, one name a line")
    parser.add_argument("--baseline", action="store_true", help="run all tests as they are, write those that fail")
    parser.add_argument("--strata", nargs="*", default=list(STRATA))
    parser.add_argument("--list", action="store_true", help="draw only")
    arguments = parser.parse_args()
    end = time.time() + arguments.until
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.baseline:
        if arguments.deselect is None:
            parser.error("expected --deselect, the file that --baseline writes, got none")
        lane = Lane(arguments.tree / "0", workers=arguments.workers, deselected=set())
        return baseline(lane, until=min(time.time() + arguments.limit, end), deselect=arguments.deselect)
    if arguments.seed is None or (arguments.out is None and not arguments.list):
        parser.error("expected --seed and --out (or --list), or --baseline")
    mutants = [mutant for mutant in draw(arguments.seed, arguments.count) if mutant["stratum"] in arguments.strata]
    mutants.sort(key=lambda mutant: arguments.strata.index(mutant["stratum"]))
    before = earlier(arguments.out) if arguments.out else {}
    known = [before.get((mutant["file"], mutant["line"])) for mutant in mutants]
    cut_off = [
        {**mutant, "batches": outcome["batches"]}
        for mutant, outcome in zip(mutants, known, strict=True)
        if outcome is not None and outcome["verdict"] == "cut off"
    ]
    mutants = [mutant for mutant, outcome in zip(mutants, known, strict=True) if outcome is None] + cut_off
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant['file']}:{mutant['line']} {mutant['before']!r} -> {mutant['after']!r}")
        return 0
    if arguments.strata == list(STRATA):  # a study that ends early has then met all strata alike
        random.Random(arguments.seed).shuffle(mutants)
        mutants.sort(key=lambda mutant: "batches" in mutant)
    deselected = set(arguments.deselect.read_text().splitlines()) if arguments.deselect else set()
    lanes = [
        Lane(arguments.tree / str(number), workers=arguments.workers, deselected=deselected)
        for number in range(arguments.lanes)
    ]
    study(mutants, lanes, arguments.out, limit=arguments.limit, end=end)
    if arguments.deselect:
        arguments.deselect.write_text("".join(f"{test}\n" for test in sorted(deselected)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
