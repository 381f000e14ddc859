"""Where Flower is not installed its tests are not there; `make flower` installs it and asks for them."""

import importlib.util

import pytest

collect_ignore = [] if importlib.util.find_spec("flwr") else ["test_flower.py"]


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server for all tests that ask for one, `make postgres`."""
    from parties.cluster import cluster

    with cluster() as running:
        yield running


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request, tmp_path):
    """Where a store of this name is: both kinds must do the same."""
    if request.param == "sqlite":
        return lambda name="store": tmp_path / name
    server, urls = request.getfixturevalue("postgres"), {}
    return lambda name="store": urls[name] if name in urls else urls.setdefault(name, server.database())
