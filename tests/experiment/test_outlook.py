"""What is said before the first round: noise against updates, what to expect, what would help; and what is refused."""

import dataclasses
import logging
import math
import re

import numpy as np
import pytest

import dovetail
from dovetail.data import Dataset
from dovetail.experiment import config as configs
from dovetail.experiment import training
from dovetail.experiment.outlook import Outlook
from dovetail.experiment.preparation import prepare


def table(users: int, width: int = 4) -> Dataset:
    rng = np.random.default_rng(0)
    inputs = rng.uniform(-1, 1, (users, width)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int32)
    return Dataset.from_arrays(inputs, labels, test=(inputs[:50], labels[:50]), classes=[0, 1])


@pytest.fixture
def trained(monkeypatch):
    """The plans that `train` would have run."""
    plans = []
    monkeypatch.setattr(training, "run", lambda plan, **settings: plans.append(plan))
    return plans


def test_the_noise_beside_the_longest_update_is_what_the_engine_adds(trained):
    dovetail.train(table(4000), eps=8.0)
    outlook = Outlook.of(trained[0])
    protocol = trained[0].sampler.protocol
    assert outlook.ratio == pytest.approx(protocol.noise_multiplier / 4000 * math.sqrt(10))
    assert outlook.residual == pytest.approx(outlook.ratio / 10)
    assert (outlook.users, outlook.dim, outlook.rounds, outlook.eps) == (4000, 10, 100, 8.0)


@pytest.mark.parametrize(
    ("users", "arguments"),
    [
        (5, {"eps": 2.0}),
        (500, {"eps": 0.01}),
        (1000, {"eps": 2.0, "model": "mlp", "protocol": "ldp_fl"}),
    ],
)
def test_what_is_hopeless_is_refused_unless_forced(users, arguments, trained):
    data = table(users)
    with pytest.raises(
        ValueError, match=r"no better than a constant guess\. What would help: more users \(about "
    ) as said:
        dovetail.train(data, **arguments)
    assert "force=True" in str(said.value)
    assert ("'secagg'" in str(said.value)) == ("protocol" in arguments)
    assert not trained
    with pytest.warns(UserWarning, match="the model would be noise"):
        dovetail.train(data, **arguments, force=True)
    assert trained


def test_losses_are_warned_of_and_good_prospects_are_logged(trained, caplog, recwarn):
    with caplog.at_level(logging.INFO, logger="dovetail"):
        dovetail.train(table(20_000), eps=8.0)
    assert "privacy should cost little accuracy, a point or two" in caplog.text
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]
    with pytest.warns(UserWarning, match="expect to lose much accuracy to privacy"):
        dovetail.train(table(200), eps=1.0)


def test_more_noise_never_looks_better(trained):
    residuals = []
    for eps in (8.0, 2.0, 1.0):
        dovetail.train(table(3000), eps=eps)
        residuals.append(Outlook.of(trained[-1]).residual)
    assert residuals == sorted(residuals)


def test_seeded_noise_protects_nobody_and_is_not_refused():
    for noise in ("seeded", "os"):
        outlook = Outlook.of(prepare(configs.read("digits", [("privacy.eps", 0.001), ("noise", noise)])))
        assert outlook.is_hopeless
        outlook.refuse_if_hopeless(force=noise == "os")
    with pytest.raises(ValueError, match="--force"):
        outlook.refuse_if_hopeless(force=False)


def test_the_command_says_it_on_stderr_and_refuses(command, tmp_path):
    settings = ("--set", "cohort.rounds=1", "--out", str(tmp_path / "run"))
    status, out, err = command("run", "digits", *settings)
    assert status == 0
    assert "in each of 1 rounds the noise is" in err
    assert "the noise is" not in out
    settings = ("--set", "privacy.eps=0.001", "--set", "cohort.rounds=1", "--out", str(tmp_path / "no"))
    status, _, err = command("run", "digits", *settings)
    assert status == 2
    assert "--force" in err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("is_local", [False, True])
def test_what_would_help_is_what_leaves_little_to_lose(is_local):
    """Noise on a mean falls with the users, or with their root; its length grows with the root of the parameters."""
    outlook = Outlook(
        ratio=1.0,
        longest=1.0,
        rounds=100,
        users=1000,
        dim=10_000,
        eps=1.0,
        protocol="dp_fl",
        is_local=is_local,
        has_secret_noise=True,
    )
    assert outlook.residual == 0.1 and outlook.costs_much
    users = int(re.search(r"more users \(about ([0-9,]+)\)", outlook.describe())[1].replace(",", ""))
    fewer = int(re.search(r"fewer parameters \(about ([0-9,]+)\)", outlook.describe())[1].replace(",", ""))
    assert users == (25_000 if is_local else 5000) and fewer == 400
    assert "a larger eps" in outlook.describe() and "'secagg'" not in outlook.describe()
    assert "a larger eps" not in dataclasses.replace(outlook, eps=None).describe()
    assert "'secagg'" in dataclasses.replace(outlook, protocol="ldp_fl").describe()
    assert "fewer parameters" not in dataclasses.replace(outlook, dim=24).describe()
    assert "fewer parameters (about 1)" in dataclasses.replace(outlook, dim=25).describe()
    assert "What would help" not in dataclasses.replace(outlook, ratio=0.3).describe()


@pytest.mark.parametrize(
    ("ratio", "expectation"),
    [
        (0.0, "nothing is lost to noise, and nothing is private"),
        (0.2, "a point or two"),
        (0.3, "a few points of accuracy"),
        (15.0, "may be no better than a constant guess"),
        (15.1, "the model would be noise"),
    ],
)
def test_what_to_expect_depends_on_the_noise_that_is_left_of_all_rounds(ratio, expectation):
    facts = {"longest": 1.0, "users": 10, "dim": 10, "eps": 1.0, "protocol": "dp_fl"}
    outlook = Outlook(ratio=ratio, rounds=100, is_local=False, has_secret_noise=True, **facts)
    assert expectation in outlook.describe()


def test_the_noise_that_counts_is_that_of_the_first_round():
    """Of a schedule, in which noise and sizes change."""
    overrides = [
        ("protocol.name", "dp_fl"),
        ("protocol.schedule", [1.0, 3.0]),
        ("protocol.noise_multiplier", 4.0),
        ("protocol.clip_norm", 1.0),
        ("cohort.kind", "poisson"),
        ("cohort.size", [100, 200]),
        ("cohort.rounds", 2),
    ]
    plan = prepare(configs.read("digits", [*overrides, ("privacy.eps", None)]))
    stds = [plan.sampler.noise_std(index, dim=1) / plan.sampler.sum_divisor(index, learning_rate=1) for index in (0, 1)]
    assert stds[0] == pytest.approx(4 / 100) and stds[0] != pytest.approx(stds[1])
    assert Outlook.of(plan).ratio == pytest.approx(stds[0] * math.sqrt(plan.engine.dim))
