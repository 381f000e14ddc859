"""Where a run comes from, for the page that is signed: its setting, its counts, its code, and its data under a key.

A bare hash of the data would let whoever knows all other records confirm the last one. So the data's fingerprint is an
HMAC-SHA-256 under a key that stays with their owner: the file $DOVETAIL_DATA_KEY, or dovetail/data.key in the user's
configuration folder. It is made on first use, its owner alone can read it, and it is never inside a run's folder.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import _imports
from dovetail._version import __version__
from dovetail.data import Dataset, Task, resolve
from dovetail.experiment.config import Config, read
from dovetail.experiment.fingerprint import own_code
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.preparation import load_data
from dovetail.guarantee import Spread
from dovetail.protocols import Protocol

__all__ = ["VARIABLE", "check_key", "data_key", "different_data", "key_path", "origin_of"]

VARIABLE = "DOVETAIL_DATA_KEY"
_BLOCK, _BYTES = 1 << 26, 32
_PACKAGE = Path(__file__).resolve().parents[1]


def origin_of(
    config: Config, task: Task, protocol: Protocol, dataset: Dataset, spread: Spread, out: Path
) -> dict[str, Any]:
    """What a simulated run says of where it comes from, as plain data; makes the data's key if there is none."""
    return {
        "setting": "simulation",
        "users": spread.users,
        "records": spread.items,
        "library": {"version": __version__, "commit": _commit(), "code": _code()},
        "own_code": own_code(config, task, protocol),
        "data": _keyed(dataset, out),
    }


def check_key(out: Path) -> None:
    """Make the data's key if there is none, before a run starts; refuses one that cannot be used at its end."""
    _keyed(None, out)


def key_path() -> Path:
    """Where the data's key is, or will be."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dovetail" / "data.key"


def data_key(path: Path, *, out: Path | None = None) -> bytes:
    """The key in this file, made there if there is none; refuses one that others can read, or inside the run's folder.

    Guarantees:
        Two processes that make it at the same time get the same key.
    """
    if out is not None and path.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"expected the data's key outside the run's folder, got {VARIABLE}={str(path)!r}")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make(path)
    return _read(path)


def _make(path: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # its owner alone can read it
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was first, and its key counts
    finally:
        Path(temporary).unlink()


def _read(path: Path) -> bytes:
    if path.stat().st_mode & 0o077:
        raise ValueError(f"expected a key that its owner alone can read (chmod 600), got {str(path)!r}")
    try:
        key = bytes.fromhex(path.read_text().strip())
    except ValueError:
        key = b""
    if len(key) != _BYTES:
        raise ValueError(f"expected a key of {2 * _BYTES} hexadecimal digits, got something else in {str(path)!r}")
    return key


def different_data(run: Path, key: Path, *, task: Task | None = None, trust_code: bool = False) -> str | None:
    """Why the data that the run's config names, or `task`, are not shown to be the run's; None if they are the same.

    Guarantees:
        Data are the same only if every array the model reads is, bit by bit: inputs, labels, test records, subjects,
        users. Features that are computed in floating point may differ in their last bits on another machine.
    """
    folder = RunFolder(run)
    stated = folder.privacy().get("origin", {}).get("data", {})
    if "hmac_sha256" not in stated:
        return f"the run has no fingerprint of its data: {stated.get('missing', 'it does not say why')}"
    if not key.is_file():
        raise ValueError(f"expected the file of the data's key, got {str(key)!r}, which is none")
    secret = _read(key)
    if _key_id(secret) != stated["key_id"]:
        return f"the fingerprint was made with another key, key_id {stated['key_id']}"
    config = read(str(folder.config), code_beside=trust_code)
    with _imports.reading(f"the run in {str(run)!r}", trust_code=trust_code):
        dataset, _, _ = load_data(config, task or resolve(config.task.name))
    same = hmac.compare_digest(_mac(secret, dataset), stated["hmac_sha256"])
    return None if same else "the data are not those of the run"


def _keyed(dataset: Dataset | None, out: Path | None) -> dict[str, str]:
    """The data's fingerprint and whose key it is, or why there is none."""
    path = key_path()
    try:
        key = data_key(path, out=out)
    except OSError as error:
        if VARIABLE in os.environ:
            raise
        return {"missing": f"no key could be made ({error.strerror}); {VARIABLE} names a file for it"}
    if dataset is None:
        return {}
    return {"hmac_sha256": _mac(key, dataset), "key_id": _key_id(key), "key_file": _shown(path)}


def _shown(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _key_id(key: bytes) -> str:
    return hmac.digest(key, b"dovetail data key", "sha256").hex()[:16]


def _mac(key: bytes, dataset: Dataset) -> str:
    found = hmac.new(key, b"dovetail data 1", hashlib.sha256)
    for name in ("inputs", "labels", "test_inputs", "test_labels", "subjects", "users"):
        array = getattr(dataset, name)
        if array is None:
            continue
        found.update(f"|{name} {array.dtype.str} {array.shape}|".encode())
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for low in range(0, len(flat), _BLOCK):
            found.update(flat[low : low + _BLOCK].data)
    return found.hexdigest()


@functools.cache
def _code() -> str:
    """SHA-256 of the package's files: of one line per file, its own SHA-256 and its path, sorted by path."""
    files = sorted(
        file.relative_to(_PACKAGE).as_posix()
        for file in _PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )
    lines = [f"{hashlib.sha256((_PACKAGE / name).read_bytes()).hexdigest()}  {name}\n" for name in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@functools.cache
def _commit() -> str | None:
    """The commit of the checkout that the package is in, and whether its files were changed; None if it is in none."""
    git = shutil.which("git")
    if git is None or not (_PACKAGE.parent / ".git").exists():
        return None

    def asked(*words: str) -> str | None:
        found = subprocess.run([git, "-C", str(_PACKAGE.parent), *words], capture_output=True, text=True, check=False)
        return found.stdout.strip() if found.returncode == 0 else None

    commit, changed = asked("rev-parse", "HEAD"), asked("status", "--porcelain", "--", _PACKAGE.name)
    return f"{commit}, with changes" if commit and changed else commit or None
