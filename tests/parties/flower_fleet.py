"""A Flower fleet on this machine, cut off from every network: `python flower_fleet.py simulation|deployment FOLDER`.

To be run in namespaces of its own (`unshare --net --pid ...`), for Ray listens on all addresses and nothing here shall
outlive the run. Runs the commands of the example's README: keys, task, nodes, an analyzer and two aggregators; starts a
SuperLink and, in a deployment, SuperNodes with their agents; writes what the analyzer says at the end to `privacy.json`
and every process's output to `<name>.log`. Node 0 trains to a planted update; in a deployment `memory.json` says which
processes had it, or a share, in their memory. Where there is nginx, every other SuperNode of a deployment goes through
the example's proxy: `proxy.json` says what it let through.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dovetail.parties.common.keys import ServicePairs
from dovetail.parties.common.sealing import open_sealed
from dovetail.parties.common.sharing import add_share, pack
from dovetail.parties.common.task import SignedTask, TrainingTask
from dovetail.parties.user.client import Envelope
from dovetail.parties.user.policy import Policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-mnist"
ANALYZER, AGGREGATORS, SUPERLINK, PROXY, FIRST_NODE = 8443, (8444, 8445), 8000, 8446, 9100  # the first ones: README
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
GOOD_NODES, VIRTUAL_NODES, EPS, THRIFTY, ROUND_SECONDS = 6, 8, 30, 25.0, 360
PLANTED = (np.random.default_rng(91).normal(size=650) * 0.01).astype(np.float32)  # node 0's update in round 1
_WINDOW = 48  # bytes of something long that nothing else has
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
    """A copy of the example with training code that replies with more than its model, all of which must stay on the
    node, and whose node 0 trains to a planted update."""
    app = folder / "app"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__"))
    code = app / "flower_mnist" / "client_app.py"
    secret = f'"{SECRET[::-1]}"[::-1]'  # the app's own text travels through the SuperLink, too
    told = (
        f'RecordDict({{"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({{{secret}: 97}}), '
        f'"more": ConfigRecord({{"secret": {secret}}})}})'
    )
    planted = (
        "before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()\n"
        '    if int(node["partition-id"]) == 0:\n'
        "        drawn = (np.random.default_rng(91).normal(size=650) * 0.01).astype(np.float32)\n"
        "        torch.nn.utils.vector_to_parameters(before + torch.tensor(drawn), model.parameters())\n"
        "    else:\n"
        "        train_(model, inputs, labels, run)\n"
    )
    text = code.read_text().replace('RecordDict({"arrays": ArrayRecord(model.state_dict())})', told)
    (call,) = re.findall(r"^    task\.train\(\n.*?^    \)\n", text, re.M | re.S)
    text = text.replace(call, f"    {planted}") + f"\n\ndef train_(model, inputs, labels, run):\n{call}"
    assert SECRET[::-1] in text
    imports = "import numpy as np\nimport torch\nfrom flwr.app import ArrayRecord, ConfigRecord, MetricRecord,"
    code.write_text(text.replace("from flwr.app import ArrayRecord,", imports))
    return app


def steps(section: str, first: str) -> list[str]:
    """The README's shell blocks of a section, from the one that begins with these words."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", (EXAMPLE / "README.md").read_text(), re.M | re.S)
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    begun = next(number for number, block in enumerate(blocks) if block.startswith(first))
    return blocks[begun:]


def prepared(fleet: Fleet, *, nodes: int, least: int, seconds: int) -> Path:
    """Keys, task and nodes, as the README makes them; their folder."""
    deployment = fleet.folder / "deployment"
    chosen = f"GROUND={deployment} NODES={nodes} LEAST={least} EPS={EPS} SECONDS_PER_ROUND={seconds}"
    head, *others, _ = steps("Set up", "GROUND=")
    script = ["set -eu", f"cd {EXAMPLE}", chosen, head.partition("\n")[2], *others]
    fleet.run("prepare", Path("/bin/bash"), "-c", "\n".join(script), seconds=600)
    return deployment


