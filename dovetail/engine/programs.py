"""Compiled programs, kept between runs: a second run of a model on this machine compiles nothing.

They are in the folder `programs` of the cache ($DOVETAIL_CACHE, or ~/.cache/dovetail), read by its owner alone, apart
for each kind of processor; `DOVETAIL_PROGRAMS=off` keeps none. What JAX itself is told to keep (its option
`jax_compilation_cache_dir`) goes before. A program holds the shapes of records, and no record.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from dovetail import machine
from dovetail.data.download import cache_folder

__all__ = ["MOST_BYTES", "keep_programs", "program_folder", "remove_oldest"]

MOST_BYTES = 1 << 29  # of all programs that are kept; the ones that were not used for longest go first
_LEAST_SECONDS = 0.05  # what compiles faster is not worth a file


def keep_programs() -> None:
    """Let JAX keep what it compiles, and find what it compiled before; no effect where the user has chosen."""
    if jax.config.values.get("jax_compilation_cache_dir") or (folder := program_folder()) is None:
        return
    remove_oldest(folder.parent, MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    compilation_cache.reset_cache()  # what was compiled before in this process had none


def program_folder() -> Path | None:
    """Where programs for this processor are kept, and what was measured of them; None where nothing is kept."""
    if os.environ.get("DOVETAIL_PROGRAMS") == "off":
        return None
    processor = hashlib.sha256(f"{platform.machine()} {machine.processor_flags()}".encode()).hexdigest()[:12]
    folder = cache_folder() / "programs" / processor
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # a home that cannot be written to
        return None
    return folder


def remove_oldest(folder: Path, most_bytes: int) -> None:
    """Remove files in a folder, the least recently used first, until the others have at most so many bytes."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may have removed it
            status = path.stat()
            if path.is_file():
                files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files, key=lambda file: file[0]):
        if total <= most_bytes:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
