"""`train`, the simplest entry point, in a module that loads nothing of what a training needs before one begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dovetail.data import Dataset, Loss, Metric, Task
    from dovetail.experiment.callbacks import Callback
    from dovetail.experiment.result import Result

__all__ = ["train"]


def train(
    task: str | Task | Dataset,
    *,
    model: Any = None,
    loss: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    protocol: str = "dp_fl",
    eps: float | None = None,
    delta: float | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    ledger: str | Path | bool | None = None,
    ceiling: float | tuple[float, float] | None = None,
    evaluate: Literal["public", "private"] | None = None,
    force: bool = False,
) -> Result:
    """Train a model with differential privacy: the simplest entry point.

    Arguments:
        task: a registered name, ``"module:name"``, a `Task` or a `Dataset`.
        model: a bundled model by name, a `Model`, a module of PyTorch, Flax or Equinox, or a function from a
            `RecordSpec` to one of these.
        loss: a name of `learners.losses.LOSSES`, or a function ``(outputs, labels) -> one loss per record``.
        metrics: functions ``(outputs, labels) -> number`` of the test records, by name.
        protocol: the protocol's name; every protocol has defaults for all its settings but the noise.
        eps: the target; without one, `settings` must give the noise.
        delta: the delta of the target and of the statement.
        settings: config keys by dotted path, for example ``{"cohort.rounds": 50}``; they override everything else.
        out: the folder to write to; without one nothing is written.
        resume: go on with the run that was interrupted in `out`, given the same arguments.
        callbacks: objects that watch the training (see `Callback`).
        ledger: the ledger of what all runs on the same people have spent (docs/concepts/across-runs.md): a file, or
            False for none; by default, of data that are not published, that of these people in the user's folder.
        ceiling: eps, or (eps, delta), that all runs in the ledger may spend together; a run beyond it is refused.
        evaluate: "public" scores on test records that are public, without noise. "private" protects those who are
            held out, too: only the last model's scores are released, with noise in the same (eps, delta) and with
            intervals.
        force: train even where noise will drown the updates, which is refused otherwise.

    Before the first round it says how long the noise is beside the updates, and what to expect: as a warning where much
    accuracy will be lost, otherwise as a log message of level INFO (`experiment.outlook`).

    If a preset has the name of the task, training starts from it: model, cohort, server, the protocol's settings if
    it is the same protocol, and the privacy target if `eps` or `delta` is not given, which is (2, 1e-05) for "digits"
    and (1, 5e-06) for "mnist". Other tasks have a `delta` of 1e-05 and no `eps`. On a `Dataset`, rounds,
    clip norm, optimiser, step and averaging that `settings` leave open follow from the noise (`experiment.defaults`):
    there is nothing to tune, and nothing of the data decides.
    """
    from dovetail.experiment.outlook import Outlook
    from dovetail.experiment.training import prepare, run, start_of

    start = start_of(
        task,
        model=model,
        loss=loss,
        metrics=metrics,
        protocol=protocol,
        eps=eps,
        delta=delta,
        settings=settings,
        evaluate=evaluate,
    )
    plan = prepare(start.config, task=start.task, open_keys=start.open_keys)
    outlook = Outlook.of(plan)
    outlook.refuse_if_hopeless(force=force)
    outlook.log_expectation()
    return run(
        plan, out=None if out is None else Path(out), resume=resume, callbacks=callbacks, ledger=ledger, ceiling=ceiling
    )
