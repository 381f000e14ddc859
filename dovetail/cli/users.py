"""Commands of the users: `client`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli._shared import Authority, address_printer, err_console, flag, key_id_from, out_console, print_error

if TYPE_CHECKING:
    from dovetail.parties.user.policy import Policy

__all__ = ["client"]

client = typer.Typer(name="client", help="Take part as a user.", no_args_is_help=True)

ConfigFile = Annotated[
    str, typer.Option("--config", help="A TOML file or a preset, for data, model and local training.")
]
Pinned = Annotated[
    list[str] | None,
    typer.Option(help="Id of a service of this kind that the user trusts; repeat for each.", metavar="HEX|FILE"),
]
WitnessFolder = Annotated[
    Path | None,
    typer.Option(
        envvar="DOVETAIL_WITNESS",
        help="Folder of rollback guards, which remember what was spent: on another disk or another backup than the "
        "users' folders.",
    ),
]
UserFolder = Annotated[Path, typer.Argument(help="The user's folder, with key.json.")]


def _ceiling_option(of: str, default: str = "default: no limit of its own") -> Any:
    return typer.Option(help=f"Largest eps {of}; {default}.")


@client.command("new")
def client_new(
    folder: Annotated[
        list[Path],
        typer.Argument(help="The user's new folder, for key.json, policy.json and public.json; or one per user."),
    ],
    signer: Annotated[str, typer.Option(help="Id of the key that signs tasks.", metavar="HEX|FILE")],
    analyzer: Annotated[str, typer.Option(help="Id of the analyzer's key.", metavar="HEX|FILE")],
    min_clients: Annotated[int, typer.Option(min=1, help="Minimum number of honest users per round.")],
    eps_round: Annotated[float | None, _ceiling_option("of one round")] = None,
    eps_task: Annotated[float | None, _ceiling_option("of all rounds of a task")] = None,
    eps_lifetime: Annotated[float, _ceiling_option("of all tasks together", "inf: no limit")] = 10.0,
    eps_local: Annotated[float | None, _ceiling_option("of all rounds of a task if nobody is trusted")] = None,
    delta_lifetime: Annotated[float, typer.Option(help="Total delta over all tasks.")] = 1e-4,
    epoch_seconds: Annotated[float, typer.Option(help="Minimum number of seconds between two reports.")] = 0.0,
    shuffler: Pinned = None,
    aggregator: Pinned = None,
    any_service: Annotated[
        bool, flag("--any-service", "Trust whichever shufflers or aggregators a task names: its signer's word alone.")
    ] = False,
    recovery: Annotated[
        str | None,
        typer.Option(help="Id of the key that can revoke the signer's, if that is stolen.", metavar="HEX|FILE"),
    ] = None,
    verified: Annotated[bool, flag("--verified", "Take part only where aggregators verify what users share.")] = False,
    follow_rotations: Annotated[
        bool, flag("--follow-rotations", "Let pinned keys stand for the successors that the signer announces.")
    ] = False,
) -> None:
    """Create a user: its key and its policy. Key ids are pinned here and never taken from a message.

    A user trusts only the shufflers and aggregators named here, and spends at most eps 10 over all tasks, unless told
    otherwise (--any-service, --eps-lifetime).
    """
    import math

    from dovetail.parties.user.policy import Policy

    os.umask(0o077)
    names_services = shuffler is not None or aggregator is not None
    if names_services == any_service:
        raise ValueError(
            "name the services that this user trusts, each by --aggregator FILE or --shuffler FILE, or give "
            "--any-service to trust whichever the signer names: one of the two"
        )
    policy = Policy(
        signer=key_id_from(signer),
        analyzer=key_id_from(analyzer),
        min_clients=min_clients,
        eps_round=eps_round,
        eps_task=eps_task,
        eps_lifetime=None if math.isinf(eps_lifetime) else eps_lifetime,
        eps_local=eps_local,
        delta_lifetime=delta_lifetime,
        epoch_seconds=epoch_seconds,
        shufflers=tuple(key_id_from(text) for text in shuffler or ()) if names_services else None,
        aggregators=tuple(key_id_from(text) for text in aggregator or ()) if names_services else None,
        recovery=None if recovery is None else key_id_from(recovery),
        verified=verified,
        follow_rotations=follow_rotations,
    )
    for home in folder:
        if (home / "key.json").exists():
            raise ValueError(f"{str(home)!r} already holds a user (key.json): name a new folder")
    for home in folder:
        out_console.print(f"user {_make_user(home, policy)}", highlight=False)
    most = "any eps" if policy.eps_lifetime is None else f"at most eps {policy.eps_lifetime:g}"
    words = f"spends {most} over all tasks, at a total delta of at most {policy.delta_lifetime:g}"
    err_console.print(f"{words} (--eps-lifetime, --delta-lifetime)", highlight=False)
    if policy.recovery is None:
        err_console.print(
            "pins no recovery key: if the signer's key is stolen, users need a new policy (--recovery pins one)",
            highlight=False,
        )


def _make_user(folder: Path, policy: Policy) -> str:
    """Write a user's files with a fresh key; the key's id."""
    import msgspec

    from dovetail.parties.common.keys import KeyPair

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    pair = KeyPair.generate("sign")
    pair.save(folder / "key.json")
    (folder / "policy.json").write_bytes(msgspec.json.encode(policy))
    (folder / "public.json").write_bytes(msgspec.json.encode(pair.public))
    return pair.public.key_id.hex()


@client.command("enrol")
def client_enrol(
    clients: Annotated[Path, typer.Argument(help="The list of users of a shuffler or aggregator (a JSON file).")],
    public: Annotated[
        list[Path], typer.Argument(help="Users' public.json files, or rotation-....json files of new keys.")
    ],
) -> None:
    """Add users to the list that a service accepts uploads from; a running service notices within two seconds."""
    from dovetail.parties.intermediary.enrolment import enrol

    out_console.print(f"{enrol(clients, public)} users in {clients}", highlight=False)


@client.command("revoke")
def client_revoke(
    clients: Annotated[Path, typer.Argument(help="The list of users of a shuffler or aggregator (a JSON file).")],
    user: Annotated[list[str], typer.Argument(help="Ids of users' keys, or their public.json.", metavar="HEX|FILE")],
) -> None:
    """Take users off the list that a service accepts uploads from; a running service notices within two seconds."""
    from dovetail.parties.intermediary.enrolment import revoke

    count = revoke(clients, [key_id_from(text) for text in user])
    out_console.print(f"{count} users in {clients}", highlight=False)


@client.command("rotate")
def client_rotate(
    folder: UserFolder,
    days: Annotated[int, typer.Option(min=1, help="Days until the new key expires.")] = 365,
) -> None:
    """Replace a user's key by a new one; its ledgers stay. Give rotation-....json to those who enrolled the user."""
    from dovetail.parties.user.client import rotate_user

    os.umask(0o077)
    out_console.print(f"user {rotate_user(folder, days=days).hex()}", highlight=False)


