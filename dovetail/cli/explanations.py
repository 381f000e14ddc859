"""The command `help`: what the keys of a config mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli._shared import out_console

if TYPE_CHECKING:
    from dovetail._fields import Setting
    from dovetail.experiment.keys import Section

__all__ = ["help_"]


def help_(
    key: Annotated[
        str | None,
        typer.Argument(help="A key such as cohort.size or clip_norm, a section such as cohort, or a protocol."),
    ] = None,
) -> None:
    """Say what a key of a config means, its type and its default; without KEY, list all keys."""
    from dovetail.experiment import keys

    if key is None:
        for section in keys.sections():
            out_console.print(f"{section.title}: {', '.join(one.name for one in section.keys) or 'no keys of its own'}")
        out_console.print("dovetail help KEY says what a key means")
        return
    sections = keys.explain(key)
    if key == "protocol":
        out_console.print("[protocol] name: the protocol, one of " + ", ".join(str(one.protocol) for one in sections))
        out_console.print("dovetail help PROTOCOL lists the other keys, which are the protocol's own")
    elif all(key in (section.name, section.protocol) for section in sections):
        for section in sections:
            _print_section(section)
    else:
        _print_keys(sections)


def _print_section(section: Section) -> None:
    """A section with all its keys."""
    out_console.print(f"{section.title}\n{section.summary}")
    for setting in section.keys:
        out_console.print(f"\n{_setting_line(setting)}\n  {setting.meaning}")


def _print_keys(sections: list[Section]) -> None:
    """One key of each section; protocols in which it means the same are named together."""
    alike: dict[str, list[str]] = {}
    for section in sections:
        (setting,) = section.keys
        place = f"[{section.name}] {_setting_line(setting)}" if section.name else _setting_line(setting)
        alike.setdefault(f"{place}\n  {setting.meaning}", []).extend([section.protocol] if section.protocol else [])
    for text, names in alike.items():
        out_console.print(text + (f"\n  of {', '.join(names)}" if names else ""))


def _setting_line(setting: Setting) -> str:
    """A key with its type and its default."""
    from dovetail.experiment.keys import default_in_words, type_in_words

    default = default_in_words(setting.default)
    return (
        f"{setting.name}: {type_in_words(setting.type)}"
        + (f" (default {default})" if default not in ("", "required") else "")
        + (" (required)" if default == "required" else "")
    )
