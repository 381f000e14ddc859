"""Commands around a task: `keys`, `task new`, `task show`, `task withdraw`, `task announce`, `task revoke`."""

from __future__ import annotations

import datetime
import json
import math
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli._shared import (
    HeldOut,
    JsonFlag,
    Measures,
    Overrides,
    flag,
    key_id_from,
    out_console,
    print_guarantees,
    print_json,
    read_public_key,
)
from dovetail.numbers import at_most

__all__ = ["keys", "task"]

task = typer.Typer(
    name="task", help="Create and inspect a task: the training that all parties agree on.", no_args_is_help=True
)


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
    """Make a key pair in a folder. Older keys there stay valid until the rounds of tasks that name them are closed."""
    import msgspec

    from dovetail import _validate
    from dovetail.files import write_atomically
    from dovetail.parties.common.certificates import Certificate, make_authority, make_certificate
    from dovetail.parties.common.keys import KeyRing, PublicKey, ServiceKeys, ServicePairs
    from dovetail.parties.common.notices import rotate_key

    if tls is not None:
        authority = Certificate(folder / "authority.crt", folder / "authority.key")
        if not authority.private_key.exists():
            authority = make_authority(folder)
        made = make_certificate(folder, authority, host=tls)
        facts: dict[str, Any] = {"certificate": str(made.certificate), "private_key": str(made.private_key)}
        facts["authority"] = str(authority.certificate)
    else:
        _validate.one_of(("seal", "sign", "service"), use=use)
        public: PublicKey | ServiceKeys
        ring = KeyRing(folder, "seal" if use == "seal" else "sign")
        old = (ServicePairs.current(folder) if use == "service" else ring.current()) if rotate else None
        if rotate and (left := ring.current().public.expires - time.time()) >= (days + 1) * 86_400:
            raise ValueError(
                f"the key in {str(folder)!r} lasts for another {left / 86_400:.0f} days, longer than its successor "
                f"would: give --days {math.ceil(left / 86_400)} or more"
            )
        public = ServicePairs.add(folder, days=days).public if use == "service" else ring.add(days=days).public
        path = folder / f"public-{use}-{public.key_id.hex()}.json"
        for copy in (path, *([] if public_file is None else [public_file])):
            write_atomically(copy, msgspec.json.encode(public))
        facts = {"id": public.key_id.hex(), "use": use, "public": str(public_file or path), "days": days}
        if old is not None:
            by = old.sign if isinstance(old, ServicePairs) else None if use == "seal" else old
            rotation = folder / f"rotation-{old.public.key_id.hex()}.json"
            write_atomically(rotation, msgspec.json.encode(rotate_key(old.public, public, by=by)))
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
    """Create and sign a task, a new one each time. Noise that is not set is calibrated to the budget."""
    import msgspec

    from dovetail.experiment import config as configs
    from dovetail.files import write_atomically
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.guarantees import calibrate_noise, certify_task
    from dovetail.parties.common.keys import KeyRing, ServiceKeys
    from dovetail.parties.common.measures import measures_by_name, total_size_of_measures
    from dovetail.parties.common.task import TrainingTask, sign
    from dovetail.parties.federation import load_federation

    parsed = configs.read(config, [configs.parse_override(text) for text in set_ or []])
    learned = load_federation(parsed) if dim is None or "labels" in (measure or ()) else None
    classes = 0 if learned is None else learned.dataset.num_classes
    measures = measures_by_name(measure or (), classes=classes)
    dim = learned.dim if dim is None and learned is not None else dim
    fields = {
        "protocol": parsed.protocol["name"],
        "dim": (dim or 0) + total_size_of_measures(measures),
        "rounds": rounds,
        "min_clients": min_clients,
        "max_clients": max_clients,
        "eps": parsed.privacy.eps,
        "delta": parsed.privacy.delta,
        "colluders": colluders,
    }
    made = TrainingTask(
        name=parsed.task.name,
        settings=calibrate_noise(
            settings=parsed.protocol_settings, aggregators=len(aggregator or ()) or None, **fields
        ),
        round_seconds=round_seconds,
        measures=measures,
        held_out=held_out,
        begins=_parse_second(begins),
        ends=_parse_second(ends),
        nonce=secrets.token_bytes(16),
        **_analyzer_keys(analyzer),
        shufflers=tuple(read_json(path, ServiceKeys, "a shuffler's public keys") for path in shuffler or ()),
        aggregators=tuple(read_json(path, ServiceKeys, "an aggregator's public keys") for path in aggregator or ()),
        **fields,
    )
    certified, local = certify_task(made, made.rounds)
    if certified.eps > made.budget:
        raise ValueError(
            f"{rounds} rounds cost eps {at_most(certified.eps, 6)}, above the task's budget of eps {made.eps}, so that "
            "every user would refuse it: use more noise, fewer rounds or a larger privacy.eps"
        )
    signed = sign(made, KeyRing(signer, "sign").current())
    write_atomically(_path_of_copy(signer, made.task_id), msgspec.json.encode(signed))
    write_atomically(out, msgspec.json.encode(signed))
    out_console.print(f"task {made.task_id.hex()}, signed by {signed.signer.key_id.hex()}", highlight=False)
    print_guarantees(certified, local)


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

    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.guarantees import certify_task
    from dovetail.parties.common.task import SignedTask, verify

    signed = read_json(path, SignedTask, "a signed task")
    made = verify(signed, signer=signed.signer.key_id if signer is None else key_id_from(signer))
    certified, local = certify_task(made, made.rounds)
    if as_json:
        facts = {"certified": certified.to_json(), "without_trust": local.to_json()}
        print_json({"task": json.loads(msgspec.json.encode(made)), **facts})
        return
    out_console.print(f"task {made.task_id.hex()}, signed by {signed.signer.key_id.hex()}", highlight=False)
    kind = "shufflers" if made.shufflers else "aggregators"
    summary = (
        f"{made.name} by {made.protocol}, {made.rounds} rounds of {made.min_clients} to {made.max_clients} users, "
        f"{len(made.intermediaries)} {kind}"
    )
    out_console.print(" ".join(summary.split()), highlight=False)  # a name with lines would add some
    for word, second in (("begins", made.begins), ("ends", made.ends)):
        if second is not None:
            when = datetime.datetime.fromtimestamp(second, datetime.UTC).isoformat()
            out_console.print(f"{word} {when}", highlight=False)
    print_guarantees(certified, local)


