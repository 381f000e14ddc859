"""The papers' experiments as configs and tables: what was printed, what is certified, what we measured.

One file a paper; each gives its rows, `tables` runs them and writes them.
"""

import dovetail.papers.geyer as geyer
import dovetail.papers.subdp as subdp
from dovetail.papers._table import Outcome, Row, Table, reproduce

__all__ = ["PAPERS", "Outcome", "Row", "Table", "reproduce"]

PAPERS = {"geyer": geyer.table, "subdp": subdp.table}
