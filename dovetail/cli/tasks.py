"""Commands around a task: `keys`, `task new`, `task show`, `task withdraw`, `task announce`."""

from __future__ import annotations

import datetime
import json
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli._shared import (
    HeldOut,
    JsonFlag,
    Measures,
    Overrides,
    flag,
    from_hex,
    out_console,
    print_costs,
    print_json,
    public_key,
)
from dovetail.numbers import at_most

__all__ = ["keys", "task"]

task = typer.Typer(help="Create and inspect a task: the training that all parties agree on.", no_args_is_help=True)


def keys(
    folder: Annotated[Path, typer.Argument(help="Folder for the key; only its owner can read the files.")],
    use: Annotated[
        str, typer.Option(help='"sign" (task owner), "service" (analyzer, shuffler, aggregator), or "seal" alone.')
    ] = "sign",
    days: Annotated[int, typer.Option(min=1, help="Days until the key expires.")] = 365,
    tls: Annotated[str | None, typer.Option(help="Instead, make a TLS certificate for this host.")] = None,
    rotate: Annotated[
        bool, flag("--rotate", "Make a successor to the folder's key, and rotation-....json for the task's signer.")
    ] = False,
    public_file: Annotated[
        Path | None, typer.Option("--public", help="Also write the public half to this file, for the others.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key pair. Older keys in the folder stay valid until their rounds are closed."""
    import msgspec

    from dovetail import _validate
    from dovetail.files import write_atomically
    from dovetail.parties.common.certificates import Certified, make_authority, make_certificate
    from dovetail.parties.common.keys import KeyRing, PublicKey, ServiceKeys, ServicePairs
    from dovetail.parties.common.notices import rotated

    if tls is not None:
        there = Certified(folder / "authority.crt", folder / "authority.key")
        made = make_certificate(folder, there if there.private_key.exists() else make_authority(folder), host=tls)
        facts: dict[str, Any] = {"certificate": str(made.certificate), "private_key": str(made.private_key)}
        facts["authority"] = str(there.certificate)
    else:
        _validate.one_of(("seal", "sign", "service"), use=use)
        public: PublicKey | ServiceKeys
        ring = KeyRing(folder, "seal" if use == "seal" else "sign")
        old = (ServicePairs.current(folder) if use == "service" else ring.current()) if rotate else None
        public = ServicePairs.add(folder, days=days).public if use == "service" else ring.add(days=days).public
        path = folder / f"public-{use}-{public.key_id.hex()}.json"
        for one in (path, *([] if public_file is None else [public_file])):
            write_atomically(one, msgspec.json.encode(public))
        facts = {"id": public.key_id.hex(), "use": use, "public": str(public_file or path), "days": days}
        if old is not None:
            by = old.sign if isinstance(old, ServicePairs) else None if use == "seal" else old
            rotation = folder / f"rotation-{old.public.key_id.hex()}.json"
            write_atomically(rotation, msgspec.json.encode(rotated(old.public, public, by=by)))
            facts["rotation"] = str(rotation)
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
    analyzer: Annotated[Path, typer.Option(help="The analyzer's public keys (public-service-....json).")],
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
    begins: Annotated[
        str | None,
        typer.Option(help="When users may begin to take part, such as 2027-01-31T12:00+00:00; default: now."),
    ] = None,
    ends: Annotated[str | None, typer.Option(help="When the last may take part; default: no end.")] = None,
    set_: Overrides = None,
) -> None:
    """Create and sign a task, another one each time. Noise that is not given is calibrated to the budget."""
    import msgspec

    from dovetail.experiment import config as configs
    from dovetail.files import write_atomically
    from dovetail.parties.common.costs import calibrated, cost
    from dovetail.parties.common.keys import KeyRing, ServiceKeys
    from dovetail.parties.common.measures import by_name, measured_size
    from dovetail.parties.common.records import read_record
    from dovetail.parties.common.task import TrainingTask, sign
    from dovetail.parties.federation import federation

    chosen = configs.read(config, [configs.parse_override(text) for text in set_ or []])
    settings = chosen.protocol_settings
    learned = federation(chosen) if dim is None or measure else None
    beside = by_name(measure or (), classes=learned.dataset.num_classes) if learned is not None else ()
    dim = learned.dim if dim is None and learned is not None else dim
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
        begins=_second(begins),
        ends=_second(ends),
        nonce=secrets.token_bytes(16),
        **_analyzer_keys(analyzer),
        shufflers=tuple(read_record(path, ServiceKeys, "a shuffler's public keys") for path in shuffler or ()),
        aggregators=tuple(read_record(path, ServiceKeys, "an aggregator's public keys") for path in aggregator or ()),
        **fields,
    )
    certified, local = cost(made, made.rounds)
    if certified.eps > made.budget:
        raise ValueError(
            f"expected a task whose {rounds} rounds fit its budget, eps {made.eps}, got {at_most(certified.eps, 6)}: "
            "every user would refuse it"
        )
    signed = sign(made, KeyRing(signer, "sign").current())
    write_atomically(out, msgspec.json.encode(signed))
    out_console.print(f"task {made.task_id.hex()}, signed by {signed.signer.key_id.hex()}", highlight=False)
    print_costs(certified, local)


@task.command("show")
def task_show(
    path: Annotated[Path, typer.Argument(help="A signed task.")],
    signer: Annotated[
        str | None, typer.Option(help="Refuse a task that another key signed.", metavar="HEX|FILE")
    ] = None,
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
    words = " ".join(f"{words}, {len(made.intermediaries)} {kind}".split())  # a name with lines would add some
    out_console.print(words, highlight=False)
    for word, second in (("begins", made.begins), ("ends", made.ends)):
        if second is not None:
            when = datetime.datetime.fromtimestamp(second, datetime.UTC).isoformat()
            out_console.print(f"{word} {when}", highlight=False)
    print_costs(certified, local)


@task.command("withdraw")
def task_withdraw(
    notices: Annotated[Path, typer.Argument(help="The signer's notices, a JSON file that services hand out.")],
    signed: Annotated[Path, typer.Option("--task", help="The signed task.")],
    signer: Annotated[Path, typer.Option(help="Folder with the signing key.")],
) -> None:
    """Withdraw a task: users and services that see the notice take no further part. There is no way back."""
    from dovetail.parties.common.records import read_record
    from dovetail.parties.common.task import SignedTask, task_id_of

    task_id = task_id_of(read_record(signed, SignedTask, "a signed task").body)
    _add_notice(notices, signer, task_id=task_id)
    out_console.print(f"task {task_id.hex()} is withdrawn: give {notices} to all services", highlight=False)


@task.command("announce")
def task_announce(
    notices: Annotated[Path, typer.Argument(help="The signer's notices, a JSON file that services hand out.")],
    rotation: Annotated[
        list[Path], typer.Option(help="A rotation-....json of `dovetail keys --rotate`; repeat for each.")
    ],
    signer: Annotated[Path, typer.Option(help="Folder with the signing key.")],
) -> None:
    """Announce that keys have successors, to users that follow rotations."""
    from dovetail.parties.common.notices import Rotation
    from dovetail.parties.common.records import read_record

    for path in rotation:
        one = read_record(path, Rotation, "a rotation")
        _add_notice(notices, signer, rotation=one)
        out_console.print(f"{one.old.hex()} is followed by {one.new.hex()}", highlight=False)


def _add_notice(path: Path, signer: Path, **what: Any) -> None:
    """Sign a notice with the signer's current key; the successor of its own key is announced by the old one."""
    from dovetail.parties.common.keys import KeyRing
    from dovetail.parties.common.notices import SignedNotice, announce, write_notices
    from dovetail.parties.common.records import read_record

    ring = KeyRing(signer, "sign")
    old = None if what.get("rotation") is None else what["rotation"].old
    pair = next((pair for pair in ring.all() if pair.public.key_id == old), None) or ring.current()
    known = read_record(path, list[SignedNotice], "notices") if path.exists() else []
    write_notices(path, [*known, announce(pair, **what)])


def _analyzer_keys(path: Path) -> dict[str, Any]:
    """What a task says of the analyzer with the public keys in a file; one without a key to sign with signs nothing."""
    from dovetail.parties.common.keys import PublicKey

    named = public_key(path)
    return (
        {"analyzer": named} if isinstance(named, PublicKey) else {"analyzer": named.seal, "analyzer_sign": named.sign}
    )


def _second(text: str | None) -> int | None:
    """The second that a date and time names."""
    if text is None:
        return None
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"expected a date and time such as 2027-01-31T12:00+00:00, got {text!r}") from error
    if found.tzinfo is None:
        raise ValueError(f"expected a time zone, such as +00:00, behind the time, got {text!r}")
    return int(found.timestamp())
