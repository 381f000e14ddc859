"""Links that work in the repository and on the site alike.

Pages link to files of the repository (`../benchmarks/RESULTS.md`), as they are read there; on the site these links go
to the page that shows the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

__all__ = ["SHOWN_ON", "rewritten", "setup"]

SHOWN_ON = {  # file or folder of the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
    "examples/flower-mnist": "tutorials/flower.md",
    "examples/flower-mnist/README.md": "tutorials/flower-example.md",
    "docs/proofs": "proofs/index.md",
}
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")


def rewritten(text: str, *, file: str, page: str) -> str:
    """The text of a file of the repository with its links as `page` of the site needs them."""

    def to_page(found: re.Match[str]) -> str:
        if "://" in found[1] or found[1].startswith("mailto:"):
            return found[1]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), found[1]))
        shown = SHOWN_ON.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if shown is None:  # a file to download
            return posixpath.relpath(target, posixpath.join("docs", posixpath.dirname(page)))
        return posixpath.relpath(shown, posixpath.dirname(page) or ".")

    return _LINK.sub(to_page, text)


def _read(app: Any, page: str, content: list[str]) -> None:
    if str(app.env.doc2path(page)).endswith(".md"):
        content[0] = rewritten(content[0], file=f"docs/{page}.md", page=f"{page}.md")


def _included(app: Any, path: Path, parent: str, content: list[str]) -> None:
    file = Path(app.srcdir, path).resolve().relative_to(Path(app.srcdir).parent.resolve()).as_posix()
    content[0] = rewritten(content[0], file=file, page=f"{app.env.docname}.md")


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("source-read", _read)
    app.connect("include-read", _included)
    return {"parallel_read_safe": True}
