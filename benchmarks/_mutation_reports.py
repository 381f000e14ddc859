"""A pytest plugin of mutation.py: writes down when tests begin and end, and leaves out those that a file names."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

REPORTS = "MUTATION_REPORTS"  # the environment's names of the two files
DESELECTED = "MUTATION_DESELECTED"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file's name leaves out all of its tests."""
    named = set(Path(os.environ[DESELECTED]).read_text().splitlines())
    dropped = [item for item in items if item.nodeid in named or item.nodeid.partition("::")[0] in named]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, began=time.time())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds = round(report.duration, 3)
    failure = {} if report.passed else {"said": str(report.longrepr)[-2000:]}
    _write(test=report.nodeid, when=report.when, outcome=report.outcome, seconds=seconds, **failure)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(test=report.nodeid, when="collect", outcome="failed", seconds=0.0, said=str(report.longrepr)[-2000:])


def _write(**fields: object) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers tell the process that started them, which writes
        with Path(os.environ[REPORTS]).open("a") as file:
            file.write(json.dumps(fields) + "\n")
