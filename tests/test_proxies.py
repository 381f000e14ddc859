"""nginx by deploy/cache.conf and deploy/proxy.conf: strangers fill no disk, hold no line, and nobody is logged.

They need nginx (apt-get install nginx-light libnginx-mod-stream), and are skipped where there is none.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import sys
import time

import httpx
import numpy as np
import pytest
from parties.household import Household, running
from parties.proxies import DEPLOY, cache_in_front_of, has_streams, needs_nginx, stream_in_front_of

from dovetail.parties.common.http_clients import IntermediaryClient, Unreachable
from dovetail.parties.user.client import Client
from dovetail.parties.user.participation import Participation

MIB = 1 << 20


@pytest.fixture
def behind(tmp_path, monkeypatch):
    household = Household(tmp_path, "privunit", dim=3)
    with running(household, monkeypatch) as up, cache_in_front_of(up, tmp_path) as proxy:
        yield household, up, proxy


@needs_nginx
@pytest.mark.parametrize("size", [300, 48], ids=["beyond the proxy's limit", "beyond the service's"])
def test_a_body_without_a_key_is_never_on_disk(behind, capsys, size):
    """300 MiB once were on the proxy's disk before anybody asked whose they were."""
    household, up, proxy = behind
    path = f"/v1/tasks/{household.task.task_id.hex()}/rounds/1/uploads/0"
    answer, most = proxy.post(up.authority, path, size * MIB)
    with capsys.disabled():
        sys.stdout.write(f"\n{size} MiB without a key: answer {answer}, {most} bytes on the proxy's disk at most\n")
    assert most == 0
    assert answer in ("413", "none")  # who goes on sending may find the line cut before the answer
    assert up.service_counts["refused 413"] == (size == 48)


@needs_nginx
def test_a_stranger_hears_from_the_service_before_its_body_has_come(behind):
    """What the service would take from a user it refuses by the head; the rest of the body never comes."""
    household, up, proxy = behind
    path = f"/v1/tasks/{household.task.task_id.hex()}/rounds/1/uploads/0"
    context = ssl.create_default_context(cafile=str(up.authority))
    with proxy.line(context) as line:
        line.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nbegun".encode())
        assert line.recv(4096).split()[1] == b"401"
    assert up.service_counts == {"refused 401": 1}


@needs_nginx
def test_an_upload_passes_and_no_question_of_ones_own_makes_an_entry(behind):
    household, up, proxy = behind
    line = IntermediaryClient(proxy.url, ca=up.authority)
    client = Client(household.folder / "user-0", policy=household.policy, key=household.users[0])
    Participation(client, [line], np.ones_like).step()
    line.close()
    assert up.service_counts == {"accepted": 1} and up.complaints.texts == []
    with httpx.Client(verify=ssl.create_default_context(cafile=str(up.authority)), base_url=proxy.url) as http:
        before = len(list((proxy.folder / "cache").iterdir()))
        for number in range(50):
            assert http.get(f"/v1/task?x={number}").status_code == 200
        assert len(list((proxy.folder / "cache").iterdir())) <= max(1, before)


@needs_nginx
def test_the_cache_logs_nobody(behind):
    """At nginx's usual levels a body that is too large, or a service that is away, names the client's address."""
    _, up, proxy = behind
    proxy.post(up.authority, "/v1/x", 300 * MIB, chunk=100 * MIB)
    limit = int(re.search(r"limit_conn address (\d+);", (DEPLOY / "cache.conf").read_text())[1])
    lines = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(limit + 20)]
    for line in lines:
        line.close()
    with httpx.Client(verify=False, base_url=proxy.url) as http:
        assert http.get("/v1/none").status_code == 404
    assert "127.0.0.1" not in proxy.said() and "client" not in proxy.said()


@needs_nginx
def test_who_asks_slowly_is_let_go_of_by_the_cache(behind):
    _, up, proxy = behind
    limit = float(re.search(r"client_header_timeout (\d+)s;", (DEPLOY / "cache.conf").read_text())[1])
    context = ssl.create_default_context(cafile=str(up.authority))
    with proxy.line(context) as line:
        line.sendall(b"GET /v1/sta")
        line.settimeout(limit + 5)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(10) == b""
    assert limit - 2 < time.monotonic() - began < limit + 3


@needs_nginx
def test_the_proxy_limits_the_lines_of_an_address_and_logs_nobody(tmp_path):
    if not has_streams():
        pytest.skip("needs nginx's module `stream` (libnginx-mod-stream), which is not installed")
    limit = int(re.search(r"limit_conn address (\d+);", (DEPLOY / "proxy.conf").read_text())[1])
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen(4096)
        with stream_in_front_of(service.getsockname(), tmp_path) as proxy:
            time.sleep(0.2)  # the line that looked whether it is up ends
            lines = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(limit + 20)]
            for line in lines:
                line.settimeout(0.01)
            time.sleep(1.0)
            assert sum(map(is_closed, lines)) == 20
            for line in lines:
                line.close()
            assert "127.0.0.1" not in proxy.said() and "client" not in proxy.said() and proxy.on_disk() == 0


@needs_nginx
def test_the_proxy_passes_what_comes(tmp_path, monkeypatch):
    if not has_streams():
        pytest.skip("needs nginx's module `stream` (libnginx-mod-stream), which is not installed")
    household = Household(tmp_path, "privunit", dim=3)
    with running(household, monkeypatch) as up, stream_in_front_of(up.shuffler, tmp_path) as proxy:
        line = IntermediaryClient(proxy.url, ca=up.authority)
        end = time.monotonic() + 20
        while True:
            try:
                assert line.status().round == 1
                break
            except Unreachable:
                assert time.monotonic() < end
                time.sleep(0.05)
        line.close()


def is_closed(line):
    try:
        return line.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("name", ["cache.conf", "proxy.conf"])
def test_both_set_limits(name):
    """Also where there is no nginx to try them."""
    text = (DEPLOY / name).read_text()
    wanted = ["limit_conn address", "proxy_connect_timeout", "error_log /dev/stderr alert", "worker_rlimit_nofile"]
    if name == "cache.conf":
        wanted += ["proxy_request_buffering off", "client_body_timeout", "client_header_timeout", "send_timeout"]
        wanted += ["proxy_max_temp_file_size 0", "proxy_cache_key $uri"]
        assert 0 < int(re.search(r"client_max_body_size (\d+)m;", text)[1]) < 1024
    else:
        wanted += ["proxy_timeout"]
    assert [words for words in wanted if words not in text] == []
    assert "access_log off" in text
