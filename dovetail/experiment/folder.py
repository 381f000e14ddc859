"""The folder of a run: what is written, and how it survives being killed.

Files are replaced atomically, so that whatever a kill leaves behind is a complete earlier state. `metrics.jsonl` is
appended to, with lines of rounds that are in the checkpoint already.

`checkpoint.npz` holds all that a run needs to go on, and no noise key: its owner alone can read it, and it is deleted
when the run ends, as is `spending.json`, which says in which ledger of all runs on the same people it is counted.
`ledger.json` holds what was released, in privacy terms, for `dovetail verify`; `recipe.json` says
how new rows are read, for `dovetail predict`; `timing.json` how long a round took, which may depend on the data.

The ledger ends with a chain of hashes: origin, what was released, config, recipe and model, each entry hashed with the
hash of the one before it. The last hash is in `privacy.json`, so whoever keeps that one line can tell whether any of
these is still what the run wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import _imports, protocols
from dovetail.data.readers.recipes import Recipe
from dovetail.files import lock, make_folder, write_atomically, write_json
from dovetail.guarantee.record import Record

__all__ = ["BANNER", "SETTINGS", "TIMING_BANNER", "Checkpoint", "RunFolder"]

SETTINGS = ("noise", "protocol", "uploads", "tuning", "evaluation")  # keys of privacy.json that ledger.json repeats
BANNER = "diagnostics of raw updates: not covered by the statement, not for release"

TIMING_BANNER = "how long rounds took may depend on the data: not covered by the statement, not for release"

_CONFIG, _METRICS, _DIAGNOSTICS, _CHECKPOINT, _PRIVACY, _MODEL, _LEDGER, _RECIPE, _TIMING, _LINK, _LOCK = (
    "config.toml",
    "metrics.jsonl",
    "diagnostics.jsonl",
    "checkpoint.npz",
    "privacy.json",
    "model.npz",
    "ledger.json",
    "recipe.json",
    "timing.json",
    "spending.json",
    ".lock",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after a round, with all that it needs to go on."""

    round: int  # how many rounds are done, released or not
    released: tuple[int, ...]  # the indices, from 0, of the rounds that were released
    resumed: tuple[int, ...]  # the rounds after which the run was resumed before
    record: Record  # the released rounds in privacy terms
    fingerprint: Mapping[str, Any]  # what a run that goes on from here must be made of (fingerprint.py)
    leaves: tuple[np.ndarray, ...]  # the arrays of the engine's `Training`, in the order of jax.tree.leaves


