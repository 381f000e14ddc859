import json
from pathlib import Path

from golden_vdaf import computed

GOLDEN = Path(__file__).parent.parent / "golden" / "vdaf.json"


def test_what_ships_stays_byte_for_byte():
    assert computed() == json.loads(GOLDEN.read_text())
