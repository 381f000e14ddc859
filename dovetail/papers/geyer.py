"""Geyer, Klein, Nabi (2017): client-level privacy, eps 8, training until delta would be exceeded.

MNIST by two shards per client, 600 records each, an MLP of 784-200-200-10; the paper prints neither model nor local
training nor clip norm, so these were searched (see the presets). Each K is run with a fixed clip norm, with the private
quantile, with the paper's median (nothing certified), and with m_t rising threefold while sigma_t^2/m_t is held, at the
same budget and the same uploads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dovetail.claims import geyer
from dovetail.figures import Figure, Line
from dovetail.papers.exhibits import Paper, Part, Row, curve_lines
from dovetail.papers.runner import Overrides, Runner

__all__ = ["PAPER"]

_PRINTED: dict[int, dict[str, float]] = {
    100: {"accuracy": 0.78, "rounds": 11, "uploads": 550},
    1000: {"accuracy": 0.92, "rounds": 54, "uploads": 11880},
    10000: {"accuracy": 0.96, "rounds": 412, "uploads": 209500},
}
_NON_PRIVATE = {"accuracy": 0.97, "rounds": 380, "uploads": 38000}
_SIZES = {100: (25, 75), 1000: (110, 330), 10000: (254, 762)}
_DELTAS = {100: 1e-3, 1000: 1e-5, 10000: 1e-6}
_LONG = "it takes an hour or more without an accelerator"
_FIXED = "fixed clip"
_MEDIAN = "median (as published)"


def overrides_by_variant(clients: int) -> Mapping[str, Overrides]:
    """By name, the overrides of each way to set the clip norm and the schedule, for this number of clients."""
    first, last = _SIZES[clients]
    rounds = int(_PRINTED[clients]["rounds"])
    private = {"delta": _DELTAS[clients], "neighbors": "add-remove"}
    return {
        _FIXED: (),
        "private quantile": (
            ("protocol", {"name": "dp_fl", "clip": "adaptive", "clip_norm": 1.0}),
            ("cohort.rounds", rounds),
        ),
        _MEDIAN: (("protocol.clip", "median"), ("cohort.rounds", rounds), ("privacy", private)),
        "rising m_t": (
            ("protocol", {"name": "dp_fl", "clip": 1.0, "schedule": "held"}),
            ("cohort", {"kind": "poisson", "size": first, "size_end": last, "rounds": rounds}),
        ),
    }


def overrides_without_privacy(rounds: int) -> Overrides:
    """K = 100 without privacy; what the raw updates were like is drawn over the rounds."""
    return (
        ("diagnostics", True),
        ("protocol", {"name": "fedavg"}),
        ("cohort", {"kind": "everyone", "rounds": rounds}),
        ("privacy", {"delta": 1e-3, "neighbors": "add-remove"}),
    )


def _table_rows(runner: Runner) -> Iterator[Row]:
    """One training per number of clients and way to set the clip norm, then the one without privacy."""
    for clients, printed in _PRINTED.items():
        for name, overrides in overrides_by_variant(clients).items():
            if runner.quick and not (clients == 100 and name in (_FIXED, _MEDIAN)):
                continue
            label = f"K = {clients}, {name}"
            if clients == 10000 and not runner.has_accelerator:
                yield Row(label=label, paper=printed, not_here=_LONG)
                continue
            note = "the noise is scaled to the exact median and reveals it, so nothing is certified"
            yield runner.training_row(
                label,
                f"geyer-{clients}",
                overrides,
                paper=printed,
                series=name,
                attack=True,
                note=note if name == _MEDIAN else "",
            )
    rounds = _num_rounds(runner)
    yield runner.training_row(
        f"K = 100, non-private, {rounds} rounds",
        "geyer-100",
        overrides_without_privacy(rounds),
        paper=_NON_PRIVATE,
        series="none",
    )


def _num_rounds(runner: Runner) -> int:
    """Rounds of the non-private run: those that the paper took where there is an accelerator."""
    if runner.has_accelerator:
        return 380
    return 20 if runner.quick else 60


def _training_rows(runner: Runner) -> Iterator[Row]:
    """The trainings of the table that Fig. 2 draws: they were run already, and are not run again."""
    rounds = _num_rounds(runner)
    for clients, printed in _PRINTED.items():
        if (runner.quick and clients > 100) or (clients == 10000 and not runner.has_accelerator):
            yield Row(label=f"K = {clients}", paper=printed, not_here="left out of --quick" if runner.quick else _LONG)
            continue
        yield runner.training_row(
            f"K = {clients}", f"geyer-{clients}", overrides_by_variant(clients)[_FIXED], paper=printed, attack=True
        )
    yield runner.training_row(
        "non-private, K = 100", "geyer-100", overrides_without_privacy(rounds), paper=_NON_PRIVATE
    )


def _accuracy_figure(rows: Sequence[Row]) -> list[Figure]:
    return [
        Figure(title="Accuracy over the rounds", x_label="round", y_label="test accuracy", log_x=True, percent_y=True,
               lines=curve_lines(rows))
    ]  # fmt: skip


def _phase_rows(runner: Runner) -> Iterator[Row]:
    """The curves of the training without privacy: accuracy, and what the raw updates were like."""
    rounds = _num_rounds(runner)
    trained = runner.train("geyer-100", overrides_without_privacy(rounds), label="non-private, K = 100")
    named = {"accuracy": trained.accuracy, **trained.diagnostics}
    for name, title in _TITLES.items():
        if named.get(name):
            yield Row(label=title, curve=named[name], extra={"first": named[name][0][1], "last": named[name][-1][1]})


_TITLES = {"accuracy": "test accuracy", "variance": "between-clients variance V_c", "scale": "update scale U_s"}


def _phase_figures(rows: Sequence[Row]) -> list[Figure]:
    """One figure per curve, over rounds."""
    return [
        Figure(title=line.name, x_label="round", y_label=line.name, percent_y=line.name == "test accuracy",
               log_y=line.name != "test accuracy", lines=(line,))
        for line in curve_lines(rows)
    ]  # fmt: skip


def _noise_rows(runner: Runner) -> Iterator[Row]:
    """The noise multiplier that exhausts eps 8 in the paper's rounds, by each accountant."""
    for clients, printed in _PRINTED.items():
        rounds = int(printed["rounds"])
        prob = printed["uploads"] / rounds / clients
        multipliers = {
            name: geyer.noise_multiplier(
                prob=prob, rounds=rounds, eps=8.0, delta=_DELTAS[clients], accountant=name
            ).value
            for name in ("privacy-loss", "renyi", "moments")
        }
        yield Row(
            label=f"K = {clients}, delta {_DELTAS[clients]:g}, q {prob:.4g}, {rounds} rounds",
            paper={"rounds": rounds, "uploads": printed["uploads"]},
            x=float(clients),
            extra=multipliers,
        )


