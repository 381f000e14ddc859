"""The model of a finished run, back from its folder: ready to be asked, with its config and its statement.

The data are not needed: `recipe.json` says what the model reads, `config.toml` which model and features it is. A run's
folder is data: a model of one's own is given again, or imported with its task ("module:name") if the caller trusts that
code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import _imports
from dovetail.data import TASKS, resolve
from dovetail.experiment.config import Config, read
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.result import headline_facts, html_table
from dovetail.features import Features
from dovetail.learners.prediction import Predictor, model_from_recipe, own_model_from_recipe
from dovetail.statements import Statement

__all__ = ["LoadedRun", "load"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LoadedRun:
    """A finished run: its model, what it states, and how it was made.

    `privacy` is the content of `privacy.json` (docs/privacy-json.md), `statement` the certified one in it.
    """

    folder: Path
    config: Config
    statement: Statement
    privacy: Mapping[str, Any]
    predictor: Predictor

    @property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """The model's arrays by name."""
        return self.predictor.parameters

    def predict(self, rows: Any) -> np.ndarray:
        """One answer per row (a class, a number, or zeros and ones for labels); for `rows` see `Result.predict`."""
        return self.predictor.predict(rows)

    def predict_proba(self, rows: Any) -> np.ndarray:
        """The probability of every class, (rows, classes), or of every label, by the model."""
        return self.predictor.predict_proba(rows)

    def state_dict(self) -> Any:
        """The parameters in the form that the model's own library loads: see `Result.state_dict`."""
        return self.predictor.state_dict()

    def __repr__(self) -> str:
        return f"LoadedRun({', '.join(f'{key}: {value}' for key, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return html_table("Run", self._facts())

    def _facts(self) -> dict[str, str]:
        """What `repr` and a notebook show, as text by name."""
        return headline_facts(self.privacy, self.statement, out=self.folder)


def load(folder: str | Path, *, model: Any = None, trust_code: bool = False) -> LoadedRun:
    """The model of the finished run in a folder, with its statement and its config.

    Arguments:
        folder: what `train(out=)`, `Result.save` or `dovetail run` wrote.
        model: if the run trained a model of your own, the same again: a `Model`, a module of PyTorch, Flax or Equinox,
            or a function from a `RecordSpec` to one of these. Its weights are replaced by those of the run; what
            training left as it was, such as frozen layers and buffers, stays that of the model that you pass.
        trust_code: whether a task or features that the run names as "module:name" may be imported, also from its
            folder.

    Guarantees:
        Parameters that do not fit the model by name and shape are refused.
        No code that the run names is imported, unless `trust_code` says so.

    The statement is what the run states; `dovetail verify` recomputes it.
    """
    run = RunFolder(Path(folder))
    config = read(run.config, code_beside=trust_code)
    privacy = run.read_privacy()
    recipe = run.read_recipe()
    features = config.task.all_features
    with _imports.import_only_if_trusted(f"the run in {str(folder)!r}", trust_code=trust_code):
        _refuse_code_of(features)
        source = model if model is not None else _model_of(config)
        if source is not None:
            found = own_model_from_recipe(source, recipe, features)
        elif recipe.model == config.task.model:
            found = model_from_recipe(config.task.model, recipe, features)
        else:
            found = None
    if found is None or (model is None and found.name != recipe.model):
        raise ValueError(
            f"the run in {str(folder)!r} is of {recipe.model!r}, a model of your own, and its folder holds parameters "
            "but no code: pass the same model again, model=... (--model module:object)"
        )
    predictor = Predictor(
        model=found,
        parameters=run.read_parameters(),
        recipe=recipe,
        features=features,
    )
    try:
        predictor.check_parameters()
    except ValueError as error:
        raise ValueError(f"model {found.name!r} does not fit the parameters in {str(folder)!r}: {error}") from error
    return LoadedRun(
        folder=run.path,
        config=config,
        statement=Statement.from_json(privacy["certified"]),
        privacy=privacy,
        predictor=predictor,
    )


def _refuse_code_of(features: Features) -> None:
    """Refuse what would be imported when rows are predicted, unless the run's code is trusted."""
    if ":" in features.kind:
        _imports.refuse_untrusted(features.kind, what="features")
    if features.whiten is not None and ":" in features.whiten.on:
        _imports.refuse_untrusted(features.whiten.on, what="task to whiten on")


def _model_of(config: Config) -> Any:
    """The model that the config's task brings, if the task can be found by its name; else None."""
    name = config.task.name
    return resolve(name).model if ":" in name or name in TASKS else None
