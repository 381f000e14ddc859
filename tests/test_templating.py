"""Templates: text stays text, and a name that nobody knows is an error."""

from pathlib import Path

import jinja2
import pytest

import dovetail
from dovetail import templating
from dovetail.templating import Markup

TEMPLATES = sorted((Path(dovetail.__file__).parent / "templates").iterdir())
FACTS = {
    "version": "1",
    "banner": "<script>alert(1)</script>",
    "charts": [Markup("<svg></svg>")],
    "title": "\"a\" & 'b'",
    "figure_style": Markup(".a>.b{}"),
}


def test_values_are_escaped_and_markup_is_not():
    page = templating.render("diagnostics.html.jinja", **FACTS)
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&#34;a&#34; &amp; &#39;b&#39;" in page
    assert "<figure><svg></svg></figure>" in page
    assert ".a>.b{}" in page


@pytest.mark.parametrize("missing", FACTS)
def test_a_value_that_is_missing_is_an_error(missing):
    with pytest.raises(jinja2.UndefinedError, match=missing):
        templating.render("diagnostics.html.jinja", **{name: FACTS[name] for name in FACTS if name != missing})


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_no_template_turns_escaping_off_or_loads_something(file):
    text = file.read_text()
    assert not any(way in text for way in ("safe", "autoescape", "<script", "<link", "<img", "url(", "@import"))
    assert templating._TEMPLATES.get_template(file.name)