def _noise_figure(rows: Sequence[Row]) -> list[Figure]:
    """One figure: the noise multiplier over clients, a line per accountant."""
    names = ("privacy-loss", "renyi", "moments")
    lines = tuple(
        Line(name=name, x=tuple(row.x or 0.0 for row in rows), y=tuple(row.extra[name] for row in rows))
        for name in names
    )
    title = "Noise multiplier that exhausts eps 8"
    return [Figure(title=title, x_label="clients", y_label="noise multiplier", log_x=True, lines=lines)]


PAPER = Paper(
    name="geyer",
    title="Differentially private federated learning: a client level perspective",
    citation="Geyer, Klein, Nabi (2017)",
    reference="GKN17",
    minutes={"cpu": 25.0, "gpu": 15.0},
    parts=(
        Part(
            key="table1",
            title="Table 1: accuracy, rounds and uploads at eps 8",
            caption="The paper prints no model, local training, clip norm or m_t; ours were tuned on MNIST's first "
            "50,000 training images and evaluated on its last 10,000. Its accountant assumes Poisson sampling, which "
            "is what we run. Its median clipping reveals its own noise scale and is not certified; a fixed norm, a "
            "private quantile and a rising schedule are. K = 100 varies by about 3 points from seed to seed. "
            "Attacks are exact, on all rounds of one client; `dovetail audit dp_fl --set clip=median` attacks the "
            "median.",
            rows=_table_rows,
        ),
        Part(
            key="fig2",
            title="Figure 2: accuracy over the course of training",
            caption="The runs of Table 1 with a fixed clip norm. A curve ends where one more round would exceed delta.",
            rows=_training_rows,
            figures=_accuracy_figure,
        ),
        Part(
            key="fig3",
            title="Figure 3: accuracy, between-clients variance and update scale without privacy",
            caption="Diagnostics of raw updates, K = 100, non-private; no statement covers them. The paper sees two "
            "phases: updates are first large and similar, then small and different.",
            rows=_phase_rows,
            figures=_phase_figures,
        ),
        Part(
            key="noise",
            title="The noise that the printed rounds and uploads allow",
            caption="Noise multipliers that exhaust (8, delta), Poisson sampling, add-remove: by the tight accountant, "
            "by Renyi orders, and by the moments accountant that the paper uses.",
            rows=_noise_rows,
            figures=_noise_figure,
        ),
    ),
)
