"""Requests that no honest party sends: mutations of valid ones, by kind, and a connection to send their bytes by.

A `Victim` is a service with a request that it would take; a `Mutator` makes an `Attack` of every kind from it. An
attack says which statuses may answer it and how many refusals the service has to count for it. Bytes that are no HTTP
are answered by the server below the application, with a sentence of its own, and are not counted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import random
import ssl
import urllib.parse
from collections.abc import Callable

import numpy as np

from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.wire import sign_request

NOT_HTTP = "Invalid HTTP request received."
REFUSED = frozenset(range(400, 500))

_NAMED = b'"batch":"' + base64.b64encode(bytes(16)) + b'"'

WRONG_JSON = (  # what a shuffler could say of a closed round, and must not
    *(
        wrong.replace(b"BATCH", _NAMED)
        for wrong in (
            b'{"state":"sent","parts":NaN,"uploads":4,BATCH}',
            b'{"state":"sent","parts":Infinity,"uploads":-Infinity,BATCH}',
            b'{"state":"sent","parts":1e400,"uploads":4,BATCH}',
            b'{"state":"sent","parts":1,"uploads":' + b"9" * 900 + b",BATCH}",
            b'{"state":"void","parts":0,"uploads":9223372036854775808,BATCH}',
            b'{"state":"void","parts":0,"uploads":-1,BATCH}',
            b'{"state":"se\xff\xfent","parts":1,"uploads":4,BATCH}',
            b'{"state":"sent\\ud800","parts":1,"uploads":4,BATCH}',
            b'{"state":"sent","parts":1,"uploads":4,"client":"somebody",BATCH}',
            b'{"state":"sent","parts":2,"uploads":4,BATCH}',  # it sent none yet
            b'{"state":"sent","parts":"1","uploads":4,BATCH}',
            b'{"state":"done","parts":1,"uploads":4,BATCH}',
        )
    ),
    b'{"a\\nb\\u2028":1}',
    b"[" * 1000,
    b'{"state":' + b"[" * 900,
    b"\xef\xbb\xbf{}",
    b"",
    b"null",
    b'{"state":"sent","parts":1,"upl',
    b'{"state":"void","parts":0,"uploads":0}',  # of which batch?
    b'{"state":"void","parts":0,"uploads":0,"batch":""}',
    b'{"state":"void","parts":0,"uploads":0,"batch":"AAAA"}',
    b'{"state":"void","parts":0,"uploads":0,"batch":"' + base64.b64encode(bytes(17)) + b'"}',
    b'{"state":"void","parts":0,"uploads":0,"batch":"' + b"0" * 32 + b'"}',  # not in base 16
    b'{"state":"void","parts":0,"uploads":0,"batch":null}',
    b'{"state":"void","parts":0,"uploads":0,"batch":[0]}',
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A request before it is bytes; `path` is as it travels, quoted."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    host: str = "127.0.0.1"

    def signed(self, key, *, path=None, body=None, method=None):
        """With its sender's headers; or with those of another path, body or method."""
        said = urllib.parse.unquote(self.path) if path is None else path
        headers = sign_request(key, method or self.method, said, self.body if body is None else body)
        return dataclasses.replace(self, headers=(*self.headers, *headers.items()))

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def head(self, *, length=None, version="1.1"):
        lines = [f"{self.method} {self.path} HTTP/{version}", f"host: {self.host}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines += [f"content-length: {len(self.body)}" if length is None else length]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"

    def raw(self):
        return self.head() + self.body


@dataclasses.dataclass(frozen=True)
class Attack:
    """Bytes to send, piece by piece; `leave`: hang up instead of waiting for an answer."""

    kind: str
    pieces: tuple[bytes, ...]
    statuses: frozenset[int] = REFUSED
    leave: bool = False
    plain: bool = False  # without TLS
    keep: bool = True  # the connection may serve another attack
    counted: int | None = None  # refusals to be counted; None: one if the application answers


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int | None
    text: str = ""

    @property
    def by_server(self):
        """Whether the application did not say this."""
        return self.status is None or (self.status == 400 and self.text == NOT_HTTP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Victim:
    """A service: what it would take, of whom, and keys that it would not."""

    name: str
    address: tuple[str, int]
    authority: object
    taken: tuple[Request, ...]  # unsigned
    key: KeyPair
    another: KeyPair  # known, but not the sender
    stranger: KeyPair = dataclasses.field(default_factory=lambda: KeyPair.generate("sign"))
    expired: KeyPair | None = None
    task_id: bytes
    length: int  # of a ciphertext, or of a sealed sum
    slots: int  # 0 where sums travel
    most: int  # bytes of a body
    content: bytes = b""  # of the upload that it would take
    asked: tuple[tuple[Request, KeyPair], ...] = ()  # what it would tell, and whom
    sealed: Callable[..., bytes] | None = None  # (report, content, round=): an upload of this content by the sender


class Mutator:
    """Every kind of attack on one service, from a seed."""

    def __init__(self, victim, seed):
        self.victim, self.rng = victim, random.Random(seed)

    @property
    def kinds(self):
        """Their names; some are about one service alone."""
        names = [name.removeprefix("kind_") for name in dir(self) if name.startswith("kind_")]
        analyzer, shuffled = self.victim.name == "analyzer", self.victim.slots > 0
        only = {
            "upload": not analyzer,
            "messages": not analyzer and shuffled,
            "share": not analyzer and not shuffled,
            "question": bool(self.victim.asked),
            "part": analyzer,
            "slots": analyzer and shuffled,
            "sum": analyzer and not shuffled,
            "closed": analyzer,
        }
        return [name for name in names if only.get(name.partition("_")[0], True)]

    def attack(self, kind):
        made = getattr(self, f"kind_{kind}")()
        return dataclasses.replace(made, kind=kind)

    # what the sender did not sign

    def kind_flipped_body(self):
        request = self._signed()
        body = bytearray(request.body)
        for _ in range(self.rng.randint(1, 8)):
            body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
        changed = bytes(body) if bytes(body) != request.body else bytes(len(body))
        return _sent(request.replace(body=changed), {401})

    def kind_truncated_body(self):
        request = self._signed()
        return _sent(request.replace(body=request.body[: self.rng.randrange(len(request.body))]), {401})

    def kind_extended_body(self):
        request = self._signed()
        return _sent(request.replace(body=request.body + self.rng.randbytes(self.rng.randint(1, 40))), {401, 413})

    def kind_empty_body(self):
        return _sent(self._signed().replace(body=b""), {401})

    def kind_swapped_body_halves(self):
        request = self._signed()
        half = len(request.body) // 2
        return _sent(request.replace(body=request.body[half:] + request.body[:half]), {401})

    def kind_flipped_signature(self):
        request = self._signed()
        return _sent(_with(request, **{"dovetail-signature": self._flipped(request, "dovetail-signature")}), {401})

    def kind_wrong_signature_size(self):
        signature = self.rng.randbytes(self.rng.choice([0, 1, 63, 65, 500])).hex()
        return _sent(_with(self._signed(), **{"dovetail-signature": signature}), {401})

    def kind_flipped_digest(self):
        request = self._signed()
        return _sent(_with(request, **{"dovetail-digest": self._flipped(request, "dovetail-digest")}), {401})

    def kind_odd_digest(self):
        odd = self.rng.choice(["", "00", "zz" * 32, self.rng.randbytes(31).hex(), self.rng.randbytes(33).hex()])
        return _sent(_with(self._signed(), **{"dovetail-digest": odd}), {401})

    def kind_signature_split_elsewhere(self):
        """A byte of the signature moved into what is signed: the same bytes, in other places."""
        request = self._signed()
        signature = dict(request.headers)["dovetail-signature"]
        return _sent(_with(request, **{"dovetail-signature": signature[: 2 * self.rng.randrange(64)]}), {401})

    def kind_signature_of_another_body(self):
        request = self._request()
        return _sent(request.signed(self.victim.key, body=self.rng.randbytes(len(request.body))), {401})

    def kind_signature_of_another_path(self):
        request = self._request()
        return _sent(request.signed(self.victim.key, path=request.path.replace("/rounds/1/", "/rounds/2/")), {401})

    def kind_signature_of_another_method(self):
        return _sent(self._request().signed(self.victim.key, method="PUT"), {401})

    def kind_unsigned(self):
        return _sent(self._request(), {401})

    def kind_unknown_key(self):
        return _sent(self._request().signed(self.victim.stranger), {401})

    def kind_expired_key(self):
        return _sent(self._request().signed(self.victim.expired or self.victim.stranger), {401})

    def kind_wrong_key_id(self):
        request, choices = self._signed(), [self.victim.another.public.key_id, self.rng.randbytes(8), b"", bytes(9)]
        return _sent(_with_key(request, self.rng.choice(choices).hex()), {401})

    def kind_key_id_that_is_no_hex(self):
        text = "".join(
            chr(self.rng.choice([*range(33, 127), *range(161, 256)])) for _ in range(self.rng.randint(1, 40))
        )
        return _sent(_with_key(self._signed(), text), {401})

    # other places

    def kind_other_method(self):
        method = self.rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW", "post"])
        return _sent(self._signed().replace(method=method), {400 if method in ("BREW", "post") else 405})

    def kind_other_path(self):
        request = self._signed()
        at = self.rng.randrange(1, len(request.path))
        chars = "0123456789abcdefXYZ/.-_~%"
        changed = self.rng.choice(
            [
                request.path[:at] + request.path[at + 1 :],
                request.path[:at] + self.rng.choice(chars) + request.path[at:],
                request.path + self.rng.choice(["/", "/x", "//", "%2f", ";x", "%00"]),
                self.rng.choice(["/", "", "//", "/v2"]) + request.path,
                request.path.upper(),
                "/../" * self.rng.randint(1, 9),
                "/" + "a" * self.rng.randint(1, 4000),
            ]
        )
        changed = changed if changed not in (request.path, "/") else "/nowhere"
        return _sent(request.replace(path=changed), {400, 401, 404, 405})

    def kind_odd_number_in_the_path(self):
        numbers = (
            "-1",
            "1.0",
            "1e3",
            "+1",
            "%201",
            "1%0A",
            "0x1",
            "NaN",
            "inf",
            "9" * 400,
            "1_0",
            "\u0663",
            "\u00b2",
            "\ud55c",
        )
        odd = self.rng.choice([urllib.parse.quote(text, safe="%") for text in numbers])
        request = self._request()
        path = request.path.replace("/rounds/1/", f"/rounds/{odd}/")
        return _sent(request.replace(path=path).signed(self.victim.key), {400})

    def kind_odd_model(self):
        odd = self.rng.choice(["-1", "2", "999999999", "9" * 30, "NaN", "%D9%A3", "1.5", "%00", "0%2F0"])
        path = f"/v1/tasks/{self.victim.task_id.hex()}/models/{odd}"
        return _sent(Request("GET", path), {400, 404, 410})

    def kind_roster_for_a_client(self):
        path = f"/v1/tasks/{self.victim.task_id.hex()}/rounds/1/roster"
        return _sent(Request("GET", path).signed(self.victim.key), {401, 404})

    def kind_swapped_round(self):
        other = self.rng.choice([0, 2, 3, 7, 10**8])
        request = self._request()
        path = request.path.replace("/rounds/1/", f"/rounds/{other}/")
        body = request.body
        if self.victim.sealed is not None:  # else it would not even open
            body = self.victim.sealed(body[:16], self.victim.content, round=other)
        changed = request.replace(path=path, body=body)
        return _sent(changed.signed(self.victim.key), {410, 425, *self._early(path)})

    def _early(self, path):
        """Round 0 is over before the first is: what a shuffler says of it again is heard, and ignored."""
        return {200} if path.endswith("/rounds/0/closed") else set()

    def kind_swapped_round_of_another_signature(self):
        request = self._signed()
        return _sent(request.replace(path=request.path.replace("/rounds/1/", "/rounds/2/")), {401})

    def kind_swapped_task(self):
        request = self._request()
        path = request.path.replace(self.victim.task_id.hex(), self.rng.randbytes(32).hex())
        return _sent(request.replace(path=path).signed(self.victim.key), {400})

    def kind_path_in_the_host_header(self):
        request = self._signed()
        path = request.path.replace("/rounds/1/", "/rounds/2/")
        host = self.rng.choice([f"x{request.path}?", f"x{request.path}#", "[::1", "x/../", "a b", "\xff"])
        return _sent(request.replace(path=path, host=host), {401})

    # what the sender signed, but would not if it were honest

    def kind_messages_too_few(self):
        count = self.rng.randrange(self.victim.slots)
        return self._upload(list(range(count)), {409})

    def kind_messages_too_many(self):
        return self._upload([*range(self.victim.slots), 0], {413})

    def kind_messages_out_of_range(self):
        slots = list(range(self.victim.slots))
        slots[self.rng.randrange(len(slots))] = self.rng.choice([self.victim.slots, 2**31, 2**32 - 1])
        return self._upload(slots, {409})

    def kind_messages_in_one_slot(self):
        slots = list(range(self.victim.slots))
        slots[-1] = self.rng.randrange(len(slots) - 1)
        return self._upload(slots, {409})

    def kind_messages_with_a_truncated_ciphertext(self):
        return self._resealed(self.victim.content[: -self.rng.randrange(1, self.victim.length)], {400})

    def kind_messages_with_an_extended_ciphertext(self):
        whole = 4 + self.victim.length
        return self._resealed(self.victim.content[:-whole] + self.rng.randbytes(self.rng.randrange(1, whole)), {400})

    def kind_upload_shorter_than_its_id(self):
        body = self.rng.randbytes(self.rng.randrange(16))
        return _sent(self._request().replace(body=body).signed(self.victim.key), {400})

    def kind_messages_with_swapped_fields(self):
        words = 4 * self.victim.slots
        return self._resealed(self.victim.content[words:] + self.victim.content[:words], {409})

    def kind_upload_that_is_not_sealed(self):
        return self._upload_of(self.rng.randbytes(16) + self.victim.content, {400})

    def kind_upload_with_a_changed_seal(self):
        body = bytearray(self._request().body)
        body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
        return self._upload_of(bytes(body), {400})

    def kind_upload_with_a_truncated_seal(self):
        body = self._request().body
        return self._upload_of(body[: self.rng.randrange(16, len(body))], {400})

    def kind_upload_under_another_id(self):
        return self._upload_of(self.rng.randbytes(16) + self._request().body[16:], {400})

    def kind_upload_sealed_for_another_round(self):
        other = self.rng.choice([0, 2, 7])
        return self._upload_of(self.victim.sealed(self.rng.randbytes(16), self.victim.content, round=other), {400})

    def kind_upload_copied_by_another_client(self):
        return _sent(self._request().signed(self.victim.another), {400})

    def kind_part_with_an_odd_batch(self):
        odd = self.rng.choice(["0", "00" * 15, "00" * 17, "AA" * 16, "zz" * 16, "%20" + "00" * 16, "\u0663" * 32])
        request = self._part_request()
        head, _, tail = request.path.partition("/batches/")
        path = f"{head}/batches/{urllib.parse.quote(odd, safe='%')}/{tail.partition('/')[2]}"
        return _sent(request.replace(path=path).signed(self.victim.key), {400})

    def kind_slots_out_of_range(self):
        slots = [self.rng.choice([self.victim.slots, 2**31, 2**32 - 1])]
        return self._part(np.array(slots, "<u4").tobytes() + self.rng.randbytes(self.victim.length), {400})

    def kind_part_of_another_length(self):
        size = self.rng.choice([1, 3, self.victim.length - 1, self.victim.length + 5, 3 * self.victim.length])
        size += size % (4 + self.victim.length) == 0
        return self._part(self.rng.randbytes(size), {400} if self.victim.slots else {400, 413})

    def kind_closed_with_wrong_json(self):
        request = next(one for one in self.victim.taken if one.path.endswith("/closed"))
        return _sent(request.replace(body=self.rng.choice(WRONG_JSON)).signed(self.victim.key), {400})

    def kind_share_of_another_length(self):
        cut = self.rng.randrange(len(self.victim.content))
        return self._resealed(self.victim.content[:cut], {409})

    def kind_share_of_another_form(self):
        """Another version, group, number of bits, form or length than the task's."""
        changed = bytearray(self.victim.content)
        changed[self.rng.randrange(8)] ^= 1 << self.rng.randrange(8)
        return self._resealed(bytes(changed), {409})

    def kind_share_that_is_too_long(self):
        return self._resealed(self.victim.content + self.rng.randbytes(self.rng.randint(1, 40)), {413})

    def kind_share_of_nothing(self):
        return self._resealed(b"", {409})

    def kind_sum_with_a_changed_seal(self):
        request = self._part_request()
        body = bytearray(request.body)
        body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
        return self._part(bytes(body), {400})

    def kind_sum_of_another_batch(self):
        request = self._part_request()
        path = request.path.replace(bytes(16).hex(), self.rng.randbytes(16).hex())
        return _sent(request.replace(path=path).signed(self.victim.key), {400})

    def kind_sum_of_another_aggregator(self):
        return _sent(self._part_request().signed(self.victim.another), {400})

    # what is told to some alone

    def kind_question_unsigned(self):
        request, _ = self.rng.choice(self.victim.asked)
        return _sent(request, {401})

    def kind_question_by_another(self):
        request, key = self.rng.choice(self.victim.asked)
        others = [one for _, one in self.victim.asked if one is not key]
        asking = [*others, self.victim.key, self.victim.another, self.victim.stranger, self.victim.expired]
        return _sent(request.signed(self.rng.choice(asking)), {401})

    def kind_question_with_a_flipped_signature(self):
        request, key = self.rng.choice(self.victim.asked)
        signed = request.signed(key)
        return _sent(_with(signed, **{"dovetail-signature": self._flipped(signed, "dovetail-signature")}), {401})

    def kind_question_signed_for_another(self):
        (request, key), (other, _) = self.rng.sample(self.victim.asked, 2)
        return _sent(request.signed(key, path=other.path), {401})

    def kind_question_with_an_odd_round(self):
        request, key = self.rng.choice([one for one in self.victim.asked if "/rounds/1/" in one[0].path])
        odd = self.rng.choice(["-1", "1.0", "NaN", "9" * 400, "%201", "1%0A", "%D9%A3"])
        return _sent(request.replace(path=request.path.replace("/rounds/1/", f"/rounds/{odd}/")).signed(key), {400})

    def kind_question_of_another_task(self):
        request, key = self.rng.choice([one for one in self.victim.asked if "/rounds/1/" in one[0].path])
        path = request.path.replace(self.victim.task_id.hex(), self.rng.randbytes(32).hex())
        return _sent(request.replace(path=path).signed(key), {400})

    def kind_question_by_another_method(self):
        request, key = self.rng.choice(self.victim.asked)
        method = self.rng.choice(["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
        status = 400 if method == "BREW" else 405
        return _sent(request.replace(method=method, body=self.rng.randbytes(40)).signed(key), {status})

    def kind_question_of_an_open_round(self):
        """Of who may ask, about a round that is open or was never heard of: there is nothing to tell."""
        request, key = self.rng.choice([one for one in self.victim.asked if "/rounds/1/" in one[0].path])
        path = request.path.replace("/rounds/1/", f"/rounds/{self.rng.choice([0, 1, 2, 10**8])}/")
        return _sent(request.replace(path=path).signed(key), {200})

    # how it is said

    def kind_oversize_body(self):
        body = bytes(self.victim.most + self.rng.randint(1, self.victim.most))
        return Attack(
            "",
            (self._request().replace(body=body).signed(self.victim.key).raw(),),
            frozenset({413}),
            keep=False,
            counted=1,
        )

    def kind_oversize_body_in_chunks(self):
        request = self._request().signed(self.victim.key)
        piece = max(1, self.victim.most // 3)
        chunk = f"{piece:x}\r\n".encode() + bytes(piece) + b"\r\n"
        pieces = (request.head(length="transfer-encoding: chunked"), *[chunk] * 5, b"0\r\n\r\n")
        return Attack("", pieces, frozenset({411}), keep=False, counted=1)

    def kind_unsigned_body_in_chunks(self):
        request = self._request()
        cut = self.rng.randrange(1, len(request.body))
        chunks = [f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (request.body[:cut], request.body[cut:])]
        return Attack("", (request.head(length="transfer-encoding: chunked"), *chunks, b"0\r\n\r\n"), frozenset({411}))

    def kind_malformed_chunk(self):
        head = self._signed().head(length="transfer-encoding: chunked")
        return Attack("", (head + b"zz\r\nbody\r\n0\r\n\r\n",), frozenset({400}), keep=False, counted=1)

    def kind_slow_body(self):
        request = self._signed(self.victim.stranger)
        third = max(1, len(request.body) // 3)
        parts = (request.body[:third], request.body[third : 2 * third], request.body[2 * third :])
        return Attack("", (request.head(), *parts), frozenset({401}))

    def kind_left_in_the_body(self):
        request = self._signed()
        part = request.body[: self.rng.randrange(len(request.body))]
        return Attack("", (request.head() + part,), leave=True, keep=False, counted=1)

    def kind_longer_length_than_body(self):
        request = self._signed()
        length = f"content-length: {len(request.body) + self.rng.choice([1, 1000, 10**12])}"
        return Attack("", (request.head(length=length) + request.body[:-1],), leave=True, keep=False, counted=1)

    def kind_shorter_length_than_body(self):
        request = self._signed()
        length = f"content-length: {self.rng.randrange(len(request.body))}"
        return Attack("", (request.head(length=length) + request.body,), frozenset({400, 401}), keep=False, counted=1)

    def kind_expect_continue(self):
        request = self._request().replace(headers=(("expect", "100-continue"),))
        return Attack("", (request.head(), request.body), frozenset({401}))

    def kind_upgrade(self):
        headers = (("connection", "upgrade"), ("upgrade", self.rng.choice(["websocket", "h2c"])))
        return dataclasses.replace(_sent(self._request().replace(headers=headers), {401}), keep=False)

    def kind_old_version(self):
        request = self._signed(self.victim.stranger)
        return Attack("", (request.head(version="1.0") + request.body,), frozenset({401}), keep=False)

    def kind_flipped_head(self):
        request = self._signed(self.victim.stranger)
        lines = request.head().rpartition(b"content-length")
        head = bytearray(lines[0])
        for _ in range(self.rng.randint(1, 4)):
            head[self.rng.randrange(len(head) - 2)] ^= 1 << self.rng.randrange(8)
        return Attack("", (bytes(head) + lines[1] + lines[2] + request.body,), keep=False)

    # no HTTP at all

    def kind_not_http(self):
        junk = self.rng.randbytes(self.rng.randint(1, 300)).replace(b"\n", b".")
        return Attack("", (b"\x00" + junk + b"\r\n\r\n",), frozenset({400}), keep=False, counted=0)

    def kind_wrong_framing(self):
        request = self._signed()
        length = self.rng.choice(
            [
                "content-length: -1",
                "content-length: NaN",
                "content-length: " + "9" * 40,
                "content-length: 1\r\ncontent-length: 2",
                "x" * 300_000 + ": 1",
            ]
        )
        return Attack("", (request.head(length=length),), frozenset({400, 401}), keep=False)

    def kind_odd_transfer_encoding(self):
        head = self._signed().head(length=f"transfer-encoding: {self.rng.choice(['gzip', 'identity', 'x'])}")
        return Attack("", (head,), frozenset({400, 411}), keep=False, counted=1)

    def kind_another_protocol(self):
        said = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET /nowhere HTTP/9.9\r\n\r\n",
            b"\r\n" * 5 + b"x\r\n\r\n",
        ]
        return Attack("", (self.rng.choice(said),), frozenset({400, 404}), keep=False)

    def kind_not_tls(self):
        said = self.rng.choice([self._signed().raw(), self.rng.randbytes(200), b"\x16\x03\x01\x02\x00" + bytes(200)])
        return Attack("", (said,), leave=True, plain=True, keep=False, counted=0)

    def _flipped(self, request, name):
        changed = bytearray(bytes.fromhex(dict(request.headers)[name]))
        changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return changed.hex()

    def _request(self):
        return self.rng.choice(self.victim.taken)

    def _signed(self, key=None):
        return self._request().signed(key or self.victim.key)

    def _upload(self, slots, statuses):
        sealed = self.rng.randbytes(self.victim.length * len(slots))
        return self._resealed(np.array(slots, "<u4").tobytes() + sealed, statuses)

    def _resealed(self, content, statuses):
        """An upload of this content that its sender has sealed as it should."""
        return self._upload_of(self.victim.sealed(self.rng.randbytes(16), content), statuses)

    def _upload_of(self, body, statuses):
        return _sent(self._request().replace(body=body).signed(self.victim.key), statuses)

    def _part(self, body, statuses):
        return _sent(self._part_request().replace(body=body).signed(self.victim.key), statuses)

    def _part_request(self):
        return next(one for one in self.victim.taken if "/parts/" in one.path)


def _sent(request, statuses):
    return Attack("", (request.raw(),), frozenset(statuses))


def _with(request, **changes):
    """With other values of these headers."""
    return request.replace(headers=tuple((name, changes.get(name, value)) for name, value in request.headers))


def _with_key(request, key_id):
    return _with(request, **{"dovetail-key": key_id})


def refusals_for(attack, answer):
    """How many refusals the service has to count for an attack that was answered so."""
    return int(not answer.by_server and answer.status >= 400) if attack.counted is None else attack.counted


class Line:
    """A connection to a service, opened again when it was closed."""

    def __init__(self, victim):
        self._address = victim.address
        self._context = ssl.create_default_context(cafile=str(victim.authority))
        self._streams = None

    async def send(self, attack, *, pause=0.0):
        """Send the pieces, with pauses between them, and read the answer, if any."""
        kept = self._streams is not None
        try:
            return await asyncio.wait_for(self._send(attack, pause), 60)
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.close()
            if kept and not attack.leave:  # the service had closed what was kept
                return await self.send(attack, pause=pause)
            return Answer(None)

    async def _send(self, attack, pause):
        reader, writer = await self._open(plain=attack.plain)
        with contextlib.suppress(ConnectionError):  # it may have been refused already: read what was said
            for piece in attack.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
        if attack.leave:
            await self.close()
            return Answer(None)
        answer, closes = await _answer(reader, head_only=attack.pieces[0].startswith(b"HEAD "))
        if closes or not attack.keep:
            await self.close()
        return answer

    async def _open(self, *, plain):
        if plain:
            await self.close()
        if self._streams is None:
            tls = {} if plain else {"ssl": self._context, "server_hostname": self._address[0]}
            self._streams = await asyncio.open_connection(*self._address, **tls)
        return self._streams

    async def close(self):
        if self._streams is not None:
            streams, self._streams = self._streams, None
            streams[1].close()
            with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
                await asyncio.wait_for(streams[1].wait_closed(), 5)


async def _answer(reader, *, head_only):
    """The answer, after any that say to go on, and whether the connection ends with it."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        if status >= 200:
            break
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    if head_only:
        return Answer(status), True
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
        return Answer(status, body.decode(errors="replace")), headers.get("connection") == "close"
    body = await reader.read(-1)
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(body.split(b"\r\n")[1::2])
    return Answer(status, body.decode(errors="replace")), True