@task.command("withdraw")
def task_withdraw(
    notices: Annotated[Path, typer.Argument(help="The signer's notices, a JSON file that services hand out.")],
    signed: Annotated[Path, typer.Option("--task", help="The signed task.")],
    signer: Annotated[Path, typer.Option(help="Folder with the signing key.")],
) -> None:
    """Withdraw a task: users and services that see the notice take no further part. There is no way back."""
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.keys import KeyRing
    from dovetail.parties.common.notices import withdraw_task
    from dovetail.parties.common.task import SignedTask, task_id_of

    withdrawn = read_json(signed, SignedTask, "a signed task")
    task_id = task_id_of(withdrawn.body)
    announced = _read_notices(notices, withdrawn.signer.key_id)
    withdrawal = withdraw_task(KeyRing(signer, "sign").find(announced.current), task_id)
    if not announced.receive([withdrawal]):
        reason = (
            announced.why_ended(withdrawn) or f"the key {announced.current.hex()} was revoked, and has no successor"
        )
        raise ValueError(f"this withdrawal would have no effect: {reason}")
    _add_notice(notices, withdrawal)
    out_console.print(f"task {task_id.hex()} is withdrawn: give {notices} to all services", highlight=False)


@task.command("announce")
def task_announce(
    notices: Annotated[Path, typer.Argument(help="The signer's notices, a JSON file that services hand out.")],
    rotation: Annotated[
        list[Path], typer.Option(help="A rotation-....json of `dovetail keys --rotate`; repeat for each.")
    ],
    signer: Annotated[Path, typer.Option(help="Folder with the signing key.")],
) -> None:
    """Announce that keys have successors, to users that follow rotations.

    The successor of the signer's own key ends the old one: the tasks in the signer's folder that run go on, and nothing
    else that the old key signs counts any more.
    """
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.keys import KeyRing
    from dovetail.parties.common.notices import Rotation, announce_rotation

    own = {pair.public.key_id: pair for pair in KeyRing(signer, "sign").all_pairs()}
    rotations = [read_json(path, Rotation, "a rotation") for path in rotation]
    for item in sorted(rotations, key=lambda item: item.old not in own):  # others are announced by the latest key
        effect = ""
        if item.old in own:
            _refuse_second_successor(notices, item)
            running = _running_tasks(signer, item.old)
            standing = (*running, *_read_notices(notices, item.old).standing_digests(item.old))
            signed = announce_rotation(own[item.old], item, standing=standing)
            effect = f"; {len(running)} running task{'' if len(running) == 1 else 's'} of the old key go on"
        else:
            signed = announce_rotation(_latest_pair(notices, signer), item)
        _add_notice(notices, signed)
        out_console.print(f"{item.old.hex()} is followed by {item.new.hex()}{effect}", highlight=False)


