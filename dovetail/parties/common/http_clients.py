"""Clients over HTTPS: a shuffler or aggregator as users and its peers see it, an analyzer as services see it.

Every call either returns an answer or raises: `Unreachable` where nobody answered or could yet (try again: whatever is
posted may be sent twice), `Gone` where it is too late, `Conflict` where something else of ours is there already, and
`Rejected` with the other side's sentence. Status and models may have come through a cache: what the analyzer's key,
which the task names, has not signed is `Rejected`. Without TLS only this machine is spoken to.
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

from dovetail._structs import resolve_fields
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
    decode_vector,
    request_headers,
    sign_request,
    upload_path,
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
    """Nobody answered, or not yet."""


class Rejected(ValueError):  # noqa: N818 - the other side's decision
    """The other side does not take this, and says why in its own words."""


class Gone(Rejected):
    """Too late: the round is closed."""


class Conflict(Rejected):
    """Something else of ours is there already."""


def tls_context(ca: Path | None) -> ssl.SSLContext:
    """TLS that trusts this authority alone, or the usual ones; clients of one process may share it."""
    return httpx.create_ssl_context(trust_env=False) if ca is None else ssl.create_default_context(cafile=str(ca))


class _Named(msgspec.Struct):
    """The only field of a task that a client reads: who signs for the analyzer."""

    analyzer_sign: PublicKey | None = None


class _ServiceClient:
    """What analyzers, shufflers and aggregators answer alike.

    Arguments:
        url: address of the service, https:// or on this machine.
        ca: certificate of the only authority to trust, or a context of `tls_context`; None: the usual authorities.
        key: key pair that requests are signed with, for what is not answered to everybody.
        timeout: seconds to wait for a connection and for the next bytes of an answer.
    """

    def __init__(
        self,
        url: str,
        *,
        ca: Path | ssl.SSLContext | None = None,
        key: KeyPair | None = None,
        timeout: float = 30.0,
    ) -> None:
        _refuse_plain_http(url)
        verify = ca if isinstance(ca, ssl.SSLContext) else tls_context(ca)
        limits = httpx.Limits(keepalive_expiry=_IDLE)
        self.url = url.rstrip("/")
        self._key = key
        self._timeout = timeout
        self._http = httpx.Client(base_url=self.url, verify=verify, timeout=timeout, trust_env=False, limits=limits)
        self._signed: SignedTask | None = None
        self.retry_after: float | None = None  # in how many seconds to come back, if the last answer said so

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def task(self) -> SignedTask:
        """The task as this service hands it out, asked for once; whoever uses it verifies the signature."""
        if self._signed is None:
            try:
                self._signed = msgspec.json.decode(self._ask("GET", "/v1/task"), type=resolve_fields(SignedTask))
            except msgspec.MsgspecError as error:
                raise Rejected(
                    f"{self.url} did not send a signed task: is it the address of a service of Dovetail?"
                ) from error
        return self._signed

    def status(self) -> RoundStatus:
        """Where the training of its task stands, as the analyzer has signed it."""
        try:
            data = self._ask("GET", "/v1/status", max_bytes=_LARGEST_SENTENCE)
            status = msgspec.json.decode(data, type=resolve_fields(RoundStatus))
            check_status(status, task_id=task_id_of(self.task().body), key=self._status_key())
        except msgspec.MsgspecError as error:
            raise Rejected(f"{self.url} did not send a status of a training that this version can read") from error
        except Forged as error:
            raise Rejected(f"{error}, from {self.url}") from error
        return status

    def notices(self) -> list[SignedNotice]:
        """What the task's signer has announced, as far as this service says; whoever uses it verifies it."""
        try:
            data = self._ask("GET", "/v1/notices", max_bytes=_LARGEST_NOTICES)
            return msgspec.json.decode(data, type=list[resolve_fields(SignedNotice)])  # type: ignore[misc]
        except msgspec.MsgspecError as error:
            raise Rejected(f"{self.url} did not send notices that this version can read") from error

    def model(self, round: int, *, dim: int | None = None) -> np.ndarray:
        """The model after a round; that of round 0 is the initial one.

        Arguments:
            round: the round.
            dim: length that the model must have; None: any.
        """
        return decode_vector(self.signed_model(round, dim=dim)[0], dim)

    def signed_model(self, round: int, *, dim: int | None = None) -> tuple[bytes, bytes]:
        """The model after a round as bytes, and the analyzer's signature of it (empty if it signs nothing)."""
        max_bytes = _LARGEST if dim is None else 4 * dim
        data, headers = self._answer("GET", f"{self._path_prefix}/models/{round}", max_bytes=max_bytes)
        decode_vector(data, dim)
        if (key := self._status_key()) is None:
            return data, b""
        try:
            signature = bytes.fromhex(headers.get(SIGNATURE, ""))
            check_model(data, signature, task_id=task_id_of(self.task().body), round=round, key=key)
        except ValueError as error:
            reason = str(error) if isinstance(error, Forged) else "the model's signature is not hexadecimal"
            raise Rejected(f"{reason}, from {self.url}") from error
        return data, signature

    def _status_key(self) -> PublicKey | None:
        """The key that the analyzer signs with, by the task as this service tells it: whoever uses it verifies it."""
        try:
            return msgspec.json.decode(self.task().body, type=resolve_fields(_Named)).analyzer_sign
        except (msgspec.MsgspecError, ValueError) as error:
            raise Rejected(f"{self.url} sent a task that this version cannot read") from error

    def answers(self, path: str) -> bool:
        """True if the service answers on this path with status 200; else it raises what the others do."""
        self._ask("GET", path, max_bytes=_LARGEST_SENTENCE)
        return True

    def counts(self) -> dict[str, int]:
        """What it accepted and refused, how often; a shuffler tells its owner alone."""
        return json.loads(self._ask("GET", "/v1/counts"))

    @property
    def _path_prefix(self) -> str:
        return f"/v1/tasks/{task_id_of(self.task().body).hex()}"

    def _ask(self, method: str, path: str, body: bytes = b"", **options: Any) -> bytes:
        return self._answer(method, path, body, **options)[0]

    def _answer(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        max_bytes: int = _LARGEST,
        signed: dict[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Body and headers of the answer to a request, of `max_bytes` bytes at most."""
        headers = signed or ({} if self._key is None else sign_request(self._key, method, path, body))
        content = bytearray()
        deadline = time.monotonic() + self._timeout + max_bytes / _SLOWEST_RATE
        try:
            with self._http.stream(method, path, content=body, headers={**headers, **_PLAIN}) as answer:
                if answer.headers.get("content-encoding", "identity") != "identity":  # it may unfold to anything
                    raise Rejected(f"{self.url} sent a compressed answer: turn compression off in the proxy before it")
                for chunk in answer.iter_raw():
                    content += chunk
                    if len(content) > max(max_bytes, _LARGEST_SENTENCE):
                        raise Rejected(
                            f"the answer of {self.url} is longer than {max_bytes} bytes, the most for {path}"
                        )
                    if time.monotonic() > deadline:
                        raise Unreachable(f"{self.url} sent only part of its answer in time")
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.url} does not answer ({type(error).__name__})") from error
        self.retry_after = _parse_retry_seconds(answer.headers.get(RETRY_AFTER))
        status = answer.status_code
        sentence = content[:_LARGEST_SENTENCE].decode(errors="replace")
        if status >= 500 or status in (425, 429):
            raise Unreachable(f"{self.url} cannot answer now (status {status})")
        if status in (409, 410):
            raise {409: Conflict, 410: Gone}[status](sentence)
        if status != 200:
            raise Rejected(sentence or f"{self.url} refused the request with status {status}")
        return bytes(content), answer.headers


class IntermediaryClient(_ServiceClient):
    """A shuffler or aggregator, as a user or a peer sees it.

    Arguments:
        url: its address.
        index: its place among the shufflers or aggregators of the task, from 0.
        options: those of `AnalyzerClient`: `ca`, `key`, `timeout`.
    """

    def __init__(self, url: str, *, index: int = 0, **options: Any) -> None:
        super().__init__(url, **options)
        self.index = index

    def upload(self, task_id: bytes, round: int, upload: Upload, *, sender: bytes, signature: bytes) -> None:
        """Send an upload that its sender has signed; the service has stored it when this returns."""
        path = upload_path(task_id, round, self.index)
        body = upload.encode()
        self._ask("POST", path, body, signed=request_headers(sender, signature, body))

    def roster(self, round: int) -> set[bytes] | None:
        """The report ids of a round that is closed; None as long as it is not."""
        return msgspec.msgpack.decode(
            self._ask("GET", f"{self._path_prefix}/rounds/{round}/roster"), type=set[bytes] | None
        )

    def agreed_digest(self, round: int) -> bytes | None:
        """The digest of the users whom it is going to count in a round; None as long as it has not decided."""
        return msgspec.msgpack.decode(self._ask("GET", f"{self._path_prefix}/rounds/{round}/agreed"), type=bytes | None)

    def challenge(self, round: int) -> bytes | None:
        """An aggregator's part of the key that a round's proofs are tested with; None before the round is frozen."""
        return msgspec.msgpack.decode(
            self._ask("GET", f"{self._path_prefix}/rounds/{round}/challenge"), type=bytes | None
        )

    def verifiers(self, round: int, *, reports: int) -> Verifiers | None:
        """The results of an aggregator on so many reports; None as long as it has not looked at all of them."""
        results: list[bytes] = []
        while True:
            path = f"{self._path_prefix}/rounds/{round}/verifiers/{len(results)}"
            page = msgspec.msgpack.decode(self._ask("GET", path), type=resolve_fields(Verifiers) | None)
            if page is None or page.total != reports or not (page.results or len(results) == reports):
                return None
            results += page.results
            if len(results) >= reports:
                return msgspec.structs.replace(page, results=results)


class AnalyzerClient(_ServiceClient):
    """The analyzer, as a shuffler, an aggregator or anybody else sees it."""

    def privacy(self) -> dict[str, Any]:
        """What it says of the training to machines: `Analyzer.privacy`."""
        return json.loads(self._ask("GET", "/v1/privacy"))

    def send_part(self, round: int, batch: bytes, number: int, part: bytes) -> None:
        """Send a numbered part of a batch; the analyzer has stored it when this returns."""
        self._ask("POST", f"{self._path_prefix}/rounds/{round}/batches/{batch.hex()}/parts/{number}", part)

    def report_closed(self, round: int, closed: Closed) -> None:
        """Say that a round of this service is closed, and nothing more will come."""
        self._ask("POST", f"{self._path_prefix}/rounds/{round}/closed", msgspec.json.encode(closed))


def _parse_retry_seconds(text: str | None) -> float | None:
    """The number in a header that says when to come back, if it makes sense."""
    try:
        seconds = float(text or "nan")
    except ValueError:
        return None
    return seconds if 0 <= seconds <= _LATEST else None


def _refuse_plain_http(url: str) -> None:
    """Refuse to talk without TLS to another machine."""
    parsed = httpx.URL(url)
    if parsed.scheme == "https":
        return
    try:
        is_here = ipaddress.ip_address(parsed.host).is_loopback
    except ValueError:
        is_here = parsed.host == "localhost"
    if parsed.scheme != "http" or not is_here:
        raise ValueError(f"{url!r} is not an https:// address; http:// is for this machine alone")
