"""The command `audit`: attack a protocol, every protocol, what a shuffler sees, or a whole training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from dovetail.cli._progress import steps
from dovetail.cli._shared import (
    Colluders,
    Delta,
    Dim,
    JsonFlag,
    LedgerName,
    Participation,
    Population,
    Quiet,
    Relation,
    Rounds,
    Settings,
    Users,
    flag,
    out_console,
    parse_settings,
    print_json,
    print_statement,
    progress_console,
    relation_of,
)
from dovetail.numbers import at_least, at_most
from dovetail.wording import attack_in_words

__all__ = ["audit"]

_USERS, _DIM, _DELTA = 1000, 7850, 5e-6
_VIEWS = "analyzer, observer (sees models only), colluding (shuffler and analyzer) or shuffler (sees indices only)"


def audit(
    name: Annotated[str | None, typer.Argument(help="A protocol.")] = None,
    everything: Annotated[
        bool, flag("--all", "Attack every protocol: exactly at the papers' sizes, and by running the code.")
    ] = False,
    quick: Annotated[bool, flag("--quick", "With --all: only attacks that take seconds.")] = False,
    n: Users = _USERS,
    dim: Dim = _DIM,
    delta: Delta = _DELTA,
    rounds: Rounds = 1,
    population: Population = None,
    participation: Participation = None,
    colluders: Colluders = 0,
    neighbors: Relation = None,
    set_: Settings = None,
    view: Annotated[str, typer.Option(help=f"Who attacks: {_VIEWS}.")] = "analyzer",
    trials: Annotated[
        int | None,
        typer.Option(min=0, help="Runs of the code for each of the two inputs; 0: none. Default: only if fast."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence level of bounds estimated from trials.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the trials.")] = 0,
    training: Annotated[
        str | None, typer.Option(help="Attack a whole training run of this config or preset.", metavar="CONFIG")
    ] = None,
    canaries: Annotated[int, typer.Option(min=20, help="With --training: number of canaries.")] = 500,
    black_box: Annotated[bool, flag("--black-box", "With --training: attack only the final model.")] = False,
    task: Annotated[
        str | None, typer.Option(help="With --view shuffler: use this task's gradients instead of synthetic ones.")
    ] = None,
    ledger: LedgerName = None,
    plot: Annotated[Path | None, typer.Option(help="Plot delta against eps to this file (.svg, .png or .pdf).")] = None,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Attack a protocol to find a lower bound on eps, next to the certified and the claimed value.

    Exits with status 1 if an attack finds more than is certified.
    """
    from dovetail import _validate, figures
    from dovetail import audit as audits
    from dovetail.experiment import config

    if plot is not None:
        figures.check_drawable_file(plot)
    target = _protocol_to_attack(name, everything, training)
    _validate.one_of((*audits.VIEWS, "shuffler"), view=view)
    if training is not None:
        changes = [config.parse_override(text) for text in set_ or []]
        _audit_training(config.read(training, changes), canaries, black_box, confidence, seed, ledger, as_json)
        return
    if everything:
        _audit_all(quick, trials, confidence, seed, as_json)
        return
    plan = audits.attack_terms(
        *(target, n, dim, delta),
        chosen=parse_settings(set_),
        colluders=colluders,
        rounds=rounds,
        population=population,
        participation=participation,
        neighbors=relation_of(neighbors),
    )
    if view == "shuffler":
        with progress_console.status("attacking indices"):
            indices = _audit_indices(target, plan, task, confidence, seed)
        print_json(indices.to_json()) if as_json else _print_indices(indices)
        return
    with steps(1) as bar:
        finding = audits.audit(
            target, plan, view=cast(Any, view), trials=trials, confidence=confidence, seed=seed, observe=bar.say
        )
    if plot is not None:
        from dovetail.audit import curves

        curves.save_figure(plot, finding)
    print_json(finding.to_json()) if as_json else _print_finding(finding)
    _exit_unless(finding.is_consistent)


def _protocol_to_attack(name: str | None, everything: bool, training: str | None) -> str:
    """The protocol's name, if that is what is attacked."""
    targets = {"NAME": name, "--all": everything, "--training": training}
    options = [option for option, value in targets.items() if value]
    if len(options) != 1:
        raise ValueError(f"give one of NAME, --all and --training, got {' and '.join(options) or 'none of them'}")
    return name or ""


def _audit_all(quick: bool, trials: int | None, confidence: float, seed: int, as_json: bool) -> None:
    """Every case and, unless it should be quick, what a shuffler learns from FLAME's indices.

    All counted bounds hold together with this confidence.
    """
    from dovetail import audit as audits

    cases = [case for case in audits.CASES if case.quick or not quick]
    counting = sum(case.trials != 0 for case in cases)
    each = 1 - (1 - confidence) / max(1, counting)  # so that all of them together hold with the confidence asked for
    findings, indices = [], None
    with steps(len(cases) + (not quick)) as bar:
        for case in cases:
            bar.begin(f"{case.protocol}, {case.label}")
            counted = case.trials if trials is None or case.trials == 0 else trials
            findings.append(
                audits.audit(case.protocol, case.terms, view=case.view, trials=counted, confidence=each, seed=seed)
            )
        if not quick:
            bar.begin("ss_topk, indices")
            indices = _audit_indices("ss_topk", audits.INDICES, None, confidence, seed)
    consistent = all(finding.is_consistent for finding in findings)
    if as_json:
        rows = [{**finding.to_json(), "case": case.label} for case, finding in zip(cases, findings, strict=True)]
        print_json({"audits": rows, "indices": indices and indices.to_json(), "consistent": consistent})
    else:
        columns = ("protocol", "what", "view", "delta", "claimed", "certified", "audited", "in runs", "consistent")
        table = Table(*columns, box=None)
        for case, finding in zip(cases, findings, strict=True):
            table.add_row(
                finding.protocol,
                case.label,
                finding.view,
                at_most(finding.bound.delta),
                _claim_cell(finding),
                _upper_bound_as_text(finding.certified.eps),
                _lower_bound_as_text(finding.bound.eps),
                "-" if finding.counted_bound is None else _lower_bound_as_text(finding.counted_bound.eps),
                "yes" if finding.is_consistent else "NO",
            )
        out_console.print(table)
        if indices is not None:
            _print_indices(indices)
    _exit_unless(consistent)


