"""Commands of the services: `keys`, `task`, `analyzer`, `shuffler`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli._shared import (
    Authority,
    JsonFlag,
    Overrides,
    flag,
    from_hex,
    listens,
    out_console,
    print_costs,
    print_json,
)

__all__ = ["analyzer", "keys", "shuffler", "task"]

task = typer.Typer(help="Create and inspect a task: the training that all parties agree on.", no_args_is_help=True)

TaskFile = Annotated[Path, typer.Option("--task", help="The signed task, made by `dovetail task new`.")]
Signer = Annotated[str, typer.Option(help="Id of the key that must have signed the task.", metavar="HEX")]
Keys = Annotated[Path, typer.Option(help="Folder with this party's keys, made by `dovetail keys`.")]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free port.")]
Certificate = Annotated[Path | None, typer.Option(help="TLS certificate (PEM).")]
PrivateKey = Annotated[Path | None, typer.Option(help="Private key of the TLS certificate (PEM).")]
Plain = Annotated[bool, flag("--plain", "Serve without TLS, behind a proxy that terminates it.")]
Workers = Annotated[int, typer.Option(min=1, help="Number of processes that seal and open messages.")]


def keys(
    folder: Annotated[Path, typer.Argument(help="Folder for the key; only its owner can read the files.")],
    use: Annotated[str, typer.Option(help='"seal" (analyzer) or "sign" (task owner, shuffler, client).')] = "sign",
    days: Annotated[int, typer.Option(min=1, help="Days until the key expires.")] = 365,
    tls: Annotated[str | None, typer.Option(help="Instead, make a TLS certificate for this host.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key pair. Older keys in the folder stay valid until their rounds are closed."""
    import msgspec

    from dovetail import _validate
    from dovetail.parties.common.certificates import Certified, make_authority, make_certificate
    from dovetail.parties.common.keys import KeyRing

    if tls is not None:
        there = Certified(folder / "authority.crt", folder / "authority.key")
        made = make_certificate(folder, there if there.private_key.exists() else make_authority(folder), host=tls)
        facts: dict[str, Any] = {"certificate": str(made.certificate), "private_key": str(made.private_key)}
        facts["authority"] = str(there.certificate)
    else:
        _validate.one_of(("seal", "sign"), use=use)
        public = KeyRing(folder, "seal" if use == "seal" else "sign").add(days=days).public
        path = folder / f"public-{use}-{public.key_id.hex()}.json"
        path.write_bytes(msgspec.json.encode(public))
        facts = {"id": public.key_id.hex(), "use": use, "public": str(path), "expires": public.expires}
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
    shuffler: Annotated[list[Path], typer.Option(help="Public key of a shuffler; repeat for each one.")],
    min_clients: Annotated[
        int, typer.Option(min=1, help="Minimum number of users per round; below it the shuffler forwards nothing.")
    ],
    max_clients: Annotated[int, typer.Option(min=1, help="Maximum number of users per round.")],
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")],
    round_seconds: Annotated[float, typer.Option(help="Seconds that a round stays open.")] = 3600.0,
    colluders: Annotated[int, typer.Option(min=0, help="Number of users assumed to be fake or to collude.")] = 0,
    dim: Annotated[
        int | None, typer.Option(min=1, help="Number of model parameters, if the config names no model.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Create and sign a task. Noise that is not given is calibrated to the budget."""
    import msgspec

    from dovetail.experiment import config as configs
    from dovetail.files import write_atomically
    from dovetail.parties.common.keys import KeyRing, PublicKey
    from dovetail.parties.common.records import read_record
    from dovetail.parties.common.task import TrainingTask, calibrated, cost, sign
    from dovetail.parties.federation import federation

    chosen = configs.read(config, [configs.parse_override(text) for text in set_ or []])
    settings = chosen.protocol_settings
    fields = {
        "protocol": chosen.protocol["name"],
        "dim": federation(chosen).dim if dim is None else dim,
        "rounds": rounds,
        "min_clients": min_clients,
        "max_clients": max_clients,
        "eps": chosen.privacy.eps,
        "delta": chosen.privacy.delta,
        "colluders": colluders,
    }
    made = TrainingTask(
        name=chosen.task.name,
        settings=calibrated(settings=settings, **fields),
        round_seconds=round_seconds,
        analyzer=read_record(analyzer, PublicKey, "a public key"),
        shufflers=tuple(read_record(path, PublicKey, "a public key") for path in shuffler),
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

    from dovetail.parties.common.records import read_record
    from dovetail.parties.common.task import SignedTask, cost, verify

    signed = read_record(path, SignedTask, "a signed task")
    made = verify(signed, signer=signed.signer.key_id if signer is None else from_hex(signer))
    certified, local = cost(made, made.rounds)
    if as_json:
        facts = {"certified": certified.to_json(), "without_trust": local.to_json()}
        print_json({"task": json.loads(msgspec.json.encode(made)), **facts})
        return
    words = f"{made.name} by {made.protocol}, {made.rounds} rounds of {made.min_clients} to {made.max_clients} users"
    out_console.print(f"task {made.task_id.hex()}, signed by {signed.signer.key_id.hex()}", highlight=False)
    out_console.print(f"{words}, {len(made.shufflers)} shufflers", highlight=False)
    print_costs(certified, local)


def analyzer(
    folder: Annotated[Path, typer.Argument(help="Folder for the ledger and the models.")],
    task: TaskFile,
    signer: Signer,
    keys: Keys,
    config: Annotated[str | None, typer.Option(help="A TOML file or a preset: model, server, test data.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Instead of --config: the initial model, a .npy file with one flat vector.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="With --model: the server's learning rate.")] = 1.0,
    host: Host = "127.0.0.1",
    port: Port = 8443,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    plain: Plain = False,
    workers: Workers = 2,
    grace: Annotated[float, typer.Option(help="Seconds to wait for shufflers after a round has ended.")] = 600.0,
) -> None:
    """Run the analyzer of a task: it opens shuffled reports and releases models within the privacy budget."""
    from dovetail.parties.analyzer.rounds import Analyzer
    from dovetail.parties.common.keys import KeyRing
    from dovetail.parties.common.records import read_record
    from dovetail.parties.common.task import SignedTask
    from dovetail.parties.http.analyzer import AnalyzerService

    os.umask(0o077)
    _refuse_half_tls(certificate, private_key, plain)
    party = Analyzer(
        folder,
        signed=read_record(task, SignedTask, "a signed task"),
        signer=from_hex(signer),
        keys=KeyRing(keys, "seal"),
        learning=_learning(config, model, learning_rate),
        workers=workers,
    )
    app = AnalyzerService(party, grace=grace).app
    _serve("analyzer", app, party, host=host, port=port, certificate=certificate, private_key=private_key)


def shuffler(
    folder: Annotated[Path, typer.Argument(help="Folder for uploads until they are forwarded.")],
    task: TaskFile,
    signer: Signer,
    keys: Keys,
    analyzer: Annotated[str, typer.Option(help="The analyzer's address.", metavar="URL")],
    clients: Annotated[Path, typer.Option(help="JSON file with the public keys of the enrolled users.")],
    index: Annotated[int, typer.Option(min=0, help="Index of this shuffler in the task, starting at 0.")] = 0,
    peer: Annotated[list[str] | None, typer.Option(help="Address of another shuffler; repeat for each one.")] = None,
    ca: Authority = None,
    host: Host = "127.0.0.1",
    port: Port = 8444,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    plain: Plain = False,
    workers: Workers = 1,
) -> None:
    """Run a shuffler of a task: it collects sealed reports and forwards them permuted and without names."""
    from dovetail.parties.common.keys import KeyRing
    from dovetail.parties.common.links import AnalyzerLink, ShufflerLink
    from dovetail.parties.common.records import read_record
    from dovetail.parties.common.task import SignedTask, verify
    from dovetail.parties.http.shuffler import ShufflerService, read_enrolled
    from dovetail.parties.shuffler.rounds import Shuffler

    os.umask(0o077)
    _refuse_half_tls(certificate, private_key, plain)
    signed = read_record(task, SignedTask, "a signed task")
    named = verify(signed, signer=from_hex(signer), fresh=False).shufflers
    if index >= len(named):
        raise ValueError(f"expected --index below {len(named)}, the number of shufflers in the task, got {index}")
    key = KeyRing(keys, "sign").find(named[index].key_id)
    party = Shuffler(folder, signed=signed, signer=from_hex(signer), index=index, key=key, workers=workers)
    service = ShufflerService(
        party,
        enrolled=read_enrolled(clients),
        analyzer=AnalyzerLink(analyzer, ca=ca, key=key),
        peers=[ShufflerLink(url, ca=ca, key=key) for url in peer or []],
    )
    _serve("shuffler", service.app, party, host=host, port=port, certificate=certificate, private_key=private_key)


def _serve(name: str, app: Any, party: Any, **where: Any) -> None:
    """Until told to stop; then the party lets go of its files."""
    from dovetail.parties.http._http import serve

    try:
        serve(app, ready=listens(name), **where)
    finally:
        party.shut()


def _learning(config: str | None, model: Path | None, learning_rate: float) -> Any:
    import numpy as np

    from dovetail.experiment import config as configs
    from dovetail.learners.server import Server
    from dovetail.parties.analyzer.learning import Learning
    from dovetail.parties.federation import federation

    if (config is None) == (model is None):
        raise ValueError("expected exactly one of --config and --model, got both or neither")
    if config is not None:
        return federation(configs.read(config)).learning()
    try:
        initial = np.load(model, allow_pickle=False)  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a .npy file with one vector, got {str(model)!r} ({error})") from error
    return Learning(initial=np.asarray(initial, np.float32), server=Server(learning_rate=learning_rate))


def _refuse_half_tls(certificate: Path | None, private_key: Path | None, plain: bool) -> None:
    if (certificate is None) != (private_key is None) or (certificate is None) != plain:
        raise ValueError("expected either --certificate with --private-key or --plain, got neither or both")
