"""Changes to a config from the command line: ``key.path=value``.

A key of the protocol may stand alone: `clip_norm=1` is `protocol.clip_norm=1` where no key of a config has that name.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dovetail import protocols

__all__ = ["apply", "parse_override"]


def parse_override(text: str) -> tuple[str, Any]:
    """``key.path=value`` as a pair; the value is read as TOML, or else as a plain string.

    Numbers may leave out a zero, which TOML does not allow: .025 and 2. are numbers too, also in lists.
    """
    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise ValueError(f"expected --set key.path=value, got {text!r}")
    for spelled in (value, _with_zeros(value)):
        try:
            return path.strip(), tomllib.loads(f"value = {spelled}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return path.strip(), value


def apply(tree: dict[str, Any], overrides: Iterable[tuple[str, Any]], *, known: Collection[str]) -> None:
    """Change a config in plain data, whose top-level keys are `known`."""
    for path, value in _spelled_out(tree, list(overrides), known):
        _assign(tree, path, value)


def _spelled_out(
    tree: Mapping[str, Any], given: Sequence[tuple[str, Any]], known: Collection[str]
) -> list[tuple[str, Any]]:
    """Overrides by their full path: a bare key that is no key of a config may be one of its protocol."""
    section = dict(given).get("protocol", tree.get("protocol"))
    name = dict(given).get("protocol.name", section.get("name") if isinstance(section, Mapping) else None)
    bare = [key for key, _ in given if "." not in key and key not in known]
    own = protocols.fields(name) if bare and isinstance(name, str) else ()
    return [(f"protocol.{key}" if key in bare and key in own else key, value) for key, value in given]


def _assign(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    node = tree
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ValueError(f"expected a section at {name!r}, got a value in {path!r}")
    node[last] = copy.deepcopy(value)


def _with_zeros(value: str) -> str:
    return re.sub(r"(?<=\d)\.(?![\d.])", ".0", re.sub(r"(?<![\w.])\.(?=\d)", "0.", value))
