"""Links that work in the repository and on the site alike.

Pages link to files of the repository (`../benchmarks/RESULTS.md`), as they are read there; on the site these links go
to the page that shows the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

__all__ = ["SHOWN_ON", "rewrite_links", "setup"]

SHOWN_ON = {  # file or folder of the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
    "examples/flower-mnist": "tutorials/flower.md",
    "examples/flower-mnist/README.md": "tutorials/flower-example.md",
    "docs/proofs": "proofs/index.md",
}
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")


def rewrite_links(text: str, *, file: str, page: str) -> str:
    """The text of a file of the repository with its links as `page` of the site needs them."""

    def to_page(match: re.Match[str]) -> str:
        if "://" in match[1] or match[1].startswith("mailto:"):
            return match[1]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[1]))
        target_page = SHOWN_ON.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if target_page is None:  # a file to download
            return posixpath.relpath(target, posixpath.join("docs", posixpath.dirname(page)))
        return posixpath.relpath(target_page, posixpath.dirname(page) or ".")

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
