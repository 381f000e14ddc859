"""An oracle for exactly once: user i marks coordinate i and no other, so a model tells whose reports are in it.

The first model is zero, and the server adds the estimate as it is: a model differs from the one before it by the marks
over the number of users who counted, which the analyzer tells. Nobody marks the last coordinate; it shows how
many reports there were, or that shares were lost.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.ledger import LedgerEntry
from dovetail.parties.fleet import Deployment, make_deployment


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A protocol whose reports are, but for a probability below 1e-10, the truth."""

    protocol: str
    settings: dict[str, Any]
    services: int  # shufflers, or aggregators where reports are shared
    eps_round: float | None  # what a round and a coordinate cost
    shared: bool = False

    def update(self, user: int, users: int) -> np.ndarray:
        """One mark; levels of randomized response and encoded integers, so that nothing is rounded at random."""
        update = np.full(users + 1, -1.0 if self.protocol == "ss_simple" else 0.0, np.float32)
        update[user] = 1.0
        return update

    def marks(self, before: np.ndarray, after: np.ndarray, *, uploads: int) -> np.ndarray:
        """How often every user is in the difference of two models, over a round with so many uploads."""
        if uploads == 0:
            np.testing.assert_array_equal(before, after)
        moved = (after - before) * uploads
        if self.protocol == "ss_simple":  # every report adds -1 everywhere, and 2 at its mark
            marks = (moved[:-1] - moved[-1]) / 2
            np.testing.assert_allclose(marks.sum(), -moved[-1], atol=1e-3)
        else:
            marks = moved[:-1]
            np.testing.assert_allclose(moved[-1], 0.0, atol=1e-3)
        counts = np.rint(marks).astype(int)
        np.testing.assert_allclose(marks, counts, atol=1e-3)
        return counts

    def deployment(
        self, folder: Path, keys: Sequence[KeyPair], *, rounds: int, round_seconds: float, **options: Any
    ) -> Deployment:
        """A fleet's deployment with this task, for the users with these keys; a round needs two of them."""
        users = len(keys)
        fields = {
            "name": "unique buckets",
            "protocol": self.protocol,
            "settings": self.settings,
            "dim": users + 1,
            "rounds": rounds,
            "min_clients": 2,
            "max_clients": users,
            "round_seconds": round_seconds,
            "eps": None if self.eps_round is None else 1.01 * self.eps_round * (users + 1) * rounds,
            "delta": 1e-5,
        }
        between = {"aggregators" if self.shared else "shufflers": self.services}
        deployment = make_deployment(folder, fields, enrolled=[key.public for key in keys], **between, **options)
        np.save(folder / "model.npy", np.zeros(users + 1, np.float32))
        return deployment


def uploads_of(history: Sequence[dict[str, Any]]) -> collections.defaultdict[int, int]:
    """How many uploads are in the model of each round, by what the analyzer tells: none in a void one."""
    released = {one["round"]: one["uploads"] for one in history if one["outcome"] == "released"}
    return collections.defaultdict(int, released)


ONE_SHUFFLER = Oracle("ss_simple", {"clip_value": 1.0, "eps_local": 40.0}, 1, 40.0)
THREE_SHUFFLERS = Oracle(
    "split_and_mix",
    {"clip_norm": 1.0, "noise_multiplier": 1e-12, "scale": 64.0, "shares": 6, "shufflers": 3},
    3,
    None,
)
TWO_AGGREGATORS = Oracle("ss_simple", {"clip_value": 1.0, "eps_local": 40.0}, 2, 40.0, shared=True)
THREE_AGGREGATORS = Oracle(
    "secagg",
    {"clip_norm": 1.0, "noise_multiplier": 1e-12, "scale": 64.0, "noise": "aggregators", "aggregators": 3},
    3,
    None,
    shared=True,
)
VERIFIED = Oracle(
    "secagg",
    {"clip_norm": 1.0, "noise_multiplier": 1e-12, "scale": 64.0, "noise": "aggregators", "verified": True},
    2,
    None,
    shared=True,
)
ORACLES = {
    "one shuffler": ONE_SHUFFLER,
    "three shufflers": THREE_SHUFFLERS,
    "two aggregators": TWO_AGGREGATORS,
    "three aggregators": THREE_AGGREGATORS,
    "verified": VERIFIED,
}


