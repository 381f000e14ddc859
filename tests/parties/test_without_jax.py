"""A client that only takes part: it reports to tasks on shares, and checks their cost, where JAX is not installed."""

import subprocess
import sys

TASKS = {
    "secagg": {"clip_norm": 1.0, "noise_multiplier": 2.0},
    "ss_simple": {"clip_value": 1.0, "eps_local": 1.0},
    "ss_topk": {"clip_value": 1.0, "k": 2, "eps_local": 1.0},
    "apes": {"budgets": "uniform2"},
    "unis": {"budgets": "uniform2"},
}
REPORT = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "optax"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
from pathlib import Path
import numpy as np
from dovetail.parties.common.keys import KeyPair, ServicePairs
from dovetail.parties.common.task import TrainingTask, sign
from dovetail.parties.user.policy import Policy
from dovetail.parties.user.client import Client
folder, tasks = Path(sys.argv[1]), eval(sys.argv[2])
services = tuple(ServicePairs.add(folder / str(i)).public for i in range(2))
for name, settings in tasks.items():
    task = TrainingTask(name="small", protocol=name, settings=settings, dim=6, rounds=1, min_clients=9, max_clients=9,
                        round_seconds=60.0, delta=1e-5, analyzer=KeyPair.generate("seal").public, aggregators=services)
    signed = sign(task, signer := KeyPair.generate("sign"))
    policy = Policy(signer=signer.public.key_id, analyzer=task.analyzer_id, min_clients=9, eps_round=100.0,
                    eps_task=100.0, eps_lifetime=100.0, delta_lifetime=0.1, number=3)
    client = Client(folder / name, policy=policy, key=KeyPair.generate("sign"))
    envelope = client.report(signed, 1, np.linspace(-1, 1, 6, dtype=np.float32))
    print(name, sum(len(upload.encode()) for upload in envelope.uploads) == task.upload_bytes)
"""


def test_a_client_reports_without_jax(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", REPORT, str(tmp_path), repr(TASKS)], capture_output=True, text=True, check=False
    )
    assert found.stderr == ""
    assert found.stdout.split() == [word for name in TASKS for word in (name, "True")]
