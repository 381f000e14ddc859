"""Between the parties: whom a user talks to, what an impostor gets, and answers that do not wait for a full packet."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import math
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
from parties.household import Household, opened, running
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.parties.common import http_clients
from dovetail.parties.common.http_clients import (
    AnalyzerClient,
    Conflict,
    Gone,
    IntermediaryClient,
    Rejected,
    Unreachable,
)
from dovetail.parties.common.keys import KeyPair, ServicePairs
from dovetail.parties.common.sealing import Unsealable, open_sealed
from dovetail.parties.common.task import sign
from dovetail.parties.common.wire import RoundStatus, Verifiers
from dovetail.parties.user.client import Client
from dovetail.parties.user.participation import take_part
from dovetail.parties.user.policy import Refused


@pytest.mark.parametrize("link", [IntermediaryClient, AnalyzerClient])
@pytest.mark.parametrize(
    "url",
    [
        "http://shuffler.example",
        "http://10.0.0.7:8444",
        "http://0.0.0.0:8444",
        "http://[2001:db8::1]:8444",
        "http://127.0.0.1.example",
        "http://localhost.example",
        "http://127.0.0.1@shuffler.example",
        "ws://127.0.0.1:8444",
        "127.0.0.1:8444",
    ],
)
def test_without_tls_nobody_on_another_machine_is_spoken_to(link, url):
    with pytest.raises(ValueError, match="is not an https:// address; http:// is for this machine alone"):
        link(url)


@pytest.mark.parametrize(
    "url", ["https://shuffler.example", "http://127.0.0.1:8444", "http://[::1]:8444", "http://localhost:8444"]
)
def test_tls_or_this_machine_is_fine(url):
    IntermediaryClient(url).close()


class Impostor:
    """Who ends the line to a shuffler without having its keys: it says what it likes, and keeps what it is given."""

    def __init__(self, signed, task):
        self._signed, self._task, self.given = signed, task, []

    def task(self):
        return self._signed

    def notices(self):
        return []

    def status(self):
        over = bool(self.given)
        return RoundStatus(task_id=self._task.task_id, round=1, over=over, head=bytes(32))

    def model(self, round, *, dim):
        return np.zeros(dim, np.float32)

    def upload(self, task_id, round, upload, *, sender, signature):
        self.given.append(upload)


def client_of(household):
    return Client(household.folder / "user-0", policy=household.policy, key=household.users[0])


def trained(model):
    return np.ones_like(model)


@pytest.mark.parametrize("protocol", ["privunit", "split_and_mix"])
def test_an_impostor_without_the_shufflers_key_gets_nothing_that_it_can_open(tmp_path, protocol):
    """Not even with the analyzer's key: between the user and the shuffler there is another seal."""
    household = Household(tmp_path, protocol, dim=3)
    task, analyzer = household.task, household.ring.current().opening_key()
    impostors = [Impostor(household.signed, task) for _ in task.shufflers]
    assert take_part(client_of(household), impostors, trained) == 1
    own = ServicePairs(sign=KeyPair.generate("sign"), seal=KeyPair.generate("seal"))
    for index, impostor in enumerate(impostors):
        (upload,) = impostor.given
        for keys in (own, ServicePairs(sign=own.sign, seal=household.ring.current())):
            with pytest.raises(Unsealable):
                opened(task, upload, keys, household.users[0], index=index)
        body, length = upload.encode(), task.message_bytes
        assert not any(
            opens(body[i : i + length], analyzer, task.message_purpose(1)) for i in range(len(body) - length + 1)
        )
        inside = opened(task, upload, household.shuffler_keys[index], household.users[0], index=index)
        assert opens(inside[-length:], analyzer, task.message_purpose(1))  # the search finds what is there


def opens(sealed, key, purpose):
    try:
        open_sealed(sealed, key, purpose)
    except Unsealable:
        return False
    return True


