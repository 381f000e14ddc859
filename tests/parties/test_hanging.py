"""A service that hangs is seen to: its health is red, it ends, and systemd hears nothing more."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from parties.household import Direct, Household
from parties.test_door import alive

from dovetail.parties.common.database import Unavailable
from dovetail.parties.http import monitoring
from dovetail.parties.http.analyzer import AnalyzerService
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.http.monitoring import Pulse, notify_systemd


async def statuses(app, *paths):
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        return [(await http.get(path)).status_code for path in paths]


@pytest.fixture
def hurried(monkeypatch):
    """A moment instead of minutes."""
    monkeypatch.setattr(monitoring, "_BEAT", 0.02)
    monkeypatch.setattr(monitoring, "_SLOW", 0.3)


@pytest.mark.parametrize("party", ["shuffler", "analyzer"])
def test_health_goes_red_while_the_store_hangs(tmp_path, hurried, party):
    """Somebody holds the store's lock and does not let go, as a thread does that waits for a disk that is gone."""
    household = Household(tmp_path, "ss_topk")
    analyzer = household.analyzer()
    shuffler = household.shuffler()
    if party == "shuffler":
        service = IntermediaryService(shuffler, enrolled=household.enrolled, analyzer=Direct(analyzer))
        pulse, lock = service.app.pulse, shuffler.store._database._lock
    else:
        service = AnalyzerService(analyzer)
        pulse, lock = service.app.pulse, analyzer._lock
    pulse._patience = 2.0
    held, release = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            release.wait(20)

    async def until(last):
        """The states that are seen, each once, until the last one is."""
        found, end = [], time.monotonic() + 20
        while not found or (found[-1] != last and time.monotonic() < end):
            state = await statuses(service.app, "/healthz", "/readyz")
            found += [state] if not found or found[-1] != state else []
            await asyncio.sleep(0.02)
        return found

    async def look():
        if party == "shuffler":
            await service._follow_analyzer()
        beating = asyncio.create_task(pulse.beat())
        began = await until([200, 200])
        threading.Thread(target=hold).start()
        held.wait(10)
        hanging = await until([503, 503])
        release.set()
        mended = await until([200, 200])
        beating.cancel()
        return began, hanging, mended

    began, hanging, mended = asyncio.run(look())
    assert began[-1] == [200, 200]
    assert hanging[-2:] == [[200, 503], [503, 503]]  # first not ready, then not healthy
    assert mended[-1] == [200, 200]
    shuffler.close()
    analyzer.close()


def test_a_database_that_is_away_is_no_reason_to_end(hurried):
    """A new process would find it away, too."""

    def fail():
        raise Unavailable("the database does not answer")

    async def look():
        pulse = Pulse(fail, patience=0.3)
        beating = asyncio.create_task(pulse.beat())
        await asyncio.sleep(0.6)
        beating.cancel()
        return pulse.is_alive, pulse.is_ready

    assert asyncio.run(look()) == (True, False)


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """What is told to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(0.5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def heard():
            try:
                return line.recv(100).decode()
            except TimeoutError:
                return None

        yield heard


def test_systemd_is_told_where_it_asks(systemd, monkeypatch):
    notify_systemd("READY=1")
    assert systemd() == "READY=1"
    for other in ("", "vsock:2:1234", "/nowhere/at/all"):
        monkeypatch.setenv("NOTIFY_SOCKET", other)
        notify_systemd("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify_systemd("READY=1")
    assert systemd() is None


def test_an_abstract_socket_is_told_too(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(f"\0dovetail-{os.getpid()}")
        line.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@dovetail-{os.getpid()}")
        notify_systemd("WATCHDOG=1")
        assert line.recv(100) == b"WATCHDOG=1"


SERVES = r"""
import asyncio, sys, time, threading
from starlette.routing import Route
from dovetail.parties.http import monitoring, server
from dovetail.parties.http.requests import Counts, ServiceApp
from dovetail.parties.http.monitoring import Pulse
monitoring._BEAT = 0.05
hangs = sys.argv[1]
began = time.monotonic()

def ask():
    if hangs == "store" and time.monotonic() - began > 2:
        time.sleep(600)

async def work():
    await asyncio.sleep(2)
    if hangs == "loop":
        time.sleep(600)
    await asyncio.sleep(600)

app = ServiceApp([], Counts(), work, pulse=Pulse(ask, patience=1.5))
server.serve(app, host="127.0.0.1", port=0, certificate=None, private_key=None, ready=lambda address: None)
"""


@pytest.mark.parametrize("hangs", ["store", "loop", "nothing"])
def test_a_process_that_hangs_falls_silent_says_where_and_ends(systemd, hangs):
    process = subprocess.Popen([sys.executable, "-c", SERVES, hangs], stderr=subprocess.PIPE, text=True)
    try:
        end, heard = time.monotonic() + 20, []
        while not heard and time.monotonic() < end:
            heard += [word for word in [systemd()] if word]
        assert heard == ["READY=1"]
        end = time.monotonic() + 6
        while process.poll() is None and time.monotonic() < end:
            heard.append(systemd())
        assert heard.count("WATCHDOG=1") > 10
        assert process.poll() == (None if hangs == "nothing" else 1)
        if hangs != "nothing":
            assert f'File "<string>", line {13 if hangs == "store" else 18}' in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_stopped_tells_nothing(systemd):
    """SIGSTOP: systemd's watchdog then kills it."""
    process = subprocess.Popen([sys.executable, "-c", SERVES, "nothing"], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        while systemd() != "WATCHDOG=1":
            assert time.monotonic() < end
        process.send_signal(signal.SIGSTOP)
        while systemd() is not None:  # what was said before
            assert time.monotonic() < end
        assert systemd() is None
    finally:
        process.kill()
        process.wait()


CREW = r"""
import os, sys, time
from dovetail.parties.http import workers as module
module._SILENCE = 1.0
crew = module.Supervisor(2)
number = crew.start()
os.write(1, f"{number} {os.getpid()}\n".encode())
while True:
    crew.beat()
    time.sleep(0.1)
"""


def test_a_stopped_process_of_a_crew_is_ended_and_replaced(systemd):
    crew = subprocess.Popen([sys.executable, "-c", CREW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen = dict(map(int, crew.stdout.readline().split()) for _ in range(3))
    time.sleep(1.5)
    os.kill(seen[0], signal.SIGSTOP)
    number, again = map(int, crew.stdout.readline().split())
    assert number == 0 and again != seen[0] and not alive(seen[0])
    assert alive(seen[1]) and alive(seen[2])
    assert systemd() == "WATCHDOG=1"
    crew.terminate()
    assert crew.wait(20) == 0
    assert "process 0 of the service said nothing for 1 seconds and is ended" in crew.stderr.read()
