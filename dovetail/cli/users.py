"""Commands of the users: `client` and `fleet`."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dovetail.cli._shared import (
    Authority,
    JsonFlag,
    Overrides,
    err_console,
    flag,
    from_hex,
    listens,
    out_console,
    print_costs,
    print_json,
)

__all__ = ["client", "fleet"]

client = typer.Typer(help="Take part as a user.", no_args_is_help=True)
fleet = typer.Typer(help="Run a whole fleet on this machine.", no_args_is_help=True)

ConfigFile = Annotated[
    str, typer.Option("--config", help="A TOML file or a preset, for data, model and local training.")
]
Ceiling = Annotated[float | None, typer.Option(help="Largest eps that this user accepts; default: no limit.")]


@client.command("new")
def client_new(
    folder: Annotated[Path, typer.Argument(help="The user's new folder, for key.json, policy.json and public.json.")],
    signer: Annotated[str, typer.Option(help="Id of the key that signs tasks.", metavar="HEX")],
    analyzer: Annotated[str, typer.Option(help="Id of the analyzer's key.", metavar="HEX")],
    min_clients: Annotated[int, typer.Option(min=1, help="Minimum number of honest users per round.")],
    eps_round: Ceiling = None,
    eps_task: Ceiling = None,
    eps_lifetime: Ceiling = None,
    eps_local: Ceiling = None,
    delta_lifetime: Annotated[float, typer.Option(help="Total delta over all tasks.")] = 1e-4,
    epoch_seconds: Annotated[float, typer.Option(help="Minimum number of seconds between two reports.")] = 0.0,
) -> None:
    """Create a user: its key and its policy. Key ids are pinned here and never taken from a message."""
    import msgspec

    from dovetail.parties.common.keys import KeyPair
    from dovetail.parties.common.policy import Policy

    os.umask(0o077)
    policy = Policy(
        signer=from_hex(signer),
        analyzer=from_hex(analyzer),
        min_clients=min_clients,
        eps_round=eps_round,
        eps_task=eps_task,
        eps_lifetime=eps_lifetime,
        eps_local=eps_local,
        delta_lifetime=delta_lifetime,
        epoch_seconds=epoch_seconds,
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (folder / "key.json").exists():
        raise ValueError(f"expected a folder without a user, got {str(folder)!r}, which already holds one")
    pair = KeyPair.generate("sign")
    pair.save(folder / "key.json")
    (folder / "policy.json").write_bytes(msgspec.json.encode(policy))
    (folder / "public.json").write_bytes(msgspec.json.encode(pair.public))
    out_console.print(f"user {pair.public.key_id.hex()}", highlight=False)


@client.command("enrol")
def client_enrol(
    clients: Annotated[Path, typer.Argument(help="The shuffler's list of users (a JSON file).")],
    public: Annotated[list[Path], typer.Argument(help="Users' public.json files.")],
) -> None:
    """Add users to the list that a shuffler accepts uploads from; restart the shuffler afterwards."""
    import msgspec

    from dovetail.files import write_atomically
    from dovetail.parties.common.keys import PublicKey
    from dovetail.parties.common.records import read_record
    from dovetail.parties.http.shuffler import read_enrolled

    known = read_enrolled(clients) if clients.exists() else {}
    for path in public:
        key = read_record(path, PublicKey, "a public key")
        known[key.key_id] = key
    write_atomically(clients, msgspec.json.encode(list(known.values())))
    out_console.print(f"{len(known)} users in {clients}", highlight=False)


@client.command("run")
def client_run(
    folder: Annotated[
        Path, typer.Argument(help="Parent of the users' folders: user-<number> with key.json and policy.json.")
    ],
    shuffler: Annotated[list[str], typer.Option(help="Address of a shuffler; repeat in the order of the task.")],
    config: ConfigFile,
    users: Annotated[str, typer.Option(help="The users that this process runs, such as 0 or 0,2,4.")] = "0",
    ca: Authority = None,
    patience: Annotated[float, typer.Option(help="Seconds without an answer before giving up.")] = 60.0,
) -> None:
    """Take part until the training ends: train, randomize, seal and upload."""
    from dovetail.experiment import config as configs
    from dovetail.parties.common.keys import KeyPair
    from dovetail.parties.common.links import ShufflerLink
    from dovetail.parties.common.policy import Policy
    from dovetail.parties.federation import federation
    from dovetail.parties.user.client import Client, take_part

    os.umask(0o077)
    numbers = _numbers(users)
    learned = federation(configs.read(config))
    failures: list[BaseException] = []

    def take(user: int) -> None:
        home = folder / f"user-{user}"
        try:
            key = KeyPair.load(home / "key.json")
            party = Client(home, policy=Policy.read(home / "policy.json"), key=key)
            links = [ShufflerLink(url, index=i, ca=ca, key=key) for i, url in enumerate(shuffler)]
            reported = take_part(party, links, learned.train(user), patience=patience)
            err_console.print(f"user {user} reported in {reported} rounds", highlight=False)
        except Exception as error:  # a thread would swallow it
            failures.append(error)

    threads = [threading.Thread(target=take, args=(user,)) for user in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures and not isinstance(failures[0], ValueError | OSError):
        raise failures[0]
    if failures:
        raise ValueError(str(failures[0]))


@client.command("agent")
def client_agent(
    folder: Annotated[Path, typer.Option(help="The user's folder, with key.json and policy.json.")],
    socket: Annotated[Path, typer.Option(help="The Unix socket to serve on.")],
    group: Annotated[bool, flag("--group", "Let the socket's group use it too.")] = False,
) -> None:
    """Serve a Unix socket that takes an update and returns it randomized and sealed, for apps that run on this node."""
    from dovetail.parties.common.keys import KeyPair
    from dovetail.parties.common.policy import Policy
    from dovetail.parties.user.agent import serve_agent
    from dovetail.parties.user.client import Client

    os.umask(0o077)
    party = Client(folder, policy=Policy.read(folder / "policy.json"), key=KeyPair.load(folder / "key.json"))
    listens("agent")(str(socket))
    serve_agent(party, socket, group=group)


@fleet.command("demo")
def fleet_demo(
    clients: Annotated[int, typer.Option(min=2, help="Number of users.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 3,
    protocol: Annotated[str, typer.Option(help="privunit, ss_topk, split_and_mix, ...")] = "privunit",
    shufflers: Annotated[int | None, typer.Option(min=1, help="Number of shuffler processes.")] = None,
    set_: Overrides = None,
    folder: Annotated[Path | None, typer.Option(help="Keep everything in this new folder.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that run the users.")] = 2,
    seconds: Annotated[float, typer.Option(help="Seconds after which to give up.")] = 1800.0,
    as_json: JsonFlag = False,
) -> None:
    """Start users, shufflers and an analyzer as processes with TLS on this machine, train, and print who saw what."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from dovetail.parties.demo import demo_config, transcript
    from dovetail.parties.fleet import Fleet, set_up

    chosen = demo_config(protocol, clients=clients, overrides=set_ or [])
    with tempfile.TemporaryDirectory(prefix="dovetail-fleet-") as temporary:
        with err_console.status("making keys, certificates and the task"):
            home = folder or Path(temporary) / "fleet"
            deployment = set_up(home, chosen, rounds=rounds, clients=clients, shufflers=shufflers)
        bar = Progress(TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), console=err_console, transient=True)
        with bar, Fleet(deployment) as running:
            line = bar.add_task("rounds", total=rounds)
            running.start(processes=processes)
            facts = running.follow(seconds=seconds, observe=lambda done, _: bar.update(line, completed=done))
            saw = transcript(running, facts)
    if as_json:
        print_json({"privacy": facts, "transcript": saw})
        return
    table = Table(title="who saw what", show_lines=True)
    for heading in ("party", "holds", "saw", "did not see"):
        table.add_column(heading)
    for row in saw:
        table.add_row(row["party"], row["holds"], row["saw"], row["never"])
    out_console.print(table)
    _print_outcome(facts)


def _print_outcome(facts: dict[str, Any]) -> None:
    from dovetail.statements import Statement

    released = [one for one in facts["history"] if one["accuracy"] is not None]
    if released:
        out_console.print(
            f"test accuracy {released[-1]['accuracy']:.2%} after {len(facts['history'])} rounds "
            f"({len(released)} released)",
            highlight=False,
        )
    statement = Statement.from_json(facts["statement"])
    if statement.unbounded:
        out_console.print("not certified", highlight=False)
    print_costs(statement, Statement.from_json(facts["without_trust"]))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"expected user numbers such as 0 or 0,2,4, got {text!r}") from error
