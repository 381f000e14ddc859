"""Deployment: users, shufflers or aggregators, and an analyzer as parties, with the protocols of the simulation.

- `common`: what several parties need: the signed task and what it guarantees, keys, notices, sealed messages, shares,
  ledgers, databases, and the clients that speak to services.
- `user`: a client with its policy, its spending and its consent, the loop of its participation, perhaps an agent.
- `intermediary`: what shufflers and aggregators have in common; `shuffler` keeps uploads in a store, pads and permutes
  them, `aggregator` adds up shares.
- `analyzer`: keeps sums and models in a store, and computes with `learning`.
- `http`: puts services behind HTTPS. `flower`: carries reports over a Flower fleet.
- `fleet`: lays out and starts everybody on one machine, with the data and model of a config (`federation`).

It needs the extra `parties` and a POSIX system, as Linux; importing it elsewhere raises ModuleNotFoundError with what
to do.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

__all__: list[str] = []

_OF_THE_SYSTEM = ("fcntl", "resource")
_OF_THE_EXTRA = ("httptools", "httpx", "nacl", "starlette", "uvicorn", "uvloop")


def _require_platform_and_extras() -> None:
    """Refuse a system, or an installation, on which deployed parties do not work."""
    try:
        for name in _OF_THE_SYSTEM:
            import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"deployed parties need Linux or another POSIX system, and this one has no module {error.name!r}; "
            "simulations, reports and accounting work here"
        ) from error
    missing = [name for name in _OF_THE_EXTRA if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"deployed parties need packages that are not installed ({', '.join(missing)}): "
            "pip install 'dovetail-fl[parties]'",
            name=missing[0],
        )


_require_platform_and_extras()
