"""A page must open without a network: the build warns of every script, style, font or picture from elsewhere.

Links that a reader may follow are another matter; `make docs` cannot check them and does not claim to. They are listed
in `external-links.txt` of the output.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

__all__ = ["links", "loads", "setup"]

_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""", re.I)
_ELSEWHERE = re.compile(r"(?:https?:)?//", re.I)
_HARMLESS_RELS = {"canonical", "alternate", "search", "index", "next", "prev", "author"}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in _LOADING:
            self.loads.append(values.get(_LOADING[tag], ""))
        elif tag == "object":
            self.loads.append(values.get("data", ""))
        elif tag == "link" and not set(values.get("rel", "").split()) <= _HARMLESS_RELS:
            self.loads.append(values.get("href", ""))
        elif tag == "a":
            self.links.append(values.get("href", ""))
        self.loads += _STYLE.findall(values.get("style", ""))


def _read(html: str) -> _Page:
    page = _Page()
    page.feed(html)
    return page


def loads(text: str, *, kind: str = "html") -> list[str]:
    """What a browser would fetch from elsewhere to show this page, or to apply this style sheet (`kind = "css"`)."""
    if kind == "css":
        return _STYLE.findall(text)
    styles = "".join(re.findall(r"<style[^>]*>(.*?)</style>", text, re.S))
    return [url for url in _read(text).loads if _ELSEWHERE.match(url)] + _STYLE.findall(styles)


def links(html: str) -> set[str]:
    """Links of the page to elsewhere."""
    return {url for url in _read(html).links if _ELSEWHERE.match(url)}


def _check_site(app: Any, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    from sphinx.util import logging

    log = logging.getLogger(__name__)
    out = Path(app.outdir)
    elsewhere: set[str] = set()
    for path in sorted([*out.rglob("*.html"), *out.rglob("*.css")]):
        text = path.read_text(encoding="utf-8")
        for url in loads(text, kind=path.suffix[1:]):
            log.warning("%s fetches %s, which is not part of the site", path.relative_to(out), url)
        if path.suffix == ".html":
            elsewhere |= links(text)
    (out / "external-links.txt").write_text("".join(f"{url}\n" for url in sorted(elsewhere)))


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("build-finished", _check_site)
    return {"parallel_read_safe": True}
