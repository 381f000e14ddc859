"""The other ends: a shuffler or aggregator as its clients see it, an analyzer as they see it, over HTTPS.

Every call either gets an answer or raises: `Unreachable` where nobody answered or could yet (ask again: whatever is
posted may be said twice), `Gone` where the answer is that it is too late, `Rejected` with the other side's sentence.
Status and models may have come through a cache: what the analyzer's key, which the task names, has not signed is
`Rejected`. Without TLS nobody is spoken to but who is on this machine.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from dovetail._structs import ready
from dovetail.parties.common.keys import KeyPair, PublicKey
from dovetail.parties.common.notices import SignedNotice
from dovetail.parties.common.task import SignedTask, task_id_of
from dovetail.parties.common.wire import (
    RETRY_AFTER,
    SIGNATURE,
    Closed,
    Forged,
    RoundStatus,
    Upload,
    Verifiers,
    check_model,
    check_status,
    request_headers,
    sign_request,
    upload_path,
    vector_from,
)

__all__ = ["AnalyzerClient", "Conflict", "Gone", "IntermediaryClient", "Rejected", "Unreachable", "tls_context"]

_LARGEST = 1 << 28  # bytes of an answer: a roster of sixteen million
_LARGEST_SENTENCE = 1 << 12
_LARGEST_NOTICES = 1 << 22
_SLOWEST_RATE = 16_384.0  # bytes per second of a long answer
_PLAIN = {"accept-encoding": "identity"}
_LATEST = 7 * 86_400.0  # seconds after which one looks again, whatever was said
_IDLE = 25.0  # seconds that a connection is kept; services close it a little later


class Unreachable(ConnectionError):  # noqa: N818 - it says what happened; one asks again
    """Nobody answered."""


class Rejected(ValueError):  # noqa: N818 - the other side's decision
    """What the other side does not take, in its words."""


class Gone(Rejected):
    """Too late: the round is closed."""


class Conflict(Rejected):
    """Something else of ours is there already."""


def tls_context(ca: Path | None) -> ssl.SSLContext:
    """TLS that trusts this authority alone, or the usual ones; links of one process may share it."""
    return httpx.create_ssl_context(trust_env=False) if ca is None else ssl.create_default_context(cafile=str(ca))


class _Named(msgspec.Struct):
    """Whose word counts, in a task: the only thing that a link looks at."""

    analyzer_sign: PublicKey | None = None


class _ServiceClient:
    def __init__(
        self,
        url: str,
        *,
        ca: Path | ssl.SSLContext | None = None,
        key: KeyPair | None = None,
        timeout: float = 30.0,
    ) -> None:
        _refuse_plain(url)
        verify = ca if isinstance(ca, ssl.SSLContext) else tls_context(ca)
        self.url, self._key, self._timeout = url.rstrip("/"), key, timeout
        limits = httpx.Limits(keepalive_expiry=_IDLE)
        self._http = httpx.Client(base_url=self.url, verify=verify, timeout=timeout, trust_env=False, limits=limits)
        self._signed: SignedTask | None = None
        self.retry_after: float | None = None  # in how many seconds to come back, if the last answer said so

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def task(self) -> SignedTask:
        """The signed task; whoever uses it verifies it."""
        if self._signed is None:
            try:
                self._signed = msgspec.json.decode(self._ask("GET", "/v1/task"), type=ready(SignedTask))
            except msgspec.MsgspecError as error:
                raise Rejected(f"expected a signed task from {self.url}, got invalid content") from error
        return self._signed

    def status(self) -> RoundStatus:
        """Where the training of its task stands, as the analyzer says."""
        try:
            said = msgspec.json.decode(self._ask("GET", "/v1/status", most=_LARGEST_SENTENCE), type=ready(RoundStatus))
            check_status(said, task_id=task_id_of(self.task().body), key=self._announcer())
        except msgspec.MsgspecError as error:
            raise Rejected(f"expected the status of a training from {self.url}, got invalid content") from error
        except Forged as error:
            raise Rejected(f"{error}, from {self.url}") from error
        return said

    def notices(self) -> list[SignedNotice]:
        """What the task's signer has announced, as far as this service says; whoever uses it verifies it."""
        try:
            data = self._ask("GET", "/v1/notices", most=_LARGEST_NOTICES)
            return msgspec.json.decode(data, type=list[ready(SignedNotice)])  # type: ignore[misc]
        except msgspec.MsgspecError as error:
            raise Rejected(f"expected notices from {self.url}, got invalid content") from error

    def model(self, round: int, *, dim: int | None = None) -> np.ndarray:
        """The model after a round; that of round 0 is the first. Refuses one of another dimension, if it is known."""
        return vector_from(self.signed_model(round, dim=dim)[0], dim)

    def signed_model(self, round: int, *, dim: int | None = None) -> tuple[bytes, bytes]:
        """The model after a round as it travels, and the analyzer's signature, to be passed on."""
        most = _LARGEST if dim is None else 4 * dim
        data, told = self._answer("GET", f"{self._prefix}/models/{round}", most=most)
        vector_from(data, dim)
        if (key := self._announcer()) is None:
            return data, b""
        try:
            signature = bytes.fromhex(told.get(SIGNATURE, ""))
            check_model(data, signature, task_id=task_id_of(self.task().body), round=round, key=key)
        except ValueError as error:
            words = str(error) if isinstance(error, Forged) else "expected a signed model, got another one"
            raise Rejected(f"{words}, from {self.url}") from error
        return data, signature

    def _announcer(self) -> PublicKey | None:
        """The key that the analyzer signs with, by the task as this service tells it: whoever uses it verifies it."""
        try:
            return msgspec.json.decode(self.task().body, type=ready(_Named)).analyzer_sign
        except (msgspec.MsgspecError, ValueError) as error:
            raise Rejected(f"expected a signed task from {self.url}, got invalid content") from error

    def answers(self, path: str) -> bool:
        """Whether it says on this path that all is well."""
        self._ask("GET", path, most=_LARGEST_SENTENCE)
        return True

    def counts(self) -> dict[str, int]:
        """What it took and refused, how often; a shuffler tells its owner alone."""
        return json.loads(self._ask("GET", "/v1/counts"))

    @property
    def _prefix(self) -> str:
        return f"/v1/tasks/{task_id_of(self.task().body).hex()}"

    def _ask(self, method: str, path: str, body: bytes = b"", **options: Any) -> bytes:
        return self._answer(method, path, body, **options)[0]

    def _answer(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        most: int = _LARGEST,
        signed: dict[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        headers = signed or ({} if self._key is None else sign_request(self._key, method, path, body))
        content, end = bytearray(), time.monotonic() + self._timeout + most / _SLOWEST_RATE
        try:
            with self._http.stream(method, path, content=body, headers={**headers, **_PLAIN}) as answer:
                if answer.headers.get("content-encoding", "identity") != "identity":  # it may unfold to anything
                    raise Rejected(f"expected an answer from {self.url} as it is, got a compressed one")
                for chunk in answer.iter_raw():
                    content += chunk
                    if len(content) > max(most, _LARGEST_SENTENCE):
                        raise Rejected(f"expected at most {most} bytes from {self.url}, got more")
                    if time.monotonic() > end:
                        raise Unreachable(f"expected the whole answer from {self.url} in time, got a part of it")
        except httpx.HTTPError as error:
            raise Unreachable(f"expected an answer from {self.url}, got none ({type(error).__name__})") from error
        self.retry_after = _seconds(answer.headers.get(RETRY_AFTER))
        status, words = answer.status_code, content[:_LARGEST_SENTENCE].decode(errors="replace")
        if status >= 500 or status in (425, 429):
            raise Unreachable(f"expected an answer from {self.url}, got status {status}")
        if status in (409, 410):
            raise {409: Conflict, 410: Gone}[status](words)
        if status != 200:
            raise Rejected(words or f"expected status 200 from {self.url}, got {status}")
        return bytes(content), answer.headers


class IntermediaryClient(_ServiceClient):
    """A shuffler or aggregator, as a client or another one sees it; `index` is its place among those of the task."""

    def __init__(self, url: str, *, index: int = 0, **options: Any) -> None:
        super().__init__(url, **options)
        self.index = index

    def upload(self, task_id: bytes, round: int, upload: Upload, *, sender: bytes, signature: bytes) -> None:
        """Give it an upload that its sender has signed; it has it when this returns."""
        path = upload_path(task_id, round, self.index)
        body = upload.encode()
        self._ask("POST", path, body, signed=request_headers(sender, signature, body))

    def roster(self, round: int) -> set[bytes] | None:
        """The report ids of a round that is closed; None as long as it is not."""
        return msgspec.msgpack.decode(self._ask("GET", f"{self._prefix}/rounds/{round}/roster"), type=set[bytes] | None)

    def agreed_digest(self, round: int) -> bytes | None:
        """The digest of the users whom it is going to count in a round; None as long as it has not decided."""
        return msgspec.msgpack.decode(self._ask("GET", f"{self._prefix}/rounds/{round}/agreed"), type=bytes | None)

    def challenge(self, round: int) -> bytes | None:
        """An aggregator's part of the key that a round's proofs are tested with; None before the round is frozen."""
        return msgspec.msgpack.decode(self._ask("GET", f"{self._prefix}/rounds/{round}/challenge"), type=bytes | None)

    def verifiers(self, round: int, *, reports: int) -> Verifiers | None:
        """What an aggregator found about so many reports; None as long as it has not looked at all of them."""
        told: list[bytes] = []
        while True:
            path = f"{self._prefix}/rounds/{round}/verifiers/{len(told)}"
            page = msgspec.msgpack.decode(self._ask("GET", path), type=ready(Verifiers) | None)
            if page is None or page.total != reports or not (page.told or len(told) == reports):
                return None
            told += page.told
            if len(told) >= reports:
                return msgspec.structs.replace(page, told=told)


class AnalyzerClient(_ServiceClient):
    """The analyzer, as a shuffler, an aggregator or anybody else sees it."""

    def privacy(self) -> dict[str, Any]:
        """What it says of the training to machines: `Analyzer.privacy`."""
        return json.loads(self._ask("GET", "/v1/privacy"))

    def send_part(self, round: int, batch: bytes, number: int, part: bytes) -> None:
        """Give it a part of a batch; it has it when this returns."""
        self._ask("POST", f"{self._prefix}/rounds/{round}/batches/{batch.hex()}/parts/{number}", part)

    def report_closed(self, round: int, closed: Closed) -> None:
        """Say that nothing more will come."""
        self._ask("POST", f"{self._prefix}/rounds/{round}/closed", msgspec.json.encode(closed))


def _seconds(text: str | None) -> float | None:
    """What an answer says of when to come back, if it is a number that makes sense."""
    try:
        found = float(text or "nan")
    except ValueError:
        return None
    return found if 0 <= found <= _LATEST else None


def _refuse_plain(url: str) -> None:
    """Refuse to talk without TLS to another machine."""
    parsed = httpx.URL(url)
    if parsed.scheme == "https":
        return
    try:
        here = ipaddress.ip_address(parsed.host).is_loopback
    except ValueError:
        here = parsed.host == "localhost"
    if parsed.scheme != "http" or not here:
        raise ValueError(f"expected an https address, or http on this machine alone, got {url!r}")
