"""What a run is made of, in two forms: a fingerprint that resuming compares, and an origin that the run publishes.

`fingerprint` decides whether a run may go on from a checkpoint. It holds bare hashes of the data, stays in the
checkpoint, and is deleted with it at the end.

`origin_of` says in `privacy.json` which code and data a run used. There a bare hash of the data would let whoever knows
all other records confirm the last one. So it is an HMAC-SHA-256 under a key that stays with the data's owner: the file
$DOVETAIL_DATA_KEY, or dovetail/data.key in the user's configuration folder. The key is made on first use, its owner
alone can read it, and it is never inside a run's folder. `different_data` checks data against it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import inspect
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from dovetail import _imports, protocols
from dovetail._version import __version__
from dovetail.data import TASKS, Clients, Dataset, Task, resolve, views
from dovetail.experiment.config import Config, read
from dovetail.experiment.declared import UNNAMED, declared_public
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.population import load_inputs
from dovetail.guarantee import Guarantee
from dovetail.protocols import Protocol

__all__ = [
    "VARIABLE",
    "check_key",
    "data_key",
    "different_data",
    "fingerprint",
    "first_difference",
    "key_path",
    "origin_of",
    "own_code",
]

VARIABLE = "DOVETAIL_DATA_KEY"
_PACKAGE = Path(__file__).resolve().parents[1]
_BLOCK = 1 << 26  # bytes of an array that are hashed at a time
_KEY_BYTES = 32
_HINTS = {"first model": " (a module of your own must start from the same weights: set a seed before it is made)"}


def fingerprint(
    config: Config,
    task: Task,
    protocol: protocols.Protocol,
    dataset: Dataset,
    clients: Clients,
    parameters: np.ndarray,
) -> dict[str, Any]:
    """What a run is made of, as plain data: two runs with equal fingerprints may go on from each other's checkpoints.

    Of code from outside the package, the files count that task, model, views and protocol are written in.

    Arguments:
        config: all of it counts, but for [performance], which may change speed alone.
        protocol: the settled protocol; what it read off the data does not count.
        dataset: by its records, test records and subjects.
        clients: who holds which records.
        parameters: the first model, flat.
    """
    settings = msgspec.to_builtins(config)
    del settings["performance"]
    protocol_settings = {
        name: value for name, value in msgspec.to_builtins(protocol).items() if name not in protocol.read_off_data
    }
    data = (dataset.inputs, dataset.labels, dataset.test_inputs, dataset.test_labels)
    subjects = () if dataset.subjects is None else (dataset.subjects,)
    return {
        "config": settings,
        "protocol": {"class": f"{type(protocol).__module__}:{type(protocol).__qualname__}", **protocol_settings},
        "data": _hash_of_arrays(*data, *subjects),
        "roster": _hash_of_arrays(clients.records, clients.counts),
        "first model": _hash_of_arrays(parameters),
        "own code": own_code(config, task, protocol),
        "library": f"dovetail {__version__}, jax {jax.__version__}, numpy {np.__version__}",
    }


def own_code(config: Config, task: Task, protocol: protocols.Protocol) -> dict[str, str]:
    """Fingerprints of the files outside the package that task, model, views, features and protocol are written in."""
    own: list[Any] = [task.loss, *task.metrics.values()]
    if task.model is not None:
        own += [task.model.init, task.model.apply, task.model.loss]
        own += task.model.learner.code if task.model.learner is not None else ()
    own = [item for item in own if item is not None and not isinstance(item, str)]
    files = _files_of_code(type(protocol), task.load, *own, *views.parse_views(config.client.views))
    return files | _files_of_features(config.task.features)


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first difference of two fingerprints, as a sentence; None if there is none."""
    return next(_list_differences("", before, now), None)


def _list_differences(where: str, before: Any, now: Any) -> Iterator[str]:
    """A sentence for each value that differs in two trees of plain data; `where` is the dotted path of their root."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*before, *now)):
            yield from _list_differences(f"{where}.{name}" if where else name, before.get(name), now.get(name))
    elif _list_if_tuple(before) != _list_if_tuple(now):
        name = where.removeprefix("config.")
        yield f"{name} was {_short_text(before)} and is {_short_text(now)}{_HINTS.get(name, '')}"


def _list_if_tuple(value: Any) -> Any:
    """A tuple as a list, as it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value


