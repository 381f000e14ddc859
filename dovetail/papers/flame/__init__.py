"""FLAME (Liu, Cao, Chen, Guo, Yoshikawa, AAAI 2021): every number that it prints about the system, and every figure.

The privacy of its three protocols is recomputed, certified where it holds and attacked where it does not
(`privacy`, `amplification`); accuracies are trained (`training`). Figures 1 and 2 are drawings of the parties.
"""

from __future__ import annotations

from dovetail.papers.exhibits import Paper
from dovetail.papers.flame.privacy import FIG3, FIG8, FIG9, HEADLINE
from dovetail.papers.flame.training import FIG4, FIG5, FIG6, FIG7

__all__ = ["PAPER"]

PAPER = Paper(
    name="flame",
    title="FLAME: Differentially Private Federated Learning in the Shuffle Model",
    citation="FLAME (Liu et al., AAAI 2021)",
    reference="FLAME",
    parts=(HEADLINE, FIG3, FIG4, FIG5, FIG6, FIG7, FIG8, FIG9),
    minutes={"cpu": 35, "gpu": 6},
)
