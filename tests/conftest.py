"""Two host devices for every test, so that sharding is always exercised; no test shares the user's cache or key."""

import atexit
import contextlib
import functools
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

# a worker per core is enough: threads of NumPy's matrix products would wait for each other by spinning
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import jaxlib
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# most of a test's time would go into optimising programs that run once; XLA ends on a flag that it no longer has
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",  # parts of a program are compiled apart: more work in all
        *(["--xla_cpu_use_fusion_emitters=false"] if jaxlib.version.__version_info__ < (0, 11) else []),
    ]
).strip()
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # an eighth of all tracing goes into who called whom
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ["DOVETAIL_PROGRAMS"] = "off"  # nothing is kept in the home of whoever runs the tests
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers and tests' own processes inherit it: one compiles for all
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="dovetail-programs-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["DOVETAIL_WITNESS"] = tempfile.mkdtemp(prefix="dovetail-witness-")
# before tests copy the environment for processes of their own
os.environ["DOVETAIL_DATA_KEY"] = str(Path(tempfile.mkdtemp(prefix="dovetail-key-")) / "data.key")
os.environ["DOVETAIL_LEDGERS"] = tempfile.mkdtemp(prefix="dovetail-ledgers-")

import jax

atexit.register(shutil.rmtree, os.environ["DOVETAIL_WITNESS"], ignore_errors=True)
atexit.register(shutil.rmtree, os.environ["DOVETAIL_LEDGERS"], ignore_errors=True)
atexit.register(shutil.rmtree, Path(os.environ["DOVETAIL_DATA_KEY"]).parent, ignore_errors=True)
jax.config.update("jax_num_cpu_devices", 2)
hypothesis.settings.register_profile("the same examples in every run", derandomize=True, database=None)
hypothesis.settings.load_profile("the same examples in every run")
with contextlib.suppress(ImportError, AttributeError):  # JAX's own, which may move: tests then take longer, no more
    from jax._src import api
    from jax._src.interpreters import mlir

    # it would load all dialects of MLIR anew for each of some thousand programs; a process does with one context
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)
    if "PYTEST_XDIST_WORKER" in os.environ:  # it would forget thousands of programs one by one, for seconds
        atexit.unregister(api.clean_up)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """A test's room is the folder that it is in, and its marker has that name."""
    tests, known = Path(__file__).parent, {line.partition(":")[0] for line in config.getini("markers")}
    for item in items:
        folder, *inside = item.path.relative_to(tests).parts
        room = folder if inside else "core"
        if room not in known:
            raise pytest.UsageError(f"expected a marker for the folder tests/{room} in pyproject.toml, got none")
        item.add_marker(room)


def pytest_collection_finish():
    """What is there before the first test stays: the collector of garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # tracing makes much that lives for a while


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Nobody looks for garbage that the operating system is about to take anyway."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory):
    before = os.environ.get("DOVETAIL_CACHE")
    os.environ["DOVETAIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["DOVETAIL_CACHE"]
    else:
        os.environ["DOVETAIL_CACHE"] = before


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The command line within this process: arguments -> (exit status, stdout, stderr)."""
    from dovetail import cli

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dovetail", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