def _short_text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}..."


def _files_of_features(name: str) -> dict[str, str]:
    """The file of features that are named "module:object"."""
    return _files_of_code(sys.modules.get(name.partition(":")[0])) if ":" in name else {}


def _files_of_code(*objects: Any) -> dict[str, str]:
    """Hashes (BLAKE2b-128) of the files outside the package that these objects are written in, by module."""
    files = {}
    for item in objects:
        module = inspect.getmodule(item)
        if module is None or module.__name__.split(".")[0] == "dovetail":
            continue
        file = getattr(module, "__file__", None)
        content = Path(file).read_bytes() if file and Path(file).is_file() else b""
        files[module.__name__] = hashlib.blake2b(content, digest_size=16).hexdigest()
    return files


def _hash_of_arrays(*arrays: np.ndarray) -> str:
    """A hash (BLAKE2b-128) of the arrays in this order, with their types and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        _hash_array(digest, array)
    return digest.hexdigest()


def _hash_array(digest: Any, array: np.ndarray) -> None:
    """Hash the bytes of an array, block by block."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for low in range(0, len(flat), _BLOCK):
        digest.update(flat[low : low + _BLOCK].data)


def origin_of(
    config: Config, task: Task, protocol: Protocol, dataset: Dataset, guarantee: Guarantee, out: Path
) -> dict[str, Any]:
    """What a simulated run says of where it comes from, as plain data; makes the data's key if there is none.

    Arguments:
        protocol: the settled protocol.
        guarantee: knows how many users and records there are, as far as that is public, and what is assumed.
        out: the run's folder, in which the data's key must not lie.
    """
    return {
        "setting": "simulation",
        "users": guarantee.spread.users,
        "records": guarantee.spread.items,
        "library": {"version": __version__, "commit": _commit_in_words(), "code": _package_code()},
        "own_code": own_code(config, task, protocol),
        "data": _fingerprint_of_data(dataset, out),
        "declared": declared_public(config, task, dataset, assumptions=guarantee.assumptions),
    }


def check_key(out: Path) -> None:
    """Make the data's key if there is none, before a run starts; refuses one that cannot be used at its end."""
    _fingerprint_of_data(None, out)


def key_path() -> Path:
    """Where the data's key is, or will be."""
    if path := os.environ.get(VARIABLE):
        return Path(path)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dovetail" / "data.key"


def data_key(path: Path, *, out: Path | None = None) -> bytes:
    """The key in this file, made there if there is none; refuses one that others can read, or inside the run's folder.

    Guarantees:
        Two processes that make it at the same time get the same key.
    """
    if out is not None and path.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{VARIABLE} names {str(path)!r}, inside the run's folder: keep the data's key elsewhere")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_key(path)
    return _read_key(path)


