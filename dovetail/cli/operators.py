"""Commands of operators: `party`."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli._shared import Authority, flag, key_id_from, out_console

__all__ = ["party"]

party = typer.Typer(name="party", help="Inspect running services.", no_args_is_help=True)


@party.command("status")
def party_status(
    url: Annotated[list[str], typer.Argument(help="Addresses of services.", metavar="URL...")],
    ca: Authority = None,
    keys: Annotated[
        Path | None, typer.Option(help="Folder with the keys of a shuffler or aggregator, which shows its counts too.")
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print JSON.")] = False,
) -> None:
    """Print whether services are ready, and which round they are in; exits with status 1 if one is not ready."""
    services = [_probe_service(address, ca, keys) for address in url]
    if as_json:
        out_console.print_json(json.dumps(services))
    else:
        for service in services:
            state = "ready" if service["ready"] else "not ready" if service["healthy"] else "does not answer"
            words = [service["url"], state]
            words += [] if service["round"] is None else [f"round {service['round']}{_open_until(service)}"]
            words += [f"{name}: {count}" for name, count in sorted((service["counts"] or {}).items())]
            out_console.print("; ".join(words), highlight=False, markup=False, soft_wrap=True)
    if not all(service["ready"] for service in services):
        raise typer.Exit(1)


@party.command("model")
def party_model(
    url: Annotated[str, typer.Argument(help="Address of a service of the training.")],
    out: Annotated[Path, typer.Option(help="File to write the model to: .npz with --config, else .npy.")],
    signer: Annotated[str, typer.Option(help="Id of the key that must have signed the task.", metavar="HEX|FILE")],
    config: Annotated[
        str | None, typer.Option(help="The training's config, for the names and shapes of parameters; default: flat.")
    ] = None,
    ca: Authority = None,
) -> None:
    """Fetch the latest model, check that the task's analyzer signed it, and write it to a file."""
    import contextlib
    import io

    import numpy as np

    from dovetail.experiment import config as configs
    from dovetail.files import write_atomically
    from dovetail.parties.common.http_clients import IntermediaryClient
    from dovetail.parties.common.task import verify
    from dovetail.parties.federation import load_federation

    suffix = ".npy" if config is None else ".npz"
    buffer = io.BytesIO()
    if out.suffix != suffix:
        raise ValueError(
            f"--out must end with {suffix} {'without' if config is None else 'with'} --config, got {str(out)!r}"
        )
    with contextlib.closing(IntermediaryClient(url, ca=ca, timeout=60.0)) as link:
        task = verify(link.task(), signer=key_id_from(signer), fresh=False)
        status = link.status()
        round = status.round if status.over else status.round - 1
        model = link.model(round)
    if config is None:
        np.save(buffer, model)
    else:
        np.savez(buffer, **load_federation(configs.read(config)).parameters_by_name(model))  # type: ignore[arg-type]
    write_atomically(out, buffer.getvalue())
    of = "the last round" if status.over else f"round {round}" if round else "no round yet, the first one"
    out_console.print(f"task {task.task_id.hex()[:16]}; {len(model):,} parameters after {of}: {out}", highlight=False)


def _open_until(service: dict[str, Any]) -> str:
    """Until when a round is open."""
    if service["over"] or not service["closes"]:
        return ", over" if service["over"] else ""
    return f", closes {datetime.datetime.fromtimestamp(service['closes'], datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


def _probe_service(url: str, ca: Path | None, keys: Path | None) -> dict[str, Any]:
    """What a service says of itself; one that does not answer, or not to this key, has False or None there."""
    import contextlib

    from dovetail.parties.common.http_clients import IntermediaryClient, Rejected, Unreachable
    from dovetail.parties.common.keys import KeyRing

    facts: dict[str, Any] = {"url": url, "healthy": False, "ready": False}
    facts |= dict.fromkeys(("round", "over", "closes", "counts"))
    key = None if keys is None else KeyRing(keys, "sign").current()
    with contextlib.closing(IntermediaryClient(url, ca=ca, key=key, timeout=10.0)) as link:
        with contextlib.suppress(Unreachable, Rejected):
            facts["healthy"] = link.answers("/healthz")
            facts["ready"] = link.answers("/readyz")
        with contextlib.suppress(Unreachable, Rejected):
            status = link.status()
            facts |= {"round": status.round, "over": status.over, "closes": status.closes}
        if key is not None:
            with contextlib.suppress(Unreachable, Rejected):
                facts["counts"] = link.counts()
    return facts
