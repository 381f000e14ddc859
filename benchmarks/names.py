"""How many functions of the package are named by a bare participle (`dealt`), which does not say what they do.

    python benchmarks/names.py            # a count per package
    python benchmarks/names.py --list     # and each of them, with its place

Functions, methods, properties and nested functions count; dunder names do not. A name of several words counts as named
(`records_of_users`), as does a word that is a noun or an adjective of the field besides (`shared`, `seed`).
"""

from __future__ import annotations

import argparse
import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "dovetail"
IRREGULAR = """
been begun borne bought bound broken brought built caught chosen come cut dealt done drawn driven fallen felt found
forgotten given gone grown heard held hidden hit kept known laid lain led left lent let lost made meant met paid put
read ridden risen run said seen sent set shown shrunk shut sold sought spent split spread stood sunk sworn taken
taught thought thrown told torn understood undone unseen withdrawn woken won worn wound written rewritten redrawn
unwritten
"""
NOT_PARTICIPLES = (
    "bed bleed breed creed embed exceed feed greed indeed led need proceed red seed shed speed succeed weed"
)
VERBS_OR_NOUNS_TOO = "bound come cut hit led left let put read run set shed split spread shut"


def is_bare_participle(name: str) -> bool:
    """Whether a function's name is one word, a participle that is neither a verb's base form nor a noun."""
    word = name.strip("_")
    if not word.isalpha() or (name.startswith("__") and name.endswith("__")):
        return False
    if word in f"{NOT_PARTICIPLES} {VERBS_OR_NOUNS_TOO}".split():
        return False
    return word in IRREGULAR.split() or re.fullmatch(r"[a-z]+ed", word) is not None


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Every function below a node, by its qualified name, and the line it stands on."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{node.name}."
            if not isinstance(node, ast.ClassDef):
                yield f"{prefix}{node.name}", node.lineno
        yield from functions(node, inner)


def main() -> None:
    """Counts, and lists if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print every such function with its place")
    listed = parser.parse_args().list
    totals: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        package = place.parts[0] if len(place.parts) > 1 else "(top)"
        for name, line in functions(ast.parse(path.read_text())):
            totals[package] += 1
            if is_bare_participle(name.rpartition(".")[2]):
                counts[package] += 1
                if listed:
                    print(f"dovetail/{place}:{line} {name}")
    for package in sorted(totals):
        print(f"{package:12} {counts[package]:4} of {totals[package]:4}")
    print(f"{'all':12} {counts.total():4} of {totals.total():4}")


if __name__ == "__main__":
    main()
