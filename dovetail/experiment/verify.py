"""Whether a finished run states what it did: its statements anew, from its ledger, by the accountant alone.

No plan is made; of the config only the name of the protocol is read, which may bring events of its own. The ledger
records every round that is charged; `privacy.json` is what the run states. Data are read only if their key is given.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from dovetail import _imports
from dovetail.data import Dataset, Task
from dovetail.experiment.fingerprint import different_data, key_path
from dovetail.experiment.folder import RunFolder
from dovetail.statements import Statement

__all__ = ["Verification", "import_data", "verify"]

_CLOSE = 1e-9  # relative difference of numbers that count as equal: other versions of the libraries round differently


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The statement that the ledger gives, and where `privacy.json` says something else."""

    run: Path
    rounds: int  # in the ledger
    statement: Statement  # the certified one, computed from the ledger
    differences: tuple[str, ...]  # a sentence each; none if everything agrees
    missing: tuple[str, ...] = ()  # files that were not there to be compared with the ledger's hashes
    data_checked: bool = False
    data: str | None = None  # why the data are not the run's, where that was checked

    @property
    def agrees(self) -> bool:
        """Whether the run states what its ledger gives, and the data, if they were checked, are the run's."""
        return not self.differences and self.data is None

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "run": str(self.run),
            "agrees": self.agrees,
            "rounds": self.rounds,
            "certified": self.statement.to_json(),
            "differences": list(self.differences),
            "missing": list(self.missing),
            **({"same_data": self.data is None, "data": self.data} if self.data_checked else {}),
        }


def verify(
    run: str | Path,
    *,
    data: Dataset | Task | None = None,
    data_key: str | Path | None = None,
    trust_code: bool = False,
) -> Verification:
    """Recompute the statements of a finished run from its ledger; with data or their key, check the data as well.

    Arguments:
        run: the folder of the run.
        data: what should be the run's data, read as they were read for the run; by default those that its config names,
            which needs `data` where the run was given a dataset.
        data_key: the file of the key that the run's data were fingerprinted with; by default, where there are `data`,
            the user's own.
        trust_code: whether a protocol or a task that the run names as "module:name" may be imported.

    Guarantees:
        Every statement of `privacy.json` but the paper's claim is compared, and every part of it; so are the noise's
        origin and the protocol's settings, which the ledger repeats.
        Model, recipe, config and origin are those that the run wrote, by the ledger's chain of hashes. A folder in
        which chain and `privacy.json` were changed together is found only by who kept the last hash.
        A ledger that no run can write, such as one of fewer than no rounds, is refused.
        No code is imported that the folder holds or names, unless `trust_code`.
    """
    run = Path(run)
    key = key_path() if data is not None and data_key is None else None if data_key is None else Path(data_key)
    folder = RunFolder(run)
    stated = folder.read_privacy()
    record = folder.read_ledger(trust_code=trust_code)
    settings = folder.read_settings()
    tuning = settings["tuning"]
    rounds = tuning.get("rounds") if isinstance(tuning, Mapping) else len(record.own.rounds)
    counted = "charged_rounds" if "charged_rounds" in stated else "rounds"  # a callback may have ended it
    computed = {**record.statements(), **settings, counted: rounds}
    return Verification(
        run=run,
        rounds=len(record.own.rounds),
        statement=record.certified_statement(),
        differences=(
            *_list_differences("", computed, {name: stated.get(name) for name in computed}),
            *folder.find_changes(),
        ),
        missing=folder.missing,
        data_checked=key is not None,
        data=None if key is None else different_data(run, key, given=data, trust_code=trust_code),
    )


def import_data(text: str) -> Dataset | Task:
    """The dataset or task "module:object" that a user names; the object may be a function that returns one."""
    found = _imports.import_named(
        text, what="dataset", kind="Dataset, Task, or function that returns one", accept=_is_data_or_maker
    )
    made = found if isinstance(found, Dataset | Task) else found()
    if not isinstance(made, Dataset | Task):
        raise ValueError(f"expected {text!r} to return a Dataset or a Task, got {type(made).__name__}")
    return made


def _is_data_or_maker(value: object) -> TypeGuard[Any]:
    return isinstance(value, Dataset | Task) or inspect.isfunction(value)


def _list_differences(where: str, computed: Any, stated: Any) -> Iterator[str]:
    """A sentence for each value that differs in two trees of plain data; `where` is the dotted path of their root."""
    if isinstance(computed, Mapping) and isinstance(stated, Mapping):
        for name in dict.fromkeys((*computed, *stated)):
            yield from _list_differences(f"{where}.{name}" if where else name, computed.get(name), stated.get(name))
    elif _is_list_or_tuple(computed) and _is_list_or_tuple(stated) and len(computed) == len(stated):
        for number, pair in enumerate(zip(computed, stated, strict=True)):
            yield from _list_differences(f"{where}[{number}]", *pair)
    elif not _is_equal_but_for_rounding(computed, stated):
        yield f"{where} is {stated!r} in privacy.json, and {computed!r} by the ledger"


def _is_list_or_tuple(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_equal_but_for_rounding(computed: Any, stated: Any) -> bool:
    """Whether two plain values are equal; floats but for rounding."""
    if isinstance(computed, float) and isinstance(stated, int | float) and not isinstance(stated, bool):
        return math.isclose(computed, stated, rel_tol=_CLOSE)
    return bool(computed == stated)
