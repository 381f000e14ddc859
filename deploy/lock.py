"""Write deploy/requirements.txt: what the image installs, at exact versions, with the hashes of their files.

To be run with the image's Python (3.11), when pyproject.toml changes or a dependency has to be newer:

    python3.11 deploy/lock.py

pip resolves for each platform of the image and says which files it would take; nothing is installed. Platforms must
agree on versions. The wheels come from whatever index pip is set up with; that index is not written down.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLATFORMS = ("x86_64", "aarch64")
TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
BUILD = "hatchling>=1.25"  # as [build-system] in pyproject.toml


def resolve(machine: str) -> dict[str, tuple[str, str]]:
    """Versions and SHA-256 of the files, by name, of all that the image needs on a kind of machine."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        platforms = [word for tag in TAGS for word in ("--platform", f"{tag}_{machine}")]
        target = ["--target", folder, "--python-version", "3.11", "--only-binary", ":all:", *platforms]
        words = ["install", "--dry-run", "--quiet", "--ignore-installed", "--report", str(report), *target]
        subprocess.run([sys.executable, "-m", "pip", *words, *requirements()], check=True)
        found = json.loads(report.read_text())["install"]
    return {
        one["metadata"]["name"].lower().replace("_", "-"): (
            one["metadata"]["version"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in found
    }


def requirements() -> list[str]:
    """What pyproject.toml asks for, for parties on PostgreSQL, and what builds the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["parties"], *extras["postgres"], BUILD]
    return [one for one in wanted if not one.startswith(f"{project['name']}[")]


def main() -> None:
    """For all platforms."""
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"expected Python 3.11, which the image has, got {sys.version.split()[0]}")
    made = [resolve(machine) for machine in PLATFORMS]
    lines = ["# Made by deploy/lock.py: what the image installs. Do not edit."]
    for name in sorted(set().union(*made)):
        versions = {one[name][0] for one in made if name in one}
        if len(versions) != 1:
            sys.exit(f"expected one version of {name} for all platforms, got {', '.join(sorted(versions))}")
        hashes = sorted({one[name][1] for one in made if name in one})
        lines.append(" \\\n".join([f"{name}=={versions.pop()}", *(f"    --hash=sha256:{one}" for one in hashes)]))
    (ROOT / "deploy" / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
