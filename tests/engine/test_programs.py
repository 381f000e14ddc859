"""Compiled programs are kept within their bound, and only where nobody chose otherwise."""

import os
import subprocess
import sys

import jax
import pytest

from dovetail.engine import programs
from dovetail.engine.programs import keep_programs, remove_oldest

COMPILE = """
import jax, jax.numpy as jnp
from dovetail.engine import programs
programs._LEAST_SECONDS = 0.0
programs.keep_programs()
print(float(jax.jit(lambda x: jnp.sin(x).sum())(jnp.ones(3))))
"""


def run(folder, **more):
    kept = {name: value for name, value in os.environ.items() if name not in ("JAX_COMPILATION_CACHE_DIR",)}
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
