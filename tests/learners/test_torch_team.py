"""Clients that train on threads or in processes: the same updates, whatever happens to a process."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is no dependency: `make flower` has it")
from torch import nn  # noqa: E402

from dovetail.learners import _torch_team  # noqa: E402
from dovetail.learners import torch as ours  # noqa: E402
from dovetail.learners._torch import LocalSteps, trained_parameters  # noqa: E402
from dovetail.learners._torch_team import Team  # noqa: E402
from dovetail.learners.client import ClientUpdate  # noqa: E402

pytestmark = pytest.mark.torch

COUNTS = np.array([9, 0, 4, 1, 9, 7])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def absolute(outputs, labels):
    """A loss that another process finds by its name."""
    return (outputs.sum(dim=1) - labels).abs()


def held(module, records=9):
    start = torch.cat([value.detach().reshape(-1) for _, value in trained_parameters(module)])
    return start, torch.randn(len(COUNTS), records, 8, 8), torch.randint(0, 10, (len(COUNTS), records)), COUNTS


def processes(team):
    return [process for process, _ in team._pool._started]


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error", absolute], ids=["sum", "name", "own"])
@pytest.mark.parametrize(
    "steps", [LocalSteps(False, 1, 1, 0.1, 0.0), LocalSteps(True, 2, 2, 0.1, 0.5)], ids=["sgd", "prox"]
)
def test_processes_make_the_updates_of_threads_bit_by_bit(steps, loss):
    module = network() if loss != "squared_error" else nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    team, num_threads = Team(module, loss, processes=True), Team(module, loss, processes=False)
    for records in (9, 12):  # the memory that they share grows
        args = steps, *held(module, records)
        found = team.updates(*args)
        assert team._pool.ready and num_threads._pool is None
        assert torch.equal(found, num_threads.updates(*args))
        assert found.any() and not found[1].any()


def test_processes_start_once_training_has_taken_long(monkeypatch):
    module = network()
    args = LocalSteps(True, 2, 1, 0.1, 0.0), *held(module)
    team = Team(module, "cross_entropy")
    first = team.updates(*args)
    assert team._pool is None
    monkeypatch.setattr(_torch_team, "_START", 0.0)
    assert torch.equal(team.updates(*args), first) and team._pool is not None  # threads until they are ready
    team._pool.wait()
    trained_by_threads = team._seconds_trained
    assert torch.equal(team.updates(*args), first) and team._seconds_trained == trained_by_threads
    ends = processes(team)
    del team
    assert all(process.poll() is not None for process in ends)


@pytest.mark.parametrize("when", ["between", "during"])
def test_a_process_that_is_killed_costs_no_update(caplog, when):
    module = network()
    steps, args = LocalSteps(True, 1, 200, 0.01, 0.0), held(module)
    team = Team(module, "cross_entropy", processes=True)
    expected = team.updates(steps, *args)
    victim = processes(team)[0]
    if when == "between":
        victim.kill()
    else:
        subprocess.Popen(["sh", "-c", f"sleep 0.05; kill -9 {victim.pid}"])
    assert torch.equal(team.updates(steps, *args), expected)
    assert not team._pool.ready and "clients train on threads from now on" in caplog.text
    assert all(process.poll() is not None for process in processes(team))
    assert torch.equal(team.updates(steps, *args), expected)


@pytest.mark.parametrize("what", ["module", "loss"])
def test_what_another_process_cannot_load_trains_on_threads(caplog, what):
    class Local(nn.Linear):
        pass

    caplog.set_level(logging.INFO)
    module = nn.Sequential(nn.Flatten(), Local(64, 10) if what == "module" else nn.Linear(64, 10))
    loss = "cross_entropy" if what == "module" else lambda z, y: (z.sum(dim=1) - y) ** 2
    args = LocalSteps(True, 2, 1, 0.1, 0.0), *held(module)
    team = Team(module, loss, processes=True)
    assert torch.equal(team.updates(*args), Team(module, loss, processes=False).updates(*args))
    assert not team._pool.ready and "clients train on threads, as processes cannot" in caplog.text


def test_a_loss_that_fails_in_a_process_says_what_it_says_on_a_thread():
    module = network()
    team = Team(module, torch.nn.functional.cross_entropy, processes=True)
    with pytest.raises(ValueError, match=r"expected loss\(outputs, labels\) to return one number per record"):
        team.updates(LocalSteps(True, 2, 1, 0.1, 0.0), *held(module))


def test_the_learner_has_processes_on_request():
    model = ours.model(network(), vectorized=False, processes=True, device="cpu")
    start, inputs, labels, counts = (np.asarray(array) for array in held(network()))
    settings = ClientUpdate(update="fedavg", batch=2)
    found = model.learner.updates(settings, "cross_entropy", start, inputs, labels, counts)
    (team,) = model.learner._teams.values()
    assert team._pool.ready and found.shape == (len(COUNTS), len(start))


def test_processes_end_with_who_started_them():
    code = (
        "import torch, time\n"
        "from dovetail.learners._torch_team import Team\n"
        "from dovetail.learners._torch import LocalSteps\n"
        "import numpy as np\n"
        "team = Team(torch.nn.Linear(4, 2), 'cross_entropy', processes=True)\n"
        "team.updates(LocalSteps(True, 2, 1, .1, 0.), torch.zeros(10), torch.zeros(2, 3, 4), torch.zeros(2, 3).long(), "
        "np.array([3, 3]))\n"
        "print(*[process.pid for process, _ in team._pool._started], flush=True)\n"
        "time.sleep(60)\n"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    theirs = [int(number) for number in started.stdout.readline().split()]
    assert len(theirs) > 1
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in theirs) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in theirs)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
