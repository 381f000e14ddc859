"""Measure other engines on the workloads of `dovetail bench`, each in a virtual environment of its own.

`ensure` builds a peer's environment once, from pinned requirements, under $DOVETAIL_BENCH_HOME or
~/.cache/dovetail/bench; `measure` runs the peer's script there and returns the result it prints as JSON. Where the
system allows it, the peer runs in a network namespace that has nothing but loopback.
"""

import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import venv

SCRIPTS = pathlib.Path(__file__).resolve().parent / "peers"

# Installed group by group: torch comes first so that the build it resolves to is the one the rest is installed around.
REQUIREMENTS = {
    "pfl": (
        ("torch==2.13.0",),
        (
            "pfl==0.6.0",
            "torch==2.13.0",
            "numpy==2.4.6",
            "scipy==1.17.1",
            "dp-accounting==0.5.1",
            "multiprocess==0.70.19",
            "prv-accountant==0.2.0",
        ),
    ),
    "flower": (
        ("torch==2.13.0",),
        ("flwr[simulation]==1.41.0", "torch==2.13.0", "ray==2.55.1", "numpy==2.4.6"),
    ),
    "opacus": (
        ("torch==2.13.0",),
        ("opacus==1.6.0", "torch==2.13.0", "numpy==2.4.6", "scipy==1.17.1", "opt-einsum==3.4.0"),
    ),
    "jax_privacy": (
        (
            "jax-privacy==2.0.0",
            "jax==0.10.2",
            "jaxlib==0.10.2",
            "numpy==2.4.6",
            "scipy==1.17.1",
            "optax==0.2.8",
            "chex==0.1.92",
            "dp-accounting==0.6.0",
        ),
    ),
}

# Peers whose processes listen on every address of the machine: never run outside a network namespace.
LISTENS_EVERYWHERE = {"flower"}

_AT_ITS_END = "terminate called without an active exception"  # of a thread of PyTorch's, after the result was printed

LOOPBACK_ONLY = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def home() -> pathlib.Path:
    """Return the directory that holds the peers' environments."""
    configured = os.environ.get("DOVETAIL_BENCH_HOME")
    return pathlib.Path(configured) if configured else pathlib.Path.home() / ".cache" / "dovetail" / "bench"


def ensure(peer: str) -> pathlib.Path:
    """Return the Python of the peer's environment, building the environment when there is none that matches."""
    groups = REQUIREMENTS[peer]
    directory = (home() / peer).absolute()
    stamp = directory / "requirements.txt"
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = _stamp_text(groups)
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True)
    for group in groups:
        _install(peer, python, group)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def measure(peer: str, workload: str, *, benchmark: str = "clients", timeout: float = 900.0, **options: object) -> dict:
    """Run the peer on the workload and return its result; options become `--name value`, those that are None do not.

    For "clients" the result has `engine`, `workers`, `workload`, `seconds_per_round` (one number for each timed round)
    and `peak_rss_mb` (summed over the processes that train and aggregate); for "examples" see `peers/batch_examples`.
    """
    command = [str(ensure(peer)), str(SCRIPTS / f"{peer}_{benchmark}.py"), "--workload", workload]
    for name, value in options.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    with tempfile.TemporaryDirectory(prefix="p", ignore_cleanup_errors=True) as scratch:
        status, output, errors = _run(_isolate(peer, command), scratch=scratch, timeout=timeout)
    if status is None:
        raise RuntimeError(f"{peer} did not finish the {workload} workload within {timeout:g} seconds.")
    if status and not (output.strip() and errors.rstrip().endswith(_AT_ITS_END)):
        raise RuntimeError(f"{peer} failed on the {workload} workload: {_last_line(errors)}")
    try:
        return json.loads(_last_line(output))
    except json.JSONDecodeError:
        raise RuntimeError(f"{peer} printed no result for the {workload} workload: {_last_line(errors)}") from None


def _stamp_text(groups: tuple[tuple[str, ...], ...]) -> str:
    python = f"# python {sys.version_info.major}.{sys.version_info.minor}"
    return "\n".join([python, *(requirement for group in groups for requirement in group), ""])


def _install(peer: str, python: pathlib.Path, requirements: tuple[str, ...]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"The environment of {peer} could not be built: {_last_line(done.stderr)}")


def _environment() -> dict[str, str]:
    """Return our environment without the variables that would let our packages into the peer's Python."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}


def _isolate(peer: str, command: list[str]) -> list[str]:
    prefix = _namespace()
    if prefix is None and peer in LISTENS_EVERYWHERE:
        raise RuntimeError(
            f"{peer} was not measured: it listens on every network address, and this system gives it no network "
            "namespace of its own (unshare and ip are needed)."
        )
    return [*(prefix or ()), *command]


@functools.cache
def _namespace() -> tuple[str, ...] | None:
    """Return the command prefix that runs a program with loopback only, or None where that is not possible."""
    for flags in ("-n", "-rn"):
        prefix = ("unshare", flags, *LOOPBACK_ONLY)
        try:
            done = subprocess.run([*prefix, "true"], capture_output=True, check=False)
        except FileNotFoundError:
            return None
        if done.returncode == 0:
            return prefix
    return None


def _run(command: list[str], *, scratch: str, timeout: float) -> tuple[int | None, str, str]:
    """Run a command in a session of its own; on a timeout end the whole session and return None as the status."""
    process = subprocess.Popen(
        command,
        env={**_environment(), "TMPDIR": scratch},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output, errors


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "(nothing was printed)"
