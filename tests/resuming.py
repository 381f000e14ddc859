"""Runs that were killed and resumed: what their statements say besides those of runs that were not."""

import dataclasses

SAID = "nothing of a later round had been seen when the run was resumed after round"


def without_resuming(statement):
    """The same statement without what it says about having been resumed, which it must say."""
    assert any(line.startswith(SAID) for line in statement.assumptions)
    return _unresumed(statement)


def _unresumed(statement):
    return dataclasses.replace(
        statement,
        assumptions=tuple(line for line in statement.assumptions if not line.startswith(SAID)),
        premises=tuple(_unresumed(premise) for premise in statement.premises),
    )
