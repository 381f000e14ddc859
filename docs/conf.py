"""The documentation site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from dovetail import __version__  # noqa: E402 - found by the path above

project, author, copyright = "Dovetail", "The Dovetail authors", "The Dovetail authors, Apache-2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "docstrings",
    "generated_pages",
    "links",
    "offline",
    "protocol_facts",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_ext"]
default_role = "code"
highlight_language = "none"

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
toc_object_entries = False

nitpicky = True
# names that other projects document: there is no internet at build time to look them up in
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(jax|jaxlib|numpy|np|msgspec|optax|flwr|starlette|typer|click|cryptography|httpx|dp_accounting|rich|uvicorn)(\..*)?",
    ),
    (
        r"py:.*",
        r"(asyncio|collections|dataclasses|datetime|pathlib|functools|enum|abc|typing|types|subprocess|sqlite3|concurrent|contextlib|mmap|socket|ssl|fractions)(\..*)?",
    ),
    (r"py:class", r"Path|dict\[str|tuple\[int"),  # pieces of a signature that Sphinx could not take apart
    # names of types, which have no page
    (r"py:class", r"Crowd|EllipsisType|Kind|Loss|Metric|PrivacyLossDistribution|Sampling|Target"),
    (r"py:class", r"dovetail\.(features\.cache\.Rows|protocols\.P)"),
    (r"py:.*", r"dovetail(\.\w+)*\._\w+(\..*)?"),  # private names in signatures
]

html_theme = "furo"
html_title = f"Dovetail {release}"
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"source_repository": "", "top_of_page_buttons": []}
smartquotes = False  # options keep their two dashes
