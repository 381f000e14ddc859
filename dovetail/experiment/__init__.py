"""From a config to a trained model and its statement.

`prepare` (preparation.py, with the data side in population.py) turns a config (config.py) into a plan; `run`
(training.py) trains it, watched by callbacks (callbacks.py), and gives a `Result` (result.py), written to a folder
(folder.py). `load` (loading.py), verify.py and fingerprint.py work on a finished run's folder; tuning.py runs several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail._imports import lazy_getattr

if TYPE_CHECKING:
    from dovetail.experiment.callbacks import Callback, Diagnosis, EarlyStopping, RunStart
    from dovetail.experiment.entry import train
    from dovetail.experiment.loading import LoadedRun, load
    from dovetail.experiment.training import Finished, Progress, Result, prepare, run
    from dovetail.experiment.tuning import tune

__all__ = [
    "Callback",
    "Diagnosis",
    "EarlyStopping",
    "Finished",
    "LoadedRun",
    "Progress",
    "Result",
    "RunStart",
    "load",
    "prepare",
    "run",
    "train",
    "tune",
]

_HOMES = dict.fromkeys(__all__, "dovetail.experiment.training")  # the engine is large
_HOMES |= dict.fromkeys(("LoadedRun", "load"), "dovetail.experiment.loading")
_HOMES |= {"train": "dovetail.experiment.entry", "tune": "dovetail.experiment.tuning"}
_HOMES |= dict.fromkeys(("Callback", "Diagnosis", "EarlyStopping", "RunStart"), "dovetail.experiment.callbacks")
__getattr__ = lazy_getattr(__name__, _HOMES)
