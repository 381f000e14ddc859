"""The folder of a run: what is written, and how it survives being killed.

Files are replaced atomically, so that whatever a kill leaves behind is a complete earlier state. `metrics.jsonl` is
appended to; on resume, lines after the checkpoint are dropped and written again by the rounds that are run again.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.files import make_folder, write_atomically

__all__ = ["BANNER", "RunFolder", "Saved"]

BANNER = "diagnostics of raw updates: not covered by the statement, and never to be released"

_CONFIG, _METRICS, _DIAGNOSTICS, _CHECKPOINT, _PRIVACY, _MODEL = (
    "config.toml",
    "metrics.jsonl",
    "diagnostics.jsonl",
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
        make_folder(path)
        write_atomically(path / _CONFIG, config.encode())
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, config: str) -> tuple[RunFolder, Saved | None]:
        """An earlier run's folder and its last checkpoint, if it got that far; refuses another config.

        Nothing is written: several processes may read the same checkpoint (`drop_after` is for the one that writes).
        """
        if not (path / _CONFIG).is_file():
            raise ValueError(f"expected a run to resume in {str(path)!r}, got none")
        if (path / _CONFIG).read_text() != config:
            raise ValueError(f"expected the config that the run in {str(path)!r} began with, got another one")
        folder = cls(path)
        return folder, folder._load()

    def drop_after(self, last: int) -> None:
        """Leave out the lines of later rounds, which will be run again."""
        for name in (_METRICS, _DIAGNOSTICS):
            kept = [line for line in self._lines(name) if line.get("round", 0) <= last]
            if kept or name == _METRICS:
                text = "".join(json.dumps(line) + "\n" for line in kept)
                write_atomically(self.path / name, text.encode())

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl`."""
        self._append(_METRICS, line)

    def diagnose(self, line: Mapping[str, Any]) -> None:
        """Append a line to `diagnostics.jsonl`, under a banner that says what it is."""
        if not (self.path / _DIAGNOSTICS).exists():
            self._append(_DIAGNOSTICS, {"banner": BANNER})
        self._append(_DIAGNOSTICS, line)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; a last line that a kill cut short is left out."""
        return self._lines(_METRICS)

    def diagnostics(self) -> list[dict[str, Any]]:
        """The lines of `diagnostics.jsonl` below the banner."""
        return [line for line in self._lines(_DIAGNOSTICS) if "round" in line]

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(_finite(line)) + "\n")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        lines = []
        if (self.path / name).exists():
            for line in (self.path / name).read_text().splitlines():
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


def _finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """The line with null for what JSON has no number for."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
