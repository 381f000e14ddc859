"""The command `choose`: which protocols fit, what they cost, and why the others do not fit."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from dovetail.cli._progress import steps
from dovetail.cli._shared import JsonFlag, Quiet, out_console, print_json
from dovetail.numbers import at_least, at_most

__all__ = ["choose"]

_QUESTIONS = {
    "trust": "Whom may users have to trust: nobody, aggregators (of which one is honest), shuffler, or curator",
    "users": "How many users are there",
    "per_round": "How many of them take part in a round",
    "rounds": "How many rounds are there",
    "dim": "How many parameters has the model",
}
_COUNTS = ("users", "per_round", "rounds", "dim")


def choose(
    trust: Annotated[
        str | None,
        typer.Option(
            help="The most trust that users accept: nobody; aggregators, of which one is honest; a shuffler that does "
            "not collude; or a curator who sees every update."
        ),
    ] = None,
    users: Annotated[int | None, typer.Option(help="Number of users.")] = None,
    per_round: Annotated[int | None, typer.Option(help="Number of users per round. Default: all.")] = None,
    participation: Annotated[
        str | None,
        typer.Option(
            help="How they take part: everyone, disjoint (batches, the default with --per-round), fixed or poisson (a "
            "secret sample), separated (in turn, with noise that later rounds take back), or secret (all upload, and "
            "each decides secretly whether its data enter)."
        ),
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Number of parameters of the model.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    eps: Annotated[float, typer.Option(help="The eps of the whole training.")] = 1.0,
    delta: Annotated[
        float | None, typer.Option(help="The delta of the whole training. Default: a tenth of 1/users, at most 1e-5.")
    ] = None,
    records_per_user: Annotated[
        int, typer.Option(min=1, help="Number of records per user; all of a user's records are protected together.")
    ] = 1,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Say which protocols fit: noise, bytes, seconds and accuracy at the same privacy, and why others do not fit.

    On a terminal, it asks for what is not given.
    """
    from dovetail import protocols
    from dovetail.compare import choosing

    options = {"trust": trust, "users": users, "per_round": per_round, "rounds": rounds, "dim": dim}
    answers = _ask_for_missing(options, participation)
    count = answers["users"]
    situation = choosing.Situation(
        **answers,
        participation=participation,
        eps=eps,
        delta=min(1e-5, 0.1 / max(1, count)) if delta is None else delta,
        records_per_user=records_per_user,
    )
    with steps(len(protocols.PROTOCOLS)) as bar:
        choice = choosing.choose(situation, observe=bar.begin)
    if as_json:
        print_json(choice.to_json())
        return
    _print_choice(choice)


def _ask_for_missing(options: dict[str, Any], participation: str | None) -> dict[str, Any]:
    """What was given, and on a terminal what is answered to the rest."""
    optional = ("per_round",) if participation in (None, "everyone", "disjoint") else ()
    missing = [name for name, value in options.items() if value is None and name not in optional]
    if missing and not sys.stdin.isatty():
        missing_options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"give {missing_options}: questions are asked on a terminal only")
    if not missing:
        return options
    answers = dict(options)
    for name, question in _QUESTIONS.items():
        if answers[name] is None:
            default = {"per_round": answers["users"], "trust": "aggregators"}.get(name)
            kind = int if name in _COUNTS else str
            answers[name] = typer.prompt(question, default=default, type=kind, err=True)
    return answers


def _print_choice(choice: Any) -> None:
    situation = choice.situation
    lines = [
        f"({at_most(situation.eps)}, {at_most(situation.delta)})-DP for {situation.rounds:,} rounds of "
        f"{situation.size:,} of {situation.users:,} users ({situation.kind}), {situation.dim:,} coordinates, "
        f"trust at most: {situation.trust}"
    ]
    if situation.records_per_user > 1:
        lines.append(f"all {situation.records_per_user:,} records of a user are protected together, at the same noise")
    out_console.print("\n".join(lines), markup=False, highlight=False)
    out_console.print(_choice_table(choice) if choice.fitting else "no protocol fits", highlight=False)
    for protocol in choice.ruled_out:
        out_console.print(f"{protocol.protocol}: ruled out, {protocol.reason}", markup=False, highlight=False)
    out_console.print(_source_of_accuracy(choice), markup=False, highlight=False)
    out_console.print("what each statement assumes: dovetail account protocol NAME, or --json here", highlight=False)


def _choice_table(choice: Any) -> Table:
    columns = ("protocol", "trusts", "certified", "without trust", "noise", "std per coordinate of the mean",
               "sent per user and round", "client s", "server s", "accuracy")  # fmt: skip
    table = Table(*columns, box=None)
    for fitting in choice.fitting:
        round_safely = at_most if fitting.parameter == "noise_multiplier" else at_least  # more noise, smaller budgets
        cells = (
            fitting.protocol,
            fitting.trust,
            f"{_eps_and_delta(fitting.certified)}, {fitting.certified.neighbors.value}",
            "no guarantee" if fitting.local.is_unbounded else _eps_and_delta(fitting.local),
            f"{fitting.parameter} {round_safely(fitting.value)}",
            f"{fitting.std:.3g} x {fitting.clip}",
            _upload_cell(fitting.costs),
            "-" if fitting.costs.client_seconds is None else f"{fitting.costs.client_seconds:.2g}",
            f"{fitting.costs.server_seconds:.2g}",
            "-" if fitting.accuracy is None else f"{fitting.accuracy:.1%}",
        )
        table.add_row(*cells)
    return table


def _eps_and_delta(statement: Any) -> str:
    return f"({at_most(statement.eps)}, {at_most(statement.delta)})"


def _upload_cell(costs: Any) -> str:
    from dovetail.compare import bytes_in_words

    return bytes_in_words(costs.bytes)


def _source_of_accuracy(choice: Any) -> str:
    """Where accuracies come from, or why there are nfitting."""
    if choice.source is None:
        return (
            "accuracy: unknown, for no earlier comparison is near; `dovetail compare` trains every protocol "
            "(users who come in turn or in secret were never compared)"
        )
    ceiling = choice.source.runs["fedavg"]["accuracy"]
    return (
        f"accuracy: from the comparison {choice.source}, with clip, step and sparsity tuned there, {ceiling:.1%} "
        "without privacy; '-' where its rounds were of another size or number"
    )
