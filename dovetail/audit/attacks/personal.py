"""Personal budgets: the reports of the user that is ready to spend the most.

*S-APES by a threshold* shows the analyzer less than APES does, and so does what an attack may use. A report is kept
where its size reaches the threshold; else it is a fresh draw around 0 at the smallest budget. Both happen coordinate by
coordinate, so that the law of a shuffled coordinate is that of APES seen through this step.
"""

from __future__ import annotations

import numpy as np

from dovetail.audit.attacks import _own
from dovetail.audit.attacks.registry import attacks_on_own_reports, shows_less_than_event, stronger_attacks
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import cells, personal
from dovetail.protocols import Cohort
from dovetail.protocols.personal._personal import Personal
from dovetail.protocols.personal.apes import Apes
from dovetail.protocols.personal.s_apes import SApes
from dovetail.statements import NotApplicable

__all__ = [
    "attack_apes_client",
    "attack_personal_client",
    "attack_s_apes_client",
    "attack_s_apes_round",
    "laws_after_sparsifying",
]


@attacks_on_own_reports.register(Personal)
def attack_personal_client(
    protocol: Personal, cohort: Cohort, dim: int, *, family: cells.Cells | None = None
) -> list[ExactAttack]:
    """Attacks on the reports of the user with the largest budget, all coordinates at one end or at the other.

    Arguments:
        family: the cells of a report; those of the protocol's kind of noise unless given.
    """
    budget = float(protocol.settle(cohort, dim).eps_locals.max())
    high, low = (family or cells.cells_of_randomizer(protocol.kind)).masses_at_ends(budget)
    pure_eps = dim * budget * (1 - 1e-9)  # the ratio at the end of the box
    return _own.attacks_on_laws(high, low, dim, pure_eps=pure_eps)


@attacks_on_own_reports.register(Apes)
def attack_apes_client(protocol: Apes, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on the reports of the user with the largest budget; Clip-Laplace reports may leave the inputs' box."""
    if protocol.kind != "clip_laplace":
        return attack_personal_client(protocol, cohort, dim)
    family = cells.clip_laplace_cells((protocol.output_bound / protocol.clip_value - 1) / 2)
    return attack_personal_client(protocol, cohort, dim, family=family)


shows_less_than_event.register(SApes, lambda protocol: True)


@stronger_attacks.register(SApes)
def attack_s_apes_round(protocol: SApes, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The attack on one round: the victim has the largest budget, all others hold the low end.

    None where a client's reports depend on each other, which is so unless a threshold selects them or all are kept.
    """
    if protocol.sparsify != "threshold" and protocol.num_kept(dim) < dim:
        return []
    budgets = protocol.settle(cohort, dim).eps_locals
    victim = int(np.argmax(budgets))
    missing = cohort.colluders + cohort.size - cohort.crowd()
    others = np.sort(np.delete(budgets, victim))[missing:]
    attack = f"sum over all messages, victim with the largest budget {budgets[victim]:.4g}, others at the low end"
    laws = laws_after_sparsifying(protocol.settle(cohort, dim), dim)
    return [personal.attack_crowd(attack, laws, float(budgets[victim]), others, slots=dim)]


@attacks_on_own_reports.register(SApes)
def attack_s_apes_client(protocol: SApes, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on the reports of the user with the largest budget after the selection; APES's where all are kept."""
    if protocol.num_kept(dim) == dim and protocol.sparsify != "threshold":
        return attack_apes_client(protocol, cohort, dim)
    settled = protocol.settle(cohort, dim)
    laws = laws_after_sparsifying(settled, dim)
    budgets = settled.eps_locals.max(keepdims=True)
    return _own.attacks_on_laws(laws(budgets, 1.0)[0], laws(budgets, 0.0)[0], dim)


def laws_after_sparsifying(protocol: SApes, dim: int) -> personal.Laws:
    """The law of one message in cells, as a function of budgets and of the input's position; budgets must be settled.

    Raises NotApplicable where the messages of one client depend on each other.
    """
    clip = protocol.clip_value
    bound = protocol.output_bound
    if protocol.sparsify != "threshold" and protocol.num_kept(dim) < dim:
        raise NotApplicable(f"reports of one client depend on each other with sparsify={protocol.sparsify!r}")
    cut = protocol.threshold / (2 * clip) if protocol.sparsify == "threshold" else 0.0
    family = cells.clip_laplace_cells((bound - clip) / (2 * clip))
    return personal.laws_with_threshold(family, cut, eps_fresh=float(protocol.eps_locals.min()))