def _audit_indices(name: str, plan: Any, task: str | None, confidence: float, seed: int) -> Any:
    import jax

    from dovetail.audit.indices import Population, audit_indices, noiseless_updates
    from dovetail.guarantee import quotes
    from dovetail.protocols.flame.ss_topk import SsTopk

    protocol, _ = quotes.settle_protocol(name, plan)
    if not isinstance(protocol, SsTopk):
        raise ValueError(f"--view shuffler attacks 'ss_topk'; the slots of {name!r} do not depend on the data")
    rounds = (1, 10) if plan.rounds == 1 else (1, plan.rounds)
    updates: Any = Population(users=plan.num_users, dim=plan.dim)
    if task is not None:
        updates = noiseless_updates(task, users=plan.num_users, rounds=max(rounds))
    return audit_indices(protocol, updates, rounds=rounds, confidence=confidence, key=jax.random.key(seed))


def _print_indices(audit: Any) -> None:
    columns = (
        "shuffler knows",
        "rounds",
        "success",
        "at least",
        "over k/d",
        "without reports",
        "claimed nu",
        "claim",
    )
    table = Table(*columns, box=None)
    for attack in audit.attacks:
        table.add_row(
            attack.knowledge,
            str(attack.rounds),
            f"{attack.success:.4g}",
            f"{attack.lower:.4g}",
            f"{attack.amplification:.4g}",
            f"{attack.prior_success:.4g}",
            f"{attack.nu:.4g}",
            attack.verdict,
        )
    out_console.print(
        f"attack: guess one of a client's {audit.top} largest coordinates from the indices it reports", highlight=False
    )
    out_console.print(table)
    out_console.print(f"with each coordinate's own prior instead of k/d: {audit.verdict_own_prior}", highlight=False)


def _audit_training(
    settings: Any, canaries: int, black_box: bool, confidence: float, seed: int, ledger: str | None, as_json: bool
) -> None:
    from dovetail.audit import training as trainings
    from dovetail.engine import devices

    devices.use_all_cores()
    with progress_console.status("training with canaries"):
        result = trainings.audit(
            settings,
            canaries=canaries,
            attack="black-box" if black_box else "white-box",
            confidence=confidence,
            seed=seed,
            ledger=ledger,
        )
    if as_json:
        print_json(result.to_json())
    else:
        out_console.print(
            f"audited: eps >= {_lower_bound_as_text(result.bound.eps)} at delta {result.bound.delta:g}, "
            f"confidence {confidence:g} "
            f"({result.right} of {result.guesses} guesses right, {canaries} canaries, {result.attack})",
            highlight=False,
        )
        out_console.print(f"certified: {result.statement}", markup=False, highlight=False)
        _print_in_words(result.statement, result.bound)
        out_console.print("consistent" if result.is_consistent else "NOT CONSISTENT", highlight=False)
    _exit_unless(result.is_consistent)


def _print_finding(finding: Any) -> None:
    table = Table("attack", "eps at least", "at delta", "confidence", "trials", box=None)
    for bound in (finding.bound, *finding.others):
        sure = "exact" if bound.confidence == 1 else f"{bound.confidence:g}"
        runs = str(bound.trials) if bound.trials else "-"
        table.add_row(bound.attack, _lower_bound_as_text(bound.eps), at_most(bound.delta), sure, runs)
    out_console.print(table)
    print_statement("certified", finding.certified)
    print_statement("claimed", finding.claimed)
    if finding.is_claim_refuted:
        out_console.print("the claim is refuted by this attack", highlight=False)
    _print_in_words(finding.certified, finding.bound)
    verdict = (
        "no attack found more than is certified"
        if finding.is_consistent
        else "NOT CONSISTENT: an attack found more than is certified"
    )
    out_console.print(verdict, highlight=False)


def _print_in_words(statement: Any, bound: Any) -> None:
    """One line for whoever reads no eps."""
    said = attack_in_words(statement, eps=bound.eps, delta=bound.delta, trials=bound.trials)
    out_console.print(said, markup=False, highlight=False)


def _claim_cell(finding: Any) -> str:
    if finding.claimed is None:
        return "-"
    return _upper_bound_as_text(finding.claimed.eps) + (" refuted" if finding.is_claim_refuted else "")


def _upper_bound_as_text(eps: float) -> str:
    return "unbounded" if eps == float("inf") else at_most(eps)


def _lower_bound_as_text(eps: float) -> str:
    return "unbounded" if eps == float("inf") else at_least(eps)


def _exit_unless(consistent: bool) -> None:
    if not consistent:
        raise typer.Exit(1)
