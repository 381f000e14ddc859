"""Code that pages show, as it stands in tested files: this script writes it into the pages, `--check` compares.

Pages are also read as plain Markdown, so they hold the code themselves. The line before a block says what it shows: a
file, and optionally from where to where, by text that is on one line of the file only.

    <!-- code: examples/own_table.py start-after "# [train]" end-before "# [score]" -->

`start-after` and `end-before` leave out the line that they name, `start-at` keeps it. Comments for the linter are
left out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["BLOCK", "check", "code_of", "rewrite_blocks"]

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^<!-- code: (?P<file>\S+)(?P<part>(?: [a-z-]+ \"[^\"\n]*\")*) -->\n```(?P<kind>\w+)\n(?P<body>(?:.*\n)*?)```$",
    re.M,
)
_ENDS = {"start-after", "start-at", "end-before"}
_LINTER = re.compile(r"  # noqa\b.*$", re.M)


def code_of(file: str, part: str, *, root: Path = ROOT) -> str:
    """The part of the file that a block shows, without blank lines around it."""
    path = root / file
    if not path.is_file():
        raise ValueError(f"a page shows code of {file}, which is not a file of the repository: correct the comment")
    lines = path.read_text().splitlines()
    first, last = 0, len(lines)
    for end, text in re.findall(r'([a-z-]+) "(.*?)"', part):
        if end not in _ENDS:
            raise ValueError(f"a page shows code of {file} from {end!r}: use one of {', '.join(sorted(_ENDS))}")
        found = [number for number, line in enumerate(lines) if text in line]
        if len(found) != 1:
            raise ValueError(f"{text!r} is on {len(found)} lines of {file}: name a text that is on one line only")
        if end == "end-before":
            last = found[0]
        else:
            first = found[0] + (end == "start-after")
    code = _LINTER.sub("", "\n".join(lines[first:last])).strip("\n")
    if not code.strip() or "```" in code:
        raise ValueError(f"the part{part} of {file} is empty or contains three backticks: a page cannot show it")
    return f"{code}\n"


def rewrite_blocks(text: str, *, root: Path = ROOT) -> str:
    """The page with the code of its files as it is now."""
    blocks, marks = len(BLOCK.findall(text)), text.count("<!-- code:")
    if blocks != marks:
        raise ValueError(
            f"{marks - blocks} of {marks} comments '<!-- code: FILE ... -->' are not followed by a code block"
        )

    def with_code(match: re.Match[str]) -> str:
        mark, fence, _ = match[0].partition(f"```{match['kind']}\n")
        return f"{mark}{fence}{code_of(match['file'], match['part'], root=root)}```"

    return BLOCK.sub(with_code, text)


def _pages(root: Path) -> list[Path]:
    """Without those that a build writes."""
    return [path for path in sorted((root / "docs").rglob("*.md")) if not {"_build", "generated"} & set(path.parts)]


def check(root: Path = ROOT) -> list[str]:
    """The pages whose code is not that of its files."""
    texts = {path: path.read_text() for path in _pages(root)}
    return [str(path.relative_to(root)) for path, text in texts.items() if text != rewrite_blocks(text, root=root)]


if __name__ == "__main__":
    stale = check()
    if "--check" in sys.argv:
        sys.exit(f"not up to date, run this script without --check: {', '.join(stale)}" if stale else 0)
    for name in stale:
        (ROOT / name).write_text(rewrite_blocks((ROOT / name).read_text()))
