"""A user's own protocol: a class named "module:Class" is found, run and quoted like a bundled one."""

import textwrap

import pytest

from dovetail import experiment, protocols
from dovetail.experiment import config
from dovetail.guarantee import quotes

FILE = """
import dataclasses
from typing import ClassVar

from dovetail.protocols.curator.dp_fl import DpFl

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(DpFl):
    name: ClassVar[str] = "mine"

NOT_ONE = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_own_protocol.py").write_text(textwrap.dedent(FILE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_it_runs_and_is_quoted(here):
    name = "my_own_protocol:Mine"
    plan = quotes.Terms(num_users=100, dim=5, delta=1e-5, settings={"noise_multiplier": 2.0, "clip_norm": 1.0})
    assert quotes.quote(name, plan).certified.eps == quotes.quote("dp_fl", plan).certified.eps
    tree = {
        "task": {"name": "tiny:TASK"},
        "cohort": {"kind": "fixed", "size": 50, "rounds": 2},
        "protocol": {"name": name, "clip_norm": 1.0, "noise_multiplier": 5.0},
    }
    result = experiment.run(experiment.prepare(config.parse(tree)))
    assert result.rounds == 2
    assert not result.statement.is_unbounded


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "my_own_protocol:NOT_ONE",
            "expected 'NOT_ONE' in 'my_own_protocol' to be a dovetail.protocols.Protocol, got a int",
        ),
        ("my_own_protocol:Absent", "got no such name"),
        ("no_such_module:Mine", "expected a protocol 'module:name' that imports"),
        ("dp_fll", "dp_fl"),
    ],
)
def test_what_is_none_is_said(here, name, said):
    with pytest.raises(ValueError, match=said):
        protocols.build(name, {})
