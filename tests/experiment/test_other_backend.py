"""A run that is killed on a CPU and resumed on a GPU shows one model per round.

Where there is no GPU, both processes run on the CPU: what is tested then is that processes that share nothing but the
folder release each round once.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from experiment.test_released_once import PROTOCOLS, ROUNDS
from grids import later

from dovetail.experiment.verify import verify

TESTS = Path(__file__).parents[1]
CHILD = """
import json, os, sys
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # tests share the GPU
os.environ["JAX_PLATFORMS"], name, out, kill_at, seen = sys.argv[1:6]
sys.path.insert(0, sys.argv[6])
import jax, pytest
from pathlib import Path
from experiment.test_released_once import Killed, Observer, prepared
from dovetail import experiment
out = Path(out)
observer = Observer(pytest.MonkeyPatch(), kill_at=int(kill_at) or None)
resumed = (out / "checkpoint.npz").exists()
try:
    run = prepared(name, "same", resumed=resumed)
    experiment.run(run, out=out, resume=resumed, checkpoint_every=3, evaluate_every=2, callbacks=[observer])
except Killed:
    pass
found = {
    kind: {str(round): list(map(str, models)) for round, models in by_round.items()}
    for kind, by_round in (("checkpoints", observer.checkpoints), ("scores", observer.scores))
}
with open(seen, "a") as file:
    file.write(json.dumps({**found, "backend": jax.default_backend(), "resumed": resumed}) + "\\n")
os._exit(0)
"""


def gpu():
    """The platform to resume on: a GPU's, if this machine has one that JAX can use."""
    asked = "import jax; print(jax.default_backend())"
    environment = {**os.environ, "JAX_PLATFORMS": ""}
    found = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    return "cuda" if found.stdout.strip() == "gpu" else "cpu"


@pytest.mark.parametrize("name", [name if name == "dp_fl" else later(name) for name in PROTOCOLS])
def test_a_run_that_is_resumed_on_another_backend_shows_one_model_per_round(tmp_path, name):
    out, seen, other = tmp_path / "run", tmp_path / "seen.jsonl", gpu()
    for platform, kill_at in (("cpu", 23), (other, 0)):
        words = [platform, name, str(out), str(kill_at), str(seen), str(TESTS)]
        subprocess.run([sys.executable, "-c", CHILD, *words], check=True, cwd=TESTS.parent)
    first, second = map(json.loads, seen.read_text().splitlines())
    assert not first["resumed"] and second["resumed"] and first["checkpoints"] and second["checkpoints"]
    assert second["backend"] == ("gpu" if other == "cuda" else "cpu")
    for kind in ("checkpoints", "scores"):
        models = defaultdict(set)
        for process in (first, second):
            for round, versions in process[kind].items():
                models[round] |= set(versions)
        assert all(len(versions) == 1 for versions in models.values()), models
    found = verify(out)
    assert found.agrees and found.rounds == ROUNDS
