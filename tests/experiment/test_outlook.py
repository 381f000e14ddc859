"""What is said before the first round: noise against updates, what to expect, what would help; and what is refused."""

import logging
import math

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
        outlook.refuse(force=noise == "os")
    with pytest.raises(ValueError, match="--force"):
        outlook.refuse(force=False)


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
