"""Users in a process of their own, which can be killed: each marks its own coordinate and notes what it is told.

They run `take_part` as `dovetail client run` does, over TLS, one thread for each. A note is a line that is appended
before an upload is sent, or after a service has said that it has it; a kill leaves what was noted. Started with
`python -m parties.marking_users FOLDER ORACLE PROCESS USERS AUTHORITY SERVICE ...`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from parties.unique_buckets import ORACLES, read_only

from dovetail.parties.common.http_clients import IntermediaryClient
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.ledger import Ledger, LedgerEntry
from dovetail.parties.common.task import SignedTask
from dovetail.parties.common.wire import Upload
from dovetail.parties.fleet import lenient_policy
from dovetail.parties.user.client import Client
from dovetail.parties.user.participation import take_part

TRANSITIONS = ("round spent", "upload begun", "upload taken")
_PATIENCE = 3600.0  # seconds: services are killed all the time


class Note(NamedTuple):
    """What a user did in a round, with which report."""

    what: str
    round: int
    user: int
    service: int
    report: str


def home_of(folder: Path, user: int) -> Path:
    """A user's own folder in that of a deployment."""
    return folder / "users" / f"user-{user}"


def notes(folder: Path) -> list[Note]:
    """What all users noted; a line that was cut by a kill is none."""
    lines = [line for file in folder.glob("notes-*") for line in file.read_text().splitlines()]
    words = [line.split() for line in lines]
    return [Note(one[0], int(one[1]), int(one[2]), int(one[3]), one[4]) for one in words if len(one) == 6]


def spent(folder: Path) -> list[int]:
    """The rounds that a user has paid for, from the ledger of its one task; refuses a ledger that is not whole."""
    found = list((folder / "spending").glob("task-*.db"))
    if not found or not Ledger.has_entries(found[0]):
        return []
    with contextlib.closing(Ledger.reopen(found[0])) as ledger:
        budget, (eps, _) = ledger.entries[0].bound, ledger.total
        assert eps <= budget, f"{folder.name} has spent {eps} of {budget}"
        return [entry.round for entry in ledger.entries if entry.kind == "reserve"]


def counter_of_users(folder: Path, users: Sequence[int], transition: str) -> Callable[[], int]:
    """How often these users made a transition, from their files."""
    if transition != "round spent":
        what = {"upload begun": "sends", "upload taken": "taken"}[transition]
        return lambda: sum(note.what == what and note.user in users for note in notes(folder))

    return lambda: sum(len(_paid(home_of(folder, user))) for user in users)


def _paid(folder: Path) -> list[int]:
    """As `spent`, of a user who may be at work, or whose files are to be left as they are."""
    rows: list[tuple[bytes]] = []
    for file in (folder / "spending").glob("task-*.db"):
        with contextlib.suppress(sqlite3.OperationalError), read_only(file) as database:
            rows += database.execute("SELECT body FROM entries").fetchall()
    entries = [msgspec.json.decode(body, type=LedgerEntry) for (body,) in rows]
    return [entry.round for entry in entries if entry.kind == "reserve"]


def landed_with(folder: Path, users: Iterable[int], services: int) -> str:
    """In which step of the round that they paid for last these users were killed: that of who came least far."""
    steps = ["paid, nothing sent", "sending", *(f"taken by {n} of {services}" for n in range(1, services)), "done"]
    found, noted = [], notes(folder)
    for user in users:
        last = max(_paid(home_of(folder, user)), default=0)
        mine = [note for note in noted if note.user == user and note.round == last]
        taken = len({note.service for note in mine if note.what == "taken"})
        found.append(0 if not mine else 1 + taken)
    return steps[min(found)]


class _NotingLink(IntermediaryClient):
    """A service, and a file in which is noted what it was given and what it has."""

    def __init__(self, url: str, *, user: int, noted: int, **options: Any) -> None:
        super().__init__(url, **options)
        self._user, self._noted = user, noted

    def upload(self, task_id: bytes, round: int, upload: Upload, *, sender: bytes, signature: bytes) -> None:
        self._note("sends", round, upload)
        super().upload(task_id, round, upload, sender=sender, signature=signature)
        self._note("taken", round, upload)

    def _note(self, what: str, round: int, upload: Upload) -> None:
        os.write(self._noted, f"{what} {round} {self._user} {self.index} {upload.report.hex()} .\n".encode())


def main(folder: Path, oracle: str, process: str, users: Sequence[int], ca: Path, services: Sequence[str]) -> None:
    """Take part with these users until training is over."""
    signed = msgspec.json.decode((folder / "task.json").read_bytes(), type=SignedTask)
    enrolled = len(msgspec.json.decode((folder / "clients.json").read_bytes()))
    noted = os.open(folder / f"notes-{process}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def take(user: int) -> None:
        home, update = home_of(folder, user), ORACLES[oracle].update(user, enrolled)
        try:
            client = Client(home, policy=lenient_policy(signed), key=KeyPair.load(home / "key.json"))
            links = [_NotingLink(url, index=i, ca=ca, user=user, noted=noted) for i, url in enumerate(services)]
            take_part(client, links, lambda model: update, patience=_PATIENCE)
        except Exception:  # a thread would swallow it
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=take, args=(user,)) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    _, place, name, process, numbers, authority, *urls = sys.argv
    main(Path(place), name, process, [int(one) for one in numbers.split(",")], Path(authority), urls)
