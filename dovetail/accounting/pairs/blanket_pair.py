"""Reports that hide among draws from a blanket, as one dominating pair, so that they compose.

The exact blanket bounds delta(eps) of one shuffled coordinate in both directions, at every eps below eps_local; so does
the clone pair, and both are 0 beyond. The smaller of the two is made a pair (`symmetric.pair_dominating_curve`).

Users of different randomizers share a blanket w where every one of them is at least g_i w, whatever its input: then the
victim hides among C ~ PoissonBinomial(g_i) draws (docs/proofs/blankets.md; `BlanketCrowd`). More draws never hurt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

from dovetail.accounting import numerics
from dovetail.accounting.amplification import blanket, blanket_grid, clones
from dovetail.accounting.amplification.blanket_grid import CountedDraws, Grid
from dovetail.accounting.amplification.clones import CloneCounts
from dovetail.accounting.amplification.frontier import Frontier
from dovetail.accounting.pairs.symmetric import Nodes, SymmetricPair, nodes_for, pair_dominating_curve
from dovetail.events import Report, Shuffled
from dovetail.statements import NotApplicable, Theorem

__all__ = ["BLANKETS", "BLANKET_PAIR", "BlanketCrowd", "pair"]

BLANKET_PAIR = Theorem(
    key="dovetail.blanket-composition",
    where="the smaller of the exact blanket (Balle, Bell, Gascon, Nissim, CRYPTO 2019, Lemma 5.3) and the clones of "
    "Feldman, McMillan, Talwar (SODA 2023), as one pair (docs/proofs/blanket-composition.md)",
    url="https://arxiv.org/abs/1903.02837",
)
BLANKETS = Theorem(
    key="dovetail.blankets",
    where="a common blanket of the users' randomizers (docs/proofs/blankets.md, after Balle, Bell, Gascon, Nissim, "
    "CRYPTO 2019), or clones where they hide more (docs/proofs/personalized-clones.md)",
    url="https://arxiv.org/abs/1903.02837",
)

_COARSER = 5.0  # than the blanket of one coordinate: an error below the one of few nodes
_MOST_POINTS = 2**16  # of the law of one draw: only reports that reveal nearly everything need more
_RESOLUTION = 0.1  # of a grid, in standard deviations of one draw: .25 % of the variance at most


@dataclasses.dataclass(frozen=True, eq=False)
class BlanketCrowd:
    """A victim with this frontier among draws from the blanket.

    `counts` is the law of how many draws there are beside the victim's report.

    Guarantees:
        Never below the exact delta of the shuffled reports, in either direction (brute force at small n).
    """

    frontier: Frontier
    counts: CloneCounts

    @functools.cached_property
    def _blanket_draws(self) -> CountedDraws:
        return CountedDraws(self.counts.counts, self.counts.weights)

    @property
    def _mean_crowd_size(self) -> float:
        """The mean number of reports that hide the victim, its own included."""
        return float(self.counts.counts @ self.counts.weights) + 1

    def delta(self, eps: float) -> float:
        """delta at eps >= 0, rounded up; the mass below the window of counts is charged as if nobody hid the victim."""
        alpha = math.exp(eps)
        values, probs = self.frontier.law_of_l(alpha)
        if values.max() <= 0:
            return 0.0
        grid = Grid.from_law(
            values, probs, mean_draws=self._mean_crowd_size, resolution=_RESOLUTION, max_points=_MOST_POINTS
        )
        excess = blanket_grid.mean_excess(grid, self._blanket_draws)
        return numerics.as_probability_bound(excess + self.counts.below * self.frontier.delta_without_crowd(alpha))


def pair(event: Shuffled) -> SymmetricPair:
    """The pair that dominates one round of Laplace reports, of levels (more than two) or of caps.

    Guarantees:
        Never below enumeration at small num_users, composed over coordinates.
        Never above the clone pair by more than the grid's error; one coordinate is the exact blanket within 1 %.
        Refuses generic and binary reports: for generic ones the blanket says no more than the clones, and binary ones
        are known exactly (`binary`).
    """
    report = event.report
    if report.kind == "generic" or (report.kind == "rr" and report.levels == 2):
        raise NotApplicable("the blanket is of no use for generic and binary reports")
    return dataclasses.replace(
        _pair_of_one_coordinate(report, event.honest, nodes_for(event.coordinates)), folds=event.coordinates
    )


@functools.lru_cache(maxsize=64)
def _pair_of_one_coordinate(report: Report, num_users: int, nodes: Nodes) -> SymmetricPair:
    """The pair of one coordinate of so many honest users: the smaller of blanket and clones at every node."""
    event = Shuffled(report=report, num_users=num_users)

    def delta(eps: float) -> float:
        least = clones.delta_of(event, eps=eps)
        with contextlib.suppress(NotApplicable):
            least = min(least, blanket.exact_delta(event, eps=eps, coarser=_COARSER))
        return least

    return pair_dominating_curve(delta, eps_pure=report.eps_local, nodes=nodes)
