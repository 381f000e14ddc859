"""Commands of the services: `analyzer`, `shuffler`, `aggregator`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli._shared import (
    Authority,
    address_printer,
    err_console,
    flag,
    key_id_from,
)

__all__ = ["aggregator", "analyzer", "shuffler"]

TaskFile = Annotated[Path, typer.Option("--task", help="The signed task, made by `dovetail task new`.")]
Signer = Annotated[str, typer.Option(help="Id of the key that must have signed the task.", metavar="HEX|FILE")]
Recovery = Annotated[
    str | None, typer.Option(help="Id of the key that can revoke the signer's, if there is one.", metavar="HEX|FILE")
]
Keys = Annotated[Path, typer.Option(help="Folder with this party's keys, made by `dovetail keys`.")]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free port.")]
Certificate = Annotated[Path | None, typer.Option(help="TLS certificate (PEM).")]
PrivateKey = Annotated[Path | None, typer.Option(help="Private key of the TLS certificate (PEM).")]
Plain = Annotated[bool, flag("--plain", "Serve without TLS, behind a proxy that terminates it.")]
Workers = Annotated[int, typer.Option(min=1, help="Number of processes that seal and open messages.")]
Folder = Annotated[Path, typer.Argument(help="Folder for uploads until they are forwarded.")]
AnalyzerUrl = Annotated[str, typer.Option(help="The analyzer's address.", metavar="URL")]
Enrolled = Annotated[Path, typer.Option(help="JSON file with the public keys of the enrolled users.")]
Index = Annotated[int, typer.Option(min=0, help="Index of this party among those of its kind in the task, from 0.")]
Store = Annotated[
    str | None,
    typer.Option(
        envvar="DOVETAIL_STORE",
        help="Where state is kept, shared by all replicas: postgresql://... or sqlite:///FOLDER; default: the folder.",
        metavar="URL",
        show_envvar=True,
    ),
]
SegmentsFolder = Annotated[
    Path | None,
    typer.Option(
        envvar="DOVETAIL_SEGMENTS",
        help="With a postgresql:// store: a folder that all replicas reach, for shares; default: the database.",
        show_envvar=True,
    ),
]
NoticesFile = Annotated[
    Path | None, typer.Option(help="The signer's notices (`dovetail task withdraw`), read again when they change.")
]
Doors = Annotated[
    int,
    typer.Option(min=1, help="Number of processes that take uploads; if there are several, one more keeps the rounds."),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Port on this machine for Prometheus metrics; default: no metrics."),
]
JsonLogs = Annotated[bool, flag("--json-logs", "Log as JSON, one object a line.")]
Peers = Annotated[list[str] | None, typer.Option(help="Address of another one of its kind; repeat for each.")]


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
    grace: Annotated[float, typer.Option(help="Seconds to wait for the others after a round has ended.")] = 600.0,
    store: Store = None,
    notices: NoticesFile = None,
    recovery: Recovery = None,
    metrics_port: MetricsPort = None,
    json_logs: JsonLogs = False,
) -> None:
    """Run the analyzer of a task: it opens shuffled reports, or sums, and releases models within the privacy budget."""
    from dovetail.parties.analyzer.party import Analyzer
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.keys import KeyRing
    from dovetail.parties.common.task import SignedTask, verify
    from dovetail.parties.http.analyzer import AnalyzerService

    ready = _prepare_process("analyzer", json_logs)
    _refuse_half_tls(certificate, private_key, plain)
    signed = read_json(task, SignedTask, "a signed task")
    _await_beginning(verify(signed, signer=key_id_from(signer), fresh=False).begins)
    party = Analyzer(
        folder,
        signed=signed,
        signer=key_id_from(signer),
        keys=KeyRing(keys, "seal"),
        learning=_learning_of_options(config, model, learning_rate),
        workers=workers,
        store=store,
    )
    announced = _notices_reader(notices, signer, recovery)
    app = AnalyzerService(party, grace=grace, notices=announced, metrics_port=metrics_port).app
    _serve_until_stopped(
        app, party, ready=ready, host=host, port=port, certificate=certificate, private_key=private_key
    )


def shuffler(
    folder: Folder,
    task: TaskFile,
    signer: Signer,
    keys: Keys,
    analyzer: AnalyzerUrl,
    clients: Enrolled,
    index: Index = 0,
    peer: Peers = None,
    ca: Authority = None,
    host: Host = "127.0.0.1",
    port: Port = 8444,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    plain: Plain = False,
    workers: Workers = 1,
    store: Store = None,
    notices: NoticesFile = None,
    recovery: Recovery = None,
    doors: Doors = 1,
    metrics_port: MetricsPort = None,
    json_logs: JsonLogs = False,
) -> None:
    """Run a shuffler of a task: it collects sealed reports and forwards them permuted and without names."""
    from dovetail.parties.shuffler import Shuffler

    where = {"host": host, "port": port, "certificate": certificate, "private_key": private_key, "plain": plain}
    options: dict[str, Any] = {"workers": workers, "store": store, "notices": notices, "doors": doors}
    options |= {"recovery": recovery, "metrics_port": metrics_port, "json_logs": json_logs}
    _serve_intermediary(Shuffler, folder, task, signer, keys, analyzer, clients, index, peer, ca, where, **options)


def aggregator(
    folder: Folder,
    task: TaskFile,
    signer: Signer,
    keys: Keys,
    analyzer: AnalyzerUrl,
    clients: Enrolled,
    index: Index = 0,
    peer: Peers = None,
    ca: Authority = None,
    host: Host = "127.0.0.1",
    port: Port = 8445,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    plain: Plain = False,
    store: Store = None,
    segments: SegmentsFolder = None,
    notices: NoticesFile = None,
    recovery: Recovery = None,
    doors: Doors = 1,
    metrics_port: MetricsPort = None,
    json_logs: JsonLogs = False,
) -> None:
    """Run an aggregator of a task: it adds up users' shares and forwards nothing but the sum."""
    from dovetail.parties.aggregator.party import Aggregator

    where = {"host": host, "port": port, "certificate": certificate, "private_key": private_key, "plain": plain}
    options: dict[str, Any] = {"store": store, "segments": segments, "notices": notices, "doors": doors}
    options |= {"recovery": recovery, "metrics_port": metrics_port, "json_logs": json_logs}
    _serve_intermediary(Aggregator, folder, task, signer, keys, analyzer, clients, index, peer, ca, where, **options)


