"""Users that die at a chosen step: on their own ledger, over their envelope, between one service and the next.

As in `every_step` a death leaves files as they are, and here also half of a file that was being written; who is born
again is the same user, with what it finds in its folder.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parties.every_step import Killed, Life, Wire, World

from dovetail.files import write_atomically
from dovetail.parties.common.http_clients import Gone, Rejected, Unreachable
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.ledger import Ledger
from dovetail.parties.common.wire import RoundStatus, Upload
from dovetail.parties.fleet import lenient_policy
from dovetail.parties.intermediary.store import RoundClosed, RoundNotOpen, UploadRefused
from dovetail.parties.user import client as clients
from dovetail.parties.user import participation, spending
from dovetail.parties.user.client import Client, Envelope
from dovetail.parties.user.participation import take_part

_PATIENCE = 0.3  # seconds of a clock that nobody waits for


class Populated(World):
    """A world whose users run `take_part`, each with a life of its own: one visit whenever the others had a turn."""

    def __init__(self, folder: Path, *world: Any, keys: Sequence[KeyPair], **options: Any) -> None:
        super().__init__(folder, *world, **options)
        self.keys, self._now = keys, 0.0
        self.reports: dict[tuple[int, int], set[bytes]] = defaultdict(set)  # ids, by round and user
        for user in range(len(keys)):
            self._give_birth(user)

    @contextlib.contextmanager
    def at_work(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Let files be written by those who live, and let no time pass."""
        clock = types.SimpleNamespace(monotonic=lambda: self._now, sleep=self._sleep, time=time.time)
        with patch.context() as patched:
            patched.setattr(participation, "time", clock)
            for module in (clients, spending):
                patched.setattr(module, "write_atomically", self._write)
            yield

    def spent(self, user: int) -> list[int]:
        """The rounds in a user's own ledger."""
        folder, task = self._homes[_name(user)] / "spending", self._ground.task
        with contextlib.closing(Ledger.reopen(folder / f"task-{task.task_id.hex()}.db")) as ledger:
            assert ledger.total[0] <= task.budget
            return [entry.round for entry in ledger.entries if entry.kind == "reserve"]

    def _let_users(self, envelope: Any, users: int, status: RoundStatus) -> None:
        for user in range(users):
            self._visit(user)

    def _visit(self, user: int) -> None:
        """Until it has gone through a round's steps once, however often it dies over that."""
        update = self._oracle.update(user, len(self.keys))
        while True:
            try:
                client = _MortalClient(
                    self._homes[_name(user)],
                    policy=lenient_policy(self._ground.signed),
                    key=self.keys[user],
                    witness=self._witnesses(user),
                )
                client.life, asked = self._lives[_name(user)], [0]
                links = [_ToService(self, user, index, asked) for index in range(len(self._ground.services))]
                with contextlib.suppress(Unreachable):  # it comes again
                    take_part(client, links, lambda model: update, patience=_PATIENCE)
                return
            except Killed:
                self.deaths += 1
                self._give_birth(user)

    def _give_birth(self, user: int) -> None:
        before, self._births = self._homes.get(_name(user)), self._births + 1
        home = self._homes[_name(user)] = self._folder / f"{self._births}-{_name(user)}"
        if before is None:
            home.mkdir()
        else:
            shutil.copytree(before, home)
        self._lives[_name(user)] = Life(_name(user), self._moment)

    def _witnesses(self, user: int) -> Path:
        """Where a user's witness is: not in its home, of which every life has a copy."""
        return self._folder / "witnesses" / _name(user)

    def _write(self, path: Path, content: bytes, **options: Any) -> None:
        """In the place of `write_atomically`."""
        life, what = self._life_of(path), path.name
        if path.parent.name == "outbox":
            what = "envelope"
        elif path.is_relative_to(self._folder / "witnesses"):
            life, what = self._lives[path.parent.name], "witness"
        try:
            life.pass_moment(f"before writing {what}")
        except Killed:
            (path.parent / f".{path.name}.half").write_bytes(content[: len(content) // 2])
            raise
        write_atomically(path, content, **options)
        life.pass_moment(f"after writing {what}")

    def _sleep(self, seconds: float) -> None:
        self._now += seconds


class _MortalClient(Client):
    life: Life

    def forget_envelope(self, envelope: Envelope) -> None:
        self.life.pass_moment("before forgetting")
        super().forget_envelope(envelope)
        self.life.pass_moment("after forgetting")


class _ToService(Wire):
    """A service as a user sees it, who is told the second time that it asks that training is over."""

    def __init__(self, world: Populated, user: int, index: int, asked: list[int]) -> None:
        super().__init__(world, world._ground.services[index])
        self._user, self._index, self._asked = user, index, asked

    def task(self) -> Any:
        return self._world._ground.signed

    def notices(self) -> list[Any]:
        return []

    def status(self) -> RoundStatus:
        self._asked[0] += 1
        status = self._answer(lambda service: service._status)
        if status is None:
            raise Unreachable(self._name)
        if self._asked[0] == 1:
            return status
        return RoundStatus(task_id=status.task_id, round=status.round, over=True, head=status.head)

    def model(self, round: int, *, dim: int) -> np.ndarray:
        return np.zeros(dim, np.float32)

    def upload(self, task_id: bytes, round: int, upload: Upload, *, sender: bytes, signature: bytes) -> None:
        life, world = self._world._lives[_name(self._user)], self._world
        world.reports[round, self._user].add(upload.report)
        life.pass_moment(f"before {self._name}")
        self._answer(_taking(lambda service: service._party.accept(round, client=sender, upload=upload)))
        world.told.add((round, self._user, self._index))
        life.pass_moment(f"after {self._name}")


def _taking(accept: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What a link makes of a service's refusals."""

    def take(service: Any) -> Any:
        try:
            return accept(service)
        except RoundNotOpen as error:
            raise Unreachable(str(error)) from error
        except RoundClosed as error:
            raise Gone(str(error)) from error
        except UploadRefused as error:
            raise Rejected(str(error)) from error

    return take


def _name(user: int) -> str:
    return f"user-{user}"
