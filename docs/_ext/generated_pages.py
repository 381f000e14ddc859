"""Reference pages that are written when the site is built: every public module, every command, every config key.

They go to `reference/generated` and are not kept: the code and its docstrings are the source.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from dovetail._fields import Setting
from dovetail.cli import app as command_line
from dovetail.experiment.keys import default_in_words, sections, type_in_words

__all__ = ["MODULES", "command_page", "config_page", "modules_of", "setup"]

MODULES = {  # a page: what it shows, in this order; a package stands for all its public modules
    "dovetail": ("dovetail.experiment", "dovetail.watching", "dovetail.randomness"),
    "statements": ("dovetail.statements", "dovetail.wording", "dovetail.proofs", "dovetail.numbers"),
    "guarantee": ("dovetail.guarantee",),
    "events": ("dovetail.events",),
    "accounting": ("dovetail.accounting",),
    "claims": ("dovetail.claims",),
    "mechanisms": ("dovetail.mechanisms",),
    "shufflers": ("dovetail.shufflers",),
    "protocols": ("dovetail.protocols",),
    "vdaf": ("dovetail.vdaf",),
    "data": ("dovetail.data", "dovetail.sampling"),
    "features": ("dovetail.features",),
    "engine": ("dovetail.engine", "dovetail.learners"),
    "evaluation": ("dovetail.evaluation",),
    "audit": ("dovetail.audit",),
    "testing": ("dovetail.testing",),
    "parties": ("dovetail.parties",),
    "papers": ("dovetail.papers", "dovetail.compare"),
    "pages": ("dovetail.pages", "dovetail.figures", "dovetail.references"),
}
_WITH_OTHERS = ("dovetail.learners.torch", "dovetail.parties.flower")  # of packages that the site is built without


def modules_of(name: str) -> Iterator[str]:
    """The module, and the public modules of the package."""
    yield name
    module = importlib.import_module(name)
    for entry in pkgutil.iter_modules(getattr(module, "__path__", []), f"{name}."):
        if not entry.name.rpartition(".")[2].startswith("_") and entry.name not in _WITH_OTHERS:
            yield from modules_of(entry.name)


def _home(member: object) -> tuple[str, str] | None:
    """The module of a class or function of ours, and its full name; None for constants and for what is not ours."""
    module, name = getattr(member, "__module__", None), getattr(member, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not module.startswith("dovetail"):
        return None
    return module, f"{module}.{name}"


def _private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split("."))


def aliases(name: str) -> dict[str, str]:
    """Full names of what a package shows as its own but keeps in a private module -> the name it is documented by."""
    module = importlib.import_module(name)
    shown = {}
    for public in getattr(module, "__all__", []):
        home = _home(getattr(module, public, None))
        if home and home[0] != name and _private(home[0]):
            shown[home[1]] = f"{name}.{public}"
    return shown


def module_section(name: str) -> str:
    """What a module shows as its own; what it only passes on from a public module is shown there."""
    module = importlib.import_module(name)
    own = []
    passed_on = []
    for public in getattr(module, "__all__", []):
        member = getattr(module, public, None)
        home = _home(member)
        if inspect.ismodule(member):
            continue
        if home and home[0] != name and not _private(home[0]):
            passed_on.append(f":py:obj:`~{home[1]}`")
        elif home:
            own.append(public)
    members = f"   :members: {', '.join(own)}" if own else "   :no-members:"
    lines = [name, "-" * len(name), "", f".. automodule:: {name}", members, ""]
    if passed_on:
        lines += [f"Also here: {', '.join(passed_on)}.", ""]
    return "\n".join(lines)


def module_page(page: str) -> str:
    """One page of the reference."""
    title = "dovetail: train" if page == "dovetail" else f"dovetail.{page}"
    parts = [f"{title}\n{'=' * len(title)}\n"]
    if page == "dovetail":
        parts.append("``dovetail.train`` and ``dovetail.Result`` are those of ``dovetail.experiment.training``.\n")
    for name in MODULES[page]:
        parts += [module_section(module) for module in modules_of(name)]
    return "\n".join(parts)


def command_page() -> str:
    """Every command with its arguments and options, as ``--help`` says them."""
    lines = [
        "# Command line",
        "",
        "Every command takes `--help`; most take `--json`, which prints one JSON object.",
        "",
    ]
    root = typer.main.get_command(command_line)
    for words, command in _commands(root, ("dovetail",)):
        lines += [f"## {' '.join(words)}", "", inspect.cleandoc(command.help or ""), ""]
        parameters = [item for item in command.params if not getattr(item, "hidden", False) and item.name != "help"]
        usage = [_argument(item) for item in parameters if item.param_type_name == "argument"]
        options = ["[OPTIONS]"] if any(item.param_type_name == "option" for item in parameters) else []
        lines += ["```text", " ".join([*words, *options, *usage]), "```", "", "| | default | |", "|---|---|---|"]
        lines += [_parameter(item) for item in parameters]
        lines.append("")
    return "\n".join(lines)


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, sub in command.commands.items():
            yield from _commands(sub, (*words, name))
    else:
        yield words, command


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[]")
    return (name if parameter.required else f"[{name}]") + ("..." if parameter.nargs == -1 else "")


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_argument(parameter)}`"
    else:
        name = ", ".join(f"`{option}`" for option in parameter.opts)
    default = parameter.default if not callable(parameter.default) else None
    default_text = (
        "required"
        if parameter.required
        else ""
        if default is None or default is False or default in ((), [])
        else f"`{default}`"
    )
    return f"| {name} | {default_text} | {_cell(getattr(parameter, 'help', None) or '')} |"


def config_page() -> str:
    """Every key of a config: its type, its default, what it is for."""
    lines = [
        "# Config keys",
        "",
        "A config is a TOML file; `dovetail run FILE --set section.key=value` changes a key.",
        "`dovetail help KEY` prints what is said here.",
        "",
    ]
    for section in (one for one in sections() if not one.protocol):
        lines += [f"## [{section.name}]" if section.name else "## Top level", ""]
        lines += [*([section.summary, ""] if section.name else []), *_table(section.keys)]
    lines += ["## [protocol]", "", "`name` is the protocol; the other keys are its own.", ""]
    for section in (one for one in sections() if one.protocol):
        name = section.protocol
        lines += [f"### {name}", "", f"See [{name}](../../protocols/{name}.md).", "", *_table(section.keys)]
    return "\n".join(lines)


def _table(keys: Iterable[Setting]) -> list[str]:
    rows = [f"| `{key.name}` | `{type_in_words(key.type)}` | {_default(key)} | {_cell(key.meaning)} |" for key in keys]
    return ["| key | type | default | |", "|---|---|---|---|", *rows, ""] if rows else ["No keys of its own.", ""]


def _default(key: Setting) -> str:
    text = default_in_words(key.default)
    return text if text in ("", "required") else f"`{text}`"


def _cell(text: str) -> str:
    escaped = " ".join(text.split()).replace("<", "\\<").replace("|", "\\|")
    return re.sub(r"(?<![`\w-])(--[a-z][a-z-]*)", r"`\1`", escaped)


def _write(app: Any) -> None:
    folder = Path(app.srcdir) / "reference" / "generated"
    folder.mkdir(exist_ok=True)
    pages = {f"{page}.rst": module_page(page) for page in MODULES}
    pages |= {"command-line.md": command_page(), "config-keys.md": config_page()}
    for old in folder.iterdir():
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def _resolve(app: Any, env: Any, node: Any, contents: Any) -> Any:
    """A type that a signature names by its private home, as a link to where it is documented."""
    homes: dict[str, str] = {}
    for names in MODULES.values():
        for name in names:
            for module in modules_of(name):
                homes |= aliases(module)
    if node.get("refdomain") != "py" or node.get("reftarget") not in homes:
        return None
    node["reftarget"] = homes[node["reftarget"]]
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], node["reftarget"], node, contents
    )


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("builder-inited", _write)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True}
