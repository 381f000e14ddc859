"""Pages that open offline: a run's report, a comparison, the reproduction of a paper, and the index of all papers.

Every page is drawn from the data files beside it and from nothing else, holds no script and loads nothing. What is
promised comes first, in words; numbers never stand without their scope.
"""

from __future__ import annotations

from dovetail.pages.registry import registry
from dovetail.pages.run import write
from dovetail.pages.studies import write_comparison_page, write_index_page, write_paper_page

__all__ = ["registry", "write", "write_comparison_page", "write_index_page", "write_paper_page"]
