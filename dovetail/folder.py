"""The folder of a run: what is written, and how it survives being killed.

Files are replaced atomically, so that whatever a kill leaves behind is a complete earlier state. `metrics.jsonl` is
appended to; on resume, lines after the checkpoint are dropped and written again by the rounds that are run again.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["RunFolder", "Saved", "write_atomically"]

_CONFIG, _METRICS, _CHECKPOINT, _PRIVACY, _MODEL = (
    "config.toml",
    "metrics.jsonl",
    "checkpoint.npz",
    "privacy.json",
    "model.npz",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint: rounds done, which of them were released, and the arrays of the training state."""

    round: int
    released: tuple[int, ...]
    leaves: tuple[np.ndarray, ...]


class RunFolder:
    """Where one run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """A new run's folder; refuses one that holds a run, and one that cannot be written to."""
        if (path / _CONFIG).exists():
            raise ValueError(f"expected a folder without a run, or --resume, got {str(path)!r}, which holds one")
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / _CONFIG, config.encode())
        except OSError as error:
            raise ValueError(
                f"expected a folder that can be written to, got {str(path)!r} ({error.strerror})"
            ) from error
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, config: str) -> tuple[RunFolder, Saved | None]:
        """An earlier run's folder and its last checkpoint, if it got that far; refuses another config."""
        if not (path / _CONFIG).is_file():
            raise ValueError(f"expected a run to resume in {str(path)!r}, got none")
        if (path / _CONFIG).read_text() != config:
            raise ValueError(f"expected the config that the run in {str(path)!r} began with, got another one")
        folder = cls(path)
        saved = folder._load()
        folder._keep_metrics_until(saved.round if saved else 0)
        return folder, saved

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl`."""
        with (self.path / _METRICS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; a last line that a kill cut short is left out."""
        lines = []
        if (self.path / _METRICS).exists():
            for line in (self.path / _METRICS).read_text().splitlines():
                try:
                    lines.append(json.loads(line))
                except json.JSONDecodeError:
                    break
        return lines

    def save(self, saved: Saved) -> None:
        """Replace the checkpoint."""
        meta = json.dumps({"round": saved.round, "released": saved.released, "leaves": len(saved.leaves)})
        arrays = {f"leaf{i}": leaf for i, leaf in enumerate(saved.leaves)}
        write_atomically(self.path / _CHECKPOINT, _npz({"meta": np.array(meta), **arrays}))

    def finish(self, privacy: Mapping[str, Any], parameters: Mapping[str, np.ndarray]) -> None:
        """Write the statement and the model; the checkpoint has done its work."""
        write_atomically(self.path / _MODEL, _npz(parameters))
        write_atomically(self.path / _PRIVACY, (json.dumps(privacy, indent=2) + "\n").encode())
        (self.path / _CHECKPOINT).unlink(missing_ok=True)

    def _load(self) -> Saved | None:
        path = self.path / _CHECKPOINT
        if not path.exists():
            return None
        with np.load(path) as data:
            meta = json.loads(str(data["meta"]))
            leaves = tuple(data[f"leaf{i}"] for i in range(meta["leaves"]))
        return Saved(round=meta["round"], released=tuple(meta["released"]), leaves=leaves)

    def _keep_metrics_until(self, last: int) -> None:
        kept = [line for line in self.metrics() if line["round"] <= last]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(self.path / _METRICS, text.encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is seen either complete or not at all, also after a crash."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
