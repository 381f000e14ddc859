"""Links that work in the repository and on the site alike.

Pages link to files of the repository (`../benchmarks/RESULTS.md`), as they are read there; on the site these links go
to the page that shows the file. A link to a section of the reference's first page, which says what to do without the
site, goes to the page that the build makes.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

__all__ = ["GENERATED", "SHOWN_ON", "rewrite_links", "setup"]

SHOWN_ON = {  # file or folder of the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
    "examples/flower-mnist": "tutorials/flower.md",
    "examples/flower-mnist/README.md": "tutorials/flower-example.md",
    "docs/proofs": "proofs/index.md",
}
GENERATED = {  # section of the reference -> page that the build makes
    "docs/reference/index.md#command-line": "reference/generated/command-line.md",
    "docs/reference/index.md#config-keys": "reference/generated/config-keys.md",
}
_LINK = re.compile(
    r"^```.*?^```|(?<=\]\()(?P<target>[^)#\s]+)(?P<section>#[^)\s]*)?(?=\))", re.M | re.S
)  # code has none


def rewrite_links(text: str, *, file: str, page: str) -> str:
    """The text of a file of the repository with its links as `page` of the site needs them."""

    def to_page(match: re.Match[str]) -> str:
        if not match["target"] or "://" in match["target"] or match["target"].startswith("mailto:"):
            return match[0]
        section = match["section"] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), match["target"]))
        if target + section in GENERATED:
            return posixpath.relpath(GENERATED[target + section], posixpath.dirname(page) or ".")
        target_page = SHOWN_ON.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if target_page is None:  # a file to download
            return posixpath.relpath(target, posixpath.join("docs", posixpath.dirname(page))) + section
        return posixpath.relpath(target_page, posixpath.dirname(page) or ".") + section

    return _LINK.sub(to_page, text)


def _read(app: Any, page: str, content: list[str]) -> None:
    if str(app.env.doc2path(page)).endswith(".md"):
        content[0] = rewrite_links(content[0], file=f"docs/{page}.md", page=f"{page}.md")


def _include(app: Any, path: Path, parent: str, content: list[str]) -> None:
    file = Path(app.srcdir, path).resolve().relative_to(Path(app.srcdir).parent.resolve()).as_posix()
    content[0] = rewrite_links(content[0], file=file, page=f"{app.env.docname}.md")


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("source-read", _read)
    app.connect("include-read", _include)
    return {"parallel_read_safe": True}