@client.command("mend")
def client_mend(
    folder: UserFolder,
    witness: WitnessFolder = None,
) -> None:
    """Give up the tasks whose ledgers were set back, so that others can go on. What was spent on them stays spent."""
    from dovetail.parties.common.keys import KeyPair
    from dovetail.parties.user.client import rollback_guard_of
    from dovetail.parties.user.spending import default_guard_folder

    key = KeyPair.load(_require_user(folder) / "key.json")
    for task in rollback_guard_of(folder, key, witness or default_guard_folder()).give_up(folder / "spending"):
        out_console.print(f"gave up task {task}", highlight=False)


@client.command("leave")
def client_leave(
    folder: UserFolder,
    task: Annotated[list[str], typer.Argument(help="Ids of tasks, or their task.json.", metavar="HEX|FILE")],
) -> None:
    """Leave tasks: this user reports to them no more. What was spent on them stays spent."""
    from dovetail.parties.user.consent import leave_tasks, task_id_from

    consent = leave_tasks(_require_user(folder), list(map(task_id_from, task)))
    out_console.print(f"left {len(consent.left)} tasks", highlight=False)


@client.command("refuse")
def client_refuse(
    folder: UserFolder,
    kind: Annotated[list[str], typer.Argument(help="Names of tasks or of protocols.", metavar="NAME...")],
) -> None:
    """Refuse kinds of task for ever: every task with this name, or with this protocol."""
    from dovetail.parties.user.consent import Consent

    consent = Consent.read(_require_user(folder))
    consent.refused += [name for name in kind if name not in consent.refused]
    consent.write(folder)
    out_console.print(f"refuses {', '.join(consent.refused)}", highlight=False)


