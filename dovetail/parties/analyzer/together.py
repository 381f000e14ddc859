"""Whether an analyzer's ledger and book belong together, or one of them was restored from an older copy."""

from __future__ import annotations

from dovetail.parties.analyzer.book import Book
from dovetail.parties.common.ledger import Ledger

__all__ = ["check_together"]


def check_together(ledger: Ledger, book: Book) -> None:
    """Refuse a ledger and a book of different times; a model that the ledger released last is bound to it."""
    released = ledger.released
    if released is not None:
        kept = book.model(released.round)
        if kept is None or kept.digest != released.model:
            raise ValueError("expected the models that the ledger released, got a book without the last of them")
        head = ledger.release(released.round, model=released.model)
        if kept.head is None:  # killed between the ledger and the book
            book.confirm(released.round, head)
        ledger.check(model=kept.digest, head=kept.head or head)
    newest = book.model()
    if newest is not None and newest.head is not None and newest.round > (released.round if released else 0):
        raise ValueError("expected the ledger that released the last model, got an older one")
    reserved = max(entry.round for entry in ledger.entries)
    settled = book.settled()
    if settled > reserved:
        raise ValueError("expected the ledger that reserved the last round, got an older one")
    if reserved > settled + 1:
        raise ValueError("expected the book of the rounds that were reserved, got an older one")
