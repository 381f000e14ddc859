"""The command that asks a trained model: `predict`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import typer

from dovetail.cli._shared import JsonFlag, Quiet, TrustCode, out_console, print_json, progress_console

__all__ = ["predict"]


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    data: Annotated[Path, typer.Argument(help="Rows to predict: .csv, .tsv, .parquet, or an array in .npy.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Your own model, if the run trained one: an object of a module, which is imported.",
            metavar="MODULE:OBJECT",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write. Default: standard output.")] = None,
    trust_code: TrustCode = False,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Predict rows with a trained model: a column of answers, and the probability of every class or label."""
    from dovetail import experiment
    from dovetail.files import write_table

    with progress_console.status("predicting"):
        loaded = experiment.load(run, model=None if model is None else _own_model(model), trust_code=trust_code)
        rows = _rows_with_answers(loaded.predictor, data)
    if out is not None:
        write_table(out, rows)
    if as_json:
        print_json({"rows": len(rows), "predictions": rows, "out": None if out is None else str(out)})
    elif out is None:
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        out_console.print(f"{len(rows)} predictions: {out}", markup=False, highlight=False)


def _own_model(name: str) -> Any:
    """The model that the user names as "module:object"; naming it is to trust it."""
    from dovetail import _imports

    if ":" not in name:
        raise ValueError(f"expected --model module:object, such as --model mynet:net, got {name!r}")
    return _imports.import_named(
        name, what="model", kind="model, a module or a function that makes one", accept=_is_model_or_maker
    )


def _is_model_or_maker(value: object) -> TypeGuard[Any]:
    """Whether this may be a model; what it is exactly `load` finds out."""
    return value is not None and (callable(value) or type(value).__name__ == "Model")


def _rows_with_answers(predictor: Any, data: Path) -> list[dict[str, Any]]:
    """One row per record: the answer, and beside it what the model thinks of every other."""
    import numpy as np

    if not data.is_file():
        raise FileNotFoundError(f"there is no file {str(data)!r}: give a file of rows (.csv, .tsv, .parquet or .npy)")
    logits = predictor.logits(np.load(data, allow_pickle=False) if data.suffix == ".npy" else data)
    answer = predictor.recipe.answer
    answers = answer.decode(logits)
    names = answer.classes or tuple(range(answer.size))
    if answer.kind == "number":
        return [{"prediction": float(value)} for value in answers]
    probabilities = answer.probabilities(logits).tolist()
    if answer.kind == "labels":
        return [
            dict(zip(map(str, names), ones, strict=True))
            | {f"p({name})": p for name, p in zip(names, row, strict=True)}
            for ones, row in zip(answers.tolist(), probabilities, strict=True)
        ]
    return [
        {"prediction": value, **{f"p({name})": p for name, p in zip(names, row, strict=True)}}
        for value, row in zip(answers.tolist(), probabilities, strict=True)
    ]
