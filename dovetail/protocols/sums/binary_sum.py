"""Binary summation: how many of n users hold a one, from one shuffled bit per user (Survey 5.4).

A user sends its bit, or with probability p = 2 / (e^eps_local + 1) a fair coin. Then (y - n p / 2) / (1 - p), with y
the sum of the reports, is unbiased (the survey's eq. 6 has a sign error). At a fixed central (eps, delta) p falls
as 1 / n, so the error does not grow with n.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from dovetail.mechanisms import BinaryRandomizedResponse
from dovetail.protocols.sums._sums import ReportedSum

__all__ = ["BinarySum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinarySum(ReportedSum):
    """The sum of n bits; numbers between 0 and 1 are rounded to a bit at random, without bias.

    Guarantees:
        `estimate` is unbiased for the sum over the planned size; for bits the variance is n p (2 - p) / (1 - p)^2 / 4.

    References:
        Cheu, Smith, Ullman, Zeber, Zhilyaev (EUROCRYPT 2019), section 3; Balle et al. (CRYPTO 2019), section 3.
    """

    name: ClassVar[str] = "binary_sum"
    references: ClassVar[tuple[str, ...]] = ("CSUZZ19", "BBGN19")

    @property
    def local_randomizer(self) -> BinaryRandomizedResponse:
        """The randomizer of one report: randomized response on a bit."""
        return BinaryRandomizedResponse(self.require("eps_local"))
