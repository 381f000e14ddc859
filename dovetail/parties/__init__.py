"""Deployment: users, shufflers or aggregators, and analyzer as parties, with the protocol objects of the simulation.

`common` is what all share: a signed task, keys, messages and how they are sealed, policies, ledgers. `user` is a client
with a policy and a ledger of its own, perhaps behind an agent. `shuffler` keeps uploads in a store, pads and permutes
them; `aggregator` adds up shares; `intermediary` is what the two have in common. `analyzer` keeps sums and models in a
book, and computes with `learning`. `http` puts all of them behind HTTPS, `flower` carries reports over a Flower fleet,
`fleet` starts everybody on one machine, with the data and model of a config (`federation`).
"""