class RunFolder:
    """The folder of one run: what `run` writes into it, and how it is read back.

    Arguments:
        path: the folder; `create` makes a new one, `reopen` finds an earlier run's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """Make a new run's folder with its `config.toml`; refuses a folder that holds a run or cannot be written to.

        Arguments:
            config: the content of `config.toml`.
        """
        cls.refuse_taken(path)
        make_folder(path)
        write_atomically(path / _CONFIG, config.encode())
        return cls(path)

    @staticmethod
    def refuse_taken(path: Path) -> None:
        """Refuse a folder that holds a run."""
        if (path / _CONFIG).exists():
            raise ValueError(f"{str(path)!r} already holds a run: choose another folder, or --resume it")

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """An earlier run's folder; nothing is written."""
        if not (path / _CONFIG).is_file():
            raise ValueError(f"there is no run to resume in {str(path)!r}")
        return cls(path)

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended: `privacy.json`, which is written last, is there."""
        return (self.path / _PRIVACY).exists()

    @property
    def is_resumable(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return (self.path / _CHECKPOINT).exists()

    def drop_lines_after(self, last: int) -> None:
        """Remove the lines of rounds after `last` from `metrics.jsonl` and `diagnostics.jsonl`.

        A run that goes on from a checkpoint runs these rounds again and writes new lines for them.
        """
        for name in (_METRICS, _DIAGNOSTICS):
            lines = [line for line in self._read_lines(name) if line.get("round", 0) <= last]
            if lines or name == _METRICS:
                text = "".join(json.dumps(line) + "\n" for line in lines)
                write_atomically(self.path / name, text.encode())

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl`."""
        self._append(_METRICS, line)

    def append_diagnostics(self, line: Mapping[str, Any]) -> None:
        """Append a line to `diagnostics.jsonl`, under a banner that says what it is."""
        if not (self.path / _DIAGNOSTICS).exists():
            self._append(_DIAGNOSTICS, {"banner": BANNER})
        self._append(_DIAGNOSTICS, line)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; a last line that a kill cut short is left out."""
        return self._read_lines(_METRICS)

    def read_diagnostics(self) -> list[dict[str, Any]]:
        """The lines of `diagnostics.jsonl` below the banner."""
        return [line for line in self._read_lines(_DIAGNOSTICS) if "round" in line]

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line of JSON to a file; values that are not finite are written as null."""
        with (self.path / name).open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(_null_if_not_finite(line)) + "\n")

    def _read_lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file up to the first that is not JSON, for a kill may have cut the last one short."""
        lines = []
        if (self.path / name).exists():
            for line in (self.path / name).read_text(encoding="utf-8").splitlines():
                try:
                    lines.append(json.loads(line))
                except json.JSONDecodeError:
                    break
        return lines

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint, which its owner alone can read; refuses to bring one back after the end."""
        if self.is_finished:
            raise ValueError(f"the run in {str(self.path)!r} has ended: no checkpoint is written any more")
        meta = {
            "round": checkpoint.round,
            "released": checkpoint.released,
            "resumed": checkpoint.resumed,
            "record": checkpoint.record.to_json(),
            "fingerprint": checkpoint.fingerprint,
            "leaves": len(checkpoint.leaves),
        }
        arrays = {f"leaf{i}": leaf for i, leaf in enumerate(checkpoint.leaves)}
        content = _npz_bytes({"meta": np.array(json.dumps(meta)), **arrays})
        write_atomically(self.path / _CHECKPOINT, content, mode=0o600)

    def read_checkpoint(self) -> Checkpoint:
        """The last checkpoint; a run has one from its start to its end."""
        path = self.path / _CHECKPOINT
        if not path.exists():
            raise ValueError(f"there is no checkpoint in {str(self.path)!r}: the run cannot go on")
        try:
            with np.load(path) as data:
                meta = json.loads(str(data["meta"]))
                leaves = tuple(data[f"leaf{i}"] for i in range(meta["leaves"]))
            return Checkpoint(
                round=meta["round"],
                released=tuple(meta["released"]),
                resumed=tuple(meta["resumed"]),
                record=Record.from_json(meta["record"]),
                fingerprint=meta["fingerprint"],
                leaves=leaves,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the checkpoint in {str(path)!r} is of another version of the library: finish the run with that one"
            ) from error

    def finish(
        self, privacy: Mapping[str, Any], record: Record, parameters: Mapping[str, np.ndarray], recipe: Recipe
    ) -> None:
        """Write model, recipe, ledger and, last, the statement; then delete the checkpoint.

        Arguments:
            privacy: the content of `privacy.json`. `seconds_per_round` goes to a file of its own, under a banner,
                for it is no part of what is stated; the ledger's last hash is added.
            record: what was released, in privacy terms.
            parameters: the model's arrays by name.
            recipe: how new rows are read.
        """
        privacy = dict(privacy)
        if (seconds := privacy.pop("seconds_per_round", None)) is not None:
            write_json(self.path / _TIMING, {"banner": TIMING_BANNER, "seconds_per_round": seconds})
        released = {**record.to_json(), **{name: privacy[name] for name in SETTINGS if name in privacy}}
        write_atomically(self.path / _MODEL, _npz_bytes(parameters))
        write_json(self.path / _RECIPE, recipe.to_json())
        chain = self._make_chain(privacy.get("origin"), released)
        write_json(self.path / _LEDGER, {**released, "chain": chain})
        stated = {**privacy, "ledger": chain[-1]["hash"]}
        write_atomically(self.path / _PRIVACY, (json.dumps(stated, indent=2) + "\n").encode())
        self.delete_checkpoint()

    @property
    def missing(self) -> tuple[str, ...]:
        """Files of a finished run that the ledger's chain ties to it, and that are not in the folder."""
        return tuple(name for name in (_CONFIG, _RECIPE, _MODEL) if not (self.path / name).is_file())

    def _make_chain(self, origin: Any, released: Mapping[str, Any]) -> list[dict[str, str]]:
        """The ledger's chain of hashes, made anew from what is in the folder.

        Arguments:
            origin: what `privacy.json` says of where the run comes from.
            released: the content of `ledger.json` but for its chain.
        """
        contents = {"origin": _canonical_bytes(origin), "released": _canonical_bytes(released)}
        files = {
            name: (self.path / name).read_bytes() for name in (_CONFIG, _RECIPE, _MODEL) if name not in self.missing
        }
        return _hash_chain({name: hashlib.sha256(content).hexdigest() for name, content in (contents | files).items()})

    def find_changes(self) -> list[str]:
        """What in a finished run's folder is not what the run wrote there, by its ledger's chain: a sentence each."""
        privacy = self.read_privacy()
        ledger = self._read_json(_LEDGER)
        stated = ledger.pop("chain", None)
        if not isinstance(stated, list) or not all(isinstance(entry, dict) and "entry" in entry for entry in stated):
            return [f"{_LEDGER} has no chain of hashes, so nothing ties model and config to it"]
        hashes = {entry["entry"]: entry.get("sha256") for entry in stated}
        there = {entry["entry"]: entry["sha256"] for entry in self._make_chain(privacy.get("origin"), ledger)}
        changes = [
            f"{name} is not what the run wrote: its SHA-256 is {there[name]}, and {hashes.get(name)} in {_LEDGER}"
            for name in there
            if there[name] != hashes.get(name)
        ]
        if not changes and stated != _hash_chain(hashes):
            changes.append(f"the chain of hashes in {_LEDGER} does not add up")
        if not stated or privacy.get("ledger") != stated[-1].get("hash"):
            changes.append(f"the ledger's last hash in {_PRIVACY} is not that of {_LEDGER}")
        return changes

    def delete_checkpoint(self) -> None:
        """Delete the checkpoint, and whatever a kill left of one that was being written."""
        for file in (self.path / _CHECKPOINT, *self.path.glob(f".{_CHECKPOINT}.*")):
            file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from working on the same run while the block runs; refuses if one of them does."""
        with contextlib.ExitStack() as locks:
            locks.callback(self._delete_lock_if_finished)  # once the lock is let go of
            try:
                locks.enter_context(lock(self.path / _LOCK))
            except BlockingIOError as error:
                raise ValueError(f"another process is using the run in {str(self.path)!r}") from error
            yield

    def _delete_lock_if_finished(self) -> None:
        """Delete the lock's file of a run that has ended: whoever locks it next finds nothing to do."""
        if self.is_finished:
            with contextlib.suppress(OSError):  # Windows keeps a file that another process has open
                (self.path / _LOCK).unlink()

    def write_ledger_link(self, link: Mapping[str, str]) -> None:
        """Write which ledger of spending counts this run, and under which id, for whoever resumes it."""
        write_json(self.path / _LINK, link)

    def read_ledger_link(self) -> dict[str, str] | None:
        """Which ledger of spending counts this run, as `write_ledger_link` wrote it; None if there is none."""
        return self._read_json(_LINK) if (self.path / _LINK).is_file() else None

    def delete_ledger_link(self) -> None:
        """Forget where the run was counted: it has ended, and its ledger knows what it was charged."""
        (self.path / _LINK).unlink(missing_ok=True)

    def read_ledger(self, *, trust_code: bool = False) -> Record:
        """The rounds that are charged, as `run` wrote them; a protocol "module:Class" is imported only if trusted."""
        data = self._read_json(_LEDGER)
        with contextlib.suppress(OSError, TypeError, KeyError, tomllib.TOMLDecodeError):
            name = tomllib.loads((self.path / _CONFIG).read_text(encoding="utf-8"))["protocol"]["name"]
            with _imports.import_only_if_trusted(f"the run in {str(self.path)!r}", trust_code=trust_code):
                protocols.find(name)  # one from outside the package brings its own events
        return Record.from_json(data)

    def read_settings(self) -> dict[str, Any]:
        """The values of `SETTINGS` in the ledger, such as the protocol's settings; None for one that is not there."""
        ledger = self._read_json(_LEDGER)
        return {name: ledger.get(name) for name in SETTINGS}

    def read_privacy(self) -> dict[str, Any]:
        """The content of `privacy.json`: what a finished run states."""
        return self._read_json(_PRIVACY)

    def read_seconds_per_round(self) -> float | None:
        """The median time of a round; None if nobody wrote it down."""
        if not (self.path / _TIMING).is_file():
            return None
        seconds = self._read_json(_TIMING).get("seconds_per_round")
        return float(seconds) if isinstance(seconds, int | float) else None

    def read_recipe(self) -> Recipe:
        """How new rows become the model's inputs: the content of `recipe.json`."""
        return Recipe.from_json(self._read_json(_RECIPE))

    def read_parameters(self) -> dict[str, np.ndarray]:
        """The arrays of the final model by name; refuses a run that has not finished."""
        path = self.path / _MODEL
        if not path.is_file():
            raise ValueError(f"{str(self.path)!r} has no {_MODEL}: the run has not finished")
        with np.load(path) as arrays:
            return dict(arrays)

    @property
    def config(self) -> Path:
        """The path of `config.toml`; refuses a folder without one."""
        if not (self.path / _CONFIG).is_file():
            raise ValueError(f"{str(self.path)!r} is not the folder of a run: it has no {_CONFIG}")
        return self.path / _CONFIG

    def _read_json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file of a finished run; refuses a missing file and one that is not valid."""
        if not self.path.is_dir():
            raise ValueError(f"{str(self.path)!r} is not a folder")
        try:
            data = json.loads((self.path / name).read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
        except FileNotFoundError as error:
            raise ValueError(f"{str(self.path)!r} has no {name}: the run has not finished") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{str(self.path / name)!r} is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{str(self.path / name)!r} holds no JSON object")
        return data


def _refuse_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object as a dict; refuses two equal names, of which readers disagree which one counts."""
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} occurs twice in one JSON object, and readers disagree about which counts")
    return data


def _null_if_not_finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """The line with null for what JSON has no number for."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }


def _hash_chain(hashes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry {"entry": name, "sha256": digest, "hash": ...} for each hash, in this order.

    An entry's hash covers the hash of the entry before it, so the last one depends on all of them.
    """
    chain: list[dict[str, Any]] = []
    for name, digest in hashes.items():
        before = chain[-1]["hash"] if chain else ""
        entry = {"entry": name, "sha256": digest}
        chain.append({**entry, "hash": hashlib.sha256(before.encode() + _canonical_bytes(entry)).hexdigest()})
    return chain


def _canonical_bytes(data: Any) -> bytes:
    """Plain data as JSON with sorted keys and no spaces: equal data give equal bytes, whose hash can be compared."""
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The content of an .npz file with these arrays."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
