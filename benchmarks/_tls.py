"""The client's side of TLS 1.3 (RFC 8446) for a load generator: full handshakes, one suite, no input or output.

Python's `ssl` spends most of a handshake at a client on looking up algorithms and on decoding a certificate that is
always the same. Here that is decoded once; everything else is done anew for every connection: an ephemeral X25519 key,
the check of the service's signature and of its Finished message, keys for both directions. For measurements against a
service of one's own: whose certificate it is nobody checks, and nothing is done in constant time.
"""

import functools
import os
import struct
from collections.abc import Iterator
from hashlib import sha256

import nacl.bindings
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_CHANGE, _ALERT, _HANDSHAKE, _DATA = 20, 21, 22, 23
_SERVER_HELLO, _TICKET, _EXTENSIONS, _CERTIFICATE, _VERIFY, _FINISHED = 2, 4, 8, 11, 15, 20
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
_SUITE, _GROUP, _SIGNATURE, _VERSION = 0x1301, 0x1D, 0x0403, 0x0304  # AES-128-GCM-SHA256, X25519, ECDSA P-256
_ECDSA = ec.ECDSA(hashes.SHA256())
_RECORD = 1 << 14  # bytes of a record, at most
_INNER, _OUTER = bytes(i ^ 0x36 for i in range(256)), bytes(i ^ 0x5C for i in range(256))
_NOTHING = sha256(b"").digest()


def _hmac(key: bytes, data: bytes) -> bytes:
    key = key.ljust(64, b"\0")
    return sha256(key.translate(_OUTER) + sha256(key.translate(_INNER) + data).digest()).digest()


def _expand(secret: bytes, label: bytes, context: bytes = b"", length: int = 32) -> bytes:
    """HKDF-Expand-Label, of at most one block."""
    label = b"tls13 " + label
    info = struct.pack(">HB", length, len(label)) + label + bytes([len(context)]) + context
    return _hmac(secret, info + b"\1")[:length]


_EARLY = _expand(_hmac(bytes(32), bytes(32)), b"derived", _NOTHING)


class _Way:
    """One direction under one secret."""

    def __init__(self, secret: bytes) -> None:
        self._aead = AESGCM(_expand(secret, b"key", length=16))
        self._start, self._count = int.from_bytes(_expand(secret, b"iv", length=12), "big"), 0

    def _nonce(self) -> bytes:
        self._count += 1
        return (self._start ^ (self._count - 1)).to_bytes(12, "big")

    def seal(self, data: bytes, kind: int) -> bytes:
        head = struct.pack(">BHH", _DATA, 0x0303, len(data) + 17)
        return head + self._aead.encrypt(self._nonce(), b"%b%c" % (data, kind), head)

    def open(self, record: bytes) -> tuple[int, bytes]:
        inner = self._aead.decrypt(self._nonce(), record[5:], record[:5]).rstrip(b"\0")
        return inner[-1], inner[:-1]


@functools.cache
def _public(certificate: bytes) -> ec.EllipticCurvePublicKey:
    key = x509.load_der_x509_certificate(certificate).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("expected a certificate of a key on P-256, got another kind")
    return key


def _extension(kind: int, body: bytes) -> bytes:
    return struct.pack(">HH", kind, len(body)) + body


def _fail(what: str) -> ConnectionError:
    return ConnectionError(f"expected {what} of a TLS 1.3 handshake, got something else")


