"""The survey (Ahmed, Wu, Dushime, Tao 2021): sums and models under three trust models, measured instead of quoted.

Every protocol is calibrated to the same central (1, 1e-6) for each number of users and run on the input that is worst
for it. At a fixed budget the squared error of a sum of bits, of unary messages and of split-and-mix should not grow
with n, one message per user for a number in [0, 1] should cost about n^(1/3), and the local model n. The survey prints
rates without constants, so there is a shape to compare, and no number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import accounting
from dovetail.accounting.amplification import table
from dovetail.claims import survey as published
from dovetail.events import Everyone, Gaussian, Report, Round
from dovetail.figures import Figure
from dovetail.guarantee import quotes
from dovetail.papers.exhibits import Measurement, Paper, Part, Row, measured_mean, sweep_lines
from dovetail.papers.runner import Runner
from dovetail.protocols import fast_path
from dovetail.protocols.sums.binary_sum import BinarySum
from dovetail.protocols.sums.real_sum import RealSum
from dovetail.statements import Bound, Neighbors, NotApplicable, Scope, Theorem, Trust, Unit, Verdict

__all__ = ["EPS", "PAPER", "curator_error", "error_exponent", "local_error", "measure_sum"]

EPS, DELTA = 1.0, 1e-6
_SIZES = (100, 316, 1000, 3162, 10_000, 31_623, 100_000)
_FEW_SIZES = (100, 1000, 10_000)
_CHUNK = 10_000  # users at a time
_MOST_REPORTS = 10**8  # to draw for one point
_METRIC = "squared error of the sum"
_NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "one message": ("real_sum", {"method": "single"}),
    "unary, sqrt(n) messages": ("real_sum", {"method": "unary"}),
    "split-and-mix, parallel shufflers": ("real_sum", {"method": "split"}),
}
_BITS: dict[str, tuple[str, dict[str, Any]]] = {"shuffle, one bit": ("binary_sum", {})}

Sum = BinarySum | RealSum


def measure_sum(name: str, size: int, settings: dict[str, Any], *, seeds: int, most_rounds: int) -> tuple[Row, Sum]:
    """A sum at one number of users, at a certified EPS.

    Arguments:
        name: of a protocol that sums, binary_sum or real_sum.
        size: how many users there are, all of whom hold the input that is worst for the protocol.
        seeds: how often the error is measured.
        most_rounds: at most so many rounds are run for each seed; fewer where users send many reports.

    Returns: a row with the statement, the exact squared error and the measured one; and the calibrated protocol.
    """
    plan = quotes.Terms(num_users=size, dim=1, delta=DELTA, settings=settings)
    parameter, value, quote = quotes.calibrate(name, plan, eps=EPS)
    protocol, _ = quotes.settle_protocol(name, plan.with_setting(parameter, value))
    if not isinstance(protocol, BinarySum | RealSum):
        raise ValueError(f"{name!r} does not estimate a sum: use binary_sum or real_sum")
    worst = _worst_input(protocol)
    reports = protocol.layout(1).reports_per_client
    rounds = int(np.clip(_MOST_REPORTS // (size * reports * seeds), 30, most_rounds))
    errors = [
        float(np.mean([(_estimate_sum_in_one_round(protocol, size, worst, key) - size * worst) ** 2 for key in keys]))
        for keys in jax.random.split(jax.random.key(size), (seeds, rounds))
    ]
    row = Row(
        label=f"n = {size}",
        x=float(size),
        certified=quote.certified,
        ours=Measurement(metric=_METRIC, values=tuple(errors)),
        extra={
            "exact": protocol.variance(np.full(size, worst)),
            "reports per user": reports,
            "rounds": rounds * seeds,
            parameter: value,
        },
    )
    return row, protocol


def curator_error() -> float:
    """The squared error of a trusted curator's Gaussian noise on a sum of numbers in [0, 1]."""

    def eps_at(std: float) -> float:
        mechanism = Gaussian(std=std, sensitivity=1.0, neighbors=Neighbors.REPLACE_ONE)
        return accounting.bound([Round(mechanism=mechanism, participation=Everyone())], delta=DELTA).eps

    return accounting.smallest_noise(eps_at, eps=EPS) ** 2


def local_error(size: int) -> float:
    """The squared error of randomized response where nobody shuffles and EPS is each report's own."""
    return float(BinarySum(eps_local=EPS).variance(np.zeros(size)))


def error_exponent(rows: Sequence[Row], field: str | None = None) -> float:
    """The exponent of n in the squared error.

    Arguments:
        field: the extra column that holds the error; without it, the measured one is taken.
    """
    errors = [row.extra[field] if field else row.ours.mean for row in rows if row.ours]
    return float(np.polyfit(np.log([row.x or 1.0 for row in rows if row.ours]), np.log(errors), 1)[0])