def _make_key(path: Path) -> None:
    """Write a new key to a file of its own and link it to `path`, so that `path` never holds half a key."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # its owner alone can read it
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(_KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was first, and its key counts
    finally:
        Path(temporary).unlink()


def _read_key(path: Path) -> bytes:
    """The key in this file; refuses a file that others than its owner can read, or that holds something else."""
    if os.name == "posix" and path.stat().st_mode & 0o077:  # elsewhere the mode says nothing about who may read it
        raise ValueError(f"others can read the data's key in {str(path)!r}: chmod 600 it, or make a new one")
    try:
        key = bytes.fromhex(path.read_text(encoding="utf-8").strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{str(path)!r} holds no key, which has {2 * _KEY_BYTES} hexadecimal digits")
    return key


def different_data(
    run: Path, key: Path, *, given: Dataset | Task | None = None, trust_code: bool = False
) -> str | None:
    """Why data are not shown to be the run's; None if they are the same.

    Arguments:
        key: the file of the key that the run's data were fingerprinted with.
        given: the data; by default those that the run's config names.
        trust_code: whether code that the config names may be imported.

    Guarantees:
        Data are the same only if every array the model reads is, bit by bit: inputs, labels, test records, subjects,
        users. Features that are computed in floating point may differ in their last bits on another machine.
    """
    folder = RunFolder(run)
    stated = folder.read_privacy().get("origin", {}).get("data", {})
    if "hmac_sha256" not in stated:
        return f"the run has no fingerprint of its data: {stated.get('missing', 'it does not say why')}"
    if not key.is_file():
        raise ValueError(
            f"there is no file {str(key)!r}: give the file of the key that the run's data were fingerprinted with"
        )
    secret = _read_key(key)
    if _key_id(secret) != stated["key_id"]:
        return f"the fingerprint was made with another key, key_id {stated['key_id']}"
    config = read(str(folder.config), code_beside=trust_code)
    with _imports.import_only_if_trusted(f"the run in {str(run)!r}", trust_code=trust_code):
        dataset = load_inputs(config, _task_of(given, config.task.name))
    same = hmac.compare_digest(_hmac_of_dataset(secret, dataset), stated["hmac_sha256"])
    return None if same else "the data are not those of the run"


def _task_of(given: Dataset | Task | None, name: str) -> Task:
    """What was given as a task, or the task of this name; refuses what only the program had that trained on it."""
    if isinstance(given, Dataset):
        return Task(name=UNNAMED, load=lambda *, folder: given)
    if given is not None and not isinstance(given, Task):
        raise ValueError(
            f"expected data= as a Dataset or a Task, got {type(given).__name__}: make a dataset of it as for the run, "
            "by Dataset.from_... with the same arguments"
        )
    if given is None and ":" not in name and name not in TASKS:
        raise ValueError(
            f"the data of task.name = {name!r} were given to the run by a Python program: give them again, "
            "dovetail.verify(run, data=dataset), or dovetail verify RUN --data module:object"
        )
    return given or resolve(name)


def _fingerprint_of_data(dataset: Dataset | None, out: Path | None) -> dict[str, str]:
    """The data's HMAC with the id and file of its key; {"missing": the reason} where no key could be made.

    Without a dataset only the key is made or checked, and nothing is returned. A file that $DOVETAIL_DATA_KEY names and
    that cannot be read is an error, not a reason.
    """
    path = key_path()
    try:
        key = data_key(path, out=out)
    except OSError as error:
        if VARIABLE in os.environ:
            raise
        return {"missing": f"no key could be made ({error.strerror}); {VARIABLE} names a file for it"}
    if dataset is None:
        return {}
    return {"hmac_sha256": _hmac_of_dataset(key, dataset), "key_id": _key_id(key), "key_file": _abbreviate_home(path)}


def _abbreviate_home(path: Path) -> str:
    """The path as text, with ~ for the user's home, so that a published page does not name the user."""
    home = Path.home()
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) else str(path)


def _key_id(key: bytes) -> str:
    """16 hexadecimal digits that name the key and reveal nothing about it."""
    return hmac.digest(key, b"dovetail data key", "sha256").hex()[:16]


def _hmac_of_dataset(key: bytes, dataset: Dataset) -> str:
    """HMAC-SHA-256 of every array of the dataset, each with its name, type and shape; in hexadecimal digits."""
    mac = hmac.new(key, b"dovetail data 1", hashlib.sha256)
    for name in ("inputs", "labels", "test_inputs", "test_labels", "subjects", "users"):
        array = getattr(dataset, name)
        if array is None:
            continue
        mac.update(f"|{name} {array.dtype.str} {array.shape}|".encode())
        _hash_array(mac, array)
    return mac.hexdigest()


@functools.cache
def _package_code() -> str:
    """SHA-256 of the package's files: of one line per file, its own SHA-256 and its path, sorted by path."""
    files = sorted(
        file.relative_to(_PACKAGE).as_posix()
        for file in _PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )
    lines = [f"{hashlib.sha256((_PACKAGE / name).read_bytes()).hexdigest()}  {name}\n" for name in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@functools.cache
def _commit_in_words() -> str | None:
    """The commit of the checkout that the package is in, and whether its files were changed; None if it is in none."""
    git = shutil.which("git")
    if git is None or not (_PACKAGE.parent / ".git").exists():
        return None

    def run_git(*words: str) -> str | None:
        result = subprocess.run([git, "-C", str(_PACKAGE.parent), *words], capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else None

    commit = run_git("rev-parse", "HEAD")
    changed = run_git("status", "--porcelain", "--", _PACKAGE.name)
    return f"{commit}, with changes" if commit and changed else commit or None
