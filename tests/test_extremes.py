"""Every protocol at extreme parameters, through the command line: a statement, or one sentence and exit status 2.

Never a NaN, never a traceback, and never an eps below an exact attack on the same rounds.
"""

import contextlib
import itertools
import json
import math
import random
import signal

import pytest
from typer.testing import CliRunner

from dovetail.audit import findings
from dovetail.cli import app
from dovetail.guarantee import quotes
from dovetail.protocols import PROTOCOLS

EPS_LOCAL = (1e-300, 1e-30, 1e-12, 1e-6, 0.01, 1.0, 8.0, 30.0, 100.0, 400.0, 720.0, 1e3)
NOISE = (1e-300, 1e-160, 1e-30, 1e-6, 1e-3, 0.1, 1.0, 30.0, 1e4, 1e12, 1e100, 1e300)
BUDGETS = ((720.0,), (1e4,), (1e-300,), (1e-300, 1e4), (0.05, 1.0), (740.0, 1.0), (100.0, 30.0), (1e-12, 8.0))
DELTAS = (1e-300, 1e-100, 1e-20, 1e-12, 1e-6, 0.01, 0.5)
USERS, FEW_USERS = (1, 2, 3, 10, 1000, 10**5, 10**7, 10**9, 10**12), (2, 3, 10, 300)
DIMS, ROUNDS = (1, 2, 50, 10**4, 10**6), (1, 1, 2, 100, 10**4, 10**5)
LONG = 60  # seconds after which a question hangs


class Hangs(Exception):  # noqa: N818
    """A question that takes longer than `LONG`."""


@contextlib.contextmanager
def in_time(seconds=LONG):
    def stop(*_):
        raise Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def drawn(name, rng):
    """Parameters of one question, each at an extreme or in the middle."""
    dim = PROTOCOLS[name].only_dim or rng.choice(DIMS)
    settings = PROTOCOLS[name].example(dim, {})
    users, delta, rounds = rng.choice(USERS), rng.choice(DELTAS), rng.choice(ROUNDS)
    if "eps_local" in settings:
        settings["eps_local"] = rng.choice(EPS_LOCAL)
    if "noise_multiplier" in settings:
        settings["noise_multiplier"] = rng.choice(NOISE[:-1] if name == "split_and_mix" else NOISE)
    if "budgets" in settings:
        users, some = rng.choice(FEW_USERS), rng.choice(BUDGETS)
        settings["budgets"] = [rng.choice(some) for _ in range(users)]
    if name == "ss_simple":
        settings["randomizer"] = rng.choice(["laplace", "rr"])
        if settings["randomizer"] == "rr":
            settings["levels"] = rng.choice([2, 16])
    return {"num_users": users, "dim": dim, "delta": delta, "rounds": rounds, "settings": settings}


def asked(name, question):
    """What the command line answers: statements, or None where it refuses in one sentence."""
    words = ["account", "protocol", name, "--json"]
    for option, key in (("--n", "num_users"), ("--dim", "dim"), ("--delta", "delta"), ("--rounds", "rounds")):
        words += [option, str(question[key])]
    for key, value in question["settings"].items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    with in_time():
        answer = CliRunner().invoke(app, words)
    if answer.exception is not None:
        refused = isinstance(answer.exception, ValueError | OSError)
        assert refused or answer.exit_code == 2, (name, question, repr(answer.exception))
        assert "domain error" not in str(answer.exception), (name, question)
        assert len(str(answer.exception)) > 15 or answer.exit_code == 2
        return None
    return json.loads(answer.stdout, parse_constant=_constant)


def _constant(text):
    assert text != "NaN"
    return float(text.replace("Infinity", "inf"))


def attacked(name, question):
    """An exact lower bound on the eps of the same rounds, where the attack reaches."""
    plan = quotes.Terms(**question)
    protocol, cohort = quotes.settle_protocol(name, plan)
    view = protocol.view(cohort, plan.dim, neighbors=protocol.relation)
    with contextlib.suppress(ArithmeticError):
        return findings.attack_training([view.round] * plan.rounds, delta=plan.delta)
    return None


def check(name, question, *, attack):
    answer = asked(name, question)
    if answer is None:
        return
    for role in ("certified", "claimed", "local", "shuffler"):
        statement = answer[role]
        if statement is not None:
            eps = math.inf if statement["eps"] is None else float(statement["eps"])
            assert eps >= 0, (name, question, role)
            assert 0 <= float(statement["delta"]) <= 1, (name, question, role)
    certified = answer["certified"]["eps"]
    if attack and certified is not None and math.isfinite(float(certified)):
        found = None
        with contextlib.suppress(Hangs), in_time(10):  # an attack may take its time
            found = attacked(name, question)
        assert found is None or found.eps <= float(certified), (name, question, found)


def test_budgets_of_720_are_not_certified_for_nothing():
    question = {"num_users": 5, "dim": 2, "delta": 1e-6, "rounds": 1, "settings": {"budgets": [720.0, 720.0]}}
    assert float(asked("apes", question)["certified"]["eps"]) > 1000


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_few_extremes_of_every_protocol(name):
    rng = random.Random(name)
    questions = [drawn(name, rng) for _ in range(40)]
    cheap = [one for one in questions if one["num_users"] <= 10**5 and one["dim"] <= 50 and one["rounds"] <= 100]
    for question in itertools.islice(cheap, 2):
        check(name, question, attack=question["num_users"] <= 1000)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", PROTOCOLS)
def test_extremes_of_every_protocol(name, seed):
    rng = random.Random(f"{name} {seed}")
    for _ in range(8):
        question = drawn(name, rng)
        small = question["num_users"] <= 1000 and question["dim"] <= 50 and question["rounds"] <= 100
        check(name, question, attack=small)