def _serve_intermediary(
    kind: Any,
    folder: Path,
    task: Path,
    signer: str,
    keys: Path,
    analyzer: str,
    clients: Path,
    index: int,
    peer: list[str] | None,
    ca: Path | None,
    where: dict[str, Any],
    *,
    notices: Path | None,
    recovery: str | None,
    doors: int,
    metrics_port: int | None,
    json_logs: bool,
    **options: Any,
) -> None:
    """Serve a shuffler or an aggregator (`kind`) as its command says; with several doors, by as many processes."""
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient
    from dovetail.parties.common.keys import ServicePairs
    from dovetail.parties.common.task import SignedTask, verify
    from dovetail.parties.http.intermediary import IntermediaryService
    from dovetail.parties.http.workers import serve_with_workers
    from dovetail.parties.intermediary.enrolment import Enrolled as Listed

    ready = _prepare_process(kind.kind, json_logs)
    _refuse_half_tls(where["certificate"], where["private_key"], where.pop("plain"))
    signed = read_json(task, SignedTask, "a signed task")
    services = kind.service_keys(verify(signed, signer=key_id_from(signer), fresh=False))
    if index >= len(services):
        raise ValueError(f"the task has {len(services)} {kind.kind}s, counted from 0: there is no --index {index}")
    pairs = ServicePairs.find(keys, services[index])
    announced = _notices_reader(notices, signer, recovery)

    def make(**role: Any) -> tuple[Any, IntermediaryService]:
        alone = role.get("coordinates", True)
        party = kind(folder, signed=signed, signer=key_id_from(signer), index=index, keys=pairs, alone=alone, **options)
        return party, IntermediaryService(
            party,
            enrolled=Listed(clients, max_users=party.task.max_clients, services=len(services)),
            notices=announced,
            analyzer=AnalyzerClient(analyzer, ca=ca, key=pairs.sign),
            peers=[IntermediaryClient(url, ca=ca, key=pairs.sign) for url in peer or []],
            metrics_port=metrics_port,
            **role,
        )

    if doors > 1:
        return serve_with_workers(make, doors, ready=ready, **where)
    party, service = make()
    return _serve_until_stopped(service.app, party, ready=ready, **where)


def _serve_until_stopped(app: Any, party: Any, **where: Any) -> None:
    """Serve until the process is stopped; then close the party's files."""
    from dovetail.parties.http.server import serve

    try:
        serve(app, **where)
    finally:
        party.close()


def _await_beginning(begins: int | None) -> None:
    """Wait until users may take part: a round that opened before would be void, and spent."""
    if begins is not None and (wait := begins - time.time()) > 0:
        err_console.print(f"waiting {wait:.0f} seconds until the task begins", highlight=False)
        time.sleep(wait)


def _notices_reader(path: Path | None, signer: str, recovery: str | None) -> Any:
    """A function that gives what the signer has announced in a file, as it is now; None if there is no file."""
    from dovetail.parties.common.files import WatchedFile
    from dovetail.parties.common.notices import read_notices

    key = key_id_from(signer)
    recovery_key = None if recovery is None else key_id_from(recovery)
    return (
        None
        if path is None
        else WatchedFile(path, lambda file: read_notices(file, key, recovery=recovery_key)).current_content
    )


def _prepare_process(name: str, json_logs: bool) -> Callable[[str], None]:
    """Let new files be for their owner alone, and log as asked for.

    Returns: what announces the address that the party listens on.
    """
    from dovetail.parties.http.monitoring import log_as_json

    os.umask(0o077)
    return log_as_json(name) if json_logs else address_printer(name)


def _learning_of_options(config: str | None, model: Path | None, learning_rate: float) -> Any:
    import numpy as np

    from dovetail.experiment import config as configs
    from dovetail.learners.server import Server
    from dovetail.parties.analyzer.learning import Learning
    from dovetail.parties.federation import load_federation

    if (config is None) == (model is None):
        raise ValueError("give either --config or --model, one of the two")
    if config is not None:
        return load_federation(configs.read(config)).learning()
    try:
        initial = np.load(model, allow_pickle=False)  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(model)!r} is not a .npy file with one vector ({error})") from error
    return Learning(initial=np.asarray(initial, np.float32), server=Server(learning_rate=learning_rate))


def _refuse_half_tls(certificate: Path | None, private_key: Path | None, plain: bool) -> None:
    if (certificate is None) != (private_key is None) or (certificate is None) != plain:
        raise ValueError(
            "give --certificate and --private-key, or --plain to serve without TLS behind a proxy that terminates it"
        )
