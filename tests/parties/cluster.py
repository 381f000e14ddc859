"""A PostgreSQL server in a folder of its own, for tests: an unprivileged user's, on one address, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg

from dovetail.parties.common.certificates import make_authority, make_certificate
from dovetail.parties.fleet import HOST, free_ports

_USER = "postgres"  # Debian's, where this runs as root


class Cluster:
    """A server that can be restarted, as by a crash; a database in it for whoever asks."""

    def __init__(self, folder: Path, *, host: str = HOST, tls: bool = False) -> None:
        self._folder, self._host, self._password = folder, host, secrets.token_hex(16)
        self._tls, self._options = tls or host != HOST, ""
        (self._port,) = free_ports(1)
        self._bin = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
        (folder / "password").write_text(self._password)
        if os.geteuid() == 0:
            owner = pwd.getpwnam(_USER)
            for path in (folder, folder / "password"):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        options = ("--auth=scram-sha-256", f"--pwfile={folder / 'password'}", "--username=dovetail", "--encoding=UTF8")
        self._run("initdb", "--pgdata", folder / "data", *options, "--no-locale")
        if self._tls:
            made = make_certificate(folder, make_authority(folder), host=host)
            for path in made:
                shutil.chown(path, _USER, _USER) if os.geteuid() == 0 else None
            self._options = f"-c ssl=on -c ssl_cert_file={made.certificate} -c ssl_key_file={made.private_key}"
        if host != HOST:  # in a network namespace of its own
            with (folder / "data" / "pg_hba.conf").open("a") as rules:
                rules.write(f"host all all {host}/24 scram-sha-256\n")

    def start(self) -> None:
        """Until it takes connections."""
        options = f"-h {self._host} -p {self._port} -k {self._folder} -c max_connections=200 {self._options}"
        self._run(
            "pg_ctl", "start", "--wait", "-D", self._folder / "data", "-l", self._folder / "log", "--options", options
        )

    def stop(self, mode: str = "fast") -> None:
        """As told: `immediate` is a crash."""
        self._run("pg_ctl", "stop", "--wait", "-D", self._folder / "data", "--mode", mode)

    def crash(self) -> None:
        """End it without a word to anybody, and start it again."""
        self.stop("immediate")
        self.start()

    def database(self, name: str | None = None) -> str:
        """The URL of a new database."""
        name = f"test_{secrets.token_hex(8)}" if name is None else name
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self._url(name)

    def copied(self, url: str) -> str:
        """A database restored from a dump of another one."""
        made, file = self.database(), self._folder / "dump"
        self._run("pg_dump", "--format=custom", f"--file={file}", f"--dbname={url}")
        self._run("pg_restore", f"--dbname={made}", file)
        return made

    def files(self, folder: str) -> bytes:
        """What one of its folders holds, after everything was written there."""
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute("CHECKPOINT")
        return b"".join(path.read_bytes() for path in (self._folder / "data" / folder).rglob("*") if path.is_file())

    def _url(self, name: str) -> str:
        tls = f"?sslmode=verify-full&sslrootcert={self._folder}/authority.crt" if self._tls else ""
        return f"postgresql://dovetail:{self._password}@{self._host}:{self._port}/{name}{tls}"

    def at_socket(self, url: str) -> str:
        """The same database by the server's Unix socket."""
        name = url.rpartition("/")[2]
        return f"postgresql://dovetail:{self._password}@/{name}?host={self._folder}&port={self._port}"

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Until the block ends; a process of its own ends the server if this one is killed."""
        stop = shlex.join(self._words("pg_ctl", "stop", "-D", self._folder / "data", "--mode", "immediate"))
        words = f"while kill -0 {os.getpid()}; do sleep 1; done; {stop}; rm -rf {shlex.quote(str(self._folder))}"
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        watching = subprocess.Popen(["sh", "-c", words], start_new_session=True, cwd="/", **quiet)
        try:
            yield
        finally:
            watching.kill()
            watching.wait()
            self.stop("immediate")

    def _words(self, command: str, *words: object) -> list[str]:
        program = shutil.which(command) if self._bin is None else str(self._bin / command)
        assert program is not None, "expected PostgreSQL (apt-get install postgresql), got none"
        alone = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"] if os.geteuid() == 0 else []
        return [*alone, program, *map(str, words)]

    def _run(self, command: str, *words: object) -> None:
        told = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": self._folder}
        with tempfile.TemporaryFile() as output:  # no pipe: the server would keep it open
            done = subprocess.run(self._words(command, *words), check=False, stdout=output, **told)
            output.seek(0)
            assert done.returncode == 0, output.read().decode()


@contextlib.contextmanager
def cluster(*, host: str = HOST, tls: bool = False) -> Iterator[Cluster]:
    """A server, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="dovetail-postgres-") as folder:
        made = Cluster(Path(folder), host=host, tls=tls)
        made.start()
        with made.watched():
            yield made
