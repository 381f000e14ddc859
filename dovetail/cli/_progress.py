"""Bars over steps of which each takes a while, and over rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dovetail.cli._shared import progress_console
from dovetail.numbers import at_most

__all__ = ["Steps", "rounds_bar", "steps"]


class Steps:
    """What is done now, and how many steps were done before it."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task
        self._begun, self._title = 0, ""

    def begin(self, title: str) -> None:
        """The next step begins, and the one before it is done."""
        self._title = title
        self._bar.update(self._task, completed=self._begun, description=escape(title))
        self._begun += 1

    def say(self, text: str) -> None:
        """What is done within the step."""
        said = f"{self._title}: {text}" if self._title else text
        self._bar.update(self._task, description=escape(said))


@contextlib.contextmanager
def steps(total: int) -> Iterator[Steps]:
    """A bar on stderr that goes away at the end; nothing where nobody watches."""
    columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
    shown = progress_console.is_terminal and not progress_console.quiet
    with Progress(*columns, TimeElapsedColumn(), console=progress_console, transient=True, disable=not shown) as bar:
        yield Steps(bar, bar.add_task("", total=total))


@contextlib.contextmanager
def rounds_bar(rounds: int, *, reproducible: bool) -> Iterator[Any]:
    """A bar over the rounds of a training, with its scores; lines now and then where nobody watches."""
    columns = (
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=progress_console, transient=True) as bar:
        task = bar.add_task("", total=rounds)

        def observe(progress: Any) -> None:
            said = ""
            if progress.metrics is not None:
                spent = progress.spent
                eps = (
                    f"({at_most(spent.eps)}, {at_most(spent.delta)})-DP"
                    if spent and spent.eps < float("inf")
                    else "no guarantee"
                )
                said = f"{_score(progress)}, {eps}{' (noise is reproducible)' * reproducible}"
            bar.update(task, completed=progress.round, description=said)
            if not progress_console.is_terminal and progress.round % max(1, rounds // 10) == 0:
                progress_console.print(f"round {progress.round}/{rounds} {said}", highlight=False, markup=False)

        yield observe


def _score(progress: Any) -> str:
    if progress.accuracy is not None:
        return f"accuracy {progress.accuracy:.2%}"
    name = "r2" if progress.metrics.get("r2") is not None else "loss"
    return f"{name.upper() if name == 'r2' else name} {progress.metrics[name]:.4g}"
