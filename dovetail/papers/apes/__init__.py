"""APES, "Echo of Neighbors" (Liu, Zhao, Xiong, Liu, Chen, AAAI 2023): its tables and figures.

Budgets and bounds are in `_apes_privacy`, trainings in `_apes_training`. Table 1 and Figure 1 are prose and a drawing;
the figures of the paper's appendix are not reproduced.
"""

from __future__ import annotations

from dovetail.papers._exhibit import Paper
from dovetail.papers.apes.privacy import FIG2A, TABLE2
from dovetail.papers.apes.training import FIG2B, FIG3A, FIG3B, TABLE3

__all__ = ["PAPER"]

PAPER = Paper(
    name="apes",
    title="Echo of Neighbors: Privacy Amplification for Personalized Private Federated Learning with Shuffle Model",
    citation="APES (Liu et al., AAAI 2023)",
    reference="APES",
    parts=(TABLE2, TABLE3, FIG2A, FIG2B, FIG3A, FIG3B),
    minutes={"cpu": 100, "gpu": 25},
)
