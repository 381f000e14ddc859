"""Commands of a whole fleet on this machine: `fleet demo` and `fleet audit`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dovetail.cli._progress import steps
from dovetail.cli._shared import (
    HeldOut,
    JsonFlag,
    Measures,
    Overrides,
    Quiet,
    Settings,
    err_console,
    flag,
    out_console,
    print_guarantees,
    print_json,
    print_statement,
    progress_console,
)
from dovetail.numbers import at_least, at_most

__all__ = ["fleet"]

fleet = typer.Typer(name="fleet", help="Run a whole fleet on this machine.", no_args_is_help=True)
_IN_MEMORY = Path("/dev/shm")


@fleet.command("demo")
def fleet_demo(
    clients: Annotated[int, typer.Option(min=2, help="Number of users.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 3,
    protocol: Annotated[str, typer.Option(help="secagg, privunit, ss_topk, apes, ...")] = "secagg",
    config: Annotated[
        str | None,
        typer.Option(help="Instead of the bundled digits: a TOML file, or a preset such as mnist-untrusted."),
    ] = None,
    shufflers: Annotated[int | None, typer.Option(min=1, help="Number of shuffler processes.")] = None,
    aggregators: Annotated[
        int | None, typer.Option(min=2, help="Share reports between so many aggregators instead of shuffling them.")
    ] = None,
    measure: Measures = None,
    held_out: HeldOut = 0.0,
    verified: Annotated[
        bool, flag("--verified", "secagg with proofs of norm: aggregators add the noise, and leave out who cheats.")
    ] = False,
    hostile: Annotated[
        int | None,
        typer.Option(min=0, help="Users that do not clip; default: one in twenty with --verified, else none."),
    ] = None,
    set_: Overrides = None,
    folder: Annotated[Path | None, typer.Option(help="Keep everything in this new folder.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that run the users.")] = 2,
    seconds: Annotated[float, typer.Option(help="Seconds after which to give up.")] = 1800.0,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Start users, aggregators or shufflers, and an analyzer as processes, train, and print who saw what."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from dovetail.experiment import config as configs
    from dovetail.parties.demo import demo_config, transcript
    from dovetail.parties.fleet import Fleet, set_up_fleet

    proofs = ["protocol.noise=aggregators", "protocol.verified=true"] if verified else []
    set_ = [*proofs, *(set_ or [])]
    hostile_users = (clients // 20 if verified else 0) if hostile is None else hostile
    if config is None:
        parsed = demo_config(protocol, clients=clients, overrides=set_ or [])
    else:
        parsed = configs.read(config, [configs.parse_override(text) for text in set_ or []])
    _refuse_hostile(hostile_users, clients, parsed.protocol["name"])
    with tempfile.TemporaryDirectory(prefix="dovetail-fleet-") as temporary:
        with progress_console.status("making keys, certificates and the task"):
            home = folder or Path(temporary) / "fleet"
            deployment = set_up_fleet(
                home,
                parsed,
                rounds=rounds,
                clients=clients,
                shufflers=shufflers,
                aggregators=aggregators,
                measures=measure or (),
                held_out=held_out,
                min_clients=clients - hostile_users,
            )
        columns = (TextColumn("rounds"), BarColumn(), MofNCompleteColumn())
        bar = Progress(*columns, console=progress_console, transient=True)
        with bar, Fleet(deployment, hostile=hostile_users) as running:
            line = bar.add_task("rounds", total=rounds)
            running.start(processes=processes)
            facts = running.wait_until_over(seconds=seconds, observe=lambda done, _: bar.update(line, completed=done))
            seen = transcript(running, facts)
            refused = running.refused_users()
    if as_json:
        print_json({"privacy": facts, "transcript": seen, "hostile": hostile_users, "refused": refused})
        return
    table = Table(title="who saw what", show_lines=True)
    for heading in ("party", "holds", "saw", "did not see"):
        table.add_column(heading)
    for row in seen:
        table.add_row(row["party"], row["holds"], row["saw"], row["never"])
    out_console.print(table)
    _print_outcome(facts)


def _refuse_hostile(hostile: int, clients: int, protocol: str) -> None:
    """Refuse more hostile users than there are others, and protocols in which there is nothing to leave unclipped."""
    from dovetail.protocols import find

    if hostile >= clients:
        raise ValueError(f"of {clients} users {hostile} cannot be hostile: give --hostile less than --clients")
    if hostile and not hasattr(find(protocol), "aggregators"):
        raise ValueError(
            f"hostile users share unclipped updates, which protocol {protocol} does not add up: use secagg, or "
            "--hostile 0"
        )


def _print_outcome(facts: dict[str, Any]) -> None:
    from dovetail.statements import Statement

    released = [entry for entry in facts["history"] if entry["accuracy"] is not None]
    if released:
        out_console.print(
            f"test accuracy {released[-1]['accuracy']:.2%} after {len(facts['history'])} rounds "
            f"({len(released)} released)",
            highlight=False,
        )
    for name, statistic in (facts["history"][-1].get("measured") or {}).items():
        values = ", ".join(f"{key} {value:.4g}" for key, value in statistic.items() if isinstance(value, float))
        out_console.print(f"measured on users' own data before the last round: {name}: {values}", highlight=False)
    later = facts["seconds"][1:] or facts["seconds"]
    out_console.print(
        f"{facts['bytes_per_upload']:,} bytes per user and round; {sum(later) / len(later):.1f} s per round"
        + (" (after the first, in which everybody starts)" if len(facts["seconds"]) > 1 else ""),
        highlight=False,
    )
    statement = Statement.from_json(facts["statement"])
    if statement.is_unbounded:
        out_console.print("not certified", highlight=False)
    print_guarantees(statement, Statement.from_json(facts["without_trust"]))


@fleet.command("audit")
def fleet_audit(
    protocol: Annotated[str, typer.Argument(help="A protocol that can be shared: secagg, ss_simple, apes, ...")],
    clients: Annotated[int, typer.Option(min=2, help="Number of users per round.")] = 4,
    dim: Annotated[int, typer.Option(min=1, help="Number of coordinates of an update.")] = 4,
    delta: Annotated[float, typer.Option(help="The delta of the bound.")] = 1e-5,
    aggregators: Annotated[int, typer.Option(min=2, help="Number of aggregators, of which all but one collude.")] = 2,
    trials: Annotated[int, typer.Option(min=10, help="Rounds for each of the two updates of the canary.")] = 200,
    confidence: Annotated[float, typer.Option(help="Confidence level of the bound.")] = 0.95,
    set_: Settings = None,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Attack deployed rounds: real clients, aggregators and analyzer, with a canary that holds one of two updates.

    The adversary is the analyzer with all aggregators but one. Exits with status 1 if it finds more than is certified.
    """
    from dovetail.audit.runs import lower_bound_from_scores
    from dovetail.experiment.config import parse_override
    from dovetail.parties.canaries import CanaryRounds
    from dovetail.protocols import find

    overrides = dict(parse_override(text) for text in set_ or [])
    settings = {**find(protocol).example(dim, overrides), **overrides}
    in_memory = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="dovetail-canaries-", dir=in_memory) as folder, steps(2 * trials) as bar:
        canaries = CanaryRounds(
            Path(folder),
            protocol,
            settings,
            dim=dim,
            users=clients,
            delta=delta,
            trials=2 * trials,
            aggregators=aggregators,
        )
        try:
            scores = canaries.run(trials, observe=lambda done: bar.begin(f"round {done}"))
            certified = canaries.statement()
        finally:
            canaries.close()
    audit = lower_bound_from_scores(scores, delta=delta, confidence=confidence)
    consistent = certified.is_unbounded or audit.eps <= certified.eps
    if as_json:
        audited = {"eps": audit.eps, "delta": delta, "attack": audit.attack, "confidence": confidence}
        print_json({"certified": certified.to_json(), "audited": audited, "consistent": consistent})
    else:
        print_statement("certified", certified)
        out_console.print(
            f"audited: eps >= {at_least(audit.eps)} at delta {at_most(delta)} with confidence {confidence:g}, "
            f"by {audit.attack} in {2 * trials} rounds",
            highlight=False,
        )
    if not consistent:
        err_console.print("an attack found more than is certified: a proof or the code is wrong", style="red")
        raise typer.Exit(1)
