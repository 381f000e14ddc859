"""Dovetail on a Flower fleet: Flower carries tasks and models to nodes, and sealed envelopes back; nothing else.

A `ClientApp` gets `dovetail_mod`, a `ServerApp` runs a `DovetailStrategy`. What is random, sealed, added up, shuffled
or accounted is done by the parties that Dovetail has without Flower: the node's agent, the aggregators or shufflers,
the analyzer. This is the only place that imports flwr (`pip install 'dovetail-fl[flower]'`).
"""

from dovetail.parties.flower.mod import dovetail_mod
from dovetail.parties.flower.strategy import DovetailStrategy, LocalShuffler, Relay

__all__ = ["DovetailStrategy", "LocalShuffler", "Relay", "dovetail_mod"]
