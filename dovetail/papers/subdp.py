"""SubDP (Marathe, Kanani 2022): people whose records lie in several silos. The paper has no experiments.

MNIST with its 539 true writers over ten silos, each writer's images at r = 1, 2 or 5 of them, scattering features and a
linear model. Everything but the item level aims at a certified (4, 1e-5) for adding or removing one writer; the column
with the paper's accounting shows what its theorems would say of the same noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dovetail import accounting, audit
from dovetail.accounting.releases import subjects
from dovetail.audit import LowerBound
from dovetail.claims import subdp
from dovetail.events import Everyone, Gaussian, Round, SampledSubject
from dovetail.figures import Figure
from dovetail.numbers import at_most
from dovetail.papers.exhibits import Paper, Part, Row, measured_mean, sweep_lines
from dovetail.papers.runner import Overrides, Runner
from dovetail.statements import Bound, Neighbors, Scope, Statement, Theorem, Trust, Unit, Verdict

__all__ = ["PAPER"]

_DELTA = 1e-5
_REPLACE = ("privacy.neighbors", "replace-one")
_ITEM_NOTE = "(4, 1e-5) for one item; the eps of a writer has its own column"
_BATCH_NOTE = "the noise depends on the data and reveals something about it, so nothing is certified"


def preset_and_overrides(spread: int) -> dict[str, tuple[str, Overrides]]:
    """Each way to protect writers whose images lie at `spread` silos: a preset, and what is changed."""
    over = ("task.spread", spread)
    capped = (over, ("protocol.users_per_subject", spread))
    as_published = (*capped, ("protocol.adaptive_z", True), ("protocol.sampling_rate", 0.01))
    return {
        "item-level DP-FL": ("subdp-item", (over,)),
        "central_sub": ("subdp-central", capped),
        "central_sub, Z of the batch (as published)": ("subdp-central", as_published),
        "local_sub": ("subdp-local", (*capped, ("protocol.items_per_user", -(-80 // spread)))),
        "user-level DP-FL": ("subdp-user", (over,)),
        "user-level LDP": ("subdp-user", (over, ("protocol", {"name": "ldp_fl", "clip_norm": 0.1}), _REPLACE)),
    }


WRITERS = {
    "every writer a user, DP-FL": "subdp-writers",
    "every writer a user, split-and-mix (no trusted party)": "subdp-writers-untrusted",
}


def _train_rows(runner: Runner) -> Iterator[Row]:
    """One training per number of silos and way to protect writers; then those that deal with writers otherwise."""
    for spread in (2,) if runner.quick else (1, 2, 5):
        for name, (preset, overrides) in preset_and_overrides(spread).items():
            if runner.quick and name not in ("central_sub", "local_sub", "item-level DP-FL"):
                continue
            notes = {"item-level DP-FL": _ITEM_NOTE, "central_sub, Z of the batch (as published)": _BATCH_NOTE}
            yield _train_row(
                runner, f"r = {spread}, {name}", preset, overrides, series=name, x=spread, note=notes.get(name, "")
            )
    if not runner.quick:
        for name, preset in WRITERS.items():
            yield _train_row(runner, name, preset, ())


def _train_row(runner: Runner, label: str, preset: str, overrides: Overrides, **more: Any) -> Row:
    """The row of a training with a writer's eps beside it, whatever unit its statement is about."""
    writer = runner.train(preset, overrides, label=label).first.units[Unit.SUBJECT]
    extra = {"a writer's eps": "unbounded" if writer.is_unbounded else at_most(writer.eps)}
    return runner.training_row(label, preset, overrides, extra=extra, attack=True, **more)


def _accuracy_figures(rows: Sequence[Row]) -> list[Figure]:
    lines = sweep_lines(rows, measured_mean)
    title = "Accuracy by the number of silos that hold a writer's images"
    return [Figure(title=title, x_label="silos", y_label="test accuracy", percent_y=True, lines=lines)]


_SCOPE = Scope(
    trust=Trust.CURATOR,
    adversary="observer of every average",
    neighbors=Neighbors.ADD_REMOVE,
    unit=Unit.SUBJECT,
    assumptions=("items are sampled as the row says", "noise is real-valued and fresh"),
)


