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

task = typer.Typer(help="Describe a training that parties agree on, and see what it costs.", no_args_is_help=True)

TaskFile = Annotated[Path, typer.Option("--task", help="The signed task (dovetail task new).")]
Signer = Annotated[str, typer.Option(help="The id of the key that must have signed the task.", metavar="HEX")]
Keys = Annotated[Path, typer.Option(help="The folder of this party's keys (dovetail keys).")]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free one.")]
Certificate = Annotated[Path | None, typer.Option(help="The TLS certificate, PEM.")]
PrivateKey = Annotated[Path | None, typer.Option(help="Its private key, PEM.")]
Plain = Annotated[bool, flag("--plain", "Serve without TLS (behind a proxy that has it).")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that seal and open messages.")]


def keys(
    folder: Annotated[Path, typer.Argument(help="Where the key goes; files that their owner alone can read.")],
    use: Annotated[str, typer.Option(help='"seal" (analyzer) or "sign" (task owner, shuffler, client).')] = "sign",
    days: Annotated[int, typer.Option(min=1, help="Days until it expires.")] = 365,
    tls: Annotated[str | None, typer.Option(help="Make TLS certificates for this host instead.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key pair; older ones in the folder stay until their rounds are closed."""
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
    out: Annotated[Path, typer.Option(help="Where the signed task goes.")],
    signer: Annotated[Path, typer.Option(help="The folder of the key to sign with.")],
    analyzer: Annotated[Path, typer.Option(help="The analyzer's public key (public-seal-....json).")],
    shuffler: Annotated[list[Path], typer.Option(help="A shuffler's public key; once for each.")],
    min_clients: Annotated[int, typer.Option(min=1, help="Fewer users in a round: nothing leaves the shuffler.")],
    max_clients: Annotated[int, typer.Option(min=1, help="More users are not let into a round.")],
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds there are.")],
    round_seconds: Annotated[float, typer.Option(help="How long a round is open.")] = 3600.0,
    colluders: Annotated[int, typer.Option(min=0, help="Users that are assumed to be fake or to collude.")] = 0,
    dim: Annotated[int | None, typer.Option(min=1, help="Parameters of a model that the config does not name.")] = None,
    set_: Overrides = None,
) -> None:
    """Describe a training and sign it; noise that is not given is calibrated to the budget."""
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
    signer: Annotated[str | None, typer.Option(help="Refuse other signers.", metavar="HEX")] = None,
    as_json: JsonFlag = False,
) -> None:
    """What a task asks for, and what it costs a user."""
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
    folder: Annotated[Path, typer.Argument(help="Where it keeps its ledger and its models.")],
    task: TaskFile,
    signer: Signer,
    keys: Keys,
    config: Annotated[str | None, typer.Option(help="A TOML file or a preset: model, server, test data.")] = None,
    model: Annotated[Path | None, typer.Option(help="Or the first model: a .npy file, one flat vector.")] = None,
    learning_rate: Annotated[float, typer.Option(help="The server's step, with --model.")] = 1.0,
    host: Host = "127.0.0.1",
    port: Port = 8443,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    plain: Plain = False,
    workers: Workers = 2,
    grace: Annotated[float, typer.Option(help="Seconds to wait for shufflers after a round's time is up.")] = 600.0,
) -> None:
    """Serve the analyzer of a task: opens what shufflers hand on, releases models that are paid for."""
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
    folder: Annotated[Path, typer.Argument(help="Where it keeps uploads until they are handed on.")],
    task: TaskFile,
    signer: Signer,
    keys: Keys,
    analyzer: Annotated[str, typer.Option(help="The analyzer's address.", metavar="URL")],
    clients: Annotated[Path, typer.Option(help="The public keys of the users that may report, a JSON list.")],
    index: Annotated[int, typer.Option(min=0, help="Which of the task's shufflers this is.")] = 0,
    peer: Annotated[list[str] | None, typer.Option(help="Another shuffler's address; once for each.")] = None,
    ca: Authority = None,
    host: Host = "127.0.0.1",
    port: Port = 8444,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    plain: Plain = False,
    workers: Workers = 1,
) -> None:
    """Serve a shuffler of a task: takes sealed reports, hands them on in no order and without names."""
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
        raise ValueError(f"expected --index below {len(named)}, the task's shufflers, got {index}")
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
        raise ValueError("expected --config or --model, got both or neither")
    if config is not None:
        return federation(configs.read(config)).learning()
    try:
        initial = np.load(model, allow_pickle=False)  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a .npy file with one vector, got {str(model)!r} ({error})") from error
    return Learning(initial=np.asarray(initial, np.float32), server=Server(learning_rate=learning_rate))


def _refuse_half_tls(certificate: Path | None, private_key: Path | None, plain: bool) -> None:
    if (certificate is None) != (private_key is None) or (certificate is None) != plain:
        raise ValueError("expected --certificate with --private-key, or --plain, got neither or both")
