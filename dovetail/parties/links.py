"""The other ends: a shuffler as its clients see it, an analyzer as its shufflers see it, over HTTPS.

Every call either gets an answer or raises: `Unreachable` where nobody answered or could yet (ask again: whatever is
posted may be said twice), `Gone` where the answer is that it is too late, `Rejected` with the other side's sentence.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from dovetail.parties.keys import KeyPair
from dovetail.parties.task import SignedTask, Task, task_id_of
from dovetail.parties.wire import Closed, RoundStatus, Upload, signed_headers, vector_from

__all__ = ["AnalyzerLink", "Gone", "Rejected", "ShufflerLink", "Unreachable"]


class Unreachable(ConnectionError):  # noqa: N818 - it says what happened; one asks again
    """Nobody answered."""


class Rejected(ValueError):  # noqa: N818 - the other side's decision
    """What the other side does not take, in its words."""


class Gone(Rejected):
    """Too late: the round is closed."""


class _Link:
    def __init__(self, url: str, *, ca: Path | None = None, key: KeyPair | None = None, timeout: float = 30.0) -> None:
        verify: Any = ssl.create_default_context(cafile=str(ca)) if ca is not None else True
        self.url, self._key = url.rstrip("/"), key
        self._http = httpx.Client(base_url=self.url, verify=verify, timeout=timeout, trust_env=False)
        self._signed: SignedTask | None = None

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def task(self) -> SignedTask:
        """The signed task; whoever uses it verifies it."""
        if self._signed is None:
            self._signed = msgspec.json.decode(self._ask("GET", "/v1/task"), type=SignedTask)
        return self._signed

    def status(self) -> RoundStatus:
        """Where the training stands."""
        return msgspec.json.decode(self._ask("GET", "/v1/status"), type=RoundStatus)

    def model(self, round: int) -> np.ndarray:
        """The model after a round; that of round 0 is the first."""
        dim = msgspec.json.decode(self.task().body, type=Task).dim
        return vector_from(self._ask("GET", f"{self._prefix}/models/{round}"), dim)

    @property
    def _prefix(self) -> str:
        return f"/v1/tasks/{task_id_of(self.task().body).hex()}"

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        headers = {} if self._key is None else signed_headers(self._key, method, path, body)
        try:
            answer = self._http.request(method, path, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise Unreachable(f"expected an answer from {self.url}, got none ({type(error).__name__})") from error
        if answer.status_code >= 500 or answer.status_code == 425:
            raise Unreachable(f"expected an answer from {self.url}, got status {answer.status_code}")
        if answer.status_code == 410:
            raise Gone(answer.text)
        if answer.status_code >= 400:
            raise Rejected(answer.text)
        return answer.content


class ShufflerLink(_Link):
    """A shuffler, as a client or another shuffler sees it."""

    def upload(self, round: int, upload: Upload) -> None:
        """Give it an upload; it has it when this returns."""
        self._ask("POST", f"{self._prefix}/rounds/{round}/uploads", upload.encode())

    def roster(self, round: int) -> set[bytes] | None:
        """The report ids of a round that is closed; None as long as it is not."""
        return msgspec.msgpack.decode(self._ask("GET", f"{self._prefix}/rounds/{round}/roster"), type=set[bytes] | None)


class AnalyzerLink(_Link):
    """The analyzer, as a shuffler sees it."""

    def part(self, round: int, number: int, packed: bytes) -> None:
        """Give it a part of a batch; it has it when this returns."""
        self._ask("POST", f"{self._prefix}/rounds/{round}/parts/{number}", packed)

    def closed(self, round: int, closed: Closed) -> None:
        """Say that nothing more will come."""
        self._ask("POST", f"{self._prefix}/rounds/{round}/closed", msgspec.json.encode(closed))
