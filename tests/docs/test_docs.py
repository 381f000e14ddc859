"""The documentation cannot rot: pages, snippets and commands are read and run here; `make docs` builds the site.

A shell block of a tutorial is marked by a line before it: `<!-- run: quick -->` (here), `soak` (`make soak`), `flower`
(`make flower`, through the example that it starts) or `dry` (make's own targets: what they would do).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import code_blocks
import docstrings
import generated_pages
import links
import offline
import protocol_facts
import pytest
import test_runnable_examples

import dovetail
from dovetail._fields import fields, is_settings, summary
from dovetail.engine import Performance
from dovetail.experiment.config import Config
from dovetail.features import Whitening
from dovetail.guarantee import quotes
from dovetail.numbers import at_most
from dovetail.protocols import PROTOCOLS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

TUTORIALS = sorted(DOCS.glob("tutorials/*.md"))
WRITTEN = [page for page in sorted(DOCS.rglob("*.md")) if not {"_build", "generated"} & set(page.parts)]
BLOCK = re.compile(
    r"(?:^<!-- run: (?P<run>\S+) -->\n)?^```(?P<kind>\S*)[ \t]*(?P<target>.*)\n(?P<body>(?:.*\n)*?)```$", re.M
)
KINDS = ("quick", "soak", "flower", "dry")


@dataclasses.dataclass(frozen=True)
class Shell:
    """A shell block of a tutorial."""

    page: str
    run: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.lines[0]}"


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text()))


SHELL = [
    Shell(page.stem, found["run"], tuple(found["body"].strip().splitlines()))
    for page in TUTORIALS
    for found in blocks(page)
    if found["kind"] == "sh"
]


def of(kind: str) -> list[Shell]:
    return [block for block in SHELL if block.run == kind]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_code_of_a_tutorial_is_that_of_an_example_and_commands_say_where_they_are_run(page):
    from_files = {found["body"] for found in code_blocks.BLOCK.finditer(page.read_text())}
    for found in blocks(page):
        if found["kind"] == "sh":
            assert found["run"] in KINDS, f"expected '<!-- run: ... -->' before {found['body']!r}"
        elif found["kind"] not in ("{include}", "{toctree}", "text"):
            assert found["body"] in from_files, f"expected '<!-- code: ... -->' before {found['body']!r}"


def test_a_tutorial_shows_no_code_that_the_pattern_does_not_see():
    for page in TUTORIALS:
        assert page.read_text().count("```") == 2 * len(blocks(page)), page


@pytest.mark.parametrize("block", of("quick"), ids=str)
def test_quick_commands_run(block, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in block.lines:
        program, *words = shlex.split(line)
        if program == "python":
            assert words[0].removeprefix("examples/") in test_runnable_examples.QUICK  # run there
            continue
        assert program == "dovetail"
        status, out, err = command(*words)
        assert status == 0, err
        assert "guarantee: (" in out or "DP [" in out


@pytest.mark.soak
@pytest.mark.parametrize("page", sorted({block.page for block in of("soak")}))
def test_long_commands_run(page, tmp_path):
    for block in of("soak"):
        if block.page == page:  # in one folder: a block may go on with what those before it wrote
            _bash("\n".join(block.lines), tmp_path)


def _bash(script: str, folder: Path) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    for name, words in {"dovetail": "-m dovetail.cli", "python": ""}.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("block", of("dry"), ids=str)
def test_make_knows_the_targets_that_tutorials_name(block):
    for line in block.lines:
        program, target = line.split()
        assert program == "make"
        planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert planned.returncode == 0, planned.stderr
        assert f"\n{target}: " in (ROOT / "Makefile").read_text()


def test_runnable_examples_of_flower_blocks_are_run_by_make_flower():
    for block in of("flower"):
        for line in block.lines:
            assert line.removeprefix("python examples/") in test_runnable_examples.WITH_TORCH


# protocols


def config_of(name: str) -> str:
    (found,) = [found for found in blocks(DOCS / "protocols" / f"{name}.md") if found["kind"] == "{protocol-facts}"]
    assert found["target"] == name
    return found["body"]


def test_every_protocol_has_a_page_and_every_page_a_protocol():
    pages = {page.stem for page in DOCS.glob("protocols/*.md")} - {"index"}
    assert pages == set(PROTOCOLS)
    index = (DOCS / "protocols" / "index.md").read_text()
    listed = index.partition("```{toctree}")[2].split()
    for name in PROTOCOLS:
        assert f"({name}.md)" in index
        assert name in listed


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_the_config_of_a_page_is_one(name):
    found, plan = protocol_facts.plan_of(config_of(name))
    assert found == name
    protocol, cohort = quotes.settle_protocol(name, plan)
    assert protocol.is_calibrated
    assert protocol.view(cohort, plan.dim, neighbors=protocol.relation)


@pytest.mark.parametrize("name", ["fedavg", "privunit", "ss_simple"])
def test_the_facts_of_a_page_are_those_of_the_quote(name):
    text = protocol_facts.markdown(config_of(name))
    quote = quotes.quote(name, protocol_facts.plan_of(config_of(name))[1])
    for statement in (quote.certified, quote.claimed, quote.local, quote.shuffler):
        if statement is not None:
            shown = (
                "no guarantee | "
                if statement.is_unbounded
                else f"{at_most(statement.eps)} | {at_most(statement.delta)}"
            )
            assert f"| {shown} |" in text
    for assumption in quote.certified.assumptions:
        assert assumption in text
    assert ("1 of 16 bytes" in text) == (name == "privunit")


# reference


def test_every_setting_has_a_meaning():
    sections = [field.type for field in fields(Config) if is_settings(field.type)]
    assert len(sections) == 6
    for kind in (*sections, Whitening, *PROTOCOLS.values()):
        assert {field.name for field in fields(kind) if not field.meaning} == set(), kind
    assert [field.name for field in fields(Config) if field.meaning] == ["seed", "noise", "diagnostics"]


def test_help_says_what_settings_mean(capsys):
    help(Performance)
    said = " ".join(capsys.readouterr().out.split())
    assert "chunk: Number of clients trained at a time on one device." in said
    assert "Performance" not in summary(Performance) and "Fields:" not in summary(Performance)
    assert "beta: Share of coordinates that a client reports." in PROTOCOLS["ss_double"].__doc__


def test_pages_of_keys_and_commands_name_all_of_them():
    keys, commands = generated_pages.config_page(), generated_pages.command_page()
    for name in PROTOCOLS:
        assert f"\n### {name}\n" in keys
    assert "| `eps_local` | `float` |  | The budget of one report" in keys
    assert "\n## dovetail account protocol\n" in commands
    assert "| `--delta` | required |" in commands
    assert "```text\ndovetail run [OPTIONS] [CONFIG]\n```" in commands


def test_the_reference_has_every_package():
    shown = {package.split(".")[1] for packages in generated_pages.MODULES.values() for package in packages}
    packages = {entry.name for entry in pkgutil.iter_modules(dovetail.__path__) if entry.ispkg}
    assert packages - shown == {"cli"}  # has a page of commands
    toctree = (DOCS / "reference" / "index.md").read_text().partition("```{toctree}")[2].split()
    assert {f"generated/{page}" for page in generated_pages.MODULES} <= set(toctree)


def test_what_the_reference_shows_is_shown_once_and_what_it_points_to_is_shown():
    shown, pointed = [], set()
    for page in generated_pages.MODULES:
        for package in generated_pages.MODULES[page]:
            for name in generated_pages.modules_of(package):
                section = generated_pages.module_section(name)
                module = importlib.import_module(name)
                members = re.findall(r":members: (.*)", section)
                for member in members[0].split(", ") if members else ():
                    _, home = generated_pages._home(getattr(module, member))
                    shown.append(home)
                pointed |= set(re.findall(r":py:obj:`~([^`]*)`", section))
    assert sorted(shown) == sorted(set(shown))
    assert pointed <= set(shown)


def test_guarantees_become_points_and_bars_stay_bars():
    lines = ["A norm |x| and `a | b`.", "", "Guarantees:", "    First one", "    goes on.", "    Second.", "", "More."]
    assert docstrings.format_lines(lines) == [
        "A norm \\|x\\| and `a | b`.",
        "",
        "**Guarantees**",
        "",
        "- First one",
        "  goes on.",
        "- Second.",
        "",
        "More.",
    ]


# links


def relative_links(page: Path) -> list[str]:
    text = re.sub(r"^ *```(?!\{include).*?^ *```", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s#]+)", text)
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "flower-mnist" / "README.md", *WRITTEN],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_to_files_lead_somewhere(page):
    for target in relative_links(page):
        assert "generated" not in Path(target).parts, f"{target} is there after a build only"
        assert (page.parent / target).exists(), target


def test_links_of_the_repository_lead_to_pages_of_the_site():
    text = "[a](../benchmarks/RESULTS.md) [b](https://x.org/docs/y.md) [c](audit.md#what) [d](../LICENSE)"
    assert links.rewrite_links(text, file="docs/parties.md", page="parties.md") == (
        "[a](results.md) [b](https://x.org/docs/y.md) [c](audit.md#what) [d](../LICENSE)"
    )
    readme = "[a](../../docs/threat-model.md) [b](fleet-proxy.conf)"
    assert links.rewrite_links(readme, file="examples/flower-mnist/README.md", page="tutorials/flower-example.md") == (
        "[a](../threat-model.md) [b](../../examples/flower-mnist/fleet-proxy.conf)"
    )
    own = "[a](../reference/index.md#config-keys) [b](../reference/index.md#python)\n```python\nat[0](audit.md)\n```\n"
    assert links.rewrite_links(own, file="docs/tutorials/tuning.md", page="tutorials/tuning.md") == own.replace(
        "index.md#config-keys", "generated/config-keys.md"
    )
    own = "[a](../LICENSE#what)\n```python\nat[0](../LICENSE)\n```\n"
    assert links.rewrite_links(own, file="benchmarks/RESULTS.md", page="results.md") == own
    assert all((ROOT / file).exists() for file in links.SHOWN_ON)
    assert all((DOCS / page).exists() for page in links.SHOWN_ON.values())


def test_what_a_page_fetches_from_elsewhere_is_found():
    page = """<link rel="stylesheet" href="style.css"><a href="https://a.org">a</a><img src="//b.org/c.png">
      <script src='https://cdn.org/mathjax.js'></script><style>@import "https://fonts.org/f";</style>
      <link rel="canonical" href="https://d.org">"""
    assert offline.loads(page) == ["//b.org/c.png", "https://cdn.org/mathjax.js", "https://fonts.org/f"]
    assert offline.loads("a { background: url(https://e.org/f.png) } b { background: url(g.png) }", kind="css") == [
        "https://e.org/f.png"
    ]
    assert offline.links(page) == {"https://a.org"}


def test_the_five_lines_of_the_readme_are_an_example():
    readme = (ROOT / "README.md").read_text()
    _ten, lines = re.findall(r"```python\n(.*?)```", readme, re.S)
    example = (ROOT / "examples" / "first_model.py").read_text()
    assert lines == example[example.index("import dovetail") :].replace("  # noqa: T201", "")