def _item_rows(runner: Runner) -> Iterator[Row]:
    """A subject's eps by the number of its items, under three laws of sampling."""
    laws = {
        "items sampled alone": {"prob_item": 0.01},
        "users first, with nobody else's records": {"prob_item": 0.1, "prob_user": 0.1, "alone": True},
        "users first, whose other records show that they were drawn": {
            "prob_item": 0.1,
            "prob_user": 0.1,
            "alone": False,
        },
    }
    for series, law in laws.items():
        for items in (1, 2, 5, 10) if series == "items sampled alone" else (2, 5):
            event = SampledSubject(items=items, std=0.96, clip_norm=1.0, **law)  # type: ignore[arg-type]
            certified, audited = _certify_and_attack(event, 1000)
            yield Row(label=f"{items} items, {series}", series=series, x=items, certified=certified, audited=audited)
    recipe = subdp.noise_scale(eps=4.0, delta=_DELTA, group=2, prob=0.01, steps=1000)
    event = SampledSubject(items=131, std=recipe.value, clip_norm=1.0, prob_item=0.01)
    certified, audited = _certify_and_attack(event, 1000)
    claim = Bound(eps=4.0, delta=_DELTA, proof=recipe.theorem.proof)
    yield Row(
        label="131 items, with the paper's noise for (4, 1e-5) and batches that hold 2 of them",
        claimed=_SCOPE.state(claim, Verdict.CLAIMED_REFUTED, span="1000 steps"),
        certified=certified,
        audited=audited,
        extra={"noise multiplier": recipe.value},
    )


def _certify_and_attack(event: SampledSubject, steps: int) -> tuple[Statement, LowerBound | None]:
    """What is certified of so many steps of an event, and what an attack on them shows."""
    rounds = [Round(mechanism=event, participation=Everyone())] * steps
    bound = accounting.bound(rounds, delta=_DELTA)
    certified = _SCOPE.state(bound, Verdict.CERTIFIED, span=f"{steps} steps")
    return certified, audit.attack_training(rounds, delta=_DELTA)


def _certified_eps(row: Row) -> float | None:
    return None if row.certified is None else row.certified.eps


def _items_figure(rows: Sequence[Row]) -> list[Figure]:
    title = "A subject's eps by the number of its items"
    lines = sweep_lines(rows, _certified_eps)
    return [Figure(title=title, x_label="items", y_label="certified eps", log_x=True, log_y=True, lines=lines)]


def _span_rows(runner: Runner) -> Iterator[Row]:
    """What one Gaussian release per user costs a subject with records at several users, against the paper's claim."""
    release = Gaussian(std=1.0, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)
    rounds = {
        users: [Round(mechanism=subjects.gaussian_of_users_together(release, users=users), participation=Everyone())]
        for users in (1, 2, 5, 10)
    }
    bounds = {users: accounting.bound(spanning, delta=_DELTA) for users, spanning in rounds.items()}
    says = Theorem(key="SubDP.span", where="SubDP (Marathe, Kanani 2022): a subject at several users costs no more")
    claim = Bound(eps=bounds[1].eps, delta=_DELTA, proof=says.proof)
    for users, bound in bounds.items():
        verdict = Verdict.CLAIMED_HOLDS if users == 1 else Verdict.CLAIMED_REFUTED
        yield Row(
            label=f"records at {users} user{'s' * (users > 1)}",
            series="eps",
            x=users,
            claimed=_SCOPE.state(claim, verdict, span="one release per user"),
            certified=_SCOPE.state(bound, Verdict.CERTIFIED, span="one release per user"),
            audited=audit.attack_training(rounds[users], delta=_DELTA),
        )


def _spans_figure(rows: Sequence[Row]) -> list[Figure]:
    """One figure: a subject's eps over the number of its users, certified and claimed."""
    lines = (
        *sweep_lines(rows, _certified_eps, suffix=", certified"),
        *sweep_lines(
            rows, lambda row: None if row.claimed is None else row.claimed.eps, style="dashed", suffix=", claimed"
        ),
    )
    title = "A subject's eps by the number of users that hold its records"
    return [Figure(title=title, x_label="users", y_label="eps", lines=lines)]


PAPER = Paper(
    name="subdp",
    title="Subject granular differential privacy in federated learning",
    citation="Marathe, Kanani (2022)",
    reference="SubDP",
    minutes={"cpu": 9.0, "gpu": 4.0},
    parts=(
        Part(
            key="measured",
            title="First measurements of the paper's algorithms",
            caption="The paper has no experiments. MNIST with its 539 true writers over ten silos, each writer's "
            "images at r of them, scattering features, a linear model; certified (4, 1e-5) for adding or removing one "
            "writer, except for the item level. The column of the paper's claim shows what its theorems give for the "
            "same noise. Hyper-parameters were tuned on MNIST's first 50,000 training images and evaluated on its "
            "last 10,000, and no statement accounts for that. Attacks are exact, on all rounds, where one is known.",
            rows=_train_rows,
            figures=_accuracy_figures,
        ),
        Part(
            key="items",
            title="What Z in the batch misses: how many items a subject has",
            caption="Noise .96, item sampling rate .01, 1000 steps, delta 1e-5, adding or removing one subject. One "
            "item has eps 2. If users are sampled first, all items of a subject at a user are sampled together.",
            rows=_item_rows,
            figures=_items_figure,
        ),
        Part(
            key="spans",
            title="Subjects at several users",
            caption="Every user adds its own noise, mu 1, delta 1e-5. The claim that a subject at several users costs "
            "no more is refuted: aligned gradients add up.",
            rows=_span_rows,
            figures=_spans_figure,
        ),
    ),
)
