"""Pages read as plain Markdown: they show their code, which is that of tested files, and their links lead somewhere."""

import re
from pathlib import Path

import code_blocks
import links
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if not {"_build", "generated"} & set(page.parts)]
EXAMPLE = '''"""An example."""

# [train]

def train():
    print("loss", at[0](1))  # noqa: T201


# [end]
train()
'''
PAGE = """# Train

<!-- code: examples/example.py start-after "# [train]" end-before "# [end]" -->
```python
```

As a whole:

<!-- code: examples/example.py -->
```python
def train(): ...
```
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in {"examples/example.py": EXAMPLE, "docs/tutorials/page.md": PAGE}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_code_on_every_page_is_that_of_its_file():
    assert code_blocks.check() == [], "run: python docs/_ext/code_blocks.py"


def test_code_is_written_and_a_later_change_is_noticed(folder):
    assert code_blocks.check(folder) == ["docs/tutorials/page.md"]
    text = code_blocks.rewrite_blocks(PAGE, root=folder)
    assert '-->\n```python\ndef train():\n    print("loss", at[0](1))\n```\n\nAs a whole' in text
    assert text.endswith(
        '-->\n```python\n"""An example."""\n\n' + EXAMPLE.partition("\n\n")[2].replace("  # noqa: T201", "") + "```\n"
    )
    (folder / "docs/tutorials/page.md").write_text(text)
    assert code_blocks.check(folder) == []
    (folder / "examples/example.py").write_text(EXAMPLE.replace("loss", "accuracy"))
    assert code_blocks.check(folder) == ["docs/tutorials/page.md"]


def test_a_line_that_a_part_starts_at_is_kept(folder):
    assert code_blocks.code_of("examples/example.py", ' start-at "# [end]"', root=folder) == "# [end]\ntrain()\n"
    assert code_blocks.code_of("examples/example.py", ' start-after "# [end]"', root=folder) == "train()\n"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("examples/example.py -->", "examples/gone.py -->", "examples/gone.py, which is not a file"),
        ("# [end]", "# [stop]", "'# \\[stop\\]' is on 0 lines of examples/example.py"),
        ("# [end]", "train()", "'train\\(\\)' is on 2 lines of examples/example.py"),
        ("end-before", "stop-at", "'stop-at': use one of end-before, start-after, start-at"),
        ('"# [train]"', '"# [end]"', "is empty"),
        ('"# [train]"', "# [train]", "1 of 2 comments"),
        ("example.py -->\n", "example.py -->\n\n", "1 of 2 comments"),
    ],
)
def test_a_comment_that_names_no_part_of_a_file_is_refused(folder, old, new, error):
    assert old in PAGE
    with pytest.raises(ValueError, match=error):
        code_blocks.rewrite_blocks(PAGE.replace(old, new), root=folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_can_be_read_without_the_site(page):
    text = page.read_text()
    assert "{literalinclude}" not in text, (
        "its code shows on the site only: name the file in a comment '<!-- code: ... -->'"
    )
    assert not re.search(r"^% ", text, re.M), "a comment that shows outside of the site: write '<!-- ... -->'"
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    assert not re.search(r"(?<!!)\[\]\(", text), "a link without a text"
    for target in re.findall(r"\]\(([^)\s#]+\.md)", text):
        if "://" not in target:
            shown = (page.parent / target).read_text()
            assert not shown.startswith("```{include}"), (
                f"{target} is empty outside of the site: link to what it includes"
            )


def test_sections_that_stand_for_generated_pages_are_there():
    index = (DOCS / "reference" / "index.md").read_text()
    for section, page in links.GENERATED.items():
        file, _, heading = section.partition("#")
        assert file == "docs/reference/index.md"
        assert f"\n## {heading.replace('-', ' ').capitalize()}\n" in index
        assert f"\n{page.removeprefix('reference/').removesuffix('.md')}\n" in index
