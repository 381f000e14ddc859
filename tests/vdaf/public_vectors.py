"""Where the public test vectors are, if they are: beside the project, or where DOVETAIL_VDAF_VECTORS says."""

import json
import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("DOVETAIL_VDAF_VECTORS") or Path(__file__).parents[2].parent / "shared" / "vdaf")


def vectors(pattern, *, absent=()):
    """The files as parameters of a test; one that skips, with its reason, where there are none."""
    found = [path for path in sorted(FOLDER.glob(pattern)) if not any(word in path.name for word in absent)]
    if not found:
        why = "expected public test vectors in ../shared/vdaf or $DOVETAIL_VDAF_VECTORS, got none"
        return [pytest.param(None, marks=pytest.mark.skip(reason=why), id="absent")]
    return [pytest.param(json.loads(path.read_text()) | {"file": path.stem}, id=path.stem) for path in found]
