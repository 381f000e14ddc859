"""What the settings of a class are, and what each means: the text beneath its field, read from the class's source.

Settings are fields of dataclasses and msgspec structs: the sections of a config, and protocols. `help` of such a class,
the page of config keys and errors about a key all take their words from here.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

__all__ = [
    "REQUIRED",
    "Setting",
    "fields",
    "is_settings",
    "meanings",
    "summary",
    "types_by_name",
    "with_fields_in_help",
]

REQUIRED = object()

_Kind = TypeVar("_Kind", bound=type)


class Setting(NamedTuple):
    """A field of a class of settings; `default` is `REQUIRED` where it has none, `meaning` "" without a text."""

    name: str
    type: Any
    default: Any
    meaning: str


def is_settings(kind: object) -> bool:
    """Whether this is a class of settings: a msgspec struct or a dataclass."""
    return isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind))


def types_by_name(kind: type) -> dict[str, Any]:
    """The type of every setting of a class, by name."""
    if issubclass(kind, msgspec.Struct):
        return {field.name: field.type for field in msgspec.structs.fields(kind)}
    return {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def fields(kind: type) -> list[Setting]:
    """The settings of a class in their order."""
    texts = meanings(kind)
    if issubclass(kind, msgspec.Struct):
        return [
            Setting(field.name, field.type, _default(field, msgspec.NODEFAULT), texts.get(field.name, ""))
            for field in msgspec.structs.fields(kind)
        ]
    return [
        Setting(field.name, field.type, _default(field, dataclasses.MISSING), texts.get(field.name, ""))
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
    ]


def _default(field: Any, missing: object) -> Any:
    """The default of a field, made if it has a factory; `missing` is what its library has for none."""
    if field.default_factory is not missing:
        return field.default_factory()
    return REQUIRED if field.default is missing else field.default


@functools.cache
def meanings(kind: type) -> Mapping[str, str]:
    """By name, what each field means that has a text beneath it, in the class or in one that it derives from.

    Cached: do not write to it.
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        texts |= _own_meanings(base)
    return texts


@functools.cache
def _own_meanings(kind: type) -> Mapping[str, str]:
    """The meanings of the fields in a class's own body; none where there is no source to read."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # written in a notebook, or in C
        return {}
    texts = {}
    for field, text in itertools.pairwise(getattr(definition, "body", [])):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            texts[field.target.id] = " ".join(text.value.value.split())
    return texts


class _Help:
    """The docstring of a class with its fields below, put together when somebody asks for it."""

    def __init__(self, summary: str) -> None:
        self.summary = summary

    def __get__(self, instance: object, kind: type | None = None) -> str:
        owner = type(instance) if kind is None else kind
        lines = [f"    {field.name}: {field.meaning}" for field in fields(owner) if field.meaning]
        return "\n".join([self.summary, "", "Fields:", *lines]) if lines else self.summary


def summary(kind: type) -> str:
    """The docstring of a class as it was written, without the fields that `with_fields_in_help` adds."""
    help_text = vars(kind).get("__doc__")
    return help_text.summary if isinstance(help_text, _Help) else inspect.cleandoc(help_text or "")


def with_fields_in_help(kind: _Kind) -> _Kind:
    """A decorator: the same class, whose `help` lists its fields with what they mean."""
    kind.__doc__ = _Help(summary(kind))  # type: ignore[assignment]
    return kind
