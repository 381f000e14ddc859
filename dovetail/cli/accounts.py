"""Commands that compute privacy without running anything: `account`, `calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dovetail.cli._shared import (
    Colluders,
    Delta,
    Dim,
    JsonFlag,
    Participation,
    Population,
    Quiet,
    Relation,
    Rounds,
    Settings,
    Users,
    out_console,
    parse_settings,
    print_json,
    print_statement,
    progress_console,
    relation_of,
)
from dovetail.numbers import at_least, at_most

__all__ = ["account", "calibrate"]

account = typer.Typer(name="account", help="Compute privacy bounds without running anything.", no_args_is_help=True)


@account.command()
def amplify(
    n: Users,
    eps_local: Annotated[float, typer.Option("--eps-local", help="The local eps of one report.")],
    delta: Delta,
    bound: Annotated[str | None, typer.Option(help="Show only this bound.")] = None,
    randomizer: Annotated[
        str, typer.Option(help="The randomizer that the best bound must hold for: generic, laplace or rr2.")
    ] = "generic",
    colluders: Colluders = 0,
    plot: Annotated[Path | None, typer.Option(help="Plot every bound to this file (.svg, .png or .pdf).")] = None,
    over: Annotated[str, typer.Option(help="The x axis of the plot: n or eps-local.")] = "n",
    as_json: JsonFlag = False,
) -> None:
    """Print every shuffle amplification bound: its eps, or why it does not apply."""
    from dovetail import _validate, figures
    from dovetail.accounting.amplification import table as amplification
    from dovetail.statements import NotApplicable

    _validate.integer(n=n)
    _validate.at_least(2, n=n)
    _validate.positive(eps_local=eps_local)
    _validate.in_open_interval(0, 1, delta=delta)
    if bound is not None:
        _validate.known_name("bound", bound, amplification.BOUNDS)
    if plot is not None:
        figures.check_drawable_file(plot)
    rows = [
        row
        for row in amplification.table(eps_local, num_users=n, delta=delta, colluders=colluders)
        if bound is None or row.name == bound
    ]
    try:
        best = amplification.best(
            _report_event_of_options(randomizer, eps_local), num_users=n, delta=delta, colluders=colluders
        )
    except NotApplicable:
        best = None
    if plot is not None:
        from dovetail.pages import plots  # loads nearly everything

        figures.save(plots.amplification_figure(num_users=n, eps_local=eps_local, delta=delta, over=over), plot)
    if as_json:
        facts = {"n": n, "eps_local": eps_local, "delta": delta, "colluders": colluders}
        print_json({**facts, "bounds": [_row_json(row) for row in rows], "best": _row_json(best) if best else None})
        return
    table = Table("bound", "eps", "theorem, or why it does not apply")
    for row in rows:
        table.add_row(row.name, at_most(row.bound.eps, 5) if row.bound else "-", row.reason or row.theorem.where)
    out_console.print(table)
    if best and best.bound:
        numbers = f"eps {at_most(best.bound.eps, 5)} at delta {at_most(delta)}"
        summary = f"best bound for a {randomizer} report: {best.name}, {numbers}"
    else:
        summary = f"no bound improves on eps_local for a {randomizer} report"
    out_console.print(summary, highlight=False)


@account.command("protocol")
def account_protocol(
    name: Annotated[str, typer.Argument(help="A protocol.")],
    n: Users,
    dim: Dim,
    delta: Delta,
    rounds: Rounds = 1,
    population: Population = None,
    participation: Participation = None,
    colluders: Colluders = 0,
    neighbors: Relation = None,
    set_: Settings = None,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the certified, claimed and local statements of a protocol."""
    from dovetail.guarantee import quotes

    terms = _terms_of_options(n, dim, delta, rounds, colluders, neighbors, set_)
    with progress_console.status("accounting"):
        quote = quotes.quote(name, quotes.with_cohort(terms, participation, population))
    if as_json:
        print_json(_quote_json(quote))
        return
    _print_quote(quote)


def calibrate(
    name: Annotated[str, typer.Argument(help="A protocol.")],
    n: Users,
    dim: Dim,
    eps: Annotated[float, typer.Option("--eps", help="The target eps.")],
    delta: Delta,
    parameter: Annotated[
        str | None,
        typer.Option(
            help="The parameter to calibrate: eps_local, noise_multiplier, beta or pad_to. Default: the noise."
        ),
    ] = None,
    rounds: Rounds = 1,
    population: Population = None,
    participation: Participation = None,
    colluders: Colluders = 0,
    neighbors: Relation = None,
    set_: Settings = None,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Find the protocol parameter that meets a target (eps, delta), rounded conservatively."""
    from dovetail.guarantee import quotes

    terms = quotes.with_cohort(
        _terms_of_options(n, dim, delta, rounds, colluders, neighbors, set_), participation, population
    )
    with progress_console.status("calibrating"):
        calibrated, value, quote = quotes.calibrate(name, terms, eps=eps, parameter=parameter)
    if as_json:
        print_json({**_quote_json(quote), "parameter": calibrated, "value": value})
        return
    # rounded to the safe side: more noise, more dummies, smaller budgets
    round_safely = at_most if calibrated in ("noise_multiplier", "pad_to") else at_least
    out_console.print(f"{calibrated} = {round_safely(value, 9)}", highlight=False)
    _print_quote(quote)


def _terms_of_options(
    n: int,
    dim: int,
    delta: float,
    rounds: int,
    colluders: int,
    neighbors: str | None,
    set_: list[str] | None,
) -> Any:
    """The terms that these options describe, with no setting but those that were given."""
    from dovetail.guarantee import quotes

    return quotes.Terms(
        num_users=n,
        dim=dim,
        delta=delta,
        rounds=rounds,
        colluders=colluders,
        settings=parse_settings(set_),
        neighbors=relation_of(neighbors),
    )


def _print_quote(quote: Any) -> None:
    for title in ("certified", "claimed", "local", "shuffler"):
        statement = getattr(quote, title)
        print_statement(title, statement)
        if statement is not None and statement.lower is not None:
            out_console.print(f"  the same quantity is at least {at_least(statement.lower, 9)}", highlight=False)


def _quote_json(quote: Any) -> dict[str, Any]:
    """The quote, with the lower ends of numbers that were computed from both sides."""
    facts: dict[str, Any] = quote.to_json()
    for title in ("certified", "claimed", "local", "shuffler"):
        statement = getattr(quote, title)
        if statement is not None and statement.lower is not None:
            facts[title]["lower"] = statement.lower
    return facts


def _report_event_of_options(randomizer: str, eps_local: float) -> Any:
    from dovetail import _validate
    from dovetail.events import Report

    _validate.one_of(("generic", "laplace", "rr2"), randomizer=randomizer)
    kinds: dict[str, Any] = {"generic": "generic", "laplace": "laplace", "rr2": "rr"}
    return Report(kind=kinds[randomizer], eps_local=eps_local)


def _row_json(row: Any) -> dict[str, Any]:
    return {
        "name": row.name,
        "eps": None if row.bound is None else row.bound.eps,
        "applicable": row.bound is not None,
        "reason": row.reason,
        "theorem": row.theorem.where,
    }
