"""What a run spends, in the ledger of all runs on the same people (`ledgers`).

A run reserves all that it may spend before its first round; at its end the reservation becomes what is charged. What
was reserved stays spent where a run ends early, unless not even its first round began. A ceiling, of the ledger or of
the run, stops a run that would exceed it before anything of it is written.

Which ledger that is follows from the data: their fingerprint (`data.people`) under the owner's key (`fingerprint`) is
its name in the user's folder. Or the user names a file: all runs that name it add up, whatever their tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from dovetail.experiment.fingerprint import VARIABLE as KEY_VARIABLE
from dovetail.experiment.fingerprint import data_key, key_path
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.ledgers import (
    VARIABLE,
    Ceiling,
    LedgerRun,
    SpendingLedger,
    Together,
    ledger_folder,
    ledger_of,
    parse_ceiling,
    resolve_ledger,
    utc_timestamp,
)
from dovetail.experiment.preparation import Plan
from dovetail.files import make_folder
from dovetail.guarantee import Record
from dovetail.guarantee.across import RunSpending

__all__ = ["Account", "open_account", "open_account_of_plan", "settle_finished_run"]

_SWITCH = {"on": True, "off": False}


@dataclasses.dataclass(kw_only=True)
class Account:
    """A run's place in a ledger: it reserves before the first round, and settles or gives back at the end.

    Without a ledger nothing is written, and `missing` says why there is none.
    """

    ledger: SpendingLedger | None
    ceiling: Ceiling | None
    what: str
    task: str
    protocol: str
    folder: str | None
    people: str | None
    missing: str | None = None
    has_reserved: bool = False
    run: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))

    def reserve(self, record: Record) -> None:
        """Reserve what these rounds spend; raises `CeilingReached` where they exceed a ceiling."""
        if self.ledger is None:
            return
        run = LedgerRun(
            id=self.run,
            time=utc_timestamp(),
            what=self.what,
            task=self.task,
            protocol=self.protocol,
            folder=self.folder,
            people=self.people,
            ended=False,
            spending=RunSpending.from_record(record),
        )
        self.ledger.reserve(run, ceiling=self.ceiling)
        self.has_reserved = True

    def give_back(self) -> None:
        """Give back what was reserved, where not even the first round began."""
        if self.ledger is not None and self.has_reserved:
            self.ledger.give_back(self.run)
            self.has_reserved = False

    def total_with(self, record: Record) -> Together | None:
        """What all runs have spent together once this one is settled at this record; None without a ledger."""
        return None if self.ledger is None else self.ledger.total_with_run(self.run, RunSpending.from_record(record))

    def settle(self, record: Record) -> None:
        """End the run: it is charged what this record spends."""
        if self.ledger is not None:
            self.ledger.settle(self.run, RunSpending.from_record(record))

    def write_ledger_link(self, folder: RunFolder) -> None:
        """Write into the run's folder where it is counted, for whoever resumes it."""
        if self.ledger is not None:
            folder.write_ledger_link({"ledger": str(self.ledger.path.absolute()), "run": self.run})

    def resume_reservation(self, folder: RunFolder) -> None:
        """Go on with the reservation of a run that is resumed; a run that has ended there begins anew.

        A run that was started without a ledger, and has one now, is charged from its first round.
        """
        link = folder.read_ledger_link()
        if link is None or self.has_reserved:
            return
        path = Path(link["ledger"])
        if not path.exists():
            raise ValueError(
                f"the run in {str(folder.path)!r} is counted in the ledger {str(path)!r}, which is not there: bring it "
                "back to go on"
            )
        self.ledger, self.missing = SpendingLedger(path), None
        if not any(run.id == link["run"] and run.ended for run in self.ledger.runs()):
            self.run = link["run"]


def open_account(
    *,
    ledger: str | Path | bool | None,
    ceiling: float | str | Sequence[float] | Ceiling | None,
    people: bytes | None,
    published: bool,
    task: str,
    protocol: str,
    what: str = "run",
    out: Path | None = None,
) -> Account:
    """The place of a run in a ledger; nothing is written.

    Arguments:
        ledger: a file, by its path or name; True or "on" for that of the data's people in the user's folder, False or
            "off" for none. None is True for data that are not published, unless DOVETAIL_LEDGERS is "off".
        ceiling: what all runs together may spend at most, as `parse_ceiling` reads it.
        people: the fingerprint of the people (`data.people`), not keyed; None where it is not known.
        published: whether the data are public.
        what: "run", "tuning" or "audit".
        out: the run's folder, in which the data's key must not lie.
    """
    account = Account(
        ledger=None,
        ceiling=None if ceiling is None else parse_ceiling(ceiling),
        what=what,
        task=task,
        protocol=protocol,
        folder=None if out is None else str(out),
        people=None,
    )
    chosen = ledger is not None
    if isinstance(ledger, str) and ledger.lower() in _SWITCH:
        ledger = _SWITCH[ledger.lower()]
    if isinstance(ledger, str | Path):
        account.ledger = resolve_ledger(ledger)
        make_folder(account.ledger.path.parent)
        account.people = None if people is None else _fingerprint_of_people(people, out, needed=False)
        return account
    if ledger is False or (ledger is None and published):
        account.missing = "no ledger was asked for" if chosen else "the data are published"
    elif (folder := ledger_folder()) is None:
        account.missing = f"{VARIABLE} is off"
    elif people is None:
        account.missing = "it is not known whose data these are"
    else:
        try:
            account.people = _fingerprint_of_people(people, out, needed=True)
            make_folder(folder)
        except ValueError as error:
            if chosen or account.ceiling is not None or KEY_VARIABLE in os.environ:
                raise
            account.missing = str(error)
        else:
            account.ledger = ledger_of(str(account.people), folder)
    if account.ledger is None and account.ceiling is not None:
        raise ValueError(f"a ceiling needs a ledger of what was spent, and there is none: {account.missing}")
    return account


def open_account_of_plan(
    plan: Plan,
    *,
    ledger: str | Path | bool | None,
    ceiling: float | str | Sequence[float] | Ceiling | None = None,
    what: str = "run",
    out: Path | None = None,
) -> Account:
    """The place of a run of this plan in the ledger of its people; `open_account` says what the arguments are."""
    return open_account(
        ledger=ledger,
        ceiling=ceiling,
        people=plan.dataset.people,
        published=plan.task.published,
        task=plan.dataset.name or plan.task.name,
        protocol=plan.sampler.protocol.name,
        what=what,
        out=out,
    )


def _fingerprint_of_people(people: bytes, out: Path | None, *, needed: bool) -> str | None:
    """The fingerprint of people under the data's key, in hexadecimal digits, the key made if there is none.

    Where no key can be made: ValueError if it is needed, or else None.
    """
    try:
        key = data_key(key_path(), out=out)
    except OSError as error:
        if not needed:
            return None
        raise ValueError(f"the data's key cannot be made ({error.strerror}); {KEY_VARIABLE} names a file") from error
    return hmac.digest(key, b"dovetail people 1" + people, "sha256").hex()


def settle_finished_run(folder: RunFolder) -> None:
    """Settle a run that has ended, but was killed before it was settled, at what its ledger.json charges."""
    link = folder.read_ledger_link()
    if link is None:
        return
    ledger = SpendingLedger(Path(link["ledger"]))
    if ledger.exists:
        with contextlib.suppress(ValueError):
            ledger.settle(link["run"], RunSpending.from_record(folder.read_ledger()))
    folder.delete_ledger_link()
