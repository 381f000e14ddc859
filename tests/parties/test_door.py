"""The door: it stays open to who speaks, whoever else is silent, slow or many; processes that die are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time

import httpx
import pytest
from parties.household import Direct, Household
from starlette.responses import PlainTextResponse

from dovetail.parties.common.certificates import make_authority, make_certificate
from dovetail.parties.common.wire import sign_request
from dovetail.parties.fleet import free_ports
from dovetail.parties.http import server as connection_module
from dovetail.parties.http import server as door_module
from dovetail.parties.http.analyzer import AnalyzerService
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.http.monitoring import serve_metrics
from dovetail.parties.http.requests import Counts
from dovetail.parties.http.server import BoundedServer, raise_connection_limit
from dovetail.parties.http.workers import _PAGE, SharedCounts


async def hello(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await PlainTextResponse("hello")(scope, receive, send)


class Opened:
    """A door in this process, with a line to it."""

    def __init__(self, tmp_path, *, most=50, tls=False, app=hello):
        self.most, self._app, certified = most, app, None
        if tls:
            certified = make_certificate(tmp_path, make_authority(tmp_path), host="127.0.0.1")
        self.listener = door_module.listen("127.0.0.1", 0)
        self.address = self.listener.getsockname()
        self._files = certified
        self.context = ssl.create_default_context(cafile=tmp_path / "authority.crt") if tls else None

    async def __aenter__(self):
        config = door_module.uvicorn_config(self._app, *(self._files or (None, None)))
        self.door = BoundedServer(config, max_connections=self.most)
        self._task = asyncio.create_task(self.door._serve([self.listener]))
        while not self.door.started:
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *error):
        self.door.should_exit = True
        await self._task

    async def ask(self):
        """A request on a connection of its own; the status."""
        reader, writer = await asyncio.open_connection(*self.address, ssl=self.context)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(65536), 10)
        writer.close()
        return answer.split()[1]


def silent(address, count):
    """So many who connect and say nothing."""
    found = []
    for _ in range(count):
        one = socket.create_connection(address)
        one.setblocking(False)
        found.append(one)
    return found


@pytest.mark.parametrize("tls", [False, True])
def test_the_longest_silent_make_room_for_who_comes(tmp_path, tls):
    async def siege():
        async with Opened(tmp_path, most=20, tls=tls) as opened:
            quiet = await asyncio.to_thread(silent, opened.address, 60)
            answers = [await opened.ask() for _ in range(5)]
            held = opened.door.num_connections
            for one in quiet:
                one.close()
            return answers, held, opened.door.dropped["silent"]

    answers, held, turned = asyncio.run(siege())
    assert answers == [b"200"] * 5
    assert held <= 20 and turned >= 40


def test_who_says_nothing_or_half_a_head_is_let_go_of(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "_HEAD", -1.0)

    async def wait():
        async with Opened(tmp_path) as opened:
            lines = [await asyncio.open_connection(*opened.address) for _ in range(2)]
            lines[1][1].write(b"GET / HTT")
            return [await asyncio.wait_for(reader.read(), 10) for reader, _ in lines]

    assert asyncio.run(wait()) == [b"", b""]


def test_a_head_without_end_is_not_read(tmp_path):
    """Whoever sends it hears so, or nothing, depending on what is on its way when the connection ends."""

    async def send():
        async with Opened(tmp_path) as opened:
            reader, writer = await asyncio.open_connection(*opened.address)
            writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * 300_000)
            with contextlib.suppress(ConnectionResetError):
                assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 400 ")
            return await opened.ask()

    assert asyncio.run(send()) == b"200"


def test_who_asks_and_asks_without_waiting_for_an_answer_is_let_go_of(tmp_path):
    """A thousand requests in a packet once cost as many times what one does, on every connection."""

    async def send():
        async with Opened(tmp_path) as opened:
            lines = [await asyncio.open_connection(*opened.address) for _ in range(2)]
            for (_, writer), ahead in zip(lines, (8, 1000), strict=True):
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * ahead)
            few = [await asyncio.wait_for(lines[0][0].readuntil(b"hello"), 10) for _ in range(8)]
            return few, await asyncio.wait_for(lines[1][0].read(), 10), await opened.ask()

    few, many, again = asyncio.run(send())
    assert all(one.startswith(b"HTTP/1.1 200 OK") for one in few)
    assert many.count(b"HTTP/1.1 200 OK") < 10 and b"HTTP/1.1 400" in many and again == b"200"


ENDLESS = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1099511627776\r\n\r\n"


def test_who_was_answered_and_does_not_stop_sending_is_let_go_of(tmp_path, monkeypatch):
    """A length of a terabyte once bought a place for two years."""
    monkeypatch.setattr(connection_module, "_LINGER", -1.0)

    async def send():
        async with Opened(tmp_path) as opened:
            reader, writer = await asyncio.open_connection(*opened.address)
            writer.write(ENDLESS)
            with contextlib.suppress(OSError):
                while not reader.at_eof():
                    writer.write(bytes(1000))
                    await writer.drain()
                    await asyncio.sleep(0.05)
            return opened.door.dropped["overdue"], await opened.ask()

    assert asyncio.run(asyncio.wait_for(send(), 20)) == (1, b"200")


def test_who_was_answered_and_sends_on_makes_room_for_who_comes(tmp_path):
    async def send():
        async with Opened(tmp_path, most=20) as opened:
            lines = [await asyncio.open_connection(*opened.address) for _ in range(20)]
            for reader, writer in lines:
                writer.write(ENDLESS)
                assert (await reader.readuntil(b"\r\n")).split()[1] == b"200"
            return await opened.ask(), opened.door.dropped

    answer, turned = asyncio.run(send())
    assert answer == b"200" and turned == {"silent": 1}


def test_who_is_being_served_makes_room_for_nobody(tmp_path):
    async def crowd():
        served, release = asyncio.Semaphore(0), asyncio.Event()

        async def slow(scope, receive, send):
            if scope["type"] == "http":
                served.release()
                await release.wait()
            await hello(scope, receive, send)

        async with Opened(tmp_path, most=2, app=slow) as opened:
            lines = [await asyncio.open_connection(*opened.address) for _ in range(2)]
            for _, writer in lines:
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                await asyncio.wait_for(served.acquire(), 10)
            turned = []
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*opened.address)
                with contextlib.suppress(ConnectionError):
                    turned.append(await asyncio.wait_for(reader.read(), 10))
                writer.close()
            held = opened.door.num_connections
            release.set()
            answers = [(await reader.readuntil(b"\r\n")).split()[1] for reader, _ in lines]
            return turned, held, answers, await opened.ask(), opened.door.dropped

    turned, held, answers, after, dropped = asyncio.run(crowd())
    assert turned == [b""] * len(turned) and held == 2
    assert answers == [b"200"] * 2 and after == b"200"
    assert dropped == {"no room": 3, "silent": 1}  # who came last took the place of one that had been answered


def test_a_process_with_too_few_files_does_not_begin():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "from dovetail.parties.http.server import raise_connection_limit\nraise_connection_limit()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "this process may open 100 files and needs at least 192" in found.stderr


def test_the_soft_limit_is_raised():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert raise_connection_limit() == min(hard, 1 << 16) - 128
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


def test_nothing_of_a_strangers_body_is_read_and_one_upload_of_a_user_at_a_time(tmp_path, monkeypatch):
    """An unsigned request that names an enrolled key once made a shuffler buffer bodies."""
    household = Household(tmp_path, "ss_topk")
    service = IntermediaryService(household.shuffler(), enrolled=household.enrolled, analyzer=Direct(None))
    path = f"/v1/tasks/{household.task.task_id.hex()}/rounds/1/uploads/0"
    body, (user, *_) = household.envelope(0).uploads[0].encode(), household.users
    signed = sign_request(user, "POST", path, body)
    read = []

    async def never():
        read.append(1)
        await asyncio.sleep(3600)
        yield b""

    async def asked():
        transport = httpx.ASGITransport(app=service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shuffler") as http:
            length = {"content-length": str(len(body))}
            unsigned = {**signed, "dovetail-signature": "00" * 64, **length}
            answers = [await http.post(path, content=never(), headers=unsigned)]
            first = asyncio.create_task(http.post(path, content=never(), headers={**signed, **length}))
            while not read:
                await asyncio.sleep(0.01)
            answers.append(await http.post(path, content=body, headers=signed))
            first.cancel()
            return answers

    stranger, second = asyncio.run(asked())
    assert (stranger.status_code, stranger.text) == (
        401,
        "not signed by a key that is enrolled here and has not expired",
    )
    assert read == [1]
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    service._party.close()


def test_counts_of_a_crew_add_up_and_outlive_their_process():
    pages = mmap.mmap(-1, 3 * _PAGE)
    first, second = SharedCounts(pages, 0), SharedCounts(pages, 1)
    first["accepted"] += 2
    second["accepted"] += 3
    second.publish()
    assert first.counts_of_all_processes() == {"accepted": 5}
    assert SharedCounts(pages, 1) == {"accepted": 3}  # another one in its place
    assert Counts(accepted=1).counts_of_all_processes() == {"accepted": 1}


CREW = r"""
import os, sys, time
from dovetail.parties.http.analyzer import AnalyzerService
from dovetail.parties.http.workers import Supervisor
pause, forked, fork = float(sys.argv[1]), [], os.fork

