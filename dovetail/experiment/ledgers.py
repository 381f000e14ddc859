"""The ledger of what all runs on the same people have spent together: a file that the data's owner keeps.

A ledger is a JSON file: entries that carry the hash of the one before, so that one that was changed is noticed. It is
replaced as a whole, under a lock, and is on disk before a method returns. It is named by the data's fingerprint under
the owner's key (`spending`), or by its user. Who has neither key nor data learns from it how much was spent, when, and
by which protocols, and nothing of a record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dovetail import _validate
from dovetail.files import lock, write_atomically
from dovetail.guarantee import Record
from dovetail.guarantee.across import RunSpending, compose_runs, compose_runs_fixed_beforehand
from dovetail.numbers import at_least, at_most
from dovetail.statements import Statement

__all__ = [
    "VARIABLE",
    "Ceiling",
    "CeilingReached",
    "LedgerRun",
    "SpendingLedger",
    "Together",
    "find_ledgers",
    "ledger_folder",
    "ledger_of",
    "parse_ceiling",
    "resolve_ledger",
    "utc_timestamp",
]

VARIABLE = "DOVETAIL_LEDGERS"
_FORMAT = 1
_PREFIX = "people-"
_CEILING_DELTA = 1e-4  # of a ceiling that names none: ten runs at the default delta
_WAIT = 120.0  # seconds for another process to let go of the ledger


class CeilingReached(ValueError):  # noqa: N818 - a refusal, not a mistake
    """A run that would bring what was spent on the same people above a ceiling."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What all runs on the same people together may spend at most."""

    eps: float
    delta: float = _CEILING_DELTA

    def __post_init__(self) -> None:
        _validate.positive(ceiling=self.eps)
        _validate.in_open_interval(0, 1, ceiling_delta=self.delta)

    def allows(self, spent: Statement) -> bool:
        """Whether a total is within the ceiling."""
        return spent.eps <= self.eps and spent.delta <= self.delta

    def __str__(self) -> str:
        return f"({self.eps:g}, {self.delta:g})"


def parse_ceiling(value: float | str | Sequence[float] | Ceiling) -> Ceiling:
    """A ceiling from an eps, a pair (eps, delta), or the text of either: "8" or "8,1e-5"."""
    if isinstance(value, Ceiling):
        return value
    try:
        numbers = [float(part) for part in (value.split(",") if isinstance(value, str) else _as_list(value))]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(f"expected a ceiling as an eps, or as eps and delta such as 8,1e-5, got {value!r}")
    return Ceiling(**dict(zip(("eps", "delta"), numbers, strict=False)))


def _as_list(value: float | Sequence[float]) -> list[float]:
    return list(value) if isinstance(value, Sequence) else [value]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry: the ledger is opened, a run reserves, is settled or gives back, or a ceiling is set.

    `people` is the keyed fingerprint of the people that the ledger, or a run, is about; None where it is not known.
    """

    kind: Literal["open", "reserve", "settle", "return", "ceiling"]
    time: str
    run: str = ""
    what: str = ""
    task: str = ""
    protocol: str = ""
    folder: str | None = None
    people: str | None = None
    record: dict[str, Any] | None = None
    statement: dict[str, Any] | None = None
    eps: float | None = None
    delta: float | None = None
    hash: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerRun:
    """One run as a ledger has it: what it spent or, while it has not ended, what it has reserved."""

    id: str
    time: str  # when it began, in UTC
    what: str  # "run", "tuning" or "audit"
    task: str
    protocol: str
    folder: str | None
    people: str | None
    ended: bool
    spending: RunSpending

    def to_json(self) -> dict[str, Any]:
        """The run as plain data, for a line of `dovetail runs --spent`."""
        reason = self.spending.reason_without_bound
        return {
            "run": self.id,
            "time": self.time,
            "what": self.what,
            "task": self.task,
            "protocol": self.protocol,
            "folder": self.folder,
            "ended": self.ended,
            "spent": self.spending.statement.to_json(),
            **({} if reason is None else {"without_bound": reason}),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Together:
    """What all runs of a ledger have spent together.

    `spent` are the statements of the runs that promise something: one, or one for each unit where they protect
    different ones; `without_bound` says of every other run why it promises nothing.
    """

    ledger: str
    head: str  # the hash of the ledger's last entry
    runs: int
    spent: tuple[Statement, ...]
    without_bound: tuple[str, ...] = ()
    ceiling: Ceiling | None = None

    @property
    def sentence(self) -> str:
        """In one line: "on these people 2 runs together: (3.1, 2e-05)-DP per user"."""
        if self.runs == 0:
            return "on these people no run has spent anything yet"
        counted = "1 run so far" if self.runs == 1 else f"{self.runs} runs together"
        totals = ", ".join(_total_in_short(statement) for statement in self.spent)
        if self.without_bound:
            some = f"{len(self.without_bound)} of them promise{'s' * (len(self.without_bound) == 1)} nothing"
            others = f"; the other{'s' * (self.runs - len(self.without_bound) > 1)}: {totals}" if totals else ""
            return f"on these people {counted}: no guarantee, for {some}{others}"
        apart = " (for different units, which do not add up)" if len(self.spent) > 1 else ""
        return f"on these people {counted}: {totals}{apart}"

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `privacy.json` has it under "across_runs"."""
        return {
            "sentence": self.sentence,
            "ledger": self.ledger,
            "head": self.head,
            "runs": self.runs,
            "spent": [statement.to_json() for statement in self.spent],
            "without_bound": list(self.without_bound),
            "ceiling": None if self.ceiling is None else dataclasses.asdict(self.ceiling),
        }


