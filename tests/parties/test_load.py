"""The load generator of the benchmarks: an honest client of TLS 1.3, whose handshakes OpenSSL accepts."""

from __future__ import annotations

import asyncio
import importlib
import ssl
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from parties.test_door import Opened

from dovetail.parties.common.certificates import make_authority, make_certificate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tls(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_tls")


class Server:
    """OpenSSL's side of a connection, in memory."""

    def __init__(self, folder, *, tickets=0):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*make_certificate(folder, make_authority(folder), host="127.0.0.1"))
        context.num_tickets = tickets
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def hear(self, data):
        self._incoming.write(data)

    def say(self):
        return self._outgoing.read()

    def flight(self, hello):
        self.hear(hello)
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self.say()


def test_a_handshake_is_full_and_data_of_many_records_goes_both_ways(tmp_path, tls):
    client, server = tls.Client(), Server(tmp_path, tickets=2)
    said = server.flight(client.hello())
    assert b"".join(client.receive(said[i : i + 7]) for i in range(0, len(said), 7)) == b""  # in whatever pieces
    assert client.shaken
    sent = bytes(range(256)) * 200
    server.hear(client.finished + client.send(sent))
    server.tls.do_handshake()
    assert (server.tls.version(), server.tls.cipher()[0]) == ("TLSv1.3", "TLS_AES_128_GCM_SHA256")
    assert not server.tls.session_reused
    assert b"".join(server.tls.read(1 << 14) for _ in range(-(-len(sent) >> 14))) == sent
    for piece in (b"answer", b"another"):
        server.tls.write(piece)
    assert client.receive(server.say()) == b"answeranother"  # behind tickets that nobody wants
    with pytest.raises(ssl.SSLWantReadError):
        server.tls.unwrap()
    with pytest.raises(ConnectionError, match="got alert 0"):
        client.receive(server.say())


def test_who_does_not_hold_the_certificates_key_is_refused(tmp_path, tls, monkeypatch):
    client, other = tls.Client(), ec.generate_private_key(ec.SECP256R1()).public_key()
    monkeypatch.setattr(tls, "_public", lambda certificate: other)
    said = Server(tmp_path).flight(client.hello())
    with pytest.raises(InvalidSignature):
        client.receive(said)
    assert not client.shaken


def test_whoever_changes_what_is_said_is_noticed(tmp_path, tls):
    client, server = tls.Client(), Server(tmp_path)
    said = bytearray(server.flight(client.hello()))
    said[-1] ^= 1
    with pytest.raises(InvalidTag):
        client.receive(bytes(said))
    client, server = tls.Client(), Server(tmp_path)
    hello = bytearray(client.hello())
    hello[12] ^= 1  # of its random part, which both must have seen alike
    with pytest.raises(InvalidTag):
        client.receive(server.flight(bytes(hello)))


@pytest.mark.parametrize("fresh", [False, True])
def test_every_request_is_answered(tmp_path, tls, fresh):
    load = importlib.import_module("_load")

    async def run():
        async with Opened(tmp_path, tls=True) as opened:
            asked = [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"] * 2
            made = load.Load(opened.address)
            return await asyncio.to_thread(made.run, [asked] * 20, connections=4, fresh=fresh)

    measured = asyncio.run(run())
    assert measured.statuses == {200: 40}
    assert len(measured.latencies) == 20
