"""nginx as `deploy/` sets it up, in front of services on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from dovetail.parties.fleet import free_ports

DEPLOY = Path(__file__).parents[2] / "deploy"
_MODULES = Path("/usr/lib/nginx/modules")
needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx, which is not installed")


class Proxy:
    """A running nginx; everything that it writes is in its folder."""

    def __init__(self, folder, port, process):
        self.folder, self.port, self.process = folder, port, process
        self.url = f"https://127.0.0.1:{port}"

    def on_disk(self):
        """Bytes of all that it keeps: its cache, and the files that its processes have open, also without a name."""
        found = {}
        for path in (*self.folder.glob("cache/**/*"), *self._open_files()):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and path.stat().st_dev == self.folder.stat().st_dev:
                    found[path.stat().st_ino] = path.stat().st_size
        return sum(found.values())

    def _open_files(self):
        """Those in its folders: a body on its way has lost its name."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if str(file.readlink()).startswith((f"{self.folder}/client_body", f"{self.folder}/proxy")):
                        yield file

    def said(self):
        """What it logged."""
        return (self.folder / "nginx.log").read_text()

    def post(self, authority, path, body_size, *, chunk=1 << 20):
        """Send a body without a key to the bitter end; the status, and the most bytes that were on disk meanwhile."""
        context = ssl.create_default_context(cafile=str(authority))
        most, answer = 0, b""
        with self.line(context) as line:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {body_size}\r\n\r\n"
            with contextlib.suppress(OSError):
                line.sendall(head.encode())
                for _ in range(body_size // chunk):
                    line.sendall(bytes(chunk))
                    most = max(most, self.on_disk())
            with contextlib.suppress(OSError):
                answer = line.recv(4096)
        words = answer.split()
        return words[1].decode() if len(words) > 1 else "none", max(most, self.on_disk())

    def line(self, context):
        """A connection to it."""
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")


@contextlib.contextmanager
def cache_in_front_of(up, folder):
    """deploy/cache.conf in front of the first shuffler or aggregator."""
    home = folder / "nginx"
    home.mkdir()
    (port,) = free_ports(1)
    kinds = "".join(f"{kind}_temp_path {home}/{kind};" for kind in ("client_body", "proxy"))
    changes = (
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        ("replica:8443", "{}:{}".format(*up.services[0])),
        ("proxy_ssl_verify on", "proxy_ssl_verify on; proxy_ssl_name 127.0.0.1"),
        ("/party/tls.", f"{folder}/tls-127.0.0.1."),
        ("/party/", f"{folder}/"),
        ("/var/cache/dovetail", f"{home}/cache"),
        ("http {", f"http {{ {kinds}"),
    )
    with _running("cache.conf", changes, home, port) as proxy:
        yield proxy


@contextlib.contextmanager
def stream_in_front_of(address, folder):
    """deploy/proxy.conf in front of a listening socket."""
    home = folder / "nginx"
    home.mkdir()
    (port,) = free_ports(1)
    changes = (("listen 8443", f"listen 127.0.0.1:{port}"), ("party:8443", "{}:{}".format(*address)))
    with _running("proxy.conf", changes, home, port) as proxy:
        yield proxy


def has_streams():
    """Whether this nginx knows `stream`: built in, or as Debian's libnginx-mod-stream."""
    said = subprocess.run(["nginx", "-V"], check=False, capture_output=True, text=True).stderr
    return "--with-stream " in said or (_MODULES / "ngx_stream_module.so").exists()


@contextlib.contextmanager
def _running(name, changes, home, port):
    text = (DEPLOY / name).read_text()
    for there, here in changes:
        assert there in text, there
        text = text.replace(there, here)
    mine = "user root;" if os.geteuid() == 0 else ""  # for the folder is nobody else's
    module = _MODULES / "ngx_stream_module.so"
    load = f"load_module {module};" if "stream {" in text and module.exists() else ""
    (home / "nginx.conf").write_text(f"{load} daemon off; {mine} pid {home}/nginx.pid;\n{text}")
    words = ["nginx", "-e", "stderr", "-p", str(home), "-c", str(home / "nginx.conf")]
    with (home / "nginx.log").open("w") as log, subprocess.Popen(words, stderr=log, stdout=log) as process:
        try:
            _await(port, process)
            yield Proxy(home, port, process)
        finally:
            process.terminate()


def _await(port, process):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        assert process.poll() is None, "nginx did not start"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise AssertionError("nginx did not answer")
