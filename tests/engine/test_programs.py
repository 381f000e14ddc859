"""Compiled programs are kept within their bound, and only where nobody chose otherwise."""

import functools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from dovetail.data._base import Dataset
from dovetail.engine import choices, programs
from dovetail.engine.programs import keep_programs, remove_oldest
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate, cross_entropy

COMPILE = """
import jax, jax.numpy as jnp
from dovetail.engine import programs
programs._LEAST_SECONDS = 0.0
programs.keep_programs()
print(float(jax.jit(lambda x: jnp.sin(x).sum())(jnp.ones(3))))
"""


_SET_BY_TESTS = ("JAX_COMPILATION_CACHE_DIR", "DOVETAIL_PROGRAMS")


def run(folder, **more):
    kept = {name: value for name, value in os.environ.items() if name not in _SET_BY_TESTS}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env={**kept, "DOVETAIL_CACHE": str(folder), **more})
    return [path for path in folder.rglob("*") if path.is_file()]


def test_programs_are_kept_for_their_owner_alone_and_found_again(tmp_path):
    first = run(tmp_path)
    assert first
    assert {path.parent.parent.name for path in first} == {"programs"}
    assert first[0].parent.stat().st_mode & 0o077 == 0
    kept = {path for path in first if path.name.endswith("-cache")}
    assert {path for path in run(tmp_path) if path.name.endswith("-cache")} == kept


@pytest.mark.soak
def test_nothing_is_kept_where_the_user_says_so(tmp_path):
    assert not run(tmp_path / "off", DOVETAIL_PROGRAMS="off")
    assert not run(tmp_path / "own", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "elsewhere"))
    assert list((tmp_path / "elsewhere").iterdir())


def test_what_the_user_chose_stays(tmp_path, monkeypatch):
    chosen = jax.config.values["jax_compilation_cache_dir"]
    assert chosen, "tests keep their programs in a folder of their own"
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    monkeypatch.delenv("DOVETAIL_PROGRAMS")
    keep_programs()
    assert jax.config.values["jax_compilation_cache_dir"] == chosen
    assert not list(tmp_path.iterdir())


def test_the_least_recently_used_go_first(tmp_path):
    for number, name in enumerate(("old", "used", "new")):
        path = tmp_path / "sub" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10)
        os.utime(path, (number, number))
    os.utime(tmp_path / "sub" / "used", (10, 1))
    remove_oldest(tmp_path, 30)
    assert len(list((tmp_path / "sub").iterdir())) == 3
    remove_oldest(tmp_path, 15)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["used"]
    assert programs.MOST_BYTES == 2**29


def test_what_was_measured_is_kept_and_asked_again(tmp_path, monkeypatch):
    """Zeros are timed, not records; the second time nothing is."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    monkeypatch.delenv("DOVETAIL_PROGRAMS")
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(20, 40)).astype(np.float32), rng.integers(0, 3, 20).astype(np.int32)
    data = Dataset(inputs=inputs, labels=labels, test_inputs=inputs, test_labels=labels, num_classes=3)
    model = models.mlp(data, hidden=(100,))
    parameters = model.init(jax.random.key(0))
    ask = functools.partial(
        choices.trains_one_by_one, model, parameters, ClientUpdate(update="fedavg"), cross_entropy, data, records=7
    )
    timed = iter([2.0, 1.0])
    monkeypatch.setattr(choices, "_time", lambda way, parameters, batch: next(timed))
    assert ask() is False
    assert ask() is False
    assert next(timed, None) is None
    (path,) = tmp_path.rglob("*.choice.json")
    path.write_text("{}")
    timed = iter([1.0, 2.0])
    assert ask() is True
    monkeypatch.setattr(choices, "_PLAIN", (10, 20))
    assert ask() is True, "so large that there is nothing to measure"