def slow():
    pid = fork()
    forked.append(pid)
    if pid and len(forked) > 3:  # one that takes another's place
        time.sleep(pause)
    return pid

os.fork = slow
crew = Supervisor(2)
number = crew.start()
os.write(1, f"{number} {os.getpid()}\n".encode())  # at once, whole
time.sleep(60)
"""


@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["", "slow"])
def test_a_process_of_a_crew_that_dies_is_replaced_and_all_end_together(pause):
    """Also if it is told to stop before it knows the number of the process that it has just made."""
    command = [sys.executable, "-c", CREW, str(pause)]
    crew = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen = dict(map(int, crew.stdout.readline().split()) for _ in range(3))
    assert sorted(seen) == [0, 1, 2]
    os.kill(seen[1], signal.SIGKILL)
    number, again = map(int, crew.stdout.readline().split())
    assert number == 1 and again != seen[1]
    crew.terminate()
    assert crew.wait(20) == 0
    assert "process 1 of the service ended (signal 9) and is replaced" in crew.stderr.read()
    for pid in (seen[0], again, seen[2]):
        assert not alive(pid)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_crew_ends_with_its_first_process():
    crew = subprocess.Popen([sys.executable, "-c", CREW, "0"], stdout=subprocess.PIPE, text=True)
    pids = [int(crew.stdout.readline().split()[1]) for _ in range(3)]
    crew.kill()
    crew.wait(20)
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in pids)


def test_health_readiness_and_metrics_say_nothing_of_users(tmp_path):
    household = Household(tmp_path, "ss_topk")
    analyzer = household.analyzer()
    parties = household.shuffler(), analyzer
    service = IntermediaryService(parties[0], enrolled=household.enrolled, analyzer=Direct(analyzer))
    at_analyzer = AnalyzerService(analyzer)

    async def asked(app, *paths):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            return [(await http.get(path)).status_code for path in paths]

    async def ask():
        before = await asked(service.app, "/healthz", "/readyz", "/metrics")
        await service._follow_analyzer()
        after = await asked(service.app, "/healthz", "/readyz")
        service._followed -= 20.0
        assert await asked(service.app, "/healthz", "/readyz") == [200, 503]  # the analyzer was heard too long ago
        return before, after, await asked(at_analyzer.app, "/healthz", "/readyz"), await service._metrics_text()

    before, after, analyzers, metrics = asyncio.run(ask())
    assert (before, after, analyzers) == ([200, 503, 404], [200, 200], [200, 200])
    assert 'dovetail_requests_total{outcome="refused 404"} 1' in metrics
    assert "dovetail_round 1" in metrics and "dovetail_round_uploads 0" in metrics
    assert not any(key.public.key_id.hex() in metrics for key in household.users)
    told = asyncio.run(at_analyzer._metrics_text())
    assert "dovetail_rounds_released 0" in told and "dovetail_rounds_reserved 1" in told
    for party in parties:
        party.close()


def test_metrics_have_a_port_of_their_own():
    async def look():
        (port,) = free_ports(1)

        async def read():
            return "dovetail_round 3\n"

        task = asyncio.create_task(serve_metrics(port, read))
        async with httpx.AsyncClient(timeout=5) as http:
            for _ in range(200):
                with contextlib.suppress(httpx.ConnectError):
                    answer = await http.get(f"http://127.0.0.1:{port}/metrics")
                    break
                await asyncio.sleep(0.01)
        task.cancel()
        return answer

    assert asyncio.run(look()).text == "dovetail_round 3\n"


def test_logs_are_json_on_demand():
    code = "from dovetail.parties.http.monitoring import log_as_json; import logging\n"
    code += "log_as_json('shuffler')('https://here'); logging.getLogger('x').warning('a \"quoted\" word')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listens, said = map(json.loads, found.stderr.splitlines())
    assert (listens["level"], listens["message"]) == ("info", "shuffler listens on https://here")
    assert (said["level"], said["party"], said["message"]) == ("warning", "shuffler", 'a "quoted" word')


def test_a_line_of_a_log_in_a_file_is_not_broken():
    """Operators search for whole sentences in it."""
    code = "import contextlib, logging, sys; from dovetail.cli import main; sys.argv = ['dovetail', '--version']\n"
    code += "with contextlib.suppress(SystemExit): main()\n"
    code += "logging.getLogger('x').warning('%s', ' '.join(['word'] * 60))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr == f"WARNING {' '.join(['word'] * 60)}\n"