@task.command("revoke")
def task_revoke(
    notices: Annotated[Path, typer.Argument(help="The signer's notices, a JSON file that services hand out.")],
    recovery: Annotated[Path, typer.Option(help="Folder with the recovery key that users have pinned.")],
    key: Annotated[
        str | None, typer.Option(help="The stolen key, if it gets no successor.", metavar="HEX|FILE")
    ] = None,
    rotation: Annotated[
        Path | None, typer.Option(help="Instead: rotation-....json of the stolen key and its successor.")
    ] = None,
    signer: Annotated[Path | None, typer.Option(help="With --rotation: folder with the stolen key.")] = None,
    standing: Annotated[
        list[Path] | None,
        typer.Option("--task", help="A signed task of the stolen key that goes on; repeat for each. Default: none."),
    ] = None,
) -> None:
    """End a signing key that was stolen, with all that it signed but the tasks given here. There is no way back.

    The recovery key alone ends the stolen key. To name a successor it takes both: make one with `dovetail keys SIGNER
    --rotate`, and give its rotation-....json here.
    """
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.keys import KeyRing
    from dovetail.parties.common.notices import Rotation, read_notices, revoke_key

    if (key is None) == (rotation is None):
        raise ValueError("name the stolen key by --key, or by --rotation if it has a successor: one of the two")
    if (rotation is None) != (signer is None):
        raise ValueError("--rotation and --signer belong together: the stolen key must sign its successor, too")
    by = KeyRing(recovery, "sign").current()
    if rotation is not None and signer is not None:
        replaced = read_json(rotation, Rotation, "a rotation")
        revoked = replaced.old
        tasks = _standing_tasks(notices, revoked, standing or ())
        kept = (*tasks, *_read_notices(notices, revoked).standing_digests(revoked))
        stolen = KeyRing(signer, "sign").find(revoked)
        notice = revoke_key(by, rotation=replaced, stolen=stolen, standing=kept)
        effect = f"{revoked.hex()} is revoked and followed by {replaced.new.hex()}"
    else:
        revoked = key_id_from(key or "")
        tasks = _standing_tasks(notices, revoked, standing or ())
        kept = (*tasks, *_read_notices(notices, revoked).standing_digests(revoked))
        notice = revoke_key(by, key=revoked, standing=kept)
        effect = f"{revoked.hex()} is revoked"
    if not read_notices(notices, revoked, recovery=by.public.key_id).receive([notice]):
        raise ValueError(f"this revocation would have no effect: {str(notices)!r} already holds one of the same key")
    _add_notice(notices, notice)
    out_console.print(f"{effect}; {len(tasks)} of its tasks go on: give {notices} to all services", highlight=False)


def _path_of_copy(signer: Path, task_id: bytes) -> Path:
    """Where the signer keeps a task that it signed: the rotation of its key says which tasks go on."""
    return signer / f"task-{task_id.hex()}.json"


def _running_tasks(signer: Path, key_id: bytes) -> list[bytes]:
    """The ids of the tasks in a signer's folder that this key signed and that are not over."""
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.task import SignedTask, verify

    copies = [read_json(path, SignedTask, "a signed task") for path in sorted(signer.glob("task-*.json"))]
    tasks = [verify(copy, signer=key_id, fresh=False) for copy in copies if copy.signer.key_id == key_id]
    return [running.task_id for running in tasks if not running.is_over()]


def _standing_tasks(notices: Path, revoked: bytes, paths: Sequence[Path]) -> list[bytes]:
    """The ids of the tasks in files; refuses one that would not end with the revoked key."""
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.task import SignedTask, task_id_of

    ended = _read_notices(notices, revoked).successors(revoked)
    tasks = []
    for path in paths:
        signed = read_json(path, SignedTask, "a signed task")
        if signed.signer.key_id not in ended:
            raise ValueError(
                f"the task in {str(path)!r} was signed by the key {signed.signer.key_id.hex()}, not by "
                f"{revoked.hex()}, which is revoked: leave it out, for it is not affected"
            )
        tasks.append(task_id_of(signed.body))
    return tasks


def _read_notices(path: Path, signer: bytes) -> Any:
    from dovetail.parties.common.notices import read_own_notices

    return read_own_notices(path, signer)


def _latest_pair(path: Path, signer: Path) -> Any:
    """The signer's latest key pair; refuses one that is not announced, for users would ignore what it signs."""
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.keys import KeyRing
    from dovetail.parties.common.notices import Rotation

    pair = KeyRing(signer, "sign").current()
    for file in signer.glob("rotation-*.json"):
        rotation = read_json(file, Rotation, "a rotation")
        if rotation.new == pair.public.key_id != _read_notices(path, rotation.old).current:
            raise ValueError(f"the signer's key {rotation.new.hex()} is not announced yet: add --rotation {file}")
    return pair


def _refuse_second_successor(path: Path, rotation: Any) -> None:
    """Users who see two successors of one key take one of them for a thief's, and stop."""
    others = _read_notices(path, rotation.old).successors(rotation.old) - {rotation.old, rotation.new}
    if others:
        raise ValueError(
            f"the key {rotation.old.hex()} already has the successor {others.pop().hex()} in {str(path)!r}: "
            "rotate that one instead"
        )


def _add_notice(path: Path, notice: Any) -> None:
    """Append a notice to a file."""
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.notices import SignedNotice, write_notices

    earlier = read_json(path, list[SignedNotice], "notices") if path.exists() else []
    write_notices(path, [*earlier, notice])


def _analyzer_keys(path: Path) -> dict[str, Any]:
    """What a task says of the analyzer with the public keys in a file; one without a key to sign with signs nothing."""
    from dovetail.parties.common.keys import PublicKey

    keys = read_public_key(path)
    return {"analyzer": keys} if isinstance(keys, PublicKey) else {"analyzer": keys.seal, "analyzer_sign": keys.sign}


def _parse_second(text: str | None) -> int | None:
    """The second that a date and time names."""
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no date and time: write it as 2027-01-31T12:00+00:00") from error
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: add one, such as {text}+00:00")
    return int(moment.timestamp())