@pytest.mark.parametrize("theirs", ["both", "sign", "seal"])
def test_an_impostor_with_a_task_of_its_own_gets_no_report(tmp_path, theirs):
    """Even one that the signer has signed: who has pinned shufflers reports to no others, and spends nothing."""
    household = Household(tmp_path, "privunit", dim=3)
    (pinned,) = household.task.shufflers
    own = {use: KeyPair.generate(use).public for use in (("sign", "seal") if theirs == "both" else (theirs,))}
    other = msgspec.structs.replace(household.task, shufflers=(msgspec.structs.replace(pinned, **own),))
    impostor = Impostor(sign(other, household.signer), other)
    with pytest.raises(Refused, match="not among this user's pinned shufflers"):
        take_part(client_of(household), [impostor], trained)
    assert impostor.given == []
    assert not list((tmp_path / "user-0" / "spending").glob("task-*"))


def test_small_answers_are_sent_at_once(tmp_path, monkeypatch):
    """Nagle's algorithm is off on every connection that is accepted: else an answer waits 40 ms for another packet."""
    made, accepted = HttpToolsProtocol.connection_made, []

    def watched(protocol, transport):
        accepted.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(protocol, transport)

    monkeypatch.setattr(HttpToolsProtocol, "connection_made", watched)
    household = Household(tmp_path, "privunit")
    with running(household, monkeypatch) as up:
        for address, link in ((up.shuffler, IntermediaryClient), (up.analyzer, AnalyzerClient)):
            before = len(accepted)
            asked = link("https://{}:{}".format(*address), ca=up.authority)
            assert asked.status().round == 1
            asked.close()
            assert len(accepted) > before
    assert all(accepted)


class Scoundrel(http.server.BaseHTTPRequestHandler):
    """Answers that cost their reader more than their sender."""

    def do_GET(self):
        bomb = gzip.compress(bytes(1 << 22))
        self.send_response(200)
        if self.path == "/v1/task":
            self.send_header("content-encoding", "gzip")
            self.send_header("content-length", str(len(bomb)))
            self.end_headers()
            self.wfile.write(bomb)
            return
        self.send_header("content-length", "1000")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(100):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.02)

    def log_message(self, *said):
        pass


def test_answers_that_unfold_or_drip_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(http_clients, "_SLOWEST_RATE", math.inf)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scoundrel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with contextlib.closing(IntermediaryClient(f"http://127.0.0.1:{server.server_port}", timeout=0.2)) as link:
            with pytest.raises(Rejected, match="sent a compressed answer"):
                link.task()
            with pytest.raises(Unreachable, match="sent only part of its answer in time"):
                link.status()
        server.shutdown()


class Refuses(http.server.BaseHTTPRequestHandler):
    """Answers with the status that it is asked for."""

    def do_GET(self):
        self.send_response(int(self.path.rsplit("/", 1)[1]))
        self.send_header("content-length", "5")
        self.end_headers()
        self.wfile.write(b"words")

    def log_message(self, *said):
        pass


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (409, Conflict, "words"),
        (410, Gone, "words"),
        (404, Rejected, "words"),
        (425, Unreachable, "status 425"),
        (429, Unreachable, "status 429"),
        (500, Unreachable, "status 500"),
    ],
)
def test_users_hear_whether_to_come_back_to_go_on_or_to_give_up(status, kind, words):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with contextlib.closing(IntermediaryClient(f"http://127.0.0.1:{server.server_port}")) as link:
            with pytest.raises((Rejected, Unreachable), match=words) as heard:
                link.answers(f"/{status}")
            assert heard.type is kind
        server.shutdown()


@pytest.mark.parametrize(
    ("pages", "reports", "results"),
    [
        ([[]], 0, []),
        ([[b"a", b"b"], [b"c"]], 3, [b"a", b"b", b"c"]),
        ([[b"a"], []], 3, None),  # an aggregator that stops short: asked no further
        ([[b"a"], None], 3, None),
    ],
)
def test_pages_of_verifiers_are_asked_for_until_they_are_all_there_or_one_is_empty(
    monkeypatch, pages, reports, results
):
    monkeypatch.setattr(IntermediaryClient, "_path_prefix", "/v1/tasks/00")
    client = IntermediaryClient.__new__(IntermediaryClient)
    answers = iter(pages)

    def ask(method, path):
        page = next(answers)
        return msgspec.msgpack.encode(None if page is None else Verifiers(index=0, total=reports, results=page))

    client._ask = ask
    told = client.verifiers(1, reports=reports)
    assert (told if told is None else told.results) == results
    assert next(answers, "all were asked for") == "all were asked for"