class Auditor:
    """Who watches a ledger's file and every model that can be had.

    Entries are only ever added, in a chain; what is spent never decreases; a release follows its reservation; a model
    that moved is, when it can be had, the one that the ledger released for its round.
    """

    def __init__(self, ledger: Path, *, finite: bool) -> None:
        self.ledger, self._finite = ledger, finite
        self._rows: list[tuple[int, bytes, bytes]] = []
        self.models: dict[int, np.ndarray] = {}

    @property
    def entries(self) -> list[LedgerEntry]:
        """The ledger as it was seen last."""
        return [msgspec.json.decode(body, type=LedgerEntry) for _, body, _ in self._rows]

    @property
    def released(self) -> set[int]:
        """The rounds that were released, as far as their models were seen."""
        return {entry.round for entry in self.entries if entry.kind == "release" and entry.round in self.models}

    def look(self) -> None:
        """Read the ledger again."""
        rows = self._read()
        assert rows[: len(self._rows)] == self._rows, "an entry of the ledger is gone or changed"
        self._rows = rows
        before = bytes(32)
        for _, body, digest in rows:
            assert digest == hashlib.sha256(before + body).digest()
            before = digest
        reserved: list[LedgerEntry] = []
        for entry in self.entries:
            if entry.kind == "reserve":
                assert entry.round == len(reserved) + 1
                assert entry.bound >= (reserved[-1].bound if reserved else 0.0)
                assert not self._finite or entry.bound < float("inf")
                reserved.append(entry)
            elif entry.kind == "release":
                assert entry.round == len(reserved), "a model was released before it was reserved"

    def _read(self) -> list[tuple[int, bytes, bytes]]:
        with read_only(self.ledger) as database:
            return database.execute("SELECT number, body, hash FROM entries ORDER BY number").fetchall()

    def see(self, round: int, model: np.ndarray) -> None:
        """A model that could be had: the ledger must already say so."""
        if round in self.models:
            assert np.array_equal(self.models[round], model), f"the model of round {round} changed"
            return
        self.look()
        released = {entry.round: entry.model for entry in self.entries if entry.kind == "release"}
        if round == 0 or (round - 1 in self.models and np.array_equal(model, self.models[round - 1])):
            assert round not in released
        else:
            assert released.get(round) == hashlib.sha256(model.astype("<f4").tobytes()).digest()
        assert any(entry.kind == "reserve" and entry.round == round for entry in self.entries) or round == 0
        self.models[round] = model


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """A database that somebody else writes."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as database:
        yield database


def landed(deployment: Deployment, party: str) -> str:
    """In which step a party was killed, from a copy of the files that it left."""
    with tempfile.TemporaryDirectory() as copy:
        for file in (deployment.folder / party).glob("*.db*"):
            shutil.copy(file, copy)
        try:
            return _analyzer_step(Path(copy)) if party == "analyzer" else _service_step(Path(copy))
        except sqlite3.OperationalError:
            return "first start"


def _service_step(folder: Path) -> str:
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as database:
        last = database.execute("SELECT state, uploads FROM rounds ORDER BY round DESC LIMIT 1").fetchone()
    if last is None:
        return "first start"
    state, uploads = last
    return {"open": "takes uploads" if uploads else "open, empty", "done": "between rounds"}.get(state, state)


def _analyzer_step(folder: Path) -> str:
    with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as database:
        entries = [
            msgspec.json.decode(row[0], type=LedgerEntry) for row in database.execute("SELECT body FROM entries")
        ]
    reserved = max((entry.round for entry in entries if entry.kind == "reserve"), default=0)
    released = any(entry.kind == "release" and entry.round == reserved for entry in entries)
    with contextlib.closing(sqlite3.connect(folder / "book.db")) as database:

        def one(query: str) -> Any:
            return (database.execute(query, (reserved,)).fetchone() or (None,))[0]

        if one("SELECT 1 FROM outcomes WHERE round = ?"):
            return "between rounds"
        if released:
            return "released" if one("SELECT head FROM models WHERE round = ?") is None else "confirmed"
        if one("SELECT 1 FROM models WHERE round = ?") and reserved:
            return "proposed"
        if one("SELECT COUNT(*) FROM closed WHERE round = ?"):
            return "closed said"
        return "takes parts" if one("SELECT COUNT(*) FROM parts WHERE round = ?") else "open, empty"


_CLOSED = "SELECT COUNT(*) FROM rounds WHERE state IN ('sent', 'void', 'done')"
_OF_ANY_SERVICE = {
    "round opened": ("store.db", "SELECT COUNT(*) FROM rounds"),
    "upload accepted": ("store.db", "SELECT COALESCE(SUM(uploads), 0) FROM rounds"),
    "round frozen": ("store.db", "SELECT COUNT(*) FROM rounds WHERE state != 'open'"),
    "batch acknowledged": ("store.db", "SELECT COUNT(*) FROM rounds WHERE state = 'done'"),
}
COUNTERS: dict[str, dict[str, tuple[str, str]]] = {
    "shuffler": {**_OF_ANY_SERVICE, "batch shuffled": ("store.db", _CLOSED)},
    "aggregator": {
        **_OF_ANY_SERVICE,
        "users agreed": ("store.db", "SELECT COUNT(*) FROM rounds WHERE agreed IS NOT NULL"),
        "sum sealed": ("store.db", _CLOSED),
    },
    "analyzer": {
        "round reserved": ("ledger.db", "SELECT COUNT(*) FROM entries WHERE CAST(body AS TEXT) LIKE '%\"reserve\"%'"),
        "part counted": ("book.db", "SELECT COUNT(*) FROM parts"),
        "closed said": ("book.db", "SELECT COUNT(*) FROM closed"),
        "model proposed": ("book.db", "SELECT COUNT(*) FROM models"),
        "model released": ("ledger.db", "SELECT COUNT(*) FROM entries WHERE CAST(body AS TEXT) LIKE '%\"release\"%'"),
    },
}


def kind_of(party: str) -> str:
    """An analyzer, a shuffler, an aggregator or users."""
    return party.partition("-")[0]


def counter(deployment: Deployment, party: str, transition: str) -> Callable[[], int]:
    """How often a party made a transition, from its files; -1 where they cannot be read just now."""
    file, query = COUNTERS[kind_of(party)][transition]

    def count() -> int:
        try:
            with read_only(deployment.folder / party / file) as database:
                return int(database.execute(query).fetchone()[0])
        except sqlite3.OperationalError:
            return -1

    return count
