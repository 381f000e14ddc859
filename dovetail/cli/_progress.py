"""Bars over steps of which each takes a while, and over rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dovetail.cli._shared import err_console, progress_console, strip_control_characters
from dovetail.numbers import at_most

__all__ = ["RoundsBar", "Steps", "live_page", "rounds_bar", "steps"]


class Steps:
    """What is done now, and how many steps were done before it."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task
        self._begun, self._title = 0, ""

    def begin(self, title: str) -> None:
        """The next step begins, and the one before it is done."""
        self._title = title
        self._bar.update(self._task, completed=self._begun, description=escape(strip_control_characters(title)))
        self._begun += 1

    def say(self, text: str) -> None:
        """What is done within the step."""
        description = f"{self._title}: {text}" if self._title else text
        self._bar.update(self._task, description=escape(strip_control_characters(description)))


@contextlib.contextmanager
def steps(total: int) -> Iterator[Steps]:
    """A bar on stderr that goes away at the end; nothing where nobody watches."""
    columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
    shown = progress_console.is_terminal and not progress_console.quiet
    with Progress(*columns, TimeElapsedColumn(), console=progress_console, transient=True, disable=not shown) as bar:
        yield Steps(bar, bar.add_task("", total=total))


class RoundsBar:
    """A bar over the rounds of a training, with its scores; lines now and then where nobody watches."""

    def __init__(self, bar: Progress, rounds: int, *, reproducible: bool) -> None:
        self._bar, self._task, self._rounds = bar, bar.add_task("", total=rounds), rounds
        self._suffix = " (noise is reproducible)" * reproducible

    def update(self, progress: Any) -> None:
        """Where the training stands."""
        description = ""
        if progress.metrics is not None or progress.spent is not None:
            spent = progress.spent
            eps = (
                f"({at_most(spent.eps)}, {at_most(spent.delta)})-DP"
                if spent and spent.eps < float("inf")
                else "no guarantee"
            )
            score = "" if progress.metrics is None else f"{_score_in_words(progress)}, "  # private until the end
            description = f"{score}{eps}{self._suffix}"
        self._bar.update(self._task, completed=progress.round, description=description)
        if not progress_console.is_terminal and progress.round % max(1, self._rounds // 10) == 0:
            progress_console.print(
                f"round {progress.round}/{self._rounds} {description}", highlight=False, markup=False
            )


@contextlib.contextmanager
def rounds_bar(rounds: int, *, reproducible: bool, opening: str = "") -> Iterator[Any]:
    """A callback that moves a bar on stderr, which goes away at the end.

    Arguments:
        rounds: how many are planned.
        reproducible: whether the noise follows from the seed, which is said beside eps.
        opening: what is said when the first round is about to begin, after everything that could be refused was not.
    """
    from dovetail.experiment import Callback

    class Watcher(Callback):
        """Moves the bar."""

        def on_start(self, start: Any) -> None:
            if opening:
                progress_console.print(opening, markup=False, highlight=False)

        def on_round(self, progress: Any) -> None:
            shown.update(progress)

    columns = (
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=progress_console, transient=True) as bar:
        shown = RoundsBar(bar, rounds, reproducible=reproducible)
        yield Watcher()


def live_page(folder: Path) -> list[Any]:
    """The page that follows the run, and where it is."""
    from dovetail.watching import LivePage

    page = folder / "live.html"
    err_console.print(f"live page: {page.resolve().as_uri()}", markup=False, highlight=False)
    return [LivePage(page)]


def _score_in_words(progress: Any) -> str:
    if progress.accuracy is not None:
        return f"accuracy {progress.accuracy:.2%}"
    name = "r2" if progress.metrics.get("r2") is not None else "loss"
    return f"{name.upper() if name == 'r2' else name} {progress.metrics[name]:.4g}"
