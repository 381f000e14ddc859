"""What a command that only accounts does not wait for."""

import subprocess
import sys

import pytest

SLOW = ("jax", "scipy.stats", "scipy.signal", "dp_accounting", "vl_convert")
ASKED = {
    "a crowd": ["account", "protocol", "binary_sum", "--n", "1000", "--dim", "1", "--delta", "1e-6"],
    "personal budgets": ["account", "protocol", "apes", "--n", "100", "--dim", "5", "--delta", "1e-5"],
    "one report": ["account", "amplify", "--n", "1000", "--eps-local", "1", "--delta", "1e-6"],
}
SETTINGS = {"a crowd": ["--set", "eps_local=1"], "personal budgets": ["--set", "budgets=uniform2"], "one report": []}


@pytest.mark.soak  # a process of its own each: seconds
@pytest.mark.parametrize("what", ASKED)
def test_accounting_imports_nothing_that_takes_long(what):
    program = (
        "import sys; from dovetail.cli import app\n"
        f"app({[*ASKED[what], *SETTINGS[what]]!r}, standalone_mode=False)\n"
        f"print([name for name in {SLOW!r} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "[]"