class Client:
    """One connection: `hello` goes out first, and whatever comes in goes to `receive`.

    When it is `shaken`, `finished` has to go out before, or together with, the first data.
    """

    def __init__(self) -> None:
        self._private = os.urandom(32)
        self._transcript = sha256()
        self._raw = b""
        self._messages = b""
        self._reads: _Way | None = None
        self._writes: _Way
        self.shaken = False
        self.finished = b""

    def hello(self) -> bytes:
        share = nacl.bindings.crypto_scalarmult_base(self._private)
        extensions = (
            _extension(43, struct.pack(">BH", 2, _VERSION))
            + _extension(10, struct.pack(">HH", 2, _GROUP))
            + _extension(13, struct.pack(">HH", 2, _SIGNATURE))
            + _extension(51, struct.pack(">HHH", 36, _GROUP, 32) + share)
        )
        head = struct.pack(">H32sBHHBB", 0x0303, os.urandom(32), 0, 2, _SUITE, 1, 0)
        body = head + struct.pack(">H", len(extensions)) + extensions
        message = b"\1" + len(body).to_bytes(3, "big") + body
        self._transcript.update(message)
        return struct.pack(">BHH", _HANDSHAKE, 0x0301, len(message)) + message

    def send(self, data: bytes) -> bytes:
        """Data as records."""
        if len(data) <= _RECORD:
            return self._writes.seal(data, _DATA)
        return b"".join(self._writes.seal(data[i : i + _RECORD], _DATA) for i in range(0, len(data), _RECORD))

    def receive(self, incoming: bytes) -> bytes:
        """The data in what came."""
        received = []
        for record in self._records(incoming):
            if record[0] == _CHANGE and not self.shaken:
                continue  # it says nothing, to please what is in the way
            kind, data = (record[0], record[5:]) if self._reads is None else self._reads.open(record)
            if kind == _DATA and self.shaken:
                received.append(data)
            elif kind == _HANDSHAKE:
                self._handshake(data)
            elif kind == _ALERT:
                raise ConnectionError(f"expected the service to go on, got alert {data[1]}")
            else:
                raise _fail("a record")
        return b"".join(received)

    def _records(self, incoming: bytes) -> Iterator[bytes]:
        raw = self._raw + incoming
        at = 0
        while len(raw) - at >= 5 and len(raw) - at >= (end := 5 + int.from_bytes(raw[at + 3 : at + 5], "big")):
            yield raw[at : at + end]
            at += end
        self._raw = raw[at:]

    def _handshake(self, data: bytes) -> None:
        self._messages += data
        while len(self._messages) >= 4:
            size = 4 + int.from_bytes(self._messages[1:4], "big")
            if len(self._messages) < size:
                return
            message, self._messages = self._messages[:size], self._messages[size:]
            if not self.shaken:
                self._take(message)
            elif message[0] != _TICKET:  # nobody comes back with it
                raise _fail("nothing after the end")

    def _take(self, message: bytes) -> None:
        kind, body = message[0], message[4:]
        before = self._transcript.digest()
        self._transcript.update(message)
        if (kind == _SERVER_HELLO) != (self._reads is None):
            raise _fail("the messages in their order")
        if kind == _SERVER_HELLO:
            self._agree(body)
        elif kind == _CERTIFICATE:
            begin = 1 + body[0] + 3  # the context of a request, and the length of all
            length = int.from_bytes(body[begin : begin + 3], "big")
            self._public = _public(body[begin + 3 : begin + 3 + length])
        elif kind == _VERIFY:
            if int.from_bytes(body[:2], "big") != _SIGNATURE:
                raise _fail("a signature by ECDSA on P-256")
            signed = b" " * 64 + b"TLS 1.3, server CertificateVerify\0" + before
            self._public.verify(body[4:], signed, _ECDSA)
            self._proved = True
        elif kind == _FINISHED:
            self._finish(body, before)
        elif kind != _EXTENSIONS:
            raise _fail("another message")

    def _agree(self, body: bytes) -> None:
        """Keys of the handshake, from the service's share."""
        at = 2 + 32 + 1 + body[34]
        suite, _, size = struct.unpack_from(">HBH", body, at)
        extensions = {}
        at, end = at + 5, at + 5 + size
        while at < end:
            kind, length = struct.unpack_from(">HH", body, at)
            extensions[kind] = body[at + 4 : at + 4 + length]
            at += 4 + length
        share = struct.pack(">HH", _GROUP, 32)
        if suite != _SUITE or extensions.get(43) != struct.pack(">H", _VERSION) or extensions.get(51, b"")[:4] != share:
            raise _fail("the suite and the group that were offered")
        if body[2:34] == _RETRY:
            raise _fail("an answer to the first hello")
        shared = nacl.bindings.crypto_scalarmult(self._private, extensions[51][4:])
        secret = _hmac(_EARLY, shared)
        until = self._transcript.digest()
        self._ours, self._theirs = _expand(secret, b"c hs traffic", until), _expand(secret, b"s hs traffic", until)
        self._master = _hmac(_expand(secret, b"derived", _NOTHING), bytes(32))
        self._reads = _Way(self._theirs)
        self._proved = False

    def _finish(self, body: bytes, before: bytes) -> None:
        """Check that both saw the same, say so, and go on to the keys for data."""
        if not self._proved or body != _hmac(_expand(self._theirs, b"finished"), before):
            raise _fail("the end")
        until = self._transcript.digest()
        verify_data = _hmac(_expand(self._ours, b"finished"), until)
        self.finished = _Way(self._ours).seal(struct.pack(">B3s", _FINISHED, b"\0\0\x20") + verify_data, _HANDSHAKE)
        self._reads = _Way(_expand(self._master, b"s ap traffic", until))
        self._writes = _Way(_expand(self._master, b"c ap traffic", until))
        self.shaken = True
