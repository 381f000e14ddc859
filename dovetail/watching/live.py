"""A page that shows a training while it runs: a file that reloads itself, without a server, a port or a script.

It is written anew after rounds, complete or not at all, and says at the end how the training ended: from then on it no
longer reloads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.experiment import Callback, Progress, Result, RunStart
from dovetail.experiment.folder import RunFolder
from dovetail.figures import Figure, Line
from dovetail.files import make_folder
from dovetail.numbers import at_most
from dovetail.templating import draw_inline, write_page

__all__ = ["LivePage"]

_RELOAD = 2  # seconds


class LivePage(Callback):
    """Writes a page to `path` that follows a training: scores, spent eps, rounds, and how long it will still take."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self._clock = clock
        self._start: RunStart | None = None
        self._history: list[dict[str, Any]] = []
        self._began = self._written = 0.0  # when the training began, and the page was written last, by the clock
        self._first: tuple[int, float] | None = None  # the first round, which compiles, and when it was over

    def on_start(self, start: RunStart) -> None:
        """Write the first page; a training that goes on from a checkpoint has its earlier scores in it."""
        self._start = start
        self._began = self._clock()
        self._first = None
        self._history = RunFolder(start.folder).read_metrics() if start.round and start.folder else []
        make_folder(self.path.parent)
        self._write(start.round, "runs")

    def on_round(self, progress: Progress) -> None:
        """Write the page again, where there are new scores or the last one is older than `_RELOAD` seconds."""
        self._first = self._first or (progress.round, self._clock())
        if progress.fresh:
            self._history.append(progress.to_json())
        if progress.fresh or self._clock() - self._written >= _RELOAD:
            self._write(progress.round, "runs")

    def on_end(self, result: Result) -> None:
        """Write the last page, with the statement."""
        self._write(result.rounds, "finished", message=str(result.statement), report=result.out is not None)

    def on_failure(self, error: BaseException) -> None:
        """Write the last page, which says that the training failed or was interrupted."""
        stopped = isinstance(error, KeyboardInterrupt)
        done = self._history[-1]["round"] if self._history else 0
        self._write(done, "interrupted" if stopped else "failed", message="" if stopped else str(error))

    def _write(self, done: int, state: str, *, message: str = "", report: bool = False) -> None:
        """Write the page; nothing if the training failed before it began.

        Arguments:
            done: how many rounds are done.
            state: "runs", "finished", "interrupted" or "failed"; a page that says "runs" reloads itself.
            message: the statement, or the error.
            report: whether there will be a report beside the run.
        """
        start = self._start
        if start is None:  # it failed before it began
            return
        self._written = self._clock()
        write_page(
            self.path,
            "live.html.jinja",
            title=start.config["task"]["name"],
            protocol=start.protocol["name"],
            state=state,
            reload=_RELOAD if state == "runs" else None,
            done=done,
            rounds=start.rounds,
            share=f"{100 * done / max(1, start.rounds):.1f}",
            tiles=self._tiles(start, done, state),
            message=message,
            report=report,
            resumable=start.folder,
            figures=draw_inline(self._figures()),
        )

    def _tiles(self, start: RunStart, done: int, state: str) -> list[tuple[str, str]]:
        """Titles and values of the boxes at the top: round, score, spent and target eps, and the time, as text."""
        last = self._history[-1] if self._history else None
        tiles = [("round", f"{done} of {start.rounds}")]
        if last is not None:
            tiles += [_score_in_words(last)] if last["metrics"] is not None else []  # private until the end
            spent = "no guarantee" if last["eps"] is None else f"({at_most(last['eps'])}, {at_most(last['delta'])})"
            tiles.append((f"(eps, delta) spent, {start.config['privacy']['neighbors']}", spent))
        if start.eps is not None:
            tiles.append(("target", f"({at_most(start.eps)}, {at_most(start.delta)})"))
        now = self._clock()
        tiles.append(("elapsed", _duration_in_words(now - self._began)))
        if state == "runs" and self._first is not None and done > self._first[0]:
            left = (now - self._first[1]) / (done - self._first[0]) * (start.rounds - done)
            tiles.append(("left, about", _duration_in_words(left)))
        return tiles

    def _figures(self) -> list[Figure]:
        """The score and the spent eps over the rounds; no figure before the second evaluation."""
        if len(self._history) < 2:
            return []
        rounds = [line["round"] for line in self._history]
        name, _ = _score_in_words(self._history[-1])
        percent = name == "accuracy"
        values = [line["accuracy"] if percent else (line["metrics"] or {}).get(name) for line in self._history]
        figures = [
            Figure(
                title=name, x_label="round", y_label=f"test {name}", lines=[Line(name="", x=rounds, y=values)],
                percent_y=percent,
            )
        ]  # fmt: skip
        if self._history[-1]["metrics"] is None:
            figures = []
        spent = [line["eps"] for line in self._history]
        if any(eps is not None for eps in spent):
            label = f"eps at delta {self._history[-1]['delta']}"
            figures.append(
                Figure(title="spent", x_label="round", y_label=label, lines=[Line(name="", x=rounds, y=spent)])
            )
        return figures


def _score_in_words(line: dict[str, Any]) -> tuple[str, str]:
    """The first score of accuracy, R2 and loss in a line of `metrics.jsonl`: its name, and its value as text."""
    if line["accuracy"] is not None:
        return "accuracy", f"{line['accuracy']:.2%}"
    metrics = line["metrics"] or {}
    name = "r2" if metrics.get("r2") is not None else "loss"
    return name, "not a number" if metrics.get(name) is None else f"{metrics[name]:.4g}"


def _duration_in_words(seconds: float) -> str:
    """Seconds as text in two units: "2 h 5 min", "3 min 20 s", "4 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