def _worst_input(protocol: Sum) -> float:
    """The number that every user holds where the error is largest; the variance adds up over users."""
    if isinstance(protocol, BinarySum):
        return 0.0
    return max(np.linspace(0, 1, 1001).tolist(), key=lambda x: protocol.variance([x]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _collect_reports(protocol: Sum, users: int, x: float, key: jax.Array) -> Any:
    """What the protocol collects from so many users who all hold x; compiled for each protocol and number."""
    xs = jnp.full((users, 1), x)
    present = jnp.ones(users, bool)
    return fast_path(protocol, 1).collect(xs, present, (), keys=jax.random.split(key, users))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _estimate_sum_of_collected(protocol: Sum, size: int, collected: Any, key: jax.Array) -> jax.Array:
    """The sum that a protocol estimates from what was collected of `size` users."""
    tally = fast_path(protocol, 1).finish(collected, key=key)
    return size * protocol.estimate(tally, size, (), key=key)[0][0]


def _estimate_sum_in_one_round(protocol: Sum, size: int, x: float, key: jax.Array) -> float:
    """What one round estimates the sum to be, where everybody holds x."""
    sizes = [min(_CHUNK, size - start) for start in range(0, size, _CHUNK)]
    parts = [_collect_reports(protocol, users, x, jax.random.fold_in(key, i)) for i, users in enumerate(sizes)]
    total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    return float(_estimate_sum_of_collected(protocol, size, total, jax.random.fold_in(key, size)))


def _rows_by_size(runner: Runner, protocols: dict[str, tuple[str, dict[str, Any]]]) -> Iterator[Row]:
    """One measured row, with the exact attack, per protocol and number of users."""
    sizes = _FEW_SIZES if runner.quick else _SIZES
    for series, (name, settings) in protocols.items():
        for size in sizes:
            runner.observe(f"{series}, {size} users")
            row, _ = measure_sum(name, size, settings, seeds=runner.seeds, most_rounds=60 if runner.quick else 300)
            audited = runner.best_exact_bound(
                name, quotes.Terms(num_users=size, dim=1, delta=DELTA, settings=_settings_with_noise(row, settings))
            )
            yield _row_in_series(row, series, audited)


def _settings_with_noise(row: Row, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the noise that the row was measured with, so that it is not calibrated again."""
    noise = {key: row.extra[key] for key in ("eps_local", "noise_multiplier") if key in row.extra}
    return {**settings, **noise}


def _row_in_series(row: Row, series: str, audited: Any) -> Row:
    return dataclasses.replace(row, series=series, label=f"{series}, {row.label}", audited=audited)


def _row_of_exact_error(name: str, size: int, error: float, note: str) -> Row:
    return Row(label=f"{name}, n = {size}", series=name, x=float(size), extra={"exact": error}, note=note)


def _number_rows(runner: Runner) -> Iterator[Row]:
    """Sums of numbers in [0, 1]: the shuffled protocols, and a curator's error by its formula."""
    yield from _rows_by_size(runner, _NUMBERS)
    for size in _FEW_SIZES if runner.quick else _SIZES:
        yield _row_of_exact_error("curator", size, curator_error(), "Gaussian noise, by its formula")


def _bit_rows(runner: Runner) -> Iterator[Row]:
    """Sums of bits: the shuffled protocols, and the errors of a curator and of nobody trusted by their formulas."""
    yield from _rows_by_size(runner, _BITS)
    for size in _FEW_SIZES if runner.quick else _SIZES:
        yield _row_of_exact_error("curator", size, curator_error(), "Gaussian noise, by its formula")
        yield _row_of_exact_error(
            "local", size, local_error(size), "randomized response at eps_local 1, by its formula"
        )


def _error_figure(title: str) -> Any:
    """The function from rows to one figure of squared error over users, exact and measured."""

    def figures(rows: Sequence[Row]) -> list[Figure]:
        exact = sweep_lines(rows, lambda row: row.extra.get("exact"), suffix=", exact")
        measured = sweep_lines(rows, measured_mean, style="points", suffix=", measured")
        return [
            Figure(title=title, x_label="users", y_label=_METRIC, log_x=True, log_y=True, lines=(*exact, *measured))
        ]

    return figures


def _error_exponent_notes(rows: Sequence[Row]) -> list[str]:
    """One sentence per series: with which power of n its squared error grows, exactly and measured."""
    notes = []
    for series in dict.fromkeys(row.series for row in rows if row.ours):
        points = [row for row in rows if row.series == series]
        exact, measured = error_exponent(points, "exact"), error_exponent(points)
        notes.append(f"{series}: squared error grows as n^{exact:.2f}, measured n^{measured:.2f}.")
    return notes


def _bit_notes(rows: Sequence[Row]) -> list[str]:
    """The exponents, and what the survey's printed estimate and error of a bit sum come to."""
    size = 10_000
    prob = 0.1
    wrong = published.binary_sum_estimate(reports_sum=size * prob / 2, num_users=size, prob_random=prob)
    rate = published.error_shuffled_response(eps=EPS, delta=DELTA)
    return [
        *_error_exponent_notes(rows),
        f"Eq. 6 as printed, {size} users who all hold 0 and lie with probability {prob:g}: it estimates "
        f"{wrong.value:.0f} ones. {wrong.reason}",
        f"The printed error sqrt(1/delta)/eps is {rate.value:.0f} here. {rate.reason}",
    ]


def _best_bound(eps_local: float, size: int) -> Bound:
    """The best bound on a shuffled bit; where none gains anything, what the report itself promises."""
    try:
        best = table.best(Report(kind="rr", eps_local=eps_local, levels=2), num_users=size, delta=DELTA).bound
    except NotApplicable:
        best = None
    return best or Bound(
        eps=eps_local, delta=0.0, proof=Theorem(key="W65", where="randomized response, Warner 1965").proof
    )


def _amplification_rows(runner: Runner) -> Iterator[Row]:
    """The survey's printed amplification bounds, each beside the best certified bound and an exact attack."""
    scope = Scope(
        trust=Trust.SHUFFLE,
        adversary="analyzer",
        neighbors=Neighbors.REPLACE_ONE,
        unit=Unit.USER,
        assumptions=("users draw fresh, independent noise", "the shuffler permutes uniformly"),
    )
    claims = {
        "Sec. 5.5, blanket": published.amplification_single,
        "Sec. 5.5, Erlingsson et al.": published.amplification_erlingsson,
        "Sec. 5.2, m shufflers": published.amplification_multi,
    }
    for size, eps_local in ((1000, 0.5), (10_000, 1.0), (1_000_000, 4.0), (1_000_000, 14.0)):
        certified = scope.state(_best_bound(eps_local, size), Verdict.CERTIFIED, span="one report")
        audited = runner.best_exact_bound(
            "binary_sum", quotes.Terms(num_users=size, dim=1, delta=DELTA, settings={"eps_local": eps_local})
        )
        for name, claim in claims.items():
            try:
                claimed = claim(eps_local=eps_local, num_users=size, delta=DELTA).statement(scope, span="one report")
                why = ""
            except NotApplicable as refusal:
                claimed, why = None, f"outside the condition that is printed: {refusal}"
            yield Row(
                label=f"{name}, n = {size:g}, eps_local {eps_local:g}",
                claimed=claimed,
                certified=certified,
                audited=audited,
                note=why,
            )


def _trust_rows(runner: Runner) -> Iterator[Row]:
    """One training on MNIST for every model of trust, from nobody protected to nobody trusted."""
    local = (("protocol", {"name": "ldp_fl", "clip_norm": 1.0}), ("server.learning_rate", 0.05))
    yield runner.training_row("nobody protected (FedSGD)", "mnist-fedavg", [("cohort.epochs", 1)])
    yield runner.training_row("curator: DP-FL", "mnist", attack=True)
    yield runner.training_row("two shufflers: split-and-mix", "mnist-split-and-mix", attack=True)
    yield runner.training_row("one shuffler, one message per user: PrivUnit", "mnist-privunit", attack=True)
    yield runner.training_row("one shuffler, one message per coordinate: SS-Simple", "mnist-ss-simple", attack=True)
    yield runner.training_row("local: LDP-FL, Gaussian", "mnist", local, attack=True)


PAPER = Paper(
    name="survey",
    title="Recent progress of differentially private federated learning with the shuffle model",
    citation="Ahmed, Wu, Dushime, Tao (2021)",
    reference="Survey",
    minutes={"cpu": 6.0, "gpu": 4.0},
    parts=(
        Part(
            key="numbers",
            title="Sec. 5.3: mean squared error of real summation",
            caption="The sum of n numbers in [0, 1] at a certified central (1, 1e-6), recalibrated for each n, on the "
            "worst input. The survey quotes O(n^(1/3)) for one message and O(1) for several; the recursive protocol "
            "of Balle et al. (2020) with O(log log n) messages is not implemented.",
            rows=_number_rows,
            figures=_error_figure("The sum of n numbers in [0, 1]"),
            notes=_error_exponent_notes,
        ),
        Part(
            key="binary",
            title="Sec. 5.4: binary summation under three trust models",
            caption="How many of n users hold a one, at a certified (1, 1e-6): a trusted curator, one shuffled bit per "
            "user, and the local model, where each report alone has eps 1.",
            rows=_bit_rows,
            figures=_error_figure("The sum of n bits"),
            notes=_bit_notes,
        ),
        Part(
            key="amplification",
            title="Sec. 5.2 and 5.5: amplification by shuffling",
            caption="Randomized response on a bit, delta 1e-6. The survey prints rates; we take their constants as 1, "
            "which no theorem supports.",
            rows=_amplification_rows,
        ),
        Part(
            key="trust",
            title="Three trust models, one training",
            caption="Logistic regression on MNIST, one image per user, 1000 users per round, one epoch, replacement, "
            "certified (1, 5e-6) except for the first row. Attacks are exact, on all rounds of a user.",
            rows=_trust_rows,
        ),
    ),
)
