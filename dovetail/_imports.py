"""Objects that a config names as "module:name", and modules and names that are imported on first use.

Whatever is wrong with a user's own module or object is told in one sentence.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, TypeVar

__all__ = ["LateModule", "add_search_folder", "lazy_getattr", "load", "reading_data", "refuse_untrusted"]

_Loaded = TypeVar("_Loaded")
_search_folders: list[Path] = []
_data_being_read: contextvars.ContextVar[str | None] = contextvars.ContextVar("what is read as data", default=None)


@contextlib.contextmanager
def reading_data(what: str, *, trust_code: bool) -> Iterator[None]:
    """Read something as data: within, `load` refuses to import what it names, unless its code is trusted."""
    token = _data_being_read.set(None if trust_code else what)
    try:
        yield
    finally:
        _data_being_read.reset(token)


def refuse_untrusted(text: str, *, what: str) -> None:
    """Refuse to import this, where it is named by something that is read as data."""
    source = _data_being_read.get()
    if source is not None:
        raise ValueError(
            f"{source} names code, the {what} {text!r}, which would run if it were loaded: pass trust_code=True "
            "(--trust-code) if you trust that code"
        )


def add_search_folder(folder: Path) -> None:
    """Let `load` find modules in this folder too, after the working directory: a config's, for its own modules."""
    if (resolved := folder.resolve()) not in _search_folders:
        _search_folders.append(resolved)


def load(
    text: str, *, what: str, kind: str, accept: Callable[[object], TypeGuard[_Loaded]], installed: bool = False
) -> _Loaded:
    """The object "module:name", from the Python path, the working directory or a folder of `add_search_folder`, if it is one to `accept`.

    `what` and `kind` name such an object in a refusal: "task", "dovetail.data.Task". What is `installed` with a package
    that declares it is trusted as that package is.

    Guarantees:
        Nothing is imported within `reading`, unless it is installed or trusted.
    """
    if not installed:
        refuse_untrusted(text, what=what)
    module_name, _, name = text.partition(":")
    for folder in (Path.cwd(), *_search_folders):
        if str(folder) not in sys.path and not (folder == Path.cwd() and "" in sys.path):
            sys.path.append(str(folder))  # last, and for good: the module may import its neighbours later
    try:
        importlib.invalidate_caches()
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"expected a {what} 'module:name' that imports, got {text!r} ({reason})") from error
    if not accept(found):
        got = "no such name" if found is None else f"a {type(found).__name__}"
        raise ValueError(f"expected {name!r} in {module_name!r} to be a {kind}, got {got}")
    return found


def lazy_getattr(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose public names live in these modules, loaded when they are asked for."""

    def get_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get_name


class LateModule:
    """A module that is imported, with others that it needs, when something of it is first asked for."""

    def __init__(self, name: str, *also: str) -> None:
        self._names = (name, *also)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._module(), name)
        setattr(self, name, found)
        return found

    def _module(self) -> ModuleType:
        try:
            module, *_ = [importlib.import_module(name) for name in self._names]
            return module
        except ModuleNotFoundError as error:
            package, _, _ = self._names[0].partition(".")
            raise ModuleNotFoundError(f"this computes with {self._names[0]}, and {package} is not installed") from error
