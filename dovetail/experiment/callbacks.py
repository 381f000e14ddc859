"""How to watch a training: an object that is called when it starts, after each round, and when it ends.

A callback is told what the statement covers and nothing else: the config, scores of released models on the test
records where these are public, and what was spent. What raw updates were like it is told apart from that, by
`on_diagnostics`, and only where the config asks for diagnostics.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec

from dovetail import _validate
from dovetail.experiment.folder import BANNER
from dovetail.experiment.preparation import Plan
from dovetail.experiment.result import Progress, Result, describe_protocol

__all__ = [
    "OVERHEARD",
    "STOPPED",
    "STOPPED_BY_MODELS",
    "Callback",
    "Callbacks",
    "Diagnosis",
    "EarlyStopping",
    "RunStart",
]

STOPPED = "the training was ended by looking at released models and at public test records alone"
STOPPED_BY_MODELS = "the training was ended by looking at released models and at public numbers alone"
OVERHEARD = "what ended the training did not go by the diagnostics of raw updates, which one of the callbacks is told"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStart:
    """What is known of a training before its first round: its settings, and where it starts and is written to.

    `config` and `protocol` are plain data, the protocol's settings as they were settled; `round` is 0, or the round of
    the checkpoint that it goes on from, and `rounds` how many are planned.
    """

    config: Mapping[str, Any]
    protocol: Mapping[str, Any]
    round: int
    rounds: int
    eps: float | None  # the target
    delta: float
    folder: Path | None

    @classmethod
    def of(cls, plan: Plan, *, round: int, folder: Path | None) -> RunStart:
        """What callbacks are told when this plan is run.

        Arguments:
            round: the last round that is done already, 0 for a new run.
            folder: the folder that the run is written to, if any.
        """
        return cls(
            config=msgspec.to_builtins(plan.config),
            protocol=describe_protocol(plan.sampler.protocol),
            round=round,
            rounds=plan.num_rounds,
            eps=plan.config.privacy.eps,
            delta=plan.config.privacy.delta,
            folder=folder,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the raw updates of a round were like; `banner` says that no statement covers it."""

    round: int
    values: Mapping[str, float]
    banner: str = BANNER


class Callback:
    """Something that watches a training: override what you need.

    An exception in a callback ends the training as any other error does: nothing is certified, and a run with a folder
    can be resumed. Of several processes that train together, the first alone calls, and none can end the training.
    """

    def on_start(self, start: RunStart) -> None:
        """The first round is about to begin, or the first one after a checkpoint."""

    def on_round(self, progress: Progress) -> bool | None:
        """A round has ended; True ends the training here.

        What decides that must be public: `progress`, and no data of users. Where a callback is told diagnostics, that
        is declared, and the statement is one *as declared*. All rounds that were planned are charged,
        also those that are not run, for which of them are run depends on the models.
        """
        return None

    def on_diagnostics(self, diagnosis: Diagnosis) -> None:
        """A round has ended of which the config asks for diagnostics, which no statement covers: not for release."""

    def on_end(self, result: Result) -> None:
        """The training has ended, and its folder is written."""

    def on_failure(self, error: BaseException) -> None:
        """The training ends without a result: by an error, or by Ctrl-C (KeyboardInterrupt)."""


class EarlyStopping(Callback):
    """Ends a training when a score on the test records has not improved for a while.

    All planned rounds are charged: stopping saves time, not privacy.

    Arguments:
        metric: the score, by its name in `Progress.metrics`.
        public_test: declares that the test records are public; it must be True.
        patience: evaluations without a better score before it stops; a run has about twenty.
        lower_is_better: whether small scores are good; by default they are of "loss", "rmse" and "mae".
    """

    def __init__(
        self, metric: str = "loss", *, public_test: bool, patience: int = 3, lower_is_better: bool | None = None
    ) -> None:
        if not public_test:
            raise ValueError("EarlyStopping needs public_test=True: when it stops tells about the test records")
        _validate.positive(patience=patience)
        self.metric = metric
        self.patience = patience
        if lower_is_better is None:
            lower_is_better = metric in ("loss", "rmse", "mae")
        self._sign = -1 if lower_is_better else 1
        self._best = float("-inf")
        self._since = 0

    def on_start(self, start: RunStart) -> None:
        """Forget what an earlier training scored; refuses private test records, of which no scores are shown."""
        if start.config.get("task", {}).get("evaluate") == "private":
            raise ValueError(
                "EarlyStopping goes by scores of every evaluation, and with evaluate='private' there are none before "
                "the end: leave one of them out"
            )
        self._best = float("-inf")
        self._since = 0

    def on_round(self, progress: Progress) -> bool | None:
        """True where the last `patience` evaluations brought nothing better."""
        if not progress.fresh or progress.metrics is None:
            return None
        if self.metric not in progress.metrics:
            names = ", ".join(sorted(progress.metrics))
            raise ValueError(f"this training has no metric {self.metric!r}: choose one of {names}")
        score = progress.metrics[self.metric]
        if isinstance(score, int | float) and self._sign * score > self._best:
            self._best = self._sign * score
            self._since = 0
        else:
            self._since += 1
        return self._since >= self.patience


class Callbacks(Callback):
    """Several callbacks as one, called in their order."""

    def __init__(self, members: Sequence[Callback]) -> None:
        for member in members:
            if not isinstance(member, Callback):
                raise ValueError(f"expected callbacks that are dovetail.Callback objects, got {type(member).__name__}")
        self._members = tuple(members)

    def on_start(self, start: RunStart) -> None:
        """Call `on_start` of all callbacks."""
        for member in self._members:
            member.on_start(start)

    def on_round(self, progress: Progress) -> bool:
        """Call `on_round` of all callbacks; True if one of them ends the training.

        Never True where several processes train together: the others are not told, and would wait for this one.
        """
        requests = [member.on_round(progress) for member in self._members]
        return any(requests) and jax.process_count() == 1

    @property
    def reads_diagnostics(self) -> bool:
        """Whether one of the callbacks overrides `on_diagnostics`."""
        return any(type(member).on_diagnostics is not Callback.on_diagnostics for member in self._members)

    def on_diagnostics(self, diagnosis: Diagnosis) -> None:
        """Call `on_diagnostics` of all callbacks."""
        for member in self._members:
            member.on_diagnostics(diagnosis)

    def on_end(self, result: Result) -> None:
        """Call `on_end` of all callbacks."""
        for member in self._members:
            member.on_end(result)

    @contextlib.contextmanager
    def notify_failure(self) -> Iterator[None]:
        """Call `on_failure` of all callbacks if the block raises, and raise the same error again.

        An error in one callback's `on_failure` is ignored: the others are called, and the block's error is raised.
        """
        try:
            yield
        except BaseException as error:
            for member in self._members:
                with contextlib.suppress(Exception):
                    member.on_failure(error)
            raise