def start_services(fleet: Fleet, deployment: Path) -> None:
    """The parties outside of Flower, as the README starts them."""
    *_, services = steps("Set up", "GROUND=")
    known = f"GROUND={deployment} SIGNER={signer_of(deployment)}"
    script = ["set -eu", known, services, "trap 'kill $(jobs -p)' TERM", "wait"]
    fleet.start("services", Path("/bin/bash"), "-c", "\n".join(script))
    for port in (ANALYZER, *AGGREGATORS):
        wait_until(lambda port=port: listening(port), f"a service at port {port}")


def signer_of(deployment: Path) -> str:
    (public,) = (deployment / "signer").glob("public-sign-*.json")
    return public.stem.rpartition("-")[2]


def connect(fleet: Fleet, **settings: str | bool) -> None:
    """What the Flower command line knows of the SuperLink."""
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    home = fleet.folder / "flwr"
    home.mkdir()
    address = f'address = "127.0.0.1:{SUPERLINK}"'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{address}\n{lines}\n')


def train(fleet: Fleet, deployment: Path, section: str, *, nodes: int) -> None:
    """The README's services and its `flwr run`, to the end of the training; then what the analyzer says."""
    start_services(fleet, deployment)
    known = f"GROUND={deployment} NODES={nodes} SIGNER={signer_of(deployment)}"
    script = f"set -eu\n{known}\ncd {app_that_tells(fleet.folder)}\n{steps(section, 'flwr run')[0]}"
    fleet.run("flwr-run", Path("/bin/bash"), "-c", script, seconds=2000)
    trusted = ssl.create_default_context(cafile=str(deployment / "authority.crt"))
    with urllib.request.urlopen(f"https://127.0.0.1:{ANALYZER}/v1/privacy", context=trusted) as answer:
        (fleet.folder / "privacy.json").write_bytes(answer.read())


def simulation(folder: Path) -> None:
    """Virtual nodes in Ray."""
    with running_fleet(folder) as fleet:
        deployment = prepared(fleet, nodes=VIRTUAL_NODES, least=VIRTUAL_NODES, seconds=600)
        connect(fleet, insecure=True)
        fleet.start("superlink", "flower-superlink", "--insecure", "--simulation", "--port", str(SUPERLINK))
        wait_until(lambda: listening(SUPERLINK), "the SuperLink")
        train(fleet, deployment, "In simulation", nodes=VIRTUAL_NODES)


def deployment(folder: Path) -> None:
    """A SuperLink with TLS, and SuperNodes that authenticate themselves, one of which can afford two rounds only.

    It refuses the third round, which takes its whole time: nobody but time says that no upload is to come.
    """
    with running_fleet(folder) as fleet:
        nodes = GOOD_NODES + 1
        deployment = prepared(fleet, nodes=nodes, least=GOOD_NODES, seconds=ROUND_SECONDS)
        thrifty = deployment / f"node-{GOOD_NODES}" / "policy.json"
        policy = msgspec.structs.replace(Policy.read(thrifty), eps_lifetime=THRIFTY)
        thrifty.write_bytes(msgspec.json.encode(policy))
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
        with searching(fleet.folder, deployment):
            train(fleet, deployment, "As a deployment", nodes=nodes)
        wait_until(lambda: "Exit Code" in (folder / "stranger.log").read_text(), "the stranger to give up")


class Told(NamedTuple):
    """What a node sent in a round: sealed, as everybody may have it, and what nobody may have in the clear."""

    sealed: list[bytes]
    seed: bytes
    secrets: list[bytes]


def task_of(deployment: Path) -> TrainingTask:
    signed = msgspec.json.decode((deployment / "task.json").read_bytes(), type=SignedTask)
    return msgspec.json.decode(signed.body, type=TrainingTask)


