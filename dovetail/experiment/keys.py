"""What every key of a config means, its type and its default, as `dovetail help` and the page of keys say it."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from dovetail import _fields, _validate, protocols
from dovetail._fields import REQUIRED, Setting
from dovetail.experiment.config import Config

__all__ = ["Section", "default_in_words", "explain", "sections", "type_in_words"]

_FILLED_IN = "Filled in:"  # how the meaning of a key begins that is not for configs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a config, or the settings of one protocol.

    Arguments:
        name: its name in TOML; "" for the keys above all sections, "protocol" for every protocol.
        summary: what it is about.
        keys: its keys in their order.
        protocol: the protocol whose settings these are, if any.
    """

    name: str
    summary: str
    keys: tuple[Setting, ...]
    protocol: str | None = None

    @property
    def title(self) -> str:
        """Its name, as it is printed."""
        return f"[{self.name}] name = {self.protocol!r}" if self.protocol else f"[{self.name}]" if self.name else "top"


def sections() -> Iterator[Section]:
    """All sections: keys above the sections, the sections, and the settings of every protocol."""
    keys = _fields.fields(Config)
    named = [key for key in keys if _fields.is_settings(key.type)]
    above = tuple(key for key in keys if key not in named and key.name != "protocol")
    yield Section(name="", summary="Keys above all sections.", keys=above)
    for key in named:
        yield Section(name=key.name, summary=_fields.summary(key.type), keys=tuple(_fields.fields(key.type)))
    for name in sorted(protocols.PROTOCOLS):
        kind = protocols.PROTOCOLS[name]
        shown = tuple(key for key in _fields.fields(kind) if not key.meaning.startswith(_FILLED_IN))
        yield Section(name="protocol", summary=_fields.summary(kind), keys=shown, protocol=name)


def explain(name: str) -> list[Section]:
    """The sections that a name stands for, each with the keys that are meant.

    Arguments:
        name: a section ("cohort"), a protocol ("dp_fl"), or a key, with its section ("cohort.size") or without.

    Returns: several sections where the key is in several; refuses an unknown name with the nearest one.
    """
    known = list(sections())
    if name == "protocol":
        return [section for section in known if section.protocol]
    whole = [section for section in known if name in (section.name, section.protocol)]
    if whole and name:
        return whole
    prefix, _, last = name.rpartition(".")
    found = [
        dataclasses.replace(section, keys=(key,))
        for section in known
        if prefix in ("", section.name, section.protocol)
        for key in section.keys
        if key.name == last
    ]
    if not found:
        dotted = {f"{section.name}.{key.name}" for section in known if section.name for key in section.keys}
        alone = {key.name for section in known for key in section.keys}
        heads = {section.protocol or section.name for section in known if section.name} | {"protocol"}
        _validate.known_name("config key", name, dotted if prefix else alone | heads)
    return found


def type_in_words(kind: Any) -> str:
    """The type of a key as text: "int or float"; "table" for a table of its own."""
    if any(dataclasses.is_dataclass(part) for part in typing.get_args(kind)):
        return "table"
    is_plain = isinstance(kind, type) and not isinstance(kind, types.GenericAlias)
    text = kind if isinstance(kind, str) else kind.__name__ if is_plain else str(kind)
    return text.replace("typing.", "").replace(" | None", "").replace("|", "or")


def default_in_words(default: Any) -> str:
    """The default of a key as TOML would have it; "required" where there is none, "" where it follows from others."""
    if default is REQUIRED:
        return "required"
    return "" if default is None else msgspec.json.encode(default).decode()
