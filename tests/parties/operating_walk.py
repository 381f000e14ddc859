"""A new operator follows docs/operating.md, word for word: `python -m parties.operating_walk FOLDER`.

To be run as root in namespaces of its own: `unshare --net --mount --pid --fork --kill-child --mount-proc`. Every
machine of the page is a network namespace that all others reach by its name, with a folder of its own at /srv/training.
What is typed is read from the page's code blocks, so that every command there is run, and run as it is written, but for
this:

- Dovetail is the one that runs this, instead of an environment that pip makes;
- `scp FILE... HOST:/srv/training/` copies into that machine's folder;
- `…` in the name of a file stands for the newest file of that name;
- what the page says in words is done here: with another task's files the commands get those names.

There is one machine more, a thief's. What was found is written as JSON at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.notices import SignedNotice
from dovetail.parties.common.task import SignedTask, task_id_of
from dovetail.parties.user.client import Client
from dovetail.parties.user.policy import Policy, Refused

PAGE = Path(__file__).parents[2] / "docs" / "operating.md"
HOME = Path("/srv/training")
OPERATED = ("analyzer", "aggregator-0", "aggregator-1", "users")
MACHINES = (*OPERATED, "thief")
SERVICES = ("analyzer", "aggregator-0", "aggregator-1")
EVERYBODY, SOME, OTHERS = "$(seq -s, 0 19)", "$(seq -s, 0 17)", "18,19"
_LONG_RUNNING = ("dovetail analyzer ", "dovetail aggregator ", "dovetail client run ")
_UNFINISHED = "rounds WHERE state != 'done'"
_INSTALLED = "/opt/dovetail/bin"
_SCP = """scp() {
  local last="${@: -1}" files=("${@:1:$#-1}")
  [[ "$last" == *:/srv/training/* ]] || { echo "scp to $last?" >&2; return 1; }
  cp -- "${files[@]}" "$MACHINES/${last%%:*}/${last#*:/srv/training/}"
}"""


def typed_on(page: str) -> dict[str, list[list[tuple[str, str]]]]:
    """What a page says to type, block by block: machine and command, under the heading or bold words before it."""
    found: dict[str, list[list[tuple[str, str]]]] = {}
    lead, block = "", None
    for line in page.splitlines():
        if line.strip().startswith("```"):
            if block:
                found.setdefault(lead, []).append(block)
            block = [] if block is None else None
        elif block is None:
            if said := re.match(r"##+ (.+)|(?:- )?\*\*(.+?)\.?\*\*", line):
                lead = said[1] or said[2]
        elif said := re.match(r"\s*([a-z0-9-]+)\$ (.+)", line):
            block.append((said[1], said[2]))
    return found


def require(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def wait_until(there: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not there():
        if time.monotonic() > until:
            raise TimeoutError(f"expected {what} within {seconds:g} s")
        time.sleep(0.1)


@contextlib.contextmanager
def machines(folder: Path) -> Iterator[dict[str, int]]:
    """Processes that keep each machine's namespaces: names resolve, /srv/training is a folder of its own."""
    holders: dict[str, subprocess.Popen[bytes]] = {}

    def do(*words: str | Path, within: str | None = None) -> None:
        joined = [] if within is None else joining(holders[within].pid)
        subprocess.run([*joined, *words], check=True)

    do("ip", "link", "set", "lo", "up")
    do("ip", "link", "add", "switch", "type", "bridge")
    do("ip", "link", "set", "switch", "up")
    do("mount", "-t", "tmpfs", "tmpfs", HOME.parent)
    HOME.mkdir()
    addresses = {name: f"10.78.0.{number}" for number, name in enumerate(MACHINES, 1)}
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in addresses.items()))
    try:
        for number, name in enumerate(MACHINES, 1):
            holders[name] = subprocess.Popen(["unshare", "--net", "--mount", "sleep", "infinity"])
            own = Path(f"/proc/{holders[name].pid}/ns")
            for kind in ("net", "mnt"):  # it has them when it has left ours
                wait_until(lambda own=own, kind=kind: _left(own / kind), f"namespaces of {name}", 10)
            cable, training, remembered = f"cable-{number}", folder / name, folder / f"{name}-var-lib"
            do("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(holders[name].pid))
            do("ip", "link", "set", cable, "master", "switch", "up")
            do("ip", "address", "add", f"{addresses[name]}/24", "dev", "eth0", within=name)
            for device in ("eth0", "lo"):
                do("ip", "link", "set", device, "up", within=name)
            for made in (training, remembered):
                made.mkdir()
            do("mount", "--bind", training, HOME, within=name)
            do("mount", "--bind", remembered, "/var/lib", within=name)  # of whichever machine keeps the witness
            do("mount", "--bind", hosts, "/etc/hosts", within=name)
        yield {name: holder.pid for name, holder in holders.items()}
    finally:
        for holder in holders.values():
            holder.kill()
            holder.wait()


def _left(namespace: Path) -> bool:
    return namespace.readlink() != Path("/proc/self/ns").joinpath(namespace.name).readlink()


def joining(holder: int) -> list[str]:
    """What begins a command that is run on a machine."""
    return ["nsenter", "--target", str(holder), "--net", "--mount"]


class Operator:
    """Types what the page says, on the machine that it says."""

    def __init__(self, folder: Path, holders: dict[str, int]) -> None:
        self.folder, self._holders = folder, holders
        self.page = typed_on(PAGE.read_text())
        self._begun = {name: [_SCP] for name in MACHINES}  # what its shell was told to stay
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._followed: set[tuple[str, int]] = set()
        self.typed = self.started = 0
        logs = folder / "logs"
        logs.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
        self._env = {**kept, "MACHINES": str(folder), "PYTHONUNBUFFERED": "1"}

    def at(self, machine: str, *names: str) -> Path:
        """A file on a machine."""
        return self.folder.joinpath(machine, *names)

    def follow(self, lead: str, block: int = 0, *, only: tuple[str, ...] = MACHINES, **names: str) -> list[str]:
        """Type one of the page's blocks, with other names of files where there is another task; what was said."""
        self._followed.add((lead, block))
        self.typed += len(self.page[lead][block])
        return [
            self.type(one, renamed(command, names))
            for machine, command in self.page[lead][block]
            for one in (OPERATED if machine == "all" else (machine,))
            if one in only
        ]

    def unfollowed(self) -> list[str]:
        """Blocks of the page that were not typed."""
        blocks = {(lead, number) for lead, all_of in self.page.items() for number in range(len(all_of))}
        return sorted(f"{lead}, block {number}" for lead, number in blocks - self._followed)

    def type(self, machine: str, command: str, *, fails: int = 0) -> str:
        """Run a command to its end, or start what runs on; what it said."""
        command = self._resolved(machine, command)
        if command.startswith(("python3 -m venv", f"{_INSTALLED}/pip")):
            return ""  # what runs this is installed
        command = command.replace(_INSTALLED, str(Path(sys.executable).parent))
        if command.startswith(_LONG_RUNNING):
            self._start(machine, command)
            return ""
        done = subprocess.run(
            self._shell(machine, command), env=self._env, capture_output=True, text=True, timeout=120, check=False
        )
        require(done.returncode == fails, f"{machine}$ {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        if command.startswith(("cd ", "export ")):
            self._begun[machine].append(command)
        return done.stdout + done.stderr

    def _resolved(self, machine: str, command: str) -> str:
        """With the newest files in the place of names with dots: as many as the command names."""
        words, there = command.split(" "), self.at(machine)
        for pattern in {word for word in words if "…" in word}:
            files = sorted(there.glob(pattern.replace("…", "*")), key=lambda one: one.stat().st_mtime_ns)
            places = [place for place, word in enumerate(words) if word == pattern]
            require(len(files) >= len(places), f"too few files {pattern} for {machine}$ {command}")
            for place in places:
                words[place] = str(files.pop().relative_to(there))
        return " ".join(words)

    def _shell(self, machine: str, command: str) -> list[str]:
        script = "\n".join([*self._begun[machine], command])
        return [*joining(self._holders[machine]), "bash", "-c", script]

    def _start(self, machine: str, command: str) -> None:
        name = machine
        while name in self._running:  # another one on the same machine
            name += "'"
        self.started += 1
        log = self.folder / "logs" / f"{self.started}-{name}.log"
        with log.open("wb") as out:
            self._running[name] = subprocess.Popen(
                self._shell(machine, f"exec {command}"), env=self._env, stdout=out, stderr=subprocess.STDOUT
            )
        self._logs[name] = log

    def said(self, name: str) -> str:
        """What a process that was started last has said so far."""
        return self._logs[name].read_text()

    def end_of(self, name: str, seconds: float = 120.0) -> tuple[int, str]:
        """Wait for the end of what ends by itself; its exit status, and what it said."""
        status = self._running[name].wait(seconds)
        del self._running[name]
        return status, self.said(name)

    def stop(self, *names: str) -> None:
        """Ctrl-C, in their terminals; all of them unless some are named."""
        ended = {name: self._running.pop(name) for name in names or tuple(self._running)}
        for process in ended.values():
            process.send_signal(signal.SIGINT)
        for name, process in ended.items():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise TimeoutError(f"{name} did not stop: {self.said(name)[-2000:]}") from None

    def kill(self) -> None:
        """End whatever is left."""
        for process in self._running.values():
            process.kill()
            process.wait()


def renamed(command: str, names: dict[str, str]) -> str:
    """With other words for the page's names of a folder, of files, of users, and for the rounds and eps of a task."""
    places = {
        "state": r"(?<= )state(?= |$)",
        "task": r"(?<= )task\.json",
        "task2": r"(?<= )task-2\.json",
        "signer": r"(?<=--signer )owner\.json",
        "users": re.escape(EVERYBODY),
        "rounds": r"(?<=--rounds )\d+",
        "eps": r"(?<=privacy\.eps=)\d+",
    }
    for name, word in names.items():
        command = re.sub(places[name], lambda _, word=word: word, command)
    return command


class Walk:
    """The page, section by section, and what must be true after each."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self.seconds: dict[str, float] = {}  # by part
        self.rounds: dict[str, list[list[object]]] = {}

    def run(self) -> dict[str, object]:
        """All of it; what was found."""
        for part in (
            self.set_up,
            self.train,
            self.let_users_go,
            self.change_keys,
            self.train_with_new_keys,
            self.withdraw,
            self.refuse_strange_aggregators,
            self.revoke_stolen_key,
            self.back_up_and_restore,
            self.set_back,
        ):
            began = time.monotonic()
            part()
            self.seconds[part.__name__] = round(time.monotonic() - began, 1)
        left = self._operator.unfollowed()
        require(not left, f"the page has commands that nobody typed here: {left}")
        return {
            "seconds": self.seconds,
            "rounds": self.rounds,
            "typed": self._operator.typed,
            "started": self._operator.started,
        }

    # --- the page

    def set_up(self) -> None:
        """Four machines: from nothing to users."""
        operator = self._operator
        operator.follow("Install")
        operator.follow("Keys")
        shutil.move(operator.at("analyzer", "recovery"), operator.folder / "offline")
        (described,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
        operator.at("analyzer", "training.toml").write_text(described)
        _, shown, *_ = operator.follow("Task")
        require("3 rounds of 16 to 20 users, 2 aggregators" in shown, shown)
        (ends,) = re.findall(r"--ends (\d+-\d+-\d+)", self.page_line("Task", 0, "task new"))
        require("(30, 1e-05)-DP" in shown and f"ends {ends}" in shown, shown)
        operator.follow("Users")
        for name in ("aggregator-0", "aggregator-1"):
            listed = json.loads(operator.at(name, "clients.json").read_bytes())
            require(len(listed) == 20, f"{len(listed)} users on the list of {name}")
            keys = {file.name for file in operator.at(name).rglob("*.key")}
            require(keys == {f"tls-{name}.key"}, f"{name} has the TLS keys {keys}")
        for machine in OPERATED:
            for file in operator.at(machine).rglob("*.json"):
                private = re.match(r"key(-|\.json)|(sign|seal)-", file.name)
                require(not private or file.stat().st_mode & 0o077 == 0, f"others can read {file}")

    def train(self) -> None:
        """Start, to the end of the training, and a look at what came out."""
        operator = self._operator
        operator.follow("Start")
        status, said = operator.end_of("users")
        require(status == 0, said)
        require(len(re.findall(r"user \d+ reported in 3 rounds$", said, re.M)) == 20, said)
        told, fetched, services = operator.follow("Start", 1)
        facts = self._outcome("training", told, [("released", 20)] * 3)
        require(facts["spent"]["eps"] <= 30 and facts["statement"]["eps"] <= 30, told)
        require(re.search(r"parameters after the last round: model\.npz", fetched), fetched)
        with np.load(operator.at("analyzer", "model.npz")) as model:
            require(all(np.isfinite(model[name]).all() for name in model.files), "a model of numbers")
        require(len(re.findall(r"^https://[a-z0-9:-]+; ready; round 3, over$", services, re.M)) == 3, services)
        require(facts["history"][-1]["accuracy"] > 0.3, f"accuracy {facts['history'][-1]['accuracy']}")

    def let_users_go(self) -> None:
        """Users come and go: the nineteenth is revoked; the running services see it."""
        self._operator.follow("Users come and go")
        shutil.copytree(self._operator.at("users", "users", "user-19"), self._operator.folder / "older")

    def change_keys(self) -> None:
        """A user's key, all services' keys, and the owner's."""
        operator = self._operator
        operator.follow("A user")
        listed = json.loads(operator.at("aggregator-1", "clients.json").read_bytes())
        require(len(listed) == 19, f"{len(listed)} users after a rotation")
        operator.follow("The analyzer, an aggregator or shuffler")
        announced, *_ = operator.follow("The analyzer, an aggregator or shuffler", 1)
        require(announced.count("is followed by") == 4, announced)
        require("1 running task of the old key go" in announced, announced)
        told = operator.type("analyzer", self.page_line("Start", 1, "party status"))
        require(told.count("; ready; ") == 3, told)  # the old task stands

    def train_with_new_keys(self) -> None:
        """Another task: users follow the rotations; the one that was revoked comes back in mid-round."""
        operator = self._operator
        operator.follow("Another task")
        operator.stop()
        self._start(2)
        wait_until(lambda: self._held(2) == [19, 19], "19 uploads at both aggregators")
        refusal = "user 19: not signed by a key that is enrolled here and has not expired"
        wait_until(lambda: refusal in operator.said("users"), "an error of the user that was revoked")
        operator.follow("Users come and go", 1)
        time.sleep(2)  # as the page says
        operator.type("users", renamed(self.page_line("Start", 0, "client run"), {"users": "19"}))
        status, said = operator.end_of("users'")
        require((status, "user 19 reported in 1 round" in said) == (0, True), said)
        status, said = operator.end_of("users")
        require((status, len(re.findall(r"reported in 1 round$", said, re.M))) == (2, 19), said)
        told, fetched, _ = operator.follow("Start", 1, signer="owner-new.json")
        require("parameters after the last round" in fetched, fetched)
        self._outcome("another task", told, [("released", 20)])
        require(self._rows("analyzer", "state-2", "parts") == 2, "a sum of each aggregator")
        operator.stop()

    def withdraw(self) -> None:
        """A task ends early: in mid-round; nothing of the round is left, and none opens again."""
        operator = self._operator
        self._sign(3, eps="5")
        self._start(3, users=SOME)
        wait_until(lambda: self._held(3) == [18, 18], "18 uploads at both aggregators")
        require(all(self._contents(name, 3) for name in SERVICES[1:]), "shares that are there to be dropped")
        operator.follow("A task ends early", task="task-3.json")
        self._dropped(3, "the signer has withdrawn the task")
        status, said = operator.end_of("users", 30)
        require((status, len(re.findall(r"; the task was withdrawn$", said, re.M))) == (0, 18), said)
        operator.stop()
        for name in SERVICES:  # a restart without the file
            operator.at(name, "notices.json").rename(operator.at(name, "notices.kept"))
        operator.follow("Start", only=SERVICES, **self._names(3))
        wait_until(lambda: self._over("aggregator-0") and self._over("aggregator-1"), "services that know it is over")
        require(not any(self._contents(name, 3) for name in SERVICES[1:]), "a round was opened after the restart")
        self._outcome("withdrawn", self._told(), [("void", 0)])
        operator.stop()
        for name in SERVICES:
            operator.at(name, "notices.kept").rename(operator.at(name, "notices.json"))

    def refuse_strange_aggregators(self) -> None:
        """A thief has the owner's folder, and aggregators of its own; it even has the analyzer run its task."""
        operator = self._operator
        operator.type("thief", "cd /srv/training")
        operator.type("thief", f"export PATH={_INSTALLED}:$PATH")
        shutil.copytree(operator.at("analyzer", "owner"), operator.at("thief", "owner"))
        for name in ("training.toml", "analyzer-new.json", "aggregator-0-new.json", "aggregator-1-new.json"):
            shutil.copy(operator.at("analyzer", name), operator.at("thief"))
        for index in (0, 1):
            operator.type("thief", f"dovetail keys keys-{index} --use service --public strange-{index}.json")
        new = self.page_line("Another task", 0, "task new")
        strange = new.replace("aggregator-0-new", "strange-0").replace("aggregator-1-new", "strange-1")
        operator.type("thief", renamed(strange, {"task2": "trap.json", "eps": "5"}))
        operator.type("analyzer", "dovetail keys tls --tls thief")  # any authority would certify its host
        for name in ("authority.crt", "tls-thief.crt", "tls-thief.key"):
            shutil.copy(operator.at("analyzer", "tls", name), operator.at("thief"))
        for name in ("clients.json", "owner-new.json"):
            shutil.copy(operator.at("aggregator-0", name), operator.at("thief"))
        shutil.copy(operator.at("thief", "trap.json"), operator.at("analyzer"))
        names = {"task": "trap.json", "state": "state-trap", "signer": "owner-new.json"}
        operator.follow("Start", only=("analyzer",), **names)
        for index, port in enumerate((8445, 8446)):
            operator.type(
                "thief",
                f"dovetail aggregator state-{index} --task trap.json --signer owner-new.json --keys keys-{index} "
                f"--index {index} --analyzer https://analyzer:8443 --peer https://thief:{8446 - index} "
                f"--clients clients.json --ca authority.crt --host 0.0.0.0 --port {port} "
                "--certificate tls-thief.crt --private-key tls-thief.key",
            )
        before = self._spent("user-0")
        running = self.page_line("Start", 0, "client run").replace("aggregator-0:8445", "thief:8445")
        operator.type("users", running.replace("aggregator-1:8445", "thief:8446"))
        status, said = operator.end_of("users")
        refused = re.findall(r"user \d+: .*not among this user's pinned aggregators", said)
        require((status, len(refused)) == (2, 20), said)
        require(before == self._spent("user-0"), "a user spent something on the trap")
        spending = list(operator.at("users", "users").glob(f"*/spending/*{self._id_of('trap.json')}*"))
        require(not spending, f"users have ledgers for the trap: {spending}")
        held = [self._rows("thief", f"state-{index}", "uploads") for index in (0, 1)]
        require(held == [0, 0], f"the thief holds {held} uploads")
        operator.stop()

    def revoke_stolen_key(self) -> None:
        """A key is stolen: users spend on the thief's task until the owner revokes the key, and then no more."""
        operator = self._operator
        new = self.page_line("Another task", 0, "task new")
        operator.type("thief", renamed(new, {"task2": "task-4.json", "eps": "5"}))
        for name in SERVICES:
            shutil.copy(operator.at("thief", "task-4.json"), operator.at(name))
        before = self._spent("user-0")
        self._start(4, users=SOME)
        wait_until(lambda: self._held(4) == [18, 18], "what a thief can have: users that report to pinned parties")
        require(before < self._spent("user-0") <= before + 5, "what a thief can spend")
        spending = list(operator.at("users", "users").glob(f"*/spending/*{self._id_of('task-4.json')}*.db"))
        require(len(spending) == 18, f"ledgers of users that took part: {spending}")
        shutil.copytree(operator.folder / "offline", operator.at("analyzer", "recovery"))
        revoked = operator.follow("A key is stolen", task="task-3.json")[1]  # the owner's last one
        shutil.rmtree(operator.at("analyzer", "recovery"))
        require("is revoked and followed by" in revoked, revoked)
        self._dropped(4, "was revoked")
        status, said = operator.end_of("users", 30)
        require((status, len(re.findall(r"; the task was withdrawn$", said, re.M))) == (0, 18), said)
        operator.type("users", self.page_line("Start", 0, "client run"))  # all, anew
        status, said = operator.end_of("users")
        stopped = len(re.findall(r"reported in 0 rounds; the task was withdrawn$", said, re.M))
        require((status, stopped, self._held(4)) == (0, 20, [0, 0]), said)
        self._outcome("stolen key", self._told(), [("void", 0)])
        operator.stop()
        self._refused_by_users(new)

    def _refused_by_users(self, new: str) -> None:
        """What else the thief signs, with the stolen key and with a successor that it announces itself."""
        operator = self._operator
        operator.type("thief", renamed(new, {"task2": "late.json"}))
        operator.type("thief", "dovetail keys owner --use sign --rotate")
        operator.type("thief", renamed(new, {"task2": "heir.json"}))
        forged = "dovetail task announce forged.json --rotation owner/rotation-….json --signer owner"
        operator.type("thief", forged)
        notices = msgspec.json.decode(operator.at("thief", "forged.json").read_bytes(), type=list[SignedNotice])
        for name, why in (("late.json", "was revoked"), ("heir.json", "expected a task signed by")):
            signed = msgspec.json.decode(operator.at("thief", name).read_bytes(), type=SignedTask)
            for user in range(20):
                home = operator.folder / "asked" / f"user-{user}"
                shutil.copytree(operator.at("users", "users", f"user-{user}"), home, dirs_exist_ok=True)
                policy, key = Policy.read(home / "policy.json"), KeyPair.load(home / "key.json")
                client = Client(home, policy=policy, key=key, witness=False)
                client.receive_notices(notices)
                try:
                    client.admit(signed)
                except Refused as error:
                    require(why in str(error), f"{name}: {error}")
                else:
                    raise AssertionError(f"user {user} takes part in {name}")

    def back_up_and_restore(self) -> None:
        """A task of the new key, whose analyzer is restored in mid-round: every report counts once."""
        operator = self._operator
        self._sign(5, eps="9", rounds="2")
        self._start(5, users=SOME)
        wait_until(lambda: self._held(5) == [18, 18], "18 uploads at both aggregators")
        before = json.loads(self._told())
        operator.stop("analyzer")
        operator.follow("Backup and restore", state="state-5")
        operator.follow("Start", only=("analyzer",), **self._names(5))
        self._set_user_back("user-19")
        operator.type("users", renamed(self.page_line("Start", 0, "client run"), {"users": OTHERS}))
        for name, count in (("users", 18), ("users'", 2)):
            status, said = operator.end_of(name)
            require((status, len(re.findall(r"reported in 2 rounds$", said, re.M))) == (0, count), said)
        told = self._told()
        facts = self._outcome("after a restore", told, [("released", 20)] * 2)
        require(facts["task_id"] == before["task_id"] and before["rounds_reserved"] == 1, told)
        status_of_all = operator.type("analyzer", self.page_line("Start", 1, "party status"))
        require(status_of_all.count("; ready; round 2, over") == 3, status_of_all)

    def _set_user_back(self, user: str) -> None:
        """Restore a user's folder from an older copy: it notices, gives up that task, and goes on with others."""
        operator, spent = self._operator, self._spent(user)
        home = operator.at("users", "users", user)
        shutil.rmtree(home)
        shutil.copytree(operator.folder / "older", home)
        operator.type("users", renamed(self.page_line("Start", 0, "client run"), {"users": user.removeprefix("user-")}))
        status, said = operator.end_of("users'")
        require(
            status == 2
            and "1 of the ledgers in" in said
            and "bring the newest ones back, or give up their tasks" in said,
            said,
        )
        mended = operator.type("users", f"dovetail client mend users/{user} --witness /var/lib/dovetail-witness")
        require(mended.count("gave up task") == 1, mended)
        require(self._spent(user) == spent, f"{user} had spent {spent}, and now {self._spent(user)}")

    def set_back(self) -> None:
        """Restored from before a round, the analyzer is found out by the aggregators."""
        operator = self._operator
        operator.stop("analyzer")
        shutil.rmtree(operator.at("analyzer", "state-5"))
        shutil.copytree(operator.at("analyzer", "backup"), operator.at("analyzer", "state-5"))
        operator.follow("Start", only=("analyzer",), **self._names(5))
        words = "the analyzer opens round 1 after round 2: its ledger was restored from an older copy"
        for name in SERVICES[1:]:
            wait_until(lambda name=name: words in operator.said(name), f"{words!r} in the log of {name}", 60)
        wait_until(lambda: not any(map(self._ready, SERVICES[1:])), "aggregators that are not ready", 30)
        told = operator.type("analyzer", self.page_line("Start", 1, "party status"), fails=1)
        require(re.findall(r"; (ready|not ready); ", told) == ["ready", "not ready", "not ready"], told)
        operator.stop()

    # --- what the page says in words, and what is looked at

    def page_line(self, lead: str, block: int, words: str) -> str:
        """The command of a block that has these words."""
        (command,) = [one for _, one in self._operator.page[lead][block] if words in one]
        return command

    def _names(self, number: int) -> dict[str, str]:
        return {"task": f"task-{number}.json", "state": f"state-{number}", "signer": "owner-new.json"}

    def _start(self, number: int, *, users: str = EVERYBODY) -> None:
        """The same commands as before, with another task and another folder."""
        self._operator.follow("Start", users=users, **self._names(number))

    def _sign(self, number: int, **asked: str) -> None:
        self._operator.follow("Another task", task2=f"task-{number}.json", **asked)

    def _told(self) -> str:
        return self._operator.type("analyzer", self.page_line("Start", 1, "curl"))

    def _outcome(self, what: str, told: str, expected: list[tuple[str, int]]) -> dict[str, Any]:
        """How the rounds of a training ended."""
        facts = json.loads(told)
        found = [(one["outcome"], one["uploads"]) for one in facts["history"]]
        require(found == expected, f"{what}: expected {expected}, got {facts['history']}")
        self.rounds[what] = [list(one) for one in found]
        return facts

    def _held(self, number: int) -> list[int]:
        """The uploads at the aggregators."""
        return [self._rows(name, f"state-{number}", "uploads") for name in SERVICES[1:]]

    def _rows(self, machine: str, folder: str, table: str) -> int:
        """How many rows a service keeps in a table."""
        store = self._operator.at(machine, folder, "book.db" if machine == "analyzer" else "store.db")
        if not store.exists():
            return 0
        with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as link:
            try:
                return int(link.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])
            except sqlite3.OperationalError:  # it is made just now
                return 0

    def _contents(self, machine: str, number: int) -> list[str]:
        """Everything that an aggregator holds of its rounds."""
        folder = f"state-{number}"
        tables = [
            name
            for name in ("uploads", "shares", "places", "partials", "sums", _UNFINISHED)
            if self._rows(machine, folder, name)
        ]
        segments = self._operator.at(machine, folder, "segments")
        return tables + [str(file) for file in segments.rglob("*") if file.is_file() and file.stat().st_size]

    def _dropped(self, number: int, why: str) -> None:
        """Both aggregators hold nothing more of an ended task, and handed no sum on."""
        operator = self._operator
        for name in SERVICES[1:]:
            wait_until(lambda name=name: not self._contents(name, number), f"nothing left at {name}", 15)
            said = operator.said(name)
            require(why in said and "open rounds are deleted" in said, said)
        wait_until(lambda: self._over("aggregator-0"), "an analyzer that says it is over", 15)
        facts = json.loads(self._told())
        require(self._rows("analyzer", f"state-{number}", "parts") == 0, "a sum was handed to the analyzer")
        found = [(one["outcome"], why in one.get("reason", "")) for one in facts["history"]]
        require(found == [("void", True)], f"{facts['history']}")

    def _over(self, name: str) -> bool:
        asked = f"curl --silent --fail --cacert tls/authority.crt https://{name}:8445/v1/status || true"
        said = self._operator.type("analyzer", asked)
        return bool(said and json.loads(said)["over"])

    def _id_of(self, name: str) -> str:
        signed = msgspec.json.decode(self._operator.at("thief", name).read_bytes(), type=SignedTask)
        return task_id_of(signed.body).hex()

    def _ready(self, name: str) -> bool:
        asked = f"curl --silent --cacert tls/authority.crt --output /dev/null --write-out '%{{http_code}}' https://{name}:8445/readyz"
        return self._operator.type("analyzer", asked) == "200"

    def _spent(self, user: str) -> float:
        """A user's eps over all tasks."""
        command = f"dovetail client spent users/{user} --witness /var/lib/dovetail-witness --json"
        return round(sum(one["eps"] for one in json.loads(self._operator.type("users", command))), 6)


def main(folder: Path) -> None:
    """The walk; what was found, as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    with machines(folder) as holders:
        operator = Operator(folder, holders)
        walk = Walk(operator)
        try:
            found = walk.run()
        except BaseException:
            sys.stderr.write(f"{json.dumps(walk.seconds)}\n")
            raise
        finally:
            operator.kill()
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
