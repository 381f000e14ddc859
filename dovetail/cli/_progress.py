"""A bar over steps of which each takes a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dovetail.cli._shared import err_console

__all__ = ["Steps", "steps"]


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
    shown = err_console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=err_console, transient=True, disable=not shown) as bar:
        yield Steps(bar, bar.add_task("", total=total))
