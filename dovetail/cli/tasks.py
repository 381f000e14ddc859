"""Commands around a task: `keys`, `task new`, `task show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli._shared import HeldOut, JsonFlag, Measures, Overrides, from_hex, out_console, print_costs, print_json

__all__ = ["keys", "task"]

task = typer.Typer(help="Create and inspect a task: the training that all parties agree on.", no_args_is_help=True)


def keys(
    folder: Annotated[Path, typer.Argument(help="Folder for the key; only its owner can read the files.")],
    use: Annotated[
        str, typer.Option(help='"seal" (analyzer), "sign" (task owner) or "service" (shuffler, aggregator).')
    ] = "sign",
    days: Annotated[int, typer.Option(min=1, help="Days until the key expires.")] = 365,
    tls: Annotated[str | None, typer.Option(help="Instead, make a TLS certificate for this host.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key pair. Older keys in the folder stay valid until their rounds are closed."""
    import msgspec

    from dovetail import _validate
    from dovetail.parties.common.certificates import Certified, make_authority, make_certificate
    from dovetail.parties.common.keys import KeyRing, PublicKey, ServiceKeys, ServicePairs

    if tls is not None:
        there = Certified(folder / "authority.crt", folder / "authority.key")
        made = make_certificate(folder, there if there.private_key.exists() else make_authority(folder), host=tls)
        facts: dict[str, Any] = {"certificate": str(made.certificate), "private_key": str(made.private_key)}
        facts["authority"] = str(there.certificate)
    else:
        _validate.one_of(("seal", "sign", "service"), use=use)
        public: PublicKey | ServiceKeys
        if use == "service":
            public = ServicePairs.add(folder, days=days).public
        else:
            public = KeyRing(folder, "seal" if use == "seal" else "sign").add(days=days).public
        path = folder / f"public-{use}-{public.key_id.hex()}.json"
        path.write_bytes(msgspec.json.encode(public))
        facts = {"id": public.key_id.hex(), "use": use, "public": str(path), "days": days}
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        out_console.print(f"{name}: {value}", markup=False, highlight=False)


@task.command("new")
def task_new(
    config: Annotated[str, typer.Argument(help="A TOML file or a preset: data, model, protocol, privacy.")],
    out: Annotated[Path, typer.Option(help="File to write the signed task to.")],
    signer: Annotated[Path, typer.Option(help="Folder with the signing key.")],
    analyzer: Annotated[Path, typer.Option(help="The analyzer's public key (public-seal-....json).")],
    min_clients: Annotated[
        int, typer.Option(min=1, help="Minimum number of users per round; with fewer, nothing is forwarded.")
    ],
    max_clients: Annotated[int, typer.Option(min=1, help="Maximum number of users per round.")],
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")],
    shuffler: Annotated[
        list[Path] | None, typer.Option(help="Public keys of a shuffler (public-service-....json); repeat for each.")
    ] = None,
    aggregator: Annotated[
        list[Path] | None, typer.Option(help="Instead of shufflers: public keys of an aggregator; repeat for each.")
    ] = None,
    round_seconds: Annotated[float, typer.Option(help="Seconds that a round stays open.")] = 3600.0,
    colluders: Annotated[int, typer.Option(min=0, help="Number of users assumed to be fake or to collude.")] = 0,
    measure: Measures = None,
    held_out: HeldOut = 0.0,
    dim: Annotated[
        int | None, typer.Option(min=1, help="Number of model parameters, if the config names no model.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Create and sign a task. Noise that is not given is calibrated to the budget."""
    import msgspec

    from dovetail.experiment import config as configs
    from dovetail.files import write_atomically
    from dovetail.parties.common.costs import calibrated, cost
    from dovetail.parties.common.keys import KeyRing, PublicKey, ServiceKeys
    from dovetail.parties.common.measures import by_name, measured_size
    from dovetail.parties.common.records import read_record
    from dovetail.parties.common.task import TrainingTask, sign
    from dovetail.parties.federation import federation

    chosen = configs.read(config, [configs.parse_override(text) for text in set_ or []])
    settings = chosen.protocol_settings
    learned = federation(chosen) if dim is None or measure else None
    beside = by_name(measure or (), classes=learned.dataset.num_classes) if learned is not None else ()
    if dim is None and learned is not None:
        dim = learned.dim
    fields = {
        "protocol": chosen.protocol["name"],
        "dim": (dim or 0) + measured_size(beside),
        "rounds": rounds,
        "min_clients": min_clients,
        "max_clients": max_clients,
        "eps": chosen.privacy.eps,
        "delta": chosen.privacy.delta,
        "colluders": colluders,
    }
    made = TrainingTask(
        name=chosen.task.name,
        settings=calibrated(settings=settings, aggregators=len(aggregator or ()) or None, **fields),
        round_seconds=round_seconds,
        measures=beside,
        held_out=held_out,
        analyzer=read_record(analyzer, PublicKey, "a public key"),
        shufflers=tuple(read_record(path, ServiceKeys, "a shuffler's public keys") for path in shuffler or ()),
        aggregators=tuple(read_record(path, ServiceKeys, "an aggregator's public keys") for path in aggregator or ()),
        **fields,
    )
    signed = sign(made, KeyRing(signer, "sign").current())
    write_atomically(out, msgspec.json.encode(signed))
    out_console.print(f"task {made.task_id.hex()}, signed by {signed.signer.key_id.hex()}", highlight=False)
    print_costs(*cost(made, made.rounds))


@task.command("show")
def task_show(
    path: Annotated[Path, typer.Argument(help="A signed task.")],
    signer: Annotated[str | None, typer.Option(help="Refuse a task that another key signed.", metavar="HEX")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what a task asks for, and its privacy cost per user."""
    import msgspec

    from dovetail.parties.common.costs import cost
    from dovetail.parties.common.records import read_record
    from dovetail.parties.common.task import SignedTask, verify

    signed = read_record(path, SignedTask, "a signed task")
    made = verify(signed, signer=signed.signer.key_id if signer is None else from_hex(signer))
    certified, local = cost(made, made.rounds)
    if as_json:
        facts = {"certified": certified.to_json(), "without_trust": local.to_json()}
        print_json({"task": json.loads(msgspec.json.encode(made)), **facts})
        return
    words = f"{made.name} by {made.protocol}, {made.rounds} rounds of {made.min_clients} to {made.max_clients} users"
    out_console.print(f"task {made.task_id.hex()}, signed by {signed.signer.key_id.hex()}", highlight=False)
    kind = "shufflers" if made.shufflers else "aggregators"
    out_console.print(f"{words}, {len(made.intermediaries)} {kind}", highlight=False)
    print_costs(certified, local)