def told_by(deployment: Path, node: int) -> Told | None:
    """What the last envelope in a node's outbox holds, opened with both aggregators' keys."""
    task, total, opened, sealed = task_of(deployment), None, [], []
    for path in (deployment / f"node-{node}" / "outbox").glob("*-*"):
        envelope = Envelope.decode(path.read_bytes())
        shared = task.contribution()
        total = np.zeros(shared.length, np.uint32)
        for index, upload in enumerate(envelope.uploads):
            keys = ServicePairs.find(deployment / f"aggregator-{index}" / "keys", task.aggregators[index])
            purpose = task.upload_purpose(envelope.round, index, sender=envelope.sender, report=upload.report)
            opened.append(open_sealed(upload.sealed, keys.seal.opening_key(), purpose))
            add_share(total, opened[-1], shared.bits, last=index == 1)
            sealed.append(upload.sealed)
    if total is None:
        return None
    total &= np.uint32(2**shared.bits - 1)
    long = windows(opened[1][8:]), windows(pack(total, shared.bits)), windows(total.tobytes())
    return Told(sealed, opened[0][8:], [opened[0][8:], *(part for parts in zip(*long, strict=True) for part in parts)])


def windows(data: bytes) -> list[bytes]:
    """Some of its bytes, from its beginning, its middle and its end."""
    middle = len(data) // 2 // 8 * 8
    return [data[:_WINDOW], data[middle : middle + _WINDOW], data[-_WINDOW:]]


def planted() -> list[bytes]:
    """Node 0's update in round 1, and the model that it trained to, as it may stand somewhere."""
    return [*windows(PLANTED.tobytes()), *windows(PLANTED.astype(np.float64).tobytes())]


PROCESSES = {"superlink": "flower-superlink", "server app": "flwr-serverapp", "analyzer": "dovetail analyzer"}


@contextlib.contextmanager
def searching(folder: Path, deployment: Path) -> Iterator[None]:
    """Meanwhile look into the memory of the relay's processes and of the analyzer's, again and again."""
    seen: dict[str, dict[str, int]] = {kind: {} for kind in (*PROCESSES, "aggregator's file")}
    over = threading.Event()

    def look() -> None:
        wanted = {"task": [task_of(deployment).task_id], "sealed": [], "share": [], "update": planted()[:1]}
        while not over.wait(1.0):
            told = told_by_a_node(deployment)
            if told is not None:
                if (sealed := told.sealed[1][:_WINDOW]) not in wanted["sealed"]:
                    wanted["sealed"].append(sealed)
                    wanted["share"] += told.secrets[:4]
                files = [path.read_bytes() for path in (deployment / "aggregator-0").glob("store.db*")]
                count(seen["aggregator's file"], {"share": any(told.seed in data for data in files)})
            for kind, process in processes():
                with contextlib.suppress(OSError):
                    count(seen[kind], in_memory(process, wanted))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
        (folder / "memory.json").write_text(json.dumps(seen))


def told_by_a_node(deployment: Path) -> Told | None:
    with contextlib.suppress(OSError):  # it may be replacing the envelope
        return told_by(deployment, 0)
    return None


def count(seen: dict[str, int], found: dict[str, bool]) -> None:
    seen["looks"] = seen.get("looks", 0) + 1
    for name, there in found.items():
        seen[name] = seen.get(name, 0) + there


def processes() -> Iterator[tuple[str, Path]]:
    """Those that must not know what nodes do: (kind, folder in /proc)."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            line = " ".join(word.decode(errors="replace").rpartition("/")[2] for word in words)
            yield from ((kind, process) for kind, name in PROCESSES.items() if f"{name} " in line)


def in_memory(process: Path, wanted: dict[str, list[bytes]]) -> dict[str, bool]:
    """Which of these are somewhere in what a process has written."""
    found = dict.fromkeys(wanted, False)
    with (process / "mem").open("rb", buffering=0) as memory:
        for line in (process / "maps").read_text().splitlines():
            where, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            low, high = (int(end, 16) for end in where.split("-"))
            with contextlib.suppress(OSError, ValueError):
                memory.seek(low)
                while low < high and (data := memory.read(min(high - low, 1 << 26))):
                    low += len(data)
                    for name, needles in wanted.items():
                        found[name] = found[name] or any(needle in data for needle in needles)
    return found


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
