"""Objects that a config names as "module:name", and modules and names that are imported on first use.

Whatever is wrong with a user's own module or object is a `ValueError` of one sentence. Modules of a user are looked for
on the Python path, in the working directory and in the folders of `add_search_folder`. What is read as data, such as a
run's folder from somebody else, may name code too: within `import_only_if_trusted` it is refused unless trusted.
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

__all__ = [
    "LateModule",
    "add_search_folder",
    "import_named",
    "import_only_if_trusted",
    "lazy_getattr",
    "refuse_untrusted",
]

_Loaded = TypeVar("_Loaded")
_search_folders: list[Path] = []
_data_being_read: contextvars.ContextVar[str | None] = contextvars.ContextVar("what is read as data", default=None)


@contextlib.contextmanager
def import_only_if_trusted(what: str, *, trust_code: bool) -> Iterator[None]:
    """Read something as data: within, `import_named` refuses to import what it names, unless its code is trusted.

    Arguments:
        what: the thing that is read, as the subject of a refusal: "the run in 'results'".
        trust_code: whether code that it names may run after all.
    """
    token = _data_being_read.set(None if trust_code else what)
    try:
        yield
    finally:
        _data_being_read.reset(token)


def refuse_untrusted(text: str, *, what: str) -> None:
    """Refuse to import `text` ("module:name"), a `what` ("task"), if `import_only_if_trusted` says so."""
    source = _data_being_read.get()
    if source is not None:
        raise ValueError(
            f"{source} names code, the {what} {text!r}, which would run if it were loaded: pass trust_code=True "
            "(--trust-code) if you trust that code"
        )


def add_search_folder(folder: Path) -> None:
    """Let `import_named` look in this folder (a config file's) too, after the working directory and for good."""
    if (resolved := folder.resolve()) not in _search_folders:
        _search_folders.append(resolved)


def import_named(
    text: str, *, what: str, kind: str, accept: Callable[[object], TypeGuard[_Loaded]], installed: bool = False
) -> _Loaded:
    """Import the object that a text "module:name" names.

    Arguments:
        what: what the text names, in a refusal: "task".
        kind: what it should be, in a refusal: "dovetail.data.Task".
        accept: whether an object is of that kind; others are refused.
        installed: whether an installed package declares it (an entry point): it is then trusted as that package is.

    Guarantees:
        Nothing is imported within `import_only_if_trusted`, unless it is installed or trusted.
    """
    if not installed:
        refuse_untrusted(text, what=what)
    module_name, _, name = text.partition(":")
    for folder in (Path.cwd(), *_search_folders):
        if str(folder) not in sys.path and not (folder == Path.cwd() and "" in sys.path):
            sys.path.append(str(folder))  # last, and for good: the module may import its neighbours later
    try:
        importlib.invalidate_caches()
        loaded = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"expected a {what} 'module:name' that imports, got {text!r} ({reason})") from error
    if not accept(loaded):
        got = "no such name" if loaded is None else f"a {type(loaded).__name__}"
        raise ValueError(f"expected {name!r} in {module_name!r} to be a {kind}, got {got}")
    return loaded


def lazy_getattr(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose public names are imported when they are first asked for.

    Arguments:
        package: the package's `__name__`, for the error about an unknown name.
        homes: for every public name the module that defines it.
    """

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
        value = getattr(self._module(), name)
        setattr(self, name, value)
        return value

    def _module(self) -> ModuleType:
        """The first of the modules, after all of them were imported."""
        try:
            module, *_ = [importlib.import_module(name) for name in self._names]
            return module
        except ModuleNotFoundError as error:
            package, _, _ = self._names[0].partition(".")
            raise ModuleNotFoundError(f"this computes with {self._names[0]}, and {package} is not installed") from error