@client.command("spent")
def client_spent(
    folder: UserFolder, witness: WitnessFolder = None, as_json: Annotated[bool, flag("--json", "Print JSON.")] = False
) -> None:
    """Print what this user has spent, task by task, and on whom."""
    import json

    from dovetail.numbers import at_most
    from dovetail.parties.common.keys import KeyPair
    from dovetail.parties.user.client import rollback_guard_of
    from dovetail.parties.user.consent import spending_by_task
    from dovetail.parties.user.spending import default_guard_folder

    key = KeyPair.load(_require_user(folder) / "key.json")
    rows = spending_by_task(folder, rollback_guard_of(folder, key, witness or default_guard_folder()))
    if as_json:
        out_console.print_json(json.dumps(rows))
        return
    if not rows:
        out_console.print("nothing was spent")
    for row in rows:
        pair = None if row["eps"] is None else f"({at_most(row['eps'])}, {at_most(row['delta'])})-DP {row['means']}"
        words = [f"task {row['task'][:16]}", row["name"] or "unknown", f"analyzer {row['analyzer'] or 'unknown'}"]
        words += [_rounds_in_words(row["rounds"]), pair or "without a guarantee"]
        words += [word for word, key in (("left", "left"), ("set back", "set_back")) if row[key]]
        out_console.print("; ".join(words), highlight=False, markup=False, soft_wrap=True)


def _require_user(folder: Path) -> Path:
    if not (folder / "key.json").is_file():
        raise FileNotFoundError(f"{str(folder)!r} holds no user (key.json): make one with dovetail client new")
    return folder


@client.command("run")
def client_run(
    folder: Annotated[
        Path, typer.Argument(help="Parent of the users' folders: user-<number> with key.json and policy.json.")
    ],
    service: Annotated[
        list[str], typer.Option(help="Address of a shuffler or aggregator; repeat in the order of the task.")
    ],
    config: ConfigFile,
    users: Annotated[str, typer.Option(help="The users that this process runs, such as 0 or 0,2,4.")] = "0",
    ca: Authority = None,
    patience: Annotated[float, typer.Option(help="Seconds without an answer before giving up.")] = 60.0,
    witness: WitnessFolder = None,
    hostile: Annotated[str, typer.Option(help="Users that do not clip, for demonstrations.", hidden=True)] = "",
) -> None:
    """Take part until the training ends: train, randomize, seal and upload."""
    from dovetail.experiment import config as configs
    from dovetail.parties.common.http_clients import IntermediaryClient, tls_context
    from dovetail.parties.common.keys import KeyPair
    from dovetail.parties.federation import load_federation
    from dovetail.parties.user.client import Client
    from dovetail.parties.user.hostile import HostileClient
    from dovetail.parties.user.participation import Participation, take_part_together
    from dovetail.parties.user.policy import Policy

    os.umask(0o077)
    numbers = _parse_numbers(users)
    hostile_numbers = _parse_numbers(hostile) if hostile else []
    tls = tls_context(ca)
    learned = load_federation(configs.read(config))

    def participation(user: int) -> Participation:
        home = folder / f"user-{user}"
        kind = HostileClient if user in hostile_numbers else Client
        policy = Policy.read(home / "policy.json")
        key = KeyPair.load(home / "key.json")
        party = kind(home, policy=policy, key=key, witness=True if witness is None else witness)
        services = [IntermediaryClient(url, index=index, ca=tls) for index, url in enumerate(service)]
        return Participation(party, services, learned.train(user), measure=learned.measure(user), patience=patience)

    participations = {user: participation(user) for user in numbers}
    user_of = {each: user for user, each in participations.items()}

    try:
        take_part_together(
            participations.values(), failed=lambda failed, why: print_error(f"user {user_of[failed]}: {why}")
        )
    except (ValueError, OSError) as error:  # printed by then
        raise typer.Exit(2) from error
    finally:
        for user, each in participations.items():
            ended = "; the task was withdrawn" if each.is_withdrawn else ""
            err_console.print(f"user {user} reported in {_rounds_in_words(each.reported)}{ended}", highlight=False)


@client.command("agent")
def client_agent(
    folder: Annotated[Path, typer.Option(help="The user's folder, with key.json and policy.json.")],
    socket: Annotated[Path, typer.Option(help="The Unix socket to serve on.")],
    group: Annotated[bool, flag("--group", "Let the socket's group use it too.")] = False,
    witness: WitnessFolder = None,
) -> None:
    """Serve a Unix socket that takes an update and returns it randomized and sealed, for apps on this node."""
    from dovetail.parties.common.keys import KeyPair
    from dovetail.parties.user.agent import serve_agent
    from dovetail.parties.user.client import Client
    from dovetail.parties.user.policy import Policy

    os.umask(0o077)
    policy = Policy.read(folder / "policy.json")
    key = KeyPair.load(folder / "key.json")
    party = Client(folder, policy=policy, key=key, witness=True if witness is None else witness)
    address_printer("agent")(str(socket))
    serve_agent(party, socket, group=group)


def _rounds_in_words(count: int) -> str:
    return f"{count} round{'' if count == 1 else 's'}"


def _parse_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{text!r} are no numbers of users: write 0 or 0,2,4") from error
