"""Objects that a config names as "module:name": a user's own task, a user's own protocol."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

__all__ = ["load"]


def load(text: str, *, what: str) -> object:
    """The object "module:name", imported from the working directory or the Python path; None if there is no such name.

    Whatever goes wrong in the user's module is told in one sentence.
    """
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, and for good: the module may import its neighbours later
    try:
        importlib.invalidate_caches()
        return getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"expected a {what} 'module:name' that imports, got {text!r} ({reason})") from error