def _total_in_short(statement: Statement) -> str:
    """A total in few words: "(3.1, 2e-05)-DP per user"."""
    return f"({at_most(statement.eps)}, {at_most(statement.delta)})-DP per {statement.unit.value}"


class SpendingLedger:
    """The ledger of what all runs on the same people have spent, in a file.

    Arguments:
        path: the file; it is made by the first run.
        people: the keyed fingerprint of the people that it is about; None for one that is named by its user.

    Guarantees:
        An entry is on disk before a method returns, and two processes never write at once.
        A file in which an entry was changed, removed from the middle or inserted is refused, and so is one that is no
        ledger. One that was set back to an older copy as a whole is not noticed: keep its last hash.
    """

    def __init__(self, path: Path, *, people: str | None = None) -> None:
        self.path = path
        self._people = people

    @property
    def name(self) -> str:
        """What messages call it: the file's name, by which `dovetail runs --ledger` finds an automatic one."""
        return self.path.name

    @property
    def exists(self) -> bool:
        """Whether a run has written it."""
        return self.path.exists()

    def runs(self) -> list[LedgerRun]:
        """All runs, in the order in which they began; without those that gave back all that they had reserved."""
        return _runs_of(self._read_entries())

    @property
    def ceiling(self) -> Ceiling | None:
        """The ceiling in the ledger, if one was set."""
        return _ceiling_of(self._read_entries())

    def total_spent(self) -> Together:
        """What all runs have spent together."""
        entries = self._read_entries()
        return self._add_up_runs(entries, _runs_of(entries))

    def total_if_fixed(self) -> Statement | None:
        """What they have spent together if all that they spent was fixed beforehand; None where that says no more."""
        return compose_runs_fixed_beforehand(
            [run for each in self.runs() if (run := each.spending).reason_without_bound is None]
        )

    def total_with_run(self, run: str, spending: RunSpending) -> Together:
        """What all runs have spent together once this run is settled at `spending`; nothing is written."""
        entries = self._read_entries()
        runs = [dataclasses.replace(each, spending=spending) if each.id == run else each for each in _runs_of(entries)]
        return self._add_up_runs(entries, runs)

    def set_ceiling(self, ceiling: Ceiling) -> None:
        """Set what all runs together may spend; the next run that would exceed it is refused."""
        with self._append_entries() as entries:
            entries.append(_Entry(kind="ceiling", time=utc_timestamp(), eps=ceiling.eps, delta=ceiling.delta))

    def reserve(self, run: LedgerRun, *, ceiling: Ceiling | None = None) -> None:
        """Reserve what a run may spend, before its first round; reserving the same again changes nothing.

        Arguments:
            ceiling: one that the run brings, beside that of the ledger.

        Raises `CeilingReached`, and writes nothing, if the run would exceed a ceiling.
        """
        with self._append_entries() as entries:
            runs = _runs_of(entries)
            earlier = next((each for each in runs if each.id == run.id), None)
            if earlier is not None and earlier.spending.record == run.spending.record:
                return
            others = [each for each in runs if each.id != run.id]
            for limit in (_ceiling_of(entries), ceiling):
                if limit is not None:
                    self._refuse_beyond_ceiling(limit, others, run)
            entries.append(_make_entry("reserve", run, run.spending))

    def settle(self, run: str, spending: RunSpending) -> None:
        """End a run: what it is charged takes the place of what it had reserved. Saying it again changes nothing."""
        with self._append_entries() as entries:
            earlier = next((each for each in _runs_of(entries) if each.id == run), None)
            if earlier is None:
                raise ValueError(f"the run {run} has reserved nothing in the ledger {str(self.path)!r}")
            if not earlier.ended:
                entries.append(_make_entry("settle", earlier, spending))

    def give_back(self, run: str) -> None:
        """Give back all that a run has reserved, of which not even the first round began."""
        with self._append_entries() as entries:
            if any(each.id == run and not each.ended for each in _runs_of(entries)):
                entries.append(_Entry(kind="return", time=utc_timestamp(), run=run))

    def _refuse_beyond_ceiling(self, ceiling: Ceiling, others: Sequence[LedgerRun], run: LedgerRun) -> None:
        """Raise `CeilingReached` if this run, after the others, would exceed the ceiling; says what is left."""
        where = f"the ceiling {ceiling} on what all runs on these people spend together (ledger {str(self.path)!r})"
        for each in (*others, run):
            if (reason := each.spending.reason_without_bound) is not None:
                whose = "this run" if each is run else f"the run of {each.time}"
                raise CeilingReached(f"{whose} promises nothing, and so cannot stay below {where}: {reason}")
        spent = compose_runs([each.spending for each in others]) if others else ()
        total = compose_runs([each.spending for each in (*others, run)])
        if len(total) > 1:
            raise CeilingReached(
                f"this run protects another unit than earlier runs, so that what they spend is no one number to "
                f"compare with {where}: give it a ledger of its own"
            )
        if ceiling.allows(total[0]):
            return
        left = max(0.0, ceiling.eps - (spent[0].eps if spent else 0.0))
        count = f"{len(others)} run{'s' * (len(others) != 1)}"
        before = f"{count} spent {_total_in_short(spent[0])}" if spent else "nothing was spent before"
        raise CeilingReached(
            f"this run asks for {_total_in_short(run.spending.statement)} and would bring the total to "
            f"{_total_in_short(total[0])}, above {where}: {before}, and eps {at_least(left)} is left"
        )

    def _add_up_runs(self, entries: Sequence[_Entry], runs: Sequence[LedgerRun]) -> Together:
        """What these runs have spent together."""
        spending = [run.spending for run in runs]
        bounded = [run for run in spending if run.reason_without_bound is None]
        return Together(
            ledger=self.name,
            head=entries[-1].hash if entries else "",
            runs=len(runs),
            spent=compose_runs(bounded) if bounded else (),
            without_bound=tuple(reason for run in spending if (reason := run.reason_without_bound) is not None),
            ceiling=_ceiling_of(entries),
        )

    @contextlib.contextmanager
    def _append_entries(self) -> Iterator[list[_Entry]]:
        """The entries, to be appended to; what was appended is on disk when the block ends, one process at a time."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock(self.path.with_name(f".{self.path.name}.lock"), wait=_WAIT))
            except BlockingIOError as error:
                raise ValueError(f"another process holds the ledger {str(self.path)!r}: try again later") from error
            before = self._read_entries()
            entries = list(before or [_Entry(kind="open", time=utc_timestamp(), people=self._people)])
            length = len(entries)
            yield entries
            if len(entries) > length:
                self._write_entries(entries)

    def _write_entries(self, entries: list[_Entry]) -> None:
        """Replace the file; entries without a hash get theirs."""
        head = ""
        for number, entry in enumerate(entries):
            entries[number] = msgspec.structs.replace(entry, hash=_hash_entry(head, entry))
            head = entries[number].hash
        lines = ",\n".join(msgspec.json.encode(entry).decode() for entry in entries)
        mode = stat.S_IMODE(self.path.stat().st_mode) if self.exists else 0o600
        write_atomically(self.path, f'{{"format": {_FORMAT}, "entries": [\n{lines}\n]}}\n'.encode(), mode=mode)

    def _read_entries(self) -> list[_Entry]:
        """All entries; none where there is no file. Refuses a file that is no ledger, or was changed."""
        remedy = "so what was spent is not known: restore it from a backup"
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        try:
            data = msgspec.json.decode(content)
            found = data["format"]
            entries = msgspec.convert(data["entries"], list[_Entry]) if found == _FORMAT else []
        except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"{str(self.path)!r} is not a ledger of spending, or is damaged, {remedy}") from error
        if found != _FORMAT:
            raise ValueError(f"the ledger {str(self.path)!r} has format {found!r}, and this version reads {_FORMAT}")
        head = ""
        for number, entry in enumerate(entries):
            if entry.hash != _hash_entry(head, entry):
                raise ValueError(f"the ledger {str(self.path)!r} was changed at entry {number}, {remedy}")
            head = entry.hash
        if not entries or entries[0].kind != "open" or (self._people and entries[0].people != self._people):
            raise ValueError(f"{str(self.path)!r} is not the ledger of these people, {remedy}")
        return entries


def _hash_entry(previous_hash: str, entry: _Entry) -> str:
    """SHA-256 of the hash of the entry before and of this entry, in hexadecimal digits."""
    data = msgspec.to_builtins(msgspec.structs.replace(entry, hash=""))
    body = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(previous_hash.encode() + body.encode()).hexdigest()


def _make_entry(kind: Literal["reserve", "settle"], run: LedgerRun, spending: RunSpending) -> _Entry:
    """The entry by which a run reserves or is settled."""
    return _Entry(
        kind=kind,
        time=utc_timestamp(),
        run=run.id,
        what=run.what,
        task=run.task,
        protocol=run.protocol,
        folder=run.folder,
        people=run.people,
        record=None if spending.record is None else spending.record.to_json(),
        statement=spending.statement.to_json(),
    )


def _runs_of(entries: Sequence[_Entry]) -> list[LedgerRun]:
    """The runs that these entries leave, each as its last entry has it, and with the time of its first."""
    began: dict[str, str] = {}
    last: dict[str, _Entry] = {}
    for entry in entries:
        if entry.kind in ("reserve", "settle"):
            began.setdefault(entry.run, entry.time)
            last[entry.run] = entry
        elif entry.kind == "return":
            last.pop(entry.run, None)
            began.pop(entry.run, None)
    return [
        LedgerRun(
            id=entry.run,
            time=began[entry.run],
            what=entry.what,
            task=entry.task,
            protocol=entry.protocol,
            folder=entry.folder,
            people=entry.people,
            ended=entry.kind == "settle",
            spending=_spending_of(entry),
        )
        for entry in sorted(last.values(), key=lambda entry: list(began).index(entry.run))
    ]


def _spending_of(entry: _Entry) -> RunSpending:
    """What an entry says was spent; without the rounds where they are of a protocol whose code is not there."""
    record = None
    with contextlib.suppress(ValueError):
        record = Record.from_json(entry.record or {})
    return RunSpending(statement=Statement.from_json(entry.statement or {}), record=record)


def _ceiling_of(entries: Sequence[_Entry]) -> Ceiling | None:
    """The ceiling that was set last."""
    found = next((entry for entry in reversed(entries) if entry.kind == "ceiling"), None)
    return None if found is None else Ceiling(eps=found.eps or 0.0, delta=found.delta or 0.0)


def utc_timestamp() -> str:
    """The time in UTC, as ledgers have it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def ledger_folder() -> Path | None:
    """Where ledgers are kept: in the folder that DOVETAIL_LEDGERS names, or among the user's data; None for "off"."""
    if named := os.environ.get(VARIABLE):
        return None if named.lower() == "off" else Path(named)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "dovetail" / "ledgers"


def find_ledgers() -> list[SpendingLedger]:
    """All ledgers in the user's folder."""
    folder = ledger_folder()
    return [] if folder is None else [SpendingLedger(path) for path in sorted(folder.glob(f"{_PREFIX}*.json"))]


def ledger_of(people: str, folder: Path) -> SpendingLedger:
    """The ledger of these people in a folder.

    Arguments:
        people: their fingerprint under the data's key, in hexadecimal digits.
    """
    return SpendingLedger(folder / f"{_PREFIX}{people[:16]}.json", people=people)


def resolve_ledger(name: str | Path) -> SpendingLedger:
    """The ledger in a file, or the one in the user's folder that is called so, or begins so."""
    path = Path(name)
    if path.exists() or path.parent != Path():
        return SpendingLedger(path)
    alike = [ledger for ledger in find_ledgers() if ledger.name.removeprefix(_PREFIX).startswith(str(name))]
    alike += [ledger for ledger in find_ledgers() if ledger.name == str(name)]
    return alike[0] if len(alike) == 1 else SpendingLedger(path)
