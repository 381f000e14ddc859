"""Deployment: users, shufflers or aggregators, and an analyzer as parties, with the protocols of the simulation.

- `common`: what several parties need: the signed task and what it guarantees, keys, notices, sealed messages, shares,
  ledgers, databases, and the clients that speak to services.
- `user`: a client with its policy, its spending and its consent, the loop of its participation, perhaps an agent.
- `intermediary`: what shufflers and aggregators have in common; `shuffler` keeps uploads in a store, pads and permutes
  them, `aggregator` adds up shares.
- `analyzer`: keeps sums and models in a store, and computes with `learning`.
- `http`: puts services behind HTTPS. `flower`: carries reports over a Flower fleet.
- `fleet`: lays out and starts everybody on one machine, with the data and model of a config (`federation`).
"""
