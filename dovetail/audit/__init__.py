"""The audit: attack what runs, and hold the lower bound against what is certified and claimed.

- `audit` attacks one protocol at given parameters, `CASES` are those worth it (`dovetail audit --all`);
- `attack_training` attacks the rounds of a training as a whole;
- `training.audit` hides canaries in a whole training and guesses them;
- `indices.audit_indices` is what a shuffler makes of the coordinates that clients report.
"""

from dovetail.audit.bounds import ExactAttack, LowerBound
from dovetail.audit.cases import CASES, INDICES, Case, attack_terms
from dovetail.audit.findings import Finding, attack_training, audit
from dovetail.audit.runs.scores import VIEWS

__all__ = [
    "CASES",
    "INDICES",
    "VIEWS",
    "Case",
    "ExactAttack",
    "Finding",
    "LowerBound",
    "attack_terms",
    "attack_training",
    "audit",
]
