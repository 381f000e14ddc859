"""A Flower fleet on this machine, cut off from every network: `python flower_fleet.py simulation|deployment FOLDER`.

To be run in namespaces of its own (`unshare --net --pid ...`), for Ray listens on all addresses and nothing here shall
outlive the run. Starts an analyzer, a SuperLink and, in a deployment, SuperNodes with their agents; runs the example;
writes what the analyzer says at the end to `privacy.json` and every process's output to `<name>.log`. Where there is
nginx, every other SuperNode of a deployment goes through the example's proxy: `proxy.json` says what it let through.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.policy import Policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-mnist"
ANALYZER, SUPERLINK, PROXY, FIRST_NODE = 8443, 8000, 8445, 9100
FLEET_PATH = "/v1/fleet/get-run"
OTHER_PATHS = (
    "/v1/control/list-runs",
    "/v1/runtime/",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/control/list-runs/../../fleet/get-run",
    "/v1/control/list-runs%2f..%2f..%2ffleet/get-run",
    "//v1/control/list-runs",
    "/",
)
SECRET = "planted-secret-7f3a91"
GOOD_NODES, VIRTUAL_NODES = 6, 8
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def loopback_up() -> None:
    """`ip link set lo up`, where there is no `ip`."""
    up_and_running, set_flags = 0x1 | 0x40, 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", up_and_running))


class Fleet:
    """Processes by name, in a folder with their output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = Path(sys.executable).parent
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        self._env = {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(folder / "flwr")}
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *command: str | Path) -> None:
        """Start a process that runs on."""
        with (self.folder / f"{name}.log").open("wb") as log:
            arguments = [self.bin / command[0], *command[1:]]
            self._running.append(subprocess.Popen(arguments, env=self._env, stdout=log, stderr=subprocess.STDOUT))

    def run(self, name: str, *command: str | Path, seconds: float = 60.0) -> str:
        """Run a command to its end; what it said."""
        arguments = [self.bin / command[0], *command[1:]]
        done = subprocess.run(arguments, env=self._env, capture_output=True, text=True, timeout=seconds, check=False)
        with (self.folder / f"{name}.log").open("a") as log:
            log.write(done.stdout + done.stderr)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def end(self) -> None:
        """End what was started, the last one first."""
        for process in reversed(self._running):
            process.terminate()
        for process in reversed(self._running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def wait_until(there: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not there():
        if time.monotonic() > until:
            raise TimeoutError(f"expected {what} within {seconds} s")
        time.sleep(0.2)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        fleet.end()


def app_that_tells(folder: Path) -> Path:
    """A copy of the example whose training code replies with more than its model: all of it must stay on the node."""
    app = folder / "app"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__"))
    code = app / "flower_mnist" / "client_app.py"
    secret = f'"{SECRET[::-1]}"[::-1]'  # the app's own text travels through the SuperLink, too
    told = (
        f'RecordDict({{"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({{{secret}: 97}}), '
        f'"more": ConfigRecord({{"secret": {secret}}})}})'
    )
    text = code.read_text().replace('RecordDict({"arrays": ArrayRecord(model.state_dict())})', told)
    assert SECRET[::-1] in text
    code.write_text(text.replace("import ArrayRecord,", "import ArrayRecord, ConfigRecord, MetricRecord,"))
    return app


def prepared(fleet: Fleet, *, nodes: int, least: int) -> tuple[Path, str]:
    """The deployment of the example, with its analyzer running; its folder, and the id of the key that signs tasks."""
    deployment = fleet.folder / "deployment"
    sizes = ("--nodes", str(nodes), "--least", str(least), "--round-seconds", "600")
    signer = fleet.run("prepare", "python", EXAMPLE / "prepare.py", deployment, *sizes, seconds=600).strip()
    certificate = ("--certificate", deployment / "tls-127.0.0.1.crt", "--private-key", deployment / "tls-127.0.0.1.key")
    which = ("--task", deployment / "task.json", "--signer", signer, "--keys", deployment / "analyzer" / "keys")
    model = ("--model", deployment / "first-model.npy", "--workers", "1")
    fleet.start("analyzer", "dovetail", "analyzer", deployment / "analyzer", *which, *model, *certificate)
    return deployment, signer


def connect(fleet: Fleet, **settings: str | bool) -> None:
    """What the Flower command line knows of the SuperLink."""
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    home = fleet.folder / "flwr"
    home.mkdir()
    address = f'address = "127.0.0.1:{SUPERLINK}"'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{address}\n{lines}\n')


def train(fleet: Fleet, deployment: Path, signer: str, *options: str, **more: Path) -> None:
    """`flwr run`, to the end of the training; then what the analyzer says."""
    wait_until(lambda: listening(ANALYZER), "the analyzer")
    config = {
        "dovetail-signer": signer,
        "dovetail-ca": deployment / "authority.crt",
        "dovetail-analyzer": f"https://127.0.0.1:{ANALYZER}",
        "dovetail-shuffler": deployment / "shuffler",
        **{name.replace("_", "-"): path for name, path in more.items()},
    }
    told = " ".join(f"{name}='{value}'" for name, value in config.items())
    app = app_that_tells(fleet.folder)
    fleet.run("flwr-run", "flwr", "run", app, "--stream", "--run-config", told, *options, seconds=2000)
    trusted = ssl.create_default_context(cafile=str(deployment / "authority.crt"))
    with urllib.request.urlopen(f"https://127.0.0.1:{ANALYZER}/v1/privacy", context=trusted) as answer:
        (fleet.folder / "privacy.json").write_bytes(answer.read())


def simulation(folder: Path) -> None:
    """Virtual nodes in Ray."""
    with running_fleet(folder) as fleet:
        deployment, signer = prepared(fleet, nodes=VIRTUAL_NODES, least=VIRTUAL_NODES)
        connect(fleet, insecure=True)
        fleet.start("superlink", "flower-superlink", "--insecure", "--simulation", "--port", str(SUPERLINK))
        wait_until(lambda: listening(SUPERLINK), "the SuperLink")
        engine = f"num-supernodes={VIRTUAL_NODES} client-resources-num-cpus=1"
        train(fleet, deployment, signer, "--federation-config", engine, dovetail_simulation=deployment / "simulation")


def deployment(folder: Path) -> None:
    """A SuperLink with TLS, and SuperNodes that authenticate themselves; the last one has pinned another analyzer."""
    with running_fleet(folder) as fleet:
        nodes = GOOD_NODES + 1
        deployment, signer = prepared(fleet, nodes=nodes, least=GOOD_NODES)
        other = deployment / f"node-{GOOD_NODES}" / "policy.json"
        policy = msgspec.json.decode(other.read_bytes(), type=Policy)
        pinned = KeyPair.generate("seal").public.key_id
        other.write_bytes(msgspec.json.encode(msgspec.structs.replace(policy, analyzer=pinned)))
        authority = deployment / "authority.crt"
        connect(fleet, **{"root-certificates": str(authority)})
        tls = ("--ssl-certfile", deployment / "tls-127.0.0.1.crt", "--ssl-keyfile", deployment / "tls-127.0.0.1.key")
        more = ("--ssl-ca-certfile", authority, "--enable-supernode-auth", "--database", folder / "superlink.db")
        fleet.start("superlink", "flower-superlink", "--port", str(SUPERLINK), *tls, *more)
        wait_until(lambda: listening(SUPERLINK), "the SuperLink")
        start_stranger(fleet, authority)
        proxied = start_proxy(fleet, deployment)
        for node in range(nodes):
            start_node(fleet, deployment, node, nodes, port=PROXY if proxied and node % 2 else SUPERLINK)
        train(fleet, deployment, signer)
        wait_until(lambda: "Exit Code" in (folder / "stranger.log").read_text(), "the stranger to give up")


def start_proxy(fleet: Fleet, deployment: Path) -> bool:
    """The example's proxy, where there is nginx; asks it, and the SuperLink itself, for every interface."""
    nginx = shutil.which("nginx")
    if nginx is None:
        return False
    text = (EXAMPLE / "fleet-proxy.conf").read_text()
    for there, here in {
        "listen 443 ssl": f"listen 127.0.0.1:{PROXY} ssl",
        "/etc/dovetail/fleet.crt": str(deployment / "tls-127.0.0.1.crt"),
        "/etc/dovetail/fleet.key": str(deployment / "tls-127.0.0.1.key"),
        "/etc/dovetail/authority.crt": str(deployment / "authority.crt"),
        "https://127.0.0.1:8000": f"https://127.0.0.1:{SUPERLINK}",
    }.items():
        assert there in text
        text = text.replace(there, here)
    home = fleet.folder / "proxy"
    home.mkdir()
    temporary = "\n".join(
        f"{kind}_temp_path {home / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    about = f"daemon off; master_process off; user root; pid {home}/pid; error_log stderr; events {{}}"
    (home / "nginx.conf").write_text(f"{about}\nhttp {{\naccess_log off;\n{temporary}\n{text}\n}}\n")
    fleet.start("proxy", Path(nginx), "-e", "stderr", "-p", home, "-c", home / "nginx.conf")
    wait_until(lambda: listening(PROXY), "the proxy")
    answers = {
        str(port): {path: answer_of(port, path, deployment) for path in (FLEET_PATH, *OTHER_PATHS)}
        for port in (PROXY, SUPERLINK)
    }
    (fleet.folder / "proxy.json").write_text(json.dumps(answers))
    return True


def answer_of(port: int, path: str, deployment: Path) -> list[object]:
    """What an empty request gets: a status and a page."""
    trusted = ssl.create_default_context(cafile=str(deployment / "authority.crt"))
    link = http.client.HTTPSConnection("127.0.0.1", port, context=trusted, timeout=30)
    with contextlib.closing(link):
        link.request("POST", path, headers={"Content-Type": "application/protobuf"})
        answer = link.getresponse()
        return [answer.status, answer.read(200).decode(errors="replace")]


def start_node(fleet: Fleet, deployment: Path, node: int, nodes: int, *, port: int) -> None:
    """Its agent, its key, its SuperNode."""
    home = deployment / f"node-{node}"
    agent = home / "agent.sock"
    fleet.start(f"agent-{node}", "dovetail", "client", "agent", "--folder", home, "--socket", agent)
    key = ec.generate_private_key(ec.SECP384R1())
    files = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    (home / "node").write_bytes(key.private_bytes(*files))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (home / "node.pub").write_bytes(public)
    fleet.run("register", "flwr", "supernode", "register", home / "node.pub", seconds=300)
    trust = ("--root-certificates", deployment / "authority.crt", "--auth-supernode-private-key", home / "node")
    own = f'partition-id={node} num-partitions={nodes} dovetail-agent="{agent}"'
    where = ("--superlink", f"127.0.0.1:{port}", "--port", str(FIRST_NODE + node))
    fleet.start(f"node-{node}", "flower-supernode", *where, *trust, "--node-config", own)


def start_stranger(fleet: Fleet, authority: Path) -> None:
    """A SuperNode that nobody registered: it must not get in."""
    where = ("--superlink", f"127.0.0.1:{SUPERLINK}", "--port", "9199", "--root-certificates", authority)
    fleet.start("stranger", "flower-supernode", *where, "--max-retries", "1")


if __name__ == "__main__":
    loopback_up()
    {"simulation": simulation, "deployment": deployment}[sys.argv[1]](Path(sys.argv[2]))
